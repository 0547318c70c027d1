"""`bench all` keeps what was measured, whatever fails; `bench compare` calls slower what noise does not explain."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from mooncake_zmq.bench.client_stream import Seen
from mooncake_zmq.bench.command import bench
from mooncake_zmq.bench.everything import COMMANDS, compared, missing
from mooncake_zmq.bench.zoo_live import row_of
from mooncake_zmq.bench.zoo_report import ZooReport
from mooncake_zmq.laboratory.reports import Found, run_all


def report(**ratios: float) -> dict[str, Any]:
    return {"bench": "x", "rows": [{"name": name, "ratio": ratio} for name, ratio in ratios.items()]}


def whole(*reports: dict[str, Any]) -> dict[str, Any]:
    return {"benches": [{"command": "bench x", "reports": list(reports), "errors": []}]}


def test_one_that_fails_is_named_and_the_others_are_kept_at_once() -> None:
    kept: list[int] = []

    def run(command: str) -> Found:
        if command == "bad":
            raise click.ClickException("no disk")
        return report(a=1.0)

    found = run_all(
        ["good", "bad", "better"], 2, run, lambda all_: kept.append(sum(len(b["reports"]) for b in all_["benches"]))
    )
    assert [(len(each["reports"]), each["errors"]) for each in found["benches"]] == [(2, []), (0, ["no disk"] * 2), (2, [])]
    assert kept == [0, 1, 1, 2, 3, 3, 4]
    assert {"commit", "machine"} <= found.keys()
    assert found["benches"][0]["command"] == "good"


@pytest.mark.parametrize(
    ("before", "after", "is_slower"),
    [
        ([1.0], [0.96], False),
        ([1.0], [0.94], True),
        ([1.0, 0.8, 0.9], [0.75], False),
        ([1.0, 0.8, 0.9], [0.7], True),
        ([1.0], [1.4], False),
        ([0.0], [0.0], False),
    ],
)
def test_slower_is_what_the_turns_own_differences_do_not_explain(
    before: list[float], after: list[float], is_slower: bool
) -> None:
    (change,) = compared(whole(*(report(a=each) for each in before)), whole(*(report(a=each) for each in after)))
    assert change.is_slower == is_slower


def test_the_zoo_is_compared_by_what_a_clairvoyant_would_compute() -> None:
    row = row_of("quiet", [Seen(status=200, finished=True, prompt_tokens=100, cached_tokens=50)], 40, {})
    before, after = (ZooReport("zoo", lines=[replace(row, finished=finished)]).as_json() for finished in (1, 0))
    (change,) = compared(whole(before), whole(after))
    assert (change.bench, change.row, change.before, change.is_slower) == ("zoo", "quiet, live", 0.8, True)


def test_a_benchmark_that_failed_is_no_success(tmp_path: Path) -> None:
    good, bad = whole(report(a=1.0)), whole(report(a=1.0))
    bad["benches"][0]["errors"] = ["exit status 1"]
    for name, each in (("a.json", good), ("b.json", bad)):
        (tmp_path / name).write_text(json.dumps(each))
    result = CliRunner().invoke(bench, ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert result.exit_code == 1
    assert "bench x: exit status 1" in result.output


def test_a_row_that_is_gone_is_named() -> None:
    assert missing(whole(report(a=1.0, b=1.0)), whole(report(a=1.0))) == ["x: b"]


@pytest.mark.parametrize(("ratio", "status"), [(1.0, 0), (0.5, 1)])
def test_the_exit_status_says_whether_anything_became_slower(ratio: float, status: int, tmp_path: Path) -> None:
    for name, value in (("a.json", 1.0), ("b.json", ratio)):
        (tmp_path / name).write_text(json.dumps(whole(report(decisions=value))))
    result = CliRunner().invoke(bench, ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert result.exit_code == status
    assert "decisions" in result.output
    assert ("slower" in result.output) == bool(status)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_all_runs_are_commands_with_such_options(command: str) -> None:
    name, *options = command.split()
    bench.commands[name].make_context(name, [*options, "--json"])


TRIED = {
    "all": "bench/test_everything.py",
    "answers": "bench/test_bench_answers.py",
    "attend": "bench/test_bench_attend.py",
    "blend": "bench/test_bench_blend.py",
    "client": "helpers/page_commands.py",
    "codecs": "bench/test_bench_codecs.py",
    "compare": "bench/test_everything.py",
    "engine": "bench/test_bench_engine.py",
    "gateway": "helpers/page_commands.py",
    "gpu": "bench/test_bench_gpu.py",
    "lending": "bench/test_bench_lending.py",
    "longprompt": "bench/test_longprompt.py",
    "meet": "helpers/page_commands.py",
    "overload": "helpers/page_commands.py",
    "pool": "bench/test_pool.py",
    "schedule": "bench/test_schedule.py",
    "select": "bench/test_bench_select.py",
    "serve": "helpers/page_commands.py",
    "vllm": "bench/test_bench_vllm.py",
    "zoo": "bench/test_bench_zoo.py",
}
"""Subcommands -> the file of tests/ that runs each of them at toy size."""


def test_every_benchmark_is_run_somewhere() -> None:
    assert TRIED.keys() == bench.commands.keys()
    for name, file in TRIED.items():
        text = (Path(__file__).parents[1] / file).read_text()
        assert f"bench {name}" in text or f'"{name}"' in text or f"bench_{name}" in text, f"{file} does not run {name}"


def test_a_benchmark_that_is_none_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(bench, ["all", "--json", str(tmp_path / "x.json"), "--only", "speed"])
    assert result.exit_code == 2
    assert "gateway" in result.output
