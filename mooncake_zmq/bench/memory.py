"""Memory and CPU time of processes, as the kernel counts them."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click
import psutil

FIELDS = {"VmHWM": "peak_bytes", "RssAnon": "private_bytes", "RssFile": "file_bytes", "RssShmem": "shared_bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Resident memory of one process: its peak, and its present composition."""

    name: str
    peak_bytes: int
    private_bytes: int
    """Private memory: heap, stacks, activations, a sequence's KV."""
    file_bytes: int
    """Mapped files: weights and libraries, in memory once for all that map them."""
    shared_bytes: int
    """Shared memory: segments of KV blocks, in memory once for all that map them."""


def footprint(name: str, pid: int) -> Footprint:
    """Return the footprint of a running process. Raises ProcessLookupError when there is none."""
    sizes = dict.fromkeys(FIELDS.values(), 0)
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        raise ProcessLookupError(f"{name} (process {pid}) is gone") from None
    for line in lines:
        key, _, value = line.partition(":")
        if key in FIELDS:
            sizes[FIELDS[key]] = int(value.split()[0]) << 10
    return Footprint(name=name, **sizes)


def shared_files(pid: int, directory: str = "/dev/shm") -> dict[str, int]:
    """Return the files below a tmpfs that a process maps, and the memory each takes: all of it, touched by this process or
    not."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    names = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return {
        name: Path(name).stat().st_blocks * 512 for name in names if name.startswith(f"{directory}/") and Path(name).exists()
    }


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process and its descendants have used; 0 for one that has ended. Resolution: a clock tick."""
    used_s = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                used_s += times.user + times.system
    return used_s


def await_idle(pids: Mapping[str, int], quiet_s: float, most_cpu_s: float, timeout_s: float) -> None:
    """Wait until all of these processes, by name, use little CPU time in a while. Raises click.ClickException."""
    deadline = time.monotonic() + timeout_s
    used = {name: cpu_s(pid) for name, pid in pids.items()}
    while time.monotonic() < deadline:
        time.sleep(quiet_s)
        before, used = used, {name: cpu_s(pid) for name, pid in pids.items()}
        busy = [name for name in pids if used[name] - before[name] > most_cpu_s]
        if not busy:
            return
    raise click.ClickException(f"{', '.join(busy)} computes without a request: no figure would be worth anything")


def threads_cpu_s(pid: int) -> float:
    """Return the CPU time of the process's threads that now exist, to the microsecond or better."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
