"""When several prefills compute a prompt together, and which: by hand, and the formula against chunks laid out one by one."""

import math
from dataclasses import replace

import pytest
from conductor_harness import Cluster, keys

from mooncake_zmq.conductor.pipeline import Candidate, form_pipeline
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.costs import Costs

B = 32
COSTS = Costs(prefill_token_s=1e-3, prefill_square_s=1e-8, load_bytes_per_s=1e12)
SETTINGS = ConductorSettings(pipeline_stages=4, pipeline_min_tokens=2048, pipeline_chunk_tokens=512)


def prefill(name, queue_s=0.0, slowness=1.0, reuse_blocks=0):
    return Candidate(name, queue_s, slowness, reuse_blocks)


def formed(first, others, *, tokens=16_384, settings=SETTINGS, ttft_s=None):
    alone = first.queue_s + first.slowness * COSTS.compute_s(tokens, first.reuse_blocks * B)
    ttft_s = alone if ttft_s is None else ttft_s
    return form_pipeline(first, [first, *others], ttft_s=ttft_s, tokens=tokens, block_tokens=B, settings=settings, costs=COSTS)


def test_idle_prefills_form_the_largest_pipeline_allowed():
    pipeline = formed(prefill("a"), [prefill(name) for name in "bcdef"])
    assert pipeline.stages == ("b", "c", "d")
    assert pipeline.share_s == pytest.approx(COSTS.compute_s(16_384, 0) / 4)
    assert pipeline.ttft_s < 0.3 * COSTS.compute_s(16_384, 0)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_prediction_is_what_chunks_laid_out_one_by_one_take(stages):
    tokens, chunk = 16_384, 512
    free_at = [0.0] * stages
    for start in range(0, tokens, chunk):
        ready = 0.0
        for stage in range(stages):
            begins = max(ready, free_at[stage])
            ready = free_at[stage] = begins + COSTS.compute_s(start + chunk, start) / stages
    pipeline = formed(prefill("a"), [prefill(name) for name in "bcd"[: stages - 1]])
    assert pipeline.ttft_s == pytest.approx(free_at[-1], rel=0.02)


def test_short_prompts_and_single_prefills_are_left_alone():
    others = [prefill("b")]
    assert formed(prefill("a"), others, tokens=2047) is None
    assert formed(prefill("a", reuse_blocks=450), others) is None, "little of it is left to compute"
    assert formed(prefill("a"), []) is None
    assert formed(prefill("a"), others, settings=replace(SETTINGS, pipeline_stages=1)) is None
    assert formed(prefill("a"), others) is not None


def test_busy_and_slow_prefills_are_left_out():
    assert formed(prefill("a"), [prefill("b", queue_s=60.0), prefill("c", queue_s=1.0)]).stages == ("c",)
    assert formed(prefill("a"), [prefill("b", queue_s=60.0)]) is None
    assert formed(prefill("a"), [prefill("b", slowness=5.0)]) is None


def test_what_a_later_stage_cannot_reuse_it_would_compute():
    """All stages reuse what the poorest holds: a long cached prefix is worth more than a second node."""
    assert formed(prefill("a", reuse_blocks=400), [prefill("b")], settings=replace(SETTINGS, pipeline_min_tokens=1024)) is None
    both = formed(
        prefill("a", reuse_blocks=400), [prefill("b", reuse_blocks=400)], settings=replace(SETTINGS, pipeline_min_tokens=1024)
    )
    assert both is not None


def test_one_that_is_no_quicker_is_not_formed():
    assert formed(prefill("a"), [prefill("b")], ttft_s=1.0) is None
    assert formed(prefill("a"), [prefill("b")], ttft_s=math.inf) is not None


@pytest.mark.parametrize("changes", [{"pipeline_stages": 0}, {"pipeline_min_tokens": 0}, {"pipeline_stages": 18}])
def test_settings_that_make_no_sense_are_refused(changes):
    with pytest.raises(ValueError, match="pipeline"):
        ConductorSettings(**changes)


# --- the conductor


def test_a_long_prompt_is_placed_on_a_pipeline_and_booked_on_all_its_stages():
    cluster = Cluster(3, pipeline_stages=3)
    alone = Cluster(3).schedule(tokens=16_384)
    placed = cluster.schedule(tokens=16_384)
    assert {placed.prefill, *placed.stages} == {"p0", "p1", "p2"}
    assert placed.ttft_s < alone.ttft_s / 2.5
    for prefill in ("p0", "p1", "p2"):
        assert cluster.conductor.dump(cluster.now)["prefills"][prefill]["queue_s"] == pytest.approx(alone.ttft_s / 3)
    cluster.end(placed)
    assert cluster.conductor.gauges(cluster.now)["queued_prefill_s"] == 0
    assert cluster.schedule(tokens=4_000).stages == ()
    assert cluster.schedule(tokens=16_384, exclude=("p1", "p2")).stages == ()


def test_stages_that_leave_take_the_booking_along():
    cluster = Cluster(2, pipeline_stages=2)
    placed = cluster.schedule(tokens=16_384)
    (stage,) = placed.stages
    cluster.down(stage)
    assert cluster.conductor.gauges(cluster.now)["bookings"] == 0
    assert cluster.schedule(tokens=16_384).stages == ()


def test_an_own_prefix_keeps_a_prompt_on_its_node():
    """The others hold nothing of it, and there is nothing that they could fetch quicker than compute in time."""
    cluster = Cluster(2, pipeline_stages=2, pipeline_min_tokens=1024)
    chain = keys("a", 60)
    cluster.announce("c0", chain)
    placed = cluster.schedule(chain, tokens=61 * 256 + 2000)
    assert (placed.prefill, placed.stages, placed.reuse_blocks) == ("p0", (), 60)
