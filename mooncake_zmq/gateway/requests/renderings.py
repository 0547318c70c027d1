"""Chats with images, which a vLLM writes as tokens before they are requests. PURE.

One call for each is under way at a time. One that fails is made again at another vLLM, up to `TRIES` calls in all. Nothing is
lost, as the chat is here. What a vLLM refuses is an error of the client's.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from mooncake_zmq.core.actor import (
    CancelTimer,
    DrainTimedOut,
    DrainWanted,
    Effect,
    Event,
    FromClient,
    PeerDown,
    PeerUp,
    Received,
    Send,
    SetTimer,
    TimerFired,
    ToClient,
)
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import CancelRequest, ChatRendered, ChatUnrendered, Hello, Image, RenderChat, has_field
from mooncake_zmq.gateway.requests.client_events import ChatToRender, ClientGone, Failed, Rendered
from mooncake_zmq.gateway.requests.readiness import is_for
from mooncake_zmq.gateway.settings import RequestsSettings
from mooncake_zmq.kv.layout import BlockLayout

TIMER: Final = "render"
"""The first part of the key of a chat's timer: for the call under way, a pause, or the wait for a vLLM."""
RENDER_S: Final = 30.0
"""How long a call may take."""
TRIES: Final = 5
"""Calls in a row that may fail, of which one may fail by taking too long."""
AGAIN_S: Final = 0.2
"""The pause after the first failed call, doubled for each further one: 3 s in all, in which a vLLM may be found lost."""
NONE_THERE: Final = "no vLLM that takes images is there to serve the request"
IMAGES: Final = "StartPrefill.images"


def takes_images(peer: Hello | None, model: str) -> bool:
    """Return whether a node serves requests with images for a model."""
    return peer is not None and peer.role == "vllm" and is_for(peer, model) and has_field(peer.protocol, IMAGES)


@dataclass(slots=True)
class _Chat:
    """One chat that is being written."""

    request_id: str
    client: ChatToRender
    node: str = ""
    """The node that has the call; empty: none is under way."""
    call: int = 0
    failed: int = 0
    avoid: str = ""
    waits: bool = False
    """Whether there is no vLLM to ask."""
    paused: bool = False
    was_late: bool = False
    """Whether a call took too long."""


class Renderings:
    """All chats of one gateway that vLLMs are writing."""

    def __init__(
        self,
        peers: Mapping[str, Hello],
        layouts: Mapping[str, BlockLayout],
        settings: RequestsSettings,
        counts: Tally,
        closed: Callable[[], Collection[str]],
    ) -> None:
        """`closed`: returns the nodes that accept no new requests, as far as it is known."""
        self._peers = peers
        self._closed = closed
        self._layouts = layouts
        self._counts = counts
        self._most = settings.max_open
        self._wait_s = settings.placement_wait_s
        self._open: dict[str, _Chat] = {}
        self._last = ""
        """The node that was asked last."""
        self._draining = False

    def __len__(self) -> int:
        """Return the number of chats that are being written."""
        return len(self._open)

    def handle(self, event: Event) -> list[Effect]:
        """Handle the part of an event that concerns writing chats; peers are those after the event."""
        match event:
            case FromClient(request_id, ChatToRender() as client):
                return self._on_client(request_id, client)
            case Received(sender, ChatRendered() as message) if (chat := self._asked(sender, message)) is not None:
                return self._on_rendered(chat, message)
            case Received(sender, ChatUnrendered() as message) if (chat := self._asked(sender, message)) is not None:
                return self._refuse(chat, message.reason) if message.refused else self._on_failed(chat, message.reason)
            case FromClient(request_id, ClientGone()) if request_id in self._open:
                return self._abandon(self._open[request_id])
            case PeerUp():
                return [effect for chat in list(self._open.values()) if chat.waits for effect in self._ask(chat)]
            case PeerDown(peer, _):
                lost = [chat for chat in self._open.values() if chat.node == peer]
                return [effect for chat in lost for effect in self._on_failed(chat, "its vLLM was lost")]
            case TimerFired((name, str(request_id))) if name == TIMER and request_id in self._open:
                return self._on_timer(self._open[request_id])
            case DrainWanted():
                self._draining = True
            case DrainTimedOut():
                left = Failed(status=503, code="gateway_stopped", message="the gateway stops", retry_after_s=1.0)
                chats = list(self._open.values())
                return [effect for chat in chats for effect in (ToClient(chat.request_id, left), *self._abandon(chat))]
        return []

    def check(self) -> None:
        """Assert what always holds."""
        assert len(self._open) <= self._most
        for chat in self._open.values():
            assert bool(chat.node) + chat.waits + chat.paused == 1
            assert chat.failed < TRIES

    def _on_client(self, request_id: str, client: ChatToRender) -> list[Effect]:
        if request_id in self._open:
            return []
        if self._draining or len(self._open) >= self._most:
            why = "the gateway is draining: try another one" if self._draining else "too many chats with images"
            return [ToClient(request_id, Failed(status=503, code="overloaded", message=why, retry_after_s=1.0))]
        chat = self._open[request_id] = _Chat(request_id, client)
        self._counts.add("renders")
        return self._ask(chat)

    def _ask(self, chat: _Chat) -> list[Effect]:
        """Ask the vLLM with the fewest chats of this gateway, by turns, and none that failed or is closed if another is there;
        or wait for one."""
        chat.paused = False
        there = [name for name, peer in self._peers.items() if takes_images(peer, chat.client.model)]
        if not there:
            began, chat.waits = not chat.waits, True
            return [SetTimer((TIMER, chat.request_id), self._wait_s)] if began else []
        busy = [each.node for each in self._open.values()]
        closed, last = self._closed(), self._last
        chat.waits = False
        chat.node = min(there, key=lambda name: (name == chat.avoid, name in closed, busy.count(name), name <= last, name))
        self._last = chat.node
        chat.call += 1
        message = RenderChat(
            request_id=chat.request_id,
            call=chat.call,
            deadline_s=RENDER_S,
            chat=chat.client.chat,
            tenant=chat.client.tenant,
        )
        return [SetTimer((TIMER, chat.request_id), RENDER_S), Send(chat.node, message)]

    def _asked(self, sender: str, answer: ChatRendered | ChatUnrendered) -> _Chat | None:
        """Return the chat, if this node has its call under way."""
        chat = self._open.get(answer.request_id)
        if chat is None or (chat.node, chat.call) != (sender, answer.call):
            self._counts.add("stale_renders")
            return None
        return chat

    def _on_timer(self, chat: _Chat) -> list[Effect]:
        if chat.waits:
            return self._fail(chat, Failed(status=503, code="no_vllm", message=NONE_THERE, retry_after_s=2.0))
        if chat.paused:
            return self._ask(chat)
        if chat.was_late:
            return self._give_up(chat, "it did not answer in time")
        chat.was_late = True
        return self._on_failed(chat, "it did not answer in time")

    def _on_rendered(self, chat: _Chat, message: ChatRendered) -> list[Effect]:
        layout = self._layouts.get(chat.client.model)
        if layout is None or not layout.has_tokens(message.tokens) or not _fits(message.tokens, message.images):
            return self._on_failed(chat, "it wrote images that are not in its tokens")
        if len(message.images) != chat.client.images:
            return self._refuse(chat, f"the chat's template writes {len(message.images)} of {chat.client.images} images")
        return [ToClient(chat.request_id, Rendered(message.tokens, message.images)), *self._close(chat)]

    def _on_failed(self, chat: _Chat, reason: str) -> list[Effect]:
        self._counts.add("renders_in_vain")
        if chat.failed + 1 >= TRIES:
            return self._give_up(chat, reason)
        chat.failed += 1
        chat.avoid, chat.node, chat.paused = chat.node, "", True
        return [SetTimer((TIMER, chat.request_id), AGAIN_S * 2.0 ** (chat.failed - 1))]

    def _give_up(self, chat: _Chat, reason: str) -> list[Effect]:
        why = f"vLLM did not write the chat as tokens in {chat.failed + 1} calls ({reason})"
        return self._fail(chat, Failed(status=503, code="render_failed", message=why, retry_after_s=2.0))

    def _refuse(self, chat: _Chat, reason: str) -> list[Effect]:
        return self._fail(chat, Failed(status=400, code="invalid_value", message=reason))

    def _fail(self, chat: _Chat, failed: Failed) -> list[Effect]:
        self._counts.add(f"renders_failed[code={failed.code}]")
        return [ToClient(chat.request_id, failed), *self._close(chat)]

    def _abandon(self, chat: _Chat) -> list[Effect]:
        """Close a chat whose answer is of no use any more, also at the node that has its call."""
        cancel = CancelRequest(request_id=chat.request_id, attempt=chat.call)
        return [*([Send(chat.node, cancel)] if chat.node else []), *self._close(chat)]

    def _close(self, chat: _Chat) -> list[Effect]:
        del self._open[chat.request_id]
        return [CancelTimer((TIMER, chat.request_id))]


def _fits(tokens: bytes, images: tuple[Image, ...]) -> bool:
    """Return whether images are in these tokens one after the other."""
    ends = [image.begin + image.length for image in images]
    return all(end <= image.begin for end, image in zip([0, *ends], images, strict=False)) and 4 * max(ends, default=0) <= len(
        tokens
    )
