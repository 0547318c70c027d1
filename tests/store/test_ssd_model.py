"""The two tiers of a store against a model with real bytes: power may fail at any step, and no wrong value is ever seen."""

import itertools
import random
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import structlog
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake_zmq.store.memory import checksum_of
from mooncake_zmq.store.rules.object_log import ObjectLog, ObjectSsdSettings
from mooncake_zmq.store.rules.objects import Code, Objects, ObjectSettings, Pin
from mooncake_zmq.store.segment import ObjectSegment
from mooncake_zmq.store.server.memory import StoreMemory
from mooncake_zmq.store.server.object_disk import ObjectDisk
from mooncake_zmq.store.server.ssd import PROMOTER, StoreSsd

SLAB = 1 << 17
SSD_BYTES = 8 * (SLAB + (1 << 16))
ME = b"me"
KEYS = [f"key{number}" for number in range(12)]
SIZES = [1, 70, 5000, 65_535, 65_536, 70_000, SLAB]


class PowerFails(BaseException):
    """Nothing of our process happens any more."""


class FailingDisk(ObjectDisk):
    """Power fails after `left` more steps; then what was written and not synced is lost."""

    left = 1 << 60

    @staticmethod
    def amid():
        """Called once, amid the next write."""

    @staticmethod
    def amid_sync():
        """Called once, amid the next sync."""

    def step(self):
        self.left -= 1
        if self.left < 0:
            raise PowerFails

    def create(self, segment, length):
        self.step()
        super().create(segment, length)
        self.step()

    def _write(self, segment, buffers, offset):
        self.step()
        if not hasattr(self, "unsynced"):
            self.unsynced = []
        self.unsynced.append((segment, offset, sum(buffer.nbytes for buffer in buffers)))
        amid, self.amid = self.amid, lambda: None
        amid()
        super()._write(segment, buffers, offset)
        self.step()

    def _sync(self):
        self.step()
        amid, self.amid_sync = self.amid_sync, lambda: None
        amid()
        super()._sync()
        self.unsynced = []
        self.step()

    def commit(self, rows):
        super().commit(rows)
        self.step()

    def change(self, moved, gone):
        self.step()
        super().change(moved, gone)
        assert not (moved and self.unsynced), "rows tell of what is durable"
        self.step()

    def remove(self, segments):
        self.step()
        super().remove(segments)
        self.step()

    def lose_unsynced(self):
        for segment, offset, size in getattr(self, "unsynced", ()):
            path = self._path(segment)
            if path.exists():
                with path.open("r+b") as file:
                    file.seek(offset)
                    file.write(random.Random(offset).randbytes(size))


class Stepped(StoreSsd):
    """Without a writer's thread: steps are ours."""

    def _run(self):
        pass


class TiersMachine(RuleBasedStateMachine):
    """`allowed`: what each key may be read as, None standing for a miss, which it always may be."""

    def __init__(self):
        super().__init__()
        self.home = Path(tempfile.mkdtemp(dir="/dev/shm"))  # where a sync costs nothing
        self.lives = itertools.count(1)
        self.ids = itertools.count(1)
        self.allowed = {key: set() for key in KEYS}
        self.start()

    def start(self):
        self.disk = FailingDisk.open(self.home / "ssd", SLAB)
        ssd = ObjectSsdSettings(directory="x", bytes=SSD_BYTES, ahead=1.0, threads=1, max_objects=24)
        log = ObjectLog(ssd)
        log.restore(self.disk.lengths, self.disk.recovered.items())
        self.objects = Objects(
            ObjectSettings(object_bytes=3 * SLAB, slab_bytes=SLAB, max_objects=12, max_client_share=1.0, ssd=ssd), log
        )
        self.segment = ObjectSegment.create(
            self.home, "c", "n", next(self.lives), entries=self.objects.table_entries, memory_bytes=3 * SLAB
        )
        self.memory = StoreMemory(self.objects, self.segment)
        self.ssd = Stepped(self.memory, self.disk, log, self.crashed)

    def crashed(self, error):
        raise error

    def stop(self):
        self.disk.left = 1 << 60
        self.ssd.close(0.0)
        self.segment.close()

    def fail_power(self):
        self.disk.lose_unsynced()
        self.stop()
        self.start()

    def now(self):
        return time.monotonic()

    # --- as the server does it

    def end(self, keys, work):
        """What replaces or removes: now, or when the writer has come to it."""
        with self.memory as objects:
            if not objects.copies_on_disk(keys):
                return work(objects, frozenset())
            results = []
            assert self.ssd.park(lambda _: keys, work, results.append)
            if objects.log.writing:  # the writer comes to it later
                return None
        self.ssd._erase()
        return results[0]

    def read(self, key):
        for _ in range(2):
            with self.memory as objects:
                (found,) = objects.lease(self.now(), ME, lease := next(self.ids), [key], 30)
                if found:
                    value = bytes(self.memory.view(found.offset, found.size))
                    objects.release(ME, lease)
                    assert checksum_of(value) == found.checksum
                    return value
            self.ssd.promote([key])
        return None

    @rule(
        key=st.sampled_from(KEYS), size=st.sampled_from(SIZES), pins=st.sampled_from([0, 0, 4, 4, 1]), data=st.integers(0, 99)
    )
    def put(self, key, size, pins, data):
        value = random.Random(repr((key, size, data))).randbytes(size)
        put_id = next(self.ids)
        with self.memory as objects:
            was_here = bool(objects.exist([key])[0])
            (grant,) = objects.reserve(self.now(), ME, put_id, [key], [size], pins=Pin(pins), ttl_s=30)
            if grant.code is not Code.OK:
                assert (grant.code is Code.EXISTS and was_here) or grant.code is Code.NO_ROOM
                return
            self.memory.view(grant.offset, size)[:] = value
            keys = objects.replaces(self.now(), ME, put_id, [0])
        self.allowed[key] = {*self.allowed[key], value}  # until the answer, the one or the other
        codes = self.end(keys, lambda objects, _: objects.commit(self.now(), ME, put_id, [0], [checksum_of(value)]))
        if codes == [Code.OK]:
            self.allowed[key] = {value}
            assert self.read(key) == value

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key):
        there = bool(self.objects.exist([key])[0])
        removed = self.end([key], lambda objects, erased: objects.remove(key) or key in erased)
        assert removed == there
        self.allowed[key] = set()

    @rule(key=st.sampled_from(KEYS))
    def get(self, key):
        there = bool(self.objects.exist([key])[0])
        value = self.read(key)
        assert there == (value is not None), "what exists can be read"
        assert value is None or value in self.allowed[key]
        if value is not None:
            self.allowed[key] = {value}

    @rule()
    def demote(self):
        self.ssd._demote()

    @rule(count=st.integers(1, 30), small=st.sampled_from(SIZES[:5]), large=st.sampled_from(SIZES[-3:]))
    def churn(self, count, small, large):
        """So much is written that old segments go, and some of what is in them was read."""
        for number in range(count):
            self.put(KEYS[number % len(KEYS)], large if number % 3 else small, 4, number)
            self.ssd._demote()
            log = self.objects.log
            for key in [key for key in log.by_key if key not in self.objects.by_key][-1:]:
                self.get(key)

    @rule(pins=st.sampled_from([0, 4]))
    def cells_are_taken_while_they_are_written(self, pins):
        def amid():
            for key in KEYS:
                if not self.objects.copies_on_disk([key]):
                    self.put(key, SLAB, pins, 77)

        for key in KEYS[:4]:
            self.remove(key)
        self.put(KEYS[4], SLAB, 4, 78)
        self.disk.amid = amid
        self.ssd._demote()
        self.disk.amid = lambda: None
        self.ssd._erase()

    @rule(key=st.sampled_from(KEYS))
    def a_reader_reports_a_value_while_it_is_written(self, key):
        self.put(key, 100, 4, 79)
        entry = self.objects.by_key.get(key)

        def amid():
            with self.memory as objects:
                objects.report_corrupt(entry, objects.generation[entry])
            self.put(key, 200, 0, 80)

        if entry is not None:
            self.disk.amid_sync = amid
            self.ssd._demote()
            self.disk.amid_sync = lambda: None
            self.ssd._erase()

    @rule(steps=st.integers(0, 200), small=st.sampled_from(SIZES[:5]))
    def power_fails_while_values_are_written(self, steps, small):
        self.disk.left = steps
        try:
            self.churn(30, small, SLAB)
        except PowerFails:
            self.fail_power()
        self.disk.left = 1 << 60

    @precondition(lambda self: self.objects.log.by_key)
    @rule(data=st.data(), steps=st.integers(0, 3), upsert=st.booleans())
    def power_fails_while_a_value_goes(self, data, steps, upsert):
        key = data.draw(st.sampled_from(sorted(self.objects.log.by_key)))
        self.disk.left = steps
        try:
            if upsert:
                self.put(key, 100, 4, 7)
            else:
                self.remove(key)
        except PowerFails:
            self.fail_power()
        self.disk.left = 1 << 60

    @rule()
    def power_fails_while_idle(self):
        self.fail_power()

    @rule()
    def restart_gracefully(self):
        while self.ssd._demote():
            pass
        held = {key for key in KEYS if self.objects.exist([key])[0]}
        unsaved = self.objects.unsaved_bytes
        assert unsaved == 0
        self.stop()
        self.start()
        assert {key for key in KEYS if self.objects.exist([key])[0]} == held

    @invariant()
    def all_is_well(self):
        with self.memory as objects:
            objects.check()
            listed, cursor = [], 0
            while True:
                page, cursor = objects.keys(cursor, 3)
                listed += page
                if not cursor:
                    break
            assert sorted(listed) == [key for key in sorted(KEYS) if objects.exist([key])[0]]
            assert PROMOTER not in objects._clients or not objects._clients[PROMOTER].puts
        files = {path.name for path in (self.home / "ssd").glob("segment-*")}
        assert files == {f"segment-{number:08d}" for number in objects.log._segments}
        assert sum((self.home / "ssd" / name).stat().st_size for name in files) <= SSD_BYTES
        counts = self.disk.counts
        assert not any(counts[name] for name in ("stale", "corrupt", "short", "faults"))

    def teardown(self):
        self.stop()
        shutil.rmtree(self.home)


TiersMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None, phases=[Phase.generate])
TestTiersAgainstModel = pytest.mark.usefixtures("quiet")(TiersMachine.TestCase)


@pytest.fixture
def quiet():
    with structlog.testing.capture_logs():
        yield
