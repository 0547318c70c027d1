"""Memory of sequences that ended, kept for the next ones.

The kernel clears each page that it hands out. Where a hypervisor has to find the page first, that takes two to three times as
long as to load verified blocks into it: measured, 45 % of the CPU time of a request whose prefix is in the pool.
"""

import mmap
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

LIMIT_BYTES = 256 << 20
"""The most that a process keeps: the KV of one long prompt of a small model, while no sequence uses it."""
MAP_NORESERVE = 0x4000  # Linux; Python's mmap names it only in later versions


def new_memory(size_bytes: int) -> mmap.mmap:
    """Map memory of which no page is committed before its first write, in small pages."""
    memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    advise(memory, mmap.MADV_NOHUGEPAGE)  # some kernels return large pages unasked
    return memory


def advise(memory: mmap.mmap, how: int) -> None:
    """Advise the kernel, if it has large pages."""
    with suppress(OSError):
        memory.madvise(how)


@dataclass(frozen=True, slots=True)
class Kept:
    """Memory of which the first bytes have been used."""

    memory: mmap.mmap
    used_bytes: int


class KeptMemory:
    """Holds memory up to a limit, the latest. Any thread may take and keep."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._kept: list[Kept] = []
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> Kept:
        """Return the least memory of this size that is kept, with anything in it; else new memory in large pages, with room for
        longer sequences that come later."""
        with self._lock:
            fitting = [each for each in self._kept if len(each.memory) >= size_bytes]
            if fitting:
                found = min(fitting, key=lambda each: each.used_bytes)
                self._kept.remove(found)
                return Kept(found.memory, max(found.used_bytes, size_bytes))
        memory = new_memory(1 << (size_bytes - 1).bit_length())
        advise(memory, mmap.MADV_HUGEPAGE)
        return Kept(memory, size_bytes)

    def keep(self, returned: Kept) -> None:
        """Keep memory that no thread uses; what is beyond the limit goes back to the OS, the oldest first."""
        with self._lock:
            self._kept.append(returned)
            dropped = list(self._beyond_the_limit())
        for each in dropped:
            each.memory.madvise(mmap.MADV_DONTNEED)

    def _beyond_the_limit(self) -> Iterator[Kept]:
        while sum(each.used_bytes for each in self._kept) > self._limit_bytes:
            yield self._kept.pop(0)


of_this_process = KeptMemory()
