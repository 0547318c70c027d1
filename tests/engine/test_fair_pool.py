"""Threads that tenants take turns at."""

import threading
from concurrent.futures import CancelledError
from concurrent.futures import wait as wait_for

import pytest

from mooncake_zmq.engine.fair_pool import FairPool


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


@pytest.mark.parametrize(("a_takes_s", "order"), [(1.0, "abcabaa"), (2.0, "abcbaaa"), (9.0, "abcbaaa")])
def test_tenants_share_the_time_whatever_each_has_waiting(a_takes_s, order):
    now, done, go_on = [0.0], [], threading.Event()
    lane = FairPool("lane", clock=lambda: now[0])
    lane.submit("holder", lambda: go_on.wait(10))

    def work(tenant):
        done.append(tenant)
        now[0] += a_takes_s if tenant == "a" else 1.0

    asked = [lane.submit(tenant, lambda tenant=tenant: work(tenant)) for tenant in "aaaabbc"]
    go_on.set()
    wait_for(asked)
    lane.close()
    assert "".join(done) == order


def test_works_of_one_flow_wait_for_each_other_and_go_with_it(lane, hold):
    flow, order = lane.new_flow(), []
    left = [lane.submit("a", lambda: order.append("left"), flow) for _ in range(3)]
    kept = lane.submit("a", lambda: order.append("kept"))
    lane.drop("a", flow)
    hold.set()
    kept.result(10)
    assert all(each.cancelled() for each in left)
    assert order == ["kept"]


def test_what_a_work_gives_or_raises_is_its_callers(lane):
    assert lane.submit("a", lambda: 7).result(10) == 7
    with pytest.raises(ZeroDivisionError):
        lane.submit("a", lambda: 1 // 0).result(10)
    assert lane.submit("a", lambda: 8).result(10) == 8


def test_what_is_cancelled_is_forgotten_and_never_begun(lane, hold):
    begun = []
    for number in range(100):
        assert lane.submit("a", lambda number=number: begun.append(number)).cancel()
    assert lane._turns.take() is None
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


def test_works_go_on_where_threads_cannot_be_started_for_a_while(monkeypatch):
    lane, go_on = FairPool("lane", 2), threading.Event()

    def full(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", full)
        for _ in range(3):
            with pytest.raises(RuntimeError):
                lane.submit("a", lambda: 1)
    running = lane.submit("a", lambda: go_on.wait(10))
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", full)
        waiting = lane.submit("a", lambda: 2)
    go_on.set()
    assert running.result(10)
    assert waiting.result(10) == 2
    lane.close(wait=True)
    assert lane._busy == 0


def test_a_close_leaves_nobody_waiting(lane, hold):
    waiting = lane.submit("a", lambda: 1)
    lane.close()
    with pytest.raises(CancelledError):
        waiting.result(10)
