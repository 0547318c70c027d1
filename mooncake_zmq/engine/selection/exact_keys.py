"""KCache's choice: all keys are near and values are far, so each token's weight is known before any value is fetched."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.kv_cache import KEY_TILE
from mooncake_zmq.engine.selection.few_of_many import Floats, Weighed, weighed


class ExactKeys:
    """Implements `Selector` with the keys themselves, in tiles as a sequence keeps them."""

    exact = True

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int) -> None:
        self.keys = np.zeros((layers, kv_heads, -(-capacity // KEY_TILE), head_dim, KEY_TILE), np.float32)
        """By tiles [layer, kv_head, tile, head_dim, token]."""
        self._scratch = np.empty(0, np.float32)

    def add(self, layer: int, first: int, keys: Floats) -> None:
        at = first + np.arange(len(keys))
        self.keys[layer][:, at // KEY_TILE, :, at % KEY_TILE] = keys

    def weigh(self, layer: int, queries: Floats, length: int) -> Weighed:
        heads, group, _ = queries.shape
        tiles = -(-length // KEY_TILE)
        size = heads * group * tiles * KEY_TILE
        if len(self._scratch) < size:
            self._scratch = np.empty(2 * size, np.float32)
        scores = self._scratch[:size].reshape(heads, group, tiles, KEY_TILE)
        np.matmul(queries[:, None], self.keys[layer, :, :tiles], out=scores.transpose(0, 2, 1, 3))
        exact = scores.reshape(heads, group, -1)[:, :, :length]
        found = weighed(exact)
        assert found.total is not None
        return found._replace(scores=exact, share=partial(_share, exact, found.total))

    def near_bytes(self, tokens: int) -> int:
        layers, kv_heads, _, dim, _ = self.keys.shape
        return layers * kv_heads * tokens * dim * 4


def _share(scores: Floats, total: Floats, found: NDArray[np.int64]) -> Floats:
    """See `Weighed.share`."""
    shares: Floats = np.exp(np.take_along_axis(scores, found[:, None], axis=2) - total).sum(axis=2, keepdims=True)
    return shares
