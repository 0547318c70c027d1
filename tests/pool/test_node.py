"""The store's actor by itself: what one event leads to."""

import node_harness
import pytest
from node_harness import SLAB, TOKEN

from mooncake_zmq.core.actor import Drained, DrainWanted, Fence, SetTimer, Start, TimerFired, WorkDone
from mooncake_zmq.core.work import GOOD, Done, ValuesRead, ValuesWritten, WriteValues
from mooncake_zmq.pool.node import store_node as node_module
from mooncake_zmq.pool.node.store_events import (
    Asked,
    ChecksumsMade,
    ClientDied,
    Dismiss,
    Greeted,
    MakeChecksums,
    Probe,
    ReceiveValues,
    Reply,
    SendValues,
    Serve,
    StreamAsked,
    StreamBegan,
    StreamEnded,
    ValuesCame,
    ValuesSent,
)
from mooncake_zmq.pool.node.store_node import PROBE
from mooncake_zmq.pool.node.tiers import LOOK, LOOK_S
from mooncake_zmq.pool.rules import changes
from mooncake_zmq.pool.rules.holders import EXPIRE
from mooncake_zmq.pool.rules.object_log import ObjectSsdSettings
from mooncake_zmq.store import protocol
from mooncake_zmq.store.codes import Code
from mooncake_zmq.store.stream_messages import Attach, Ended, Get, Promote, Put

ME = b"m" * 16
CONNECTION = b"c" + ME + b"1234"
SSD = ObjectSsdSettings(directory="x", bytes=12 * SLAB)


class Store(node_harness.Store):
    """With one client of this machine's user, which has the stream 1."""

    def __init__(self, *, on_disk: tuple[str, ...] = (), ssd: bool = False, shared: bool = True) -> None:
        super().__init__(on_disk=on_disk, size=10, ssd=SSD if ssd or on_disk else False, slabs=2)
        hello = protocol.Hello(1, protocol.PROTOCOL_VERSION, "", shared)
        self.take(Greeted(CONNECTION, hello, "path", shared, TOKEN, "stream"))
        self.take(StreamBegan(1, Attach(ME, TOKEN)))

    def say(self, now: float, request: object) -> list[object]:
        return self.take(Asked(CONNECTION, request), now)

    def store(self, key: str, size: int = 10, checksum: int = 7) -> None:
        self.say(0.0, protocol.Reserve(100, [key], [size], 0, 30.0))
        self.say(0.0, protocol.Commit(101, 100, [0], [checksum]))


def kinds(effects: list[object]) -> list[type]:
    return [type(effect) for effect in effects]


def test_what_changed_is_visible_before_anybody_is_told() -> None:
    store = Store()
    fence, reserved, *_ = store.say(1.0, protocol.Reserve(2, ["k"], [10], 0, 30.0))
    assert isinstance(fence, Fence)
    assert isinstance(reserved, Reply)
    assert fence.generations == ((reserved.reply.entries[0], reserved.reply.generations[0]),)


def test_a_resident_value_costs_a_turn_to_send_it_and_one_to_let_it_go() -> None:
    store = Store()
    store.store("k")
    assert kinds(store.take(StreamAsked(1, Get(["k"], [], 20.0)), 1.0))[0] is SendValues
    assert store.node.gauges()["leases"] == 1
    assert store.take(ValuesSent(1), 1.0) == [Serve(1)]
    assert store.node.gauges()["leases"] == 0


def test_one_timer_serves_all_that_is_held_and_is_set_again_for_what_is_left() -> None:
    store = Store()
    store.store("k")
    store.take(TimerFired(EXPIRE), 30.1)
    effects = [effect for number in range(5) for effect in store.say(40.0, protocol.Lease(10 + number, ["k"], 5.0 + number))]
    assert [effect.delay_s for effect in effects if isinstance(effect, SetTimer)] == [pytest.approx(5.0, abs=0.01)]
    (again,) = store.take(TimerFired(EXPIRE), 45.001)
    assert again.delay_s == pytest.approx(1.0, abs=0.01)
    assert store.node.gauges()["leases"] == 4
    assert store.take(TimerFired(EXPIRE), 60.0) == []
    assert store.node.counts["leases_expired"] == 5


def test_who_holds_something_is_looked_at_and_its_death_ends_it() -> None:
    store = Store()
    store.take(StreamEnded(1), 0.0)
    store.store("k")
    store.say(1.0, protocol.Lease(2, ["k"], 20.0))
    store.say(1.0, protocol.Reserve(3, ["late"], [10], 0, 0.5))
    store.take(TimerFired(EXPIRE), 2.0)
    assert store.node.gauges()["quarantined_objects"] == 1, "its writer lives"
    assert Probe([ME]) in store.take(TimerFired(PROBE), 2.0)
    store.take(ClientDied(ME, closed=False), 2.0)
    assert not any(store.node.gauges()[name] for name in ("leases", "puts", "quarantined_objects", "reserved_bytes", "clients"))


def test_a_put_of_a_stream_that_ends_leaves_nothing() -> None:
    store = Store(shared=False)
    effects = store.take(StreamAsked(1, Put(["k"], [10], 0, 20.0, [], False)), 0.0)
    assert ReceiveValues in kinds(effects)
    store.take(StreamEnded(1), 1.0)
    assert store.node.gauges()["puts"] == 0
    assert store.node.objects.exist(["k"]) == b"\0"


def test_a_put_that_waits_for_the_disk_is_made_though_its_stream_is_gone() -> None:
    store = Store(on_disk=("k",))
    store.take(StreamAsked(1, Put(["k"], [10], 4, 20.0, [7], False)), 0.0)
    (start,) = [effect for effect in store.take(ValuesCame(1, [7], [7]), 0.0) if isinstance(effect, Start)]
    store.take(StreamEnded(1), 0.0)
    assert not any(isinstance(effect, Serve) for effect in store.take(done(start), 1.0))
    assert store.node.objects.by_key


def done(start: Start) -> object:
    return WorkDone(start.work_id, Done())


def test_where_too_much_waits_for_the_disk_nothing_becomes_of_a_further_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_WAITING", 1)
    store = Store(on_disk=("a", "b"))
    (start,) = [effect for effect in store.say(0.0, protocol.Remove(2, ["a"])) if isinstance(effect, Start)]
    assert store.say(0.0, protocol.Remove(3, ["b"])) == [Reply(CONNECTION, protocol.Codes(3, b""))]
    assert store.node.counts["dropped"] == 1
    store.take(StreamAsked(1, Put(["b"], [10], 4, 20.0, [7], False)), 0.0)
    assert Dismiss(1, "too much waits for the disk") in store.take(ValuesCame(1, [7], [7]), 0.0)
    assert store.node.gauges()["puts"] == 0
    assert Reply(CONNECTION, protocol.Numbers(2, [Code.OK])) in store.take(done(start), 0.0)


def test_a_value_that_two_streams_want_is_read_once() -> None:
    store = Store(on_disk=("k",))
    store.take(StreamBegan(2, Attach(ME, TOKEN)), 0.0)
    assert Start in kinds(store.take(StreamAsked(1, Promote(["k"], [])), 0.0))
    assert store.take(StreamAsked(2, Promote(["k", "no such"], [])), 0.0) == []
    effects = store.take(WorkDone(1, ValuesRead((GOOD,))), 0.0)
    assert [effect for effect in effects if isinstance(effect, Serve)] == [Serve(1, Ended([])), Serve(2, Ended([]))]


@pytest.mark.parametrize("damaged_before", ["written", "sent"])
def test_the_first_checksum_made_of_a_value_stands_and_damage_since_then_is_vouched_for_by_none(damaged_before: str) -> None:
    store = Store(ssd=True)
    store.store("k", SLAB, checksum=0)
    store.take(DrainWanted())
    assert MakeChecksums in kinds(store.take(StreamAsked(1, Get(["k"], [], 20.0))))
    if damaged_before == "written":
        assert SendValues in kinds(store.take(ChecksumsMade(1, [7])))
        store.take(ValuesSent(1))
    while not isinstance(store.works[0].work, WriteValues):
        store.take(done(store.works.pop(0)))
    store.take(WorkDone(store.works.pop(0).work_id, ValuesWritten((8,))))
    if damaged_before == "sent":
        store.settle()
        assert SendValues(1, [0], [0], [], 20.0) in store.take(ChecksumsMade(1, [7]))
        store.take(ValuesSent(1))
    store.settle()
    assert "k" not in store.node.objects.by_key
    assert store.node.objects.counts["corrupt"] == 1
    assert ("k" in store.log.by_key) == (damaged_before == "sent")


def test_a_store_without_a_disk_is_drained_at_once() -> None:
    assert Store().take(DrainWanted(), 1.0) == [Drained()]


def test_further_clients_than_the_limit_are_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr(node_module, "MAX_CLIENTS", 1)
    other = b"c" + b"o" * 16 + b"1234"
    hello = protocol.Hello(5, protocol.PROTOCOL_VERSION, "", False)
    refused = protocol.Stranger(5, "1 clients are there")
    assert store.take(Greeted(other, hello, "", False, TOKEN, ""), 1.0) == [Reply(other, refused)]
    assert store.take(Asked(other, protocol.Exist(6, ["k"])), 1.0) == [Reply(other, protocol.Stranger(6))]


def test_the_holder_of_one_key_does_not_take_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr(node_module, "MAX_CLIENTS_OF_A_KEY", 2)
    hello = protocol.Hello(5, protocol.PROTOCOL_VERSION, "", False)

    def greeted(number: int, user: str) -> protocol.Reply:
        connection = b"c" + bytes([number]) * 16 + b"1234"
        (reply,) = (
            each
            for each in store.take(Greeted(connection, hello, "", False, TOKEN, "", user), number)
            if isinstance(each, Reply)
        )
        return reply.reply

    assert isinstance(greeted(1, "ruby"), protocol.Welcome)
    assert isinstance(greeted(2, "ruby"), protocol.Welcome)
    assert isinstance(greeted(2, "ruby"), protocol.Welcome), "it is known"
    assert greeted(3, "ruby") == protocol.Stranger(5, "2 clients with the key of ruby are there")
    assert isinstance(greeted(4, "sky"), protocol.Welcome)
    assert store.node.counts["clients_refused"] == 1
    store.take(TimerFired(node_module.PROBE), 1 + node_module.IDLE_S + 1)
    assert isinstance(greeted(90, "ruby"), protocol.Welcome), "one has gone"


def test_an_idle_store_does_not_look_at_its_disk_again_and_again() -> None:
    store = Store(ssd=True)
    looked = store.take(TimerFired(LOOK), 1.0)
    assert SetTimer(LOOK, LOOK_S) not in looked
    assert SetTimer(LOOK, LOOK_S) in store.take(Asked(CONNECTION, protocol.Reserve(100, ["k"], [10], 0, 30.0)), 2.0)
