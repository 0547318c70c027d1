"""What is predicted, and what reports and bookings do to it."""

import math
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.conductor.estimates import DecodeBatch, DecodeBooking, PrefillQueue, compute_s
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import DecodeLoad, Measured, PrefillLoad, QueuedJob

PAPER = Costs(
    prefill_token_s=1.147e-4,
    prefill_square_s=7.181e-10,
    kv_bytes_per_token=320 * 1024,
    transfer_bytes_per_s=87e9,
    load_bytes_per_s=128e9,
)
SETTINGS = ConductorSettings(report_grace_s=0.25)
COSTS = Costs()


def queued(queued_s=0.0, token_s=0.0):
    return PrefillLoad(
        jobs=(QueuedJob(booking=0, rank_s=0.0, left_s=queued_s),),
        compute=Measured(seconds=1000 * token_s, predicted_s=1000 * COSTS.prefill_token_s) if token_s else Measured(),
    )


def load(running=0, reserved=0, free=10_000, step_s=0.0):
    return DecodeLoad(
        running=running,
        reserved=reserved,
        free_tokens=free,
        capacity_tokens=10_000,
        step_s=step_s,
        draining=False,
    )


@pytest.mark.parametrize(("tokens", "seconds"), [(8, 1.00), (16, 2.05), (32, 4.48), (64, 10.58), (128, 27.52)])
def test_the_papers_prefill_times(tokens, seconds):
    assert compute_s(PAPER, tokens=tokens * 1024, prefix=0, token_s=0) == pytest.approx(seconds, rel=0.025)


def test_the_papers_transfer_time():
    assert PAPER.transfer_s(40_000_000_000 // (320 * 1024)) == pytest.approx(0.46, rel=0.01)


def test_a_prefix_saves_its_compute_and_costs_its_load():
    whole = compute_s(COSTS, tokens=4096, prefix=0, token_s=0)
    rest = compute_s(COSTS, tokens=4096, prefix=2048, token_s=0)
    assert rest == pytest.approx(whole - compute_s(COSTS, tokens=2048, prefix=0, token_s=0))
    assert COSTS.load_s(2048) == pytest.approx(2048 * COSTS.kv_bytes_per_token / COSTS.load_bytes_per_s)


def test_a_measured_token_time_scales_the_whole_formula():
    once = compute_s(COSTS, tokens=4096, prefix=0, token_s=COSTS.prefill_token_s)
    assert compute_s(COSTS, tokens=4096, prefix=0, token_s=0) == pytest.approx(once)
    assert compute_s(COSTS, tokens=4096, prefix=0, token_s=2 * COSTS.prefill_token_s) == pytest.approx(2 * once)


def test_a_queue_is_worked_off_as_time_passes():
    queue = PrefillQueue(SETTINGS, COSTS)
    assert queue.queue_s(5.0) == 0
    queue.report(10.0, queued(3.0))
    assert queue.queue_s(10.0) == 3
    assert queue.queue_s(12.0) == 1
    assert queue.queue_s(20.0) == 0


def test_bookings_count_until_a_report_can_show_them():
    queue = PrefillQueue(SETTINGS, COSTS)
    queue.report(10.0, queued(1.0))
    queue.book(10.5, ("g", "a"), 2.0)
    assert queue.queue_s(10.5) == pytest.approx(2.5)
    queue.report(10.6, queued(0.4))
    assert queue.queue_s(10.6) == pytest.approx(2.4)
    queue.report(11.0, queued(2.0))
    assert queue.queue_s(11.0) == pytest.approx(2.0)
    assert queue.bookings == {}


def test_an_ended_booking_leaves_the_queue():
    queue = PrefillQueue(SETTINGS, COSTS)
    queue.book(10.0, ("g", "a"), 2.0)
    queue.book(10.0, ("g", "b"), 3.0)
    queue.unbook(("g", "a"))
    queue.unbook(("g", "unknown"))
    assert queue.queue_s(10.0) == pytest.approx(3)
    queue.unbook(("g", "b"))
    assert queue.queue_s(10.0) == 0


@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from(("book", "unbook", "report")), st.floats(0, 5)), max_size=30))
def test_a_queue_is_never_negative_nor_longer_than_all_its_work(steps):
    queue, now, work = PrefillQueue(SETTINGS, COSTS), 0.0, 0.0
    for number, (wait, what, amount) in enumerate(steps):
        now += wait
        if what == "book":
            queue.book(now, ("g", str(number)), amount)
            work += amount
        elif what == "unbook" and queue.bookings:
            queue.unbook(next(iter(queue.bookings)))
        elif what == "report":
            queue.report(now, queued(amount))
            work += amount
        assert 0 <= queue.queue_s(now) <= work + 1e-9
    assert queue.queue_s(now + work + 1e-6) == 0


def test_step_time_follows_the_batch():
    batch = DecodeBatch(SETTINGS, COSTS)
    assert batch.step_s(1) == COSTS.step_s(1, 0)
    batch.report(10.0, load(running=4, step_s=0.06))
    assert batch.step_s(4) == pytest.approx(0.06)
    assert batch.step_s(9) == pytest.approx(0.06 * COSTS.step_s(9, 0) / COSTS.step_s(4, 0))


def test_step_time_follows_the_context():
    costs = Costs(decode_context_s=1e-6)
    batch = DecodeBatch(SETTINGS, costs)
    batch.report(10.0, load(running=3, reserved=1, free=2000, step_s=0.06))
    assert batch.step_s(3) == pytest.approx(0.06)
    assert batch.step_s(8) == pytest.approx(0.06 * costs.step_s(8, 8 * 2000) / costs.step_s(3, 3 * 2000))


def test_decode_bookings_count_until_they_are_reported():
    batch = DecodeBatch(SETTINGS, COSTS)
    assert batch.free_tokens == math.inf
    batch.report(10.0, load(running=2, reserved=1, free=5000))
    batch.book(("g", "a"), DecodeBooking(10.1, 13.0, 700))
    assert (batch.batch, batch.free_tokens) == (4, 4300)
    batch.report(11.0, load(running=2, reserved=0, free=5000))
    assert (batch.batch, batch.free_tokens) == (3, 4300), "its prefill waits: not reserved yet"
    batch.report(12.0, load(running=2, reserved=1, free=4300))
    assert (batch.batch, batch.free_tokens) == (3, 4300), "reserved now: the report has it"
    batch.report(13.5, load(running=3, reserved=0, free=4200))
    assert (batch.batch, batch.free_tokens, batch.bookings) == (3, 4200, {})


def test_a_batch_thins_out_while_a_request_waits():
    settings = ConductorSettings(expected_output_tokens=100)
    batch = DecodeBatch(settings, Costs(decode_request_s=0))
    assert batch.after(10.0, 5.0) == (0, math.inf)
    batch.report(10.0, load(running=8, free=2000, step_s=0.1))
    batch.book(("g", "a"), DecodeBooking(10.0, 12.0, 500))
    assert batch.after(10.0, 0.0) == (9, 1500)
    assert batch.after(10.0, 5.0) == (5, 10_000 - 4000 - 500)
    assert batch.after(10.0, 11.0) == (1, 10_000 - 500)
    assert batch.after(10.0, 12.0) == (0, 10_000)


def test_an_ended_booking_leaves_the_batch():
    batch = DecodeBatch(SETTINGS, COSTS)
    batch.report(10.0, load(free=5000))
    batch.book(("g", "a"), DecodeBooking(10.1, 13.0, 700))
    batch.book(("g", "b"), DecodeBooking(10.1, 13.0, 300))
    batch.unbook(("g", "a"))
    assert (batch.batch, batch.free_tokens) == (1, 4700)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ttft_slo_s", -1),
        ("tbt_slo_s", float("nan")),
        ("kvcache_balancing_threshold", 0.9),
        ("tie_ratio", 1),
        ("booking_ttl_s", 0.1),
        ("max_keys", 0),
        ("max_bookings", 0),
    ],
)
def test_bad_settings_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        ConductorSettings(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("prefill_token_s", 0), ("transfer_bytes_per_s", 0), ("decode_request_s", -1), ("disk_bytes_per_s", math.inf)],
)
def test_bad_costs_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        Costs(**{name: value})


def test_every_setting_has_a_default():
    assert all(getattr(ConductorSettings(), one.name) is not None for one in fields(ConductorSettings))
