"""GPU memory among the registered buffers: its bytes go by way of pinned host memory, as the store copies host memory alone."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mooncake_zmq.store.client.batch import Value, chunks
from mooncake_zmq.store.memory import cut
from mooncake_zmq.transfer.cuda import DeviceCopies
from mooncake_zmq.transfer.hashed_copy import Span

STAGING_BYTES = 64 << 20
"""Pinned, of each thread that moves such values; a larger value gets its own size."""

MAX_REFUSED = 4096
"""The latest: a connector registers a buffer or two a layer."""

_libc = ctypes.CDLL(None, use_errno=True)


class NotOurs(ValueError):
    """Memory that this process can neither read nor copy."""


class DeviceMemory:
    """Which registered addresses are a GPU's, and the copies to and from there. Thread-safe."""

    def __init__(self, open_copies: Callable[[], DeviceCopies] = DeviceCopies.open) -> None:
        self._open_copies = open_copies
        self._copies: DeviceCopies | None = None
        self._ranges: tuple[tuple[int, int], ...] = ()
        self._refused: tuple[tuple[int, int], ...] = ()
        """Ranges whose registration was refused: callers may use them all the same, and reading one would end the process."""
        self._own = threading.local()

    def admit(self, address: int, size: int) -> None:
        """Find out what memory this is. Raises NotOurs with one line that says what to do."""
        self._refused = tuple(each for each in self._refused if each[1] <= address or address + size <= each[0])
        if is_readable(address) and is_readable(address + size - 1):
            return
        try:
            self._copies = self._copies or self._open_copies()
            if not self._copies.holds(address):
                raise ValueError("nor the GPU's")
        except ValueError as error:
            self._refused = (*self._refused, (address, address + size))[-MAX_REFUSED:]
            raise NotOurs(f"memory at {address:#x} is not the host's: {error}") from error
        self._ranges += ((address, address + size),)

    def forget(self, address: int) -> None:
        """No buffer begins there any more."""
        self._ranges = tuple(each for each in self._ranges if each[0] != address)

    def refuses(self, values: Sequence[Value]) -> bool:
        """Whether any part of these lies in memory that `admit` refused."""
        return bool(self._refused) and any(_lies_in(self._refused, address) for value in values for address, _ in value)

    def holds(self, values: Sequence[Value]) -> bool:
        """Return whether any part of these ranges lies in a GPU's memory."""
        return bool(self._ranges) and any(self._is_device(address) for value in values for address, _ in value)

    def put(self, values: Sequence[Value], put: Callable[[list[int], list[Value]], list[int]]) -> list[int]:
        """`put` with some values at a time, all of them in host memory; the codes of all."""
        codes: list[int] = []
        sizes = [sum(length for _, length in value) for value in values]
        for some, places in self._staged(sizes):
            for index, (start, _) in zip(some, places, strict=True):
                for address, length in values[index]:
                    self._move(start, address, length)
                    start += length
            self._settle()
            codes += put(some, [[place] for place in places])
        return codes

    def fetch(self, places: Sequence[Value], fetch: Callable[[list[int], list[Value]], list[int]]) -> list[int]:
        """`fetch` into host memory, some values at a time, and from there to `places`; sizes or codes of all."""
        results: list[int] = []
        rooms = [sum(length for _, length in value) for value in places]
        for some, staged in self._staged(rooms):
            sizes = fetch(some, [[place] for place in staged])
            for index, (start, _), size in zip(some, staged, sizes, strict=True):
                for address, length in cut(places[index], 0, max(size, 0)):
                    self._move(address, start, length)
                    start += length
            self._settle()
            results += sizes
        return results

    def copy(self, target: int, source: int, size: int) -> None:
        """Between any two places; it is there on return."""
        self._move(target, source, size)
        self._settle()

    def _staged(self, sizes: Sequence[int]) -> Iterator[tuple[list[int], list[Span]]]:
        """Indexes that fit into the thread's staging memory together, and where each has its room."""
        for some in chunks(range(len(sizes)), sizes, STAGING_BYTES):
            address = self._staging(sum(sizes[index] for index in some))
            places = []
            for index in some:
                places.append((address, sizes[index]))
                address += sizes[index]
            yield some, places

    def _staging(self, size: int) -> int:
        """Address of pinned memory of this thread, which lasts until the next call."""
        assert self._copies is not None
        held: Any = getattr(self._own, "staging", None)
        if held is None or held.nbytes < size:
            held = self._own.staging = self._copies.pinned(max(size, min(STAGING_BYTES, 2 * size)), former=held)
        address: int = held.ctypes.data
        return address

    def _move(self, target: int, source: int, size: int) -> None:
        to_device, from_device = self._is_device(target), self._is_device(source)
        if not to_device and not from_device:
            ctypes.memmove(target, source, size)
            return
        assert self._copies is not None
        self._copies.start(target, source, size, to_device=to_device)

    def _settle(self) -> None:
        if self._copies is not None:
            self._copies.settle()

    def _is_device(self, address: int) -> bool:
        return _lies_in(self._ranges, address)


def _lies_in(ranges: tuple[tuple[int, int], ...], address: int) -> bool:
    return any(start <= address < stop for start, stop in ranges)


def is_readable(address: int) -> bool:
    """Whether this process has memory there: the kernel looks, and answers instead of ending the process."""
    byte = ctypes.create_string_buffer(1)
    to, of = (_Vector * 1)(_Vector(ctypes.addressof(byte), 1)), (_Vector * 1)(_Vector(address, 1))
    done = _libc.process_vm_readv(os.getpid(), to, ctypes.c_ulong(1), of, ctypes.c_ulong(1), ctypes.c_ulong(0))
    return bool(done == 1) or ctypes.get_errno() != _EFAULT


class _Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


_EFAULT = 14
