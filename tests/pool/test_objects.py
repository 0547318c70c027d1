"""The object pool: every defined answer, and a stateful test of it against a model that holds real bytes."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.rules.objects import Objects
from mooncake_zmq.store.codes import Code, Pin

SLAB = 1 << 16
ME, OTHER = b"me", b"other"


def make(slabs=2, **changes):
    return Objects(ObjectSettings(object_bytes=slabs * SLAB, slab_bytes=SLAB, max_client_share=1.0, **changes))


def reserve(objects, key, size=100, *, client=ME, put_id=1, now=0.0, pins=Pin.NONE, ttl_s=10.0):
    return objects.puts.reserve(now, client, put_id, [key], [size], pins=pins, ttl_s=ttl_s)[0]


_ids = iter(range(1000, 1 << 60))


def put(objects, key, size=100, **named):
    put_id = next(_ids)
    grant = reserve(objects, key, size, put_id=put_id, **named)
    if grant.code is not Code.OK:
        return grant.code
    return objects.puts.commit(0.0, named.get("client", ME), put_id, [0], [7])[0]


def test_nothing_is_readable_before_its_commit():
    objects = make()
    grant = reserve(objects, "k")
    assert grant.generation % 2 == 1
    assert objects.entries.find("k") is None
    assert objects.lease(0, OTHER, 1, ["k"], 5) == [None]
    assert objects.puts.commit(0, ME, 1, [0], [9]) == [Code.OK]
    found = objects.entries.find("k")
    assert (found.offset, found.size, found.generation, found.checksum) == (grant.offset, 100, grant.generation + 1, 9)


def test_an_aborted_put_is_never_readable_and_its_cell_comes_back():
    objects = make()
    reserve(objects, "k")
    assert objects.puts.commit(0, ME, 1, [], []) == [Code.OK]
    assert objects.entries.find("k") is None
    assert objects.gauges()["free_slabs"] == 2
    assert put(objects, "k") is Code.OK


def test_the_second_writer_of_a_key_is_told_and_writes_nothing():
    objects = make()
    reserve(objects, "k", 100)
    assert reserve(objects, "k", 100, client=OTHER).code is Code.EXISTS
    objects.puts.commit(0, ME, 1, [0], [1])
    assert put(objects, "k", 300) is Code.EXISTS
    assert objects.size_of("k") == 100
    assert objects.counts["dedup_hits"] == 2
    assert objects.counts["dedup_bytes_saved"] == 400


def test_a_repeated_reserve_gets_the_same_cells_and_a_repeated_commit_finds_nothing():
    objects = make()
    assert reserve(objects, "k") == reserve(objects, "k")
    assert objects.puts.commit(0, ME, 1, [0], [1]) == [Code.OK]
    assert objects.puts.commit(0, ME, 1, [0], [1]) is None
    assert objects.gauges()["objects"] == 1


def test_an_upsert_replaces_at_its_commit_and_readers_of_the_old_value_finish():
    objects = make()
    put(objects, "k", 100)
    (old,) = objects.lease(0, OTHER, 1, ["k"], 5)
    reserve(objects, "k", 200, pins=Pin.UPSERT)
    assert objects.size_of("k") == 100
    objects.puts.commit(0, ME, 1, [0], [2])
    assert objects.size_of("k") == 200
    assert objects.generation[old.entry] == old.generation, "still leased, still unchanged"
    objects.holders.release(OTHER, 1)
    assert objects.generation[old.entry] != old.generation
    objects.check()


@pytest.mark.parametrize(
    ("key", "size"), [("", 1), ("k" * 1025, 1), ("é" * 513, 1), ("k", 0), ("k", SLAB + 1)], ids=lambda v: str(v)[:8]
)
def test_empty_and_oversize_keys_and_values_are_invalid(key, size):
    assert put(make(), key, size) is Code.INVALID


def test_a_full_pool_evicts_the_least_recently_used_and_never_what_is_leased():
    objects = make(slabs=1)
    for name in "abcd":
        assert put(objects, name, SLAB // 4) is Code.OK
    objects.lease(0, OTHER, 1, ["a"], 5)
    objects.entries.find("b")
    assert put(objects, "e", SLAB // 4) is Code.OK
    assert objects.entries.find("c") is None
    assert all(objects.entries.find(name) for name in "abde")


def test_a_put_of_any_size_into_a_full_pool_evicts_rather_than_fails():
    objects = make(slabs=3)
    for number, size in enumerate([64, 1000, 5000, 30000, SLAB, 70, 9000, 64, 20000, SLAB, 3000] * 20):
        assert put(objects, f"{number}", size) is Code.OK
        objects.check()
    assert objects.counts["units_taken_over"] > 0


def test_the_coldest_slab_is_taken_over_although_the_class_has_an_object_of_its_own():
    objects = make(slabs=2)
    put(objects, "cold", 100)
    put(objects, "hot", SLAB)
    assert put(objects, "new", SLAB) is Code.OK
    assert objects.entries.find("cold") is None
    assert objects.entries.find("hot")


def test_classes_of_small_values_share_one_slab():
    objects = make(slabs=1)
    names = [f"{size}/{number}" for size in range(64, 513, 64) for number in range(5)]
    for name in names:
        assert put(objects, name, int(name.split("/")[0])) is Code.OK
    assert sorted(objects.by_key) == sorted(names)
    assert put(objects, "whole", SLAB) is Code.OK
    assert list(objects.by_key) == ["whole"]
    objects.check()


def test_all_is_removed_in_steps_of_the_limit():
    objects = make()
    for number in range(5):
        put(objects, f"{number}")
    steps = []
    while keys := objects.some_keys(2):
        steps.append(len(keys))
        assert all(objects.remove(key) for key in keys)
    assert steps == [2, 2, 1]


def test_soft_pins_go_last_and_hard_pins_never():
    objects = make(slabs=1)
    put(objects, "soft", SLAB // 2, pins=Pin.SOFT)
    put(objects, "plain", SLAB // 2)
    objects.entries.find("plain")
    assert put(objects, "hard", SLAB // 2, pins=Pin.HARD) is Code.OK
    assert objects.entries.find("plain") is None
    assert put(objects, "next", SLAB // 2) is Code.OK
    assert objects.entries.find("soft") is None
    assert put(objects, "whole", SLAB) is Code.NO_ROOM
    assert objects.entries.find("hard")
    assert objects.remove("hard")
    assert put(objects, "whole", SLAB) is Code.OK


def test_past_max_objects_the_oldest_of_all_classes_goes():
    objects = make(slabs=4, max_objects=3)
    for number, size in enumerate([64, 5000, 900, 64]):
        assert put(objects, f"{number}", size) is Code.OK
    assert sorted(objects.by_key) == ["1", "2", "3"]


def test_a_removed_object_lives_until_its_last_reader_is_done():
    objects = make()
    put(objects, "k")
    (found,) = objects.lease(0, OTHER, 1, ["k"], 5)
    assert objects.remove("k")
    assert not objects.remove("k")
    assert objects.generation[found.entry] == found.generation
    objects.holders.release(OTHER, 1)
    assert objects.gauges()["free_slabs"] == 2


def test_an_expired_lease_protects_nothing():
    objects = make()
    put(objects, "k")
    objects.lease(0, OTHER, 1, ["k"], 5)
    objects.expire(5.1)
    assert objects.gauges()["leases"] == 0
    objects.holders.release(OTHER, 1)
    objects.check()


def test_a_late_writer_keeps_its_cell_in_quarantine_until_it_answers():
    objects = make(slabs=1)
    reserve(objects, "k", SLAB)
    objects.expire(11)
    assert objects.holders.busy() == {ME}
    assert objects.gauges()["quarantined_objects"] == 1
    assert put(objects, "other", 64, client=OTHER) is Code.NO_ROOM
    assert objects.puts.commit(12, ME, 1, [0], [1]) == [Code.EXPIRED]
    assert objects.entries.find("k") is None
    assert put(objects, "other", 64) is Code.OK


def test_burying_a_client_ends_its_leases_and_frees_its_half_written_and_quarantined_cells():
    objects = make()
    put(objects, "k", client=OTHER)
    objects.lease(0, ME, 1, ["k"], 5)
    reserve(objects, "a", put_id=2, ttl_s=1)
    objects.expire(2)
    reserve(objects, "b", put_id=3, now=2)
    objects.bury(ME)
    gauges = objects.gauges()
    assert not any(gauges[name] for name in ("leases", "puts", "writing_objects", "quarantined_objects", "reserved_bytes"))
    objects.check()


def test_one_client_cannot_reserve_more_than_its_share():
    objects = Objects(ObjectSettings(object_bytes=4 * SLAB, slab_bytes=SLAB, max_client_share=0.5))
    codes = [reserve(objects, f"{i}", SLAB, put_id=i).code for i in range(3)]
    assert codes == [Code.OK, Code.OK, Code.NO_ROOM]
    assert put(objects, "x", SLAB, client=OTHER) is Code.OK


def test_leases_and_puts_per_client_are_limited():
    objects = make(max_leases_per_client=1, max_puts_per_client=1)
    put(objects, "k")
    assert objects.lease(0, ME, 1, ["k"], 5) != [None]
    assert objects.lease(0, ME, 2, ["k"], 5) == [None]
    assert reserve(objects, "a", put_id=1).code is Code.OK
    assert reserve(objects, "b", put_id=2).code is Code.NO_ROOM


def test_clients_with_one_key_share_its_limits_and_others_have_their_own():
    objects = make(max_leases_per_client=2, max_puts_per_client=2)
    put(objects, "k", client=b"first")
    names = [b"a", b"b", b"c"]
    for name in names:
        objects.holders.join(name, "red")
    objects.holders.join(b"x", "blue")
    found = [objects.lease(0, name, 1, ["k"], 5) != [None] for name in (*names, b"x", b"keyless", b"as keyless")]
    assert found == [True, True, False, True, True, True]
    codes = [reserve(objects, f"{name}", client=name).code for name in (*names, b"x", b"keyless")]
    assert codes == [Code.OK, Code.OK, Code.NO_ROOM, Code.OK, Code.OK]
    objects.bury(b"a")
    assert objects.lease(0, b"c", 2, ["k"], 5) != [None], "who is gone holds nothing"
    assert reserve(objects, "c", client=b"c").code is Code.OK
    objects.check()


def test_clients_with_one_key_share_its_part_of_the_memory():
    objects = Objects(ObjectSettings(object_bytes=4 * SLAB, slab_bytes=SLAB, max_client_share=0.5))
    for number in range(3):
        objects.holders.join(b"%d" % number, "red")
    codes = [reserve(objects, f"{i}", SLAB, client=b"%d" % i).code for i in range(3)]
    assert codes == [Code.OK, Code.OK, Code.NO_ROOM]
    objects.expire(20)
    assert reserve(objects, "x", SLAB, client=b"2").code is Code.NO_ROOM, "quarantine counts"
    assert objects.puts.commit(20, b"0", 1, [], []) == [Code.EXPIRED]
    assert reserve(objects, "x", SLAB, client=b"2", now=20).code is Code.OK
    objects.check()


class Unseen(dict):
    """May be looked up in, but not looked through."""

    def looked_through(self):
        raise AssertionError("looked through")

    __iter__ = keys = values = items = looked_through


def test_what_ends_is_found_without_a_look_at_what_does_not():
    objects = make()
    put(objects, "k")
    for number in range(100):
        objects.lease(0, b"%d" % number, 1, ["k"], 30)
        objects.lease(0, b"stream", number, ["k"], None)
    objects.lease(0, ME, 1, ["k"], 1)
    reserve(objects, "a", ttl_s=2.0)
    objects.holders.clients = Unseen(objects.holders.clients)
    for client in (b"1", ME):
        objects.holders.clients[client].leases = Unseen(objects.holders.clients[client].leases)
    assert objects.holders.ends.next_at() == 1
    objects.expire(1.5)
    assert (objects.counts["leases_expired"], objects.counts["puts_expired"], objects.holders.ends.next_at()) == (1, 0, 2)
    objects.expire(2.5)
    assert (objects.counts["leases_expired"], objects.counts["puts_expired"], objects.holders.ends.next_at()) == (1, 1, 30)
    objects.expire(30.5)
    assert objects.counts["leases_expired"] == 101
    assert objects.holders.ends.next_at() == math.inf, "a stream's leases do not end by time"


def test_a_copy_reported_corrupt_is_gone_but_a_later_copy_is_not():
    objects = make()
    put(objects, "k")
    found = objects.entries.find("k")
    objects.entries.report_corrupt(found.entry, found.generation - 2)
    assert objects.entries.find("k")
    objects.entries.report_corrupt(found.entry, found.generation)
    assert objects.entries.find("k") is None
    objects.entries.report_corrupt(found.entry, found.generation)
    objects.entries.report_corrupt(1 << 40, 0)
    assert objects.counts["corrupt"] == 1


def test_keys_are_listed_page_by_page_without_loss():
    objects = make()
    names = {f"k{i}" for i in range(50)}
    for name in names:
        put(objects, name)
    cursor, seen = 0, []
    while True:
        page, cursor = objects.keys(cursor, 7)
        seen += page
        if cursor == 0:
            break
    assert sorted(seen) == sorted(names)


KEYS = st.sampled_from([f"key{i}" for i in range(6)])
CLIENTS = st.sampled_from([ME, OTHER])
KEY_LISTS = st.lists(KEYS, min_size=1, max_size=3)
SIZES = st.sampled_from([1, 64, 65, 900, 5000, 30000, SLAB // 2, SLAB])


class ObjectsMachine(RuleBasedStateMachine):
    """The model: what each live writer wrote where and what each reader was promised; a memory that shows any overlap."""

    def __init__(self):
        super().__init__()
        self.objects = make(slabs=3, max_objects=12)
        self.memory = {}
        self.now = 0.0
        self.next_id = 1
        self.puts = {}
        self.leases = {}
        self.values = {}

    @rule(client=CLIENTS, keys=KEY_LISTS, size=SIZES, pins=st.sampled_from([0, 0, 1, 4]))
    def reserve(self, client, keys, size, pins):
        put_id, self.next_id = self.next_id, self.next_id + 1
        sizes = [size] * len(keys)
        grants = self.objects.puts.reserve(self.now, client, put_id, keys, sizes, pins=Pin(pins), ttl_s=5)
        mine = {}
        for index, (key, grant) in enumerate(zip(keys, grants, strict=True)):
            if grant.code is Code.OK:
                mine[index] = (key, grant)
                stamp = (put_id, index)
                for cell in range(grant.offset, grant.offset + size, 64):
                    self.memory[cell] = stamp
        if mine:
            self.puts[put_id] = (client, mine, size, self.now + 5, Pin(pins))

    @rule(data=st.data(), abort=st.booleans())
    def commit(self, data, abort):
        if not self.puts:
            return
        put_id = data.draw(st.sampled_from(sorted(self.puts)))
        client, mine, size, expires, pins = self.puts.pop(put_id)
        indexes = [] if abort else list(mine)
        codes = self.objects.puts.commit(self.now, client, put_id, indexes, [put_id] * len(indexes))
        for index in indexes:
            key, grant = mine[index]
            if self.now > expires:
                assert codes[index] is Code.EXPIRED
            elif codes[index] is Code.OK:
                self.values[key] = (put_id, index)
            else:
                assert codes[index] is Code.EXISTS
                assert not pins & Pin.UPSERT

    @rule(client=CLIENTS, keys=KEY_LISTS)
    def lease(self, client, keys):
        lease_id, self.next_id = self.next_id, self.next_id + 1
        found = self.objects.lease(self.now, client, lease_id, keys, 5)
        granted = [(self.values[key], one) for key, one in zip(keys, found, strict=True) if one]
        if granted:
            self.leases[lease_id] = (client, granted, self.now + 5)

    @rule(data=st.data())
    def release(self, data):
        if self.leases:
            lease_id = data.draw(st.sampled_from(sorted(self.leases)))
            self.objects.holders.release(self.leases.pop(lease_id)[0], lease_id)

    @rule(key=KEYS)
    def remove(self, key):
        present = key in self.values
        assert self.objects.remove(key) == present
        self.values.pop(key, None)

    @rule(step=st.sampled_from([1.0, 3.0, 6.0]))
    def time_goes_on(self, step):
        self.now += step
        self.objects.expire(self.now)
        self.leases = {i: lease for i, lease in self.leases.items() if lease[2] >= self.now}

    @rule(client=CLIENTS)
    def die(self, client):
        self.objects.bury(client)
        self.puts = {i: put for i, put in self.puts.items() if put[0] != client}
        self.leases = {i: lease for i, lease in self.leases.items() if lease[0] != client}

    def evicted(self):
        return [key for key in self.values if key not in self.objects.by_key]

    @invariant()
    def readers_see_what_was_committed(self):
        self.objects.check()
        for key in self.evicted():
            del self.values[key]
        assert set(self.objects.by_key) == set(self.values)
        promised = [one for _, granted, _ in self.leases.values() for one in granted]
        promised += [(stamp, self.objects.entries.found(self.objects.by_key[key])) for key, stamp in self.values.items()]
        for stamp, found in promised:
            assert self.objects.generation[found.entry] == found.generation
            assert all(self.memory[cell] == stamp for cell in range(found.offset, found.offset + found.size, 64))

    def teardown(self):
        for client in (ME, OTHER):
            self.objects.bury(client)
        assert all(self.objects.remove(key) for key in self.objects.some_keys(1 << 20))
        self.objects.check()
        gauges = self.objects.gauges()
        assert gauges["free_slabs"] == 3
        assert not any(gauges[name] for name in gauges if name not in ("capacity_bytes", "free_slabs"))


ObjectsMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestObjectsAgainstModel = ObjectsMachine.TestCase
