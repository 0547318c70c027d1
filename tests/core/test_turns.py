"""Turns are shared by the time they take, among tenants and then among a tenant's answers, and nobody waits for ever."""

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.core.turns import Turns

SLOW_S, QUICK_S = 0.0245, 0.0005
flows = st.tuples(st.sampled_from("abc"), st.integers(0, 3))


def run(takes_s, seconds):
    """What each flow gets of one server, and the longest that each waited; all come again as soon as they had a turn."""
    turns, now, came, had, waited = Turns(), 0.0, dict.fromkeys(takes_s, 0.0), Counter(), defaultdict(float)
    for flow in takes_s:
        turns.put(*flow, flow)
    while now < seconds:
        flow = turns.take()
        waited[flow] = max(waited[flow], now - came[flow])
        now += takes_s[flow]
        had[flow] += takes_s[flow]
        turns.charge(*flow, takes_s[flow])
        came[flow] = now
        turns.put(*flow, flow)
    return had, waited


def test_a_tenant_with_many_slow_answers_costs_another_no_more_than_the_one_under_way():
    takes_s = {("bob", number): SLOW_S for number in range(64)} | {("alice", number): QUICK_S for number in range(4)}
    _, waited = run(takes_s, 30.0)
    assert max(waited["alice", number] for number in range(4)) <= 2 * SLOW_S + 4 * QUICK_S


def test_without_tenants_an_answer_waits_for_no_more_than_each_others_share():
    takes_s = {("", number): SLOW_S for number in range(64)} | {("", 64): QUICK_S}
    had, waited = run(takes_s, 120.0)
    assert waited["", 64] <= 65 * SLOW_S
    later = {flow: seconds for flow, seconds in had.items() if flow != ("", 64)}
    assert max(later.values()) - min(later.values()) <= SLOW_S + 1e-9


@given(st.dictionaries(flows, st.floats(0.1, 1.0), min_size=1))
def test_nobody_waits_for_ever_and_no_tenant_gets_half_of_anothers_time(takes_s):
    longest = max(takes_s.values())
    had, waited = run(takes_s, 200 * longest)
    mine = Counter(tenant for tenant, _ in takes_s)
    assert max(waited.values()) <= 2 * longest * len(mine) * max(mine.values()) + 1e-6
    by_tenant = Counter()
    for (tenant, _), seconds in had.items():
        by_tenant[tenant] += seconds
    assert min(by_tenant.values()) > max(by_tenant.values()) / 2


def test_newcomers_that_never_end_keep_no_answer_waiting_for_ever():
    turns, had = Turns(), 0
    turns.put("", 0, 0)
    for number in range(1, 2000):
        turns.put("", number, number)
        taken = turns.take()
        turns.charge("", taken, 0.1)
        if taken:
            turns.drop("", taken)
        else:
            had += 1
            turns.put("", 0, 0)
    assert had > 20


def test_who_was_away_has_saved_nothing_up():
    turns = Turns()
    for _ in range(100):
        turns.put("bob", 1, "bob")
        assert turns.take() == "bob"
        turns.charge("bob", 1, 1.0)
    order = []
    for _ in range(10):
        turns.put("bob", 1, "bob")
        turns.put("alice", 2, "alice")
        order.append(turns.take())
        turns.charge(order[-1], 1 if order[-1] == "bob" else 2, 1.0)
    assert order.count("alice") <= 6


@given(st.lists(st.tuples(st.sampled_from(("put", "take", "drop", "charge")), flows), max_size=60))
def test_each_work_comes_out_once_and_what_is_dropped_is_forgotten(steps):
    turns, waiting = Turns(), []
    for number, (what, flow) in enumerate(steps):
        match what:
            case "put":
                turns.put(*flow, (flow, number))
                waiting.append((flow, number))
            case "take":
                work = turns.take()
                assert (work is None) == (not waiting)
                if work is not None:
                    waiting.remove(work)
            case "drop":
                assert turns.drop(*flow) == [work for work in waiting if work[0] == flow]
                waiting = [work for work in waiting if work[0] != flow]
            case "charge":
                turns.charge(*flow, 0.5)
    assert sorted(turns.clear()) == sorted(waiting)
    assert turns.take() is None


def test_tenants_that_are_gone_are_forgotten():
    turns = Turns()
    for number in range(1000):
        turns.put(f"t{number}", number, number)
        assert turns.take() == number
        turns.charge(f"t{number}", number, 0.001)
        turns.drop(f"t{number}", number)
    assert len(turns._shares) + len(turns._tenants) < 10
