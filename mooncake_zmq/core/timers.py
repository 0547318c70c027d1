"""Keyed one-shot timers: the one heap of due times, for an actor's timers and for leases and puts that end. PURE."""

import math
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")

MIN_STALE = 64
"""Number of cancelled or replaced timers that are not worth a sweep."""


class Timers(Generic[T]):
    """A value to be returned at a time for each key; setting a key again replaces its timer."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Hashable]] = []
        self._live: dict[Hashable, tuple[int, T]] = {}
        self._order = 0

    def set(self, key: Hashable, at: float, value: T) -> None:
        """Arm the timer `key`."""
        self._order += 1
        self._live[key] = (self._order, value)
        heappush(self._heap, (at, self._order, key))
        if len(self._heap) > 2 * len(self._live) + MIN_STALE:  # else distant deadlines of past requests would pile up
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)

    def cancel(self, key: Hashable) -> None:
        """Disarm the timer `key`, if it is armed."""
        self._live.pop(key, None)

    def next_at(self) -> float:
        """Return when the next timer is due; infinite if there is none."""
        while self._heap and not self._is_live(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def pop_due(self, now: float) -> T | None:
        """Disarm the earliest timer that is due, if any, and return its value."""
        if self.next_at() > now:
            return None
        _, _, key = heappop(self._heap)
        return self._live.pop(key)[1]

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._live

    def _is_live(self, entry: tuple[float, int, Hashable]) -> bool:
        live = self._live.get(entry[2])
        return live is not None and live[0] == entry[1]
