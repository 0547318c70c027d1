"""The store's actor by itself: what one event leads to."""

import pytest

from mooncake_zmq.core.actor import Drained, DrainWanted, Fence, SetTimer, Started, TimerFired
from mooncake_zmq.store import node as node_module
from mooncake_zmq.store import protocol
from mooncake_zmq.store.events import (
    GOOD,
    Asked,
    ClientDied,
    Dismiss,
    Done,
    Greeted,
    Hear,
    Probe,
    ReceiveValues,
    Reply,
    Say,
    SendValues,
    Start,
    StreamAsked,
    StreamBegan,
    StreamEnded,
    ValuesCame,
    ValuesRead,
    ValuesSent,
    WorkDone,
)
from mooncake_zmq.store.node import EXPIRE, PROBE, StoreFacts, StoreNode
from mooncake_zmq.store.rules import changes
from mooncake_zmq.store.rules.object_log import ObjectLog, ObjectSsdSettings
from mooncake_zmq.store.rules.object_record import ObjectRecord
from mooncake_zmq.store.rules.objects import Code, ObjectSettings
from mooncake_zmq.store.stream_messages import Attach, Ended, Get, Promote, Put
from mooncake_zmq.store.tiers import LOOK, LOOK_S

SLAB = 1 << 17
ME = b"m" * 16
CONNECTION = b"c" + ME + b"1234"
TOKEN = b"t" * 16
SSD = ObjectSsdSettings(directory="x", bytes=12 * SLAB)


class Store:
    def __init__(self, *, on_disk: tuple[str, ...] = (), ssd: bool = False, shared: bool = True) -> None:
        log = ObjectLog(SSD) if ssd or on_disk else None
        if log is not None and on_disk:
            rows = [(key, ObjectRecord(number, 1, number * 4096, 10, 7, 0)) for number, key in enumerate(on_disk, 1)]
            log.restore({1: SLAB}, rows)
        settings = ObjectSettings(object_bytes=2 * SLAB, slab_bytes=SLAB, ssd=SSD if log is not None else ObjectSsdSettings())
        self.node = StoreNode(settings, StoreFacts(name="n", cluster="c", incarnation=1), log)
        self.take(0.0, Started())
        hello = protocol.Hello(1, protocol.PROTOCOL_VERSION, "", shared)
        self.take(0.0, Greeted(CONNECTION, hello, "path", shared, TOKEN, "stream"))
        self.take(0.0, StreamBegan(1, Attach(ME, TOKEN)))

    def take(self, now: float, event: object) -> list[object]:
        effects = self.node.handle(now, event)
        self.node.check()
        return effects

    def ask(self, now: float, request: object) -> list[object]:
        return self.take(now, Asked(CONNECTION, request))

    def put(self, key: str, size: int = 10) -> None:
        self.ask(0.0, protocol.Reserve(100, [key], [size], 0, 30.0))
        self.ask(0.0, protocol.Commit(101, 100, [0], [7]))


def kinds(effects: list[object]) -> list[type]:
    return [type(effect) for effect in effects]


def test_what_changed_is_visible_before_anybody_is_told() -> None:
    store = Store()
    fence, reserved, *_ = store.ask(1.0, protocol.Reserve(2, ["k"], [10], 0, 30.0))
    assert isinstance(fence, Fence)
    assert isinstance(reserved, Reply)
    assert fence.generations == ((reserved.reply.entries[0], reserved.reply.generations[0]),)


def test_a_resident_value_costs_a_turn_to_send_it_and_one_to_let_it_go() -> None:
    store = Store()
    store.put("k")
    assert kinds(store.take(1.0, StreamAsked(1, Get(["k"], [], 20.0))))[0] is SendValues
    assert store.node.gauges()["leases"] == 1
    assert store.take(1.0, ValuesSent(1)) == [Hear(1)]
    assert store.node.gauges()["leases"] == 0


def test_one_timer_serves_all_that_is_held_and_is_set_again_for_what_is_left() -> None:
    store = Store()
    store.put("k")
    store.take(30.1, TimerFired(EXPIRE))
    effects = [effect for number in range(5) for effect in store.ask(40.0, protocol.Lease(10 + number, ["k"], 5.0 + number))]
    assert [effect.delay_s for effect in effects if isinstance(effect, SetTimer)] == [pytest.approx(5.0, abs=0.01)]
    (again,) = store.take(45.001, TimerFired(EXPIRE))
    assert again.delay_s == pytest.approx(1.0, abs=0.01)
    assert store.node.gauges()["leases"] == 4
    assert store.take(60.0, TimerFired(EXPIRE)) == []
    assert store.node.counts["leases_expired"] == 5


def test_who_holds_something_is_looked_at_and_its_death_ends_it() -> None:
    store = Store()
    store.take(0.0, StreamEnded(1))
    store.put("k")
    store.ask(1.0, protocol.Lease(2, ["k"], 20.0))
    store.ask(1.0, protocol.Reserve(3, ["late"], [10], 0, 0.5))
    store.take(2.0, TimerFired(EXPIRE))
    assert store.node.gauges()["quarantined_objects"] == 1, "its writer lives"
    assert Probe([ME]) in store.take(2.0, TimerFired(PROBE))
    store.take(2.0, ClientDied(ME, closed=False))
    assert not any(store.node.gauges()[name] for name in ("leases", "puts", "quarantined_objects", "reserved_bytes", "clients"))


def test_a_put_of_a_stream_that_ends_leaves_nothing() -> None:
    store = Store(shared=False)
    effects = store.take(0.0, StreamAsked(1, Put(["k"], [10], 0, 20.0, [], False)))
    assert ReceiveValues in kinds(effects)
    store.take(1.0, StreamEnded(1))
    assert store.node.gauges()["puts"] == 0
    assert store.node.objects.exist(["k"]) == b"\0"


def test_a_put_that_waits_for_the_disk_is_made_though_its_stream_is_gone() -> None:
    store = Store(on_disk=("k",))
    store.take(0.0, StreamAsked(1, Put(["k"], [10], 4, 20.0, [7], False)))
    (start,) = [effect for effect in store.take(0.0, ValuesCame(1, [7], [7])) if isinstance(effect, Start)]
    store.take(0.0, StreamEnded(1))
    assert not any(isinstance(effect, Say) for effect in store.take(1.0, done(start)))
    assert store.node.objects.by_key


def done(start: Start) -> object:
    return WorkDone(start.work_id, Done())


def test_where_too_much_waits_for_the_disk_nothing_becomes_of_a_further_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_WAITING", 1)
    store = Store(on_disk=("a", "b"))
    (start,) = [effect for effect in store.ask(0.0, protocol.Remove(2, ["a"])) if isinstance(effect, Start)]
    assert store.ask(0.0, protocol.Remove(3, ["b"])) == []
    assert store.node.counts["dropped"] == 1
    store.take(0.0, StreamAsked(1, Put(["b"], [10], 4, 20.0, [7], False)))
    assert Dismiss(1, "too much waits for the disk") in store.take(0.0, ValuesCame(1, [7], [7]))
    assert store.node.gauges()["puts"] == 0
    assert Reply(CONNECTION, protocol.Numbers(2, [Code.OK])) in store.take(0.0, done(start))


def test_a_value_that_two_streams_want_is_read_once() -> None:
    store = Store(on_disk=("k",))
    store.take(0.0, StreamBegan(2, Attach(ME, TOKEN)))
    assert Start in kinds(store.take(0.0, StreamAsked(1, Promote(["k"], []))))
    assert store.take(0.0, StreamAsked(2, Promote(["k", "no such"], []))) == []
    effects = store.take(0.0, WorkDone(1, ValuesRead((GOOD,))))
    assert [effect for effect in effects if isinstance(effect, Say)] == [Say(1, Ended([])), Say(2, Ended([]))]


def test_a_store_without_a_disk_is_drained_at_once() -> None:
    assert Store().take(1.0, DrainWanted()) == [Drained()]


def test_further_clients_than_the_limit_are_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr(node_module, "MAX_CLIENTS", 1)
    other = b"c" + b"o" * 16 + b"1234"
    hello = protocol.Hello(5, protocol.PROTOCOL_VERSION, "", False)
    refused = protocol.Stranger(5, "1 clients are there")
    assert store.take(1.0, Greeted(other, hello, "", False, TOKEN, "")) == [Reply(other, refused)]
    assert store.take(1.0, Asked(other, protocol.Exist(6, ["k"]))) == [Reply(other, protocol.Stranger(6))]


def test_the_holder_of_one_key_does_not_take_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr(node_module, "MAX_CLIENTS_OF_A_KEY", 2)
    hello = protocol.Hello(5, protocol.PROTOCOL_VERSION, "", False)

    def greeted(number: int, user: str) -> protocol.Reply:
        connection = b"c" + bytes([number]) * 16 + b"1234"
        (reply,) = (
            each
            for each in store.take(number, Greeted(connection, hello, "", False, TOKEN, "", user))
            if isinstance(each, Reply)
        )
        return reply.reply

    assert isinstance(greeted(1, "ruby"), protocol.Welcome)
    assert isinstance(greeted(2, "ruby"), protocol.Welcome)
    assert isinstance(greeted(2, "ruby"), protocol.Welcome), "it is known"
    assert greeted(3, "ruby") == protocol.Stranger(5, "2 clients with the key of ruby are there")
    assert isinstance(greeted(4, "sky"), protocol.Welcome)
    assert store.node.counts["clients_refused"] == 1
    store.take(1 + node_module.IDLE_S + 1, TimerFired(node_module.PROBE))
    assert isinstance(greeted(90, "ruby"), protocol.Welcome), "one has gone"


def test_an_idle_store_does_not_look_at_its_disk_again_and_again() -> None:
    store = Store(ssd=True)
    looked = store.take(1.0, TimerFired(LOOK))
    assert SetTimer(LOOK, LOOK_S) not in looked
    assert SetTimer(LOOK, LOOK_S) in store.take(2.0, Asked(CONNECTION, protocol.Reserve(100, ["k"], [10], 0, 30.0)))
