"""`bench zoo`: one table of every workload and policy, and how it refuses."""

import json
from array import array
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mooncake_zmq.bench.client_prompts import PromptForm, pieces
from mooncake_zmq.bench.client_stream import Seen
from mooncake_zmq.bench.command import bench
from mooncake_zmq.bench.everything import compared
from mooncake_zmq.bench.zoo import SMALL_REQUESTS, names, source_of
from mooncake_zmq.bench.zoo_live import SMALL_BLOCK, errors_between, least_tokens, parts_of, row_of
from mooncake_zmq.config.load import load as load_config
from mooncake_zmq.laboratory import zoo
from mooncake_zmq.laboratory.jobs import load
from mooncake_zmq.laboratory.study import TRACE_BLOCK_TOKENS, Arrival

QUICK = ("--prefill", "2", "--decode", "2", "--jobs", "2")


def run(*arguments: str):
    return CliRunner().invoke(bench, ["zoo", *arguments])


def test_every_workload_stands_beside_what_was_possible_under_every_policy() -> None:
    result = run("--small", "--only", "bursts,quiet", "--policy", "global,random,vllm", *QUICK, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["bench"] == "zoo"
    rows = report["rows"]
    assert [(each["workload"], each["policy"]) for each in rows] == [
        (kind, policy) for kind in ("bursts", "quiet") for policy in ("global", "random", "vllm")
    ]
    assert compared(whole := {"benches": [{"reports": [report]}]}, whole)[0].row == "bursts, global"
    for each in rows:
        assert each["requests"] == each["finished"] == SMALL_REQUESTS
        assert each["regret"] >= 1
        assert each["hits"] <= each["possible"] + 1e-9
        assert each["ttft_s"] >= each["least_ttft_s"] > 0
        assert 0 < each["first_gap_p99_s"] < 10
        assert 0 <= each["within_tbt"] <= 1
    assert rows[0]["possible"] == pytest.approx(7 / 8 * 8 / 9)
    assert rows[2]["hits"] == 0
    assert rows[2]["regret"] == pytest.approx(4.5)


def test_the_table_names_its_columns_and_their_units() -> None:
    result = run("--small", "--only", "system", "--policy", "global", *QUICK)
    assert result.exit_code == 0, result.output
    for word in ("hits/possible", "regret", "gap p99", "in TBT", "TTFT off", "means in s"):
        assert word in result.stdout


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_a_small_run_has_the_first_requests_of_the_whole_one(kind: str) -> None:
    small, whole = (load(source_of(kind, 3, small=each)) for each in (True, False))
    assert small == whole[:SMALL_REQUESTS]
    assert small != load(source_of(kind, 4, small=True))


def test_settings_reach_the_runs() -> None:
    slow = run("--small", "--only", "quiet", "--policy", "global", *QUICK, "--set", "costs.prefill_token_s=1e-3", "--json")
    assert slow.exit_code == 0, slow.output
    (row,) = json.loads(slow.stdout)["rows"]
    assert row["least_ttft_s"] > 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "lions"), "lions is none of bursts"),
        (("--policy", "best"), "best is none of coming"),
        (("--policy", ","), "nothing is none of coming"),
        (("--set", "conductor.nothing=1"), "no setting 'conductor.nothing'"),
        (("--hardware", "abacus"), "hardware 'abacus'"),
    ],
)
def test_what_cannot_be_run_is_said(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert said in result.output


def test_a_name_that_comes_twice_counts_once() -> None:
    assert names("--only", "b,a, b", ("a", "b")) == ("b", "a")
    assert names("--only", "", ("a", "b")) == ("a", "b")


# --- the live half


def prompt(arrival: Arrival, form: PromptForm) -> list[int]:
    return json.loads(b"".join(pieces(arrival, form)))


def answered(tokens: int, cached: int, times: tuple[float, ...] = (0.1, 0.2, 0.3)) -> Seen:
    seen = Seen(status=200, finished=True, ended_s=1.0, prompt_tokens=tokens, cached_tokens=cached)
    return replace(seen, token_s=array("d", times))


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("kind", zoo.KINDS)
def test_every_workload_fits_into_the_toy_cluster(kind: str, seed: int) -> None:
    config = load_config(Path(__file__).parent.parent.parent / "configs/toy.toml").config
    form = PromptForm(block_tokens=TRACE_BLOCK_TOKENS if kind == "bursts" else SMALL_BLOCK)
    for part in parts_of(kind, seed, 1.0):
        for each in chain(*part):
            assert form.length(each) + each.output_tokens <= config.model.max_model_len


def test_a_live_burst_could_do_with_its_prefix_once() -> None:
    (burst, *others) = parts_of("bursts", 0, 1.0)
    arrivals = list(chain(*burst))
    assert [len(each) for each in (burst, *others)] == [8, 8, 8]
    assert [round(b.at_s - a.at_s, 6) for a, b in pairwise(arrivals)] == [0.05] * 7
    form = PromptForm()
    seen = [answered(1_044, 0)] * 8
    assert least_tokens(arrivals, seen, form, 32) == 1_024 + 8 * 20
    row = row_of("bursts", seen, least_tokens(arrivals, seen, form, 32), {})
    assert (row.computed_tokens, row.least_tokens) == (8_352, 1_184)
    assert row.regret == pytest.approx(7.054, abs=1e-3)


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_the_least_is_of_the_very_tokens_that_are_sent(kind: str) -> None:
    form = PromptForm(block_tokens=SMALL_BLOCK)
    arrivals = list(chain(*chain(*parts_of(kind, 3, 1.0)[:1])))[:40]
    prompts = [prompt(each, form) for each in arrivals]
    known: set[tuple[int, ...]] = set()
    least = 0
    for tokens in prompts:
        begins = [tuple(tokens[:end]) for end in range(32, len(tokens) + 1, 32)]
        found = 32 * next((at for at, begin in enumerate(begins) if begin not in known), len(begins))
        least += len(tokens) - min(found, len(tokens) - 1)
        known.update(begins)
    seen = [answered(len(tokens), 0) for tokens in prompts]
    assert least_tokens(arrivals, seen, form, 32) == least


def test_a_request_that_was_refused_is_on_neither_side() -> None:
    arrivals = list(chain(*parts_of("bursts", 0, 1.0)[0]))[:2]
    seen = [Seen(status=429), answered(1_044, 0)]
    assert least_tokens(arrivals, seen, PromptForm(), 32) == 1_044
    row = row_of("bursts", seen, 1_044, {"ttft": 0.1})
    assert (row.requests, row.finished, row.regret, row.ttft_error, row.tbt_error) == (2, 1, 1.0, 0.1, -1.0)


@pytest.mark.parametrize(("tokens", "cached"), [(1_044, -1), (-1, -1), (-1, 0)])
def test_tokens_that_are_not_reported_are_not_taken_for_computed(tokens: int, cached: int) -> None:
    with pytest.raises(click.ClickException, match="1 of 2 answers do not report"):
        row_of("bursts", [answered(1_044, 0), answered(tokens, cached)], 1_184, {})


def test_the_first_gap_stands_beside_all_gaps() -> None:
    row = row_of("quiet", [answered(100, 50, (1.0, 1.5, 1.6, 1.7))], 50, {})
    assert row.first_gap_p99_s == pytest.approx(0.5)
    assert row.gap_p50_s == pytest.approx(0.1)
    assert row.ttft_s == 1.0


def test_predictions_count_from_one_look_at_the_books_to_the_next() -> None:
    assert errors_between({"ttft": (1.0, 10.0)}, {"ttft": (2.0, 14.0), "tbt": (1.0, 2.0)}) == {"ttft": 0.25, "tbt": 0.5}
    assert errors_between({"ttft": (1.0, 10.0)}, {"ttft": (1.0, 10.0)}) == {}


def test_no_part_of_any_workload_shares_a_block_with_another() -> None:
    parts = [part for kind in zoo.KINDS for part in parts_of(kind, 0, 1.0)]
    ids = [{block for each in chain(*part) for block in each.hash_ids} for part in parts]
    assert len(set().union(*ids)) == sum(map(len, ids))
