"""The array namespace behind one name. This is the only file of the engine that may import CuPy."""

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
"""Arrays up to this size come from the allocator: to map them, and to advise the kernel, takes longer than to write them."""
MAP_NORESERVE = 0x4000  # Linux; Python's mmap names it only in later versions


def array_namespace(device: Device) -> ModuleType:
    """Return NumPy for "cpu", CuPy for "cuda". Raises ValueError with one line that says what to do."""
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
    """Let CuPy keep the kernels that it compiles here, unless the operator has chosen a place. Call it before CuPy is imported:
    the import fails where CuPy's own choice, the home directory, cannot be written."""
    os.environ.setdefault("CUPY_CACHE_DIR", str(directory / "cupy"))


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """Return the array in host memory: itself when it is NumPy's already, else one device-to-host copy."""
    if isinstance(array, np.ndarray):
        return array
    host: np.ndarray[Any, Any] = array.get()
    return host


def synchronize(xp: ModuleType) -> None:
    """Return once the device has completed all work of this thread, so that other threads may read the results. On the CPU it
    always has."""
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def release_staging(xp: ModuleType) -> None:
    """Give back the page-locked memory through which arrays were copied to the device; CuPy would keep all of it."""
    if xp is not np:
        synchronize(xp)
        xp.get_default_pinned_memory_pool().free_all_blocks()


def ended_on_error(step: Step) -> Step:
    """Wrap an engine's step: when it raises, no work that it started on the device is pending. The caller may then give its
    sequences' memory to others, who use it from streams of their own."""

    @functools.wraps(step)
    def ended(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return step(self, *arguments, **options)
        except BaseException:
            synchronize(self._xp)
            raise

    return cast(Step, ended)


class Zeros(NamedTuple):
    """A float32 array of zeros, and how its memory is released and enlarged."""

    array: Any
    release: Callable[[], None]
    """Give the memory back."""
    enlarge: Callable[[], None]
    """Take the memory in pages as large as there are, each of which is committed whole; call it before anything is written."""


def allocate_zeros(xp: ModuleType, shape: tuple[int, ...]) -> Zeros:
    """Allocate new memory.

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

    advise(mmap.MADV_NOHUGEPAGE)  # some kernels return large pages unasked
    array = np.frombuffer(memory, dtype=np.float32, count=size_bytes // 4).reshape(shape)
    return Zeros(array, lambda: memory.madvise(mmap.MADV_DONTNEED), lambda: advise(mmap.MADV_HUGEPAGE))
