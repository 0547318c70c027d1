"""The array namespace behind one name. The only file of the engine that may import CuPy."""

import importlib
import mmap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

MAP_NORESERVE = 0x4000  # Linux; Python's mmap names it only in later versions


def array_namespace(device: str) -> ModuleType:
    """NumPy for "cpu", CuPy for "cuda". Raises ValueError with one line that says what to do."""
    if device == "cpu":
        return np
    if device != "cuda":
        raise ValueError(f"unknown device {device!r}: use 'cpu' or 'cuda'")
    try:
        cupy = importlib.import_module("cupy")
        if cupy.cuda.runtime.getDeviceCount() < 1:
            raise RuntimeError("no CUDA device")
    except Exception as error:  # a missing driver raises CuPy's own types, known only after the import that may have failed
        raise ValueError(f"device 'cuda' needs CuPy and a GPU (extras gpu-cu12, gpu-cu13): {error}") from error
    return cupy


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """The array in host memory: itself when it is NumPy's already, else one device-to-host copy."""
    if isinstance(array, np.ndarray):
        return array
    host: np.ndarray[Any, Any] = array.get()
    return host


def allocate_zeros(xp: ModuleType, shape: tuple[int, ...]) -> tuple[Any, Callable[[], None]]:
    """A float32 array of zeros and the function that gives its memory back.

    On the host the pages come from a private anonymous mapping: none is committed before its first write, and releasing
    returns them to the OS at once, even while some view of the array is still alive (it then reads zeros).
    """
    if xp is not np:
        return xp.zeros(shape, dtype=xp.float32), lambda: None
    size_bytes = 4 * int(np.prod(shape, dtype=np.int64))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, max(size_bytes, 1), flags=flags)
    array = np.frombuffer(memory, dtype=np.float32, count=size_bytes // 4).reshape(shape)
    return array, lambda: memory.madvise(mmap.MADV_DONTNEED)
