"""`reproduce systems`: figures are in the commands' reports, verdicts are those of the bounds, nothing is measured twice."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mooncake_zmq.cli import main
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.reproduce.systems import (
    ANSWERS,
    SYSTEMS,
    Found,
    as_json,
    capacity,
    measured,
    over,
    reproduce_systems,
    row,
)

ROWS = {
    "hits, 20 predicted by a model of words / most frequent seen": (12.0, 10.0),
    "inferences, worst seed / target": (30.0, 35.0),
    "wrong, worst seed / max_error": (11.0, 10.0),
    "wrong / similar": (4.0, 8.0),
}
REPORT = {
    "machine": "a machine",
    "rows": [{"name": n, "value": v, "reference": r, "ratio": v / r} for n, (v, r) in ROWS.items()],
}
OF_ANSWERS = [each.name for each in SYSTEMS if each.by is ANSWERS]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("command", sorted({each.by.command for each in SYSTEMS}))
def test_each_figure_is_in_the_report_of_its_command(command: str) -> None:
    names = [each.name for each in SYSTEMS if each.by.command == command]
    judged = reproduce_systems(names, None, small=True, run=measured)
    assert [each.system.name for each in judged] == names
    assert all(len(each.values) == len(each.system.figures) for each in judged)


def test_every_system_has_a_bound_that_it_can_miss() -> None:
    for each in SYSTEMS:
        assert any((figure.least, figure.most) != (None, None) for figure in each.figures), each.name


def test_a_verdict_is_that_of_the_bounds() -> None:
    judged = {each.system.name: each for each in reproduce_systems(OF_ANSWERS, None, small=False, run=lambda words: REPORT)}
    assert judged["InstCache"].verdict == "works"
    assert judged["Approximate-key caching"].verdict == "does NOT: wrong of 1,000 given, worst seed"
    assert {each.machine for each in judged.values()} == {"a machine"}
    (_, found) = as_json(list(judged.values()))["rows"]
    assert [each["kept"] for each in found["figures"]] == [True, False, True]
    assert found["figures"][1] == {
        "what": "wrong of 1,000 given, worst seed",
        "ours": 11.0,
        "least": None,
        "most": 10,
        "kept": False,
    }


def test_what_was_measured_is_not_measured_again_and_is_kept_although_another_fails(tmp_path: Path) -> None:
    results, asked = tmp_path / "results.json", list[str]()

    def run(words: str) -> Found:
        asked.append(words)
        if words != ANSWERS.command:
            raise click.ClickException("no disk")
        return REPORT

    with pytest.raises(StudyError, match="bench blend --cpu-time: no disk"):
        reproduce_systems(["SemShareKV", *OF_ANSWERS], results, small=False, run=run)
    assert asked == ["bench blend --cpu-time"], "systems are measured in their order"
    reproduce_systems(OF_ANSWERS, results, small=False, run=run)
    assert [each.values[0] for each in reproduce_systems(OF_ANSWERS, results, small=False, run=run)] == [12.0, 30.0]
    assert asked == ["bench blend --cpu-time", ANSWERS.command]
    again = CliRunner().invoke(main, ["reproduce", "systems", "--only", OF_ANSWERS[0], "--results", str(results)])
    assert again.exit_code == 0, again.output
    assert "works" in again.stdout
    assert "a machine" in again.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["systems", "--only", "GPT"], "choose of Cake"),
        (["systems", "--trace", "x.jsonl"], "no --trace"),
        (["fig14", "--only", "Cake"], "are for systems"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["reproduce", *options])
    assert result.exit_code == 2
    assert said in result.output


def test_a_report_without_a_figure_and_a_file_without_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="has not measured: InstCache, % hit"):
        reproduce_systems(["InstCache"], None, small=False, run=lambda words: {"rows": []})
    (tmp_path / "x.json").write_text(json.dumps({"bench answers": {"report": {}}}))
    with pytest.raises(StudyError, match="no results"):
        reproduce_systems(["InstCache"], tmp_path / "x.json", small=False, run=lambda words: REPORT)


def test_capacity_is_the_highest_speed_at_which_enough_are_in_time() -> None:
    runs = [
        {"swept": {"policy": "vllm", "speed": speed}, "summary": {"within_slo": share}}
        for speed, share in (("1", 1.0), ("2", 0.91), ("3", 0.89))
    ]
    found = {"runs": runs}
    assert capacity("vllm")(found) == 2
    assert capacity("other")(found) == 0
    assert over(capacity("vllm"), capacity("other"))(found) == float("inf")
    assert row("a*", "share")({"rows": [{"name": "ab", "value": 2.0, "reference": 8.0}]}) == 0.25
