"""Measures how much prefill work of each size arrives: a waiting job must expect shorter ones to overtake it. PURE."""

import math
from bisect import bisect_left
from typing import Final

SIZES: Final = 40
HALF_LIFE_S: Final = 60.0
SMALLEST_S: Final = 1e-3
MEASURED_S: Final = 5.0
"""The shortest time over which a rate is estimated."""
MIDDLES_S = tuple([SMALLEST_S * 2 ** (size / 2) for size in range(SIZES)])
LARGEST_WEIGHT: Final = 1e12
LASTS_S: Final = 100 * HALF_LIFE_S
PER_S = math.log(2) / HALF_LIFE_S
"""The factor from the sum of all weights to a steady rate."""


class Arrivals:
    """Counts placed work by size, in half powers of two from a millisecond up. Older work counts less: later work is added
    with a larger weight, and all weights are scaled down now and then."""

    def __init__(self) -> None:
        self._work = [0.0] * SIZES
        self._squares = [0.0] * SIZES
        """By size, the weighted sums of job sizes (`_work`) and of their squares (`_squares`)."""
        self._base = 0.0
        """The time at which a job has weight 1."""
        self._since: float | None = None

    def add(self, now: float, work_s: float) -> None:
        """Count a job that was placed on any prefill."""
        if self._since is None or self._is_long_ago(now):
            self._work, self._squares = [0.0] * SIZES, [0.0] * SIZES
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

    def _is_long_ago(self, now: float) -> bool:
        """Return whether all that was counted counts for nothing by now, and its weight would be no number."""
        return now - self._base > LASTS_S

    def overtaking_s(self, now: float, *, work_s: float, wait_s: float, overtake: float, nodes: int) -> float:
        """Return the seconds of work expected to run before a job of `work_s`, per node: that of shorter jobs which arrive
        while it waits or is computed, within `overtake` times the difference in size (see `core.order`)."""
        if self._since is None or now - self._since < MEASURED_S or overtake <= 0 or self._is_long_ago(now):
            return 0.0
        most_s = wait_s + work_s
        shorter = bisect_left(MIDDLES_S, work_s)
        # Jobs short enough to overtake whenever they arrive before this one ends:
        always = bisect_left(MIDDLES_S, work_s - most_s / overtake, 0, shorter)
        total = overtake * (work_s * sum(self._work[always:shorter]) - sum(self._squares[always:shorter]))
        total += most_s * sum(self._work[:always])
        measured = 1 - math.exp2((self._since - now) / HALF_LIFE_S)  # the share of all weights within the measured time
        return total * PER_S / measured / math.exp2((now - self._base) / HALF_LIFE_S) / max(1, nodes)
