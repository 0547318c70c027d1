"""Loads of a cached prefix from a pool's shared memory into a sequence, every part verified, as an engine's process does them;
beside plain copies of as many bytes."""

import ctypes
import math
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.bench.disk import elapsed_s, fill_slot
from mooncake_zmq.bench.report import Progress
from mooncake_zmq.core.work import BlockLoad, PullBlocks
from mooncake_zmq.engine.kv_cache import NewSequence, SequenceKV
from mooncake_zmq.engine.prepare import default_cache_dir
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.runtime.executor.jobs import Job
from mooncake_zmq.runtime.executor.loads import Loads
from mooncake_zmq.runtime.executor.worker import Worker
from mooncake_zmq.transfer.directory import SegmentDirectory
from mooncake_zmq.transfer.shared_memory import Segment

LAYOUT = BlockLayout(layers=30, kv_heads=3, head_dim=64, block_tokens=32)
"""The default model's: 1.41 MiB a block."""
COPY = "memory copy"


def load_gb_per_s(rounds: int, blocks: int, progress: Progress) -> dict[str, list[float]]:
    """Return GB/s of each round: of loads into each kind of sequence, and of plain copies by one thread. Raises AssertionError
    if a loaded byte is not the pool's."""
    with ExitStack() as stack:
        place = stack.enter_context(TemporaryDirectory(prefix="mooncake-bench-", dir="/dev/shm"))
        segment = Segment.create(Path(place), "bench", "bench", LAYOUT, blocks, 1)
        stack.callback(segment.close)
        random = np.random.default_rng(1)
        sources = [fill_slot(segment, slot, random) for slot in range(blocks)]
        loads = [BlockLoad(block, source, 0, LAYOUT.layers, LAYOUT.block_tokens) for block, source in enumerate(sources)]
        copier = Worker("copies", lambda _: None)
        stack.callback(copier.close)
        into = Loads(SegmentDirectory("bench", 1, "bench", LAYOUT, segment), copier, verify_local=True)
        sequences = {kind: _sequence(make, blocks) for kind, make in _kinds().items()}
        for sequence in sequences.values():
            stack.callback(sequence.close)
        copied: NDArray[np.uint8] = np.empty(segment.slots_memory().nbytes, np.uint8)
        took: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            progress(f"loads, round {number} of {rounds}" if number else "loads, warming up")
            for kind, sequence in sequences.items():
                seconds = elapsed_s(partial(_load, into, loads, sequence))
                _compare(segment, sequence)
                took.setdefault(kind, []).append(copied.nbytes / 1e9 / seconds)
            seconds = elapsed_s(lambda: ctypes.memmove(copied.ctypes.data, segment.slots_memory().ctypes.data, copied.nbytes))
            took.setdefault(COPY, []).append(copied.nbytes / 1e9 / seconds)
    return {kind: rates[1:] for kind, rates in took.items()}


def _kinds() -> dict[str, NewSequence]:
    """Return how each kind of sequence is made; the second where its compiler is installed."""
    kinds: dict[str, NewSequence] = {"NumPy": SequenceKV}
    try:
        from mooncake_zmq.engine.machine_code import object_code
        from mooncake_zmq.engine.machine_code.placed_parts import PlacingSequenceKV
    except ImportError:
        return kinds
    code = object_code.load(default_cache_dir())
    kinds["machine code"] = lambda **shape: PlacingSequenceKV(code, **shape)
    return kinds


def _sequence(make: NewSequence, blocks: int) -> SequenceKV:
    tokens = blocks * LAYOUT.block_tokens
    sequence = make(layers=LAYOUT.layers, kv_heads=LAYOUT.kv_heads, head_dim=LAYOUT.head_dim, capacity_tokens=tokens)
    sequence.expect(tokens)
    return sequence


def _load(into: Loads, loads: list[BlockLoad], sequence: SequenceKV) -> None:
    job = Job(1, PullBlocks(1, tuple(loads)), math.inf)
    for _, turn in into.prefix(job, loads, sequence, math.inf).turns:
        turn()
    assert job.prefix is not None
    assert not job.prefix.failed


def _compare(segment: Segment, sequence: SequenceKV) -> None:
    out: NDArray[np.float32] = np.empty(LAYOUT.part_shape, np.float32)
    for slot in range(segment.slots):
        for layer in range(LAYOUT.layers):
            start = slot * LAYOUT.block_tokens
            sequence.read_part(layer, start, start + LAYOUT.block_tokens, out)
            assert np.array_equal(out, segment.part_view(slot, layer)), "a loaded block differs from the pool's"
