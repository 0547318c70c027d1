"""Numbers of a KV block as codes of 8 or 4 bits and back, in torch: on a CPU or a GPU, as the block is.

A run of `RUN` numbers that are adjacent in a block has a scale of its own. Which tokens and channels these are depends on the
engine's layout, which blocks are named by. The steps are those of `kv.codec`, which names the codecs too. A codec with fewer
bits for values than for keys needs to know which are which.
"""

from collections.abc import Sequence
from typing import Any

import torch

from mooncake_zmq.kv.codec import BENT, CUBIC, LINEAR, REACHES, SCALE_BYTES, STEEP, ZEROS, Codec

RUN = 64
KEYS_AND_VALUES = {"CPU_ATTN": "head", "FLASH_ATTN": "token", "TRITON_ATTN": "token", "FLEX_ATTENTION": "token"}
"""Attention backends -> of what a block has all keys before all values, as vLLM 0.32 has them."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Codes:
    """Codes of one kind of numbers: of `bits`, and rotated before or not."""

    def __init__(self, bits: int, is_rotated: bool, device: torch.device) -> None:
        self._bits = bits
        self._zero, self._reach = ZEROS[bits], REACHES[bits]
        self._rotation = _hadamard(RUN).to(device) if is_rotated else None

    def bytes_of(self, numbers: int) -> int:
        """Return the bytes of so many numbers, a multiple of RUN."""
        return numbers * self._bits // 8 + numbers // RUN * SCALE_BYTES

    def encode(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the bytes [block, bytes] of numbers [block, n], which may be changed."""
        numbers = blocks.to(torch.float32).reshape(len(blocks), -1, RUN)
        if self._rotation is not None:
            numbers = numbers @ self._rotation
        scales = (numbers.abs().amax(dim=-1, keepdim=True) / self._reach).to(torch.bfloat16)
        steps = torch.where(scales > 0, 1 / scales.to(torch.float32), 0)
        scaled = numbers.mul_(steps)
        if self._bits == 4:
            scaled.mul_(scaled.abs().mul_(-BENT).add_(STEEP))
        codes = scaled.add_(self._zero + 0.5).floor_().clamp_(self._zero - self._reach, self._zero + self._reach)
        packed = codes.to(torch.uint8)
        if self._bits == 4:
            packed = packed[..., : RUN // 2] | packed[..., RUN // 2 :] << 4
        return torch.cat((packed.reshape(len(blocks), -1), scales.reshape(len(blocks), -1).view(torch.uint8)), dim=1)

    def decode(self, coded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers [block, n] of bytes [block, bytes]."""
        runs = coded.shape[1] // self.bytes_of(RUN)
        codes = coded[:, : -SCALE_BYTES * runs].reshape(len(coded), runs, -1)
        if self._bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), dim=-1)
        scales = coded[:, -SCALE_BYTES * runs :].contiguous().view(torch.bfloat16).to(torch.float32)
        numbers = codes.to(torch.float32).sub_(self._zero)
        if self._bits == 4:
            numbers.mul_((numbers * numbers).mul_(CUBIC).add_(LINEAR))
        numbers.mul_(scales[..., None])
        if self._rotation is not None:
            numbers = numbers @ self._rotation
        most = torch.finfo(dtype).max  # a scale is rounded, so that the largest float16 may come back as more
        return numbers.clamp_(-most, most).to(dtype).reshape(len(coded), -1)


class BlockCodes:
    """One codec for the blocks of one tensor. `keys`: see `keys_in_a_row`; 0 with a codec that `is_alike`."""

    def __init__(self, codec: Codec, keys: int, device: torch.device) -> None:
        self._keys = keys
        kinds = ((codec.key_bits, codec.rotates_keys), (codec.value_bits, codec.rotates_values))
        self._kinds = [Codes(*kind, device) for kind in (kinds if keys else kinds[:1])]

    def bytes_of(self, numbers: int) -> int:
        """Return the bytes of so many numbers, a multiple of RUN for each kind."""
        return sum(kind.bytes_of(numbers // len(self._kinds)) for kind in self._kinds)

    def encode(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the bytes [block, bytes] of numbers [block, n], which may be changed."""
        if not self._keys:
            return self._kinds[0].encode(blocks)
        halves = blocks.reshape(len(blocks), -1, 2, self._keys).unbind(2)
        return torch.cat([kind.encode(half) for kind, half in zip(self._kinds, halves, strict=True)], dim=1)

    def decode(self, coded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers [block, n] of bytes [block, bytes]."""
        if not self._keys:
            return self._kinds[0].decode(coded, dtype)
        sizes = [kind.bytes_of(RUN) for kind in self._kinds]
        parts = coded.split([coded.shape[1] * size // sum(sizes) for size in sizes], dim=1)
        halves = [kind.decode(part, dtype) for kind, part in zip(self._kinds, parts, strict=True)]
        return torch.stack([half.reshape(len(coded), -1, self._keys) for half in halves], dim=2).reshape(len(coded), -1)


def keys_in_a_row(layer: Any, shape: Sequence[int]) -> int:
    """Return how many keys' numbers lie in a row in blocks [head, token, content] of one of vLLM's attention layers, before
    as many of values. Raises ValueError where that is not known."""
    backend = layer.get_attn_backend().get_name()
    if shape[-1] != 2 * layer.head_size or backend not in KEYS_AND_VALUES:
        raise ValueError(f"a kv_codec that codes keys and values apart does not know where {backend} has them")
    return shape[-1] // 2 * (shape[-2] if KEYS_AND_VALUES[backend] == "head" else 1)


def _hadamard(size: int) -> torch.Tensor:
    """Return Sylvester's matrix, normalized: it is its own inverse."""
    matrix = torch.ones((1, 1))
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix / size**0.5
