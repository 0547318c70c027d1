"""Ways to keep fewer tokens of a context: what a bench compares with codecs of as many bytes.

All keep keys as they were rotated, and every token that follows the context. Elastic Cache (liuzuyan/ElasticCache) keeps what
all queries of the context attend to most, merges the others into it, and evicts at a fixed point while it decodes, so that it
keeps a constant share of all tokens. PyramidInfer (mutonix/pyramidinfer) drops tokens from layer to layer while it computes the
context, so that later layers compute less.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.bench.codec_baselines import SINKS
from mooncake_zmq.bench.low_rank import State, joined
from mooncake_zmq.bench.quality import Computed, Floats, causal_weights, computed
from mooncake_zmq.core.messages import Eviction
from mooncake_zmq.engine.eviction import attention_received, kept_tokens
from mooncake_zmq.engine.llama import Llama

FIXED_DISTANCE = 25
"""Elastic Cache: how far before the end of what is kept of the context its fixed point is."""
RECENT_SHARE, DISTANCE_WEIGHT, DECAY = 0.2, 1.2, 0.9
"""PyramidInfer: the share of a context that is always kept, whose queries choose; the weight of the last of these; the d of its
schedule in published files."""
LEAST_SHARE = 16
"""PyramidInfer: the part of the context, beside recent tokens, that the deepest layer keeps at least: 64 of 1,024 tokens."""

Tokens = NDArray[np.int64]


class KeptTokens:
    """Implements `Attending`: some of a context's tokens, by layer, and all that follow. `share`: no more of all are kept: a
    token that follows makes one go at Elastic Cache's fixed point. `state`: stands for tokens that are not kept."""

    def __init__(
        self,
        kv: Sequence[Floats],
        tokens: int,
        following: int,
        *,
        share: float | None = None,
        state: Sequence[State] | None = None,
    ) -> None:
        """`kv`: of each layer what is kept, [k/v, kv_head, n, head_dim]."""
        self.length, self.capacity = tokens, tokens + following
        room = np.empty((2, kv[0].shape[1], following, kv[0].shape[3]), np.float32)
        self._kv = [np.concatenate((each, room), axis=2) for each in kv]
        self._counts = [each.shape[2] for each in kv]
        self._share, self._state = share, state
        self._fixed = [max(0, count - min(FIXED_DISTANCE, count // 2)) for count in self._counts]

    @property
    def numbers(self) -> int:
        """How many numbers are kept now."""
        state = sum(each.mass.size + each.mixed.size for each in self._state or ())
        return state + sum(each[:, :, :count].size for each, count in zip(self._kv, self._counts, strict=True))

    @property
    def position(self) -> int:
        """The position of the next token."""
        return self.length

    def attend(self, layer: int, queries: Any, keys: Any, values: Any) -> Any:
        held, count = self._kv[layer], self._counts[layer] + 1
        held[:, :, count - 1] = keys, values
        scores = queries @ held[0, :, :count].transpose(0, 2, 1)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        mixed = weights @ held[1, :, :count]
        if self._state is not None:
            mixed = joined(self._state[layer], queries, weights[:, :, :SINKS].sum(axis=2, keepdims=True), mixed)
        if self._share is not None and count - self._share * (self.length + 1) >= 1:
            count -= 1
            held[:, :, self._fixed[layer] : count] = held[:, :, self._fixed[layer] + 1 : count + 1].copy()
        self._counts[layer] = count
        return mixed.reshape(-1)


def taken(kv: Floats, which: Tokens) -> Floats:
    """Return what is kept of a layer's keys and values [k/v, n, kv_head, head_dim], as `KeptTokens` takes it."""
    return kv[:, which].transpose(0, 2, 1, 3)


# --------------------------------------------------------------------------------------------------- Elastic Cache


def attended_most(layer: Computed, kept: int) -> Tokens:
    """Return the first tokens, those that all queries attend to most in the mean of heads, and the last one."""
    keys, count = layer.kv[0].transpose(1, 2, 0)[:, None], layer.kv.shape[1]
    received = attention_received(layer.queries, keys, np.arange(count))
    return kept_tokens(Eviction(kind="elastic", kept=kept), count, received)


def merged(kv: Floats, which: Tokens) -> Floats:
    """Return what is kept, as published: each is the mean of itself and the dropped tokens that are nearest to it, keys and
    values alike; but the first tokens and the last one stay as they are."""
    tokens, middle = np.arange(kv.shape[1]), which[SINKS:-1]
    if not len(middle):
        return taken(kv, which)
    nearest = SINKS + np.abs(tokens[:, None] - middle).argmin(axis=1)
    nearest[which] = np.arange(len(which))
    sums = np.zeros((2, len(which), *kv.shape[2:]), np.float32)
    for part, total in zip(kv, sums, strict=True):
        np.add.at(total, nearest, part)
    sums /= np.bincount(nearest)[:, None, None]
    return sums.transpose(0, 2, 1, 3)


def folded(kv: Floats, which: Tokens) -> Floats:
    """Return what is kept, mended as in NVIDIA/kvpress' merging press: keys as they are, and each dropped value folded into
    that of the most similar key, by their cosine and the share of its length."""
    found = taken(kv, which).copy()
    dropped = taken(kv, np.setdiff1d(np.arange(kv.shape[1]), which))
    units = [each / np.maximum(np.linalg.norm(each, axis=2, keepdims=True), 1e-6) for each in (found[0], dropped[0])]
    cosines = units[1] @ units[0].transpose(0, 2, 1)
    for head, (values, gone, cosine) in enumerate(zip(found[1], dropped[1], cosines, strict=True)):
        target = cosine.argmax(axis=1)
        length = np.linalg.norm(gone, axis=1)
        weight = np.maximum(cosine.max(axis=1), 0) * length / (length + np.linalg.norm(values, axis=1)[target] + 1e-6)
        sums, weights = values.copy(), np.ones(len(values), np.float32)
        np.add.at(sums, target, weight[:, None] * gone)
        np.add.at(weights, target, weight)
        found[1, head] = sums / weights[:, None]
    return found


# ---------------------------------------------------------------------------------------------------- PyramidInfer


def pyramid_lengths(tokens: int, layers: int, decay: float = DECAY) -> list[int]:
    """Return how many tokens each layer keeps. After layer i a share (1 - decay) (cos(pi i / layers) + 1) / 2 + decay of the
    context before the recent tokens stays."""
    recent, least, found = int(tokens * RECENT_SHARE), tokens // LEAST_SHARE, []
    context = tokens - 1 - recent
    for layer in range(layers):
        found.append(context + 1 + recent)
        share = (1 - decay) * (math.cos(math.pi * layer / layers) + 1) / 2 + decay
        context = min(context, max(least, int(context * share + 1e-6)))
    return found


def pyramid(engine: Llama, tokens: NDArray[np.int32], decay: float = DECAY) -> tuple[list[Floats], int]:
    """Compute a context of which later layers see fewer tokens. Return its KV by layer and the multiply-adds that it took."""
    spec, recent = engine.spec, int(len(tokens) * RECENT_SHARE)
    lengths = [*pyramid_lengths(len(tokens), spec.layers, decay), 0]
    scratch, at = engine.new_sequence(len(tokens)), np.arange(len(tokens))
    entering: NDArray[Any] = tokens
    found, multiply_adds = [], 0
    for index in range(spec.layers):
        layer = computed(engine, scratch, index, entering, at)
        found.append(layer.kv.transpose(0, 2, 1, 3))
        multiply_adds += layer.multiply_adds
        if lengths[index + 1] in (0, len(at)):
            entering = layer.hidden
            continue
        context = len(at) - 1 - recent
        weights = _recent_weights(layer, context)
        multiply_adds += (1 + recent) * len(at) * spec.heads * spec.head_dim
        stays = np.sort(np.argsort(-weights, kind="stable")[: lengths[index + 1] - 1 - recent])
        stays = np.r_[stays, context : len(at)]
        at, entering = at[stays], layer.hidden[stays]
    scratch.close()
    return found, multiply_adds


def _recent_weights(layer: Computed, context: int) -> Floats:
    """Return how the recent tokens attend to the `context` ones before them, the later of them more; the first never go."""
    by_query = causal_weights(layer, context)[..., :context].mean(axis=(0, 1))
    found: Floats = (by_query * np.linspace(1, DISTANCE_WEIGHT, len(by_query), dtype=np.float32)[:, None]).mean(axis=0)
    found[:SINKS] = np.inf
    return found
