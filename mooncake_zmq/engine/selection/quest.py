"""Quest's choice: of each block the lowest and highest of every number of its keys are near, which bound the tokens' scores."""

import numpy as np

from mooncake_zmq.engine.selection.few_of_many import Floats, Weighed, weighed
from mooncake_zmq.engine.selection.sizes import BLOCK_TOKENS


class Quest:
    """Implements `Selector`: a token matters as much as the bound of its block."""

    exact = False

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int) -> None:
        blocks = -(-capacity // BLOCK_TOKENS)
        self.lowest, self.highest = np.empty((2, layers, kv_heads, blocks, head_dim), np.float32)
        """Bounds of each number of the keys of a block [layer, kv_head, block, head_dim]."""

    def add(self, layer: int, first: int, keys: Floats) -> None:
        stop = first + len(keys)
        for begin in range(first - first % BLOCK_TOKENS, stop, BLOCK_TOKENS):
            block, some = begin // BLOCK_TOKENS, keys[max(begin - first, 0) : begin + BLOCK_TOKENS - first]
            lowest, highest = self.lowest[layer, :, block], self.highest[layer, :, block]
            if begin >= first:
                lowest[:], highest[:] = some[0], some[0]
            np.minimum(lowest, some.min(axis=0), out=lowest)
            np.maximum(highest, some.max(axis=0), out=highest)

    def bounds(self, layer: int, queries: Floats, length: int) -> Floats:
        """Return upper bounds [kv_head, group, block] of the scores of all keys of a block."""
        blocks = -(-length // BLOCK_TOKENS)
        highest, lowest = (each[layer, :, :blocks].transpose(0, 2, 1) for each in (self.highest, self.lowest))
        bounds: Floats = np.matmul(queries.clip(min=0), highest)
        bounds += np.matmul(queries.clip(max=0), lowest)
        return bounds

    def weigh(self, layer: int, queries: Floats, length: int) -> Weighed:
        matter = weighed(self.bounds(layer, queries, length)).matter
        return Weighed(np.repeat(matter, BLOCK_TOKENS, axis=1)[:, :length])

    def near_bytes(self, tokens: int) -> int:
        return 2 * self.lowest[:, :, : -(-tokens // BLOCK_TOKENS)].nbytes
