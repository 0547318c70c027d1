"""The work queued at a prefill, in its own measured seconds: ranks and load reports. PURE.

One formula serves for all of it: the cost by `Costs` of what a job still has to compute, including the reused prefix and the
quadratic part, times the measured slowness of this node. The chunk that loads the prefix takes as long as the longer of loading
and computing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict

from mooncake_zmq.core.chunking import chunk_stop
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import MAX_REPORTED, MAX_SECONDS, PrefillLoad, QueuedJob, StartPrefill, StartStage
from mooncake_zmq.core.order import Order
from mooncake_zmq.core.reports import queued_job
from mooncake_zmq.core.speed import COMPUTE_MEMORY_S, Speed
from mooncake_zmq.core.work import ChunkComputed, StageComputed
from mooncake_zmq.prefill.job import Estimate, Job, JobState
from mooncake_zmq.prefill.settings import PrefillSettings

LOAD_MEMORY_S = 0.8
"""Seconds of loading that the measure remembers; loading takes about a tenth as long as computing."""
CLEARLY_LOADING = 1.5
"""A chunk with a prefix that takes so many times its expected computing time counts as having waited for the prefix, unless
that was measured."""


@dataclass(frozen=True, slots=True)
class _Speeds:
    """Factors on the cost model's seconds at one moment."""

    compute: float
    load: float


IDLE = _Speeds(1.0, 1.0)


class Workload:
    """Measure and estimate the work of one prefill."""

    def __init__(self, settings: PrefillSettings, costs: Costs, block_tokens: int) -> None:
        self._settings = settings
        self._costs = costs
        self._block_tokens = block_tokens
        self._order = Order(settings.overtake, settings.priority_s)
        self._compute = Speed(memory_s=COMPUTE_MEMORY_S, half_life_s=settings.measured_half_life_s)
        self._load = Speed(memory_s=LOAD_MEMORY_S, half_life_s=settings.measured_half_life_s)

    def rank(self, now: float, request: StartPrefill | StartStage, tokens: int, share: float) -> float:
        """Return the rank of a job that arrives now, which is final: by the work that its plan leaves here, a `share` of the
        layers."""
        work_s = share * self._compute.ratio(now) * self._costs.compute_s(tokens, self._promised(request, tokens))
        return self._order.rank(now, work_s, request.priority)

    def block_s(self, now: float) -> float:
        """Return how long computing one block took recently; 0 if nothing was measured yet."""
        return self._compute.ratio(now) * self._costs.compute_s(self._block_tokens, 0) if self._compute.known else 0.0

    def computed_s(self, now: float, start: int, stop: int) -> float:
        """Return how long computing these tokens of a prompt would take."""
        return self._compute.ratio(now) * self._costs.compute_s(stop, start)

    def fetched_s(self, blocks: int) -> float:
        """Return how long fetching so many blocks would take by the cost model, where nothing was measured."""
        return self._costs.transfer_s(blocks * self._block_tokens)

    def spared_s(self, now: float, request: StartPrefill | StartStage, tokens: int, own_blocks: int) -> float:
        """Return how long computing the blocks that the plan reuses would take, without the first `own_blocks`."""
        own, promised = own_blocks * self._block_tokens, self._promised(request, tokens)
        return self._compute.ratio(now) * self._costs.compute_s(promised, own) if promised > own else 0.0

    def measure(
        self,
        now: float,
        result: ChunkComputed | StageComputed,
        *,
        start: int,
        stop: int,
        loaded: int,
        share: float,
    ) -> None:
        """Record that tokens `start` to `stop` were computed in a `share` of the layers, and `loaded` tokens before them
        were loaded."""
        compute_s = share * self._costs.compute_s(stop, start)
        if not loaded:
            self._compute.add(now, max(0.0, result.elapsed_s - result.waited_s), compute_s)
            return
        load_s = share * self._costs.load_s(loaded)
        if result.loaded_s > 0:
            self._load.add(now, result.loaded_s, load_s)
            self._compute.add(now, max(0.0, result.elapsed_s - result.waited_s), compute_s)
        elif result.elapsed_s > CLEARLY_LOADING * self._compute.ratio(now) * compute_s:
            self._load.add(now, result.elapsed_s, load_s)
        else:
            self._compute.add(now, result.elapsed_s, compute_s)

    def stage(self, now: float, request: StartStage, rank: float, *, computed: int, share: float) -> QueuedJob:
        """Return the remaining work of a stage of another prefill's pipeline."""
        left_s = share * self._compute.ratio(now) * self._costs.compute_s(request.tokens, computed)
        return queued_job(now, booking=request.booking, rank=rank, left_s=left_s, tenant=request.tenant)

    def report(
        self, now: float, jobs: Sequence[Job], *, room: int, draining: bool, stages: Sequence[QueuedJob] = ()
    ) -> PrefillLoad:
        """Return the load report. `jobs`: all that are not computed to their end, by rank; `stages`: those of pipelines that
        other prefills lead."""
        speeds = _Speeds(self._compute.ratio(now), self._load.ratio(now)) if jobs else IDLE
        named = [self._queued(now, job, speeds) for job in jobs[:MAX_REPORTED]]
        if stages:
            named = sorted([*named, *stages], key=lambda job: job.rank_s)
        if len(named) > MAX_REPORTED or len(jobs) > MAX_REPORTED:
            beyond_s = sum(self._left_s(now, job, speeds) for job in jobs[MAX_REPORTED:])
            beyond_s += sum(job.left_s for job in named[MAX_REPORTED:])
            del named[MAX_REPORTED:]
            last = named[-1]
            left_s = min(MAX_SECONDS, last.left_s + beyond_s)
            named[-1] = QueuedJob(booking=last.booking, rank_s=last.rank_s, left_s=left_s, tenant=last.tenant)
        return PrefillLoad(
            jobs=tuple(named),
            overtake=self._settings.overtake,
            priority_s=self._settings.priority_s,
            chunk_tokens=self._settings.chunk_tokens,
            room=room,
            compute=self._compute.measured(now),
            load=self._load.measured(now),
            draining=draining,
            token_s=self._costs.prefill_token_s,
            meets=self._settings.meet,
        )

    def later_than(self, now: float, jobs: Sequence[Job], within_s: float) -> list[Job]:
        """Return those of the jobs, given by rank, that are not expected to be computed within so long."""
        speeds, ends_s = _Speeds(self._compute.ratio(now), self._load.ratio(now)), 0.0
        late: list[Job] = []
        for job in jobs:
            ends_s += self._left_s(now, job, speeds)
            if ends_s > within_s:
                late.append(job)
        return late

    def dump(self, now: float) -> dict[str, Any]:
        """Return the measured speeds as JSON-able values."""
        return {"compute": asdict(self._compute.measured(now)), "load": asdict(self._load.measured(now))}

    def _queued(self, now: float, job: Job, speeds: _Speeds) -> QueuedJob:
        left_s = self._left_s(now, job, speeds)
        return queued_job(now, booking=job.request.booking, rank=job.rank, left_s=left_s, tenant=job.tenant)

    def _left_s(self, now: float, job: Job, speeds: _Speeds) -> float:
        estimate = job.estimate
        if estimate is None:
            estimate = job.estimate = self._estimate(job)
        chunk_s = max(speeds.compute * estimate.compute_s, speeds.load * estimate.load_s)
        if job.state is JobState.COMPUTING:
            chunk_s = max(0.0, chunk_s - (now - job.chunk_began_at))
        return chunk_s + speeds.compute * estimate.remaining_s

    def _estimate(self, job: Job) -> Estimate:
        computing = job.state is JobState.COMPUTING
        known = self._start(job)
        start = job.computed if computing else known
        stop = job.chunk_stop if computing else chunk_stop(start, job.length, self._settings.chunk_tokens)
        loaded = len(job.chunk_loads) * self._block_tokens if computing else 0 if job.loaded else start
        return Estimate(
            compute_s=job.share * self._costs.compute_s(stop, start),
            load_s=job.share * self._costs.load_s(loaded),
            remaining_s=job.share * self._costs.compute_s(job.length, max(stop, known)),
        )

    def _start(self, job: Job) -> int:
        """Return the tokens that need not be computed any more, as far as is known."""
        if not job.is_begun:
            return self._promised(job.request, job.length)
        if job.state is JobState.PREPARING or job.state is JobState.GATHERING:
            own = len(job.prefix) * self._block_tokens
            if job.meeting is not None:
                return job.meeting.stop * self._block_tokens
            return own if job.leased else max(own, self._promised(job.request, job.length))
        if job.meeting is not None and job.meeting.grows:
            return max(job.computed, job.meeting.stop * self._block_tokens)
        return job.computed

    def _promised(self, request: StartPrefill | StartStage, length: int) -> int:
        """Return the tokens that the plan reuses."""
        return min(request.reuse_blocks, (length - 1) // self._block_tokens) * self._block_tokens
