"""Clusters of two releases: processes that speak the former protocol alone, and what may reach them."""

import zlib

from mooncake_zmq.core.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    Hello,
    ProtocolError,
    decode,
    decode_envelope,
    encode,
    speaks,
)
from mooncake_zmq.simulation.violation import Violation

Protocols = tuple[int, int]
"""The oldest and the newest protocol that a process speaks."""
THIS: Protocols = (OLDEST_PROTOCOL, PROTOCOL_VERSION)
FORMER: Protocols = (OLDEST_PROTOCOL, OLDEST_PROTOCOL)


def has_two(seed: int) -> bool:
    """Return whether the processes of a seed are of two releases."""
    return seed % 4 == 3 and seed % 5 != 4


def protocols_of(seed: int, name: str, starts: int, *, read_by_vllms: bool) -> Protocols:
    """Return the protocols of an incarnation. Of four seeds, one has two releases: each start may be of either, so that nodes
    are upgraded and go back. vLLMs and gateways whose answers they read are of this release, as the former reads none."""
    if not has_two(seed) or name.startswith("vllm") or (read_by_vllms and name.startswith("gateway")):
        return THIS
    return FORMER if zlib.crc32(f"{seed} {name} {starts}".encode()) % 2 else THIS


def check_frame(name: str, newest: int, frame: bytes) -> None:
    """Check I6: what a process would accept has nothing that its protocol lacks. Of Hellos it takes the one that it speaks."""
    try:
        envelope = decode_envelope(frame)
        messages = [(body, decode(body)) for body in envelope.bodies] if envelope.version <= newest else []
    except ProtocolError:
        return
    for body, message in messages:
        if isinstance(message, Hello):
            continue
        if not speaks(newest, type(message)) or encode(message, newest) != body:
            raise Violation("I6", f"{envelope.sender} sent {name} a {type(message).__name__} that protocol {newest} lacks")
