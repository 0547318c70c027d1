"""A stream between two threads: bytes arrive where they should, and no end of it waits for ever."""

import math
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.store import stream as stream_module
from mooncake_zmq.store.memory import checksum_of
from mooncake_zmq.store.protocol import PIECE_BYTES
from mooncake_zmq.store.stream import receive_values, send_values
from mooncake_zmq.store.stream_messages import Ended, decode_ended, decode_values
from mooncake_zmq.transfer.sockets import connect_beside, listen_beside
from mooncake_zmq.transfer.stream import MAX_MESSAGE_BYTES, MAX_VIEWS, Stream, StreamError, StreamGarbage

PATIENCE_S = 20.0


def give_up(quiet_s):
    if quiet_s > PATIENCE_S:
        raise StreamError("nothing came")


@pytest.fixture(scope="module", params=["unix", "tcp", "sealed"])
def pair(request):
    if request.param == "unix":
        ends = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            ends = near, listener.accept()[0]
    keys = (bytes(32), bytes(range(32))) if request.param == "sealed" else (None, None)
    both = zip(ends, keys, reversed(keys), strict=True)
    streams = [Stream(end, give_up, slice_s=0.05, seals=ours, opens=theirs) for end, ours, theirs in both]
    yield streams
    for stream in streams:
        stream.close()


def cut_up(data, cuts):
    """`data` in pieces that end at `cuts`."""
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [memoryview(data)[start:stop] for start, stop in zip(edges, edges[1:], strict=False)]


sizes = st.lists(st.one_of(st.integers(1, 300), st.integers(1, 3 * PIECE_BYTES)), min_size=1, max_size=5)
cuts = st.lists(st.integers(0, 3 * PIECE_BYTES), max_size=8)


@settings(max_examples=60)
@given(sizes=sizes, cuts_here=cuts, cuts_there=cuts, seed=st.integers(0, 255))
def test_values_in_any_places_arrive_in_any_others_with_their_checksums(pair, sizes, cuts_here, cuts_there, seed):
    near, far = pair
    values = [
        bytes((seed + number + i) % 251 for i in range(min(size, 1000))) * (size // 1000 + 1)
        for number, size in enumerate(sizes)
    ]
    places = [bytearray(len(value)) for value in values]
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(send_values, near, [cut_up(value, cuts_here) for value in values])
        came = receive_values(far, [cut_up(place, cuts_there) for place in places])
        assert sent.result() == came == [checksum_of(value) for value in values]
    assert places == values


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 2 * PIECE_BYTES), min_size=1, max_size=1200))
def test_a_run_is_no_longer_than_a_piece_and_loses_nothing(lengths):
    memory = memoryview(bytes(max(lengths)))
    runs = list(stream_module._runs([(memory[:length],) for length in lengths]))
    assert all(0 < sum(len(view) for view, _, _ in run) <= PIECE_BYTES for run in runs)
    assert all(len(run) <= MAX_VIEWS for run in runs)
    values, open_bytes = [], 0
    for view, first, last in (entry for run in runs for entry in run):
        assert first == (open_bytes == 0)
        open_bytes += len(view)
        if last:
            values.append(open_bytes)
            open_bytes = 0
    assert values == lengths


def test_more_places_than_one_system_call_takes(pair):
    near, far = pair
    views = [memoryview(bytes([i % 256]) * 3) for i in range(3 * MAX_VIEWS)]
    near.send(Ended([1]), views)
    assert far.receive(decode_ended) == Ended([1])
    place = bytearray(9 * MAX_VIEWS)
    receive_values(far, [(memoryview(place),)])
    assert place == b"".join(views)


def ends():
    here, there = socket.socketpair()
    return Stream(here, give_up, slice_s=0.05), there


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xff\xff\xff",
        (MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"),
        b"\1\0\0\0\xc1",
        b"\2\0\0\0\x91\x07",
    ],
    ids=["huge", "over the limit", "no MessagePack", "another message"],
)
def test_what_is_no_message_ends_the_stream(raw):
    stream, there = ends()
    with there:
        there.sendall(raw)
        with pytest.raises(StreamGarbage):
            stream.receive(decode_values)
    stream.close()


@pytest.mark.parametrize("sent", [b"", b"\5\0", b"\5\0\0\0\x92"], ids=["nothing", "half a length", "half a message"])
def test_a_connection_that_ends_is_an_error_at_any_point(sent):
    stream, there = ends()
    there.sendall(sent)
    there.close()
    with pytest.raises(StreamError):
        stream.receive(decode_ended)
    stream.close()


def test_whoever_waits_is_asked_for_patience_and_may_lose_it():
    here, there = socket.socketpair()
    asked = []

    def idle(quiet_s):
        asked.append(quiet_s)
        if len(asked) == 3:
            raise StreamError("enough")

    stream = Stream(here, idle, slice_s=0.01)
    with there, pytest.raises(StreamError, match="enough"):
        stream.receive(decode_ended)
    assert asked == pytest.approx([0.01, 0.02, 0.03])
    asked.clear()
    with pytest.raises(StreamError):
        send_values(stream, [(memoryview(bytes(64 << 20)),)])
    stream.close()


def test_what_has_come_in_time_counts_however_late_it_is_taken(pair):
    near, far = pair
    near.send(Ended([7]))
    far.stop_at = monotonic()
    assert far.receive(decode_ended).codes == [7]
    with pytest.raises(StreamError, match="too slow"):
        far.receive(decode_ended)
    far.stop_at = math.inf


def test_nothing_is_sent_once_its_time_is_over(pair):
    near, far = pair
    near.stop_at = monotonic()
    with pytest.raises(StreamError, match="too slow"):
        near.send(Ended([7]))
    near.close()
    with pytest.raises(StreamError, match="the connection ended"):
        far.receive(decode_ended)


def test_a_stream_can_be_ended_under_a_reader_of_another_thread():
    stream, there = ends()
    with there, ThreadPoolExecutor(1) as thread:
        reading = threading.Event()

        def read():
            reading.set()
            stream.receive(decode_ended)

        waiting = thread.submit(read)
        assert reading.wait(10)
        stream.shut()
        with pytest.raises(StreamError):
            waiting.result(timeout=10)
    stream.close()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "tcp://[::1]:1", "ipc://{}/socket"])
def test_a_stream_is_found_beside_its_endpoint(endpoint, tmp_path):
    endpoint = endpoint.format(tmp_path)
    for _ in range(2):  # the second over a path that a former life left
        try:
            listener, where = listen_beside(endpoint, 0)
        except OSError as error:
            pytest.skip(f"{endpoint}: {error}")
        with listener, connect_beside(where, endpoint, 5.0) as near:
            far, _ = listener.accept()
            near.setblocking(True)
            with far:
                near.sendall(b"here")
                assert far.recv(4) == b"here"


@pytest.mark.parametrize("where", ["ipc:///run/other", "tcp://*:1", "ipc://{}/other-stream"])
def test_nobody_is_sent_elsewhere_than_beside_the_endpoint(where, tmp_path):
    endpoint = "tcp://127.0.0.1:1" if where.startswith("ipc:///run") else f"ipc://{tmp_path}/socket"
    with pytest.raises(ValueError, match="is not beside"):
        connect_beside(where.format(tmp_path), endpoint, 5.0)
