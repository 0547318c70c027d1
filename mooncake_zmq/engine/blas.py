"""How many threads BLAS uses, said before anything loads NumPy. Imports nothing that does."""

import os

_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def limit_blas() -> None:
    """One thread in this process and those it starts: parallel are the engine's own threads (see `team`), and BLAS workers
    that spin beside them slow decode 50-fold (measured)."""
    os.environ.update(blas_environment(1))


def blas_environment(threads: int) -> dict[str, str]:
    """For a process that is to use so many."""
    return dict.fromkeys(_VARIABLES, str(threads))
