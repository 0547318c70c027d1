"""The memory of this process and of this machine, as the kernel reports it."""

import os
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
_RESIDENT_PAGES = 1
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, also while it has no file descriptor left, except the first time."""
    return int(os.pread(_statm(os.getpid()), 256, 0).split()[_RESIDENT_PAGES]) * _PAGE_BYTES


@cache
def _statm(pid: int) -> int:
    """Return a descriptor, which stays open, of the process's own file: a forked one has another."""
    return os.open(_PROC / f"{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)


def available_bytes() -> int:
    """Return the bytes of memory that this machine can give to processes without swapping."""
    lines = (_PROC / "meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
