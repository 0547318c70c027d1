"""Records of the loading of blocks into a sequence: which layers arrived, and which blocks failed."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from mooncake_zmq.core.work import BlockLoad, BlocksPulled, Result
from mooncake_zmq.kv.reading import ReadFailure

LayersOfBlock = tuple[range, BlockLoad]
"""Layers of one block that are loaded together."""


class PrefixFailed(Exception):
    """Raised where blocks of the prefix were not loaded."""

    def __init__(self, blocks: dict[int, ReadFailure]) -> None:
        super().__init__(blocks)
        self.blocks = blocks


class LoadRecord(Protocol):
    """A record of loaded blocks, written by the copy thread and the reader's thread alike."""

    failed: dict[int, ReadFailure]

    def arrived(self, block: int, layers: range, checksums: Sequence[int]) -> None: ...

    def fail(self, block: int, failure: ReadFailure) -> None: ...


class Pulled:
    """Record of a `PullBlocks`. Both writers only append, each for its own blocks, which needs no lock."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, int]] = []
        self.failed: dict[int, ReadFailure] = {}

    def arrived(self, block: int, layers: range, checksums: Sequence[int]) -> None:
        self.parts.extend((block, layer, checksum) for layer, checksum in zip(layers, checksums, strict=True))

    def fail(self, block: int, failure: ReadFailure) -> None:
        _note(self.failed, block, failure)

    def result(self) -> Result:
        good = sorted(part for part in self.parts if part[0] not in self.failed)
        return BlocksPulled(tuple(good), *split_failures(self.failed))


class Prefix:
    """Record of a chunk's prefix: the compute thread waits here for each of its layers."""

    def __init__(self, layers: int, loads: Iterable[BlockLoad]) -> None:
        self._missing = [0] * layers
        for load in loads:
            for layer in range(load.first_layer, load.stop_layer):
                self._missing[layer] += 1
        self._changed = threading.Condition()
        self._began = time.perf_counter()
        self.loaded_s = 0.0
        """When the last layer arrived, counted from the beginning."""
        self.failed: dict[int, ReadFailure] = {}

    def arrived(self, block: int, layers: range, checksums: Sequence[int]) -> None:
        with self._changed:
            self.loaded_s = time.perf_counter() - self._began
            for layer in layers:
                self._missing[layer] -= 1
            self._changed.notify_all()

    def fail(self, block: int, failure: ReadFailure) -> None:
        with self._changed:
            _note(self.failed, block, failure)
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, layer: int, check: Callable[[], None], deadline: float) -> None:
        """Return when this layer of every block has arrived; raise if that will not happen. `check` raises for a job that is
        to stop."""
        with self._changed:
            while not self.failed and self._missing[layer]:
                check()
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            if self.failed:
                check()  # the failure may come from a stop or a timeout
                raise PrefixFailed(dict(self.failed))

    def until_failed(self, bands: Iterable[Iterable[LayersOfBlock]]) -> Iterator[LayersOfBlock]:
        """Yield the loads of band after band, to the end of one that failed, so that all its failed blocks are reported."""
        for band in bands:
            if self.failed:
                return
            yield from band


def split_failures(failed: dict[int, ReadFailure]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return all failed blocks, and the corrupt ones among them."""
    corrupt = (block for block, failure in failed.items() if failure is ReadFailure.CORRUPT)
    return tuple(sorted(failed)), tuple(sorted(corrupt))


def _note(failed: dict[int, ReadFailure], block: int, failure: ReadFailure) -> None:
    """Record a failed read; a block that was corrupt once stays so."""
    if failure is ReadFailure.CORRUPT or block not in failed:
        failed[block] = failure
