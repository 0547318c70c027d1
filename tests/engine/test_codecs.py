"""Codecs of KV: what is rounded stays so, each token by itself, and errors are as small as the bits allow."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.engine import codecs
from mooncake_zmq.kv.codec import CODECS, CUBIC, LINEAR, REACHES, ZEROS, Codec, rotated_together

DIMS = (2, 8, 16, 24, 64, 80, 96, 128, 192)


def drawn(seed: int, count: int, heads: int, dim: int) -> np.ndarray:
    """Numbers like keys: some channels are outliers."""
    random = np.random.default_rng(seed)
    spread = np.exp(random.normal(0, 1.5, (heads, dim)))
    return (random.normal(size=(count, heads, dim)) * spread).astype(np.float32)


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
@given(seed=st.integers(0, 1 << 30), dim=st.sampled_from(DIMS), heads=st.integers(1, 3))
def test_what_comes_back_is_what_rounding_gives_and_rounding_again_changes_nothing(
    codec: Codec, seed: int, dim: int, heads: int
) -> None:
    keys, values = drawn(seed, 5, heads, dim), drawn(seed + 1, 5, heads, dim)
    part = np.empty((5, codec.token_bytes(heads, dim)), np.uint8)
    codecs.encode(codec, keys, values, part)
    back = codecs.decode(codec, part, heads, dim)
    for one, two in zip(back, codecs.rounded(codec, keys, values), strict=True):
        assert one.tobytes() == two.tobytes()
    if codec.rounds_when_stored:
        again = np.empty_like(part)
        codecs.encode(codec, *back, again)
        assert again.tobytes() == part.tobytes(), "so a warm sequence stores what a cold one did"
        assert b"".join(each.tobytes() for each in codecs.rounded(codec, *back)) == b"".join(each.tobytes() for each in back)


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_each_token_is_rounded_by_itself(codec: Codec) -> None:
    keys, values = drawn(1, 9, 2, 64), drawn(2, 9, 2, 64)
    whole = np.empty((9, codec.token_bytes(2, 64)), np.uint8)
    codecs.encode(codec, keys, values, whole)
    for token in range(9):
        alone = np.empty((1, codec.token_bytes(2, 64)), np.uint8)
        codecs.encode(codec, keys[token : token + 1], values[token : token + 1], alone)
        assert alone.tobytes() == whole[token].tobytes()


@pytest.mark.parametrize(("name", "most"), [("int8", 0.02), ("k8v4", 0.1), ("int4", 0.1)])
def test_the_error_is_as_small_as_the_bits_allow(name: str, most: float) -> None:
    codec, numbers = CODECS[name], drawn(3, 200, 2, 64)
    _, values = codecs.rounded(codec, numbers, numbers)
    assert np.linalg.norm(values - numbers) / np.linalg.norm(numbers) < most


def levels() -> np.ndarray:
    """The 16 levels of 4 bits, for a scale of 1."""
    from_zero = np.arange(16) - ZEROS[4]
    return from_zero * (LINEAR + CUBIC * from_zero * from_zero)


def test_levels_are_exact_numbers_and_remain_so_times_any_scale() -> None:
    assert levels()[-1] == -levels()[0] == REACHES[4]
    for scale in (1.0, 1 + 127 / 128, 3 / 128):  # of 8 bits
        numbers = levels() * scale
        assert (numbers.astype(np.float32) == numbers).all()


@pytest.mark.parametrize("spread", [1e-6, 1.0, 3e4])
def test_a_number_in_4_bits_becomes_nearly_the_nearest_level(spread: float) -> None:
    codec = CODECS["int4"]
    numbers = (np.random.default_rng(5).normal(size=(300, 1, 64)) * spread).astype(np.float32)
    part = np.empty((300, codec.token_bytes(1, 64)), np.uint8)
    codecs.encode(codec, codecs.rotated(numbers), numbers, part)
    found = codecs.rotated(codecs.decode(codec, part, 1, 64)[0])
    scale = np.abs(numbers).max(axis=-1, keepdims=True) / REACHES[4]
    nearest = np.abs(numbers[..., None] - levels() * scale[..., None]).min(axis=-1)
    assert (np.abs(found - numbers) <= nearest + 0.2 * scale).all()  # of steps that are .67 and more


def test_the_levels_lose_less_of_normal_numbers_than_levels_at_equal_distances() -> None:
    numbers = np.random.default_rng(6).normal(size=(20_000, 1, 64)).astype(np.float32)
    _, found = codecs.rounded(CODECS["int4"], numbers, codecs.rotated(numbers))
    scales = np.abs(numbers).max(axis=-1, keepdims=True) / REACHES[4]
    even = (np.clip(np.floor(numbers / scales), -8, 7) + 0.5) * scales
    assert 0.77 < ((codecs.rotated(found) - numbers) ** 2).mean() / ((even - numbers) ** 2).mean() < 0.83


def test_a_rotation_keeps_lengths_and_spreads_an_outlier() -> None:
    for dim in DIMS:
        numbers = drawn(4, 7, 2, dim)
        turned = codecs.rotated(numbers)
        assert np.allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(numbers, axis=-1), rtol=1e-5)
        assert np.allclose(codecs.rotated(turned), numbers, atol=1e-4 * np.abs(numbers).max())
        outlier = np.zeros((1, 1, dim), np.float32)
        outlier[..., 0] = 8.0
        run = rotated_together(dim)
        assert np.allclose(np.abs(codecs.rotated(outlier))[0, 0, :run], 8.0 / math.sqrt(run))


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_nothing_and_what_is_not_finite_is_no_error(codec: Codec) -> None:
    zeros = np.zeros((2, 1, 64), np.float32)
    for each in codecs.rounded(codec, zeros, zeros):
        assert not each.any()
    broken = zeros.copy()
    broken[0, 0, 3], broken[1, 0, 0] = np.nan, 1.0
    keys, values = codecs.rounded(codec, broken, broken)
    for each in (keys, values):
        assert not np.isfinite(each[0]).all(), "what is broken does not become a number"
        assert np.isfinite(each[1]).all(), "nor does it touch another token"


def test_sizes_are_what_the_pages_say() -> None:
    assert {name: codec.bits_a_value(64) for name, codec in CODECS.items()} == {"int8": 8.25, "k8v4": 6.25, "int4": 4.25}
    assert CODECS["int4"].refusal(65)
    assert not CODECS["int4"].refusal(80)
