"""Threads that compute together: they wait for each other, fail together, and end with their team."""

import gc
import threading

import pytest

from mooncake_zmq.engine.team import Team


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_runs_once_and_the_last_is_the_callers(size):
    team, ran = Team(size), {}
    team.run(lambda rank: ran.setdefault(rank, threading.current_thread()))
    assert sorted(ran) == list(range(size))
    assert ran[size - 1] is threading.current_thread()
    assert len(set(ran.values())) == size


def pass_on(team, said, steps, culprit=None):
    """A share: each rank hears the one before it and tells the next; the culprit tells once too often and fails."""

    def share(rank):
        for step in range(steps):
            if rank > 0:
                team.wait_for(rank, of=rank - 1)
            said.append((step, rank))
            if rank + 1 < team.size:
                team.signal(rank, to=rank + 1)
            if rank == culprit:
                team.signal(rank, to=(rank + 1) % team.size)
                raise LookupError("this one")

    return share


def check_order(said, steps, size):
    assert sorted(said) == [(step, rank) for step in range(steps) for rank in range(size)]
    for rank in range(1, size):
        for step in range(steps):
            assert said.index((step, rank - 1)) < said.index((step, rank))


def test_a_rank_hears_only_what_it_was_told():
    said = []
    team = Team(3)
    team.run(pass_on(team, said, 50))
    check_order(said, 50, 3)


def test_a_rank_that_only_tells_ends_when_another_has_failed():
    team = Team(2)

    def share(rank):
        if rank == 1:
            raise LookupError("this one")
        while True:
            team.signal(rank, to=1)

    with pytest.raises(LookupError, match="this one"):
        team.run(share)


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_one_failure_ends_all_and_leaves_nothing_for_the_next_run(culprit):
    team = Team(3)
    for _ in range(20):
        with pytest.raises(LookupError, match="this one"):
            team.run(pass_on(team, [], 10, culprit))
        said = []
        team.run(pass_on(team, said, 10))
        check_order(said, 10, 3)


def test_the_threads_end_with_the_team():
    gc.collect()
    before = set(threading.enumerate())
    team = Team(4)
    team.run(lambda rank: None)
    mine = set(threading.enumerate()) - before
    assert len(mine) == 3
    del team
    gc.collect()
    for thread in mine:
        thread.join(timeout=20)
        assert not thread.is_alive()


def test_a_team_of_nobody_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        Team(0)
