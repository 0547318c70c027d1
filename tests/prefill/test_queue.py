"""Who holds a place: the first by rank, and a few that rank before one of those."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.prefill.queue import JobQueue


@dataclass
class Job:
    rank: float
    order: int
    tenant: str = ""
    arrived_at: float = 0.0


def queue(ranks, *, max_active=2, further=1):
    turns = JobQueue(max_active, further)
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
    turns = JobQueue(max_active, further)
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


def shared(*jobs, max_active=2, further=1):
    """A queue with these jobs, as many active as may be."""
    turns = JobQueue(max_active, further)
    made = [Job(rank=float(order), order=order, tenant=tenant, arrived_at=float(order)) for order, tenant in enumerate(jobs)]
    for job in made:
        turns.arrive(job)
        while turns.activate() is not None:
            pass
    return turns, made


def run_through(turns, takes_s):
    """Whose chunks are computed, one after the other, until no job is left; each job has as many as its tenant says."""
    left, order = {}, []
    while len(turns):
        while (job := turns.activate()) is not None:
            left[job.order] = takes_s[job.tenant][0]
        job = turns.first(lambda _: True)
        order.append(job.tenant)
        turns.charge(job, takes_s[job.tenant][1])
        left[job.order] = left.get(job.order, takes_s[job.tenant][0]) - 1
        if not left[job.order]:
            turns.leave(job)
    return "".join(order)


def test_a_tenant_without_a_place_gets_one_though_another_one_holds_all_of_them():
    turns, jobs = shared(*"aaaaab")
    assert [job.tenant for job in turns.active()] == ["a", "a", "b"]
    assert turns.first(lambda _: True) is jobs[0], "nobody has used anything yet"
    turns.charge(jobs[0], 1.0)
    assert turns.first(lambda _: True) is jobs[5]


def test_a_short_prompt_of_another_tenant_waits_for_one_chunk_of_long_ones():
    turns, _ = shared(*"aaab")
    assert run_through(turns, {"a": (5, 0.1), "b": (1, 0.1)}) == "ab" + "a" * 14


def test_tenants_get_the_same_time_not_as_many_chunks():
    turns, _ = shared(*"ab")
    assert run_through(turns, {"a": (3, 4.0), "b": (9, 1.0)}) == "abbbbabbbbab"


def test_a_priority_is_worth_its_seconds_of_the_engine_among_tenants():
    turns, jobs = shared(*"ab")
    turns.leave(jobs[1])
    jobs[1].rank -= 10.0
    turns.arrive(jobs[1])
    assert turns.activate() is jobs[1]
    for _ in range(99):
        assert turns.first(lambda _: True) is jobs[1]
        turns.charge(jobs[1], 0.1)
    turns.charge(jobs[1], 0.2)
    assert turns.first(lambda _: True) is jobs[0]


def test_who_is_gone_has_left_nothing():
    turns, jobs = shared(*"aab")
    for job in jobs:
        turns.charge(job, 1.0)
        turns.leave(job)
    turns.charge(jobs[0], 1.0)
    assert (len(turns), len(turns._jobs), len(turns._places)) == (0, 0, 0)
    assert len(turns._shares) <= 1
