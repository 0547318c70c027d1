"""`mooncake-zmq usage`: sums by day and key, of the files of several gateways."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mooncake_zmq.cli import main
from mooncake_zmq.operate.usage import usage
from mooncake_zmq.telemetry.usage import Meter

NOVEMBER_26 = 1_795_651_200.0  # seconds


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for gateway, key, day in (("a", "alice", 0), ("b", "alice", 0), ("b", "bob", 0), ("a", "alice", 1)):
        meter = Meter(tmp_path, f"gateway-{gateway}", now=lambda day=day: NOVEMBER_26 + 86_400 * day)
        meter.note(key, prompt=1000, cached=(100, 200, 300), completion=50)
        meter.write()
    return tmp_path


def sums(directory: Path, *options: str) -> list[tuple[str, str, int]]:
    told = CliRunner().invoke(usage, [str(directory), "--json", *options])
    assert told.exit_code == 0, told.output
    lines = map(json.loads, told.output.splitlines())
    return [(each["day"], each["key"], each["prompt_tokens"]) for each in lines]


def test_sums_are_by_day_and_key_over_all_gateways(directory: Path) -> None:
    assert sums(directory) == [("2026-11-26", "alice", 2000), ("2026-11-26", "bob", 1000), ("2026-11-27", "alice", 1000)]
    assert sums(directory, "--by", "key") == [("", "alice", 3000), ("", "bob", 1000)]
    assert sums(directory, "--by", "day", "--since", "2026-11-27") == [("2026-11-27", "", 1000)]
    assert sums(directory, "--key", "bob", "--until", "2026-11-26") == [("2026-11-26", "bob", 1000)]


def test_the_table_says_what_was_computed(directory: Path) -> None:
    told = CliRunner().invoke(usage, [str(directory)])
    assert "2026-11-26 alice 2 2,000 200 400 600 800 100" in " ".join(told.output.split())


def test_what_is_wrong_is_one_line(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = CliRunner().invoke(usage, [str(tmp_path_factory.mktemp("empty"))])
    assert (empty.exit_code, len(empty.output.splitlines())) == (1, 1)
    assert "write YYYY-MM-DD" in CliRunner().invoke(usage, [str(directory), "--since", "yesterday"]).output
    (directory / "usage-2026-11-28-gateway-c.jsonl").write_text("no JSON\n")
    spoilt = CliRunner().invoke(main, ["usage", str(directory)])
    assert spoilt.exit_code == 2
    assert "gateway-c.jsonl:1" in spoilt.output


def test_a_line_that_a_crash_cut_is_lost_alone(directory: Path) -> None:
    path = directory / "usage-2026-11-27-gateway-a.jsonl"
    path.write_bytes(path.read_bytes() + path.read_bytes()[:40])
    assert sums(directory, "--key", "alice", "--by", "key") == [("", "alice", 3000)]
    meter = Meter(directory, "gateway-a", now=lambda: NOVEMBER_26 + 86_400)
    meter.note("alice", prompt=5, cached=(0, 0, 0), completion=1)
    meter.write()
    assert sums(directory, "--key", "alice", "--by", "key") == [("", "alice", 3005)]
