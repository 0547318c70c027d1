"""`bench codecs` at toy size, and what it compares with: each other way keeps what it says it keeps."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mooncake_zmq.bench.codec_baselines import SINKS, Baseline, adjacent_cosines, baselines, kept_tokens
from mooncake_zmq.bench.codec_pool import WAYS, Host
from mooncake_zmq.bench.codec_pruning import BY_PROMPT, FIXED, KEYS_ALONE, LAST, Pruning, left_out, mean_squares, prunings
from mooncake_zmq.bench.codecs import BESIDE
from mooncake_zmq.bench.command import bench
from mooncake_zmq.bench.quality import prepared_model
from mooncake_zmq.engine.blend import read_kv
from mooncake_zmq.engine.codecs import rotated, rounded
from mooncake_zmq.engine.weights import open_model
from mooncake_zmq.kv.codec import CODECS, EXACT

KEYS, VALUES = np.random.default_rng(4).standard_normal((2, 6, 96, 2, 64), dtype=np.float32)
OTHERS = {each.name: each for each in baselines(64, 6, 96, 4.25)}
PRUNINGS = {each.name: each for each in prunings(64, 96)}


def lost(other: Baseline) -> float:
    keys, values = other.change(KEYS, VALUES)
    return float(np.linalg.norm(keys - KEYS) + np.linalg.norm(values - VALUES)) / float(2 * np.linalg.norm(KEYS))


def run(*options: str) -> dict[str, Any]:
    result = CliRunner().invoke(bench, ["codecs", *options, "--json"])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


def test_each_codec_and_each_other_way_has_its_row() -> None:
    sizes = ["--model", "dummy:tiny", "--tokens", "48", "--following", "8", "--blocks", "2", "--rounds", "1"]
    report = run(*sizes, "--only", "quality", "--only", "rates", "--only", "pool")
    found = {each["name"]: each for each in report["qualities"]}
    assert {"exact", *CODECS, *OTHERS, *PRUNINGS} == set(found)
    assert found["exact"]["kl"] == 0
    assert [found[name]["warm"] == 0 for name in CODECS] == [codec.rounds_when_stored for codec in CODECS.values()]
    assert all(0 < found[name]["kl"] < 0.1 for name in CODECS)
    rates = [row for row in report["rows"] if row["unit"].startswith("GB/s")]
    assert len(rates) == 2 * len(CODECS)
    moves = [row for row in report["rows"] if row["unit"] == "tokens/s"]
    assert len(moves) == len(WAYS) * len(CODECS)
    assert len(report["rows"]) == len(rates) + len(moves) + len(BESIDE)
    assert sum("cosine" in note for note in report["notes"]) == 2


@pytest.mark.timeout(180)
@pytest.mark.parametrize("codec", [EXACT, *CODECS])
def test_blocks_that_are_not_loaded_are_noticed(codec: str) -> None:
    with ExitStack() as stack:
        host = Host(codec, 2, stack)
        refs = host.put()
        host.get(refs)
        host.check(refs)
        unloaded = Host(codec, 2, stack)
        with pytest.raises(AssertionError, match="not loaded"):
            unloaded.check(unloaded.put())


def test_over_a_link_two_clusters_answer_the_same_prompts() -> None:
    report = run("--model", "dummy:tiny", "--linked-tokens", "64", "--rounds", "1", "--only", "link")
    (row,) = report["rows"]
    assert row["name"] == "TTFT of 64 tokens over 100 MB/s and 16 more, int4 / exact"


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


def test_values_in_three_bits_leave_keys_as_int4_has_them() -> None:
    keys, values = OTHERS["int4, values in 3 bits"].change(KEYS, VALUES)
    assert keys.tobytes() == rounded(CODECS["int4"], KEYS, VALUES)[0].tobytes()
    losses = [float(np.linalg.norm(each - VALUES) / np.linalg.norm(VALUES)) for each in (keys, values)]
    assert 0.15 < losses[1] < 0.3
    assert len(np.unique(np.abs(np.round(rotated(values[0, 0, 0]) / np.abs(rotated(values[0, 0, 0])).max(), 4)))) <= 4


def mask_of(left: int) -> np.ndarray:
    mask = np.zeros((6, 2, 64), bool)
    mask[..., :left] = True
    return mask


@pytest.mark.parametrize("way", PRUNINGS.values(), ids=list(PRUNINGS))
def test_channels_are_left_out_but_for_a_prompts_last_keys(way: Pruning) -> None:
    keys, values = way.changed(KEYS, VALUES, mask_of(16))
    whole = 96 - LAST if way.mask == BY_PROMPT else 96
    assert not keys[:, :whole, :, :16].any()
    assert keys[:, whole:, :, :16].all()
    most = 0.15 if "4 bits" in way.name else 0
    assert np.linalg.norm(keys[..., 16:] - KEYS[..., 16:]) <= most * np.linalg.norm(KEYS)
    assert np.linalg.norm(values - VALUES) <= most * np.linalg.norm(VALUES)


def test_what_is_left_out_takes_no_bits() -> None:
    assert PRUNINGS[f"ThinK, {FIXED}"].bits == PRUNINGS[f"ThinK, {KEYS_ALONE}"].bits == 14
    assert PRUNINGS[f"ThinK, {FIXED}, with 4 bits"].bits == (48 * 4.5 + 64 * 4.25) / 128
    assert PRUNINGS[f"ThinK, {BY_PROMPT}"].bits == 14 + 2 * LAST / 96


def test_the_channels_with_the_lowest_scores_are_left_out() -> None:
    scores = np.random.default_rng(5).random((3, 2, 8), np.float32)
    mask = left_out(scores)
    assert (mask.sum(axis=-1) == 2).all()
    assert (np.where(mask, scores, 0).max(axis=-1) < np.where(mask, 1, scores).min(axis=-1)).all()


def test_scores_are_of_what_a_prefill_computes(tmp_path: Path) -> None:
    engine = open_model(prepared_model("dummy:tiny", str(tmp_path), kernels=False))
    tokens = np.arange(3, 40, dtype=np.int32)
    sequence = engine.new_sequence(len(tokens))
    engine.prefill(sequence, tokens)
    keys = read_kv(engine, sequence, 0, len(tokens))[:, 0]
    queries, squares = mean_squares(engine, tokens, last=5)
    assert np.allclose(squares, np.square(keys).mean(axis=1), rtol=1e-4)
    assert queries.shape == squares.shape
    assert not np.allclose(queries, mean_squares(engine, tokens, last=6)[0], rtol=1e-3)


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
