"""The wait of a batch's step for the masks of answers that follow grammars. PURE.

One process computes all masks while the step computes, and may take far longer than the step. Every answer in the batch pays
for the time that the step waits beyond its own, so the wait is a small share of it, and only for answers whose masks come in
time. An answer whose mask is late gets its token when the mask arrives, sits out the steps until then, and joins the batch
again.
"""

from typing import Final

SHARE: Final = 0.1
"""Longest wait as a share of a step's time."""
LEAST_S: Final = 0.002
"""Shortest wait: the delay of even a trivial mask through two processes and a thread."""


def mask_s(step_s: float, *, constrained: bool, was_late: bool) -> float:
    """Return how long a step that takes `step_s` waits for an answer's mask. `was_late`: the previous step waited for this
    answer in vain."""
    return max(LEAST_S, SHARE * step_s) if constrained and not was_late else 0.0
