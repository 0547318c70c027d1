"""`bench attend` at toy size: two processes, equal tokens, and as many bytes as the arithmetic says."""

import json

import pytest
from click.testing import CliRunner

from mooncake_zmq.bench.command import bench

SIZES = ["--tokens", "200", "--lent", "96", "--batch", "3", "--steps", "3", "--rounds", "1"]


@pytest.mark.parametrize(
    "options", [["--backend", "numpy"], ["--clear"], ["--tokens", "380", "--lenders", "3"]], ids=["numpy", "clear", "three"]
)
def test_each_way_gives_the_tokens_of_all_kv_at_hand(options: list[str]) -> None:
    result = CliRunner().invoke(bench, ["attend", "--model", 'dummy:{"layers": 2}', *SIZES, *options, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert len(report["rows"]) == 2
    assert sum("greedy tokens equal" in note for note in report["notes"]) == 2, report["notes"]
    if "--lenders" in options:
        assert any("380 tokens in 4 places: 0.990" in note for note in report["notes"]), "longest context >= .95 of the sum"
    assert any("ESTIMATE" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("options", "message"),
    [(["toy"], "no KV of floats"), (["dummy:tiny", "--tokens", "64", "--lent", "64"], "lend fewer")],
)
def test_what_cannot_be_measured_is_refused(options: list[str], message: str) -> None:
    result = CliRunner().invoke(bench, ["attend", "--model", *options])
    assert result.exit_code != 0
    assert message in result.output
