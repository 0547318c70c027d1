"""Numbers of a KV block as codes of 8 or 4 bits and back, in torch: on a CPU or a GPU, as the block is.

A run of `RUN` numbers that are adjacent in a block has a scale of its own. Which tokens and channels these are depends on the
engine's layout, which blocks are named by. The steps are those of `kv.codec`, which names the codecs too.
"""

import torch

from mooncake_zmq.kv.codec import REACHES, SCALE_BYTES, ZEROS, Codec

RUN = 64
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Codes:
    """One codec for the blocks of one tensor."""

    def __init__(self, codec: Codec, device: torch.device) -> None:
        self._bits = codec.key_bits
        self._zero, self._reach = ZEROS[self._bits], REACHES[self._bits]
        self._rotation = _hadamard(RUN).to(device) if codec.rotates_keys else None

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
        codes = numbers.mul_(steps).add_(self._zero + 0.5).floor_().clamp_(self._zero - self._reach, self._zero + self._reach)
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
        numbers = codes.to(torch.float32).sub_(self._zero).mul_(scales[..., None])
        if self._rotation is not None:
            numbers = numbers @ self._rotation
        most = torch.finfo(dtype).max  # a scale is rounded, so that the largest float16 may come back as more
        return numbers.clamp_(-most, most).to(dtype).reshape(len(coded), -1)


def _hadamard(size: int) -> torch.Tensor:
    """Return Sylvester's matrix, normalized: it is its own inverse."""
    matrix = torch.ones((1, 1))
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix / size**0.5
