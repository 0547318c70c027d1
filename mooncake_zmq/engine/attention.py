"""Causal attention over one sequence's keys and values."""

from typing import Any

import numpy as np

from mooncake_zmq.engine.kv_cache import KEY_TILE, SequenceKV
from mooncake_zmq.engine.panels import SMALL_PRODUCT
from mooncake_zmq.engine.spec import ModelSpec

MIXED_TOKENS = 16  # whose scores meet the values in one product; measured 8 to 32: equal
SMALLEST_TOTAL, LARGEST_TOTAL = 1e-26, 1e30  # of a row of exponentials, for softmax without a shift: exp(-60), exp(69)


class Attention:
    """For one thread, with its scratch memory. Queries come scaled."""

    def __init__(self, xp: Any, spec: ModelSpec) -> None:
        self._xp = xp
        self._kv_heads, self._dim = spec.kv_heads, spec.head_dim
        self._group = spec.heads // spec.kv_heads
        fitting = SMALL_PRODUCT // (KEY_TILE * spec.head_dim * self._group)
        self._tile_tokens = min(64, max(16, fitting // 16 * 16))  # measured flat from 32 to 80, slower beyond
        # What a tile of queries may not see of the keys from its own first token on.
        future = np.triu(np.ones((self._tile_tokens, self._tile_tokens + KEY_TILE), dtype=bool), k=1)
        self._causal_mask: Any = xp.asarray(np.where(future, -np.inf, 0.0).astype(np.float32))
        self._scratch: Any = xp.empty(0, dtype=xp.float32)

    def many(self, sequence: SequenceKV, index: int, queries: Any, start: int, count: int, out: Any) -> None:
        """`count` new tokens, queries [kv_head, n, group, head_dim], at token `start`, each over all up to itself, in layer
        `index`: a tile of queries and a head at a time, into the first rows of `out` [rows, heads * head_dim].

        Two of softmax's five passes over the scores find and take off each row's maximum. Ordinary scores, within about
        +-60, do not need it; leaving it out, unless a sum shows otherwise, measured a tenth of attention.
        """
        xp, group, dim = self._xp, self._group, self._dim
        by_head = out[:count].reshape(count, self._kv_heads, group, dim)
        self._scores(min(self._tile_tokens, count) * group, start + count + KEY_TILE)  # the largest first
        for first in range(0, count, self._tile_tokens):
            end = min(first + self._tile_tokens, count)
            height, visible = (end - first) * group, start + end
            tiles = -(-visible // KEY_TILE)
            width = tiles * KEY_TILE
            scores = self._scores(height, width)
            scores_by_tile = scores.reshape(height, tiles, KEY_TILE).transpose(1, 0, 2)
            own = scores.reshape(end - first, group, width)[:, :, start + first :]
            mask = self._causal_mask[: end - first, None, : own.shape[2]]
            for head in range(self._kv_heads):
                tile = queries[head, first:end].reshape(height, dim)
                xp.matmul(tile, sequence.keys[index, head, :tiles], out=scores_by_tile)
                own += mask
                totals = self._exponentiate(scores)
                if not SMALLEST_TOTAL < float(totals.min()) <= float(totals.max()) < LARGEST_TOTAL:
                    xp.matmul(tile, sequence.keys[index, head, :tiles], out=scores_by_tile)
                    own += mask
                    scores -= scores.max(axis=1, keepdims=True)
                    totals = self._exponentiate(scores)
                mixed = self._mix(scores, sequence.values[index, head], visible)
                mixed /= totals
                by_head[first:end, head] = mixed.reshape(end - first, group, dim)

    def one(self, sequence: SequenceKV, index: int, queries: Any, visible: int) -> Any:
        """One token, queries [kv_head, group, head_dim], over its sequence's first `visible` tokens."""
        xp, (heads, group, dim) = self._xp, queries.shape
        tiles = -(-visible // KEY_TILE)
        scores = self._scores(heads * group, tiles * KEY_TILE).reshape(heads, group, tiles * KEY_TILE)
        by_tile = scores.reshape(heads, group, tiles, KEY_TILE).transpose(0, 2, 1, 3)
        xp.matmul(queries[:, None], sequence.keys[index, :, :tiles], out=by_tile)
        weights = scores[:, :, :visible]
        weights -= weights.max(axis=2, keepdims=True)
        xp.exp(weights, out=weights)
        totals = weights.sum(axis=2, keepdims=True)
        span = max(KEY_TILE, SMALL_PRODUCT // (group * dim))
        values = sequence.values[index]
        mixed = weights[:, :, :span] @ values[:, : min(span, visible)]
        for at in range(span, visible, span):
            mixed += weights[:, :, at : at + span] @ values[:, at : min(at + span, visible)]
        mixed /= totals
        return mixed.reshape(-1)

    def _mix(self, scores: Any, values: Any, visible: int) -> Any:
        """scores [n * group, width] @ values [token, head_dim] over the first `visible`, in small products: measured
        105 GFLOP/s where one product reaches 97."""
        height, width = scores.shape
        rows = MIXED_TOKENS * self._group if height % (MIXED_TOKENS * self._group) == 0 else height
        span = max(KEY_TILE, SMALL_PRODUCT // (rows * self._dim) // KEY_TILE * KEY_TILE)
        blocks = scores.reshape(height // rows, rows, width)
        mixed = blocks[:, :, : min(span, visible)] @ values[: min(span, visible)]
        for at in range(span, visible, span):
            end = min(at + span, visible)
            mixed += blocks[:, :, at:end] @ values[at:end]
        return mixed.reshape(height, self._dim)

    def _exponentiate(self, scores: Any) -> Any:
        """exp in place; returns the sums of the rows."""
        with np.errstate(over="ignore"):
            self._xp.exp(scores, out=scores)
            return scores.sum(axis=1, keepdims=True)

    def _scores(self, height: int, width: int) -> Any:
        """Scratch [height, width], of any content."""
        if self._scratch.size < height * width:
            self._scratch = self._xp.empty(height * width, dtype=self._xp.float32)
        return self._scratch[: height * width].reshape(height, width)
