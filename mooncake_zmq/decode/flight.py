"""The work in flight of a decode: one step or a run of steps of a batch. PURE."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_zmq.core.actor import CancelWork, Effect
from mooncake_zmq.decode.request import Request

RECENT = 0.8
"""Weight that earlier steps keep in `step_s` when another is measured."""


@dataclass(slots=True)
class Step:
    """A work of one or more steps."""

    work_id: int
    members: Sequence[Request]
    steps: int
    context: int
    """Tokens of KV that the first step reads."""
    begins_choice: bool = False
    """Whether a member chooses for the first time what it attends to: a copy of its KV is made first, in the step's time."""
    cancelled: bool = False


class Flight:
    """Hold at most one work at a time, and how long recent steps took."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.step_s = 0.0
        self.border_at = 0.0
        """When the previous step ended."""

    def begin(self, step: Step) -> None:
        """Record the work that begins."""
        self.step = step

    def end(self, now: float) -> Step:
        """Remove and return the work that ended."""
        step, self.step, self.border_at = self.step, None, now
        assert step is not None
        return step

    def measure(self, elapsed_s: float, made: int) -> None:
        """Record how long the `made` steps of a work took."""
        keep = RECENT**made if self.step_s else 0.0
        self.step_s = keep * self.step_s + (1 - keep) * (elapsed_s / made)

    def interrupt(self) -> list[Effect]:
        """Stop a run of steps at its next border, for a request that waits for its end."""
        step = self.step
        if step is None or step.steps == 1 or step.cancelled:
            return []
        step.cancelled = True
        return [CancelWork(step.work_id)]
