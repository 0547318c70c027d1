"""Threads that tenants take turns at."""

import threading
from concurrent.futures import CancelledError
from concurrent.futures import wait as wait_for

import pytest

from mooncake_zmq.gateway.http.fair_pool import FairPool


@pytest.fixture
def lane():
    made = FairPool("lane")
    yield made
    made.close()


@pytest.fixture
def hold(lane):
    """Keeps the one thread until it is set."""
    began, go_on = threading.Event(), threading.Event()
    lane.submit("holder", lambda: (began.set(), go_on.wait(10)))
    assert began.wait(10)
    yield go_on
    go_on.set()


def test_tenants_take_turns_whatever_each_has_waiting(lane, hold):
    order = []
    asked = [lane.submit(tenant, lambda tenant=tenant: order.append(tenant)) for tenant in "aaaabbc"]
    hold.set()
    wait_for(asked)
    assert "".join(order) == "abcabaa"


def test_what_a_work_gives_or_raises_is_its_callers(lane):
    assert lane.submit("a", lambda: 7).result(10) == 7
    with pytest.raises(ZeroDivisionError):
        lane.submit("a", lambda: 1 // 0).result(10)
    assert lane.submit("a", lambda: 8).result(10) == 8


def test_what_is_cancelled_is_forgotten_and_never_begun(lane, hold):
    begun = []
    for number in range(100):
        assert lane.submit("a", lambda number=number: begun.append(number)).cancel()
    assert not lane._waiting
    hold.set()
    assert lane.submit("a", lambda: 1).result(10) == 1
    assert begun == []


def test_so_many_threads_work_at_once_and_no_more():
    lane, both, most = FairPool("lane", 2), threading.Barrier(2), []
    for _ in range(2):
        wait_for([lane.submit("a", lambda: both.wait(10)) for _ in range(2)])
    wait_for([lane.submit("a", lambda: most.append(threading.current_thread().name)) for _ in range(20)])
    assert set(most) <= {"lane_0", "lane_1"}
    lane.close()


def test_a_close_leaves_nobody_waiting(lane, hold):
    waiting = lane.submit("a", lambda: 1)
    lane.close()
    with pytest.raises(CancelledError):
        waiting.result(10)
