"""How fast one node does work of one kind, beside what the cost model says: what it measures, and how that is forgotten. PURE.

Each piece of work counts by its size, so that many small ones with their overhead do not hide the large ones. A measurement
also fades with the time in which nothing is measured, towards the cost model: an idle node that measured slow once is not given
work, so it would never measure again. The same holds the first one down: it is measured beside work that went as predicted.
"""

import math

from mooncake_zmq.core.messages import Measured

MAX_SECONDS = 1e7
"""The most a message may say."""
COMPUTE_MEMORY_S = 8.0
"""Of computing prompts: a few long chunks of one core, a hundred of a GPU."""
STEP_MEMORY_S = 4.0
"""Of decoding: a hundred or two steps."""


class Pace:
    """Recent work of one kind. `memory_s`: predicted seconds of work after which what came before counts half; an eighth of
    that stands at the beginning, as predicted. `half_life_s`: without work, a difference from 1 is halved in this time."""

    def __init__(self, *, memory_s: float, half_life_s: float) -> None:
        self._memory_s = memory_s
        self._half_life_s = half_life_s
        self._predicted_s = self._seconds = memory_s / 8
        self._measured_at: float | None = None

    def add(self, now: float, seconds: float, predicted_s: float) -> None:
        """Work that took `seconds`, for which the cost model says `predicted_s`, has just ended."""
        if predicted_s <= 0:
            return
        kept_s = self._faded_s(now - seconds)  # what was at work all the time has not faded
        keep = math.pow(0.5, predicted_s / self._memory_s)
        self._seconds = keep * kept_s + seconds
        self._predicted_s = keep * self._predicted_s + predicted_s
        self._measured_at = now

    @property
    def known(self) -> bool:
        """Was anything measured yet?"""
        return self._measured_at is not None

    def ratio(self, now: float) -> float:
        """What such work takes, as a multiple of what the cost model says; 1 if nothing was measured yet."""
        return self._faded_s(now) / self._predicted_s

    def measured(self, now: float) -> Measured:
        """For a load report."""
        if self._measured_at is None:
            return Measured()
        return Measured(seconds=min(self._faded_s(now), MAX_SECONDS), predicted_s=min(self._predicted_s, MAX_SECONDS))

    def _faded_s(self, now: float) -> float:
        idle_s = 0.0 if self._measured_at is None else max(0.0, now - self._measured_at)
        return self._predicted_s + (self._seconds - self._predicted_s) * math.pow(0.5, idle_s / self._half_life_s)
