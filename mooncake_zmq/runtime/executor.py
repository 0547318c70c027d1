"""Carries out an actor's works live: model steps on one thread, local copies on another, reads from other hosts on a third,
and the SSD tier's reads and writes on some more, apart from each other, so that no promotion waits behind demotions.

KV moves as a one-sided read by its destination, from a mapped segment, in host or GPU memory, or from a data server; a put
alone writes, into slots that it was granted. RDMA would be a third way to do the same read. What arrives is verified, by the
rule of `kv.reading`; what does not verify is reported per block, as a miss.

A work may have several parties (a chunk's computation and the loading of its prefix). Its `WorkDone` is emitted when the
last of them has let go, so that nothing of a work touches memory after its end.
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from mooncake_zmq.core.actor import WorkDone, WorkProgress
from mooncake_zmq.core.messages import Hello, Sampled, Sampling, SlotRef, TokenLogprob
from mooncake_zmq.core.work import (
    TOLD_EVERY_S,
    BlockLoad,
    BlocksCopied,
    BlocksPulled,
    ChunkComputed,
    ComputeChunk,
    ComputeStage,
    CopyBlocks,
    DecodeStep,
    DiskBlock,
    DiskWritten,
    ForkSequence,
    Generate,
    LayersComputed,
    ProbeEngine,
    ProbeProcess,
    ProcessProbed,
    PullBlocks,
    Result,
    SampleTokens,
    SequenceBlock,
    SequenceForked,
    SlotGrant,
    StageComputed,
    StepDecoded,
    StepEntry,
    TokensSampled,
    WatchEngine,
    Work,
    WorkFailed,
    WriteToDisk,
)
from mooncake_zmq.engine.constraint import ConstraintError, ConstraintNotReady
from mooncake_zmq.engine.grammars import Grammars
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.sampling import Past, choose
from mooncake_zmq.engine.scoring import PromptScores
from mooncake_zmq.engine.spec import Engine
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.pool.ssd.disk import Disk
from mooncake_zmq.pool.ssd.disk_copy import read_blocks, write_blocks
from mooncake_zmq.pool.ssd.disk_directory import DiskFault
from mooncake_zmq.transfer.block_copy import (
    copy_block,
    granted,
    load_blocks,
    store_block,
    store_parts,
)
from mooncake_zmq.transfer.cuda import Cuda
from mooncake_zmq.transfer.directory import SegmentDirectory
from mooncake_zmq.transfer.hidden_states import EnteringStates, store_hidden
from mooncake_zmq.transfer.network import RemoteReader
from mooncake_zmq.transfer.process_lock import is_alive
from mooncake_zmq.transfer.reading_lane import ReadBatch, RemoteRead
from mooncake_zmq.transfer.shared_memory import Segment
from mooncake_zmq.transfer.sockets import Sockets

log = structlog.get_logger()

Emit = Callable[[WorkProgress | WorkDone], None]

ENGINE_WORKS = (ComputeChunk, ComputeStage, DecodeStep)


class Executor:
    """Methods are for the runtime's thread; `emit` and `on_crash` are called from the executor's own threads as well."""

    def __init__(
        self,
        *,
        node: str,
        incarnation: int,
        host: str,
        layout: BlockLayout,
        segment: Segment | None,
        engine: Engine | None,
        runtime_dir: str | Path,
        emit: Emit,
        on_crash: Callable[[BaseException], None],
        window_bytes: int = 32 << 20,
        progress_s: float = TOLD_EVERY_S,
        sockets: Sockets | None = None,
        disk: Disk | None = None,
        verify_local: bool = True,
        cuda: Cuda | None = None,
        shm_dir: Path | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`emit` and `on_crash` are called from worker threads. `progress_s`: see `TOLD_EVERY_S`. `disk` stays the
        caller's to close, after this. Without `verify_local`, local reads of committed blocks check generations alone, and the
        bytes' checksums only where they come from another host or a disk. `cuda`: the GPU that the engine's sequences are on.
        `shm_dir`: where neighbours' segments must lie. `grammars`: for answers with a constraint, closed with this."""
        self._segment = segment
        self._layout = layout
        self._engine = engine
        self._runtime_dir = runtime_dir
        self._emit = emit
        self._crashed = False

        def crash(error: BaseException) -> None:
            self._crashed = True
            on_crash(error)

        self._lock = threading.Lock()
        """Guards `_jobs`, their parties and results, and `_sequences`."""
        self._jobs: dict[int, _Job] = {}
        self._sequences: dict[int, _OpenSequence] = {}
        self._closed = False
        self._directory = SegmentDirectory(node, incarnation, host, layout, segment, cuda, shm_dir)
        self._progress_s = progress_s
        self._reader = RemoteReader(layout, on_crash=crash, window_bytes=window_bytes, sockets=sockets)
        self._compute = _Worker("compute", crash)
        self._copy = _Worker("copy", crash)
        self._sampler = _Sampler(crash)
        self._disk = disk
        self._disk_reads = _Worker("disk-read", crash, disk.threads if disk else 0)
        self._disk_writes = _Worker("disk-write", crash, disk.threads if disk else 0)
        self._verify_local = verify_local
        self._grammars = grammars

    @property
    def read_counts(self) -> dict[str, int]:
        """Counters of the reads from other hosts."""
        return self._reader.counts

    def engine_overdue_s(self) -> float:
        """How far the engine's oldest work is past the deadline by which it was to end: well past, its thread hangs."""
        now = time.monotonic()
        with self._lock:
            deadlines = [job.deadline for job in self._jobs.values() if isinstance(job.work, ENGINE_WORKS)]
        return max(0.0, now - min(deadlines, default=now))

    # --- peers, sequences, generations

    def learn_peer(self, name: str, incarnation: int, hello: Hello) -> None:
        """Remember where this life's slots can be read; an older life of it is forgotten."""
        life = (name, incarnation)
        replaced = self._directory.learn(life, hello.host, hello.segment)
        if replaced:
            self._reader.forget(replaced)
        endpoint = self._directory.endpoint(life)
        if endpoint:
            self._reader.learn(life, endpoint)

    def forget_peer(self, name: str) -> None:
        """Drop what is known of a peer; reads of it over the network fail at once, copies under way finish."""
        life = self._directory.forget(name)
        if life:
            self._reader.forget(life)

    def fence(self, generations: Iterable[tuple[int, int]]) -> None:
        """Set (slot, generation) in the own segment."""
        assert self._segment, "a node without a segment has nothing to fence"
        for slot, generation in generations:
            self._segment.set_generation(slot, generation)

    def open_sequence(
        self,
        sequence: int,
        capacity_tokens: int,
        sampling: Sampling | None = None,
        past: bytes = b"",
        filled_tokens: int = 0,
        tenant: str = "",
    ) -> None:
        """See `core.actor.OpenSequence`."""
        assert self._engine, "a node without an engine has no sequences"
        assert sequence not in self._sequences, f"sequence {sequence} is open already"
        try:
            opened = _OpenSequence(self._engine.new_sequence(capacity_tokens))
            opened.kv.expect(filled_tokens)
        except MemoryError as error:  # a GPU's, which is taken at once; works with the sequence fail
            log.warning("no_memory_for_sequence", tokens=capacity_tokens, error=str(error))
            opened = _OpenSequence(None)
        if sampling is not None and sampling.reads_past:
            opened.past = Past(sampling, past, self._grammars, tenant)
        with self._lock:
            self._sequences[sequence] = opened

    def close_sequence(self, sequence: int) -> None:
        """Free a sequence's KV, at the end of the last work that uses it."""
        with self._lock:
            opened = self._sequences.pop(sequence)
            opened.closing = True
            unused = opened.take_unused()
        for each in unused:
            each.close()

    # --- works

    def start(self, work_id: int, work: Work, deadline_s: float) -> None:
        """Begin a work that may take `deadline_s` from now. It ends with exactly one `WorkDone`, whatever happens."""
        job = _Job(work_id, work, time.monotonic() + deadline_s)
        with self._lock:
            assert not self._closed, "the executor is closed"
            assert work_id not in self._jobs, f"work id {work_id} is in use"
            for sequence in _sequences_of(work):
                opened = job.sequences[sequence] = self._sequences[sequence]
                opened.uses += 1
            self._jobs[work_id] = job
        if any(job.sequences[sequence].memory is None for sequence in _needed(work)):
            job.result = WorkFailed("no memory for the sequence")
            self._begin(job, [], [])
            return
        match work:
            case ComputeChunk():
                self._start_chunk(job, work)
            case ComputeStage():
                self._start_chunk(job, work.chunk, work)
            case PullBlocks():
                self._start_pull(job, work)
            case CopyBlocks():
                self._start_copy(job, work)
            case WriteToDisk():
                self._start_write(job, work)
            case DecodeStep():
                self._begin(job, [(self._compute, partial(self._decode, job, work))], [])
            case ForkSequence():
                self._begin(job, [(self._copy, partial(self._fork, job, work))], [])
            case SampleTokens():
                self._start_sampling(job, work)
            case ProbeProcess():
                self._begin(job, [(self._copy, partial(self._probe, work))], [])
            case Generate() | ProbeEngine() | WatchEngine():
                raise TypeError(work)  # a node beside vLLM has `runtime.generation`

    def cancel(self, work_id: int) -> None:
        """Ask a work to stop early; one that has ended is none. A run of steps ends at its next border, which is no failure."""
        with self._lock:
            job = self._jobs.get(work_id)
        if job and isinstance(job.work, DecodeStep) and job.work.steps > 1:
            job.cut = True
        elif job:
            self._stop(job, "cancelled")

    def close(self) -> None:
        """End all works, stop the threads, free all sequences. May be called twice. After a crash works may be left."""
        with self._lock:
            self._closed = True
            jobs = list(self._jobs.values())
        for job in jobs:
            self._stop(job, "closed")
        self._compute.close()
        if self._grammars is not None:
            self._grammars.close()
        self._sampler.close()
        self._copy.close()
        self._disk_reads.close()
        self._disk_writes.close()
        self._reader.close()
        assert self._crashed or not self._jobs, "a work was left without its end"
        for sequence in list(self._sequences):
            self.close_sequence(sequence)
        self._directory.clear()

    # --- a job's parties

    def _begin(
        self, job: "_Job", turns: "list[tuple[_Worker, Turn]]", reads: list[RemoteRead], reads_until: float = math.inf
    ) -> None:
        """Hand a job to its parties. All are counted before the first may finish."""
        job.parties = 1 + len(turns) + bool(reads)
        if reads:
            batch = self._reader.submit(reads, min(job.deadline, reads_until), lambda: self._leave(job, None))
            with self._lock:
                job.batch = batch
        for worker, turn in turns:
            worker.put(partial(self._take_turn, job, turn))
        self._leave(job, None)

    def _take_turn(self, job: "_Job", turn: "Turn") -> None:
        result: Result | None
        try:
            job.check()
            result = turn()
        except _Stopped as stopped:
            result = WorkFailed(stopped.reason)
        except MemoryError as error:
            result = WorkFailed(f"out of memory: {error}")
        except ConstraintError as error:
            result = _unable(error)
        except Exception as error:
            self._leave(job, WorkFailed(f"bug: {error!r}"))
            raise
        self._leave(job, result)

    def _leave(self, job: "_Job", result: Result | None) -> None:
        """One party is done. The last one to leave ends the job with the first result that was given."""
        with self._lock:
            job.result = job.result or result
            job.parties -= 1
            last = job.parties == 0
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
            let_go = [*job.sequences.values(), *([job.unsampled.source] if job.unsampled else [])]
            unused = [each for opened in let_go for each in opened.take_unused()]
        for each in unused:
            each.close()
        self._emit(WorkDone(job.work_id, outcome))

    def _stop(self, job: "_Job", reason: str) -> None:
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

    # --- loading blocks into sequences

    def _start_pull(self, job: "_Job", work: PullBlocks) -> None:
        pulled = _Pulled()
        job.conclude = pulled.result
        sequence = job.sequences[work.sequence].kv
        here, far = self._split(work.loads)
        turns: list[tuple[_Worker, Turn]] = []
        if here:
            order = [(range(load.first_layer, load.stop_layer), load) for load in here]
            turns.append((self._copy, partial(self._load_blocks, job, order, sequence, pulled)))
        self._begin(
            job, turns, [self._sequence_read(load, range(load.first_layer, load.stop_layer), sequence, pulled) for load in far]
        )

    def _split(self, loads: Iterable[BlockLoad]) -> tuple[list[BlockLoad], list[BlockLoad]]:
        """Loads of this host, or of nowhere, and those of other hosts."""
        here: list[BlockLoad] = []
        far: list[BlockLoad] = []
        for load in loads:
            (far if self._directory.endpoint((load.source.node, load.source.incarnation)) else here).append(load)
        return here, far

    def _load_blocks(
        self,
        job: "_Job",
        order: "Iterable[_LayersOfBlock]",
        sequence: SequenceKV,
        record: "_LoadRecord",
        until: float = math.inf,
    ) -> None:
        """Load in the given order. What comes too late has failed."""
        for together in _batches(order, sequence.parts_at_once):
            is_late = job.is_late() or time.monotonic() >= until
            loads = []
            for layers, load in together:
                segment = self._directory.segment((load.source.node, load.source.incarnation))
                if segment and not is_late and load.block not in record.failed:
                    loads.append((segment, load, layers))
                else:
                    record.fail(load.block, ReadFailure.UNREACHED)
            outcomes = load_blocks(loads, sequence, verify_committed=self._verify_local)
            for (_, load, layers), loaded in zip(loads, outcomes, strict=True):
                if isinstance(loaded, ReadFailure):
                    record.fail(load.block, loaded)
                else:
                    record.arrived(load.block, layers, loaded)
            if job.stopped:
                return

    def _sequence_read(self, load: BlockLoad, layers: range, sequence: SequenceKV, record: "_LoadRecord") -> RemoteRead:
        return RemoteRead(load.source, layers, _SequenceSink(load, sequence, self._layout, record))

    # --- computing

    def _start_chunk(self, job: "_Job", work: ComputeChunk, stage: ComputeStage | None = None) -> None:
        sequence = job.sequences[work.sequence].kv
        turns: list[tuple[_Worker, Turn]] = []
        reads: list[RemoteRead] = []
        until = time.monotonic() + work.prefix_s
        if work.prefix:
            prefix = job.prefix = _Prefix(self._layout.layers, work.prefix)
            here, far = self._split(work.prefix)
            if here:
                order = prefix.until_failed(_by_layer(self._layout.layers, here))
                turns.append((self._copy, partial(self._load_blocks, job, order, sequence, prefix, until)))
            reads = [
                self._sequence_read(load, layers, sequence, prefix) for layers, load in _by_layer(self._layout.layers, far)
            ]
        if stage and stage.entering:
            assert self._engine
            job.entering = EnteringStates(self._layout, stage.entering, stage.count, self._engine.spec.hidden)
            reads += job.entering.remote_reads(self._is_remote)
        compute = partial(self._compute_stage, job, stage, sequence) if stage else None
        turns.append((self._compute, compute or partial(self._compute_chunk, job, work, sequence)))
        self._begin(job, turns, reads, until)

    def _is_remote(self, source: SlotRef) -> bool:
        return self._directory.endpoint((source.node, source.incarnation)) is not None

    def _compute_chunk(self, job: "_Job", work: ComputeChunk, sequence: SequenceKV) -> Result:
        assert self._engine
        began = time.perf_counter()
        tokens = _tokens_of(work)
        told_at = began_at = time.monotonic()

        def after_layer(layer: int) -> None:
            nonlocal told_at
            job.check()
            self._store_outputs(work, sequence, layer, len(tokens))
            now = time.monotonic()
            is_last = layer + 1 == self._layout.layers
            if now - (began_at if is_last else told_at) >= self._progress_s:
                told_at = now
                self._emit(WorkProgress(job.work_id, LayersComputed(layer + 1)))

        scoring = None
        if work.prompt_logprobs is not None:
            following = [*tokens[1:].tolist(), *np.frombuffer(work.following, "<i4").tolist()]
            scoring = PromptScores(following, work.prompt_logprobs)
        try:
            sequence.set_length(work.start)
            logits = self._engine.prefill(
                sequence,
                tokens,
                before_layer=job.before_layer,
                after_layer=after_layer,
                logits_at=range(len(tokens)) if scoring else None if work.sampling is None else (-1,),
                on_logits=scoring,
            )
            if scoring:
                logits = scoring.last
            for layer in range(self._layout.layers):  # an engine that skipped one must not have used what is not there
                job.before_layer(layer)
        except _PrefixFailed as failure:
            return ChunkComputed((), None, time.perf_counter() - began, *_split_failures(failure.blocks))
        sampled: tuple[Sampled, ...] = ()
        if work.sampling is not None:
            assert logits is not None
            sampled = self._sample(job, work, logits[0], work.start + len(tokens))
        token, told = sampled[0] if sampled else (None, None)
        loaded_s = job.prefix.loaded_s if job.prefix else 0.0
        elapsed_s = time.perf_counter() - began
        checksums = self._output_checksums(work)
        return ChunkComputed(
            checksums,
            token,
            elapsed_s,
            loaded_s=loaded_s,
            waited_s=job.waited_s,
            logprob=told,
            others=sampled[1:],
            scored=tuple(scoring.scored) if scoring else (),
        )

    def _sample(self, job: "_Job", work: ComputeChunk, logits: NDArray[np.float32], position: int) -> tuple[Sampled, ...]:
        """The token at `position` for each choice; none where it is not known yet what may stand there."""
        opened = job.sequences[work.sequence]
        if opened.past is not None and opened.past.awaited() is not None:
            opened.unsampled = _Unsampled(opened, logits.copy(), work.samplings, position)
            return ()
        return tuple(choose(logits, sampling, position, opened.past) for sampling in work.samplings)

    def _start_sampling(self, job: "_Job", work: SampleTokens) -> None:
        with self._lock:
            opened = self._sequences[work.logits_of]
            unsampled, opened.unsampled = opened.unsampled, None
            assert unsampled, "the last work on the sequence left nothing to sample"
            job.unsampled, job.parties = unsampled, 1
            opened.samples += 1
        self._sampler.put(job, partial(self._take_turn, job, lambda: TokensSampled(unsampled.sample())))

    def _compute_stage(self, job: "_Job", stage: ComputeStage, sequence: SequenceKV) -> Result:
        assert self._engine
        began = time.perf_counter()
        chunk = stage.chunk
        entering: NDArray[Any] | None = _tokens_of(chunk)
        if job.entering:
            job.entering.read_here(lambda ref: self._directory.segment((ref.node, ref.incarnation)), self._is_remote)
            entering = job.entering.wait(job.check, job.deadline)
        if entering is None:
            return WorkFailed("hidden states were not reached")
        computes = time.perf_counter()

        def after_layer(layer: int) -> None:
            job.check()
            self._store_outputs(chunk, sequence, layer, stage.count)

        try:
            sequence.set_length(chunk.start)
            out = self._engine.prefill_layers(
                sequence,
                entering,
                stage.layers,
                before_layer=job.before_layer,
                after_layer=after_layer,
                logits=chunk.sampling is not None,
            )
            for layer in stage.layers:
                job.before_layer(layer)
        except _PrefixFailed as failure:
            return StageComputed((), None, time.perf_counter() - began, *_split_failures(failure.blocks))
        sampled: tuple[Sampled, ...] = ()
        if stage.leaving:
            assert out is not None
            assert self._segment
            if not store_hidden(out, self._segment, stage.leaving):
                return WorkFailed("the slots for hidden states are no longer granted")
        elif chunk.sampling is not None:
            assert out is not None
            sampled = self._sample(job, chunk, out[0], chunk.start + stage.count)
        token, told = sampled[0] if sampled else (None, None)
        loaded_s = job.prefix.loaded_s if job.prefix else 0.0
        elapsed_s, waited_s = time.perf_counter() - began, job.waited_s + computes - began
        parts = self._stage_parts(stage)
        return StageComputed(parts, token, elapsed_s, loaded_s=loaded_s, waited_s=waited_s, logprob=told, others=sampled[1:])

    def _stage_parts(self, stage: ComputeStage) -> tuple[int, ...]:
        assert self._segment
        rows = [self._segment.parts(grant.slot)[stage.first_layer : stage.stop_layer] for grant in stage.chunk.outputs]
        return tuple(int(checksum) for row in rows for checksum in row)

    def _store_outputs(self, work: ComputeChunk, sequence: SequenceKV, layer: int, token_count: int) -> None:
        """Copy one layer of the new tokens to the output slots, which lie in the own segment."""
        block_tokens = self._layout.block_tokens
        stop = work.start + token_count
        assert len(work.outputs) <= self._layout.blocks_for(token_count)
        assert self._segment
        parts = []
        for index, grant in enumerate(work.outputs):
            if not granted(self._segment, grant):
                raise _Stopped(f"output slot {grant.slot} is no longer granted")
            first = work.start + index * block_tokens
            parts.append((grant.slot, layer, first, min(block_tokens, stop - first)))
        store_parts(sequence, self._segment, parts)

    def _output_checksums(self, work: ComputeChunk) -> tuple[int, ...]:
        segment = self._segment
        return tuple(block_checksum(segment.parts(grant.slot).tolist()) for grant in work.outputs if segment)

    def _decode(self, job: "_Job", work: DecodeStep) -> Result:
        assert self._engine
        began = time.perf_counter()
        sequences = [job.sequences[entry.sequence].kv for entry in work.entries]
        for sequence, entry in zip(sequences, work.entries, strict=True):
            if sequence.length != entry.position:
                sequence.set_length(entry.position)
        pasts = [job.sequences[entry.sequence].past for entry in work.entries]
        asked = any(entry.sampling.logprobs is not None for entry in work.entries)
        fed, made, told = tuple(entry.token for entry in work.entries), [], []
        failed: dict[int, WorkFailed] = {}
        for step in range(work.steps):
            for row, entry in enumerate(work.entries):
                if (past := pasts[row]) is not None:
                    past.feed(fed[row], entry.position + step)
            logits = self._engine.decode(sequences, np.array(fed, np.int32))
            chosen: list[tuple[int, TokenLogprob | None]] = []
            sat_out = _sitting_out(work.entries, pasts)
            for row, entry in enumerate(work.entries):
                position, opened = entry.position + step + 1, job.sequences[entry.sequence]
                if row in sat_out:
                    opened.unsampled = _Unsampled(opened, logits[row].copy(), (entry.sampling,), position)
                    chosen.append((0, None))
                    continue
                try:
                    chosen.append(choose(logits[row], entry.sampling, position, opened.past))
                except ConstraintError as error:  # of this answer alone
                    failed[row] = _unable(error)
                    chosen.append((0, None))
                    continue
                if opened.past is not None:  # what may follow is looked for from now on
                    opened.past.feed(chosen[row][0], position)
            fed = tuple(token for token, _ in chosen)
            made.append(fed)
            if asked:
                told.append(tuple(logprob for _, logprob in chosen))
            if failed or sat_out or job.cut or job.stopped or job.is_late():
                break
        return StepDecoded(tuple(made), time.perf_counter() - began, tuple(told), tuple(failed.items()), sat_out)

    def _fork(self, job: "_Job", work: ForkSequence) -> Result:
        source = job.sequences[work.source].kv
        without = tuple(target for target in work.targets if job.sequences[target].memory is None)
        for target in work.targets:
            job.check()
            if target in without:
                continue
            copy = job.sequences[target].kv
            copy.copy_from(source, work.tokens)
            copy.settle()
        return SequenceForked(without)

    # --- copying whole blocks

    def _start_copy(self, job: "_Job", work: CopyBlocks) -> None:
        copied = _Copied(len(work.copies))
        job.conclude = copied.result
        here: list[int] = []
        stored: list[int] = []
        reads: list[RemoteRead] = []
        for index, (source, grant) in enumerate(work.copies):
            if isinstance(source, DiskBlock):
                stored.append(index)
                continue
            # Pinning takes seconds, for which no heartbeat waits: the copy thread finds what is near. A stream needs no pin.
            far = isinstance(source, SlotRef) and self._directory.endpoint((source.node, source.incarnation))
            target = self._directory.segment((grant.node, grant.incarnation), writable=True, pinned=False) if far else None
            if isinstance(source, SlotRef) and target:
                reads.append(RemoteRead(source, range(self._layout.layers), _SlotSink(index, target, grant, copied)))
            else:
                here.append(index)
        turns: list[tuple[_Worker, Turn]] = []
        if here:
            turns.append((self._copy, partial(self._copy_blocks, job, work, here, copied)))
        if stored:
            assert self._disk, "a node without a disk has nothing to promote"
            blocks = [source for source, _ in work.copies if isinstance(source, DiskBlock)]
            shares = deque([stored[place] for place in share] for share in self._disk.share_out(blocks))
            turn = partial(self._read_blocks, job, work, shares, copied, self._disk)
            turns += [(self._disk_reads, turn)] * min(self._disk.threads, len(shares))
        self._begin(job, turns, reads)

    def _copy_blocks(self, job: "_Job", work: CopyBlocks, indices: list[int], copied: "_Copied") -> None:
        for index in indices:
            if job.stopped or job.is_late():
                return
            source, grant = work.copies[index]
            target = self._directory.segment((grant.node, grant.incarnation), writable=True)
            if target is None:
                continue
            if isinstance(source, SequenceBlock):
                copied.checksums[index] = store_block(job.sequences[source.sequence].kv, source.block, target, grant)
                continue
            assert isinstance(source, SlotRef)
            segment = self._directory.segment((source.node, source.incarnation))
            if segment:
                copied.set(index, copy_block(segment, source, target, grant, verify_committed=self._verify_local))

    # --- the SSD tier

    def _read_blocks(self, job: "_Job", work: CopyBlocks, shares: deque[list[int]], copied: "_Copied", disk: Disk) -> None:
        for share in _taken(shares):
            if job.stopped or job.is_late() or copied.fault:
                return
            indices, copies = [], []
            for index in share:
                block, grant = work.copies[index]
                assert isinstance(block, DiskBlock)
                target = self._directory.segment((grant.node, grant.incarnation), writable=True)
                if target:
                    indices.append(index)
                    copies.append((block, target, grant))
            try:
                for index, outcome in zip(indices, read_blocks(disk, copies), strict=True):
                    copied.set(index, outcome)
            except DiskFault as fault:
                copied.fault = str(fault)

    def _start_write(self, job: "_Job", work: WriteToDisk) -> None:
        assert self._disk, "a node without a disk has nothing to demote to"
        shares = deque(self._disk.share_out([block for _, block in work.blocks]))
        parties = min(self._disk.threads, len(shares))
        written = _Written(len(work.blocks), parties)
        job.conclude = written.result
        turn = partial(self._write_blocks, job, work, shares, written, self._disk)
        self._begin(job, [(self._disk_writes, turn)] * parties, [])

    def _write_blocks(self, job: "_Job", work: WriteToDisk, shares: deque[list[int]], written: "_Written", disk: Disk) -> None:
        """Write what is left to write; the last party to end makes it all durable at once."""
        assert self._segment, "a node without a segment has nothing to demote"
        for share in _taken(shares):
            if job.stopped or job.is_late() or written.fault:
                break
            try:
                outcomes = write_blocks(self._segment, disk, [work.blocks[index] for index in share])
            except DiskFault as fault:
                written.fault = str(fault)
                break
            for index, outcome in zip(share, outcomes, strict=True):
                written.set(index, outcome)
                if outcome is ReadFailure.CORRUPT:
                    source, block = work.blocks[index]
                    log.error("block_corrupt_in_memory", slot=source.slot, key=block.key.hex())
        if written.is_last() and not job.stopped:
            try:
                written.commit(work, disk)
            except DiskFault as fault:
                written.fault = written.fault or str(fault)

    def _probe(self, work: ProbeProcess) -> Result:
        return ProcessProbed(is_alive(self._runtime_dir, work.node, work.incarnation))


_LayersOfBlock = tuple[range, BlockLoad]

Turn = Callable[[], Result | None]
"""One party's share of a job; a result ends the job for the other parties too."""


class _Stopped(Exception):
    """The work is to end without a result."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _PrefixFailed(Exception):
    """Blocks of the prefix were not loaded."""

    def __init__(self, blocks: dict[int, ReadFailure]) -> None:
        super().__init__(blocks)
        self.blocks = blocks


@dataclass(slots=True, eq=False)
class _OpenSequence:
    memory: SequenceKV | None
    """None: there was none for it."""
    past: Past | None = None
    """Where choices read it."""
    unsampled: "_Unsampled | None" = None
    """What its last work computed and did not sample."""
    uses: int = 0
    """Works that use its KV."""
    samples: int = 0
    """Works that use its past alone."""
    closing: bool = False

    @property
    def kv(self) -> SequenceKV:
        assert self.memory, "no work begins on a sequence without memory"
        return self.memory

    def take_unused(self) -> "list[SequenceKV | Past]":
        """What can be closed: once it is closing, what no work uses. Each is returned once."""
        unused: list[SequenceKV | Past] = []
        if self.closing and not self.uses:
            if self.memory:
                unused.append(self.memory)
                self.memory = None
            if self.past and not self.samples:
                unused.append(self.past)
                self.past = None
        return unused


@dataclass(slots=True, eq=False)
class _Unsampled:
    """Logits at `position`, from which a token is to be sampled in each of these ways when that can be done."""

    source: _OpenSequence
    logits: NDArray[np.float32]
    samplings: Sequence[Sampling]
    position: int

    def sample(self) -> tuple[Sampled, ...]:
        """May wait, and raises ConstraintError."""
        return tuple(choose(self.logits, sampling, self.position, self.source.past) for sampling in self.samplings)

    def awaited(self) -> Future[bytes] | None:
        """What `sample` would wait for."""
        return self.source.past.awaited() if self.source.past else None

    def left_s(self) -> float:
        """How much longer it may be awaited."""
        return self.source.past.left_s() if self.source.past else 0.0


def _nothing() -> Result:
    raise AssertionError("a work without parties that give a result")


@dataclass(slots=True, eq=False)
class _Job:
    """A started work. `stopped`: why its parties should end early."""

    work_id: int
    work: Work
    deadline: float
    parties: int = 0
    stopped: str = ""
    cut: bool = False
    """Of a run of steps: it ends at its next border."""
    result: Result | None = None
    conclude: Callable[[], Result] = _nothing
    prefix: "_Prefix | None" = None
    waited_s: float = 0.0
    """For the prefix."""
    entering: EnteringStates | None = None
    batch: ReadBatch | None = None
    unsampled: _Unsampled | None = None
    sequences: dict[int, _OpenSequence] = field(default_factory=dict)

    def is_late(self) -> bool:
        return time.monotonic() >= self.deadline

    def check(self) -> None:
        if self.stopped:
            raise _Stopped(self.stopped)
        if self.is_late():
            raise _Stopped("deadline")

    def before_layer(self, layer: int) -> None:
        """Return once this layer of the prefix is here."""
        self.check()
        if self.prefix:
            waits = time.perf_counter()
            self.prefix.wait(layer, self)
            self.waited_s += time.perf_counter() - waits


class _LoadRecord(Protocol):
    """Learns of loaded parts; from the copy thread and the reader's thread alike."""

    failed: dict[int, ReadFailure]

    def arrived(self, block: int, layers: range, checksums: Sequence[int]) -> None: ...

    def fail(self, block: int, failure: ReadFailure) -> None: ...


def _note(failed: dict[int, ReadFailure], block: int, failure: ReadFailure) -> None:
    """A block fails once for each of its reads: one that was corrupt stays so."""
    if failure is ReadFailure.CORRUPT or block not in failed:
        failed[block] = failure


def _split_failures(failed: dict[int, ReadFailure]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """All failed blocks, and the corrupt ones among them."""
    corrupt = (block for block, failure in failed.items() if failure is ReadFailure.CORRUPT)
    return tuple(sorted(failed)), tuple(sorted(corrupt))


class _Pulled:
    """Record of a `PullBlocks`. Both writers only append, each for blocks of its own, which needs no lock."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, int]] = []
        self.failed: dict[int, ReadFailure] = {}

    def arrived(self, block: int, layers: range, checksums: Sequence[int]) -> None:
        self.parts.extend((block, layer, checksum) for layer, checksum in zip(layers, checksums, strict=True))

    def fail(self, block: int, failure: ReadFailure) -> None:
        _note(self.failed, block, failure)

    def result(self) -> Result:
        good = sorted(part for part in self.parts if part[0] not in self.failed)
        return BlocksPulled(tuple(good), *_split_failures(self.failed))


class _Prefix:
    """Record of a chunk's prefix: the compute thread waits here for each layer of it."""

    def __init__(self, layers: int, loads: Iterable[BlockLoad]) -> None:
        self._missing = [0] * layers
        for load in loads:
            for layer in range(load.first_layer, load.stop_layer):
                self._missing[layer] += 1
        self._changed = threading.Condition()
        self._began = time.perf_counter()
        self.loaded_s = 0.0
        """When the last part came, counted from the beginning."""
        self.failed: dict[int, ReadFailure] = {}

    def arrived(self, block: int, layers: range, checksums: Sequence[int]) -> None:
        with self._changed:
            self.loaded_s = time.perf_counter() - self._began
            for layer in layers:
                self._missing[layer] -= 1
            self._changed.notify_all()

    def fail(self, block: int, failure: ReadFailure) -> None:
        with self._changed:
            _note(self.failed, block, failure)
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, layer: int, job: _Job) -> None:
        """Return when this layer of every block is here; raise when that will not be."""
        with self._changed:
            while not self.failed and self._missing[layer]:
                job.check()
                self._changed.wait(max(0.0, job.deadline - time.monotonic()))
            if self.failed:
                job.check()  # it may have failed only because the work was stopped or is late
                raise _PrefixFailed(dict(self.failed))

    def until_failed(self, order: "Iterable[_LayersOfBlock]") -> "Iterator[_LayersOfBlock]":
        """Go on to the end of the layer that failed, so as to report all its blocks that do, but not beyond."""
        current = range(0)
        for layers, load in order:
            if self.failed and layers != current:
                return
            current = layers
            yield layers, load


class _Copied:
    """Record of a `CopyBlocks`; every index has one writer."""

    def __init__(self, count: int) -> None:
        self.checksums: list[int | None] = [None] * count
        self.fault = ""
        self._corrupt: list[int] = []

    def set(self, index: int, outcome: int | ReadFailure) -> None:
        if not isinstance(outcome, ReadFailure):
            self.checksums[index] = outcome
        elif outcome is ReadFailure.CORRUPT:
            self._corrupt.append(index)

    def result(self) -> Result:
        return BlocksCopied(tuple(self.checksums), tuple(sorted(self._corrupt)), self.fault)


class _Written:
    """Record of a `WriteToDisk`; every index has one writer. `sequences`: of the blocks whose bytes are written."""

    def __init__(self, count: int, parties: int) -> None:
        self.sequences: list[int | None] = [None] * count
        self.fault = ""
        self._corrupt: list[int] = []
        self._committed = False
        self._lock = threading.Lock()
        self._parties = parties

    def set(self, index: int, outcome: int | ReadFailure) -> None:
        if not isinstance(outcome, ReadFailure):
            self.sequences[index] = outcome
        elif outcome is ReadFailure.CORRUPT:
            self._corrupt.append(index)

    def is_last(self) -> bool:
        """Called by each party at its end: is it the last?"""
        with self._lock:
            self._parties -= 1
            return self._parties == 0

    def commit(self, work: WriteToDisk, disk: Disk) -> None:
        numbered = zip(work.blocks, self.sequences, strict=True)
        whole = [(block, sequence) for (_, block), sequence in numbered if sequence is not None]
        disk.commit(whole, proves=work.is_probe and not self.fault)
        self._committed = True

    def result(self) -> Result:
        written = tuple(self._committed and sequence is not None for sequence in self.sequences)
        return DiskWritten(written, self.fault, tuple(sorted(self._corrupt)))


class _SequenceSink:
    """Puts a block that comes from another host into a sequence."""

    def __init__(self, load: BlockLoad, sequence: SequenceKV, layout: BlockLayout, record: _LoadRecord) -> None:
        self._load = load
        self._sequence = sequence
        self._layout = layout
        self._record = record

    def buffer(self) -> memoryview | None:
        return None

    def part(self, layer: int, payload: memoryview, checksum: int) -> None:
        part: NDArray[Any] = np.frombuffer(payload, self._layout.dtype).reshape(self._layout.part_shape)
        load = self._load
        self._sequence.write_part(layer, load.block * self._layout.block_tokens, part[:, : load.tokens])
        self._sequence.settle()
        self._record.arrived(load.block, range(layer, layer + 1), (checksum,))

    def end(self, failure: ReadFailure | None) -> None:
        if failure:
            self._record.fail(self._load.block, failure)


class _SlotSink:
    """Puts a block that comes from another host straight into a granted slot."""

    def __init__(self, index: int, target: Segment, grant: SlotGrant, copied: _Copied) -> None:
        self._index = index
        self._target = target
        self._grant = grant
        self._copied = copied
        self._checksums: list[int] = []

    def buffer(self) -> memoryview | None:
        if not granted(self._target, self._grant):
            return None
        return self._target.layers_view(self._grant.slot, 0, self._target.layout.layers)

    def part(self, layer: int, payload: memoryview, checksum: int) -> None:
        self._checksums.append(checksum)

    def end(self, failure: ReadFailure | None) -> None:
        if not granted(self._target, self._grant):  # others may have written there meanwhile
            return
        if failure is None:
            self._target.parts(self._grant.slot)[:] = self._checksums
        self._copied.set(self._index, failure or block_checksum(self._checksums))


class _Worker:
    """Threads that take what they are given in its order; one, unless told otherwise."""

    def __init__(self, name: str, on_crash: Callable[[BaseException], None], threads: int = 1) -> None:
        self._on_crash = on_crash
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def put(self, task: Callable[[], None]) -> None:
        self._queue.put(task)

    def close(self) -> None:
        """Finish what was given, then stop."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        _give_way()
        while task := self._queue.get():
            try:
                task()
            except Exception as error:
                # A thread has no caller that could crash: the process must learn that it is not to go on,
                # whatever becomes of the log.
                self._on_crash(error)
                log.critical("worker_crashed", thread=threading.current_thread().name, exc_info=error)


class _Sampler:
    """A thread that samples for each job when it is known what may come next, or that it will not be."""

    def __init__(self, on_crash: Callable[[BaseException], None]) -> None:
        self._on_crash = on_crash
        self._lock = threading.Lock()
        """Guards what follows."""
        self._waiting: list[tuple[_Job, _Unsampled, Callable[[], None]]] = []
        self._woken: Future[None] = Future()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def put(self, job: _Job, sample: Callable[[], None]) -> None:
        """Call `sample` when the job's tokens can be sampled, at its deadline or when it is stopped."""
        assert job.unsampled
        with self._lock:
            self._waiting.append((job, job.unsampled, sample))
        self.wake()

    def wake(self) -> None:
        """A job came, or was stopped."""
        with self._lock:
            woken, self._woken = self._woken, Future()
        woken.set_result(None)

    def close(self) -> None:
        """Finish what was given, then stop."""
        with self._lock:
            self._closed = True
        self.wake()
        self._thread.join()

    def _run(self) -> None:
        _give_way()
        try:
            while self._go_on():
                pass
        except Exception as error:
            self._on_crash(error)
            log.critical("worker_crashed", thread=threading.current_thread().name, exc_info=error)

    def _go_on(self) -> bool:
        """Sample what can be, or wait until something changes."""
        with self._lock:
            waiting, woken = list(self._waiting), self._woken
            if self._closed and not waiting:
                return False
        awaited, until_s = list[Future[Any]](), list[float]()
        for entry in waiting:
            job, unsampled, sample = entry
            future = None if job.stopped or job.is_late() else unsampled.awaited()
            if future is not None:
                awaited.append(future)
                until_s += [job.deadline - time.monotonic(), unsampled.left_s()]
                continue
            with self._lock:
                self._waiting.remove(entry)
            sample()
        if len(awaited) < len(waiting):
            return True  # sampling takes time: another one may be ready by now, or the last one is gone
        wait_for([woken, *awaited], max(0.0, min(until_s)) if until_s else None, FIRST_COMPLETED)
        return True


def _give_way() -> None:
    """When woken, this thread does not push aside who speaks for this process or another; unless an operator has said how its
    process is to be scheduled. An engine's further threads, which it waits for, stay as they are."""
    with suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _unable(error: ConstraintError) -> WorkFailed:
    """The model, the tokens so far and the constraint are the same wherever it is tried again."""
    return WorkFailed(f"constraint: {error}", stuck=not isinstance(error, ConstraintNotReady))


def _sitting_out(entries: Sequence[StepEntry], pasts: Sequence[Past | None]) -> tuple[int, ...]:
    """The rows for which it is still not known what may come next, once the step has waited for them as long as it may."""
    awaited = {row: future for row, past in enumerate(pasts) if past is not None and (future := past.awaited()) is not None}
    part_s = {row: entries[row].mask_s for row in awaited if entries[row].mask_s}
    wait_for([awaited[row] for row in part_s], max(part_s.values(), default=0.0))
    return tuple(row for row, future in awaited.items() if not future.done())


def _tokens_of(work: ComputeChunk) -> NDArray[np.int32]:
    tokens: NDArray[np.int32] = np.frombuffer(work.tokens, "<i4").astype(np.int32, copy=False)
    return tokens


def _taken(shares: deque[list[int]]) -> Iterator[list[int]]:
    """Take turns with other threads at one list of things to do."""
    while True:
        try:
            yield shares.popleft()
        except IndexError:
            return


def _batches(order: "Iterable[_LayersOfBlock]", parts_at_once: int) -> "Iterator[list[_LayersOfBlock]]":
    """In the same order, so many together as make `parts_at_once`, the last of them whole."""
    together: list[_LayersOfBlock] = []
    parts = 0
    for layers, load in order:
        together.append((layers, load))
        parts += len(layers)
        if parts >= parts_at_once:
            yield together
            together, parts = [], 0
    if together:
        yield together


def _by_layer(layers: int, loads: Sequence[BlockLoad]) -> "list[_LayersOfBlock]":
    """One layer of all blocks after the other."""
    order = ((range(layer, layer + 1), load) for layer in range(layers) for load in loads)
    return [(layer, load) for layer, load in order if load.first_layer <= layer.start < load.stop_layer]


def _needed(work: Work) -> list[int]:
    """The sequences without whose memory nothing of a work can be done."""
    return [work.source] if isinstance(work, ForkSequence) else _sequences_of(work)


def _sequences_of(work: Work) -> list[int]:
    """The sequences a work reads or writes, each once."""
    match work:
        case ComputeChunk() | ComputeStage() | PullBlocks():
            return [work.sequence]
        case DecodeStep():
            return list(dict.fromkeys(entry.sequence for entry in work.entries))
        case CopyBlocks():
            return list(dict.fromkeys(source.sequence for source, _ in work.copies if isinstance(source, SequenceBlock)))
        case ForkSequence():
            return [work.source, *work.targets]
        case WriteToDisk() | ProbeProcess() | Generate() | ProbeEngine() | WatchEngine() | SampleTokens():
            return []
