"""The values of one call: to put, or places to fill. And the end of every two-phase put."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mooncake_zmq.store import protocol
from mooncake_zmq.store.client.link import Unreached
from mooncake_zmq.store.client.peer import Call
from mooncake_zmq.store.codes import Code, Pin
from mooncake_zmq.store.protocol import MAX_KEYS
from mooncake_zmq.transfer.hashed_copy import Span

Value = Sequence[Span]
"""Where a value's bytes lie, one part after another."""
Place = Callable[[int, int], Value | None]
"""(index of the key, size) -> where the value goes; None if it does not fit."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Values to put, in columns."""

    keys: list[str]
    values: list[Value]
    sizes: list[int]
    pins: Pin


@dataclass(frozen=True, slots=True)
class Wanted:
    """Values to fetch. `results`, by index: the size of what came, or a code; NOT_FOUND until then."""

    keys: Sequence[str]
    place: Place
    caps: Sequence[int] | None
    """The largest size that each place takes, if known before."""
    results: list[int]


def chunks(indexes: Iterable[int], sizes: Sequence[int] | Mapping[int, int] | None, limit_bytes: int) -> Iterator[list[int]]:
    """`indexes` in runs of at most MAX_KEYS keys and, beyond one, `limit_bytes` bytes; sizes not known count as nothing."""
    chunk: list[int] = []
    total = 0
    for index in indexes:
        size = 0 if sizes is None else sizes[index]
        if chunk and (len(chunk) == MAX_KEYS or total + size > limit_bytes):
            yield chunk
            chunk, total = [], 0
        chunk.append(index)
        total += size
    if chunk:
        yield chunk


def commit(call: Call, put_id: int, codes: list[int], indexes: list[int], checksums: list[int]) -> list[int]:
    """The final codes of a put of which `codes` were granted and `indexes` written. Raises Unreached for an answer to another
    put than this one."""
    granted = [index for index, code in enumerate(codes) if code == 0]
    if not granted:
        return codes
    request = protocol.Commit(call.peer.next_id(), put_id, indexes, checksums)
    numbers = call.ask(request, protocol.Numbers).numbers
    if len(numbers) not in (0, len(codes)):
        raise Unreached(f"{len(numbers)} codes for {len(codes)} keys")
    if not numbers or len(indexes) < len(granted):
        call.peer.counts["expired"] += 1
    written = set(indexes if numbers else ())
    for index in granted:
        codes[index] = numbers[index] if index in written else int(Code.EXPIRED)
    return codes
