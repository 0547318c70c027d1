"""Choice of backend, device and BLAS threads. BLAS threads are set before any module loads NumPy, so this one does not import
it."""

import functools
import importlib.util
import mmap
import os
from typing import Literal

Backend = Literal["auto", "numpy", "compiled"]
"""The implementation that computes a model; see `llama` and `compiled`. "auto": see `chosen`."""

Device = Literal["cpu", "cuda"]
"""The device on which an engine computes and keeps its KV; see `backend`."""

_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def chosen(backend: Backend) -> Literal["numpy", "compiled"]:
    """Return the meaning of `backend` on this machine: "auto" is machine code where that can be made and run."""
    if backend != "auto":
        return backend
    return "numpy" if lacking() else "compiled"


_found_broken: list[str] = []


def found_broken(reason: str) -> None:
    """Record that the compiler cannot be used: from now on "auto" is NumPy in this process."""
    _found_broken.append(reason)
    lacking.cache_clear()


@functools.cache
def lacking() -> str:
    """Return why "auto" is NumPy here; empty: it is not. It imports nothing, as that takes seconds."""
    if _found_broken:
        return _found_broken[0]
    missing = [name for name in ("numba", "llvmlite") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: the extra 'compiled' has it"
    try:
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    except OSError:
        return "this process may not run what it writes into memory (MemoryDenyWriteExecute)"
    return ""


def limit_blas() -> None:
    """Set BLAS to one thread in this process and those it starts: the engine has threads of its own (see `team`), and BLAS
    workers that spin beside them slow decode 50-fold (measured)."""
    os.environ.update(blas_environment(1))


def blas_environment(threads: int) -> dict[str, str]:
    """Return the environment of a process that is to use so many BLAS threads."""
    return dict.fromkeys(_VARIABLES, str(threads))
