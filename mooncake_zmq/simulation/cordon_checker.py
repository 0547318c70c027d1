"""Checks cordoned nodes: their work becomes less and less, and never more. Gateways use a cordoned conductor only where all are
cordoned, so for conductors it is the gateways' requests that are checked."""

from collections.abc import Sequence
from typing import Any

from mooncake_zmq.core.actor import CordonWanted, Effect, Event, PeerDown, PeerUp, Received, Send
from mooncake_zmq.core.messages import NodesReported, Schedule

HAS = {
    "gateway": ("requests_waiting", "requests_placing", "requests_prefilling", "requests_decoding"),
    "prefill": ("requests_waiting", "requests_running", "stages"),
    "decode": ("requests_waiting", "requests_running", "requests_closing"),
    "vllm": ("requests_waiting", "requests_running", "requests_closing"),
    "cache-node": ("leases", "pending_leases"),
}
"""The gauges of each role's work that is not over."""
IncarnationId = tuple[str, int]


class CordonChecker:
    """The remaining work of each cordoned incarnation, and, for each incarnation of a gateway, its conductors, whether they
    are cordoned and their models."""

    def __init__(self) -> None:
        self._left: dict[IncarnationId, float] = {}
        self._conductors: dict[IncarnationId, dict[str, bool]] = {}
        self._models: dict[str, str] = {}

    def observed(
        self, now: float, incarnation: IncarnationId, role: str, actor: Any, event: Event, effects: Sequence[Effect]
    ) -> str | None:
        """Check an event that an actor handled; return what is wrong, if anything."""
        wrong = self._uses_cordoned(incarnation, event, effects) if role == "gateway" else None
        return wrong or (self._has_more(now, incarnation, HAS[role], actor, event) if role in HAS else None)

    def _has_more(self, now: float, incarnation: IncarnationId, gauges: Sequence[str], actor: Any, event: Event) -> str | None:
        if type(event) is CordonWanted:
            self._left.pop(incarnation, None)
            if event.cordoned:
                self._left[incarnation] = float("inf")
        if incarnation not in self._left:
            return None
        levels = actor.gauges(now)
        before, left = self._left[incarnation], sum(levels[gauge] for gauge in gauges)
        self._left[incarnation] = left
        return f"{incarnation[0]} is cordoned and takes on more: {before:g} before, {left:g} now" if left > before else None

    def _uses_cordoned(self, incarnation: IncarnationId, event: Event, effects: Sequence[Effect]) -> str | None:
        conductors = self._conductors.setdefault(incarnation, {})
        match event:
            case PeerUp(peer, _, hello) if hello.role == "conductor":
                conductors[peer] = False
                self._models[peer] = hello.model
            case PeerDown(peer, _):
                conductors.pop(peer, None)
            case Received(sender, NodesReported(cordoned=cordoned)):
                conductors[sender] = cordoned
        open_models = {self._models[name] for name, cordoned in conductors.items() if not cordoned}
        if not open_models:
            return None
        asked = [effect.to for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Schedule)]
        wrong = next((to for to in asked if conductors[to] and self._models[to] in open_models), None)
        return wrong and f"{incarnation[0]} asks {wrong}, which is cordoned, where another is not"
