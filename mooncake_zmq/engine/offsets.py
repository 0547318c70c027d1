"""The part of keys and values that a model's biases make, the same in every prompt: codecs round what is left without it.

A Qwen's keys are as large as 160 by biases of a few channels, and a tenth of that without them. A key's offset is the bias as
it is rotated for the key's position, a value's is the bias. It is taken off before a number is coded, and added after that.
Their sum is rounded to float32, and this error must not change a code: no scale is less than some part of the largest offset.

Keys of 4 bits are then divided by a number for each pair of channels, the root of their size by that of queries there, as the
weights show it: a rotation gives all channels the same error, and it matters as much as the query is large. (On a Qwen with
int4 a KL of .011 in place of .017. With 8 bits, and without biases, nothing was gained.)
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.codecs import LEAST_EXPONENTS, Exponents
from mooncake_zmq.engine.spec import FAMILIES, ModelSpec
from mooncake_zmq.kv.codec import Codec

Floats = NDArray[np.float32]
Positions = int | NDArray[np.int64]

PLAIN_MARGIN, ROTATED_MARGIN = 18, 13
"""A scale is at least so many powers of two below the largest offset. A sum is off by at most 2**-24 of that, which is 2**-6 of
a step of 8 bits, where half a step would do, and 2**-13 of the 127 steps that give the scale again, where 2**-9 would do. In a
rotation 64 such errors make 8 times as much: 2**-8 of a step, where a third of one would do for levels of 4 bits, and 2**-10 of
the 7.5 steps that give their scale."""


MOST_POWER = 6
"""log2 of the largest divisor and of the inverse of the smallest one. A pair of channels without weights, whose keys are the
bias alone, would have 0, and the rounding error of a sum divided by that would drown its head."""


class Offsets:
    """The offsets of all layers."""

    def __init__(self, biases: Floats, frequencies: Floats, divisors: Floats | None = None) -> None:
        """`biases` [layer, k/v, kv_head, head_dim], rotation pairs side by side; `frequencies` [head_dim / 2]; `divisors` of
        keys [layer, kv_head, head_dim], None: 1."""
        self.biases: Floats = np.ascontiguousarray(biases)
        self.divisors: Floats | None = None if divisors is None else np.stack((divisors, 1 / divisors), axis=1)
        """Those of keys and their inverses [layer, 2, kv_head, head_dim]."""
        self._frequencies = frequencies
        self._turns: Floats = np.empty((2, 0, len(frequencies)), np.float32)

    def turns(self, tokens: int) -> Floats:
        """Return cosines and sines [2, tokens or more, head_dim / 2] of the rotations for positions from 0 on."""
        if self._turns.shape[1] < tokens:
            positions = np.arange(1 << (tokens - 1).bit_length(), dtype=np.float32)
            angles = positions[:, None] * self._frequencies
            self._turns = np.stack((np.cos(angles), np.sin(angles)))
        return self._turns

    def at(self, layer: int, positions: Positions) -> tuple[Floats, Floats]:
        """Return the offsets of keys [n, kv_head, head_dim], or of one position without n, and those of all values [kv_head,
        head_dim]."""
        cos, sin = self.turns(int(np.max(positions, initial=0)) + 1)[:, positions, None]
        keys, values = self.biases[layer]
        real, imaginary = keys[:, 0::2], keys[:, 1::2]
        pairs = np.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), axis=-1)
        return pairs.reshape(*pairs.shape[:-2], -1), values

    def least_exponents(self, codec: Codec) -> Exponents:
        """Return -log2 of the least scales of keys and of values, as powers of two; of a codec whose codes need not be found
        again, LEAST_EXPONENTS."""
        if not codec.rounds_when_stored:
            return LEAST_EXPONENTS
        largest = np.linalg.norm(self.biases.reshape(len(self.biases), 2, -1, 2), axis=3).max(axis=(0, 2))
        margins = [ROTATED_MARGIN if rotates else PLAIN_MARGIN for rotates in (codec.rotates_keys, codec.rotates_values)]
        each = zip(LEAST_EXPONENTS, margins, largest, strict=True)
        keys, values = (min(usual, max(0, margin - math.frexp(most)[1])) if most else usual for usual, margin, most in each)
        return keys, values


def offsets_of(spec: ModelSpec, tensors: Mapping[str, Any], codec: Codec) -> Offsets | None:
    """Return the offsets of a model in host memory; None: its family has no biases."""
    if not FAMILIES[spec.family].qkv_bias:
        return None
    width = 2 * spec.kv_heads * spec.head_dim
    biases = np.stack([tensors[f"{layer}.qkv_bias"][-width:] for layer in range(spec.layers)])
    divisors = [divisors_of(spec, tensors, layer) for layer in range(spec.layers)] if codec.rotates_keys else None
    shaped = biases.reshape(spec.layers, 2, spec.kv_heads, spec.head_dim)
    return Offsets(shaped, tensors["inv_freq"], None if divisors is None else np.stack(divisors))


def divisors_of(spec: ModelSpec, tensors: Mapping[str, Any], layer: int) -> Floats:
    """Return the divisors of a layer's keys [kv_head, head_dim]: powers of 2**.25, so that all machines have the same, with a
    mean of about 1 in a head, and one for both channels of a rotation pair. Normed inputs count as of equal size."""
    query, kv, gain = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, tensors[f"{layer}.attn_norm"][:, None]
    squares = np.concatenate([((panel * gain).astype(np.float64) ** 2).sum(axis=0) for panel in tensors[f"{layer}.qkv"]])
    squares[:query] += tensors[f"{layer}.qkv_bias"][:query].astype(np.float64) ** 2
    queries = squares[:query].reshape(spec.kv_heads, -1, spec.head_dim // 2, 2).sum(axis=(1, 3))
    keys = squares[query : query + kv].reshape(spec.kv_heads, -1, 2).sum(axis=2)
    powers = np.log2(np.maximum(keys, 1e-30) / np.maximum(queries, 1e-30)) / 4
    powers = np.clip(powers - np.median(powers, axis=1, keepdims=True), -MOST_POWER, MOST_POWER)
    powers = np.round(4 * (powers - powers.mean(axis=1, keepdims=True))) / 4
    return np.repeat(np.exp2(powers).astype(np.float32), 2, axis=1)
