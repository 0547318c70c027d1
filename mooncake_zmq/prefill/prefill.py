"""The actor that builds KV for prompts and the first token: queue, reuse, chunks, handoff, puts. PURE.

It owns its slab (the slots from which its KV is handed off and reused) and its queue. A job that cannot go on here ends with
`AttemptFailed` to the gateway, which places the request again; there is no other recovery.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from mooncake_zmq.core.actor import (
    CancelTimer,
    CordonWanted,
    DrainTimedOut,
    DrainWanted,
    Effect,
    Event,
    Fence,
    PeerDown,
    PeerUp,
    Received,
    Send,
    SetTimer,
    Started,
    TimerFired,
    WorkDone,
    WorkProgress,
)
from mooncake_zmq.core.actor_parts import Ids, Tally
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.drain import MOVE, Drain
from mooncake_zmq.core.handlers import Handlers
from mooncake_zmq.core.messages import (
    BlocksArrived,
    BlocksLeased,
    CancelRequest,
    ChangeRole,
    DecodeDenied,
    DecodeReserved,
    EndStage,
    HandoffFailed,
    HandoffReceived,
    Hello,
    LeaseRenewed,
    ReclaimSlots,
    ReportCorrupt,
    SlotRef,
    SlotsReserved,
    StageChunk,
    StageDone,
    StageFailed,
    StageReady,
    StartPrefill,
    StartStage,
    WaitEnded,
)
from mooncake_zmq.core.reports import REPORT, Reports
from mooncake_zmq.core.work import BlocksCopied, ChunkComputed, Result, StageComputed, TokensSampled, WorkFailed
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.slot_table import SlotState
from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.pool.node.client import POOL_ABSENT, PoolClient
from mooncake_zmq.prefill.admission import Admission
from mooncake_zmq.prefill.blending import Blending
from mooncake_zmq.prefill.computing import Computing
from mooncake_zmq.prefill.ends import DEADLINE, Ends, attempts_failed
from mooncake_zmq.prefill.handoff import Handoff
from mooncake_zmq.prefill.job import Job, JobEvent, JobState, attempts_of, tokens_of
from mooncake_zmq.prefill.jobs import Jobs
from mooncake_zmq.prefill.leading import Leading
from mooncake_zmq.prefill.offers import Offers
from mooncake_zmq.prefill.pipeline import Group
from mooncake_zmq.prefill.queue import JobQueue
from mooncake_zmq.prefill.reuse import Reuse
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.prefill.slab import NO_SLOT, Slab
from mooncake_zmq.prefill.slab_announcer import SlabAnnouncer
from mooncake_zmq.prefill.stages import DEADLINE as STAGE_DEADLINE
from mooncake_zmq.prefill.stages import Stages
from mooncake_zmq.prefill.waiting import WAITED, Waiting
from mooncake_zmq.prefill.workload import Workload

COMPUTED, STAGED = (ChunkComputed, StageComputed, WorkFailed), (StageComputed, WorkFailed)
COPIED, SAMPLED = (BlocksCopied, WorkFailed), (TokensSampled, WorkFailed)
"""Result types of the works of a prefill."""
PREPARING, READY, ABANDONED = JobState.PREPARING, JobState.READY, JobState.ABANDONED
"""Local names, since nearly every event needs them and looking into an enum class is ten times as slow."""


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
        self.jobs = Jobs(self.job_transitions)
        self._settings = settings
        self._layout = layout
        self._peers: dict[str, Hello] = {}
        self._ids = Ids()
        self._queue: JobQueue[Job] = JobQueue(settings.max_active, settings.short_jobs)
        self._waiting = Waiting(self.slots, self.jobs, self._queue, self.counts)
        self._announcer = SlabAnnouncer(self.slots, self.counts)
        self._workload = Workload(settings, costs, layout.block_tokens)
        self._reports = Reports(settings.report_s)
        self._pool = PoolClient(host, settings.pool, self.counts)
        self._drain = Drain(may_become, self.counts)
        self._slab = Slab(name, incarnation, self.slots)
        slab, pool, ids, counts = self._slab, self._pool, self._ids, self.counts
        self._reuse = Reuse(
            settings=settings, layout=layout, slab=slab, pool=pool, workload=self._workload, ids=ids, counts=counts
        )
        waiting, jobs, queue = self._waiting, self.jobs, self._queue
        self._offers = Offers(
            settings=settings, layout=layout, slab=slab, pool=pool, announcer=self._announcer, waiting=waiting, ids=ids
        )
        self._ends = Ends(
            slab=slab, jobs=jobs, queue=queue, waiting=waiting, reuse=self._reuse, reports=self._reports, counts=counts
        )
        self._admission = Admission(
            settings=settings, layout=layout, slab=slab, peers=self._peers, queue=queue, waiting=waiting, drain=self._drain
        )
        self._make_parts()
        self._handler_table = Handlers(self.counts, self._handlers(), self._pool.may_say)

    def _make_parts(self) -> None:
        """Create the components that run a job once it has a place, and the stages of other prefills' pipelines."""
        settings, layout, slab, jobs, queue = self._settings, self._layout, self._slab, self.jobs, self._queue
        pool, ids, counts, reuse, offers, ends = self._pool, self._ids, self.counts, self._reuse, self._offers, self._ends
        self._handoff = handoff = Handoff(
            host=self.host,
            settings=settings,
            layout=layout,
            peers=self._peers,
            pool=pool,
            jobs=jobs,
            queue=queue,
            reuse=reuse,
            offers=offers,
            ends=ends,
            reports=self._reports,
            counts=counts,
        )
        self._blending = Blending(
            settings=settings, layout=layout, slab=slab, peers=self._peers, waiting=self._waiting, counts=counts
        )
        self._computing = Computing(
            settings=settings,
            layout=layout,
            slab=slab,
            jobs=jobs,
            queue=queue,
            workload=self._workload,
            reuse=reuse,
            offers=offers,
            handoff=handoff,
            blending=self._blending,
            ends=ends,
            ids=ids,
            counts=counts,
        )
        self._leading = Leading(
            layout=layout,
            slab=slab,
            jobs=jobs,
            reuse=reuse,
            handoff=handoff,
            computing=self._computing,
            ends=ends,
            counts=counts,
        )
        self._stages = Stages(
            settings=settings,
            layout=layout,
            slab=slab,
            pool=pool,
            workload=self._workload,
            reuse=reuse,
            drain=self._drain,
            ids=ids,
            counts=counts,
            transitions=self.job_transitions,
        )

    def _handlers(self) -> dict[type, Callable[[float, str, Any], list[Effect]]]:
        return {
            StartPrefill: self._on_start,
            CancelRequest: self._on_cancel,
            DecodeReserved: self._handoff.on_reserved,
            DecodeDenied: self._handoff.on_denied,
            StartStage: self._stages.on_start,
            StageChunk: self._stages.on_chunk,
            EndStage: self._stages.on_end,
            StageReady: self._leading.on_ready,
            StageDone: self._leading.on_done,
            StageFailed: self._leading.on_failed,
            HandoffReceived: self._handoff.on_received,
            HandoffFailed: self._handoff.on_failed,
            BlocksLeased: self._on_leased,
            BlocksArrived: self._reuse.on_arrived,
            LeaseRenewed: self._pool.on_renewed,
            SlotsReserved: self._offers.on_reserved,
            ReclaimSlots: self._pool.on_reclaim,
            ChangeRole: self._on_change,
            ReportCorrupt: self._on_report_corrupt,
            WaitEnded: self._waiting.on_ended,
        }

    @property
    def transitions(self) -> dict[str, int]:
        """State transitions taken, for coverage."""
        return self.job_transitions | self.slots.transitions

    def holds(self, key: Key) -> bool:
        """Return whether the slab holds this complete block."""
        return self.slots.committed(key) is not None

    def handle(self, now: float, event: Event) -> list[Effect]:
        if type(event) is WorkProgress:  # the most frequent event, for which no queued job waits
            return self._computing.on_progress(event)
        effects = self._dispatch(now, event)
        effects += self._schedule(now)
        effects += self._announcer.flush(self._reports.conductors)
        if self._drain.draining:
            effects += self._drained()
        return [Fence(self.slots.take_fences()), *effects] if self.slots.fences else effects

    def _dispatch(self, now: float, event: Event) -> list[Effect]:
        # Frequent events come first, see `Handlers`.
        if type(event) is Received:
            return self._handler_table.to(now, event.sender, event.message)
        if type(event) is TimerFired and event.key == REPORT:
            return self._report(now)
        if type(event) is WorkDone:
            return self._on_work(now, event)
        match event:
            case PeerUp() as up:
                self._peers[up.peer] = up.hello
                self._admission.links.peer_up(up.peer)
                self._reports.peer_up(up)
                slab = self._announcer.whole() if up.hello.role == "conductor" else []
                return [*(Send(up.peer, message) for message in slab), *self._pool.peer_up(now, up)]
            case PeerDown(peer, _):
                return self._on_peer_down(now, peer)
            case TimerFired(("renew",)):
                return [*self._pool.renew(now), self._pool.renewal_timer()]
            case TimerFired((kind, str(request_id), int(attempt))) if kind == DEADLINE:
                return self._on_deadline(now, request_id, attempt)
            case TimerFired((kind, str(request_id), int(attempt))) if kind == WAITED:
                return self._waiting.end_timed_out(request_id, attempt)
            case TimerFired((kind, int(lease_id))) if kind == POOL_ABSENT:
                return self._leased(now, lease_id, ()) if self._pool.forgo(lease_id) else []
            case TimerFired((kind, str(request_id), int(attempt))) if kind == STAGE_DEADLINE:
                return self._stages.on_deadline(request_id, attempt)
            case Started():
                return [self._reports.begin(), self._pool.renewal_timer()]
            case TimerFired(key) if key == MOVE:
                return self._move(now, again=True)
            case DrainWanted() | CordonWanted() as order:
                self._drain.wanted(order)
                return self._on_drain(now)
            case DrainTimedOut():
                self._drain.drain()
                return self._hand_over(now)
            case TimerFired():
                return []
            case _:
                raise TypeError(event)

    def _on_work(self, now: float, event: WorkDone[Result]) -> list[Effect]:
        """Route the end of a work by its id; ids are used once, so each shows which work ended."""
        work_id, result = event.work_id, event.result
        if self._computing.is_computing(work_id):
            assert isinstance(result, COMPUTED)
            return self._computing.on_computed(now, result)
        if self._pool.copying(work_id):
            assert isinstance(result, COPIED)
            return self._offers.ended(self._pool.on_copied(work_id, result))
        if self._stages.is_computing(work_id):
            assert isinstance(result, STAGED)
            return self._stages.on_computed(now, result) + self._reports.hurry(now)
        if self._computing.is_sampling(work_id):
            assert isinstance(result, SAMPLED)
            return self._computing.on_sampled(now, work_id, result)
        if self._stages.is_sampling(work_id):
            assert isinstance(result, SAMPLED)
            return self._stages.on_sampled(work_id, result)
        return []

    def _on_change(self, now: float, sender: str, message: ChangeRole) -> list[Effect]:
        return self._on_drain(now) if self._drain.change(sender, message, self._peers) else []

    def _on_report_corrupt(self, _now: float, _sender: str, message: ReportCorrupt) -> list[Effect]:
        return self._reuse.corrupt(message.slots)

    def check(self, now: float) -> None:
        slots, jobs = self.slots, list(self.jobs)
        slots.check()
        self.jobs.check()
        self._stages.check()
        self._computing.check()
        self._reuse.check(jobs)
        assert all((job.state is JobState.WAITING) == self._waiting.holds(job) for job in jobs)
        pinned = [slot for job in jobs for slot in job.held_slots] + self._stages.held_slots
        writing = {slot for slot in pinned if slots.state_of(slot) is SlotState.WRITING}
        assert len(writing) == slots.count(SlotState.WRITING), "every slot being written is a job's or a stage's"
        pinned += self._offers.pinned
        assert sorted(pinned) == [s for s, pins in enumerate(slots.pins) for _ in range(pins)], "a job's or a put's"
        assert not (self._computing.is_busy and self._stages.computing), "one engine"
        computed = (JobState.SAMPLING, JobState.HANDING_OFF)
        queued = [job for job in jobs if job.state not in computed and not self._waiting.holds(job)]
        assert {id(job) for job in self._queue} == {id(job) for job in queued}, "a job waits until it is computed to its end"
        assert self._queue.waiting == sum(1 for job in queued if job.state is JobState.QUEUED)

    def gauges(self, now: float) -> dict[str, float]:
        early = (JobState.WAITING, JobState.QUEUED, PREPARING, JobState.GATHERING)
        waiting = sum(1 for job in self.jobs if job.state in early)
        return {
            "capacity_blocks": self.slots.capacity,
            "cached_blocks": self.slots.count(SlotState.COMMITTED),
            "pinned_blocks": self.slots.pinned,
            "writing_blocks": self.slots.count(SlotState.WRITING),
            "requests_waiting": waiting,
            "requests_running": len(self.jobs) - waiting,
            "stages": len(self._stages),
            "leases": self._pool.leases,
            "puts": self._pool.puts,
        }

    def dump(self, now: float) -> dict[str, Any]:
        return {
            "gauges": self.gauges(now),
            **self._workload.dump(now),
            "draining": self._drain.draining,
            "stages": self._stages.dump(now),
            "jobs": self.jobs.dump(now),
        }

    # --- messages of the gateway

    def _on_start(self, now: float, sender: str, message: StartPrefill) -> list[Effect]:
        current = self.jobs.of(message.request_id)
        if current is not None and current.request.attempt >= message.attempt:
            return []
        effects = self._ends.drop(now, current, "a newer attempt is here") if current is not None else []
        lack = self._admission.lack(message.tenant)
        reason, full = lack or self._admission.refusal(message), lack is not None
        missing = self._admission.missing(message)
        if reason is None and missing:
            reason, full = f"{missing} is not reachable from {self.name}", self._admission.links.is_passing(now, missing)
        if reason is not None:
            self.counts.add("jobs_refused")
            return effects + attempts_failed(sender, attempts_of(message), reason, full=full, avoid=missing)
        group = Group(message, self._layout, self._settings.chunk_tokens) if message.stages else None
        rank = self._workload.rank(now, message, len(tokens_of(message)) // 4, group.share if group else 1.0)
        job = Job(request=message, gateway=sender, order=self._ids.new(), rank=rank, arrived_at=now, group=group)
        self.jobs.add(job)
        effects.append(SetTimer((DEADLINE, message.request_id, message.attempt), message.deadline_s))
        its_end = not message.conductor or message.conductor in self._peers
        found = self._settings.own_reuse or self._pool.node is not None
        if self._waiting.is_needed(job, can_end=its_end and found):
            return [*effects, self._waiting.begin(job)]
        self._queue.arrive(job)
        return effects

    def _on_cancel(self, now: float, sender: str, message: CancelRequest) -> list[Effect]:
        job = self.jobs.wanted_by(message.request_id, message.attempt)
        if job is None or job.gateway != sender:
            return []
        del job.choices[message.request_id]
        if job.choices:  # it goes on for its other choices
            return []
        self.counts.add("jobs_cancelled")
        return self._ends.drop(now, job, "cancelled")

    def _on_deadline(self, now: float, request_id: str, attempt: int) -> list[Effect]:
        job = self.jobs.attempt(request_id, attempt)
        return [] if job is None else self._ends.fail(now, job, "deadline passed in prefill")

    # --- preparing: reservation, reuse, room

    def _schedule(self, now: float) -> list[Effect]:
        """Activate queued jobs while there are places, and give the engine its next chunk."""
        effects: list[Effect] = []
        if not (len(self._queue) or len(self._stages)):
            return effects
        effects += self._activate_all(now)
        preparing = [job for job in self._queue.active() if job.state is PREPARING]
        for job in preparing:
            effects += self._prepare(now, job)
            if job.state is PREPARING and job.held_blocks is not None and job.leased:
                break  # the slab has no room for it, and what is freed must not go to jobs of a later rank
        if preparing:
            effects += self._activate_all(now)  # jobs whose waits ended, since their blocks do not come
            effects += self._break_standstill(now)
        self._reuse.end_overdue(now, self._queue.active())
        while not self._computing.is_busy and self._stages.computing is None:
            turn, stage = self._queue.first(partial(self._is_ready, now)), self._stages.first()
            if turn is None and stage is None:
                turn = self._queue.first(partial(self._may_go_ahead, now))
            if turn is None and stage is None:
                turn = self._queue.first(partial(self._may_meet, now))
            if stage is not None and (turn is None or (stage.rank, stage.order) < (turn.rank, turn.order)):
                effects += self._stages.compute(now, stage)
            elif turn is not None:
                effects += self._computing.begin(now, turn)  # if this one failed, the next one gets the turn
            else:
                break
        return effects

    def _is_ready(self, now: float, job: Job) -> bool:
        begins = job.state is READY and job.reserved and (job.group is None or job.group.may_begin(0))
        return begins and not self._reuse.waits(now, job)

    def _may_go_ahead(self, now: float, job: Job) -> bool:
        """Return whether a job may begin before its decode has answered, when the engine is idle: mostly there is room, and
        where there is none, only the current layer is wasted. That holds for jobs of one chunk: longer ones gain little, and
        would hold the slab meanwhile."""
        return job.state is READY and not job.reserved and not self._reuse.awaits(job)

    def _may_meet(self, now: float, job: Job) -> bool:
        """Return whether a job that awaits blocks may compute some of its head, when the engine is idle."""
        return job.state is READY and job.reserved and self._reuse.awaits(job) and self._reuse.head_blocks(now, job) > 0

    def _break_standstill(self, now: float) -> list[Effect]:
        """End the last job where jobs whose own hits fill the slab wait for room in a circle; it is placed again."""
        stuck = [job for job in self._queue.active() if job.state is PREPARING]
        waiting = self._queue.waiting + len(self._waiting)
        idle = len(self.jobs) == waiting + len(stuck) and not self._pool.puts
        if not idle or not stuck or len(self._stages) or any(job.held_blocks is None or not job.leased for job in stuck):
            return []
        return self._ends.fail(now, stuck[-1], "no room in the slab", full=True)

    def _activate_all(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while (job := self._queue.activate()) is not None:
            effects += self._activate(now, job)
        return effects

    def _activate(self, now: float, job: Job) -> list[Effect]:
        """Pin own hits, lease more from the pool and reserve KV at the decode, all at once, before the answers."""
        self.jobs.move(job, JobEvent.ACTIVATED)
        job.started_at = now
        meets = len(self._queue) == 1 and not len(self._stages)  # the engine has nothing else to compute
        return [*self._reuse.begin(now, job, meets=meets), self._handoff.reserve(now, job)]

    def _prepare(self, now: float, job: Job) -> list[Effect]:
        """Open the sequence and announce the reused blocks, once reservation and lease are there and the slab has room."""
        if job.held_blocks is None or not job.leased:
            return []
        self._reuse.drop_expired(now, job)
        if job.group is not None:
            return self._leading.gather(now, job, job.group)
        expected = job.meeting.stop - len(job.prefix) if job.meeting else 0
        blocks = self._layout.blocks_for(job.handed_tokens) - len(job.prefix) - expected
        if blocks > self.slots.available:
            return []
        released = self._blending.plan(job, self.slots.available - blocks)
        job.new_slots = [NO_SLOT] * expected + self._slab.reserve(blocks)
        return [*released, self._computing.open(job), *self._handoff.prefix(job)]

    def _on_leased(self, now: float, _sender: str, message: BlocksLeased) -> list[Effect]:
        sources = self._pool.on_leased(message)
        return [] if sources is None else self._leased(now, message.lease_id, sources, message)

    def _leased(
        self, now: float, lease_id: int, sources: tuple[SlotRef, ...], answer: BlocksLeased | None = None
    ) -> list[Effect]:
        """Give a stage or a job the blocks that the pool leased for it; none if the pool did not answer."""
        of_stage = self._stages.on_leased(lease_id, sources)
        return self._reuse.take(now, lease_id, sources, answer) if of_stage is None else of_stage

    # --- ends of jobs and of the node

    def _on_drain(self, now: float) -> list[Effect]:
        """Report a drain that began or was undone. Prompts whose turn comes too late for it are placed elsewhere at once."""
        asked = self._move(now) if self._drain.draining else []
        return [*self._report(now), *(asked or [CancelTimer(MOVE)])]

    def _move(self, now: float, *, again: bool = False) -> list[Effect]:
        """Ask to place the prompts elsewhere that are not expected to be computed within the grace. The stages of other
        prefills' pipelines end here. `again`: those that wait for something else than the engine have waited for long."""
        jobs = [job for job in self._queue if job.state is not ABANDONED]
        late = self._workload.later_than(now, jobs, self._settings.drain_grace_s)
        waiting = [job for job in jobs if job not in late and job.state is not JobState.COMPUTING] if again else []
        wanted = [*late, *waiting, *self._waiting]
        attempts = [(job.gateway, *attempt) for job in wanted for attempt in job.choices.items()]
        return self._drain.move(attempts, left=bool(jobs))

    def _hand_over(self, now: float) -> list[Effect]:
        """End all jobs at once so that they continue on other nodes; they count as ones for which there is no room."""
        reason, jobs = "prefill is leaving", self.jobs.live
        self.counts.add("jobs_handed_over", len(jobs))
        return [e for job in jobs for e in self._ends.fail(now, job, reason, full=True)] + self._stages.hand_over(reason)

    def _on_peer_down(self, now: float, peer: str) -> list[Effect]:
        self._peers.pop(peer, None)
        self._reports.peer_down(peer)
        effects = self._offers.ended(self._pool.peer_down(peer))
        effects += self._waiting.peer_down(peer)
        for job in self.jobs.live:
            if job.gateway == peer:
                effects += self._ends.drop(now, job, f"{peer} is down")
            elif job.request.decode == peer and job.state is JobState.HANDING_OFF and job.reserved:
                effects += self._ends.end(now, job)  # the gateway detects by itself that the decode is down
            elif job.request.decode == peer or peer in job.request.stages and job.state is not JobState.HANDING_OFF:
                effects += self._ends.fail(now, job, f"{peer} is down", avoid=peer)
            else:
                self._reuse.pool_lost(job)
        return effects + self._stages.peer_down(peer)

    def _report(self, now: float) -> list[Effect]:
        jobs = [job for job in self._queue if job.state is not ABANDONED]
        if len(self._waiting):
            jobs = sorted([*jobs, *self._waiting], key=lambda job: (job.rank, job.order))
        stages, room = self._stages.report(now), max(0, self._admission.room)
        load = self._workload.report(now, jobs, room=room, draining=self._drain.draining, stages=stages)
        return self._reports.send(now, load)

    def _drained(self) -> list[Effect]:
        idle = not (len(self.jobs) or self._pool.puts or len(self._stages) or self._computing.has_samples)
        return self._drain.drained(idle=idle)
