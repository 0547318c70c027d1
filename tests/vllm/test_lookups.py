"""Lookups in a pool that answers late: the steps of the engine wait little for them, and want of room makes none a miss."""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import waiting

from mooncake_zmq.store.client.client import Hold
from mooncake_zmq.vllm import lookups
from mooncake_zmq.vllm.lookups import MAX_WAITING, STEP_WAIT_S, Lookups


class LatePool:
    """A client of stores that have everything, and answer once they may."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()

    def hold(self, names: Sequence[str], first: Sequence[str]) -> Hold:
        self.may_answer.wait()
        return Hold(len(names), time.monotonic() + 20.0, (("p", 1),), (), (True,) * len(names))

    def release(self, hold: Hold) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def late() -> LatePool:
    return LatePool()


@pytest.fixture
def asks(late: LatePool) -> Iterator[Lookups]:
    made = Lookups(late)  # type: ignore[arg-type]
    yield made
    late.may_answer.set()
    made.close()


def test_the_first_looks_of_one_step_wait_no_longer_than_one_alone(asks: Lookups, monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [0.0], list[float]()

    class Clocked(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waited.append(timeout)
            now[0] += min(timeout, 1e-3)
            return False

    monkeypatch.setattr(lookups, "monotonic", lambda: now[0])
    for _ in range(2):
        waited.clear()
        begun = [asks.ask(["a"]) for _ in range(50)]
        for lookup in begun:
            lookup.done = Clocked()
        assert [lookup.answer() for lookup in begun * 2] == [None] * 100
        assert waited[:1] == [STEP_WAIT_S]
        assert sum(1 for each in waited if each) == 4, "each of these waits takes a quarter of what the step may wait"
        asks.begin_step()


def test_lookups_beyond_those_that_may_wait_are_begun_later(asks: Lookups, late: LatePool) -> None:
    begun = [asks.ask(["a"]) for _ in range(MAX_WAITING + 50)]
    assert 49 <= asks.deferred <= 50
    assert {lookup.answer() for lookup in begun} == {None}
    late.may_answer.set()
    answers: dict[Any, int | None] = {}

    def are_there() -> bool:
        answers.update((lookup, lookup.answer()) for lookup in begun)
        return None not in answers.values()

    waiting.eventually(are_there)
    assert {*answers.values()} == {1}
