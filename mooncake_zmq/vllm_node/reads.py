"""Answers that the parsers of the vLLM beside a node read for gateways: a queue, one at a time. PURE.

Reading takes time of vLLM's HTTP server, which streams the tokens of all its requests too. It reads one answer at a time, and
after that nothing for as long: at most half of its time goes there.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from mooncake_zmq.core.actor import (
    CancelWork,
    DrainTimedOut,
    Effect,
    Event,
    PeerDown,
    PeerUp,
    Received,
    Send,
    SetTimer,
    Start,
    TimerFired,
    WorkDone,
)
from mooncake_zmq.core.actor_parts import Ids, Tally
from mooncake_zmq.core.messages import AnswerRead, AnswerUnread, Hello, Parsers, ParsersReported, ReadAnswer, clip
from mooncake_zmq.core.work import ReadTokens, TokensRead, WorkFailed
from mooncake_zmq.vllm_node.gateway_call import GatewayCall

PAUSED: Final = ("read",)


_Read = GatewayCall[ReadAnswer]


class Reads:
    """Calls that one vLLM serves or is to serve, and the parsers that gateways know it to have."""

    def __init__(self, most: int, peers: Mapping[str, Hello], ids: Ids, counts: Tally) -> None:
        """`most`: calls that may wait."""
        self._most = most
        self._peers = peers
        self._ids = ids
        self._counts = counts
        self._parsers: Parsers | None = None
        self._waiting: OrderedDict[tuple[str, str], _Read] = OrderedDict()
        """The latest call for each request, by gateway and request."""
        self._work: int | None = None
        self._running: _Read | None = None
        self._paused = False

    def __len__(self) -> int:
        """Return the calls that have no answer yet."""
        return len(self._waiting) + (self._work is not None)

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Handle the part of an event that concerns reading."""
        match event:
            case Received(sender, ReadAnswer() as message):
                return self._on_asked(now, sender, message)
            case WorkDone(work_id, TokensRead() | WorkFailed() as result) if work_id == self._work:
                return self._on_done(now, result)
            case TimerFired(key) if key == PAUSED:
                self._paused = False
                return self._begin(now)
            case PeerUp(peer, _, hello) if hello.role == "gateway":
                return self._report([peer])
            case PeerDown(peer, _):
                for key in [key for key in self._waiting if key[0] == peer]:
                    del self._waiting[key]
            case DrainTimedOut():
                return self._end_all()
        return []

    @property
    def knows_parsers(self) -> bool:
        """Whether vLLM has ever said which parsers it has."""
        return self._parsers is not None

    def learn(self, parsers: Parsers | None) -> list[Effect]:
        """Note the parsers of vLLM, None being nothing new, and send a change to the gateways."""
        if parsers is None or parsers == self._parsers:
            return []
        self._parsers = parsers
        return self._report(name for name, hello in self._peers.items() if hello.role == "gateway")

    def check(self) -> None:
        """Assert what always holds."""
        assert len(self._waiting) <= self._most
        assert (self._work is None) == (self._running is None)

    def dump(self) -> dict[str, Any]:
        """Return what is waiting, JSON-able."""
        return {"parsers": repr(self._parsers), "waiting": [request for _, request in self._waiting], "runs": self._work}

    def _report(self, gateways: Iterable[str]) -> list[Effect]:
        parsers = self._parsers
        return [] if parsers is None else [Send(gateway, ParsersReported(parsers=parsers)) for gateway in gateways]

    def _on_asked(self, now: float, gateway: str, message: ReadAnswer) -> list[Effect]:
        hello = self._peers.get(gateway)
        if hello is None or hello.role != "gateway":
            self._counts.add("unasked_requests")
            return []
        if len(message.prompt) % 4 or len(message.tokens) % 4:
            return [_unread(gateway, message, "what it is to read are no tokens")]
        key = (gateway, message.request_id)
        before = self._waiting.get(key)
        if before is not None and before.message.call >= message.call:
            return []
        if before is None and len(self._waiting) >= self._most:
            self._counts.add("reads_refused")
            return [_unread(gateway, message, "too many answers wait to be read")]
        self._waiting[key] = _Read(gateway, message, now)
        return self._begin(now)

    def _end_all(self) -> list[Effect]:
        """End all calls, so that the gateways turn to another vLLM."""
        left = [_unread(read.gateway, read.message, "the node is leaving") for read in self._waiting.values()]
        self._waiting.clear()
        return [*left, *([] if self._work is None else [CancelWork(self._work)])]

    def _begin(self, now: float) -> list[Effect]:
        """Read the next answer: those of which nothing was read yet come first."""
        if self._work is not None or self._paused:
            return []
        for key in [key for key, read in self._waiting.items() if read.left_s(now) <= 0]:
            del self._waiting[key]
        if not self._waiting:
            return []
        key = min(self._waiting, key=lambda each: bool(self._waiting[each].message.state))
        self._running = read = self._waiting.pop(key)
        self._work, read.began_at = self._ids.new(), now
        message = read.message
        work = ReadTokens(message.chat, message.prompt, message.tokens, message.state, message.end, message.whole)
        return [Start(self._work, work, read.left_s(now))]

    def _on_done(self, now: float, result: TokensRead | WorkFailed) -> list[Effect]:
        read = self._running
        assert read is not None
        self._work = self._running = None
        self._paused = True
        pause = SetTimer(PAUSED, now - read.began_at)
        if isinstance(result, WorkFailed):
            self._counts.add("reads_failed")
            return [_unread(read.gateway, read.message, result.reason), pause]
        self._counts.add("reads")
        request_id, call = read.message.request_id, read.message.call
        answer = AnswerRead(
            request_id=request_id,
            call=call,
            reasoning=result.reasoning,
            text=result.text,
            calls=result.calls,
            state=result.state,
        )
        return [Send(read.gateway, answer), pause]


def _unread(gateway: str, message: ReadAnswer, reason: str) -> Send:
    return Send(gateway, AnswerUnread(request_id=message.request_id, call=message.call, reason=clip(reason)))
