"""The rule of order: what may pass whom, and for how long."""

from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.core.order import Order

jobs = st.tuples(st.floats(0, 100), st.floats(0.01, 50), st.integers(-3, 3))
orders = st.builds(Order, overtake=st.floats(0, 5), priority_s=st.floats(0, 20))


@given(orders, st.lists(jobs, min_size=2, max_size=30))
def test_of_those_that_come_later_only_such_pass_as_come_within_the_bound(order, some):
    """The bound that `core.order` states: no stream of later arrivals can hold a job back for longer."""
    for arrived_at, work_s, priority in some:
        rank = order.rank(arrived_at, work_s, priority)
        for other_at, other_s, other_priority in some:
            if other_at > arrived_at and order.rank(other_at, other_s, other_priority) < rank:
                steps = max(0, priority - other_priority)
                assert other_at - arrived_at < order.overtake * work_s + order.priority_s * steps + 1e-6


@given(st.lists(jobs, min_size=1, max_size=30))
def test_without_overtaking_it_is_first_come_first_served(some):
    order = Order(overtake=0.0, priority_s=0.0)
    assert sorted(some, key=lambda job: order.rank(*job)) == sorted(some, key=lambda job: job[0])


def test_a_short_one_passes_a_long_one_and_a_step_of_priority_is_worth_its_seconds():
    order = Order(overtake=1.0, priority_s=10.0)
    assert order.rank(5.0, 0.1) < order.rank(0.0, 30.0) < order.rank(29.95, 0.1)
    assert order.rank(9.9, 1.0, -1) < order.rank(0.0, 1.0) < order.rank(10.1, 1.0, -1)


@given(st.floats(0, 5), st.floats(0.1, 20), st.floats(-200, 200), st.floats(0, 100), st.floats(0.01, 50))
def test_the_priority_behind_a_rank_is_the_earliest_that_does_not_pass_it(overtake, priority_s, rank, arrived_at, work_s):
    order = Order(overtake, priority_s)
    priority = order.priority_behind(rank, arrived_at, work_s)
    assert order.rank(arrived_at, work_s, priority) >= rank
    assert order.rank(arrived_at, work_s, priority - 2) < rank
