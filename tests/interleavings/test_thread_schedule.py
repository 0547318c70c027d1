"""The schedule itself: it finds what threads that are not guarded do, runs guarded ones through, and repeats itself."""

import sys
import threading

from thread_schedule import first_failure

HERE = sys.modules[__name__]
SEEDS = range(30)


class Counter:
    def __init__(self):
        self.value, self.lock = 0, threading.Lock()

    def add(self):
        self.value += 1

    def add_guarded(self):
        with self.lock:
            self.value += 1


def counting(add):
    def case(schedule):
        def body():
            counter = Counter()
            schedule.together(*[lambda: [add(counter) for _ in range(3)]] * 3)
            assert counter.value == 9

        return body

    return case


def test_an_increment_without_a_lock_is_found_lost():
    assert "AssertionError" in first_failure(counting(Counter.add), SEEDS, HERE)


def test_an_increment_under_a_lock_never_is():
    assert first_failure(counting(Counter.add_guarded), SEEDS, HERE) == ""


def test_two_locks_taken_in_opposite_orders_are_found_to_block_each_other():
    def case(schedule):
        def body():
            one, two = threading.Lock(), threading.Lock()

            def both(first, second):
                with first, second:
                    pass

            schedule.together(lambda: both(one, two), lambda: both(two, one))

        return body

    assert "Stuck: no thread can go on" in first_failure(case, SEEDS, HERE)


def test_a_seed_repeats_itself():
    orders = set()
    for _ in range(5):
        order = []

        def case(schedule, order=order):
            def body():
                schedule.together(*[lambda number=number: [order.append(number) for _ in range(5)] for number in range(3)])

            return body

        assert first_failure(case, [7], HERE) == ""
        orders.add(tuple(order))
    assert len(orders) == 1
