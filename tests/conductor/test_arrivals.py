"""What arrives counts less with time, and for nothing after a night without any."""

import pytest

from mooncake_zmq.conductor.arrivals import Arrivals


def overtaking_s(arrivals: Arrivals, now: float) -> float:
    return arrivals.overtaking_s(now, work_s=10.0, wait_s=10.0, overtake=1.0, nodes=1)


def test_after_a_quiet_night_what_was_before_counts_for_nothing() -> None:
    arrivals, fresh, morning = Arrivals(), Arrivals(), 18 * 3600.0
    for at in range(60):
        arrivals.add(float(at), 1.0)
    assert overtaking_s(arrivals, 60.0) > 0
    assert overtaking_s(arrivals, morning) == 0
    for at in range(60):
        arrivals.add(morning + at, 1.0)
        fresh.add(morning + at, 1.0)
    assert overtaking_s(arrivals, morning + 60) == pytest.approx(overtaking_s(fresh, morning + 60))
