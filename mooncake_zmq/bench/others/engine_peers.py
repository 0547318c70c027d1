"""The processes of `bench engine`: each with its number of threads, in its own Python. See `engine_driver`."""

import ctypes.util
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mooncake_zmq.bench.others.peers import Peer, driver_process
from mooncake_zmq.engine.cpu import blas_environment

OURS, MACHINE = "mooncake_zmq", "machine"
VLLM, VLLM_BFLOAT16 = "vLLM", "vLLM bfloat16"
DRIVER = Path(__file__).with_name("engine_driver.py")
ANSWER_TIMEOUT_S = 900.0
"""The first answer of an engine that compiles its kernels takes minutes."""


def engine_process(order: dict[str, Any], *, python: str | None) -> AbstractContextManager[Peer]:
    """Return the side `order["engine"]` with `order["threads"]` threads, in the Python at `python` or this one."""
    name = order["engine"]
    environment = os.environ | blas_environment(1 if name == OURS else order["threads"])
    if name in (VLLM, VLLM_BFLOAT16) and python is not None and (preloads := _vllm_preloads(Path(python))):
        environment["LD_PRELOAD"] = " ".join(preloads)
    return driver_process(
        DRIVER, order, python=python or sys.executable, what=name, timeout_s=ANSWER_TIMEOUT_S, environment=environment
    )


def _vllm_preloads(python: Path) -> list[str]:
    """Return the libraries that vLLM's guide for CPUs preloads, if they are here: Intel's OpenMP of its own environment,
    tcmalloc."""
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    found = [str(openmp) if openmp.exists() else None, ctypes.util.find_library("tcmalloc_minimal")]
    return [library for library in found if library is not None]
