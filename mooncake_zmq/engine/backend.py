"""The array namespace behind one name. The only file of the engine that may import CuPy."""

import functools
import importlib
import math
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from mooncake_zmq.engine.cpu import Device

Step = TypeVar("Step", bound=Callable[..., Any])

SMALL_BYTES = 64 << 10
"""So little is the allocator's: to map it, and to tell the kernel how, takes longer than to write it."""
MAP_NORESERVE = 0x4000  # Linux; Python's mmap names it only in later versions


def array_namespace(device: Device) -> ModuleType:
    """NumPy for "cpu", CuPy for "cuda". Raises ValueError with one line that says what to do."""
    if device == "cpu":
        return np
    try:
        cupy = importlib.import_module("cupy")
        if cupy.cuda.runtime.getDeviceCount() < 1:
            raise RuntimeError("no CUDA device")
    except Exception as error:  # a missing driver raises CuPy's own types, known only after the import that may have failed
        raise ValueError(f"device 'cuda' needs CuPy and a GPU (extras gpu-cu12, gpu-cu13): {error}") from error
    return cupy


def keep_kernels_in(directory: Path) -> None:
    """Where CuPy keeps the kernels that it compiles, unless the operator has said so. To be called before it is imported: that
    fails where its own choice, the home directory, cannot be written."""
    os.environ.setdefault("CUPY_CACHE_DIR", str(directory / "cupy"))


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """The array in host memory: itself when it is NumPy's already, else one device-to-host copy."""
    if isinstance(array, np.ndarray):
        return array
    host: np.ndarray[Any, Any] = array.get()
    return host


def synchronize(xp: ModuleType) -> None:
    """Return once the device has done all that this thread asked of it, so that other threads may read it. The CPU has."""
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def release_staging(xp: ModuleType) -> None:
    """Give back the page-locked memory that arrays came to the device through; CuPy would keep as much as they all took."""
    if xp is not np:
        synchronize(xp)
        xp.get_default_pinned_memory_pool().free_all_blocks()


def ended_on_error(step: Step) -> Step:
    """For an engine's steps: when one raises, nothing that it asked of the device is still to be done. The caller is free to
    give its sequences' memory to others, who use it from streams of their own."""

    @functools.wraps(step)
    def ended(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return step(self, *arguments, **options)
        except BaseException:
            synchronize(self._xp)
            raise

    return cast(Step, ended)


class Zeros(NamedTuple):
    """A float32 array of zeros, and what becomes of its memory."""

    array: Any
    release: Callable[[], None]
    """Give it back."""
    enlarge: Callable[[], None]
    """Take it in pages as large as there are, each of which is committed whole; to be said before anything is written."""


def allocate_zeros(xp: ModuleType, shape: tuple[int, ...]) -> Zeros:
    """New memory.

    On the host the pages come from a private anonymous mapping: none is committed before its first write, and releasing
    returns them to the OS at once, even while some view of the array is still alive (it then reads zeros); of `SMALL_BYTES` or
    less the last reference does. On a device all of it is taken at once, or MemoryError raised; it goes back to CuPy's pool
    with the last reference.
    """
    if xp is not np:
        zeros = xp.zeros(shape, dtype=xp.float32)
        synchronize(xp)  # threads that copy into it do so on streams of their own, which wait for no other
        return Zeros(zeros, lambda: None, lambda: None)
    size_bytes = 4 * math.prod(shape)
    if size_bytes <= SMALL_BYTES:
        return Zeros(np.zeros(shape, dtype=np.float32), lambda: None, lambda: None)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, max(size_bytes, 1), flags=flags)

    def advise(how: int) -> None:
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(how)

    advise(mmap.MADV_NOHUGEPAGE)  # which some give unasked
    array = np.frombuffer(memory, dtype=np.float32, count=size_bytes // 4).reshape(shape)
    return Zeros(array, lambda: memory.madvise(mmap.MADV_DONTNEED), lambda: advise(mmap.MADV_HUGEPAGE))
