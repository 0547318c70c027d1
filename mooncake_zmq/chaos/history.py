"""The faults of a run and their times, which excuse a broken stream and explain a pause."""

from collections.abc import Iterable
from dataclasses import dataclass

from mooncake_zmq.chaos.plan import Fault


@dataclass(slots=True)
class Done:
    """One fault as it was carried out, by a monotonic clock. It ends when the cluster is whole again."""

    fault: Fault
    disturbed: tuple[str, ...]
    """The nodes that it killed, stopped or drained."""
    began_at: float
    ended_at: float = float("inf")
    what: str = ""
    """The result, in words for the operator."""

    def overlaps(self, start: float, stop: float) -> bool:
        return self.began_at <= stop and self.ended_at >= start


class History:
    """All faults so far, oldest first."""

    def __init__(self) -> None:
        self.done: list[Done] = []

    def begin(self, fault: Fault, disturbed: tuple[str, ...], now: float) -> Done:
        """Note that a fault begins; the caller sets its end."""
        entry = Done(fault, disturbed, now)
        self.done.append(entry)
        return entry

    def disturbed(self, node: str, start: float, stop: float) -> bool:
        """Return whether `node` itself was killed, stopped or drained at any time in between."""
        return any(node in entry.disturbed for entry in self.outages(start, stop))

    def outages(self, start: float, stop: float) -> Iterable[Done]:
        """Return the outages in between."""
        return [entry for entry in self.done if entry.fault.kind.is_outage and entry.overlaps(start, stop)]
