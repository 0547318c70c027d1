"""Ways to keep fewer tokens of a context: what a bench compares with codecs of as many bytes. Not served.

All keep keys as they were rotated, and every token that follows the context. Elastic Cache (liuzuyan/ElasticCache) keeps what
all queries of the context attend to most, merges the others into it, and evicts at a fixed point while it decodes. PyramidInfer
(mutonix/pyramidinfer) drops tokens from layer to layer while it computes the context, so that later layers compute less.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.bench.codec_baselines import SINKS
from mooncake_zmq.bench.low_rank import State, joined
from mooncake_zmq.bench.quality import Computed, Floats, computed
from mooncake_zmq.engine.llama import Llama

FIXED_DISTANCE = 25
"""Elastic Cache: the tokens before the end of what is kept at which it evicts one for each decoded token."""
RECENT_SHARE, DISTANCE_WEIGHT = 0.2, 1.2
"""PyramidInfer: the share of a context that is always kept, whose queries choose; the weight of the last of these."""
LEAST_SHARE = 16
"""PyramidInfer: the part of the context, beside recent tokens, that the deepest layer keeps at least: 64 of 1,024 tokens."""

Tokens = NDArray[np.int64]


class KeptTokens:
    """Implements `Attending`: some of a context's tokens, by layer, and all that follow. `evict_at`: with each token that
    follows, the one that is kept at this place is dropped. `state`: stands for tokens that are not kept."""

    def __init__(
        self,
        kv: Sequence[Floats],
        tokens: int,
        following: int,
        *,
        evict_at: int | None = None,
        state: Sequence[State] | None = None,
    ) -> None:
        """`kv`: of each layer what is kept, [k/v, kv_head, n, head_dim]."""
        self.length, self.capacity = tokens, tokens + following
        room = np.empty((2, kv[0].shape[1], following, kv[0].shape[3]), np.float32)
        self._kv = [np.concatenate((each, room), axis=2) for each in kv]
        self._counts = [each.shape[2] for each in kv]
        self._evict_at, self._state = evict_at, state

    @property
    def numbers(self) -> int:
        """How many numbers are kept now."""
        state = sum(each.mass.size + each.mixed.size for each in self._state or ())
        return state + sum(each[:, :, :count].size for each, count in zip(self._kv, self._counts, strict=True))

    def attend(self, layer: int, queries: Any, keys: Any, values: Any) -> Any:
        held, count = self._kv[layer], self._counts[layer] + 1
        held[:, :, count - 1] = keys, values
        scores = queries @ held[0, :, :count].transpose(0, 2, 1)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        mixed = weights @ held[1, :, :count]
        if self._state is not None:
            mixed = joined(self._state[layer], queries, weights[:, :, :SINKS].sum(axis=2, keepdims=True), mixed)
        if self._evict_at is None:
            self._counts[layer] = count
        else:
            held[:, :, self._evict_at : count - 1] = held[:, :, self._evict_at + 1 : count].copy()
        return mixed.reshape(-1)


def sinks_and_recent(tokens: int, kept: int) -> Tokens:
    """Return the first tokens of a context and its last ones, so many in all."""
    found: Tokens = np.r_[:SINKS, tokens - (kept - SINKS) : tokens]
    return found


def taken(kv: Floats, which: Tokens) -> Floats:
    """Return what is kept of a layer's keys and values [k/v, n, kv_head, head_dim], as `KeptTokens` takes it."""
    return kv[:, which].transpose(0, 2, 1, 3)


# --------------------------------------------------------------------------------------------------- Elastic Cache


def attended_most(layer: Computed, kept: int) -> Tokens:
    """Return the first tokens, those that all queries attend to most in the mean of heads, and the last one."""
    tokens = layer.kv.shape[1]
    scores = layer.queries.transpose(0, 2, 1, 3) @ layer.kv[0].transpose(1, 2, 0)[:, None]
    scores[..., np.triu(np.ones((tokens, tokens), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    importance = (weights / weights.sum(axis=3, keepdims=True)).sum(axis=(0, 1, 2))
    importance[:SINKS] = importance[-1] = np.inf
    found: Tokens = np.sort(np.argsort(-importance, kind="stable")[:kept])
    return found


def merged(kv: Floats, which: Tokens) -> Floats:
    """Return what is kept, as published: each is the mean of itself and the dropped tokens that are nearest to it, keys and
    values alike."""
    tokens = np.arange(kv.shape[1])
    after = np.clip(np.searchsorted(which, tokens), 1, len(which) - 1)
    nearest = after - (tokens - which[after - 1] <= which[after] - tokens)
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


@dataclass(frozen=True, slots=True)
class Pyramid:
    """A context's KV as PyramidInfer computes it, by layer, and the multiply-adds that this took."""

    kv: list[Floats]
    multiply_adds: int


def pyramid_lengths(tokens: int, layers: int, kept: int) -> list[int]:
    """Return how many tokens each layer keeps, `kept` of them in the mean, or as few as the schedule can: the first two layers
    always keep all. After layer i a share (1 - d) (cos(pi i / layers) + 1) / 2 + d of the context before the recent tokens
    stays; published files have d = .9, here it is what the bytes demand."""
    recent, least = _recent(tokens, kept), tokens // LEAST_SHARE

    def lengths(decay: float) -> list[int]:
        context, found = tokens - 1 - recent, []
        for layer in range(layers):
            found.append(context + 1 + recent)
            share = (1 - decay) * (math.cos(math.pi * layer / layers) + 1) / 2 + decay
            context = min(context, max(least, int(context * share + 1e-6)))
        return found

    low, high = -1024.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(lengths(middle)) <= kept * layers else (low, middle)
    return lengths(low)


def pyramid(engine: Llama, tokens: NDArray[np.int32], kept: int) -> Pyramid:
    """Compute a context of which later layers see fewer tokens, `kept` of them in the mean."""
    spec, recent = engine.spec, _recent(len(tokens), kept)
    lengths = [*pyramid_lengths(len(tokens), spec.layers, kept), 0]
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
    return Pyramid(found, multiply_adds)


def _recent(tokens: int, kept: int) -> int:
    return int(tokens * min(RECENT_SHARE, kept / tokens / 2))


def _recent_weights(layer: Computed, context: int) -> Floats:
    """Return how the recent tokens attend to the `context` ones before them, the later of them more; the first never go."""
    queries = layer.queries[:, context:].transpose(0, 2, 1, 3)
    scores = queries @ layer.kv[0].transpose(1, 2, 0)[:, None]
    recent = scores.shape[2]
    scores[..., context:][..., np.triu(np.ones((recent, recent), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    by_query = weights[..., :context].mean(axis=(0, 1))
    found: Floats = (by_query * np.linspace(1, DISTANCE_WEIGHT, recent, dtype=np.float32)[:, None]).mean(axis=0)
    found[:SINKS] = np.inf
    return found
