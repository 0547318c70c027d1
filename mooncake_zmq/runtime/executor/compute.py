"""Model steps on the engine's own thread: chunks of prompts, stages of chunks, and decode steps."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from mooncake_zmq.core.actor import WorkProgress
from mooncake_zmq.core.messages import Eviction, Sampled, TokenLogprob
from mooncake_zmq.core.work import (
    ChunkComputed,
    ComputeChunk,
    ComputeStage,
    DecodeStep,
    LayersComputed,
    Result,
    StageComputed,
    StepDecoded,
    StepEntry,
    WorkFailed,
    lender_lost,
)
from mooncake_zmq.engine.blend import Again, moved_run, prefill_blended, read_kv
from mooncake_zmq.engine.constraint import ConstraintError
from mooncake_zmq.engine.eviction import AttentionSums, evict
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.engine.sampling import Past, choose
from mooncake_zmq.engine.scoring import PromptScores
from mooncake_zmq.engine.selection.few_of_many import FewOfMany
from mooncake_zmq.engine.selection.kinds import selected
from mooncake_zmq.engine.spec import Engine
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.runtime.executor.jobs import Job, OpenedSequence, Stopped, Subtasks, Unsampled
from mooncake_zmq.runtime.executor.load_records import PrefixFailed, split_failures
from mooncake_zmq.runtime.executor.loads import Loads
from mooncake_zmq.runtime.executor.worker import Worker
from mooncake_zmq.runtime.executor.works import unable
from mooncake_zmq.transfer.block_copy import granted, store_parts
from mooncake_zmq.transfer.directory import SegmentDirectory
from mooncake_zmq.transfer.hidden_states import EnteringStates, store_hidden
from mooncake_zmq.transfer.partials import BorrowedKV


class Compute:
    """Run model steps on the engine's thread."""

    def __init__(
        self,
        engine: Engine,
        directory: SegmentDirectory,
        loads: Loads,
        emit: Callable[[WorkProgress], None],
        on_crash: Callable[[BaseException], None],
        *,
        progress_s: float,
    ) -> None:
        """`progress_s`: see `core.work.REPORT_EVERY_S`."""
        self._engine, self._directory, self._loads, self._emit = engine, directory, loads, emit
        self._layout, self._segment = directory.layout, directory.own
        self._progress_s = progress_s
        self._worker = Worker("compute", on_crash)

    def close(self) -> None:
        self._worker.close()

    def chunk(self, job: Job, work: ComputeChunk, stage: ComputeStage | None = None) -> Subtasks:
        """Compute a chunk, or one stage of it, while its prefix is loaded."""
        sequence = job.sequences[work.sequence].kv
        until = time.monotonic() + work.prefix_s
        subtasks = self._loads.prefix(job, work.prefix, sequence, until) if work.prefix else Subtasks(reads_until=until)
        if stage and stage.entering:
            job.entering = EnteringStates(self._layout, stage.entering, stage.count, self._engine.spec.hidden)
            subtasks.reads += job.entering.remote_reads(self._loads.is_remote)
        compute = partial(self._compute_stage, job, stage, sequence) if stage else None
        subtasks.turns.append((self._worker, compute or partial(self._compute_chunk, job, work, sequence)))
        return subtasks

    def steps(self, job: Job, work: DecodeStep) -> Subtasks:
        """Make the next tokens of a batch."""
        return Subtasks([(self._worker, partial(self._decode, job, work))])

    def _compute_blended(self, job: Job, work: ComputeChunk, sequence: SequenceKV) -> Result:
        """Compute a chunk over KV of parts that is loaded behind the prompt. All layers end together."""
        began, engine, size = time.perf_counter(), self._engine, self._layout.block_tokens
        assert isinstance(engine, Llama)
        tokens, layers = _tokens_of(work), range(self._layout.layers)
        try:
            for layer in layers:
                job.before_layer(layer)
        except PrefixFailed as failure:
            return ChunkComputed((), None, time.perf_counter() - began, *split_failures(failure.blocks))
        reused = []
        for part in work.parts:
            first = part.block * size
            kv = read_kv(engine, sequence, first, first + part.tokens, part.computed_at)
            reused.append(moved_run(kv, part.at, part.computed_at))
        sequence.set_length(work.start)
        blended = prefill_blended(engine, sequence, tokens, reused, Again(work.again), job.check)
        for layer in layers:
            job.check()
            self._store_outputs(work, sequence, layer, work.start, len(tokens))
        again = sum([int(np.isin(each.at, blended.computed).sum()) for each in reused])
        return structs.replace(self._chunk_result(job, work, blended.logits, began), recomputed=again)

    def _compute_evicted(self, job: Job, work: ComputeChunk, eviction: Eviction, sequence: SequenceKV) -> Result:
        """Compute a chunk of a prompt that is evicted behind its last one: only then something is stored."""
        began, opened = time.perf_counter(), job.sequences[work.sequence]
        if eviction.kind == "elastic" and not work.start:
            opened.sums = AttentionSums(self._layout.layers, sequence.capacity)
        sums = opened.sums

        def on_rows(layer: int, queries: Any, positions: NDArray[np.int64]) -> None:
            assert sums is not None
            sums.add(layer, sequence.keys[layer], queries, positions)

        sequence.set_length(work.start)
        logits = self._engine.prefill(
            sequence,
            _tokens_of(work),
            after_layer=lambda _: job.check(),
            logits_at=None if work.sampling is None else (-1,),
            on_rows=None if sums is None else on_rows,
        )
        if work.sampling is not None:
            evict(sequence, eviction, sums)
            for layer in range(self._layout.layers):
                job.check()
                self._store_outputs(work, sequence, layer, 0, eviction.kept)
        return self._chunk_result(job, work, logits[0] if logits is not None else None, began)

    def _compute_chunk(self, job: Job, work: ComputeChunk, sequence: SequenceKV) -> Result:
        if work.parts:
            return self._compute_blended(job, work, sequence)
        if work.eviction is not None:
            return self._compute_evicted(job, work, work.eviction, sequence)
        began = time.perf_counter()
        tokens = _tokens_of(work)
        reported_at = began_at = time.monotonic()

        def after_layer(layer: int) -> None:
            nonlocal reported_at
            job.check()
            self._store_outputs(work, sequence, layer, work.start, len(tokens))
            now = time.monotonic()
            is_last = layer + 1 == self._layout.layers
            if now - (began_at if is_last else reported_at) >= self._progress_s:
                reported_at = now
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
            for layer in range(self._layout.layers):  # an engine that skipped a layer must not have used missing blocks
                job.before_layer(layer)
        except PrefixFailed as failure:
            return ChunkComputed((), None, time.perf_counter() - began, *split_failures(failure.blocks))
        scored = tuple(scoring.scored) if scoring else ()
        return self._chunk_result(job, work, logits[0] if logits is not None else None, began, scored)

    def _chunk_result(
        self,
        job: Job,
        work: ComputeChunk,
        logits: NDArray[np.float32] | None,
        began: float,
        scored: tuple[TokenLogprob, ...] = (),
    ) -> ChunkComputed:
        """Return the result of a chunk that is computed and stored. `logits`: those after its last token."""
        sampled: tuple[Sampled, ...] = ()
        if work.sampling is not None:
            assert logits is not None
            sampled = self._sample(job, work, logits, work.start + len(work.tokens) // 4)
        token, logprob = sampled[0] if sampled else (None, None)
        loaded_s = job.prefix.loaded_s if job.prefix else 0.0
        elapsed_s = time.perf_counter() - began
        checksums = self._output_checksums(work)
        return ChunkComputed(
            checksums,
            token,
            elapsed_s,
            loaded_s=loaded_s,
            waited_s=job.waited_s,
            logprob=logprob,
            others=sampled[1:],
            scored=scored,
        )

    def _sample(self, job: Job, work: ComputeChunk, logits: NDArray[np.float32], position: int) -> tuple[Sampled, ...]:
        """Return the token at `position` for each choice; none where the mask is not ready."""
        opened = job.sequences[work.sequence]
        if opened.past is not None and opened.past.awaited() is not None:
            opened.unsampled = Unsampled(opened, logits.copy(), work.samplings, position)
            return ()
        return tuple(choose(logits, sampling, position, opened.past) for sampling in work.samplings)

    def _compute_stage(self, job: Job, stage: ComputeStage, sequence: SequenceKV) -> Result:
        began = time.perf_counter()
        chunk = stage.chunk
        entering: NDArray[Any] | None = _tokens_of(chunk)
        if job.entering:
            job.entering.read_here(lambda ref: self._directory.segment((ref.node, ref.incarnation)), self._loads.is_remote)
            entering = job.entering.wait(job.check, job.deadline)
        if entering is None:
            return WorkFailed("hidden states were not reached")
        computes = time.perf_counter()

        def after_layer(layer: int) -> None:
            job.check()
            self._store_outputs(chunk, sequence, layer, chunk.start, stage.count)

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
        except PrefixFailed as failure:
            return StageComputed((), None, time.perf_counter() - began, *split_failures(failure.blocks))
        sampled: tuple[Sampled, ...] = ()
        if stage.outgoing:
            assert out is not None
            assert self._segment
            if not store_hidden(out, self._segment, stage.outgoing):
                return WorkFailed("the slots for hidden states are no longer granted")
        elif chunk.sampling is not None:
            assert out is not None
            sampled = self._sample(job, chunk, out[0], chunk.start + stage.count)
        token, logprob = sampled[0] if sampled else (None, None)
        loaded_s = job.prefix.loaded_s if job.prefix else 0.0
        elapsed_s, waited_s = time.perf_counter() - began, job.waited_s + computes - began
        parts = self._stage_parts(stage)
        return StageComputed(parts, token, elapsed_s, loaded_s=loaded_s, waited_s=waited_s, logprob=logprob, others=sampled[1:])

    def _stage_parts(self, stage: ComputeStage) -> tuple[int, ...]:
        assert self._segment
        rows = [self._segment.parts(grant.slot)[stage.first_layer : stage.stop_layer] for grant in stage.chunk.outputs]
        return tuple(int(checksum) for row in rows for checksum in row)

    def _store_outputs(self, work: ComputeChunk, sequence: SequenceKV, layer: int, start: int, token_count: int) -> None:
        """Copy one layer of the tokens from `start` on to the output slots, which are in the own segment."""
        block_tokens = self._layout.block_tokens
        stop = start + token_count
        assert len(work.outputs) <= self._layout.blocks_for(token_count)
        assert self._segment
        parts = []
        for index, grant in enumerate(work.outputs):
            if not granted(self._segment, grant):
                raise Stopped(f"output slot {grant.slot} is no longer granted")
            first = start + index * block_tokens
            parts.append((grant.slot, layer, first, min(block_tokens, stop - first)))
        store_parts(sequence, self._segment, parts)

    def _output_checksums(self, work: ComputeChunk) -> tuple[int, ...]:
        segment = self._segment
        return tuple(block_checksum(segment.parts(grant.slot).tolist()) for grant in work.outputs if segment)

    def _decode(self, job: Job, work: DecodeStep) -> Result:
        began = time.perf_counter()
        sequences = [_running(job.sequences[entry.sequence], entry) for entry in work.entries]
        elsewhere = self._elsewhere(job, work)
        pasts = [job.sequences[entry.sequence].past for entry in work.entries]
        asked = any(entry.sampling.logprobs is not None for entry in work.entries)
        fed, made, logprobs = tuple(entry.token for entry in work.entries), [], []
        failed: dict[int, WorkFailed] = {}
        late: dict[int, str] = {}
        for step in range(work.steps):
            for row, entry in enumerate(work.entries):
                if (past := pasts[row]) is not None:
                    past.feed(fed[row], entry.position + step)
            logits = self._logits(sequences, np.array(fed, np.int32), elsewhere)
            if elsewhere is not None:
                failed = {row: lender_lost(lender.name, lender.lost) for row, lender in elsewhere.failed.items()}
                late = {row: lender.name for row, lender in elsewhere.late.items()}
            chosen: list[tuple[int, TokenLogprob | None]] = []
            without = failed.keys() | late.keys()
            sat_out = _sitting_out(work.entries, [None if row in without else past for row, past in enumerate(pasts)])
            for row, entry in enumerate(work.entries):
                position, opened = entry.position + step + 1, job.sequences[entry.sequence]
                if row in without:
                    chosen.append((0, None))
                    continue
                if row in sat_out:
                    opened.unsampled = Unsampled(opened, logits[row].copy(), (entry.sampling,), position)
                    chosen.append((0, None))
                    continue
                try:
                    chosen.append(choose(logits[row], entry.sampling, position, opened.past))
                except (ConstraintError, FloatingPointError) as error:  # of this answer alone
                    failed[row] = unable(error)
                    chosen.append((0, None))
                    continue
                if opened.past is not None:  # the next mask is computed from now on
                    opened.past.feed(chosen[row][0], position)
            fed = tuple(token for token, _ in chosen)
            made.append(fed)
            if asked:
                logprobs.append(tuple(logprob for _, logprob in chosen))
            if failed or late or sat_out or job.cut or job.stopped or job.is_late():
                break
        elapsed_s, over = time.perf_counter() - began, (tuple(failed.items()), sat_out, tuple(late.items()))
        return StepDecoded(tuple(made), elapsed_s, tuple(logprobs), *over)

    def _elsewhere(self, job: Job, work: DecodeStep) -> BorrowedKV | None:
        """Return the parts of the entries that lenders hold; None if there are none."""
        borrowed = [
            replace(part, row=row) for row, entry in enumerate(work.entries) for part in job.sequences[entry.sequence].borrowed
        ]
        return BorrowedKV(self._engine.spec, borrowed, wait_s=work.lenders_s) if borrowed else None

    def _logits(
        self, sequences: Sequence[SequenceKV | FewOfMany], tokens: NDArray[np.int32], elsewhere: BorrowedKV | None
    ) -> NDArray[np.float32]:
        whole = [sequence for sequence in sequences if isinstance(sequence, SequenceKV)]
        if elsewhere is None and len(whole) == len(sequences):
            return self._engine.decode(whole, tokens)
        assert isinstance(self._engine, Llama)
        if elsewhere is None:
            return self._engine.decode_over(sequences, tokens)
        return self._engine.decode_elsewhere(whole, tokens, elsewhere)


def _running(opened: OpenedSequence, entry: StepEntry) -> SequenceKV | FewOfMany:
    """Return what a step reads and appends to."""
    if opened.few is not None:
        assert opened.few.position == entry.position, "what a choice is made from has each token once"
        return opened.few
    sequence = opened.kv
    if sequence.position != entry.position:
        sequence.set_position(entry.position)
    if entry.selection is None:
        return sequence
    opened.few = selected(sequence, entry.selection)
    return opened.few


def _sitting_out(entries: Sequence[StepEntry], pasts: Sequence[Past | None]) -> tuple[int, ...]:
    """Return the rows whose masks are still not ready after the step has waited as long as it may."""
    awaited = {row: future for row, past in enumerate(pasts) if past is not None and (future := past.awaited()) is not None}
    part_s = {row: entries[row].mask_s for row in awaited if entries[row].mask_s}
    wait_for([awaited[row] for row in part_s], max(part_s.values(), default=0.0))
    return tuple(row for row, future in awaited.items() if not future.done())


def _tokens_of(work: ComputeChunk) -> NDArray[np.int32]:
    tokens: NDArray[np.int32] = np.frombuffer(work.tokens, "<i4").astype(np.int32, copy=False)
    return tokens
