"""The two tiers of a store: what is written to the SSD, what is read from it, and what goes there. PURE.

One work at a time changes the disk. When one has ended, what waits for the disk to forget something comes first (`changes`);
else the coldest values that memory alone holds are written: in one work their bytes, in the next the rows that find them.

Several works read. Who wants a value that is on its way into memory waits for the same. Where memory has no room for it, as
all is leased or pinned, it is a miss.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mooncake_zmq.core.actor import SetTimer, Start
from mooncake_zmq.core.work import (
    BAD,
    BUSY,
    GOOD,
    UNREAD,
    CommitValues,
    CreateSegment,
    ForgetValues,
    MoveValues,
    ReadValue,
    ReadValues,
    RemoveSegments,
    StoreResult,
    StoreWork,
    ValuesRead,
    ValuesWritten,
    WorkFailed,
    WriteValues,
    WrittenValue,
)
from mooncake_zmq.kv.layout import PAGE_BYTES, div_ceil
from mooncake_zmq.kv.object_record import ObjectRecord, moved_bytes, record_bytes, round_up
from mooncake_zmq.pool.node.store_events import Turn
from mooncake_zmq.pool.rules.changes import Change, Changes
from mooncake_zmq.pool.rules.entries import Unsaved
from mooncake_zmq.pool.rules.object_log import MOVED_SHARE, ObjectLog, Place
from mooncake_zmq.pool.rules.objects import Objects
from mooncake_zmq.store.codes import Code, Pin

BATCH_BYTES = 16 << 20
"""Written at a time; a larger value alone."""
BATCH_RECORDS = 128
"""Written at a time: each takes a page, or all of a small value, in the disk's buffer."""
LOOK_S = 0.05
"""From the first change of what memory holds to a look at what is to be written."""
GO_ON_S = 1e-3
"""From one look to the next when all is to be written and one was not enough: others have their turns in between."""
FULL_S = 30.0
"""A disk that was full is written again after so long, in case somebody has made room."""
MAX_MOVED = 2048
"""Values moved to a new segment because they were read, each a read and a write."""
TRIES = 3
"""To read a value that moves on disk meanwhile."""
PROMOTER = b"ssd"
"""The client of promotions."""
LOOK = ("demote",)
RETRY = ("disk",)


@dataclass(slots=True)
class _Promotion:
    """A value on its way into memory, and the streams that wait for it."""

    waiting: list[int]
    tries: int = 0


@dataclass(slots=True)
class _Room:
    """Room being made: the segment that goes, and how many bytes and values of it, or of none, may still move.
    `promised_bytes`: what of these is for values that are promised to stay, of which `promised` may still move; `values` is for
    others alone."""

    bytes: int
    values: int
    promised: int
    promised_bytes: int = 0
    victim: int = 0
    steps: Iterator[list[tuple[str, ObjectRecord, bool]]] = field(default_factory=lambda: iter(()))
    going: list[str] = field(default_factory=list)
    """Keys that the work under way makes the disk forget."""


@dataclass(slots=True)
class _Read:
    key: str
    record: ObjectRecord
    put_id: int


class Tiers:
    """The disk half of a store's actor: the node calls it within its turns."""

    def __init__(self, turn: Turn, objects: Objects, log: ObjectLog, changes: Changes) -> None:
        self._turn = turn
        self._objects = objects
        self._log = log
        self._changes = changes
        self.counts = dict.fromkeys(
            ("moved", "dropped", "dropped_in_quota", "segments_dropped", "promotions_denied", "may_come_back", "outgrown"), 0
        )
        self.writable = True
        self.drained = False
        """Nothing is left to write, or nothing can be."""
        self.ready: list[int] = []
        """Streams whose promotions are over; the node takes them out."""
        self._draining = False
        self._looks = False
        """Is a look to come?"""
        self._work_ids = itertools.count(1)
        self._put_ids = itertools.count(1)
        # The disk's writer: the work under way, and what it is about.
        self._writing: tuple[int, StoreWork] | None = None
        self._removal: RemoveSegments | None = None
        """A removal begun once nothing reads there any more; it takes a work's place."""
        self._batch: list[Unsaved] = []
        self._room: _Room | None = None
        self._movable = int(log.settings.max_objects * MOVED_SHARE)
        """Values that may move to a new segment because they are promised to stay; half as many may because they were read."""
        self._forgetting: list[tuple[str, ObjectRecord]] = []
        self._outgrown: list[tuple[str, ObjectRecord]] = []
        """Copies being forgotten because their tenant has no room for them any more."""
        # Its readers.
        share = int(objects.settings.max_client_share * objects.settings.object_bytes)
        # Each may fill cells as large as the largest value's: all of them no more than one client may.
        self.readers = max(1, min(log.settings.threads, share // objects.max_object_bytes))
        self._promotions: dict[str, _Promotion] = {}
        self._queue: deque[str] = deque()
        """Keys of these values that are not being read; each at most once."""
        self._reading: dict[int, list[_Read]] = {}
        self._waits: dict[int, int] = {}
        """Promotions that each stream waits for."""

    def start(self) -> None:
        """Begin: the tier may have become smaller, or the last incarnation may have ended while it made room."""
        self._make_room(_Room(self._log.left_bytes, 0, self._movable))

    def drain(self) -> None:
        """Write all that memory alone holds."""
        self._draining = True
        self.look()

    def changed(self) -> None:
        """Something may have become cold, or new: look soon."""
        if not self._looks:
            self._looks = True
            self._turn.effects.append(SetTimer(LOOK, GO_ON_S if self._draining else LOOK_S))

    def look(self) -> None:
        """Begin what is to be done on disk, if nothing is under way."""
        if self._writing is not None or self._removal is not None:
            return
        if len(self._changes):
            self._forgetting = self._changes.in_the_way()
            if self._forgetting:
                self._begin(ForgetValues(tuple(record.sequence for _, record in self._forgetting)))
                return
            self._changes.make()
        if self._demote():
            return
        if self.writable and self._objects.demotion.is_unfinished:
            self.changed()
        else:
            self.drained = self._draining

    def look_is_due(self) -> None:
        """The timer has fired."""
        self._looks = False
        self.look()

    def retry(self) -> None:
        """The disk was full a while ago."""
        if self._log.readable is self._log.by_key:
            self.writable = True
            self.changed()

    def done(self, work_id: int, result: StoreResult) -> None:
        """A work has ended."""
        if work_id in self._reading:
            self._on_read(self._reading.pop(work_id), result)
            return
        assert self._writing is not None
        assert self._writing[0] == work_id
        work, self._writing = self._writing[1], None
        if isinstance(result, WorkFailed):
            self._on_fault(work, result)
        else:
            self._on_done(work, result)
        if self._writing is None:
            self.look()

    def gauges(self) -> dict[str, float]:
        """All zero when nothing is to be done, but for the last."""
        work = {"ssd_promoting": len(self._promotions), "ssd_erasing": len(self._changes)}
        return {**work, "ssd_writable": self.writable}

    def check(self) -> None:
        """Assert the invariants. Slow: for tests."""
        reading = [read.key for reads in self._reading.values() for read in reads]
        giving_up = len(self._promotions) - len(self._queue) - len(reading)
        assert 0 <= giving_up <= len(self._changes)
        assert self._promotions.keys() >= {*self._queue, *reading}
        waits: dict[int, int] = {}
        for promotion in self._promotions.values():
            for stream in promotion.waiting:
                waits[stream] = waits.get(stream, 0) + 1
        assert waits == self._waits
        assert len(self._reading) <= self.readers
        assert self._writing is None or self._removal is None
        assert self._writing or self._removal or not (self._batch or self._room or self._forgetting or self._outgrown)

    # --- readers

    def promote(self, keys: Sequence[str], stream: int) -> None:
        """Bring values that are on disk into memory, as far as they are good and there is room; the stream is then `ready`."""
        wanted = list(dict.fromkeys(keys))
        self._waits[stream] = len(wanted) + 1
        for key in wanted:
            promotion = self._promotions.get(key)
            if promotion is None:
                self._promotions[key] = _Promotion([stream])
                self._queue.append(key)
            else:
                promotion.waiting.append(stream)
        self._read_next()
        self._over_for(stream)

    def _read_next(self) -> None:
        """Give readers that are free their share: of small values, handing over one costs as much as reading it."""
        while self._queue and len(self._reading) < self.readers:
            share = div_ceil(len(self._queue), self.readers)
            room = self._objects.max_object_bytes
            reads: list[tuple[_Read, int]] = []
            while self._queue and len(reads) < share:
                key = self._queue[0]
                record = None if key in self._objects.by_key else self._log.find(key)
                if record is not None and reads and self._objects.cell_bytes(record.size) > room:
                    break
                self._queue.popleft()
                if record is None:
                    self._end(key)
                elif self._reserve(key, record, reads):
                    room -= self._objects.cell_bytes(record.size)
            if reads:
                work_id = next(self._work_ids)
                self._reading[work_id] = [read for read, _ in reads]
                values = tuple(ReadValue(read.key, read.record, offset) for read, offset in reads)
                self._turn.effects.append(Start(work_id, ReadValues(values)))

    def _reserve(self, key: str, record: ObjectRecord, reads: list[tuple[_Read, int]]) -> bool:
        """A cell for a value, which is then among those to be read; False, and its promotion over, where there is none."""
        put_id = next(self._put_ids)
        pins, ttl_s = Pin.PROMOTION | Pin(record.pin), self._objects.settings.max_ttl_s
        (grant,) = self._objects.puts.reserve(self._turn.now, PROMOTER, put_id, [key], [record.size], pins=pins, ttl_s=ttl_s)
        if grant.code is Code.OK:
            reads.append((_Read(key, record, put_id), grant.offset))
            return True
        self.counts["promotions_denied"] += 1
        if grant.code is Code.INVALID:  # no cell is as large any more
            self._give_up(key, record)
        else:
            self._end(key)
        return False

    def _on_read(self, reads: Sequence[_Read], result: StoreResult) -> None:
        outcomes = result.outcomes if isinstance(result, ValuesRead) else (UNREAD,) * len(reads)
        for read, outcome in zip(reads, outcomes, strict=True):
            self._on_value_read(read, outcome)
        fault = result.reason if isinstance(result, WorkFailed) else result.fault if isinstance(result, ValuesRead) else ""
        if fault:
            # Nothing is served from disk, or written to it, in this incarnation. Copies there still go when their keys do.
            self.writable = False
            self._log.fail()
        if self._removal is not None:
            self._remove(self._removal)
        self._read_next()

    def _on_value_read(self, read: _Read, outcome: str) -> None:
        is_current = self._log.find(read.key) == read.record
        if outcome == GOOD and is_current:
            self._objects.puts.commit(self._turn.now, PROMOTER, read.put_id, [0], [read.record.checksum])
        else:
            self._objects.puts.commit(self._turn.now, PROMOTER, read.put_id, [], [])
        if outcome == BUSY:
            self.counts["promotions_denied"] += 1
        if outcome in (GOOD, BAD) and not is_current:
            self._try_again(read.key)
        elif outcome == BAD:
            self._give_up(read.key, read.record)
        else:
            self._end(read.key)

    def _try_again(self, key: str) -> None:
        """It moved while it was read."""
        self._promotions[key].tries += 1
        if self._promotions[key].tries < TRIES:
            self._queue.append(key)
        else:
            self._end(key)

    def _give_up(self, key: str, record: ObjectRecord) -> None:
        """This copy must not be found any more; its readers wait for that, as the next one would try again."""
        change = Change(lambda: [key] if self._log.record(key) == record else [], lambda _: self._end(key))
        if not self._changes.begin(change):
            self._end(key)

    def _end(self, key: str) -> None:
        """A promotion is over, whichever way."""
        for stream in self._promotions.pop(key).waiting:
            self._over_for(stream)

    def _over_for(self, stream: int) -> None:
        self._waits[stream] -= 1
        if not self._waits[stream]:
            del self._waits[stream]
            self.ready.append(stream)

    # --- the writer

    def _remove(self, work: RemoveSegments) -> None:
        """Begin it, unless a value is being read there: that would look like a damaged one. No new read is begun there, as
        nothing stands there any more."""
        read = {each.record.segment for reads in self._reading.values() for each in reads}
        if read.isdisjoint(work.segments):
            self._removal = None
            self._begin(work)
        else:
            self._removal = work

    def _begin(self, work: StoreWork) -> None:
        assert self._writing is None
        self._writing = next(self._work_ids), work
        self._turn.effects.append(Start(*self._writing))

    def _on_done(self, work: StoreWork, result: StoreResult) -> None:
        match work:
            case ForgetValues() if self._outgrown:
                outgrown, self._outgrown = self._outgrown, []
                self._objects.demotion.drop_from_disk(key for key, _ in outgrown)
                self.counts["outgrown"] += len(outgrown)
            case ForgetValues():
                forgotten, self._forgetting = self._forgetting, []
                self._changes.forgotten(key for key, _ in forgotten)
            case CreateSegment(segment, length):
                self._log.open(segment, length)
                needed_bytes = round_up(record_bytes(self._batch[0].key.encode(), self._batch[0].size), PAGE_BYTES)
                most = min(MAX_MOVED, self._movable // 2)
                self._make_room(_Room(min(int(length * MOVED_SHARE), length - needed_bytes), most, self._movable))
            case MoveValues(moved):
                self._on_moved(moved)
            case RemoveSegments():
                if self._forgetting:
                    self._drop_forgotten()
                else:
                    assert self._room is not None
                    self._make_room(_Room(self._room.bytes, 0, self._room.promised))
            case WriteValues(values):
                assert isinstance(result, ValuesWritten)
                self._on_written(values, result.checksums)
            case CommitValues(rows):
                records = dict(rows)
                self._end_batch([(value, records[value.key]) for value in self._batch if value.key in records])

    def _on_fault(self, work: StoreWork, fault: WorkFailed) -> None:
        if self.writable and fault.full:
            self._turn.effects.append(SetTimer(RETRY, FULL_S))
        self.writable = False
        if isinstance(work, ForgetValues) and self._outgrown:
            self._outgrown = []
            return
        if isinstance(work, ForgetValues):
            # A full disk may not even take this. A row without its file is none.
            segments = tuple(sorted({record.segment for _, record in self._forgetting}))
            self._begin(RemoveSegments(segments, len(self._forgetting)))
            return
        self.counts["may_come_back"] += len(self._forgetting)
        self._drop_forgotten()
        self._room = None
        self._end_batch([])

    def _drop_forgotten(self) -> None:
        """Whole segments went, or cannot: nothing is looked for there any more."""
        forgotten, self._forgetting = self._forgetting, []
        self._changes.forgotten(key for key, _ in forgotten)
        for segment in sorted({record.segment for _, record in forgotten}):
            for step in self._log.standing(segment):
                self._drop([key for key, _, _ in step])
            self._close(segment)

    def _demote(self) -> bool:
        """Write the next batch, if one is due."""
        if not self.writable:
            return False
        self._batch = self._objects.demotion.unsaved(BATCH_BYTES, BATCH_RECORDS, draining=self._draining)
        self._outgrown = self._objects.demotion.outgrown(BATCH_RECORDS)
        if self._outgrown:
            self._end_batch([])
            self._begin(ForgetValues(tuple(record.sequence for _, record in self._outgrown)))
            return True
        if self._batch and not self._write():
            self._begin(CreateSegment(self._log.new_segment(), self._log.settings.segment_bytes))
        return bool(self._batch)

    def _write(self) -> bool:
        """Begin to write as much of the batch as the newest segment has room for; False if that is nothing."""
        place = self._place()
        if place is None:
            return False
        self._log.take(place)
        values = []
        for value, offset in zip(self._batch, place.offsets, strict=False):
            record = ObjectRecord(self._log.next_sequence, place.segment, offset, value.size, 0, value.pin)
            values.append(WrittenValue(value.key, record, value.offset))
        self._begin(WriteValues(tuple(values), place.end))
        return True

    def _place(self) -> Place | None:
        """Room for the batch, or for its first part."""
        sizes = [(value.key.encode(), value.size) for value in self._batch]
        place = self._log.place(sizes)
        while place is None and len(sizes) > 1:
            sizes = sizes[: len(sizes) // 2]
            place = self._log.place(sizes)
        return place

    def _on_written(self, values: Sequence[WrittenValue], checksums: Sequence[int]) -> None:
        """Make findable those values now on disk that still exist and verify."""
        rows = []
        written = self._batch[: len(values)]
        whole = self._objects.demotion.are_whole(written)
        for value, at, checksum, is_whole in zip(written, values, checksums, whole, strict=True):
            if is_whole and self._objects.entries.set_checksum(value, checksum):
                rows.append((value.key, at.record._replace(checksum=checksum)))
        if rows:
            self._begin(CommitValues(tuple(rows)))
        else:
            self._end_batch([])

    def _end_batch(self, saved: Sequence[tuple[Unsaved, ObjectRecord]]) -> None:
        if self._batch:
            self._batch = []
            self._objects.demotion.end_writing(saved)

    def _make_room(self, room: _Room) -> None:
        """Let segments go until another one fits in, and then write what it is for."""
        self._room = None
        victim = self._log.victim(room.bytes)
        if victim is not None:
            room.victim, room.steps = victim, self._log.standing(victim)
            room.promised_bytes = self._log.promised_bytes(victim)
            self._room = room
            self._move(room)
        elif self._batch and not self._write():
            raise AssertionError("a new segment holds any value beside what was moved there")

    def _move(self, room: _Room) -> None:
        """The next rows of the segment that goes: move what is promised to stay, and what was read of it and memory has not, as
        far as there is room."""
        step = next(room.steps, None)
        if step is None:
            self._close(room.victim)
            self._remove(RemoveSegments((room.victim,)))
            return
        moved, room.going = [], []
        gone: list[int] = []
        for key, record, used in step:
            promised = self._log.is_promised(key)
            worth_it = promised or (used and key not in self._objects.by_key)
            to = self._place_moved(room, key, record, promised=promised) if worth_it else None
            if to is None:
                self.counts["dropped_in_quota"] += promised
                gone.append(record.sequence)
                room.going.append(key)
            else:
                moved.append((key, record, to))
        self._begin(MoveValues(tuple(moved), tuple(gone)))

    def _place_moved(self, room: _Room, key: str, record: ObjectRecord, *, promised: bool) -> ObjectRecord | None:
        size = moved_bytes(key.encode(), record.offset, record.size)
        room.promised_bytes -= size if promised else 0
        room_bytes, left = (room.bytes, room.promised) if promised else (room.bytes - room.promised_bytes, room.values)
        place = self._log.place_pages(size) if size <= room_bytes and left > 0 else None
        if place is None:
            return None
        self._log.take(place)
        room.bytes -= size
        room.promised -= promised
        room.values -= not promised
        return record._replace(segment=place.segment, offset=place.offsets[0] + record.offset % PAGE_BYTES)

    def _on_moved(self, moved: Sequence[tuple[str, ObjectRecord, ObjectRecord]]) -> None:
        assert self._room is not None
        for key, _, to in moved:
            self._log.moved(key, to.sequence, to.segment, to.offset)
        self.counts["moved"] += len(moved)
        self._drop(self._room.going)
        self._move(self._room)

    def _drop(self, keys: Sequence[str]) -> None:
        """The disk has no rows of these any more."""
        self._objects.demotion.drop_from_disk(keys)
        self.counts["dropped"] += len(keys)

    def _close(self, segment: int) -> None:
        self._log.close_segment(segment)
        self.counts["segments_dropped"] += 1
