"""Order of a prefill's prompts: the same rule in the node and in the conductor's prediction. PURE.

A prompt gets its *rank* once, when it arrives: the time of its arrival, plus `overtake` times its own work, plus `priority_s`
for each step of priority. The prompt of the smallest rank computes its next chunk. So a short
prompt overtakes a long one that waits or runs, but none starves: a later prompt overtakes one of w seconds only if it arrives
within `overtake` * w (and `priority_s` for each step) after it and is shorter by as much. `overtake` 0 is first come, first
served.

A priority must not make a late prompt later: it puts a prompt before others that can still keep their SLO, and before none
that is late already (`priority_behind`). The conductor applies that, as it knows the SLOs.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Order:
    """`overtake`: seconds of later arrival that a prompt gives way for each second of its own work. `priority_s`: seconds of
    later arrival that one step of priority is worth (a larger number waits longer)."""

    overtake: float
    priority_s: float

    def rank(self, arrived_at: float, work_s: float, priority: int = 0) -> float:
        """Return a prompt's rank: the smaller goes first; of equals the one that came first."""
        return arrived_at + self.overtake * work_s + self.priority_s * priority

    def priority_behind(self, rank: float, arrived_at: float, work_s: float) -> int:
        """Return the earliest priority with which a prompt does not go before rank `rank`. Needs `priority_s` above 0."""
        priority = math.ceil((rank - arrived_at - self.overtake * work_s) / self.priority_s)
        return priority if self.rank(arrived_at, work_s, priority) >= rank else priority + 1  # sums are rounded
