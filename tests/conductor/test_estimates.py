"""What is predicted: queues, batches, corrections and lengths, against reports made by hand and against plain models."""

import math
import random
from dataclasses import fields

import pytest
from conductor_harness import BLOCK, COSTS, Cluster, keys
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.conductor.bookings import Bookings
from mooncake_zmq.conductor.corrections import (
    MOST_BIAS,
    MOST_FACTOR,
    MOST_OVERHEAD_S,
    MOST_SPARE,
    OVERHEAD_OUTCOMES,
    PRIOR_REPORTS,
    SPARE,
    Bias,
    Correction,
    Lateness,
    OutputLengths,
)
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core import gaps
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.gaps import longest_gaps
from mooncake_zmq.core.messages import MAX_REPORTED, DecodeLoad, Measured, Outcome, Placed, PrefillLoad, RequestEnded
from mooncake_zmq.core.order import Order
from mooncake_zmq.core.speed import Speed
from mooncake_zmq.gateway.requests.token_gaps import Gaps

PAPER = Costs(
    prefill_token_s=1.147e-4,
    prefill_square_s=7.181e-10,
    kv_bytes_per_token=320 * 1024,
    transfer_bytes_per_s=87e9,
    load_bytes_per_s=128e9,
)
A800_STEP = Costs(decode_step_s=0.0203, decode_request_s=0.0004)
TEN_MS = Costs(decode_step_s=0.01, decode_request_s=0.0)
"""A step takes 10 ms whatever the batch."""


def queue_s(cluster, node="p0"):
    return cluster.conductor.dump(cluster.now)["prefills"][node]["queue_s"]


def outcome(**more):
    told = {
        "ttft_s": 1.0,
        "predicted_ttft_s": 1.5,
        "tbt_s": 0.1,
        "predicted_tbt_s": 0.1,
        "max_tokens": 100,
        "output_tokens": 50,
        "ended": True,
    }
    return Outcome(**(told | more))


@pytest.mark.parametrize(("tokens", "seconds"), [(8, 1.00), (16, 2.05), (32, 4.48), (64, 10.58), (128, 27.52)])
def test_the_papers_prefill_times(tokens, seconds):
    assert Cluster(1, costs=PAPER).schedule(tokens=tokens * 1024).ttft_s == pytest.approx(seconds, rel=0.025)


def test_the_papers_transfer_time():
    assert PAPER.transfer_s(40_000_000_000 // (320 * 1024)) == pytest.approx(0.46, rel=0.01)


# --- the queue of a prefill


def test_a_queue_is_worked_off_as_time_passes():
    cluster = Cluster(1)
    cluster.prefill_load("p0", queued_s=3)
    assert queue_s(cluster) == 3
    cluster.advance(2)
    assert queue_s(cluster) == 1
    cluster.advance(8)
    assert queue_s(cluster) == 0


def test_a_booking_counts_once_whatever_reports_come():
    cluster = Cluster(1)
    placed = cluster.schedule(tokens=1000)
    work_s = placed.ttft_s
    cluster.prefill_load("p0")
    assert queue_s(cluster) == pytest.approx(work_s), "the report cannot know it yet"
    cluster.advance(0.1)
    cluster.prefill_load("p0", jobs=[(placed.booking, -0.1, 1.7)])
    assert queue_s(cluster) == pytest.approx(1.7), "the report's from now on, at once"
    cluster.advance(0.1)
    cluster.prefill_load("p0")
    assert queue_s(cluster) == 0, "computed"


def test_a_booking_that_never_arrives_is_dropped_after_the_grace():
    cluster = Cluster(1)
    cluster.schedule(tokens=1000)
    cluster.advance(0.3)
    cluster.prefill_load("p0")
    assert queue_s(cluster) == 0


def test_an_ended_booking_leaves_the_queue():
    cluster = Cluster(1)
    first, second = (cluster.schedule(tokens=1000) for _ in range(2))
    cluster.end(first)
    assert queue_s(cluster) == pytest.approx(first.ttft_s)
    cluster.end(second)
    assert queue_s(cluster) == 0


def test_long_prompts_in_the_queue_are_priced_with_their_squares():
    """Sixteen of 32k tokens: 72 s; by tokens alone it would be 60."""
    cluster = Cluster(1, costs=PAPER)
    for _ in range(16):
        cluster.schedule(tokens=32 * 1024)
    assert queue_s(cluster) == pytest.approx(16 * 4.48, rel=0.025)


def test_a_cached_prefix_is_not_queued():
    cluster = Cluster(1, costs=PAPER)
    doc = keys("doc", 400)
    cluster.announce("c0", doc)
    for _ in range(10):
        cluster.schedule(doc)
    assert queue_s(cluster) < 10


def test_a_short_job_waits_only_for_what_its_rank_leaves_ahead():
    """By the sum of all it would be told a minute, and refused."""
    cluster = Cluster(1, ttft_slo_s=30)
    cluster.prefill_load("p0", jobs=[(0, 60.0, 30.0), (0, 70.0, 30.0)], overtake=1.0)
    short = cluster.schedule(tokens=100)
    assert isinstance(short, Placed)
    assert short.ttft_s < 2
    assert cluster.schedule(tokens=100, begun=True, priority=1000).ttft_s < 2, "without a step of priority they are equal"
    cluster.prefill_load("p0", jobs=[(0, 60.0, 30.0)], overtake=1.0, priority_s=10.0)
    assert cluster.schedule(tokens=100, begun=True, priority=100).ttft_s > 30


def test_queues_equal_a_plain_reference_under_any_rule():
    """Random bookings, reports and pauses; the wait of every prefill is what `core.order` says of a plain list of jobs."""
    chance = random.Random(3)
    for overtake in (0.0, 0.5, 4.0):
        cluster = Cluster(3, ttft_slo_s=0)
        prefills, order = cluster.conductor._prefills, Order(overtake=overtake, priority_s=5.0)
        jobs = {f"p{i}": [] for i in range(3)}
        for _ in range(150):
            now, node = cluster.now, f"p{chance.randrange(3)}"
            if chance.random() < 0.3:
                told = [(0, chance.uniform(-5, 20), chance.uniform(0, 4)) for _ in range(chance.randrange(6))]
                cluster.prefill_load(node, jobs=told, overtake=overtake, priority_s=5.0)
                kept = [job for job in jobs[node] if job[2] and now - job[3] < 0.25]
                jobs[node] = [(now + rank, left, 0, 0, left) for _, rank, left in told]
                jobs[node] += [(rank, full, booking, at, full) for rank, _, booking, at, full in kept]
            elif chance.random() < 0.5:
                priority = chance.choice((0, 0, 1))
                answer = cluster.schedule(tokens=chance.randrange(10, 2000), priority=priority)
                chosen = prefills.by_name[answer.prefill]
                rank, left = chosen.unseen[answer.booking][1:3]
                if chosen.priority_s:  # it has told its rule
                    assert rank == pytest.approx(order.rank(now, left, priority))
                jobs[answer.prefill].append((rank, left, answer.booking, now, left))
            work_s, priority = chance.uniform(0, 5), chance.choice((0, 1))
            for name, mine in jobs.items():
                each = prefills.by_name[name]
                rank = each.rank(cluster.now, work_s, priority)
                ahead_s = sum(left for other, left, *_ in mine if other <= rank)
                assert each.ahead_s(cluster.now, rank) == pytest.approx(ahead_s, abs=1e-6)
            pause = chance.choice((0.0, 0.05, 0.4))
            cluster.advance(pause)
            for name, mine in jobs.items():
                jobs[name] = worked_off(mine, pause)


def late_cluster(ttft_slo_s=10.0):
    """One prefill with two jobs that were promised their first tokens within 10 s, of which the second is late by now."""
    cluster = Cluster(1, ttft_slo_s=ttft_slo_s)
    first, second = cluster.schedule(tokens=100), cluster.schedule(tokens=100)
    cluster.prefill_load("p0", jobs=[(first.booking, -2.0, 4.0), (second.booking, -1.0, 8.0)], priority_s=10.0)
    return cluster, first, second


def test_a_priority_takes_a_prompt_before_those_that_keep_their_promise_and_before_none_that_is_late():
    cluster, first, second = late_cluster()
    hurried = cluster.schedule(tokens=100, priority=-5, ttft_slo_s=0)
    node = cluster.conductor._prefills.by_name["p0"]
    assert node.numbers == [first.booking, second.booking, hurried.booking]
    assert hurried.ttft_s > 12, "what it is told counts who goes before it"
    assert hurried.least_priority == 0, "its prefill keeps the same order"
    cluster, first, second = late_cluster(ttft_slo_s=60.0)
    hurried = cluster.schedule(tokens=100, priority=-5)
    assert cluster.conductor._prefills.by_name["p0"].numbers == [hurried.booking, first.booking, second.booking]
    assert hurried.ttft_s < 1
    assert hurried.least_priority <= -5


def test_a_priority_is_bounded_no_more_than_a_late_job_needs():
    cluster = Cluster(1, ttft_slo_s=10.0)
    late, other = cluster.schedule(tokens=100), cluster.schedule(tokens=100)
    cluster.prefill_load("p0", jobs=[(late.booking, -35.0, 11.0), (other.booking, -15.0, 0.5)], priority_s=10.0, overtake=0.0)
    cluster.conductor._bookings.numbered(other.booking).deadline = cluster.now + 60
    hurried = cluster.schedule(tokens=100, priority=-1000, ttft_slo_s=0)
    assert hurried.least_priority == -3
    assert cluster.conductor._prefills.by_name["p0"].numbers == [late.booking, hurried.booking, other.booking]


def test_of_nobody_who_was_promised_nothing_is_it_said_that_he_is_late():
    cluster, *_ = late_cluster(ttft_slo_s=0.0)
    assert cluster.schedule(tokens=100, priority=-5).ttft_s < 1


def test_no_priority_makes_a_late_job_later():
    """Than the same prompt would without any."""

    def ends_after(seed, priority):
        chance = random.Random(seed)
        cluster = Cluster(1, ttft_slo_s=20.0)
        overtake, priority_s = chance.choice((0.0, 1.0)), chance.choice((0.0, 3.0, 10.0))
        bookings = [cluster.schedule(tokens=50).booking for _ in range(8)]
        told = [(booking, chance.uniform(-30, 10), chance.uniform(0, 6)) for booking in bookings]
        cluster.prefill_load("p0", jobs=told, overtake=overtake, priority_s=priority_s)
        node = cluster.conductor._prefills.by_name["p0"]
        late = {n for n, end in zip(node.numbers, node.ends, strict=True) if end > cluster.now + 20.0}
        tokens = chance.randrange(100, 5000)
        placed = cluster.schedule(tokens=tokens, priority=priority, ttft_slo_s=0)
        return {n: end for n, end in zip(node.numbers, node.ends, strict=True) if n in late}, placed

    bounded = 0
    for seed in range(60):
        without, _ = ends_after(seed, 0)
        for priority in (-1, -3, -1000):
            ends, placed = ends_after(seed, priority)
            assert all(ends[number] <= without[number] + 1e-6 for number in ends)
            bounded += isinstance(placed, Placed) and bool(ends) and placed.least_priority > priority
    assert bounded > 20


def worked_off(jobs, seconds):
    """The jobs after so long, the front first."""
    left = []
    for rank, seconds_left, *rest in sorted(jobs):
        done = min(seconds, seconds_left)
        seconds -= done
        if seconds_left > done:
            left.append((rank, seconds_left - done, *rest))
    return left


def test_later_arrivals_that_will_overtake_are_expected():
    def promised(crowd):
        cluster = Cluster(1)
        cluster.prefill_load("p0", overtake=5.0)
        for _ in range(crowd):
            cluster.end(cluster.schedule(tokens=200))
            cluster.advance(0.9)
            cluster.prefill_load("p0", overtake=5.0)
        return cluster.schedule(tokens=8000).ttft_s

    assert promised(60) > 1.3 * promised(0)


# --- the batch of a decode


def tbt(cluster, **more):
    answer = cluster.schedule(**({"tokens": 10} | more))
    cluster.end(answer)
    return answer.tbt_s


def test_a_request_that_finds_the_batch_full_is_told_its_wait():
    """The 64th request of a decode with room for 16 at a time waits for a place: its gap is not its step of 34 ms."""
    cluster = Cluster(1, costs=A800_STEP, expected_output_tokens=343)
    cluster.decode_load("d0", running=63, max_batch=16)
    step_s = A800_STEP.step_s(16, 0)
    wait_s = (64 - 16) * 343 * step_s / 16
    assert tbt(cluster, max_tokens=343) == pytest.approx(step_s + wait_s / 35, rel=0.05)
    cluster.decode_load("d0", running=10, max_batch=16)
    assert tbt(cluster, max_tokens=343) == pytest.approx(A800_STEP.step_s(11, 0), rel=0.05)


def test_a_decode_is_judged_when_the_prefill_is_done_not_when_the_queue_is():
    cluster = Cluster(1, costs=Costs(decode_step_s=0.01, decode_request_s=0.01), expected_output_tokens=100)
    cluster.decode_load("d0", running=9)
    stay_s = 100 * 0.1
    long = cluster.schedule(tokens=1700)
    assert 2 < long.ttft_s < 8
    assert long.tbt_s == pytest.approx(gaps.stretch(100) * (0.01 + 0.01 * (1 + 9 * (1 - long.ttft_s / stay_s))), rel=0.02)


def test_its_own_context_and_that_of_all_others_lengthen_the_step():
    costs = Costs(decode_step_s=0.02, decode_request_s=0.0, decode_context_s=1e-6)
    cluster = Cluster(1, costs=costs)
    grown = gaps.growth_tokens(1, 100) * 1e-6
    assert tbt(cluster, tokens=9000) == pytest.approx(gaps.stretch(100, 0.0) * (0.02 + 0.009 + grown))
    cluster.decode_load("d0", running=1, context_tokens=50_000)
    assert tbt(cluster, tokens=10) == pytest.approx(gaps.stretch(100) * (0.02 + 0.05), rel=0.02)


def test_a_booking_whose_prefill_is_not_done_does_not_decode_yet():
    cluster = Cluster(2, costs=Costs(decode_step_s=0.01, decode_request_s=0.01))
    cluster.down("d1")
    cluster.prefill_load("p0", queued_s=50)
    cluster.prefill_load("p1", queued_s=1000)
    for _ in range(10):
        assert cluster.schedule(tokens=10).prefill == "p0", "each is done after 50 s"
    cluster.prefill_load("p1")
    soon, later = cluster.schedule(tokens=10), cluster.schedule(tokens=10, exclude=("p1",))
    assert soon.tbt_s == pytest.approx(gaps.stretch(100, 0.0) * 0.02, rel=0.01), "nobody is there when its prefill is done"
    assert later.tbt_s > 0.1, "the others are"


def test_reports_take_over_decode_bookings_one_by_one():
    cluster = Cluster(1, costs=Costs(decode_step_s=0.01, decode_request_s=0.01))
    placed = [cluster.schedule(tokens=10) for _ in range(3)]
    cluster.advance(1)
    cluster.prefill_load("p0")
    numbers = [one.booking for one in placed]
    cluster.decode_load("d0", running=2, reserved=0, bookings=numbers[:2])
    assert len(cluster.conductor._decodes.nodes[0].coming) == 0, "two run, the third never came"
    assert tbt(cluster) == pytest.approx(gaps.stretch(100) * 0.04, rel=0.05)
    cluster.decode_load("d0", running=0)
    assert tbt(cluster) == pytest.approx(gaps.stretch(100, 0.0) * 0.02)


def test_a_reserved_request_joins_when_its_prefill_is_done():
    cluster = Cluster(1, costs=Costs(decode_step_s=0.01, decode_request_s=0.01))
    cluster.prefill_load("p0", queued_s=20)
    waiting = cluster.schedule(tokens=10)
    cluster.advance(0.5)
    cluster.prefill_load("p0", jobs=[(0, -1.0, 19.5), (waiting.booking, -0.5, 0.02)])
    cluster.decode_load("d0", reserved=1, bookings=(waiting.booking,))
    (booking,) = cluster.conductor._decodes.nodes[0].coming
    assert booking.due == pytest.approx(cluster.now + 19.52)
    cluster.prefill_load("p0")
    assert booking.due == cluster.now, "computed"


# --- corrections


def test_one_slow_first_measurement_does_not_retire_an_idle_node():
    """On a cold start its first chunk took two hundred times as long; it was never chosen again, and so never measured
    again."""
    cluster = Cluster(2)
    cluster.prefill_load("p0", compute=Measured(seconds=20.0, predicted_s=0.1))
    used = {"p0": 0, "p1": 0}
    late = []
    for number in range(400):
        answer = cluster.schedule(tokens=100)
        used[answer.prefill] += 1
        late += [answer.prefill] if number >= 300 else []
        cluster.advance(0.5)
        for name, count in used.items():
            seconds = 0.1 + 0.01 * count
            slow = name == "p0" and not count
            measured = Measured(seconds=20.0, predicted_s=0.1) if slow else Measured(seconds=seconds, predicted_s=seconds)
            cluster.prefill_load(name, compute=measured)
        cluster.end(answer)
        assert number > 20 or not used["p0"], "for now it is believed"
    assert late.count("p0") > 30


def test_a_correction_grows_with_evidence_and_fades_without():
    correction = Correction(half_life_s=10)
    assert not correction.report(0.0, Measured())
    assert correction.report(1.0, Measured(seconds=3.0, predicted_s=1.0))
    once = correction.factor
    assert 1.5 < once < 3
    for step in range(40):
        correction.report(1.25 + step / 4, Measured(seconds=3.0 + step, predicted_s=1.0 + step / 3))
    assert correction.factor == pytest.approx(3.0, rel=0.05)
    last = Measured(seconds=3.0 + 39, predicted_s=1.0 + 39 / 3)
    assert not correction.report(60.0, last)
    assert 1.0 < correction.factor < 2.5
    correction.report(600.0, last)
    assert correction.factor == pytest.approx(1.0, abs=0.01)


def test_a_nodes_own_costs_are_believed_at_once_and_do_not_fade():
    """Ours are another machine's: without this the first predictions, and those after a pause, would be as far off."""
    ours = Cluster(hosts=1).schedule(keys("x", 4), 4 * BLOCK + 1)
    cluster = Cluster(hosts=1)
    own = COSTS.scaled(prefill=0.01, decode=0.02)
    for pause_s in (0.0, 60.0, 600.0):
        cluster.advance(pause_s)
        cluster.say("p0", PrefillLoad(token_s=own.prefill_token_s))
        cluster.say(
            "d0", DecodeLoad(running=0, reserved=0, free_tokens=10**6, capacity_tokens=10**6, fixed_s=own.decode_step_s)
        )
        placed = cluster.schedule(keys("x", 4), 4 * BLOCK + 1, request_id=f"r{pause_s}")
        assert placed.ttft_s == pytest.approx(own.compute_s(4 * BLOCK + 1, 0))
        assert placed.tbt_s == pytest.approx(0.02 * ours.tbt_s)
        cluster.say("g", RequestEnded(request_id=f"r{pause_s}", attempt=1))


def test_what_a_node_measured_corrects_its_own_costs():
    cluster = Cluster(hosts=1)
    cluster.say("p0", PrefillLoad(token_s=0.01 * COSTS.prefill_token_s, compute=Measured(seconds=3.0, predicted_s=1.0)))
    correction = (3.0 + PRIOR_REPORTS) / (1 + PRIOR_REPORTS)
    placed = cluster.schedule(keys("x", 4), 4 * BLOCK + 1)
    assert placed.ttft_s == pytest.approx(0.01 * correction * COSTS.compute_s(4 * BLOCK + 1, 0))


def test_an_idle_node_repeats_its_measurement_and_that_is_no_news():
    """What it measured fades in its reports, a little each time: four a second counted as four new measurements, so that
    `correction_half_life_s` never came to bear and the errors of predictions that nobody made were counted."""
    pace = Speed(memory_s=8.0, half_life_s=60.0)
    pace.add(0.0, 16.0, 4.0)
    cluster = Cluster(1, correction_half_life_s=10.0)
    began = cluster.now
    (node,) = cluster.conductor._prefills.nodes
    cluster.prefill_load("p0", compute=pace.measured(0.0))
    believed = node.compute.factor
    assert believed > 1.5
    for _ in range(120):
        cluster.advance(0.25)
        cluster.prefill_load("p0", compute=pace.measured(cluster.now - began))
    assert cluster.conductor.counts["predictions[kind=compute]"] == 1
    assert 1.0 < node.compute.factor < 1 + (believed - 1) / 3, "three half-lives"
    pace.add(cluster.now - began, 8.0, 4.0)
    cluster.prefill_load("p0", compute=pace.measured(cluster.now - began))
    assert cluster.conductor.counts["predictions[kind=compute]"] == 2


def test_equal_pieces_of_work_stay_news_while_their_times_differ():
    """In the long run the predicted seconds of equal pieces no longer change."""
    correction = Correction(half_life_s=10)
    for number in range(100):
        correction.report(number / 4, Measured(seconds=6.0 + number % 2 / 10, predicted_s=3.0))
    assert correction.factor == pytest.approx(2.0, rel=0.05)


def test_no_report_makes_a_correction_grow_past_all_bounds():
    """Reports of next to no predicted work raised it each time; at infinity, counting the error would end the conductor."""
    correction = Correction(half_life_s=10)
    for number in range(10_000):
        correction.report(number / 4, Measured(seconds=1e7, predicted_s=1e-300 * (1 + number)))
    assert correction.factor <= MOST_FACTOR


def test_jobs_that_a_full_report_no_longer_names_are_not_taken_as_computed():
    cluster = Cluster(1)
    answer = cluster.schedule(tokens=1000)
    cluster.prefill_load("p0", jobs=[(answer.booking, 0.0, 50.0)])
    (booking,) = cluster.conductor._decodes.nodes[0].coming
    cluster.prefill_load("p0", jobs=[(0, -1.0, 0.1)] * MAX_REPORTED)
    assert booking.due > cluster.now + 40


@given(st.integers(1, 3000))
def test_the_longest_tenth_of_the_gaps_is_as_many_as_the_gateway_counts(count):
    gaps = Gaps()
    gaps.add(1.0)
    for _ in range(count - 1):
        gaps.add(0.0)
    assert 1.0 / longest_gaps(count) == pytest.approx(gaps.tbt_s)


def test_kinds_of_work_are_corrected_apart():
    cluster = Cluster(1)
    cluster.announce("c0", keys("doc", 20))
    for step in range(30):
        cluster.prefill_load("p0", load=Measured(seconds=40.0 + step, predicted_s=0.01 * (40 + step)))
        cluster.advance(0.25)
    assert cluster.schedule(tokens=1000).ttft_s == pytest.approx(COSTS.compute_s(1000, 0))
    loaded = cluster.schedule(keys("doc", 20), begun=True)
    assert cluster.conductor.dump(cluster.now)["prefills"]["p0"]["load_factor"] == pytest.approx(100, rel=0.15)
    assert loaded.ttft_s > 50 * COSTS.load_s(20 * BLOCK)


def test_outputs_are_as_long_as_those_that_ended_and_never_longer_than_allowed():
    lengths = OutputLengths(512)
    assert lengths.expected(2000) == 512
    assert lengths.expected(100) == 100
    for _ in range(200):
        lengths.ended(2000, 50)
    assert lengths.expected(2000) == pytest.approx(50, rel=0.5)
    assert lengths.expected(10) == 10
    assert lengths.expected(100_000) == 512, "of another magnitude nothing is known"


def test_every_predictions_error_is_counted_and_dumped():
    cluster = Cluster(1)
    cluster.end(cluster.schedule(tokens=100, max_tokens=400), outcome())
    cluster.prefill_load("p0", token_s=2 * COSTS.prefill_token_s, load=Measured(seconds=2.0, predicted_s=1.0))
    cluster.decode_load("d0", step=Measured(seconds=0.06, predicted_s=0.05))
    told = cluster.conductor.dump(cluster.now)["predictions"]
    assert told["ttft"] == (1, 0.5, 1.0)
    assert told["tbt"] == (1, 0.0, 0.1)
    assert told["output"] == (1, 350.0, 50.0)
    assert told["step"] == (1, pytest.approx(0.01, rel=1e-3), pytest.approx(0.06))
    assert told["compute"][0] == told["load"][0] == 1
    assert cluster.conductor.counts["predictions[kind=ttft]"] == 1
    assert cluster.conductor.counts["prediction_error_millionths[kind=ttft]"] == 500_000
    assert cluster.conductor.counts["prediction_actual_millionths[kind=ttft]"] == 1_000_000


def test_numbers_of_bookings_are_unique_across_conductors_and_lives():
    books = [Bookings(name, life, limit=5) for name in ("k1", "k2") for life in (1, 2)]
    numbers = [book.next_number() for book in books for _ in range(100)]
    assert len(set(numbers)) == 400
    assert all(0 < number < 1 << 48 for number in numbers)


def test_the_end_of_a_job_leaves_its_queue_in_order_though_sums_are_rounded():
    for tenths in range(1, 50):
        cluster = Cluster(1, ttft_slo_s=0)
        gone = cluster.schedule(tokens=400_000)
        cluster.prefill_load("p0", jobs=[(0, -1.0, tenths / 10), (0, 1.0, 0.0)])
        cluster.end(gone)  # the conductor is checked


# --- settings


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
        ("waiting_share", -1),
        ("correction_half_life_s", 0),
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


def test_promises_that_were_kept_need_no_time_to_spare():
    lateness = Lateness()
    assert lateness.factor == 1
    for _ in range(50):
        lateness.add(4.9, 5.0)
    assert lateness.factor == 1


def test_first_tokens_that_come_late_ask_for_time_to_spare():
    lateness = Lateness()
    for _ in range(300):
        lateness.add(5.05, 5.0)
        lateness.add(4.95, 5.0)
    assert lateness.factor == pytest.approx(1 + SPARE * 0.005, rel=1e-3)
    for _ in range(2000):
        lateness.add(5.0, 5.0)
    assert lateness.factor == pytest.approx(1, abs=1e-3)


@given(st.lists(st.tuples(st.floats(0, 1e7), st.floats(0, 1e7)), max_size=50))
def test_time_to_spare_is_bounded_whatever_is_told(outcomes):
    lateness = Lateness()
    for actual_s, promised_s in outcomes:
        lateness.add(actual_s, promised_s)
    assert 1 <= lateness.factor <= 1 + MOST_SPARE


def test_a_conductor_whose_promises_came_late_admits_less():
    def answer(late_s):
        cluster = Cluster(1, ttft_slo_s=10, admission="prediction")
        for _ in range(50):
            came = outcome(ttft_s=5 + late_s, predicted_ttft_s=5.0, tbt_s=0.0, predicted_tbt_s=0.0, output_tokens=1)
            cluster.say("g", RequestEnded(request_id="gone", attempt=1, outcome=came))
        cluster.prefill_load("p0", queued_s=9.5)
        return cluster.schedule(tokens=10)

    assert isinstance(answer(0.0), Placed)
    assert answer(0.2).predicted_s > 10, "it is told what was held against the bound"


@given(st.lists(st.tuples(st.floats(0, 1e7), st.floats(0, 1e7)), max_size=50))
def test_the_bias_of_what_is_told_is_bounded_whatever_came(outcomes):
    bias = Bias()
    for actual_s, predicted_s in outcomes:
        bias.add(actual_s, predicted_s)
    assert 0.999 / MOST_BIAS <= bias.factor <= 1.001 * MOST_BIAS


def test_what_is_told_of_a_tbt_comes_to_what_tbts_come_to():
    cluster = Cluster(1)

    def told():
        placed = cluster.schedule(tokens=10)
        came = outcome(tbt_s=1.2 * first_s, predicted_tbt_s=placed.tbt_s) if first_s else None
        cluster.say("g", RequestEnded(request_id=placed.request_id, attempt=1, outcome=came))
        return placed.tbt_s

    first_s = 0.0
    first_s = told()
    for _ in range(600):
        last_s = told()
    assert last_s == pytest.approx(1.2 * first_s, rel=0.01)


def first_token(cluster, overhead_s, **more):
    """Place a request whose first token comes `overhead_s` after what its work takes; return its prediction and its TTFT."""
    placed = cluster.schedule(**({"tokens": 100} | more))
    came = outcome(
        ttft_s=cluster.work_s + overhead_s, predicted_ttft_s=placed.ttft_s, tbt_s=0.0, predicted_tbt_s=0.0, output_tokens=1
    )
    cluster.say("g", RequestEnded(request_id=placed.request_id, attempt=1, outcome=came))
    return placed.ttft_s, came.ttft_s


def with_prefill(queued_s=0.0):
    cluster = Cluster(1, costs=Costs(prefill_token_s=0.001))
    cluster.prefill_load("p0", queued_s=queued_s)
    first = cluster.schedule(tokens=100)
    cluster.end(first)
    cluster.work_s = first.ttft_s
    return cluster


def test_a_predicted_ttft_has_the_time_that_no_work_explains_as_it_was_measured():
    cluster = with_prefill()
    predicted = [first_token(cluster, 0.004) for _ in range(8)]
    assert predicted[0][0] == cluster.work_s
    assert predicted[-1][0] == pytest.approx(predicted[-1][1])
    first_token(cluster, 9.0)
    assert first_token(cluster, 0.004)[0] == pytest.approx(cluster.work_s + 0.004), "one late token is no rule"


def test_the_overhead_of_a_first_token_follows_what_changes_and_is_bounded():
    cluster = with_prefill()
    for overhead_s, added_s in ((0.004, 0.004), (0.02, 0.02), (-0.05, 0.0), (3.0, MOST_OVERHEAD_S)):
        for _ in range(OVERHEAD_OUTCOMES):
            first_token(cluster, overhead_s)
        assert first_token(cluster, overhead_s)[0] == pytest.approx(cluster.work_s + added_s)


def test_a_wait_in_a_queue_is_no_overhead():
    cluster = with_prefill(queued_s=5.0)
    for _ in range(8):
        first_token(cluster, 0.03)
    assert cluster.conductor._placement.hindsight.ttft_s(1.0) == 1.0


def test_a_decode_with_nothing_to_do_begins_a_step_at_once():
    cluster = Cluster(1, costs=Costs(decode_step_s=0.02, decode_request_s=0.0))
    assert tbt(cluster, max_tokens=8) == pytest.approx(0.02)
    cluster.decode_load("d0", running=4)
    assert tbt(cluster, max_tokens=8) == pytest.approx(gaps.stretch(8) * 0.02)


def test_a_short_answer_goes_where_it_waits_for_no_step_of_others():
    """The longest tenth of few gaps is the first one, which is longer where others are; that of many gaps hardly shows it."""
    cluster = Cluster(2, costs=Costs(decode_step_s=0.02, decode_request_s=0.0), expected_output_tokens=400)
    cluster.decode_load("d0", running=4)
    short, long = (cluster.schedule(tokens=10, max_tokens=most, exclude=("p1",)) for most in (8, 400))
    assert (short.prefill, short.decode) == ("p0", "d1")
    assert short.tbt_s == pytest.approx(0.02)
    assert long.decode == "d0", "the decode at home"


def test_the_bias_of_crowded_decodes_does_not_touch_predictions_for_idle_ones():
    cluster = Cluster(1, costs=Costs(decode_step_s=0.02, decode_request_s=0.0))
    for _ in range(300):
        cluster.decode_load("d0", running=4)
        placed = cluster.schedule(tokens=10)
        came = outcome(tbt_s=0.03, predicted_tbt_s=placed.tbt_s)
        cluster.say("g", RequestEnded(request_id=placed.request_id, attempt=1, outcome=came))
    assert tbt(cluster) == pytest.approx(0.03, rel=0.01)
    cluster.decode_load("d0", running=0)
    assert tbt(cluster) == pytest.approx(0.02)


@pytest.mark.parametrize("told_s", [5e-324, 1e-300, 1e6])
def test_what_a_node_says_of_its_own_costs_ends_nothing_and_draws_all_for_no_more_than_the_bound(told_s):
    cluster = Cluster(2)
    for report in range(4):
        step = Measured(seconds=0.0, predicted_s=1.0 + report)
        cluster.decode_load("d0", running=1, max_batch=8, room=8, fixed_s=told_s, step=step)
        cluster.prefill_load("p0")
        cluster.say("p0", PrefillLoad(jobs=(), token_s=told_s))
        cluster.advance(0.25)
        placed = cluster.schedule(keys("x", 4), 4 * BLOCK + 1)
        assert isinstance(placed, Placed)
        assert 0 < cluster.conductor._prefills.by_name["p0"].factor <= MOST_FACTOR
        assert cluster.conductor._decodes.by_name["d0"].scale > 1e-9
