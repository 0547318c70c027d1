"""The SSD tier as the executor's works use it, beside bare direct I/O of the same block size and concurrency.

Both sides move the same slots of shared memory, from and to files that were written once before, the tier in a cache-node's
batches, two at once. The bare side is threads that only pread and pwrite, a block a call: no header, checksum, index or sync.
"""

import itertools
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from mooncake_zmq.bench.report import Row
from mooncake_zmq.core.actor import WorkDone, WorkProgress
from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import BlocksCopied, CopyBlocks, DiskBlock, DiskWritten, Result, SlotGrant, Work, WriteToDisk
from mooncake_zmq.kv.checksum import block_checksum, part_checksum
from mooncake_zmq.kv.layout import PAGE_BYTES, BlockLayout
from mooncake_zmq.pool.node.disk_tier import BATCHES
from mooncake_zmq.pool.node.settings import CacheNodeSettings
from mooncake_zmq.pool.ssd.disk import Disk
from mooncake_zmq.runtime.executor.executor import Executor
from mooncake_zmq.transfer.directory import SegmentDirectory
from mooncake_zmq.transfer.shared_memory import Segment

T = TypeVar("T")

SETTINGS = CacheNodeSettings()
TIMEOUT_S = 120.0
DEPTH = 4
LAYOUTS = {
    "64 KiB": BlockLayout(layers=2, kv_heads=1, head_dim=64, block_tokens=64),
    "1.41 MiB": BlockLayout(layers=30, kv_heads=3, head_dim=64, block_tokens=32),
    "16 MiB": BlockLayout(layers=32, kv_heads=8, head_dim=128, block_tokens=64),
}


def disk_rows(
    directory: Path,
    *,
    rounds: int = 5,
    working_set_bytes: int = 512 << 20,
    memory_directory: Path = Path("/dev/shm"),
    progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Return the rows of write and read speed in GB/s of each block size; `DEPTH` requests at once on both sides, medians of
    alternating rounds.

    Needs twice the working set in memory and on the disk; its files are removed at the end. Raises DiskError, SharedMemoryError
    or OSError, and AssertionError if bytes read are not those written.
    """
    rows = []
    for name, layout in LAYOUTS.items():
        for operation, (value, reference) in _measure(
            directory, memory_directory, layout, working_set_bytes // layout.slot_bytes, rounds
        ).items():
            label = f"ssd {operation} {name}"
            rows.append(Row(label, "GB/s", value, reference, higher=True))
            progress(f"{label}: {value:.2f} GB/s, bare I/O {reference:.2f} GB/s")
    return rows


def _measure(directory: Path, memory: Path, layout: BlockLayout, blocks: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Return GB/s of the tier and of bare I/O, per operation."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        segment = stack.enter_context(
            closing(Segment.create(memory, f"bench-{os.getpid()}", "bench", layout, 2 * blocks, 1, setting="working_set_bytes"))
        )
        capacity_bytes = blocks * (PAGE_BYTES + layout.slot_bytes)
        disk = stack.enter_context(closing(Disk.open(scratch / "tier", layout, capacity_bytes, threads=DEPTH)))
        tier = stack.enter_context(closing(_Tier(segment, disk, scratch, blocks)))
        bare = stack.enter_context(closing(_Bare(segment, scratch / "bare", blocks, direct=disk.direct)))
        figures = {}
        pairs = {"write": (tier.write, bare.write), "read": (tier.read, bare.read)}
        for operation, sides in pairs.items():
            speeds: list[tuple[float, ...]] = []
            for _ in range(1 + rounds):
                speeds.append(tuple(blocks * layout.slot_bytes / elapsed_s(side) / 1e9 for side in sides))
            # The first round allocates the files and warms up.
            value, reference = (statistics.median(side) for side in zip(*speeds[1:], strict=True))
            figures[operation] = (value, reference)
        tier.verify()
        return figures


def elapsed_s(act: Callable[[], object]) -> float:
    """Return the seconds that a call took."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


class _Tier:
    """Blocks in the first half of a segment, which are demoted, then promoted into the second half."""

    def __init__(self, segment: Segment, disk: Disk, runtime_dir: Path, blocks: int) -> None:
        self._segment = segment
        self._events: SimpleQueue[WorkProgress | WorkDone[Result] | BaseException] = SimpleQueue()
        self._ids = itertools.count()
        random = np.random.default_rng(3)
        self._refs = [fill_slot(segment, slot, random) for slot in range(blocks)]
        self._blocks = [DiskBlock(ref.slot, ref.slot.to_bytes(16, "big"), ref.checksum) for ref in self._refs]
        self._grants = [SlotGrant("bench", 1, blocks + slot, 1) for slot in range(blocks)]
        for grant in self._grants:
            segment.set_generation(grant.slot, grant.generation)
        self._executor = Executor(
            SegmentDirectory("bench", 1, "bench", segment.layout, segment),
            engine=None,
            runtime_dir=runtime_dir,
            emit=self._events.put,
            on_crash=self._events.put,
            disk=disk,
        )

    def write(self) -> None:
        pairs = list(zip(self._refs, self._blocks, strict=True))
        for result in self._run([WriteToDisk(batch) for batch in _batches(pairs, SETTINGS.ssd.batch_blocks)]):
            assert isinstance(result, DiskWritten), result
            assert all(result.written), result.fault

    def read(self) -> None:
        pairs = list(zip(self._blocks, self._grants, strict=True))
        for result in self._run([CopyBlocks(batch) for batch in _batches(pairs, SETTINGS.fetch_batch_blocks)]):
            assert isinstance(result, BlocksCopied), result
            assert None not in result.checksums, result.fault or "a block did not verify"

    def verify(self) -> None:
        """Assert that the bytes read are those written."""
        layers = self._segment.layout.layers
        for ref, grant in zip(self._refs, self._grants, strict=True):
            assert self._segment.layers_view(grant.slot, 0, layers) == self._segment.layers_view(ref.slot, 0, layers)

    def close(self) -> None:
        self._executor.close()

    def _run(self, works: list[Work]) -> list[Result]:
        waiting, results = deque(works), []
        under_way = 0
        while waiting or under_way:
            while waiting and under_way < BATCHES:
                self._executor.start(next(self._ids), waiting.popleft(), TIMEOUT_S)
                under_way += 1
            match self._events.get(timeout=TIMEOUT_S):
                case WorkDone(_, result):
                    results.append(result)
                    under_way -= 1
                case BaseException() as error:
                    raise error
        return results


class _Bare:
    """The same bytes, written to and read from a plain file."""

    def __init__(self, segment: Segment, path: Path, blocks: int, *, direct: bool) -> None:
        self._segment = segment
        self._blocks = blocks
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
        self._threads = ThreadPoolExecutor(DEPTH)
        os.posix_fallocate(self._fd, 0, blocks * segment.layout.slot_bytes)

    def write(self) -> None:
        self._move(os.pwritev, 0)

    def read(self) -> None:
        self._move(os.preadv, self._blocks)

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._fd)

    def _move(self, call: Callable[[int, list[memoryview], int], int], first_slot: int) -> None:
        slots = deque(range(self._blocks))
        size = self._segment.layout.slot_bytes
        layers = self._segment.layout.layers

        def take() -> None:
            while True:
                try:
                    slot = slots.popleft()
                except IndexError:
                    return
                assert call(self._fd, [self._segment.layers_view(first_slot + slot, 0, layers)], slot * size) == size

        for future in [self._threads.submit(take) for _ in range(DEPTH)]:
            future.result()


def fill_slot(segment: Segment, slot: int, random: np.random.Generator) -> SlotRef:
    """Write a committed block of random bytes."""
    layout = segment.layout
    assert layout.block_bytes == layout.slot_bytes, "the bare side moves whole pages"
    for layer in range(layout.layers):
        part = segment.part_view(slot, layer)
        part[...] = random.standard_normal(part.shape, dtype=np.float32)
        segment.parts(slot)[layer] = part_checksum(part.data)
    checksum = block_checksum(segment.parts(slot).tolist())
    segment.set_generation(slot, 2)
    return SlotRef(node="bench", incarnation=1, slot=slot, generation=2, checksum=checksum)


def _batches(items: Sequence[T], size: int) -> list[tuple[T, ...]]:
    return [tuple(items[start : start + size]) for start in range(0, len(items), size)]
