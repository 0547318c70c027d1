"""An engine that sleeps for the time which a cost model states: real KV in real memory, no weights, hardly any CPU.

KV is a running sum over the tokens so far, a chain of its own for each layer, so a block's bytes and the next token are a pure
function of the tokens (and of the seed, in sampling), however they are chunked, batched, stored or moved. A wrong last token's
KV in any layer changes what follows.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.engine.kv_cache import KEY_TILE, SequenceKV
from mooncake_zmq.engine.spec import (
    LayerCallback,
    LogitsCallback,
    ModelSpec,
    RowsCallback,
    check_batch,
    check_entering,
    check_room,
    check_tokens,
    row_by_row,
)
from mooncake_zmq.engine.toy import packed, unpacked

MASK = (1 << 20) - 1
"""Sums below 2**20 are exact in float32."""


class ModelledEngine:
    """An engine over a cost model. A prefill chunk takes `costs.compute_s`, in equal shares by layer; a step `costs.step_s`.
    The wait for a layer of a prefix is added, as it does where loading is slower than computing."""

    def __init__(
        self,
        spec: ModelSpec,
        costs: Costs,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.spec = spec
        self.costs = costs
        self._now, self._sleep = now, sleep
        numbers = np.arange(2 * spec.layers, dtype=np.int64).reshape(spec.layers, 2)
        self._multipliers = (numbers * 40503 + 10007) | 1
        """[layer, k/v], odd, so that no two sums are alike"""
        self._scores = np.random.Generator(np.random.Philox(key=1)).random(spec.vocab_size, dtype=np.float32)

    def new_sequence(self, capacity_tokens: int) -> SequenceKV:
        spec = self.spec
        return SequenceKV(layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, capacity_tokens=capacity_tokens)

    def prefill(
        self,
        sequence: SequenceKV,
        tokens: NDArray[np.int32],
        *,
        before_layer: LayerCallback | None = None,
        after_layer: LayerCallback | None = None,
        logits_at: Sequence[int] | None = (-1,),
        on_logits: LogitsCallback | None = None,
        on_rows: RowsCallback | None = None,
    ) -> NDArray[np.float32] | None:
        check_room(sequence, len(tokens))
        check_tokens(tokens, self.spec.vocab_size)
        start, stop = sequence.length, sequence.length + len(tokens)
        steps = _steps(np.asarray(tokens, dtype=np.int64), np.arange(start, stop, dtype=np.int64))
        self._run(sequence, range(self.spec.layers), start, steps, before_layer, after_layer)
        sequence.length = stop
        if logits_at is None:
            return None
        rows = (self._logits(self._mixed(sequence, start + range(len(tokens))[at])) for at in logits_at)
        return row_by_row(rows, on_logits)

    def prefill_layers(
        self,
        sequence: SequenceKV,
        entering: NDArray[Any],
        layers: range,
        *,
        before_layer: LayerCallback | None = None,
        after_layer: LayerCallback | None = None,
        logits: bool = False,
    ) -> NDArray[np.float32] | None:
        check_room(sequence, len(entering))
        check_entering(self.spec, entering, layers)
        tokens, mixed = (entering, 0) if layers.start == 0 else unpacked(entering)
        start, stop = sequence.length, sequence.length + len(tokens)
        steps = _steps(np.asarray(tokens, dtype=np.int64), np.arange(start, stop, dtype=np.int64))
        self._run(sequence, layers, start, steps, before_layer, after_layer)
        sequence.length = stop
        mixed += self._mixed(sequence, stop - 1, layers)
        if layers.stop < self.spec.layers:
            return packed(tokens, mixed, self.spec.hidden)
        return self._logits(mixed)[None] if logits else None

    def _run(
        self,
        sequence: SequenceKV,
        layers: range,
        start: int,
        steps: NDArray[np.int64],
        before_layer: LayerCallback | None,
        after_layer: LayerCallback | None,
    ) -> None:
        """Compute some layers of a chunk, each in its share of the time that the costs state for it."""
        layer_s = self.costs.compute_s(start + len(steps), start) / self.spec.layers
        due = self._now()
        for layer in layers:
            if before_layer:
                asked_at = self._now()
                before_layer(layer)
                due += self._now() - asked_at
            self._append(sequence, layer, start, steps)
            due += layer_s
            self._sleep_until(due)
            if after_layer:
                after_layer(layer)

    def decode(self, sequences: list[SequenceKV], tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        began_at = self._now()
        check_batch(sequences, tokens, self.spec.vocab_size)
        logits = np.empty((len(sequences), self.spec.vocab_size), dtype=np.float32)
        for row, sequence in enumerate(sequences):
            self._append_one(sequence, int(tokens[row]))
            logits[row] = self._logits(self._mixed(sequence, sequence.length - 1))
        context_tokens = sum(sequence.length for sequence in sequences)
        self._sleep_until(began_at + self.costs.step_s(len(sequences), context_tokens))
        return logits

    def _sleep_until(self, due: float) -> None:
        left_s = due - self._now()
        if left_s > 0:
            self._sleep(left_s)

    def _append(self, sequence: SequenceKV, layer: int, start: int, steps: NDArray[np.int64]) -> None:
        """Append KV of one layer for the tokens of `steps`: the sums continue from the token before."""
        sums = np.cumsum((steps[:, None] * self._multipliers[layer]) & MASK, axis=0)
        if start:
            sums += self._sums_at(sequence, start - 1)[layer]
        cells = (sums & MASK).astype(np.float32)
        shape = (len(steps), self.spec.kv_heads, self.spec.head_dim)
        keys, values = (np.broadcast_to(cells[:, which, None, None], shape) for which in (0, 1))
        sequence.store(layer, start, keys, values)

    def _append_one(self, sequence: SequenceKV, token: int) -> None:
        """Append KV of all layers for one token."""
        at = sequence.length
        step = _steps(np.array([token], dtype=np.int64), np.array([sequence.position], dtype=np.int64))
        sums = (step * self._multipliers) & MASK
        if at:
            sums += self._sums_at(sequence, at - 1)
        cells = (sums & MASK).astype(np.float32)
        tile, column = divmod(at, KEY_TILE)
        sequence.keys[:, :, tile, :, column] = cells[:, 0, None, None]
        sequence.values[:, :, at] = cells[:, 1, None, None]
        sequence.length = at + 1

    def _sums_at(self, sequence: SequenceKV, at: int) -> Any:
        """Return [layer, k/v] of the token at position `at`."""
        tile, column = divmod(at, KEY_TILE)
        pair = (sequence.keys[:, 0, tile, 0, column], sequence.values[:, 0, at, 0])
        return np.stack(pair, axis=1).astype(np.int64)

    def _mixed(self, sequence: SequenceKV, at: int, layers: range | None = None) -> int:
        """Return the sum of the KV of the token at `at` over these layers, or all: a sum, so that stages can continue it."""
        of = slice(None) if layers is None else slice(layers.start, layers.stop)
        return int((self._sums_at(sequence, at)[of] * self._multipliers[of]).sum())

    def _logits(self, mixed: int) -> NDArray[np.float32]:
        """Return one row of scores for all tokens, rotated by the sum over the last token's KV."""
        shift = xxhash.xxh3_64_intdigest(mixed.to_bytes(8, "little")) % self.spec.vocab_size
        return np.concatenate((self._scores[shift:], self._scores[:shift]))


def _steps(tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    steps = (tokens + 1) * 7919 + (positions + 1) * 104729
    return (steps ^ (steps >> 7)) & MASK
