"""Checks what this machine's engines compute with: cores, CPU features, machine code, GPUs."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path

from mooncake_zmq.core.roles import ENGINE_ROLES
from mooncake_zmq.engine.backend import array_namespace
from mooncake_zmq.engine.cpu import lacking
from mooncake_zmq.operate.doctor.finding import Finding, Here
from mooncake_zmq.operate.doctor.places import UNIT_DIRECTORIES, units_installed

AREA = "compute"
FEATURES = {"x86_64": ("avx2", "avx512f", "avx512_bf16"), "aarch64": ("asimd", "asimddp", "sve")}
"""The CPU features with which NumPy's products are several times faster."""
DRIVER = Path("/dev/nvidiactl")


def examine(here: Here) -> Iterator[Finding]:
    """Yield findings on the CPU and the GPU, each if a node here computes with it."""
    engines = here.of_role(*ENGINE_ROLES)
    computing = [node for node in engines if node.computes and node.device == "cpu"]
    if computing:
        yield cores(sum(node.threads for node in computing), len(os.sched_getaffinity(0)))
        yield features(cpu_features())
    asked = {node.prepared_for for node in computing}
    if asked & {"auto", "compiled"}:
        yield machine_code(needed="compiled" in asked)
    if names := [node.name for node in engines if node.device == "cuda"]:
        yield from _gpu(names)
    elif DRIVER.exists():
        yield Finding(AREA, "ok", "this machine has an NVIDIA driver, and no node here uses it")


def cores(threads: int, count: int) -> Finding:
    """Check the threads against the cores: more threads than cores wait for each other."""
    found = f"{count} cores; the engines here compute in {threads} threads"
    if threads <= count:
        return Finding(AREA, "ok", found)
    return Finding(AREA, "warning", found, "lower threads of the nodes, or move some to another machine")


def cpu_features() -> list[str]:
    """Return the CPU's features that matter here, by the kernel's names."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return []
    return [name for name in FEATURES.get(platform.machine(), ()) if name in words]


def features(found: list[str]) -> Finding:
    shown = f"{platform.machine()} with {', '.join(found) or 'none of what NumPy is fast with'}"
    if found:
        return Finding(AREA, "ok", shown)
    return Finding(AREA, "warning", shown, "a virtual machine may hide it: set its CPU type to host")


def machine_code(*, needed: bool) -> Finding:
    """Check what backend "auto" chooses here, and whether "compiled" is available if a node needs it."""
    reason = lacking()
    if not reason:
        return Finding(AREA, "ok", 'machine code can be made and run: backend "auto" is "compiled"')
    advice = 'bin/install --extra compiled, or backend = "numpy"'
    if needed:
        return Finding(AREA, "problem", f'backend "compiled" cannot be had: {reason}', advice)
    return Finding(AREA, "warning", f'backend "auto" is "numpy", which decodes several times slower: {reason}', advice)


def _gpu(names: list[str]) -> Iterator[Finding]:
    who = f'device "cuda" of {", ".join(names)}'
    try:
        cupy = array_namespace("cuda")
    except ValueError as error:
        driver = "" if DRIVER.exists() else "install NVIDIA's driver (nvidia-smi must list the GPU); "
        advice = f"{driver}bin/install --gpu --extra gpu-cu12 (or gpu-cu13)"
        yield Finding(AREA, "problem", f"{who}: {error}", advice)
        return
    runtime = cupy.cuda.runtime
    free_bytes, total_bytes = runtime.memGetInfo()
    name = runtime.getDeviceProperties(0)["name"].decode()
    driver = f"driver for CUDA {_version(runtime.driverGetVersion())}, CuPy {cupy.__version__}"
    yield Finding(AREA, "ok", f"{who}: {name}, {free_bytes >> 20:,} of {total_bytes >> 20:,} MiB free, {driver}")
    if units_installed():
        yield gpu_units([Path(directory) for directory in UNIT_DIRECTORIES])


def gpu_units(directories: list[Path]) -> Finding:
    """Check whether units may open the GPU's devices: without the drop-in they see none."""
    if any((path / "mooncake-prefill@.service.d/50-gpu.conf").exists() for path in directories):
        return Finding(AREA, "ok", "units may use the GPU")
    return Finding(AREA, "problem", "units may not use the GPU", "bin/install --gpu")


def _version(number: int) -> str:
    """Return a CUDA version as text: 12040 is 12.4."""
    return f"{number // 1000}.{number % 1000 // 10}"
