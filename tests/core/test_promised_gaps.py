"""What a TBT will be, and what step keeps it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.core.gaps import FIRST_GAP_STEPS, GROWTH_TOKENS, growth_tokens, longest_gaps, longest_step_s, stretch
from mooncake_zmq.gateway.requests.token_gaps import Gaps


def test_the_longest_tenth_is_one_gap_at_least():
    assert [longest_gaps(count) for count in (0, 1, 9, 10, 19, 20, 343)] == [1, 1, 1, 1, 1, 2, 34]


@given(st.integers(2, 3000), st.floats(1e-3, 1.0))
def test_what_is_promised_is_what_is_counted(tokens, step_s):
    """Steps of one length, and a first gap that is longer by what the rule says."""
    counted = Gaps()
    counted.add((1 + FIRST_GAP_STEPS) * step_s)
    for _ in range(tokens - 2):
        counted.add(step_s)
    assert stretch(tokens) * step_s == pytest.approx(counted.tbt_s)


@given(st.integers(1, 100_000), st.floats(1e-3, 10.0))
def test_the_longest_step_just_keeps_the_bound(tokens, bound_s):
    assert stretch(tokens) * longest_step_s(bound_s, tokens) == pytest.approx(bound_s)


def test_a_batch_grows_by_a_token_each_step_of_each_request():
    assert growth_tokens(8, 100) == 400
    assert growth_tokens(8, 1 << 20) == 8 * GROWTH_TOKENS / 2
