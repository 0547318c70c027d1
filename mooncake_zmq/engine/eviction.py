"""Which tokens of a prompt are kept where its KV is evicted: by place alone, or by how much all others attend to them.

The sums are fixed-point numbers, so that they do not depend on the order in which threads and chunks are added.
"""

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.messages import Eviction
from mooncake_zmq.core.selection import SINKS
from mooncake_zmq.engine.kv_cache import SequenceKV

SCORES_ITEMS = 1 << 18
"""Scores of one head that are held at once, 1 MiB: rows are taken together while theirs are fewer."""
ONE = 1 << 20
"""The fixed-point number of an attention weight of 1: a million queries of a hundred heads stay below 2**48."""

Sums = NDArray[np.int64]


def attention_received(queries: Any, keys: Any, positions: NDArray[np.int64]) -> Sums:
    """Return how much some queries of a layer attend to each token up to the last of them: softmax, summed over queries and
    heads, in units of 1 / ONE.

    `queries`: [kv_head, n, group, head_dim], rotated and scaled, at ascending `positions`, each of which sees the tokens up to
    itself. `keys`: [kv_head, tile, head_dim, tokens of a tile], as a sequence has them. Memory for SCORES_ITEMS scores is
    taken, or for those of one query.
    """
    heads, count, group, dim = queries.shape
    size = keys.shape[3]
    found = np.zeros(int(positions[-1]) + 1, np.int64)
    at_once = max(1, SCORES_ITEMS // (group * len(found)))
    scratch = np.empty(min(at_once, count) * group * -(-len(found) // size) * size, np.float32)
    for first in range(0, count, at_once):
        some = positions[first : first + at_once]
        height, begin, tiles = len(some) * group, int(some[0]), -(-(int(some[-1]) + 1) // size)
        scores = scratch[: height * tiles * size].reshape(height, tiles * size)
        hidden = np.arange(begin, tiles * size) > np.repeat(some, group)[:, None]
        received = np.zeros(tiles * size)
        for head in range(heads):
            rows = queries[head, first : first + at_once].reshape(height, dim)
            np.matmul(rows, keys[head, :tiles], out=scores.reshape(height, tiles, size).transpose(1, 0, 2))
            np.copyto(scores[:, begin:], -np.inf, where=hidden)
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            received += (1 / scores.sum(axis=1)) @ scores
        found[: int(some[-1]) + 1] += np.rint(received[: int(some[-1]) + 1] * ONE).astype(np.int64)
    return found


class AttentionSums:
    """How much the tokens of one prompt are attended to in each layer, chunk after chunk."""

    def __init__(self, layers: int, tokens: int) -> None:
        self.by_layer: Sums = np.zeros((layers, tokens), np.int64)
        self._lock = threading.Lock()

    def add(self, layer: int, keys: Any, queries: Any, positions: NDArray[np.int64]) -> None:
        """Add the queries of some rows of a layer. Any thread may call it, and several at once."""
        if not len(positions):
            return
        found = attention_received(queries, keys, positions)
        with self._lock:
            self.by_layer[layer, : len(found)] += found


def sinks_and_recent(tokens: int, kept: int) -> NDArray[np.int64]:
    """Return the first tokens of a context and its last ones, so many in all."""
    found: NDArray[np.int64] = np.r_[:SINKS, tokens - (kept - SINKS) : tokens]
    return found


def kept_tokens(eviction: Eviction, tokens: int, received: Sums | None) -> NDArray[np.int64]:
    """Return which of so many tokens are kept in a layer, ascending. `received`: how much each is attended to there; None: the
    choice is by place alone.

    "recent" keeps the first tokens and a window of the last ones. "elastic" is what Elastic Cache (liuzuyan/ElasticCache)
    keeps of a prompt: the first tokens, the last ones, and of the others those that are attended to most.
    """
    if received is None:
        return sinks_and_recent(tokens, eviction.kept)
    rank = received.copy()
    rank[:SINKS] = rank[tokens - eviction.last :] = np.iinfo(np.int64).max
    found: NDArray[np.int64] = np.sort(np.argsort(-rank, kind="stable")[: eviction.kept])
    return found


def evict(sequence: SequenceKV, eviction: Eviction, sums: AttentionSums | None) -> None:
    """Keep only the KV of some tokens of a sequence that holds a whole prompt, in each layer of those chosen there. Keys stay
    rotated as they are, and what follows goes on behind the whole prompt."""
    tokens = sequence.length
    for layer in range(len(sequence.values)):
        received = None if sums is None else sums.by_layer[layer, :tokens]
        sequence.keep_rows(layer, kept_tokens(eviction, tokens, received))
    sequence.set_length(eviction.kept)
    sequence.dropped += tokens - eviction.kept
