"""The works of a simulated engine: prefill by layers, a stage of it, decode steps, copies of sequences, late samples."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from mooncake_zmq.core.messages import Eviction, Sampled, Sampling, TokenLogprob
from mooncake_zmq.core.work import (
    REPORT_EVERY_S,
    ChunkComputed,
    ComputeChunk,
    ComputeStage,
    DecodeStep,
    ForkSequence,
    LayersComputed,
    Result,
    SampleTokens,
    SequenceForked,
    SlotGrant,
    StageComputed,
    StepDecoded,
    StepEntry,
    TokensSampled,
    WorkFailed,
)
from mooncake_zmq.kv.checksum import block_checksum, part_checksum
from mooncake_zmq.kv.layout import div_ceil
from mooncake_zmq.simulation import loan_works
from mooncake_zmq.simulation.engine import LAYERS, SimSequence, as_tokens, entering_states, hidden_states, logprob_of
from mooncake_zmq.simulation.machine import Machine, Running, Steps, slot_of
from mooncake_zmq.simulation.reads import SlotRead

SET_ASIDE, SITS_OUT = 0.3, 0.05
"""The shares of answers' first tokens under a grammar, and of their later ones, whose mask is not ready in time."""
MASK_S, NO_MASK = 0.1, 0.02
"""The longest delay of a mask, and the share of masks that never come."""


@dataclass(frozen=True, slots=True)
class _Missing:
    """The reason why layers were not all computed."""

    failed: tuple[int, ...] = ()
    corrupt: tuple[int, ...] = ()
    stopped: str = ""

    def of_chunk(self, elapsed_s: float) -> Result:
        return WorkFailed(self.stopped) if self.stopped else ChunkComputed((), None, elapsed_s, self.failed, self.corrupt)

    def of_stage(self, elapsed_s: float) -> Result:
        return WorkFailed(self.stopped) if self.stopped else StageComputed((), None, elapsed_s, self.failed, self.corrupt)


def compute(machine: Machine, running: Running, work: ComputeChunk) -> Steps:
    hardware = machine.world.hardware
    tokens = as_tokens(work.tokens)
    took_s = machine.took(hardware.compute_start_s + hardware.compute_token_s * len(tokens))
    took_s += machine.took(hardware.copy_block_s * len(work.prefix))
    fail = machine.world.random.random() < machine.world.copy_fail
    began_at = machine.now
    stop = yield machine.wait_for_compute(running, took_s)
    if stop or fail:
        return WorkFailed(stop or "injected failure")
    layers = range(machine.layout.layers)
    evicts = work.eviction is not None
    computed = structs.replace(work, outputs=()) if evicts else work
    missing = yield from _run_layers(machine, running, computed, tokens, layers, took_s, reports=not evicts)
    if missing is not None:
        return missing.of_chunk(machine.now - began_at)
    end = work.start + len(tokens)
    if work.eviction is not None and work.sampling is not None:
        _evict(machine, running, work, work.eviction, end)
    kv_hash = 0 if work.sampling is None else machine.sequences[work.sequence].hash_kv(layers, end)
    sampled = _sampled(machine, work, kv_hash, end)
    token, logprob = sampled[0] if sampled else (None, None)
    assert machine.segment is not None or not work.outputs
    checksums = tuple(block_checksum(machine.segment.parts[grant.slot]) for grant in work.outputs if machine.segment)
    again = round(work.again * sum(part.tokens for part in work.parts))
    took_s, others = machine.now - began_at, sampled[1:]
    return ChunkComputed(checksums, token, took_s, logprob=logprob, others=others, scored=_scored(work), recomputed=again)


def _evict(machine: Machine, running: Running, work: ComputeChunk, eviction: Eviction, end: int) -> None:
    """Drop tokens of a prompt that is computed, and store what is kept. The token after it is that of what is kept, unlike in
    an engine: an answer is then the same wherever it is resumed."""
    sequence, size = machine.sequences[work.sequence], machine.layout.block_tokens
    sequence.evict(eviction, end)
    for layer in range(machine.layout.layers):
        for index, grant in enumerate(work.outputs):
            _write_out(machine, running, sequence, layer, index * size, eviction.kept, grant)


def _sampled(machine: Machine, work: ComputeChunk, kv_hash: int, end: int) -> tuple[Sampled, ...]:
    """Return the next token for each choice; none where its mask is not ready in time."""
    sequence = machine.sequences[work.sequence]
    tokens = [(sequence.token_of(kv_hash, end, sampling), sampling) for sampling in work.samplings]
    sampled = tuple((token, logprob_of(token, end, sampling)) for token, sampling in tokens)
    if work.sampling is None or not _sits_out(machine, work.sampling, SET_ASIDE):
        return sampled
    sequence.unsampled = sampled
    return ()


def sample_late(machine: Machine, _: Running, work: SampleTokens) -> Steps:
    sequence = machine.sequences.get(work.logits_of)
    sampled = sequence.unsampled if sequence is not None else ()
    if not sampled:
        machine.world.watcher.broken(machine, f"samples where nothing was left of sequence {work.logits_of}")
    elif sequence is not None:
        sequence.unsampled = ()
    stop = yield machine.took(MASK_S * machine.world.random.random())
    if stop or machine.world.random.random() < max(NO_MASK, machine.world.copy_fail):
        return WorkFailed(stop or "constraint: its grammar was not ready")
    return TokensSampled(sampled)


def compute_stage(machine: Machine, running: Running, work: ComputeStage) -> Steps:
    hardware, chunk, segment = machine.world.hardware, work.chunk, machine.segment
    assert segment is not None
    share = len(work.layers) / machine.layout.layers
    took_s = machine.took(hardware.compute_start_s + hardware.compute_token_s * work.count * share)
    took_s += machine.took(hardware.copy_block_s * (len(chunk.prefix) * share + len(work.entering)))
    fail = machine.world.random.random() < machine.world.copy_fail
    began_at = machine.now
    stop = yield machine.wait_for_compute(running, took_s)
    if stop or fail:
        return WorkFailed(stop or "injected failure")
    tokens, before = as_tokens(chunk.tokens), 0
    if work.entering:
        raw = yield from _read_states(machine, running, work)
        if raw is None:
            return WorkFailed("hidden states were not reached")
        tokens, before = entering_states(raw)
    missing = yield from _run_layers(machine, running, chunk, tokens, work.layers, took_s, reports=False)
    if missing is not None:
        return missing.of_stage(machine.now - began_at)
    end = chunk.start + work.count
    kv_hash = machine.sequences[chunk.sequence].hash_kv(work.layers, end, before)
    if work.outgoing:
        _write_states(machine, running, hidden_states(tokens, kv_hash), work.outgoing)
    sampled = _sampled(machine, chunk, kv_hash, end)
    token, logprob = sampled[0] if sampled else (None, None)
    parts = [part for grant in chunk.outputs for part in segment.parts[grant.slot][work.first_layer : work.stop_layer]]
    return StageComputed(tuple(parts), token, machine.now - began_at, logprob=logprob, others=sampled[1:])


def _read_states(machine: Machine, running: Running, work: ComputeStage) -> Generator[float, str | None, bytes | None]:
    size = work.count * machine.layout.hidden_bytes
    parts = div_ceil(size, machine.layout.part_bytes)
    places = [divmod(part, machine.layout.layers) for part in range(parts)]
    reads = [SlotRead(machine, running, work.entering[index], layer) for index, layer in places]
    for read in reads:
        read.first_half()
    yield machine.took(machine.copy_s(len(work.entering), work.entering))
    halves = [read.second_half() for read in reads]
    return None if None in halves else b"".join(half for half in halves if half is not None)[:size]


def _write_states(machine: Machine, running: Running, states: bytes, grants: Sequence[SlotGrant]) -> None:
    size, layers = machine.layout.part_bytes, machine.layout.layers
    for index in range(div_ceil(len(states), size)):
        grant, layer = grants[index // layers], index % layers
        segment = machine.world.segments[grant.node, grant.incarnation]
        machine.world.watcher.writing(machine, running, segment, grant)
        part = states[index * size : (index + 1) * size].ljust(size, b"\0")
        segment.part(grant.slot, layer)[:] = part
        segment.parts[grant.slot][layer] = part_checksum(part)


def _run_layers(
    machine: Machine,
    running: Running,
    work: ComputeChunk,
    tokens: NDArray[np.uint32],
    layers: range,
    took_s: float,
    *,
    reports: bool,
) -> Generator[float, str | None, "_Missing | None"]:
    """Load, compute and store one layer after the other, until something is missing."""
    sequence = machine.sequences[work.sequence]
    end = work.start + len(tokens)
    layer_s = took_s / (2 * len(layers))
    for layer in layers:
        loads = [load for load in work.prefix if load.first_layer <= layer < load.stop_layer]
        if loads and machine.now > running.started_at + work.prefix_s:
            return _Missing(tuple(load.block for load in loads))
        reads = [SlotRead(machine, running, load.source, layer) for load in loads]
        for read in reads:
            read.first_half()
        machine.half_read([load.source for load in loads])
        stop = yield layer_s
        parts = [read.second_half() for read in reads]
        failed = tuple(load.block for load, part in zip(loads, parts, strict=True) if part is None)
        if failed:
            corrupt = tuple(load.block for load, read in zip(loads, reads, strict=True) if read.corrupt)
            return _Missing(failed, corrupt)
        if stop:
            return _Missing(stopped=stop)
        for load, part in zip(loads, parts, strict=True):
            assert part is not None
            machine.store(sequence, load, layer, part)
        _compute_layer(machine, sequence, slice(layer, layer + 1), work, tokens)
        yield layer_s
        for index, grant in enumerate(work.outputs):
            _write_out(machine, running, sequence, layer, work.start + index * machine.layout.block_tokens, end, grant)
        if reports and (layer + 1 < layers.stop or took_s >= REPORT_EVERY_S):
            machine.progressed(running.work_id, LayersComputed(layer + 1))
    return None


def _compute_layer(
    machine: Machine, sequence: SimSequence, layer: slice, work: ComputeChunk, tokens: NDArray[np.uint32]
) -> None:
    sequence.run_layer(layer, work.start, tokens)
    for part in work.parts:
        own = tokens[part.at - work.start :][: part.tokens]
        if not sequence.has_computed(layer, part.block * machine.layout.block_tokens, part.computed_at, own):
            machine.world.watcher.broken(machine, f"reuses KV of other tokens than those from {part.at} on")
    if work.parts:
        sequence.poison(layer, work.start, work.start + len(tokens))
        machine.world.approximate.update(map(slot_of, work.outputs))


def _write_out(
    machine: Machine, running: Running, sequence: SimSequence, layer: int, start: int, end: int, grant: SlotGrant
) -> None:
    """Store one layer's part of one output block, with zeros beyond the sequence's tokens."""
    segment = machine.world.segments[grant.node, grant.incarnation]
    machine.world.watcher.writing(machine, running, segment, grant)
    part = sequence.read_part(layer, start, min(start + machine.layout.block_tokens, end), machine.layout.block_tokens)
    segment.part(grant.slot, layer)[:] = part
    segment.parts[grant.slot][layer] = part_checksum(part)


def decode(machine: Machine, running: Running, work: DecodeStep) -> Steps:
    hardware = machine.world.hardware
    began_at = machine.now
    rows: list[tuple[int, ...]] = []
    sat_out: tuple[int, ...] = ()
    failed: tuple[tuple[int, WorkFailed], ...] = ()
    late: dict[int, str] = {}
    for made in range(work.steps):
        took_s = machine.took(hardware.step_s + hardware.step_entry_s * len(work.entries))
        stop = yield machine.wait_for_compute(running, took_s)
        if stop and stop != "cancelled":
            return WorkFailed(stop)
        loan_works.ask(machine, [entry.sequence for entry in work.entries])
        stop = yield took_s
        if _late(machine, work):
            stop = yield work.lenders_s
            late = _late(machine, work)
        fed = rows[-1] if rows else [entry.token for entry in work.entries]
        row = [
            0 if place in late else _step(machine, entry, made, token)
            for place, (entry, token) in enumerate(zip(work.entries, fed, strict=True))
        ]
        failed = tuple((place, token) for place, token in enumerate(row) if isinstance(token, WorkFailed))
        rows.append(tuple(0 if isinstance(token, WorkFailed) else token for token in row))
        sitting_out = (place for place, entry in enumerate(work.entries) if _sits_out(machine, entry.sampling))
        sat_out = tuple(place for place in sitting_out if place not in late)
        if stop or sat_out or failed or late:  # the decode does not wait beyond the next border
            break
    asked = any(each.sampling.logprobs is not None for each in work.entries)
    logprobs = tuple(
        tuple(logprob_of(token, each.position + made, each.sampling) for each, token in zip(work.entries, row, strict=True))
        for made, row in enumerate(rows if asked else (), 1)
    )
    for place in sat_out:
        entry = work.entries[place]
        token_at = rows[-1][place], logprob_of(rows[-1][place], entry.position + len(rows), entry.sampling)
        machine.sequences[entry.sequence].unsampled = (token_at,)
    nothing = [tuple(0 if place in sat_out else token for place, token in enumerate(rows[-1]))]
    return StepDecoded(tuple(rows[:-1] + nothing), machine.now - began_at, logprobs, failed, sat_out, tuple(late.items()))


def _late(machine: Machine, work: DecodeStep) -> dict[int, str]:
    """Return the lenders that do not answer now, by the places of their borrowers in the batch."""
    lenders = enumerate(loan_works.silent_lender(machine, entry.sequence) for entry in work.entries)
    return {place: lender for place, lender in lenders if lender}


def _sits_out(machine: Machine, sampling: Sampling, share: float = SITS_OUT) -> bool:
    return bool(sampling.constraint) and machine.world.random.random() < share


def _step(machine: Machine, entry: StepEntry, made: int, token: int) -> int | WorkFailed:
    """Return the token that follows, unless a lender of the sequence is lost."""
    sequence, position = machine.sequences[entry.sequence], entry.position + made
    merged = loan_works.whole(machine, sequence) if sequence.borrowed else sequence
    if isinstance(merged, WorkFailed):
        return merged
    merged.run(position, np.array([token], dtype=np.uint32))
    if entry.selection is not None and sequence.approximate_from > position:
        sequence.poison(slice(None), position, position + 1)
    if merged is not sequence:
        sequence.kv[:, :, position - merged.capacity + sequence.capacity] = merged.kv[:, :, position]
    sequence.feed(token, position, entry.sampling)
    return sequence.token_of(merged.hash_kv(range(LAYERS), position + 1), position + 1, entry.sampling)


def fork(machine: Machine, _: Running, work: ForkSequence) -> Steps:
    source = machine.sequences[work.source]
    for target in work.targets:
        blocks = machine.layout.blocks_for(work.tokens)
        stop = yield machine.took(machine.world.hardware.copy_start_s + machine.world.hardware.copy_block_s * blocks)
        if stop or machine.world.random.random() < machine.world.copy_fail:
            return WorkFailed(stop or "injected failure")
        machine.sequences[target].kv[:, :, : work.tokens] = source.kv[:, :, : work.tokens]
        if source.approximate_from < work.tokens:
            machine.sequences[target].approximate_from = source.approximate_from
    return SequenceForked()


def _scored(work: ComputeChunk) -> tuple[TokenLogprob, ...]:
    if work.prompt_logprobs is None:
        return ()
    return prompt_scores(as_tokens(work.tokens + work.following).tolist(), work.prompt_logprobs, work.start)


def prompt_scores(tokens: Sequence[int], likeliest: int, start: int = 0) -> tuple[TokenLogprob, ...]:
    """Return the logprobs of all tokens but the first, which is at position `start`."""
    sampling = Sampling(logprobs=likeliest)
    return tuple(each for at, token in enumerate(tokens[1:], start + 1) if (each := logprob_of(token, at, sampling)))
