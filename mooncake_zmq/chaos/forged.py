"""Frames that nobody of the cluster sent, and a hand that puts them on a control socket without a ZeroMQ of its own.

What is made here is noise, strangers, old lives and wrong versions: a cluster without keys must drop and count all of it. That
a stranger may *pass* for a member is not tried: nothing but keys is against that.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from random import Random

from mooncake_zmq.core.messages import MAX_BODIES, PROTOCOL_VERSION, Envelope, Hello, encode

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER" + b"\x08Identity" + bytes(4)
_LONG, _COMMAND = 2, 4
_TIMEOUT_S = 2.0
_FRAMES_PER_CONNECTION = 100


def frames(random: Random, members: Sequence[str], count: int) -> Iterator[bytes]:
    """Frames that no member may heed. `members`: names that do exist, whose old lives speak here."""
    for _ in range(count):
        kind = random.randrange(5)
        if kind == 0:
            yield random.randbytes(random.choice((0, 1, 7, 64, 1500, 70_000)))
            continue
        whole = _envelope(random, members)
        if kind == 1:
            yield whole[: random.randrange(len(whole))]
        elif kind == 2:
            damaged = bytearray(whole)
            damaged[0] = random.choice((0xC1, 0xDF, 0xDD, 0x90, 0xFF))  # another type, or an array of 2**32 entries
            yield bytes(damaged)
        else:
            yield whole


def _envelope(random: Random, members: Sequence[str]) -> bytes:
    """A well-formed one: from nobody, from a life long over, or of another protocol."""
    stranger = random.random() < 0.5
    version = PROTOCOL_VERSION if stranger else random.choice((0, PROTOCOL_VERSION, PROTOCOL_VERSION + 1, 1 << 48))
    sender = random.choice(("nobody", "decode-z", "root")) if stranger else random.choice(members)
    hello = Hello(protocol=version, role="decode", host="host-a", model="", tokenizer="", layout="", segment=None)
    bodies = random.choice(((), (encode(hello),), (random.randbytes(40),) * MAX_BODIES))
    return encode(
        Envelope(
            version=version,
            sender=sender,
            incarnation=random.choice((0, 1, 1 << 40)),  # milliseconds: members' own are of this century
            epoch=random.choice((1, 2, 1 << 48)),
            to_incarnation=random.choice((0, 1)),
            floor=random.choice((1, 1 << 48)),
            sequence=random.choice((1, 5)),
            ack_epoch=0,
            ack=0,
            bodies=bodies,
        )
    )


def send(address: str, port: int, forged: Sequence[bytes], random: Random) -> int:
    """Put frames on a ROUTER's TCP socket: how many went out before it hung up. Connections that are no ZeroMQ come between."""
    sent = 0
    for start in range(0, len(forged), _FRAMES_PER_CONNECTION):
        with suppress(OSError), socket.create_connection((address, port), timeout=_TIMEOUT_S) as stream:
            stream.sendall(random.choice((b"GET / HTTP/1.1\r\n\r\n", random.randbytes(200))))
        with suppress(OSError), socket.create_connection((address, port), timeout=_TIMEOUT_S) as stream:
            stream.sendall(_GREETING + _frame(_READY, _COMMAND))
            _read(stream, len(_GREETING))
            for frame in forged[start : start + _FRAMES_PER_CONNECTION]:
                stream.sendall(_frame(frame))
                sent += 1
    return sent


def _frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) > 255:
        return bytes([flags | _LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def _read(stream: socket.socket, size: int) -> None:
    while size > 0 and (read := stream.recv(size)):
        size -= len(read)
