"""What goes wrong between clients and a store: every case has its answer, and afterwards nothing is held."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from time import monotonic

import msgspec
import numpy as np
import pytest
import zmq
from conftest import SLAB_BYTES, WORK_GAUGES, Memory, idle, wait_for

from mooncake_zmq.cache_node.objects import Code
from mooncake_zmq.store import protocol
from mooncake_zmq.store.client import StoreClient
from mooncake_zmq.store.memory import checksum_of
from mooncake_zmq.store.peer import ClientSettings


@pytest.fixture
def raw(server):
    """Asks the server what no well-behaved client would; `raw(shared)` is a connection's `ask` with ids of its own."""
    clients = []

    def connect(shared):
        client = StoreClient([server.endpoint], ClientSettings(share_memory=shared))
        assert client.connect() is None
        clients.append(client)
        return client._peers[0]

    yield connect
    for client in clients:
        client.close()


def ask(peer, request, expected):
    return peer.call(lambda call: call.link.ask(request, expected, call.deadline))


def reserve(peer, key, size=100, ttl_s=10.0):
    request = protocol.Reserve(peer.next_id(), [key], [size], 0, ttl_s)
    return request, ask(peer, request, protocol.Reserved)


def commit(peer, put_id, indexes=(0,), checksums=(1,)):
    request = protocol.Commit(peer.next_id(), put_id, list(indexes), list(checksums))
    return ask(peer, request, protocol.Numbers).numbers


def exists(peer, key):
    return ask(peer, protocol.Exist(peer.next_id(), [key]), protocol.Codes).codes == b"\1"


def write_piece(peer, put_id, offset, payload):
    def work(call):
        call.link.send(protocol.WritePiece(put_id, 0, offset), call.deadline, memoryview(payload))

    peer.call(work)


def test_the_reader_of_an_aborted_put_finds_nothing(server, raw):
    peer = raw(True)
    put, _ = reserve(peer, "k")
    assert not exists(peer, "k")
    assert commit(peer, put.id, (), ()) == [0]
    assert not exists(peer, "k")
    assert idle(server)


def test_a_repeated_request_changes_nothing_more(server, raw):
    peer = raw(True)
    put, reserved = reserve(peer, "k")
    assert ask(peer, put, protocol.Reserved) == reserved
    assert commit(peer, put.id) == [0]
    assert commit(peer, put.id) == []
    assert exists(peer, "k")
    lease = protocol.Lease(peer.next_id(), ["k", "no"], 5.0)
    assert ask(peer, lease, protocol.Leased) == ask(peer, lease, protocol.Leased)
    assert server.gauges()["leases"] == 1
    peer.call(lambda call: call.link.tell(protocol.Release([lease.id], [])))
    wait_for(lambda: idle(server), "the release")


def test_a_lease_that_is_not_released_expires(server, raw):
    peer = raw(True)
    put, _ = reserve(peer, "k")
    commit(peer, put.id)
    ask(peer, protocol.Lease(peer.next_id(), ["k"], 0.01), protocol.Leased)
    wait_for(lambda: server.counts["leases_expired"] == 1, "the lease's end")
    assert idle(server)


def test_a_put_past_its_time_is_refused_and_its_cell_kept_until_the_writer_says_so(server, raw):
    peer = raw(True)
    put, _ = reserve(peer, "k", ttl_s=0.01)
    wait_for(lambda: server.gauges()["quarantined_objects"] == 1, "quarantine")
    assert commit(peer, put.id) == [Code.EXPIRED]
    assert not exists(peer, "k")
    assert idle(server)


def test_the_cells_of_a_put_by_frames_are_free_when_its_time_is_over(server, raw):
    peer = raw(False)
    put, _ = reserve(peer, "k", ttl_s=0.01)
    wait_for(lambda: server.counts["puts_expired"] == 1, "expiry")
    write_piece(peer, put.id, 0, bytes(100))
    assert commit(peer, put.id) == []
    assert idle(server)


@pytest.mark.parametrize(
    "pieces",
    [[], [(0, 50)], [(50, 50)], [(0, 50), (0, 50)], [(0, 50), (50, 51)], [(0, 101)], [(0, 100), (100, 1)]],
    ids=str,
)
def test_a_value_of_missing_doubled_or_long_pieces_is_refused(server, raw, pieces):
    peer = raw(False)
    put, _ = reserve(peer, "k")
    for offset, size in pieces:
        write_piece(peer, put.id, offset, b"x" * size)
    assert commit(peer, put.id, checksums=(checksum_of(b"x" * 100),)) == [Code.TRANSFER_FAILED]
    assert not exists(peer, "k")
    assert idle(server)


def test_a_small_value_that_is_short_or_damaged_is_refused(server, raw):
    peer = raw(False)

    def write(size, payload, checksum):
        request = protocol.Write(peer.next_id(), "k", size, checksum, 0)

        def work(call):
            call.link.send(request, call.deadline, memoryview(payload))
            return call.link.receive(call.deadline).numbers

        return peer.call(work)

    good = checksum_of(b"x" * 100)
    assert write(100, b"x" * 99, good) == [Code.TRANSFER_FAILED]
    assert write(100, b"x" * 101, good) == [Code.TRANSFER_FAILED]
    assert write(100, b"x" * 99 + b"y", good) == [Code.TRANSFER_FAILED]
    assert write(protocol.PIECE_BYTES + 1, b"x", good) == [Code.INVALID]
    assert write(100, b"x" * 100, good) == [0]
    assert server.counts["corrupt_writes"] == 3
    assert idle(server)


def test_a_remote_client_gets_no_lease_and_a_server_forgets_no_shared_writer(server, raw):
    peer = raw(False)
    assert ask(peer, protocol.Lease(peer.next_id(), ["k"], 1.0), protocol.Codes).codes == b""
    peer = raw(True)
    peer.call(lambda call: peer._hello(call.link, call.deadline, shared=False))
    reserve(peer, "k", ttl_s=0.01)
    wait_for(lambda: server.gauges()["quarantined_objects"] == 1, "quarantine, not reuse")


def test_garbage_strangers_and_foreign_versions_are_dropped_and_counted(server):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.routing_id = b"c" + bytes(15) + b"12345"
        dealer.connect(server.endpoint)
        for frames in ([b""], [b"\xc1"], [b"x" * 1000], [msgspec.msgpack.encode([4, 1])], [msgspec.msgpack.encode([99])]):
            dealer.send_multipart(frames)
        dealer.send(protocol.encode(protocol.Exist(1, ["k"])))
        assert dealer.poll(10_000)
        assert protocol.decode_reply(dealer.recv()) == protocol.Stranger(1)
        dealer.send(protocol.encode(protocol.Hello(2, 999, "", False)))
        assert dealer.poll(10_000)
        assert protocol.decode_reply(dealer.recv()) == protocol.Stranger(2)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.routing_id = b"too short"
        dealer.connect(server.endpoint)
        dealer.send(protocol.encode(protocol.Hello(1, 1, "", False)))
        wait_for(lambda: server.counts["garbage"] == 6, "all garbage")
    assert server.counts["strangers"] == 2


def test_a_flipped_bit_in_the_segment_is_a_counted_miss_and_is_found_by_nobody_again(server, connect):
    value = os.urandom(100_000)
    for shared in (True, False):
        store = connect(server, share_memory=shared)
        store.put("k", value)
        found = server._objects.find("k")
        server._segment.memory[found.offset + 77_777] ^= 4
        assert store.get("k") == b""
        assert store._client._peers[0].counts["corrupt"] == 1
        if shared:
            wait_for(lambda: server.counts["corrupt"] == 1, "the report")
            assert store.is_exist("k") == 0
        store.remove("k")


def test_a_bit_flipped_on_the_network_is_a_counted_miss(make_server, connect):
    server = make_server(endpoint="tcp://127.0.0.1:*")
    value = b"\x55" * 3_000_000
    connect(server).put("k", value)
    with damaging_proxy(int(server.endpoint.rpartition(":")[2])) as port:
        store = connect(type("At", (), {"endpoint": f"tcp://127.0.0.1:{port}"}), share_memory=False)
        assert store.get("k") == b""
        assert store._client._peers[0].counts["corrupt"] == 1
        assert store.get("k") == value, "only the way was bad"
        assert store.put("other", b"\x66" * 3_000_000) == 0


@contextlib.contextmanager
def damaging_proxy(to_port):
    """Forwards TCP both ways; flips one bit in the first long run of 0x55 that comes back."""
    done = threading.Event()
    open_sockets = []

    def pump(source, sink, damage):
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                if damage and not done.is_set() and b"\x55" * 1000 in chunk:
                    done.set()
                    chunk = chunk.replace(b"\x55" * 1000, b"\x55" * 999 + b"\x51", 1)
                sink.sendall(chunk)
        sink.close()

    def accept():
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", to_port))
                open_sockets.extend((near, far))
                threading.Thread(target=pump, args=(near, far, False), daemon=True).start()
                threading.Thread(target=pump, args=(far, near, True), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
    for each in open_sockets:
        each.close()


CLIENT = """
import sys
from mooncake_zmq.store import protocol, MooncakeDistributedStore
from mooncake_zmq.store.client import StoreClient
endpoint, what = sys.argv[1:]
if what == "hold":
    client = StoreClient([endpoint])
    assert client.connect() is None
    peer = client._peers[0]
    def work(call):
        call.link.ask(protocol.Lease(peer.next_id(), ["k"], 30.0), protocol.Leased, call.deadline)
        call.link.ask(protocol.Reserve(peer.next_id(), ["a", "b"], [1000, 5000], 0, 30.0), protocol.Reserved, call.deadline)
        call.link.ask(protocol.Reserve(peer.next_id(), ["late"], [1000], 0, 0.01), protocol.Reserved, call.deadline)
        print("ready", flush=True)
        sys.stdin.read()
    peer.call(work)
else:
    store = MooncakeDistributedStore()
    assert store.setup({"master_server_addr": endpoint, "share_memory": what == "shared"}) == 0
    print("ready", flush=True)
    for number in range(1_000_000):
        store.upsert(f"{number % 50}", bytes([number % 256]) * (300_000 + number))
"""


@contextlib.contextmanager
def client_process(endpoint, what):
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, endpoint, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert any("ready" in line for line in process.stdout)
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_client_killed_with_leases_and_half_written_cells_leaves_nothing(server, connect):
    store = connect(server)
    store.put("k", b"x")
    with client_process(server.endpoint, "hold") as process:
        wait_for(lambda: server.gauges()["quarantined_objects"] == 1, "the late put")
        gauges = server.gauges()
        assert (gauges["leases"], gauges["writing_objects"]) == (1, 2)
        process.send_signal(signal.SIGSTOP)
        assert server.gauges()["quarantined_objects"] == 1, "stopped is not dead"
        process.kill()
        wait_for(lambda: idle(server), "everything to be over")
    assert server.counts["clients_died"] == 1
    assert store.put("a", b"now mine") == 0
    assert store.get("k") == b"x"


@pytest.mark.parametrize("what", ["shared", "framed"])
def test_kill_9_amid_puts_never_shows_a_wrong_byte(server, connect, what):
    store = connect(server)
    for turn in range(3):
        with client_process(server.endpoint, what) as process:
            before = server.counts["puts"]
            wait_for(lambda: server.counts["puts"] > before + 20 + 7 * turn, "some puts")  # noqa: B023
            process.kill()
        wait_for(lambda: idle(server), "everything to be over")
        values = [value for value in store.get_batch([f"{i}" for i in range(50)]) if value]
        assert values
        assert all(value == value[:1] * len(value) for value in values)
    assert store._client._peers[0].counts["corrupt"] == 0
    server.check()


def test_a_reader_whose_object_is_evicted_and_overwritten_meanwhile_has_a_miss(make_server, connect):
    server = make_server(slabs=1)
    store = connect(server, verify_local=False)
    store.put("k", b"1" * SLAB_BYTES)
    peer = store._client._peers[0]
    request = protocol.Lease(peer.next_id(), ["k"], 0.01)
    leased = ask(peer, request, protocol.Leased)
    wait_for(lambda: server.counts["leases_expired"] == 1, "the lease's end")
    assert store.put("new", b"2" * SLAB_BYTES) == 0
    segment = peer.session(monotonic() + 5).segment
    assert segment.generations[leased.entries[0]] != leased.generations[0], "how a late reader knows"


def test_a_forked_child_cannot_use_the_store_of_its_parent(server, connect):
    store = connect(server)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if store.is_exist("k") == -1 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.put("k", b"x") == 0


def test_values_without_a_checksum_get_one_when_they_leave_the_host(server, connect):
    here = connect(server, checksum_local=False, verify_local=False)
    value = os.urandom(2_500_000)
    here.put("k", value)
    assert server._objects.find("k").checksum == 0
    assert here.get("k") == value
    assert connect(server, share_memory=False).get("k") == value
    assert server._objects.find("k").checksum == checksum_of(value)


def test_a_client_share_bounds_what_one_batch_reserves(make_server, connect):
    server = make_server(max_client_share=0.5)
    store = connect(server)
    source = Memory(SLAB_BYTES)
    codes = store.batch_put_from([f"{i}" for i in range(4)], [source.address] * 4, [SLAB_BYTES] * 4)
    assert codes == [0, 0, -200, -200]
    assert store.put("4", b"x") == 0


def test_gauges_name_all_work(server):
    assert set(WORK_GAUGES) <= set(server.gauges())
    assert np.all([server.gauges()[name] == 0 for name in WORK_GAUGES])
