"""The KV of one running sequence, contiguous. Blocks exist only at its seam: `write_part` and `read_part`.

Threads. A copy thread may call `write_part` and `read_part` while the compute thread runs a layer: the sequence is
append-only, every (layer, token) cell is written once, and each thread touches cells that the other has finished with
(the engine's `before_layer` and `after_layer` are where they agree). Nothing is moved or resized.
"""

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.backend import allocate_zeros, to_host


class SequenceKV:
    """`length` tokens of valid KV out of `capacity`; memory is committed as it is written and returned by `close`."""

    __slots__ = ("_release", "capacity", "kv", "length")

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, capacity_tokens: int, xp: ModuleType = np) -> None:
        if capacity_tokens < 1:
            raise ValueError("a sequence needs room for at least one token")
        # [layer, k/v, token, kv_head, head_dim]: the layout of blocks, so that a layer's part is two contiguous copies.
        self.kv: Any
        self.kv, self._release = allocate_zeros(xp, (layers, 2, capacity_tokens, kv_heads, head_dim))
        self.capacity = capacity_tokens
        self.length = 0

    def write_part(self, layer: int, start: int, part: NDArray[np.float32]) -> None:
        """Store one layer's part of a block, [k/v, n, kv_head, head_dim], at tokens start..start+n."""
        stop = start + part.shape[1]
        self._check_range(start, stop)
        self.kv[layer, :, start:stop] = part

    def read_part(self, layer: int, start: int, stop: int, out: NDArray[np.float32]) -> None:
        """Copy one layer's tokens start..stop into `out`, [k/v, stop - start, kv_head, head_dim].

        `stop` may lie beyond `length`: after `after_layer(l)` a layer can be read while later layers still compute.
        """
        self._check_range(start, stop)
        out[...] = to_host(self.kv[layer, :, start:stop])

    def set_length(self, length: int) -> None:
        if not 0 <= length <= self.capacity:
            raise ValueError(f"length {length} is outside 0..{self.capacity}")
        self.length = length

    def close(self) -> None:
        """Give the memory back to the OS. May be called twice; the sequence is not used afterwards."""
        self.length = self.capacity = 0
        self.kv = None
        self._release()

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.capacity:
            raise ValueError(f"tokens {start}..{stop} are outside the sequence's capacity of {self.capacity}")
