"""The gateway of a replayed trace: it requests a placement when a request comes, sends it on, tries again, writes its record.

It does what `gateway.requests.requests` does, in runs of tokens instead of single tokens, and with clients that never
disconnect. A request that the conductor rejects ends if its client has no token yet.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.actor import (
    CancelTimer,
    Effect,
    Event,
    PeerDown,
    PeerUp,
    Received,
    Send,
    SetTimer,
    Started,
    TimerFired,
)
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import (
    AttemptFailed,
    CancelRequest,
    FirstToken,
    Message,
    Outcome,
    Placed,
    PlaceElsewhere,
    Rejected,
    RejectReason,
    RequestEnded,
    Sampling,
    Schedule,
    StartPrefill,
    StopRule,
    TokensDecoded,
)
from mooncake_zmq.gateway.settings import RequestsSettings
from mooncake_zmq.kv.block_hash import Key, extend_keys
from mooncake_zmq.laboratory.gaps import longest_tenth_s
from mooncake_zmq.laboratory.keys import ROOT, Prompt, block_keys
from mooncake_zmq.laboratory.recorder import Recorder
from mooncake_zmq.laboratory.study import Arrival, RequestRecord

NEXT = ("next",)
GREEDY = Sampling()
FAR_S = 1e6
"""Deadline of a request: it lies beyond the end of every replay."""
NO_NODE = (RejectReason.NO_PREFILL, RejectReason.NO_DECODE)


@dataclass(slots=True)
class _Request:
    """An open request."""

    name: str
    number: int
    arrival: Arrival
    record: RequestRecord
    keys: tuple[Key, ...]
    arrived_at: float
    max_tokens: int
    attempt: int = 0
    broken: int = 0
    waiting: bool = True
    """Whether it waits for the pause before its next attempt."""
    asked_at: float = 0.0
    prefill: str = ""
    decode: str = ""
    exclude: tuple[str, ...] = ()
    tokens: int = 0
    """Output tokens so far; the next field counts those before this attempt."""
    resumed_at: int = 0
    paid_s: float = 0.0
    """Engine time behind the first token of this attempt."""
    times: list[NDArray[np.float64]] = field(default_factory=list)
    """The times of its tokens, in arrays as they were received."""


class Arrivals:
    """A gateway that serves a trace. `arrivals` in order of time, from `begin_s` on; `ended` is called with each record."""

    def __init__(
        self,
        *,
        name: str,
        settings: RequestsSettings,
        arrivals: Iterator[Arrival],
        begin_s: float,
        speed: float,
        block_tokens: int,
        recorder: Recorder,
        encoded: bool,
        ended: Callable[[int, RequestRecord], None],
    ) -> None:
        self.counts = Tally()
        self.placed: Callable[[Placed], None] = lambda placed: None
        """Called with every placement."""
        self.exhausted = False
        self.open: dict[str, _Request] = {}
        self.name = name
        self._settings = settings
        self._arrivals = arrivals
        self._next: Arrival | None = None
        self._begin_s = begin_s
        self._speed = speed
        self._block_tokens = block_tokens
        self._recorder = recorder
        self._encoded = encoded
        self._ended = ended
        self._number = 0
        self._peers: dict[str, str] = {}

    def handle(self, now: float, event: Event) -> list[Effect]:
        match event:
            case Received(sender, message):
                return self._on_message(now, sender, message)
            case TimerFired(("next",)):
                return self._arrive(now)
            case TimerFired(("attempt", str(name))):
                return self._begin_attempt(now, self.open.get(name))
            case TimerFired(("placement", str(name))):
                return self._on_placement_late(now, name)
            case PeerUp() as up:
                self._peers[up.peer] = up.hello.role
            case PeerDown(peer, _):
                return self._on_peer_down(peer)
            case Started():
                return self._await_next(now)
        return []

    def check(self, now: float) -> None:
        for request in self.open.values():
            assert request.tokens < request.max_tokens, "the last token ends a request"

    def gauges(self, now: float) -> dict[str, float]:
        waiting = sum([request.waiting or not request.prefill for request in self.open.values()])
        decoding = sum([request.tokens > request.resumed_at and not request.waiting for request in self.open.values()])
        return {
            "requests_waiting": waiting,
            "requests_prefilling": len(self.open) - waiting - decoding,
            "requests_decoding": decoding,
        }

    def dump(self, now: float) -> dict[str, Any]:
        return {"gauges": self.gauges(now), "requests": list(self.open)}

    # --- arrivals

    def _await_next(self, now: float) -> list[Effect]:
        self._next = next(self._arrivals, None)
        if self._next is None:
            self.exhausted = True
            return []
        return [SetTimer(NEXT, max(0.0, self._begin_s + self._next.at_s / self._speed - now))]

    def _arrive(self, now: float) -> list[Effect]:
        arrival = self._next
        assert arrival is not None
        number, self._number = self._number, self._number + 1
        name = f"r{number}"
        output = max(1, arrival.output_tokens)
        request = self.open[name] = _Request(
            name,
            number,
            arrival,
            RequestRecord(now - self._begin_s, arrival.input_tokens, output),
            block_keys(arrival.hash_ids, arrival.input_tokens, self._block_tokens),
            now,
            output,
        )
        self._recorder.engine_s[name] = 0.0
        late = SetTimer(("placement", name), self._settings.placement_wait_s)
        return [late, *self._begin_attempt(now, request), *self._await_next(now)]

    # --- placement

    def _begin_attempt(self, now: float, request: _Request | None) -> list[Effect]:
        if request is None or not request.waiting:
            return []
        conductor = next((name for name in self._settings.conductors if name in self._peers), None)
        if conductor is None:
            return [SetTimer(("attempt", request.name), self._settings.backoff_max_s)]
        request.waiting = False
        request.attempt, request.resumed_at = request.attempt + 1, request.tokens
        request.asked_at = now
        request.prefill = request.decode = ""
        schedule = Schedule(
            request_id=request.name,
            attempt=request.attempt,
            keys=self._keys(request),
            tokens=request.arrival.input_tokens + request.tokens,
            max_tokens=request.max_tokens - request.tokens,
            exclude=request.exclude,
            begun=request.tokens > 0,
            waited_s=now - request.arrived_at,
            tenant=request.arrival.tenant,
        )
        return [Send(conductor, schedule)]

    def _keys(self, request: _Request) -> tuple[Key, ...]:
        """Return the keys of the complete blocks of prompt and tokens so far; those that the output completed as a decode makes
        them."""
        if not request.tokens:
            return request.keys
        parent = request.keys[-1] if request.keys else ROOT
        rest = self._tokens(request)[len(request.keys) * self._block_tokens * 4 :]
        return (*request.keys, *extend_keys(parent, rest, self._block_tokens))

    def _tokens(self, request: _Request) -> bytes:
        """Return the token ids as bytes where messages are encoded; else an object that makes only the parts that are read."""
        prompt = Prompt(request.arrival.input_tokens, self._block_tokens, request.number, request.tokens)
        return prompt[:] if self._encoded else cast(bytes, prompt)

    def _on_message(self, now: float, sender: str, message: Message) -> list[Effect]:
        match message:
            case TokensDecoded(entries=entries):
                return self._on_tokens(now, sender, entries)
            case Placed():
                return self._on_placed(now, message)
            case FirstToken():
                return self._on_first_token(now, sender, message)
            case Rejected():
                return self._on_rejected(now, message)
            case AttemptFailed():
                return self._on_failed(now, sender, message)
            case PlaceElsewhere():
                return []  # a node that changes its role first ends what it has
            case _:
                self.counts.add(f"unexpected_messages[type={type(message).__name__}]")
                return []

    def _on_placed(self, now: float, message: Placed) -> list[Effect]:
        request = self._current(message.request_id, message.attempt)
        if request is None or request.prefill:
            return []
        self.placed(message)
        for role, node in (("prefill", message.prefill), ("decode", message.decode)):
            if self._peers.get(node) != role:  # the node died just now, or has changed its role
                return self._retry(request, exclude=node)
        request.prefill, request.decode = message.prefill, message.decode
        record = request.record
        record.prefill, record.decode, record.attempts = message.prefill, message.decode, request.attempt
        if not request.tokens:
            record.predicted_ttft_s = request.asked_at - request.arrived_at + message.ttft_s
            record.predicted_tbt_s = message.tbt_s
        start = StartPrefill(
            request_id=request.name,
            attempt=request.attempt,
            tokens=self._tokens(request),
            root=ROOT,
            keys=self._keys(request),
            first_index=request.tokens,
            sampling=GREEDY,
            stop=StopRule(max_tokens=request.max_tokens),
            decode=message.decode,
            reuse_blocks=message.reuse_blocks,
            sources=message.sources,
            coming_blocks=message.coming_blocks,
            coming_s=message.coming_s,
            deadline_s=FAR_S,
            booking=message.booking,
            tbt_slo_s=message.tbt_slo_s,
            stages=message.stages,
            tenant=request.arrival.tenant,
        )
        return [CancelTimer(("placement", request.name)), Send(message.prefill, start)]

    def _on_rejected(self, now: float, message: Rejected) -> list[Effect]:
        request = self._current(message.request_id, message.attempt)
        if request is None or request.prefill:
            return []
        request.exclude = ()
        if request.tokens or message.reason in NO_NODE:
            return self._retry(request)
        return self._reject(now, request, message.reason.value)

    def _on_placement_late(self, now: float, name: str) -> list[Effect]:
        request = self.open.get(name)
        return [] if request is None or request.prefill else self._reject(now, request, "nobody is there")

    # --- tokens

    def _on_first_token(self, now: float, sender: str, message: FirstToken) -> list[Effect]:
        request = self._current(message.request_id, message.attempt)
        if request is None or request.prefill != sender or message.index != request.tokens:
            return []
        record = request.record
        if not request.tokens:
            record.ttft_s = now - request.arrived_at
            disk = min(message.local, self._recorder.from_disk.pop(request.name, 0) * self._block_tokens)
            record.hit_own, record.hit_dram, record.hit_remote = message.own, message.local - disk, message.remote
            record.hit_disk = disk
            record.queue_s, record.prefill_s = message.queue_s, message.prefill_s
        request.paid_s, self._recorder.engine_s[request.name] = self._recorder.engine_s[request.name], 0.0
        request.times.append(np.array((now,)))
        request.tokens += 1
        return self._finish(now, request) if request.tokens >= request.max_tokens else []

    def _on_tokens(self, now: float, sender: str, entries: tuple[tuple[str, int, int, tuple[int, ...]], ...]) -> list[Effect]:
        times = self._recorder.times[sender].popleft()
        effects: list[Effect] = []
        for name, attempt, first, tokens in entries:
            request = self.open.get(name)
            if request is None or request.attempt != attempt or request.waiting:
                effects.append(Send(sender, CancelRequest(request_id=name, attempt=attempt)))
            elif first == request.tokens:
                request.times.append(times[: len(tokens)])
                request.tokens += len(tokens)
                if request.tokens >= request.max_tokens:
                    effects += self._finish(now, request)
        return effects

    def _finish(self, now: float, request: _Request) -> list[Effect]:
        record = request.record
        times = np.concatenate(request.times)
        if request.resumed_at:
            times.sort()
        record.tbt_s = longest_tenth_s(np.diff(times))
        record.first_gap_s = float(times[1] - times[0]) if len(times) > 1 else -1.0
        record.end_s = float(times[-1]) - request.arrived_at
        outcome = Outcome(
            ttft_s=record.ttft_s,
            predicted_ttft_s=max(0.0, record.predicted_ttft_s),
            tbt_s=record.tbt_s,
            predicted_tbt_s=max(0.0, record.predicted_tbt_s),
            max_tokens=request.max_tokens - request.resumed_at,
            output_tokens=request.tokens - request.resumed_at,
            ended=True,
        )
        return self._end(request, "finished", "", outcome)

    # --- ends

    def _on_failed(self, now: float, sender: str, message: AttemptFailed) -> list[Effect]:
        request = self._current(message.request_id, message.attempt)
        if request is None or sender not in (request.prefill, request.decode):
            return []
        self.counts.add(f"attempts_failed[by={self._peers.get(sender, '')}]")
        if message.refused and request.tokens <= 1:  # the token that its prefill sent is not kept
            request.record.wasted_prefill_s += request.paid_s
            return self._cancel(request) + self._reject(now, request, "refused by the decode")
        request.broken += not message.full
        return self._retry(request, exclude=message.avoid or sender)

    def _on_peer_down(self, peer: str) -> list[Effect]:
        self._peers.pop(peer, None)
        touched = [request for request in self.open.values() if peer in (request.prefill, request.decode)]
        return [effect for request in touched for effect in self._retry(request, exclude=peer)]

    def _retry(self, request: _Request, *, exclude: str = "") -> list[Effect]:
        """Give this attempt up everywhere and begin the next one after a pause that grows."""
        effects = self._cancel(request)
        self._waste(request)
        if request.broken >= self._settings.max_attempts:
            return effects + self._end(request, "failed", "attempts_exhausted", None)
        request.waiting = True
        self.counts.add("attempts_retried")
        if exclude:
            request.exclude = (*[node for node in request.exclude if node != exclude], exclude)[-4:]
        pause_s = min(self._settings.backoff_max_s, self._settings.backoff_s * 2.0 ** min(request.attempt - 1, 16))
        ended = self._send_end(request, None)
        return [*effects, *ended, SetTimer(("attempt", request.name), pause_s)]

    def _cancel(self, request: _Request) -> list[Effect]:
        cancel = CancelRequest(request_id=request.name, attempt=request.attempt)
        return [Send(node, cancel) for node in (request.prefill, request.decode) if node in self._peers]

    def _reject(self, now: float, request: _Request, reason: str) -> list[Effect]:
        request.record.end_s = now - request.arrived_at
        self._waste(request)
        return self._end(request, "rejected", reason, None)

    def _waste(self, request: _Request) -> None:
        """Count as wasted the engine time of the request since its last token."""
        request.record.wasted_prefill_s += self._recorder.engine_s[request.name]
        self._recorder.engine_s[request.name] = 0.0

    def _end(self, request: _Request, outcome: str, reason: str, result: Outcome | None) -> list[Effect]:
        record = request.record
        record.outcome, record.reason, record.attempts = outcome, reason, request.attempt
        del self.open[request.name], self._recorder.engine_s[request.name]
        self._recorder.from_disk.pop(request.name, None)
        self._ended(request.number, record)
        timers: list[Effect] = [CancelTimer(("placement", request.name)), CancelTimer(("attempt", request.name))]
        return timers + self._send_end(request, result)

    def _send_end(self, request: _Request, outcome: Outcome | None) -> list[Effect]:
        ended = RequestEnded(request_id=request.name, attempt=request.attempt, outcome=outcome)
        return [Send(name, ended) for name in self._settings.conductors[:1] if name in self._peers]

    def _current(self, name: str, attempt: int) -> _Request | None:
        request = self.open.get(name)
        return None if request is None or request.attempt != attempt or request.waiting else request
