"""Figures of runs whose records are known, and the profiles that runs stand on."""

import numpy as np
import pytest

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.profile import PrefillTime, Profile, StepTime, encode
from mooncake_zmq.laboratory import report
from mooncake_zmq.laboratory.errors import StudyError
from mooncake_zmq.laboratory.metrics import share_within, summarize
from mooncake_zmq.laboratory.profiles import A800, H800, PROFILES, find_profile, sources
from mooncake_zmq.laboratory.study import RequestRecord, RunResult, Setup

SETUP = Setup(prefill=1, decode=1, hardware=A800, ttft_slo_s=2.0, tbt_slo_s=0.1)


def record(at_s, ttft_s, tbt_s, **changes):
    known = {"input_tokens": 1000, "output_tokens": 10, "outcome": "finished", "end_s": 5.0}
    return RequestRecord(at_s=at_s, ttft_s=ttft_s, tbt_s=tbt_s, **(known | changes))


def known_result():
    return RunResult(
        setup=SETUP,
        requests=[
            record(0.0, 1.0, 0.05, hit_dram=500, predicted_ttft_s=1.5),
            record(1.0, 2.0, 0.10, hit_own=250, hit_remote=250),
            record(2.0, 3.0, 0.05, predicted_ttft_s=2.5),
            record(3.0, 1.0, 0.20),
            record(4.0, 0.5, 0.0, output_tokens=1),
            record(5.0, -1.0, -1.0, outcome="rejected", reason="overloaded", end_s=0.0),
            record(5.0, 1.5, -1.0, outcome="failed", reason="lost", wasted_prefill_s=0.4),
        ],
        prefill_busy_s={"a": 4.0, "b": 2.0},
        decode_busy_s={"c": 7.0},
        errors={"step": (10, 0.01, 0.1)},
    )


def test_shares_count_what_was_refused_or_lost_as_missed():
    found = summarize(known_result())
    assert (found.requests, found.finished, found.rejected, found.failed) == (7, 5, 1, 1)
    assert found.within_slo == pytest.approx(3 / 7)
    assert found.within_ttft == pytest.approx(4 / 7)
    assert found.within_tbt == pytest.approx(4 / 7)
    assert found.admitted_within_slo == pytest.approx(3 / 6)
    # From the first arrival at 0 to the last end, 5 s after its arrival at 5.
    assert found.goodput_per_s == pytest.approx(3 / 10)
    assert not found.attained
    assert found.reasons == {"lost": 1, "overloaded": 1}
    assert (found.wasted_prefills, found.wasted_prefill_s) == (1, 0.4)


def test_percentiles_count_only_those_that_got_there():
    found = summarize(known_result())
    assert found.ttft_s.mean == pytest.approx(np.mean([1, 2, 3, 1, 0.5, 1.5]))
    assert found.ttft_s.p50 == pytest.approx(1.25)
    assert found.tbt_s.mean == pytest.approx(0.1)  # four with two tokens or more


def test_hits_are_shares_of_the_prompts_that_were_prefilled():
    found = summarize(known_result())
    assert found.hits == pytest.approx({"own": 250 / 6000, "dram": 500 / 6000, "disk": 0, "remote": 250 / 6000})
    assert found.hit_ratio == pytest.approx(1 / 6)
    assert found.prefill_gpu_s == pytest.approx(1.0)
    assert found.decode_gpu_s == 7.0


def test_errors_are_shares_of_what_came_true():
    found = summarize(known_result()).errors
    assert found["step"].percent == pytest.approx(10.0)
    assert (found["ttft_s"].count, found["ttft_s"].mean_absolute) == (2, 0.5)
    assert found["ttft_s"].percent == pytest.approx(100 * 0.5 / 2.0)
    assert "tbt_s" not in found


def test_shares_can_be_asked_for_at_other_bounds():
    assert share_within(known_result(), 30.0, 0.3) == pytest.approx(5 / 7)
    assert share_within(known_result(), 0.7, 0.3) == pytest.approx(1 / 7)


def test_a_run_without_requests_has_figures():
    found = summarize(RunResult(setup=SETUP, requests=[]))
    assert found.within_slo == found.goodput_per_s == found.ttft_s.mean == 0.0
    report.outcome_of(RunResult(setup=SETUP, requests=[]))


def test_plots_are_drawn_of_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    result = known_result()
    result.copies = [(30.0, {"10": 1, "100": 0}), (60.0, {"10": 3, "100": 1})]
    result.loads = [(30.0, 0.1, 0.2)]
    outcome = report.outcome_of(result)
    one = report.plot(tmp_path / "one", [{}], [outcome])
    assert [path.name for path in one] == ["ttft.png", "load.png", "copies.png"]
    two = report.plot(tmp_path / "two", [{"speed": "1"}, {"speed": "2"}], [outcome, outcome])
    assert [path.name for path in two] == ["ttft.png", "load.png", "copies.png", "sweep.png"]
    assert all(path.stat().st_size > 1000 for path in one + two)


def test_the_paper_s_times_come_out_of_its_profile():
    costs = A800.costs
    for length, seconds in zip((8, 16, 32, 64, 128), (1.00, 2.05, 4.48, 10.58, 27.52), strict=True):
        assert costs.compute_s(1024 * length, 0) == pytest.approx(seconds, rel=0.018)
    for length, seconds in zip((8, 16, 32, 64, 128), (0.0266, 0.0269, 0.0275, 0.0286, 0.0308), strict=True):
        assert costs.step_s(1, 1024 * length) == pytest.approx(seconds, rel=0.005)
    for batch in (1, 8, 32, 64):
        relative = (0.765 + 0.0149 * batch) / (0.765 + 0.0149)
        assert costs.step_s(batch, 8192 * batch) / costs.step_s(1, 8192) == pytest.approx(relative)


def test_every_figure_of_a_profile_says_where_it_is_from():
    for profile in PROFILES.values():
        assert {source for _, source, _ in sources(profile)} <= {"paper", "measured", "assumed"}
        assert len(sources(profile)) >= 8
    assert H800.costs.compute_s(8192, 0) < A800.costs.compute_s(8192, 0)


def test_a_measured_profile_is_a_node(tmp_path):
    truth = Costs(prefill_token_s=1e-3, prefill_square_s=1e-7, decode_step_s=0.02, decode_request_s=1e-3, decode_context_s=1e-6)
    profile = Profile(
        model="toy",
        fingerprint="ab",
        threads=1,
        backend="numpy",
        machine="test",
        prefill=tuple(PrefillTime(n, p, truth.compute_s(n + p, p)) for n in (64, 512) for p in (0, 256)),
        decode=tuple(StepTime(b, c, truth.step_s(b, b * c)) for b in (1, 8) for c in (64, 512)),
    )
    path = tmp_path / "profile.json"
    path.write_bytes(encode(profile))
    node = find_profile(f"measured:{path}")
    assert node.costs.prefill_token_s == pytest.approx(1e-3)
    assert node.costs.decode_context_s == pytest.approx(1e-6)
    assert node.max_batch == 8
    assert "measured" in {source for _, source, _ in sources(node)}


@pytest.mark.parametrize("name", ["b200", "measured:", "measured:/none/there"])
def test_hardware_that_is_not_known_is_refused(name):
    with pytest.raises(StudyError):
        find_profile(name)


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    (tmp_path / "x").write_text("{}")
    with pytest.raises(StudyError, match="not a profile"):
        find_profile(f"measured:{tmp_path / 'x'}")
