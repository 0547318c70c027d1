"""Who of a prefill's jobs holds a place and who computes next, by `core.order`. It knows nothing of KV. PURE.

A place is the right to hold KV and to get chunks. It goes to the smallest rank, and `max_active` jobs hold one. A job that
ranks before one of them gets a further place, of which there are a few, so that the first of all is nearly always prepared
when the engine is free: that is what the conductor predicts.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class Ranked(Protocol):
    """What the queue looks at."""

    @property
    def rank(self) -> float:
        """See `core.order`."""

    @property
    def order(self) -> int:
        """Arrival number, unique: decides ties."""


J = TypeVar("J", bound=Ranked)
Entry = tuple[float, int, J]


class Turns(Generic[J]):
    """Jobs that wait for a place, and those that hold one, both by rank."""

    def __init__(self, max_active: int, further: int) -> None:
        self._max_active = max_active
        self._further = further
        self._waiting: list[Entry[J]] = []
        self._active: list[Entry[J]] = []

    @property
    def waiting(self) -> int:
        """Jobs without a place."""
        return len(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._active)

    def arrive(self, job: J) -> None:
        """It waits for a place."""
        insort(self._waiting, (job.rank, job.order, job))

    def activate(self) -> J | None:
        """The job that gets a place now, if any; call until there is none."""
        if not self._waiting or len(self._active) >= self._max_active + self._further:
            return None
        first = self._waiting[0]
        if len(self._active) >= self._max_active and bisect_left(self._active, first) >= self._max_active:
            return None
        del self._waiting[0]
        insort(self._active, first)
        return first[2]

    def leave(self, job: J) -> None:
        """It needs no place any more, and no turn; one that has left already may leave again."""
        entry = (job.rank, job.order, job)
        for entries in (self._active, self._waiting):
            index = bisect_left(entries, entry)
            if index < len(entries) and entries[index][2] is job:
                del entries[index]
                return

    def first(self, wanted: Callable[[J], bool]) -> J | None:
        """The first active job for which `wanted` holds."""
        for _, _, job in self._active:
            if wanted(job):
                return job
        return None

    def active(self) -> list[J]:
        """Those that hold a place, by rank."""
        return [job for _, _, job in self._active]

    def __iter__(self) -> Iterator[J]:
        """All, by rank."""
        return (job for _, _, job in sorted(self._active + self._waiting))
