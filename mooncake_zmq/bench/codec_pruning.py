"""ThinK: of each layer's and head's keys the channels that matter least are left out. Rows of `bench codecs`; not served.

A channel's score is the mean square of the queries' numbers times that of the keys'. Only a mask that is fixed for a model, by
other texts than those measured, could be used for blocks that prompts share. The paper makes one for each prompt, by its last
queries, and keeps its last keys whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.bench.codec_baselines import GROUP, Change, kivi
from mooncake_zmq.bench.quality import Floats, computed
from mooncake_zmq.engine.codecs import rounded
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.kv.codec import CODECS

SHARE = 0.25
"""The share of a head's channels that is left out."""
LAST = 32
"""The last tokens of a prompt: their queries choose, and their keys are kept whole."""
FIXED, KEYS_ALONE, BY_PROMPT = "fixed mask", "fixed mask by keys alone", "mask by prompt"

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pruning:
    """A way to leave channels out by a mask of one kind. `bits`: of a number, on average; `change`: applied to what is kept."""

    name: str
    mask: str
    bits: float
    change: Change

    def changed(self, keys: Floats, values: Floats, mask: Mask) -> tuple[Floats, Floats]:
        """Return the KV of a context, [layer, token, kv_head, head_dim], without the channels of `mask`."""
        kept, values_there = self.change(np.where(mask[:, None], np.float32(0), keys), values)
        if self.mask == BY_PROMPT:
            kept[:, -LAST:] = self.change(keys, values)[0][:, -LAST:]
        return kept, values_there


def prunings(head_dim: int, tokens: int) -> list[Pruning]:
    """Return the ways for a context of so many tokens: in bfloat16, and with 4 bits, in which keys have a scale by channel."""
    group = min(GROUP, head_dim)
    four_bits = 4 + 16 / head_dim
    ways = []
    for mask in (FIXED, KEYS_ALONE, BY_PROMPT):
        kept = 1 - SHARE * (1 - LAST / tokens if mask == BY_PROMPT else 1)
        ways.append(Pruning(f"ThinK, {mask}", mask, 8 * kept + 8, lambda keys, values: (keys, values)))
        bits = ((4 + 32 / group) * kept + four_bits) / 2
        ways.append(Pruning(f"ThinK, {mask}, with 4 bits", mask, bits, _four_bits(group)))
    return ways


def left_out(scores: Floats) -> Mask:
    """Return which channels have the lowest scores [..., channel]."""
    ranks = scores.argsort(axis=-1).argsort(axis=-1)
    mask: Mask = ranks < round(scores.shape[-1] * SHARE)
    return mask


def mean_squares(engine: Llama, tokens: NDArray[np.int32], last: int) -> tuple[Floats, Floats]:
    """Return those of the queries of the last so many tokens, and of all keys: [layer, kv_head, channel]."""
    sequence, at = engine.new_sequence(len(tokens)), np.arange(len(tokens))
    entering: NDArray[Any] = tokens
    queries, keys = [], []
    for index in range(engine.spec.layers):
        layer = computed(engine, sequence, index, entering, at)
        queries.append(np.square(layer.queries[:, -last:]).mean(axis=(1, 2)))
        keys.append(np.square(layer.kv[0]).mean(axis=0))
        entering = layer.hidden
    sequence.close()
    return np.stack(queries), np.stack(keys)


def _four_bits(group: int) -> Callable[[Floats, Floats], tuple[Floats, Floats]]:
    def change(keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        return kivi(4, 4, group)(keys, values)[0], rounded(CODECS["int4"], values, values)[1]

    return change
