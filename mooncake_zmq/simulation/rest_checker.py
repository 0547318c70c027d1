"""Watches those that an operator has rest: what they have becomes less and less, and never more."""

from typing import Any

from mooncake_zmq.core.actor import Event, RestWanted

HAS = {
    "prefill": ("requests_waiting", "requests_running", "stages"),
    "decode": ("requests_waiting", "requests_running", "requests_closing"),
    "vllm": ("requests_waiting", "requests_running", "requests_closing"),
    "cache-node": ("leases", "pending_leases"),
}
"""By role: the gauges of what was asked of a node and is not over."""


class RestChecker:
    """By life: how much each that rests had left."""

    def __init__(self) -> None:
        self._left: dict[tuple[str, int], float] = {}

    def observed(self, now: float, name: str, incarnation: int, role: str, actor: Any, event: Event) -> str | None:
        """An actor handled an event: what is wrong with that, if anything."""
        life = name, incarnation
        if type(event) is RestWanted:
            self._left.pop(life, None)
            if event.resting:
                self._left[life] = float("inf")
        if life not in self._left:
            return None
        gauges = actor.gauges(now)
        before, left = self._left[life], sum(gauges[gauge] for gauge in HAS[role])
        self._left[life] = left
        return f"{name} rests and takes on more: {before:g} before, {left:g} now" if left > before else None
