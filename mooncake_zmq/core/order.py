"""Which prompt a prefill computes next, and what a new one finds ahead of it: one rule for the node that keeps it and for the
conductor that predicts it. PURE.

A prompt gets its *rank* once, when it arrives: the time of its arrival, plus `overtake` times its own work, plus `priority_s`
for each step of priority. The smallest rank computes its next chunk. So a short prompt overtakes a long one that waits or runs,
but nobody starves: of those that come later only such overtake a prompt of w seconds as arrive within `overtake` * w (and
`priority_s` for each step) after it and are shorter by as much. `overtake` 0 is first come, first served.

The right to a priority is no right to make what is broken worse: it takes a prompt before others that can still keep what they
were promised, and before none that is late already (`priority_behind`). Who knows the promises, the conductor, applies that.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Order:
    """`overtake`: seconds of later arrival that a prompt gives way for each second of its own work. `priority_s`: seconds of
    later arrival that one step of priority is worth (a larger number waits longer)."""

    overtake: float
    priority_s: float

    def rank(self, arrived_at: float, work_s: float, priority: int = 0) -> float:
        """The smaller goes first; of equals the one that came first."""
        return arrived_at + self.overtake * work_s + self.priority_s * priority

    def priority_behind(self, rank: float, arrived_at: float, work_s: float) -> int:
        """The earliest priority by which a prompt does not go before another one of this rank. Needs `priority_s` above 0."""
        priority = math.ceil((rank - arrived_at - self.overtake * work_s) / self.priority_s)
        return priority if self.rank(arrived_at, work_s, priority) >= rank else priority + 1  # as sums are rounded


def work_ahead_s(jobs: Iterable[tuple[float, float]], rank: float) -> float:
    """Seconds of work that a job of this rank finds ahead of it; `jobs`: (rank, seconds left) of those that are there."""
    return sum(left_s for other, left_s in jobs if other <= rank)
