"""Copies between a value's places in an application's memory and its contiguous bytes, with a checksum on the way.

Sketch: a piece is copied and, while still in the CPU's cache, hashed at more than twice the speed, so a checked copy
reaches about 0.9 of a plain one; measured best with pieces of 1 MiB. `ctypes.memmove` lets other threads run meanwhile.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import xxhash

from mooncake_zmq.store.protocol import PIECE_BYTES

Span = tuple[int, int]
"""(address, bytes) in this process's memory."""
Buffer = bytes | bytearray | memoryview

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
_READ, _WRITE = 0x100, 0x200


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
    view: memoryview = _view_memory(address, size, _READ)
    return view


def write_view(address: int, size: int) -> memoryview:
    """The same, to be written."""
    view: memoryview = _view_memory(address, size, _WRITE)
    return view


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


def gather(spans: Sequence[Span], address: int, size: int, checksum: Checksum | None) -> None:
    """Copy `size` bytes from `spans`, one after another, to `address`. The checksum is of what was written there."""
    _copy(spans, address, size, checksum, outward=False)


def scatter(address: int, size: int, spans: Sequence[Span], checksum: Checksum | None) -> None:
    """Copy `size` bytes from `address` into `spans`, which hold as much. The checksum is of the bytes at `address`."""
    _copy(spans, address, size, checksum, outward=True)


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


def _copy(spans: Sequence[Span], address: int, size: int, checksum: Checksum | None, *, outward: bool) -> None:
    memmove = ctypes.memmove
    done = hashed = 0
    for start, length in spans:
        stop = min(done + length, size)
        shift = start - done
        while done < stop:
            step = min(stop, hashed + PIECE_BYTES) - done
            if outward:
                memmove(done + shift, address + done, step)
            else:
                memmove(address + done, done + shift, step)
            done += step
            if done == hashed + PIECE_BYTES:
                if checksum is not None:
                    checksum.update(read_view(address + hashed, PIECE_BYTES))
                hashed = done
    assert done == size, "the spans hold less than the value"
    if checksum is not None and done > hashed:
        checksum.update(read_view(address + hashed, done - hashed))
