"""The actor that produces the later tokens: reservation, verified handoff, continuous batch, preemption, puts. PURE.

It owns its running batch and the KV budget behind it. A request that cannot go on here ends with `AttemptFailed` to the
gateway, which resumes it elsewhere from prompt and tokens so far.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict

from mooncake_zmq.core.actor import (
    CancelTimer,
    CancelWork,
    CloseSequence,
    DrainTimedOut,
    DrainWanted,
    Effect,
    Event,
    OpenSequence,
    PeerDown,
    PeerUp,
    Received,
    RestWanted,
    Send,
    SetTimer,
    Start,
    Started,
    TimerFired,
    WorkDone,
    WorkProgress,
)
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.gaps import growth_tokens
from mooncake_zmq.core.leaving import Leaving
from mooncake_zmq.core.messages import (
    MAX_REPORTED,
    AttemptFailed,
    BlocksLeased,
    CancelRequest,
    ChangeRole,
    DecodeDenied,
    DecodeLoad,
    DecodeReserved,
    DecodeTimes,
    HandoffBlocks,
    HandoffDone,
    HandoffFailed,
    HandoffReceived,
    Hello,
    LayersReady,
    LeaseRenewed,
    ReclaimSlots,
    ReportCorrupt,
    ReserveDecode,
    Sibling,
    SlotRef,
    SlotsReserved,
    TokenLogprob,
    TokensDecoded,
    clip,
    for_sibling,
)
from mooncake_zmq.core.pace import STEP_MEMORY_S, Pace
from mooncake_zmq.core.reactions import Reactions
from mooncake_zmq.core.reports import REPORT, Reports
from mooncake_zmq.core.shell import Ids, Lifecycle, Tally
from mooncake_zmq.core.work import (
    BlocksCopied,
    BlocksPulled,
    DecodeStep,
    ForkSequence,
    PullBlocks,
    SampleTokens,
    SequenceBlock,
    SequenceForked,
    StepDecoded,
    StepEntry,
    TokensSampled,
    WorkFailed,
)
from mooncake_zmq.decode.batch import Place, ahead_of, retry_after_s, step_members, victim
from mooncake_zmq.decode.masks import mask_s
from mooncake_zmq.decode.request import MISSING, NEXT_STATE, Group, Request, RequestEvent, RequestState, Segment
from mooncake_zmq.decode.settings import DecodeSettings
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.checksum import block_checksum, block_checksums
from mooncake_zmq.kv.layout import BlockLayout, div_ceil
from mooncake_zmq.pool.node.client import PoolClient, PutEnded

RECENT = 0.8
"""What earlier steps still count in `DecodeLoad.step_s` once another is measured."""
PIECE_TOKENS = 2048
"""KV of so many tokens is copied at a time, into a sequence or out of it."""
JOIN, BORDER = ("join",), "border"
"""Of the timers that begin a step held back, and end a run of steps for somebody who comes."""
LEAST_HOLD_S = 1e-4
HOLD_SHARE = 0.3
"""A step is held back for at most this part of one, for a request whose KV is nearly there."""
HELD = "held"
"""Of the timers that end the wait for a pool, with request and attempt."""
HELD_GRACE_S = 0.1
"""So long after all is computed a request waits for its pool: its client sees that as a gap after the first token, and the
prefill has what is lacking at hand."""
MOST_SEGMENTS, LEAST_SEGMENT = 8, 16
"""What is loaded from the pool is leased in so many segments at most, of so many blocks at least, one after the other: one is
loaded while the next is on its way."""
NEWER = "a newer attempt is here"
RUN_SHARE = 4
"""A work of several steps takes at most this part of the free KV ahead, so that there is some left for those that come."""

PULLED, DECODED, COPIED = (BlocksPulled, WorkFailed), (StepDecoded, WorkFailed), (BlocksCopied, WorkFailed)
FORKED, SAMPLED = (SequenceForked, WorkFailed), (TokensSampled, WorkFailed)
"""How its works end."""
LOADING, READY, STEPPING, CLOSING = RequestState.LOADING, RequestState.READY, RequestState.STEPPING, RequestState.CLOSING
SITTING_OUT, RUNNING = RequestState.SITTING_OUT, (RequestState.READY, RequestState.STEPPING, RequestState.SITTING_OUT)
STEP_BEGAN, STEPPED = RequestEvent.STEP_BEGAN, RequestEvent.STEPPED
"""By name, as each step needs them for each request: an enum's class is ten times as slow to look into."""


@dataclass(slots=True)
class _Step:
    """The work in flight."""

    work_id: int
    members: list[Request]
    steps: int
    context: int
    """Tokens of KV that its first step reads."""
    cancelled: bool = False


def _held_timer(request: Request) -> tuple[str, str, int]:
    return HELD, request.request.request_id, request.request.attempt


_Entry = tuple[tuple[str, int, int, tuple[int, ...]], tuple[TokenLogprob, ...], DecodeTimes | None]
"""What `TokensDecoded` tells of one request; an account of one that ends."""


def _decoded(entries: Sequence[_Entry]) -> TokensDecoded:
    told, logprobs, accounts = zip(*entries, strict=True)
    over = tuple([account for account in accounts if account is not None])
    return TokensDecoded(entries=told, logprobs=logprobs if any(logprobs) else (), accounts=over)


class Decode:
    """One decode instance."""

    def __init__(
        self,
        *,
        name: str,
        host: str,
        incarnation: int,
        settings: DecodeSettings,
        layout: BlockLayout,
        costs: Costs,
        may_become: str = "",
    ) -> None:
        self.name = name
        self.host = host
        self.incarnation = incarnation
        self.counts = Tally()
        self.transitions = Tally()
        self._life = Lifecycle("decode request", NEXT_STATE, self.transitions)
        self._settings = settings
        self._layout = layout
        self._costs = costs
        self._pool = PoolClient(host, settings.pool, self.counts)
        self._peers: dict[str, Hello] = {}
        self._requests: OrderedDict[str, Request] = OrderedDict()
        """The live attempt of each request, in order of reservation."""
        self._closing: list[Request] = []
        self._pulls: dict[int, Request] = {}
        self._forks: dict[int, tuple[Request, list[Request]]] = {}
        """Copies of a request's KV into its siblings."""
        self._sitting_out: dict[int, Request] = {}
        """By the works that sample their tokens."""
        self._step: _Step | None = None
        self._free_tokens = settings.capacity_tokens // layout.block_tokens * layout.block_tokens
        self._capacity_tokens = self._free_tokens
        self._step_s = 0.0
        self._border_at = 0.0
        """When the last step ended."""
        self._piece_blocks = max(1, PIECE_TOKENS // layout.block_tokens)
        self._piece_parts = self._piece_blocks * layout.layers
        self._pace = Pace(memory_s=STEP_MEMORY_S, half_life_s=settings.measured_half_life_s)
        self._reports = Reports(settings.report_s)
        self._ids = Ids()
        self._leaving = Leaving(may_become, self.counts)
        self._reactions = Reactions(
            self.counts,
            {
                ReserveDecode: self._on_reserve,
                HandoffBlocks: self._on_blocks,
                LayersReady: self._on_layers,
                HandoffDone: self._on_done,
                HandoffFailed: self._on_handoff_failed,
                CancelRequest: self._on_cancel,
                BlocksLeased: self._on_leased,
                LeaseRenewed: self._pool.on_renewed,
                SlotsReserved: self._on_slots,
                ReclaimSlots: self._pool.on_reclaim,
                ChangeRole: self._on_change,
            },
            self._pool.may_say,
        )

    def handle(self, now: float, event: Event) -> list[Effect]:
        """See `core.actor`."""
        effects = self._dispatch(now, event)
        if self._step is None and self._requests:
            effects += self._begin_step(now)
        return effects + self._drained() if self._leaving.draining else effects

    def _dispatch(self, now: float, event: Event) -> list[Effect]:
        # As with messages, the frequent ones first: see `Reactions`.
        if type(event) is Received:
            return self._reactions.to(now, event.sender, event.message)
        if type(event) is WorkDone:
            return self._on_work(now, event)
        if type(event) is TimerFired and event.key == REPORT:
            return self._report(now)
        match event:
            case PeerUp() as up:
                self._peers[up.peer] = up.hello
                self._reports.peer_up(up)
                return self._pool.peer_up(now, up)
            case PeerDown(peer, _):
                return self._on_peer_down(now, peer)
            case TimerFired(("renew",)):
                return [*self._pool.renew(now), self._renew_timer()]
            case TimerFired(("deadline", str(request_id), int(attempt))):
                request = self._requests.get(request_id)
                if request is None or request.request.attempt != attempt:
                    return []
                return self._fail(now, request, "deadline passed in decode")
            case TimerFired((kind, int())) if kind == BORDER:
                return self._interrupt()
            case TimerFired((kind, str(request_id), int(attempt))) if kind == HELD:
                return self._on_held_late(now, request_id, attempt)
            case Started():
                return [self._reports.begin(), self._renew_timer()]
            case DrainWanted():
                self._leaving.drain()
                return self._report(now)
            case RestWanted(resting):
                self._leaving.rest(resting)
                return self._report(now)
            case DrainTimedOut():
                self._leaving.drain()
                return self._hand_over(now)
            case TimerFired() | WorkProgress():
                return []
            case _:
                raise TypeError(event)

    def _on_work(self, now: float, event: WorkDone) -> list[Effect]:
        """Ids of works are used once, so each tells what it was."""
        work_id, result = event.work_id, event.result
        if (request := self._pulls.pop(work_id, None)) is not None:
            assert isinstance(result, PULLED)
            return self._on_pulled(now, request, result)
        if (fork := self._forks.pop(work_id, None)) is not None:
            assert isinstance(result, FORKED)
            return self._on_forked(now, *fork, result)
        if self._step is not None and self._step.work_id == work_id:
            assert isinstance(result, DECODED)
            return self._on_stepped(now, result)
        if (request := self._sitting_out.pop(work_id, None)) is not None:
            assert isinstance(result, SAMPLED)
            return self._on_sampled(now, request, result)
        if self._pool.copying(work_id):
            assert isinstance(result, COPIED)
            return self._put_ended(now, self._pool.on_copied(work_id, result))
        return []

    def _on_slots(self, now: float, _sender: str, message: SlotsReserved) -> list[Effect]:
        return self._put_ended(now, self._pool.on_reserved(now, message, self._ids.new()))

    def _on_change(self, now: float, sender: str, message: ChangeRole) -> list[Effect]:
        return self._report(now) if self._leaving.change(sender, message, self._peers) else []

    def check(self, now: float) -> None:
        """See `core.actor`."""
        live = [*self._requests.values(), *self._closing]
        assert self._free_tokens + sum(r.budget_tokens for r in live) == self._capacity_tokens
        assert self._free_tokens >= 0
        for request in live:
            assert (request.state is CLOSING) == (request in self._closing)
            assert request.state is not RequestState.ENDED
            assert request.position <= request.budget_tokens
            assert request.leader is None or request in request.leader.siblings
            assert not request.unwanted or request.siblings or request.state is CLOSING
            assert all(each.leader is request and each.state is LOADING for each in request.siblings)
        sitting_out = {id(r) for r in self._sitting_out.values() if r.state is not CLOSING}
        assert sitting_out == {id(r) for r in live if r.state is SITTING_OUT}
        stepping = sum(1 for r in live if r.state is STEPPING)
        assert stepping == 0 or self._step is not None

    def gauges(self, now: float) -> dict[str, float]:
        """See `core.actor`."""
        running = sum(1 for r in self._requests.values() if r.state in RUNNING)
        return {
            "capacity_tokens": self._capacity_tokens,
            "reserved_tokens": self._capacity_tokens - self._free_tokens,
            "requests_running": running,
            "requests_waiting": len(self._requests) - running,
            "requests_closing": len(self._closing),
            "leases": self._pool.leases,
            "puts": self._pool.puts,
        }

    def dump(self, now: float) -> dict[str, Any]:
        """See `core.actor`."""
        return {
            "gauges": self.gauges(now),
            "step_s": self._step_s,
            "step": asdict(self._pace.measured(now)),
            "draining": self._leaving.draining,
            "requests": [
                {
                    "request": r.request.request_id,
                    "attempt": r.request.attempt,
                    "state": r.state.value,
                    "prefill": r.prefill,
                    "tokens": r.request.tokens,
                    "output": r.count,
                    "in_flight": r.in_flight,
                    "parts": len(r.parts) - r.parts.count(MISSING),
                    "handoff_done": r.done is not None,
                }
                for r in [*self._requests.values(), *self._closing]
            ],
        }

    # --- reserving

    def _on_reserve(self, now: float, sender: str, message: ReserveDecode) -> list[Effect]:
        current = self._requests.get(message.request_id)
        if current is not None and current.request.attempt >= message.attempt:
            if current.request.attempt == message.attempt and current.prefill == sender:
                return []
            return [self._denied(sender, message, NEWER, full=False)]
        effects = self._replace(now, current)
        budget = self._layout.blocks_for(message.tokens + 1) * self._layout.block_tokens
        lack = self._lack(budget)
        reason = lack or self._refusal(sender, message, budget)
        if reason is not None:
            self.counts.add("reservations_denied")
            return [*effects, self._denied(sender, message, reason, full=lack is not None)]
        request = self._admit(now, sender, message, budget, effects)
        for sibling in message.siblings:
            effects += self._reserve_sibling(now, request, sibling, budget)
        if self._pool.node is not None:
            request.held_blocks = len(message.reuse_keys)
        return [*effects, self._reserved(request), *self._lease_held(now, request)]

    def _lease_held(self, now: float, request: Request) -> list[Effect]:
        """Ask the pool for the next segment of what it is to have."""
        keys, message = request.request.reuse_keys, request.request
        size = max(LEAST_SEGMENT, div_ceil(len(keys), MOST_SEGMENTS))
        some = keys[request.leased_blocks : min(request.leased_blocks + size, request.held_blocks)]
        if not some:
            return []
        request.segment = Segment(self._ids.new(), request.leased_blocks, len(some))
        request.leased_blocks += len(some)
        return self._pool.lease(now, request.segment.lease_id, some, message.sources, fetch=True)

    def _reserve_sibling(self, now: float, leader: Request, sibling: Sibling, budget: int) -> list[Effect]:
        """Room for a further choice, which waits for the handoff of the first. Without room it is placed by itself."""
        current, message = self._requests.get(sibling.request_id), leader.request
        if current is not None and (current is leader or current.request.attempt >= sibling.attempt):
            return []
        effects = self._replace(now, current)
        lack = self._lack(budget)
        if lack is not None:
            self.counts.add("reservations_denied")
            failed = AttemptFailed(request_id=sibling.request_id, attempt=sibling.attempt, reason=lack, full=True)
            return [*effects, Send(message.gateway, failed)]
        request = self._admit(now, leader.prefill, for_sibling(message, sibling), budget, effects)
        request.forked, request.leader = True, leader
        leader.siblings.append(request)
        return effects

    def _replace(self, now: float, current: Request | None) -> list[Effect]:
        """A newer attempt of a request has come."""
        return [] if current is None else self._tell_prefill(current, NEWER) + self._close(now, current)

    def _admit(self, now: float, prefill: str, message: ReserveDecode, budget: int, effects: list[Effect]) -> Request:
        """There is room for it."""
        self._free_tokens -= budget
        full = message.tokens // self._layout.block_tokens
        request = Request(
            request=message,
            prefill=prefill,
            order=self._ids.new(),
            sequence=self._ids.new(),
            budget_tokens=budget,
            parts=[MISSING] * (self._layout.blocks_for(message.tokens) * self._layout.layers),
            tail=message.tail,
            parent=message.last_key,
            keyed_blocks=full,
            reserved_at=now,
        )
        self._requests[message.request_id] = request
        remaining = message.stop.max_tokens - message.first_index
        # What a request asks for is no reason to have more than the budget can ever give it.
        capacity = min(message.tokens + max(1, remaining), self._capacity_tokens)
        tokens, tenant = message.tokens, message.tenant
        effects.append(OpenSequence(request.sequence, capacity, message.sampling, message.past, tokens, tenant))
        effects.append(SetTimer(("deadline", message.request_id, message.attempt), message.deadline_s))
        return request

    def _lack(self, budget: int) -> str | None:
        """What may be otherwise soon: such an attempt counts as one that found no room."""
        if self._leaving.draining:
            return "decode is draining"
        if len(self._requests) + len(self._closing) >= self._settings.max_requests:
            return "too many requests"
        return "no KV left" if self._free_tokens < budget <= self._capacity_tokens else None

    def _refusal(self, sender: str, message: ReserveDecode, budget: int) -> str | None:
        """What is wrong with the request here: it is tried a few times at most."""
        for peer in (message.gateway, sender):
            if peer not in self._peers:
                return f"{peer} is not reachable from {self.name}"
        size = self._layout.block_tokens
        if (
            message.tokens < 1
            or len(message.tail) != message.tokens % size * 4
            or (len(message.reuse_keys) + len(message.new_keys)) * size > message.tokens
        ):
            return "tail or keys do not match tokens"
        if message.block_tokens and len(message.block_tokens) != (len(message.reuse_keys) + len(message.new_keys)) * size * 4:
            return "tokens do not match keys"
        if not self._layout.has_tokens(message.tail) or not self._layout.has_tokens(message.past):
            return "tokens that the model does not have"
        sampling = message.sampling
        if not self._layout.has_token(sampling.largest_token) or not sampling.fits(message.past, message.tokens):
            return "sampling does not match tokens"
        return None if budget <= self._capacity_tokens else "prompt is longer than the KV budget"

    def _on_leased(self, now: float, _sender: str, message: BlocksLeased) -> list[Effect]:
        """The pool of our host has so many blocks of a segment."""
        sources = self._pool.on_leased(message)
        if sources is None:
            return []
        for request in self._requests.values():
            segment = request.segment
            if segment is not None and segment.lease_id == message.lease_id:
                return self._take_segment(now, request, segment, sources[: segment.blocks])  # no more than were asked for
        return self._pool.release(message.lease_id)

    def _take_segment(self, now: float, request: Request, segment: Segment, sources: Sequence[SlotRef]) -> list[Effect]:
        """Load what the pool has of a segment. What comes after a block that it does not have is handed off."""
        request.segment = None
        request.want_held(segment, sources, self._layout.layers, self._layout.block_tokens)
        if len(sources) == segment.blocks:
            return self._lease_held(now, request) + self._pull(now, request)
        held = segment.first + len(sources)
        self.counts.add("handoff_blocks_missed", request.held_blocks - held)
        request.hold_fewer(held)
        return [self._reserved(request), *self._pull(now, request), *self._verify(now, request)]

    def _reserved(self, request: Request) -> Effect:
        message = request.request
        held = request.held_blocks
        return Send(request.prefill, DecodeReserved(request_id=message.request_id, attempt=message.attempt, held_blocks=held))

    # --- the handoff

    def _on_blocks(self, now: float, sender: str, message: HandoffBlocks) -> list[Effect]:
        request = self._loading(sender, message.request_id, message.attempt)
        if request is None:
            return []
        stop = message.first_block + len(message.sources)
        if stop > self._layout.blocks_for(request.request.tokens):
            return self._fail(now, request, "more blocks than the prompt has")
        first_layer, stop_layer = message.first_layer, message.stop_layer or self._layout.layers
        if not first_layer < stop_layer <= self._layout.layers:
            return self._fail(now, request, "layers that the model does not have")
        if not message.ready:
            request.groups[message.first_block] = Group(stop, now)
        request.sources.update(enumerate(message.sources, message.first_block))
        if message.ready:
            request.want(range(message.first_block, stop), first_layer, stop_layer, self._layout.block_tokens)
        if request.wants_twice:
            return self._fail(now, request, "blocks handed off twice")
        if stop == self._layout.blocks_for(request.request.tokens) and not request.promised:
            request.promised = True
            refused = self._refuse(now, request)
            if refused is not None:
                return refused
        return self._pull(now, request)

    def _refuse(self, now: float, request: Request) -> list[Effect] | None:
        """Its prefill is nearly done: would the steps be too long with it in the batch, for itself or for what others were
        promised? None if it may come. A resumed request is not refused, nor one that will not take a step here."""
        message = request.request
        if message.tbt_slo_s <= 0 or message.first_index or request.left <= 1:
            return None
        promised = [r for r in self._requests.values() if r.promised and r is not request]
        if not promised:
            return None
        others = (*promised, *request.siblings)
        wait_s = retry_after_s(
            self._costs,
            slowness=self._pace.ratio(now),
            slo_s=min([request.longest_step_s, *(r.longest_step_s for r in promised)]),
            max_batch=self._settings.max_batch,
            others=[Place(r.context, max(0, r.left)) for r in others],
            own_context=request.context + int(growth_tokens(min(len(others) + 1, self._settings.max_batch), request.left)),
            ahead=ahead_of(others, request.tenant),
        )
        if wait_s is None:
            return None
        self.counts.add("requests_refused")
        denied = DecodeDenied(
            request_id=message.request_id,
            attempt=message.attempt,
            reason="the step would be too long",
            full=True,
            refused=True,
            retry_after_s=wait_s,
        )
        return [Send(request.prefill, denied), *self._close(now, request, prefill_tells=True)]

    def _on_layers(self, now: float, sender: str, message: LayersReady) -> list[Effect]:
        request = self._loading(sender, message.request_id, message.attempt)
        group = None if request is None else request.groups.get(message.first_block)
        if request is None or group is None or not group.wanted_layers < message.stop_layer <= self._layout.layers:
            return []
        blocks = range(message.first_block, group.stop_block)
        request.want(blocks, group.wanted_layers, message.stop_layer, self._layout.block_tokens)
        group.wanted_layers = message.stop_layer
        if request.wants_twice:
            return self._fail(now, request, "blocks handed off twice")
        return self._pull(now, request) + self._expect(now, request, group)

    def _expect(self, now: float, request: Request, group: Group) -> list[Effect]:
        """When the last layers of the last chunk will be there, by what the others took: a run of steps ends before."""
        if group.stop_block < self._layout.blocks_for(request.request.tokens):
            return []
        layers_s = (now - group.announced_at) / group.wanted_layers
        request.due_at = now + layers_s * (self._layout.layers - group.wanted_layers)
        if self._settings.max_steps == 1:
            return []
        return [SetTimer((BORDER, request.sequence), max(0.0, request.due_at - now - self._step_s))]

    def _pull(self, now: float, request: Request) -> list[Effect]:
        """Copy what is ready, a piece at a time, so that nobody's last layers wait for another one's whole prompt. One copy at
        a time per request: what becomes ready meanwhile goes into the next one."""
        if request.pulling or not request.wanted:
            return []
        reading_s = [self._pool.reading_time_s(now, lease_id) for lease_id in request.reading]
        deadline_s = min([self._settings.pull_deadline_s, *reading_s])
        if deadline_s <= 0:
            return self._fail(now, request, "lease ended before the held blocks were loaded")
        piece = request.piece(self._piece_parts)
        loads = tuple(request.wanted[:piece])
        del request.wanted[:piece]
        request.pulling = True
        request.in_flight += 1
        work_id = self._ids.new()
        self._pulls[work_id] = request
        return [Start(work_id, PullBlocks(request.sequence, loads), deadline_s)]

    def _on_pulled(self, now: float, request: Request, result: BlocksPulled | WorkFailed) -> list[Effect]:
        request.in_flight -= 1
        request.pulling = False
        effects: list[Effect] = []
        if not any([load.block < request.held_blocks for load in request.wanted]):
            effects += [effect for lease_id in request.reading for effect in self._pool.release(lease_id)]
            request.reading = []
        if request.state is CLOSING:
            return effects + self._try_end(request)
        if isinstance(result, WorkFailed):
            return effects + self._fail(now, request, f"handoff copy failed: {result.reason}")
        if result.failed:
            self.counts.add("handoff_blocks_failed", len(result.failed))
            refs = [ref for block in result.corrupt if (ref := request.read_from(block)).checksum]
            self.counts.add("handoff_blocks_corrupt", len(refs))
            effects += self._pool.report_corrupt(refs)
            theirs = tuple(ref for ref in refs if ref.node != self._pool.node)
            if theirs:  # else the prefill would reuse them for the next attempt, and fail again
                effects.append(Send(request.prefill, ReportCorrupt(slots=theirs)))
            return effects + self._fail(
                now, request, f"a handed-off block {'did not verify' if result.corrupt else 'was not reached'}"
            )
        parts, layers = request.parts, self._layout.layers
        for block, layer, checksum in result.parts:
            parts[block * layers + layer] = checksum
        return effects + self._pull(now, request) + self._verify(now, request)

    def _on_done(self, now: float, sender: str, message: HandoffDone) -> list[Effect]:
        request = self._loading(sender, message.request_id, message.attempt)
        if request is None or request.done is not None and message.blocks <= request.done.blocks:
            return []
        if not self._layout.has_token(message.token):
            return self._fail(now, request, "a token that the model does not have")
        request.done = message
        effects: list[Effect] = [SetTimer(_held_timer(request), HELD_GRACE_S)] if request.segment else []
        effects += self._verify(now, request)
        return effects + self._interrupt() if request.is_arriving(self._piece_parts) else effects

    def _on_held_late(self, now: float, request_id: str, attempt: int) -> list[Effect]:
        """All is computed, and the pool still waits for blocks that the prefill has."""
        request = self._requests.get(request_id)
        if request is None or request.request.attempt != attempt:
            return []
        return self._forgo_segment(now, request)

    def _forgo_segment(self, now: float, request: Request) -> list[Effect]:
        """Wait no longer for what the pool has not said that it has."""
        segment = request.segment
        if segment is None:
            return []
        return self._pool.release(segment.lease_id) + self._take_segment(now, request, segment, ())

    def _verify(self, now: float, request: Request) -> list[Effect]:
        """The handoff counts only once every layer of every block is here and folds to the announced checksum."""
        done, layers = request.done, self._layout.layers
        if done is None or request.pulling or request.wanted or request.segment or request.state is not LOADING:
            return []
        handed = self._layout.blocks_for(request.request.tokens) - request.held_blocks
        if done.layers == layers and done.blocks < handed:
            return []  # it has not got the word yet that the pool had fewer
        if done.layers != layers or done.blocks != handed:
            return self._fail(now, request, "handoff is incomplete")
        parts = request.parts
        if MISSING in parts:
            return self._fail(now, request, "handoff is incomplete")
        if block_checksum(block_checksums(parts[request.held_blocks * layers :], layers)) != done.checksum:
            self.counts.add("handoffs_corrupt")
            return self._fail(now, request, "handoff checksum differs")
        self._move(request, RequestEvent.VERIFIED)
        request.verified_at = now
        request.parts.clear()
        request.sources.clear()
        request.passed_over.clear()
        self.counts.add("handoff_blocks_held", request.held_blocks)
        message = request.request
        received = HandoffReceived(request_id=message.request_id, attempt=message.attempt)
        effects: list[Effect] = [Send(request.prefill, received), *self._offer_prompt(now, request, done)]
        effects += self._fork(now, request, done)
        wanted = done.wanted and not request.unwanted
        return effects + (self._first(now, request, done.token) if wanted else self._close(now, request))

    def _first(self, now: float, request: Request, token: int) -> list[Effect]:
        """It has its KV and its first token: it joins the batch, unless that token ends it."""
        request.made, request.last, request.promised = 1, token, True
        if request.request.stop.reason(token, request.count) is not None:
            return self._close(now, request)
        if self._step is not None and len(self._step.members) < self._settings.max_batch:
            return self._interrupt()
        return []

    def _fork(self, now: float, leader: Request, done: HandoffDone) -> list[Effect]:
        """Its siblings begin with the same KV: those of which the prefill says nothing are cancelled."""
        tokens, targets = dict(done.siblings), list[Request]()
        siblings, leader.siblings = leader.siblings, []
        effects: list[Effect] = []
        for sibling in siblings:
            sibling.leader = None
            token = tokens.get(sibling.request.request_id)
            if token is None or sibling.request.stop.reason(token, sibling.count + 1) is not None:
                effects += self._close(now, sibling)
            elif not self._layout.has_token(token):
                effects += self._fail(now, sibling, "a token that the model does not have")
            else:
                sibling.last = token
                targets.append(sibling)
        if not targets:
            return effects
        for user in (leader, *targets):
            user.in_flight += 1
        work_id = self._ids.new()
        self._forks[work_id] = leader, targets
        fork = ForkSequence(leader.sequence, tuple([each.sequence for each in targets]), leader.request.tokens)
        return [*effects, Start(work_id, fork, self._settings.pull_deadline_s)]

    def _on_forked(
        self, now: float, leader: Request, targets: Sequence[Request], result: SequenceForked | WorkFailed
    ) -> list[Effect]:
        effects: list[Effect] = []
        for request in (leader, *targets):
            request.in_flight -= 1
            if request.state is RequestState.CLOSING:
                effects += self._try_end(request)
            elif request is leader:
                continue
            elif isinstance(result, WorkFailed):
                effects += self._fail(now, request, f"copy of a prompt's KV failed: {result.reason}")
            elif request.sequence in result.without_memory:
                effects += self._fail(now, request, "no memory for the sequence", full=True)
            else:
                self._move(request, RequestEvent.VERIFIED)
                request.parts.clear()
                effects += self._first(now, request, request.last)
        return effects

    def _offer_prompt(self, now: float, request: Request, done: HandoffDone) -> list[Effect]:
        """A pipeline's blocks are whole here for the first time: the pool gets them from here. So does the pool of another host
        than the prefill's: the next turn of a chat finds them beside its decode."""
        keys, size, complete = done.keys, self._layout.block_tokens, request.request.tokens // self._layout.block_tokens
        if not keys:
            return self._keep_prompt(now, request) if self._settings.store_prompts else []
        if len(keys) > complete or len(done.block_tokens) != len(keys) * size * 4:
            return []
        sources = [SequenceBlock(request.sequence, block) for block in range(complete - len(keys), complete)]
        return self._put(now, request, keys, sources, done.parent, done.block_tokens)

    def _keep_prompt(self, now: float, request: Request) -> list[Effect]:
        """Offer what was handed off of it: what was not came from the pool."""
        message = request.request
        if not message.block_tokens:
            return []
        request.unkept = range(request.held_blocks, len(message.reuse_keys) + len(message.new_keys))
        return self._keep_piece(now, request)

    def _keep_piece(self, now: float, request: Request) -> list[Effect]:
        """One piece after the other; what is left when the request ends is not kept."""
        message, size = request.request, self._layout.block_tokens * 4
        piece, request.unkept = request.unkept[: self._piece_blocks], request.unkept[self._piece_blocks :]
        if not piece or request.state is CLOSING:
            return []
        keys = (*message.reuse_keys, *message.new_keys)
        parent, tokens = keys[piece.start - 1] if piece.start else None, message.block_tokens
        sources = [SequenceBlock(request.sequence, block) for block in piece]
        tokens = tokens[piece.start * size : piece.stop * size]
        more = bool(request.unkept)
        return self._put(now, request, keys[piece.start : piece.stop], sources, parent, tokens, more=more)

    def _on_handoff_failed(self, now: float, sender: str, message: HandoffFailed) -> list[Effect]:
        request = self._requests.get(message.request_id)
        current = request is not None and (request.request.attempt, request.prefill) == (message.attempt, sender)
        if request is None or not current or request.forked or request.state is not LOADING:
            return []
        return self._close(now, request, prefill_tells=True)

    def _loading(self, prefill: str, request_id: str, attempt: int) -> Request | None:
        request = self._requests.get(request_id)
        if request is None or request.request.attempt != attempt or request.prefill != prefill:
            self.counts.add("stale_handoff_messages")
            return None
        return request if request.state is LOADING and not request.forked else None

    # --- the batch

    def _begin_step(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while True:
            ready = [r for r in self._requests.values() if r.state is READY]
            members = step_members(ready, self._settings.max_batch)
            short = [r for r in members if r.context > r.budget_tokens and not self._grow(r)]
            if not short or self._closing:  # what is closing gives its KV back: wait for that rather than preempt more
                members = [r for r in members if r not in short] if short else members
                break
            effects += self._preempt(now)
        if not members:
            return effects
        hold_s = self._hold_s(now)
        if hold_s > LEAST_HOLD_S:
            return [*effects, SetTimer(JOIN, hold_s)]
        steps = self._run_length(members)
        entries = []
        for request in members:
            self._move(request, STEP_BEGAN)
            request.stepped_at = request.stepped_at or now
            request.in_flight += 1
            sampling = request.request.sampling
            wait_s = mask_s(self._step_s, constrained=bool(sampling.constraint), was_late=request.was_late)
            entries.append(StepEntry(request.sequence, request.last, request.position, sampling, wait_s))
        self.counts.add("steps_sat_out", len(self._sitting_out))
        work_id = self._ids.new()
        self._step = _Step(work_id, members, steps, sum([request.context for request in members]))
        return [*effects, Start(work_id, DecodeStep(tuple(entries), steps), self._settings.step_deadline_s)]

    def _hold_s(self, now: float) -> float:
        """How much longer the next step waits for a request whose last blocks are being copied, or will be within that time: it
        would have to wait for the whole step otherwise."""
        hold_s, held_s = HOLD_SHARE * self._step_s, now - self._border_at
        if held_s >= hold_s:
            return 0.0
        expected_s = hold_s / 2  # the rest is for its last layers
        for request in self._requests.values():
            if request.is_arriving(self._piece_parts):
                return hold_s - held_s
            if request.done is None and held_s < expected_s and abs(request.due_at - self._border_at) < expected_s:
                return expected_s - held_s
        return 0.0

    def _run_length(self, members: Sequence[Request]) -> int:
        """Steps to make in one work: until the first member ends, as far as there is KV for all of them."""
        steps = min(self._settings.max_steps, *[request.left for request in members]) if self._settings.max_steps > 1 else 1
        if all([request.position + steps <= request.budget_tokens for request in members]):
            return max(1, steps)
        while steps > 1:
            growth = [self._growth(request, steps) for request in members]
            if sum(growth) * RUN_SHARE <= self._free_tokens:
                for request, more in zip(members, growth, strict=True):
                    request.budget_tokens += more
                self._free_tokens -= sum(growth)
                return steps
            steps //= 2
        return 1

    def _growth(self, request: Request, steps: int) -> int:
        """KV that the tokens fed in so many steps need beside what is reserved: whole blocks."""
        needed = request.position + steps - request.budget_tokens
        return self._layout.blocks_for(needed) * self._layout.block_tokens if needed > 0 else 0

    def _grow(self, request: Request) -> bool:
        """Make sure there is KV for the token to be fed; False if none is left."""
        more = self._growth(request, 1)
        if not more:
            return True
        if more > self._free_tokens:
            return False
        self._free_tokens -= more
        request.budget_tokens += more
        return True

    def _shrink(self, request: Request) -> None:
        """A run ended sooner than was reserved for."""
        needed, size = request.position + 1, self._layout.block_tokens
        if request.budget_tokens - needed >= size:
            kept = self._layout.blocks_for(needed) * size
            self._free_tokens += request.budget_tokens - kept
            request.budget_tokens = kept

    def _interrupt(self) -> list[Effect]:
        """Somebody waits for the end of the run: it stops at its next border."""
        step = self._step
        if step is None or step.steps == 1 or step.cancelled:
            return []
        step.cancelled = True
        return [CancelWork(step.work_id)]

    def _preempt(self, now: float) -> list[Effect]:
        """The youngest request gives way. Its full blocks are in the pool already, so it resumes cheaply elsewhere."""
        youngest = victim([r for r in self._requests.values() if r.state is not STEPPING])
        assert youngest is not None
        self.counts.add("preemptions")
        return self._fail(now, youngest, "preempted", full=True)

    def _on_stepped(self, now: float, result: StepDecoded | WorkFailed) -> list[Effect]:
        step, self._step, self._border_at = self._step, None, now
        assert step is not None
        columns: Sequence[tuple[int, ...]] = [()] * len(step.members)
        told: Sequence[tuple[TokenLogprob | None, ...]] = [()] * len(step.members)
        unable: dict[int, WorkFailed] = {}
        sat_out: tuple[int, ...] = ()
        if isinstance(result, StepDecoded):
            self._measure(now, step, result)
            columns = list(zip(*result.tokens, strict=True))
            told = list(zip(*result.logprobs, strict=True)) or told
            unable, sat_out = dict(result.failed), result.sat_out
        effects: list[Effect] = []
        batches: dict[str, list[_Entry]] = {}
        for place, (request, tokens, logprobs) in enumerate(zip(step.members, columns, told, strict=True)):
            request.in_flight -= 1
            if request.state is CLOSING:
                effects += self._try_end(request)
                continue
            self._move(request, STEPPED)
            if isinstance(result, WorkFailed):
                effects += self._fail(now, request, f"step failed: {result.reason}")
                continue
            if place in unable:
                effects += self._take_rest(now, request, tokens[:-1], logprobs[:-1], batches, unable[place])
                continue
            request.was_late = place in sat_out
            if request.was_late:
                tokens, logprobs = tokens[:-1], logprobs[:-1]
            if tokens:
                effects += self._take_tokens(now, request, tokens, logprobs, batches)
            if step.steps > 1 and request.state is READY:
                self._shrink(request)
            if request.was_late and request.state is READY:
                effects.append(self._sit_out(request))
        return self._tell(batches) + effects

    def _tell(self, batches: dict[str, list[_Entry]]) -> list[Effect]:
        """Each gateway what was sampled for it."""
        self.counts.add("generation_tokens", sum([len(told[-1]) for each in batches.values() for told, _, _ in each]))
        return [Send(gateway, _decoded(entries)) for gateway, entries in batches.items()]

    def _sit_out(self, request: Request) -> Effect:
        """Its next token is computed and not sampled: it was not known in time what it may be."""
        self._move(request, RequestEvent.SAT_OUT)
        request.in_flight += 1
        request.sampling_id = self._ids.new()
        self._sitting_out[request.sampling_id] = request
        return Start(request.sampling_id, SampleTokens(request.sequence), self._settings.step_deadline_s)

    def _on_sampled(self, now: float, request: Request, result: TokensSampled | WorkFailed) -> list[Effect]:
        request.in_flight -= 1
        if request.state is CLOSING:
            return self._try_end(request)
        self._move(request, RequestEvent.SAMPLED)
        if isinstance(result, WorkFailed):
            return self._fail(now, request, result.reason, stuck=result.stuck)
        batches: dict[str, list[_Entry]] = {}
        ((token, logprob),) = result.sampled
        effects = self._take_tokens(now, request, (token,), (logprob,), batches)
        return self._tell(batches) + effects

    def _measure(self, now: float, step: _Step, result: StepDecoded) -> None:
        """Each step of a run reads one more token of KV for each member than the one before it."""
        made, batch = len(result.tokens), len(step.members)
        self.counts.add("steps", made)
        recent_s = result.elapsed_s / made
        keep = RECENT**made if self._step_s else 0.0
        self._step_s = keep * self._step_s + (1 - keep) * recent_s
        context = step.context + batch * (made - 1) / 2
        self._pace.add(now, result.elapsed_s, made * self._costs.step_s(batch, context))

    def _take_tokens(
        self,
        now: float,
        request: Request,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob | None, ...],
        batches: dict[str, list[_Entry]],
    ) -> list[Effect]:
        """What the steps of one work sampled for one request; what comes after its end is not its."""
        message, first = request.request, request.count
        stop, ended = message.stop.cut(tokens, first)
        taken = tokens[:stop]
        effects: list[Effect] = []
        if self._settings.store_output:
            effects = self._store(now, request, taken)
        else:
            request.made += stop
            request.last = taken[-1]
        entry = (message.request_id, message.attempt, first, taken)
        told = tuple([each for each in logprobs[:stop] if each is not None]) if logprobs else ()
        request.steps += stop
        batches.setdefault(message.gateway, []).append((entry, told, request.account(now) if ended else None))
        return effects + self._close(now, request) if ended else effects

    def _take_rest(
        self,
        now: float,
        request: Request,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob | None, ...],
        batches: dict[str, list[_Entry]],
        failed: WorkFailed,
    ) -> list[Effect]:
        """What was sampled before a step that failed for this request alone."""
        effects = self._take_tokens(now, request, tokens, logprobs, batches) if tokens else []
        if request.state is not READY:
            return effects
        return effects + self._fail(now, request, failed.reason, stuck=failed.stuck)

    def _store(self, now: float, request: Request, taken: Sequence[int]) -> list[Effect]:
        """The pool gets the blocks that these tokens complete, so that the next turn of a chat hits them."""
        size = self._layout.block_tokens
        keys = request.take(taken, size)
        if not keys:
            return []
        first, told = request.keyed_blocks, len(keys) * size * 4
        before = request.parent if first else None  # the root is nobody's block
        sources = [SequenceBlock(request.sequence, first + index) for index in range(len(keys))]
        tokens = request.tail[:told]
        request.parent, request.tail = keys[-1], request.tail[told:]
        request.keyed_blocks += len(keys)
        return self._put(now, request, keys, sources, before, tokens)

    def _put(
        self,
        now: float,
        request: Request,
        keys: Sequence[Key],
        sources: Sequence[SequenceBlock],
        parent: Key | None,
        tokens: bytes,
        *,
        more: bool = False,
    ) -> list[Effect]:
        """Offer blocks of its sequence, which a copy then uses."""
        put_id, tenant = self._ids.new(), request.request.tenant
        effects = self._pool.put(now, put_id, keys, sources, request, parent=parent, tokens=tokens, tenant=tenant, more=more)
        if effects is None:
            return []
        request.in_flight += 1
        return effects

    def _put_ended(self, now: float, ended: PutEnded) -> list[Effect]:
        effects = list(ended.effects)
        for token in ended.tokens:
            assert isinstance(token, Request)
            token.in_flight -= 1
            if token.state is CLOSING:
                effects += self._try_end(token)
            elif token.unkept:
                effects += self._keep_piece(now, token)
        return effects

    # --- ends

    def _on_cancel(self, now: float, sender: str, message: CancelRequest) -> list[Effect]:
        request = self._requests.get(message.request_id)
        if request is None or request.request.gateway != sender or request.request.attempt > message.attempt:
            return []
        self.counts.add("requests_cancelled")
        if request.siblings:
            request.unwanted = True
            return []
        return self._tell_prefill(request, "cancelled") + self._close(now, request)

    def _hand_over(self, now: float) -> list[Effect]:
        """Whoever is left here goes on elsewhere at once, as one for whom there is no room: nothing broke."""
        self.counts.add("requests_handed_over", len(self._requests))
        effects: list[Effect] = []
        while self._requests:
            effects += self._fail(now, next(iter(self._requests.values())), "decode is leaving", full=True)
        return effects

    def _fail(
        self, now: float, request: Request, reason: str, *, full: bool = False, avoid: str = "", stuck: bool = False
    ) -> list[Effect]:
        self.counts.add("requests_failed")
        message = request.request
        failed = AttemptFailed(
            request_id=message.request_id, attempt=message.attempt, reason=clip(reason), full=full, avoid=avoid, stuck=stuck
        )
        return [Send(message.gateway, failed), *self._tell_prefill(request, reason), *self._close(now, request)]

    def _tell_prefill(self, request: Request, reason: str) -> list[Effect]:
        if request.state is not LOADING or request.forked:
            return []
        message = request.request
        failed = HandoffFailed(request_id=message.request_id, attempt=message.attempt, reason=clip(reason))
        return [Send(request.prefill, failed)]

    def _close(self, now: float, request: Request, *, prefill_tells: bool = False) -> list[Effect]:
        """Let go of it. Those that wait for its handoff are placed by themselves; `prefill_tells`: it tells their gateway."""
        message = request.request
        effects: list[Effect] = [CancelTimer(("deadline", message.request_id, message.attempt)), *self._reports.hurry(now)]
        if message.reuse_keys:
            effects.append(CancelTimer(_held_timer(request)))
        if request.state is STEPPING:
            effects += self._interrupt()
        if request.state is SITTING_OUT:
            effects.append(CancelWork(request.sampling_id))
        self._move(request, RequestEvent.CLOSE)
        del self._requests[message.request_id]
        self._closing.append(request)
        request.wanted = []
        unread = [request.segment.lease_id] if request.segment else []
        request.segment = None
        if not request.pulling:
            unread += request.reading
            request.reading = []
        for lease_id in unread:
            effects += self._pool.release(lease_id)
        effects += self._part(now, request, prefill_tells=prefill_tells)
        return effects + self._try_end(request)

    def _part(self, now: float, request: Request, *, prefill_tells: bool) -> list[Effect]:
        """A request that is over waits for nobody, and nobody for it."""
        leader, request.leader = request.leader, None
        if leader is not None:
            leader.siblings.remove(request)
            alone = leader.unwanted and not leader.siblings
            return self._tell_prefill(leader, "cancelled") + self._close(now, leader) if alone else []
        effects: list[Effect] = []
        siblings, request.siblings = request.siblings, []
        for sibling in siblings:
            sibling.leader = None
            effects += (
                self._close(now, sibling) if prefill_tells else self._fail(now, sibling, "its handoff is over", full=True)
            )
        return effects

    def _try_end(self, request: Request) -> list[Effect]:
        if request.in_flight:
            return []
        self._move(request, RequestEvent.END)
        self._closing.remove(request)
        self._free_tokens += request.budget_tokens
        return [CloseSequence(request.sequence)]

    def _on_peer_down(self, now: float, peer: str) -> list[Effect]:
        self._peers.pop(peer, None)
        self._reports.peer_down(peer)
        effects = self._put_ended(now, self._pool.peer_down(peer))
        for request in list(self._requests.values()):
            unverified = request.state is LOADING and not request.forked
            if request.state in (CLOSING, RequestState.ENDED):
                continue  # with the one whose handoff it waited for
            if request.request.gateway == peer:
                effects += self._tell_prefill(request, f"{peer} is down") + self._close(now, request)
            elif request.prefill == peer and unverified:
                effects += self._fail(now, request, f"{peer} is down", avoid=peer)
            elif self._pool.node is None:
                effects += self._forgo_segment(now, request)
        return effects

    def _report(self, now: float) -> list[Effect]:
        requests = self._requests.values()
        running = [r for r in requests if r.state in RUNNING]
        bookings = [booking for r in requests if (booking := r.request.booking)]
        load = DecodeLoad(
            running=len(running),
            reserved=len(self._requests) - len(running),
            free_tokens=self._free_tokens,
            capacity_tokens=self._capacity_tokens,
            context_tokens=sum([request.context for request in running]),
            max_batch=self._settings.max_batch,
            room=max(0, self._settings.max_requests - len(self._requests) - len(self._closing)),
            step_s=self._step_s,
            step=self._pace.measured(now),
            bookings=tuple(bookings[:MAX_REPORTED]),
            draining=self._leaving.draining,
            fixed_s=self._costs.decode_step_s,
        )
        return self._reports.send(now, load)

    def _drained(self) -> list[Effect]:
        idle = not (self._requests or self._closing or self._pool.puts)
        return self._leaving.drained(idle=idle)

    # --- leaves

    def _denied(self, prefill: str, message: ReserveDecode, reason: str, *, full: bool) -> Send:
        denied = DecodeDenied(request_id=message.request_id, attempt=message.attempt, reason=reason, full=full)
        return Send(prefill, denied)

    def _renew_timer(self) -> SetTimer:
        return SetTimer(("renew",), self._settings.pool.lease_ttl_s / 5)

    def _move(self, request: Request, event: RequestEvent) -> None:
        request.state = self._life.after(request.state, event)
