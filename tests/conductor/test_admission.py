"""Early rejection and Retry-After."""

import math

import pytest
from conductor_harness import Cluster, keys

from mooncake_zmq.core.messages import Placed, Rejected, RejectReason

LONG = 2000


def busy(**settings):
    cluster = Cluster(**settings)
    for i in range(2):
        cluster.prefill_load(f"p{i}", queued_s=40 + i)
        cluster.decode_load(f"d{i}", running=4, step_s=0.5)
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
    assert isinstance(busy(ttft_slo_s=off, tbt_slo_s=off).schedule(tokens=LONG), Placed)


def test_tbt_over_its_slo_is_rejected():
    cluster = busy(tbt_slo_s=0.1)
    answer = cluster.schedule(tokens=10)
    assert answer.reason is RejectReason.TBT
    assert 1 <= answer.retry_after_s <= 60
    assert isinstance(busy(tbt_slo_s=0.6).schedule(tokens=10), Placed)


def test_resumed_attempts_are_not_rejected_for_an_slo():
    cluster = busy(ttft_slo_s=1, tbt_slo_s=0.01)
    assert isinstance(cluster.schedule(tokens=LONG, attempt=1), Rejected)
    assert isinstance(cluster.schedule(tokens=LONG, attempt=2), Placed)


def test_idle_nodes_are_never_refused():
    cluster = Cluster(ttft_slo_s=1, tbt_slo_s=0.01)
    for i in range(2):
        cluster.prefill_load(f"p{i}", token_s=1.0)
        cluster.decode_load(f"d{i}", step_s=9.0)
    for _ in range(2):
        assert isinstance(cluster.schedule(tokens=LONG), Placed)
    assert isinstance(cluster.schedule(tokens=LONG), Rejected)


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
    answer = cluster.schedule(tokens=10, attempt=2)
    assert answer.reason is RejectReason.NO_PREFILL
    assert 1 <= answer.retry_after_s <= 60


def test_full_decodes():
    cluster = Cluster()
    cluster.decode_load("d0", running=8, free=2000, step_s=0.1)
    cluster.decode_load("d1", running=8, free=2600, step_s=0.2)
    assert cluster.schedule(tokens=LONG, max_tokens=600).decode == "d1"
    answer = cluster.schedule(tokens=LONG, max_tokens=600)
    assert answer.reason is RejectReason.NO_ROOM
    assert 1 <= answer.retry_after_s <= 60
    cluster.decode_load("d0", running=8, free=2048, step_s=0.1)
    assert cluster.schedule(tokens=LONG, max_tokens=0).decode == "d0"


def test_a_full_decode_has_room_again_once_a_long_prefill_queue_is_through():
    cluster = Cluster(1)
    cluster.decode_load("d0", running=8, free=100, step_s=0.1)
    assert cluster.schedule(tokens=LONG).reason is RejectReason.NO_ROOM
    cluster.prefill_load("p0", queued_s=30)
    assert cluster.schedule(tokens=LONG).decode == "d0"


def test_the_room_asked_for_is_a_setting():
    roomy = Cluster(1, expected_output_tokens=10)
    roomy.decode_load("d0", free=1024)
    assert roomy.schedule(tokens=1024, max_tokens=500).reason is RejectReason.NO_ROOM
    assert isinstance(roomy.schedule(tokens=1000, max_tokens=500), Placed)
