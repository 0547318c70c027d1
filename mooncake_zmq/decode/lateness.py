"""The wait of a batch's step for decodes that hold KV of some of its sequences. PURE.

Every sequence of the batch pays for the time that a step waits for a lender, so the wait is a few times what steps take anyway.
A sequence whose lender has not answered by then is late: it gets no token of that step, sits out, and is tried again every
`AGAIN_S`, which costs the others nothing while the lender stands still. One that is late for `DecodeSettings.lender_timeout_s`
goes on at another decode.
"""

from typing import Final

STEPS: Final = 4.0
"""Longest wait of a step for lenders in all, as a multiple of what recent steps took."""
LEAST_S: Final = 0.25
"""The least of that time: a lender's thread may get no CPU for some tens of milliseconds in each of several layers."""
AGAIN_S: Final = 0.2
"""Time after which a late sequence is tried again."""


def lenders_s(step_s: float, timeout_s: float) -> float:
    """Return how long a step waits for all lenders together, where recent steps took `step_s`."""
    return min(timeout_s, max(LEAST_S, STEPS * step_s))
