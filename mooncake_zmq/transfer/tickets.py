"""Who may attach a stream: whoever was told a ticket's secret, over the connection that keys guard. And the keys of the stream.

    client  -- opening: token, nonce -----> server      a token that this server did not make ends it here
            <- challenge: nonce, proof ---              the server knows the secret too
            -- proof ---------------------->

Both nonces and the secret make three keys (HKDF, RFC 5869), new ones for each stream: one for the proofs, one for each
direction of what is sealed. So neither a token seen on the wire nor a handshake recorded there lets anybody in. Without
sealing, who can change packets under way can still take over a stream that is attached: checksums do not stop him.

Tickets cost their server no memory: it knows its own by their form, and makes the secret of one again when it comes back. A
token tells its server, and nobody else, whose key it was handed to.
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
"""Number of the holder, and when."""
MAX_HOLDERS = 1 << 16
"""Tickets of further ones tell of none."""


class Refused(Exception):
    """The other side has not shown that it knows the secret."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a client is told. `sealed`: whether what goes over the stream is encrypted."""

    token: bytes
    secret: bytes = field(repr=False)
    sealed: bool


@dataclass(frozen=True, slots=True)
class StreamKeys:
    """Of one stream. `to_server`, `to_client`: None if it is not sealed."""

    proof: bytes = field(repr=False)
    to_server: bytes | None = field(repr=False)
    to_client: bytes | None = field(repr=False)


class Tickets:
    """Those of one server. From any thread."""

    def __init__(self, *, sealed: bool, life_s: float = math.inf, lets_in: Callable[[str], bool] = lambda holder: True) -> None:
        """`life_s`: how long a stream can be attached by a ticket, as often as one likes. `lets_in`: whether a holder's key is
        still good; with it go his tickets and his streams."""
        self.sealed = sealed
        self._lets_in = lets_in
        self._life_s = life_s
        self._master = os.urandom(SECRET_BYTES)
        self._holders = [""]
        """Of keys, by their number: as many as there are keys."""
        self._numbers = {"": 0}

    def make(self, holder: str = "") -> Ticket:
        """A new one, for the holder of this key: its name first, and whatever tells it from his others. Empty: none had to be
        shown."""
        number = self._numbers.get(holder)
        if number is None and len(self._holders) < MAX_HOLDERS:
            number = self._numbers[holder] = len(self._holders)
            self._holders.append(holder)
        body = os.urandom(_SALT_BYTES) + _MADE.pack(number or 0, time.monotonic())
        token = body + self._mark(body)
        return Ticket(token, self.secret_of(token), self.sealed)

    def secret_of(self, token: bytes) -> bytes:
        """Of a token that was made here."""
        return hmac.digest(self._master, b"secret" + token, "sha256")

    def is_good(self, token: bytes) -> bool:
        """Was it made here, not too long ago, and for a key that is still good?"""
        body, mark = token[:-_MARK_BYTES], token[-_MARK_BYTES:]
        if len(token) != TOKEN_BYTES or not hmac.compare_digest(mark, self._mark(body)):
            return False
        _, made_at = _MADE.unpack_from(body, _SALT_BYTES)
        return bool(time.monotonic() - made_at <= self._life_s) and self.stands(token)

    def stands(self, token: bytes) -> bool:
        """Is the key still good for whose holder this token was made here?"""
        return self._lets_in(self._shown(token))

    def holder_of(self, token: bytes) -> str:
        """His name, of a token that was made here."""
        return self._shown(token).partition(" ")[0]

    def _shown(self, token: bytes) -> str:
        number: int = _MADE.unpack_from(token, _SALT_BYTES)[0]
        return self._holders[number]

    def _mark(self, body: bytes) -> bytes:
        return hmac.digest(self._master, b"token" + body, "sha256")[:_MARK_BYTES]


class Attaching:
    """The client's half: what it sends, and what it makes of the answer."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._nonce = os.urandom(NONCE_BYTES)
        self.opening = MAGIC + ticket.token.ljust(TOKEN_BYTES, b"\0")[:TOKEN_BYTES] + self._nonce

    def answer(self, challenge: bytes) -> tuple[bytes, StreamKeys]:
        """The proof to send, and the stream's keys. Raises Refused if the server does not know the secret."""
        nonce, proof = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
        ticket = self._ticket
        keys = _keys(ticket.secret, self.opening, nonce, sealed=ticket.sealed)
        if not hmac.compare_digest(proof, _proof(keys, b"server")):
            raise Refused("the server does not know the secret")
        return _proof(keys, b"client"), keys


class Challenge:
    """The server's half, made of an opening; raises Refused for one that is none of a client with a good ticket."""

    def __init__(self, tickets: Tickets, opening: bytes) -> None:
        self.token = opening[len(MAGIC) : len(MAGIC) + TOKEN_BYTES]
        if not opening.startswith(MAGIC) or not tickets.is_good(self.token):
            raise Refused("no ticket of ours")
        nonce = os.urandom(NONCE_BYTES)
        self.keys = _keys(tickets.secret_of(self.token), opening, nonce, sealed=tickets.sealed)
        self.challenge = nonce + _proof(self.keys, b"server")

    def check(self, proof: bytes) -> None:
        """Raises Refused."""
        if not hmac.compare_digest(proof, _proof(self.keys, b"client")):
            raise Refused("a ticket without its secret")


def _keys(secret: bytes, opening: bytes, server_nonce: bytes, *, sealed: bool) -> StreamKeys:
    info = b"mooncake_zmq stream, sealed" if sealed else b"mooncake_zmq stream, in clear"
    made = HKDF(SHA256(), 3 * KEY_BYTES, salt=opening + server_nonce, info=info).derive(secret)
    proof, to_server, to_client = (made[at : at + KEY_BYTES] for at in range(0, 3 * KEY_BYTES, KEY_BYTES))
    return StreamKeys(proof, to_server, to_client) if sealed else StreamKeys(proof, None, None)


def _proof(keys: StreamKeys, who: bytes) -> bytes:
    return hmac.digest(keys.proof, who, "sha256")
