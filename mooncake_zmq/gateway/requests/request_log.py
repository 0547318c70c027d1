"""The record of each request: its attempts, why each ended, where its time went. PURE.

Records are made from the events and effects of the gateway's actor, which does not know of them. Times are seconds since the
request arrived; nodes report durations, which are counted back from the arrival of their messages.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mooncake_zmq.core.actor import (
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
from mooncake_zmq.core.messages import (
    AttemptFailed,
    DecodeTimes,
    FirstToken,
    Message,
    Placed,
    PlaceElsewhere,
    Rejected,
    RejectReason,
    RequestEnded,
    Schedule,
    StartPrefill,
    TextsEmbedded,
    TokensDecoded,
)
from mooncake_zmq.gateway.requests.client_events import ClientGone, ClientRequest, Failed, Finished, TokenOut

MAX_OPEN = 8192
"""Limit on the open records; of more, the oldest is dropped."""
MAX_ATTEMPTS = 16
"""Limit on the attempts in a record: the first and the last ones are kept."""
CANCELLED = "cancelled"


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One attempt: its nodes, predictions and actual times. A time is None, or 0 if a node reports it, until it is known."""

    number: int
    began_s: float
    conductor: str
    placed_s: float | None = None
    prefill: str = ""
    decode: str = ""
    stages: tuple[str, ...] = ()
    predicted_ttft_s: float | None = None
    """Predicted TTFT from `began_s` on. For a request that was refused: from its arrival on."""
    predicted_tbt_s: float | None = None
    first_s: float | None = None
    """When its first token arrived."""
    cached_own: int = 0
    cached_local: int = 0
    cached_remote: int = 0
    computed_of_cached: int = 0
    """Tokens with KV elsewhere that were computed while KV after them was fetched."""
    cached_parts: int = 0
    """Tokens with KV of earlier prompts, computed behind other tokens."""
    recomputed: int = 0
    """Tokens of these that were computed again."""
    queue_s: float = 0.0
    prepare_s: float = 0.0
    """Time from the head of the queue to the engine: lease, the decode's reservation, room."""
    load_s: float = 0.0
    """Part of `prefill_s` until reused KV was loaded."""
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    """Time from the decode's reservation until it had verified all KV."""
    wait_s: float = 0.0
    """Time spent waiting for a place in the batch."""
    decode_s: float = 0.0
    steps: int = 0
    ttft_s: float | None = None
    tbt_s: float | None = None
    tokens: int = 0
    ended_s: float | None = None
    why: str = ""
    """Why the attempt ended; for the last attempt, the request's outcome."""


@dataclass(slots=True, kw_only=True)
class RequestEntry:
    """The record of one request, open or ended."""

    request_id: str
    arrived_at: float
    prompt_tokens: int = 0
    max_tokens: int = 0
    tenant: str = ""
    model: str = ""
    """Name by which its client asked for the model."""
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    first_s: float | None = None
    """When the first token of any attempt arrived."""
    outcome: str = ""
    """Outcome: "stop", "length", "cancelled" or an error code."""
    completion_tokens: int = 0
    duration_s: float = 0.0
    cached: tuple[int, int, int] = (0, 0, 0)
    """Prompt tokens whose KV was loaded from the prefill's own slab, its host's pool, and other hosts."""
    made: int = 0
    """Number of attempts, of which `attempts` holds at most `MAX_ATTEMPTS`."""
    attempts: list[Attempt] = field(default_factory=list)
    asked: Attempt | None = None
    """Attempt that begins if there is a place for it, as a node of the one under way drains."""

    @property
    def last(self) -> Attempt | None:
        """The attempt under way, or the last one."""
        return self.attempts[-1] if self.attempts else None


class RequestLog:
    """The open records of one gateway. `ended` is called once with each record."""

    def __init__(self, ended: Callable[[RequestEntry], None]) -> None:
        self._ended = ended
        self._open: OrderedDict[str, RequestEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def observe(self, now: float, event: Event, effects: Sequence[Effect]) -> None:
        """Record an event and the effects that the actor returned for it."""
        match event:
            case Received(sender, message):
                self._received(now, sender, message)
            case FromClient(request_id, ClientRequest() as client):
                for each in (request_id, *(sibling for sibling, _ in client.siblings)):
                    self._begin(now, each, client)
        over: list[tuple[str, Finished | Failed]] = []
        to_client, token = ToClient, TokenOut
        for effect in effects:
            if type(effect) is to_client and type(effect.output) is token:
                continue  # most effects, at little cost
            match effect:
                case ToClient(request_id, Finished() | Failed() as end):
                    over.append((request_id, end))
                case Send(to, Schedule() as schedule):
                    self._scheduled(now, to, schedule, asked=type(event) is Received and type(event.message) is PlaceElsewhere)
                case Send(_, StartPrefill() as start):
                    self._started(now, start)
                case Send(_, RequestEnded() as ended):
                    self._outcome(ended)
                case SetTimer(("attempt", str(request_id))):
                    self._attempt_over(now, request_id, _why(event))
        for request_id, end in over:
            self._over(now, request_id, end)
        match event:
            case FromClient(request_id, ClientGone()) if request_id in self._open:
                self._close(now, self._open[request_id], CANCELLED)

    def _begin(self, now: float, request_id: str, client: ClientRequest) -> None:
        entry = self._of(now, request_id)
        entry.prompt_tokens, entry.max_tokens = len(client.tokens) // 4, client.stop.max_tokens
        entry.tenant, entry.model = client.tenant, client.model_name
        entry.ttft_slo_s, entry.tbt_slo_s = client.ttft_slo_s, client.tbt_slo_s

    def _of(self, now: float, request_id: str) -> RequestEntry:
        entry = self._open.get(request_id)
        if entry is None:
            entry = self._open[request_id] = RequestEntry(request_id=request_id, arrived_at=now)
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return entry

    def _scheduled(self, now: float, conductor: str, schedule: Schedule, *, asked: bool) -> None:
        entry = self._of(now, schedule.request_id)
        if asked:
            entry.asked = Attempt(number=schedule.attempt, began_s=now - entry.arrived_at, conductor=conductor)
        elif entry.last is None or entry.last.number != schedule.attempt:
            began_s = now - entry.arrived_at
            self._add(entry, Attempt(number=schedule.attempt, began_s=began_s, conductor=conductor))

    def _started(self, now: float, start: StartPrefill) -> None:
        """Record an attempt that begins because a node drains, and those of siblings, placed with the first choice."""
        entry = self._open.get(start.request_id)
        if entry is not None and entry.asked is not None and entry.asked.number == start.attempt:
            self._attempt_over(now, start.request_id, "its node drains")
            self._add(entry, entry.asked)
            entry.asked = None
        if not start.siblings:
            return
        found = self._attempt(start.request_id, start.attempt)
        if found is None:
            return
        leader, led_since = found[1], found[0].arrived_at + found[1].began_s
        for sibling in start.siblings:
            entry = self._of(now, sibling.request_id)
            self._add(entry, replace(leader, number=sibling.attempt, began_s=led_since - entry.arrived_at))

    def _add(self, entry: RequestEntry, attempt: Attempt) -> None:
        entry.made += 1
        entry.attempts.append(attempt)
        if len(entry.attempts) > MAX_ATTEMPTS:
            del entry.attempts[1]

    def _received(self, now: float, sender: str, message: Message) -> None:
        match message:
            case TokensDecoded(times=all_times):
                for times in all_times:
                    found = self._attempt(times.request_id, times.attempt)
                    if found is not None and found[1].decode == sender:
                        _decoded(found[1], times)
            case Placed():
                found = self._attempt(message.request_id, message.attempt)
                if found is not None:
                    _placed(found[1], message, now - found[0].arrived_at)
            case Rejected(reason=reason, predicted_s=predicted_s) if predicted_s:
                found = self._attempt(message.request_id, message.attempt)
                if found is not None and reason is RejectReason.TTFT:
                    found[1].predicted_ttft_s = predicted_s
                elif found is not None:
                    found[1].predicted_tbt_s = predicted_s
            case FirstToken() | TextsEmbedded():
                found = self._attempt(message.request_id, message.attempt)
                if found is not None and found[1].prefill == sender and found[1].ended_s is None:
                    _first(*found, message, now - found[0].arrived_at)

    def _attempt(self, request_id: str, number: int) -> tuple[RequestEntry, Attempt] | None:
        entry = self._open.get(request_id)
        attempt = entry.last if entry is not None else None
        if entry is not None and entry.asked is not None and entry.asked.number == number:
            attempt = entry.asked
        return None if entry is None or attempt is None or attempt.number != number else (entry, attempt)

    def _outcome(self, ended: RequestEnded) -> None:
        found = self._attempt(ended.request_id, ended.attempt)
        if found is not None and ended.outcome is not None:
            attempt, outcome = found[1], ended.outcome
            attempt.ttft_s, attempt.tbt_s, attempt.tokens = outcome.ttft_s, outcome.tbt_s, outcome.output_tokens

    def _attempt_over(self, now: float, request_id: str, why: str) -> None:
        entry = self._open.get(request_id)
        if entry is not None and entry.last is not None and entry.last.ended_s is None:
            entry.last.ended_s, entry.last.why = now - entry.arrived_at, why

    def _over(self, now: float, request_id: str, end: Finished | Failed) -> None:
        entry = self._of(now, request_id)
        if isinstance(end, Failed):
            self._close(now, entry, end.code)
            return
        entry.prompt_tokens, entry.completion_tokens = end.prompt_tokens, end.completion_tokens
        entry.cached = end.cached_own, end.cached_local, end.cached_remote
        self._close(now, entry, end.reason)

    def _close(self, now: float, entry: RequestEntry, outcome: str) -> None:
        self._attempt_over(now, entry.request_id, outcome)
        entry.outcome, entry.duration_s = outcome, now - entry.arrived_at
        del self._open[entry.request_id]
        self._ended(entry)


def _placed(attempt: Attempt, message: Placed, now_s: float) -> None:
    attempt.placed_s = now_s
    attempt.prefill, attempt.decode, attempt.stages = message.prefill, message.decode, message.stages
    attempt.predicted_ttft_s, attempt.predicted_tbt_s = message.ttft_s, message.tbt_s


def _first(entry: RequestEntry, attempt: Attempt, message: FirstToken | TextsEmbedded, now_s: float) -> None:
    attempt.first_s = now_s
    entry.first_s = now_s if entry.first_s is None else entry.first_s
    if isinstance(message, TextsEmbedded):
        attempt.queue_s, attempt.prefill_s = message.queue_s, message.prefill_s
        return
    attempt.cached_own, attempt.cached_local, attempt.cached_remote = message.own, message.local, message.remote
    attempt.computed_of_cached = message.met
    attempt.cached_parts, attempt.recomputed = message.parts, message.recomputed
    attempt.queue_s, attempt.prepare_s = message.queue_s, message.prepare_s
    attempt.load_s, attempt.prefill_s = message.load_s, max(0.0, message.prefill_s - message.prepare_s)


def _decoded(attempt: Attempt, times: DecodeTimes) -> None:
    attempt.handoff_s, attempt.wait_s = times.handoff_s, times.wait_s
    attempt.decode_s, attempt.steps = times.decode_s, times.steps


def _why(event: Event) -> str:
    """Return why an attempt was given up upon this event."""
    match event:
        case Received(sender, AttemptFailed(reason=reason)):
            return f"{sender}: {reason}"
        case Received(_, Rejected(reason=reason)):
            return f"rejected: {reason.value}"
        case Received(_, Placed(prefill=prefill, decode=decode)):
            return f"{prefill} or {decode} is not there"
        case Received(sender, FirstToken() | TokensDecoded()):
            return f"{sender} has tokens that the model does not have"
        case Received(sender, TextsEmbedded()):
            return f"{sender} has vectors that are not those of the texts"
        case PeerDown(peer, reason):
            return f"{peer} is down: {reason}"
        case TimerFired(("stall", *_)):
            return "nothing came for too long"
        case DrainTimedOut():
            return "the gateway stops"
        case _:
            return type(event).__name__


# --- judgement


@dataclass(frozen=True, slots=True)
class Slos:
    """The deployment's SLOs in seconds, for requests that bring none of their own; 0 and None: no SLO."""

    ttft_s: float | None = None
    tbt_s: float | None = None

    def judge(self, entry: RequestEntry) -> list[tuple[str, bool]]:
        """Return, for each SLO of a request that began to answer, what it is on and whether it was met."""
        last = entry.last
        pairs = (
            ("ttft", entry.first_s, self.ttft_s if entry.ttft_slo_s is None else entry.ttft_slo_s),
            ("tbt", last.tbt_s if last is not None else None, self.tbt_s if entry.tbt_slo_s is None else entry.tbt_slo_s),
        )
        return [(of, was_s <= slo_s) for of, was_s, slo_s in pairs if was_s is not None and slo_s]


# --- output


@dataclass(frozen=True, slots=True)
class Span:
    """A span of time in which a node worked for an attempt."""

    name: str
    node: str
    attempt: int
    start_s: float
    duration_s: float


def spans(entry: RequestEntry) -> list[Span]:
    """Return the spans of a request by node, in the order of its attempts."""
    return [span for attempt in entry.attempts for span in _spans(attempt, entry.duration_s)]


def _spans(attempt: Attempt, over_s: float) -> Iterator[Span]:
    ended_s = over_s if attempt.ended_s is None else attempt.ended_s
    number = attempt.number
    placed_s = attempt.placed_s
    placing_s = (ended_s if placed_s is None else placed_s) - attempt.began_s
    yield Span("place", attempt.conductor, number, attempt.began_s, placing_s)
    if placed_s is None:
        return
    if attempt.first_s is None:
        yield Span("wait for the first token", attempt.prefill, number, placed_s, ended_s - placed_s)
        return
    computing_s = attempt.first_s - attempt.prefill_s
    preparing_s = computing_s - attempt.prepare_s
    yield Span("queue", attempt.prefill, number, preparing_s - attempt.queue_s, attempt.queue_s)
    yield Span("prepare", attempt.prefill, number, preparing_s, attempt.prepare_s)
    yield Span("prefill", attempt.prefill, number, computing_s, attempt.prefill_s)
    if attempt.load_s:
        yield Span("load", attempt.prefill, number, computing_s, attempt.load_s)
    if not attempt.steps:
        yield Span("decode", attempt.decode, number, attempt.first_s, ended_s - attempt.first_s)
        return
    decoding_s = ended_s - attempt.decode_s
    waiting_s = decoding_s - attempt.wait_s
    yield Span("handoff", attempt.decode, number, waiting_s - attempt.handoff_s, attempt.handoff_s)
    yield Span("wait for the batch", attempt.decode, number, waiting_s, attempt.wait_s)
    yield Span("decode", attempt.decode, number, decoding_s, attempt.decode_s)


def as_json(entry: RequestEntry) -> dict[str, Any]:
    """Return the whole record, for JSON."""
    whole = asdict(entry)
    del whole["arrived_at"], whole["asked"]
    own, local, remote = whole.pop("cached")
    return whole | {
        "cached_own": own,
        "cached_local": local,
        "cached_remote": remote,
        "spans": [asdict(span) for span in spans(entry)],
    }


def line(entry: RequestEntry) -> dict[str, Any]:
    """Return the fields of a log line: actual and predicted times, and why attempts were given up."""
    last = entry.last or Attempt(number=0, began_s=0.0, conductor="")
    own, local, remote = entry.cached
    return {
        "outcome": entry.outcome,
        "tenant": entry.tenant,
        "model": entry.model,
        "duration_s": _rounded(entry.duration_s),
        "prompt_tokens": entry.prompt_tokens,
        "completion_tokens": entry.completion_tokens,
        "cached_own": own,
        "cached_local": local,
        "cached_remote": remote,
        "first_s": _rounded(entry.first_s),
        "ttft_s": _rounded(last.ttft_s),
        "predicted_ttft_s": _rounded(last.predicted_ttft_s),
        "tbt_s": _rounded(last.tbt_s),
        "predicted_tbt_s": _rounded(last.predicted_tbt_s),
        "prefill": last.prefill,
        "decode": last.decode,
        "attempts": entry.made,
        "given_up": [f"{each.number} {_nodes(each)}: {each.why}" for each in entry.attempts[:-1]],
    }


def _nodes(attempt: Attempt) -> str:
    """Return the nodes of an attempt as `prefill>decode`; an attempt whose schedule never came has none."""
    return f"{attempt.prefill}>{attempt.decode}" if attempt.prefill or attempt.decode else "not scheduled"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
