"""What biases make of keys and values stays out of their codes, and rounding again still changes nothing."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.engine import weights
from mooncake_zmq.engine.blend import read_kv
from mooncake_zmq.engine.codecs import LEAST_EXPONENTS
from mooncake_zmq.engine.coded_kv import CodedSequenceKV
from mooncake_zmq.engine.offsets import MOST_POWER, Offsets, divisors_of, offsets_of
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.kv.codec import CODECS, Codec

TOKENS, HEADS = 40, 2
ROUNDING = [codec for codec in CODECS.values() if codec.rounds_when_stored]


def offsets(dim: int, largest: float) -> Offsets:
    random = np.random.default_rng(dim)
    biases = random.uniform(-largest, largest, (1, 2, HEADS, dim)).astype(np.float32)
    return Offsets(biases, (10000.0 ** -np.linspace(0, 1, dim // 2)).astype(np.float32))


def sequence(codec: Codec, own: Offsets) -> CodedSequenceKV:
    shape = {"layers": 1, "kv_heads": HEADS, "head_dim": own.biases.shape[3], "capacity_tokens": 2 * TOKENS}
    return CodedSequenceKV(codec, own, **shape)


def changes_when_rounded_again(codec: Codec, own: Offsets, size: float, seed: int) -> bool:
    """Store keys and values of some size beside the offsets, and what their blocks bring of them; return whether either its KV
    or its blocks are others."""
    dim = own.biases.shape[3]
    plain = np.random.default_rng(seed).normal(0, size, (2, TOKENS, HEADS, dim)).astype(np.float32)
    of_keys, of_values = own.at(0, np.arange(TOKENS))
    one, two = sequence(codec, own), sequence(codec, own)
    parts = [np.zeros((TOKENS, codec.token_bytes(HEADS, dim)), np.uint8) for _ in range(2)]
    kv = np.zeros((2, 2, TOKENS, HEADS, dim), np.float32)
    one.store(0, 0, plain[0] + of_keys, plain[1] + of_values)
    one.read_part(0, 0, TOKENS, parts[0])
    two.write_part(0, 0, parts[0])
    two.read_part(0, 0, TOKENS, parts[1])
    for each, out in zip((one, two), kv, strict=True):
        super(CodedSequenceKV, each).read_part(0, 0, TOKENS, out)
    return parts[0].tobytes() != parts[1].tobytes() or kv[0].tobytes() != kv[1].tobytes()


@pytest.mark.parametrize("codec", ROUNDING, ids=lambda codec: codec.name)
@settings(max_examples=60)
@given(
    st.sampled_from((2, 16, 64, 128)), st.sampled_from((1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0, 50.0)), st.integers(0, 1 << 30)
)
def test_rounding_again_changes_nothing_however_small_the_numbers_are_beside_their_offsets(
    codec: Codec, dim: int, size: float, seed: int
) -> None:
    assert not changes_when_rounded_again(codec, offsets(dim, 150.0), size, seed)


def test_it_does_where_scales_have_no_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above sees what it is there for. With 8 bits it saw nothing: sums that are rounded lie on a grid, to which they
    come back, but for what single operations are off by."""
    monkeypatch.setattr(Offsets, "least_exponents", lambda self, codec: LEAST_EXPONENTS)
    assert changes_when_rounded_again(CODECS["k8v4"], offsets(64, 150.0), 1e-4, 1)


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_the_error_is_that_of_the_numbers_without_offsets(codec: Codec) -> None:
    """With 4 bits a rotated head's numbers are off by a fifteenth of their largest at most, so by less than 0.4 of the others'
    size here; with the offsets in them it would be 10."""
    own, random = offsets(64, 150.0), np.random.default_rng(4)
    plain = random.normal(0, 1, (2, TOKENS, HEADS, 64)).astype(np.float32)
    of_keys, of_values = own.at(0, np.arange(TOKENS))
    exact = np.stack((plain[0] + of_keys, plain[1] + of_values))
    one, part = sequence(codec, own), np.zeros((TOKENS, codec.token_bytes(HEADS, 64)), np.uint8)
    one.store(0, 0, *exact)
    one.read_part(0, 0, TOKENS, part)
    one.write_part(0, 0, part)
    out = np.zeros_like(exact)
    super(CodedSequenceKV, one).read_part(0, 0, TOKENS, out)
    assert np.sqrt(((out - exact) ** 2).mean()) < 0.15


def test_one_token_is_stored_as_many_are() -> None:
    own, random = offsets(16, 150.0), np.random.default_rng(5)
    keys, values = random.normal(0, 9, (2, TOKENS, HEADS, 16)).astype(np.float32)
    one, two = sequence(CODECS["k8v4"], own), sequence(CODECS["k8v4"], own)
    one.store(0, 3, keys, values)
    for token in range(TOKENS):
        two.append(0, 3 + token, keys[token], values[token])
    kept = slice(3, 3 + TOKENS)
    assert one.values[:, :, kept].tobytes() == two.values[:, :, kept].tobytes()
    kv = np.zeros((2, 2, TOKENS, HEADS, 16), np.float32)
    for each, out in zip((one, two), kv, strict=True):
        super(CodedSequenceKV, each).read_part(0, 3, 3 + TOKENS, out)
    assert kv[0].tobytes() == kv[1].tobytes()


def test_keys_of_4_bits_are_divided_by_what_makes_their_error_matter_least(tmp_path: Path) -> None:
    """Larger rows of keys and smaller ones of queries ask for larger divisors, for both channels of a pair."""
    path = prepare('dummy:{"family": "qwen2"}', tmp_path)
    spec, tensors = weights._map_tensors(path)
    rows = np.ones((spec.heads + 2 * spec.kv_heads) * spec.head_dim, np.float32)
    first_key = spec.heads * spec.head_dim
    rows[first_key + 4] = 64.0  # channels 4 and 5 of the first head
    rows[16:18] = 1 / 64  # channels 0 and 1 of one of the two queries of the first head: the other one counts
    before = divisors_of(spec, tensors, 0)
    scaled = tensors["0.qkv"] * np.pad(rows, (0, -len(rows) % 64)).reshape(-1, 1, 64)
    after = divisors_of(spec, tensors | {"0.qkv": scaled}, 0)
    assert after[0, 4] == after[0, 5] > 4 * before[0, 4]
    assert 1 <= after[0, 0] / after[0, 2] * before[0, 2] / before[0, 0] < 1.5
    np.testing.assert_array_equal(after[1], before[1])
    np.testing.assert_allclose(np.log2(after).mean(axis=1), 0, atol=0.15)
    assert offsets_of(spec, tensors, CODECS["int8"]).divisors is None  # type: ignore[union-attr]
    np.testing.assert_array_equal(offsets_of(spec, tensors, CODECS["int4"]).divisors[0, 0], before)  # type: ignore


def test_channels_without_weights_have_divisors_within_bounds(tmp_path: Path) -> None:
    """A pair of which the keys are the bias alone would have a divisor of 0, and drown its head in rounding errors."""
    spec, tensors = weights._map_tensors(prepare('dummy:{"family": "qwen2"}', tmp_path))
    rows = np.ones((spec.heads + 2 * spec.kv_heads) * spec.head_dim, np.float32)
    rows[spec.heads * spec.head_dim + 4 :][:2] = 0.0
    divisors = divisors_of(
        spec, tensors | {"0.qkv": tensors["0.qkv"] * np.pad(rows, (0, -len(rows) % 64)).reshape(-1, 1, 64)}, 0
    )
    assert 2.0**-MOST_POWER <= divisors[0, 4] < divisors[0, 6] / 2
    assert np.abs(np.log2(divisors)).max() < 2 * MOST_POWER


def test_parts_that_are_loaded_elsewhere_are_read_as_they_were_computed(tmp_path: Path) -> None:
    codec = CODECS["int8"]
    engine = weights.open_model(prepare('dummy:{"family": "qwen2"}', tmp_path), codec=codec)
    spec, (one, two) = engine.spec, [engine.new_sequence(160) for _ in range(2)]
    engine.prefill(one, np.arange(64, dtype=np.int32))
    part = np.zeros((32, codec.token_bytes(spec.kv_heads, spec.head_dim)), np.uint8)
    for layer in range(spec.layers):
        one.read_part(layer, 16, 48, part)
        two.write_part(layer, 100, part)
    computed = read_kv(engine, one, 16, 48)
    np.testing.assert_allclose(read_kv(engine, two, 100, 132, 16), computed, atol=1e-6)
    assert np.abs(read_kv(engine, two, 100, 132) - computed).max() > 0.1
