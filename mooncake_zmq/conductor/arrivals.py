"""How much work of which size comes, measured: what a waiting job must expect to be overtaken by. PURE."""

import math

SIZES = 40
HALF_LIFE_S = 60.0
SMALLEST_S = 1e-3
MEASURED_S = 5.0
"""A shorter time says nothing of how often jobs come."""
MIDDLES_S = tuple([SMALLEST_S * 2 ** (size / 2) for size in range(SIZES)])
LARGEST_WEIGHT = 1e12


class Arrivals:
    """Placed work by its size, in half powers of two from a millisecond on; older work counts less: what comes later is given
    more weight, and now and then all weights are made smaller."""

    def __init__(self) -> None:
        self._weights = [0.0] * SIZES
        self._smallest = SIZES
        """The smallest size that ever came."""
        self._base = 0.0
        """When a job weighs 1."""
        self._since: float | None = None

    def add(self, now: float, work_s: float) -> None:
        """A job was placed on some prefill."""
        if self._since is None:
            self._since = self._base = now
        weight = math.exp2((now - self._base) / HALF_LIFE_S)
        if weight > LARGEST_WEIGHT:
            self._weights = [each / weight for each in self._weights]
            self._base, weight = now, 1.0
        size = _size(work_s)
        self._smallest = min(self._smallest, size)
        self._weights[size] += weight

    def overtaking_s(self, now: float, *, work_s: float, wait_s: float, overtake: float, nodes: int) -> float:
        """Work that is expected to come before a job of `work_s` on one of so many nodes: of shorter jobs those that arrive
        while it waits or is computed, and within `overtake` times the difference (see `core.order`)."""
        if self._since is None or now - self._since < MEASURED_S:
            return 0.0
        most_s, weights, total = wait_s + work_s, self._weights, 0.0
        for size in range(self._smallest, _size(work_s) + 1):
            middle_s = MIDDLES_S[size]
            within_s = min(overtake * (work_s - middle_s), most_s)
            if within_s > 0:
                total += weights[size] * middle_s * within_s
        measured = 1 - math.exp2((self._since - now) / HALF_LIFE_S)  # of all time, what was measured counts as this much
        weight = math.exp2((now - self._base) / HALF_LIFE_S)
        return total * math.log(2) / HALF_LIFE_S / measured / weight / max(1, nodes)


def _size(work_s: float) -> int:
    return min(SIZES - 1, int(2 * math.log2(work_s / SMALLEST_S))) if work_s > SMALLEST_S else 0
