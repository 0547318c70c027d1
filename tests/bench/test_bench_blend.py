"""`bench blend` at toy size: every way has its row, and each computes as much as it says."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from mooncake_zmq.bench.blend import PREFIX, WHOLE, edited
from mooncake_zmq.bench.command import bench

SIZES = ["--documents", "3", "--tokens", "48", "--following", "8", "--edited-tokens", "96", "--orders", "2"]


def test_each_way_has_its_row() -> None:
    model = 'dummy:{"layers": 8}'
    result = CliRunner().invoke(bench, ["blend", "--model", model, "--backend", "numpy", *SIZES, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    found = {(each["of"].split()[0], each["name"]): each for each in report["outcomes"]}
    assert len(found) == len(report["outcomes"]) == len(report["rows"]) + 2 == 12 + 7
    assert {found.pop(("3", PREFIX))["computed"], found.pop(("prompts", WHOLE))["computed"]} == {1.0}
    assert all(0 < each["kl"] < 1 and 0 < each["computed"] < 1 for each in found.values())
    computed = {name: each["computed"] for (_, name), each in found.items()}
    assert computed["reused, keys turned"] == computed["reused, keys not turned"] < 0.35, "the question alone"
    assert computed["reused, keys turned"] < computed["CacheBlend, 5 % by layer 1"] < computed["CacheBlend, 30 % by layer 1"]
    assert 0.05 < computed["replaced tokens computed"] < 0.4
    assert computed["SemShareKV: neighbours' KV for them"] <= computed["replaced tokens computed"]


@pytest.mark.parametrize("tokens", [33, 40])
def test_documents_whose_every_block_is_computed_again_are_measured(tokens: int) -> None:
    """As in the way that computes the first 32 tokens, of two blocks."""
    sizes = ["--documents", "2", "--tokens", str(tokens), "--following", "2", "--edited-tokens", "64", "--orders", "1"]
    result = CliRunner().invoke(bench, ["blend", "--model", 'dummy:{"layers": 2}', "--backend", "numpy", *sizes, "--json"])
    assert result.exit_code == 0, result.output
    found = {each["name"]: each["computed"] for each in json.loads(result.stdout.splitlines()[-1])["outcomes"]}
    assert found["EPIC, first 32 of each"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"), [(["dummy:tiny", "--tokens", "100000"], "positions"), (["toy"], "no KV of floats")]
)
def test_what_cannot_be_measured_is_refused(options: list[str], message: str) -> None:
    result = CliRunner().invoke(bench, ["blend", "--model", *options])
    assert result.exit_code != 0
    assert message in result.output


def test_a_tenth_of_an_edited_prompt_is_edited() -> None:
    tokens = np.arange(20_000, dtype=np.int32)
    changed = edited(tokens, 0.1, np.random.default_rng(1))
    assert abs(len(changed) - len(tokens)) < 200
    assert np.isin(tokens, changed).mean() == pytest.approx(0.91, abs=0.02)
    assert (np.diff(changed) == 1).mean() > 0.8
    assert edited(tokens, 1e-9, np.random.default_rng(1)).tolist() == tokens.tolist()
