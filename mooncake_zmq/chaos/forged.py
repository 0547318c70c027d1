"""Forged frames, and three ways to put them on a control socket: without a ZeroMQ library, and, where there are keys, by
strangers who speak CURVE and by a thief with a member's key.

Frames are noise, or come from strangers, ended incarnations and wrong versions: nodes must drop and count all of them. No frame
without keys poses as a present member, since nothing but keys prevents that.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import zmq
from zmq.utils.monitor import recv_monitor_message

from mooncake_zmq.core.messages import MAX_BODIES, PROTOCOL_VERSION, Envelope, Hello, encode
from mooncake_zmq.transfer import zmtp
from mooncake_zmq.transfer.key_files import Keys
from mooncake_zmq.transfer.sockets import Limits, Sockets

_TIMEOUT_S = 2.0
_HANDSHAKE_TIMEOUT_S = 5.0
"""The time in which a running node answers: ZeroMQ's own timeout of a handshake."""
_FRAMES_PER_CONNECTION = 100
_LIMITS = Limits(max_message_bytes=1 << 20, send_hwm=2 * _FRAMES_PER_CONNECTION, receive_hwm=1)
_HANDSHAKES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


def frames(random: Random, members: Sequence[str], count: int) -> Iterator[bytes]:
    """Yield frames that every node must drop. `members`: real names, used with ended incarnations."""
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
    """Return a well-formed envelope from an unknown node, of an ended incarnation, or of another protocol version."""
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


def send_in_clear(address: str, port: int, forged: Sequence[bytes], random: Random) -> int:
    """Put frames on a ROUTER's TCP socket, between connections that do not speak ZeroMQ; return how many were sent before it
    closed."""
    sent = 0
    for start in range(0, len(forged), _FRAMES_PER_CONNECTION):
        with suppress(OSError), socket.create_connection((address, port), timeout=_TIMEOUT_S) as stream:
            stream.sendall(random.choice((b"GET / HTTP/1.1\r\n\r\n", random.randbytes(200))))
        with suppress(OSError), socket.create_connection((address, port), timeout=_TIMEOUT_S) as stream:
            stream.sendall(zmtp.GREETING)
            _read(stream, zmtp.GREETING_BYTES)
            stream.sendall(zmtp.ready(b"DEALER"))
            for frame in forged[start : start + _FRAMES_PER_CONNECTION]:
                stream.sendall(zmtp.part(frame))
                sent += 1
    return sent


def _read(stream: socket.socket, size: int) -> None:
    while size > 0 and (read := stream.recv(size)):
        size -= len(read)


@dataclass(frozen=True, slots=True)
class Met:
    """The number of connections with keys that were admitted and refused."""

    admitted: int = 0
    refused: int = 0


def send_by_key(server: str, endpoint: str, forged: Sequence[bytes], keys: Keys) -> Met:
    """Put frames on the control socket of `server` with these `keys`."""
    sockets = Sockets(keys, io_threads=1).borrow()
    met = [_send_on_one(sockets, server, endpoint, forged[at : at + _FRAMES_PER_CONNECTION]) for at in _starts(forged)]
    sockets.give_back()
    return Met(met.count(zmq.EVENT_HANDSHAKE_SUCCEEDED), met.count(zmq.EVENT_HANDSHAKE_FAILED_AUTH))


def _starts(forged: Sequence[bytes]) -> range:
    return range(0, len(forged), _FRAMES_PER_CONNECTION)


def _send_on_one(sockets: Sockets, server: str, endpoint: str, forged: Sequence[bytes]) -> int:
    """Send frames on one connection; return the ZeroMQ event of its handshake, or 0 if no node answered."""
    dealer, _ = sockets.connecting(zmq.DEALER, endpoint, "control", _LIMITS, server=server)
    monitor = dealer.get_monitor_socket(_HANDSHAKES)
    dealer.connect(endpoint)
    for frame in forged:
        with suppress(zmq.Again):
            dealer.send(frame, zmq.DONTWAIT)
    event = int(recv_monitor_message(monitor)["event"]) if monitor.poll(int(_HANDSHAKE_TIMEOUT_S * 1000)) else 0
    dealer.disable_monitor()
    # After the handshake the frames are still being sent.
    dealer.close(linger=int(_TIMEOUT_S * 1000) if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else 0)
    return event
