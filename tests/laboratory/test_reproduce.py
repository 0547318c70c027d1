"""`mooncake-zmq reproduce`: what is run, what is judged, and what is said beside the paper's figures."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from mooncake_zmq.cli import main
from mooncake_zmq.laboratory import coupled
from mooncake_zmq.laboratory.cluster import cluster_of
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.generated import generate, parse_spec
from mooncake_zmq.laboratory.jobs import Source
from mooncake_zmq.laboratory.reproduce import made, met, modelled
from mooncake_zmq.laboratory.reproduce.command import FIGURES
from mooncake_zmq.laboratory.reproduce.figure import HARDWARE, Conclusion
from mooncake_zmq.laboratory.reproduce.made import MADE
from mooncake_zmq.laboratory.reproduce.plans import COUPLED, FIG1, FIG5, FIG10, FIG13, PLANS
from mooncake_zmq.laboratory.reproduce.replayed import FAILED, measure, reproduce, variants
from mooncake_zmq.laboratory.reproduce.show import as_json, plot, sentence
from mooncake_zmq.laboratory.runs import run_one

SOURCE = Source(shape=parse_spec("conversation:requests=30"))


def command(*arguments):
    return CliRunner().invoke(main, ["reproduce", *arguments])


def planted(plan, value, failed=lambda setup: 0.0):
    """The figure if `value(setup)` were what every measure shows; and the setups that were run."""
    setups = []

    def run(jobs):
        setups.extend(job.setup for job in jobs)
        return [dict.fromkeys(plan.units, value(job.setup)) | {FAILED: failed(job.setup)} for job in jobs]

    return reproduce(plan, SOURCE, run), setups


def test_every_assumption_is_tried_with_two_values_on_two_kinds_of_hardware():
    for plan in PLANS.values():
        tried = variants(plan)
        assert len(tried) == 2 * (1 + len(plan.assumptions))
        assert {hardware.name for hardware, _ in tried} == {each.name for each in HARDWARE}
        assert all(each.value != each.other and each.why for each in plan.assumptions)


def test_every_figure_can_be_set_up_and_none_is_run_twice():
    for plan in PLANS.values():
        figure, setups = planted(plan, lambda setup: 1.0)
        assert len(setups) == len({repr(setup) for setup in setups})
        assert len(figure.rows) == len(plan.arms) * len(plan.units)
        assert len(figure.conclusions) == len(plan.claims)
        assert {each.source for each in figure.settings} >= {"paper", "assumed"}
        nodes = plan.base.prefill + plan.base.decode
        assert all(setup.prefill + setup.decode == nodes for setup in setups)
        for setup in setups:  # each engine knows what it is asked
            coupled.read_settings(setup) if setup.policy in COUPLED else cluster_of(setup, ())


def test_an_assumption_reaches_only_the_arms_it_concerns():
    _, setups = planted(FIG1, lambda setup: 1.0)
    assert {s.policy for s in setups if s.overrides.get("coupled.mixed") == "add"} == {"vllm-chunked"}
    assert {(s.prefill, s.decode) for s in setups if s.policy == "global"} == {(8, 8), (10, 6)}
    assert {(s.prefill, s.decode) for s in setups if s.policy != "global"} == {(8, 8)}
    assert sum(s.policy == "vllm" for s in setups) == 2 * 3


def test_a_conclusion_is_kept_only_if_it_holds_in_all():
    order = {"global": 1.0, "local": 2.0, "load": 3.0, "random": 4.0}
    figure, _ = planted(FIG5, lambda setup: order[setup.policy])
    assert all(each.kept and each.tried == 10 for each in figure.conclusions)
    figure, _ = planted(FIG5, lambda setup: 9.0 if (setup.policy, setup.speed) == ("local", 2.0) else order[setup.policy])
    whole, first, second, third = figure.conclusions
    assert (whole.kept, first.kept, second.kept, third.kept) == (False, True, False, True)
    assert whole.breaks == ("speed is 2 on a800-llama3-70b", "speed is 2 on h800-llama3-70b")
    assert "does not hold when speed is 2 on a800-llama3-70b" in sentence(whole)
    assert sentence(first).startswith("kept, in all 10")


def failing(setup, arrivals, progress):
    result = run_one(setup, arrivals, progress)
    return replace(result, requests=[replace(each, outcome="failed", ttft_s=-1.0, reason="no") for each in result.requests])


def test_no_conclusion_is_drawn_from_times_where_requests_failed(monkeypatch):
    order = {"global": 0.0, "local": 2.0, "load": 3.0, "random": 4.0}
    figure, _ = planted(FIG5, lambda setup: order[setup.policy], lambda setup: 9.0 * (setup.policy == "global"))
    assert all(len(each.breaks) == each.tried for each in figure.conclusions)
    assert "global, a800-llama3-70b: 9 requests failed." in figure.notes
    dead = failing(FIG5.base, generate(parse_spec("conversation:requests=3")), lambda share: None)
    assert measure(FIG5, dead)[FAILED] == 3
    monkeypatch.setattr(made, "run_one", failing)
    monkeypatch.setattr(met, "run_one", failing)
    for name in MADE:
        with pytest.raises(StudyError, match="failed, the first: no"):
            MADE[name](0.01)


def test_ours_stand_beside_the_paper_s():
    figure, _ = planted(FIG1, lambda setup: 50.0)
    rows = {row.name: (row.ours, row.paper) for row in figure.rows}
    assert rows["vllm-chunked, 100 ms"] == (50.0, 9.4)
    assert rows["Mooncake, 100 ms"] == (50.0, 96.6)
    assert not any(each.kept for each in figure.conclusions)
    json.dumps(as_json(figure))


def test_a_curve_has_a_point_for_each_arm():
    figure, _ = planted(FIG13, lambda setup: 1e9 / setup.hardware.network_bytes_per_s)
    assert figure.conclusions[0].kept
    points = figure.curves["a800-llama3-70b"]
    assert [x for x, _ in points] == [24, 50, 100, 200, 400]
    assert points[0][1] == pytest.approx(8 / 24)


def test_outputs_are_cut_where_the_paper_cut_them():
    seen = []

    def run(jobs):
        seen.extend(job.source.output_tokens for job in jobs)
        return [dict.fromkeys(FIG10.units, 1.0) | {FAILED: 0.0} for _ in jobs]

    reproduce(FIG10, SOURCE, run)
    assert set(seen) == {1}


def test_the_coupled_arms_of_fig1_run():
    plan = replace(FIG1, arms={name: FIG1.arms[name] for name in COUPLED[:3]}, claims=FIG1.claims[3:], assumptions=())
    arrivals = generate(parse_spec("conversation:requests=30"))

    def run(jobs):
        return [measure(plan, run_one(job.setup, arrivals, lambda share: None)) for job in jobs]

    figure = reproduce(plan, SOURCE, run)
    assert all(0 < row.ours <= 100 for row in figure.rows)


def test_the_cost_model_is_the_paper_s_where_it_was_fitted():
    for figure in (modelled.fig14(), modelled.fig15()):
        assert all(each.kept for each in figure.conclusions)
        assert all(isinstance(each, Conclusion) for each in figure.conclusions)
    assert [each.tried for each in modelled.fig15().conclusions] == [10, 4]
    ratios = [row.ours / row.paper for row in modelled.fig14().rows[5:] if row.paper]
    assert min(ratios) < 0.5  # where ours differs it is printed, not fitted away


def test_fig9_counts_what_an_lru_cache_hits():
    figure = modelled.fig9(generate(parse_spec("conversation:requests=600")))
    ours = [row.ours for row in figure.rows[: len(modelled.CAPACITIES)]]
    assert ours == sorted(ours)
    assert ours[-1] == figure.rows[-2].ours


def test_fig9_concludes_nothing_of_a_trace_without_reuse():
    arrivals = generate(parse_spec("uniform:requests=50"))
    assert [each.kept for each in modelled.fig9(arrivals).conclusions] == [False, False]


@pytest.mark.parametrize("name", ["fig14", "fig15"])
def test_figures_of_the_cost_model_need_no_trace(name):
    result = command(name)
    assert result.exit_code == 0, result.output
    assert "ours / paper" in result.stdout
    assert json.loads(command(name, "--json").stdout)["name"] == name


def test_the_others_say_that_they_need_one(tmp_path):
    for name in set(FIGURES) - {"fig13", "fig14", "fig15", *MADE}:
        result = command(name)
        assert (result.exit_code, len(result.output.strip().splitlines())) == (2, 1)
        assert "needs --trace FILE" in result.output
    assert command("fig9", "--trace", str(tmp_path / "none")).exit_code == 2
    assert command("fig2").exit_code == 2


def test_quick_says_that_it_is_not_the_figure(tmp_path):
    path = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": 1024, "output_length": 2, "hash_ids": [1, 2]}
    path.write_text("\n".join(json.dumps(row) for _ in range(5)))
    result = command("fig9", "--trace", str(path), "--quick", "3", "--json")
    assert result.exit_code == 0, result.output
    figure = json.loads(result.stdout)
    assert figure["rows"][-2]["ours"] == pytest.approx(2 / 3)
    assert "Only the first 3 requests" in figure["notes"][-1]


def test_a_replayed_figure_runs_through_our_own_actors(tmp_path):
    pytest.importorskip("mooncake_zmq.laboratory.replay")
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 1000 * a.at_s, "input_length": a.input_tokens, "output_length": a.output_tokens, "hash_ids": a.hash_ids}
        for a in generate(parse_spec("conversation:requests=60,output=20,rate=0.5"))
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    result = command("fig11", "--trace", str(path), "--quick", "40", "--json")
    assert result.exit_code == 0, result.output
    figure = json.loads(result.stdout)
    assert figure["rows"][0]["ours"] >= 1
    assert all(each["tried"] == 6 for each in figure["conclusions"])


def test_figures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert plot(modelled.fig14(), tmp_path).stat().st_size > 1000
    assert plot(modelled.fig15(), tmp_path).stat().st_size > 1000


def test_pipelines_bring_a_long_prompt_sooner_at_toy_size():
    result = command("cpp", "--quick", "60", "--json")
    assert result.exit_code == 0, result.output
    figure = json.loads(result.stdout)
    found = {row["name"]: row["ours"] for row in figure["rows"]}
    for length in ("32k", "64k", "128k"):
        one, two, four = (
            found[f"{length} tokens alone, {stages}: TTFT"] for stages in ("1 prefill", "2 prefills", "4 prefills")
        )
        assert 0.5 * one < two < 0.6 * one
        assert 0.25 * one < four < 0.35 * one
    assert figure["conclusions"][0]["kept"]
    assert sum("of the others, mean" in name for name in found) == 6


def test_a_load_that_shifts_is_served_by_nodes_of_either_role_at_toy_size():
    figure = MADE["roles"](0.01)
    found = {row.name: row.ours for row in figure.rows}
    assert found["fixed roles: goodput"] > 0
    assert found["fixed roles: failed"] == found["roles change after 60 s: failed"] == 0


def test_cake_is_hardly_slower_than_the_better_way_at_any_rate():
    figure = MADE["cake"]()
    assert [(each.tried, each.breaks) for each in figure.conclusions[:1]] == [(12, ())]
    found = {row.name: row.ours for row in figure.rows}
    assert found["rate 1: TTFT both"] < found["rate 1: TTFT computing"]
