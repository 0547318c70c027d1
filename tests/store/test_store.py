"""`MooncakeDistributedStore` against real servers: over ipc and tcp, through shared memory and through frames."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from store_harness import SLAB_BYTES, Memory, idle, wait_for

from mooncake_zmq.store import MooncakeDistributedStore, ReplicateConfig
from mooncake_zmq.store.client import api
from mooncake_zmq.store.client.link import Link, Unreached
from mooncake_zmq.store.protocol import PIECE_BYTES, Remove

SIZES = [1, 63, 4096, 70_000, PIECE_BYTES, PIECE_BYTES + 1, SLAB_BYTES]


@pytest.mark.parametrize("size", SIZES)
def test_what_is_put_is_got(store, size):
    value = os.urandom(size)
    assert store.put("k", value) == 0
    assert store.get("k") == value
    assert store.get_size("k") == size
    handle = store.get_buffer("k")
    assert handle == value
    assert handle.size() == size
    target = Memory(size + 8)
    assert store.get_into("k", target.address, target.size) == size
    assert target.bytes(0, size) == value
    assert target.bytes(size) == bytes(8)


def test_an_existing_key_keeps_its_value_and_an_upsert_replaces_it(store):
    assert [store.put("k", b"one"), store.put("k", b"three")] == [0, 0]
    assert store.get("k") == b"one"
    assert store.upsert("k", b"three") == 0
    assert store.get("k") == b"three"
    assert store.upsert("new", b"x") == 0


def test_answers_for_what_is_missing(store):
    target = Memory(8)
    assert store.get("k") == b""
    assert store.get_buffer("k") is None
    assert store.get_size("k") == -704
    assert store.get_into("k", target.address, 8) == -704
    assert store.is_exist("k") == 0
    assert store.remove("k") == -704
    assert store.get_replica_desc("k") == []
    assert store.batch_get_replica_desc(["k"]) == {}


def test_answers_for_what_cannot_be(store):
    target = Memory(8)
    assert store.put("", b"x") == -600
    assert store.put("k", b"") == -600
    assert store.put("k" * 1025, b"x") == -600
    assert store.put("\ud800", b"x") == -600
    assert store.put_from("k", target.address, 0) == -600
    assert store.put("k", bytes(SLAB_BYTES + 1)) == -600
    assert store.put_batch(["a"], [b"1", b"2"]) == -600
    assert store.batch_put_from(["a"], [target.address] * 2, [1, 1]) == [-600]
    assert store.batch_put_from_multi_buffers(["a"], [[target.address]], [[1, 2]]) == [-600]
    store.put("k", b"12345678")
    assert store.get_into("k", target.address, 7) == -600
    assert target.bytes() == bytes(8), "nothing is written into what is too small"
    assert store.batch_is_exist(["", "\ud800", "k" * 5000, "k"]) == [0, 0, 0, 1]
    assert store.get_batch(["", "\ud800", "k"]) == [b"", b"", b"12345678"]
    assert store.batch_remove(["", "k"]) == [-704, 0]
    assert store.remove_by_regex("[") == -600


def test_batches_answer_key_by_key(store):
    values = {f"k{i}": random.Random(i).randbytes(size) for i, size in enumerate([10, 100_000, 2_000_000, 1, 3_000_000])}
    assert store.put_batch(list(values), list(values.values())) == 0
    asked = ["no", *values, "nor this"]
    assert store.batch_is_exist(asked) == [0, 1, 1, 1, 1, 1, 0]
    assert store.get_batch(asked) == [b"", *values.values(), b""]
    target = Memory(6_000_000)
    places = [target.address + sum(len(v) for v in list(values.values())[:i]) for i in range(5)]
    sizes = [len(value) for value in values.values()]
    assert store.batch_get_into([*values, "no"], [*places, places[0]], [*sizes, 5]) == [*sizes, -704]
    assert target.bytes(0, sum(sizes)) == b"".join(values.values())
    assert store.batch_get_into(list(values), places, [9, *sizes[1:]]) == [-600, *sizes[1:]]


def test_more_keys_than_a_message_holds(store):
    keys = [f"key-{i}" for i in range(2500)]
    assert store.put_batch(keys[:1500], [key.encode() for key in keys[:1500]]) == 0
    assert store.batch_is_exist(keys) == [1] * 1500 + [0] * 1000
    assert store.get_batch(keys) == [key.encode() for key in keys[:1500]] + [b""] * 1000
    assert store.batch_remove(keys) == [0] * 1500 + [-704] * 1000


def test_multi_buffers_and_parts_are_one_value(store):
    source = Memory(os.urandom(3_000_000))
    pieces = [(0, 5), (7, 1_500_000), (1_600_000, 1), (1_700_000, 900_000)]
    pointers, sizes = [source.address + start for start, _ in pieces], [size for _, size in pieces]
    assert store.batch_put_from_multi_buffers(["a", "b"], [pointers, pointers[:1]], [sizes, sizes[:1]]) == [0, 0]
    whole = b"".join(source.bytes(start, size) for start, size in pieces)
    assert store.get("a") == whole
    assert store.get("b") == source.bytes(0, 5)
    target = Memory(3_000_000)
    pointers = [target.address + start for start, _ in pieces]
    assert store.batch_get_into_multi_buffers(["a", "no"], [pointers] * 2, [sizes] * 2) == [len(whole), -704]
    assert b"".join(target.bytes(start, size) for start, size in pieces) == whole
    assert target.bytes(5, 2) == bytes(2), "between the buffers nothing is written"
    assert store.batch_get_into_multi_buffers(["a"], [pointers[:3]], [sizes[:3]]) == [-600]
    assert store.put_parts("p", b"ab", bytearray(b"c"), memoryview(b"de")) == 0
    assert store.get("p") == b"abcde"
    assert store.upsert_parts("p", b"x", b"y") == 0
    assert store.get("p") == b"xy"


def test_removal(store):
    store.put_batch(["a1", "a2", "b1"], [b"x"] * 3)
    assert store.remove("a1") == 0
    assert store.remove_by_regex("^a") == 1
    assert store.is_exist("b1") == 1
    assert store.remove_all() == 1
    assert store.is_exist("b1") == 0


def test_a_full_pool_evicts_and_a_hard_pin_stays(server, connect):
    store = connect(server)
    hard, soft = ReplicateConfig(with_hard_pin=True), ReplicateConfig(with_soft_pin=True)
    assert store.put("hard", b"h" * 1000, hard) == 0
    assert store.put("soft", b"s" * 1000, soft) == 0
    for number in range(50):
        size = (1 << 20, 300_000, 5000, SLAB_BYTES)[number % 4]
        assert store.put(f"{number}", bytes([number]) * size) == 0
    assert store.get("hard") == b"h" * 1000
    assert store.get("soft") == b"s" * 1000
    assert store.get("49") == bytes([49]) * 300_000
    assert server.counts["evicted"] > 0


def test_when_all_is_pinned_hard_a_put_is_denied(server, connect):
    store = connect(server)
    config = ReplicateConfig(with_hard_pin=True)
    assert [store.put(f"{i}", bytes(SLAB_BYTES), config) for i in range(5)] == [0, 0, 0, 0, -200]


def test_two_writers_of_one_key_race_and_one_value_stands(server, connect):
    one, two = connect(server), connect(server, share_memory=False)
    for turn in range(30):
        values = [bytes([1]) * 200_000, bytes([2]) * 200_000]
        with ThreadPoolExecutor(2) as pool:
            puts = [pool.submit(store.put, f"{turn}", value) for store, value in zip((one, two), values, strict=True)]
        assert [each.result() for each in puts] == [0, 0]
        assert one.get(f"{turn}") in values
        assert two.get(f"{turn}") == one.get(f"{turn}")
    assert server.gauges()["objects"] == 30
    wait_for(lambda: idle(server), "the last release")


def test_many_threads_of_one_client_read_what_they_wrote(store):
    def work(number):
        for turn in range(20):
            value = random.Random(number * 100 + turn).randbytes(20_000 + number)
            assert store.put(f"{number}-{turn}", value) == 0
            assert store.get(f"{number}-{turn}") == value

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_buffers_are_registered_once_and_without_overlap(store):
    memory = Memory(400)
    at = memory.address + 100
    assert store.register_buffer(at, 100) == 0
    assert store.register_buffer(at, 100) == -600
    assert store.register_buffer(at + 99, 10) == -600
    assert store.register_buffer(at - 100, 101) == -600
    assert store.register_buffer(at + 100, 10) == 0
    assert store.register_buffer(0, 10) == -600
    assert store.unregister_buffer(at) == 0
    assert store.unregister_buffer(at) == -600


def test_replicas_say_in_which_store_a_value_is(server, connect):
    store = connect(server)
    store.put("k", b"value")
    (replica,) = store.batch_get_replica_desc(["k", "no"])["k"]
    assert replica.is_memory_replica()
    assert not replica.is_disk_replica()
    descriptor = replica.get_memory_descriptor().buffer_descriptor
    assert descriptor.size == 5
    assert descriptor.transport_endpoint == store.get_hostname() == "node-1"
    with pytest.raises(ValueError, match="not a disk replica"):
        replica.get_disk_descriptor()


def test_what_is_not_supported_says_its_name(store):
    for name in ("put_tensor_with_tp", "query_task", "mount_segment"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(store, name)("x")
    with pytest.raises(NotImplementedError, match="nof_replica_num"):
        store.put("k", b"x", ReplicateConfig(nof_replica_num=1))
    with pytest.raises(AttributeError, match="no_such_call"):
        store.no_such_call()


def test_the_supported_and_unsupported_calls_do_not_overlap():
    assert not [name for name in api.UNSUPPORTED if hasattr(MooncakeDistributedStore, name)]


# --- setup and close


def test_setup_takes_mooncakes_positional_form(server):
    store = MooncakeDistributedStore()
    address = server.endpoint.removeprefix("tcp://")
    assert store.setup("localhost", "P2PHANDSHAKE", 1 << 20, 1 << 20, "tcp", "", address) == 0
    assert store.health_check() == 0
    assert store.setup("localhost", "", 0, 0, "tcp", "", address) == -600, "it is set up already"
    store.close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "127.0.0.1:1", "ipc:///nowhere/at/all", "bad://x"])
def test_setup_with_nothing_listening_fails_with_a_reason(address, capsys):
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", address) == -900
    assert "store_setup_failed" in capsys.readouterr().out
    assert store.get("k") == b""


@pytest.mark.parametrize("setting", ["verify_local", "checksum_local"])
def test_setup_refuses_to_leave_checksums_out_where_the_cpu_reorders_loads(server, monkeypatch, capsys, setting):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    config = {"local_hostname": "here", "master_server_addr": server.endpoint}
    with closing(MooncakeDistributedStore()) as store:
        assert store.setup(config | {setting: "false"}) == api.INVALID
        assert f"{setting} = false needs a CPU that keeps the order of loads" in capsys.readouterr().out
        assert store.setup(config) == 0


@pytest.mark.parametrize(
    "config",
    [{}, {"master_server_addr": "x:1", "tenant_id": "t"}, {"master_server_addr": "x:1", "no_such": 1}]
    + [{"master_server_addr": "x:1", "share_memory": "maybe"}],
)
def test_setup_refuses_what_it_cannot_follow(config):
    assert MooncakeDistributedStore().setup(config) == -600


@pytest.mark.parametrize("closed", [True, False], ids=["after close", "before setup"])
def test_calls_on_a_closed_store_answer_errors(server, connect, closed):
    store = connect(server) if closed else MooncakeDistributedStore()
    store.close()
    store.close()
    target = Memory(8)
    assert store.put("k", b"x") == store.upsert("k", b"x") == store.put_batch(["k"], [b"x"]) == -900
    assert store.get("k") == b""
    assert store.get_batch(["k"]) == [b""]
    assert store.get_buffer("k") is None
    assert store.get_into("k", target.address, 8) == store.get_size("k") == store.remove("k") == store.remove_all() == -900
    assert store.batch_get_into(["k"], [target.address], [8]) == store.batch_put_from(["k"], [target.address], [8]) == [-900]
    assert store.is_exist("k") == -1
    assert store.batch_is_exist(["a", "b"]) == [-1, -1]
    assert store.remove_by_regex("k") == store.register_buffer(1, 1) == store.unregister_buffer(1) == -900
    assert store.health_check() != 0
    assert store.batch_get_replica_desc(["k"]) == {}


def test_close_ends_the_calls_under_way(make_server, connect):
    server = make_server()
    store = connect(server)
    stop = threading.Event()

    def work():
        while not stop.is_set() and store.is_exist("k") != -1:
            pass
        return True

    with ThreadPoolExecutor(4) as pool:
        working = [pool.submit(work) for _ in range(4)]
        store.close()
        try:
            assert all(each.result(timeout=20) for each in working)
        finally:
            stop.set()


def test_a_server_that_ends_is_an_error_and_its_successor_is_found(make_server, connect, tmp_path):
    endpoint = f"ipc://{tmp_path}/again.sock"
    first = make_server(endpoint=endpoint)
    store = connect(first, timeout_s=2.0)
    assert store.put("k", b"x") == 0
    first.close()
    assert store.put("k", b"x") == -900
    assert store.is_exist("k") == -1
    make_server(endpoint=endpoint, incarnation=2)
    wait_for(lambda: store.put("k", b"new") == 0, "the new server")
    assert store.get("k") == b"new"


@pytest.mark.parametrize("share", [True, False])
def test_the_first_call_after_a_restart_finds_the_new_server(server, make_server, connect, share):
    store = connect(server, share_memory=share)
    assert store.put("small", b"x") == store.put("large", bytes(300_000)) == 0
    server.close()
    make_server("successor", endpoint=server.endpoint, incarnation=2)
    assert store.put("small", b"y") == 0
    assert store.get("small") == b"y"
    assert store.put("large", bytes(400_000)) == 0
    assert store.get("large") == bytes(400_000)


# --- several stores


def test_values_are_found_wherever_they_are_and_stored_once(make_server, connect):
    one, two = make_server("node-1"), make_server("node-2", endpoint="tcp://127.0.0.1:*")
    here, there = connect(one), connect(two, share_memory=False)
    both = connect(two, one)
    assert both.get_hostname() == "node-2"
    here.put("a", b"old")
    there.put("b", b"x" * 100_000)
    assert both.get_batch(["a", "b", "c"]) == [b"old", b"x" * 100_000, b""]
    assert both.batch_is_exist(["a", "b", "c"]) == [1, 1, 0]
    assert both.get_size("a") == 3
    assert both.put("a", b"new") == 0
    assert both.get("a") == b"old"
    assert there.is_exist("a") == 0
    assert both.upsert("a", b"new") == 0
    assert here.is_exist("a") == 0
    assert both.get("a") == b"new"
    assert both.remove("b") == 0
    assert there.is_exist("b") == 0


def test_replicas_and_preferred_stores(make_server, connect):
    one, two = make_server("node-1"), make_server("node-2")
    both, second = connect(one, two), connect(two)
    config = ReplicateConfig(replica_num=2)
    assert both.put("k", b"x", config) == 0
    assert [each.get_memory_descriptor().buffer_descriptor.transport_endpoint for each in both.get_replica_desc("k")] == [
        "node-1",
        "node-2",
    ]
    assert both.put("p", b"x", ReplicateConfig(preferred_segment="node-2")) == 0
    assert second.is_exist("p") == 1
    assert both.remove_all() == 3


def test_an_upsert_that_a_store_refuses_leaves_no_old_value_there(make_server, connect):
    one, two = make_server("node-1", slabs=2), make_server("node-2", slabs=4)
    both, first = connect(one, two), connect(one)
    assert first.put("k", b"old") == first.put("kept", bytes(SLAB_BYTES)) == 0
    held = first._client.hold(["k", "kept"])
    assert held.found == (True, True)
    assert both.upsert("k", bytes(SLAB_BYTES)) < 0
    assert both.get("k") == b"old", "nothing was stored, and nothing lost"
    assert both.upsert("k", bytes(SLAB_BYTES), ReplicateConfig(replica_num=2)) == 0
    assert both.get("k") == bytes(SLAB_BYTES)
    assert first.is_exist("k") == 0
    first._client.release(held)


@pytest.mark.parametrize("what", ["upsert", "remove"])
def test_a_removal_that_does_not_reach_a_store_is_done_before_the_next_call_there(make_server, connect, monkeypatch, what):
    one, two = make_server("node-1"), make_server("node-2")
    both = connect(one, two)
    assert connect(two).put("k", b"old") == 0
    assert both.put("there", b"x") == 0
    ask, refused = Link.ask, []

    def ask_in_vain(self, request, *arguments):
        if isinstance(request, Remove) and self.socket.last_endpoint == two.endpoint.encode():
            refused.append(request)
            raise Unreached("lost")
        return ask(self, request, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Link, "ask", ask_in_vain)
        if what == "upsert":
            assert both.upsert("k", b"new") == 0
        else:
            both.remove("k")
        count = len(refused)
        wait_for(lambda: both.is_exist("none") == 0 and len(refused) > count, "it is tried again")
    reader = connect(two)
    wait_for(lambda: both.is_exist("none") == 0 and not reader.is_exist("k"), "the store to be asked again")
    assert both.get("k") == (b"new" if what == "upsert" else b"")


def test_with_the_first_store_gone_the_second_is_used(make_server, connect):
    one, two = make_server("node-1"), make_server("node-2")
    store = connect(one, two, timeout_s=2.0)
    one.close()
    assert store.put("k", b"x") == 0
    assert store.get("k") == b"x"
    assert store.batch_is_exist(["k", "no"]) == [1, 0]
    assert store.health_check() == 0
