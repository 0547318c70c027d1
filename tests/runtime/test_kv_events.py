"""KV events over real sockets, heard by a subscriber written from the conventions alone."""

import threading
from contextlib import contextmanager
from functools import partial

import hostile
import msgpack
import pytest
import waiting
import zmq

from mooncake_zmq.kv.events import AllBlocksCleared, BlocksRemoved, BlocksStored, Medium, batch_bytes
from mooncake_zmq.runtime import kv_events
from mooncake_zmq.runtime.kv_events import KvEventPublisher
from mooncake_zmq.transfer.connections import PARTIAL_BYTES
from mooncake_zmq.transfer.sockets import BadEndpoint
from mooncake_zmq.transfer.zmtp import part

END = b"\xff" * 8
PATIENCE_S = 30.0


def key(number):
    return number.to_bytes(16, "big")


def stored(number, medium=Medium.CPU):
    return (BlocksStored((key(number),), medium),)


wait_until = partial(waiting.eventually, timeout_s=PATIENCE_S)


@contextmanager
def publishing(**options):
    crashes = []
    publisher = KvEventPublisher(
        options.pop("endpoint", "tcp://127.0.0.1:*"),
        replay_endpoint=options.pop("replay_endpoint", "tcp://127.0.0.1:*"),
        block_tokens=4,
        on_crash=crashes.append,
        **options,
    )
    try:
        yield publisher
    finally:
        publisher.close()
        assert crashes == []


class Subscriber:
    """Folds batches into the set of (hash, medium) held; fills a gap by replay, and forgets all where it cannot."""

    def __init__(self, publisher, topic=b""):
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.subscribe(topic)
        self.sub.connect(publisher.endpoint)
        self.replay = self.context.socket(zmq.DEALER)
        if publisher.replay_endpoint:
            self.replay.connect(publisher.replay_endpoint)
        self.held = set()
        self.next = 0
        self.replays = 0
        self.resets = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.destroy(linger=0)

    def joined(self, publisher):
        """Wait until the subscription is in place: publish something harmless until it is heard."""
        while not self.sub.poll(5):
            publisher.publish((BlocksRemoved((key(0),), Medium.CPU),))
        return self

    def receive(self, deaf=False):
        assert self.sub.poll(PATIENCE_S * 1000), "nothing came"
        _, number, payload = self.sub.recv_multipart()
        if not deaf:
            self.take(int.from_bytes(number, "big"), payload)

    def take(self, number, payload):
        if number < self.next:
            if number == 0:  # the publisher's next life
                self.next = 0
                self.held.clear()
            else:
                return
        if number > self.next:
            self.fill()
        if number > self.next:
            self.resets += 1
            self.held.clear()
        if number >= self.next:
            self.fold(payload)
            self.next = number + 1

    def fill(self):
        self.replays += 1
        for number, payload in self.ask(self.next):
            if number == self.next:
                self.fold(payload)
                self.next += 1

    def ask(self, start):
        self.replay.send_multipart((b"", start.to_bytes(8, "big")))
        while True:
            assert self.replay.poll(PATIENCE_S * 1000), "the replay never ended"
            empty, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                return
            yield int.from_bytes(number, "big"), payload

    def fold(self, payload):
        _, events, *_ = msgpack.unpackb(payload)
        for event in events:
            match event:
                case {"type": "BlockStored", "block_hashes": hashes, "medium": medium}:
                    self.held.update((one, medium) for one in hashes)
                case {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}:
                    self.held.difference_update((one, medium) for one in hashes)
                case {"type": "AllBlocksCleared"} | ["AllBlocksCleared"]:
                    self.held.clear()
                case ["BlockStored", hashes, _, _, _, _, medium, *_]:
                    self.held.update((one, medium) for one in hashes)
                case ["BlockRemoved", hashes, medium, *_]:
                    self.held.difference_update((one, medium) for one in hashes)
                case _:
                    raise AssertionError(event)

    def until(self, number):
        while self.next < number:
            self.receive()


def published(publisher):
    return publisher._next_number


@pytest.mark.parametrize("form", ["map", "array"])
def test_a_subscriber_knows_what_the_pool_holds(form):
    with publishing(format=form) as publisher, Subscriber(publisher) as subscriber:
        subscriber.joined(publisher)
        publisher.publish((*stored(1), *stored(2), *stored(1, Medium.DISK)))
        publisher.publish((BlocksRemoved((key(2),), Medium.CPU),))
        subscriber.until(published(publisher))
        assert subscriber.held == {(key(1), "CPU"), (key(1), "DISK")}
        publisher.publish((AllBlocksCleared(), *stored(3)))
        subscriber.until(published(publisher))
        assert subscriber.held == {(key(3), "CPU")}


def test_a_late_joiner_is_brought_up_to_date():
    with publishing() as publisher:
        for number in range(50):
            publisher.publish(stored(number))
        wait_until(lambda: publisher.counts["batches"] == 51)
        with Subscriber(publisher) as subscriber:
            replayed = list(subscriber.ask(0))
            assert [number for number, _ in replayed] == list(range(51))
            assert msgpack.unpackb(replayed[0][1])[1] == [{"type": "AllBlocksCleared"}], "the first batch of a life"
            subscriber.joined(publisher).until(published(publisher))
            assert subscriber.held == {(key(number), "CPU") for number in range(1, 50)}
            assert subscriber.replays == 1


def test_a_gap_is_filled_by_replay():
    with publishing() as publisher, Subscriber(publisher) as subscriber:
        subscriber.joined(publisher).until(published(publisher))
        before = subscriber.replays
        for number in range(1, 31):
            publisher.publish(stored(number))
        for _ in range(20):
            subscriber.receive(deaf=True)
        subscriber.until(published(publisher))
        assert subscriber.held == {(key(number), "CPU") for number in range(1, 31)}
        assert (subscriber.replays, subscriber.resets) == (before + 1, 0)


def test_two_subscribers_and_a_topic():
    with (
        publishing(topic="kv@here@model") as publisher,
        Subscriber(publisher, b"kv@here") as one,
        Subscriber(publisher) as two,
        Subscriber(publisher, b"other") as none,
    ):
        one.joined(publisher)
        two.joined(publisher)
        publisher.publish(stored(7))
        one.until(published(publisher))
        two.until(published(publisher))
        assert one.held == two.held == {(key(7), "CPU")}
        assert not none.sub.poll(0)


def test_a_subscriber_that_lags_loses_batches_and_gets_them_by_replay():
    with publishing(subscriber_bytes=1 << 20) as publisher, Subscriber(publisher) as subscriber:
        subscriber.joined(publisher).until(published(publisher))
        before = subscriber.replays
        fill(publisher, batches=1500)  # 30 MB, of which the sockets on both sides hold a part
        publisher.publish(stored(5000))
        wait_until(lambda: publisher.counts["batches"] == published(publisher))
        while subscriber.next < published(publisher):
            if not subscriber.sub.poll(20):
                publisher.publish((BlocksRemoved((key(0),), Medium.CPU),))
            else:
                subscriber.receive()
        assert subscriber.replays > before
        assert subscriber.resets == 0
        assert (key(5000), "CPU") in subscriber.held


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_subscribers_past_the_limit_are_cut_and_one_that_leaves_makes_room(monkeypatch, tmp_path, scheme):
    monkeypatch.setattr(kv_events, "MAX_SUBSCRIBERS", 2)
    with publishing(endpoint=f"ipc://{tmp_path}/events" if scheme == "ipc" else "tcp://127.0.0.1:*") as publisher:
        with Subscriber(publisher) as one:
            one.joined(publisher)
            with Subscriber(publisher) as two:
                two.joined(publisher)
                with Subscriber(publisher) as three:
                    wait_until(lambda: publisher.counts["subscribers_cut"] > 0)
                    publisher.publish(stored(1))
                    one.until(published(publisher))
                    two.until(published(publisher))
                    assert three.held == set()
            with Subscriber(publisher) as four:
                four.joined(publisher)
        assert publisher.counts["subscribers_cut"] > 0


def test_a_subscriber_of_several_pools_may_reconnect_as_often_as_it_likes(monkeypatch, tmp_path):
    monkeypatch.setattr(kv_events, "MAX_FOREIGN", 2)
    with publishing(endpoint=f"ipc://{tmp_path}/events") as publisher, zmq.Context() as context:
        for _ in range(20):
            with context.socket(zmq.SUB) as subscriber:
                subscriber.subscribe(b"another pool")
                subscriber.subscribe(b"")
                subscriber.connect(publisher.endpoint)
                while not subscriber.poll(10):
                    publisher.publish(stored(1))
        assert publisher.counts["subscribers_cut"] == 0
        with context.socket(zmq.SUB) as subscriber:
            for topic in (b"one", b"two", b"three"):
                subscriber.subscribe(topic)
            subscriber.connect(publisher.endpoint)
            wait_until(lambda: publisher.counts["subscribers_cut"] > 0)


def test_a_restart_begins_at_0_and_clears():
    with publishing() as publisher:
        endpoints = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
        with Subscriber(publisher) as subscriber:
            subscriber.joined(publisher)
            publisher.publish(stored(1))
            subscriber.until(published(publisher))
            assert subscriber.held == {(key(1), "CPU")}
            publisher.close()
            with publishing(**endpoints):
                first = next(iter(subscriber.ask(0)))
                assert first[0] == 0
                subscriber.take(*first)
                assert subscriber.held == set()
                assert subscriber.next == 1


def test_what_is_no_longer_buffered_cannot_be_replayed():
    with publishing(buffer_steps=10) as publisher, Subscriber(publisher) as subscriber:
        for number in range(100):
            publisher.publish(stored(number))
        wait_until(lambda: publisher.counts["batches"] == 101)
        assert [number for number, _ in subscriber.ask(0)] == list(range(91, 101))
        assert [number for number, _ in subscriber.ask(99)] == [99, 100]
        assert list(subscriber.ask(101)) == []
        assert list(subscriber.ask((1 << 64) - 1)) == []


def test_the_buffer_is_bounded_in_bytes():
    with publishing(buffer_bytes=2000) as publisher:
        for number in range(100):
            publisher.publish(stored(number))
        wait_until(lambda: publisher.counts["batches"] == 101)
        assert sum(map(len, publisher._kept.payloads.values())) == publisher._kept.bytes <= 2000
        assert 2 < len(publisher._kept.payloads) < 100


def test_a_full_queue_drops_its_oldest_batch_and_leaves_a_gap(monkeypatch):
    gate = threading.Event()
    encode = kv_events.EventEncoder.encode

    def slow(*args):
        assert gate.wait(PATIENCE_S)
        return encode(*args)

    monkeypatch.setattr(kv_events.EventEncoder, "encode", slow)
    with publishing(queue_bytes=5 * batch_bytes(stored(1))) as publisher, Subscriber(publisher) as subscriber:
        wait_until(lambda: not publisher._queue)  # the thread holds batch 0
        for number in range(1, 21):
            publisher.publish(stored(number))
        assert publisher.counts["dropped"] == 15
        gate.set()
        wait_until(lambda: publisher.counts["batches"] == 6)
        assert [number for number, _ in subscriber.ask(0)] == [0, 16, 17, 18, 19, 20]
        subscriber.joined(publisher).until(published(publisher))
        assert subscriber.resets == 1, "no replay fills such a gap"


def test_garbage_is_dropped_and_counted():
    with publishing() as publisher, Subscriber(publisher) as subscriber:
        garbage = [(b"",), (b"", b""), (b"", b"1234567"), (b"x", bytes(8)), (bytes(8),), (b"", bytes(8), b"")]
        for frames in garbage:
            subscriber.replay.send_multipart(frames)
        assert [number for number, _ in subscriber.ask(0)] == [0]
        assert publisher.counts["replay_garbage"] == len(garbage)
        assert publisher.counts["replays"] == 1


def test_a_req_socket_gets_its_first_batch():
    with publishing() as publisher, Subscriber(publisher) as subscriber:
        req = subscriber.context.socket(zmq.REQ)
        req.connect(publisher.replay_endpoint)
        req.send(bytes(8))
        assert req.poll(PATIENCE_S * 1000)
        number, payload = req.recv_multipart()
        assert number == bytes(8)
        assert payload


def fill(publisher, batches=400):
    """Batches of about 20 kB each: more than sockets and kernel hold for a peer that does not read."""
    keys = tuple(key(number) for number in range(1000))
    for _ in range(batches):
        publisher.publish((BlocksStored(keys, Medium.CPU),))
    wait_until(lambda: publisher.counts["batches"] > batches)


@contextmanager
def stuck_replayer(publisher):
    """Asks for everything and reads nothing."""
    context = zmq.Context()
    stuck = context.socket(zmq.DEALER)
    stuck.rcvhwm = 1
    stuck.rcvbuf = 4096
    stuck.connect(publisher.replay_endpoint)
    before = publisher.counts["replays"]
    stuck.send_multipart((b"", bytes(8)))
    try:
        wait_until(lambda: publisher.counts["replays"] > before)
        yield stuck
    finally:
        context.destroy(linger=0)


def test_a_slow_replayer_blocks_neither_events_nor_other_replays_and_goes_on_later():
    with publishing() as publisher:
        fill(publisher, batches=1500)
        with stuck_replayer(publisher) as stuck, Subscriber(publisher) as subscriber:
            assert len(list(subscriber.ask(0))) == 1501
            subscriber.joined(publisher)
            publisher.publish(stored(5000))
            subscriber.until(published(publisher))
            assert (key(5000), "CPU") in subscriber.held
            assert len(publisher._replays) == 1, "it is still stuck"
            numbers = []
            while not numbers or numbers[-1] != END:
                assert stuck.poll(PATIENCE_S * 1000)
                numbers.append(stuck.recv_multipart()[1])
            assert len(numbers) == 1502
        assert publisher.counts["replays_dropped"] == 0


def test_a_replayer_that_takes_nothing_is_dropped_at_the_limit(monkeypatch):
    monkeypatch.setattr(kv_events, "REPLAY_STALL_S", 0.0)
    with publishing() as publisher:
        fill(publisher, batches=1500)
        with stuck_replayer(publisher):
            wait_until(lambda: publisher.counts["replays_dropped"] == 1)
            assert not publisher._replays


def test_a_replayer_that_leaves_is_dropped():
    with publishing() as publisher:
        fill(publisher, batches=1500)
        with stuck_replayer(publisher):
            wait_until(lambda: publisher._replays)
        wait_until(lambda: not publisher._replays)
        assert publisher.counts["replays_dropped"] == 1


def test_replays_past_the_limit_are_refused(monkeypatch):
    monkeypatch.setattr(kv_events, "MAX_REPLAYS", 1)
    with publishing() as publisher:
        fill(publisher, batches=1500)
        with stuck_replayer(publisher), Subscriber(publisher) as subscriber:
            subscriber.replay.send_multipart((b"", bytes(8)))
            wait_until(lambda: publisher.counts["replays_refused"] == 1)
            assert len(publisher._replays) == 1


def test_an_endpoint_in_use_is_the_operators_mistake():
    with publishing() as publisher, pytest.raises(BadEndpoint, match="cannot publish KV events on tcp"):
        KvEventPublisher(publisher.endpoint, block_tokens=4, on_crash=lambda error: None)


def test_without_a_replay_endpoint_nothing_listens():
    with publishing(replay_endpoint="") as publisher, Subscriber(publisher) as subscriber:
        assert publisher.replay_endpoint == ""
        subscriber.joined(publisher)


def test_closing_twice_leaves_no_thread():
    before = threading.active_count()
    with publishing() as publisher:
        publisher.close()
    assert threading.active_count() == before


def test_a_bug_is_told(monkeypatch):
    crashes = []

    def broken(*_):
        raise RuntimeError("bug")

    monkeypatch.setattr(kv_events.EventEncoder, "encode", broken)
    publisher = KvEventPublisher("tcp://127.0.0.1:*", block_tokens=4, on_crash=crashes.append)
    wait_until(lambda: crashes)
    publisher.publish(stored(1))
    publisher.close()
    assert [str(error) for error in crashes] == ["bug"]


def test_who_says_much_over_its_life_is_not_taken_for_one_who_says_too_much_at_once():
    topic = b"t" * 200
    said = {b"SUB": part(b"\1" + topic) + part(b"\0" + topic) + part(b"\0nothing"), b"DEALER": part(b"x" * 200)}
    with publishing(topic=topic.decode()) as publisher:
        endpoints = publisher.endpoint, publisher.replay_endpoint
        for (kind, message), endpoint, watch in zip(said.items(), endpoints, publisher._connections.values(), strict=True):
            count = 3 * PARTIAL_BYTES // len(message)
            with hostile.connect(endpoint, kind) as peer:
                for _ in range(count):
                    peer.sendall(message)
                wait_until(lambda: sum(held.received_bytes for held in list(watch._open.values())) > count * len(message))  # noqa: B023
                wait_until(lambda: sum(held.untaken_bytes for held in list(watch._open.values())) < PARTIAL_BYTES)  # noqa: B023
        assert publisher.counts["connections_cut"] == publisher.counts["subscribers_cut"] == 0
