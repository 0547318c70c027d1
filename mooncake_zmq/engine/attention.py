"""Causal attention over one sequence's keys and values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.elsewhere import FarKV, Floats, Partial, no_tokens
from mooncake_zmq.engine.kv_cache import KEY_TILE, SequenceKV
from mooncake_zmq.engine.machine_code.step_layout import LARGEST_TOTAL, SMALLEST_TOTAL
from mooncake_zmq.engine.matrices.panels import SMALL_PRODUCT
from mooncake_zmq.engine.rowwise import Rowwise
from mooncake_zmq.engine.spec import ModelSpec

MIXED_TOKENS = 16  # keys whose scores meet the values in one product; measured 8 to 32: equal
SCORES_ITEMS = 64 * 1024  # scores of one product: heads are taken together while they are shorter, for fewer calls
DEVICE_TILE_TOKENS = 256  # on a GPU large products are fast and launches cost 10 to 30 us each
DEVICE_SCORES_ITEMS = 64 << 20  # 256 MiB of scratch: on a GPU, all heads of a tile over 8k tokens and more


def tile_tokens(xp: Any, spec: ModelSpec) -> int:
    """Return the queries that `Attention.many` takes at a time."""
    if xp is not np:
        return DEVICE_TILE_TOKENS
    fitting = SMALL_PRODUCT // (KEY_TILE * spec.head_dim * (spec.heads // spec.kv_heads))
    return min(64, max(16, fitting // 16 * 16))  # measured flat from 32 to 80, slower beyond


class Attention:
    """Attention for one thread, with its scratch memory. Queries come scaled."""

    def __init__(self, xp: Any, spec: ModelSpec, rowwise: Rowwise) -> None:
        self._xp = xp
        self._on_device = xp is not np
        self._rowwise = rowwise
        self._kv_heads, self._dim = spec.kv_heads, spec.head_dim
        self._group = spec.heads // spec.kv_heads
        self._tile_tokens = tile_tokens(xp, spec)
        self._scores_items = DEVICE_SCORES_ITEMS if self._on_device else SCORES_ITEMS
        self._scratch: Any = xp.empty(0, dtype=xp.float32)
        self._shifted: set[int] = set()
        """Layers whose scores have been too large or too small for exponentials as they are."""

    def many(self, sequence: SequenceKV, index: int, queries: Any, positions: NDArray[np.int64], out: Any) -> None:
        """Compute some tokens, queries [kv_head, n, group, head_dim], at ascending positions, each over all up to itself, in
        layer `index`: a tile of queries and some heads at a time, into the first rows of `out` [rows, heads * head_dim].

        Ordinary scores, within about +-60, need no shift to be exponentiated. Others show in their sums: they are computed
        again, and the layer's are shifted from then on. A GPU shifts always: it is idle while the host looks at sums.
        """
        count = len(positions)
        by_head = out[:count].reshape(count, self._kv_heads, self._group, self._dim)
        with np.errstate(over="ignore", invalid="ignore"):
            shift = self._on_device or index in self._shifted
            totals = self._mix_values(sequence, index, queries, positions, by_head, shift=shift)
            if not self._on_device and not SMALLEST_TOTAL < float(totals.min()) <= float(totals.max()) < LARGEST_TOTAL:
                self._shifted.add(index)
                totals = self._mix_values(sequence, index, queries, positions, by_head, shift=True)
        by_head /= totals

    def _mix_values(
        self, sequence: SequenceKV, index: int, queries: Any, positions: NDArray[np.int64], out: Any, *, shift: bool
    ) -> Any:
        """Sum the values weighted by exponentials of scores into `out` [n, kv_head, group, head_dim]; returns the sums of the
        weights, [n, kv_head, group, 1]."""
        xp, group, dim, count = self._xp, self._group, self._dim, len(out)
        totals = xp.empty((count, self._kv_heads, group, 1), dtype=xp.float32)
        if count:
            self._scores(1, min(self._tile_tokens, count) * group, int(positions[-1]) + 1 + KEY_TILE)  # the largest first
        for first in range(0, count, self._tile_tokens):
            end = min(first + self._tile_tokens, count)
            height, visible = (end - first) * group, int(positions[end - 1]) + 1
            tiles = -(-visible // KEY_TILE)
            at_once = max(1, self._scores_items // (height * tiles * KEY_TILE))
            for head in range(0, self._kv_heads, at_once):
                heads = slice(head, min(head + at_once, self._kv_heads))
                tile = queries[heads, first:end].reshape(-1, 1, height, dim)
                scores = self._scores(len(tile), height, tiles * KEY_TILE)
                by_tile = scores.reshape(len(tile), height, tiles, KEY_TILE).transpose(0, 2, 1, 3)
                xp.matmul(tile, sequence.keys[index, heads, :tiles], out=by_tile)
                by_token = scores.reshape(len(tile), end - first, group, -1)
                sums = self._rowwise.exponentiate(by_token, positions[first:end], shift=shift)
                totals[first:end, heads] = sums.transpose(1, 0, 2, 3)
                mixed = self._mix(scores, sequence.values[index, heads], visible)
                out[first:end, heads] = mixed.reshape(by_token.shape[:3] + (dim,)).transpose(1, 0, 2, 3)
        return totals

    def one(self, sequence: SequenceKV, index: int, queries: Any, visible: int) -> Any:
        """Compute one token, queries [kv_head, group, head_dim], over its sequence's first `visible` tokens."""
        mixed, _, totals = self.part(sequence, index, queries, visible)
        mixed /= totals
        return mixed.reshape(-1)

    def part(self, sequence: SequenceKV, index: int, queries: Any, visible: int) -> tuple[Any, Any, Any]:
        """Compute what `one` does without dividing: return the sums of weighted values [kv_head, group, head_dim], the highest
        scores and the totals of the weights, both [kv_head, group, 1].

        On a GPU the weights meet all values in one product; it serves the few rows of a prefill whose logits are requested, as
        decode has kernels of its own there (`device`).
        """
        xp, (heads, group, dim) = self._xp, queries.shape
        tiles = -(-visible // KEY_TILE)
        scores = self._scores(heads, group, tiles * KEY_TILE)
        by_tile = scores.reshape(heads, group, tiles, KEY_TILE).transpose(0, 2, 1, 3)
        xp.matmul(queries[:, None], sequence.keys[index, :, :tiles], out=by_tile)
        weights = scores[:, :, :visible]
        highest = weights.max(axis=2, keepdims=True)
        weights -= highest
        xp.exp(weights, out=weights)
        totals = weights.sum(axis=2, keepdims=True)
        span = visible if self._on_device else max(KEY_TILE, SMALL_PRODUCT // (group * dim))
        values = sequence.values[index]
        mixed = weights[:, :, :span] @ values[:, : min(span, visible)]
        for at in range(span, visible, span):
            mixed += weights[:, :, at : at + span] @ values[:, at : min(at + span, visible)]
        return mixed, highest, totals

    def parts(self, sequences: Sequence[SequenceKV | FarKV], lengths: Sequence[int], index: int, queries: Floats) -> Partial:
        """Compute one token of each row, queries [n, kv_head, group, head_dim], over the first tokens of its sequence here."""
        result = no_tokens(*queries.shape)
        for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            if isinstance(sequence, SequenceKV):
                with np.errstate(invalid="ignore", over="ignore"):  # queries of rows that failed
                    found = self.part(sequence, index, queries[row], length)
                result.mixed[row], result.states[row, ..., :1], result.states[row, ..., 1:] = found
        return result

    def _mix(self, scores: Any, values: Any, visible: int) -> Any:
        """Multiply scores [head, n * group, width] by values [head, token, head_dim] over the first `visible`, in small
        products: measured 105 GFLOP/s where one product reaches 97. On a GPU in one."""
        heads, height, width = scores.shape
        if self._on_device:
            return scores[:, None, :, :visible] @ values[:, None, :visible]
        rows = MIXED_TOKENS * self._group if height % (MIXED_TOKENS * self._group) == 0 else height
        span = max(KEY_TILE, SMALL_PRODUCT // (rows * self._dim) // KEY_TILE * KEY_TILE)
        blocks = scores.reshape(heads, height // rows, rows, width)
        values = values[:, None, :visible]
        mixed = blocks[:, :, :, : min(span, visible)] @ values[:, :, :span]
        for at in range(span, visible, span):
            mixed += blocks[:, :, :, at : min(at + span, visible)] @ values[:, :, at : at + span]
        return mixed

    def _scores(self, heads: int, height: int, width: int) -> Any:
        """Return scratch [head, height, width], of any content."""
        size = heads * height * width
        if self._scratch.size < size:
            self._scratch = self._xp.empty(size, dtype=self._xp.float32)
        return self._scratch[:size].reshape(heads, height, width)
