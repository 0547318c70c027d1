"""The resident memory of this process."""

import os
from pathlib import Path

_STATM = Path("/proc/self/statm")
_RESIDENT_PAGES = 1
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, as the kernel reports it now."""
    return int(_STATM.read_text(encoding="ascii").split()[_RESIDENT_PAGES]) * _PAGE_BYTES
