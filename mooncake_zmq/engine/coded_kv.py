"""The KV of a sequence whose blocks are coded: parts are encoded as they leave it and decoded as they enter, and with a codec
that `rounds_when_stored` KV is rounded as it is computed."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine import codecs
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.kv.codec import Codec


class CodedSequenceKV(SequenceKV):
    """`SequenceKV` in host memory whose parts are [token, token_bytes] of uint8."""

    __slots__ = ("_codec",)

    def __init__(self, codec: Codec, *, layers: int, kv_heads: int, head_dim: int, capacity_tokens: int) -> None:
        super().__init__(layers=layers, kv_heads=kv_heads, head_dim=head_dim, capacity_tokens=capacity_tokens)
        self._codec = codec

    def write_part(self, layer: int, start: int, part: Any) -> None:
        _, kv_heads, _, head_dim, _ = self.keys.shape
        super().store(layer, start, *codecs.decode(self._codec, part, kv_heads, head_dim))

    def read_part(self, layer: int, start: int, stop: int, out: Any) -> None:
        _, kv_heads, _, head_dim, _ = self.keys.shape
        exact = np.empty((2, stop - start, kv_heads, head_dim), np.float32)
        super().read_part(layer, start, stop, exact)
        codecs.encode(self._codec, exact[0], exact[1], out)

    def first_tokens(self, part: Any, tokens: int) -> Any:
        return part[:tokens]

    def store(self, layer: int, start: int, keys: Any, values: Any) -> None:
        super().store(layer, start, *self._stored(keys, values))

    def scatter(self, layer: int, positions: NDArray[np.int64], keys: Any, values: Any) -> None:
        super().scatter(layer, positions, *self._stored(keys, values))

    def append(self, layer: int, position: int, keys: Any, values: Any) -> None:
        super().append(layer, position, *self._stored(keys, values))

    def _stored(self, keys: Any, values: Any) -> tuple[Any, Any]:
        return codecs.rounded(self._codec, keys, values) if self._codec.rounds_when_stored else (keys, values)
