"""The work of a store's SSD tier: a thread that writes, and a few that read.

The writer demotes in the background what memory alone holds, the coldest first, and makes room on disk. It alone changes what
stands there. What is to give a key on disk another value, or none, is parked until the old copy is gone for good: it then
runs on the writer's thread, so that nobody sees a key between its two values, nor the old one after a crash.

Readers promote: a value goes from disk into a cell like that of a put. Who wants one that is under way waits for the same.
Where memory has no room for it, as all is leased or pinned, it is a miss: `promotions_denied` counts them.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from mooncake_zmq.kv.layout import PAGE_BYTES, div_ceil
from mooncake_zmq.store.memory import checksum_of
from mooncake_zmq.store.rules.object_log import ObjectLog, Place
from mooncake_zmq.store.rules.object_record import LARGE_BYTES, ObjectRecord, record_bytes, round_up
from mooncake_zmq.store.rules.objects import Code, Objects, Pin, Unsaved
from mooncake_zmq.store.server.memory import StoreMemory
from mooncake_zmq.store.server.object_disk import BATCH_RECORDS, DiskBusy, ObjectDisk
from mooncake_zmq.transfer.disk_directory import DiskFault

log = structlog.get_logger()

BATCH_BYTES = 16 << 20
"""Written at a time; a larger value alone."""
POLL_S = 0.05
"""How often an idle writer looks for what is to be written."""
MAX_PARKED = 4096
"""Requests that wait for the writer; a further one is not answered."""
MOVED_SHARE = 0.5
"""Of a new segment, and of all that may be on disk, what is moved there at most."""
MAX_MOVED = 2048
"""Values moved to a new segment, each a read and a write: half a second that what is parked may have to wait."""
TRIES = 3
"""To read a value that moves on disk meanwhile."""
PROMOTER = b"ssd"
"""The client of promotions."""

T = TypeVar("T")
Keys = Callable[[Objects], Sequence[str]]
"""Of which keys no copy may be on disk when a work runs, as things stand."""
Work = Callable[[Objects, frozenset[str]], T]
"""What was parked, told which keys were on disk until now."""


class StoreStopped(Exception):
    """The writer ended before it came to this."""


@dataclass(frozen=True, slots=True)
class _Parked:
    keys: "Keys"
    work: Work[Any]
    done: Callable[[Any], None]
    """Called with the result, outside of the memory's lock."""
    failed: Callable[[Exception], None]


class StoreSsd:
    """Works from construction until `close`. `objects` of the memory has the same log, filled from the same disk."""

    def __init__(
        self, memory: StoreMemory, disk: ObjectDisk, objects_log: ObjectLog, on_crash: Callable[[BaseException], None]
    ) -> None:
        self._memory = memory
        self._disk = disk
        self._log = objects_log
        self._on_crash = on_crash
        settings = objects_log.settings
        self._counts = dict.fromkeys(("moved", "dropped", "segments_dropped", "promotions_denied"), 0)
        """`moved` to `segments_dropped` are the writer's."""
        self._is_writable = True
        self._put_ids = itertools.count(1)
        self._changed = threading.Condition()
        """Guards what follows."""
        self._parked: list[_Parked] = []
        self._promoting: dict[str, Future[None]] = {}
        self._dead = False
        self._drain_until: float | None = None
        self._is_hurried: Callable[[], bool] = lambda: False
        with memory as objects:
            share = objects.settings.max_client_share * objects.settings.object_bytes
            # Each reader may hold a cell of the largest size: all of them no more than one client may.
            self._reader_count = max(1, min(settings.threads, int(share) // objects.max_object_bytes))
        self._readers = ThreadPoolExecutor(self._reader_count, "store-disk-read")
        all_there = threading.Barrier(self._reader_count + 1)
        self._writer = threading.Thread(target=self._run, name="store-disk-write", daemon=True)
        try:
            for _ in range(self._reader_count):  # started now, as later there may be no thread to be had
                self._readers.submit(all_there.wait)
            all_there.wait()
            self._writer.start()
        except BaseException:
            all_there.abort()
            self._readers.shutdown()
            raise

    def close(self, until: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """When nobody else calls any more: write what memory alone holds, but end by `until` or once `is_hurried`."""
        with self._changed:
            self._drain_until, self._is_hurried = until, is_hurried
            self._changed.notify()
        self._writer.join()
        self._readers.shutdown()
        self._disk.close()

    @property
    def counts(self) -> Mapping[str, int]:
        return {f"ssd_{name}": value for name, value in {**self._disk.counts, **self._counts}.items()}

    def gauges(self) -> dict[str, float]:
        with self._changed:
            work = {"ssd_promoting": len(self._promoting), "ssd_erasing": len(self._parked)}
        return {**work, "ssd_writable": self._is_writable}

    # --- called from other threads

    def park(self, keys: Keys, work: Work[T], done: Callable[[T], None]) -> bool:
        """Run `work`, and then `done` with its result, once no copy of `keys` is on disk. False if too much is parked.

        To be called with the memory's lock held, as it was when the copies were seen.
        """
        return self._park(_Parked(keys, work, done, lambda _: None))

    def settle(self, keys: Keys, work: Work[T]) -> T:
        """Run `work` once no copy of these keys is on disk, waiting for it. Raises StoreStopped."""
        ended: Future[T] = Future()
        with self._memory as objects:
            if not objects.copies_on_disk(keys(objects)):
                return work(objects, frozenset())
            parked = self._park(_Parked(keys, work, ended.set_result, ended.set_exception))
        if not parked:
            raise StoreStopped("too much waits for the disk")
        return ended.result()

    def promote(self, keys: Sequence[str]) -> None:
        """Bring values that are on disk into memory, as far as they are good and there is room; waits for it."""
        with self._changed:
            under_way = [future for key in keys if (future := self._promoting.get(key)) is not None]
            fresh = [key for key in dict.fromkeys(keys) if key not in self._promoting]
            # A share for each reader: of small values, handing over one costs as much as reading it.
            share = max(1, div_ceil(len(fresh), self._reader_count))
            for start in range(0, len(fresh), share):
                some = fresh[start : start + share]
                future = self._readers.submit(self._promote_some, some)
                self._promoting.update(dict.fromkeys(some, future))
                under_way.append(future)
        for future in under_way:
            future.result()

    def _park(self, parked: _Parked) -> bool:
        with self._changed:
            if self._dead or len(self._parked) >= MAX_PARKED:
                return False
            self._parked.append(parked)
            self._changed.notify()
            return True

    # --- readers

    def _promote_some(self, keys: Sequence[str]) -> None:
        try:
            for key in keys:
                for _ in range(TRIES):
                    if self._promote_from(key, self._where(key), more=len(keys) > 1):
                        break
        except DiskBusy as busy:
            self._deny(str(busy))
        except DiskFault as fault:
            self._fail(str(fault))
        finally:
            with self._changed:
                for key in keys:
                    del self._promoting[key]

    def _where(self, key: str) -> ObjectRecord | None:
        with self._memory as objects:
            if key in objects.by_key:
                return None
            return self._log.find(key)

    def _promote_from(self, key: str, record: ObjectRecord | None, *, more: bool) -> bool:
        """Is there no reason to try again? `more`: other values will be read."""
        if record is None:
            return True
        put_id = next(self._put_ids)
        pins = Pin.PROMOTION | Pin(record.pin)
        with self._memory as objects:
            now, ttl_s = time.monotonic(), objects.settings.max_ttl_s
            (grant,) = objects.reserve(now, PROMOTER, put_id, [key], [record.size], pins=pins, ttl_s=ttl_s)
        if grant.code is not Code.OK:
            self._deny(grant.code.name)
            if grant.code is Code.INVALID:  # no cell is as large any more
                self._give_up(key, record)
            return True
        good = is_current = False
        try:
            good = self._disk.read(key, record, self._memory.view(grant.offset, _cell_bytes(record.size)), ahead=more)
        finally:
            with self._memory as objects:
                is_current = self._log.find(key) == record
                if good and is_current:
                    objects.commit(time.monotonic(), PROMOTER, put_id, [0], [record.checksum])
                else:
                    objects.commit(time.monotonic(), PROMOTER, put_id, [], [])
        if not good and is_current:
            self._give_up(key, record)
        return is_current

    def _deny(self, reason: str) -> None:
        with self._changed:
            self._counts["promotions_denied"] += 1
        log.debug("store_promotion_denied", reason=reason)

    def _give_up(self, key: str, record: ObjectRecord) -> None:
        """Nobody shall find this copy any more; waits for it, as the next reader would try again."""
        with contextlib.suppress(StoreStopped):
            self.settle(lambda _: [key] if self._log.record(key) == record else [], _nothing)

    def _fail(self, reason: str) -> None:
        """Nothing is served from disk, or written to it, in this life. Copies there still go when their keys do."""
        self._stop_writing(reason)
        with self._memory:
            self._log.fail()
        log.error("store_disk_off", reason=reason)

    # --- the writer

    def _run(self) -> None:
        try:
            try:
                self._make_room()
            except DiskFault as fault:
                self._stop_writing(str(fault))
            drained = False
            while not self._is_over(drained):
                with self._changed:
                    draining = self._drain_until is not None
                erased = self._erase()
                idle = not self._demote() and not erased
                drained = draining and idle
                if idle:
                    with self._changed:
                        if not self._parked and self._drain_until is None:
                            self._changed.wait(POLL_S)
        except Exception as error:
            log.critical("store_disk_writer_crashed", exc_info=error)
            self._on_crash(error)
        finally:
            with self._changed:
                self._dead = True
                parked, self._parked = self._parked, []
            for each in parked:
                each.failed(StoreStopped("the store is closing"))

    def _is_over(self, drained: bool) -> bool:
        """`drained`: all that was to be written is, or as much of it as the disk keeps."""
        with self._changed:
            if self._drain_until is None or self._parked:
                return False
        over = drained or time.monotonic() >= self._drain_until or self._is_hurried() or not self._is_writable
        if over:
            with self._memory as objects:
                unsaved_bytes = objects.unsaved_bytes
            if unsaved_bytes:
                log.warning("store_drain_incomplete", unsaved_bytes=unsaved_bytes, writable=self._is_writable)
        return over

    def _erase(self) -> bool:
        """Do what is parked; False if nothing is."""
        with self._changed:
            parked, self._parked = self._parked, []
        if not parked:
            return False
        try:
            results = self._run_parked(parked)
        except BaseException:
            for each in parked:
                each.failed(StoreStopped("the disk's writer failed"))
            raise
        for each, result in zip(parked, results, strict=True):
            each.done(result)
        return True

    def _run_parked(self, parked: Sequence[_Parked]) -> list[Any]:
        """Erase what is in the way, and run all works before anything can get to the disk again."""
        erased: set[str] = set()
        doomed: list[str] = []
        while True:
            with self._memory as objects:
                objects.drop_from_disk(doomed)
                erased.update(doomed)
                # Asked anew each time: what a work may not find on disk changes, as when the disk fails meanwhile.
                doomed = list(dict.fromkeys(objects.copies_on_disk([key for each in parked for key in each.keys(objects)])))
                if not doomed:
                    return [each.work(objects, frozenset(erased)) for each in parked]
                records = [record for key in doomed if (record := self._log.record(key)) is not None]
            self._forget(records)

    def _forget(self, records: Sequence[ObjectRecord]) -> None:
        """These are not found any more, nor after a restart."""
        if not records:
            return
        try:
            self._disk.change([], [record.sequence for record in records])
        except DiskFault as fault:
            # A full disk may not even take this. A row without its file is none.
            self._stop_writing(str(fault))
            segments = sorted({record.segment for record in records})
            try:
                self._disk.remove(segments)
            except DiskFault as error:
                log.critical("store_values_may_come_back", count=len(records), error=str(error), after="a restart")
            for segment in segments:
                self._drop(segment)

    def _demote(self) -> bool:
        """Write the next batch, if one is due."""
        if not self._is_writable:
            return False
        with self._memory as objects:
            batch = objects.unsaved(BATCH_BYTES, BATCH_RECORDS, draining=self._drain_until is not None)
        if not batch:
            return False
        saved: list[tuple[Unsaved, ObjectRecord]] = []
        try:
            saved = self._write(batch)
        except DiskFault as fault:
            self._stop_writing(str(fault))
        finally:
            with self._memory as objects:
                objects.end_writing(saved)
        return True

    def _write(self, batch: Sequence[Unsaved]) -> list[tuple[Unsaved, ObjectRecord]]:
        """What of the batch stands on disk now, which is as much as its segment has room for. Raises DiskFault."""
        place = self._place(batch)
        if place is None:
            self._open_segment(round_up(record_bytes(batch[0].key.encode(), batch[0].size), PAGE_BYTES))
            place = self._place(batch)
        assert place is not None, "a new segment holds any value beside what was moved there"
        batch = batch[: len(place.offsets)]
        with self._memory:
            sequences = [self._log.next_sequence for _ in batch]
        cells = [self._memory.view(value.offset, _cell_bytes(value.size)) for value in batch]
        checksums = [checksum_of(cell[: value.size]) for value, cell in zip(batch, cells, strict=True)]
        records = [
            ObjectRecord(sequence, place.segment, offset, value.size, checksum, value.pin)
            for value, checksum, sequence, offset in zip(batch, checksums, sequences, place.offsets, strict=True)
        ]
        written = [(value.key, record, cell) for value, record, cell in zip(batch, records, cells, strict=True)]
        self._disk.write(written, place.end)
        saved = []
        with self._memory as objects:
            for value, record, is_whole in zip(batch, records, objects.are_whole(batch), strict=True):
                if is_whole and value.checksum not in (0, record.checksum):
                    objects.report_corrupt(value.entry, value.generation)
                elif is_whole:
                    saved.append((value, record))
        if saved:
            self._disk.commit((value.key, record) for value, record in saved)
        return saved

    def _place(self, batch: Sequence[Unsaved]) -> Place | None:
        """Room for the batch, or for its first part; taken."""
        sizes = [(value.key.encode(), value.size) for value in batch]
        with self._memory:
            place = self._log.place(sizes)
            while place is None and len(sizes) > 1:
                sizes = sizes[: len(sizes) // 2]
                place = self._log.place(sizes)
            if place is not None:
                self._log.take(place)
        return place

    def _open_segment(self, needed_bytes: int) -> None:
        """Begin a new one, in which so much stays free while room is made for it."""
        with self._memory:
            segment, length = self._log.new_segment(), self._log.settings.segment_bytes
        self._disk.create(segment, length)
        with self._memory:
            self._log.open(segment, length)
        self._make_room(min(int(length * MOVED_SHARE), length - needed_bytes))

    def _make_room(self, movable_bytes: int = 0) -> None:
        """Let segments go until another one fits in; of the first, so much is moved to the newest at most."""
        while True:
            with self._memory:
                victim = self._log.victim()
            if victim is None:
                return
            moved, gone = self._move_from(victim, movable_bytes)
            self._disk.change([record for _, record in moved], gone)
            with self._memory:
                for key, record in moved:
                    self._log.moved(key, record.sequence, record.segment, record.offset)
            self._counts["moved"] += len(moved)
            self._drop(victim)
            self._disk.remove([victim])
            movable_bytes = 0

    def _move_from(self, segment: int, room: int) -> tuple[list[tuple[str, ObjectRecord]], list[int]]:
        """Copy what was read of it, and memory has not, as far as there is room; the copies, and the sequences of the rest."""
        moved: list[tuple[str, ObjectRecord]] = []
        gone: list[int] = []
        most = min(MAX_MOVED, int(self._log.settings.max_objects * MOVED_SHARE))
        steps = self._log.standing(segment)
        while True:
            with self._memory as objects:
                step = next(steps, None)
                if step is None:
                    return moved, gone
                step = [(key, record, used and key not in objects.by_key) for key, record, used in step]
            for key, record, is_wanted in step:
                size = round_up(record.offset % PAGE_BYTES + record_bytes(key.encode(), record.size), PAGE_BYTES)
                may_move = is_wanted and size <= room and len(moved) < most
                with self._memory:
                    place = self._log.place_pages(size) if may_move else None
                    if place is not None:
                        self._log.take(place)
                if place is None:
                    gone.append(record.sequence)
                else:
                    room -= size
                    moved.append((key, self._disk.copy(record, key, place.segment, place.offsets[0])))

    def _drop(self, segment: int) -> None:
        """Forget all that stands there, its rows being gone or worthless."""
        with self._memory:
            steps = self._log.standing(segment)
        while True:
            with self._memory as objects:
                step = next(steps, None)
                if step is None:
                    break
                objects.drop_from_disk(key for key, _, _ in step)
            self._counts["dropped"] += len(step)
        with self._memory:
            self._log.close_segment(segment)
        self._counts["segments_dropped"] += 1

    def _stop_writing(self, reason: str) -> None:
        if self._is_writable:
            self._is_writable = False
            log.error("store_disk_not_written", reason=reason)


def _cell_bytes(size: int) -> int:
    """What of a value's cell is read or written: whole pages where it is at one."""
    return round_up(size, PAGE_BYTES) if size >= LARGE_BYTES else size


def _nothing(*_: object) -> None:
    """There is nothing to do once a bad copy is gone."""
