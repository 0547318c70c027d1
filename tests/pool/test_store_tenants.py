"""Tenants of a store: nobody reads, lists, replaces or removes what is another's, and no tenant has more than its quota."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_harness import SLAB, SSD, TOKEN, Store

from mooncake_zmq.core.actor import Drained, DrainWanted, TimerFired
from mooncake_zmq.kv.object_record import taken_bytes
from mooncake_zmq.pool.node.store_events import Asked, Greeted, Reply, StreamAsked, StreamEnded
from mooncake_zmq.pool.node.tiers import LOOK
from mooncake_zmq.pool.rules.tenants import Reach, StoreTenant, Tenants, check_tenants
from mooncake_zmq.pool.rules.write_back import MAX_STEPS
from mooncake_zmq.store import protocol
from mooncake_zmq.store.codes import Code, Pin
from mooncake_zmq.store.stream_messages import Promote, Recheck

RED = StoreTenant(name="red", namespaces=("red/", "scarlet/"), clients=("ruby", "rose"), readers=("eye",))
BLUE = StoreTenant(name="blue", namespaces=("blue/",), clients=("sky",), readers=("eye",))
INVALID, MISSING = int(Code.INVALID), int(Code.NOT_FOUND)
RECORD = taken_bytes(b"red/0", 1000)


@pytest.fixture
def store():
    made = Store(RED, BLUE)
    for user in ("ruby", "rose", "sky", "eye", "nobody", None):
        made.meet(user)
    assert made.put("ruby", "red/1", "red/2", "scarlet/1") == [0, 0, 0]
    assert made.put("sky", "blue/1") == [0]
    assert made.put(None, "else") == [0]
    return made


def test_whose_a_key_is_its_beginning_tells():
    tenants = Tenants((RED, BLUE))
    assert [tenants.of(key) for key in ("red/", "scarlet/x", "blue/1", "red", "", "xred/", "Red/")] == [1, 1, 2, 0, 0, 0, 0]
    assert tenants.reach_of("ruby") == Reach(("red/", "scarlet/"), ("red/", "scarlet/"))
    assert tenants.reach_of("eye") == Reach(("red/", "scarlet/", "blue/"), ())
    assert tenants.reach_of("nobody") == tenants.reach_of("") == Reach((), ())
    assert tenants.reach_of(None) is None
    assert Tenants(()).reach_of("ruby") is None


@pytest.mark.parametrize(
    ("tenants", "told"),
    [
        ((RED, StoreTenant(name="x", namespaces=("red/a",))), "is within 'red/'"),
        ((RED, StoreTenant(name="x", namespaces=("red/",))), "is within 'red/'"),
        ((RED, StoreTenant(name="red", namespaces=("other",))), "red is there twice"),
        (tuple(StoreTenant(name=f"t{i}", namespaces=(f"n{i}/",)) for i in range(65)), "more than 64"),
    ],
)
def test_tenants_of_whom_it_is_not_certain_whose_a_key_is_are_refused(tenants, told):
    with pytest.raises(ValueError, match=told):
        check_tenants(tenants)


@pytest.mark.parametrize(
    "wrong", [{"name": "Red"}, {"clients": ("a b",)}, {"namespaces": ()}, {"namespaces": ("",)}, {"dram_bytes": -1}]
)
def test_a_tenant_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="tenants: "):
        StoreTenant(**{"name": "x", "namespaces": ("x/",), **wrong})


def test_what_is_anothers_looks_as_if_it_were_not_there(store):
    everything = ["red/1", "scarlet/1", "blue/1", "else", "none"]
    seen = {"ruby": "11000", "rose": "11000", "sky": "00100", "eye": "11100", "nobody": "00000", None: "11110"}
    for user, there in seen.items():
        found = [there[at] == "1" for at in range(5)]
        assert store.ask(user, protocol.Exist(next(store.ids), everything)).codes == bytes(found)
        sizes = store.ask(user, protocol.SizesOf(next(store.ids), everything)).numbers
        assert sizes == [1000 if each else MISSING for each in found]
        assert store.get(user, *everything) == [1000 if each else 0 for each in found]
        listed = store.ask(user, protocol.ListKeys(next(store.ids), 0, 1024)).keys
        assert sorted(listed) == sorted(
            key
            for key in ("red/1", "red/2", "scarlet/1", "blue/1", "else")
            if key[:3] in {each[:3] for each, is_there in zip(everything, found, strict=True) if is_there}
        )


@pytest.mark.parametrize("pins", [Pin.NONE, Pin.UPSERT])
def test_nobody_puts_or_replaces_what_is_anothers(store, pins):
    for user in ("sky", "eye", "nobody"):
        assert store.put(user, "red/1", "red/new", "else", "other", pins=pins) == [INVALID] * 4
    assert store.put("sky", "red/new", "blue/new", pins=pins) == [INVALID, 0]
    assert store.get(None, "red/1", "red/new", "blue/new", "else", "other") == [1000, 0, 1000, 1000, 0]


def test_nobody_removes_what_is_anothers(store):
    for user in ("sky", "eye", "nobody"):
        removed = store.ask(user, protocol.Remove(next(store.ids), ["red/1", "else", "none"]))
        assert removed.numbers == [INVALID] * 3
    assert store.ask("eye", protocol.RemoveAll(next(store.ids))).numbers == [0]
    assert store.ask("nobody", protocol.RemoveAll(next(store.ids))).numbers == [0]
    assert store.ask("ruby", protocol.Remove(next(store.ids), ["red/2", "red/none"])).numbers == [0, MISSING]
    assert store.ask("rose", protocol.RemoveAll(next(store.ids))).numbers == [2]
    assert store.get(None, "red/1", "scarlet/1", "blue/1", "else") == [0, 0, 1000, 1000]


class Unseen(dict):
    def __iter__(self):
        raise AssertionError("looked through")


def test_for_who_may_use_nothing_nothing_is_looked_through(store):
    store.node.check = lambda: None
    store.node.objects.by_key = Unseen(store.node.objects.by_key)
    store.node.objects.keys = Unseen().__iter__
    for user in ("eye", "nobody"):
        assert store.ask(user, protocol.RemoveAll(next(store.ids))).numbers == [0]
    listed = store.ask("nobody", protocol.ListKeys(next(store.ids), 0, 1024))
    assert (listed.keys, listed.cursor) == ([], 0)


@pytest.mark.parametrize("ssd", [False, True])
def test_to_remove_all_looks_at_ones_own_alone(ssd):
    store = Store(RED, BLUE, ssd=ssd)
    assert store.put("ruby", "red/1", "scarlet/1") == [0, 0]
    assert store.put("sky", "blue/1") == [0]
    if ssd:
        store.look()
        assert sorted(store.log.by_key) == ["blue/1", "red/1", "scarlet/1"]
    store.node.check = lambda: None
    store.node.objects.by_key = Unseen(store.node.objects.by_key)
    if ssd:
        store.log.by_key = store.log.readable = Unseen(store.log.by_key)
    assert [store.ask("ruby", protocol.RemoveAll(next(store.ids))).numbers for _ in range(2)] == [[2], [0]]
    assert [store.ask("sky", protocol.RemoveAll(next(store.ids))).numbers for _ in range(2)] == [[1], [0]]


def test_clients_with_one_key_share_its_leases(store):
    store.node.objects.settings = replace(store.node.objects.settings, max_leases_per_client=3)

    def lease(name):
        connection = b"c" + name.ljust(16, b"_") + b"1234"
        hello = protocol.Hello(next(store.ids), protocol.PROTOCOL_VERSION, "", False)
        store.take(Greeted(connection, hello, "path", False, TOKEN, "s", "ruby"))
        asked = protocol.Lease(next(store.ids), ["red/1"], 5.0)
        (told,) = [each.reply for each in store.take(Asked(connection, asked, "ruby")) if isinstance(each, Reply)]
        return told.sizes

    assert [lease(b"r%d" % number) for number in range(5)] == [[1000]] * 3 + [[0]] * 2


def test_who_may_not_use_all_does_not_map_the_memory(store):
    welcome = store.meet("ruby", shared=True)
    assert (welcome.path, welcome.shared) == ("", False)
    lease = store.ask("ruby", protocol.Lease(next(store.ids), ["red/1", "blue/1"], 5.0))
    reserve = store.ask("ruby", protocol.Reserve(next(store.ids), ["red/9"], [10], 0, 5.0))
    assert lease == protocol.Leased(lease.id, [1000, 0], *[[0, 0]] * 4), "its own stay where they are, wherever that is"
    assert reserve == protocol.Codes(reserve.id, b"")
    found = store.node.objects.entries.find("blue/1")
    store.ask("ruby", protocol.ReportCorrupt([found.entry], [found.generation]))
    assert store.get("sky", "blue/1") == [1000]
    assert store.meet(None, shared=True).path == "path"


def test_who_a_client_is_its_connections_key_tells_and_not_the_client(store):
    request = protocol.Exist(next(store.ids), ["blue/1"])
    for event in (
        Asked(store.connection("sky"), request, "ruby"),
        Asked(store.connection("sky"), request, None),
        Greeted(store.connection("sky"), protocol.Hello(9, protocol.PROTOCOL_VERSION, "", False), "", False, b"", "", "ruby"),
    ):
        (effect,) = store.take(event)
        assert isinstance(effect.reply, protocol.Stranger)
    assert store.ask("sky", request).codes == b"\1"


def test_what_is_on_disk_is_as_much_its_tenants_own():
    store = Store(RED, BLUE, on_disk=("red/1", "blue/1", "else"))
    for user in ("ruby", "sky", None):
        store.meet(user)
    keys = ["red/1", "blue/1", "else"]
    assert store.ask("ruby", protocol.Exist(next(store.ids), keys)).codes == b"\1\0\0"
    listed, cursor = [], 0
    while True:
        page = store.ask("ruby", protocol.ListKeys(next(store.ids), cursor, 1024))
        listed += page.keys
        if not (cursor := page.cursor):
            break
    assert listed == ["red/1"]
    store.take(StreamAsked(store.names["ruby"], Promote(keys, [])))
    assert [value.key for start in store.works for value in start.work.values] == ["red/1"]
    store.works.clear()
    assert store.ask("sky", protocol.RemoveAll(next(store.ids))).numbers == [1]
    assert list(store.log.by_key) == ["red/1", "else"]


# --- quotas


def limited(dram=0, ssd=0):
    return StoreTenant(name="red", namespaces=("red/",), clients=("ruby",), dram_bytes=dram, ssd_bytes=ssd)


def held(store, tenant="red", tier=""):
    return store.node.gauges()[f"{tier}tenant_bytes[tenant={tenant}]"]


def test_over_its_quota_a_tenants_own_coldest_values_make_room():
    store = Store(limited(dram=5 * 1024), BLUE)
    assert store.put("sky", "blue/1") == [0]
    for number in range(4):
        store.put("ruby", f"red/{number}")
    store.get("ruby", "red/0")
    assert store.put("ruby", "red/4", "red/5") == [0, 0]
    assert held(store) <= 5 * 1024
    sizes = store.get("ruby", *(f"red/{number}" for number in range(6)))
    assert sizes[0] == sizes[4] == sizes[5] == 1000
    assert sizes[1] == 0
    assert store.get("sky", "blue/1") == [1000]
    assert store.node.counts["evicted_over_quota"] > 0


@pytest.mark.parametrize("pins", [Pin.NONE, Pin.HARD])
def test_a_tenant_within_its_quota_is_within_its_share_of_the_rows(pins):
    share = StoreTenant(name="blue", namespaces=("blue/",), clients=("sky",), dram_bytes=6 * SLAB)
    store = Store(limited(dram=2 * SLAB), share, max_objects=64)  # of 8 slabs: 16 KiB a row
    assert store.put("sky", *(f"blue/{number}" for number in range(48))) == [0] * 48
    for number in range(100):
        store.put("ruby", f"red/{number}", size=1, pins=pins)
    assert sum(store.get("sky", *(f"blue/{number}" for number in range(48)))) == 48 * 1000
    assert len(store.node.objects.by_key) == 64
    assert held(store) == 2 * SLAB
    assert store.put("ruby", "red/too large", size=1 + SLAB, pins=pins) == [INVALID]


def test_where_all_of_its_own_is_held_a_tenant_gets_no_room_and_others_do():
    store = Store(limited(dram=2 * 1152), BLUE)
    assert store.put("ruby", "red/1", "red/2", pins=Pin.HARD) == [0, 0]
    assert store.put("ruby", "red/3", "red/4") == [int(Code.NO_ROOM)] * 2
    assert store.put("sky", *(f"blue/{number}" for number in range(20))) == [0] * 20
    assert store.put("ruby", "red/large", size=4 * 1024) == [int(Code.NO_ROOM)]
    assert store.get("ruby", "red/1", "red/2") == [1000, 1000]


def test_soft_pins_of_a_tenant_go_after_the_rest():
    store = Store(limited(dram=3 * 1152))
    store.put("ruby", "red/soft", pins=Pin.SOFT)
    for number in range(1, 4):
        store.put("ruby", f"red/{number}")
    assert store.get("ruby", "red/soft", "red/1", "red/3") == [1000, 0, 1000]


def test_what_is_being_written_counts_and_what_is_given_up_does_not():
    store = Store(limited(dram=2 * 1152))
    store.meet("ruby")
    objects = store.node.objects
    assert [grant.code for grant in objects.puts.reserve(0.0, b"x", 1, ["red/1", "red/2", "red/3"], [1000] * 3, ttl_s=5)] == [
        Code.OK,
        Code.OK,
        Code.NO_ROOM,
    ]
    objects.puts.commit(0.0, b"x", 1, [], [])
    assert held(store) == 0
    assert store.put("ruby", "red/1", "red/2") == [0, 0]


def test_over_its_quota_on_disk_a_tenant_loses_what_memory_does_not_have_and_nobody_else_anything():
    store = Store(limited(ssd=3 * RECORD), BLUE, on_disk=("red/a", "red/b", "red/c", "blue/a", "else"))
    assert store.put("ruby", "red/d") == [0]
    assert store.put("sky", "blue/b") == [0]
    for _ in range(3):
        store.look()
    assert held(store, tier="ssd_") == 3 * RECORD
    assert sorted(store.log.by_key) == ["blue/a", "blue/b", "else", "red/b", "red/c", "red/d"]
    assert store.node.counts["ssd_outgrown"] == 1


def test_keys_and_headers_count_on_disk():
    store = Store(limited(ssd=20_000), ssd=True)
    for number in range(100):
        store.put("ruby", f"red/{number}".ljust(1000, "x"), size=1)
    store.look()
    assert len(store.log.by_key) == 20_000 // taken_bytes(bytes(1000), 1) == 18


def test_a_tenant_within_its_quota_on_disk_is_within_its_share_of_the_rows_there():
    store = Store(limited(ssd=16 * SLAB), BLUE, ssd=replace(SSD, max_objects=256), max_objects=128)
    assert store.put("sky", *(f"blue/{number}" for number in range(60))) == [0] * 60
    assert store.put("ruby", *(f"red/{number}" for number in range(68)), size=1) == [0] * 68
    for _ in range(4):
        store.look()
    assert len(store.log.by_key) == 60 + 64, "a quarter of the disk, a quarter of its rows"


def test_what_has_no_room_on_disk_stays_in_memory_alone_and_is_not_written_again_and_again():
    store = Store(limited(ssd=5 * RECORD // 2), BLUE, ssd=True)
    store.put("ruby", *(f"red/{number}" for number in range(4)))
    store.put("ruby", "red/large", size=3000)
    store.put("sky", "blue/1")
    for _ in range(4):
        store.look()
    demoted = store.node.counts["demoted"]
    for _ in range(4):
        store.look()
    assert store.node.counts["demoted"] == demoted == 3
    assert held(store, tier="ssd_") == 2 * RECORD
    assert "blue/1" in store.log.by_key
    assert store.get("ruby", "red/3", "red/large") == [1000, 3000]


def test_within_its_quota_a_tenant_loses_nothing_on_disk_however_fast_others_write():
    ssd = replace(SSD, bytes=24 * SLAB, max_objects=1 << 10)
    assert ssd.promised_bytes(SLAB) >= 8 * SLAB
    store = Store(limited(ssd=8 * SLAB), BLUE, ssd=ssd, slabs=4, max_objects=256)
    keys = [f"red/{number}" for number in range(7)]
    for key in keys:
        store.put("ruby", key, size=SLAB - 5000)
        store.put("sky", f"blue/beside {key}", size=100)
        store.look()
    for number in range(200):
        store.put("sky", f"blue/{number}", size=SLAB - 5000 if number % 3 else 100)
        store.look()
    assert [key for key in keys if key not in store.log.by_key] == []
    counts = store.node.counts
    assert counts["ssd_segments_dropped"] > 10
    assert counts["ssd_dropped_in_quota"] == 0
    assert 0 < counts["ssd_moved"] < 100


def test_what_more_than_can_be_promised_is_lost_is_counted():
    store = Store(limited(ssd=20 * SLAB), BLUE, ssd=replace(SSD, bytes=24 * SLAB), slabs=4, max_objects=256)
    for number in range(60):
        store.put("ruby", f"red/{number}", size=SLAB - 5000)
        store.put("sky", f"blue/{number}", size=SLAB - 5000)
        store.look()
    assert store.node.counts["ssd_dropped_in_quota"] > 0


def test_where_quotas_promise_every_row_of_the_disk_writing_goes_on():
    store = Store(limited(ssd=SSD.bytes), BLUE, ssd=replace(SSD, max_objects=16), max_objects=8)
    for number in range(40):
        assert store.put("ruby", f"red/{number}", size=10) == [0]
        store.look()
    store.put("sky", "blue/1")
    store.look()
    assert {"red/39", "blue/1"} <= store.log.by_key.keys()
    assert len(store.log.by_key) <= 16
    assert store.node.counts["ssd_dropped_in_quota"] > 0


def test_a_tenant_without_room_on_disk_keeps_nobody_else_from_it():
    store = Store(limited(ssd=5 * RECORD // 2), BLUE, ssd=True, slabs=16)
    store.node.check = lambda: None
    for number in range(MAX_STEPS + 100):
        assert store.put("ruby", f"red/{number}", size=600) == [0]
    for number in range(20):
        assert store.put("sky", f"blue/{number}", size=600) == [0]
    for _ in range(4):
        store.look()
    assert sum(key.startswith("blue/") for key in store.log.by_key) == 20
    del store.node.check
    store.node.check()
    drain(store)
    gauges = store.node.gauges()
    assert gauges["ssd_unsaved_bytes"] == gauges["ssd_without_room_bytes"] > 600 * MAX_STEPS, "nothing else is left"


@pytest.mark.parametrize("goes", ["from the store", "from memory"])
def test_what_had_no_room_on_disk_is_written_once_there_is_some(goes):
    store = Store(limited(ssd=5 * RECORD // 2), ssd=True)
    store.put("ruby", "red/0", "red/1")
    store.look()
    store.put("ruby", "red/2", "red/3")
    store.look()
    assert sorted(store.log.by_key) == ["red/0", "red/1"]
    if goes == "from the store":
        store.ask("ruby", protocol.Remove(next(store.ids), ["red/0"]))
    else:
        store.node.objects.entries.evict(store.node.objects.by_key["red/0"])
    store.look()
    assert sorted(store.log.by_key) == ["red/1", "red/2"]


def test_a_drain_is_over_when_all_is_saved_however_many_values_it_looks_at():
    store = Store(ssd=True, slabs=16)
    store.node.check = lambda: None
    keys = [f"red/{number}" for number in range(2 * MAX_STEPS + 100)]
    store.put(None, *keys, size=10)
    while store.node.objects.demotion.unsaved_bytes:
        store.look()
    for key in keys:
        store.node.objects.entries.find(key)
    store.put(None, "red/last")
    drain(store)
    assert store.node.objects.demotion.unsaved_bytes == 0


def drain(store):
    """Until it says that it is over."""
    effects = store.take(DrainWanted()) + store.settle()
    for _ in range(100):
        if any(isinstance(effect, Drained) for effect in effects):
            return
        effects = store.take(TimerFired(LOOK)) + store.settle()
    raise AssertionError("it goes on")


def test_a_quota_that_became_smaller_holds_after_the_restart():
    store = Store(limited(ssd=2 * RECORD), on_disk=tuple(f"red/{number}" for number in range(5)))
    store.look()
    assert held(store, tier="ssd_") == 2 * RECORD
    assert sorted(store.log.by_key) == ["red/3", "red/4"]


def test_a_disk_that_cannot_forget_keeps_what_it_has_and_takes_no_more():
    store = Store(limited(ssd=3 * RECORD), on_disk=("red/a", "red/b", "red/c"))
    store.full = True
    store.put("ruby", "red/d")
    store.look()
    assert sorted(store.log.by_key) == ["red/a", "red/b", "red/c"]
    assert not store.node.gauges()["ssd_writable"]


KEYS = [f"{space}{number}" for space in ("red/", "blue/", "x") for number in range(4)]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ruby", "sky", "eye", None]),
            st.sampled_from(["put", "upsert", "hard", "get", "remove", "look"]),
            st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
            st.sampled_from([1, 900, 5000, 40_000]),
        ),
        max_size=40,
    )
)
def test_whatever_is_asked_quotas_and_namespaces_hold(steps):
    red = StoreTenant(
        name="red", namespaces=("red/",), clients=("ruby",), readers=("eye",), dram_bytes=50_000, ssd_bytes=60_000
    )
    store = Store(red, BLUE, ssd=True, slabs=2)
    for user in ("ruby", "sky", "eye", None):
        store.meet(user)
    mine = {"ruby": "red/", "sky": "blue/", "eye": "?", None: ""}
    pins = {"put": Pin.NONE, "upsert": Pin.UPSERT, "hard": Pin.HARD}
    for user, what, keys, size in steps:
        if what in pins:
            codes = store.put(user, *keys, size=size, pins=pins[what])
            assert all((code == INVALID) == (not key.startswith(mine[user])) for key, code in zip(keys, codes, strict=True))
        elif what == "get":  # and goes away amid it
            assert store.take(StreamAsked(store.names[user], Recheck(keys)))
            store.take(StreamEnded(store.names.pop(user)))
            store.meet(user)
        elif what == "remove":
            store.ask(user, protocol.Remove(next(store.ids), keys))
        else:
            store.look()
        store.node.check()
        assert held(store) <= 50_000
        assert held(store, tier="ssd_") <= 60_000
