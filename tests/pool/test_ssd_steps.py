"""The two tiers of a store, step by step: what may happen between two works of the disk."""

import errno
import os

import pytest
from tiers_harness import CONNECTION, Tiers

from mooncake_zmq.core.actor import TimerFired
from mooncake_zmq.core.work import CommitValues, CreateSegment, Done, MoveValues, WriteValues
from mooncake_zmq.kv.object_record import ObjectRecord
from mooncake_zmq.pool.node.store_events import Asked
from mooncake_zmq.pool.node.tiers import LOOK
from mooncake_zmq.store import protocol
from mooncake_zmq.store.codes import Pin

SLAB = 1 << 17


@pytest.fixture
def tiers(tmp_path):
    made = []

    def make(**changes):
        made.append(Tiers(tmp_path, **{"slab": SLAB, "ssd_bytes": 12 * SLAB, **changes}))
        made[-1].settle()
        return made[-1]

    yield make
    for each in made:
        each.close()
        each.node.check()


@pytest.mark.parametrize("what", ["remove", "upsert"])
def test_a_batch_of_which_one_key_gets_to_disk_while_it_waits_is_erased_there_too(tiers, what):
    both = tiers()
    both.put("on disk", size=100)
    assert both.demote()
    both.put("in memory", size=100)
    keys, values = ["on disk", "in memory"], [b"x" * 10] * 2
    both.take(TimerFired(LOOK))
    assert isinstance(both.works[0].work, WriteValues), "the other key gets to disk meanwhile"
    if what == "remove":
        assert both.remove(*keys) is None
    else:
        assert both.commit(both.reserve(keys, values, Pin.UPSERT)[0], values) is None
    while not isinstance(both.works[0].work, CommitValues):
        both.step()
    both.step()
    assert set(both.log.by_key) == set(keys)
    while not both.replies:
        both.step()
    assert both.replies[0].numbers == [0, 0]
    assert not both.log.by_key
    both.objects.check()


def test_a_value_removed_twice_while_its_copy_goes_went_once(tiers):
    both = tiers()
    both.put("k", size=100)
    assert both.demote()
    assert both.remove("k") is both.remove("k") is None
    both.settle()
    assert [reply.numbers for reply in both.replies] == [[0], [-704]]


def test_what_moves_leaves_room_in_its_segment_however_small_it_is(tiers):
    both = tiers(slab=1 << 20, slabs=4, ssd_bytes=16 << 20, in_memory=8192)
    names = iter(f"k{number}" for number in range(1 << 20))
    while len(both.log._segments) < 2:
        both.put(*[next(names) for _ in range(1024)], size=1)
        both.demote()
    for number in range(24):
        small = [key for key in both.objects.by_key if key.startswith("k")]
        both.evict(*small)
        for key in both.log.by_key:
            both.log.use(key)
        both.put(f"big{number}", size=900_000)
        both.demote()
    assert both.node.counts["ssd_moved"] > 0
    both.log.check()


def test_at_the_limit_of_objects_on_disk_the_oldest_go_and_writing_goes_on(tiers):
    both = tiers(max_objects=10, in_memory=5)
    for number in range(40):
        both.put(f"k{number}", size=1000)
        assert both.demote()
        for key in both.log.by_key:
            both.log.use(key)
        assert f"k{number}" in both.log.by_key
        assert len(both.log.by_key) <= 10
    both.log.check()


def test_what_is_pinned_hard_and_was_not_read_since_a_restart_moves_on_when_its_segment_goes(tiers):
    both = tiers()
    request, _ = both.reserve(["pinned"], [b"v" * 100], Pin.HARD)
    assert both.commit(request, [b"v" * 100]).numbers == [0]
    assert both.demote()
    both.close()
    both = tiers()
    for number in range(60):
        both.put(f"k{number}", size=60_000)
        both.demote()
    assert both.node.counts["ssd_segments_dropped"] > 1
    assert "pinned" in both.log.by_key
    assert "k0" not in both.log.by_key
    both.log.check()


def test_a_tier_smaller_than_memory_is_not_written_over_and_over(tiers):
    both = tiers(slabs=16, ssd_bytes=9 * SLAB + (1 << 18))
    for number in range(15):
        both.put(f"k{number}", size=SLAB - 8192)
    both.take(TimerFired(LOOK))
    for _ in range(1000):
        if not both.step():
            break
    assert not both.works, "it never cordons"
    assert both.log.by_key


def test_a_process_out_of_descriptors_has_a_miss_and_keeps_its_disk(tiers, monkeypatch):
    both = tiers()
    both.put("k", size=100_000)
    assert both.demote()
    both.evict("k")

    def scarce(*_):
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", scarce)
        both.promote("k")
    assert "k" not in both.objects.by_key
    assert both.node.counts["ssd_promotions_denied"] == 1
    both.promote("k")
    assert "k" in both.objects.by_key


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
def test_a_work_that_fails_for_what_may_pass_says_so(tiers, monkeypatch, number):
    both = tiers()
    both.put("k", size=1000)
    assert both.demote()
    record = both.log.record("k")
    works = [CreateSegment(7, 1 << 20), MoveValues((("k", record, record._replace(offset=1 << 16)),), ())]
    for name, work in zip(("posix_fallocate", "open"), works, strict=True):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, lambda *_: (_ for _ in ()).throw(OSError(number, "lacks")))
            assert both.hand.carry_out(work).full == (number != errno.EIO)
        assert both.hand.carry_out(work) == Done(), "then it goes well"
        both.disk.remove([7])


def test_a_disk_that_only_the_index_finds_full_is_full(tiers):
    both = tiers()
    both.disk._index._db.execute("PRAGMA max_page_count = 2")
    rows = tuple((f"{number}".ljust(1000, "k"), ObjectRecord(number, 1, 0, 10, 5, 0)) for number in range(10))
    assert both.hand.carry_out(CommitValues(rows)).full


def test_more_small_values_come_from_disk_at_once_than_a_client_may_put_at_once(tiers):
    both = tiers()
    keys = [f"k{number}" for number in range(both.objects.entries.settings.max_puts_per_client + 1)]
    both.put(*keys, size=10)
    while both.demote():
        pass
    both.evict(*keys)
    both.promote(*keys)
    assert both.objects.by_key.keys() == set(keys)
    both.objects.check()


def test_a_value_that_goes_while_it_is_written_and_read_is_not_counted_as_saved(tiers):
    both = tiers()
    both.put("k", size=1000)
    leased = both.lease("k")
    both.take(TimerFired(LOOK))
    while not isinstance(both.works[0].work, CommitValues):
        both.step()
    both.take(Asked(CONNECTION, protocol.ReportCorrupt(leased.entries, leased.generations)))
    both.settle()
    assert both.objects.demotion.unsaved_bytes == 0
    both.objects.check()


def test_a_disk_that_was_full_is_written_again_but_never_where_something_may_stand(tiers, monkeypatch):
    both = tiers()
    both.put("k", size=1000)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        assert not both.demote()
    assert not both.node.gauges()["ssd_writable"]
    assert not both.demote()
    both.take(TimerFired(("disk",)))
    assert both.node.gauges()["ssd_writable"]
    assert both.demote()
    both.log.check()
    both.evict("k")
    both.promote("k")
    assert "k" in both.objects.by_key


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"max_objects": 5, "in_memory": 3}, "max_objects"), ({"slab": 300 << 20, "ssd_bytes": 8 << 30}, "slab_bytes")],
)
def test_settings_that_cannot_work_are_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        Tiers(tmp_path, **{"slab": SLAB, "ssd_bytes": 12 * SLAB, **changes})
