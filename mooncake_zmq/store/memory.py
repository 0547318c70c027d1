"""Copies between a value's places in an application's memory and its contiguous bytes, with a checksum on the way.

`transfer.hashed_copy` says what that costs. Other threads run meanwhile.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import xxhash

from mooncake_zmq.transfer.hashed_copy import READ, WRITE, Span, copy_spans, view_memory

Buffer = bytes | bytearray | memoryview

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt(3)
_KEPT_BYTES = 128 << 20
_MAPPED_FROM_BYTES = 32 << 20


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, up to 128 MiB an arena, for the next values: getting each anew from the kernel, which
    clears it, measured as much as all the rest of a transfer. Process-wide; other C libraries are left as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def read_view(address: int, size: int) -> memoryview:
    """The bytes at an address, which the caller keeps in place."""
    return view_memory(address, size, READ)


def write_view(address: int, size: int) -> memoryview:
    """The same, to be written."""
    return view_memory(address, size, WRITE)


def address_of(buffer: Buffer) -> int:
    """Where a contiguous buffer's bytes lie, for as long as the caller keeps it. Raises ValueError if it is empty."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def new_bytes(size: int) -> bytes:
    """A bytes object not written yet: to be filled before anybody else sees it, as C code does."""
    value: bytes = _new_bytes(None, size)
    return value


def checksum_of(view: Buffer) -> int:
    """xxh3-64; never 0, which stands for none."""
    return xxhash.xxh3_64_intdigest(view) or 1


class Checksum:
    """A checksum made piece by piece, equal to that of the whole."""

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_64()
        self.update = self._hasher.update

    def value(self) -> int:
        return self._hasher.intdigest() or 1


def gather(spans: Sequence[Span], address: int, size: int, *, hashed: bool) -> int:
    """Copy `size` bytes from `spans`, one after another, to `address`: the checksum of what was written there, 0 unless
    `hashed`."""
    return _checksum(copy_spans(address, cut(spans, 0, size), size, outward=False, hashed=hashed), hashed)


def scatter(address: int, size: int, spans: Sequence[Span], *, hashed: bool) -> int:
    """Copy `size` bytes from `address` into `spans`, which hold as much: the checksum, 0 unless `hashed`, of what arrived in
    the one span there is, or of the bytes at `address`, just read."""
    whole, places, outward = address, cut(spans, 0, size), True
    if len(places) == 1:
        whole, places, outward = places[0][0], [(address, size)], False
    return _checksum(copy_spans(whole, places, size, outward=outward, hashed=hashed), hashed)


def cut(spans: Sequence[Span], start: int, size: int) -> list[Span]:
    """The parts of `spans` that hold bytes `[start, start + size)` of the value."""
    parts: list[Span] = []
    for address, length in spans:
        if size == 0:
            break
        if start < length:
            step = min(length - start, size)
            parts.append((address + start, step))
            size -= step
            start = 0
        else:
            start -= length
    return parts


def _checksum(found: int, hashed: bool) -> int:
    """As it is stored, where 0 stands for none."""
    return (found or 1) if hashed else 0
