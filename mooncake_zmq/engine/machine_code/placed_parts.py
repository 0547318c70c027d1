"""The KV of a sequence into which machine code places the parts of blocks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.coded_kv import CodedSequenceKV
from mooncake_zmq.engine.kv_cache import Part, SequenceKV
from mooncake_zmq.engine.machine_code.object_code import MachineCode
from mooncake_zmq.engine.machine_code.step_layout import (
    LEAST_OF_KEYS,
    LEAST_OF_VALUES,
    ROTATES_KEYS,
    ROTATES_VALUES,
    TOGETHER,
    Coding,
    What,
)
from mooncake_zmq.engine.offsets import Offsets
from mooncake_zmq.kv.codec import Codec

ITEM_BYTES = 4
NO_CACHE = (0, 0, 1, -1, 0, 0, 0, 0, 0, 0, 0, 0)
"""The row of `cache_row` of a sequence that has no KV here: nothing is stored, and there are no tokens to attend to."""


class PlacingSequenceKV(SequenceKV):
    """`SequenceKV` whose parts machine code places, several in one call without the interpreter's lock. For 64 blocks of 32
    tokens and 30 layers in shared memory, 94 MB, it takes 19 ms (2-core EPYC); NumPy takes 33, mostly for transposed keys."""

    __slots__ = ("_code",)

    parts_at_once = 8
    """As in `SequenceKV`: so many parts of 48 KB are still in the CPU's cache when they are hashed."""

    def __init__(self, code: MachineCode, *, layers: int, kv_heads: int, head_dim: int, capacity_tokens: int) -> None:
        super().__init__(layers=layers, kv_heads=kv_heads, head_dim=head_dim, capacity_tokens=capacity_tokens)
        self._code = code

    def write_part(self, layer: int, start: int, part: Any) -> None:
        self.write_parts(((layer, start, part.shape[1], part),))

    def write_parts(self, parts: Sequence[Part]) -> None:
        for _, start, tokens, _ in parts:
            self._check_range(start, start + tokens)
        layers, kv_heads, _, head_dim, _ = self.keys.shape
        strides = (kv_heads * head_dim * ITEM_BYTES, head_dim * ITEM_BYTES, ITEM_BYTES)
        shape = (kv_heads, head_dim)
        numbers = [*cache_row(self), *_parts_row(self, parts)]
        for layer, start, tokens, part in parts:
            is_dense = part.strides[1:] == strides and part.shape[2:] == shape and part.dtype == np.float32 and len(part) == 2
            if not (is_dense and tokens <= part.shape[1] and 0 <= layer < layers):
                for each in parts:
                    super().write_part(*each[:2], each[3][:, : each[2]])
                return
            keys_at = part.__array_interface__["data"][0]
            numbers += (keys_at, keys_at + part.strides[0], layer, start, tokens)
        table: NDArray[np.int64] = np.array(numbers, np.int64)
        self._code(What.PLACE_PARTS, table.ctypes.data)


class PlacingCodedKV(CodedSequenceKV):
    """`CodedSequenceKV` whose parts machine code encodes and decodes."""

    __slots__ = ("_code", "_number", "_token_bytes", "_turns")

    parts_at_once = 32
    """Coded parts are a fourth to a seventh of exact ones; with 8 in a call, calls took a tenth of the time."""

    def __init__(self, code: MachineCode, codec: Codec, offsets: Offsets | None = None, **shape: int) -> None:
        """`code`: of `object_code.CODECS`; the others as in `CodedSequenceKV`."""
        super().__init__(codec, offsets, **shape)
        self._code = code
        self._turns = offsets.turns(self.capacity) if offsets else None
        self._number = codec.key_bits | codec.value_bits << 4
        self._number |= codec.rotates_keys * ROTATES_KEYS | codec.rotates_values * ROTATES_VALUES
        self._number |= self._least[0] << LEAST_OF_KEYS | self._least[1] << LEAST_OF_VALUES
        self._token_bytes = codec.token_bytes(shape["kv_heads"], shape["head_dim"])

    def coding(self) -> tuple[int, ...]:
        """Return what `cache_row` has from CODEC on."""
        round_at = self._code.address if self._codec.rounds_when_stored else 0
        if self.offsets is None or self._turns is None:
            return self._number, round_at, 0, 0, 0, 0
        arrays = (self.offsets.biases, *self._turns, self.offsets.divisors)
        return self._number, round_at, *(0 if each is None else each.ctypes.data for each in arrays)

    def write_part(self, layer: int, start: int, part: Any) -> None:
        self.write_parts(((layer, start, len(part), part),))

    def write_parts(self, parts: Sequence[Part]) -> None:
        self._run(Coding.DECODE_PARTS, parts)

    def read_part(self, layer: int, start: int, stop: int, out: Any) -> None:
        self.read_parts(((layer, start, stop - start, out),))

    def read_parts(self, parts: Sequence[Part]) -> None:
        self._run(Coding.ENCODE_PARTS, parts)

    def _run(self, what: Coding, parts: Sequence[Part]) -> None:
        layers, _, _, head_dim, _ = self.keys.shape
        scratch: NDArray[np.float32] = np.empty((TOGETHER, head_dim), np.float32)
        numbers = [*cache_row(self), *_parts_row(self, parts, scratch.ctypes.data)]
        for layer, start, tokens, part in parts:
            self._check_range(start, start + tokens)
            is_dense = part.strides == (self._token_bytes, 1) and part.dtype == np.uint8
            if not (is_dense and tokens <= len(part) and 0 <= layer < layers):
                raise ValueError(f"a coded part is {self._token_bytes} bytes a token, of one of {layers} layers")
            numbers += (part.__array_interface__["data"][0], layer, start, tokens)
        table: NDArray[np.int64] = np.array(numbers, np.int64)
        self._code(what, table.ctypes.data)


def cache_row(sequence: SequenceKV, position: int = 0) -> tuple[int, ...]:
    """Return a row of step_layout.CACHE_FIELDS; `position`: of the first new token."""
    coding = sequence.coding() if isinstance(sequence, PlacingCodedKV) else (0, 0, 0, 0, 0, 0)
    head_dim = sequence.keys.shape[3]
    return sequence.keys.ctypes.data, sequence.values.ctypes.data, sequence.capacity, position, head_dim, 0, *coding


def _parts_row(sequence: SequenceKV, parts: Sequence[Part], scratch_at: int = 0) -> tuple[int, ...]:
    """Return what follows a cache in the tables of parts."""
    return len(parts), sequence.keys.shape[1], scratch_at
