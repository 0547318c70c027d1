"""Who holds a place: the first by rank, and a few that rank before one of those."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.prefill.queue import Turns


@dataclass
class Job:
    rank: float
    order: int


def queue(ranks, *, max_active=2, further=1):
    turns = Turns(max_active, further)
    jobs = [Job(rank, order) for order, rank in enumerate(ranks)]
    for job in jobs:
        turns.arrive(job)
        while turns.activate() is not None:
            pass
    return turns, jobs


def ranks(jobs):
    return [job.rank for job in jobs]


def test_places_go_by_rank_and_ties_by_arrival():
    turns, _ = queue([5.0, 5.0, 5.0])
    assert [job.order for job in turns.active()] == [0, 1]
    assert turns.waiting == 1


def test_who_ranks_before_one_that_holds_a_place_gets_a_further_one():
    turns, jobs = queue([10.0, 20.0, 30.0, 5.0, 1.0])
    assert ranks(turns.active()) == [5.0, 10.0, 20.0], "there is one further place: the next waits"
    turns.leave(jobs[3])
    assert ranks([turns.activate()]) == [1.0]
    assert turns.activate() is None


def test_a_job_may_leave_from_wherever_it_is_and_twice():
    turns, jobs = queue([10.0, 20.0, 30.0])
    for job in (jobs[2], jobs[0], jobs[0]):
        turns.leave(job)
    assert ranks(turns) == [20.0]


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 4), st.integers(0, 3), st.data())
def test_the_first_of_all_holds_a_place_unless_all_places_are_taken(some, max_active, further, data):
    turns = Turns(max_active, further)
    here = []
    for order, rank in enumerate(some):
        here.append(Job(float(rank), order))
        turns.arrive(here[-1])
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(here))
            here.remove(gone)
            turns.leave(gone)
        while turns.activate() is not None:
            pass
        assert sorted(job.order for job in turns) == sorted(job.order for job in here)
        active = turns.active()
        assert active == sorted(active, key=lambda job: (job.rank, job.order))
        assert len(active) <= max_active + further
        assert len(active) >= min(max_active, len(here))
        if here and len(active) < max_active + further:
            assert active[0] is min(here, key=lambda job: (job.rank, job.order))
