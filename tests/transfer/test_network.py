"""Reads from another host: what verifies arrives, all else ends as a failure; no peer makes either side hang or crash."""

import contextlib
import math
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import waiting
import zmq
from cuda_stand_in import FakeCupy, Gpu
from segment_bytes import slot_bytes

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.records import encode
from mooncake_zmq.kv.checksum import block_checksum, part_checksum
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.transfer import data_server
from mooncake_zmq.transfer.block_messages import (
    PROTOCOL_VERSION,
    ReadReply,
    ReadRequest,
    ReadStatus,
    StreamOffered,
    StreamWanted,
    decode_offer,
    decode_reply,
    decode_request,
)
from mooncake_zmq.transfer.channel import ChannelLost, RemoteRead
from mooncake_zmq.transfer.cuda import Cuda, DeviceSegment
from mooncake_zmq.transfer.data_server import DataServer
from mooncake_zmq.transfer.network import RemoteReader
from mooncake_zmq.transfer.sockets import Sockets
from mooncake_zmq.transfer.stream import LENGTH, Stream, StreamError
from mooncake_zmq.transfer.tickets import Ticket

LIFE = ("a", 1)
TIMEOUT_S = 20.0


@dataclass
class Sink:
    """Keeps what it is given."""

    into: memoryview | None = None
    parts: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    verified: bool | None = None
    failure: ReadFailure | None = None

    def buffer(self):
        return self.into

    def part(self, layer, payload, checksum):
        assert self.verified is None
        self.parts[layer] = (bytes(payload), checksum)

    def end(self, failure):
        assert self.verified is None, "a read ends once"
        self.verified, self.failure = failure is None, failure


@pytest.fixture
def segment(make_segment, fill):
    made = make_segment("a")
    made.refs = [fill(made, slot) for slot in range(8)]
    return made


@pytest.fixture
def reader(layout, crashes):
    made = RemoteReader(layout, on_crash=crashes.append)
    yield made
    made.close()


@pytest.fixture(params=["ipc", "tcp", "tcp, sealed"])
def server(request, segment, crashes, tmp_path, monkeypatch):
    monkeypatch.setattr(Sockets, "seals", lambda *_: request.param == "tcp, sealed")
    endpoint = f"ipc://{tmp_path}/data" if request.param == "ipc" else "tcp://127.0.0.1:*"
    made = DataServer(segment, endpoint, on_crash=crashes.append)
    yield made
    made.close()


@pytest.fixture
def tcp_server(segment, crashes):
    made = DataServer(segment, "tcp://127.0.0.1:*", on_crash=crashes.append)
    yield made
    made.close()


def fetch(reader, reads, deadline_s=TIMEOUT_S):
    done = threading.Event()
    reader.submit(reads, time.monotonic() + deadline_s, done.set)
    assert done.wait(TIMEOUT_S)


def read(ref, layers=range(3), **sink):
    return RemoteRead(ref, layers, Sink(**sink))


eventually = partial(waiting.eventually, timeout_s=TIMEOUT_S)
"""The server counts after it has answered."""


def changed(ref, **fields):
    return type(ref)(**({name: getattr(ref, name) for name in ref.__struct_fields__} | fields))


def test_blocks_arrive_as_they_are(server, reader, segment, layout):
    reader.learn(LIFE, server.endpoint)
    reads = [read(ref) for ref in segment.refs] + [read(segment.refs[3], range(1, 2))]
    fetch(reader, reads)
    for one in reads:
        assert one.sink.verified is True
        assert list(one.sink.parts) == list(one.layers)
        for layer, (payload, checksum) in one.sink.parts.items():
            assert payload == segment.part_view(one.source.slot, layer).tobytes()
            assert checksum == segment.parts(one.source.slot)[layer]
    assert reader.counts["reads"] == 9
    eventually(lambda: server.counts["reads"] == 9)
    assert reader.counts["bytes"] == 8 * layout.block_bytes + layout.part_bytes


def test_bytes_can_land_straight_in_memory(server, reader, segment, layout):
    reader.learn(LIFE, server.endpoint)
    memory = bytearray(layout.block_bytes)
    one = read(segment.refs[2], into=memoryview(memory))
    fetch(reader, [one])
    assert one.sink.verified
    assert bytes(memory) == bytes(segment.layers_view(2, 0, 3))


def test_a_read_that_is_refused_fails_alone(server, reader, segment):
    reader.learn(LIFE, server.endpoint)
    ref = segment.refs[0]
    wrong = [
        read(changed(ref, generation=4)),
        read(changed(ref, checksum=ref.checksum ^ 1)),
        read(changed(ref, slot=8)),
        read(ref, range(2, 4)),
        read(changed(ref, generation=0, checksum=0)),
        read(changed(ref, incarnation=2)),
        read(changed(ref, node="stranger")),
    ]
    good = [read(ref), read(changed(ref, generation=1, checksum=0)), read(changed(ref, checksum=0), range(1))]
    fetch(reader, wrong + good)
    unreached = [ReadFailure.UNREACHED] * 5
    assert [one.sink.failure for one in wrong] == [ReadFailure.UNREACHED, ReadFailure.CORRUPT, *unreached]
    assert [one.sink.verified for one in good] == [True] * len(good)
    assert not any(one.sink.parts for one in wrong)


def test_a_new_life_at_the_same_endpoint_is_not_mistaken_for_the_old(server, reader, segment):
    reader.learn(("a", 7), server.endpoint)
    one = read(changed(segment.refs[0], incarnation=7))
    fetch(reader, [one])
    assert one.sink.verified is False
    eventually(lambda: server.counts["refused"] == 1)


def test_checksums_read_while_the_slot_changes_hands_are_not_sent(tcp_server, reader, segment):
    reader.learn(LIFE, tcp_server.endpoint)
    parts = segment.parts

    def evicted_meanwhile(slot):
        segment.set_generation(slot, 4)
        return parts(slot)

    segment.parts = evicted_meanwhile
    one = read(changed(segment.refs[0], checksum=0))
    fetch(reader, [one])
    assert one.sink.verified is False
    eventually(lambda: tcp_server.counts["refused"] == 1)


@contextlib.contextmanager
def a_proxy(to_port, flip_at):
    """Forwards TCP both ways, and flips a bit of the byte `flip_at` that comes back. Its port."""

    def pump(source, sink, flip):
        with contextlib.suppress(OSError):
            passed = 0
            while chunk := bytearray(source.recv(65536)):
                if flip and passed <= flip_at < passed + len(chunk):
                    chunk[flip_at - passed] ^= 4
                passed += len(chunk)
                sink.sendall(chunk)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    far = socket.create_connection(("127.0.0.1", to_port))
                    for ends in ((near, far, False), (far, near, True)):
                        threading.Thread(target=pump, args=ends, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("sealed", [True, False])
def test_a_byte_that_is_flipped_on_the_network_is_a_miss_wherever_it_is(make_segment, fill, crashes, monkeypatch, sealed):
    monkeypatch.setattr(Sockets, "seals", lambda *_: sealed)
    layout = BlockLayout(layers=3, kv_heads=1, head_dim=64, block_tokens=128)
    segment = make_segment("a", slots=2, layout=layout)
    refs = [fill(segment, slot) for slot in range(2)]
    server = DataServer(segment, "tcp://127.0.0.1:*", on_crash=crashes.append)
    challenge, failures = 64, set()
    for flip_at in (0, 40, *(challenge + at for at in (0, 3, 4, 9, 30, 70, 1000, 100_000, 2 * layout.block_bytes - 50))):
        with a_proxy(int(server._host.endpoint.rpartition(":")[2]), flip_at) as port:
            monkeypatch.setattr(server._host, "endpoint", f"tcp://*:{port}")
            reader = RemoteReader(layout, on_crash=crashes.append)
            reader.learn(LIFE, server.endpoint)
            memory = [bytearray(layout.block_bytes) for _ in refs]
            reads = [RemoteRead(ref, range(3), Sink(memoryview(into))) for ref, into in zip(refs, memory, strict=True)]
            fetch(reader, reads)
            reader.close()
            monkeypatch.undo()
            monkeypatch.setattr(Sockets, "seals", lambda *_: sealed)
        outcomes = [one.sink.failure for one in reads]
        failures |= set(outcomes)
        assert outcomes != [None, None], flip_at
        for one, into in zip(reads, memory, strict=True):
            assert one.sink.failure or into == bytes(segment.layers_view(one.source.slot, 0, 3))
    assert (ReadFailure.CORRUPT in failures) is not sealed, "what was sealed is not looked at"
    server.close()


@pytest.mark.parametrize("straight", [True, False])
def test_a_flipped_bit_is_caught(tcp_server, reader, segment, layout, straight):
    reader.learn(LIFE, tcp_server.endpoint)
    slot_bytes(segment, 1)[layout.part_bytes + 5] ^= 1
    memory = memoryview(bytearray(layout.block_bytes)) if straight else None
    bad, good = read(segment.refs[1], into=memory), read(segment.refs[2])
    fetch(reader, [bad, good])
    assert (bad.sink.failure, good.sink.verified) == (ReadFailure.CORRUPT, True)
    assert list(bad.sink.parts) == [0]
    segment.parts(2)[0] ^= 1
    bad = read(segment.refs[2])
    fetch(reader, [bad])
    assert bad.sink.failure is ReadFailure.CORRUPT


def test_more_than_the_window_is_read_in_turn(tcp_server, layout, segment, crashes):
    reader = RemoteReader(layout, on_crash=crashes.append, window_bytes=1)
    reader.learn(LIFE, tcp_server.endpoint)
    reads = [read(segment.refs[index % 8]) for index in range(40)]
    fetch(reader, reads)
    assert all(one.sink.verified for one in reads)
    reader.close()


def test_a_writer_that_never_stops_gives_misses_but_no_wrong_block(tcp_server, reader, segment, fill):
    reader.learn(LIFE, tcp_server.endpoint)
    stop = threading.Event()
    random = np.random.default_rng(3)

    def scribble():
        while not stop.is_set():
            segment.part_view(0, 1)[...] = random.standard_normal((2, 4, 1, 2))

    writer = threading.Thread(target=scribble)
    writer.start()
    for _ in range(20):
        one = read(segment.refs[0])
        fetch(reader, [one])
        if one.sink.verified:
            assert all(part_checksum(payload) == checksum for payload, checksum in one.sink.parts.values())
            assert block_checksum([checksum for _, checksum in one.sink.parts.values()]) == segment.refs[0].checksum
    stop.set()
    writer.join()


WANTED = encode(StreamWanted(PROTOCOL_VERSION, 1))
GARBAGE = [
    [b""],
    [b"\xc1"],
    [b"x" * 200],
    [b"x" * 100_000],
    [encode([1] * 6)],
    [encode([1, PROTOCOL_VERSION, -5])],
    [encode([1, 2**63, 1])],
    [WANTED, b"more"],
    [b"\x91" * 250],
    [os.urandom(100)],
]


def test_garbage_does_not_disturb_the_server(tcp_server, reader, segment):
    context = zmq.Context()
    for frames in GARBAGE:
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 1000
        stranger.connect(tcp_server.endpoint)
        stranger.send_multipart(frames)
        stranger.send(encode(StreamWanted(PROTOCOL_VERSION + 1, 1)))
        stranger.close()
    context.term()
    reader.learn(LIFE, tcp_server.endpoint)
    one = read(segment.refs[0])
    fetch(reader, [one])
    assert one.sink.verified
    eventually(lambda: tcp_server.counts["garbage"] >= 8)
    eventually(lambda: tcp_server.counts["refused"] >= 9)


def patient(quiet_s):
    if quiet_s > TIMEOUT_S:
        raise StreamError("nothing came")


def offered(server):
    """What the server hands out to whoever asks."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, int(TIMEOUT_S * 1000)
        dealer.connect(server.endpoint)
        dealer.send(WANTED)
        return decode_offer(dealer.recv())


@contextlib.contextmanager
def by_hand(server, **options):
    """A reader's end of a stream."""
    offer = offered(server)
    connection = socket.socket(socket.AF_INET)
    for option, value in options.items():
        connection.setsockopt(socket.SOL_SOCKET, getattr(socket, option), value)
    connection.connect(("127.0.0.1", int(offer.where.rpartition(":")[2])))
    with contextlib.closing(Stream(connection, patient, slice_s=0.05)) as stream:
        stream.attach(Ticket(offer.token, offer.secret, offer.sealed))
        yield stream


@pytest.mark.parametrize("raw", [b"\xff\xff\xff\xff", b"\1\0\0\0\xc1", b"\2\0\0\0\x91\x07", b"\0\0\0\0"])
def test_a_stream_that_speaks_something_else_is_ended(tcp_server, reader, segment, raw):
    with by_hand(tcp_server) as stream:
        stream.send_views([memoryview(raw)])
        with pytest.raises(StreamError):
            stream.receive(decode_reply)
    reader.learn(LIFE, tcp_server.endpoint)
    one = read(segment.refs[0])
    fetch(reader, [one])
    assert one.sink.verified


def test_ranges_and_slots_that_are_none_are_refused_on_any_stream(tcp_server):
    with by_hand(tcp_server) as stream:
        for slot, first, stop in ((8, 0, 1), (2**48, 0, 1), (0, 3, 1), (0, 0, 4), (0, 0, 2**40), (0, 1, 1)):
            stream.send(ReadRequest(5, slot, 2, True, first, stop))
            assert stream.receive(decode_reply) == ReadReply(5, ReadStatus.OUT_OF_RANGE)


@contextlib.contextmanager
def a_glutton(server, layers):
    """A reader that asks for all layers of a block, more than any buffer holds, and takes none."""
    with by_hand(server, SO_RCVBUF=4096) as stream:
        for _ in range(400):
            stream.send(ReadRequest(1, 0, 2, True, 0, layers))
        eventually(lambda: any(each.served.waits_since == math.inf for each in server._host._open.values()))
        yield


def test_a_reader_that_takes_nothing_is_given_up_alone(make_segment, fill, crashes, monkeypatch):
    layout = BlockLayout(layers=4, kv_heads=4, head_dim=64, block_tokens=1024)
    segment = make_segment("a", slots=1, layout=layout)
    one = read(fill(segment, 0), range(4))
    server, reader = (
        DataServer(segment, "tcp://127.0.0.1:*", on_crash=crashes.append),
        RemoteReader(layout, on_crash=crashes.append),
    )
    reader.learn(LIFE, server.endpoint)
    monkeypatch.setattr(data_server, "SLICE_S", 0.01)
    with a_glutton(server, 4):
        fetch(reader, [one])
        assert one.sink.verified
        monkeypatch.setattr(data_server, "STALL_S", 0.02)
        eventually(lambda: len(server._host._open) == 1)
    reader.close()
    server.close()


class Held:
    """The impostor's end of a stream: nobody serves it but a test."""

    waits_since = math.inf

    def __init__(self, guest, streams):
        keys = guest.keys
        self.stream = Stream(guest.connection, patient, slice_s=0.05, seals=keys.to_client, opens=keys.to_server)
        self.over = threading.Event()
        self.streams = streams

    def run(self):
        self.streams.put(self.stream)
        self.over.wait()

    def shut(self):
        self.stream.shut()
        self.over.set()

    def close(self):
        self.stream.close()


class Impostor(DataServer):
    """Hands out streams as a server does, and leaves to the test what is said on them."""

    def __init__(self, segment, **settings):
        self.streams = queue.Queue()
        super().__init__(segment, "tcp://127.0.0.1:*", **settings)

    def _make(self, guest):
        return Held(guest, self.streams)

    def stream(self):
        return self.streams.get(timeout=TIMEOUT_S)


@pytest.fixture
def impostor(segment, crashes):
    made = Impostor(segment, on_crash=crashes.append)
    yield made
    made.close()


def test_garbage_from_a_server_fails_the_read(impostor, reader, segment, layout):
    reader.learn(LIFE, impostor.endpoint)
    checksums = tuple(segment.parts(0).tolist())
    block = bytes(segment.layers_view(0, 0, 3))

    def reply(read_id, status=ReadStatus.OK, sums=checksums):
        body = encode(ReadReply(read_id, status, sums))
        return LENGTH.pack(len(body)) + body

    bad = [
        lambda i: reply(i),
        lambda i: reply(i, sums=()) + block,
        lambda i: reply(i, sums=(*checksums, 1)) + block,
        lambda i: reply(i) + block[:-1],
        lambda i: reply(i) + b"x" + block,
        lambda i: reply(i) + bytes(len(block)),
        lambda i: reply(i, ReadStatus.OUT_OF_RANGE) + block,
        lambda i: reply(i + 1) + block,
        lambda i: b"\xff\xff\xff\xff" + block,
        lambda i: b"\3\0\0\0\xc1 x" + block,
        lambda i: b"",
    ]
    for make in bad:
        for into in (None, memoryview(bytearray(layout.block_bytes))):
            one, done = read(segment.refs[0], into=into), threading.Event()
            reader.submit([one], time.monotonic() + TIMEOUT_S, done.set)
            stream = impostor.stream()
            answer = make(stream.receive(decode_request).read_id)
            stream.send_views([memoryview(answer)] if answer else [])
            stream.shut()
            assert done.wait(TIMEOUT_S)
            assert one.sink.verified is False
            reader.forget(LIFE)
            reader.learn(LIFE, impostor.endpoint)


def test_an_answer_that_nobody_asked_for_ends_the_stream_and_the_next_read_has_another(impostor, reader, segment):
    reader.learn(LIFE, impostor.endpoint)
    checksums = tuple(segment.parts(0).tolist())
    for verified in (False, True):
        one, done = read(segment.refs[0]), threading.Event()
        reader.submit([one], time.monotonic() + TIMEOUT_S, done.set)
        stream = impostor.stream()
        request = stream.receive(decode_request)
        if not verified:
            stream.send(ReadReply(1 << 40, ReadStatus.OK, checksums), [segment.layers_view(0, 0, 3)])
        else:
            stream.send(ReadReply(request.read_id, ReadStatus.OK, checksums), [segment.layers_view(0, 0, 3)])
        assert done.wait(TIMEOUT_S)
        assert one.sink.verified is verified
    assert reader.counts["lost_links"] == 1


def test_a_silent_server_costs_the_deadline_and_no_more(impostor, reader, segment):
    reader.learn(LIFE, impostor.endpoint)
    late = [read(segment.refs[0]), read(segment.refs[1])]
    patient, done = read(segment.refs[0]), threading.Event()
    reader.submit([patient], time.monotonic() + TIMEOUT_S, done.set)
    began = time.monotonic()
    fetch(reader, late, deadline_s=0.5)
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert [one.sink.verified for one in late] == [False, False]
    # The link began anew, and what was not late is asked again over it, alone.
    silent, again = impostor.stream(), impostor.stream()
    assert [silent.receive(decode_request).slot for _ in range(3)] == [0, 0, 1]
    request = again.receive(decode_request)
    again.send(ReadReply(request.read_id, ReadStatus.OK, tuple(segment.parts(0).tolist())), [segment.layers_view(0, 0, 3)])
    assert done.wait(TIMEOUT_S)
    assert patient.sink.verified


@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_no_byte_lands_in_memory_of_a_read_that_has_ended(impostor, reader, segment, layout, end):
    reader.learn(LIFE, impostor.endpoint)
    memory = memoryview(bytearray(layout.block_bytes))
    one, done = read(segment.refs[0], into=memory), threading.Event()
    other, others_done = read(segment.refs[1]), threading.Event()
    batch = reader.submit([one], time.monotonic() + (0.5 if end == "deadline" else TIMEOUT_S), done.set)
    reader.submit([other], time.monotonic() + TIMEOUT_S, others_done.set)
    stream = impostor.stream()
    request = stream.receive(decode_request)
    reply = ReadReply(request.read_id, ReadStatus.OK, tuple(segment.parts(0).tolist()))
    block = segment.layers_view(0, 0, 3)
    stream.send(reply, [block[:7]])
    eventually(lambda: memory[:7] == block[:7])
    if end == "cancel":
        reader.cancel(batch)
    assert done.wait(TIMEOUT_S)
    memory[:] = bytes(len(memory))
    with contextlib.suppress(StreamError):
        for _ in range(100):
            stream.send_views([block[7:]])
    again = impostor.stream()
    request = again.receive(decode_request)
    assert request.slot == 1, "only what is still wanted is asked again"
    again.send(ReadReply(request.read_id, ReadStatus.OK, tuple(segment.parts(1).tolist())), [segment.layers_view(1, 0, 3)])
    assert others_done.wait(TIMEOUT_S)
    assert other.sink.verified
    assert bytes(memory) == bytes(len(memory))


def test_a_read_that_was_cancelled_before_its_bytes_came_costs_nobody_the_stream(impostor, reader, segment):
    reader.learn(LIFE, impostor.endpoint)
    reads, ends = [read(segment.refs[slot]) for slot in range(2)], [threading.Event() for _ in range(2)]
    batches = [reader.submit([one], time.monotonic() + TIMEOUT_S, done.set) for one, done in zip(reads, ends, strict=True)]
    stream = impostor.stream()
    requests = [stream.receive(decode_request) for _ in range(2)]
    reader.cancel(batches[0])
    assert ends[0].wait(TIMEOUT_S)
    for slot, request in enumerate(requests):
        row = tuple(segment.parts(slot).tolist())
        stream.send(ReadReply(request.read_id, ReadStatus.OK, row), [segment.layers_view(slot, 0, 3)])
    assert ends[1].wait(TIMEOUT_S)
    assert [one.sink.verified for one in reads] == [False, True]
    assert reads[0].sink.parts == {}


def test_nobody_at_the_endpoint_fails_at_once(reader, segment):
    reader.learn(LIFE, "tcp://127.0.0.1:9")
    reader.learn(("b", 1), "nonsense://")
    began = time.monotonic()
    reads = [read(segment.refs[0]), read(changed(segment.refs[0], node="b"))]
    fetch(reader, reads, deadline_s=TIMEOUT_S)
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert [one.sink.verified for one in reads] == [False, False]


def test_an_owner_that_cannot_be_reached_is_left_in_peace_for_a_while_or_until_it_is_told_of_anew(layout, segment, crashes):
    opened = []

    def unreachable(incarnation, endpoint, is_over):
        opened.append(endpoint)
        raise ChannelLost("nobody is there")

    reader = RemoteReader(layout, on_crash=crashes.append, open_channel=unreachable)
    reader.learn(LIFE, "tcp://a:1")
    for _ in range(5):
        fetch(reader, [read(segment.refs[0])])
    reader.learn(LIFE, "tcp://b:1")
    fetch(reader, [read(segment.refs[0])])
    reader.close()
    assert opened == ["tcp://a:1", "tcp://b:1"]


def test_forgetting_and_cancelling_end_reads_early(impostor, reader, segment):
    for end in (lambda _: reader.forget(LIFE), reader.cancel):
        reader.learn(LIFE, impostor.endpoint)
        one, done = read(segment.refs[0]), threading.Event()
        batch = reader.submit([one], time.monotonic() + 1000, done.set)
        impostor.stream().receive(decode_request)
        end(batch)
        assert done.wait(TIMEOUT_S)
        assert one.sink.verified is False


def test_closing_ends_what_is_under_way(impostor, layout, segment, crashes):
    reader = RemoteReader(layout, on_crash=crashes.append)
    reader.learn(LIFE, impostor.endpoint)
    one, done = read(segment.refs[0]), threading.Event()
    reader.submit([one], time.monotonic() + 1000, done.set)
    impostor.stream().receive(decode_request)
    reader.close()
    reader.close()
    assert done.is_set()
    assert one.sink.verified is False


@pytest.mark.parametrize(
    "says", [None, StreamOffered("tcp://*:9", b"x", b"", False), StreamOffered("nonsense", b"", b"", True)]
)
def test_a_stream_that_does_not_come_about_fails_what_waits_for_it_and_closing_does_not_wait(layout, segment, crashes, says):
    reader = RemoteReader(layout, on_crash=crashes.append)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger, router.rcvtimeo = 0, int(TIMEOUT_S * 1000)
        router.bind("tcp://127.0.0.1:*")
        reader.learn(LIFE, router.get_string(zmq.LAST_ENDPOINT))
        one, done = read(segment.refs[0]), threading.Event()
        reader.submit([one], time.monotonic() + 1000, done.set)
        peer, _ = router.recv_multipart()
        if says is not None:
            router.send_multipart([peer, encode(says)])
            assert done.wait(TIMEOUT_S)
        began = time.monotonic()
        reader.close()
        assert time.monotonic() - began < TIMEOUT_S
    assert done.is_set()
    assert one.sink.verified is False


def test_a_crash_in_a_sink_is_told_and_ends_the_batch(tcp_server, reader, segment, crashes):
    reader.learn(LIFE, tcp_server.endpoint)

    class Broken(Sink):
        def part(self, layer, payload, checksum):
            raise ArithmeticError("planted")

    one = RemoteRead(segment.refs[0], range(3), Broken())
    fetch(reader, [one])
    assert one.sink.verified is False
    reader.close()
    assert isinstance(crashes.pop(), ArithmeticError)


SERVER = """
import sys
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.transfer.data_server import DataServer
from mooncake_zmq.transfer.shared_memory import Segment
layout = BlockLayout(layers=4, kv_heads=4, head_dim=64, block_tokens=128)
segment = Segment.attach(sys.argv[1], layout, 1)
server = DataServer(segment, "tcp://127.0.0.1:*", on_crash=print)
print(server.endpoint, flush=True)
sys.stdin.read()
"""


def test_a_server_killed_in_the_middle_fails_reads_at_once(make_segment, fill, crashes):
    layout = BlockLayout(layers=4, kv_heads=4, head_dim=64, block_tokens=128)
    segment = make_segment("a", slots=16, layout=layout)
    refs = [fill(segment, slot) for slot in range(16)]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(segment.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    reader = RemoteReader(layout, on_crash=crashes.append, window_bytes=4 << 20)
    reader.learn(LIFE, process.stdout.readline().strip())
    first, done = threading.Event(), threading.Event()

    class Telling(Sink):
        def end(self, failure):
            super().end(failure)
            first.set()

    reads = [RemoteRead(refs[index % 16], range(4), Telling()) for index in range(2000)]
    began = time.monotonic()
    reader.submit(reads, began + 1000, done.set)
    assert first.wait(TIMEOUT_S)
    process.kill()
    process.communicate()
    assert done.wait(TIMEOUT_S)
    outcomes = [one.sink.verified for one in reads]
    assert outcomes[0] is True
    assert False in outcomes
    assert None not in outcomes
    assert {one.sink.failure for one in reads} == {None, ReadFailure.UNREACHED}, "nothing is known to be corrupt"
    reader.close()


class CrashingSink(Sink):
    """Planted bugs of whoever asked for a read."""

    where = "part"

    def part(self, layer, payload, checksum):
        if self.where == "part":
            raise ArithmeticError("planted")

    def end(self, failure):
        super().end(failure)
        if self.where == "end":
            raise ArithmeticError("planted")


@pytest.mark.parametrize("where", ["part", "end"])
def test_reads_end_after_the_reader_crashed_too(tcp_server, reader, segment, crashes, where):
    reader.learn(LIFE, tcp_server.endpoint)
    reads = [RemoteRead(ref, range(3), CrashingSink()) for ref in segment.refs]
    reads[0].sink.where = where
    fetch(reader, reads)
    assert isinstance(crashes.pop(0), ArithmeticError)
    assert None not in [one.sink.verified for one in reads]
    if where == "part":
        late = [read(ref) for ref in segment.refs]
        fetch(reader, late)
        assert {one.sink.failure for one in late} == {ReadFailure.UNREACHED}
    crashes.clear()


LARGE = BlockLayout(layers=2, kv_heads=4, head_dim=64, block_tokens=1024)  # blocks of 4 MiB


@pytest.fixture
def slab(tmp_path):
    """Four committed blocks in a stand-in's GPU memory."""
    (tmp_path / "slab").mkdir()
    cuda = Cuda(FakeCupy(Gpu()), LARGE)
    segment = DeviceSegment.allocate(cuda, tmp_path / "slab", "test", "a", LARGE, 4, 1)
    random = np.random.default_rng(5)
    segment.refs = []
    for slot in range(4):
        segment.set_generation(slot, 1)
        for layer in range(2):
            segment.write_part(slot, layer, random.standard_normal(LARGE.part_shape, dtype=np.float32))
        segment.set_generation(slot, 2)
        checksum = block_checksum(segment.parts(slot).tolist())
        segment.refs.append(SlotRef(node="a", incarnation=1, slot=slot, generation=2, checksum=checksum))
    yield segment
    segment.close()
    cuda.close()


@pytest.fixture
def slab_server(slab, crashes, monkeypatch):
    monkeypatch.setattr(data_server, "STAGING_BYTES", 4 * LARGE.block_bytes)
    monkeypatch.setattr(data_server, "STAGING_WAIT_S", 0.2)
    made = DataServer(slab, "tcp://127.0.0.1:*", on_crash=crashes.append)
    yield made
    made.close()


@pytest.fixture
def slab_reader(slab_server, crashes):
    made = RemoteReader(LARGE, on_crash=crashes.append)
    made.learn(LIFE, slab_server.endpoint)
    yield made
    made.close()


def test_blocks_in_gpu_memory_arrive_by_way_of_a_bounded_staging(slab_server, slab_reader, slab):
    reads = [read(slab.refs[index % 4], range(index % 2, 2)) for index in range(40)]
    fetch(slab_reader, reads)
    expected = np.empty(LARGE.part_bytes, np.uint8)
    for one in reads:
        assert one.sink.verified
        for layer in one.layers:
            slab.copy_layers(one.source.slot, layer, layer + 1, expected)
            assert one.sink.parts[layer] == (expected.tobytes(), int(slab.parts(one.source.slot)[layer]))
    assert slab_server.counts["dropped"] == 0


def test_a_flipped_bit_in_gpu_memory_is_caught(slab_server, slab_reader, slab):
    slab._cuda.to_device(slab._part_at(1, 1) + 77, np.zeros(1, np.uint8))
    slab._cuda.settle()
    reads = [read(ref, range(2)) for ref in slab.refs]
    fetch(slab_reader, reads)
    assert [one.sink.failure for one in reads] == [None, ReadFailure.CORRUPT, None, None]


def test_a_reader_that_does_not_take_its_replies_holds_one_buffer_of_the_staging(slab_server, slab_reader, slab):
    with a_glutton(slab_server, 2):
        reads = [read(ref, range(2)) for ref in slab.refs * 3]
        fetch(slab_reader, reads)
        assert all(one.sink.verified for one in reads)


def test_requests_that_no_staging_comes_back_for_are_refused(slab_server, slab_reader, slab, monkeypatch):
    staging = slab_server._staging
    free, waits = staging._free, []

    class Stuck:
        def get(self, timeout):
            waits.append(timeout)
            raise queue.Empty

    staging._free = Stuck()
    reads = [read(ref, range(2)) for ref in slab.refs]
    fetch(slab_reader, reads)
    assert {one.sink.failure for one in reads} == {ReadFailure.UNREACHED}
    eventually(lambda: slab_server.counts["dropped"] == 4)
    assert waits == [data_server.STAGING_WAIT_S, 0, 0, 0], "the others would have waited for the same buffer"
    staging._free = free
    again = read(slab.refs[0], range(2))
    fetch(slab_reader, [again])
    assert again.sink.verified
