"""The engine's work for a prefill's own jobs: one chunk after the other, and first tokens that are sampled later. PURE."""

from collections.abc import Sequence

from mooncake_zmq.core.actor import CloseSequence, Effect, OpenSequence, Send, Start, WorkProgress
from mooncake_zmq.core.actor_parts import Ids, Tally
from mooncake_zmq.core.chunking import chunk_stop
from mooncake_zmq.core.messages import MAX_SCORED, PromptScored, TokenLogprob
from mooncake_zmq.core.work import (
    BlockLoad,
    ChunkComputed,
    ComputeChunk,
    ComputeStage,
    LayersComputed,
    SampleTokens,
    StageComputed,
    TokensSampled,
    WorkFailed,
)
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.prefill.blending import Blending
from mooncake_zmq.prefill.ends import Ends
from mooncake_zmq.prefill.handoff import Handoff
from mooncake_zmq.prefill.job import Job, JobEvent, JobState
from mooncake_zmq.prefill.jobs import Jobs
from mooncake_zmq.prefill.offers import Offers
from mooncake_zmq.prefill.pipeline import Group
from mooncake_zmq.prefill.queue import JobQueue
from mooncake_zmq.prefill.reuse import LEASE_ENDED, Reuse
from mooncake_zmq.prefill.settings import PrefillSettings
from mooncake_zmq.prefill.slab import Slab
from mooncake_zmq.prefill.workload import Workload

COMPUTING, ABANDONED = JobState.COMPUTING, JobState.ABANDONED
"""Local names, since nearly every event needs them and looking into an enum class is ten times as slow."""


class Computing:
    """Hold the chunk in flight, and the jobs set aside until their first tokens are sampled."""

    def __init__(
        self,
        *,
        settings: PrefillSettings,
        layout: BlockLayout,
        slab: Slab,
        jobs: Jobs,
        queue: JobQueue[Job],
        workload: Workload,
        reuse: Reuse,
        offers: Offers,
        handoff: Handoff,
        blending: Blending,
        ends: Ends,
        ids: Ids,
        counts: Tally,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._slab = slab
        self._jobs = jobs
        self._queue = queue
        self._workload = workload
        self._reuse = reuse
        self._offers = offers
        self._handoff = handoff
        self._blending = blending
        self._ends = ends
        self._ids = ids
        self._counts = counts
        self._job: Job | None = None
        """The job of the chunk in flight."""
        self._sampling: dict[int, Job] = {}
        """Jobs set aside, by the works that sample their first tokens. One that ended stays until its work ends."""

    @property
    def is_busy(self) -> bool:
        """Whether a chunk is in flight."""
        return self._job is not None

    @property
    def has_samples(self) -> bool:
        """Whether first tokens are being sampled, including those of a job that ended."""
        return bool(self._sampling)

    def open(self, job: Job) -> Effect:
        """Open the sequence of a job that has reservation, lease and room; from now on it waits for its turn."""
        self._jobs.move(job, JobEvent.PREPARED)
        job.computed = len(job.prefix) * self._layout.block_tokens
        job.sequence = self._ids.new()
        job.chunk_first_block = len(job.prefix)
        capacity = job.length
        if job.blend is not None:  # the parts are loaded behind the prompt
            capacity = (self._layout.blocks_for(job.length) + len(job.blend.loads)) * self._layout.block_tokens
        return OpenSequence(job.sequence, capacity, job.request.sampling, job.past, job.length, job.request.tenant)

    def begin(self, now: float, job: Job) -> list[Effect]:
        """Compute the next chunk of a job, or fail the job if its reused blocks can no longer be loaded."""
        assert job.sequence is not None
        prefix: tuple[BlockLoad, ...] = ()
        prefix_s = self._settings.work_deadline_s
        if not job.loaded:
            if job.prefix:
                prefix_s = self._reuse.time_s(now, job)
                if prefix_s <= 0:
                    return self._ends.fail(now, job, LEASE_ENDED)
                prefix = self._reuse.loads(job, job.group.own_layers if job.group else range(self._layout.layers))
            job.computing_at = now
            self._counts.add("jobs_begun_ahead", not job.reserved)
            job.loaded = True
        first = job.computed // self._layout.block_tokens
        taken, taken_s = self._reuse.take_here(now, job)
        found: list[Effect] = [self._handoff.blocks(job, first, taken, ready=True)] if taken else []
        slots = self._next_chunk(now, job)
        if slots is None:
            return self._ends.fail(now, job, "no room in the slab for blocks that were not fetched", full=True)
        prefix_s = min(prefix_s, taken_s)
        blend = job.blended_chunk
        job.chunk_loads = (*prefix, *job.found, *(blend.loads if blend else ()))
        job.found.clear()
        found += self._reuse.shorten(job)
        self._begin_chunk(now, job)
        work = self._work(job, slots, prefix_s)
        if job.group:
            hidden = self._slab.grants(job.group.begin_own(self._slab))
            stage = ComputeStage(work, job.chunk_stop - work.start, 0, job.group.own_layers.stop, outgoing=hidden)
            return [Start(job.chunk_work, stage, self._settings.work_deadline_s)]
        if job.hands_off_chunk:
            found.append(self._handoff.blocks(job, job.chunk_first_block, self._slab.written(slots), ready=False))
        return [*found, Start(job.chunk_work, work, self._settings.work_deadline_s)]

    def _next_chunk(self, now: float, job: Job) -> list[int] | None:
        """Choose the next chunk. Returns the slots that it writes; None if blocks that were not fetched find no room."""
        if job.request.eviction is not None:
            job.chunk_stop = chunk_stop(job.computed, job.length, self._settings.chunk_tokens)
            return job.new_slots if job.hands_off_chunk else []
        size, base = self._layout.block_tokens, len(job.prefix)
        first, end = job.computed // size, job.length
        if job.meeting is not None:
            end = min(end, size * (job.meeting.gap_stop(first) or self._layout.blocks_for(end)))
        if job.blend is not None and first < job.blend.exact_blocks:
            end = job.blend.exact_blocks * size
        job.chunk_first_block = first
        job.chunk_stop = end if job.blended_chunk else chunk_stop(job.computed, end, self._settings.chunk_tokens)
        if self._reuse.awaits(job):
            job.chunk_stop = min(end, (first + max(1, self._reuse.head_blocks(now, job))) * size)
        places = first - base, self._layout.blocks_for(job.chunk_stop) - base
        if job.meeting is not None and not self._reuse.take_room(job, *places):
            return None
        return job.new_slots[slice(*places)]

    def _begin_chunk(self, now: float, job: Job) -> None:
        """Record which chunk is in flight."""
        job.chunk_began_at, job.chunk_reported_layers = now, 0
        self._jobs.move(job, JobEvent.CHUNK_BEGAN)
        job.chunk_work = self._ids.new()
        self._job = job

    def _work(self, job: Job, slots: Sequence[int], prefix_s: float) -> ComputeChunk:
        assert job.sequence is not None
        request, start, stop = job.request, job.computed, job.chunk_stop
        samples = stop == job.length and not job.group
        blend = job.blended_chunk
        return ComputeChunk(
            sequence=job.sequence,
            start=start,
            tokens=job.tokens[start * 4 : stop * 4],
            prefix=job.chunk_loads,
            outputs=self._slab.grants(slots),
            sampling=request.sampling if samples else None,
            prefix_s=prefix_s,
            seeds=tuple([each.seed for each in request.siblings]) if samples else (),
            prompt_logprobs=request.prompt_logprobs,
            following=job.tokens[stop * 4 : (stop + 1) * 4] if request.prompt_logprobs is not None else b"",
            parts=blend.parts if blend else (),
            again=self._settings.blend_share if blend else 0.0,
            eviction=request.eviction,
        )

    def on_progress(self, event: WorkProgress) -> list[Effect]:
        """Announce the layers of the chunk in flight that are computed."""
        job = self._job
        if job is None or job.chunk_work != event.work_id or job.state is not COMPUTING:
            return []
        assert isinstance(event.progress, LayersComputed)
        return self._handoff.layers(job, event.progress.stop_layer)

    def is_computing(self, work_id: int) -> bool:
        """Return whether this work is the chunk in flight."""
        return self._job is not None and self._job.chunk_work == work_id

    def on_computed(self, now: float, result: ChunkComputed | StageComputed | WorkFailed) -> list[Effect]:
        """Handle the end of the chunk in flight."""
        job, self._job = self._job, None
        assert job is not None
        self._queue.charge(job, max(0.0, now - job.chunk_began_at))
        if (blend := job.blended_chunk) is not None:  # its parts are not read again, whatever became of it
            self._slab.slots.unpin(blend.slots)
            blend.slots.clear()
        if job.state is ABANDONED:
            return self._ends.end(now, job)
        if isinstance(result, WorkFailed):
            self._counts.add("chunks_failed")
            self._jobs.move(job, JobEvent.CHUNK_DONE)
            return self._ends.fail(now, job, f"chunk failed: {result.reason}", stuck=result.stuck)
        if result.failed:
            self._jobs.move(job, JobEvent.CHUNK_DONE)
            return self._on_not_loaded(now, job, result)
        start, stop = job.computed, job.chunk_stop
        # Chunks with probabilities or sums of attention take longer, blended ones less: they would distort the measure.
        if job.request.prompt_logprobs is None and job.request.eviction is None and blend is None:
            loaded = len(job.chunk_loads) * self._layout.block_tokens
            self._workload.measure(now, result, start=start, stop=stop, loaded=loaded, share=job.share)
        if isinstance(result, ChunkComputed) and blend is not None:
            job.recomputed = result.recomputed
            self._counts.add("prompt_tokens_computed", stop - start - blend.tokens + job.recomputed)
        else:
            self._counts.add("prompt_tokens_computed", stop - start)
        job.load_s = max(job.load_s, result.loaded_s)
        job.computed = stop
        if isinstance(result, StageComputed):
            assert job.group is not None
            return self._on_own_stage(job, job.group, result)
        return self._on_chunk(now, job, start, result)

    def _on_not_loaded(self, now: float, job: Job, result: ChunkComputed | StageComputed) -> list[Effect]:
        sources = dict(enumerate(job.prefix)) | {load.block: load.source for load in job.chunk_loads}
        reason, unreached, reports = self._reuse.not_loaded(sources, result)
        if unreached:
            self._reuse.forgo(job)
        return reports + self._ends.fail(now, job, reason)

    def _on_chunk(self, now: float, job: Job, start: int, result: ChunkComputed) -> list[Effect]:
        job.checksums += result.checksums
        layers = self._handoff.layers(job, self._layout.layers) if job.hands_off_chunk else []
        scored = self._scored(job, start + 1, result.scored)
        if job.computed < job.length:
            self._jobs.move(job, JobEvent.CHUNK_DONE)
            return layers + scored + self._offers.keep_chunk(now, job)
        self._blending.learn(job)
        if result.token is None:
            return [*layers, *scored, *self._set_aside(job), *self._offers.keep_chunk(now, job)]
        finished = self._handoff.finish(now, job, ((result.token, result.logprob), *result.others), layers)
        return scored + finished + self._offers.keep_chunk(now, job)

    def _on_own_stage(self, job: Job, group: Group, result: StageComputed) -> list[Effect]:
        """Offer the decode the layers of a pipeline's chunk, and the next stage its hidden states."""
        base = len(job.prefix)
        slots = job.new_slots[job.chunk_first_block - base : self._layout.blocks_for(job.computed) - base]
        self._jobs.move(job, JobEvent.OWN_DONE if job.computed == job.length else JobEvent.CHUNK_DONE)
        return group.on_own_done(self._slab.written(slots), result.parts, self._slab.written(group.outgoing))

    def _scored(self, job: Job, first: int, scored: Sequence[TokenLogprob]) -> list[Effect]:
        """Send the gateway the probabilities of the prompt's tokens from position `first` on, as soon as they are computed."""
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

    # --- jobs set aside

    def _set_aside(self, job: Job) -> list[Effect]:
        """Sample the first token later, since its grammar mask is not ready. Until then other jobs take turns, and use the
        memory of its sequence."""
        assert job.sequence is not None
        self._jobs.move(job, JobEvent.SET_ASIDE)
        self._queue.leave(job)
        self._counts.add("jobs_set_aside")
        job.sampling_id = self._ids.new()
        self._sampling[job.sampling_id] = job
        sample = Start(job.sampling_id, SampleTokens(job.sequence), self._settings.work_deadline_s)
        closed, job.sequence = job.sequence, None
        return [sample, CloseSequence(closed)]

    def is_sampling(self, work_id: int) -> bool:
        """Return whether this work samples the first tokens of a job here."""
        return work_id in self._sampling

    def on_sampled(self, now: float, work_id: int, result: TokensSampled | WorkFailed) -> list[Effect]:
        """Handle the end of a work that samples a job's first tokens."""
        job = self._sampling.pop(work_id)
        if job.sampling_id != work_id:  # it ended meanwhile
            return []
        job.sampling_id = 0
        if isinstance(result, WorkFailed):
            return self._ends.fail(now, job, f"no first token: {result.reason}", stuck=result.stuck)
        return self._handoff.finish(now, job, result.sampled)

    def check(self) -> None:
        computing = [job for job in self._jobs if job.state in (COMPUTING, ABANDONED)]
        assert [id(job) for job in computing] == ([] if self._job is None else [id(self._job)])
        sampling = {id(job) for job in self._sampling.values() if job.sampling_id}
        assert sampling == {id(job) for job in self._jobs if job.state is JobState.SAMPLING}
