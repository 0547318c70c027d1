"""What a simulated SSD tells a new life."""

from mooncake_zmq.core.work import DiskBlock
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.simulation.cluster import ClusterSettings
from mooncake_zmq.simulation.disk import SimDisk


def test_of_two_rows_with_one_key_the_newer_is_found() -> None:
    """A slot that was to hold something else keeps its row if a crash comes before the new one."""
    layout: BlockLayout = ClusterSettings.of_seed(0).layout
    disk = SimDisk(layout, 4)
    key = b"k" * 16
    for block in (DiskBlock(0, key, 1), DiskBlock(2, b"o" * 16, 2), DiskBlock(3, key, 1)):
        disk.index(block)
    assert [block.slot for block in disk.contents().blocks] == [2, 3]
    assert sorted(disk.rows) == [2, 3]
