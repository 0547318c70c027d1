"""Refusals are put off by as much as their client repeats them, and never end all at once."""

from heapq import heapify, heappop, heappush
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.gateway.http.auth import LATEST_S, REFUSALS_PER_S, Refusals

WINDOW_S = 0.05


def ends_of(clients: int, within_s: float, until_s: float) -> list[float]:
    """Return when refusals end, where so many clients begin within a time and repeat a call once it is refused."""
    refusals, ends = Refusals(), list[float]()
    calls = [within_s * number / clients for number in range(clients)]
    heapify(calls)
    while (now := heappop(calls)) < until_s:
        end = now + refusals.delay_s(now, "alice")
        ends.append(end)
        heappush(calls, end + 0.001)
    return sorted(ends)


def most_at_once(ends: list[float], since_s: float) -> int:
    counts: dict[int, int] = {}
    for end in ends:
        if end > since_s:
            counts[int(end / WINDOW_S)] = counts.get(int(end / WINDOW_S), 0) + 1
    return max(counts.values(), default=0)


@given(st.integers(1, 1000), st.sampled_from((0.0, 0.01, 0.3, 2.0)))
def test_clients_that_come_together_are_not_refused_together_for_long(clients: int, within_s: float) -> None:
    ends = ends_of(clients, within_s, 20.0)
    evenly = clients / (LATEST_S / 2) * WINDOW_S  # each at least so often: the shortest of the long delays
    assert most_at_once(ends, 1.5) <= 3 * evenly + REFUSALS_PER_S * WINDOW_S + 8


@given(st.lists(st.floats(0, 30), min_size=1, max_size=300))
def test_no_refusal_is_put_off_for_longer_than_the_longest_delay(times: list[float]) -> None:
    refusals = Refusals()
    assert all(0.0 <= refusals.delay_s(now, "alice") <= LATEST_S for now in sorted(times))


def test_the_first_of_a_second_are_not_put_off_and_the_next_ones_are_evenly_spaced() -> None:
    refusals = Refusals()
    delays = [refusals.delay_s(100.0, "alice") for _ in range(2 * REFUSALS_PER_S)]
    assert delays[:REFUSALS_PER_S] == [0.0] * REFUSALS_PER_S
    spaces = [later - sooner for sooner, later in pairwise(delays[REFUSALS_PER_S:])]
    assert spaces == pytest.approx([1 / REFUSALS_PER_S] * len(spaces))
    assert refusals.delay_s(100.0, "bob") == 0.0
