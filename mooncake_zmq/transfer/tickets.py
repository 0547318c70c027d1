"""Tickets for attaching a stream, sent over a connection that keys protect, and the stream's own keys.

    client  -- opening: token, nonce -----> server      a token that this server did not make ends it here
            <- challenge: nonce, proof ---              the server knows the secret too
            -- proof ---------------------->

Both nonces and the secret make three keys (HKDF, RFC 5869), new ones for each stream: one for the proofs, one for each
direction of what is sealed. So neither a token seen on the wire nor a recorded handshake gives access. Without
sealing, an attacker who can change packets can still take over an attached stream: checksums do not prevent that.

Tickets cost their server no memory: it recognizes its own by their form, and derives a ticket's secret again when it comes
back. From a token its server alone can find the key to which it was handed.
"""

import hmac
import math
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

MAGIC = b"mzs1"
NONCE_BYTES = PROOF_BYTES = SECRET_BYTES = KEY_BYTES = 32
TOKEN_BYTES = 40
OPENING_BYTES = len(MAGIC) + TOKEN_BYTES + NONCE_BYTES
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES
_SALT_BYTES, _MARK_BYTES = 14, 16
_MADE = struct.Struct(">Hd")
"""Number of the holder, and time of making."""
MAX_HOLDERS = 1 << 16
"""Holders with a number; tickets of further ones name none."""


class Refused(Exception):
    """Refusal of a peer that has not proved that it knows the secret."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A client's ticket. `sealed`: whether its stream is encrypted."""

    token: bytes
    secret: bytes = field(repr=False)
    sealed: bool


@dataclass(frozen=True, slots=True)
class StreamKeys:
    """Keys of one stream. `to_server`, `to_client`: None if it is not sealed."""

    proof: bytes = field(repr=False)
    to_server: bytes | None = field(repr=False)
    to_client: bytes | None = field(repr=False)


class Tickets:
    """Tickets of one server. Usable from any thread."""

    def __init__(self, *, sealed: bool, ttl_s: float = math.inf, lets_in: Callable[[str], bool] = lambda holder: True) -> None:
        """Make a secret for tickets. `ttl_s`: validity of a ticket, which may attach any number of streams. `lets_in`: whether
        a holder's key is still valid; his tickets and streams end with it."""
        self.sealed = sealed
        self._lets_in = lets_in
        self._ttl_s = ttl_s
        self._master = os.urandom(SECRET_BYTES)
        self._holders = [""]
        """Holders of keys, by their number."""
        self._numbers = {"": 0}

    def make(self, holder: str = "") -> Ticket:
        """Make a ticket for a holder: the name of the key, then anything that distinguishes it from his other keys. Empty: no
        key was required."""
        number = self._numbers.get(holder)
        if number is None and len(self._holders) < MAX_HOLDERS:
            number = self._numbers[holder] = len(self._holders)
            self._holders.append(holder)
        body = os.urandom(_SALT_BYTES) + _MADE.pack(number or 0, time.monotonic())
        token = body + self._mark(body)
        return Ticket(token, self.secret_of(token), self.sealed)

    def secret_of(self, token: bytes) -> bytes:
        """Return the secret of a token that was made here."""
        return hmac.digest(self._master, b"secret" + token, "sha256")

    def is_good(self, token: bytes) -> bool:
        """Return whether a token was made here, not too long ago, and for a key that is still valid."""
        body, mark = token[:-_MARK_BYTES], token[-_MARK_BYTES:]
        if len(token) != TOKEN_BYTES or not hmac.compare_digest(mark, self._mark(body)):
            return False
        _, made_at = _MADE.unpack_from(body, _SALT_BYTES)
        return bool(time.monotonic() - made_at <= self._ttl_s) and self.stands(token)

    def stands(self, token: bytes) -> bool:
        """Return whether the key for whose holder this token was made here is still valid."""
        return self._lets_in(self._shown(token))

    def holder_of(self, token: bytes) -> str:
        """Return the holder of a token that was made here."""
        return self._shown(token).partition(" ")[0]

    def _shown(self, token: bytes) -> str:
        number: int = _MADE.unpack_from(token, _SALT_BYTES)[0]
        return self._holders[number]

    def _mark(self, body: bytes) -> bytes:
        return hmac.digest(self._master, b"token" + body, "sha256")[:_MARK_BYTES]


class Attaching:
    """The client's side of the handshake: its opening, and its answer to the challenge."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._nonce = os.urandom(NONCE_BYTES)
        self.opening = MAGIC + ticket.token.ljust(TOKEN_BYTES, b"\0")[:TOKEN_BYTES] + self._nonce

    def answer(self, challenge: bytes) -> tuple[bytes, StreamKeys]:
        """Return the proof to send, and the stream's keys. Raises Refused if the server does not know the secret."""
        nonce, proof = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
        ticket = self._ticket
        keys = _keys(ticket.secret, self.opening, nonce, sealed=ticket.sealed)
        if not hmac.compare_digest(proof, _proof(keys, b"server")):
            raise Refused("the server does not know the secret")
        return _proof(keys, b"client"), keys


class Challenge:
    """The server's side of the handshake, made of an opening; raises Refused if that has no valid ticket."""

    def __init__(self, tickets: Tickets, opening: bytes) -> None:
        self.token = opening[len(MAGIC) : len(MAGIC) + TOKEN_BYTES]
        if not opening.startswith(MAGIC) or not tickets.is_good(self.token):
            raise Refused("no ticket of ours")
        nonce = os.urandom(NONCE_BYTES)
        self.keys = _keys(tickets.secret_of(self.token), opening, nonce, sealed=tickets.sealed)
        self.challenge = nonce + _proof(self.keys, b"server")

    def check(self, proof: bytes) -> None:
        """Check the client's proof. Raises Refused."""
        if not hmac.compare_digest(proof, _proof(self.keys, b"client")):
            raise Refused("a ticket without its secret")


def _keys(secret: bytes, opening: bytes, server_nonce: bytes, *, sealed: bool) -> StreamKeys:
    info = b"mooncake_zmq stream, sealed" if sealed else b"mooncake_zmq stream, in clear"
    made = HKDF(SHA256(), 3 * KEY_BYTES, salt=opening + server_nonce, info=info).derive(secret)
    proof, to_server, to_client = (made[at : at + KEY_BYTES] for at in range(0, 3 * KEY_BYTES, KEY_BYTES))
    return StreamKeys(proof, to_server, to_client) if sealed else StreamKeys(proof, None, None)


def _proof(keys: StreamKeys, who: bytes) -> bytes:
    return hmac.digest(keys.proof, who, "sha256")
