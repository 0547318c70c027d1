"""Load or compute: what is measured decides, a wrong measurement heals, and finding out costs a share of what it saves."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.vllm.choice import LATEST, MOST_LOADS, MOST_STEPS, PROBE_SHARE, SLOWER, Choice, Speed, Verdict

B = 16
"""Tokens of a block."""
rates = st.floats(1e-6, 1.0)
sizes = st.integers(1, 5000)
measured = st.lists(st.tuples(sizes, rates), min_size=1, max_size=60)
BETWEEN_PROBES = 2 * round(1 / PROBE_SHARE) + 2
"""Requests whose sizes have the same bits: one may take as long as two others."""


class Machine:
    """An engine and a pool that take so long a token and a block; every verdict is followed and measured."""

    def __init__(self, choice: Choice, *, load_s: float, compute_s: float) -> None:
        self.choice = choice
        self.load_s, self.compute_s = load_s, compute_s
        self.now = self.took_s = 0.0
        for _ in range(2):
            self.cold(64 * B)
            self.load(64)

    def cold(self, tokens: int) -> None:
        number = self.choice.step_begins(self.now, tokens)
        self.now += tokens * self.compute_s
        self.took_s += tokens * self.compute_s
        self.choice.step_ended(self.now, number)

    def load(self, blocks: int) -> None:
        self.took_s += blocks * self.load_s
        self.choice.load_took(blocks, blocks * self.load_s)

    def request(self, blocks: int = 64) -> Verdict:
        verdict = self.choice.verdict(blocks, blocks * B, blocks * B)
        if verdict is Verdict.LEAVE:
            self.cold(blocks * B)
        else:
            self.load(blocks)
        return verdict


def step(choice: Choice, tokens: int, took_s: float, times: int = 2) -> None:
    for _ in range(times):
        began_at = choice._ended_at
        choice.step_ended(began_at + took_s, choice.step_begins(began_at, tokens))


def test_what_has_not_been_measured_twice_is_loaded():
    choice = Choice()
    assert choice.verdict(10, 160, 161) is Verdict.LOAD
    choice.load_took(10, 100.0)
    step(choice, 161, 1.0, times=1)
    assert choice.verdict(10, 160, 161) is Verdict.LOAD
    choice.load_took(10, 100.0)
    assert choice.verdict(10, 160, 161) is Verdict.LOAD
    step(choice, 161, 1.0, times=1)
    assert choice.verdict(10, 160, 161) is Verdict.LEAVE


def test_a_quick_gpu_leaves_what_one_thread_would_load_and_looks_again_now_and_then():
    """39,000 tokens/s computed, blocks of 2 MiB loaded at 1.8 GB/s."""
    machine = Machine(Choice(), load_s=(2 << 20) / 1.8e9, compute_s=1 / 39_000)
    machine.took_s = 0.0
    verdicts = [machine.request(128) for _ in range(420)]
    assert set(verdicts) == {Verdict.LEAVE, Verdict.PROBE}
    assert verdicts.count(Verdict.PROBE) == 20
    assert machine.took_s < (1 + 2 * PROBE_SHARE) * 420 * 128 * B / 39_000


@given(measured, measured, sizes, st.integers(0, 50_000), rates)
def test_what_always_came_sooner_is_always_loaded(loads, steps, blocks, rest, rate_of_most):
    """However much paces vary: every load took less a token than every step, the largest one too."""
    choice = Choice(step_tokens=4096)
    slowest = max(rate for _, rate in loads) / B
    now = 0.0
    for size, rate in loads:
        choice.load_took(size, size * rate)
    for size, rate in [*steps, *2 * [(8191, rate_of_most)]]:
        number = choice.step_begins(now, size)
        now += size * (slowest + rate)
        choice.step_ended(now, number)
    assert choice.verdict(blocks, blocks * B, blocks * B + rest) is Verdict.LOAD


@given(
    st.lists(st.floats(1.0, 1e6), min_size=1, max_size=3 * LATEST),
    st.lists(st.integers(33, 63), min_size=1, max_size=20),
)
def test_loads_that_were_measured_too_slow_are_found_out(wrong, requests):
    choice = Choice()
    machine = Machine(choice, load_s=1e-4, compute_s=1e-4)
    for times in wrong:
        choice.load_took(40, 40 * times)
    probes = LATEST // 2 + 1
    for number in range(probes * BETWEEN_PROBES):
        machine.request(requests[number % len(requests)])
    assert [machine.request(blocks) for blocks in requests] == [Verdict.LOAD] * len(requests)


@given(rates, rates, st.lists(st.integers(1, 128), min_size=1, max_size=300))
def test_probes_cost_a_share_of_what_is_saved(load_s, compute_s, requests):
    choice = Choice()
    machine = Machine(choice, load_s=load_s, compute_s=compute_s)
    lost_s = saved_s = 0.0
    for blocks in requests:
        loss_s = blocks * (load_s - B * compute_s)
        match machine.request(blocks):
            case Verdict.PROBE:
                lost_s += loss_s
            case Verdict.LEAVE:
                saved_s += loss_s
            case Verdict.LOAD:
                assert loss_s <= (SLOWER - 1 + 1e-6) * blocks * B * compute_s
        assert lost_s <= PROBE_SHARE * saved_s * (1 + 1e-6)


def test_between_not_slower_and_much_slower_all_stays_as_it_was():
    choice = Choice()
    machine = Machine(choice, load_s=B * 1.2, compute_s=1.0)
    assert machine.request() is Verdict.LOAD
    for load_s, verdict in ((1.3, Verdict.LEAVE), (1.2, Verdict.LEAVE), (1.0, Verdict.LOAD), (1.2, Verdict.LOAD)):
        machine.load_s = B * load_s
        for _ in range(LATEST):
            machine.load(64)
        assert machine.request() is verdict


def test_only_its_share_of_the_computing_counts_for_what_is_loaded():
    choice = Choice()
    step(choice, 1000, 10.0)
    for _ in range(2):
        choice.load_took(10, 5.0)
    assert choice.verdict(10, 160, 1000) is Verdict.LEAVE, "5 s beside 1.6 s"
    assert choice.verdict(10, 600, 1000) is Verdict.LOAD, "5 s beside 6 s"


def test_steps_that_overlap_are_timed_from_end_to_end():
    choice = Choice()
    first = choice.step_begins(0.0, 100)
    second = choice.step_begins(0.5, 100)
    choice.step_ended(1.0, first)
    choice.step_ended(2.0, second)
    third = choice.step_begins(10.0, 100)
    fourth = choice.step_begins(12.5, 100)
    choice.step_ended(13.0, third)
    choice.step_ended(13.5, third)
    choice.step_ended(14.0, fourth)
    assert choice.counts == {"step_us": 3_000_000 + 1_000_000, "step_error_us": 2_000_000}, "of those expected to take 1 s"


def test_steps_that_compute_nothing_or_never_end_do_not_count():
    choice = Choice()
    assert choice.step_begins(0.0, 0) == 0
    choice.step_ended(1.0, 0)
    lost = [choice.step_begins(0.0, 5) for _ in range(MOST_STEPS + 2)]
    for number in lost[:2]:
        choice.step_ended(1.0, number)
    for _ in range(2):
        choice.load_took(1, 1e9)
    assert choice.verdict(1, 1, 1) is Verdict.LOAD, "no step was measured"
    for number in lost[-2:]:
        choice.step_ended(1.0, number)
    assert choice.verdict(1, 1, 1) is Verdict.LEAVE


def test_a_load_of_many_ranks_is_one_measurement():
    choice = Choice()
    step(choice, 1024, 0.1)
    for _ in range(8):
        choice.part_took(1, 64, 5.0, ranks=8)
    assert choice.verdict(64, 1024, 1025) is Verdict.LOAD, "one bad moment"
    for _ in range(8):
        choice.part_took(2, 64, 5.0, ranks=8)
    assert choice.verdict(64, 1024, 1025) is Verdict.LEAVE


def test_a_load_takes_as_long_as_its_slowest_rank():
    """Whose reports come one after the other, those of several loads mixed."""
    choice = Choice()
    step(choice, 1024, 0.1)
    for took_s in (0.01, 1.0, 0.01, 0.01):
        for number in (1, 2):
            choice.part_took(number, 64, took_s, ranks=4)
    assert choice.counts["load_us"] == 0, "two, of which nothing was expected"
    assert choice.verdict(64, 1024, 1025) is Verdict.LEAVE


def test_a_load_that_did_not_come_whole_on_every_rank_does_not_count():
    choice = Choice()
    step(choice, 1024, 0.1)
    for number in (1, 2):
        choice.part_took(number, 64, math.inf, ranks=2)
        choice.part_took(number, 64, 5.0, ranks=2)
    assert choice.verdict(64, 1024, 1025) is Verdict.LOAD
    assert not choice._parts


def test_a_rank_that_never_reports_leaves_nothing_behind():
    choice = Choice()
    for number in range(2 * MOST_LOADS):
        choice.part_took(number, 64, 5.0, ranks=2)
    assert list(choice._parts) == list(range(MOST_LOADS, 2 * MOST_LOADS))


@given(measured, sizes)
def test_a_pace_expects_nothing_beyond_what_it_has_seen(durations, size):
    pace = Speed()
    for each, rate in durations * 2:
        pace.add(each, each * rate)
    seen = [rate for _, rate in durations]
    known = min(size, max(each for each, _ in pace._medians.values()))
    assert min(seen) * (1 - 1e-9) <= pace.expected_s(known) / known
    assert pace.expected_s(size) / size <= max(seen) * (1 + 1e-9)
    assert pace.expected_s(known) <= pace.expected_s(size)


@pytest.mark.parametrize(("slow_at", "count"), [*((number, LATEST) for number in range(LATEST)), (0, 2), (1, 2)])
def test_a_pace_is_not_moved_by_one_bad_moment(slow_at, count):
    pace = Speed()
    for number in range(count):
        pace.add(100, 1000.0 if number == slow_at else 1.0)
    assert pace.expected_s(100) == 1.0


def test_one_bad_moment_is_no_pace():
    pace = Speed()
    for _ in range(2):
        pace.add(100, 1.0)
    pace.add(1000, 1e6)
    assert pace.expected_s(1000) == pytest.approx(10.0)


def test_a_pace_knows_that_small_things_take_longer_for_their_size():
    pace = Speed()
    for _ in range(2):
        pace.add(8, 0.037)
        pace.add(2048, 0.051)
    assert pace.expected_s(8) == pytest.approx(0.037)
    assert 0.037 < pace.expected_s(100) < 0.05
    assert pace.expected_s(4088) == pytest.approx(0.051 + 0.014), "as from 8 to 2048 once more"


def test_a_pace_that_grew_no_slower_does_not_run_backwards():
    pace = Speed()
    for _ in range(2):
        pace.add(1, 0.021)
        pace.add(32, 0.020)
    assert pace.expected_s(8192) == 0.020


def test_small_loads_do_not_make_large_ones_look_slow():
    """2.9 ms and 0.1 ms a block, beside 0.8 s of computing."""
    choice = Choice()
    step(choice, 8192, 0.8)
    for _ in range(LATEST):
        choice.load_took(1, 0.003)
    for _ in range(100):
        assert choice.verdict(512, 8192, 8193) is Verdict.LOAD
        choice.load_took(512, 0.054)


def test_loads_of_more_than_twice_the_largest_measured_are_not_known():
    choice = Choice()
    step(choice, 8192, 0.1)
    for _ in range(2):
        choice.load_took(100, 10.0)
    assert choice.verdict(200, 3200, 8192) is Verdict.LEAVE
    assert choice.verdict(201, 3216, 8192) is Verdict.LOAD
    for _ in range(2):
        choice.load_took(201, 20.0)
    assert choice.verdict(201, 3216, 8192) is Verdict.LEAVE


def test_small_steps_do_not_make_large_ones_look_slow():
    """20 ms and 0.1 ms a token: 8192 tokens are computed in 0.84 s, not in 82 s."""
    choice = Choice()
    for tokens in (2, 40):
        step(choice, tokens, 0.02 + 1e-4 * tokens)
    for _ in range(2):
        choice.load_took(512, 5.0)
    assert choice.verdict(512, 8192, 8192) is Verdict.LEAVE


def test_what_is_computed_in_several_steps_takes_as_long_as_several_steps():
    """20 ms and 0.1 ms a token, at most 200 tokens at a time: 8000 tokens take 1.6 s."""
    choice = Choice(step_tokens=200)
    for tokens in (2, 200):
        step(choice, tokens, 0.02 + 1e-4 * tokens)
    for _ in range(2):
        choice.load_took(500, 1.4)
    assert choice.verdict(500, 8000, 8000) is Verdict.LOAD
    for _ in range(LATEST):
        choice.load_took(500, 1.6 * SLOWER + 0.01)
    assert choice.verdict(500, 8000, 8000) is Verdict.LEAVE
