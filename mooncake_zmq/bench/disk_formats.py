"""`bench disk`: an SSD tier of blocks in slots, as the pool's is, beside the same blocks in a log of segments, as the store's.

A trace's requests are replayed through a pool's DRAM slots and one tier behind them, of equal bytes on disk. What DRAM evicts
is written there unless it stands there; what is found there goes back into DRAM. No byte moves: what is counted is what the
real rules, `kv.slots` and `pool.rules.object_log`, would have written. Only the indexes of a restart are real, and timed.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

from mooncake_zmq.bench.eviction import GENERATED_REQUESTS, generated_trace, read_trace
from mooncake_zmq.bench.report import Report, Row
from mooncake_zmq.core.work import DiskBlock
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.layout import PAGE_BYTES
from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.laboratory.hit_ratio import Trace, hold, infinite_hit_ratio
from mooncake_zmq.pool.node.settings import CacheNodeSettings
from mooncake_zmq.pool.node.tiers import MAX_MOVED
from mooncake_zmq.pool.rules.object_log import MOVED_SHARE, ObjectLog, ObjectSsdSettings
from mooncake_zmq.pool.rules.object_record import ObjectRecord, record_bytes
from mooncake_zmq.pool.ssd.disk_index import DiskIndex
from mooncake_zmq.pool.ssd.object_index import ObjectIndex

MEMORY_SHARE = 8
"""The tier has so many times the DRAM's blocks."""
SETTINGS = CacheNodeSettings()
POLICY = SETTINGS.eviction

Progress = Callable[[str], None]


@dataclass(slots=True)
class Written:
    """What a tier did to its disk."""

    admitted: int = 0
    """Blocks that were to be kept."""
    bytes: int = 0
    calls: int = 0
    """Writes, each of one range of a file."""
    rows: int = 0
    """Rows of the index put, changed or deleted."""


class Tier(Protocol):
    """Blocks on disk, by key."""

    written: Written

    def holds(self, key: Key) -> bool: ...

    def use(self, keys: Sequence[Key]) -> None:
        """Of a prompt, from the root on: those that stand here or in memory, and were read."""

    def left_memory(self, keys: Sequence[Key]) -> None:
        """These stand here alone now."""

    def write(self, keys: Sequence[Key], in_memory: Callable[[Key], bool]) -> None:
        """Keep them, in place of others."""

    def reload_s(self, directory: Path) -> float:
        """Seconds that a restart takes to know what stands here."""


class SlotTier:
    """A slot for each block; who goes is for the eviction policy to say. As `pool.node.disk_tier` does it."""

    def __init__(self, capacity_bytes: int, block_bytes: int) -> None:
        self.written = Written()
        self._stride = PAGE_BYTES + block_bytes
        self._slots = Slots(capacity_bytes // self._stride, POLICY)

    def holds(self, key: Key) -> bool:
        return self._slots.committed(key) is not None

    def use(self, keys: Sequence[Key]) -> None:
        pass  # what was read went to memory, and is touched as it leaves that

    def left_memory(self, keys: Sequence[Key]) -> None:
        for slot in self._slots.present(keys):
            if slot is not None:
                self._slots.touch([slot])

    def write(self, keys: Sequence[Key], in_memory: Callable[[Key], bool]) -> None:
        taken = []
        for key in keys:
            slot = self._slots.reserve(key)
            if slot is None:
                break
            self._slots.commit(slot, 0)
            taken.append(slot)
        taken.sort()
        self._slots.take_fences()
        self._slots.evicted.clear()
        self.written.admitted += len(keys)
        self.written.bytes += len(taken) * self._stride
        self.written.calls += sum(before + 1 != slot for before, slot in zip([-2, *taken], taken, strict=False))
        self.written.rows += len(taken)

    def reload_s(self, directory: Path) -> float:
        index = DiskIndex.open(directory / "slots.sqlite", "bench", self._slots.capacity)
        keys = self._slots.committed_keys()
        index.put([(DiskBlock(slot, key, slot), slot) for key in keys if (slot := self._slots.committed(key)) is not None])
        return _loaded_s(index.load, index.close)


class LogTier:
    """Blocks one after another; the oldest segment goes, and what was read of it moves. As `pool.node.tiers` does it."""

    def __init__(self, capacity_bytes: int, block_bytes: int) -> None:
        self.written = Written()
        self._block_bytes = block_bytes
        self._log = ObjectLog(ObjectSsdSettings(bytes=capacity_bytes))

    def holds(self, key: Key) -> bool:
        return key.hex() in self._log.by_key

    def use(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._log.use(key.hex())

    def left_memory(self, keys: Sequence[Key]) -> None:
        pass  # the log has no order of use

    def write(self, keys: Sequence[Key], in_memory: Callable[[Key], bool]) -> None:
        self.written.admitted += len(keys)
        waiting = [key for key in keys if not self.holds(key)]
        while waiting:
            many = len(waiting)
            while (place := self._log.place([(key.hex().encode(), self._block_bytes) for key in waiting[:many]])) is None:
                if many == 1:
                    self._open(in_memory)
                many = max(1, many // 2)
            self._log.take(place)
            for key, offset in zip(waiting[:many], place.offsets, strict=True):
                record = ObjectRecord(self._log.next_sequence, place.segment, offset, self._block_bytes, 0, 0)
                self._log.add(key.hex(), record)
                self.written.bytes += record_bytes(key.hex().encode(), self._block_bytes)
            self.written.calls += 1
            self.written.rows += many
            del waiting[:many]

    def _open(self, in_memory: Callable[[Key], bool]) -> None:
        """One more segment, room for which others make."""
        length = self._log.settings.segment_bytes
        self._log.open(self._log.new_segment(), length)
        size = record_bytes(bytes(32), self._block_bytes)
        most = min(MAX_MOVED, int(min(length * MOVED_SHARE, length - size)) // size)
        while (victim := self._log.victim()) is not None:
            for key, record, used in (row for rows in self._log.standing(victim) for row in rows):
                place = self._log.place_pages(size) if used and most and not in_memory(bytes.fromhex(key)) else None
                self.written.rows += 1
                if place is None:
                    self._log.remove(key)
                    continue
                most -= 1
                self._log.take(place)
                self._log.moved(key, record.sequence, place.segment, place.offsets[0])
                self.written.bytes += size
                self.written.calls += 1
            self._log.close_segment(victim)
            most = 0

    def reload_s(self, directory: Path) -> float:
        index = ObjectIndex.open(directory / "log.sqlite")
        index.put([(key, record) for key in self._log.by_key if (record := self._log.record(key)) is not None])
        return _loaded_s(index.load, index.close)


def bench_disk_formats(
    trace: Path | None, capacities: Sequence[int], block_bytes: int, directory: Path, progress: Progress
) -> Report:
    """Replay `trace`, or a generated one, for tiers of these capacities in blocks; indexes are made in `directory`. Raises
    click.ClickException for a trace that cannot be read."""
    requests = read_trace(trace) if trace is not None else generated_trace(Random(0), GENERATED_REQUESTS)
    report = Report("disk")
    report.notes.append(
        "Each row: blocks in the store's log of segments beside blocks in slots of their own, in as many bytes."
    )
    report.notes.append(
        f"Blocks of {block_bytes:,} bytes. A tier that never evicts would hit {infinite_hit_ratio(requests):.3f}."
    )
    for capacity in sorted(capacities):
        size = capacity * (PAGE_BYTES + block_bytes)
        progress(f"{capacity:,} blocks")
        log, slots = (_measure(requests, tier, capacity, block_bytes, directory) for tier in _tiers(size, block_bytes))
        for name, (unit, higher_is_better) in FIGURES.items():
            what = f"{name}, {capacity:,} blocks"
            row = Row(name=what, unit=unit, value=log[name], reference=slots[name], higher_is_better=higher_is_better)
            report.rows.append(row)
    return report


FIGURES = {
    "hits": ("hit ratio", True),
    "written per byte kept": ("bytes", False),
    "calls per block kept": ("writes", False),
    "rows changed per block kept": ("rows", False),
    "index loaded at a start": ("ms", False),
}


def _tiers(capacity_bytes: int, block_bytes: int) -> Iterator[Tier]:
    yield LogTier(capacity_bytes, block_bytes)
    yield SlotTier(capacity_bytes, block_bytes)


def _measure(trace: Trace, tier: Tier, capacity: int, block_bytes: int, directory: Path) -> dict[str, float]:
    ratio = hit_ratio(trace, Slots(max(1, capacity // MEMORY_SHARE), POLICY), tier)
    written = tier.written
    kept = max(1, written.admitted)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        reload_s = tier.reload_s(Path(scratch))
    figures = ratio, written.bytes / (kept * block_bytes), written.calls / kept, written.rows / kept, reload_s * 1e3
    return dict(zip(FIGURES, figures, strict=True))


def hit_ratio(trace: Trace, memory: Slots, tier: Tier) -> float:
    """Share of the trace's blocks that stand in memory or in the tier, with all before them in their prompt, when asked for."""
    hits = asked = 0
    for keys in trace:
        asked += len(keys)
        there = next((at for at, key in enumerate(keys) if memory.committed(key) is None and not tier.holds(key)), len(keys))
        hits += there
        tier.use(keys[:there])
        memory.unpin(hold(memory, keys))
        memory.take_fences()
        evicted = memory.evicted[:]
        memory.evicted.clear()
        tier.left_memory(evicted)
        fresh = [key for key in evicted if not tier.holds(key)]
        for start in range(0, len(fresh), SETTINGS.ssd.batch_blocks):
            tier.write(fresh[start : start + SETTINGS.ssd.batch_blocks], lambda key: memory.committed(key) is not None)
    return hits / asked if asked else 0.0


def _loaded_s(load: Callable[[Callable[[int, int], None]], Iterator[object]], close: Callable[[], None]) -> float:
    began = time.perf_counter()
    for _ in load(lambda _done, _total: None):
        pass
    took = time.perf_counter() - began
    close()
    return took
