"""The worker's half, without vLLM: loads blocks from the pool and offers blocks to it, on threads of its own.

The caller keeps the blocks unchanged until the end is reported, so a copy may take any time, and a store that is down or
stopped delays only these threads. Failures are reported by block, and counted.
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
from mooncake_zmq.vllm.ledger import Load, Part, Save
from mooncake_zmq.vllm.names import group_prefix, object_names
from mooncake_zmq.vllm.spans import BlockSpans
from mooncake_zmq.vllm.worker import Crew, Worker

MAX_WAITING = 4096
RETRY_S = 1.0
"""Pause before another try of a save that a store did not accept."""
TRIES = 3
"""Further tries, RETRY_S apart, for blocks that a store may still accept. After a save that failed there are none until one
succeeds: blocks are held for a store that is unreachable for a moment, and not for one that is gone."""
REASONS = {
    UNREACHED: "unreached",
    Code.EXPIRED: "expired",
    Code.TRANSFER_FAILED: "damaged",
    Code.NO_ROOM: "no_room",
}
"""Names in the counts of the codes of blocks that were not saved."""
PASSING = (UNREACHED, Code.EXPIRED, Code.TRANSFER_FAILED)
"""Codes that may be different on the next try."""


class Memory(Protocol):
    """Memory of the engine's blocks. Each direction has an object of its own."""

    value_bytes: int
    most: int
    """Most blocks handled at a time."""

    def sources(self, blocks: Sequence[int]) -> list[Value]:
        """Return the bytes of these blocks, valid until the next call."""

    def targets(self, blocks: Sequence[int]) -> list[Value]:
        """Return where to write the bytes of these blocks."""

    def arrived(self, blocks: Sequence[int]) -> None:
        """Complete the first of the last targets: those of `blocks`, which hold their bytes when this returns."""


class HostMemory:
    """Blocks in this process's memory, written and read in place."""

    most = 1024

    def __init__(self, spans: BlockSpans) -> None:
        self._spans = spans
        self.value_bytes = spans.value_bytes

    def sources(self, blocks: Sequence[int]) -> list[Value]:
        return [self._spans.of(block) for block in blocks]

    targets = sources

    def arrived(self, blocks: Sequence[int]) -> None:
        """Do nothing: the bytes are in place."""


@dataclass(slots=True)
class Moved:
    """Loads and saves that ended since the last call. `failed`: the requests, among those of `loaded`, that lack blocks.
    `loads_took`: each load's number, the blocks of its prefix, and seconds; inf if blocks are missing."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    loads_took: list[tuple[int, int, float]] = field(default_factory=list)
    failed_blocks: set[int] = field(default_factory=set)
    saved: list[int] = field(default_factory=list)


class Mover:
    """Carry out loads and saves. One thread calls it."""

    def __init__(
        self,
        client: StoreClient,
        prefix: str,
        loading: Sequence[Memory],
        saving: Sequence[Memory],
        threads: int = 1,
        copies: int = 1,
    ) -> None:
        """`prefix`: prefix of the names of this rank's blocks. `loading`, `saving`: the memory of each KV cache group.
        `threads`: how many copy one load in parallel, and as many one save. `copies`: the number of hosts in whose stores a
        block is saved."""
        self._client = client
        self._copies = copies
        self._prefixes = [group_prefix(prefix, group) for group in range(len(loading))]
        self._loading, self._saving = loading, saving
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._moved = Moved()
        self._counts: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._under_way = 0
        self._tries = TRIES
        """Tries of the next save."""
        self._closing = threading.Event()
        self._loaders, self._savers = Crew("kv-load", threads), Crew("kv-save", threads)
        self._loads = Worker("kv-loads", self._load, lambda load: self._end_load(load, 0), MAX_WAITING)
        self._saves = Worker("kv-saves", self._save, self._end_save, MAX_WAITING)

    def load(self, load: Load) -> None:
        """Begin a load; `take` reports its end in any case."""
        with self._changed:
            self._under_way += 1
        if not self._loads.offer(load):
            self._end_load(load, 0)

    def save(self, save: Save) -> None:
        """Begin a save; `take` reports its end in any case."""
        with self._changed:
            self._under_way += 1
        if not self._saves.offer(save):
            self._end_save(save)

    def take(self, wait_s: float = 0.0) -> Moved:
        """Return what ended; wait for it at most `wait_s` if anything is under way."""
        with self._changed:
            if wait_s and self._under_way and not (self._moved.loaded or self._moved.saved):
                self._changed.wait(wait_s)
            moved, self._moved = self._moved, Moved()
            return moved

    def take_counts(self) -> Counter[str]:
        """Return what was counted since the last call, including the counts of the store's client."""
        counted = Counter(self._client.counts)
        counted["failed_jobs"] = self._loads.failures + self._saves.failures
        with self._changed:
            counts, self._counts = self._counts, Counter()
            counts.update({name: count - self._counted[name] for name, count in counted.items()})
            self._counted = counted
            return counts

    def close(self) -> None:
        self._closing.set()
        self._loads.close()
        self._saves.close()
        self._loaders.close()
        self._savers.close()
        self._client.close()

    # --- on the threads

    def _load(self, load: Load) -> None:
        good: list[int] = []
        began = time.perf_counter()
        try:
            for group, part in enumerate(load.groups):
                good.append(self._load_part(group, part, load.holders))
                if good[-1] < len(part.blocks):  # blocks after a gap are computed in any case
                    break
        finally:
            self._end_load(load, sum(good), time.perf_counter() - began)

    def _load_part(self, group: int, part: Part, holders: Sequence[str]) -> int:
        """Return how many of the first blocks were loaded."""
        good = 0
        for start, stop in _batches(len(part.blocks), self._loading[group].most):
            came = self._fetch(group, part.keys[start:stop], part.blocks[start:stop], holders)
            good += came
            if came < stop - start:
                break
        return good

    def _fetch(self, group: int, keys: Sequence[bytes], blocks: Sequence[int], holders: Sequence[str]) -> int:
        """Return how many of the first blocks were loaded."""
        memory, prefix = self._loading[group], self._prefixes[group]
        targets = memory.targets(blocks)
        size = memory.value_bytes

        def fetch(start: int, stop: int) -> list[int]:
            names = object_names([prefix], keys[start:stop])
            caps = [size] * (stop - start)
            return self._client.fetch(
                names, lambda index, length: targets[start + index] if length == size else None, caps, holders
            )

        answers = self._loaders.share(len(keys), fetch, UNREACHED)
        came = next((index for index, answer in enumerate(answers) if answer != size), len(answers))
        memory.arrived(blocks[:came])
        return came

    def _save(self, save: Save) -> None:
        codes: list[int] = []
        try:
            for group, part in enumerate(save.groups):
                memory = self._saving[group]
                for start, stop in _batches(len(part.blocks), memory.most):
                    if UNREACHED in codes:
                        return
                    codes += self._offer(group, part.keys[start:stop], memory.sources(part.blocks[start:stop]))
        finally:
            self._end_save(save, codes)

    def _offer(self, group: int, keys: Sequence[bytes], values: Sequence[Value]) -> list[int]:
        """Return the codes of these blocks after all tries."""
        codes = self._put(group, keys, values)
        for _ in range(self._tries):
            left = [index for index, code in enumerate(codes) if code in PASSING]
            if not left or self._closing.wait(RETRY_S):
                break
            again = self._put(group, [keys[index] for index in left], [values[index] for index in left])
            for index, code in zip(left, again, strict=True):
                codes[index] = code
        self._tries = 0 if UNREACHED in codes else TRIES
        return codes

    def _put(self, group: int, keys: Sequence[bytes], values: Sequence[Value]) -> list[int]:
        def put(start: int, stop: int) -> list[int]:
            names = object_names([self._prefixes[group]], keys[start:stop])
            return self._client.put(names, values[start:stop], replicas=self._copies, distinct_hosts=True)

        return self._savers.share(len(keys), put, UNREACHED)

    def _end_load(self, load: Load, good: int, took_s: float = 0.0) -> None:
        with self._changed:
            self._moved.loaded.add(load.request_id)
            blocks = len(load.blocks)
            if good < blocks:
                self._moved.failed.add(load.request_id)
            self._moved.loads_took.append((load.number, load.prefix_blocks, took_s if good == blocks else math.inf))
            self._moved.failed_blocks.update(load.blocks[good:])
            self._counts["loaded_blocks"] += good
            self._counts["failed_blocks"] += blocks - good
            self._under_way -= 1
            self._changed.notify()

    def _end_save(self, save: Save, codes: Sequence[int] = ()) -> None:
        """Report the end of a save. `codes`: of its first blocks; the others were not tried."""
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
