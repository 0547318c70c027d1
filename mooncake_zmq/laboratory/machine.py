"""The modelled machine: it carries out `core.work` by its costs, without any bytes. It makes no decision of an actor.

An engine does one thing at a time. Copies share their hosts' NICs, buses and disks, so that they slow each other down. Every
work ends exactly once: when it is finished, at its deadline, or when it was cancelled. No work fails by itself, and every
checksum is the same.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from mooncake_zmq.core.actor import OpenSequence
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import (
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
    LayersComputed,
    ProbeProcess,
    ProcessProbed,
    Progress,
    PullBlocks,
    Result,
    SequenceBlock,
    SequenceForked,
    SlotGrant,
    StageComputed,
    StepDecoded,
    Work,
    WorkFailed,
    WriteToDisk,
)
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.laboratory.resources import Host, Shared, through
from mooncake_zmq.simulation.world import World

LAYERS = 4
"""Groups of layers that a chunk's KV comes in. The paper's model has 80 layers, each of which a decode could receive by
itself."""
REPORTED_LAYERS = (LAYERS // 2, LAYERS - 1)
"""Layer groups at whose completion a decode begins to read: each time half of the remaining ones, as a copy may be half as
fast."""
PART = 1
"""The checksum of every layer's share of a block."""
BLOCK = block_checksum((PART,) * LAYERS)
OF_ENGINES = frozenset((ComputeChunk, ComputeStage, DecodeStep))
"""Works that keep an engine busy."""
PROBE_S = 1e-3
HIDDEN_BYTES = 2
"""A hidden state is assumed to have a sixteenth of a token's KV: a twentieth with the paper's model, a twentieth with the
default."""


def lab_layout(block_tokens: int) -> BlockLayout:
    """Return a layout of blocks without memory, as their bytes are not stored."""
    return BlockLayout(layers=LAYERS, kv_heads=1, head_dim=1, block_tokens=block_tokens, hidden_bytes=HIDDEN_BYTES)


class StepRun(Struct, frozen=True, gc=False):
    """Steps one after the other with the same members: step i (from 0) takes `first_s + i * growth_s`."""

    begin_s: float
    first_s: float
    growth_s: float
    steps: int

    def end_s(self, steps: int) -> float:
        """Return the time at which so many of its steps are done."""
        return self.begin_s + steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)


class _Running(Struct, eq=False):
    """A work in flight and how it will end."""

    work: Work
    begin_s: float
    end_s: float
    result: Result
    run: StepRun | None = None


class ModelledMachine:
    """One incarnation of one process; see `world.Carrier`. `hosts`: resources of all hosts; `host_of`: of a process."""

    def __init__(
        self,
        world: World[Any],
        *,
        name: str,
        costs: Costs,
        layout: BlockLayout,
        hosts: Mapping[str, Host],
        host_of: Callable[[str], str],
        done: Callable[[int, Result], None],
        progressed: Callable[[int, Progress], None],
        later: Callable[..., None],
    ) -> None:
        self.busy_s = 0.0
        """Virtual seconds that its engine computed."""
        self.last_run: StepRun | None = None
        """The decode steps that ended last."""
        self.running: dict[int, _Running] = {}
        self._world = world
        self._name = name
        self._costs = costs
        self._block_bytes = float(layout.block_tokens * costs.kv_bytes_per_token)
        self._hosts = hosts
        self._host_of = host_of
        self._here = hosts[host_of(name)]
        self._home = host_of(name)
        self._engine_free_at = 0.0
        self._done = done
        self._progressed = progressed
        self._later = later

    # --- effects carried out at once: there is no memory

    def fence(self, generations: Sequence[tuple[int, int]]) -> None:
        """See `world.Carrier`."""

    def open(self, asked: OpenSequence) -> None:
        """See `world.Carrier`."""

    def close(self, sequence: int) -> None:
        """See `world.Carrier`."""

    # --- works

    def start(self, work_id: int, work: Work, deadline_s: float) -> None:
        assert work_id not in self.running, "a work id is used once"
        now = self._world.now
        running = self._plan(now, work)
        if running.end_s > now + deadline_s:
            running.end_s, running.result = now + deadline_s, WorkFailed("deadline")
        self.running[work_id] = running
        if type(work) is ComputeChunk and type(running.result) is ChunkComputed and not running.result.failed:
            layer_s = (running.end_s - running.begin_s) / LAYERS
            for layers in REPORTED_LAYERS:
                self._later(running.begin_s + layers * layer_s, self._come_far, work_id, layers)
        self._later(running.end_s, self._end, work_id, running.end_s)

    def cancel(self, work_id: int) -> None:
        """Cancel a work. A chunk stops now; steps at their next border; a copy continues, as its bytes are in transit."""
        running = self.running.get(work_id)
        if running is None:
            return
        now = self._world.now
        if isinstance(running.work, ComputeChunk | ComputeStage):
            running.result = WorkFailed("cancelled")
            self._end_at(work_id, running, max(now, min(running.begin_s, running.end_s)))
        elif running.run is not None and isinstance(running.result, StepDecoded):
            self._cut(work_id, running, running.run, now)

    def _cut(self, work_id: int, running: _Running, run: StepRun, now: float) -> None:
        steps = 1
        while steps < run.steps and run.end_s(steps) < now:
            steps += 1
        if steps < run.steps:
            assert isinstance(running.result, StepDecoded)
            running.run = StepRun(run.begin_s, run.first_s, run.growth_s, steps)
            end_s = run.end_s(steps)
            running.result = StepDecoded(running.result.tokens[:steps], end_s - run.begin_s)
            self._end_at(work_id, running, end_s)

    def _end_at(self, work_id: int, running: _Running, end_s: float) -> None:
        running.end_s = self._engine_free_at = end_s
        self._later(end_s, self._end, work_id, end_s)

    def _come_far(self, work_id: int, layers: int) -> None:
        running = self.running.get(work_id)
        if running is not None and isinstance(running.result, ChunkComputed):
            self._progressed(work_id, LayersComputed(layers))

    def _end(self, work_id: int, end_s: float) -> None:
        """End the work, unless it was given another end meanwhile."""
        running = self.running.get(work_id)
        if running is None or running.end_s != end_s:
            return
        result = running.result
        if type(running.work) in OF_ENGINES:
            self.busy_s += max(0.0, end_s - running.begin_s)
            if type(result) is ChunkComputed and not result.failed:
                self._progressed(work_id, LayersComputed(LAYERS))
            elif type(result) is StepDecoded:
                self.last_run = running.run
        del self.running[work_id]
        self._done(work_id, result)

    def _plan(self, now: float, work: Work) -> _Running:
        if type(work) is PullBlocks:
            return _Running(work, now, self._load_end(now, work.loads), _pulled(work.loads))
        if type(work) is DecodeStep:
            return self._plan_steps(now, work)
        if type(work) is ComputeChunk:
            return self._plan_chunk(now, work)
        match work:
            case ComputeStage():
                return self._plan_stage(now, work)
            case CopyBlocks(copies=copies):
                return _Running(work, now, self._copy_end(now, copies), BlocksCopied((BLOCK,) * len(copies)))
            case ForkSequence(targets=targets, tokens=tokens):
                # Each token's KV is read, as by a step, and written.
                copied_s = 2 * len(targets) * tokens * self._costs.decode_context_s
                return _Running(work, now, now + copied_s, SequenceForked())
            case WriteToDisk(blocks=blocks):
                end_s = through(now, len(blocks) * self._block_bytes, (self._here.disk,))
                return _Running(work, now, end_s, DiskWritten((True,) * len(blocks)))
            case ProbeProcess(node=node, incarnation=incarnation):
                return _Running(work, now, now + PROBE_S, ProcessProbed(self._world.alive(node, incarnation)))
            case _:
                raise TypeError(work)  # no trace has foreign engines or several choices

    def _plan_steps(self, now: float, work: DecodeStep) -> _Running:
        """Plan decode steps: their costs grow by the same amount with each step, as every member's context grows by a token."""
        batch = len(work.entries)
        context = sum([entry.position for entry in work.entries]) + batch
        begin = max(now, self._engine_free_at)
        first_s = self._costs.step_s(batch, context)
        run = StepRun(begin, first_s, self._costs.step_s(batch, context + batch) - first_s, work.steps)
        self._engine_free_at = end_s = run.end_s(work.steps)
        result = StepDecoded(((0,) * batch,) * work.steps, end_s - begin)
        return _Running(work, begin, end_s, result, run)

    def _plan_chunk(self, now: float, work: ComputeChunk) -> _Running:
        """Plan a chunk: loading the prefix overlaps with computing, layer by layer, so the longer of the two counts."""
        begin = max(now, self._engine_free_at)
        loaded_s = self._load_end(now, work.prefix)
        if loaded_s > now + work.prefix_s:
            end_s, blocks = now + work.prefix_s, tuple(load.block for load in work.prefix)
            self._engine_free_at = max(begin, end_s)
            return _Running(work, begin, max(begin, end_s), ChunkComputed((), None, end_s - now, blocks))
        stop = work.start + len(work.tokens) // 4
        computed_s = self._costs.compute_s(stop, work.start)
        self._engine_free_at = end_s = max(loaded_s, begin + computed_s)
        token = None if work.sampling is None else 0
        loading_s, waited_s = (loaded_s - now, end_s - begin - computed_s) if work.prefix else (0.0, 0.0)
        result = ChunkComputed(
            (BLOCK,) * len(work.outputs), token, end_s - begin, loaded_s=loading_s, waited_s=max(0.0, waited_s)
        )
        return _Running(work, begin, end_s, result)

    def _plan_stage(self, now: float, work: ComputeStage) -> _Running:
        """Plan a stage: its layers' share of the chunk's time, once the hidden states are here."""
        chunk, share = work.chunk, len(work.layers) / LAYERS
        begin = max(now, self._engine_free_at)
        if work.entering:
            size = work.count * self._costs.kv_bytes_per_token * HIDDEN_BYTES / (8 * LAYERS)
            begin = max(begin, through(now, size, (*self._way_from(work.entering[0].node), self._here.bus)))
        loaded_s = self._load_end(now, chunk.prefix)
        if loaded_s > now + chunk.prefix_s:
            self._engine_free_at = end_s = max(begin, now + chunk.prefix_s)
            blocks = tuple(load.block for load in chunk.prefix)
            return _Running(work, begin, end_s, StageComputed((), None, end_s - now, blocks))
        computed_s = share * self._costs.compute_s(chunk.start + work.count, chunk.start)
        self._engine_free_at = end_s = max(loaded_s, begin + computed_s)
        loading_s, waited_s = (loaded_s - now, end_s - begin - computed_s) if chunk.prefix else (0.0, 0.0)
        parts = (PART,) * (len(chunk.outputs) * len(work.layers))
        token = None if chunk.sampling is None else 0
        result = StageComputed(parts, token, end_s - begin, loaded_s=loading_s, waited_s=max(0.0, waited_s))
        return _Running(work, begin, end_s, result)

    # --- copies

    def _load_end(self, now: float, loads: Iterable[BlockLoad]) -> float:
        """Return when loads into the engine end: blocks in its own slab are there, others come over the bus, and those of other
        hosts over both NICs as well."""
        parts: dict[str, int] = {}
        """Tokens of one layer group, by source."""
        for load in loads:
            source = load.source.node
            parts[source] = parts.get(source, 0) + load.tokens * (load.stop_layer - load.first_layer)
        parts.pop(self._name, None)
        end, token_bytes = now, self._costs.kv_bytes_per_token / LAYERS
        for node, tokens in parts.items():
            end = max(end, through(now, tokens * token_bytes, (*self._way_from(node), self._here.bus)))
        return end

    def _copy_end(self, now: float, copies: Sequence[tuple[SlotRef | SequenceBlock | DiskBlock, SlotGrant]]) -> float:
        """Return when copies into the own host's pool end: from disk, from an engine over the bus, or from another host's pool
        over both NICs."""
        blocks: dict[str, int] = {}
        for source, _ in copies:
            place = source.node if type(source) is SlotRef else "disk" if type(source) is DiskBlock else self._name
            blocks[place] = blocks.get(place, 0) + 1
        end = now
        for place, count in blocks.items():
            way = (self._here.disk,) if place == "disk" else self._way_from(place) or (self._here.bus,)
            end = max(end, through(now, count * self._block_bytes, way))
        return end

    def _way_from(self, node: str) -> tuple[Shared, ...]:
        """Return the resources between two hosts; none on the same host."""
        host = self._host_of(node)
        return () if host == self._home else (self._hosts[host].outgoing, self._here.incoming)


def _pulled(loads: Sequence[BlockLoad]) -> BlocksPulled:
    parts = [(load.block, layer, PART) for load in loads for layer in range(load.first_layer, load.stop_layer)]
    return BlocksPulled(tuple(parts), ())
