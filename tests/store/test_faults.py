"""What goes wrong between clients and a store: every case has its answer, and afterwards nothing is held."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep

import msgspec
import numpy as np
import pytest
import zmq
from store_harness import SLAB_BYTES, WORK_GAUGES, Memory, idle, wait_for

from mooncake_zmq.pool.server import streams as store_streams
from mooncake_zmq.store import protocol
from mooncake_zmq.store.client import shared_copy
from mooncake_zmq.store.client.client import StoreClient
from mooncake_zmq.store.client.link import Links, Unreached
from mooncake_zmq.store.client.peer import ClientSettings
from mooncake_zmq.store.codes import Code
from mooncake_zmq.store.memory import checksum_of
from mooncake_zmq.store.stream import receive_values, send_values
from mooncake_zmq.store.stream_messages import (
    EAGER_BYTES,
    Attach,
    Checksums,
    Ended,
    Get,
    Put,
    Recheck,
    decode_attached,
    decode_ended,
    decode_values,
)
from mooncake_zmq.transfer import stream_host
from mooncake_zmq.transfer.sockets import Sockets, connect_beside
from mooncake_zmq.transfer.stream import Stream, StreamError
from mooncake_zmq.transfer.tickets import Ticket


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


@contextlib.contextmanager
def streaming(peer):
    """A stream of this client, by hand; closed at the end."""

    def take(call):
        stream = call.stream()
        call.link.stream = None  # ours now
        return stream

    stream = peer.call(take)
    try:
        yield stream
    finally:
        stream.close()


NOT_UTF8 = "no UTF-8"


def framed(message):
    """A message as it lies on the wire, with bad bytes where NOT_UTF8 stands."""
    body = protocol.encode(message).replace(NOT_UTF8.encode(), b"\xff" * len(NOT_UTF8))
    return len(body).to_bytes(4, "little") + body


def begin_put(stream, key="k", size=100_000, ttl_s=10.0, *, again=False):
    """Ask for one value's place; its bytes may follow."""
    stream.send(Put([key], [size], 0, ttl_s, [], again))
    return stream.receive(decode_ended).codes


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
    peer.call(lambda call: call.link.send_note(protocol.Release([lease.id], [])))
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


def test_a_streamed_put_past_its_time_is_refused_and_its_cell_kept_until_the_stream_lets_go(server, raw):
    peer = raw(False)
    with streaming(peer) as stream:
        assert begin_put(stream, ttl_s=0.05) == [0]
        send_values(stream, [(memoryview(bytes(10)),)])
        wait_for(lambda: server.gauges()["quarantined_objects"] == 1, "quarantine")
        send_values(stream, [(memoryview(bytes(99_990)),)])
        with pytest.raises(StreamError):
            stream.receive(decode_ended)
    wait_for(lambda: idle(server), "the stream's end")
    assert not exists(peer, "k")


@pytest.mark.parametrize(("asked_s", "granted_s"), [(0.05, 30.0), (3600.0, 0.05)])
def test_a_steady_but_slow_writer_cannot_keep_its_cell_for_longer_than_granted(make_server, connect, asked_s, granted_s):
    server = make_server(max_ttl_s=granted_s)
    peer = connect(server, share_memory=False)._client._peers[0]
    with streaming(peer) as stream:
        assert begin_put(stream, size=1_000_000, ttl_s=asked_s) == [0]

        def dribble():
            with contextlib.suppress(StreamError):
                send_values(stream, [(memoryview(b"x"),)])
            return idle(server)

        wait_for(dribble, "the server to give up")
    assert not exists(peer, "k")


@pytest.mark.parametrize("sent", [0, 50_000, 100_000])
def test_a_writer_that_goes_before_the_end_leaves_nothing(server, raw, sent):
    peer = raw(False)
    with streaming(peer) as stream:
        assert begin_put(stream) == [0]
        send_values(stream, [(memoryview(bytes(sent)),)] if sent else [])
        assert not idle(server)
    wait_for(lambda: idle(server), "the stream's end")
    assert not exists(peer, "k")


def test_a_writer_that_falls_silent_is_given_up(server, raw, monkeypatch):
    monkeypatch.setattr(store_streams, "SLICE_S", 0.01)
    monkeypatch.setattr(store_streams, "STALL_S", 0.02)
    peer = raw(False)
    with streaming(peer) as stream:
        assert begin_put(stream) == [0]
        wait_for(lambda: idle(server), "the server to give up")


def test_a_reader_that_takes_nothing_is_given_up_and_its_lease_ends(server, raw, monkeypatch):
    monkeypatch.setattr(store_streams, "SLICE_S", 0.01)
    monkeypatch.setattr(store_streams, "STALL_S", 0.02)
    source = Memory(SLAB_BYTES)
    peer = raw(False)
    store = StoreClient([server.endpoint])
    assert store.connect() is None
    for key in ("a", "b", "c"):  # more than the kernel's buffers hold
        assert store.put([key], [[(source.address, source.size)]]) == [0]
    with streaming(peer) as stream:
        stream.send(Get(["a", "b", "c"], [], 10.0))
        wait_for(lambda: server.gauges()["leases"] == 1, "the lease")
        wait_for(lambda: idle(server), "the server to give up")
    store.close()


def test_a_value_that_is_damaged_on_its_way_in_is_refused(server, raw):
    peer = raw(False)
    good = checksum_of(b"x" * 100_000)
    with streaming(peer) as stream:
        assert begin_put(stream) == [0]
        send_values(stream, [(memoryview(b"x" * 99_999 + b"y"),)])
        stream.send(Checksums([good]))
        assert stream.receive(decode_ended).codes == [Code.TRANSFER_FAILED]
        stream.send(Put(["k"], [3], 0, 10.0, [good], False), [memoryview(b"xxx")])
        assert stream.receive(decode_ended).codes == [Code.TRANSFER_FAILED]
        assert not exists(peer, "k")
        stream.send(Put(["k"], [3], 0, 10.0, [checksum_of(b"xxx")], False), [memoryview(b"xxx")])
        assert stream.receive(decode_ended).codes == [0]
    assert server.counts["corrupt_writes"] == 2
    assert exists(peer, "k")
    assert idle(server)


def test_bytes_sent_unasked_for_a_key_that_stands_are_passed_over(server, raw):
    peer = raw(False)
    with streaming(peer) as stream:
        for value, codes in ((b"first", [0, 0]), (b"other", [Code.EXISTS, 0])):
            keys = ["k", value.decode()]
            stream.send(Put(keys, [5, 5], 0, 10.0, [checksum_of(value)] * 2, False), [memoryview(value)] * 2)
            assert stream.receive(decode_ended).codes == codes
        stream.send(Get(["k", "other"], [], 10.0))
        assert stream.receive(decode_values).sizes == [5, 5]
        got = bytearray(10)
        receive_values(stream, [(memoryview(got),)])
    assert got == b"firstother"


@pytest.mark.parametrize(
    "message",
    [
        Put(["k"], [], 0, 1.0, [], False),
        Put(["k"], [0], 0, 1.0, [], False),
        Put(["k"], [1], 0, 1.0, [1, 2], False),
        Put(["k"], [EAGER_BYTES + 1], 0, 1.0, [1], False),
        Get(["k"], [1, 2], 1.0),
        Get(["k"], [-1], 1.0),
        [3, [NOT_UTF8], [], 1.0],
        Checksums([1]),
        Ended([0]),
        [99, "what"],
    ],
    ids=str,
)
def test_a_stream_that_says_what_cannot_be_is_ended_and_counted(server, raw, message):
    with streaming(raw(False)) as stream:
        stream.send_views([memoryview(framed(message))])
        with pytest.raises(StreamError):
            stream.receive(decode_ended)
    assert server.counts["stream_garbage"] == 1
    assert idle(server)


def attached(server, welcome, token=None):
    """A stream that has shown a client's ticket, or another token under its secret."""
    connection = connect_beside(welcome.stream, server.endpoint, 5.0)
    stream = Stream(connection, give_up, slice_s=1.0)
    stream.attach(Ticket(token or welcome.token, welcome.secret, welcome.sealed))
    return contextlib.closing(stream)


def give_up(quiet_s):
    if quiet_s > 10:
        raise StreamError("nothing came")


def test_a_stream_is_a_clients_whose_ticket_it_shows(server, raw):
    mine, others = (raw(False) for _ in range(2))
    my, their = (peer.session(monotonic() + 5).welcome for peer in (mine, others))
    with attached(server, my) as stream:
        stream.send(Attach(bytes(16), my.token))
        assert stream.receive(decode_attached) == protocol.Stranger(0)
    assert server.counts["strangers"] == 1
    for attach in (Attach(others._client_name, their.token), Attach(mine._client_name, bytes(40)), [1], b"\xc1" * 100):
        with attached(server, my) as stream:
            stream.send(attach)
            with pytest.raises(StreamError):
                stream.receive(decode_attached)
    assert server.counts["stream_garbage"] == 4
    with pytest.raises(StreamError), attached(server, my, token=their.token):
        pass
    assert server.counts["streams"] == 5


@pytest.mark.parametrize("say", [b"", b"\xff\0\0\0" + bytes(250)])
def test_a_client_that_does_not_say_whose_its_stream_is_is_given_up_however_steadily_it_speaks(server, raw, monkeypatch, say):
    monkeypatch.setattr(store_streams, "ATTACH_S", 0.05)
    monkeypatch.setattr(store_streams, "SLICE_S", 0.01)
    left = [memoryview(bytes([byte])) for byte in say]
    with attached(server, raw(False).session(monotonic() + 5).welcome) as stream:

        def ended():
            with contextlib.suppress(StreamError):
                stream.send_views([left.pop(0)] if left else [])
            return not server._streams._host._open

        wait_for(ended, "its end")
    assert left or not say, "it was heard to the end"


def test_past_the_limit_the_stream_that_waits_longest_makes_room(server, connect, monkeypatch):
    monkeypatch.setattr(stream_host, "MAX_STREAMS", 1)
    first, second = connect(server, share_memory=False), connect(server, share_memory=False)
    assert first.put("k", b"x") == 0
    for _ in range(3):
        assert second.get("k") == first.get("k") == b"x"


def test_with_all_streams_at_work_a_call_fails_and_the_next_may_not(server, connect, raw, monkeypatch):
    monkeypatch.setattr(stream_host, "MAX_STREAMS", 1)
    store = connect(server, share_memory=False)
    with streaming(raw(False)) as stream:
        assert begin_put(stream) == [0]
        assert store.put("other", b"x") == -900
        assert server.counts["streams_refused"] >= 1
    wait_for(lambda: store.put("other", b"x") == 0, "the first one's stream to end")


def test_a_store_is_met_anew_while_all_connections_are_in_use(server):
    with contextlib.closing(StoreClient([server.endpoint], ClientSettings(max_connections=1))) as client:
        assert client.connect() is None
        (peer,) = client._peers

        def work(call):
            peer._drop(call.session)
            return peer.session(monotonic() + 1.0)

        assert peer.call(work) is peer.session(monotonic())


def test_calls_wait_for_a_connection_in_the_order_in_which_they_came():
    class Connection:
        def close(self):
            pass

    links = Links(Connection, 1)
    link = links.take(monotonic())
    with pytest.raises(Unreached):
        links.take(monotonic())
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(links.take, monotonic() + 20)
        wait_for(lambda: len(links._waiting) == 1, "the call")
        links.put_back(link, broken=False)
        with pytest.raises(Unreached):
            links.take(monotonic())
        links.put_back(waiting.result(), broken=False)
    assert links.take(monotonic()) is link
    links.put_back(link, broken=False)
    assert links.close(monotonic())


def test_a_system_out_of_threads_costs_a_call_and_not_the_store(server, connect, monkeypatch):
    store = connect(server, share_memory=False)

    class NoThread(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(stream_host.threading, "Thread", NoThread)
        assert store.put("k", b"x") == -900
    wait_for(lambda: store.put("k", b"x") == 0, "the store to be asked again")


def test_no_message_of_a_client_ends_what_a_stream_still_writes(server, raw):
    peer = raw(False)
    with streaming(peer) as stream:
        assert begin_put(stream) == [0]
        peer.call(lambda call: call.link.send(protocol.Release(list(range(999)), list(range(999))), call.deadline))
        assert ask(peer, protocol.Commit(peer.next_id(), 1, [], []), protocol.Codes).codes == b""
        assert server.gauges()["writing_objects"] == 1


def test_a_put_begun_anew_is_not_taken_for_one_that_another_writes(server, raw):
    peer = raw(False)
    with streaming(peer) as broken, streaming(peer) as stream:
        assert begin_put(broken, size=3) == [0]
        assert begin_put(stream, size=3) == [Code.EXISTS]
        stream.send(Checksums([]))
        assert stream.receive(decode_ended).codes == [Code.EXISTS]
        assert begin_put(stream, size=3, again=True) == [0]
        assert server.gauges()["quarantined_objects"] == 1
        for each, value, code in ((stream, b"new", 0), (broken, b"old", Code.EXPIRED)):
            each.send(Checksums(send_values(each, [(memoryview(value),)])))
            codes = each.receive(decode_ended).codes
            assert codes == [code]
        stream.send(Get(["k"], [], 10.0))
        assert stream.receive(decode_values).checksums == [checksum_of(b"new")]
    wait_for(lambda: idle(server), "everything to be over")


def test_a_client_with_a_stream_is_not_forgotten_and_without_it_is(server, raw):
    peer = raw(False)
    with streaming(peer) as stream:
        assert begin_put(stream) == [0]
        server._timers.fire(monotonic() + 1000)
        assert (server.gauges()["clients"], server.gauges()["puts"]) == (1, 1)
    wait_for(lambda: not server._streams._host._open, "the stream's end")
    server._timers.fire(monotonic() + 1000)
    assert server.gauges()["clients"] == 0


def test_the_connections_of_a_closed_client_end(server, connect):
    store = connect(server, share_memory=False)
    assert store.put("k", b"x") == 0
    assert server._streams._host._open
    store.close()
    wait_for(lambda: not server._streams._host._open, "the stream's end")


def test_a_forked_child_does_not_keep_its_parents_streams_up(server, connect):
    store = connect(server, share_memory=False)
    assert store.put("k", b"x") == 0
    wait_fd, go_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go_fd)
        os.read(wait_fd, 1)
        os._exit(0)
    try:
        store.close()
        wait_for(lambda: not server._streams._host._open, "the stream's end")
    finally:
        os.close(go_fd)
        os.close(wait_fd)
        os.waitpid(pid, 0)


@pytest.fixture
def mute(server):
    """Instead of the server's streams, one that takes connections and says nothing."""
    real = server._streams.endpoint
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server._streams.endpoint = f"tcp://*:{listener.getsockname()[1]}"
        yield listener
    server._streams.endpoint = real


def trickle(listener):
    """A message that never ends, to one client."""
    with listener.accept()[0] as connection, contextlib.suppress(OSError):
        connection.sendall((protocol.MAX_FRAME_BYTES).to_bytes(4, "little"))
        while True:
            connection.sendall(b"x")
            sleep(0.01)


@pytest.mark.parametrize("server", ["tcp"], indirect=True)
def test_a_silent_stream_is_given_up_in_time(server, connect, mute):
    store = connect(server, share_memory=False, timeout_s=0.5)
    assert store.put("k", b"x") == -900
    assert store.get("k") == b""


@pytest.mark.parametrize("server", ["tcp"], indirect=True)
@pytest.mark.parametrize("trickles", [False, True])
def test_close_ends_a_call_that_waits_for_its_stream(server, connect, mute, trickles):
    store = connect(server, share_memory=False, timeout_s=3000)
    with ThreadPoolExecutor(2) as thread:
        if trickles:
            thread.submit(trickle, mute)
        waiting = thread.submit(store.put, "k", b"x")
        wait_for(lambda: any(peer._links._used for peer in store._client._peers), "the call")
        store.close()
        assert waiting.result(timeout=20) == -900


def test_a_value_removed_while_its_checksum_was_made_keeps_its_place_until_it_is_sent(server, connect, raw, monkeypatch):
    here = connect(server, checksum_local=False)
    assert here.put_batch(["a", "b"], [b"a" * 100_000] * 2) == 0

    def lose(view):
        here.remove("a")
        assert here.put("c", b"c" * 100_000) in (0, -705)
        return checksum_of(view)

    with streaming(raw(False)) as stream:
        monkeypatch.setattr(store_streams, "checksum_of", lose)
        stream.send(Get(["a", "b"], [], 0.01))
        told = stream.receive(decode_values)
        came = bytearray(200_000)
        stream.receive_views([memoryview(came)])
    assert told.sizes == [100_000, 100_000]
    assert came == b"a" * 200_000


def test_a_report_that_does_not_leave_costs_nothing_that_came(server, connect, monkeypatch):
    store = connect(server, share_memory=False)
    assert store.put_batch(["good", "bad"], [b"g" * 9999, b"b" * 9999]) == 0
    with server._turns as node:
        found = node.objects.entries.find("bad")
    server._turns.view(found.offset, found.size)[7] ^= 1
    send = Stream.send

    def no_report(self, message, views=()):
        if isinstance(message, Recheck):
            raise StreamError("gone")
        send(self, message, views)

    monkeypatch.setattr(Stream, "send", no_report)
    assert store.get_batch(["good", "bad"]) == [b"g" * 9999, b""]


def test_a_remote_client_gets_no_place_and_no_cell_and_a_server_forgets_no_shared_writer(server, raw, connect):
    assert connect(server).put("there", b"1234") == 0
    peer = raw(False)
    leased = ask(peer, protocol.Lease(peer.next_id(), ["there", "no"], 1.0), protocol.Leased)
    assert (leased.sizes, leased.entries, leased.offsets, leased.generations, leased.checksums) == ([4, 0], *[[0, 0]] * 4)
    assert ask(peer, protocol.Reserve(peer.next_id(), ["k"], [1], 0, 1.0), protocol.Codes).codes == b""
    assert ask(peer, protocol.Commit(peer.next_id(), 1, [0], [1]), protocol.Codes).codes == b""
    peer = raw(True)
    peer.call(lambda call: peer._hello(call.link, call.deadline, shared=False))
    reserve(peer, "k", ttl_s=0.01)
    wait_for(lambda: server.gauges()["quarantined_objects"] == 1, "quarantine, not reuse")


def test_a_stream_of_a_client_that_maps_nothing_tells_no_cell_either(server, raw, connect):
    assert connect(server).put("there", b"1234") == 0
    with streaming(raw(False)) as stream:
        stream.send(protocol.Lease(1, ["there", "no"], 1.0))
        leased = stream.receive(protocol.decode_reply)
        assert (leased.sizes, leased.entries, leased.offsets) == ([4, 0], [0, 0], [0, 0])
        for request in (protocol.Reserve(2, ["k"], [1], 0, 1.0), protocol.Commit(3, 2, [0], [1])):
            stream.send(request)
            assert stream.receive(protocol.decode_reply) == protocol.Codes(request.id, b"")


def test_what_a_stream_is_told_and_does_not_answer_is_done_before_what_it_asks_next(server, raw):
    peer = raw(True)
    with streaming(peer) as stream:
        for number in range(1, 40, 2):
            stream.send(protocol.Reserve(number, ["k"], [100], 0, 10.0))
            assert stream.receive(protocol.decode_reply).codes == [0], "the one before it was given up"
            stream.send(protocol.Release([], [number]))
            stream.send(protocol.Exist(number, ["k"]) if number > 37 else protocol.ReportCorrupt([1], [2]))
        with pytest.raises(StreamError):  # what moves no value is not asked here
            stream.receive(protocol.decode_reply)
    wait_for(lambda: server.counts["stream_garbage"] == 1, "its end")


def test_who_maps_the_memory_needs_no_place_among_the_streams(server, connect, monkeypatch):
    monkeypatch.setattr(stream_host, "MAX_STREAMS", 0)
    store = connect(server)
    assert store.put("there", b"v" * 300_000) == 0
    assert store.get("there") == b"v" * 300_000
    assert server.counts["streams_refused"] > 0
    wait_for(lambda: server.gauges()["leases"] == 0, "the lease's end")


def test_nobody_has_answers_sent_to_a_stream_by_taking_its_name(server, raw):
    peer = raw(True)
    with streaming(peer) as stream, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        (number,) = server._streams._effects_of
        dealer.linger = 0
        dealer.routing_id = b"s" + peer._client_name + number.to_bytes(4, "big")
        dealer.connect(server.endpoint)
        dealer.send(protocol.encode(protocol.Lease(1, ["false"], 1.0)))
        wait_for(lambda: server.counts["garbage"] == 1, "nobody by that name")
        stream.send(protocol.Lease(2, ["k"], 1.0))
        assert stream.receive(protocol.decode_reply).id == 2


def test_garbage_strangers_and_foreign_versions_are_dropped_and_counted(server):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.routing_id = b"c" + bytes(15) + b"12345"
        dealer.connect(server.endpoint)
        not_utf8 = framed([1, 1, 1, NOT_UTF8, False])[4:]
        for frames in ([b""], [b"\xc1"], [not_utf8], [msgspec.msgpack.encode([4, 1])], [msgspec.msgpack.encode([99])]):
            dealer.send_multipart(frames)
        dealer.send(protocol.encode(protocol.Exist(1, ["k"])))
        assert dealer.poll(10_000)
        assert protocol.decode_reply(dealer.recv()) == protocol.Stranger(1)
        dealer.send(protocol.encode(protocol.Hello(2, 999, "", False)))
        assert dealer.poll(10_000)
        refused = protocol.Stranger(2, f"the store speaks protocol {protocol.PROTOCOL_VERSION}")
        assert protocol.decode_reply(dealer.recv()) == refused
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
        with server._turns as node:
            found = node.objects.entries.find("k")
        server._turns.view(found.offset, found.size)[77_777] ^= 4
        assert store.get("k") == b""
        assert store._client._peers[0].counts["corrupt"] == 1
        wait_for(lambda: server.counts["corrupt"] == (1 if shared else 2), "the report")  # noqa: B023
        assert store.is_exist("k") == 0
        assert store.put("k", value) == 0
        assert store.get("k") == value
        store.remove("k")


def test_a_bit_flipped_on_the_network_is_a_counted_miss(make_server, connect):
    server = make_server(endpoint="tcp://127.0.0.1:*")
    value = b"\x55" * 3_000_000
    connect(server).put("k", value)
    with damaging_proxy(int(server._streams.endpoint.rpartition(":")[2])) as port:
        server._streams.endpoint = f"tcp://*:{port}"
        store = connect(server, share_memory=False)
        assert store.get("k") == b""
        assert store._client._peers[0].counts["corrupt"] == 1
        assert store.get("k") == value, "only the way was bad"
        assert server.counts["corrupt"] == 0, "and the store looked"
        assert store.put("other", b"\x66" * 3_000_000) == 0


def test_a_bit_flipped_in_what_is_sealed_ends_the_stream_and_the_value_comes_by_another(make_server, connect, monkeypatch):
    monkeypatch.setattr(Sockets, "seals", lambda *_: True)
    server = make_server(endpoint="tcp://127.0.0.1:*")
    value = b"\x55" * 3_000_000
    connect(server).put("k", value)
    with damaging_proxy(int(server._streams.endpoint.rpartition(":")[2]), after=500_000) as port:
        server._streams.endpoint = f"tcp://*:{port}"
        store = connect(server, share_memory=False)
        assert store.get("k") == value
        assert store._client._peers[0].counts["corrupt"] == 0
        assert store.put("other", b"\x66" * 3_000_000) == 0
        assert connect(server).get("other") == b"\x66" * 3_000_000
    assert server.counts["streams"] == 2 + 2, "one of each that shares memory"


@contextlib.contextmanager
def damaging_proxy(to_port, after=None):
    """Forwards TCP both ways; flips one bit in the first long run of 0x55 that comes back, or in what comes after so much."""
    done = threading.Event()
    open_sockets = []

    def pump(source, sink, damage):
        passed = 0
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                passed += len(chunk)
                if damage and after is not None and passed > after and not done.is_set():
                    done.set()
                    chunk = bytes([chunk[0] ^ 4]) + chunk[1:]
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
from mooncake_zmq.store.client.client import StoreClient
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


@pytest.mark.parametrize("what", ["shared", "streamed"])
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


def test_a_value_whose_store_gives_its_memory_up_amid_a_copy_is_a_miss(server, connect, monkeypatch):
    store = connect(server, verify_local=False)
    assert store.put("k", b"x" * 300_000) == 0
    scatter = shared_copy.scatter

    def too_late(*arguments, **more):
        server._turns.segment.close()
        return scatter(*arguments, **more)

    monkeypatch.setattr(shared_copy, "scatter", too_late)
    assert store.get("k") == b""
    assert store._client.counts["stale"] == 1


def test_a_forked_child_cannot_use_the_store_of_its_parent(server, connect):
    store = connect(server)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if store.is_exist("k") == -1 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.put("k", b"x") == 0


def checksum_at(server, key):
    with server._turns as node:
        return node.objects.entries.find(key).checksum


def test_values_without_a_checksum_get_one_when_they_leave_the_host(server, connect):
    here = connect(server, checksum_local=False, verify_local=False)
    value = os.urandom(2_500_000)
    here.put("k", value)
    assert checksum_at(server, "k") == 0
    assert here.get("k") == value
    assert connect(server, share_memory=False).get("k") == value
    assert checksum_at(server, "k") == checksum_of(value)


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
