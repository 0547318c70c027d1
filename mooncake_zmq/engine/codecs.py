"""The arithmetic of `kv.codec` in NumPy: the reference for machine code, which gives the same bytes.

A coded part of a block is [token, token_bytes] of uint8. A token's bytes are the codes of its keys, head after head, the codes
of its values, the scales of its keys, and those of its values. Codes of 4 bits stand in pairs: number i of a head in the low
half of byte i, number i + head_dim / 2 in the high half.
"""

import math

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.kv.codec import BENT, CUBIC, LINEAR, REACHES, SCALE_BYTES, STEEP, ZEROS, Codec, rotated_together

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Exponents = tuple[int, int]

LEAST_EXPONENTS = (100, 100)
"""-log2 of the scales of keys and of values below which numbers are zero. Of fewer, as `offsets` has them, no scale is less."""
SIDE = 8
"""Numbers of a vector of machine code."""


def encode(codec: Codec, keys: Floats, values: Floats, out: Bytes, least: Exponents = LEAST_EXPONENTS) -> None:
    """Write keys and values, each [n, kv_head, head_dim], as a coded part [n, token_bytes]. `least`: as LEAST_EXPONENTS."""
    count, heads, dim = keys.shape
    key_end, value_end, key_scales_end, _ = _bounds(codec, heads, dim)
    for numbers, bits, is_rotated, least_one, codes_at, scales_at in (
        (keys, codec.key_bits, codec.rotates_keys, least[0], slice(0, key_end), slice(value_end, key_scales_end)),
        (values, codec.value_bits, codec.rotates_values, least[1], slice(key_end, value_end), slice(key_scales_end, None)),
    ):
        codes, scales = _quantized(rotated(numbers) if is_rotated else numbers, bits, least_one)
        out[:, codes_at] = _packed(codes, bits).reshape(count, -1)
        out[:, scales_at] = (scales.view(np.uint32) >> 16).astype("<u2").view(np.uint8).reshape(count, -1)


def decode(codec: Codec, part: Bytes, heads: int, head_dim: int) -> tuple[Floats, Floats]:
    """Return the keys and values, each [n, kv_head, head_dim], of a coded part [n, token_bytes]."""
    key_end, value_end, key_scales_end, _ = _bounds(codec, heads, head_dim)
    found = []
    for bits, is_rotated, codes_at, scales_at in (
        (codec.key_bits, codec.rotates_keys, slice(0, key_end), slice(value_end, key_scales_end)),
        (codec.value_bits, codec.rotates_values, slice(key_end, value_end), slice(key_scales_end, None)),
    ):
        codes = _unpacked(part[:, codes_at].reshape(len(part), heads, -1), bits)
        shorts = np.ascontiguousarray(part[:, scales_at]).view("<u2").astype(np.uint32)
        scales = (shorts << 16).view(np.float32).reshape(len(part), heads, 1)
        numbers = _dequantized(codes, scales, bits)
        found.append(rotated(numbers) if is_rotated else numbers)
    return found[0], found[1]


def rounded(codec: Codec, keys: Floats, values: Floats, least: Exponents = LEAST_EXPONENTS) -> tuple[Floats, Floats]:
    """Return keys and values, each [..., head_dim], as they are after `encode` and `decode`. To round them again changes
    nothing."""
    kinds = ((keys, codec.key_bits, codec.rotates_keys), (values, codec.value_bits, codec.rotates_values))
    found = []
    for (numbers, bits, is_rotated), least_one in zip(kinds, least, strict=True):
        again = _dequantized(*_quantized(rotated(numbers) if is_rotated else numbers, bits, least_one), bits)
        found.append(rotated(again) if is_rotated else again)
    return found[0], found[1]


def rotated(numbers: Floats) -> Floats:
    """Return numbers [..., head_dim] of which each run of `rotated_together` is multiplied by a normalized Hadamard matrix, in
    Sylvester's order. The rotation is its own inverse. Its sums are made in a fixed order, as vectors of `SIDE` numbers make
    them: of those that are `SIDE` or more apart, the nearest first, then of nearer ones."""
    run = rotated_together(numbers.shape[-1])
    turned = numbers.reshape(-1, run)
    distances = [1 << power for power in range(run.bit_length() - 1)]
    for distance in sorted(distances, key=lambda each: (each < SIDE, each)):
        pairs = turned.reshape(-1, 2, distance)
        first, second = pairs[:, 0], pairs[:, 1]
        turned = np.stack((first + second, first - second), axis=1)
    return (turned * np.float32(1.0 / math.sqrt(run))).reshape(numbers.shape)


def _quantized(numbers: Floats, bits: int, least: int) -> tuple[Bytes, Floats]:
    """Return codes [..., head_dim] and scales [..., 1], which are exact in bfloat16."""
    zero, reach = np.float32(ZEROS[bits]), np.float32(REACHES[bits])
    with np.errstate(all="ignore"):  # KV that is not finite stays so by its scale
        scales = _in_bfloat16(np.abs(numbers).max(axis=-1, keepdims=True) * (np.float32(1.0) / reach))
        scales[scales < 2.0**-least] = 2.0**-least if least < LEAST_EXPONENTS[0] else 0.0
        scaled = numbers * np.where(scales > 0, np.float32(1.0) / scales, np.float32(0.0))
        if bits == 4:
            scaled *= np.float32(STEEP) - np.float32(BENT) * np.abs(scaled)
        codes = np.floor(scaled + (zero + np.float32(0.5)))
        codes = np.minimum(np.maximum(codes, zero - reach), zero + reach)
        return codes.astype(np.uint8), scales


def _dequantized(codes: Bytes, scales: Floats, bits: int) -> Floats:
    levels = codes.astype(np.float32) - np.float32(ZEROS[bits])
    if bits == 4:
        levels *= np.float32(LINEAR) + np.float32(CUBIC) * (levels * levels)
    with np.errstate(invalid="ignore"):
        numbers: Floats = levels * scales
    return numbers


def _in_bfloat16(numbers: Floats) -> Floats:
    """Round to bfloat16, half to even."""
    words: NDArray[np.uint32] = numbers.view(np.uint32)
    kept: NDArray[np.uint32] = (words + (np.uint32(0x7FFF) + ((words >> 16) & 1))) & np.uint32(0xFFFF0000)
    return kept.view(np.float32)


def _packed(codes: Bytes, bits: int) -> Bytes:
    half = codes.shape[-1] // 2
    packed: Bytes = codes if bits == 8 else np.bitwise_or(codes[..., :half], codes[..., half:] << np.uint8(4))
    return packed


def _unpacked(codes: Bytes, bits: int) -> Bytes:
    return codes if bits == 8 else np.concatenate((codes & 15, codes >> 4), axis=-1)


def _bounds(codec: Codec, heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """Return where the four fields of a token end."""
    keys, values = heads * head_dim * codec.key_bits // 8, heads * head_dim * codec.value_bits // 8
    scales = heads * SCALE_BYTES
    return keys, keys + values, keys + values + scales, keys + values + 2 * scales
