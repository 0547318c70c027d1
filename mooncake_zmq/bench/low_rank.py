"""LESS (hdong920/LESS): a state of constant size beside an evicting cache, which stands for the tokens that it dropped.

    attention = (sum over kept of e^s v + phi(q) H) / (sum over kept of e^s + phi(q) z)
    H = sum over dropped of psi(k)^T v,  z = sum over dropped of psi(k);  phi, psi = |gelu(gelu(x A) B)|, trained by layer

`psi` is of a KV head, `phi` of a query head. The kernel is our own, not the paper's: the published psi has a third learned
matrix and two learned scalings, and hidden layers of 512 numbers where these have 64; the unit of its phi(q) psi(k) is 1, here
it is what the query's weights of the first tokens sum up to. These are kept always and are alike in all texts, so what is to be
learned stays near 1. Training is by squared error of the attention, by Adam, with gradients by hand: a layer by itself.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.bench.codec_baselines import SINKS
from mooncake_zmq.bench.quality import Computed, Floats, causal_weights, computed
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.laboratory.new_file import replacing

RANK, HIDDEN = 8, 64
"""Numbers of phi and psi, which are as many as the paper's, and of their hidden layer."""
DROPPED = 1024.0
"""Divides psi, so that sums over so many dropped tokens begin near 1."""
LEARNING_RATE, DECAYS = 3e-3, (0.9, 0.999)
Weights = dict[str, Floats]
"""A layer's: `phi1` [kv_head, group, head_dim, hidden], `phi2` [.., hidden, rank]; `psi1` and `psi2` without a group."""


@dataclass(frozen=True, slots=True)
class State:
    """Sums that a layer keeps of dropped tokens: `mass` [kv_head, rank] and `mixed` [kv_head, rank, head_dim]; and its phi."""

    mass: Floats
    mixed: Floats
    weights: Weights


class Sample(NamedTuple):
    """A text of a layer's training: queries [kv_head, group, n, head_dim], what the first tokens weigh in the attention over
    kept tokens, that attention and the exact one; keys and values of dropped tokens [kv_head, dropped, head_dim]."""

    queries: Floats
    unit: Floats
    kept: Floats
    exact: Floats
    keys: Floats
    values: Floats


@dataclass(frozen=True, slots=True)
class LowRank:
    """Trained weights, by layer, for a model and a context of which so many last tokens are kept. `steps`: the fewest
    of a layer; `error`: the share of the squared error that is left with the training's texts, in the mean of layers."""

    fingerprint: str
    tokens: int
    recent: int
    steps: int
    error: float
    layers: list[Weights]

    def save(self, path: Path) -> None:
        """Write them to a file of NumPy, whole or not at all. Raises OSError."""
        of = np.array([self.fingerprint, str(self.tokens), str(self.recent)])
        stacked = {name: np.stack([layer[name] for layer in self.layers]) for name in self.layers[0]}
        with replacing(path) as new, new.open("wb") as file:
            np.savez(file, of=of, training=np.array([self.steps, self.error]), **stacked)  # type: ignore[arg-type]

    def state(self, layer: int, kv: Floats) -> State:
        """Return the state of a layer's dropped tokens [k/v, kv_head, n, head_dim]."""
        weights = self.layers[layer]
        psi = _psi(weights, kv[0]).out
        return State(psi.sum(axis=1) / DROPPED, psi.transpose(0, 2, 1) @ kv[1] / DROPPED, weights)


def state_tokens(head_dim: int) -> int:
    """Return how many tokens take as many bytes as the state."""
    return -(-RANK * (head_dim + 1) // (2 * head_dim))


def opened(path: Path, fingerprint: str, layers: int, tokens: int, recent: int) -> LowRank:
    """Read weights. Raises ModelError for those of another model or size, or another file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("phi1", "phi2", "psi1", "psi2")}
            of, (steps, left) = file["of"].tolist(), file["training"].tolist()
            steps = int(steps)
        if {len(each) for each in arrays.values()} != {layers}:
            raise ValueError("other layers")
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, TypeError, OverflowError) as error:
        raise ModelError(f"{path} has no weights of LESS: {error}") from None
    if of != [fingerprint, str(tokens), str(recent)]:
        raise ModelError(f"{path} has weights for another model or context: {', '.join(of)}; give another file")
    weights = [dict(zip(arrays, each, strict=True)) for each in zip(*arrays.values(), strict=True)]
    return LowRank(fingerprint, tokens, recent, steps, left, weights)


def joined(state: State, queries: Floats, unit: Floats, kept: Floats) -> Floats:
    """Return the attention of queries [kv_head, group, head_dim] over kept and dropped tokens. `kept`: that over kept ones."""
    phi: Floats = unit * _phi(state.weights, queries[:, :, None]).out[:, :, 0]
    found: Floats = (kept + phi @ state.mixed) / (1 + phi @ state.mass[:, :, None])
    return found


# --------------------------------------------------------------------------------------------------------- training


def trained(
    engine: Llama,
    texts: Sequence[NDArray[np.int32]],
    tokens: int,
    recent: int,
    *,
    minutes: float,
    steps: int,
    progress: Callable[[str], None],
) -> LowRank:
    """Train on texts, of each of which the first `tokens` are a context and the others ask. Ends after `steps` of each layer,
    or earlier so that all take no longer than `minutes`."""
    spec, rng, ends = engine.spec, np.random.default_rng(6), time.monotonic() + 60 * minutes
    scratch, at = engine.new_sequence(len(texts[0])), np.arange(len(texts[0]))
    layers: list[Weights] = []
    errors, taken = [], []
    entering: list[NDArray[Any]] = list(texts)
    for index in range(spec.layers):
        samples = []
        for number, text in enumerate(entering):
            layer = computed(engine, scratch, index, text, at)
            entering[number] = layer.hidden
            samples.append(sample(layer, tokens, recent))
        seconds = (ends - time.monotonic()) / (spec.layers - index)
        weights, error, done = _fitted(samples, rng, steps, time.monotonic() + seconds)
        layers.append(weights)
        errors.append(error)
        taken.append(done)
        progress(f"LESS, layer {index}: {error:.2f} of the squared error without it, after {done} steps")
    scratch.close()
    return LowRank(spec.fingerprint, tokens, recent, min(taken), float(np.mean(errors)), layers)


def sample(layer: Computed, tokens: int, recent: int) -> Sample:
    """Return what a text teaches: the attention of those behind its context, with and without the tokens between the first and
    the `recent` ones of this."""
    keys, values = layer.kv.transpose(0, 2, 1, 3)
    queries, weights = layer.queries[:, tokens:].transpose(0, 2, 1, 3), causal_weights(layer, tokens)
    exact = weights @ values[:, None]
    dropped = slice(SINKS, tokens - recent)
    weights[..., dropped] = 0
    weights /= weights.sum(axis=3, keepdims=True)
    unit = weights[..., :SINKS].sum(axis=3, keepdims=True)
    return Sample(queries, unit, weights @ values[:, None], exact, keys[:, dropped], values[:, dropped])


def begun(sizes: tuple[int, int, int], rng: np.random.Generator, hidden: int = HIDDEN, rank: int = RANK) -> Weights:
    """Return weights by chance, for (kv_heads, group, head_dim)."""
    kv_heads, group, dim = sizes
    shapes = {
        "phi1": (kv_heads, group, dim, hidden),
        "phi2": (kv_heads, group, hidden, rank),
        "psi1": (kv_heads, dim, hidden),
        "psi2": (kv_heads, hidden, rank),
    }

    def uniform(shape: tuple[int, ...]) -> Floats:
        most = math.sqrt(6 / (shape[-2] + shape[-1]))
        return rng.uniform(-most, most, shape).astype(np.float32)

    return {name: uniform(shape) for name, shape in shapes.items()}


def _fitted(samples: Sequence[Sample], rng: np.random.Generator, steps: int, ends: float) -> tuple[Weights, float, int]:
    """Return weights, the share of the squared error that is left on all samples, and the steps taken."""
    kv_heads, group, _, dim = samples[0].queries.shape
    weights = begun((kv_heads, group, dim), rng)
    moments = [{name: np.zeros_like(each) for name, each in weights.items()} for _ in DECAYS]
    without = float(np.mean([np.square(each.exact - each.kept).mean() for each in samples])) or 1.0
    done = 0
    while done < steps and time.monotonic() < ends:
        _, gradients = error_of(weights, samples[int(rng.integers(len(samples)))], without)
        done += 1
        rate = LEARNING_RATE * (1 - (done - 1) / steps)
        for name, gradient in gradients.items():
            for moment, decay, power in zip(moments, DECAYS, (1, 2), strict=True):
                moment[name] += (1 - decay) * (gradient**power - moment[name])
            mean, square = (moment[name] / (1 - decay**done) for moment, decay in zip(moments, DECAYS, strict=True))
            weights[name] = weights[name] - np.float32(rate) * mean / (np.sqrt(square) + np.float32(1e-8))
    left = float(np.mean([error_of(weights, each, without)[0] for each in samples]))
    return weights, left, done


def error_of(weights: Weights, sample: Sample, without: float) -> tuple[float, Weights]:
    """Return the mean squared error of a sample, in units of `without`, and its gradients."""
    phi, psi = _phi(weights, sample.queries), _psi(weights, sample.keys)
    state = psi.out.transpose(0, 2, 1) @ sample.values / np.float32(DROPPED)
    mass = psi.out.sum(axis=1)[:, None, :, None] / np.float32(DROPPED)
    scaled = sample.unit * phi.out
    total = 1 + scaled @ mass
    found = (sample.kept + scaled @ state[:, None]) / total
    off = found - sample.exact
    error = float(np.square(off).mean()) / without
    d_mixed = off * np.float32(2 / off.size / without) / total
    d_total = -(d_mixed * found).sum(axis=3, keepdims=True)
    d_phi = sample.unit * (d_mixed @ state.transpose(0, 2, 1)[:, None] + d_total * mass.transpose(0, 1, 3, 2))
    d_state = (scaled.transpose(0, 1, 3, 2) @ d_mixed).sum(axis=1)
    d_mass = (scaled * d_total).sum(axis=(1, 2))[:, None]
    d_psi = (sample.values @ d_state.transpose(0, 2, 1) + d_mass) / np.float32(DROPPED)
    gradients = dict(zip(("phi1", "phi2"), phi.gradients(d_phi), strict=True))
    return error, gradients | dict(zip(("psi1", "psi2"), psi.gradients(d_psi), strict=True))


class _Positive:
    """|gelu(gelu(x A) B)|, and its gradients by A and B."""

    def __init__(self, x: Floats, first: Floats, second: Floats) -> None:
        self._x, self._second = x, second
        self._hidden, self._hidden_slope = _gelu(x @ first)
        out, slope = _gelu(self._hidden @ second)
        self.out: Floats = np.abs(out)
        self._slope: Floats = slope * np.sign(out)

    def gradients(self, of_out: Floats) -> tuple[Floats, Floats]:
        of_last: Floats = of_out * self._slope
        of_first: Floats = (of_last @ self._second.swapaxes(-1, -2)) * self._hidden_slope
        return self._x.swapaxes(-1, -2) @ of_first, self._hidden.swapaxes(-1, -2) @ of_last


def _phi(weights: Weights, queries: Floats) -> _Positive:
    return _Positive(queries * np.float32(math.sqrt(queries.shape[-1])), weights["phi1"], weights["phi2"])


def _psi(weights: Weights, keys: Floats) -> _Positive:
    return _Positive(keys, weights["psi1"], weights["psi2"])


def _gelu(x: Floats) -> tuple[Floats, Floats]:
    """Return gelu(x), by tanh, and its slope."""
    root = np.float32(math.sqrt(2 / math.pi))
    square = x * x
    tanh = np.tanh(root * x * (1 + np.float32(0.044715) * square))
    half: Floats = np.float32(0.5) * (1 + tanh)
    slope: Floats = half + np.float32(0.5) * x * (1 - tanh * tanh) * root * (1 + np.float32(0.134145) * square)
    out: Floats = x * half
    return out, slope
