"""Speed of one node at one kind of work, as a measured multiple of the cost model that fades with time. PURE.

Each piece of work counts by its size, so that many small ones with their overhead do not hide the large ones. A measurement
also fades towards the cost model while nothing is measured: an idle node that once measured slow would get no work and never
measure again. For the same reason the first measurement is averaged with work that went as predicted.
"""

import math

from mooncake_zmq.core.messages import MAX_SECONDS, Measured

COMPUTE_MEMORY_S = 8.0
"""Memory for computing prompts: a few long chunks of one core, a hundred of a GPU."""
STEP_MEMORY_S = 4.0
"""Memory for decoding: one or two hundred steps."""


class Speed:
    """Recent work of one kind. `memory_s`: predicted seconds of work after which earlier work counts half; it starts with an
    eighth of that, as predicted. `half_life_s`: without work, a difference from 1 is halved in this time."""

    def __init__(self, *, memory_s: float, half_life_s: float) -> None:
        self._memory_s = memory_s
        self._half_life_s = half_life_s
        self._predicted_s = self._seconds = memory_s / 8
        self._measured_at: float | None = None

    def add(self, now: float, seconds: float, predicted_s: float) -> None:
        """Add work that has just ended after `seconds`; the cost model predicted `predicted_s`."""
        if predicted_s <= 0:
            return
        kept_s = self._faded_s(now - seconds)  # nothing fades while the node is working
        keep = math.pow(0.5, predicted_s / self._memory_s)
        self._seconds = keep * kept_s + seconds
        self._predicted_s = keep * self._predicted_s + predicted_s
        self._measured_at = now

    @property
    def known(self) -> bool:
        """Return whether anything was measured yet."""
        return self._measured_at is not None

    def ratio(self, now: float) -> float:
        """Return the time of such work as a multiple of the cost model's; 1 if nothing was measured yet."""
        return self._faded_s(now) / self._predicted_s

    def measured(self, now: float) -> Measured:
        """Return the measurement for a load report."""
        if self._measured_at is None:
            return Measured()
        return Measured(seconds=min(self._faded_s(now), MAX_SECONDS), predicted_s=min(self._predicted_s, MAX_SECONDS))

    def _faded_s(self, now: float) -> float:
        idle_s = 0.0 if self._measured_at is None else max(0.0, now - self._measured_at)
        return self._predicted_s + (self._seconds - self._predicted_s) * math.pow(0.5, idle_s / self._half_life_s)
