"""The decode's work in flight: one step or a run of steps of a batch. PURE."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_zmq.core.actor import CancelWork, Effect
from mooncake_zmq.decode.request import Request

RECENT = 0.8
"""Share that earlier steps keep in `step_s` once another is measured."""


@dataclass(slots=True)
class Step:
    """One work."""

    work_id: int
    members: Sequence[Request]
    steps: int
    context: int
    """Tokens of KV that its first step reads."""
    cancelled: bool = False


class Flight:
    """At most one work at a time, and how long steps have taken lately."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.step_s = 0.0
        self.border_at = 0.0
        """When the last step ended."""

    def begin(self, step: Step) -> None:
        """Note the work that begins."""
        self.step = step

    def end(self, now: float) -> Step:
        """Return the work that ended."""
        step, self.step, self.border_at = self.step, None, now
        assert step is not None
        return step

    def measure(self, elapsed_s: float, made: int) -> None:
        """Note how long the `made` steps of a work took."""
        keep = RECENT**made if self.step_s else 0.0
        self.step_s = keep * self.step_s + (1 - keep) * (elapsed_s / made)

    def interrupt(self) -> list[Effect]:
        """Have a run of steps stop at its next border, for a request that waits for its end."""
        step = self.step
        if step is None or step.steps == 1 or step.cancelled:
            return []
        step.cancelled = True
        return [CancelWork(step.work_id)]
