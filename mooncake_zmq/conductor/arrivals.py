"""How much work of which size comes, measured: what a waiting job must expect to be overtaken by. PURE."""

import math
from bisect import bisect_left

SIZES = 40
HALF_LIFE_S = 60.0
SMALLEST_S = 1e-3
MEASURED_S = 5.0
"""A shorter time says nothing of how often jobs come."""
MIDDLES_S = tuple([SMALLEST_S * 2 ** (size / 2) for size in range(SIZES)])
LARGEST_WEIGHT = 1e12
PER_S = math.log(2) / HALF_LIFE_S
"""A steady rate is this share of the sum of all weights."""


class Arrivals:
    """Placed work by its size, in half powers of two from a millisecond on; older work counts less: what comes later is given
    more weight, and now and then all weights are made smaller."""

    def __init__(self) -> None:
        self._work = [0.0] * SIZES
        self._squares = [0.0] * SIZES
        """By size the weights of what came, times that size and times its square."""
        self._base = 0.0
        """When a job weighs 1."""
        self._since: float | None = None

    def add(self, now: float, work_s: float) -> None:
        """A job was placed on some prefill."""
        if self._since is None:
            self._since = self._base = now
        weight = math.exp2((now - self._base) / HALF_LIFE_S)
        if weight > LARGEST_WEIGHT:
            self._work = [each / weight for each in self._work]
            self._squares = [each / weight for each in self._squares]
            self._base, weight = now, 1.0
        size = min(SIZES - 1, int(2 * math.log2(work_s / SMALLEST_S))) if work_s > SMALLEST_S else 0
        middle_s = MIDDLES_S[size]
        self._work[size] += weight * middle_s
        self._squares[size] += weight * middle_s * middle_s

    def overtaking_s(self, now: float, *, work_s: float, wait_s: float, overtake: float, nodes: int) -> float:
        """Work that is expected to come before a job of `work_s` on one of so many nodes: of shorter jobs those that arrive
        while it waits or is computed, and within `overtake` times the difference (see `core.order`)."""
        if self._since is None or now - self._since < MEASURED_S or overtake <= 0:
            return 0.0
        most_s = wait_s + work_s
        shorter = bisect_left(MIDDLES_S, work_s)
        # Those so much shorter that each overtakes which comes in time at all:
        always = bisect_left(MIDDLES_S, work_s - most_s / overtake, 0, shorter)
        total = overtake * (work_s * sum(self._work[always:shorter]) - sum(self._squares[always:shorter]))
        total += most_s * sum(self._work[:always])
        measured = 1 - math.exp2((self._since - now) / HALF_LIFE_S)  # of all time, what was measured counts as this much
        return total * PER_S / measured / math.exp2((now - self._base) / HALF_LIFE_S) / max(1, nodes)
