"""What computes: the backends and devices there are, and BLAS threads, which are said before anything loads NumPy; so this
does not."""

import functools
import importlib.util
import mmap
import os
from typing import Literal

Backend = Literal["auto", "numpy", "compiled"]
"""What a model is computed with; see `llama` and `compiled`. "auto": see `chosen`."""

Device = Literal["cpu", "cuda"]
"""Where an engine computes and keeps its KV; see `backend`."""

_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def chosen(backend: Backend) -> Literal["numpy", "compiled"]:
    """What `backend` is on this machine: "auto" is machine code where that can be made and run."""
    if backend != "auto":
        return backend
    return "numpy" if lacking() else "compiled"


_found_broken: list[str] = []


def found_broken(reason: str) -> None:
    """The compiler is there and cannot be used: from now on "auto" is NumPy in this process."""
    _found_broken.append(reason)
    lacking.cache_clear()


@functools.cache
def lacking() -> str:
    """Why "auto" is NumPy here; empty: it is not. Imports nothing: that takes seconds, and is left to who compiles."""
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
    """One thread in this process and those it starts: parallel are the engine's own threads (see `team`), and BLAS workers
    that spin beside them slow decode 50-fold (measured)."""
    os.environ.update(blas_environment(1))


def blas_environment(threads: int) -> dict[str, str]:
    """For a process that is to use so many."""
    return dict.fromkeys(_VARIABLES, str(threads))
