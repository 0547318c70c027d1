"""PQCache's choice: of each key a code is near, which names the nearest of 64 centroids for either half of its numbers.

Centroids are found by k-means among the keys that are there when decode begins, for each layer, head and half; keys that come
later take the nearest of these. A query meets the 4,096 pairs of centroids instead of all keys.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.selection.few_of_many import Floats, Weighed
from mooncake_zmq.engine.selection.sizes import CENTROIDS, SUBSPACES

ITERATIONS = 8
"""The rounds of k-means."""


class ProductCodes:
    """Implements `Selector`; the first keys that are added to a layer are those that its centroids are made for."""

    exact = False

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int) -> None:
        self.centroids = np.zeros((layers, kv_heads, SUBSPACES, CENTROIDS, head_dim // SUBSPACES), np.float32)
        self.codes = np.empty((layers, kv_heads, capacity), np.uint16)
        """The numbers of both centroids, the first half's times 64."""

    def add(self, layer: int, first: int, keys: Floats) -> None:
        for head, own in enumerate(self.centroids[layer]):
            halves = np.split(keys[:, head], SUBSPACES, axis=1)
            if not first:
                for half, points in enumerate(halves):
                    own[half] = k_means(points)
            codes = [nearest(points, own[half]) for half, points in enumerate(halves)]
            self.codes[layer, head, first : first + len(keys)] = codes[0] * CENTROIDS + codes[1]

    def weigh(self, layer: int, queries: Floats, length: int) -> Weighed:
        heads, group, dim = queries.shape
        halves = queries.reshape(heads, group, SUBSPACES, -1).transpose(0, 2, 1, 3) @ self.centroids[layer].swapaxes(2, 3)
        pairs = (halves[:, 0, :, :, None] + halves[:, 1, :, None, :]).reshape(heads, group, -1)
        codes = self.codes[layer, :, :length].astype(np.intp)
        counts = np.stack([np.bincount(each, minlength=pairs.shape[2]) for each in codes]).astype(np.float32)
        highest = np.where(counts[:, None] > 0, pairs, -np.inf).max(axis=2, keepdims=True)
        pairs -= highest
        np.exp(np.minimum(pairs, 0, out=pairs), out=pairs)
        sums = pairs @ counts[:, :, None]
        matter = ((1 / sums).transpose(0, 2, 1) @ pairs)[:, 0]
        shares = partial(_share, pairs / sums, codes)
        return Weighed(
            np.stack([own.take(code) for own, code in zip(matter, codes, strict=True)]), np.log(sums) + highest, shares
        )

    def near_bytes(self, tokens: int) -> int:
        return self.centroids.nbytes + self.codes[:, :, :tokens].nbytes


def _share(pairs: Floats, codes: NDArray[np.int64], found: NDArray[np.int64]) -> Floats:
    """See `Weighed.share`; `pairs` [kv_head, group, pair]: the share of a token of each pair of centroids."""
    of_found = np.take_along_axis(codes, found, axis=1)
    shares: Floats = np.take_along_axis(pairs, of_found[:, None], axis=2).sum(axis=2, keepdims=True)
    return shares


def k_means(points: Floats) -> Floats:
    """Return centroids of points [n, dim]; they begin as points evenly spaced in their order."""
    centroids: Floats = points[np.linspace(0, len(points) - 1, CENTROIDS).astype(np.int64)].copy()
    for _ in range(ITERATIONS):
        codes = nearest(points, centroids)
        counts = np.bincount(codes, minlength=CENTROIDS)
        belongs = (codes == np.arange(CENTROIDS)[:, None]).astype(np.float32)
        used = counts > 0  # else it stays where it is
        centroids[used] = (belongs @ points)[used] / counts[used, None]
    return centroids


def nearest(points: Floats, centroids: Floats) -> NDArray[np.int64]:
    """Return the index of the nearest centroid of each point."""
    half_squares = (centroids * centroids).sum(axis=1) / 2
    found: NDArray[np.int64] = (points @ centroids.T - half_squares).argmax(axis=1)
    return found
