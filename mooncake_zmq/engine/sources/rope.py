"""Inverse frequencies of RoPE, plain and scaled, in float32 steps as the reference computes them."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.spec import ModelSpec

SCALINGS = ("default", "linear", "llama3")


def rope_frequencies(spec: ModelSpec) -> NDArray[np.float32]:
    """Return theta ** (-2i/d), [head_dim / 2]. float32 steps matter: at position 3,000 one ulp is 2e-4 radians. Raises
    ModelError."""
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    with np.errstate(all="ignore"):
        return _finite(spec, np.float32(1.0) / np.power(np.float32(spec.rope_theta), exponents))


def scaled_frequencies(spec: ModelSpec, settings: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return `rope_frequencies` scaled as `spec.rope_scaling` says. Raises ModelError for an unknown scaling or missing
    settings."""
    base = rope_frequencies(spec)
    match spec.rope_scaling:
        case "default":
            return base
        case "linear":
            return _finite(spec, base / _number(spec, settings, "factor"))
        case "llama3":
            return _finite(spec, _llama3_frequencies(spec, base, settings))
    raise ModelError(f"{spec.name}: RoPE scaling {spec.rope_scaling!r} is not supported ({', '.join(SCALINGS)})")


def divided_frequencies(spec: ModelSpec, factors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `rope_frequencies` divided by factors computed beforehand, [head_dim / 2], as GGUF has them."""
    base = rope_frequencies(spec)
    if factors.shape != base.shape:
        raise ModelError(f"{spec.name}: its {factors.shape} RoPE factors do not fit {base.shape} frequencies")
    with np.errstate(all="ignore"):
        return _finite(spec, base / factors)


def _llama3_frequencies(spec: ModelSpec, base: NDArray[np.float32], settings: Mapping[str, Any]) -> NDArray[np.float32]:
    """Apply Llama 3.1's rule: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    factor, low, high, original = (
        _number(spec, settings, key)
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if high <= low:
        raise ModelError(f"{spec.name}: RoPE's high_freq_factor {high} does not exceed its low_freq_factor {low}")
    turns = original * base / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray((1 - smooth) * base / factor + smooth * base, dtype=np.float32)


def _number(spec: ModelSpec, settings: Mapping[str, Any], key: str) -> float:
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ModelError(f"{spec.name}: RoPE scaling {spec.rope_scaling!r} needs a positive {key}, not {value!r}")
    return float(value)


def _finite(spec: ModelSpec, frequencies: NDArray[Any]) -> NDArray[np.float32]:
    if not np.isfinite(frequencies).all():
        raise ModelError(f"{spec.name}: its RoPE settings give no finite frequencies")
    return np.asarray(frequencies, dtype=np.float32)
