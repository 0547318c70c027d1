"""Who is refused, and when to come back: hand-made cases of each rule."""

import math

import pytest
from conductor_harness import BLOCK, Cluster, keys

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import Placed, Rejected, RejectReason

LONG = 2000
CROWDED = Costs(decode_step_s=0.02, decode_request_s=0.01)
"""A step of n requests takes 20 + 10 n ms."""


def busy(**settings):
    cluster = Cluster(**settings)
    for i in range(2):
        cluster.prefill_load(f"p{i}", queued_s=40 + i)
    return cluster


def crowded(queued_s=0.0, running=20, **settings):
    cluster = Cluster(1, costs=CROWDED, **settings)
    cluster.decode_load("d0", running=running)
    cluster.prefill_load("p0", queued_s=queued_s)
    return cluster


def test_ttft_over_its_slo_is_rejected_until_the_queue_has_shrunk():
    cluster = busy(ttft_slo_s=30)
    answer = cluster.schedule(tokens=LONG)
    assert isinstance(answer, Rejected)
    assert answer.reason is RejectReason.TTFT
    assert 10 < answer.retry_after_s < 20
    cluster.advance(answer.retry_after_s - 0.5)
    assert isinstance(cluster.schedule(tokens=LONG), Rejected)
    cluster.advance(0.6)
    assert isinstance(cluster.schedule(tokens=LONG), Placed)


@pytest.mark.parametrize("off", [0, math.inf])
def test_slos_can_be_switched_off(off):
    assert isinstance(busy(ttft_slo_s=off).schedule(tokens=LONG), Placed)
    assert isinstance(crowded(tbt_slo_s=off).schedule(tokens=10), Placed)


def test_a_requests_own_bounds_go_before_the_deployments():
    cluster = busy(ttft_slo_s=30)
    assert isinstance(cluster.schedule(tokens=10, ttft_slo_s=50.0), Placed)
    assert isinstance(cluster.schedule(tokens=10, ttft_slo_s=0.0), Placed)
    assert isinstance(busy(ttft_slo_s=0).schedule(tokens=10, ttft_slo_s=30.0), Rejected)
    assert crowded(tbt_slo_s=1).schedule(tokens=10, tbt_slo_s=0.1).reason is RejectReason.TBT
    assert crowded(tbt_slo_s=0.1).schedule(tokens=10, tbt_slo_s=1.0).tbt_slo_s == 1.0


@pytest.mark.parametrize(("own", "asked", "promised"), [(0.1, 0.05, 0.1), (0.1, 1.0, 1.0), (0.1, 0.0, 0.0), (0, 0.05, 0.0)])
def test_others_keep_away_for_no_stricter_promise_than_the_deployments(own, asked, promised):
    """A decode refuses newcomers for what it is told here."""
    placed = Cluster(tbt_slo_s=own).schedule(tokens=10, tbt_slo_s=asked)
    assert isinstance(placed, Placed)
    assert placed.tbt_slo_s == promised


def test_what_a_client_waited_already_counts():
    cluster = busy(ttft_slo_s=50)
    assert isinstance(cluster.schedule(tokens=10), Placed)
    assert cluster.schedule(tokens=10, waited_s=15.0).predicted_s > 50, "and is part of what is told"


def test_tbt_over_its_slo_is_rejected():
    answer = crowded(tbt_slo_s=0.1).schedule(tokens=10)
    assert answer.reason is RejectReason.TBT
    assert 1 <= answer.retry_after_s <= 60
    assert 0.1 < answer.predicted_s < 1, "and says what was predicted"
    assert isinstance(crowded(tbt_slo_s=0.3).schedule(tokens=10), Placed)


@pytest.mark.parametrize("attempt", [1, 2, 7])
def test_who_holds_tokens_is_never_refused_for_an_slo_and_any_other_at_any_attempt(attempt):
    cluster = busy(ttft_slo_s=1)
    assert isinstance(cluster.schedule(tokens=LONG, attempt=attempt), Rejected)
    begun = cluster.schedule(tokens=LONG, attempt=attempt, begun=True)
    assert isinstance(begun, Placed)
    assert begun.tbt_slo_s == 0, "nor by the decode"
    assert isinstance(crowded(tbt_slo_s=0.1).schedule(tokens=10, attempt=attempt), Rejected)
    assert isinstance(crowded(tbt_slo_s=0.1).schedule(tokens=10, attempt=attempt, begun=True), Placed)


# --- the four rules: a busy prefill, and a decode that is crowded now and will not be when the prefill is done


@pytest.mark.parametrize(
    ("rule", "late_prefill", "crowded_now", "crowded_then"),
    [
        ("none", True, True, True),
        ("baseline", False, True, True),
        ("early", False, False, True),
        ("prediction", False, True, False),
    ],
)
def test_each_rule_on_its_hand_made_case(rule, late_prefill, crowded_now, crowded_then):
    """Whether the request is admitted in each case."""
    late = busy(ttft_slo_s=30, admission=rule)
    assert isinstance(late.schedule(tokens=LONG), Placed) is late_prefill
    # 20 running leave within 512 steps; 60 s of queue are longer than that
    now = crowded(queued_s=120, ttft_slo_s=0, tbt_slo_s=0.1, admission=rule)
    assert isinstance(now.schedule(tokens=10), Placed) is crowded_now
    then = crowded(running=0, ttft_slo_s=0, tbt_slo_s=0.1, admission=rule)
    then.prefill_load("p0", queued_s=5)
    for _ in range(20):  # on their way: they will be in the batch by then, and are not now
        then.schedule(tokens=10, begun=True)
    assert isinstance(then.schedule(tokens=10), Placed) is crowded_then


@pytest.mark.parametrize(("rule", "told"), [("none", 0.0), ("baseline", 0.1), ("early", 0.1), ("prediction", 0.1)])
def test_the_decode_is_told_what_to_check_again(rule, told):
    assert Cluster(tbt_slo_s=0.1, admission=rule).schedule(tokens=10).tbt_slo_s == told


# --- what waiting would not improve


def test_idle_nodes_are_never_refused():
    cluster = Cluster(ttft_slo_s=1, tbt_slo_s=0.01)
    for i in range(2):
        cluster.prefill_load(f"p{i}", token_s=1.0)
        cluster.decode_load(f"d{i}", step_s=9.0)
    for _ in range(2):
        assert isinstance(cluster.schedule(tokens=LONG), Placed)
    assert isinstance(cluster.schedule(tokens=LONG), Rejected)


@pytest.mark.parametrize(("choices", "max_tokens"), [(4, 20), (1, 4000)], ids=["choices beyond the batch", "a long answer"])
def test_what_slows_only_itself_down_is_not_refused(choices, max_tokens):
    """Nobody's leaving would make it faster: it would be refused for ever."""
    cluster = Cluster(1, costs=Costs(decode_step_s=0.02, decode_context_s=0.0001), tbt_slo_s=0.03)
    cluster.decode_load("d0", max_batch=1)
    answer = cluster.schedule(tokens=50, choices=choices, max_tokens=max_tokens)
    assert isinstance(answer, Placed)
    assert answer.tbt_s > 0.03


def test_a_long_prompt_is_not_refused_for_as_long_as_any_short_one_runs():
    cluster = Cluster(1, ttft_slo_s=10)
    cluster.prefill_load("p0", queued_s=0.5)
    assert isinstance(cluster.schedule(tokens=8000), Placed), "it takes 44 s, whenever it begins"
    cluster = Cluster(1, ttft_slo_s=10)
    cluster.prefill_load("p0", queued_s=30)
    answer = cluster.schedule(tokens=8000)
    assert answer.reason is RejectReason.TTFT
    assert 10 < answer.retry_after_s < 30
    cluster.advance(answer.retry_after_s + 0.01)
    assert isinstance(cluster.schedule(tokens=8000), Placed)


def test_a_job_that_overtakes_does_not_push_those_admitted_past_their_bound():
    """The long prompt was promised 29 s of 30; a short one of 2.6 s would go before it."""
    cluster = Cluster(1, ttft_slo_s=30)
    cluster.prefill_load("p0", overtake=10.0)
    long = cluster.schedule(tokens=6150)
    assert isinstance(long, Placed)
    assert long.ttft_s < 30
    short = cluster.schedule(tokens=1000)
    assert isinstance(short, Rejected)
    assert short.reason is RejectReason.TTFT
    assert isinstance(cluster.schedule(tokens=1000, begun=True), Placed)
    relaxed = Cluster(1, ttft_slo_s=60)
    relaxed.prefill_load("p0", overtake=10.0)
    relaxed.schedule(tokens=6150)
    assert isinstance(relaxed.schedule(tokens=1000), Placed)


def test_one_that_would_push_others_goes_to_another_prefill():
    cluster = Cluster(2, ttft_slo_s=30)
    for name in ("p0", "p1"):
        cluster.prefill_load(name, overtake=10.0)
    long = cluster.schedule(tokens=6150)
    short = [cluster.schedule(tokens=1000) for _ in range(3)]
    assert {answer.prefill for answer in short} == {"p0", "p1"} - {long.prefill}


# --- rooms


def test_placements_between_reports_fill_the_queue():
    cluster = Cluster(ttft_slo_s=30)
    answers = [cluster.schedule(tokens=LONG) for _ in range(20)]
    placed = [answer for answer in answers if isinstance(answer, Placed)]
    assert 4 <= len(placed) <= 8
    assert all(isinstance(answer, Rejected) for answer in answers[len(placed) :])
    assert all(answer.ttft_s <= 30 for answer in placed)


def test_rejections_book_nothing():
    cluster = busy(ttft_slo_s=1)
    before = cluster.conductor.dump(cluster.now)
    cluster.schedule(keys("x", 4), tokens=LONG)
    assert cluster.conductor.dump(cluster.now) == before
    assert cluster.conductor.counts["rejected[reason=ttft_slo]"] == 1


def test_retry_after_is_bounded():
    cluster = busy(ttft_slo_s=30)
    for i in range(2):
        cluster.prefill_load(f"p{i}", queued_s=1e6)
    assert cluster.schedule(tokens=LONG).retry_after_s == 60
    for i in range(2):
        cluster.prefill_load(f"p{i}", queued_s=30)
    assert 1 <= cluster.schedule(tokens=10).retry_after_s < 2


def test_no_prefill_and_no_decode():
    cluster = Cluster(1)
    cluster.down("d0")
    answer = cluster.schedule(tokens=10)
    assert answer.reason is RejectReason.NO_DECODE
    cluster.down("p0")
    cluster.announce("c0", keys("doc", 3))
    answer = cluster.schedule(keys("doc", 3), attempt=2)
    assert answer.reason is RejectReason.NO_PREFILL
    assert 1 <= answer.retry_after_s <= 60


def test_full_prefills_are_not_chosen_and_bookings_take_their_room():
    cluster = Cluster(2)
    cluster.prefill_load("p0", queued_s=50, room=2)
    cluster.prefill_load("p1", queued_s=0, room=3)
    chosen = [cluster.schedule(tokens=10).prefill for _ in range(5)]
    assert sorted(chosen) == ["p0", "p0", "p1", "p1", "p1"]
    answer = cluster.schedule(tokens=10)
    assert answer.reason is RejectReason.NO_ROOM
    assert 1 <= answer.retry_after_s <= 60
    cluster.prefill_load("p1", room=1)
    assert cluster.schedule(tokens=10).reason is RejectReason.NO_ROOM, "three are on their way there"
    cluster.advance(1)
    cluster.prefill_load("p1", room=1)
    assert cluster.schedule(tokens=10).prefill == "p1"


def test_a_decode_that_takes_no_further_request_is_not_chosen():
    cluster = Cluster(2)
    cluster.decode_load("d0", running=2, room=1)
    cluster.decode_load("d1", running=90, room=2)
    assert sorted(cluster.schedule(tokens=10).decode for _ in range(3)) == ["d0", "d1", "d1"]
    assert cluster.schedule(tokens=10).reason is RejectReason.NO_ROOM


def test_full_decodes():
    cluster = Cluster()
    cluster.decode_load("d0", running=8, free=2000)
    cluster.decode_load("d1", running=9, free=2600)
    assert cluster.schedule(tokens=LONG, max_tokens=600).decode == "d1"
    answer = cluster.schedule(tokens=LONG, max_tokens=600)
    assert answer.reason is RejectReason.NO_ROOM
    assert 1 <= answer.retry_after_s <= 60
    cluster.decode_load("d0", running=8, free=2048)
    assert cluster.schedule(tokens=LONG, max_tokens=0).decode == "d0"


def test_a_full_decode_has_room_again_once_a_long_prefill_queue_is_through():
    cluster = Cluster(1)
    cluster.decode_load("d0", running=8, free=100)
    assert cluster.schedule(tokens=LONG).reason is RejectReason.NO_ROOM
    cluster.prefill_load("p0", queued_s=30)
    assert cluster.schedule(tokens=LONG).decode == "d0"


def test_the_room_asked_for_is_a_setting():
    roomy = Cluster(1, expected_output_tokens=10)
    roomy.decode_load("d0", free=4 * BLOCK)
    assert roomy.schedule(tokens=4 * BLOCK, max_tokens=500).reason is RejectReason.NO_ROOM
    assert isinstance(roomy.schedule(tokens=4 * BLOCK - 24, max_tokens=500), Placed)
