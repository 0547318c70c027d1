"""`bench lending` at toy size: decodes as processes that lend and borrow, one that is killed, and one that stands still."""

import json

import pytest
from click.testing import CliRunner

from mooncake_zmq.bench.command import bench

MODEL = 'dummy:{"layers": 16}'
"""Layers enough for an answer not to end before its lender is stopped."""


@pytest.mark.timeout(300)
def test_lent_and_borrowed_kv_gives_the_tokens_of_one_decode() -> None:
    options = ["--model", MODEL, "--tokens", "512", "--batch", "3", "--kills", "1", "--json"]
    result = CliRunner().invoke(bench, ["lending", *options])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    longest, *_ = report["rows"]
    assert longest["value"] >= 0.95 * longest["reference"] == 0.95 * 4 * 512
    assert len(report["notes"]) == 4
