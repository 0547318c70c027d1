"""Engines whose blocks are coded: what comes from a pool is what was computed, and machine code makes the bytes of NumPy."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake_zmq.engine import codecs, weights
from mooncake_zmq.engine.coded_kv import CodedSequenceKV
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.engine.offsets import Offsets, offsets_of
from mooncake_zmq.engine.prepare import default_cache_dir, prepare
from mooncake_zmq.engine.spec import Engine
from mooncake_zmq.kv.codec import CODECS, Codec

TOKENS = np.random.default_rng(3).integers(0, 500, 210).astype(np.int32)
BLOCK = 32
CACHED = 160
SHAPES = [(64, 3), (128, 1), (80, 2), (96, 2), (10, 3), (4, 1), (32, 2)]
"""Sizes of heads and their number: of one run, several and less, and no whole vectors."""
ROUNDING = [name for name, codec in CODECS.items() if codec.rounds_when_stored]


@pytest.fixture(scope="session", params=["llama", "qwen2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without biases, and one with some."""
    return prepare(f'dummy:{{"family": "{request.param}"}}', tmp_path_factory.mktemp("models"))


def opened(path: Path, backend: str, codec: Codec | None) -> Engine:
    """Return an engine. Biases of one pair of a key's channels, which turns slowly, and of one of a value's are large."""
    spec, tensors = weights._map_tensors(path)
    for name in [name for name in tensors if name.endswith("qkv_bias")]:
        tensors[name] = tensors[name].copy()
        keys, values = tensors[name][-2 * spec.kv_heads * spec.head_dim :].reshape(2, spec.kv_heads, spec.head_dim)
        keys[:, -2:], values[:, 3] = 150.0, 40.0
    if backend == "numpy":
        sequences = None if codec is None else partial(CodedSequenceKV, codec, offsets_of(spec, tensors, codec))
        return Llama(spec, tensors, sequences=sequences)
    compiled = pytest.importorskip("mooncake_zmq.engine.machine_code.compiled", reason="needs Numba")
    engine: Engine = compiled.CompiledLlama(spec, tensors, {}, threads=2, codec=codec, cache_dir=default_cache_dir())
    return engine


def handed_over(engine: Engine, codec: Codec, source: SequenceKV, tokens: int) -> SequenceKV:
    """Return a sequence that has the first tokens of another by its blocks alone, as after a handoff or from a pool."""
    spec, taken = engine.spec, engine.new_sequence(256)
    for layer in range(spec.layers):
        for start in range(0, tokens, BLOCK):
            count = min(BLOCK, tokens - start)
            part = np.zeros((BLOCK, codec.token_bytes(spec.kv_heads, spec.head_dim)), np.uint8)
            source.read_parts([(layer, start, count, part)])
            taken.write_parts([(layer, start, count, part)])
    taken.set_length(tokens)
    return taken


def answers(engine: Engine, codec: Codec) -> tuple[bytes, bytes, bytes]:
    """Return the logits of a prompt's end and of five tokens after it: of one engine alone, of one that loads the beginning,
    and of one that has the whole prompt, and later the tokens so far, by handoffs."""

    def after(sequence: SequenceKV, begin: int, moves: bool) -> bytes:
        found = [engine.prefill(sequence, TOKENS[begin:200])]
        for position in range(200, 205):
            if moves:
                sequence = handed_over(engine, codec, sequence, position)
            found.append(engine.decode([sequence], TOKENS[position : position + 1]))
        return b"".join(np.asarray(each).tobytes() for each in found)

    cold = engine.new_sequence(256)
    engine.prefill(cold, TOKENS[:CACHED])
    warm = [handed_over(engine, codec, cold, CACHED) for _ in range(2)]
    return after(cold, CACHED, False), after(warm[0], CACHED, False), after(warm[1], CACHED, True)


@pytest.mark.parametrize("backend", ["numpy", "compiled"])
@pytest.mark.parametrize("name", ROUNDING)
def test_warm_logits_are_the_cold_ones_bit_by_bit(path: Path, backend: str, name: str) -> None:
    cold, warm, moved = answers(opened(path, backend, CODECS[name]), CODECS[name])
    assert cold == warm
    assert cold == moved


def test_they_are_not_where_rounding_is_forgotten_as_kv_is_stored(tiny_path: Path) -> None:
    """The comparison above sees the mistake that it is there for, and what int4 does by design."""
    for codec in (replace(CODECS["int8"], rounds_when_stored=False), CODECS["int4"]):
        cold, warm, _ = answers(opened(tiny_path, "numpy", codec), codec)
        assert cold != warm


class WithoutOffsets(CodedSequenceKV):
    """Forgets them as parts are loaded."""

    def write_part(self, layer: int, start: int, part: Any) -> None:
        _, kv_heads, _, head_dim, _ = self.keys.shape
        SequenceKV.store(self, layer, start, *codecs.decode(self._codec, part, kv_heads, head_dim))


class OffsetsOfTheNext(CodedSequenceKV):
    """Adds those of the next position as parts are loaded."""

    def write_part(self, layer: int, start: int, part: Any) -> None:
        _, kv_heads, _, head_dim, _ = self.keys.shape
        positions = np.arange(start, start + len(part)) + 1
        found = self._plus_offsets(layer, positions, *codecs.decode(self._codec, part, kv_heads, head_dim))
        SequenceKV.store(self, layer, start, *found)


@pytest.mark.parametrize("path", ["qwen2"], indirect=True)
@pytest.mark.parametrize("wrong", [WithoutOffsets, OffsetsOfTheNext])
def test_nor_are_they_with_wrong_offsets(path: Path, wrong: type[CodedSequenceKV]) -> None:
    codec, engine = CODECS["int8"], opened(path, "numpy", CODECS["int8"])
    assert isinstance(engine, Llama)
    engine._new_sequence = partial(wrong, codec, offsets_of(engine.spec, engine._tensors, codec))
    cold, warm, _ = answers(engine, codec)
    assert cold != warm


@pytest.mark.parametrize("name", ROUNDING)
def test_a_prompt_in_other_chunks_has_the_same_kv_but_for_few_codes(tiny_path: Path, name: str) -> None:
    """Products of other shapes differ in the last bits, which may change a code by one."""
    engine, codec = opened(tiny_path, "numpy", CODECS[name]), CODECS[name]
    spec, parts = engine.spec, []
    for chunk in (200, 57):
        sequence = engine.new_sequence(256)
        for start in range(0, 200, chunk):
            engine.prefill(sequence, TOKENS[start : min(start + chunk, 200)])
        part = np.zeros((spec.layers, 200, codec.token_bytes(spec.kv_heads, spec.head_dim)), np.uint8)
        sequence.read_parts([(layer, 0, 200, part[layer]) for layer in range(spec.layers)])
        parts.append(part)
    assert (parts[0] != parts[1]).mean() < 0.01


@pytest.fixture(scope="module")
def coded_by_machine() -> Callable[..., SequenceKV]:
    """Make sequences that machine code codes."""
    object_code = pytest.importorskip("mooncake_zmq.engine.machine_code.object_code", reason="needs Numba")
    from mooncake_zmq.engine.machine_code.placed_parts import PlacingCodedKV

    code = object_code.load(default_cache_dir(), object_code.CODECS)
    return partial(PlacingCodedKV, code)


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
@pytest.mark.parametrize("largest", [0.0, 150.0])
def test_machine_code_writes_and_reads_the_bytes_of_numpy(
    coded_by_machine: Callable[..., SequenceKV], codec: Codec, largest: float
) -> None:
    random = np.random.default_rng(0)
    for dim, heads in SHAPES:
        frequencies = (10000.0 ** -np.linspace(0, 1, dim // 2)).astype(np.float32)
        biases = random.uniform(-largest, largest, (2, 2, heads, dim)).astype(np.float32)
        divisors = np.repeat(np.exp2(random.uniform(-3, 3, (2, heads, dim // 2))).astype(np.float32), 2, axis=2)
        offsets = Offsets(biases, frequencies, divisors if codec.rotates_keys else None) if largest else None
        shape = {"layers": 2, "kv_heads": heads, "head_dim": dim, "capacity_tokens": 300}
        spread = np.exp(random.normal(0, 1.5, (heads, dim)))
        keys, values = ((random.normal(size=(200, heads, dim)) * spread).astype(np.float32) for _ in range(2))
        keys[5] = values[6] = 0.0
        reference, coded = CodedSequenceKV(codec, offsets, **shape), coded_by_machine(codec, offsets, **shape)
        for sequence in (reference, coded):
            sequence.keys[:] = sequence.values[:] = 0.0
            sequence.store(1, 37, keys, values)
        for start, count in ((37, 200), (40, 32), (64, 64), (100, 3), (63, 33)):
            parts = [np.zeros((count, codec.token_bytes(heads, dim)), np.uint8) for _ in range(2)]
            reference.read_part(1, start, start + count, parts[0])
            coded.read_part(1, start, start + count, parts[1])
            assert parts[0].tobytes() == parts[1].tobytes(), (dim, start, count)
            for sequence in (reference, coded):
                sequence.write_part(0, start, parts[0])
            assert reference.keys.tobytes() == coded.keys.tobytes(), (dim, start, count)
            assert reference.values.tobytes() == coded.values.tobytes(), (dim, start, count)


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_what_is_not_finite_stays_so_in_machine_code_too(coded_by_machine: Callable[..., SequenceKV], codec: Codec) -> None:
    sequence = coded_by_machine(codec, layers=1, kv_heads=1, head_dim=64, capacity_tokens=64)
    numbers = np.ones((3, 1, 64), np.float32)
    numbers[0, 0, 5], numbers[1, 0, 9] = np.inf, np.nan
    SequenceKV.store(sequence, 0, 0, numbers, numbers)
    part = np.zeros((3, codec.token_bytes(1, 64)), np.uint8)
    sequence.read_part(0, 0, 3, part)
    sequence.write_part(0, 0, part)
    out = np.empty((2, 3, 1, 64), np.float32)
    SequenceKV.read_part(sequence, 0, 0, 3, out)
    assert [np.isfinite(out[:, token]).any() for token in range(2)] == [False, False]
    assert np.isfinite(out[:, 2]).all()


@pytest.mark.parametrize("name", ROUNDING)
def test_machine_code_rounds_what_it_stores_as_numpy_does(path: Path, name: str) -> None:
    """Rounding what a step of machine code has stored changes nothing."""
    codec = CODECS[name]
    engine = opened(path, "compiled", codec)
    sequence = engine.new_sequence(256)
    engine.prefill(sequence, TOKENS[:100])
    engine.decode([sequence], TOKENS[100:101])
    again = handed_over(engine, codec, sequence, 101)
    spec, exact = engine.spec, np.empty((2, 2, 101, engine.spec.kv_heads, engine.spec.head_dim), np.float32)
    for layer in range(spec.layers):
        for each, out in zip((sequence, again), exact, strict=True):
            SequenceKV.read_part(each, layer, 0, 101, out)
        assert exact[0].tobytes() == exact[1].tobytes()


def test_parts_of_another_shape_are_refused(coded_by_machine: Callable[..., SequenceKV]) -> None:
    sequence = coded_by_machine(CODECS["int8"], layers=1, kv_heads=2, head_dim=64, capacity_tokens=64)
    size = CODECS["int8"].token_bytes(2, 64)
    for part in (np.zeros((8, size + 1), np.uint8), np.zeros((8, size), np.float32), np.zeros((8, 2 * size), np.uint8)[:, ::2]):
        with pytest.raises(ValueError, match="a coded part"):
            sequence.write_part(0, 0, part)
    with pytest.raises(ValueError, match="outside"):
        sequence.write_part(0, 60, np.zeros((8, size), np.uint8))
