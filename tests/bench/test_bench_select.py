"""`bench select` at toy size: every way has its rows, and keeps and moves as much as it says."""

import json

import pytest
from click.testing import CliRunner

from mooncake_zmq.bench.command import bench
from mooncake_zmq.bench.selection import BASELINE, WAYS

SIZES = ["--tokens", "128", "--following", "3", "--shares", "4,8", "--speed-tokens", "160", "--steps", "2", "--rounds", "1"]


@pytest.mark.parametrize("backend", ["numpy", "auto"])
def test_each_way_has_its_row(backend: str) -> None:
    model = 'dummy:{"layers": 2}'
    result = CliRunner().invoke(bench, ["select", "--model", model, "--backend", backend, *SIZES, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    found = {(each["name"], each["share"]): each for each in report["outcomes"]}
    assert found.keys() == {(name, share) for name in (*WAYS, BASELINE) for share in (4, 8)}
    assert len(report["rows"]) == 2 * len(WAYS) + len(WAYS) + 1
    assert all(each["kl"] >= 0 and 0 < each["near"] < 1.2 for each in found.values())
    assert {each["attended"] for each in found.values()} == {52, 68}
    for share in (4, 8):
        fetched = {name: found[name, share]["fetched_bytes"] for name in (*WAYS, BASELINE)}
        assert fetched[BASELINE] == 0
        assert fetched["KCache"] == fetched["KCache, by values too"] > 0
        assert 0 < fetched["PQCache"] < 2 * fetched["KCache"], "rows have keys too, and some are near from the last step"
    assert found["KCache", 4]["near"] > found["KCache", 8]["near"] > 0.5, "all keys"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["dummy:tiny", "--tokens", "100000"], "positions"),
        (["dummy:tiny", "--tokens", "128", "--shares", "1"], "always attended to"),
        (["toy"], "no KV of floats"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], message: str) -> None:
    result = CliRunner().invoke(bench, ["select", "--model", *options, "--speed-tokens", "64", "--steps", "1"])
    assert result.exit_code != 0
    assert message in result.output
