"""Chats with images that the vLLM beside a node writes as tokens for gateways: a queue that tenants share. PURE.

vLLM decodes and cuts the images in threads of its own, beside the requests that it computes.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mooncake_zmq.core.actor import CancelWork, DrainTimedOut, Effect, Event, PeerDown, Received, Send, Start, WorkDone
from mooncake_zmq.core.actor_parts import Ids, Tally
from mooncake_zmq.core.messages import CancelRequest, ChatRendered, ChatUnrendered, Hello, RenderChat, clip
from mooncake_zmq.core.turns import Shares
from mooncake_zmq.core.work import ChatWritten, WorkFailed, WriteChat
from mooncake_zmq.vllm_node.gateway_call import GatewayCall

AT_ONCE: Final = 2
"""Chats that vLLM writes at the same time."""
MOST_BYTES: Final = 64 << 20
"""Bytes of all chats that wait, of which one tenant may have half; a further one is refused."""


_Render = GatewayCall[RenderChat]


class Renders:
    """Calls that one vLLM serves or is to serve."""

    def __init__(self, most: int, peers: Mapping[str, Hello], ids: Ids, counts: Tally) -> None:
        """`most`: calls that may wait."""
        self._most = most
        self._peers = peers
        self._ids = ids
        self._counts = counts
        self._waiting: OrderedDict[tuple[str, str], _Render] = OrderedDict()
        """The latest call for each request, by gateway and request."""
        self._works: dict[int, _Render] = {}
        self._shares: Shares[str] = Shares()
        """vLLM's time by tenant."""

    def __len__(self) -> int:
        """Return the calls that have no answer yet."""
        return len(self._waiting) + len(self._works)

    def handle(self, now: float, event: Event, trouble: str = "") -> list[Effect]:
        """Handle the part of an event that concerns writing chats. `trouble`: why vLLM is lost; empty: it is not."""
        match event:
            case Received(sender, RenderChat() as message):
                return self._on_asked(now, sender, message, trouble)
            case WorkDone(work_id, ChatWritten() | WorkFailed() as result) if work_id in self._works:
                render = self._works.pop(work_id)
                self._shares.charge(render.message.tenant, now - render.began_at)
                return [self._answered(render, result), *self._begin(now)]
            case Received(sender, CancelRequest(request_id)):
                self._remove((sender, request_id))
                return [CancelWork(work_id) for work_id, each in self._works.items() if each.is_of(sender, request_id)]
            case PeerDown(peer, _):
                for key in [key for key in self._waiting if key[0] == peer]:
                    self._remove(key)
            case DrainTimedOut():
                left = [_unrendered(render, "the node is leaving") for render in self._waiting.values()]
                for key in list(self._waiting):
                    self._remove(key)
                return [*left, *map(CancelWork, self._works)]
        return []

    def check(self) -> None:
        """Assert what always holds."""
        assert len(self._waiting) <= self._most
        assert len(self._works) <= AT_ONCE
        assert not self._waiting or len(self._works) == AT_ONCE
        assert (self._shares.first() is None) == (not self._waiting)

    def dump(self) -> dict[str, Any]:
        """Return what is waiting, JSON-able."""
        return {"waiting": [request for _, request in self._waiting], "runs": list(self._works)}

    def _on_asked(self, now: float, gateway: str, message: RenderChat, trouble: str) -> list[Effect]:
        hello = self._peers.get(gateway)
        if hello is None or hello.role != "gateway":
            self._counts.add("unasked_requests")
            return []
        key = (gateway, message.request_id)
        before = self._waiting.get(key)
        if before is not None and before.message.call >= message.call:
            return []
        render = _Render(gateway, message, now)
        if trouble:
            return [_unrendered(render, trouble)]
        others = [each for each in self._waiting.values() if each is not before]
        own = [each for each in others if each.message.tenant == message.tenant]
        if not (self._has_room(others, message, 1) and (len(own) == len(others) or self._has_room(own, message, 2))):
            self._counts.add("renders_refused")
            return [_unrendered(render, "too many chats wait to be written")]
        self._remove(key)
        self._waiting[key] = render
        self._shares.wait(message.tenant)
        return self._begin(now)

    def _has_room(self, renders: Sequence[_Render], message: RenderChat, divisor: int) -> bool:
        """Return whether one more chat waits beside these within a part of the queue."""
        held = sum(len(each.message.chat) for each in renders) + len(message.chat)
        return held <= MOST_BYTES // divisor and len(renders) < max(1, self._most // divisor)

    def _remove(self, key: tuple[str, str]) -> None:
        """Remove a call from the queue, if it is there."""
        render = self._waiting.pop(key, None)
        if render is not None and all(each.message.tenant != render.message.tenant for each in self._waiting.values()):
            self._shares.rest(render.message.tenant)

    def _begin(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._waiting and len(self._works) < AT_ONCE:
            first = self._shares.first()
            key, render = next(pair for pair in self._waiting.items() if pair[1].message.tenant == first)
            self._remove(key)
            if render.left_s(now) > 0:
                work_id, render.began_at = self._ids.new(), now
                self._works[work_id] = render
                effects.append(Start(work_id, WriteChat(render.message.chat), render.left_s(now)))
        return effects

    def _answered(self, render: _Render, result: ChatWritten | WorkFailed) -> Send:
        if isinstance(result, WorkFailed):
            self._counts.add("renders_failed")
            return _unrendered(render, result.reason, refused=result.stuck)
        self._counts.add("renders")
        message = render.message
        rendered = ChatRendered(request_id=message.request_id, call=message.call, tokens=result.tokens, images=result.images)
        return Send(render.gateway, rendered)


def _unrendered(render: _Render, reason: str, *, refused: bool = False) -> Send:
    message = render.message
    unrendered = ChatUnrendered(request_id=message.request_id, call=message.call, reason=clip(reason), refused=refused)
    return Send(render.gateway, unrendered)
