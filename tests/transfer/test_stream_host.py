"""The door of a server's streams: clients get in while strangers crowd it, and strangers cost nothing but their places."""

import contextlib
import math
import resource
import socket
import threading
import time
from functools import partial

import pytest
import waiting
from structlog.testing import capture_logs

from mooncake_zmq.core.records import decoder, encode
from mooncake_zmq.transfer import stream_host
from mooncake_zmq.transfer.sockets import connect_beside
from mooncake_zmq.transfer.stream import Stream, StreamError
from mooncake_zmq.transfer.stream_host import MAX_UNATTACHED, StreamHost
from mooncake_zmq.transfer.tickets import CHALLENGE_BYTES, OPENING_BYTES, PROOF_BYTES, Attaching, Ticket, Tickets

TIMEOUT_S = 20.0
SILENT = 2400
decode_number = decoder(int)


def patient(quiet_s):
    if quiet_s > TIMEOUT_S:
        raise StreamError("nothing came")


class Echo:
    """Says each number again."""

    def __init__(self, guest):
        keys = guest.keys
        self.stream = Stream(guest.connection, patient, slice_s=0.05, seals=keys.to_client, opens=keys.to_server)
        self.waits_since = math.inf

    def run(self):
        with contextlib.suppress(StreamError):
            while True:
                self.waits_since = time.monotonic()
                self.stream.send(self.stream.receive(decode_number, 16))

    def shut(self):
        self.stream.shut()

    def close(self):
        self.stream.close()


class House:
    """A host of echoes, and its tickets."""

    def __init__(self, endpoint, *, sealed):
        self.endpoint = endpoint
        self.counts, self.crashes = {}, []
        self.tickets = Tickets(sealed=sealed)
        self.host = StreamHost(endpoint, 0, self.tickets, Echo, self.crashes.append, counts=self.counts, name="echo")

    def connect(self):
        return connect_beside(self.host.endpoint, self.endpoint, TIMEOUT_S)

    @contextlib.contextmanager
    def stream(self, ticket=None):
        with contextlib.closing(Stream(self.connect(), patient, slice_s=0.05)) as stream:
            stream.attach(ticket or self.tickets.make())
            yield stream

    def answers(self):
        with self.stream() as stream:
            stream.send(7)
            return stream.receive(decode_number) == 7


@pytest.fixture(params=["tcp, sealed", "tcp, in clear", "ipc"])
def house(request, tmp_path):
    endpoint = f"ipc://{tmp_path}/echo" if request.param == "ipc" else "tcp://127.0.0.1:1"
    made = House(endpoint, sealed=request.param == "tcp, sealed")
    yield made
    made.host.close()
    assert not made.crashes
    assert not list(tmp_path.iterdir())


eventually = partial(waiting.eventually, timeout_s=TIMEOUT_S)


def test_who_shows_a_ticket_is_let_in(house):
    assert house.answers()
    with house.stream() as one, house.stream() as other:
        for number in range(3):
            for stream in (one, other):
                stream.send(number)
            assert [stream.receive(decode_number) for stream in (other, one)] == [number, number]
    assert house.counts["streams"] == 3


def test_who_does_not_is_not(house):
    ticket = house.tickets.make()
    for wrong in (Ticket(ticket.token, bytes(32), ticket.sealed), Ticket(bytes(40), ticket.secret, ticket.sealed)):
        with pytest.raises(StreamError), house.stream(wrong):
            pass
    with house.connect() as connection:
        connection.setblocking(True)
        connection.sendall(Attaching(ticket).opening)
        assert len(connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        connection.sendall(bytes(PROOF_BYTES))
        assert connection.recv(1) == b""
    eventually(lambda: house.counts["without_ticket"] == 3)
    assert house.counts["streams"] == 0


def test_a_recorded_attaching_lets_nobody_in(house):
    attaching = Attaching(house.tickets.make())
    proof = b""
    for replayed in (False, True):
        with house.connect() as connection:
            connection.setblocking(True)
            connection.sendall(attaching.opening)
            challenge = connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
            proof = proof or attaching.answer(challenge)[0]
            connection.sendall(proof)
            eventually(lambda: house.counts["without_ticket"] or house.counts["streams"])
            if replayed:
                assert connection.recv(1) == b""
    assert (house.counts["streams"], house.counts["without_ticket"]) == (1, 1)


def test_garbage_and_half_an_opening_end_at_the_door(house, monkeypatch):
    for said in (b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(OPENING_BYTES), b"\xff" * OPENING_BYTES):
        with house.connect() as connection:
            connection.setblocking(True)
            connection.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    monkeypatch.setattr(stream_host, "ATTACH_S", 0.05)
    with house.connect() as connection:
        connection.setblocking(True)
        connection.sendall(Attaching(house.tickets.make()).opening[:-1])
        assert connection.recv(1) == b""


@pytest.fixture
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_silent_strangers_lock_no_client_out_and_hold_no_thread(house, many_files):
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(SILENT // 100):
            for _ in range(100):
                stack.enter_context(house.connect())
            assert house.answers()
        eventually(lambda: threading.active_count() <= threads)
        assert house.counts["ticket_late"] >= SILENT - MAX_UNATTACHED - 1
        assert len(house.host._unattached) <= MAX_UNATTACHED
        assert house.counts["streams_refused"] == 0


def test_strangers_with_a_token_that_they_saw_do_not_either(house, monkeypatch):
    monkeypatch.setattr(stream_host, "MAX_UNATTACHED", 16)
    token = house.tickets.make().token
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            connection = stack.enter_context(house.connect())
            connection.sendall(Attaching(Ticket(token, bytes(32), True)).opening)
        assert house.answers()


def test_silence_at_the_door_ends(house, monkeypatch):
    monkeypatch.setattr(stream_host, "ATTACH_S", 0.05)
    with house.connect() as connection:
        connection.setblocking(True)
        assert connection.recv(1) == b""
    assert house.counts["ticket_late"] == 1
    assert house.answers()


def test_newcomers_in_quick_succession_do_not_exceed_the_limit(house, monkeypatch):
    monkeypatch.setattr(stream_host, "MAX_STREAMS", 4)
    open_at_once = []
    begin = house.host._begin

    def watched(served, holder):
        begin(served, holder)
        open_at_once.append(len(house.host._open))

    monkeypatch.setattr(house.host, "_begin", watched)
    with contextlib.ExitStack() as stack:
        tickets = [house.tickets.make() for _ in range(40)]
        for ticket in tickets:
            stack.enter_context(house.stream(ticket))
        eventually(lambda: house.counts["streams"] == 40 == len(open_at_once) + house.counts["streams_refused"])
        eventually(lambda: all(each.served.waits_since < math.inf for each in list(house.host._open.values())))
        assert house.answers()
    assert max(open_at_once) == 4


def test_the_holder_of_one_key_makes_room_among_his_own(house, monkeypatch):
    monkeypatch.setattr(stream_host, "MAX_STREAMS_OF_A_KEY", 2)
    with contextlib.ExitStack() as stack:
        others, his = [], []
        for who, streams in (("sky", others), ("ruby", his)) * 2:
            streams.append(stack.enter_context(house.stream(house.tickets.make(who))))
            eventually(lambda: len(house.host._open) == len(others) + len(his))
            eventually(lambda: all(each.served.waits_since < math.inf for each in list(house.host._open.values())))
        his.append(stack.enter_context(house.stream(house.tickets.make("ruby"))))
        for stream in (*others, *his[1:]):
            stream.send(3)
            assert stream.receive(decode_number) == 3
        with pytest.raises(StreamError):
            his[0].receive(decode_number)
        assert house.counts["streams_over_share"] == 1
        assert house.answers(), "who has shown no key has no share"


def test_a_further_stream_of_a_key_whose_streams_are_all_at_work_is_refused(house, monkeypatch):
    monkeypatch.setattr(stream_host, "MAX_STREAMS_OF_A_KEY", 1)
    with house.stream(house.tickets.make("ruby")):
        eventually(lambda: house.counts["streams"] == 1 == len(house.host._open))
        (busy,) = house.host._open.values()
        eventually(lambda: busy.served.waits_since < math.inf)
        busy.served.waits_since = math.inf
        monkeypatch.setattr(stream_host, "ENDING_S", math.inf)  # the one accepting thread is not to sleep for it
        with capture_logs() as logged:
            for _ in range(3):
                with house.stream(house.tickets.make("ruby")) as further, pytest.raises(StreamError):
                    further.receive(decode_number)
            eventually(lambda: logged)
        assert house.counts["streams_refused"] == house.counts["streams_over_share"] == 3
        assert [each["event"] for each in logged] == ["stream_refused"]
        with house.stream(house.tickets.make("sky")) as stream:
            stream.send(3)
            assert stream.receive(decode_number) == 3


def test_closing_ends_streams_and_who_stands_at_the_door(house):
    with house.stream() as stream, house.connect() as connection:
        stream.send(1)
        assert stream.receive(decode_number) == 1
        eventually(lambda: house.host._unattached)
        house.host.close()
        house.host.close()
        with pytest.raises(StreamError):
            stream.receive(decode_number)
        connection.setblocking(True)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""


@pytest.mark.parametrize("flip", [0, 5, 10])
def test_a_flipped_byte_in_a_record_ends_the_stream_and_is_no_value(flip):
    house = House("tcp://127.0.0.1:1", sealed=True)
    with house.stream() as stream:
        (record,) = stream.sealer.records([memoryview(len(encode(7)).to_bytes(4, "little") + encode(7))])
        damaged = bytearray(record)
        damaged[flip] ^= 1
        with contextlib.suppress(ConnectionError):  # it may be ended while we are still at it
            stream.connection.sendall(damaged + bytes(1 << 21))
        with pytest.raises(StreamError):
            stream.receive(decode_number)
    house.host.close()
