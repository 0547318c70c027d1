"""The rule by which bytes that were read are trusted."""

import pytest

from mooncake_zmq.kv import reading
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.kv.reading import ReadFailure

ROW = (11, 12, 13)


@pytest.mark.parametrize(
    ("generation", "named", "committed", "stands"),
    [(4, 4, True, True), (5, 4, True, False), (3, 4, True, False)]
    + [(3, 3, False, True), (4, 3, False, True), (5, 3, False, False), (2, 3, False, False)],
)
def test_a_committed_copy_keeps_its_generation_and_one_being_written_may_be_committed(generation, named, committed, stands):
    assert reading.generation_stands(generation, named, committed=committed) is stands


def test_a_row_folds_to_what_was_told_unless_nothing_was():
    assert reading.row_stands(ROW, block_checksum(ROW))
    assert reading.row_stands(ROW, 0)
    assert not reading.row_stands(ROW, block_checksum(ROW) ^ 1)
    assert not reading.row_stands(ROW[::-1], block_checksum(ROW))


def test_a_part_that_is_not_written_yet_stands_for_nothing():
    assert reading.part_stands(11, 11)
    assert not reading.part_stands(11, 12)
    assert not reading.part_stands(0, 0)


def test_torn_bytes_accuse_nobody():
    assert reading.failure(stands=True) is ReadFailure.CORRUPT
    assert reading.failure(stands=False) is ReadFailure.UNREACHED
