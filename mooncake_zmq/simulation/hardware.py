"""Simulated memory, engine and copies: carries out `core.work` under virtual time. Never decides anything an actor decides.

Slots hold real small byte strings with generations and part checksums. A copy moves its first half of the bytes at one virtual
time and the second at a later one, so that a block can be evicted under a reader and a stopped writer can come too late.
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.actor import Event, PeerDown, PeerUp
from mooncake_zmq.core.messages import Sampled, Sampling, SlotRef, TokenLogprob
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
    EngineProbed,
    ForkSequence,
    Generate,
    Generated,
    LayersComputed,
    ProbeEngine,
    ProbeProcess,
    ProcessProbed,
    Progress,
    PullBlocks,
    Result,
    SampleTokens,
    SequenceBlock,
    SequenceForked,
    SlotGrant,
    StageComputed,
    StepDecoded,
    StepEntry,
    TokensGenerated,
    TokensSampled,
    WatchEngine,
    Work,
    WorkFailed,
    WriteToDisk,
)
from mooncake_zmq.kv import reading
from mooncake_zmq.kv.block_hash import Key, extend_keys, pack_tokens
from mooncake_zmq.kv.checksum import block_checksum, part_checksum
from mooncake_zmq.kv.layout import BlockLayout, div_ceil
from mooncake_zmq.simulation.disk import SimDisk
from mooncake_zmq.simulation.engine import SimSequence, as_tokens, entering_states, hidden_states, logprob_of
from mooncake_zmq.simulation.shelf import Shelf, block_of, fill

NO_ANSWER = "no answer"
"""Why a work stops that waited for a silent peer: its blocks were not reached."""
SET_ASIDE, SITS_OUT = 0.3, 0.05
"""Of the first tokens of answers that follow a grammar, and of the later ones: it is not known in time what may come next."""
MASK_S, NO_MASK = 0.1, 0.02
"""It is known so much later at most, but for this part of them, for which it never is."""
ENGINE_FAILS = 0.05
"""A foreign engine refuses requests and questions so often by itself."""
COMING_S, AGAIN_S = 0.2, 0.02
"""A foreign engine waits so long for what is being saved, and looks again so often."""
SAVES_LATE = 15
"""Its blocks are in a store after so many times what a copy takes to begin."""
ANSWER_LOSSES = 3
"""A foreign engine loses an answer at one token for so many copies that fail: an answer has many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Virtual durations in seconds. Every one is stretched by up to `jitter` at random, and by a host's slowness."""

    frame_s: float = 0.0004
    """One control frame's way to another process."""
    compute_token_s: float = 0.001
    compute_start_s: float = 0.002
    step_s: float = 0.012
    step_entry_s: float = 0.001
    copy_start_s: float = 0.002
    copy_block_s: float = 0.001
    network_start_s: float = 0.004
    network_block_s: float = 0.003
    disk_start_s: float = 0.002
    disk_block_s: float = 0.005
    probe_s: float = 0.001
    jitter: float = 0.5


@dataclass(slots=True)
class Segment:
    """One life's shared-memory file: the slots of `node` in its life `incarnation`."""

    node: str
    incarnation: int
    host: str
    layout: BlockLayout
    slots: int
    memory: bytearray = field(init=False)
    shelf: Shelf | None = None
    """What the store beside it holds for vLLMs, if it is a cache-node's."""
    generations: list[int] = field(init=False)
    parts: list[list[int]] = field(init=False)
    """Part checksums per slot, set by whoever wrote the part."""
    flipped: set[int] = field(default_factory=set)
    """Slots whose bytes a fault has changed since they were reserved."""
    linked: bool = True
    """False once the owner's next life swept the file away: nobody can attach it any more."""

    def __post_init__(self) -> None:
        self.memory = bytearray(self.slots * self.layout.block_bytes)
        self.generations = [0] * self.slots
        self.parts = [[0] * self.layout.layers for _ in range(self.slots)]

    def part(self, slot: int, layer: int) -> memoryview:
        """The bytes of one layer's part, writable."""
        start = slot * self.layout.block_bytes + layer * self.layout.part_bytes
        return memoryview(self.memory)[start : start + self.layout.part_bytes]

    def block(self, slot: int) -> bytes:
        """A copy of a slot's bytes."""
        start = slot * self.layout.block_bytes
        return bytes(self.memory[start : start + self.layout.block_bytes])


class Watcher(Protocol):
    """What the checkers hear from the hardware."""

    def fenced(self, segment: Segment, slot: int, generation: int) -> None: ...
    def writing(self, machine: "Machine", work: "Running", segment: Segment, grant: SlotGrant) -> None: ...
    def reading(self, machine: "Machine", work: "Running", segment: Segment, ref: SlotRef) -> None: ...
    def verified(self, segment: Segment, ref: SlotRef, layer: int, part: bytes) -> None: ...
    def closing(self, machine: "Machine", sequence: int, works: Sequence["Running"]) -> None: ...
    def broken(self, machine: "Machine", text: str) -> None: ...


class World(Protocol):
    """What a machine needs of the simulator."""

    now: float
    random: Random
    hardware: Hardware
    copy_fail: float
    copy_tear: float
    segments: dict[tuple[str, int], Segment]

    @property
    def watcher(self) -> Watcher: ...
    def slowness(self, host: str) -> float: ...
    def reach(self, reader: str, owner: str, incarnation: int) -> str: ...
    def alive(self, node: str, incarnation: int) -> bool: ...
    def half_written(self, name: str) -> None: ...
    def half_read(self, name: str, *, remote: bool) -> None: ...


Steps = Generator[float, str | None, Result]
"""A work as a coroutine: yields how long its next step takes, is told why to stop (or None), and returns its result."""


@dataclass(slots=True)
class Running:
    """A work in flight."""

    work_id: int
    work: Work
    started_at: float
    deadline: float
    steps: Steps
    sequences: frozenset[int]
    cancelled: bool = False


class Machine:
    """One life of one process: its sequences, its segment and the works it has in flight."""

    def __init__(
        self,
        world: World,
        *,
        name: str,
        incarnation: int,
        host: str,
        layout: BlockLayout,
        segment: Segment | None,
        disk: SimDisk | None = None,
        later: Callable[[float, Callable[[], None]], None],
        done: Callable[[int, Result], None],
        progressed: Callable[[int, Progress], None],
        clock: Callable[[], float],
    ) -> None:
        self.world = world
        self.name = name
        self.incarnation = incarnation
        self.host = host
        self.layout = layout
        self.segment = segment
        self.disk = disk
        self.stopped_at = float("-inf")
        """When the process was last stopped: a work begun before that may be late without being wrong."""
        self.woke_at = float("-inf")
        """When, in the world's time, its host was last suspended no more: its leases may have ended unnoticed."""
        self.sequences: dict[int, SimSequence] = {}
        self._told: dict[str, int] = {}
        """The life of each peer whose segment its Hello told of, as long as the conversation lasts."""
        self.works: dict[int, Running] = {}
        self._used_ids: set[int] = set()
        self.disk_reads: Counter[int] = Counter()
        """Disk slots that copies under way read from."""
        self._compute_free_at = 0.0
        self._later = later
        self._done = done
        self._progressed = progressed
        self._clock = clock

    # --- whose slots can be found

    @property
    def now(self) -> float:
        """The host's monotonic clock."""
        return self._clock()

    def hear(self, event: Event) -> None:
        """What the process's actor is about to learn: its peers come and go."""
        if isinstance(event, PeerUp):
            self._told[event.peer] = event.incarnation
        elif isinstance(event, PeerDown):
            self._told.pop(event.peer, None)

    def find(self, node: str, incarnation: int) -> Segment | None:
        """The segment of a life: the own one, or one that this process was told of."""
        own = (node, incarnation) == (self.name, self.incarnation)
        told = own or self._told.get(node) == incarnation
        return self.world.segments.get((node, incarnation)) if told else None

    # --- effects carried out at once

    def fence(self, generations: Sequence[tuple[int, int]]) -> None:
        """Set slot generations of the own segment."""
        if self.segment is None:
            return self.world.watcher.broken(self, "fences without a segment")
        for slot, generation in generations:
            self.world.watcher.fenced(self.segment, slot, generation)
            self.segment.generations[slot] = generation
            if generation % 2:
                self.segment.flipped.discard(slot)
        return None

    def open(self, sequence: int, capacity_tokens: int, past: bytes) -> None:
        """Allocate a sequence's KV."""
        if sequence in self.sequences:
            self.world.watcher.broken(self, f"opens sequence {sequence} twice")
        self.sequences[sequence] = SimSequence(capacity_tokens, past)

    def close(self, sequence: int) -> None:
        """Free a sequence's KV; nothing may be using it."""
        if sequence not in self.sequences:
            return self.world.watcher.broken(self, f"closes sequence {sequence}, which is not open")
        busy = [work for work in self.works.values() if sequence in work.sequences]
        self.world.watcher.closing(self, sequence, busy)
        del self.sequences[sequence]
        return None

    def start(self, work_id: int, work: Work, deadline_s: float) -> None:
        """Begin a work; it ends in exactly one `done`."""
        if work_id in self._used_ids:
            self.world.watcher.broken(self, f"reuses work id {work_id}")
        self._used_ids.add(work_id)
        now = self.now
        running = Running(work_id, work, now, now + deadline_s, iter(()), _sequences_of(work))  # type: ignore[arg-type]
        unknown = [sequence for sequence in running.sequences if sequence not in self.sequences]
        if unknown:
            self.world.watcher.broken(self, f"starts {type(work).__name__} on sequence {unknown[0]}, which is not open")
        running.steps = self._steps(running)
        self.works[work_id] = running
        self._resume(running, None, first=True)

    def cancel(self, work_id: int) -> None:
        """Ask a work to stop at its next step."""
        if work_id in self.works:
            self.works[work_id].cancelled = True

    # --- works

    def _resume(self, running: Running, _: None = None, *, first: bool = False) -> None:
        late = self.now > running.deadline
        stop = "deadline" if late else "cancelled" if running.cancelled else None
        try:
            delay_s = next(running.steps) if first else running.steps.send(stop)
        except StopIteration as end:
            del self.works[running.work_id]
            self._done(running.work_id, WorkFailed("deadline") if late else end.value)
            return
        self._later(delay_s, lambda: self._resume(running))

    def _steps(self, running: Running) -> Steps:
        match running.work:
            case ComputeChunk() as work:
                return self._compute(running, work)
            case ComputeStage() as work:
                return self._compute_stage(running, work)
            case PullBlocks() as work:
                return self._pull(running, work)
            case DecodeStep() as work:
                return self._decode(running, work)
            case ForkSequence() as work:
                return self._fork(running, work)
            case SampleTokens() as work:
                return self._sample_late(work)
            case CopyBlocks() as work:
                return self._copy(running, work)
            case WriteToDisk() as work:
                return self._write_to_disk(running, work)
            case ProbeProcess() as work:
                return self._probe(work)
            case Generate() as work:
                return self._generate(running, work)
            case ProbeEngine():
                return self._probe_engine()
            case WatchEngine() as work:
                raise TypeError(work)  # simulated ones publish nothing

    def _disk_block_s(self) -> float:
        return self.world.hardware.disk_block_s * (self.disk.slowness if self.disk else 1.0)

    def _took(self, seconds: float) -> float:
        world = self.world
        return seconds * (1 + world.hardware.jitter * world.random.random()) * world.slowness(self.host)

    def _wait_for_compute(self, running: Running, took_s: float) -> float:
        """Queue for the one compute thread; returns how long to wait, at most until just after the deadline."""
        now = self.now
        begin = max(now, self._compute_free_at)
        if begin > running.deadline:
            return running.deadline - now + 1e-6
        self._compute_free_at = begin + took_s
        return begin - now

    def _compute(self, running: Running, work: ComputeChunk) -> Steps:
        hardware = self.world.hardware
        tokens = as_tokens(work.tokens)
        took_s = self._took(hardware.compute_start_s + hardware.compute_token_s * len(tokens))
        took_s += self._took(hardware.copy_block_s * len(work.prefix))
        fail = self.world.random.random() < self.world.copy_fail
        began_at = self.now
        stop = yield self._wait_for_compute(running, took_s)
        if stop or fail:
            return WorkFailed(stop or "injected failure")
        layers = range(self.layout.layers)
        missing = yield from self._run_layers(running, work, tokens, layers, took_s, tell=True)
        if missing is not None:
            return missing.of_chunk(self.now - began_at)
        end = work.start + len(tokens)
        kv_hash = 0 if work.sampling is None else self.sequences[work.sequence].hash_kv(layers, end)
        sampled = self._sampled(work, kv_hash, end)
        token, logprob = sampled[0] if sampled else (None, None)
        assert self.segment is not None or not work.outputs
        checksums = tuple(block_checksum(self.segment.parts[grant.slot]) for grant in work.outputs if self.segment)
        return ChunkComputed(checksums, token, self.now - began_at, logprob=logprob, others=sampled[1:], scored=_scored(work))

    def _sampled(self, work: ComputeChunk, kv_hash: int, end: int) -> tuple[Sampled, ...]:
        """The next token for each choice; none where it is not known in time what it may be."""
        sequence = self.sequences[work.sequence]
        tokens = [(sequence.token_of(kv_hash, end, sampling), sampling) for sampling in work.samplings]
        sampled = tuple((token, logprob_of(token, end, sampling)) for token, sampling in tokens)
        if work.sampling is None or not self._sits_out(work.sampling, SET_ASIDE):
            return sampled
        sequence.unsampled = sampled
        return ()

    def _sample_late(self, work: SampleTokens) -> Steps:
        sequence = self.sequences.get(work.logits_of)
        sampled = sequence.unsampled if sequence is not None else ()
        if not sampled:
            self.world.watcher.broken(self, f"samples where nothing was left of sequence {work.logits_of}")
        elif sequence is not None:
            sequence.unsampled = ()
        stop = yield self._took(MASK_S * self.world.random.random())
        if stop or self.world.random.random() < max(NO_MASK, self.world.copy_fail):
            return WorkFailed(stop or "constraint: its grammar was not ready")
        return TokensSampled(sampled)

    def _compute_stage(self, running: Running, work: ComputeStage) -> Steps:
        hardware, chunk, segment = self.world.hardware, work.chunk, self.segment
        assert segment is not None
        share = len(work.layers) / self.layout.layers
        took_s = self._took(hardware.compute_start_s + hardware.compute_token_s * work.count * share)
        took_s += self._took(hardware.copy_block_s * (len(chunk.prefix) * share + len(work.entering)))
        fail = self.world.random.random() < self.world.copy_fail
        began_at = self.now
        stop = yield self._wait_for_compute(running, took_s)
        if stop or fail:
            return WorkFailed(stop or "injected failure")
        tokens, before = as_tokens(chunk.tokens), 0
        if work.entering:
            raw = yield from self._read_states(running, work)
            if raw is None:
                return WorkFailed("hidden states were not reached")
            tokens, before = entering_states(raw)
        missing = yield from self._run_layers(running, chunk, tokens, work.layers, took_s, tell=False)
        if missing is not None:
            return missing.of_stage(self.now - began_at)
        end = chunk.start + work.count
        kv_hash = self.sequences[chunk.sequence].hash_kv(work.layers, end, before)
        if work.leaving:
            self._write_states(running, hidden_states(tokens, kv_hash), work.leaving)
        sampled = self._sampled(chunk, kv_hash, end)
        token, logprob = sampled[0] if sampled else (None, None)
        parts = [part for grant in chunk.outputs for part in segment.parts[grant.slot][work.first_layer : work.stop_layer]]
        return StageComputed(tuple(parts), token, self.now - began_at, logprob=logprob, others=sampled[1:])

    def _read_states(self, running: Running, work: ComputeStage) -> Generator[float, str | None, bytes | None]:
        size = work.count * self.layout.hidden_bytes
        parts = div_ceil(size, self.layout.part_bytes)
        places = [divmod(part, self.layout.layers) for part in range(parts)]
        reads = [_Read(self, running, work.entering[index], layer) for index, layer in places]
        for read in reads:
            read.first_half()
        yield self._took(self._copy_s(len(work.entering), work.entering))
        halves = [read.second_half() for read in reads]
        return None if None in halves else b"".join(half for half in halves if half is not None)[:size]

    def _write_states(self, running: Running, states: bytes, grants: Sequence[SlotGrant]) -> None:
        size, layers = self.layout.part_bytes, self.layout.layers
        for index in range(div_ceil(len(states), size)):
            grant, layer = grants[index // layers], index % layers
            segment = self.world.segments[grant.node, grant.incarnation]
            self.world.watcher.writing(self, running, segment, grant)
            part = states[index * size : (index + 1) * size].ljust(size, b"\0")
            segment.part(grant.slot, layer)[:] = part
            segment.parts[grant.slot][layer] = part_checksum(part)

    def _run_layers(
        self, running: Running, work: ComputeChunk, tokens: NDArray[np.uint32], layers: range, took_s: float, *, tell: bool
    ) -> Generator[float, str | None, "_Missing | None"]:
        """Load, compute and store one layer after the other; what is missing ends it."""
        sequence = self.sequences[work.sequence]
        end = work.start + len(tokens)
        layer_s = took_s / (2 * len(layers))
        for layer in layers:
            loads = [load for load in work.prefix if load.first_layer <= layer < load.stop_layer]
            if loads and self.now > running.started_at + work.prefix_s:
                return _Missing(tuple(load.block for load in loads))
            reads = [_Read(self, running, load.source, layer) for load in loads]
            for read in reads:
                read.first_half()
            self._half_read([load.source for load in loads])
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
                self._store(sequence, load, layer, part)
            sequence.run_layer(slice(layer, layer + 1), work.start, tokens)
            yield layer_s
            for index, grant in enumerate(work.outputs):
                self._write_out(running, sequence, layer, work.start + index * self.layout.block_tokens, end, grant)
            if tell and (layer + 1 < layers.stop or took_s >= TOLD_EVERY_S):
                self._progressed(running.work_id, LayersComputed(layer + 1))
        return None

    def _write_out(self, running: Running, sequence: SimSequence, layer: int, start: int, end: int, grant: SlotGrant) -> None:
        """Store one layer's part of one output block, zero-filled beyond the sequence's tokens."""
        segment = self.world.segments[grant.node, grant.incarnation]
        self.world.watcher.writing(self, running, segment, grant)
        part = sequence.read_part(layer, start, min(start + self.layout.block_tokens, end), self.layout.block_tokens)
        segment.part(grant.slot, layer)[:] = part
        segment.parts[grant.slot][layer] = part_checksum(part)

    def _store(self, sequence: SimSequence, load: BlockLoad, layer: int, part: bytes) -> None:
        sequence.write_part(layer, load.block * self.layout.block_tokens, load.tokens, part)

    def _pull(self, running: Running, work: PullBlocks) -> Steps:
        reads = [
            (load, layer, _Read(self, running, load.source, layer))
            for load in work.loads
            for layer in range(load.first_layer, load.stop_layer)
        ]
        stop = yield from self._approach(running, [load.source for load in work.loads])
        if stop == NO_ANSWER:
            return BlocksPulled((), tuple(dict.fromkeys(load.block for load in work.loads)))
        if stop:
            return WorkFailed(stop)
        if self.world.random.random() < self.world.copy_fail:
            return WorkFailed("injected failure")
        for _, _, read in reads:
            read.first_half()
        self._half_read([load.source for load in work.loads])
        yield self._took(self._copy_s(len(reads) / self.layout.layers, [load.source for load in work.loads]))
        parts: list[tuple[int, int, int]] = []
        failed: dict[int, None] = {}
        corrupt: dict[int, None] = {}
        sequence = self.sequences[work.sequence]
        for load, layer, read in reads:
            part = read.second_half()
            if part is None:
                failed[load.block] = None
                if read.corrupt:
                    corrupt[load.block] = None
                continue
            self._store(sequence, load, layer, part)
            parts.append((load.block, layer, part_checksum(part)))
        return BlocksPulled(tuple(part for part in parts if part[0] not in failed), tuple(failed), tuple(corrupt))

    def _fork(self, running: Running, work: ForkSequence) -> Steps:
        source = self.sequences[work.source]
        for target in work.targets:
            blocks = self.layout.blocks_for(work.tokens)
            stop = yield self._took(self.world.hardware.copy_start_s + self.world.hardware.copy_block_s * blocks)
            if stop or self.world.random.random() < self.world.copy_fail:
                return WorkFailed(stop or "injected failure")
            self.sequences[target].kv[:, :, : work.tokens] = source.kv[:, :, : work.tokens]
        return SequenceForked()

    def _decode(self, running: Running, work: DecodeStep) -> Steps:
        hardware = self.world.hardware
        began_at = self.now
        rows: list[tuple[int, ...]] = []
        sat_out: tuple[int, ...] = ()
        for made in range(work.steps):
            took_s = self._took(hardware.step_s + hardware.step_entry_s * len(work.entries))
            stop = yield self._wait_for_compute(running, took_s)
            if stop and stop != "cancelled":
                return WorkFailed(stop)
            stop = yield took_s
            fed = rows[-1] if rows else [entry.token for entry in work.entries]
            rows.append(tuple(self._step(entry, made, token) for entry, token in zip(work.entries, fed, strict=True)))
            sat_out = tuple(place for place, entry in enumerate(work.entries) if self._sits_out(entry.sampling))
            if stop or sat_out:  # whoever asked waits for no more than the next border
                break
        asked = any(each.sampling.logprobs is not None for each in work.entries)
        logprobs = tuple(
            tuple(logprob_of(token, each.position + made, each.sampling) for each, token in zip(work.entries, row, strict=True))
            for made, row in enumerate(rows if asked else (), 1)
        )
        for place in sat_out:
            entry = work.entries[place]
            token_at = rows[-1][place], logprob_of(rows[-1][place], entry.position + len(rows), entry.sampling)
            self.sequences[entry.sequence].unsampled = (token_at,)
        nothing = [tuple(0 if place in sat_out else token for place, token in enumerate(rows[-1]))]
        return StepDecoded(tuple(rows[:-1] + nothing), self.now - began_at, logprobs, sat_out=sat_out)

    def _sits_out(self, sampling: Sampling, share: float = SITS_OUT) -> bool:
        return bool(sampling.constraint) and self.world.random.random() < share

    def _step(self, entry: StepEntry, made: int, token: int) -> int:
        sequence, position = self.sequences[entry.sequence], entry.position + made
        sequence.run(position, np.array([token], dtype=np.uint32))
        sequence.feed(token, position, entry.sampling)
        return sequence.next_token(position + 1, entry.sampling)

    def _generate(self, running: Running, work: Generate) -> Steps:
        """A foreign engine: it has KV of its own, and a fault of copies is one that loses an answer under way."""
        hardware, tokens, known = self.world.hardware, as_tokens(work.tokens), work.tokens
        left, length = work.stop.max_tokens - work.count, len(tokens)
        sequence = SimSequence(length + left, work.sampling.past(work.tokens))
        start = reused = yield from self._load_shelved(work, sequence)
        tokens = tokens[start:]
        took_s = self._took(hardware.compute_start_s + hardware.compute_token_s * len(tokens))
        if self.world.random.random() < max(ENGINE_FAILS, self.world.copy_fail):
            yield took_s
            return WorkFailed("injected failure")
        for made in range(1, left + 1):
            stop = yield self._wait_for_compute(running, took_s)
            stop = stop or (yield took_s)
            if stop or self.world.random.random() < self.world.copy_fail / ANSWER_LOSSES:
                return WorkFailed(stop or "injected failure")
            sequence.run(start, tokens)
            self._shelve(work, sequence, known, start)
            start += len(tokens)
            token = sequence.next_token(start, work.sampling)
            if work.stop.reason(token, work.count + made) is not None:
                return Generated((token,), reused)
            self._progressed(running.work_id, TokensGenerated((token,)))
            tokens, known = np.array([token], dtype=np.uint32), known + pack_tokens((token,))
            sequence.feed(token, start, work.sampling)
            took_s = self._took(hardware.step_s + hardware.step_entry_s)
        raise AssertionError("the last token ends an answer")

    def _load_shelved(self, work: Generate, sequence: SimSequence) -> Generator[float, str | None, int]:
        """The KV of so many tokens comes from stores. What another engine is still saving is waited for, but not for long."""
        world, size = self.world, self.layout.block_tokens
        keys = extend_keys(work.root, work.tokens, size)[: (len(work.tokens) // 4 - 1) // size]
        coming, until = min(len(keys), work.coming_tokens // size), self.now + COMING_S
        found = self._on_shelves(keys)
        while len(found) < coming and self.now < until:
            if (yield AGAIN_S):
                break
            found = self._on_shelves(keys)
        if found:
            yield self._took(world.hardware.network_start_s + world.hardware.network_block_s * len(found))
        for index, block in enumerate(found):
            fill(sequence, index * size, (index + 1) * size, block)
        return len(found) * size

    def _on_shelves(self, keys: Sequence[Key]) -> list[bytes]:
        """The leading blocks that stores have which answer. A copy that is torn is noticed."""
        world, found = self.world, list[bytes]()
        for key in keys:
            held = [block for shelf in self._shelves() if (block := shelf.get(key)) is not None]
            if not held or (world.copy_tear and world.random.random() < world.copy_tear):
                break
            found.append(held[0])
        return found

    def _shelves(self) -> list[Shelf]:
        """Of the stores that answer, the one on this host first."""
        there = [segment for segment in self.world.segments.values() if segment.shelf is not None and segment.linked]
        there = [each for each in there if self.world.reach(self.name, each.node, each.incarnation) == "yes"]
        return [each.shelf for each in sorted(there, key=lambda each: each.host != self.host) if each.shelf is not None]

    def _shelve(self, work: Generate, sequence: SimSequence, known: bytes, start: int) -> None:
        """Blocks that are complete go to a store in a while, if this process lives to see it."""
        size, stop = self.layout.block_tokens, len(known) // 4 // self.layout.block_tokens
        if start // size < stop:
            keys = extend_keys(work.root, known, size)
            blocks = [(keys[at], block_of(sequence, at * size, (at + 1) * size)) for at in range(start // size, stop)]
            self._later(self._took(self.world.hardware.copy_start_s * SAVES_LATE), lambda: self._put_on_shelf(blocks))

    def _put_on_shelf(self, blocks: Sequence[tuple[Key, bytes]]) -> None:
        for shelf in self._shelves()[:1]:
            for key, block in blocks:
                shelf.put(key, block)

    def _probe_engine(self) -> Steps:
        yield self._took(self.world.hardware.probe_s)
        well = self.world.random.random() >= max(ENGINE_FAILS, self.world.copy_fail)
        return EngineProbed(well, "" if well else "injected failure")

    def _copy(self, running: Running, work: CopyBlocks) -> Steps:
        layers = self.layout.layers
        sources = [source for source, _ in work.copies if isinstance(source, SlotRef)]
        stop = yield from self._approach(running, sources)
        if stop == NO_ANSWER:
            return BlocksCopied((None,) * len(work.copies))
        if stop:
            return WorkFailed(stop)
        stored = [source.slot for source, _ in work.copies if isinstance(source, DiskBlock)]
        self.disk_reads.update(stored)
        copies: list[_BlockCopy] = []
        for source, grant in work.copies:
            target = self.find(grant.node, grant.incarnation)
            if target is None or not target.linked or target.host != self.host:
                copies.append(_BlockCopy(None, grant, []))
                continue
            usable = target.generations[grant.slot] == grant.generation
            block = _DiskRead(self, source) if isinstance(source, DiskBlock) else None
            reads = [_DiskPart(block, layer) if block else self._reader(running, source, layer) for layer in range(layers)]
            copies.append(_BlockCopy(target if usable else None, grant, reads))
        fail = self.world.random.random() < self.world.copy_fail
        for copy in copies:
            if copy.target is None:
                continue
            self.world.watcher.writing(self, running, copy.target, copy.grant)
            for layer, read in enumerate(copy.reads):
                part = read.first_half()
                if part is not None:
                    copy.target.part(copy.grant.slot, layer)[: len(part)] = part
        if any(copy.target is not self.segment for copy in copies if copy.target is not None):
            self.world.half_written(self.name)
        self._half_read(sources)
        # From here on a stopped process writes late: the generation was checked, the bytes are on their way.
        yield self._took(self._copy_s(len(copies), sources) + self._disk_block_s() * len(stored))
        self.disk_reads.subtract(stored)
        if fail:
            return WorkFailed("injected failure")
        checksums = tuple(self._finish_copy(running, copy) for copy in copies)
        fault = "input/output error" if stored and self.disk and self.disk.fault == "failing" else ""
        return BlocksCopied(checksums, tuple(index for index, copy in enumerate(copies) if copy.corrupt), fault)

    def _finish_copy(self, running: Running, copy: "_BlockCopy") -> int | None:
        target, grant = copy.target, copy.grant
        if target is None:
            return None
        self.world.watcher.writing(self, running, target, grant)
        good = True
        for layer, read in enumerate(copy.reads):
            part = read.second_half()
            if part is None:
                good = False
                copy.corrupt = copy.corrupt or read.corrupt
                continue
            target.part(grant.slot, layer)[:] = part
            target.parts[grant.slot][layer] = part_checksum(part)
        if not good or target.generations[grant.slot] != grant.generation:
            return None
        if self.world.random.random() < self.world.copy_tear:
            _tear(self.world.random, target.part(grant.slot, self.world.random.randrange(self.layout.layers)))
        standing = [part_checksum(target.part(grant.slot, layer)) for layer in range(self.layout.layers)]
        return block_checksum(standing) if standing == target.parts[grant.slot] else None

    def _reader(self, running: Running, source: SlotRef | SequenceBlock | DiskBlock, layer: int) -> "_Read | _SequenceRead":
        if isinstance(source, SlotRef):
            return _Read(self, running, source, layer)
        assert isinstance(source, SequenceBlock)
        return _SequenceRead(self, source, layer)

    def _write_to_disk(self, running: Running, work: WriteToDisk) -> Steps:
        """Block by block, each in two halves: a crash in between leaves a torn slot under whatever row it had."""
        disk, segment = self.disk, self.segment
        if disk is None or segment is None:
            self.world.watcher.broken(self, "writes to a disk it does not have")
            return WorkFailed("no disk")
        written = [False] * len(work.blocks)
        stop = yield self._took(self.world.hardware.disk_start_s)
        for index, (source, block) in enumerate(work.blocks):
            if stop or disk.fault:
                break
            if not generation_stands(segment, source):
                continue
            if self.disk_reads[block.slot] > 0:
                self.world.watcher.broken(self, f"writes disk slot {block.slot}, which a copy reads")
            disk.write(block, segment.block(source.slot), half=True)
            stop = yield self._took(self._disk_block_s())
            payload = segment.block(source.slot)
            disk.write(block, payload, half=False)
            if generation_stands(segment, source) and disk.stands(block, payload):
                disk.index(block)
                written[index] = True
        return DiskWritten(tuple(written), {"": "", "full": "no space left", "failing": "input/output error"}[disk.fault])

    def _probe(self, work: ProbeProcess) -> Steps:
        yield self._took(self.world.hardware.probe_s)
        return ProcessProbed(self.world.alive(work.node, work.incarnation))

    def _approach(self, running: Running, sources: Sequence[SlotRef]) -> Generator[float, str | None, str | None]:
        """Wait for the way to the sources; a peer that does not answer costs the whole deadline."""
        remote = [source for source in sources if self._is_remote(source)]
        stop = yield self._took(self.world.hardware.network_start_s if remote else self.world.hardware.copy_start_s)
        if stop:
            return stop
        if any(self.world.reach(self.name, source.node, source.incarnation) == "silent" for source in remote):
            stop = yield max(0.0, running.deadline - self.now - 1e-6)
            return stop or NO_ANSWER
        return None

    def _half_read(self, sources: Sequence[SlotRef]) -> None:
        if any(source.node != self.name for source in sources):
            self.world.half_read(self.name, remote=any(map(self._is_remote, sources)))

    def _is_remote(self, source: SlotRef) -> bool:
        segment = self.find(source.node, source.incarnation)
        return segment is not None and segment.host != self.host

    def _copy_s(self, blocks: float, sources: Sequence[SlotRef]) -> float:
        hardware = self.world.hardware
        if any(self._is_remote(source) for source in sources):
            return hardware.network_block_s * blocks + hardware.network_start_s
        return hardware.copy_block_s * blocks + hardware.copy_start_s


@dataclass(frozen=True, slots=True)
class _Missing:
    """Why layers were not all computed."""

    failed: tuple[int, ...] = ()
    corrupt: tuple[int, ...] = ()
    stopped: str = ""

    def of_chunk(self, elapsed_s: float) -> Result:
        return WorkFailed(self.stopped) if self.stopped else ChunkComputed((), None, elapsed_s, self.failed, self.corrupt)

    def of_stage(self, elapsed_s: float) -> Result:
        return WorkFailed(self.stopped) if self.stopped else StageComputed((), None, elapsed_s, self.failed, self.corrupt)


@dataclass(slots=True)
class _BlockCopy:
    target: Segment | None
    grant: SlotGrant
    reads: "Sequence[_Read | _SequenceRead | _DiskPart]"
    corrupt: bool = False


class _Read:
    """One layer's part of a slot, read in two halves and verified as `BlockLoad` tells."""

    __slots__ = ("_half", "_layer", "_machine", "_ref", "_running", "_segment", "corrupt")

    def __init__(self, machine: Machine, running: Running, ref: SlotRef, layer: int) -> None:
        self._machine = machine
        self._running = running
        self._ref = ref
        self._layer = layer
        self._segment: Segment | None = None
        self._half: bytes | None = None
        self.corrupt = False
        """Was there a copy as named, with bytes that did not verify?"""

    def first_half(self) -> bytes | None:
        """The first half of the bytes, or None when the source is gone or has another generation."""
        segment = self._machine.find(self._ref.node, self._ref.incarnation)
        if segment is None or not readable(self._machine, segment):
            return None
        if not generation_stands(segment, self._ref):
            return None
        self._machine.world.watcher.reading(self._machine, self._running, segment, self._ref)
        self._segment = segment
        part = segment.part(self._ref.slot, self._layer)
        self._half = bytes(part[: len(part) // 2])
        return self._half

    def second_half(self) -> bytes | None:
        """The whole part if it verified: every later use of the bytes depends on this."""
        segment = self._segment
        if segment is None or self._half is None or not readable(self._machine, segment, attached=True):
            return None
        view = segment.part(self._ref.slot, self._layer)
        part = self._half + bytes(view[len(self._half) :])
        world = self._machine.world
        if world.random.random() < world.copy_fail / self._machine.layout.layers:
            return None  # as when a connection breaks, or it comes too late
        if world.random.random() < world.copy_tear / self._machine.layout.layers:
            torn = bytearray(part)
            _tear(world.random, memoryview(torn))
            part = bytes(torn)
        world.watcher.reading(self._machine, self._running, segment, self._ref)
        if not generation_stands(segment, self._ref):
            return None
        if not part_stands(segment, self._ref, self._layer, part):
            self.corrupt = True
            return None
        world.watcher.verified(segment, self._ref, self._layer, part)
        return part


class _SequenceRead:
    """One layer's part of a complete block of a running sequence: private memory, nobody else writes it."""

    __slots__ = ("_layer", "_machine", "_source", "corrupt")

    def __init__(self, machine: Machine, source: SequenceBlock, layer: int) -> None:
        self._machine = machine
        self._source = source
        self._layer = layer
        self.corrupt = False

    def first_half(self) -> bytes | None:
        part = self.second_half()
        return part[: len(part) // 2]

    def second_half(self) -> bytes:
        machine = self._machine
        start = self._source.block * machine.layout.block_tokens
        sequence = machine.sequences[self._source.sequence]
        return sequence.read_part(self._layer, start, start + machine.layout.block_tokens, machine.layout.block_tokens)


class _DiskRead:
    """A whole block of the own disk, verified as one when its last byte is in."""

    __slots__ = ("_block", "_disk", "_half", "_payload", "corrupt", "part_bytes")

    def __init__(self, machine: Machine, block: DiskBlock) -> None:
        assert machine.disk is not None
        self._disk = machine.disk
        self._block = block
        self.part_bytes = machine.layout.part_bytes
        self._half = self._disk.read(block)[: machine.layout.block_bytes // 2]
        self._payload: bytes | None = None
        self.corrupt = False

    def payload(self) -> bytes | None:
        """The bytes if they verified. A copy that did not loses its row."""
        if self._disk.fault == "failing" or self.corrupt:
            return None
        if self._payload is None:
            whole = self._half + self._disk.read(self._block)[len(self._half) :]
            if not self._disk.stands(self._block, whole):
                self.corrupt = True
                self._disk.rows.pop(self._block.slot, None)
                return None
            self._payload = whole
        return self._payload


class _DiskPart:
    """One layer's part of a block on disk."""

    __slots__ = ("_layer", "_read")

    def __init__(self, read: _DiskRead, layer: int) -> None:
        self._read = read
        self._layer = layer

    @property
    def corrupt(self) -> bool:
        return self._read.corrupt

    def first_half(self) -> bytes | None:
        return None  # nothing reaches the target before it is verified

    def second_half(self) -> bytes | None:
        payload = self._read.payload()
        size = self._read.part_bytes
        return None if payload is None else payload[self._layer * size : (self._layer + 1) * size]


def readable(machine: Machine, segment: Segment, *, attached: bool = False) -> bool:
    """Whether `machine` can read `segment`: a file on its own host, or through its living owner."""
    if segment.host == machine.host:
        return segment.linked or attached
    return machine.world.reach(machine.name, segment.node, segment.incarnation) == "yes"


def generation_stands(segment: Segment, ref: SlotRef) -> bool:
    """Whether the slot still holds the copy that `ref` names."""
    return reading.generation_stands(segment.generations[ref.slot], ref.generation, committed=ref.checksum != 0)


def part_stands(segment: Segment, ref: SlotRef, layer: int, part: bytes) -> bool:
    """Whether the bytes read are the ones that were stored."""
    row = segment.parts[ref.slot]
    return reading.part_stands(part_checksum(part), row[layer]) and reading.row_stands(row, ref.checksum)


def _scored(work: ComputeChunk) -> tuple[TokenLogprob, ...]:
    if work.prompt_logprobs is None:
        return ()
    told = Sampling(logprobs=work.prompt_logprobs)
    tokens = as_tokens(work.tokens + work.following).tolist()[1:]
    return tuple(each for at, token in enumerate(tokens, work.start + 1) if (each := logprob_of(token, at, told)))


def _tear(random: Random, part: memoryview) -> None:
    part[random.randrange(len(part))] ^= 1 << random.randrange(8)


def _sequences_of(work: Work) -> frozenset[int]:
    match work:
        case ComputeChunk() | ComputeStage() | PullBlocks():
            return frozenset((work.sequence,))
        case DecodeStep():
            return frozenset(entry.sequence for entry in work.entries)
        case CopyBlocks():
            return frozenset(source.sequence for source, _ in work.copies if isinstance(source, SequenceBlock))
        case ForkSequence():
            return frozenset((work.source, *work.targets))
        case WriteToDisk() | ProbeProcess() | Generate() | ProbeEngine() | WatchEngine() | SampleTokens():
            return frozenset()
