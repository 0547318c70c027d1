"""The KV of a sequence whose blocks are coded: parts are encoded as they leave it and decoded as they enter, and with a codec
that `rounds_when_stored` KV is rounded as it is computed."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine import codecs
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.offsets import Offsets, Positions
from mooncake_zmq.kv.codec import Codec


class CodedSequenceKV(SequenceKV):
    """`SequenceKV` in host memory whose parts are [token, token_bytes] of uint8. It begins at position 0: its KV is not lent.
    `offsets`: what is coded is the KV without them; None: the model has none."""

    __slots__ = ("_codec", "_least", "offsets")

    def __init__(
        self,
        codec: Codec,
        offsets: Offsets | None = None,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity_tokens: int,
    ) -> None:
        super().__init__(layers=layers, kv_heads=kv_heads, head_dim=head_dim, capacity_tokens=capacity_tokens)
        self._codec, self.offsets = codec, offsets
        self._least = offsets.least_exponents(codec) if offsets else codecs.LEAST_EXPONENTS

    def write_part(self, layer: int, start: int, part: Any) -> None:
        _, kv_heads, _, head_dim, _ = self.keys.shape
        keys, values = codecs.decode(self._codec, part, kv_heads, head_dim)
        super().store(layer, start, *self._plus_offsets(layer, np.arange(start, start + len(part)), keys, values))

    def read_part(self, layer: int, start: int, stop: int, out: Any) -> None:
        _, kv_heads, _, head_dim, _ = self.keys.shape
        exact = np.empty((2, stop - start, kv_heads, head_dim), np.float32)
        super().read_part(layer, start, stop, exact)
        keys, values = self._without_offsets(layer, np.arange(start, stop), exact[0], exact[1])
        codecs.encode(self._codec, keys, values, out, self._least)

    def first_tokens(self, part: Any, tokens: int) -> Any:
        return part[:tokens]

    def store(self, layer: int, start: int, keys: Any, values: Any) -> None:
        super().store(layer, start, *self._stored(layer, np.arange(start, start + len(keys)), keys, values))

    def scatter(self, layer: int, positions: NDArray[np.int64], keys: Any, values: Any) -> None:
        super().scatter(layer, positions, *self._stored(layer, positions, keys, values))

    def append(self, layer: int, position: int, keys: Any, values: Any) -> None:
        super().append(layer, position, *self._stored(layer, position, keys, values))

    def _stored(self, layer: int, positions: Positions, keys: Any, values: Any) -> tuple[Any, Any]:
        if not self._codec.rounds_when_stored:
            return keys, values
        coded = codecs.rounded(self._codec, *self._without_offsets(layer, positions, keys, values), self._least)
        return self._plus_offsets(layer, positions, *coded)

    def _without_offsets(self, layer: int, positions: Positions, keys: Any, values: Any) -> tuple[Any, Any]:
        if self.offsets is None:
            return keys, values
        of_keys, of_values = self.offsets.at(layer, positions)
        keys = keys - of_keys
        return keys if self.offsets.divisors is None else keys * self.offsets.divisors[layer, 1], values - of_values

    def _plus_offsets(self, layer: int, positions: Positions, keys: Any, values: Any) -> tuple[Any, Any]:
        if self.offsets is None:
            return keys, values
        of_keys, of_values = self.offsets.at(layer, positions)
        keys = keys if self.offsets.divisors is None else keys * self.offsets.divisors[layer, 0]
        return keys + of_keys, values + of_values
