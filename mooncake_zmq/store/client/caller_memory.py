"""The caller's memory: its registered buffers, and the values that are moved from and to it."""

import bisect
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from mooncake_zmq.store.client.batch import Value
from mooncake_zmq.store.client.client import UNREACHED, StoreClient
from mooncake_zmq.store.client.device_memory import DeviceMemory, NotOurs
from mooncake_zmq.store.client.replicas import ReplicateConfig
from mooncake_zmq.store.codes import Code, Pin
from mooncake_zmq.store.memory import Buffer, address_of
from mooncake_zmq.transfer.hashed_copy import Span

log = structlog.get_logger()

INVALID = int(Code.INVALID)
NOWHERE: Sequence[str] = ()


class CallerMemory:
    """The registered buffers, and the calls that move values. Thread-safe.

    Calls that move values take the client. Before `setup` and after `close` it is None, and they answer -900.
    """

    def __init__(self) -> None:
        self.device = DeviceMemory()
        self._lock = threading.Lock()
        self._buffers: list[tuple[int, int]] = []
        """Registered (start, stop) addresses, in order."""

    def register(self, buffer_ptr: int, size: int) -> int:
        """Note a buffer and whether it is a GPU's; -600 for memory that cannot be used or is registered already."""
        try:
            self.device.admit(buffer_ptr, size)
        except NotOurs as error:
            log.error("store_buffer_refused", reason=str(error))
            return INVALID
        with self._lock:
            at = bisect.bisect_left(self._buffers, (buffer_ptr, 0))
            if any(start < buffer_ptr + size and buffer_ptr < stop for start, stop in self._buffers[max(0, at - 1) : at + 1]):
                return INVALID
            self._buffers.insert(at, (buffer_ptr, buffer_ptr + size))
        return 0

    def unregister(self, buffer_ptr: int) -> int:
        """Forget the buffer that begins there; -600 if there is none."""
        with self._lock:
            for index, (start, _) in enumerate(self._buffers):
                if start == buffer_ptr:
                    del self._buffers[index]
                    self.device.forget(buffer_ptr)
                    return 0
        return INVALID

    def unregister_all(self) -> None:
        """Forget all buffers."""
        with self._lock:
            self._buffers.clear()

    def put(
        self,
        client: StoreClient | None,
        keys: Sequence[str],
        values: Sequence[Value],
        config: ReplicateConfig | None,
        pins: Pin = Pin.NONE,
    ) -> list[int]:
        """Store values that lie in the caller's memory; return a code for each key."""
        replicas, preferred, is_consistent = 1, NOWHERE, True
        if config is not None:
            replicas, preferred, is_consistent = config.replica_num, config.preferred, config.is_consistent
            pins |= config.pins
        if client is None:
            return [UNREACHED] * len(keys)
        if len(keys) != len(values) or replicas < 1 or not is_consistent or self.device.refuses(values):
            return [INVALID] * max(1, len(keys))

        def put(some: Sequence[int], of_some: Sequence[Value]) -> list[int]:
            return client.put([keys[index] for index in some], of_some, pins, replicas=replicas, preferred=preferred)

        return self.device.put(values, put) if self.device.holds(values) else put(range(len(keys)), values)

    def put_from(
        self,
        client: StoreClient | None,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None,
        pins: Pin = Pin.NONE,
    ) -> list[int]:
        """Store values of one buffer each; return a code for each key."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID] * len(keys)
        return self.put(client, keys, [[span] for span in zip(buffer_ptrs, sizes, strict=True)], config, pins)

    def get(self, client: StoreClient | None, keys: Sequence[str], allocate: Callable[[int], Any]) -> list[Any]:
        """Return what `allocate` made and the store filled; None for a value that could not be read."""
        made, sizes = self._fetch(client, keys, allocate)
        return [made[index] if size > 0 else None for index, size in enumerate(sizes)]

    def _fetch(
        self, client: StoreClient | None, keys: Sequence[str], allocate: Callable[[int], Any]
    ) -> tuple[dict[int, Any], list[int]]:
        """Return what `allocate` made, by index, and the size or code of each value."""
        made: dict[int, Any] = {}

        def place(index: int, size: int) -> Value:
            made[index] = allocate(size)
            return spans_of(made[index])

        return made, [UNREACHED] * len(keys) if client is None else client.fetch(keys, place)

    def get_into(self, client: StoreClient | None, keys: Sequence[str], places: Sequence[Value]) -> list[int]:
        """Read values into the caller's memory; return the size of each or a code."""
        if client is None:
            return [UNREACHED] * len(keys)
        if self.device.refuses(places):
            return [INVALID] * len(keys)

        def fetch(some: Sequence[int], of_some: Sequence[Value]) -> list[int]:
            caps = [sum(length for _, length in spans) for spans in of_some]
            named = [keys[index] for index in some]
            return client.fetch(named, lambda index, size: of_some[index] if size <= caps[index] else None, caps)

        return self.device.fetch(places, fetch) if self.device.holds(places) else fetch(range(len(keys)), places)

    def get_ranges(
        self,
        client: StoreClient | None,
        buffer_ptr: int,
        keys: Sequence[str],
        to: Sequence[Sequence[int]],
        of: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        """Read parts of several values into one buffer; return the size of each part or a code."""
        if len({len(keys), len(to), len(of), len(sizes)}) > 1:
            return [[INVALID] * len(each) for each in sizes]
        results: list[list[int]] = []
        for key, *parts in zip(keys, to, of, sizes, strict=True):
            if len(set(map(len, parts))) > 1:
                results.append([INVALID] * len(parts[2]))
                continue
            made, (code,) = self._fetch(client, [key], bytearray)
            results.append(self._copy_parts(made[0], buffer_ptr, *parts) if code > 0 else [code] * len(parts[2]))
        return results

    def _room_at(self, address: int) -> float:
        """Return the bytes from there to the end of its registered buffer; infinite if it lies in none."""
        with self._lock:
            at = bisect.bisect_right(self._buffers, (address, math.inf))
            stop = self._buffers[at - 1][1] if at else 0
        return stop - address if address < stop else math.inf

    def _copy_parts(
        self, value: bytearray, buffer_ptr: int, to: Sequence[int], of: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        found, room = [], self._room_at(buffer_ptr)
        for target, start, size in zip(to, of, sizes, strict=True):
            fits = target >= 0 and start >= 0 and 0 <= size <= min(len(value) - start, room - target)
            fits = fits and not self.device.refuses([[(buffer_ptr + target, size)]])
            if fits and size:
                self.device.copy(buffer_ptr + target, address_of(value) + start, size)
            found.append(size if fits else INVALID)
        return found


def spans_of(value: Buffer) -> list[Span]:
    """Return where the bytes of a value lie."""
    size = len(value) if isinstance(value, bytes | bytearray) else memoryview(value).nbytes
    return [(address_of(value), size)] if size else []


def joined(parts: Sequence[Buffer]) -> list[Span]:
    """Return where the bytes of a value of several parts lie."""
    return [span for part in parts for span in spans_of(part)]


def zip_spans(
    keys: Sequence[str], pointers: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
) -> list[list[Span]] | None:
    """Pair addresses and sizes for each key; return None where the lengths of the lists do not agree."""
    if not len(keys) == len(pointers) == len(sizes) or any(map(_differ, pointers, sizes)):
        return None
    return [list(zip(*columns, strict=True)) for columns in zip(pointers, sizes, strict=True)]


def _differ(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) != len(other)
