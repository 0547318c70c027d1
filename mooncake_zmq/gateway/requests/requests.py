"""The owner of requests: placement, attempts, tokens, resume, cancel. PURE.

A request lives here from arrival to its one end. Whatever goes wrong elsewhere ends an *attempt*; the next one resumes from
the prompt and the tokens so far, so the client sees a pause, never an error or a repeated token.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, repeat
from typing import Any

from msgspec import structs

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
    RestWanted,
    Send,
    SetTimer,
    Started,
    TimerFired,
    ToClient,
    WorkDone,
    WorkProgress,
)
from mooncake_zmq.core.leaving import Leaving
from mooncake_zmq.core.messages import (
    MAX_RUN,
    AttemptFailed,
    CancelRequest,
    FirstToken,
    Hello,
    NodesHeard,
    Outcome,
    Placed,
    PromptScored,
    Rejected,
    RejectReason,
    RequestEnded,
    Schedule,
    Sibling,
    StartPrefill,
    TokenLogprob,
    TokensDecoded,
)
from mooncake_zmq.core.shell import Lifecycle, Named, Tally
from mooncake_zmq.gateway.requests.client_events import (
    ClientGone,
    ClientRequest,
    Failed,
    Finished,
    PromptLogprobs,
    StopFound,
    TokenOut,
)
from mooncake_zmq.gateway.requests.cluster_snapshot import count_prediction
from mooncake_zmq.gateway.requests.readiness import WAIT, ClusterView, Readiness
from mooncake_zmq.gateway.requests.token_gaps import Gaps
from mooncake_zmq.gateway.settings import RequestsSettings
from mooncake_zmq.kv.block_hash import extend_keys, pack_tokens
from mooncake_zmq.kv.layout import BlockLayout

EARLY_TOKENS = MAX_RUN
"""Tokens kept that arrived ahead of a missing one (the decode's may overtake the prefill's first). One more is dropped: the
attempt then stalls, and is placed again."""


EPSILON_S = 1e-9
"""Rounding may fire a timer a hair early; it must not spin."""


class RequestState(Named):
    """Life of a request."""

    WAITING = "waiting"
    """For a conductor, or for the pause before the next attempt."""
    PLACING = "placing"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


class RequestEvent(Named):
    """What moves it on."""

    SCHEDULED = "schedule"
    PLACED = "placed"
    FIRST_TOKEN = "first token"
    RETRY = "retry"
    END = "end"


NEXT_STATE: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.WAITING, RequestEvent.SCHEDULED): RequestState.PLACING,
    (RequestState.PLACING, RequestEvent.PLACED): RequestState.PREFILLING,
    (RequestState.PREFILLING, RequestEvent.FIRST_TOKEN): RequestState.DECODING,
    (RequestState.PLACING, RequestEvent.RETRY): RequestState.WAITING,
    (RequestState.PREFILLING, RequestEvent.RETRY): RequestState.WAITING,
    (RequestState.DECODING, RequestEvent.RETRY): RequestState.WAITING,
    (RequestState.WAITING, RequestEvent.END): RequestState.ENDED,
    (RequestState.PLACING, RequestEvent.END): RequestState.ENDED,
    (RequestState.PREFILLING, RequestEvent.END): RequestState.ENDED,
    (RequestState.DECODING, RequestEvent.END): RequestState.ENDED,
}


PLACED = (RequestState.PREFILLING, RequestState.DECODING)
"""Where a request has a place."""


@dataclass(slots=True)
class _Request:
    request_id: str
    client: ClientRequest
    deadline: float
    state: RequestState = RequestState.WAITING
    attempt: int = 0
    missing: str = "no_conductor"
    """What a request that is not admitted waits for."""
    broken: int = 0
    """Attempts that ended because something broke."""
    admitted: bool = False
    """Has a conductor ever placed it?"""
    scheduled: bool = False
    """Is an attempt under way that a conductor may have booked?"""
    conductor: str = ""
    prefill: str = ""
    decode: str = ""
    output: list[int] = field(default_factory=list)
    begun: bool = False
    """Its client holds tokens of it, or of another answer to the same prompt: it is not refused any more."""
    answered: bool = False
    """Its client holds tokens of another part of its call's answer."""
    early: dict[int, tuple[int, TokenLogprob | None]] = field(default_factory=dict)
    family: str = ""
    """Which requests have its prompt: those of one call."""
    led_by: str = ""
    """The one whose placement it waits for."""
    booked: bool = False
    """Has its attempt a booking of its own, whose end and outcome a conductor wants to know?"""
    scored: int = 0
    """Tokens of the prompt whose probabilities its client has."""
    exclude: tuple[str, ...] = ()
    cached: tuple[int, int, int] | None = None
    prefill_times: tuple[float, float] = (0.0, 0.0)
    """Of the attempt under way: queued, computed."""
    arrived_at: float = 0.0
    heard_at: float = 0.0
    """When something last came for the attempt under way; the stall timer looks here when it fires."""
    scheduled_at: float = 0.0
    predicted: tuple[float, float] = (0.0, 0.0)
    """TTFT and TBT of the attempt under way, as its `Placed` said."""
    ttft_s: float | None = None
    """Of the attempt under way, once its first token is here."""
    token_at: float = 0.0
    resumed_at: int = 0
    """Output tokens when the attempt under way began."""
    gaps: Gaps = field(default_factory=Gaps)

    @property
    def prompt_tokens(self) -> int:
        return len(self.client.tokens) // 4

    @property
    def is_scored(self) -> bool:
        """Are the prompt's probabilities told, if they are asked for?"""
        return self.client.prompt_logprobs is None or self.scored == self.prompt_tokens - 1


def _sibling(request: _Request) -> Sibling:
    return Sibling(request_id=request.request_id, attempt=request.attempt, seed=request.client.sampling.seed)


class Requests:
    """All requests of one gateway."""

    def __init__(self, *, name: str, host: str, incarnation: int, settings: RequestsSettings, layout: BlockLayout) -> None:
        self.name = name
        self.host = host
        self.incarnation = incarnation
        self.counts = Tally()
        self.transitions = Tally()
        self._life = Lifecycle("gateway request", NEXT_STATE, self.transitions)
        self._settings = settings
        self._layout = layout
        self._peers: dict[str, Hello] = {}
        self._requests: dict[str, _Request] = {}
        self._readiness = Readiness(settings.conductors, settings.ready_wait_s)
        self._leaving = Leaving("", self.counts)

    @property
    def cluster(self) -> ClusterView:
        """For /health."""
        return self._readiness.view(self._peers)

    def handle(self, now: float, event: Event) -> list[Effect]:
        """See `core.actor`."""
        return self._dispatch(now, event) + self._drained()

    def _dispatch(self, now: float, event: Event) -> list[Effect]:
        match event:
            case FromClient(request_id, ClientRequest() as client):
                return self._on_client(now, request_id, client)
            case FromClient(request_id, ClientGone()):
                return self._on_gone(request_id)
            case FromClient(request_id, StopFound()):
                return self._on_stop_found(request_id)
            case Received(sender, Placed() as message):
                return self._on_placed(now, sender, message)
            case Received(sender, Rejected() as message):
                return self._on_rejected(now, sender, message)
            case Received(sender, FirstToken() as message):
                return self._on_first_token(now, sender, message)
            case Received(sender, TokensDecoded() as message):
                return self._on_tokens(now, sender, message)
            case Received(sender, PromptScored() as message):
                return self._on_scored(now, sender, message)
            case Received(sender, AttemptFailed() as message):
                return self._on_failed(now, sender, message)
            case Received(sender, NodesHeard() as message):
                return self._readiness.heard(sender, message, self._peers)
            case PeerUp() as up:
                return self._on_peer_up(now, up)
            case PeerDown(peer, _):
                return self._on_peer_down(now, peer)
            case TimerFired(key) if key == WAIT:
                self.counts.add("ready_waits_over", self._readiness.waited())
                return []
            case TimerFired(("attempt", str(request_id))):
                return self._begin_attempt(now, self._requests.get(request_id))
            case TimerFired(("placement", str(request_id))):
                return self._on_placement_late(request_id)
            case TimerFired(("stall", str(request_id))):
                return self._on_stalled(now, request_id)
            case TimerFired(("deadline", str(request_id))):
                late = self._requests.get(request_id)
                limit = f"no answer within {self._settings.deadline_s:g} s"
                return [] if late is None else self._fail(late, Failed(status=504, code="deadline_exceeded", message=limit))
            case DrainWanted():
                self._leaving.drain()
                return []
            case RestWanted(resting):
                self._leaving.rest(resting)
                return []
            case DrainTimedOut():
                self._leaving.drain()
                return self._hand_over()
            case Received(_, message):
                self.counts.add(f"unexpected_messages[type={type(message).__name__}]")
                return []
            case Started() | TimerFired() | WorkProgress() | WorkDone():
                return []
            case _:
                raise TypeError(event)

    def check(self, now: float) -> None:
        """See `core.actor`."""
        for request in self._requests.values():
            assert request.state is not RequestState.ENDED
            assert len(request.early) <= EARLY_TOKENS
            assert len(request.output) < max(1, request.client.stop.max_tokens), "the last token ends a request"
            assert request.scheduled == (request.state is not RequestState.WAITING)
            if request.led_by:
                assert request.state is self._requests[request.led_by].state is RequestState.PLACING
        assert len(self._requests) <= self._settings.max_open

    def gauges(self, now: float) -> dict[str, float]:
        """See `core.actor`."""
        states = [request.state for request in self._requests.values()]
        return {f"requests_{state.value}": states.count(state) for state in RequestState if state is not RequestState.ENDED}

    def dump(self, now: float) -> dict[str, Any]:
        """See `core.actor`."""
        return {
            "gauges": self.gauges(now),
            "draining": self._leaving.draining,
            "cluster": asdict(self.cluster),
            "predictions": {of: self._prediction(of) for of in ("ttft", "tbt")},
            "peers": {name: hello.role for name, hello in self._peers.items()},
            "requests": [
                {
                    "request": r.request_id,
                    "state": r.state.value,
                    "attempt": r.attempt,
                    "age_s": now - r.arrived_at,
                    "prompt_tokens": r.prompt_tokens,
                    "output_tokens": len(r.output),
                    "prefill": r.prefill,
                    "decode": r.decode,
                }
                for r in self._requests.values()
            ],
        }

    # --- the client

    def _on_client(self, now: float, request_id: str, client: ClientRequest) -> list[Effect]:
        choices = ((request_id, client.sampling.seed), *client.siblings)
        if any(each in self._requests for each, _ in choices):
            return []
        if self._leaving.draining or len(self._requests) + len(choices) > self._settings.max_open:
            self.counts.add("requests_refused", len(choices))
            why = "the gateway is draining: try another one" if self._leaving.draining else "too many open requests"
            refused = Failed(status=503, code="overloaded", message=why, retry_after_s=1.0)
            return [ToClient(each, refused) for each, _ in choices]
        timers: list[Effect] = []
        family = request_id if client.siblings else ""
        for each, seed in choices:
            own = client
            if family:
                own = structs.replace(client, sampling=structs.replace(client.sampling, seed=seed), siblings=())
            self._requests[each] = _Request(each, own, now + self._settings.deadline_s, arrived_at=now, family=family)
            self.counts.add("requests")
            timers.append(SetTimer(("deadline", each), self._settings.deadline_s))
            timers.append(SetTimer(("placement", each), self._settings.placement_wait_s))
        return timers + self._begin_attempt(now, self._requests[request_id])

    def _on_gone(self, request_id: str) -> list[Effect]:
        request = self._requests.get(request_id)
        if request is None:
            return []
        self.counts.add("requests_cancelled")
        return self._let_go(request) + self._end(request)

    def _on_stop_found(self, request_id: str) -> list[Effect]:
        request = self._requests.get(request_id)
        return [] if request is None else [*self._let_go(request, ended=True), *self._finish(request, "stop")]

    # --- placement

    def _begin_attempt(self, now: float, request: _Request | None) -> list[Effect]:
        """Ask the conductor that is to be asked; with none alive, wait for one. Of a family all that wait and have no token yet
        are placed together."""
        if request is None or request.state is not RequestState.WAITING:
            return []
        conductor = self._readiness.conductor(self._peers)
        if not conductor:
            return []
        client, siblings = request.client, self._waiting_siblings(request)
        for each in (request, *siblings):
            self._scheduled(now, each, conductor)
            each.booked = each is request
        timers: list[Effect] = [self._stall_timer(each) for each in (request, *siblings)]
        for each in siblings:
            each.led_by = request.request_id
            timers.append(CancelTimer(("attempt", each.request_id)))
        schedule = Schedule(
            request_id=request.request_id,
            attempt=request.attempt,
            keys=tuple(self._keys(request)) if request.is_scored else (),
            tokens=request.prompt_tokens + len(request.output),
            max_tokens=client.stop.max_tokens - len(request.output),
            exclude=request.exclude,
            ttft_slo_s=client.ttft_slo_s,
            tbt_slo_s=client.tbt_slo_s,
            priority=client.priority,
            begun=request.begun,
            waited_s=max(0.0, now - request.arrived_at),
            choices=1 + len(siblings),
        )
        return [Send(conductor, schedule), *timers]

    def _scheduled(self, now: float, request: _Request, conductor: str) -> None:
        self._move(request, RequestEvent.SCHEDULED)
        request.attempt += 1
        request.scheduled = True
        request.conductor, request.prefill, request.decode = conductor, "", ""
        request.early.clear()
        request.prefill_times = request.predicted = (0.0, 0.0)
        request.scheduled_at = request.heard_at = now
        request.ttft_s, request.resumed_at, request.gaps = None, len(request.output), Gaps()

    def _waiting_siblings(self, request: _Request) -> list[_Request]:
        if not request.family or request.output:
            return []
        family = [each for each in self._requests.values() if each.family == request.family and each is not request]
        return [each for each in family if each.state is RequestState.WAITING and not each.output]

    def _led(self, request: _Request) -> list[_Request]:
        """Those that are placed with it."""
        if not request.family or request.state is not RequestState.PLACING:
            return []
        return [each for each in self._requests.values() if each.led_by == request.request_id]

    def _keys(self, request: _Request) -> list[bytes]:
        """Keys of the complete blocks of prompt and tokens so far."""
        client, size = request.client, self._layout.block_tokens
        full = len(client.keys) * size * 4
        parent = client.keys[-1] if client.keys else client.root
        return [*client.keys, *extend_keys(parent, client.tokens[full:] + pack_tokens(request.output), size)]

    def _on_placed(self, now: float, sender: str, message: Placed) -> list[Effect]:
        request = self._placing(sender, message.request_id, message.attempt)
        if request is None:
            return []
        together = [request, *self._led(request)]
        for each in together:
            self._move(each, RequestEvent.PLACED)
            each.led_by = ""
            each.prefill, each.decode = message.prefill, message.decode
            each.predicted = (message.ttft_s, message.tbt_s)
            each.heard_at = now
        # A node not met yet, or that died just now, is nothing the request broke: as if there were none yet. The placement's
        # wait bounds a new request then; one that ran already waits until its deadline, as for any nodes that restart.
        # So is one that has become something else since the conductor last heard of it.
        wanted = (("prefill", message.prefill, RejectReason.NO_PREFILL), ("decode", message.decode, RejectReason.NO_DECODE))
        for role, node, missing in wanted:
            peer = self._peers.get(node)
            if peer is None or peer.role not in (role, "vllm"):
                return self._retry_all(together, missing.value, exclude=node)
        effects: list[Effect] = [CancelTimer(("placement", each.request_id)) for each in together]
        for each in together:
            each.admitted = True
        client = request.client
        start = StartPrefill(
            request_id=request.request_id,
            attempt=request.attempt,
            tokens=client.tokens + pack_tokens(request.output),
            root=client.root,
            keys=tuple(self._keys(request)),
            first_index=len(request.output),
            sampling=client.sampling,
            stop=client.stop,
            decode=message.decode,
            reuse_blocks=message.reuse_blocks,
            sources=message.sources,
            coming_blocks=0 if client.prompt_logprobs is not None else message.coming_blocks,
            coming_s=message.coming_s,
            conductor=sender,
            deadline_s=max(0.0, request.deadline - now),
            booking=message.booking,
            priority=max(client.priority, message.least_priority),
            tbt_slo_s=message.tbt_slo_s,
            stages=message.stages if request.is_scored else (),
            tenant=client.tenant,
            prompt_logprobs=None if request.is_scored else client.prompt_logprobs,
            siblings=tuple([_sibling(r) for r in together[1:]]),
        )
        return [*effects, Send(message.prefill, start)]

    def _placing(self, sender: str, request_id: str, attempt: int) -> _Request | None:
        """The request that this conductor was asked for."""
        request = self._current(request_id, attempt)
        asked = request is not None and request.state is RequestState.PLACING and not request.led_by
        return request if request is not None and asked and request.conductor == sender else None

    def _on_rejected(self, now: float, sender: str, message: Rejected) -> list[Effect]:
        request = self._placing(sender, message.request_id, message.attempt)
        if request is None:
            return []
        together = [*self._led(request), request]
        request.exclude = ()
        overloaded = message.reason in (RejectReason.TTFT, RejectReason.TBT)
        nobody = message.reason in (RejectReason.NO_PREFILL, RejectReason.NO_DECODE)
        under_way = self._call_is_under_way(request)
        # Nodes may be restarting, or a new conductor has not met them yet.
        if under_way or (not overloaded and (request.admitted or nobody)):
            placements: list[Effect] = [CancelTimer(("placement", each.request_id)) for each in together if under_way]
            return placements + self._retry_all(together, message.reason.value)
        return [effect for each in together for effect in self._refuse(each, message.reason, message.retry_after_s)]

    def _call_is_under_way(self, request: _Request) -> bool:
        """Has its client tokens of the answer, or another part of it a place now? What is in its way may be the rest of its
        call, all of which would be in vain without it. Conductors know nothing of this: it waits for room as others do."""
        if request.begun or request.answered:
            return True
        call = request.client.call
        placed = [each for each in self._requests.values() if call and each.client.call == call and each.state in PLACED]
        return any(each is not request for each in placed)

    def _retry_all(self, together: Sequence[_Request], missing: str, *, exclude: str = "") -> list[Effect]:
        """`missing`: what they wait for if they are not admitted yet."""
        effects: list[Effect] = []
        for request in together:
            request.missing = missing
            effects += self._retry(request, exclude=exclude)
        return effects

    def _refuse(self, request: _Request, reason: RejectReason, retry_after_s: float) -> list[Effect]:
        """Before its first token, at whatever attempt."""
        overloaded = reason in (RejectReason.TTFT, RejectReason.TBT)
        self.counts.add(f"requests_rejected[reason={reason.value}]")
        failed = Failed(
            status=429 if overloaded else 503,
            code=reason.value,
            message="the request would miss its SLO" if overloaded else "no decode has room for the request now",
            retry_after_s=retry_after_s,
        )
        return self._fail(request, failed)

    def _on_placement_late(self, request_id: str) -> list[Effect]:
        request = self._requests.get(request_id)
        if request is None or request.admitted:
            return []
        missing = f"{request.missing.replace('_', ' ')} is there to serve the request"
        return self._fail(request, Failed(status=503, code=request.missing, message=missing, retry_after_s=2.0))

    def _on_peer_up(self, now: float, up: PeerUp) -> list[Effect]:
        """With a conductor, requests that found none alive go on; one that pauses between attempts may as well begin now."""
        self._peers[up.peer] = up.hello
        effects = self._readiness.changed(self._peers)
        if up.hello.role != "conductor":
            return effects
        for request in list(self._requests.values()):
            effects += self._begin_attempt(now, request)
        return effects

    # --- tokens

    def _on_first_token(self, now: float, sender: str, message: FirstToken) -> list[Effect]:
        request = self._current(message.request_id, message.attempt)
        if request is None or request.prefill != sender or request.state is not RequestState.PREFILLING:
            return []
        logprobs = () if message.logprob is None else (message.logprob,)
        if not request.is_scored or not self._makes_sense(request, (message.token,), logprobs):
            return self._on_nonsense(now, request, sender)
        self._move(request, RequestEvent.FIRST_TOKEN)
        if request.cached is None:
            request.cached = (message.own, message.local, message.remote)
        request.prefill_times = (message.queue_s, message.prefill_s)
        return self._take_run(now, request, message.index, (message.token,), logprobs)

    def _on_tokens(self, now: float, sender: str, message: TokensDecoded) -> list[Effect]:
        effects: list[Effect] = []
        for request_id, attempt, reused in message.reused:
            request = self._current(request_id, attempt)
            if request is not None and request.decode == sender and not request.resumed_at:
                request.cached = (min(reused, request.prompt_tokens), 0, 0)
        told = chain(message.logprobs, repeat(()))
        for (request_id, attempt, first, tokens), logprobs in zip(message.entries, told, strict=False):
            request = self._current(request_id, attempt)
            if request is not None and request.decode == sender and not self._makes_sense(request, tokens, logprobs):
                effects += self._on_nonsense(now, request, sender)
            elif request is not None and request.decode == sender:
                effects += self._take_run(now, request, first, tokens, logprobs)
            elif request is None:  # our cancel overtook the prefill's reservation there: without another it runs to its end
                effects.append(Send(sender, CancelRequest(request_id=request_id, attempt=attempt)))
        return effects

    def _makes_sense(self, request: _Request, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> bool:
        """Are these tokens of the model, with their probabilities where these were asked for?"""
        if len(logprobs) != (0 if request.client.sampling.logprobs is None else len(tokens)):
            return False
        ids = [*tokens, *(token for _, likeliest in logprobs for token, _ in likeliest)] if logprobs else tokens
        return self._layout.has_token(ids[0] if len(ids) == 1 else max(ids, default=0))

    def _on_scored(self, now: float, sender: str, message: PromptScored) -> list[Effect]:
        """A later attempt tells all from the beginning: what the client has already is passed over."""
        request = self._current(message.request_id, message.attempt)
        if request is None or request.prefill != sender or request.state is not RequestState.PREFILLING or request.is_scored:
            return []
        ids = [token for _, likeliest in message.logprobs for token, _ in likeliest]
        stop = message.first + len(message.logprobs)
        if (
            message.first > request.scored + 1
            or stop > request.prompt_tokens
            or not self._layout.has_token(max(ids, default=0))
        ):
            return self._on_nonsense(now, request, sender)
        request.heard_at = now
        first = request.scored + 1
        if stop <= first:
            return []
        request.scored = stop - 1
        return [ToClient(request.request_id, PromptLogprobs(first, message.logprobs[first - message.first :]))]

    def _take_run(
        self, now: float, request: _Request, first: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> list[Effect]:
        effects: list[Effect] = []
        request.heard_at = now
        self._time(now, request, first, len(tokens))
        for index, token in enumerate(tokens):
            if request.state is RequestState.ENDED:
                break
            self._take(request, first + index, token, logprobs[index] if logprobs else None, effects)
        return effects

    def _time(self, now: float, request: _Request, first: int, tokens: int) -> None:
        """Note when these tokens came, for what becomes of the attempt. Those ahead of a missing one count as it does."""
        new = first + tokens - len(request.output)
        if first > len(request.output) or new <= 0:
            return
        new += sum(1 for index in request.early if index >= first + tokens) if request.early else 0
        gap_s = now - request.token_at
        if request.ttft_s is None:
            request.ttft_s, gap_s = now - request.scheduled_at, 0.0
            new -= 1
        if new:
            request.gaps.add(gap_s, new)
        request.token_at = now

    def _take(self, request: _Request, index: int, token: int, logprob: TokenLogprob | None, effects: list[Effect]) -> None:
        """Token `index` of the current attempt: passed on in order, once."""
        due = len(request.output)
        if index == due and not request.early:
            self._emit(request, token, logprob, effects)
            return
        if index < due:
            self.counts.add("duplicate_tokens")
            return
        if index == due or len(request.early) < EARLY_TOKENS:
            request.early[index] = token, logprob
        else:
            self.counts.add("early_tokens_dropped")
        while request.state is not RequestState.ENDED and len(request.output) in request.early:
            self._emit(request, *request.early.pop(len(request.output)), effects)

    def _emit(self, request: _Request, token: int, logprob: TokenLogprob | None, effects: list[Effect]) -> None:
        output = request.output
        effects.append(ToClient(request.request_id, TokenOut(len(output), token, logprob)))
        output.append(token)
        if not request.begun:
            self._begin_answer(request)
        reason = request.client.stop.reason(token, len(output))
        if reason is not None:
            effects += self._forget_booking(request, ended=True)
            effects += self._finish(request, reason)

    def _begin_answer(self, request: _Request) -> None:
        request.begun = True
        family, call = request.family, request.client.call
        for each in self._requests.values() if family or call else ():
            each.begun = each.begun or bool(family and each.family == family)
            each.answered = each.answered or bool(call and each.client.call == call)

    def _finish(self, request: _Request, reason: str) -> list[Effect]:
        own, local, remote = request.cached or (0, 0, 0)
        finished = Finished(
            reason=reason,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=len(request.output),
            cached_own=own,
            cached_local=local,
            cached_remote=remote,
            prefill=request.prefill,
            decode=request.decode,
            attempts=request.attempt,
            queue_s=request.prefill_times[0],
            prefill_s=request.prefill_times[1],
        )
        self.counts.add(f"requests_finished[reason={reason}]")
        return [ToClient(request.request_id, finished), *self._end(request)]

    # --- attempts that end early

    def _on_nonsense(self, now: float, request: _Request, sender: str) -> list[Effect]:
        """A node tells of tokens that the model does not have: as if it had failed."""
        self.counts.add("tokens_out_of_range")
        request.broken += 1
        return self._retry(request, exclude=sender)

    def _on_failed(self, now: float, sender: str, message: AttemptFailed) -> list[Effect]:
        request = self._current(message.request_id, message.attempt)
        if request is None or sender not in (request.prefill, request.decode):
            return []
        self.counts.add(f"attempts_failed[by={self._peers[sender].role}]")
        if message.refused and not self._call_is_under_way(request):
            return self._refuse(request, RejectReason.TBT, message.retry_after_s)
        if message.stuck:
            why = f"the answer cannot go on as its constraint demands ({message.reason})"
            return self._fail(request, Failed(status=400, code="constraint_stuck", message=why))
        request.broken += not message.full
        return self._retry(request, exclude=message.avoid or sender)

    def _on_stalled(self, now: float, request_id: str) -> list[Effect]:
        request = self._requests.get(request_id)
        if request is None or request.state is RequestState.WAITING:
            return []
        quiet_s = now - request.heard_at
        if quiet_s < self._settings.stall_s - EPSILON_S:
            return [SetTimer(("stall", request_id), self._settings.stall_s - quiet_s)]
        self.counts.add("attempts_stalled")
        request.broken += 1
        return self._retry(request, stalled=True)

    def _on_peer_down(self, now: float, peer: str) -> list[Effect]:
        self._peers.pop(peer, None)
        self._readiness.forget(peer)
        effects: list[Effect] = []
        for request in list(self._requests.values()):
            placing = request.state is RequestState.PLACING and request.conductor == peer
            prefilling = request.state is RequestState.PREFILLING and peer in (request.prefill, request.decode)
            decoding = request.state is RequestState.DECODING and peer in (request.decode, self._handing_off(request))
            if placing or prefilling or decoding:
                self.counts.add(f"attempts_lost[state={request.state.value}]")
                request.broken += not placing
                effects += self._retry(request, exclude="" if placing else peer)
        return effects

    def _handing_off(self, request: _Request) -> str:
        """The prefill whose decode has told no token yet: it may never have heard of the request, so nobody else would tell."""
        told = len(request.output) + len(request.early) > request.resumed_at + 1
        return "" if told else request.prefill

    def _retry(self, request: _Request, *, exclude: str = "", stalled: bool = False) -> list[Effect]:
        """Give this attempt up everywhere and begin the next one after a pause that grows."""
        effects = self._let_go(request, stalled=stalled)
        if request.broken >= self._settings.max_attempts:
            limit = f"gave up after {request.broken} attempts that broke"
            return effects + self._fail(
                request, Failed(status=503, code="attempts_exhausted", message=limit, retry_after_s=5.0)
            )
        self._move(request, RequestEvent.RETRY)
        self.counts.add("attempts_retried")
        if exclude:
            request.exclude = (*[node for node in request.exclude if node != exclude], exclude)[-4:]
        pause = min(self._settings.backoff_max_s, self._settings.backoff_s * 2.0 ** min(request.attempt - 1, 16))
        return [*effects, CancelTimer(("stall", request.request_id)), SetTimer(("attempt", request.request_id), pause)]

    def _let_go(self, request: _Request, *, ended: bool = False, stalled: bool = False) -> list[Effect]:
        """Cancel the current attempt at every hop."""
        if not request.scheduled:
            return []
        left = [effect for each in self._led(request) for effect in self._retry(each)]
        request.led_by = ""
        cancel = CancelRequest(request_id=request.request_id, attempt=request.attempt)
        nodes = [node for node in dict.fromkeys((request.prefill, request.decode)) if node in self._peers]
        return [*left, *[Send(node, cancel) for node in nodes], *self._forget_booking(request, ended=ended, stalled=stalled)]

    def _forget_booking(self, request: _Request, *, ended: bool, stalled: bool = False) -> list[Effect]:
        """The attempt is over: once for each. `ended`: its output ended by itself; `stalled`: nothing came for too long."""
        request.scheduled = False
        if not request.booked:
            return []
        outcome = self._outcome(request, ended) if request.ttft_s is not None else None
        if request.conductor not in self._peers:
            return []
        end = RequestEnded(request_id=request.request_id, attempt=request.attempt, outcome=outcome, stalled=stalled)
        return [Send(request.conductor, end)]

    def _outcome(self, request: _Request, ended: bool) -> Outcome:
        assert request.ttft_s is not None
        outcome = Outcome(
            ttft_s=max(0.0, request.ttft_s),
            predicted_ttft_s=request.predicted[0],
            tbt_s=max(0.0, request.gaps.tbt_s),
            predicted_tbt_s=request.predicted[1],
            max_tokens=request.client.stop.max_tokens - request.resumed_at,
            output_tokens=len(request.output) - request.resumed_at,
            ended=ended,
        )
        count_prediction(self.counts, "ttft", outcome.ttft_s, outcome.predicted_ttft_s)
        if len(request.gaps):
            count_prediction(self.counts, "tbt", outcome.tbt_s, outcome.predicted_tbt_s)
        return outcome

    def _prediction(self, of: str) -> dict[str, float]:
        """Mean of what came and of how far the prediction was off, in seconds."""
        made = self.counts.get(f"predictions[of={of}]", 0)
        each = 1e-6 / max(1, made)
        return {
            "count": made,
            "actual_s": each * self.counts.get(f"actual_microseconds[of={of}]", 0),
            "absolute_error_s": each * self.counts.get(f"prediction_error_microseconds[of={of}]", 0),
        }

    def _fail(self, request: _Request, failed: Failed) -> list[Effect]:
        self.counts.add(f"requests_failed[code={failed.code}]")
        return [ToClient(request.request_id, failed), *self._let_go(request), *self._end(request)]

    def _hand_over(self) -> list[Effect]:
        """Nobody else has these clients' connections: they are told, and may ask another gateway."""
        left = list(self._requests.values())
        why = Failed(status=503, code="gateway_stopped", message="the gateway stops before the answer ends", retry_after_s=1.0)
        self.counts.add("requests_handed_over", len(left))
        return [effect for request in left for effect in self._fail(request, why)]

    def _end(self, request: _Request) -> list[Effect]:
        self._move(request, RequestEvent.END)
        del self._requests[request.request_id]
        return [CancelTimer((timer, request.request_id)) for timer in ("deadline", "placement", "attempt", "stall")]

    def _drained(self) -> list[Effect]:
        return self._leaving.drained(idle=not self._requests) if self._leaving.leaves else []

    # --- leaves

    def _current(self, request_id: str, attempt: int) -> _Request | None:
        """The request, if this is its attempt under way; anything of an older attempt is dropped."""
        request = self._requests.get(request_id)
        if request is None or request.attempt != attempt or request.state is RequestState.WAITING:
            self.counts.add("stale_attempt_messages")
            return None
        return request

    def _stall_timer(self, request: _Request) -> SetTimer:
        return SetTimer(("stall", request.request_id), self._settings.stall_s)

    def _move(self, request: _Request, event: RequestEvent) -> None:
        request.state = self._life.after(request.state, event)
