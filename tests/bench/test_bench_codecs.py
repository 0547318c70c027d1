"""`bench codecs` at toy size, and what it compares with: each other way keeps what it says it keeps."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from mooncake_zmq.bench.codec_baselines import SINKS, Baseline, adjacent_cosines, baselines, kept_tokens
from mooncake_zmq.bench.codecs import BESIDE
from mooncake_zmq.bench.command import bench
from mooncake_zmq.kv.codec import CODECS

KEYS, VALUES = np.random.default_rng(4).standard_normal((2, 6, 96, 2, 64), dtype=np.float32)
OTHERS = {each.name: each for each in baselines(64, 6, 96, 4.25)}


def lost(other: Baseline) -> float:
    keys, values = other.change(KEYS, VALUES)
    return float(np.linalg.norm(keys - KEYS) + np.linalg.norm(values - VALUES)) / float(2 * np.linalg.norm(KEYS))


def test_each_codec_and_each_other_way_has_its_row() -> None:
    sizes = ["--model", "dummy:tiny", "--tokens", "48", "--following", "8", "--blocks", "2", "--rounds", "1"]
    result = CliRunner().invoke(bench, ["codecs", *sizes, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    found = {each["name"]: each for each in report["qualities"]}
    assert {"exact", *CODECS, *OTHERS} == set(found)
    assert found["exact"]["kl"] == 0
    assert [found[name]["warm"] == 0 for name in CODECS] == [codec.rounds_when_stored for codec in CODECS.values()]
    assert all(0 < found[name]["kl"] < 0.1 for name in CODECS)
    rates = [row for row in report["rows"] if row["unit"].startswith("GB/s")]
    assert len(rates) == 2 * len(CODECS)
    assert len(report["rows"]) == len(rates) + len(BESIDE)
    assert sum("cosine" in note for note in report["notes"]) == 2


def test_a_context_that_is_too_long_is_refused() -> None:
    result = CliRunner().invoke(bench, ["codecs", "--model", "dummy:tiny", "--tokens", "1000000"])
    assert result.exit_code != 0
    assert "positions" in result.output


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("fp8 e4m3, scale 1 (vLLM's fp8)", 0.03),
        ("KIVI, 8 bits", 0.01),
        ("KIVI, K 8 and V 4 bits", 0.1),
        ("KIVI, 4 bits", 0.15),
        ("4 bits a token and head, not rotated", 0.15),
    ],
)
def test_what_rounds_loses_what_its_bits_cost(name: str, most: float) -> None:
    assert 0 < lost(OTHERS[name]) < most
    assert OTHERS[name].bits >= 4.25


def test_fp8_has_the_numbers_of_e4m3() -> None:
    given = np.array([0.0, 1.0, 1.06, 1.07, -3.3, 500.0, 2.0**-9, 2.0**-11, 0.017], np.float32).reshape(1, 1, 1, -1)
    rounded, _ = OTHERS["fp8 e4m3, scale 1 (vLLM's fp8)"].change(given, given)
    assert rounded.reshape(-1).tolist() == [0.0, 1.0, 1.0, 1.125, -3.25, 448.0, 2.0**-9, 0.0, 0.017578125]


def test_a_window_keeps_the_first_and_the_last_tokens_in_as_many_bytes() -> None:
    other = OTHERS[f"{SINKS} sinks and recent tokens"]
    keys, _ = other.change(KEYS, VALUES)
    kept = kept_tokens(96, 4.25)
    assert 16 * kept == pytest.approx(4.25 * 96, rel=0.05)
    assert keys.tobytes() == np.concatenate((KEYS[:, :SINKS], KEYS[:, 96 - kept + SINKS :]), axis=1).tobytes()


def test_layers_that_are_alike_are_merged_without_loss_and_others_are_not() -> None:
    other = OTHERS["MiniCache"]
    assert 13 < other.bits < 14, "two of six layers are merged"
    alike = np.repeat(KEYS[:1], 6, axis=0) * np.arange(1, 7, dtype=np.float32).reshape(6, 1, 1, 1)
    keys, values = other.change(alike, VALUES)
    assert np.allclose(keys, alike, rtol=1e-3, atol=1e-3)
    assert not np.allclose(values, VALUES, atol=0.5)
    assert (values[:3] == VALUES[:3]).all()
    assert np.allclose(adjacent_cosines(alike), 1, atol=1e-5)
    assert np.abs(adjacent_cosines(VALUES)).max() < 0.1
