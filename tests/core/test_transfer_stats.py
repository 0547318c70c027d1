"""What a node says that it moved is what its works say that they copied."""

from mooncake_zmq.core.messages import MAX_COUNT, MAX_TRANSFER_STATS, SlotRef
from mooncake_zmq.core.transfer_stats import TransferStats
from mooncake_zmq.core.work import (
    BlockLoad,
    BlocksCopied,
    BlocksPulled,
    ChunkComputed,
    ComputeChunk,
    CopyBlocks,
    DiskBlock,
    DiskWritten,
    PullBlocks,
    SequenceBlock,
    SlotGrant,
    WorkFailed,
    WriteToDisk,
)
from mooncake_zmq.kv.layout import BlockLayout

LAYOUT = BlockLayout(layers=2, kv_heads=1, head_dim=2, block_tokens=4)
BLOCK, PART = LAYOUT.block_bytes, LAYOUT.part_bytes


def ref(node):
    return SlotRef(node=node, incarnation=1, slot=0, generation=2, checksum=1)


def grant(node):
    return SlotGrant(node, 1, 0, 1)


def totals(*works):
    transfer_stats = TransferStats("me", LAYOUT)
    for number, (work, result) in enumerate(works):
        transfer_stats.begin(number, work)
        transfer_stats.end(number, result)
    assert len(transfer_stats) == 0
    return {(moved.kind, moved.peer): moved.bytes for moved in transfer_stats.totals()}


def test_copies_count_by_where_they_come_from_and_go():
    disk = DiskBlock(0, b"k" * 16, 1)
    copies = ((ref("c2"), grant("me")), (disk, grant("me")), (SequenceBlock(1, 0), grant("c1")), (ref("c2"), grant("me")))
    found = totals(
        (CopyBlocks(copies), BlocksCopied((1, 1, 1, None))),
        (WriteToDisk(((ref("me"), disk),) * 3), DiskWritten((True, False, True))),
    )
    assert found == {("fetch", "c2"): BLOCK, ("promote", ""): BLOCK, ("put", "c1"): BLOCK, ("demote", ""): 2 * BLOCK}


def test_a_prefix_counts_as_reused_or_loaded_and_not_what_failed():
    prefix = tuple(BlockLoad(block, ref(node), 0, 2, 4) for block, node in enumerate(("me", "c1", "c1")))
    work = ComputeChunk(1, 12, b"", prefix, (), None)
    assert totals((work, ChunkComputed((), None, 0.1))) == {("reuse", "me"): BLOCK, ("load", "c1"): 2 * BLOCK}
    assert totals((work, ChunkComputed((), None, 0.1, failed=(2,)))) == {("reuse", "me"): BLOCK, ("load", "c1"): BLOCK}


def test_a_handoff_counts_layer_by_layer_as_it_comes():
    loads = (BlockLoad(0, ref("p1"), 0, 1, 4), BlockLoad(1, ref("p2"), 0, 2, 4))
    pulled = BlocksPulled(((0, 0, 1), (1, 0, 1), (1, 1, 1)), ())
    assert totals((PullBlocks(1, loads), pulled)) == {("handoff", "p1"): PART, ("handoff", "p2"): 2 * PART}


def test_what_failed_moved_nothing():
    assert totals((PullBlocks(1, ()), WorkFailed("late"))) == {}


def test_the_table_is_bounded_and_loses_no_bytes():
    works = [(CopyBlocks(((ref(f"c{n}"), grant("me")),)), BlocksCopied((1,))) for n in range(2 * MAX_TRANSFER_STATS)]
    found = totals(*works)
    assert len(found) <= MAX_TRANSFER_STATS
    assert sum(found.values()) == 2 * MAX_TRANSFER_STATS * BLOCK


def test_more_than_a_message_may_say_is_the_most_that_it_may():
    """Or no peer would read the report that it is part of."""
    vast = BlockLayout(layers=1 << 10, kv_heads=1 << 10, head_dim=1 << 20, block_tokens=4)
    transfer_stats = TransferStats("me", vast)
    transfer_stats.begin(1, WriteToDisk(()))
    transfer_stats.end(1, DiskWritten((True,) * 64))
    assert [moved.bytes for moved in transfer_stats.totals()] == [MAX_COUNT]
