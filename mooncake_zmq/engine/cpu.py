"""What computes: the backends and devices there are, and BLAS threads, which are said before anything loads NumPy; so this
does not."""

import os
from typing import Literal

Backend = Literal["numpy", "compiled"]
"""What decode computes with; see `llama` and `compiled`."""

Device = Literal["cpu", "cuda"]
"""Where an engine computes and keeps its KV; see `backend`."""

_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def limit_blas() -> None:
    """One thread in this process and those it starts: parallel are the engine's own threads (see `team`), and BLAS workers
    that spin beside them slow decode 50-fold (measured)."""
    os.environ.update(blas_environment(1))


def blas_environment(threads: int) -> dict[str, str]:
    """For a process that is to use so many."""
    return dict.fromkeys(_VARIABLES, str(threads))
