"""The mean of the longest tenth of the gaps, in bounded memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.gateway.requests.token_gaps import MAX_KEPT, Gaps


@given(st.lists(st.floats(0, 10), min_size=1, max_size=300))
def test_it_is_the_mean_of_the_longest_tenth(some):
    gaps = Gaps()
    for gap in some:
        gaps.add(gap)
    longest = sorted(some)[-max(1, len(some) // 10) :]
    assert gaps.tbt_s == pytest.approx(sum(longest) / len(longest))


def test_without_gaps_there_is_none():
    assert Gaps().tbt_s == 0.0


def test_a_long_answer_takes_bounded_memory_and_loses_nothing_of_the_longest_tenth():
    gaps = Gaps()
    some = [((index * 7919) % 20_000) / 1e4 for index in range(20_000)]
    for gap in some:
        gaps.add(gap)
        assert len(gaps._kept) <= MAX_KEPT
    longest = sorted(some)[-2000:]
    assert gaps.tbt_s == pytest.approx(sum(longest) / 2000)


def test_tokens_that_come_together_share_the_gap_before_them():
    gaps = Gaps()
    gaps.add(1.0, tokens=4)
    assert (len(gaps), gaps.tbt_s) == (4, 0.25)
