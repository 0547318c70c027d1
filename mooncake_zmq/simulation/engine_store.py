"""The store of a simulated cache-node as vLLMs use it: a few blocks of KV by key, the least recently used evicted first.

It stands for connector and store as a vLLM sees them: what is found is what was saved, or it is a miss.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.simulation.engine import HEAD_DIM, LAYERS, SimSequence
from mooncake_zmq.simulation.models import Computes

MAX_BLOCKS = 24


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """A block as it was saved. What it holds and who made it is for the checker: no vLLM looks at that."""

    kv: bytes
    text: bytes
    """The tokens up to the block's end."""
    computes: Computes


class EngineStore:
    """One incarnation of one store."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[Key, SavedBlock] = OrderedDict()

    def put(self, key: Key, block: SavedBlock) -> None:
        """Add a block; one that is there stays as it is."""
        self._blocks.setdefault(key, block)
        self._blocks.move_to_end(key)
        if len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)

    def get(self, key: Key) -> SavedBlock | None:
        """Return the block, if it is there."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
        return self._blocks.get(key)

    def held(self) -> Iterable[SavedBlock]:
        """Return all blocks."""
        return self._blocks.values()


def block_of(sequence: SimSequence, start: int, stop: int) -> bytes:
    """Return the KV of tokens `[start, stop)`, all layers."""
    return sequence.kv[:, :, start:stop].tobytes()


def fill(sequence: SimSequence, start: int, stop: int, block: bytes) -> None:
    """Write a block into a sequence: the reverse of `block_of`."""
    sequence.kv[:, :, start:stop] = np.frombuffer(block, dtype=np.uint32).reshape(LAYERS, 2, stop - start, HEAD_DIM)
