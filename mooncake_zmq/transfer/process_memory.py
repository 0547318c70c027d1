"""The memory of this process and of this machine, as the kernel reports it."""

import os
from pathlib import Path

_PROC = Path("/proc")
_RESIDENT_PAGES = 1
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int((_PROC / "self/statm").read_text(encoding="ascii").split()[_RESIDENT_PAGES]) * _PAGE_BYTES


def available_bytes() -> int:
    """Return the bytes of memory that this machine can give to processes without swapping."""
    lines = (_PROC / "meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
