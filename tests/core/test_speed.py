"""What a node measures of its own speed: by size, held down at the beginning, and faded while nothing is measured."""

import pytest

from mooncake_zmq.core.messages import Measured
from mooncake_zmq.core.speed import Speed


def pace(**changes):
    return Speed(**{"memory_s": 8.0, "half_life_s": 60.0} | changes)


def test_nothing_measured_is_told_apart_and_counts_as_predicted():
    assert pace().measured(5.0) == Measured()
    assert pace().ratio(5.0) == 1.0
    assert not pace().known


def test_steady_work_is_told_as_it_is():
    node = pace()
    for second in range(100):
        node.add(float(second), 1.0, 0.5)
    assert node.ratio(99.0) == pytest.approx(2.0, rel=0.01)
    told = node.measured(99.0)
    assert told.seconds / told.predicted_s == pytest.approx(node.ratio(99.0))


def test_a_slow_and_small_first_piece_says_little():
    node = pace()
    node.add(0.0, 0.5, 0.005)
    assert node.ratio(0.0) < 1.6, "a hundred times slower, but only a two-hundredth of what is held against it"


def test_a_slow_first_piece_is_forgotten_while_nothing_is_measured():
    node = pace()
    node.add(0.0, 100.0, 1.0)
    assert node.ratio(0.0) > 40
    assert node.ratio(60.0) == pytest.approx(1 + (node.ratio(0.0) - 1) / 2)
    assert node.ratio(1000.0) == pytest.approx(1.0, abs=0.01)


def test_work_that_never_pauses_does_not_fade():
    """A piece that takes long is no time in which nothing is measured."""
    node = pace()
    for end in range(1, 30):
        node.add(100.0 * end, 100.0, 20.0)
    assert node.ratio(2900.0) == pytest.approx(5.0, rel=0.01)


def test_many_small_pieces_with_their_overhead_do_not_hide_a_large_one():
    node = pace()
    for _ in range(50):
        node.add(0.0, 0.05, 0.001)
    node.add(0.0, 20.0, 20.0)
    assert node.ratio(0.0) < 1.2


def test_work_without_a_prediction_measures_nothing():
    node = pace()
    node.add(0.0, 1.0, 0.0)
    assert not node.known
