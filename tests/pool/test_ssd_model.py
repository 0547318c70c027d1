"""The two tiers of a store against a model with real bytes: power may fail at any step, and no wrong value is ever seen."""

import itertools
import random
import shutil
import tempfile
from pathlib import Path

import pytest
import structlog
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tiers_harness import CONNECTION, Tiers

from mooncake_zmq.pool.node.store_events import Asked
from mooncake_zmq.pool.node.tiers import PROMOTER
from mooncake_zmq.pool.rules.changes import copies_on_disk
from mooncake_zmq.pool.ssd.object_disk import ObjectDisk
from mooncake_zmq.store import protocol
from mooncake_zmq.store.codes import Code, Pin
from mooncake_zmq.store.memory import checksum_of

SLAB = 1 << 17
SSD_BYTES = 8 * (SLAB + (1 << 16))
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


class TiersMachine(RuleBasedStateMachine):
    """`allowed`: what each key may be read as, None standing for a miss, which it always may be."""

    def __init__(self):
        super().__init__()
        self.home = Path(tempfile.mkdtemp(dir="/dev/shm"))  # where a sync costs nothing
        self.ids = itertools.count(1)
        self.allowed = {key: set() for key in KEYS}
        self.start()

    def start(self):
        both = Tiers(self.home, slab=SLAB, ssd_bytes=SSD_BYTES, max_objects=24, in_memory=12, disk=FailingDisk)
        both.settle()
        self.tiers, self.disk, self.objects = both, both.disk, both.objects

    def stop(self):
        self.disk.left = 1 << 60
        self.tiers.close()

    def fail_power(self):
        self.disk.lose_unsynced()
        self.stop()
        self.start()

    # --- as a client does it

    def answer(self, reply):
        """What replaces or removes: answered now, or when the disk has come to it."""
        if reply is None and not self.objects.log.writing:  # else the disk comes to it later
            self.tiers.settle()
            reply = self.tiers.replies.pop()
        return reply and reply.numbers

    def read(self, key):
        for _ in range(2):
            leased = self.tiers.lease(key)
            if leased.entries[0]:
                value = bytes(self.tiers.view(leased.offsets[0], leased.sizes[0]))
                self.tiers.release(leased)
                assert checksum_of(value) == leased.checksums[0]
                return value
            self.tiers.promote(key)
        return None

    @rule(
        key=st.sampled_from(KEYS), size=st.sampled_from(SIZES), pins=st.sampled_from([0, 0, 4, 4, 1]), data=st.integers(0, 99)
    )
    def put(self, key, size, pins, data):
        value = random.Random(repr((key, size, data))).randbytes(size)
        was_here = bool(self.objects.exist([key])[0])
        request, reserved = self.tiers.reserve([key], [value], Pin(pins))
        (code,) = reserved.codes
        if code != Code.OK:
            assert (code == Code.EXISTS and was_here) or code == Code.NO_ROOM
            return
        self.allowed[key] = {*self.allowed[key], value}  # until the answer, the one or the other
        if self.answer(self.tiers.commit(request, [value])) == [Code.OK]:
            self.allowed[key] = {value}
            assert self.read(key) == value

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key):
        there = bool(self.objects.exist([key])[0])
        assert self.answer(self.tiers.remove(key)) == [Code.OK if there else Code.NOT_FOUND]
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
        self.tiers.demote()

    @rule(count=st.integers(1, 30), small=st.sampled_from(SIZES[:5]), large=st.sampled_from(SIZES[-3:]))
    def churn(self, count, small, large):
        """So much is written that old segments go, and some of what is in them was read."""
        for number in range(count):
            self.put(KEYS[number % len(KEYS)], large if number % 3 else small, 4, number)
            self.tiers.demote()
            log = self.objects.log
            for key in [key for key in log.by_key if key not in self.objects.by_key][-1:]:
                self.get(key)

    @rule(pins=st.sampled_from([0, 4]))
    def cells_are_taken_while_they_are_written(self, pins):
        def amid():
            for key in KEYS:
                if not copies_on_disk(self.objects, [key]):
                    self.put(key, SLAB, pins, 77)

        for key in KEYS[:4]:
            self.remove(key)
        self.put(KEYS[4], SLAB, 4, 78)
        self.disk.amid = amid
        self.tiers.demote()
        self.disk.amid = lambda: None
        self.tiers.settle()
        self.tiers.replies.clear()

    @rule(key=st.sampled_from(KEYS))
    def a_reader_reports_a_value_while_it_is_written(self, key):
        self.put(key, 100, 4, 79)
        entry = self.objects.by_key.get(key)

        def amid():
            generation = self.objects.generation[entry]
            self.tiers.take(Asked(CONNECTION, protocol.ReportCorrupt([entry], [generation])))
            self.put(key, 200, 0, 80)

        if entry is not None:
            self.disk.amid_sync = amid
            self.tiers.demote()
            self.disk.amid_sync = lambda: None
            self.tiers.settle()
            self.tiers.replies.clear()

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
        while self.tiers.demote():
            pass
        held = {key for key in KEYS if self.objects.exist([key])[0]}
        unsaved = self.objects.demotion.unsaved_bytes
        assert unsaved == 0
        self.stop()
        self.start()
        assert {key for key in KEYS if self.objects.exist([key])[0]} == held

    @invariant()
    def all_is_well(self):
        objects = self.objects
        self.tiers.node.check()
        listed, cursor = [], 0
        while True:
            page, cursor = objects.keys(cursor, 3)
            listed += page
            if not cursor:
                break
        assert sorted(listed) == [key for key in sorted(KEYS) if objects.exist([key])[0]]
        assert PROMOTER not in objects.holders.clients or not objects.holders.clients[PROMOTER].puts
        files = {path.name for path in (self.home / "ssd").glob("segment-*")}
        assert files == {f"segment-{number:08d}" for number in objects.log._segments}
        assert sum((self.home / "ssd" / name).stat().st_size for name in files) <= SSD_BYTES
        counts = self.disk.counts
        assert not any(counts[name] for name in ("stale", "corrupt", "short", "failed"))

    def teardown(self):
        self.stop()
        shutil.rmtree(self.home)


TiersMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, phases=[Phase.generate])
TestTiersAgainstModel = pytest.mark.usefixtures("quiet")(TiersMachine.TestCase)


@pytest.fixture
def quiet():
    with structlog.testing.capture_logs():
        yield
