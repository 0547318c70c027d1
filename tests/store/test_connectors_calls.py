"""Calls that connectors written for Mooncake make of its store: groups, times of pins, ranges, copies that go, and setup."""

import os

import pytest
from store_harness import Memory

from mooncake_zmq.store import MooncakeDistributedStore, ReplicateConfig, SoftPinAction
from mooncake_zmq.store.client.caller_memory import CallerMemory
from mooncake_zmq.store.client.client import StoreClient
from mooncake_zmq.store.codes import Pin


def test_groups_are_taken(store):
    config = ReplicateConfig(group_ids=["g", "g"])
    source = Memory(8)
    assert store.batch_put_from(["a", "b"], [source.address] * 2, [8, 8], config) == [0, 0]
    assert store.upsert("c", b"x", ReplicateConfig(group_ids=["h"])) == 0


@pytest.mark.parametrize("time_ms", [None, 0, 1, 2**64 - 1])
def test_a_soft_pin_may_have_a_time(time_ms):
    config = ReplicateConfig(with_soft_pin=True, soft_pin_ttl_ms=time_ms)
    assert config.pins == (Pin.NONE if time_ms == 0 else Pin.SOFT)
    assert ReplicateConfig(soft_pin_action=SoftPinAction.ENABLE, soft_pin_ttl_ms=time_ms).is_consistent


@pytest.mark.parametrize("time_ms", [-1, 2**64, 1.0, "5", b"", [1]])
def test_what_is_no_time_is_a_type_error(time_ms):
    with pytest.raises(TypeError, match="soft_pin_ttl_ms"):
        ReplicateConfig(soft_pin_ttl_ms=time_ms)
    config = ReplicateConfig()
    with pytest.raises(TypeError, match="soft_pin_ttl_ms"):
        config.soft_pin_ttl_ms = time_ms


def test_a_time_without_a_pin_is_refused(store):
    assert store.put("k", b"x", ReplicateConfig(soft_pin_ttl_ms=5)) == -600
    assert store.put("k", b"x", ReplicateConfig(with_soft_pin=True, soft_pin_ttl_ms=5)) == 0


def test_ranges_of_values_arrive_where_they_are_wanted(store):
    one, two = os.urandom(70_000), os.urandom(300)
    assert [store.put("one", one), store.put("two", two)] == [0, 0]
    left, right = Memory(1000), Memory(64)
    got = store.get_into_ranges(
        [left.address, right.address],
        [["one", "two", "none"], ["one"]],
        [[[0, 500], [200], [0]], [[8]]],
        [[[69_900, 3], [299], [0]], [[0]]],
        [[[100, 7], [1], [4]], [[16]]],
    )
    assert got == [[[100, 7], [1], [-704]], [[16]]]
    assert left.bytes(0, 100) == one[69_900:]
    assert left.bytes(500, 7) == one[3:10]
    assert left.bytes(200, 1) == two[299:]
    assert right.bytes() == bytes(8) + one[:16] + bytes(40)


def test_ranges_that_cannot_be_are_refused_and_the_others_are_not(store):
    assert store.put("k", b"12345678") == 0
    target = Memory(16)
    parts = ([0, 0, 0, -1, 4], [7, 9, -1, 0, 0], [1, 1, 1, 1, 9])
    got = store.get_into_ranges([target.address], [["k"]], *([[part]] for part in parts))
    assert got == [[[1, -600, -600, -600, -600]]]
    assert target.bytes() == b"8" + bytes(15)
    assert store.get_into_ranges([target.address], [["k"]], [[[0]]], [[[0]]], [[[1], [1]]]) == [[[-600], [-600]]]
    assert store.get_into_ranges([target.address], [], [[[0]]], [[[0]]], [[[1]]]) == [[[-600]]]
    assert store.get_into_ranges([target.address], [["k"]], [[[0, 1]]], [[[0]]], [[[1]]]) == [[[-600]]]


def test_ranges_end_within_the_buffer_that_is_registered(store):
    assert store.put("k", b"12345678") == 0
    target = Memory(64)
    assert store.register_buffer(target.address, 32) == 0
    assert store.register_buffer(target.address + 40, 8) == 0
    parts = ([31, 28, 32, 28], [0, 0, 0, 4], [4, 4, 1, 5])
    assert store.get_into_ranges([target.address], [["k"]], *([[part]] for part in parts)) == [[[-600, 4, -600, -600]]]
    assert store.get_into_ranges([target.address + 30], [["k"]], [[[0, 0]]], [[[4, 4]]], [[[3, 2]]]) == [[[-600, 2]]]
    assert target.bytes(28, 12) == b"1256" + bytes(8)
    assert store.unregister_buffer(target.address) == 0
    assert store.get_into_ranges([target.address], [["k"]], [[[31]]], [[[0]]], [[[4]]]) == [[[4]]]


def test_without_a_store_ranges_and_copies_are_unreached():
    store = MooncakeDistributedStore()
    assert store.get_into_ranges([1], [["k"]], [[[0]]], [[[0]]], [[[1]]]) == [[[-900]]]
    assert store.batch_replica_clear(["k"]) == []


def test_a_store_closed_amid_a_row_of_ranges_was_not_asked_for_the_others(store, monkeypatch):
    assert store.put("k", b"1234") == 0
    target, copy_parts = Memory(8), CallerMemory._copy_parts

    def copies_then_closes(self, value, *parts):
        found = copy_parts(self, value, *parts)
        store.close()
        return found

    monkeypatch.setattr(CallerMemory, "_copy_parts", copies_then_closes)
    row = [["k", "k", "none"]], [[[0], [4], [4]]], [[[0]] * 3], [[[4]] * 3]
    assert store.get_into_ranges([target.address], *row) == [[[4], [-900], [-900]]]


def test_values_of_which_no_store_was_asked_are_unreached_not_missing(store, monkeypatch):
    monkeypatch.setattr("mooncake_zmq.store.client.client.CHUNK_BYTES", 4)
    assert store.put("k", b"1234") == 0
    target, fetch_at = Memory(12), StoreClient._fetch_at

    def fetches_then_closes(self, *arguments):
        fetch_at(self, *arguments)
        store.close()

    monkeypatch.setattr(StoreClient, "_fetch_at", fetches_then_closes)
    places = [target.address, target.address + 4, target.address + 8]
    assert store.batch_get_into(["none", "k", "none"], places, [4, 4, 4]) == [-704, -900, -900]


def test_copies_go_from_every_store_or_the_named_one(make_server, connect):
    servers = [make_server(f"node-{number}") for number in (1, 2)]
    store = connect(*servers)
    assert store.put("k", b"value", ReplicateConfig(replica_num=2)) == 0
    assert store.batch_replica_clear(["k", "none"], "node-2") == ["k"]
    (copy,) = store.get_replica_desc("k")
    assert copy.get_memory_descriptor().buffer_descriptor.transport_endpoint == "node-1"
    assert store.batch_replica_clear(["k"], "node-3") == []
    assert store.batch_replica_clear(["k"]) == ["k"]
    assert store.is_exist("k") == 0


@pytest.mark.parametrize("size", ["80%", " 5.5 %"])
@pytest.mark.parametrize("name", ["global_segment_size", "local_buffer_size", "io_threads"])
def test_a_share_is_no_size(name, size):
    config = {"master_server_addr": "ipc:///nowhere", name: size}
    assert MooncakeDistributedStore().setup(config) == -600
    if name == "global_segment_size":
        assert MooncakeDistributedStore().setup("host", "", size, master_server_addr="ipc:///nowhere") == -600
