"""Conductors hear of the blocks of vLLMs that a store holds: of each once, whatever its ranks, and when the last of it goes."""

from pathlib import Path

import pytest
from actor_harness import LAYOUT, Harness
from store_servers import store_server

from mooncake_zmq.core.actor import EngineBlocksReported
from mooncake_zmq.core.messages import BlocksAnnounced
from mooncake_zmq.pool.node.cache_node import CacheNode
from mooncake_zmq.pool.node.settings import CacheNodeSettings
from mooncake_zmq.pool.rules.engine_blocks import EngineBlocks, block_key

KEY, OTHER = bytes(range(16)), bytes(16)


def name(key=KEY, rank="0", prefix="", digest="ab" * 16):
    return f"{prefix}vllm/{digest}/{rank}/{key.hex()}"


def test_names_of_blocks_are_told_from_all_others():
    assert block_key(name()) == block_key(name(rank="tp1", prefix="team-a/")) == block_key(name(prefix="team:")) == KEY
    for other in (
        name()[:-1],
        name(digest="ab"),
        name(digest="zz" * 16),
        f"vllm/{KEY.hex()}",
        KEY.hex(),
        "",
        "a/b/c/d",
        name() + "/",
    ):
        assert block_key(other) is None


def test_a_block_is_there_from_its_first_value_to_its_last():
    engine_blocks, there = EngineBlocks(), set()
    exist = lambda names: bytes(each in there for each in names)  # noqa: E731

    def change(*names):
        there.symmetric_difference_update(names)
        for each in names:
            engine_blocks.touch(each)
        return engine_blocks.changes(exist)

    assert change(name(rank="0"), "else") == ([KEY], [])
    assert change(name(rank="1")) == ([], [])
    assert change(name(rank="0")) == ([], [])
    assert change(name(rank="1"), name(OTHER)) == ([OTHER], [KEY])
    engine_blocks.touch(name(OTHER))
    assert engine_blocks.changes(exist) == ([], []), "gone and back"
    assert len(engine_blocks) == 1


@pytest.fixture
def told():
    return []


def test_a_store_tells_of_blocks_put_removed_and_evicted(tmp_path: Path, told: list[EngineBlocksReported], connect) -> None:
    server = store_server(tmp_path, slabs=4, slab_bytes=1 << 18, on_engine_blocks=told.append)
    try:
        store = connect(server)
        assert store.put(name(), bytes(1000)) == store.put("anything", bytes(10)) == 0
        assert told == [EngineBlocksReported((KEY,), ())]
        store.remove(name())
        assert told[1:] == [EngineBlocksReported((), (KEY,))]
        for index in range(64):
            assert store.put(name(index.to_bytes(16, "big")), bytes(60_000)) == 0
        stored = [key for each in told[2:] for key in each.stored]
        removed = [key for each in told[2:] for key in each.removed]
        assert len(stored) == 64
        assert 0 < len(stored) - len(removed) <= 16
        assert removed == stored[: len(removed)], "the oldest went first"
    finally:
        server.close()


def test_conductors_hear_of_it_whenever_they_come():
    settings = CacheNodeSettings(pool_bytes=16 * LAYOUT.slot_bytes)
    node = Harness(CacheNode(name="me", host="h0", incarnation=1, settings=settings, layout=LAYOUT))
    node.up("k1")
    node.take(BlocksAnnounced)
    node.handle(EngineBlocksReported((KEY, OTHER), ()))
    assert node.one(BlocksAnnounced) == BlocksAnnounced(stored=(KEY, OTHER), engine_blocks=True)
    node.handle(EngineBlocksReported((), (KEY,)))
    assert node.one(BlocksAnnounced) == BlocksAnnounced(removed=(KEY,), engine_blocks=True)
    node.up("k2")
    whole, complete = node.take(BlocksAnnounced, "k2")
    assert whole == BlocksAnnounced(stored=(OTHER,), engine_blocks=True)
    assert complete.complete
