"""The actor that builds KV for prompts and the first token: queue, reuse, chunks, handoff, puts. PURE.

It owns its slab (the slots its KV is handed off and reused from) and its queue. A job that cannot go on here ends with
`AttemptFailed` to the gateway, which places the request again: there is no other recovery to get wrong.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from mooncake_zmq.core.actor import (
    CancelTimer,
    CancelWork,
    CloseSequence,
    DrainTimedOut,
    DrainWanted,
    Effect,
    Event,
    Fence,
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
from mooncake_zmq.core.chunking import chunk_stop
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.leaving import Leaving
from mooncake_zmq.core.messages import (
    MAX_SCORED,
    AttemptFailed,
    BlocksLeased,
    CancelRequest,
    ChangeRole,
    DecodeDenied,
    DecodeReserved,
    EndStage,
    FirstToken,
    HandoffBlocks,
    HandoffDone,
    HandoffFailed,
    HandoffReceived,
    Hello,
    LayersReady,
    LeaseRenewed,
    PromptScored,
    ReclaimSlots,
    ReportCorrupt,
    ReserveDecode,
    Sampled,
    SlotRef,
    SlotsReserved,
    StageChunk,
    StageDone,
    StageFailed,
    StageReady,
    StartPrefill,
    StartStage,
    TokenLogprob,
    WaitEnded,
    clip,
)
from mooncake_zmq.core.reactions import Reactions
from mooncake_zmq.core.reports import REPORT, Reports
from mooncake_zmq.core.shell import Ids, Lifecycle, Tally
from mooncake_zmq.core.work import (
    BlockLoad,
    BlocksCopied,
    ChunkComputed,
    ComputeChunk,
    ComputeStage,
    LayersComputed,
    SampleTokens,
    SlotGrant,
    StageComputed,
    TokensSampled,
    WorkFailed,
)
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.slots import Slots, SlotState
from mooncake_zmq.pool.node.client import UNHEARD, PoolClient, PutEnded
from mooncake_zmq.prefill.job import NEXT_STATE, Job, JobEvent, JobState, are_known, attempts_of, choices_of, tokens_of
from mooncake_zmq.prefill.pipeline import Group, grants, refusal, release, reserve, written
from mooncake_zmq.prefill.queue import JobQueue
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.prefill.slab_announcer import SlabAnnouncer
from mooncake_zmq.prefill.stages import DEADLINE, Stages
from mooncake_zmq.prefill.waiting import WAITED, Waiting
from mooncake_zmq.prefill.workload import Workload

MAX_UNREUSED = 256
"""Requests remembered whose reused blocks were not reached; of more, the oldest are forgotten."""

COMPUTED, STAGED = (ChunkComputed, StageComputed, WorkFailed), (StageComputed, WorkFailed)
COPIED, SAMPLED = (BlocksCopied, WorkFailed), (TokensSampled, WorkFailed)
"""How its works end."""
PREPARING, READY, COMPUTING, ABANDONED = JobState.PREPARING, JobState.READY, JobState.COMPUTING, JobState.ABANDONED
"""By name, as nearly every event asks for them: an enum's class is ten times as slow to look into."""


class Prefill:
    """One prefill instance."""

    def __init__(
        self,
        *,
        name: str,
        host: str,
        incarnation: int,
        settings: PrefillSettings,
        layout: BlockLayout,
        costs: Costs,
        may_become: str = "",
    ) -> None:
        if settings.chunk_tokens % layout.block_tokens:
            raise ValueError(f"chunk_tokens must be a multiple of the block size {layout.block_tokens}")
        self.name = name
        self.host = host
        self.incarnation = incarnation
        self.slots = Slots(settings.slab_bytes // layout.slot_bytes)
        self.counts = Tally()
        self.job_transitions = Tally()
        self._life = Lifecycle("prefill job", NEXT_STATE, self.job_transitions)
        self._settings = settings
        self._layout = layout
        self._queue: JobQueue[Job] = JobQueue(settings.max_active, settings.short_lane)
        self._waiting = Waiting(self.slots, self.counts)
        self._announcer = SlabAnnouncer(self.slots, self.counts)
        self._workload = Workload(settings, costs, layout.block_tokens)
        self._reports = Reports(settings.report_s)
        self._pool = PoolClient(host, settings.pool, self.counts)
        self._peers: dict[str, Hello] = {}
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        """The live job of each request, in arrival order."""
        self._leases: dict[int, Job] = {}
        """The job of each lease asked for or held."""
        self._sampling: dict[int, Job] = {}
        """Jobs set aside, by the works that sample their first tokens."""
        self._abandoned: list[Job] = []
        self._unreused: OrderedDict[str, None] = OrderedDict()
        """Requests whose reused blocks were not reached, from here or from the decode: their next attempt here computes them.
        Else blocks that are intact but out of reach, hence reported to nobody, would fail one attempt after the other."""
        self._computing: tuple[int, Job] | None = None
        self._ids = Ids()
        self._leaving = Leaving(may_become, self.counts)
        self._stages = Stages(
            name=name,
            incarnation=incarnation,
            settings=settings,
            layout=layout,
            slots=self.slots,
            pool=self._pool,
            workload=self._workload,
            ids=self._ids,
            counts=self.counts,
            transitions=self.job_transitions,
            forget_corrupt=self._on_corrupt,
        )
        self._reactions = Reactions(
            self.counts,
            {
                StartPrefill: self._on_start,
                CancelRequest: self._on_cancel,
                DecodeReserved: self._on_reserved,
                DecodeDenied: self._on_denied,
                StartStage: self._on_start_stage,
                StageChunk: self._on_stage_chunk,
                EndStage: self._on_end_stage,
                StageReady: self._on_stage_ready,
                StageDone: self._on_stage_done,
                StageFailed: self._on_stage_failed,
                HandoffReceived: self._on_handoff_received,
                HandoffFailed: self._on_handoff_failed,
                BlocksLeased: self._on_leased,
                LeaseRenewed: self._pool.on_renewed,
                SlotsReserved: self._on_slots,
                ReclaimSlots: self._pool.on_reclaim,
                ChangeRole: self._on_change,
                ReportCorrupt: self._on_report_corrupt,
                WaitEnded: self._on_wait_ended,
            },
            self._pool.may_say,
        )

    @property
    def transitions(self) -> dict[str, int]:
        """State transitions taken, for coverage."""
        return self.job_transitions | self.slots.transitions

    def holds(self, key: Key) -> bool:
        """Return whether this complete block stands in the slab."""
        return self.slots.committed(key) is not None

    def handle(self, now: float, event: Event) -> list[Effect]:
        """See `core.actor`."""
        if type(event) is WorkProgress:  # the most frequent one, and nothing that anybody waits for in the queue
            return self._on_progress(event)
        effects = self._dispatch(now, event)
        effects += self._schedule(now)
        effects += self._announcer.flush(self._reports.conductors)
        if self._leaving.draining:
            effects += self._drained()
        return [Fence(self.slots.take_fences()), *effects] if self.slots.fences else effects

    def _dispatch(self, now: float, event: Event) -> list[Effect]:
        # As with messages, the frequent ones first: see `Reactions`.
        if type(event) is Received:
            return self._reactions.to(now, event.sender, event.message)
        if type(event) is TimerFired and event.key == REPORT:
            return self._report(now)
        if type(event) is WorkDone:
            return self._on_work(now, event)
        match event:
            case PeerUp() as up:
                self._peers[up.peer] = up.hello
                self._reports.peer_up(up)
                slab = self._announcer.whole() if up.hello.role == "conductor" else []
                return [*(Send(up.peer, message) for message in slab), *self._pool.peer_up(now, up)]
            case PeerDown(peer, _):
                return self._on_peer_down(now, peer)
            case TimerFired(("renew",)):
                return [*self._pool.renew(now), self._renew_timer()]
            case TimerFired(("deadline", str(request_id), int(attempt))):
                return self._on_deadline(now, request_id, attempt)
            case TimerFired((kind, str(request_id), int(attempt))) if kind == WAITED:
                return self._end_wait(self._waiting.timed_out(request_id, attempt))
            case TimerFired((kind, int(lease_id))) if kind == UNHEARD:
                return self._leased(lease_id, ()) if self._pool.forgo(lease_id) else []
            case TimerFired((kind, str(request_id), int(attempt))) if kind == DEADLINE:
                return self._stages.on_deadline(request_id, attempt)
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
            case TimerFired():
                return []
            case _:
                raise TypeError(event)

    def _on_work(self, now: float, event: WorkDone) -> list[Effect]:
        """Ids of works are used once, so each tells what it was."""
        work_id, result = event.work_id, event.result
        if self._computing is not None and self._computing[0] == work_id:
            assert isinstance(result, COMPUTED)
            return self._on_chunk(now, result)
        if self._pool.copying(work_id):
            assert isinstance(result, COPIED)
            return self._put_ended(self._pool.on_copied(work_id, result))
        if self._stages.is_computing(work_id):
            assert isinstance(result, STAGED)
            return self._stages.on_computed(now, result) + self._reports.hurry(now)
        if (job := self._sampling.pop(work_id, None)) is not None:
            assert isinstance(result, SAMPLED)
            return self._on_sampled(now, job, result)
        if self._stages.is_sampling(work_id):
            assert isinstance(result, SAMPLED)
            return self._stages.on_sampled(work_id, result)
        return []

    def _on_start_stage(self, now: float, sender: str, message: StartStage) -> list[Effect]:
        return self._stages.on_start(now, sender, message, draining=self._leaving.draining)

    def _on_stage_chunk(self, _now: float, sender: str, message: StageChunk) -> list[Effect]:
        return self._stages.on_chunk(sender, message)

    def _on_end_stage(self, _now: float, sender: str, message: EndStage) -> list[Effect]:
        return self._stages.on_end(sender, message)

    def _on_handoff_received(self, now: float, sender: str, message: HandoffReceived) -> list[Effect]:
        return self._on_handoff_ended(now, sender, message.request_id, message.attempt)

    def _on_slots(self, now: float, _sender: str, message: SlotsReserved) -> list[Effect]:
        return self._put_ended(self._pool.on_reserved(now, message, self._ids.new()))

    def _on_change(self, now: float, sender: str, message: ChangeRole) -> list[Effect]:
        return self._report(now) if self._leaving.change(sender, message, self._peers) else []

    def _on_report_corrupt(self, _now: float, _sender: str, message: ReportCorrupt) -> list[Effect]:
        return self._on_corrupt(message.slots)

    def check(self, now: float) -> None:
        """See `core.actor`."""
        self.slots.check()
        live = [*self._jobs.values(), *self._abandoned]
        for job in live:
            assert job.state is not JobState.ENDED
            assert (job.state is ABANDONED) == (job in self._abandoned)
            assert job.is_begun or not (job.own_slots or job.new_slots or job.sequence)
            assert (job.state is JobState.WAITING) == self._waiting.holds(job)
        self._stages.check()
        pinned = [slot for job in live for slot in job.held_slots] + self._stages.held_slots
        writing = {slot for slot in pinned if self.slots.state_of(slot) is SlotState.WRITING}
        assert len(writing) == self.slots.count(SlotState.WRITING), "every slot being written is a job's or a stage's"
        pinned += [slot for token in self._pool.tokens if isinstance(token, tuple) for slot in token]
        assert sorted(pinned) == [s for s, pins in enumerate(self.slots.pins) for _ in range(pins)], "a job's or a put's"
        computing = [job for job in live if job.state in (COMPUTING, ABANDONED)]
        assert len(computing) == (self._computing is not None)
        assert not (self._computing and self._stages.computing), "one engine"
        computed = (JobState.SAMPLING, JobState.HANDING_OFF)
        queued = [job for job in live if job.state not in computed and not self._waiting.holds(job)]
        assert {id(job) for job in self._sampling.values()} == {id(job) for job in live if job.state is JobState.SAMPLING}
        assert {id(job) for job in self._queue} == {id(job) for job in queued}, "whoever is not computed to its end waits"
        assert self._queue.waiting == sum(1 for job in queued if job.state is JobState.QUEUED)
        assert {id(job) for job in self._leases.values()} == {id(job) for job in live if job.lease_id is not None}

    def gauges(self, now: float) -> dict[str, float]:
        """See `core.actor`."""
        states = [job.state for job in self._jobs.values()]
        waiting = sum(1 for s in states if s in (JobState.WAITING, JobState.QUEUED, PREPARING, JobState.GATHERING))
        return {
            "capacity_blocks": self.slots.capacity,
            "cached_blocks": self.slots.count(SlotState.COMMITTED),
            "pinned_blocks": self.slots.pinned,
            "writing_blocks": self.slots.count(SlotState.WRITING),
            "requests_waiting": waiting,
            "requests_running": len(self._jobs) - waiting + len(self._abandoned),
            "stages": len(self._stages),
            "leases": self._pool.leases,
            "puts": self._pool.puts,
        }

    def dump(self, now: float) -> dict[str, Any]:
        """See `core.actor`."""
        return {
            "gauges": self.gauges(now),
            **self._workload.dump(now),
            "draining": self._leaving.draining,
            "stages": self._stages.dump(now),
            "jobs": [
                {
                    "request": job.request.request_id,
                    "attempt": job.request.attempt,
                    "state": job.state.value,
                    "age_s": now - job.arrived_at,
                    "tokens": job.length,
                    "computed": job.computed,
                    "decode": job.request.decode,
                    "lease": job.lease_id,
                }
                for job in [*self._jobs.values(), *self._abandoned]
            ],
        }

    # --- the gateway's orders

    def _on_start(self, now: float, sender: str, message: StartPrefill) -> list[Effect]:
        current = self._jobs.get(message.request_id)
        if current is not None and current.request.attempt >= message.attempt:
            return []
        effects = self._drop(now, current, "a newer attempt is here") if current is not None else []
        length = len(tokens_of(message)) // 4
        lack = self._lack()
        reason = lack or self._refusal(message, length)
        if reason is not None:
            self.counts.add("jobs_refused")
            avoid = self._away(message)
            return effects + self._failed(sender, attempts_of(message), reason, full=lack is not None, avoid=avoid)
        group = Group(message, self._layout, self._settings.chunk_tokens) if message.stages else None
        rank = self._workload.rank(now, message, length, group.share if group else 1.0)
        job = Job(request=message, gateway=sender, order=self._ids.new(), rank=rank, arrived_at=now, group=group)
        self._jobs[message.request_id] = job
        effects.append(SetTimer(("deadline", message.request_id, message.attempt), message.deadline_s))
        if self._may_wait(job):
            job.state = JobState.WAITING
            return [*effects, self._waiting.begin(job)]
        self._queue.arrive(job)
        return effects

    def _may_wait(self, job: Job) -> bool:
        """Return whether a job that arrives waits for blocks: not without the conductor that would end it, nor where they would
        not be found, nor if its end has come already."""
        request = job.request
        if (early := self._waiting.ended_early(request.booking)) is not None:
            job.sources = early.sources or job.sources
            job.waited = True
            return False
        ends = not request.conductor or request.conductor in self._peers
        found = self._settings.own_reuse or self._pool.node is not None
        return ends and found and self._waiting.is_needed(job)

    def _on_wait_ended(self, _now: float, sender: str, message: WaitEnded) -> list[Effect]:
        job = self._waiting.booked(sender, message.booking, came=bool(message.sources))
        if job is None:
            self._waiting.came_early(message)
        elif message.sources:
            job.sources = message.sources
        return self._end_wait(job)

    def _end_wait(self, job: Job | None) -> list[Effect]:
        """The job queues from now on, if it still waited."""
        if job is None:
            return []
        timer, job.waited = self._waiting.remove(job), True
        self._move(job, JobEvent.RELEASED)
        self._queue.arrive(job)
        return [timer]

    def _lack(self) -> str | None:
        """What may be otherwise soon: such an attempt counts as one that found no room."""
        if self._leaving.draining:
            return "prefill is draining"
        queued = self._queue.waiting + len(self._waiting)
        return "prefill queue is full" if queued >= self._settings.max_queued else None

    def _refusal(self, message: StartPrefill, length: int) -> str | None:
        """What is wrong with the request here: it is tried a few times at most."""
        if length == 0 or len(tokens_of(message)) % 4:
            return "no tokens"
        if not are_known(message, self._layout):
            return "tokens that the model does not have"
        if not self._layout.has_token(message.sampling.largest_token) or message.sampling.prompt_tokens > length:
            return "sampling does not match tokens"
        if len(message.keys) != length // self._layout.block_tokens:
            return "keys do not match tokens"
        if self._layout.blocks_for(length) > self.slots.capacity:
            return "prompt is longer than the slab"
        if message.stages and (reason := refusal(message, self.name, self._layout)) is not None:
            return reason
        if message.stages and Group(message, self._layout, self._settings.chunk_tokens).room > self.slots.capacity:
            return "prompt is longer than the slab"
        if message.stages and message.prompt_logprobs is not None:
            return "a pipeline tells no probabilities of a prompt"
        away = self._away(message)
        return f"{away} is not reachable from {self.name}" if away else None

    def _on_cancel(self, now: float, sender: str, message: CancelRequest) -> list[Effect]:
        job = self._wanted_by(message.request_id, message.attempt)
        if job is None or job.gateway != sender:
            return []
        del job.choices[message.request_id]
        if job.choices:  # it goes on for the others
            return []
        self.counts.add("jobs_cancelled")
        return self._drop(now, job, "cancelled")

    def _wanted_by(self, request_id: str, attempt: int) -> Job | None:
        """The job that has this attempt of a request, or an older one, among its choices."""
        own = self._jobs.get(request_id)
        jobs = (own, *self._jobs.values()) if own is not None else self._jobs.values()
        return next((job for job in jobs if job.choices.get(request_id, attempt + 1) <= attempt), None)

    def _on_deadline(self, now: float, request_id: str, attempt: int) -> list[Effect]:
        job = self._jobs.get(request_id)
        if job is None or job.request.attempt != attempt:
            return []
        return self._fail(now, job, "deadline passed in prefill")

    # --- preparing: reservation, reuse, room

    def _schedule(self, now: float) -> list[Effect]:
        """Activate queued jobs while there are places, and give the engine its next chunk."""
        effects: list[Effect] = []
        if not (len(self._queue) or len(self._stages)):
            return effects
        while (job := self._queue.activate()) is not None:
            effects += self._activate(now, job)
        preparing = [job for job in self._queue.active() if job.state is PREPARING]
        for job in preparing:
            effects += self._prepare(now, job)
            if job.state is PREPARING and job.held_blocks is not None and job.leased:
                break  # it lacks room in the slab: what gets free is kept for it, not taken by those that rank after it
        if preparing:
            effects += self._break_standstill(now)
        while self._computing is None and self._stages.computing is None:
            turn, stage = self._queue.first(_is_ready), self._stages.first()
            if turn is None and stage is None:
                turn = self._queue.first(_may_go_ahead)
            if stage is not None and (turn is None or (stage.rank, stage.order) < (turn.rank, turn.order)):
                effects += self._stages.compute(now, stage)
            elif turn is not None:
                effects += self._compute(now, turn)  # or fails it, and the next one gets the turn
            else:
                break
        return effects

    def _break_standstill(self, now: float) -> list[Effect]:
        """Jobs whose own hits fill the slab can wait for room in a circle: the last one gives way and is placed anew."""
        stuck = [job for job in self._queue.active() if job.state is PREPARING]
        waiting = self._queue.waiting + len(self._waiting)
        idle = len(self._jobs) == waiting + len(stuck) and not self._abandoned and not self._pool.puts
        if not idle or not stuck or len(self._stages) or any(job.held_blocks is None or not job.leased for job in stuck):
            return []
        return self._fail(now, stuck[-1], "no room in the slab", full=True)

    def _activate(self, now: float, job: Job) -> list[Effect]:
        """Pin own hits, lease more from the pool, ask the decode for KV: all at once, then wait for the answers."""
        self._move(job, JobEvent.ACTIVATED)
        job.started_at = now
        request = job.request
        scored = request.prompt_logprobs is not None  # each of its tokens has to be computed
        reusable = () if scored else request.keys[: (job.length - 1) // self._layout.block_tokens]
        own = self.slots.leading_run(reusable if self._settings.own_reuse else ())
        self.slots.pin(own)
        job.own_slots += own
        job.prefix += self._refs(own)
        effects: list[Effect] = []
        unreused = request.request_id in self._unreused
        self._unreused.pop(request.request_id, None)
        wanted = () if unreused else reusable[len(job.prefix) :]
        if job.group is not None:
            job.group.keys = () if unreused else reusable
        promised = bool(wanted) and len(job.prefix) < request.reuse_blocks
        if wanted and (self._pool.node is not None or (promised and not job.waited)):
            job.lease_id = self._ids.new()
            self._leases[job.lease_id] = job
            effects += self._pool.lease(
                now,
                job.lease_id,
                wanted,
                job.sources,
                fetch=promised,  # from other hosts, or from this host's SSD
                compute_s=self._workload.block_s(now),
                wait_s=self._workload.spared_s(now, request, job.length, len(job.prefix)),
            )
        else:
            job.leased = True
        may_hold = self._may_hold(job, unreused or scored)
        alone = not (scored or job.group or request.siblings)
        if alone and not may_hold and self._is_one_chunk(job):
            job.held_blocks = 0  # whatever it answers: the engine need not wait for that
        full, elsewhere = job.length // self._layout.block_tokens, self._is_elsewhere(request.decode)
        reserve = ReserveDecode(
            request_id=request.request_id,
            attempt=request.attempt,
            gateway=job.gateway,
            tokens=job.length,
            reuse_keys=may_hold,
            last_key=request.keys[-1] if request.keys else request.root,
            tail=job.tokens[full * self._layout.block_tokens * 4 :],
            first_index=request.first_index,
            sampling=request.sampling,
            stop=request.stop,
            deadline_s=max(0.0, job.arrived_at + request.deadline_s - now),
            booking=request.booking,
            tbt_slo_s=request.tbt_slo_s,
            past=job.past,
            tenant=request.tenant,
            siblings=tuple([each for each in request.siblings if each.request_id in job.choices]),
            sources=() if self._pool.node is None else (self._pool.node,),
            new_keys=request.keys[len(may_hold) :] if elsewhere else (),
            block_tokens=job.tokens[: full * self._layout.block_tokens * 4] if elsewhere else b"",
        )
        return [*effects, Send(request.decode, reserve)]

    def _may_hold(self, job: Job, computed_anew: bool) -> tuple[bytes, ...]:
        """Keys of the reused blocks that the decode may find on its own host. On ours it reads them where we do.

        It fetches from our host's pool alone, also what that fetches itself: then it crosses the link of whoever has it once.
        """
        request = job.request
        if computed_anew or not self._is_elsewhere(request.decode):
            return ()
        return request.keys[: max(request.reuse_blocks, len(job.prefix))]

    def _is_elsewhere(self, decode: str) -> bool:
        """Whether it has another pool than we have."""
        return self._peers[decode].host != self.host

    def _is_one_chunk(self, job: Job) -> bool:
        """What is left of it, own hits aside."""
        own = len(job.prefix) * self._layout.block_tokens
        return chunk_stop(own, job.length, self._settings.chunk_tokens) == job.length

    def _on_leased(self, _now: float, _sender: str, message: BlocksLeased) -> list[Effect]:
        sources = self._pool.on_leased(message)
        return [] if sources is None else self._leased(message.lease_id, sources, message.remote)

    def _leased(self, lease_id: int, sources: tuple[SlotRef, ...], remote: int = 0) -> list[Effect]:
        """What the pool has of what was asked for, the last `remote` blocks from elsewhere; nothing, if it was not heard."""
        job = self._leases.get(lease_id)
        if (of_stage := self._stages.on_leased(lease_id, sources)) is not None:
            return of_stage
        if job is None or job.state is not PREPARING or job.leased:
            return self._pool.release(lease_id)
        job.leased = True
        job.estimate = None
        sources = sources[: (job.length - 1) // self._layout.block_tokens - len(job.prefix)]  # no more than were asked for
        remote = min(remote, len(sources))
        job.prefix += sources
        job.remote_blocks += remote
        job.local_blocks += len(sources) - remote
        return []

    def _on_reserved(self, now: float, sender: str, message: DecodeReserved) -> list[Effect]:
        job = self._job(sender, message.request_id, message.attempt)
        if job is None:
            return [self._handoff_failed(sender, message.request_id, message.attempt, "unknown job")]
        if job.reserved:
            return self._on_fewer_held(job, message.held_blocks)
        if not job.is_begun:
            return []
        job.reserved = True
        if job.held_blocks is None:
            job.held_blocks = message.held_blocks
        return []

    def _on_fewer_held(self, job: Job, held_blocks: int) -> list[Effect]:
        """The decode's pool did not get all that it had undertaken to load: it is handed the reused blocks that it lacks, which
        are held for it until the handoff ends. What was computed it was told of anyway."""
        if job.held_blocks is None or held_blocks >= job.held_blocks:
            return []
        before, job.held_blocks = job.held_blocks, held_blocks
        if job.state in (PREPARING, JobState.GATHERING):
            return []
        effects: list[Effect] = []
        if lacking := job.prefix[held_blocks:before]:
            effects.append(self._handoff_blocks(job, held_blocks, tuple(lacking), ready=True))
        if job.done is not None:
            job.done = self._covering(job, job.done)
            effects.append(Send(job.request.decode, job.done))
        return effects

    def _covering(self, job: Job, done: HandoffDone) -> HandoffDone:
        """The same, of all that the decode does not load itself."""
        handed = ([ref.checksum for ref in job.prefix] + job.checksums)[job.held_blocks :]
        return structs.replace(done, blocks=len(handed), checksum=block_checksum(handed))

    def _on_denied(self, now: float, sender: str, message: DecodeDenied) -> list[Effect]:
        """No room, or its step would be too long now that the prefill is done. Once the first token has gone out the request
        is refused no more: it is placed again, as after any handoff that failed."""
        job = self._job(sender, message.request_id, message.attempt)
        if job is None:
            return []
        refused = message.refused and job.state is not JobState.HANDING_OFF
        return self._fail(
            now,
            job,
            f"{sender} denied: {message.reason}",
            full=message.full,
            avoid=sender,
            tell_decode=False,
            refused_for_s=message.retry_after_s if refused else None,
        )

    def _prepare(self, now: float, job: Job) -> list[Effect]:
        """Once reservation and lease are there and the slab has room: open the sequence, announce the reused blocks."""
        if job.held_blocks is None or not job.leased:
            return []
        pooled = len(job.prefix) > len(job.own_slots)
        if pooled and self._pool.reading_time_s(now, job.lease_id) <= 0:
            self._drop_pool_prefix(job)
        if job.group is not None:
            return self._gather(now, job, job.group)
        blocks = self._layout.blocks_for(job.length) - len(job.prefix)
        if blocks > self.slots.available:
            return []
        job.new_slots = reserve(self.slots, blocks)
        return self._prepared(job, job.held_blocks)

    def _prepared(self, job: Job, held_blocks: int) -> list[Effect]:
        self._move(job, JobEvent.PREPARED)
        job.computed = len(job.prefix) * self._layout.block_tokens
        job.sequence = self._ids.new()
        job.chunk_first_block = len(job.prefix)
        sampling = job.request.sampling
        opened = OpenSequence(job.sequence, job.length, sampling, job.past, job.length, job.request.tenant)
        effects: list[Effect] = [opened]
        first = min(held_blocks, len(job.prefix))
        if first < len(job.prefix):
            effects.append(self._handoff_blocks(job, first, tuple(job.prefix[first:]), ready=True))
        return effects

    def _drop_pool_prefix(self, job: Job) -> None:
        """The lease is over, or nearly: those blocks are a miss."""
        del job.prefix[len(job.own_slots) :]
        job.local_blocks = job.remote_blocks = 0
        self.counts.add("prefix_leases_expired")

    # --- as the first stage of a pipeline

    def _gather(self, now: float, job: Job, group: Group) -> list[Effect]:
        """Once the slab has room: ask the other stages. They do not wait for room, so nobody waits for it in a circle."""
        if group.room + len(job.own_slots) > self.slots.capacity:
            self.slots.unpin(job.cut_prefix(0))
        if group.room > self.slots.available:
            return []
        job.new_slots = group.take_room(self.slots)
        self._move(job, JobEvent.GATHER)
        self.counts.add("pipelines")
        return group.ask(max(0.0, job.arrived_at + job.request.deadline_s - now))

    def _on_stage_ready(self, now: float, sender: str, message: StageReady) -> list[Effect]:
        job = self._led(sender, message.request_id, message.attempt)
        if job is None or job.group is None or job.state is not JobState.GATHERING:
            return []
        if not job.group.on_ready(sender, message.blocks):
            return []
        if len(job.prefix) > len(job.own_slots) and self._pool.reading_time_s(now, job.lease_id) <= 0:
            self._drop_pool_prefix(job)
        common = job.group.common_blocks(len(job.prefix))
        self.slots.unpin(job.cut_prefix(common))
        release(self.slots, job.new_slots[:common])
        del job.new_slots[:common]
        job.group.plan(common * self._layout.block_tokens)
        assert job.held_blocks is not None
        return self._prepared(job, job.held_blocks)

    def _on_own_stage(self, now: float, job: Job, group: Group, result: StageComputed, first_block: int) -> list[Effect]:
        """A chunk is computed here: the decode may have its layers, the next stage its hidden states."""
        base = len(job.prefix)
        slots = job.new_slots[first_block - base : self._layout.blocks_for(job.computed) - base]
        self._move(job, JobEvent.OWN_DONE if job.computed == job.length else JobEvent.CHUNK_DONE)
        sources, leaving = self._written(slots), self._written(group.leaving)
        return group.on_own_done(sources, result.parts, leaving)

    def _on_stage_done(self, now: float, sender: str, message: StageDone) -> list[Effect]:
        job = self._led(sender, message.request_id, message.attempt)
        if job is None or job.group is None or job.state is JobState.HANDING_OFF:
            return []
        tokens = [message.token or 0, *(token for token, _ in message.others)]
        if not job.group.expects(sender, message) or not self._layout.has_token(max(tokens)):
            return self._fail(now, job, f"{sender} computed something else", avoid=sender)
        effects = job.group.on_done(sender, message)
        if not job.group.finished:
            return effects
        assert message.token is not None
        job.checksums = job.group.checksums()
        return effects + self._finish(now, job, ((message.token, message.logprob), *message.others))

    def _on_stage_failed(self, now: float, sender: str, message: StageFailed) -> list[Effect]:
        job = self._led(sender, message.request_id, message.attempt)
        if job is None or job.state is JobState.HANDING_OFF:
            return []
        if message.unreached:
            self._forgo_reuse(job)
        avoid = sender if message.full else ""
        return self._fail(now, job, f"{sender}: {message.reason}", full=message.full, avoid=avoid, stuck=message.stuck)

    def _led(self, stage: str, request_id: str, attempt: int) -> Job | None:
        """The job in whose pipeline `stage` is a later one."""
        job = self._jobs.get(request_id)
        current = job is not None and job.request.attempt == attempt and stage in job.request.stages
        return job if current else None

    # --- computing

    def _compute(self, now: float, job: Job) -> list[Effect]:
        assert job.sequence is not None
        request, size = job.request, self._layout.block_tokens
        deadline_s = self._settings.work_deadline_s
        prefix: tuple[BlockLoad, ...] = ()
        prefix_s = deadline_s
        if not job.loaded and job.prefix:
            if len(job.prefix) > len(job.own_slots):
                prefix_s = min(deadline_s, self._pool.reading_time_s(now, job.lease_id))
            if prefix_s <= 0:
                return self._fail(now, job, "lease ended before the prefix was loaded")
            stop_layer = job.group.own_layers.stop if job.group else self._layout.layers
            prefix = tuple(BlockLoad(i, ref, 0, stop_layer, size) for i, ref in enumerate(job.prefix))
        if not job.loaded:
            job.computing_at = now
            self.counts.add("jobs_begun_ahead", not job.reserved)
        job.loaded = True
        found = self._find_computed(job)
        prefix += tuple(job.found)
        job.found.clear()
        start = job.computed
        stop = chunk_stop(start, job.length, self._settings.chunk_tokens)
        first_block, stop_block = start // size, self._layout.blocks_for(stop)
        base = len(job.prefix)
        slots = job.new_slots[first_block - base : stop_block - base]
        job.chunk_first_block, job.chunk_stop = first_block, stop
        job.chunk_loads, job.chunk_began_at, job.chunk_told_layers = prefix, now, 0
        self._move(job, JobEvent.CHUNK_BEGAN)
        work_id = self._ids.new()
        self._computing = (work_id, job)
        samples = stop == job.length and not job.group
        work = ComputeChunk(
            sequence=job.sequence,
            start=start,
            tokens=job.tokens[start * 4 : stop * 4],
            prefix=prefix,
            outputs=self._grants(slots),
            sampling=request.sampling if samples else None,
            prefix_s=prefix_s,
            seeds=tuple([each.seed for each in request.siblings]) if samples else (),
            prompt_logprobs=request.prompt_logprobs,
            following=job.tokens[stop * 4 : (stop + 1) * 4] if request.prompt_logprobs is not None else b"",
        )
        if job.group:
            leaving = self._grants(job.group.begin_own(self.slots))
            stage = ComputeStage(work, stop - start, 0, job.group.own_layers.stop, leaving=leaving)
            return [Start(work_id, stage, deadline_s)]
        written = self._handoff_blocks(job, first_block, self._written(slots), ready=False)
        return [*found, written, Start(work_id, work, deadline_s)]

    def _find_computed(self, job: Job) -> list[Effect]:
        """Reuse what other jobs have computed here meanwhile: the blocks from the next chunk on that stand in the slab take the
        places of those reserved for them. Returns their handoff."""
        request, first = job.request, job.computed // self._layout.block_tokens
        reusable = (job.length - 1) // self._layout.block_tokens
        if job.group is not None or request.prompt_logprobs is not None or first >= reusable:
            return []
        if self.slots.committed(request.keys[first]) is None:
            return []
        slots = self.slots.leading_run(request.keys[first:reusable])
        refs, place = self._refs(slots), first - len(job.prefix)
        self.slots.pin(slots)
        release(self.slots, job.new_slots[place : place + len(slots)])
        job.reuse_computed(first, place, slots, refs, self._layout)
        self.counts.add("blocks_found_while_queued", len(slots))
        return [self._handoff_blocks(job, first, tuple(refs), ready=True)]

    def _on_progress(self, event: WorkProgress) -> list[Effect]:
        if self._computing is None or self._computing[0] != event.work_id:
            return []
        job = self._computing[1]
        if job.state is not COMPUTING:
            return []
        assert isinstance(event.progress, LayersComputed)
        return self._tell_layers(job, event.progress.stop_layer)

    def _tell_layers(self, job: Job, stop_layer: int) -> list[Effect]:
        """The decode may have these layers of the chunk under way."""
        if stop_layer <= job.chunk_told_layers:
            return []
        job.chunk_told_layers = stop_layer
        request, first_block = job.request, job.chunk_first_block
        ready = LayersReady(
            request_id=request.request_id, attempt=request.attempt, first_block=first_block, stop_layer=stop_layer
        )
        return [Send(request.decode, ready)]

    def _on_chunk(self, now: float, result: ChunkComputed | StageComputed | WorkFailed) -> list[Effect]:
        assert self._computing is not None
        (_, job), self._computing = self._computing, None
        self._queue.charge(job, max(0.0, now - job.chunk_began_at))
        if job.state is ABANDONED:
            return self._end(now, job)
        if isinstance(result, WorkFailed):
            self.counts.add("chunks_failed")
            self._move(job, JobEvent.CHUNK_DONE)
            return self._fail(now, job, f"chunk failed: {result.reason}", stuck=result.stuck)
        if result.failed:
            self._move(job, JobEvent.CHUNK_DONE)
            return self._on_prefix_failed(now, job, result)
        first_block, start, stop = job.chunk_first_block, job.computed, job.chunk_stop
        if job.request.prompt_logprobs is None:  # what those take is no measure of what others will
            loaded = len(job.chunk_loads) * self._layout.block_tokens
            self._workload.measure(now, result, start=start, stop=stop, loaded=loaded, share=job.share)
        self.counts.add("prompt_tokens_computed", stop - start)
        job.load_s = max(job.load_s, result.loaded_s)
        job.computed = stop
        if isinstance(result, StageComputed):
            assert job.group is not None
            return self._on_own_stage(now, job, job.group, result, first_block)
        job.checksums += result.checksums
        layers, scored = self._tell_layers(job, self._layout.layers), self._tell_scored(job, start + 1, result.scored)
        if job.computed < job.length:
            self._move(job, JobEvent.CHUNK_DONE)
            return layers + scored + self._keep_chunk(now, job)
        if result.token is None:
            return [*layers, *scored, *self._set_aside(job), *self._keep_chunk(now, job)]
        finished = self._finish(now, job, ((result.token, result.logprob), *result.others), layers)
        return scored + finished + self._keep_chunk(now, job)

    def _keep_chunk(self, now: float, job: Job) -> list[Effect]:
        """Make the complete blocks of the chunk that ended reusable, here at once, and offer them to the pool."""
        first, base = job.chunk_first_block, len(job.prefix)
        stop = min(job.chunk_stop // self._layout.block_tokens, len(job.request.keys))
        slots = job.new_slots[first - base : stop - base]
        if not slots:
            return []
        if self._settings.own_reuse:  # what nobody will look for needs no name
            keys = job.request.keys[first:stop]
            self._announcer.computed([key for slot, key in zip(slots, keys, strict=True) if self.slots.name(slot, key)])
        self.slots.commit_all(slots, job.checksums[first - base : stop - base])
        effects = self._offer_chain(now, job.request, first, slots, more=job.computed < job.length)
        return effects + [effect for waiter in self._waiting.found() for effect in self._end_wait(waiter)]

    def _tell_scored(self, job: Job, first: int, scored: Sequence[TokenLogprob]) -> list[Effect]:
        """What the prompt's tokens from position `first` on are worth, as soon as it is known."""
        return [
            Send(
                job.gateway,
                PromptScored(
                    request_id=job.request.request_id,
                    attempt=job.request.attempt,
                    first=first + begin,
                    logprobs=tuple(scored[begin : begin + MAX_SCORED]),
                ),
            )
            for begin in range(0, len(scored), MAX_SCORED)
        ]

    def _on_prefix_failed(self, now: float, job: Job, result: ChunkComputed | StageComputed) -> list[Effect]:
        """Reused blocks were not loaded: nobody shall find corrupt copies again, and the request is placed anew."""
        sources = dict(enumerate(job.prefix)) | {load.block: load.source for load in job.chunk_loads}
        refs = [sources[block] for block in result.corrupt if block in sources]
        unreached = len(result.failed) - len(result.corrupt)
        self.counts.add("prefix_blocks_unreached", unreached)
        if unreached:
            self._forgo_reuse(job)
        reason = "a reused block did not verify" if refs else "a reused block was not reached"
        return self._on_corrupt(refs) + self._fail(now, job, reason)

    def _forgo_reuse(self, job: Job) -> None:
        self._unreused[job.request.request_id] = None
        if len(self._unreused) > MAX_UNREUSED:
            self._unreused.popitem(last=False)

    def _on_corrupt(self, refs: Sequence[SlotRef]) -> list[Effect]:
        """Found by ourselves or by the decode that read them."""
        self.counts.add("prefix_blocks_corrupt", len(refs))
        for ref in refs:
            mine = (ref.node, ref.incarnation) == (self.name, self.incarnation) and ref.slot < self.slots.capacity
            stands = mine and self.slots.generation[ref.slot] == ref.generation
            if stands and self.slots.state_of(ref.slot) is SlotState.COMMITTED:
                self.slots.forget(ref.slot)
        return self._pool.report_corrupt(refs)

    def _set_aside(self, job: Job) -> list[Effect]:
        """It is not known yet what its first token may be: others have their turns meanwhile, and its sequence's memory."""
        assert job.sequence is not None
        self._move(job, JobEvent.SET_ASIDE)
        self._queue.leave(job)
        self.counts.add("jobs_set_aside")
        job.sampling_id = self._ids.new()
        self._sampling[job.sampling_id] = job
        sample = Start(job.sampling_id, SampleTokens(job.sequence), self._settings.work_deadline_s)
        closed, job.sequence = job.sequence, None
        return [sample, CloseSequence(closed)]

    def _on_sampled(self, now: float, job: Job, result: TokensSampled | WorkFailed) -> list[Effect]:
        if isinstance(result, WorkFailed):
            return self._fail(now, job, f"no first token: {result.reason}", stuck=result.stuck)
        return self._finish(now, job, result.sampled)

    # --- handing off

    def _finish(self, now: float, job: Job, sampled: Sequence[Sampled], layers: Sequence[Effect] = ()) -> list[Effect]:
        """Tokens to the gateway, proof of completeness to the decode, full blocks to own reuse and to the pool. `sampled`: for
        the request and each of its siblings. `layers`: what the decode hears before, and a client need not wait for."""
        self._move(job, JobEvent.ALL_DONE)
        self._queue.leave(job)
        assert job.held_blocks is not None
        request, size = job.request, self._layout.block_tokens
        own = (len(job.own_slots) + job.found_blocks) * size
        firsts = [
            FirstToken(
                request_id=choice.request_id,
                attempt=choice.attempt,
                index=request.first_index,
                token=token,
                own=own,
                local=job.local_blocks * size,
                remote=job.remote_blocks * size,
                queue_s=max(0.0, job.started_at - job.arrived_at),
                prefill_s=max(0.0, now - job.started_at),
                logprob=logprob,
                prepare_s=max(0.0, job.computing_at - job.started_at),
                load_s=max(0.0, job.load_s),
            )
            for choice, (token, logprob) in zip(choices_of(request), sampled, strict=True)
        ]
        self.counts.add("prompt_tokens_cached[source=own]", own)
        self.counts.add("prompt_tokens_cached[source=local]", job.local_blocks * size)
        self.counts.add("prompt_tokens_cached[source=remote]", job.remote_blocks * size)
        base = len(job.prefix)
        done = HandoffDone(
            request_id=request.request_id,
            attempt=request.attempt,
            layers=self._layout.layers,
            blocks=0,
            checksum=0,
            token=firsts[0].token,
            index=request.first_index,
            siblings=tuple([(first.request_id, first.token) for first in firsts[1:] if first.request_id in job.choices]),
            wanted=request.request_id in job.choices,
            **(job.group.offer(base) if job.group else {}),
        )
        job.done = done = self._covering(job, done)
        effects: list[Effect] = [Send(job.gateway, first) for first in firsts if first.request_id in job.choices]
        effects += [*layers, Send(request.decode, done)]
        if job.sequence is not None:
            effects.append(CloseSequence(job.sequence))
            job.sequence = None
        if job.own_slots:  # the pool may have evicted them since
            effects += self._offer_chain(now, request, 0, job.own_slots)
        return effects + self._reports.hurry(now)

    def _offer_chain(
        self, now: float, request: StartPrefill, first: int, slots: Sequence[int], *, more: bool = False
    ) -> list[Effect]:
        """Put the blocks from index `first` on, which stand in `slots`; `more` of them follow soon."""
        stop, size = first + len(slots), self._layout.block_tokens * 4
        self.slots.pin(slots)
        effects = self._pool.put(
            now,
            self._ids.new(),
            request.keys[first:stop],
            self._refs(slots),
            tuple(slots),
            parent=request.keys[first - 1] if first else None,
            tokens=tokens_of(request)[first * size : stop * size],
            tenant=request.tenant,
            more=more,
        )
        if effects is None:
            self.slots.unpin(slots)
            return []
        return effects

    def _put_ended(self, ended: PutEnded) -> list[Effect]:
        for token in ended.tokens:
            assert isinstance(token, tuple)
            self.slots.unpin(token)
        return ended.effects

    def _on_handoff_failed(self, now: float, sender: str, message: HandoffFailed) -> list[Effect]:
        self.counts.add("handoffs_failed")
        job = self._job(sender, message.request_id, message.attempt)
        if job is not None and (job.prefix or job.held_blocks):
            self._forgo_reuse(job)
        return self._on_handoff_ended(now, sender, message.request_id, message.attempt)

    def _on_handoff_ended(self, now: float, sender: str, request_id: str, attempt: int) -> list[Effect]:
        job = self._job(sender, request_id, attempt)
        if job is None:
            return []
        if job.state is JobState.HANDING_OFF:
            return self._end(now, job)
        return self._fail(now, job, f"{sender} gave up the handoff", tell_decode=False)

    # --- ends

    def _fail(
        self,
        now: float,
        job: Job,
        reason: str,
        *,
        full: bool = False,
        avoid: str = "",
        tell_decode: bool = True,
        refused_for_s: float | None = None,
        stuck: bool = False,
    ) -> list[Effect]:
        self.counts.add("jobs_failed" if refused_for_s is None else "jobs_refused_by_decode")
        request = job.request
        effects = self._failed(
            job.gateway, job.choices, reason, full=full, avoid=avoid, refused_for_s=refused_for_s, stuck=stuck
        )
        if tell_decode and job.is_begun:
            effects.append(self._handoff_failed(request.decode, request.request_id, request.attempt, reason))
        return effects + self._end(now, job)

    def _hand_over(self, now: float) -> list[Effect]:
        """Whoever is left here goes on elsewhere at once, as one for whom there is no room: nothing broke."""
        reason, jobs = "prefill is leaving", list(self._jobs.values())
        self.counts.add("jobs_handed_over", len(jobs))
        return [e for job in jobs for e in self._fail(now, job, reason, full=True)] + self._stages.hand_over(reason)

    def _drop(self, now: float, job: Job, reason: str) -> list[Effect]:
        """End a job its gateway no longer wants. The decode is told: what the gateway told it may have come before our
        reservation did, and then that would stand, unused, until the deadline."""
        request = job.request
        job.choices.pop(request.request_id, None)  # its gateway knows
        told = self._failed(job.gateway, job.choices, reason, full=True)
        if job.is_begun:
            told.append(self._handoff_failed(request.decode, request.request_id, request.attempt, reason))
        return told + self._end(now, job)

    def _end(self, now: float, job: Job) -> list[Effect]:
        """Let go of everything; of what a chunk in flight still writes, once it is done."""
        effects: list[Effect] = [self._waiting.remove(job)] if self._waiting.holds(job) else []
        if self._sampling.pop(job.sampling_id, None) is not None:
            effects.append(CancelWork(job.sampling_id))
        self._move(job, JobEvent.END)
        request = job.request
        if self._jobs.get(request.request_id) is job:
            del self._jobs[request.request_id]
            effects.append(CancelTimer(("deadline", request.request_id, request.attempt)))
        effects += self._reports.hurry(now)
        if job.group is not None:
            effects += job.group.dismiss()
        if job.state is ABANDONED:
            assert self._computing is not None
            self._abandoned.append(job)
            return [*effects, CancelWork(self._computing[0])]
        if job in self._abandoned:
            self._abandoned.remove(job)
        self._queue.leave(job)
        if job.lease_id is not None:
            del self._leases[job.lease_id]
            effects += self._pool.release(job.lease_id)
        if job.sequence is not None:
            effects.append(CloseSequence(job.sequence))
            job.sequence = None
        held = job.held_slots
        self.slots.unpin(held)
        for slot in self.slots.being_written(held):
            self.slots.free(slot)
        return effects

    def _on_peer_down(self, now: float, peer: str) -> list[Effect]:
        self._peers.pop(peer, None)
        self._reports.peer_down(peer)
        effects = self._put_ended(self._pool.peer_down(peer))
        effects += [effect for job in self._waiting.placed_by(peer) for effect in self._end_wait(job)]
        for job in list(self._jobs.values()):
            if job.gateway == peer:
                effects += self._drop(now, job, f"{peer} is down")
            elif job.request.decode == peer and job.state is JobState.HANDING_OFF and job.reserved:
                effects += self._end(now, job)  # the gateway hears of that decode
            elif job.request.decode == peer or peer in job.request.stages and job.state is not JobState.HANDING_OFF:
                effects += self._fail(now, job, f"{peer} is down", avoid=peer)
            elif job.lease_id is not None and not job.leased and not self._pool.wants(job.lease_id):
                job.leased, job.estimate = True, None
        return effects + self._stages.peer_down(peer)

    def _report(self, now: float) -> list[Effect]:
        room = max(0, self._settings.max_queued - self._queue.waiting - len(self._waiting))
        jobs = [job for job in self._queue if job.state is not ABANDONED]
        if len(self._waiting):
            jobs = sorted([*jobs, *self._waiting], key=lambda job: (job.rank, job.order))
        stages = self._stages.report(now)
        load = self._workload.report(now, jobs, room=room, draining=self._leaving.draining, stages=stages)
        return self._reports.send(now, load)

    def _drained(self) -> list[Effect]:
        idle = not (self._jobs or self._abandoned or self._pool.puts or len(self._stages))
        return self._leaving.drained(idle=idle)

    # --- leaves

    def _away(self, message: StartPrefill) -> str:
        """Who of those that the request needs is not there; empty: nobody. A node may have changed its role since."""
        needed = ((message.decode, "decode"), *((name, "prefill") for name in message.stages))
        return next((name for name, role in needed if name not in self._peers or self._peers[name].role != role), "")

    def _job(self, decode: str, request_id: str, attempt: int) -> Job | None:
        job = self._jobs.get(request_id)
        current = job is not None and job.request.attempt == attempt and job.request.decode == decode
        return job if current else None

    def _handoff_blocks(self, job: Job, first_block: int, sources: tuple[SlotRef, ...], *, ready: bool) -> Send:
        request = job.request
        message = HandoffBlocks(
            request_id=request.request_id, attempt=request.attempt, first_block=first_block, sources=sources, ready=ready
        )
        return Send(request.decode, message)

    def _grants(self, slots: Sequence[int]) -> tuple[SlotGrant, ...]:
        return grants(self.name, self.incarnation, self.slots, slots)

    def _written(self, slots: Sequence[int]) -> tuple[SlotRef, ...]:
        return written(self.name, self.incarnation, self.slots, slots)

    def _refs(self, slots: Sequence[int]) -> list[SlotRef]:
        """The own slots, committed, as readers name them."""
        name, incarnation, generations, checksums = self.name, self.incarnation, self.slots.generation, self.slots.checksum
        return [
            SlotRef(node=name, incarnation=incarnation, slot=slot, generation=generations[slot], checksum=checksums[slot])
            for slot in slots
        ]

    def _failed(
        self,
        gateway: str,
        choices: Mapping[str, int],
        reason: str,
        *,
        full: bool,
        avoid: str = "",
        refused_for_s: float | None = None,
        stuck: bool = False,
    ) -> list[Effect]:
        return [
            Send(
                gateway,
                AttemptFailed(
                    request_id=request_id,
                    attempt=attempt,
                    reason=clip(reason),
                    full=full,
                    avoid=avoid,
                    refused=refused_for_s is not None,
                    retry_after_s=refused_for_s or 0.0,
                    stuck=stuck,
                ),
            )
            for request_id, attempt in choices.items()
        ]

    def _handoff_failed(self, decode: str, request_id: str, attempt: int, reason: str) -> Send:
        return Send(decode, HandoffFailed(request_id=request_id, attempt=attempt, reason=clip(reason)))

    def _renew_timer(self) -> SetTimer:
        return SetTimer(("renew",), self._settings.pool.lease_ttl_s / 5)

    def _move(self, job: Job, event: JobEvent) -> None:
        job.estimate = None
        job.state = self._life.after(job.state, event)


def _is_ready(job: Job) -> bool:
    return job.state is READY and job.reserved and (job.group is None or job.group.may_begin(0))


def _may_go_ahead(job: Job) -> bool:
    """Before its decode has answered, where the engine has nothing else to do: mostly there is room. Where there is none, that
    costs the engine no more than the layer which is under way then. Of one chunk alone: what is longer gains nothing to speak
    of, and would hold the slab meanwhile."""
    return job.state is READY and not job.reserved
