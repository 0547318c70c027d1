"""Requests that draining nodes want to be placed elsewhere. PURE.

A place is asked for while the attempt under way goes on. If there is one, the next attempt begins there from the tokens so far,
without a pause, and counts neither as a failure nor as a try. If there is none, the request stays until its node asks again.
"""

from collections.abc import Callable, Mapping

from mooncake_zmq.core.actor import Effect, Send, SetTimer
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import Hello, Placed, PlaceElsewhere, Rejected, RejectReason, RequestEnded, has_field
from mooncake_zmq.gateway.requests.client_events import ClientRequest
from mooncake_zmq.gateway.requests.readiness import Readiness, is_for
from mooncake_zmq.gateway.requests.renderings import takes_images
from mooncake_zmq.gateway.requests.request import PLACED, Request


class Relocations:
    """Relocate the requests of one gateway. `let_go` cancels the attempt under way of a request."""

    def __init__(
        self,
        requests: Mapping[str, Request],
        peers: Mapping[str, Hello],
        readiness: Readiness,
        stall_s: float,
        *,
        counts: Tally,
        let_go: Callable[[Request], list[Effect]],
    ) -> None:
        self._requests = requests
        self._peers = peers
        self._readiness = readiness
        self._stall_s = stall_s
        self._counts = counts
        self._let_go = let_go

    def on_wanted(self, now: float, sender: str, message: PlaceElsewhere) -> list[Effect]:
        """Ask the conductor for other places, for the attempts under way at the sender for which that is not asked already."""
        effects: list[Effect] = []
        for request_id, attempt in message.attempts:
            request = self._requests.get(request_id)
            if request is None or request.attempt != attempt or request.state not in PLACED or request.asked is not None:
                continue
            conductor = self._readiness.conductor(self._peers, request.client.model)
            if conductor and sender in (request.decode, request.handing_off):
                effects.append(Send(conductor, request.ask(now, conductor, sender)))
        return effects

    def on_placed(self, now: float, sender: str, placed: Placed) -> list[Effect] | None:
        """Continue a request at another place; None if this is not the answer to such a question."""
        request = self._asking(sender, placed)
        if request is None or request.asked is None:
            return None
        asked = request.asked
        if asked.node in (placed.prefill, placed.decode) or absent(self._peers, placed, request.client):
            return self.give_up(request)
        request.asked = None
        effects = self._let_go(request)
        request.continue_at(now, asked, placed)
        self._counts.add("requests_relocated")
        stall = SetTimer(("stall", request.request_id), self._stall_s)
        return [*effects, stall, Send(placed.prefill, request.start(now, placed, ()))]

    def on_rejected(self, sender: str, rejected: Rejected) -> bool:
        """Leave a request where it is if there is no other place; return whether this is the answer to such a question."""
        request = self._asking(sender, rejected)
        if request is not None:
            request.asked = None
            self._counts.add("relocations_rejected")
        return request is not None

    def give_up(self, request: Request) -> list[Effect]:
        """Forget the question about a request whose attempt ends before the answer, or that stays."""
        asked, request.asked = request.asked, None
        if asked is None or asked.conductor not in self._peers:
            return []
        return [Send(asked.conductor, RequestEnded(request_id=request.request_id, attempt=asked.attempt))]

    def peer_down(self, peer: str) -> None:
        """Forget the questions that this peer would have answered, if it was a conductor."""
        for request in self._requests.values():
            if request.asked is not None and request.asked.conductor == peer:
                request.asked = None

    def _asking(self, sender: str, answer: Placed | Rejected) -> Request | None:
        request = self._requests.get(answer.request_id)
        asked = request.asked if request is not None else None
        return request if asked is not None and (asked.conductor, asked.attempt) == (sender, answer.attempt) else None


def absent(peers: Mapping[str, Hello], placed: Placed, client: ClientRequest) -> tuple[str, RejectReason] | None:
    """Return a node of a placement that is unknown here, down, of another role or model by now, or of a release or kind that
    does not do what the client asks, and as what it is missed."""
    wanted = (("prefill", placed.prefill, RejectReason.NO_PREFILL), ("decode", placed.decode, RejectReason.NO_DECODE))
    for role, node, missing in wanted:
        peer = peers.get(node)
        if peer is None or peer.role not in (role, "vllm") or not is_for(peer, client.model):
            return node, missing
        if client.images and not takes_images(peer, client.model):
            return node, missing
        if client.eviction is not None and (peer.role == "vllm" or not has_field(peer.protocol, "StartPrefill.eviction")):
            return node, missing
    return None
