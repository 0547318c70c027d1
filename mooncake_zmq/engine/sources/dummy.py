"""Random weights of a shape: for tests, benchmarks and bug reports that must not depend on a file."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine import tokenizer
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.matrices.quantized import Quantized
from mooncake_zmq.engine.sources.rope import rope_frequencies
from mooncake_zmq.engine.sources.source import StoredTensor, expected_shapes
from mooncake_zmq.engine.spec import FAMILIES, ModelSpec, check_spec

_TINY = ModelSpec(
    name="dummy-tiny",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=128,
    vocab_size=512,
    max_positions=4096,
    rope_theta=10000.0,
    norm_eps=1e-5,
    tied=False,
    eos_ids=(tokenizer.ByteVocabulary.END_ID,),
    bos_id=None,
    fingerprint="",
)
DUMMY_SHAPES = {
    "tiny": _TINY,
    "135m": replace(
        _TINY,
        name="dummy-135m",
        layers=30,
        hidden=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        ffn=1536,
        vocab_size=49152,
        max_positions=8192,
        rope_theta=100000.0,
        tied=True,
    ),
    "1b": replace(
        _TINY,
        name="dummy-1b",
        layers=16,
        hidden=2048,
        heads=32,
        kv_heads=8,
        head_dim=64,
        ffn=8192,
        vocab_size=128256,
        max_positions=16384,
        rope_theta=500000.0,
        tied=True,
    ),
}
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab_size", "max_positions")


class DummySource:
    """Random weights of a named shape, or of a JSON object that changes the tiny one. Same shape, same weights."""

    stored: Mapping[str, StoredTensor] = {}

    def __init__(self, config: str) -> None:
        self.spec = DUMMY_SHAPES[config] if config in DUMMY_SHAPES else self._parse(config)
        self._shapes = expected_shapes(self.spec)

    @staticmethod
    def _parse(config: str) -> ModelSpec:
        names = ", ".join(DUMMY_SHAPES)
        try:
            fields = json.loads(config)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"dummy:{config}: give one of {names}, or a JSON object of sizes") from error
        allowed = (*_SIZES, "rope_theta", "norm_eps", "tied", "family")
        unknown = sorted(set(fields) - set(allowed)) if isinstance(fields, dict) else [config]
        if unknown:
            raise ModelError(f"dummy: unknown {', '.join(unknown)}; known are {', '.join(allowed)}")
        spec = replace(_TINY, name="dummy", **fields)
        sizes = [getattr(spec, key) for key in _SIZES]
        numbers = [spec.rope_theta, spec.norm_eps]
        if not all(type(size) is int and size > 0 for size in sizes) or spec.vocab_size < 512:
            raise ModelError("dummy: sizes must be positive whole numbers and vocab_size at least 512")
        if not all(isinstance(number, int | float) and number > 0 for number in numbers):
            raise ModelError("dummy: rope_theta and norm_eps must be positive numbers")
        if spec.heads % spec.kv_heads or spec.head_dim % 2:
            raise ModelError("dummy: heads must be a multiple of kv_heads, and head_dim even")
        if not isinstance(spec.family, str) or spec.family not in FAMILIES:
            raise ModelError(f"dummy: family must be one of {', '.join(FAMILIES)}")
        check_spec(spec)
        return spec

    def tensor(self, name: str) -> NDArray[np.float32]:
        if name == "inv_freq":
            return rope_frequencies(self.spec)
        shape = self._shapes[name]
        if len(shape) == 1 and not name.endswith("_bias"):
            return np.ones(shape, dtype=np.float32)
        seed = int.from_bytes(name.encode(), "little") % 2**64
        values = np.random.Generator(np.random.Philox(key=seed)).standard_normal(shape, dtype=np.float32)
        return values / np.float32(math.sqrt(shape[-1]))

    def quantized(self, name: str) -> Quantized | None:
        return None

    def read_tokenizer(self) -> tokenizer.TokenizerParts:
        return tokenizer.byte_parts()
