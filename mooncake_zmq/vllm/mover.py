"""The worker's half, without vLLM: fills blocks from the pool and offers blocks to it, on threads of its own.

Whoever orders keeps the blocks as they are until the end is told; so it does not matter how long a copy takes, and what a
store that is gone or stopped costs is this thread's time. What fails is told by block, and counted.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mooncake_zmq.store.client.batch import Value
from mooncake_zmq.store.client.client import UNREACHED, StoreClient
from mooncake_zmq.store.codes import Code
from mooncake_zmq.vllm.lane import Crew, Lane
from mooncake_zmq.vllm.ledger import Load, Save
from mooncake_zmq.vllm.names import object_names
from mooncake_zmq.vllm.spans import BlockSpans

MAX_WAITING = 4096
RETRY_S = 1.0
"""Pause before a save that a store did not take in is tried again."""
TRIES = 3
"""Further ones for what a store did not take in but may, RETRY_S apart. None after a save in vain, until one is not: blocks are
kept for a store that was lost for a moment, and not for one that is gone."""
REASONS = {
    UNREACHED: "unreached",
    Code.EXPIRED: "expired",
    Code.TRANSFER_FAILED: "damaged",
    Code.NO_ROOM: "no_room",
}
"""What counts call the codes of blocks that were not saved."""
PASSING = (UNREACHED, Code.EXPIRED, Code.TRANSFER_FAILED)
"""May be otherwise on the next try."""


class Memory(Protocol):
    """Where the engine's blocks lie. Each lane has one of its own."""

    value_bytes: int
    most: int
    """Blocks that can be handled at a time."""

    def sources(self, blocks: Sequence[int]) -> list[Value]:
        """The bytes of these blocks, until the next call."""

    def targets(self, blocks: Sequence[int]) -> list[Value]:
        """Where the bytes of these blocks are to come."""

    def arrived(self, blocks: Sequence[int]) -> None:
        """The first of the last targets are filled: those of `blocks`, which have it when this returns."""


class HostMemory:
    """Blocks in this process's memory: they are written and read where they are."""

    most = 1024

    def __init__(self, spans: BlockSpans) -> None:
        self._spans = spans
        self.value_bytes = spans.value_bytes

    def sources(self, blocks: Sequence[int]) -> list[Value]:
        return [self._spans.of(block) for block in blocks]

    targets = sources

    def arrived(self, blocks: Sequence[int]) -> None:
        """They came to where they belong."""


@dataclass(slots=True)
class Moved:
    """What ended since the last look. `loads_took`: each load's number, blocks and seconds; for ever if not all of it came."""

    loaded: set[str] = field(default_factory=set)
    loads_took: list[tuple[int, int, float]] = field(default_factory=list)
    failed_blocks: set[int] = field(default_factory=set)
    saved: list[int] = field(default_factory=list)


class Mover:
    """See the module. Orders come from one thread."""

    def __init__(self, client: StoreClient, shelf: str, loading: Memory, saving: Memory, threads: int = 1) -> None:
        """`shelf`: what names of this rank's blocks begin with. `threads`: that copy one load side by side, and as many for
        saves."""
        self._client, self._shelf = client, shelf
        self._loading, self._saving = loading, saving
        self._changed = threading.Condition()
        """Guards what follows."""
        self._moved = Moved()
        self._counts: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self._under_way = 0
        self._tries = TRIES
        """Of the next save."""
        self._closing = threading.Event()
        self._loaders, self._savers = Crew("kv-load", threads), Crew("kv-save", threads)
        self._loads = Lane("kv-loads", self._load, lambda load: self._end_load(load, 0), MAX_WAITING)
        self._saves = Lane("kv-saves", self._save, self._end_save, MAX_WAITING)

    def load(self, load: Load) -> None:
        """Its end is told by `take`, whatever becomes of it."""
        with self._changed:
            self._under_way += 1
        if not self._loads.offer(load):
            self._end_load(load, 0)

    def save(self, save: Save) -> None:
        """The same."""
        with self._changed:
            self._under_way += 1
        if not self._saves.offer(save):
            self._end_save(save)

    def take(self, wait_s: float = 0.0) -> Moved:
        """What ended; waits for it for at most `wait_s`, if anything is under way."""
        with self._changed:
            if wait_s and self._under_way and not (self._moved.loaded or self._moved.saved):
                self._changed.wait(wait_s)
            moved, self._moved = self._moved, Moved()
            return moved

    def take_counts(self) -> Counter[str]:
        """What was counted since the last call, by the store's client too."""
        told = Counter(self._client.counts)
        with self._changed:
            counts, self._counts = self._counts, Counter()
            counts.update({name: count - self._told[name] for name, count in told.items()})
            self._told = told
            return counts

    def close(self) -> None:
        self._closing.set()
        self._loads.close()
        self._saves.close()
        self._loaders.close()
        self._savers.close()
        self._client.close()

    # --- on the lanes

    def _load(self, load: Load) -> None:
        good = 0
        began = time.perf_counter()
        try:
            for start, stop in _batches(len(load.blocks), self._loading.most):
                came = self._fetch(load.keys[start:stop], load.blocks[start:stop], load.holders)
                good += came
                if came < stop - start:  # what follows a gap is computed again anyhow
                    break
        finally:
            self._end_load(load, good, time.perf_counter() - began)

    def _fetch(self, keys: Sequence[bytes], blocks: Sequence[int], holders: Sequence[str]) -> int:
        """How many of the first blocks are there now."""
        memory = self._loading
        targets = memory.targets(blocks)
        size = memory.value_bytes

        def fetch(start: int, stop: int) -> list[int]:
            names = object_names([self._shelf], keys[start:stop])
            caps = [size] * (stop - start)
            return self._client.fetch(
                names, lambda index, told: targets[start + index] if told == size else None, caps, holders
            )

        answers = self._loaders.share(len(keys), fetch, UNREACHED)
        came = next((index for index, answer in enumerate(answers) if answer != size), len(answers))
        memory.arrived(blocks[:came])
        return came

    def _save(self, save: Save) -> None:
        codes: list[int] = []
        try:
            for start, stop in _batches(len(save.blocks), self._saving.most):
                codes += self._offer(save.keys[start:stop], self._saving.sources(save.blocks[start:stop]))
                if UNREACHED in codes:
                    break
        finally:
            self._end_save(save, codes)

    def _offer(self, keys: Sequence[bytes], values: Sequence[Value]) -> list[int]:
        """The codes of these, after as many tries as they get."""
        codes = self._put(keys, values)
        for _ in range(self._tries):
            left = [index for index, code in enumerate(codes) if code in PASSING]
            if not left or self._closing.wait(RETRY_S):
                break
            again = self._put([keys[index] for index in left], [values[index] for index in left])
            for index, code in zip(left, again, strict=True):
                codes[index] = code
        self._tries = 0 if UNREACHED in codes else TRIES
        return codes

    def _put(self, keys: Sequence[bytes], values: Sequence[Value]) -> list[int]:
        def put(start: int, stop: int) -> list[int]:
            return self._client.put(object_names([self._shelf], keys[start:stop]), values[start:stop])

        return self._savers.share(len(keys), put, UNREACHED)

    def _end_load(self, load: Load, good: int, took_s: float = 0.0) -> None:
        with self._changed:
            self._moved.loaded.add(load.request_id)
            blocks = len(load.blocks)
            self._moved.loads_took.append((load.number, blocks, took_s if good == blocks else math.inf))
            self._moved.failed_blocks.update(load.blocks[good:])
            self._counts["loaded_blocks"] += good
            self._counts["failed_blocks"] += blocks - good
            self._under_way -= 1
            self._changed.notify()

    def _end_save(self, save: Save, codes: Sequence[int] = ()) -> None:
        """`codes`: of its first blocks; the others were not tried."""
        unsaved = [REASONS.get(code, "refused") for code in codes if code] + ["not_tried"] * (len(save.blocks) - len(codes))
        with self._changed:
            self._counts["saved_blocks"] += len(save.blocks) - len(unsaved)
            self._counts["unsaved_blocks"] += len(unsaved)
            self._counts.update(f"unsaved_{reason}" for reason in unsaved)
            self._moved.saved.append(save.number)
            self._under_way -= 1
            self._changed.notify()


def _batches(count: int, most: int) -> Iterator[tuple[int, int]]:
    return ((start, min(count, start + most)) for start in range(0, count, most))
