"""A tiny exact engine for tests and simulations: wrong KV anywhere in a sequence changes its next token."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from mooncake_zmq.engine.kv_cache import KEY_TILE, SequenceKV
from mooncake_zmq.engine.spec import (
    LayerCallback,
    LogitsCallback,
    ModelSpec,
    RowsCallback,
    check_entering,
    check_room,
    check_tokens,
    row_by_row,
)

MODULUS = 1 << 20  # running sums below 2**20 are exact in float32
EOS_ID = 256

TOY_SPEC = ModelSpec(
    name="toy",
    layers=3,
    hidden=4,
    heads=1,
    kv_heads=1,
    head_dim=2,
    ffn=2,
    vocab_size=512,
    max_positions=4096,
    rope_theta=10000.0,
    norm_eps=1e-5,
    tied=True,
    eos_ids=(EOS_ID,),
    bos_id=None,
    fingerprint=xxhash.xxh3_128_hexdigest(b"mooncake_zmq toy engine 2"),
)

# One odd multiplier per cell of a token's KV, [layer, k/v, 1, 1, head_dim], so that no two cells carry the same sums.
_CELL_MULTIPLIER = (np.arange(3 * 2 * 2, dtype=np.int64).reshape(3, 2, 1, 1, 2) * 40503 + 10007) | 1


class ToyEngine:
    """A tiny exact engine: KV of token i = KV of token i-1 (read from the cache) + f(token, i, cell), modulo 2**20; logits hash
    all KV.

    Between two layers a token's hidden state is its id, and in a chunk's last row also the hash of the KV of all layers before.
    Bitwise the same however a prompt is chunked or batched. `delay_s_per_token` sleeps, to stand for compute.
    """

    def __init__(self, *, delay_s_per_token: float = 0.0, spec: ModelSpec = TOY_SPEC) -> None:
        self.spec = spec
        self._delay_s_per_token = delay_s_per_token

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
        tokens = np.asarray(tokens, dtype=np.int32)
        check_room(sequence, len(tokens))
        check_tokens(tokens, self.spec.vocab_size)
        start, stop = sequence.length, sequence.length + len(tokens)
        # All layers are one step where no caller waits between them: a simulation runs thousands of decode steps, and at
        # the beginning of a sequence no layer has anything to read.
        at_beginning = start == 0 and not self._delay_s_per_token
        whole = at_beginning or (before_layer is None and after_layer is None)
        for layer in (slice(None),) if whole else (slice(index, index + 1) for index in range(self.spec.layers)):
            for index in range(self.spec.layers)[layer]:
                if before_layer:
                    before_layer(index)
            self._append(sequence, layer, start, tokens)
            for index in range(self.spec.layers)[layer]:
                if after_layer:
                    after_layer(index)
        sequence.length = stop
        if logits_at is None:
            return None
        lengths = [start + range(len(tokens))[at] + 1 for at in logits_at]
        return row_by_row(
            (self._logits(self._hash(sequence, range(self.spec.layers), length)) for length in lengths), on_logits
        )

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
        tokens, before = (entering, 0) if layers.start == 0 else unpacked(entering)
        start, stop = sequence.length, sequence.length + len(tokens)
        for layer in layers:
            if before_layer:
                before_layer(layer)
            self._append(sequence, slice(layer, layer + 1), start, tokens)
            if after_layer:
                after_layer(layer)
        sequence.length = stop
        digest = self._hash(sequence, layers, stop, before)
        if layers.stop < self.spec.layers:
            return packed(tokens, digest, self.spec.hidden)
        return self._logits(digest)[None] if logits else None

    def decode(self, sequences: list[SequenceKV], tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        if len(sequences) != len(tokens):
            raise ValueError("decode needs one token for each sequence")
        result = np.empty((len(sequences), self.spec.vocab_size), dtype=np.float32)
        for row, sequence in enumerate(sequences):
            logits = self.prefill(sequence, tokens[row : row + 1])
            assert logits is not None
            result[row] = logits[0]
        return result

    def _append(self, sequence: SequenceKV, layers: slice, start: int, tokens: NDArray[np.int32]) -> None:
        positions = np.arange(start, start + len(tokens), dtype=np.int64) + sequence.dropped
        steps = (tokens.astype(np.int64) + 1) * 7919 + (positions + 1) * 104729
        steps ^= steps >> 7
        cells = steps[:, None, None] * _CELL_MULTIPLIER[layers]
        if start:
            tile, column = divmod(start - 1, KEY_TILE)
            cells[:, 0, 0] += sequence.keys[layers, :, tile, :, column].astype(np.int64)
            cells[:, 1, 0] += sequence.values[layers, :, start - 1].astype(np.int64)
        if len(tokens) > 1:
            np.cumsum(cells, axis=2, out=cells)
        kv = (cells & (MODULUS - 1)).astype(np.float32)
        if len(tokens) > 1:
            for offset, layer in enumerate(range(self.spec.layers)[layers]):
                sequence.store(layer, start, kv[offset, 0], kv[offset, 1])
        else:
            tile, column = divmod(start, KEY_TILE)
            sequence.keys[layers, :, tile, :, column] = kv[:, 0, 0]
            sequence.values[layers, :, start] = kv[:, 1, 0]
        if self._delay_s_per_token:
            time.sleep(self._delay_s_per_token * len(tokens) * len(cells) / self.spec.layers)

    def _hash(self, sequence: SequenceKV, layers: range, length: int, before: int = 0) -> int:
        """Return 64 bits of all KV of these layers, after those that hash to `before`."""
        tile, column = divmod(length, KEY_TILE)
        for layer in layers:
            digest = xxhash.xxh3_64(seed=before)
            digest.update(memoryview(sequence.values[layer, 0, :length]))
            digest.update(memoryview(sequence.keys[layer, 0, :tile]))
            if column:
                digest.update(sequence.keys[layer, 0, tile, :, :column].tobytes())
            before = digest.intdigest()
        return before

    def _logits(self, digest: int) -> NDArray[np.float32]:
        bits = np.random.Philox(key=digest).random_raw(self.spec.vocab_size)
        return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def packed(tokens: NDArray[np.int32], digest: int, width: int) -> NDArray[np.float32]:
    """Return hidden states [n, width]: a token, and in the last row the digest in three numbers that float32 holds exactly."""
    if width < 4:
        raise NotImplementedError(f"hidden states of {width} numbers hold too little to compute this model in stages")
    hidden = np.zeros((len(tokens), width), dtype=np.float32)
    hidden[:, 0] = tokens
    hidden[-1, 1:4] = [digest >> shift & 0xFFFFFF for shift in (0, 24, 48)]
    return hidden


def unpacked(hidden: NDArray[np.float32]) -> tuple[NDArray[np.int32], int]:
    """Return tokens and digest from their hidden states."""
    limbs = hidden[-1, 1:4].astype(np.int64).tolist()
    return hidden[:, 0].astype(np.int32), sum(limb << shift for limb, shift in zip(limbs, (0, 24, 48), strict=True))
