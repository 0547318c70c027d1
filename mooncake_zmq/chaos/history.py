"""What was done to the cluster, and when: the excuse that a stream may have, and what a pause is blamed on."""

from collections.abc import Iterable
from dataclasses import dataclass

from mooncake_zmq.chaos.plan import Fault


@dataclass(slots=True)
class Done:
    """One fault as it was carried out, by a monotonic clock. It ends when what it took away is whole again."""

    fault: Fault
    disturbed: tuple[str, ...]
    """Nodes that were killed, stopped or drained by it."""
    began_at: float
    ended_at: float = float("inf")
    what: str = ""
    """What came of it, for people."""

    def overlaps(self, start: float, stop: float) -> bool:
        return self.began_at <= stop and self.ended_at >= start


class History:
    """Everything done so far, oldest first."""

    def __init__(self) -> None:
        self.done: list[Done] = []

    def begin(self, fault: Fault, disturbed: tuple[str, ...], now: float) -> Done:
        """Note that a fault begins; whoever carries it out sets its end."""
        entry = Done(fault, disturbed, now)
        self.done.append(entry)
        return entry

    def disturbed(self, node: str, start: float, stop: float) -> bool:
        """Was `node` itself killed, stopped or drained at any time in between?"""
        return any(node in entry.disturbed for entry in self.outages(start, stop))

    def outages(self, start: float, stop: float) -> Iterable[Done]:
        """Those that took something away in between."""
        return [entry for entry in self.done if entry.fault.kind.is_outage and entry.overlaps(start, stop)]
