"""Checks the kernel's limits of a process: open files, locked memory. It checks nodes that run, otherwise this shell."""

from collections.abc import Iterator
from pathlib import Path

from mooncake_zmq.operate.doctor.finding import Finding, Here
from mooncake_zmq.operate.doctor.memory import size

AREA = "limits"
FILES = 4096
"""The open files that every node needs at most: a gateway of 256 streams, with sockets to some hundred nodes and an SSD's
files, stays below it."""
FILES_ADVICE = "LimitNOFILE=65536 in the unit (ours has it), or for this shell: ulimit -n 65536"
LOCKED_ADVICE = "LimitMEMLOCK=infinity in the unit (ours has it), or for this shell: ulimit -l unlimited"
ROWS = {"files": "Max open files", "locked": "Max locked memory"}


def examine(here: Here) -> Iterator[Finding]:
    """Yield findings on open files of each process, and on locked memory if a GPU copies to and from the host's pool."""
    processes = {f"{name} (pid {pid})": pid for name, pid in here.running.items()} or {"this shell": 0}
    pool_bytes = sum(here.section(node).pool_bytes for node in here.of_role("cache-node"))
    pins = any(node.device == "cuda" for node in here.nodes)
    for who, pid in processes.items():
        files, locked_bytes = granted(pid, "files"), granted(pid, "locked")
        if files is not None:
            yield _judged(files >= FILES, f"{who} may open {_shown(files)} files", FILES_ADVICE)
        if pins and locked_bytes is not None:
            found = f"{who} may lock {_shown(locked_bytes, in_bytes=True)}; its GPU copies from a pool of {size(pool_bytes)}"
            yield _judged(locked_bytes >= pool_bytes, found, LOCKED_ADVICE)


def _judged(enough: bool, found: str, advice: str) -> Finding:
    return Finding(AREA, "ok", found) if enough else Finding(AREA, "warning", found, advice)


def granted(pid: int, what: str) -> float | None:
    """Return the soft limit of a process, infinite if there is none; pid 0 is this process. None: it cannot be read."""
    try:
        lines = Path(f"/proc/{pid or 'self'}/limits").read_text().splitlines()
    except OSError:  # it has ended, or belongs to another user
        return None
    soft_text = next(line.removeprefix(ROWS[what]).split()[0] for line in lines if line.startswith(ROWS[what]))
    return float("inf") if soft_text == "unlimited" else int(soft_text)


def _shown(value: float, *, in_bytes: bool = False) -> str:
    if value == float("inf"):
        return "any amount" if in_bytes else "any number of"
    return size(int(value)) if in_bytes else f"{value:,.0f}"
