"""Started works and open sequences, each ended and closed once, by the last subtask that uses it."""

import threading
import time
from collections.abc import Callable
from functools import partial

import structlog

from mooncake_zmq.core.actor import OpenSequence, WorkDone, WorkProgress
from mooncake_zmq.core.work import (
    ChunkComputed,
    ComputeChunk,
    ComputeStage,
    DecodeStep,
    Result,
    SampleTokens,
    StageComputed,
    TokensSampled,
    Work,
    WorkFailed,
)
from mooncake_zmq.engine.constraint import ConstraintError, ConstraintNotReady
from mooncake_zmq.engine.sampling import Past
from mooncake_zmq.engine.spec import Engine
from mooncake_zmq.runtime.executor.jobs import Job, OpenedSequence, Stopped, Subtasks, Turn, needed_sequences, sequences_of
from mooncake_zmq.runtime.executor.sampler import Sampler
from mooncake_zmq.transfer.network import RemoteReader

log = structlog.get_logger()

Emit = Callable[[WorkProgress | WorkDone[Result]], None]

ENGINE_WORKS = (ComputeChunk, ComputeStage, DecodeStep)


class Works:
    """Pass jobs to their subtasks and emit a work's one `WorkDone` when the last of these has ended."""

    def __init__(self, reader: RemoteReader, sampler: Sampler, emit: Emit) -> None:
        self._reader, self._sampler, self._emit = reader, sampler, emit
        self._lock = threading.Lock()
        """Guards `_jobs`, their subtasks and results, and `sequences`."""
        self._jobs: dict[int, Job] = {}
        self.sequences: dict[int, OpenedSequence] = {}
        self._closed = False

    @property
    def are_ended(self) -> bool:
        return not self._jobs

    def engine_overdue_s(self) -> float:
        """Return how far the engine's oldest work is past its deadline: if far, the engine's thread hangs."""
        now = time.monotonic()
        with self._lock:
            deadlines = [job.deadline for job in self._jobs.values() if isinstance(job.work, ENGINE_WORKS)]
        return max(0.0, now - min(deadlines, default=now))

    # --- sequences

    def open_sequence(self, asked: OpenSequence, engine: Engine, past: Past | None) -> None:
        assert asked.sequence not in self.sequences, f"sequence {asked.sequence} is open already"
        try:
            opened = OpenedSequence(engine.new_sequence(asked.capacity_tokens))
            opened.kv.expect(asked.filled_tokens)
            opened.kv.dropped = asked.dropped_tokens
        except MemoryError as error:  # of a GPU, whose memory is allocated at once; works with the sequence fail
            log.warning("no_memory_for_sequence", tokens=asked.capacity_tokens, error=str(error))
            opened = OpenedSequence(None)
        opened.past = past
        with self._lock:
            self.sequences[asked.sequence] = opened

    def close_sequence(self, sequence: int) -> None:
        """Free a sequence's KV, at the end of the last work that uses it."""
        with self._lock:
            opened = self.sequences.pop(sequence)
            opened.closing = True
            unused = opened.take_unused()
        for each in unused:
            each.close()

    # --- jobs

    def add(self, work_id: int, work: Work, deadline: float) -> Job:
        """Return the job of a new work, which `begin` or `begin_sampling` then passes to its subtasks."""
        job = Job(work_id, work, deadline)
        with self._lock:
            assert not self._closed, "the executor is closed"
            assert work_id not in self._jobs, f"work id {work_id} is in use"
            for sequence in sequences_of(work):
                opened = job.sequences[sequence] = self.sequences[sequence]
                opened.uses += 1
            self._jobs[work_id] = job
        if any(job.sequences[sequence].memory is None for sequence in needed_sequences(work)):
            job.result = WorkFailed("no memory for the sequence")
        return job

    def begin(self, job: Job, subtasks: Subtasks) -> None:
        """Pass a job to its subtasks. All are counted before the first may finish."""
        job.subtasks = 1 + len(subtasks.turns) + bool(subtasks.reads)
        if subtasks.reads:
            until = min(job.deadline, subtasks.reads_until)
            batch = self._reader.submit(subtasks.reads, until, lambda: self._end(job, None))
            with self._lock:
                job.batch = batch
        for worker, turn in subtasks.turns:
            worker.put(partial(self._take_turn, job, turn))
        self._end(job, None)

    def begin_sampling(self, job: Job, work: SampleTokens) -> None:
        """Pass a job to the sampler."""
        with self._lock:
            opened = self.sequences[work.logits_of]
            unsampled, opened.unsampled = opened.unsampled, None
            assert unsampled, "the last work on the sequence left nothing to sample"
            job.unsampled, job.subtasks = unsampled, 1
            opened.samples += 1
        self._sampler.put(job, partial(self._take_turn, job, lambda: TokensSampled(unsampled.sample())))

    def cancel(self, work_id: int) -> None:
        """Ask a work to stop early, unless it has ended. A run of steps ends at its next border, which is no failure."""
        with self._lock:
            job = self._jobs.get(work_id)
        if job and isinstance(job.work, DecodeStep) and job.work.steps > 1:
            job.cut = True
        elif job:
            self._stop(job, "cancelled")

    def close(self) -> None:
        """Refuse new works and stop all."""
        with self._lock:
            self._closed = True
            jobs = list(self._jobs.values())
        for job in jobs:
            self._stop(job, "closed")

    def _take_turn(self, job: Job, turn: Turn) -> None:
        result: Result | None
        try:
            job.check()
            result = turn()
        except Stopped as stopped:
            result = WorkFailed(stopped.reason)
        except MemoryError as error:
            result = WorkFailed(f"out of memory: {error}")
        except (ConstraintError, FloatingPointError) as error:
            result = unable(error)
        except Exception as error:
            self._end(job, WorkFailed(f"bug: {error!r}"))
            raise
        self._end(job, result)

    def _end(self, job: Job, result: Result | None) -> None:
        """End one subtask. The last one ends the job with the first result that was given."""
        with self._lock:
            job.result = job.result or result
            job.subtasks -= 1
            last = job.subtasks == 0
        if isinstance(result, WorkFailed | ChunkComputed | StageComputed) and not last:
            self._stop(job, "its other half ended")
        if not last:
            return
        outcome = job.result or (WorkFailed(job.stopped) if job.stopped else job.conclude())
        with self._lock:
            del self._jobs[job.work_id]
            for opened in job.sequences.values():
                opened.uses -= 1
            if job.unsampled:
                job.unsampled.source.samples -= 1
            released = [*job.sequences.values(), *([job.unsampled.source] if job.unsampled else [])]
            unused = [each for opened in released for each in opened.take_unused()]
        for each in unused:
            each.close()
        self._emit(WorkDone(job.work_id, outcome))

    def _stop(self, job: Job, reason: str) -> None:
        with self._lock:
            job.stopped = job.stopped or reason
            batch = job.batch
        if job.prefix:
            job.prefix.wake()
        if job.entering:
            job.entering.wake()
        if batch:
            self._reader.cancel(batch)
        if job.unsampled:
            self._sampler.wake()


def unable(error: ConstraintError | FloatingPointError) -> WorkFailed:
    """Return a failure that no retry avoids: model, tokens and constraint are the same anywhere."""
    if isinstance(error, FloatingPointError):
        return WorkFailed(str(error), stuck=True)
    return WorkFailed(f"constraint: {error}", stuck=not isinstance(error, ConstraintNotReady))
