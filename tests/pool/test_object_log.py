"""The pure half of the store's SSD tier: what stands where, which segment goes, what is written next."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake_zmq.kv.object_record import ObjectRecord
from mooncake_zmq.pool.rules.changes import copies_on_disk, replaced
from mooncake_zmq.pool.rules.object_log import ObjectLog, ObjectSsdSettings
from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.rules.objects import Objects
from mooncake_zmq.pool.rules.tenants import StoreTenant, Tenants
from mooncake_zmq.pool.rules.write_back import WriteBackOrder
from mooncake_zmq.store.codes import Code, Pin

SLAB = 1 << 16
ME = b"me"


@pytest.mark.parametrize(
    "bad", [{"bytes": 1000}, {"ahead": -0.1}, {"ahead": 1.1}, {"threads": 0}, {"threads": 257}, {"max_objects": 0}], ids=str
)
def test_settings_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        ObjectSsdSettings(**bad)


def test_a_tier_must_hold_eight_of_the_largest_values():
    ssd = ObjectSsdSettings(directory="x", bytes=8 * (1 << 20))
    with pytest.raises(ValueError, match=r"objects.ssd.bytes must be at least 8421376"):
        ObjectSettings(slab_bytes=1 << 20, ssd=ssd)
    ObjectSettings(slab_bytes=1 << 20, ssd=ObjectSsdSettings(directory="x", bytes=8421376))
    ObjectSettings(slab_bytes=1 << 20, ssd=ObjectSsdSettings(bytes=8 * (1 << 20)))  # there is none


# --- the log


def make_log(segments=4, **changes):
    """A log that has room for so many segments of 128 KiB beside the newest, which is full; two values in each."""
    log = ObjectLog(ObjectSsdSettings(bytes=1 << 20, **changes))
    for number in range(segments):
        begin(log)
        for name in "ab":
            append(log, f"{name}{number}", 60_000)
    return log


def begin(log):
    log.open(log.new_segment(), 128 << 10)


def append(log, key, size=100, pin=Pin.NONE):
    place = log.place([(key.encode(), size)])
    if place is None:
        return None
    log.take(place)
    record = ObjectRecord(log.next_sequence, place.segment, place.offsets[0], size, 1, int(pin))
    log.add(key, record)
    return record


def test_values_follow_one_another_and_a_full_segment_takes_none():
    log = make_log(1)
    first, second = log.find("a0"), log.find("b0")
    assert (first.segment, first.offset, second.segment) == (1, 0, 1)
    assert 60_000 < second.offset < 65_536
    assert append(log, "c", 20_000) is None
    begin(log)
    assert append(log, "c", 20_000).segment == 2
    log.check()


def test_the_oldest_segment_goes_once_another_one_does_not_fit():
    log = make_log(7)
    assert log.victim() is None
    begin(log)
    assert log.victim() == 1
    assert [[key for key, _, _ in step] for step in log.standing(1)] == [["a0", "b0"]]
    for key in ("a0", "b0"):
        log.remove(key)
    log.close_segment(1)
    assert log.victim() is None
    log.check()


def test_a_segment_in_which_nothing_stands_goes_before_the_oldest():
    log = make_log(8)
    for key in ("a3", "b3"):
        log.remove(key)
    assert log.victim() == 4


def quotas(log, **ssd_bytes):
    """Tenants by the first letter of their keys."""
    tenants = [StoreTenant(name=name, namespaces=(name,), ssd_bytes=quota) for name, quota in ssd_bytes.items()]
    log.divide(Tenants(tenants))
    return log


def test_the_oldest_segment_goes_whose_promised_values_have_room_elsewhere():
    log = quotas(make_log(8), a=1 << 20)
    assert [log.victim(room) for room in (0, 61_439, 61_440, 1 << 20)] == [1, 1, 1, 1], "all have the same"
    assert log.promised_bytes(1) == 61_440, "pages"
    log.remove("a2")
    assert (log.victim(61_439), log.victim(61_440)) == (3, 1)
    assert (log.is_promised("a0"), log.is_promised("b0")) == (True, False)
    log.remove("b2")
    assert log.victim(1 << 20) == 3, "where nothing stands nothing has to move"
    log.check()


def test_without_a_quota_nothing_is_promised():
    log = quotas(make_log(8), a=0)
    assert log.promised_bytes(1) == 0
    assert not log.is_promised("a0")
    log.check()


def test_what_is_pinned_hard_is_promised_once_whoevers_it_is():
    log = make_log(0)
    begin(log)
    for key, pin in (("a", Pin.HARD), ("b", Pin.HARD | Pin.SOFT), ("c", Pin.SOFT)):
        append(log, key, pin=pin)
    assert log.promised_bytes(1) == 2 * 4096
    assert quotas(log, a=1 << 20).promised_bytes(1) == 2 * 4096
    assert [log.is_promised(key) for key in "abc"] == [True, True, False]
    log.check()


def test_a_row_that_served_two_values_of_a_segment_is_told_once():
    log = make_log(0)
    begin(log)
    for key in ("first", "second"):
        append(log, key)
        if key == "first":
            log.remove(key)
    assert [[key for key, _, _ in step] for step in log.standing(1)] == [["second"]]


def test_past_max_objects_the_oldest_segments_go():
    log = make_log(3, max_objects=6)
    assert append(log, "c", 10) is None
    begin(log)
    assert log.victim() == 1


def test_only_what_was_read_since_it_was_written_counts_as_read():
    log = make_log(1)
    log.use("b0")
    ((_, (key, record, used)),) = log.standing(1)
    assert (key, used) == ("b0", True)
    begin(log)
    place = log.place_pages(70_000)
    log.take(place)
    log.moved("b0", record.sequence, place.segment, place.offsets[0])
    assert log.find("b0") == record._replace(segment=2, offset=0)
    assert [step for step in log.standing(2)] == [[("b0", log.find("b0"), False)]]
    assert [key for step in log.standing(1) for key, _, _ in step] == ["a0"]
    log.check()


def test_what_was_replaced_while_it_was_moved_stays_where_it_is():
    log = make_log(1)
    old = log.find("a0")
    log.remove("a0")
    begin(log)
    new = append(log, "a0", 50)
    log.moved("a0", old.sequence, 2, 65_536)
    assert log.find("a0") == new


def test_a_restart_goes_on_behind_the_last_value():
    log = make_log(2)
    append(log, "x", 10)
    rows = [(key, log.record(key)) for key in log.by_key]
    again = ObjectLog(log.settings)
    again.restore({1: 128 << 10, 2: 128 << 10}, rows)
    assert again.by_key.keys() == log.by_key.keys()
    record = append(again, "y", 10)
    assert record.segment == 2
    assert record.offset >= log.record("x").offset + 10
    assert record.sequence > max(row.sequence for _, row in rows)
    again.check()


def test_what_cannot_be_read_is_not_found_but_still_known():
    log = make_log(1)
    log.fail()
    assert log.find("a0") is None
    assert log.size_of("a0") is None
    assert log.keys(0, 100) == ([], 0)
    assert log.record("a0") is not None


# --- the cold end


class WriteBackMachine(RuleBasedStateMachine):
    """The model: a list in the order of use, what of it is saved, and the tenants, by odd and even rows, that have no room."""

    ROWS = range(2, 12)

    def __init__(self):
        super().__init__()
        self.sizes = array("Q", (10 * row for row in range(12)))
        self.cold = WriteBackOrder(12, self.sizes, [row % 2 for row in range(12)])
        self.full = set()
        self.order = []
        self.saved = set()
        self.strayed = set()
        """Had no room when they were looked at, and not used since: their place is wherever what is cold ended."""

    @rule(row=st.sampled_from(ROWS), saved=st.booleans())
    def add_or_use(self, row, saved):
        self.strayed.discard(row)
        if row in self.order:
            self.cold.use(row)
            self.order.remove(row)
        else:
            self.cold.add(row, saved=saved)
            self.saved.discard(row)
            self.saved |= {row} if saved else set()
        self.order.append(row)

    @rule(row=st.sampled_from(ROWS), what=st.sampled_from(["remove", "save", "lapse"]))
    def change(self, row, what):
        if row in self.order:
            if what == "save" and row not in self.cold._order:  # it has no room
                return
            getattr(self.cold, what)(row)
            if what == "remove":
                self.order.remove(row)
                self.strayed.discard(row)
            elif what == "save":
                self.saved.add(row)
            else:
                self.saved.discard(row)

    @rule(tenant=st.integers(0, 1), is_full=st.booleans())
    def room_comes_and_goes(self, tenant, is_full):
        if is_full:
            self.full.add(tenant)
        else:
            self.full.discard(tenant)
            self.cold.look_again(tenant)

    @rule(share=st.integers(0, 900), limit_bytes=st.integers(0, 500), limit=st.integers(1, 12))
    def what_is_due_is_unsaved_and_within_the_limits(self, share, limit_bytes, limit):
        rows = self.cold.unsaved(share, limit_bytes, limit, lambda row: row % 2 in self.full)
        assert not {row % 2 for row in rows} & self.full
        assert len(rows) == len(set(rows)) <= limit
        assert not set(rows) & self.saved
        assert set(rows) <= set(self.order)
        assert len(rows) < 2 or sum(self.sizes[row] for row in rows) <= limit_bytes
        if not rows:
            assert not self.cold.is_unfinished or self.cold.unsaved_bytes
        self.strayed |= {row for row in self.order if row % 2 in self.full and row not in self.saved}
        before, due = sum(self.sizes[row] for row in self.strayed), []
        for row in self.order:
            if row in self.strayed:
                continue
            if before < share and row not in self.saved:
                due.append(row)
            before += self.sizes[row]
        assert bool(rows) >= bool(due), "what is due is told"
        if limit == 12 and limit_bytes >= 500:
            assert set(due) <= set(rows)

    @invariant()
    def it_agrees_with_itself(self):
        self.cold.check(self.order)
        assert self.cold.unsaved_bytes == sum(self.sizes[row] for row in self.order if row not in self.saved)
        assert all(self.cold.is_saved(row) == (row in self.saved) for row in self.order)


WriteBackMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestWriteBackAgainstModel = WriteBackMachine.TestCase


# --- both tiers


def make(slabs=4, ahead=1.0):
    ssd = ObjectSsdSettings(directory="x", bytes=1 << 20, ahead=ahead)
    log = ObjectLog(ssd)
    log.open(log.new_segment(), 1 << 20)
    return Objects(ObjectSettings(object_bytes=slabs * SLAB, slab_bytes=SLAB, max_client_share=1.0, ssd=ssd), log)


_ids = iter(range(1000, 1 << 60))


def put(objects, key, size=100, pins=Pin.NONE):
    put_id = next(_ids)
    (grant,) = objects.puts.reserve(0.0, ME, put_id, [key], [size], pins=pins, ttl_s=10)
    return grant.code if grant.code is not Code.OK else objects.puts.commit(0.0, ME, put_id, [0], [7])[0]


def write(objects, limit=100):
    """What the writer does; the keys written."""
    batch = objects.demotion.unsaved(1 << 30, limit)
    saved = []
    for value, whole in zip(batch, objects.demotion.are_whole(batch), strict=True):
        place = objects.log.place([(value.key.encode(), value.size)])
        objects.log.take(place)
        record = ObjectRecord(objects.log.next_sequence, place.segment, place.offsets[0], value.size, 7, value.pin)
        saved += [(value, record)] if whole else []
    objects.demotion.end_writing(saved)
    objects.check()
    return [value.key for value, _ in saved]


def test_what_was_used_longest_ago_is_written_first():
    objects = make()
    for key in "abc":
        put(objects, key)
    objects.entries.find("a")
    assert write(objects, 2) == ["b", "c"]
    assert write(objects) == ["a"]
    assert write(objects) == []
    assert objects.demotion.unsaved_bytes == 0


def test_with_room_to_spare_nothing_is_written_ahead():
    objects = make(ahead=0.5)
    put(objects, "a", SLAB)
    put(objects, "b", SLAB)
    assert write(objects) == []
    put(objects, "c", SLAB)
    assert write(objects) == ["a"]
    assert write(objects) == []


def test_an_evicted_value_still_exists_and_its_key_is_taken():
    objects = make(slabs=1)
    put(objects, "a", SLAB)
    assert write(objects) == ["a"]
    put(objects, "b", SLAB)
    assert "a" not in objects.by_key
    assert objects.exist(["a", "b", "c"]) == b"\1\1\0"
    assert objects.size_of("a") == SLAB
    assert put(objects, "a") is Code.EXISTS
    assert objects.counts["evicted_unsaved"] == 0


def test_a_value_being_written_is_evicted_last_but_a_put_is_not_denied():
    objects = make(slabs=2)
    put(objects, "cold", SLAB)
    put(objects, "warm", SLAB)
    batch = objects.demotion.unsaved(1, 1)
    assert [value.key for value in batch] == ["cold"]
    put(objects, "x", SLAB)
    assert objects.entries.find("cold")
    assert not objects.entries.find("warm")
    put(objects, "y", SLAB, pins=Pin.HARD)
    assert put(objects, "z", SLAB) is Code.OK
    assert objects.demotion.are_whole(batch) == [False]
    objects.demotion.end_writing([])
    objects.check()


def test_a_promoted_value_is_on_disk_already():
    objects = make(slabs=1)
    put(objects, "a", SLAB)
    write(objects)
    put(objects, "b", SLAB)
    write(objects)
    (grant,) = objects.puts.reserve(0.0, b"ssd", 1, ["a"], [SLAB], pins=Pin.PROMOTION, ttl_s=10)
    assert grant.code is Code.OK
    assert objects.puts.commit(0.0, b"ssd", 1, [0], [7]) == [Code.OK]
    assert objects.entries.find("a")
    assert write(objects) == []
    assert objects.counts["puts"] == 2
    objects.check()


def test_what_is_read_in_memory_counts_as_read_on_disk():
    objects = make()
    for key in "abc":
        put(objects, key)
    write(objects)
    objects.entries.find("a")
    objects.lease(0.0, ME, 1, ["b", "none"], 10)
    ((*step,),) = objects.log.standing(1)
    assert {key: used for key, _, used in step} == {"a": True, "b": True, "c": False}


def test_a_value_whose_copy_goes_is_written_again():
    objects = make()
    put(objects, "a")
    put(objects, "b")
    write(objects)
    objects.demotion.drop_from_disk(["a", "no such"])
    objects.check()
    assert write(objects) == ["a"]


def test_keys_of_both_tiers_are_listed_once():
    objects = make(slabs=1)
    for number in range(6):
        put(objects, f"{number}", SLAB // 2)
        write(objects, 1)
    put(objects, "unsaved", 100)
    cursor, seen = 0, []
    while True:
        page, cursor = objects.keys(cursor, 2)
        seen += page
        if cursor == 0:
            break
    assert sorted(seen) == sorted([*"012345", "unsaved"])
    assert sorted(objects.some_keys(100)) == sorted(seen)
    assert len(objects.some_keys(3)) == 3


def test_to_remove_all_finds_a_value_that_left_memory_on_its_way_to_disk():
    objects = make(slabs=1)
    for key in "ab":
        put(objects, key, SLAB // 2)
    batch = objects.demotion.unsaved(1 << 30, 1)
    objects.entries.let_all_go()  # its bytes were read
    assert put(objects, "c", SLAB) == Code.OK
    assert [value.key for value in batch] == ["a"]
    assert list(objects.by_key) == ["c"]
    assert sorted(objects.some_keys(100)) == ["a", "c"]
    assert objects.some_keys(1) == ["c"]


def test_what_a_put_would_replace_on_disk_is_told():
    objects = make(slabs=1)
    put(objects, "a")
    write(objects)
    put(objects, "all", SLAB)
    objects.remove("all")

    def replaces(key, pins):
        put_id = next(_ids)
        objects.puts.reserve(0.0, ME, put_id, [key], [10], pins=pins, ttl_s=10)
        try:
            return replaced(objects, 0.0, ME, put_id, [0]), replaced(objects, 11.0, ME, put_id, [0])
        finally:
            objects.puts.commit(0.0, ME, put_id, [], [])

    assert replaces("a", Pin.UPSERT) == (["a"], [])
    assert replaces("new", Pin.NONE) == ([], [])
    assert copies_on_disk(objects, ["a", "new"]) == ["a"]
    objects.log.fail()
    assert replaces("a", Pin.NONE) == (["a"], []), "it cannot be read, but would be after a restart"
    assert replaced(objects, 0.0, ME, 1, [0]) == []
