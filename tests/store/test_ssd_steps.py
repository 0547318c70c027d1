"""The two tiers of a store, step by step: what a writer's thread may meet between two of its steps."""

import contextlib
import errno
import itertools
import os
import threading
import time

import pytest
from conftest import wait_for

from mooncake_zmq.store.memory import checksum_of
from mooncake_zmq.store.rules.object_log import ObjectLog, ObjectSsdSettings
from mooncake_zmq.store.rules.objects import Code, Objects, ObjectSettings, Pin
from mooncake_zmq.store.segment import ObjectSegment
from mooncake_zmq.store.server.memory import StoreMemory
from mooncake_zmq.store.server.object_disk import ObjectDisk
from mooncake_zmq.store.server.ssd import StoreSsd, StoreStopped

ME = b"me"
SLAB = 1 << 17


class Stepped(StoreSsd):
    """Without a writer's thread: steps are ours."""

    def _run(self):
        pass


class Tiers:
    def __init__(self, home, kind=Stepped, *, slab=SLAB, slabs=3, ssd_bytes=12 * SLAB, max_objects=1 << 20, in_memory=4096):
        ssd = ObjectSsdSettings(directory="x", bytes=ssd_bytes, ahead=1.0, threads=1, max_objects=max_objects)
        settings = ObjectSettings(
            object_bytes=slabs * slab, slab_bytes=slab, max_objects=in_memory, max_client_share=1.0, ssd=ssd
        )
        self.disk = ObjectDisk.open(home / "ssd", slab)
        self.log = ObjectLog(ssd)
        self.objects = Objects(settings, self.log)
        self.segment = ObjectSegment.create(
            home, "c", "n", 1, entries=self.objects.table_entries, memory_bytes=settings.object_bytes
        )
        self.memory = StoreMemory(self.objects, self.segment)
        self.crashes = []
        self.ssd = kind(self.memory, self.disk, self.log, self.crashes.append)
        self.ids = itertools.count(1)

    def reserve(self, keys, sizes, pins=Pin.NONE):
        put_id = next(self.ids)
        with self.memory as objects:
            grants = objects.reserve(time.monotonic(), ME, put_id, keys, sizes, pins=pins, ttl_s=30)
            for grant, size in zip(grants, sizes, strict=True):
                assert grant.code is Code.OK
                self.memory.view(grant.offset, size)[:] = b"v" * size
        return put_id

    def put(self, *keys, size):
        put_id = self.reserve(keys, [size] * len(keys))
        with self.memory as objects:
            places = range(len(keys))
            assert not any(objects.commit(time.monotonic(), ME, put_id, places, [checksum_of(b"v" * size)] * len(keys)))

    def evict(self, *keys):
        with self.memory as objects:
            for key in keys:
                objects._retire(objects.by_key[key])

    def close(self):
        self.ssd.close(time.monotonic())
        self.segment.close()


@pytest.fixture
def tiers(tmp_path):
    made = []

    def make(*arguments, **changes):
        made.append(Tiers(tmp_path, *arguments, **changes))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("what", ["remove", "upsert"])
def test_a_batch_of_which_one_key_gets_to_disk_while_it_waits_is_erased_there_too(tiers, what):
    both = tiers()
    both.put("on disk", size=100)
    assert both.ssd._demote()
    both.put("in memory", size=100)
    keys = ["on disk", "in memory"]
    results = []
    if what == "remove":
        named, work = (lambda _: keys), (lambda objects, _: [objects.remove(key) for key in keys])
    else:
        put_id = both.reserve(keys, [10, 10], Pin.UPSERT)
        named = lambda objects: objects.replaces(time.monotonic(), ME, put_id, [0, 1])  # noqa: E731
        work = lambda objects, _: objects.commit(time.monotonic(), ME, put_id, [0, 1], [1, 1])  # noqa: E731
    with both.memory:
        assert both.ssd.park(named, work, results.append)
    assert both.ssd._demote(), "the other key gets to disk meanwhile"
    both.ssd._erase()
    assert results == ([[True, True]] if what == "remove" else [[0, 0]])
    assert not both.log.by_key
    both.objects.check()


def test_who_waits_for_a_writer_that_fails_is_told(tiers):
    both = tiers(StoreSsd)
    both.put("k", size=100)
    wait_for(lambda: "k" in both.log.by_key, "the demotion")

    def bug(*_):
        raise ZeroDivisionError

    def settle():
        with contextlib.suppress(StoreStopped):
            both.ssd.settle(lambda _: ["k"], bug)
        ended.set()

    ended = threading.Event()
    threading.Thread(target=settle).start()
    assert ended.wait(20)
    wait_for(lambda: both.crashes, "the crash to be told")


def test_what_moves_leaves_room_in_its_segment_however_small_it_is(tiers):
    both = tiers(slab=1 << 20, slabs=4, ssd_bytes=16 << 20, in_memory=8192)
    names = itertools.count()
    while len(both.log._segments) < 2:
        both.put(*[f"k{next(names)}" for _ in range(1024)], size=1)
        while both.ssd._demote():
            pass
    for number in range(24):
        small = [key for key in both.objects.by_key if key.startswith("k")]
        both.evict(*small)
        for key in both.log.by_key:
            both.log.use(key)
        both.put(f"big{number}", size=900_000)
        both.ssd._demote()
    assert both.ssd.counts["ssd_moved"] > 0
    both.log.check()


def test_at_the_limit_of_objects_on_disk_the_oldest_go_and_writing_goes_on(tiers):
    both = tiers(max_objects=10, in_memory=5)
    for number in range(40):
        both.put(f"k{number}", size=1000)
        assert both.ssd._demote()
        for key in both.log.by_key:
            both.log.use(key)
        assert f"k{number}" in both.log.by_key
        assert len(both.log.by_key) <= 10
    both.log.check()


def test_a_tier_smaller_than_memory_is_not_written_over_and_over(tiers):
    both = tiers(slabs=16, ssd_bytes=9 * SLAB + (1 << 18))
    for number in range(15):
        both.put(f"k{number}", size=SLAB - 8192)
    written = 0
    while both.ssd._demote():
        written += 1
        assert written < 100, "it never rests"
    assert both.log.by_key


def test_a_process_out_of_descriptors_has_a_miss_and_keeps_its_disk(tiers, monkeypatch):
    both = tiers()
    both.put("k", size=100_000)
    assert both.ssd._demote()
    both.evict("k")

    def scarce(*_):
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", scarce)
        both.ssd.promote(["k"])
    assert "k" not in both.objects.by_key
    assert both.ssd.counts["ssd_promotions_denied"] == 1
    both.ssd.promote(["k"])
    assert "k" in both.objects.by_key


def test_a_value_that_goes_while_it_is_written_and_read_is_not_counted_as_saved(tiers):
    both = tiers()
    both.put("k", size=1000)
    with both.memory as objects:
        batch = objects.unsaved(1 << 20, 10)
        objects.lease(time.monotonic(), b"reader", 1, ["k"], 30)
    saved = both.ssd._write(batch)
    with both.memory as objects:
        objects.report_corrupt(batch[0].entry, batch[0].generation)
        objects.end_writing(saved)
    assert both.objects.unsaved_bytes == 0
    both.objects.check()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"max_objects": 5, "in_memory": 3}, "max_objects"), ({"slab": 300 << 20, "ssd_bytes": 8 << 30}, "slab_bytes")],
)
def test_settings_that_cannot_work_are_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        Tiers(tmp_path, **changes)
