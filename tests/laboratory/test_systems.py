"""`reproduce systems`: figures are in the commands' reports, verdicts are those of the bounds, nothing is measured twice."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mooncake_zmq.cli import main
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.reports import Found, measured
from mooncake_zmq.laboratory.reproduce.systems import (
    ANSWERS,
    SYSTEMS,
    Bounded,
    Judged,
    as_json,
    capacity,
    over,
    reproduce_systems,
    row,
)
from mooncake_zmq.refused import Refused

ROWS = {
    "hits, 4,000 predicted by a model of words / most frequent seen": (12.0, 10.0),
    "inferences, worst seed / target": (30.0, 35.0),
    "wrong, worst seed / max_error": (11.0, 10.0),
}
REPORT = {
    "rows": [{"name": n, "value": v, "reference": r, "ratio": v / r} for n, (v, r) in ROWS.items()],
}
CLOSED = "LESS, our kernel: share of KL closed / asked"
OF_ANSWERS = [each.name for each in SYSTEMS if each.by is ANSWERS]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("command", sorted({each.by.command for each in SYSTEMS}))
def test_each_figure_is_in_the_report_of_its_command(command: str) -> None:
    names = [each.name for each in SYSTEMS if each.by.command == command]
    judged = reproduce_systems(names, None, small=True, run=partial(measured, timeout_s=170))
    assert [each.system.name for each in judged] == names
    assert [(each.error, len(each.values)) for each in judged] == [("", len(each.system.figures)) for each in judged]
    assert {each["verdict"] for each in as_json(judged)["rows"]} == {None}, "nothing was asked at toy size"
    assert all(each["command"] != command for each in as_json(judged)["rows"]), "the words that were run"


ASKED = {
    "Cake": [1, 1],
    "ThinK": [0.025, 0.6],
    "MiniCache": [],
    "SemShareKV": [0.5, 0.08],
    "CacheBlend's practice": [0.35, 0.03, 0.92],
    "Infinite-LLM": [1.15],
    "Lamina": [],
    "KCache": [0.01, 0.55, 1],
    "PQCache": [0.03, 0.25, 1],
    "PyramidInfer": [1],
    "Elastic Cache": [1],
    "LESS, our kernel": [0.25],
    "InstCache": [],
    "Approximate-key caching": [35, 10],
    "Sarathi-Serve": [],
}
"""The bounds of the project's plan, by system."""


def test_each_bound_is_one_that_was_asked_and_a_figure_at_it_keeps_it_and_one_beyond_does_not() -> None:
    assert {each.name for each in SYSTEMS} == ASKED.keys()
    for system in SYSTEMS:
        at = [each.most if each.most is not None else each.least or 0.0 for each in system.figures]
        bounded = [number for number, each in enumerate(system.figures) if each.is_bounded]
        assert [at[number] for number in bounded] == ASKED[system.name], system.name
        judged = Judged(system=system, words="", small=False, stamp="", values=tuple(at))
        assert judged.verdict == ("works" if bounded else None)
        for number in bounded:
            missed = [*at]
            missed[number] *= 0.99 if system.figures[number].most is None else 1.01
            assert replace(judged, values=tuple(missed)).verdict == f"does NOT: {system.figures[number].what}"


def test_the_share_that_less_closes_is_what_is_bounded() -> None:
    (less,) = (each for each in SYSTEMS if each.name.startswith("LESS"))
    rows = [{"name": name, "value": value} for name, value in (("KL, LESS, our kernel / x", 0.9), (CLOSED, 0.08))]
    assert [figure.read({"rows": rows}) for figure in less.figures] == [0.08]


def test_a_verdict_is_that_of_the_bounds() -> None:
    judged = {each.system.name: each for each in reproduce_systems(OF_ANSWERS, None, small=False, run=lambda words: REPORT)}
    assert judged["InstCache"].verdict is None, "no bound was asked"
    assert judged["Approximate-key caching"].verdict == "does NOT: wrong of 1,000 given, worst seed"
    (_, found) = as_json(list(judged.values()))["rows"]
    assert found["figures"][1] == {"what": "wrong of 1,000 given, worst seed", "ours": 11.0, "least": None, "most": 10}


def test_what_was_measured_is_not_measured_again_and_is_kept_although_another_fails(tmp_path: Path) -> None:
    results, asked = tmp_path / "results.json", list[str]()

    def run(words: str) -> Found:
        asked.append(words)
        if words != ANSWERS.command:
            raise click.ClickException("no disk")
        return REPORT

    failed, *found = reproduce_systems(["SemShareKV", *OF_ANSWERS], results, small=False, run=run)
    assert (failed.error, failed.verdict) == ("no disk", None)
    assert [each.values[0] for each in found] == [12.0, 30.0]
    assert asked == ["bench blend --cpu-time", ANSWERS.command], "systems are measured in their order"
    assert [each.values[0] for each in reproduce_systems(OF_ANSWERS, results, small=False, run=run)] == [12.0, 30.0]
    assert asked == ["bench blend --cpu-time", ANSWERS.command]
    again = CliRunner().invoke(main, ["reproduce", "systems", "--only", OF_ANSWERS[1], "--results", str(results)])
    assert again.exit_code == 0, again.output
    assert "does NOT" in again.stdout
    results.write_text(results.read_text().replace('"commit": "', '"commit": "x'))
    assert "not this checkout's" in reproduce_systems(OF_ANSWERS, results, small=False, run=run)[0].stamp


def test_a_file_that_cannot_be_written_is_noticed_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="--results .*No such file"):
        reproduce_systems(OF_ANSWERS, tmp_path / "no" / "x.json", small=False, run=lambda words: pytest.fail("was run"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["systems", "--only", "GPT"], "choose of Cake"),
        (["systems", "--trace", "x.jsonl"], "no --trace"),
        (["systems", "--jobs", "2"], "no --trace"),
        (["fig14", "--only", "Cake"], "are for systems"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["reproduce", *options])
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("value", [None, "text", "nan", float("inf")])
def test_a_figure_that_is_missing_or_no_number_is_not_measured(value: object) -> None:
    rows = [] if value is None else [{"name": "hits, 4,000 predicted by a model of words / x", "value": value, "ratio": 1.0}]
    (judged,) = reproduce_systems(["InstCache"], None, small=False, run=lambda words: {"rows": rows})
    assert judged.error.startswith("% hit: ")
    assert (judged.values, judged.verdict) == ((), None)


@pytest.mark.parametrize(
    "text", ['{"bench answers": {"report": {}}}', "[]", "x", '{"benches": [{"command": "bench answers"}]}']
)
def test_a_file_without_results_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(StudyError, match="no results"):
        reproduce_systems(["InstCache"], tmp_path / "x.json", small=False, run=lambda words: REPORT)


def test_capacity_is_the_speed_before_the_first_at_which_too_few_are_in_time() -> None:
    shares = (("1", 1.0), ("2", 0.91), ("3", 0.89), ("4", 0.95))
    found = {"runs": [{"swept": {"policy": "vllm", "speed": s}, "summary": {"within_slo": share}} for s, share in shares]}
    assert capacity("vllm")(found) == 2
    for unknown in ({"runs": found["runs"][:2]}, {"runs": found["runs"][2:]}, {"runs": []}):
        with pytest.raises(ValueError, match="capacity of vllm"):
            capacity("vllm")(unknown)
    assert row("a*", "share")({"rows": [{"name": "ab", "value": 2.0, "reference": 8.0}]}) == 0.25
    with pytest.raises(ZeroDivisionError):
        over(row("a"), row("a", "reference"))({"rows": [{"name": "a", "value": 0.0, "reference": 0.0}]})
    with pytest.raises(ValueError, match="too many"):
        row("a*")({"rows": [{"name": "ab", "value": 2.0}, {"name": "ac", "value": 2.0}]})
    assert Bounded("KL", row("a"), most=0.5).sentence(0.25) == "KL 0.25 (asked: at most 0.5)"
