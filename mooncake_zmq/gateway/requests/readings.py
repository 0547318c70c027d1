"""Answers that the parsers of vLLMs read: their tokens are held here until they are read, then both go to the client. PURE.

Tokens of an answer that is read once, when it is complete, go to the client's call as they come: it gathers them.

One call for each answer is under way at a time. The next one has all tokens that arrived meanwhile, after a pause as long
as the call took, as vLLM parses the whole answer again each time. A call that fails is made again at another vLLM with the same
parsers: the state that it continues from is here. After `TRIES` in vain the text is passed on as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from mooncake_zmq.core.actor import (
    CancelTimer,
    DrainTimedOut,
    Effect,
    Event,
    FromClient,
    PeerDown,
    Received,
    Send,
    SetTimer,
    TimerFired,
    ToClient,
)
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import (
    MAX_READ_BYTES,
    AnswerRead,
    AnswerUnread,
    End,
    Hello,
    Parsers,
    ParsersReported,
    ReadAnswer,
)
from mooncake_zmq.gateway.requests.client_events import (
    ClientGone,
    ClientOutput,
    ClientRequest,
    Failed,
    Finished,
    Reading,
    StopFound,
    TextRead,
    TextUnread,
    TokenOut,
)
from mooncake_zmq.gateway.requests.readiness import is_for
from mooncake_zmq.kv.block_hash import pack_tokens

TIMER: Final = "read"
"""The first part of the key of an answer's timer: for the call under way, a pause, or the wait for a vLLM."""
READ_S: Final = 10.0
"""How long a call may take, and how long an answer waits for a vLLM with its parsers."""
TRIES: Final = 3
"""Calls in a row that may fail."""
AGAIN_S: Final = 0.2
"""The pause after a failed call."""
NONE_THERE = "no vLLM with its parsers is connected"


MESSAGES: Final = frozenset((ParsersReported, AnswerRead, AnswerUnread))
OPENS: Final = frozenset((FromClient, PeerDown))
"""Types of the events that concern it too, even if no answer is being read."""


@dataclass(slots=True)
class _Answer:
    """One answer that is being read."""

    request_id: str
    client: ClientRequest
    reading: Reading
    held: list[TokenOut] = field(default_factory=list)
    """Tokens that are not read yet; the client has those of an answer that is read whole."""
    end: Finished | None = None
    state: bytes = b""
    call: int = 0
    """The number of the last call."""
    node: str = ""
    """The node that has the call; empty: none is under way."""
    asked: int = 0
    """How many of the held tokens it has."""
    asked_end: bool = False
    began_at: float = 0.0
    paused: bool = False
    waits: bool = False
    """Whether there is no vLLM to ask."""
    failed: int = 0
    """Calls in a row that failed."""
    avoid: str = ""


class Readings:
    """All answers of one gateway that vLLMs read, and the parsers of the connected vLLMs."""

    def __init__(self, peers: dict[str, Hello], counts: Tally) -> None:
        self._peers = peers
        self._counts = counts
        self._parsers: dict[str, Parsers] = {}
        """Those that each connected node has reported."""
        self._open: dict[str, _Answer] = {}

    def __len__(self) -> int:
        """Return the number of answers that are being read."""
        return len(self._open)

    def offered(self, model: str) -> Parsers:
        """Return the parsers of the vLLM of a model that has most; an empty identity stands for the only model."""
        peers = self._peers.copy()  # any thread may ask
        there = [parsers for node, parsers in self._parsers.copy().items() if node in peers and is_for(peers[node], model)]
        return max(there, key=lambda each: (each.calls + each.reasoning, each.calls), default=Parsers())

    def around(self, now: float, event: Event, handle: Callable[[float, Event], list[Effect]]) -> list[Effect]:
        """Handle an event that concerns reading alone. Others are handled by `handle`, of whose effects the outputs to clients
        wait that have to be read first."""
        if (own := self._own(now, event)) is not None:
            return own
        effects = handle(now, event)
        return self._pass_on(now, event, effects) if self._open or type(event) in OPENS else effects

    def check(self) -> None:
        """Assert what always holds."""
        for answer in self._open.values():
            assert answer.asked <= len(answer.held)
            assert bool(answer.node) + answer.paused + answer.waits <= 1
            assert answer.failed < TRIES
        assert self._parsers.keys() <= self._peers.keys()

    # --- events

    def _own(self, now: float, event: Event) -> list[Effect] | None:
        """Handle an event that concerns reading alone; None: it is another one."""
        if type(event.message) not in MESSAGES if isinstance(event, Received) else not isinstance(event, TimerFired):
            return None  # most events, at no cost
        match event:
            case Received(sender, ParsersReported(parsers)):
                if sender in self._peers:
                    self._parsers[sender] = parsers
                return [effect for answer in list(self._open.values()) for effect in self._ask(now, answer)]
            case Received(sender, AnswerRead() | AnswerUnread() as message):
                answer = self._open.get(message.request_id)
                if answer is None or (answer.node, answer.call) != (sender, message.call):
                    self._counts.add("stale_reads")
                    return []
                if isinstance(message, AnswerUnread):
                    return self._on_failed(answer, message.reason)
                return self._on_read(now, answer, message)
            case TimerFired((name, str(request_id))) if name == TIMER:
                return self._on_timer(now, self._open.get(request_id))
        return None

    def _pass_on(self, now: float, event: Event, effects: list[Effect]) -> list[Effect]:
        """Return the effects of an event, without the outputs to clients that are held, and with the calls that read them."""
        made = self._on_event(now, event)
        if not self._open:
            return effects + made
        passed, changed = list[Effect](), dict[str, _Answer]()
        for effect in effects:
            answer = self._open.get(effect.request_id) if isinstance(effect, ToClient) else None
            if answer is None or self._passes(answer, effect.output):  # type: ignore[union-attr]
                passed.append(effect)
            else:
                changed[answer.request_id] = answer
        asked = [effect for answer in changed.values() if answer.request_id in self._open for effect in self._ask(now, answer)]
        return passed + made + asked

    def _on_event(self, now: float, event: Event) -> list[Effect]:
        match event:
            case FromClient(request_id, ClientRequest() as client) if client.reading is not None:
                for each in (request_id, *(sibling for sibling, _ in client.siblings)):
                    self._open.setdefault(each, _Answer(each, client, client.reading))
            case FromClient(request_id, ClientGone()) if request_id in self._open:
                return self._close(request_id)
            case FromClient(request_id, StopFound()) if request_id in self._open:
                end = self._open[request_id].end
                return [*self._close(request_id), *([ToClient(request_id, end)] if end is not None else [])]
            case PeerDown(peer, _):
                self._parsers.pop(peer, None)
                return self._on_node_down(now, peer)
            case DrainTimedOut():
                ended = [answer for answer in self._open.values() if answer.end is not None]
                return [effect for answer in ended for effect in self._give_up(answer, "the gateway stops")]
        return []

    def _on_node_down(self, now: float, node: str) -> list[Effect]:
        effects: list[Effect] = []
        for answer in [answer for answer in self._open.values() if answer.node == node]:
            self._counts.add("reads_lost")
            answer.node, answer.asked = "", 0
            effects += self._ask(now, answer)
        return effects

    def _on_timer(self, now: float, answer: _Answer | None) -> list[Effect]:
        if answer is None:
            return []
        if answer.paused:
            answer.paused = False
            return self._ask(now, answer)
        if answer.waits:
            return self._give_up(answer, NONE_THERE)
        return self._on_failed(answer, "vLLM's parsers did not answer in time")

    def _on_read(self, now: float, answer: _Answer, message: AnswerRead) -> list[Effect]:
        request_id = answer.request_id
        read = TextRead(message.reasoning, message.text, message.calls)
        effects = [*self._out(answer, answer.asked), ToClient(request_id, read)]
        if answer.asked_end:
            return [*effects, ToClient(request_id, answer.end), *self._close(request_id)]
        answer.node, answer.asked, answer.failed, answer.avoid, answer.state = "", 0, 0, "", message.state
        answer.paused = True
        pause = SetTimer((TIMER, request_id), now - answer.began_at)
        return [*effects, pause, *self._ask(now, answer)]

    # --- calls

    def _passes(self, answer: _Answer, output: ClientOutput) -> bool:
        """Hold an output, or return True if it goes to the client now."""
        match output:
            case TokenOut():
                answer.held.append(output)
                return answer.reading.whole
            case Finished():
                answer.end = output
            case Failed():
                self._open.pop(answer.request_id)
                return True
            case _:
                return True
        return False

    def _ask(self, now: float, answer: _Answer) -> list[Effect]:
        """Have the tokens read that are held, unless a call is under way or in the pause after one, which the end of the answer
        cuts short but not after a failure."""
        ended = answer.end is not None
        paused = answer.paused and not (ended and not answer.failed)
        if answer.node or paused or not (answer.held or ended) or (answer.reading.whole and not ended):
            return []
        tokens = pack_tokens([each.token for each in answer.held if each.token not in answer.reading.textless])
        if not tokens and not (ended and answer.state):
            return self._pass_unread(answer)
        answer.paused = False
        if len(answer.client.tokens) + len(answer.reading.chat) + len(tokens) + len(answer.state) > MAX_READ_BYTES:
            return self._give_up(answer, "the answer is too long to be read by vLLM")
        node = self._node_for(answer)
        wait = SetTimer((TIMER, answer.request_id), READ_S)
        if not node:
            began, answer.waits = not answer.waits, True
            return [wait] if began else []
        answer.waits = False
        answer.call += 1
        answer.node, answer.asked, answer.asked_end, answer.began_at = node, len(answer.held), ended, now
        message = ReadAnswer(
            request_id=answer.request_id,
            call=answer.call,
            chat=answer.reading.chat,
            prompt=answer.client.tokens,
            tokens=tokens,
            state=answer.state,
            end=_end_of(answer.end),
            whole=answer.reading.whole,
            deadline_s=READ_S,
        )
        return [wait, Send(node, message)]

    def _node_for(self, answer: _Answer) -> str:
        """Return the node with the fewest calls of this gateway whose vLLM has the parsers, none that failed if another
        is there; empty: there is no node."""
        wanted, model = answer.reading.parsers, answer.client.model
        there = [node for node, parsers in self._parsers.items() if parsers == wanted and is_for(self._peers[node], model)]
        if not there:
            return ""
        busy = [each.node for each in self._open.values()]
        return min(there, key=lambda node: (node == answer.avoid, busy.count(node)))

    def _on_failed(self, answer: _Answer, reason: str) -> list[Effect]:
        self._counts.add("reads_in_vain")
        answer.failed += 1
        answer.avoid, answer.node, answer.asked = answer.node, "", 0
        if answer.failed >= TRIES:
            return self._give_up(answer, reason)
        answer.paused = True
        return [SetTimer((TIMER, answer.request_id), AGAIN_S)]

    def _give_up(self, answer: _Answer, reason: str) -> list[Effect]:
        """Pass everything on as it is, now and from now on."""
        self._counts.add("answers_unread")
        effects = self._out(answer)
        effects.append(ToClient(answer.request_id, TextUnread(reason)))
        end: list[Effect] = [] if answer.end is None else [ToClient(answer.request_id, answer.end)]
        return [*effects, *end, *self._close(answer.request_id)]

    def _pass_unread(self, answer: _Answer) -> list[Effect]:
        """Pass on tokens that stand for no text, and the end."""
        effects = self._out(answer)
        if answer.end is not None:
            effects += [ToClient(answer.request_id, answer.end), *self._close(answer.request_id)]
        return effects

    def _out(self, answer: _Answer, count: int | None = None) -> list[Effect]:
        """Pass on the first of the held tokens, or all, unless the client has them."""
        held = answer.held[:count]
        del answer.held[:count]
        return [] if answer.reading.whole else [ToClient(answer.request_id, token) for token in held]

    def _close(self, request_id: str) -> list[Effect]:
        del self._open[request_id]
        return [CancelTimer((TIMER, request_id))]


def _end_of(end: Finished | None) -> End:
    return "" if end is None else "length" if end.reason == "length" else "stop"
