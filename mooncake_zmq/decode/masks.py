"""How long a step of the batch waits for what may come next in answers that follow grammars. PURE.

That is found out for all of them by one process, while the step computes, and may take far longer than the step. Whatever the
step waits beyond its own time all answers in the batch pay for, so that it is a small part of it, and is spent on those alone
that keep up: an answer that does not gets its token when its mask is there, and joins the batch again then. The steps until
then it sits out.
"""

from typing import Final

SHARE: Final = 0.1
"""Of a step's time."""
LEAST_S: Final = 0.002
"""A mask that takes next to nothing comes so late through two processes and a thread."""


def mask_s(step_s: float, *, constrained: bool, was_late: bool) -> float:
    """How long a step that takes `step_s` waits for an answer's mask. `was_late`: one waited for its last mask in vain."""
    return max(LEAST_S, SHARE * step_s) if constrained and not was_late else 0.0
