"""Loads of blocks into sequences: blocks of this host on the copy thread, blocks of other hosts by the reader."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import BlockLoad, PullBlocks
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.runtime.executor.jobs import Job, Subtasks
from mooncake_zmq.runtime.executor.load_records import LayersOfBlock, LoadRecord, Prefix, Pulled
from mooncake_zmq.runtime.executor.worker import Worker
from mooncake_zmq.transfer.block_copy import load_blocks
from mooncake_zmq.transfer.channel import RemoteRead
from mooncake_zmq.transfer.directory import SegmentDirectory

BAND_LAYERS = 4
"""The most layers of a block of this host that are copied at once. Each copy has a cost of its own, and what is ready early is
of use to a computation that waits for it."""


class Loads:
    """Plans the loads of a work. `copier`: the thread of local copies."""

    def __init__(self, directory: SegmentDirectory, copier: Worker, *, verify_local: bool) -> None:
        self._directory, self._copier, self._verify_local = directory, copier, verify_local
        self._layout = directory.layout

    def pull(self, job: Job, work: PullBlocks) -> Subtasks:
        """Load blocks, whole or in part, into a sequence."""
        pulled = Pulled()
        job.conclude = pulled.result
        sequence = job.sequences[work.sequence].kv
        here, far = self._split(work.loads)
        subtasks = Subtasks(reads=[self._read(load, _layers_of(load), sequence, pulled) for load in far])
        if here:
            order = [(_layers_of(load), load) for load in here]
            subtasks.turns.append((self._copier, partial(self._load, job, order, sequence, pulled)))
        return subtasks

    def prefix(self, job: Job, loads: Sequence[BlockLoad], sequence: SequenceKV, until: float) -> Subtasks:
        """Load a chunk's prefix, the first layers of all its blocks before the next ones; blocks that arrive after `until` have
        failed."""
        layers = self._layout.layers
        prefix = job.prefix = Prefix(layers, loads)
        here, far = self._split(loads)
        reads = [self._read(load, part, sequence, prefix) for band in _by_bands(layers, far, 1) for part, load in band]
        subtasks = Subtasks(reads=reads, reads_until=until)
        if here:
            order = prefix.until_failed(_by_bands(layers, here, BAND_LAYERS))
            subtasks.turns.append((self._copier, partial(self._load, job, order, sequence, prefix, until)))
        return subtasks

    def is_remote(self, source: SlotRef) -> bool:
        """Whether a slot is read over the network."""
        return self._directory.endpoint((source.node, source.incarnation)) is not None

    def _split(self, loads: Iterable[BlockLoad]) -> tuple[list[BlockLoad], list[BlockLoad]]:
        """Split into loads of this host, or of an unknown place, and those of other hosts."""
        here: list[BlockLoad] = []
        far: list[BlockLoad] = []
        for load in loads:
            (far if self._directory.endpoint((load.source.node, load.source.incarnation)) else here).append(load)
        return here, far

    def _load(
        self, job: Job, order: Iterable[LayersOfBlock], sequence: SequenceKV, record: LoadRecord, until: float = math.inf
    ) -> None:
        """Load in the given order. Blocks that arrive too late have failed."""
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

    def _read(self, load: BlockLoad, layers: range, sequence: SequenceKV, record: LoadRecord) -> RemoteRead:
        return RemoteRead(load.source, layers, _SequenceSink(load, sequence, self._layout, record))


class _SequenceSink:
    """Put a block from another host into a sequence."""

    def __init__(self, load: BlockLoad, sequence: SequenceKV, layout: BlockLayout, record: LoadRecord) -> None:
        self._load = load
        self._sequence = sequence
        self._layout = layout
        self._record = record

    def buffer(self) -> memoryview | None:
        return None

    def part(self, layer: int, payload: memoryview, checksum: int) -> None:
        part: NDArray[Any] = np.frombuffer(payload, self._layout.dtype).reshape(self._layout.part_shape)
        load = self._load
        self._sequence.write_parts(((layer, load.block * self._layout.block_tokens, load.tokens, part),))
        self._sequence.settle()
        self._record.arrived(load.block, range(layer, layer + 1), (checksum,))

    def end(self, failure: ReadFailure | None) -> None:
        if failure:
            self._record.fail(self._load.block, failure)


def _layers_of(load: BlockLoad) -> range:
    return range(load.first_layer, load.stop_layer)


def _batches(order: Iterable[LayersOfBlock], parts_at_once: int) -> Iterator[list[LayersOfBlock]]:
    """Group loads in the same order, each group with at least `parts_at_once` layers of blocks except the last."""
    together: list[LayersOfBlock] = []
    layers_together = 0
    for layers, load in order:
        together.append((layers, load))
        layers_together += len(layers)
        if layers_together >= parts_at_once:
            yield together
            together, layers_together = [], 0
    if together:
        yield together


def _by_bands(layers: int, loads: Sequence[BlockLoad], most: int) -> Iterator[list[LayersOfBlock]]:
    """Yield the loads by bands of layers: one layer of all blocks, then twice as many each time, up to `most`. A computation
    thus begins early, and while it computes one band, the next is loaded."""
    start, width = 0, 1
    while start < layers:
        stop = min(layers, start + width)
        parts = ((range(max(start, load.first_layer), min(stop, load.stop_layer)), load) for load in loads)
        yield [(part, load) for part, load in parts if part]
        start, width = stop, min(2 * width, most)
