"""Reused blocks of a prefill: own hits, the pool's leased blocks, and blocks that could not be loaded. PURE."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from mooncake_zmq.core.actor import Effect
from mooncake_zmq.core.actor_parts import Ids, Tally
from mooncake_zmq.core.messages import BlocksArrived, BlocksLeased, SlotRef
from mooncake_zmq.core.work import BlockLoad, ChunkComputed, StageComputed
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.node.client import PoolClient
from mooncake_zmq.prefill.job import Job, JobState
from mooncake_zmq.prefill.meeting import Meeting
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.prefill.slab import NO_SLOT, Slab
from mooncake_zmq.prefill.workload import Workload

MAX_FORGONE = 256
"""Most requests remembered whose reused blocks could not be read; beyond that the oldest are forgotten."""
PREPARING, COMPUTING = JobState.PREPARING, JobState.COMPUTING
LEASE_ENDED = "lease ended before the prefix was loaded"


class Reusing(Protocol):
    """A job or a stage that begins with blocks which it does not compute."""

    @property
    def prefix(self) -> list[SlotRef]:
        """Reused blocks, in order, the own hits first."""

    @property
    def own_slots(self) -> list[int]:
        """Slab slots of the own hits."""

    @property
    def lease_id(self) -> int | None:
        """Lease under which the other blocks are read."""


class Reuse:
    """Manage everything that the jobs of one prefill reuse, and own their leases."""

    def __init__(
        self,
        *,
        settings: PrefillSettings,
        layout: BlockLayout,
        slab: Slab,
        pool: PoolClient,
        workload: Workload,
        ids: Ids,
        counts: Tally,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._slab = slab
        self._pool = pool
        self._workload = workload
        self._ids = ids
        self._counts = counts
        self._leases: dict[int, Job] = {}
        """Jobs by the lease requested or held for each."""
        self._forgone: OrderedDict[str, None] = OrderedDict()
        """Requests whose reused blocks could not be read, here or by the decode: their next attempt here computes them.
        Otherwise blocks that are intact but unreachable, and hence not reported, would fail one attempt after another."""

    def own_hits(self, keys: Sequence[bytes]) -> list[int]:
        """Return the slots of the leading run of these blocks in the slab, if reuse is allowed."""
        return self._slab.slots.leading_run(keys if self._settings.own_reuse else ())

    def begin(self, now: float, job: Job, *, meets: bool) -> list[Effect]:
        """Pin a job's own hits and lease more from the pool; `meets`: from the last block on, if any are fetched."""
        request = job.request
        scored = request.prompt_logprobs is not None  # each of its tokens has to be computed
        reusable = () if scored else request.keys[: self._reusable(job)]
        own = self.own_hits(reusable)
        self._slab.slots.pin(own)
        job.own_slots += own
        job.prefix += self._slab.refs(own)
        forgone = request.request_id in self._forgone
        self._forgone.pop(request.request_id, None)
        job.computes_anew = forgone or scored
        wanted = () if forgone else reusable[len(job.prefix) :]
        if job.group is not None:
            job.group.keys = () if forgone else reusable
        promised = bool(wanted) and len(job.prefix) < request.reuse_blocks
        if not wanted or not (self._pool.node is not None or (promised and not job.waited)):
            job.leased = True
            return []
        job.lease_id = self._ids.new()
        self._leases[job.lease_id] = job
        return self._pool.lease(
            now,
            job.lease_id,
            wanted,
            job.sources,
            fetch=promised,  # from other hosts, or from this host's SSD
            compute_s=self._workload.block_s(now),
            wait_s=self._workload.spared_s(now, request, job.length, len(job.prefix)),
            tail_first=self._promised(job) - len(job.prefix) if promised and meets and self._meets(job) else 0,
        )

    def _meets(self, job: Job) -> bool:
        """Return whether a job may compute its head while its tail is fetched."""
        return self._settings.meet and job.group is None

    def take(self, now: float, lease_id: int, sources: tuple[SlotRef, ...], answer: BlocksLeased | None = None) -> list[Effect]:
        """Reuse the leased blocks, of which the last ones came from other hosts; none if the pool did not answer."""
        job = self._leases.get(lease_id)
        if job is None or job.state is not PREPARING or job.leased:
            return self._pool.release(lease_id)
        job.leased = True
        job.estimate = None
        first, remote = len(job.prefix), answer.remote if answer is not None else 0
        sources = sources[: self._reusable(job) - first]  # no more than requested
        remote = min(remote, len(sources))
        job.prefix += sources
        job.remote_blocks += remote
        job.local_blocks += len(sources) - remote
        stop = self._promised(job)
        if answer is not None and answer.more and self._meets(job) and len(job.prefix) < stop and self._pool.wants(lease_id):
            job.meeting = Meeting(first, stop, answer.block_s or self._workload.fetched_s(1), now)
        return []

    def on_arrived(self, now: float, _sender: str, message: BlocksArrived) -> list[Effect]:
        """Take note of blocks that came while their job computes or waits."""
        job, sources = self._leases.get(message.lease_id), self._pool.on_arrived(message)
        meeting = job.meeting if job is not None else None
        if job is None or meeting is None or not meeting.grows:
            return []
        blocks = {meeting.first + block: ref for block, ref in zip(message.blocks, sources, strict=False)}
        remote = set(list(blocks)[len(blocks) - message.remote :]) if message.remote <= len(blocks) else set()
        computed = job.chunk_stop if job.state is COMPUTING else job.computed
        meeting.take(now, blocks, remote, max(len(job.prefix), computed // self._layout.block_tokens))
        meeting.grows = not message.last
        job.estimate = None
        return []

    def end_overdue(self, now: float, jobs: Iterable[Job]) -> None:
        """Have those of these jobs wait no more whose lease is over before everything came."""
        for job in jobs:
            if job.meeting is not None and job.meeting.grows and self._pool.reading_time_s(now, job.lease_id) <= 0:
                self._lose(job, job.meeting)

    def awaits(self, job: Job) -> bool:
        """Return whether blocks of a job that are needed before its last part may still come."""
        meeting = job.meeting
        return meeting is not None and meeting.grows and meeting.missing(job.computed // self._layout.block_tokens) > 0

    def waits(self, now: float, job: Job) -> bool:
        """Return whether a job leaves its turn to others: the blocks that it awaits come sooner than they are computed, or none
        of them is worth computing now."""
        meeting, size = job.meeting, self._layout.block_tokens
        if meeting is None or not self.awaits(job):
            return False
        block = meeting.after_run(job.computed // size)
        computed_s = self._workload.computed_s(now, block * size, meeting.stop * size)
        return meeting.remaining_s(now, meeting.missing(block)) <= computed_s or not self.head_blocks(now, job)

    def head_blocks(self, now: float, job: Job) -> int:
        """Return how many blocks of a job that awaits others are worth computing now; 0 if it should wait."""
        meeting, size = job.meeting, self._layout.block_tokens
        if meeting is None:
            return 0
        block = meeting.after_run(job.computed // size)
        compute_s = self._workload.computed_s(now, block * size, (block + 1) * size)
        least, most = max(1, self._settings.meet_chunk_tokens // size), max(1, self._settings.chunk_tokens // size)
        blocks = meeting.head_blocks(now, block, compute_s=compute_s, least=least, most=most)
        return blocks if blocks <= self._slab.slots.available else 0

    def _reusable(self, job: Job) -> int:
        """Return how many blocks could be reused, as the last token is always computed."""
        return (job.length - 1) // self._layout.block_tokens

    def _promised(self, job: Job) -> int:
        """Return how many blocks the plan reuses."""
        return min(job.request.reuse_blocks, self._reusable(job))

    def _lose(self, job: Job, meeting: Meeting) -> None:
        """The lease is over before everything came."""
        meeting.lose()
        job.estimate = None
        self._counts.add("prefix_leases_expired")

    def pool_lost(self, job: Job) -> None:
        """Stop waiting for a pool that is gone. To be called after the pool's client was notified."""
        if job.lease_id is None or self._pool.wants(job.lease_id):
            return
        if not job.leased:
            job.leased, job.estimate = True, None
        elif job.meeting is not None and (job.meeting.grows or job.meeting.arrived):
            self._lose(job, job.meeting)

    def drop_expired(self, now: float, job: Job) -> None:
        """Count the leased blocks of a job as a miss if their lease has ended or nearly so."""
        if len(job.prefix) > len(job.own_slots) and self._pool.reading_time_s(now, job.lease_id) <= 0:
            del job.prefix[len(job.own_slots) :]
            job.local_blocks = job.remote_blocks = 0
            self._counts.add("prefix_leases_expired")
            job.meeting = None

    def time_s(self, now: float, reusing: Reusing) -> float:
        """Return how long loading the reused blocks may take; 0 if their lease has ended or nearly so."""
        most_s = self._settings.work_deadline_s
        leased = len(reusing.prefix) > len(reusing.own_slots)
        return min(most_s, self._pool.reading_time_s(now, reusing.lease_id)) if leased else most_s

    def loads(self, reusing: Reusing, layers: range) -> tuple[BlockLoad, ...]:
        """Return the loads of these layers of all reused blocks."""
        size = self._layout.block_tokens
        return tuple(BlockLoad(i, ref, layers.start, layers.stop, size) for i, ref in enumerate(reusing.prefix))

    def take_here(self, now: float, job: Job) -> tuple[list[SlotRef], float]:
        """Reuse the blocks from the next chunk on that are here by now: those that other jobs have computed, and those that
        were fetched. Returns these blocks, and how long loading them may take."""
        taken, time_s = self._take_computed(job), self._settings.work_deadline_s
        meeting = job.meeting
        while meeting is not None and (run := self._take_arrived(now, job, meeting)):
            time_s = self._pool.reading_time_s(now, job.lease_id)
            taken += [*run, *self._take_computed(job)]
        return taken, time_s

    def _take_arrived(self, now: float, job: Job, meeting: Meeting) -> list[SlotRef]:
        first = job.computed // self._layout.block_tokens
        if first not in meeting.arrived:
            return []
        if self._pool.reading_time_s(now, job.lease_id) <= 0:
            self._lose(job, meeting)
            return []
        run = meeting.take_run(first)
        remote = len(meeting.remote.intersection(range(first, first + len(run))))
        job.remote_blocks += remote
        job.local_blocks += len(run) - remote
        job.load(first, run, self._layout)
        return run

    def take_room(self, job: Job, first: int, stop: int) -> bool:
        """Reserve slots for those of these blocks after the prefix that were expected from the pool and have to be computed.
        Returns whether there was room."""
        lacking = [place for place in range(first, stop) if job.new_slots[place] == NO_SLOT]
        if len(lacking) > self._slab.slots.available:
            return False
        for place, slot in zip(lacking, self._slab.reserve(len(lacking)) if lacking else (), strict=True):
            job.new_slots[place] = slot
        return True

    def shorten(self, job: Job) -> list[Effect]:
        """Let nothing be fetched that the chunk in flight computes."""
        meeting = job.meeting
        if meeting is None or not meeting.grows or job.lease_id is None:
            return []
        first, stop = job.chunk_first_block, min(job.chunk_stop // self._layout.block_tokens, meeting.stop)
        meeting.computed += max(0, stop - first)
        return self._pool.shorten(job.lease_id, max(0, stop - meeting.first)) if stop > first else []

    def _take_computed(self, job: Job) -> list[SlotRef]:
        """Reuse blocks that other jobs have computed here in the meantime: those from the next chunk on that are in the slab
        replace the slots reserved for them. Returns these blocks."""
        request, first = job.request, job.computed // self._layout.block_tokens
        reusable = min(self._reusable(job), job.exact_blocks)
        if job.group is not None or request.prompt_logprobs is not None or first >= reusable:
            return []
        if self._slab.slots.committed(request.keys[first]) is None:
            return []
        slots = self._slab.slots.leading_run(request.keys[first:reusable])
        refs, place = self._slab.refs(slots), first - len(job.prefix)
        self._slab.slots.pin(slots)
        self._slab.release(job.new_slots[place : place + len(slots)])
        job.reuse_computed(first, place, slots, refs, self._layout)
        self._counts.add("blocks_found_while_queued", len(slots))
        return refs

    def not_loaded(
        self, sources: Mapping[int, SlotRef], result: ChunkComputed | StageComputed
    ) -> tuple[str, bool, list[Effect]]:
        """Handle reused blocks, read from `sources`, that were not loaded. Returns the reason for the failure, whether some
        were merely unreachable, and the reports of corrupt copies, which must not be found again."""
        refs = [sources[block] for block in result.corrupt if block in sources]
        unreached = len(result.failed) - len(result.corrupt)
        self._counts.add("prefix_blocks_unreached", unreached)
        reason = "a reused block did not verify" if refs else "a reused block was not reached"
        return reason, unreached > 0, self.corrupt(refs)

    def forgo(self, job: Job) -> None:
        """Have the next attempt of this request compute the blocks that this one could not load."""
        self._forgone[job.request.request_id] = None
        if len(self._forgone) > MAX_FORGONE:
            self._forgone.popitem(last=False)

    def corrupt(self, refs: Sequence[SlotRef]) -> list[Effect]:
        """Forget blocks that did not verify, here or at the decode that read them, and report them to the pool."""
        self._counts.add("prefix_blocks_corrupt", len(refs))
        self._slab.forget(refs)
        return self._pool.report_corrupt(refs)

    def end(self, job: Job) -> list[Effect]:
        """Release the lease of a job that ended."""
        if job.lease_id is None:
            return []
        del self._leases[job.lease_id]
        return self._pool.release(job.lease_id, spare=job.spare)

    def check(self, jobs: Sequence[Job]) -> None:
        """Assert that the leases are those of these jobs."""
        assert {id(job) for job in self._leases.values()} == {id(job) for job in jobs if job.lease_id is not None}
