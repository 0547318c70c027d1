"""How much work of which size comes, measured: what a waiting job must expect to be overtaken by. PURE."""

import math

import numpy as np

SIZES = 40
HALF_LIFE_S = 60.0
SMALLEST_S = 1e-3
MEASURED_S = 5.0
"""A shorter time says nothing of how often jobs come."""


class Arrivals:
    """Placed work by its size, in half powers of two from a millisecond on; older work counts less."""

    def __init__(self) -> None:
        self._middle_s = SMALLEST_S * np.exp2(np.arange(SIZES) / 2)
        self._counts = np.zeros(SIZES)
        self._at = 0.0
        self._since: float | None = None

    def add(self, now: float, work_s: float) -> None:
        """A job was placed on some prefill."""
        self._since = now if self._since is None else self._since
        self._counts *= math.exp2((self._at - now) / HALF_LIFE_S)
        self._at = now
        size = int(2 * math.log2(max(work_s, SMALLEST_S) / SMALLEST_S))
        self._counts[min(size, SIZES - 1)] += 1

    def overtaking_s(self, now: float, *, work_s: float, wait_s: float, overtake: float, nodes: int) -> float:
        """Work that is expected to come before a job of `work_s` on one of so many nodes: of shorter jobs those that arrive
        while it waits or is computed, and within `overtake` times the difference (see `core.order`)."""
        if self._since is None or now - self._since < MEASURED_S:
            return 0.0
        weight = 1 - math.exp2((self._since - now) / HALF_LIFE_S)  # of all time, what was measured counts as this much
        decay = math.exp2((self._at - now) / HALF_LIFE_S)
        per_s = self._counts * (decay * math.log(2) / HALF_LIFE_S / weight / max(1, nodes))
        within_s = np.clip(overtake * (work_s - self._middle_s), 0.0, wait_s + work_s)
        return float((per_s * self._middle_s * within_s).sum())
