"""Other ways to hold KV in fewer bits, applied to the whole KV of a context: what `bench codecs` compares its codecs with.

Each takes keys and values [layer, token, kv_head, head_dim] in float32 and returns them as they come back. Scales and zero
points count as 16 bits each; exact tokens as bfloat16.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.codecs import rotated, rounded
from mooncake_zmq.kv.codec import CODECS

Floats = NDArray[np.float32]
Change = Callable[[Floats, Floats], tuple[Floats, Floats]]

SINKS = 4
"""The first tokens of a context, which attention needs however little they say."""
GROUP = 64
"""The most numbers that share a scale in KIVI."""
MERGED_AT, RETAINED, FIRST_MERGED = 0.6, 0.05, 0.5
"""MiniCache: the place between two layers' directions, the share of tokens kept apart, the share of layers left as they are."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A way to hold KV. `bits`: of a number, on average. `drops`: tokens are left out rather than rounded."""

    name: str
    bits: float
    change: Change
    drops: bool = False


def baselines(head_dim: int, layers: int, tokens: int, int4_bits: float) -> list[Baseline]:
    """Return the ways for a model and a context; the one that drops tokens takes as many bytes as `int4_bits` a number."""
    group = min(GROUP, head_dim)
    per_group = 32 / group
    merged = 2 * ((layers - _first_merged(layers)) // 2) / layers
    return [
        Baseline("fp8 e4m3, scale 1 (vLLM's fp8)", 8.0, lambda keys, values: (_fp8(keys), _fp8(values))),
        Baseline("KIVI, 8 bits", 8 + per_group, kivi(8, 8, group)),
        Baseline("KIVI, K 8 and V 4 bits", 6 + per_group, kivi(8, 4, group)),
        Baseline("KIVI, 4 bits", 4 + per_group, kivi(4, 4, group)),
        Baseline(
            "4 bits a token and head, not rotated", 4 + 16 / head_dim, lambda *both: (_per_token(both[0]), _per_token(both[1]))
        ),
        Baseline(
            "int4, levels at equal distances",
            4 + 16 / head_dim,
            lambda keys, values: (_even_levels(keys, 4), _even_levels(values, 4)),
        ),
        Baseline("int4, values in 3 bits", 3.5 + 16 / head_dim, _values_in_three_bits),
        Baseline(f"{SINKS} sinks and recent tokens", int4_bits, _window(kept_tokens(tokens, int4_bits)), drops=True),
        Baseline("MiniCache", 16 * (1 - merged) + merged * (8 + 16 / head_dim + 8 * RETAINED), _minicache),
    ]


def kept_tokens(tokens: int, bits: float) -> int:
    """Return how many tokens in bfloat16 take as many bytes as all of them at so many bits."""
    return min(tokens, max(SINKS + 1, round(tokens * bits / 16)))


def adjacent_cosines(numbers: Floats) -> Floats:
    """Return the mean cosine of each layer's keys or values with the next layer's, of the same token and head."""
    units = numbers / np.maximum(np.linalg.norm(numbers, axis=-1, keepdims=True), 1e-20)
    cosines: Floats = (units[:-1] * units[1:]).sum(axis=-1).mean(axis=(1, 2))
    return cosines


def _fp8(numbers: Floats) -> Floats:
    """Round to 4 bits of exponent and 3 of mantissa, at most 448."""
    magnitudes = np.maximum(np.abs(numbers), np.float32(2.0**-20))
    steps = np.exp2(np.maximum(np.floor(np.log2(magnitudes)), -6) - 3).astype(np.float32)
    rounded: Floats = np.clip(np.rint(numbers / steps) * steps, -448, 448)
    return rounded


def kivi(key_bits: int, value_bits: int, group: int) -> Change:
    """KIVI: keys by channel over a group of tokens, values by token over a group of channels, each between its least and its
    largest number."""

    def change(keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        by_channel = np.moveaxis(keys, 1, -1)
        return np.moveaxis(_between(by_channel, key_bits, group), -1, 1), _between(values, value_bits, group)

    return change


def _between(numbers: Floats, bits: int, group: int) -> Floats:
    """Round the last axis in groups, between the least and the largest number of each; a shorter last group counts too."""
    rounded = np.empty_like(numbers)
    for start in range(0, numbers.shape[-1], group):
        run = numbers[..., start : start + group]
        least = run.min(axis=-1, keepdims=True)
        step = (run.max(axis=-1, keepdims=True) - least) / np.float32(2**bits - 1)
        rounded[..., start : start + group] = np.rint((run - least) / np.where(step > 0, step, 1)) * step + least
    return rounded


def _per_token(numbers: Floats) -> Floats:
    """Round to 15 steps around zero, with a scale for each token and head."""
    scale = np.abs(numbers).max(axis=-1, keepdims=True) / np.float32(7)
    rounded: Floats = np.clip(np.rint(numbers / np.where(scale > 0, scale, 1)), -7, 7) * scale
    return rounded


def _values_in_three_bits(keys: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Round keys as int4 does, and values to 8 levels at equal distances."""
    return rounded(CODECS["int4"], keys, keys)[0], _even_levels(values, 3)


def _even_levels(numbers: Floats, bits: int) -> Floats:
    """Rotate, and round to levels at equal distances, of which the outermost is the largest magnitude."""
    turned, half = rotated(numbers), 1 << (bits - 1)
    step = np.maximum(np.abs(turned).max(axis=-1, keepdims=True) / np.float32(half - 0.5), np.float32(1e-20))
    middles = np.clip(np.floor(turned / step), -half, half - 1) + np.float32(0.5)
    return rotated(middles * step)


def _window(kept: int) -> Change:
    def change(keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        tokens = keys.shape[1]
        which = np.r_[:SINKS, tokens - (kept - SINKS) : tokens]
        return keys[:, which], values[:, which]

    return change


def _first_merged(layers: int) -> int:
    return math.floor(layers * FIRST_MERGED)


def _minicache(keys: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Merge each pair of layers in the deeper half into one direction by spherical interpolation, with the length of each, but
    for the tokens whose directions differ most."""
    return _merged(keys), _merged(values)


def _merged(numbers: Floats) -> Floats:
    merged = numbers.copy()
    for lower in range(_first_merged(len(numbers)), len(numbers) - 1, 2):
        pair = numbers[lower : lower + 2]
        lengths = np.maximum(np.linalg.norm(pair, axis=-1, keepdims=True), 1e-20)
        one, two = pair / lengths
        cosines = np.clip((one * two).sum(axis=-1, keepdims=True), -1, 1)
        angle = np.maximum(np.arccos(cosines), 1e-4)
        direction = (np.sin((1 - MERGED_AT) * angle) * one + np.sin(MERGED_AT * angle) * two) / np.sin(angle)
        distance = angle.mean(axis=(1, 2))
        is_merged = (distance <= np.quantile(distance, 1 - RETAINED))[:, None, None]
        merged[lower : lower + 2] = np.where(is_merged, direction * lengths, pair)
    return merged
