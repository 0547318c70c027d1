"""A Llama-family decoder: chunked prefill over a cached prefix, and batched decode. float32, one array namespace.

Products are kept small on purpose: below SMALL_PRODUCT multiply-adds OpenBLAS (on AVX-512) reads both operands in place
instead of packing copies of them. Weights lie in panels of 64 columns and rows are taken in chunks to fit. On other CPUs
and libraries the same code is merely an ordinary blocked product. These kernels use one thread: an engine process
computes on one core, and more cores are used by more processes.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.backend import array_namespace, to_host
from mooncake_zmq.engine.kv_cache import KEY_TILE, SequenceKV
from mooncake_zmq.engine.spec import LayerCallback, ModelSpec, check_room, check_tokens

PANEL_COLUMNS = 64  # measured at batch 4 and 8 against 32, 128 and 192: fastest or equal
SMALL_PRODUCT = 1_000_000  # rows * columns * depth; measured just above it: half the speed
SMALLEST_TOTAL, LARGEST_TOTAL = 1e-26, 1e30  # of a row of exponentials, for softmax without a shift: exp(-60), exp(69)


class Llama:
    """Implements `Engine`. `tensors` are float32 as `weights` stores them, and are never written."""

    def __init__(self, spec: ModelSpec, tensors: dict[str, NDArray[np.float32]], *, device: str = "cpu") -> None:
        xp: Any = array_namespace(device)
        self.spec = spec
        self._xp = xp
        self._tensors: dict[str, Any] = {name: xp.asarray(tensor) for name, tensor in tensors.items()}
        self._layers = [_Layer(self._tensors, layer) for layer in range(spec.layers)]
        self._group = spec.heads // spec.kv_heads
        self._query_width = spec.heads * spec.head_dim
        self._kv_width = spec.kv_heads * spec.head_dim
        fitting = SMALL_PRODUCT // (KEY_TILE * spec.head_dim * self._group)
        self._tile_tokens = min(64, max(16, fitting // 16 * 16))  # measured flat from 32 to 80, slower beyond
        # What a tile of queries may not see of the keys from its own first token on.
        future = np.triu(np.ones((self._tile_tokens, self._tile_tokens + KEY_TILE), dtype=bool), k=1)
        self._causal_mask: Any = xp.asarray(np.where(future, -np.inf, 0.0).astype(np.float32))

    def new_sequence(self, capacity_tokens: int) -> SequenceKV:
        spec = self.spec
        return SequenceKV(
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            capacity_tokens=capacity_tokens,
            xp=self._xp,
        )

    # ------------------------------------------------------------------------------------------------------- prefill

    def prefill(
        self,
        sequence: SequenceKV,
        tokens: NDArray[np.int32],
        *,
        before_layer: LayerCallback | None = None,
        after_layer: LayerCallback | None = None,
        logits_at: Sequence[int] | None = (-1,),
    ) -> NDArray[np.float32] | None:
        tokens = np.asarray(tokens, dtype=np.int32)
        count, start = len(tokens), sequence.length
        check_room(sequence, count)
        check_tokens(tokens, self.spec.vocab_size)
        rows = None if logits_at is None else [range(count)[at] for at in logits_at]
        work = _Workspace(self._xp, self.spec, count)
        rope = self._rope_tables(np.arange(start, start + count))
        work.hidden[:count] = self._embed(tokens)
        for index, layer in enumerate(self._layers):
            self._project(work, layer, count)
            queries, keys, values = self._rotate(work, rope, count)
            if before_layer:
                before_layer(index)
            sequence.store(index, start, keys, values)
            if after_layer:
                after_layer(index)
            if index == self.spec.layers - 1:
                break
            self._attend(work, sequence, index, queries, start, count)
            self._finish_layer(work, layer, count)
        # The last layer's output is needed only where logits are asked: 1/30 of the work of SmolLM2-135M.
        result = None if rows is None else self._last_rows(sequence, work, queries, start, rows)
        sequence.length = start + count
        return result

    def _last_rows(
        self, sequence: SequenceKV, work: "_Workspace", queries: Any, start: int, rows: list[int]
    ) -> NDArray[np.float32]:
        """Finish the last layer for some rows of a prefill and return their logits."""
        last = self.spec.layers - 1
        few = _Workspace(self._xp, self.spec, max(len(rows), 1))
        for target, row in enumerate(rows):
            few.hidden[target] = work.hidden[row]
            few.attended[target] = self._attend_one(sequence, last, queries[:, row], start + row + 1)
        self._finish_layer(few, self._layers[last], len(rows))
        return self._logits(few, len(rows))

    def _attend(self, work: "_Workspace", sequence: SequenceKV, index: int, queries: Any, start: int, count: int) -> None:
        """Causal attention of `count` new tokens over the whole sequence, a tile of queries and a head at a time.

        Two of softmax's five passes over the scores find and take off each row's maximum. Ordinary scores, within about
        +-60, do not need it; leaving it out, unless a sum shows otherwise, measured a tenth of attention.
        """
        xp, spec, group, dim = self._xp, self.spec, self._group, self.spec.head_dim
        out = work.attended[:count].reshape(count, spec.kv_heads, group, dim)
        scratch = work.scores(min(self._tile_tokens, count) * group, start + count)
        for first in range(0, count, self._tile_tokens):
            end = min(first + self._tile_tokens, count)
            height, visible = (end - first) * group, start + end
            tiles = -(-visible // KEY_TILE)
            width = tiles * KEY_TILE
            scores = scratch[: height * width].reshape(height, width)
            scores_by_tile = scores.reshape(height, tiles, KEY_TILE).transpose(1, 0, 2)
            own = scores.reshape(end - first, group, width)[:, :, start + first :]
            mask = self._causal_mask[: end - first, None, : own.shape[2]]
            for head in range(spec.kv_heads):
                tile = queries[head, first:end].reshape(height, dim)
                xp.matmul(tile, sequence.keys[index, head, :tiles], out=scores_by_tile)
                own += mask
                totals = self._exponentiate(scores)
                if not SMALLEST_TOTAL < float(totals.min()) <= float(totals.max()) < LARGEST_TOTAL:
                    xp.matmul(tile, sequence.keys[index, head, :tiles], out=scores_by_tile)
                    own += mask
                    scores -= scores.max(axis=1, keepdims=True)
                    totals = self._exponentiate(scores)
                mixed = scores[:, :visible] @ sequence.values[index, head, :visible]
                mixed /= totals
                out[first:end, head] = mixed.reshape(end - first, group, dim)

    def _exponentiate(self, scores: Any) -> Any:
        """exp in place; returns the sums of the rows."""
        with np.errstate(over="ignore"):
            self._xp.exp(scores, out=scores)
            return scores.sum(axis=1, keepdims=True)

    # -------------------------------------------------------------------------------------------------------- decode

    def decode(self, sequences: list[SequenceKV], tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        tokens = np.asarray(tokens, dtype=np.int32)
        count = len(sequences)
        if count != len(tokens):
            raise ValueError("decode needs one token for each sequence")
        for sequence in sequences:
            check_room(sequence, 1)
        check_tokens(tokens, self.spec.vocab_size)
        positions = [sequence.length for sequence in sequences]
        work = _Workspace(self._xp, self.spec, count)
        rope = self._rope_tables(np.array(positions))
        work.hidden[:count] = self._embed(tokens)
        for index, layer in enumerate(self._layers):
            self._project(work, layer, count)
            queries, keys, values = self._rotate(work, rope, count)
            for row, sequence in enumerate(sequences):
                position = positions[row]
                tile, column = divmod(position, KEY_TILE)
                sequence.keys[index, :, tile, :, column] = keys[row]
                sequence.values[index, :, position] = values[row]
                work.attended[row] = self._attend_one(sequence, index, queries[:, row], position + 1)
            self._finish_layer(work, layer, count)
        result = self._logits(work, count)
        for sequence in sequences:
            sequence.length += 1
        return result

    def _attend_one(self, sequence: SequenceKV, index: int, queries: Any, visible: int) -> Any:
        """Attention of one token, queries [kv_head, group, head_dim], over its sequence's first `visible` tokens."""
        xp, (heads, group, dim) = self._xp, queries.shape
        tiles = -(-visible // KEY_TILE)
        scores = xp.empty((heads, group, tiles * KEY_TILE), dtype=xp.float32)
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

    # -------------------------------------------------------------------------------------------- what both are made of

    def _embed(self, tokens: NDArray[np.int32]) -> Any:
        ids = self._xp.asarray(tokens)
        if self.spec.tied:
            return self._tensors["head"][ids // PANEL_COLUMNS, :, ids % PANEL_COLUMNS]
        return self._tensors["embed"][ids]

    def _rope_tables(self, positions: NDArray[np.int64]) -> tuple[Any, Any]:
        """exp(i * angle), [n, 1, head_dim / 2], for queries (which it also scales) and keys.

        Angles in float32 steps, as the reference computes them.
        """
        xp = self._xp
        angles = xp.asarray(positions, dtype=xp.float32)[:, None, None] * self._tensors["inv_freq"]
        keys = (xp.cos(angles) + 1j * xp.sin(angles)).astype(xp.complex64)
        return keys * np.float32(1.0 / math.sqrt(self.spec.head_dim)), keys

    def _project(self, work: "_Workspace", layer: "_Layer", count: int) -> None:
        self._normalize(work.hidden, layer.attn_norm, work.normed, count)
        self._linear(work.normed, layer.qkv, work.qkv, count)

    def _rotate(self, work: "_Workspace", rope: tuple[Any, Any], count: int) -> tuple[Any, Any, Any]:
        """(queries [kv_head, n, group, head_dim], keys, values [n, kv_head, head_dim]), rotated; queries also scaled.

        `weights` stores the rows of Q and K as rotation pairs side by side, so that a rotation is a complex product.
        """
        xp, spec, pairs = self._xp, self.spec, self.spec.head_dim // 2
        rope_queries, rope_keys = rope
        query_end, key_end = self._query_width, self._query_width + self._kv_width
        qkv = work.qkv[:count]
        pairs_of_queries = qkv[:, :query_end].view(xp.complex64).reshape(count, spec.kv_heads, self._group, pairs)
        pairs_of_keys = qkv[:, query_end:key_end].view(xp.complex64).reshape(count, spec.kv_heads, pairs)
        queries = xp.empty((spec.kv_heads, count, self._group, pairs), dtype=xp.complex64)
        xp.multiply(pairs_of_queries.transpose(1, 0, 2, 3), rope_queries, out=queries)
        keys = pairs_of_keys * rope_keys
        values = qkv[:, key_end : key_end + self._kv_width].reshape(count, spec.kv_heads, spec.head_dim)
        return queries.view(xp.float32), keys.view(xp.float32), values

    def _finish_layer(self, work: "_Workspace", layer: "_Layer", count: int) -> None:
        """Output projection and feed-forward, each added to the hidden state."""
        xp, ffn, hidden = self._xp, self.spec.ffn, self.spec.hidden
        self._linear(work.attended, layer.out, work.delta, count)
        work.hidden[:count] += work.delta[:count, :hidden]
        self._normalize(work.hidden, layer.ffn_norm, work.normed, count)
        self._linear(work.normed, layer.gate_up, work.gate_up, count)
        gate, up = work.gate_up[:count, :ffn], work.gate_up[:count, ffn : 2 * ffn]
        active = work.active[:count]  # silu(gate) * up = gate / (1 + exp(-gate)) * up
        xp.negative(gate, out=active)
        with np.errstate(over="ignore"):
            xp.exp(active, out=active)
        active += np.float32(1.0)
        xp.divide(gate, active, out=active)
        active *= up
        self._linear(work.active, layer.down, work.delta, count)
        work.hidden[:count] += work.delta[:count, :hidden]

    def _logits(self, work: "_Workspace", count: int) -> NDArray[np.float32]:
        head = self._tensors["head"]
        self._normalize(work.hidden, self._tensors["final_norm"], work.normed, count)
        out = self._xp.empty((len(work.normed), len(head) * PANEL_COLUMNS), dtype=self._xp.float32)
        self._linear(work.normed, head, out, count)
        logits: NDArray[np.float32] = to_host(out[:count, : self.spec.vocab_size])
        return logits

    def _normalize(self, x: Any, weight: Any, out: Any, count: int) -> None:
        x, out = x[:count], out[:count]
        mean_square = self._xp.einsum("ij,ij->i", x, x) * np.float32(1.0 / self.spec.hidden)
        scale = np.float32(1.0) / self._xp.sqrt(mean_square + np.float32(self.spec.norm_eps))
        self._xp.multiply(x, scale[:, None], out=out)
        out *= weight

    def _linear(self, x: Any, panels: Any, out: Any, count: int) -> None:
        """out = x @ weights for the first `count` rows; the rows that round them up to whole chunks are scratch."""
        chunks, height = row_chunks(count, x.shape[1])
        rows = chunks * height
        by_panel = out[:rows].reshape(chunks, height, len(panels), PANEL_COLUMNS).transpose(2, 0, 1, 3)
        self._xp.matmul(x[:rows].reshape(1, chunks, height, x.shape[1]), panels[:, None], out=by_panel)


class _Layer:
    """One layer's tensors under their names."""

    attn_norm: Any
    down: Any
    ffn_norm: Any
    gate_up: Any
    out: Any
    qkv: Any

    def __init__(self, tensors: dict[str, Any], layer: int) -> None:
        for name in self.__annotations__:
            setattr(self, name, tensors[f"{layer}.{name}"])


class _Workspace:
    """The activations of one step, reused by all its layers. Zeroed, since chunks of rows reach beyond the last."""

    def __init__(self, xp: Any, spec: ModelSpec, count: int) -> None:
        query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        depths = (spec.hidden, query, spec.ffn)
        rows = max(chunks * height for chunks, height in (row_chunks(count, depth) for depth in depths))

        def zeros(width: int) -> Any:
            return xp.zeros((rows, width), dtype=xp.float32)

        def panelled(width: int) -> Any:
            return zeros(-(-width // PANEL_COLUMNS) * PANEL_COLUMNS)

        self.hidden = zeros(spec.hidden)
        self.normed = zeros(spec.hidden)
        self.qkv = panelled(query + 2 * kv)
        self.attended = zeros(query)
        self.delta = panelled(spec.hidden)
        self.gate_up = panelled(2 * spec.ffn)
        self.active = zeros(spec.ffn)
        self._xp = xp
        self._scores: Any = None

    def scores(self, height: int, visible: int) -> Any:
        """Flat scratch for one tile of attention scores; the largest is asked first in every layer."""
        if self._scores is None:
            self._scores = self._xp.empty(height * (visible + KEY_TILE), dtype=self._xp.float32)
        return self._scores


def row_chunks(count: int, depth: int) -> tuple[int, int]:
    """(chunks, height): cut `count` rows into equal chunks, small enough for the kernels and with few rows of padding.

    Heights are even: measured at one row, two rows with one of them unused read the weights at 30 GB/s instead of 22.
    """
    limit = SMALL_PRODUCT // (PANEL_COLUMNS * depth) // 2 * 2
    if limit < 2:
        return 1, count
    heights = range(max(2, limit // 2 // 2 * 2), limit + 1, 2) if count > limit else (count + count % 2,)
    height = min(heights, key=lambda rows: (-(-count // rows) * rows, -rows))
    return -(-count // height), height
