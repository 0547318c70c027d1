"""Timers: each fires once, a replaced or cancelled one never, and what is over takes no room."""

import math

from mooncake_zmq.core.timers import MIN_STALE, Timers


def test_a_key_that_is_set_again_has_its_last_timer_alone():
    timers: Timers[int] = Timers()
    for turn in range(3):
        timers.set("key", 1.0 + turn, turn)
    timers.set("other", 1.5, 9)
    timers.cancel("other")
    assert (timers.next_at(), "key" in timers, "other" in timers) == (3.0, True, False)
    assert timers.pop_due(2.9) is None
    assert timers.pop_due(3.0) == 2
    assert (len(timers), timers.next_at(), timers.pop_due(9.0)) == (0, math.inf, None)


def test_timers_that_are_due_come_in_the_order_of_their_times():
    timers: Timers[str] = Timers()
    for at, name in ((2.0, "second"), (1.0, "first"), (2.0, "third")):
        timers.set(name, at, name)
    assert [timers.pop_due(2.0) for _ in range(4)] == ["first", "second", "third", None]


def test_timers_that_were_cancelled_do_not_pile_up():
    timers: Timers[None] = Timers()
    timers.set("stays", 5.0, None)
    for number in range(10_000):
        timers.set(number, 1e7, None)
        timers.cancel(number)
        assert len(timers._heap) <= MIN_STALE + 4, "two live timers while it is set"
    assert len(timers) == 1
    assert timers.next_at() == 5.0
