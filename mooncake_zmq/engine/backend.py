"""The array namespace behind one name. This is the only file of the engine that may import CuPy."""

import functools
import importlib
import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import numpy as np

from mooncake_zmq.engine.cpu import Device
from mooncake_zmq.engine.kept_memory import Kept, new_memory, of_this_process

Step = TypeVar("Step", bound=Callable[..., Any])

SMALL_BYTES = 64 << 10
"""Arrays up to this size come from the allocator: to map them, and to advise the kernel, takes longer than to write them."""


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


class KVMemory:
    """A float32 array for the KV of one sequence.

    On the host it is a mapping of its own: no page is committed before its first write, and `release` returns them to the OS at
    once, even while some view of the array is still alive; of `SMALL_BYTES` or less the last reference does. On a device all of
    it is taken at once, or MemoryError raised; it goes back to CuPy's pool with the last reference.
    """

    __slots__ = ("_kept", "_mapping", "array")

    def __init__(self, xp: ModuleType, shape: tuple[int, ...]) -> None:
        """Allocate it, with zeros in it."""
        self._mapping: mmap.mmap | None = None
        self._kept: Kept | None = None
        self.array: Any
        size_bytes = 4 * math.prod(shape)
        if xp is not np or size_bytes <= SMALL_BYTES:
            self.array = xp.zeros(shape, dtype=xp.float32)
            synchronize(xp)  # threads that copy into it do so on streams of their own, which wait for no other
            return
        self._mapping = new_memory(size_bytes)
        self.array = _array(self._mapping, shape)

    def enlarge(self) -> None:
        """Take the memory in pages as large as there are, each of which is committed whole, or of a sequence that ended, with
        anything in it; call it before anything is written."""
        if self._mapping is None or self._kept is not None:
            return
        shape = self.array.shape
        self._kept = of_this_process.take(4 * math.prod(shape))
        self._mapping = self._kept.memory
        self.array = _array(self._mapping, shape)

    def release(self) -> None:
        """Give the memory back, when no thread uses it any more: to the OS, or for another sequence if it was enlarged. May be
        called twice."""
        mapping, kept = self._mapping, self._kept
        self._mapping = self._kept = self.array = None
        if kept is not None:
            of_this_process.keep(kept)
        elif mapping is not None:
            mapping.madvise(mmap.MADV_DONTNEED)


def _array(memory: mmap.mmap, shape: tuple[int, ...]) -> Any:
    return np.frombuffer(memory, dtype=np.float32, count=math.prod(shape)).reshape(shape)
