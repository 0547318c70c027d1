"""The works of a store's SSD tier: a thread that writes, and a few that read. They decide nothing."""

import errno
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence

import structlog

from mooncake_zmq.core.actor import Start, WorkDone
from mooncake_zmq.core.work import (
    BAD,
    BUSY,
    GOOD,
    UNREAD,
    CommitValues,
    CreateSegment,
    Done,
    ForgetValues,
    MoveValues,
    ReadValues,
    RemoveSegments,
    StoreResult,
    StoreWork,
    ValuesRead,
    ValuesWritten,
    WorkFailed,
    WriteValues,
)
from mooncake_zmq.kv.layout import PAGE_BYTES
from mooncake_zmq.kv.object_record import LARGE_BYTES, round_up
from mooncake_zmq.pool.server.turns import Turns
from mooncake_zmq.pool.ssd.disk_directory import SCARCE, DiskBusy, DiskFault
from mooncake_zmq.pool.ssd.object_disk import ObjectDisk
from mooncake_zmq.store.memory import checksum_of

log = structlog.get_logger()


class DiskWorks:
    """Works from construction until `close`. Each work ends with a turn of its own, also where it fails."""

    def __init__(self, turns: Turns, disk: ObjectDisk, readers: int, on_crash: Callable[[BaseException], None]) -> None:
        self._turns = turns
        self._disk = disk
        self._hand = DiskHand(disk, turns.view)
        self._on_crash = on_crash
        self._writes: queue.SimpleQueue[Start[StoreWork] | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[Start[StoreWork] | None] = queue.SimpleQueue()
        turns.carry_out({Start: self.start})
        # All started now, as later there may be no thread to be had.
        self._threads: list[threading.Thread] = []
        try:
            self._begin("store-disk-write", self._writes)
            for _ in range(readers):
                self._begin("store-disk-read", self._reads)
        except BaseException:
            self.close()
            raise

    def start(self, effect: Start[StoreWork]) -> None:
        """Within a turn: as many works as the actor has under way wait at most."""
        (self._reads if isinstance(effect.work, ReadValues) else self._writes).put(effect)

    def close(self) -> None:
        """When what is under way has ended. May be called twice."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._writes.put(None)
            self._reads.put(None)
        for thread in threads:
            thread.join()
        self._disk.close()

    @property
    def counts(self) -> dict[str, int]:
        """Counters of the disk."""
        return {f"ssd_{name}": value for name, value in self._disk.counts.items()}

    def _begin(self, name: str, works: "queue.SimpleQueue[Start[StoreWork] | None]") -> None:
        thread = threading.Thread(target=self._run, args=(works,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _run(self, works: "queue.SimpleQueue[Start[StoreWork] | None]") -> None:
        try:
            while (start := works.get()) is not None:
                self._turns.take(WorkDone(start.work_id, self._result(start.work)))
        except Exception as error:
            self._on_crash(error)
            log.critical("store_disk_turn_crashed", exc_info=error)

    def _result(self, work: StoreWork) -> StoreResult:
        try:
            return self._hand.carry_out(work)
        except Exception as error:  # our bug: this process will end, and until then, waiters get a failure
            self._on_crash(error)
            log.critical("store_disk_crashed", exc_info=error)
            return WorkFailed(f"a bug: {error}")


class DiskHand:
    """Does one work after the other; reads, from several threads. `view`: the bytes of a cell, by offset and size."""

    def __init__(self, disk: ObjectDisk, view: Callable[[int, int], memoryview]) -> None:
        self._disk = disk
        self._view = view

    def carry_out(self, work: StoreWork) -> StoreResult:
        """How it ends."""
        try:
            return self._read(work) if isinstance(work, ReadValues) else self._change(work)
        except (DiskFault, DiskBusy) as fault:
            if isinstance(work, RemoveSegments) and work.instead:
                log.critical("store_values_may_come_back", count=work.instead, error=str(fault), after="a restart")
            log.error("store_disk_not_written", reason=str(fault))
            return WorkFailed(str(fault), full=_passes(fault.__cause__))

    def _change(self, work: StoreWork) -> StoreResult:
        disk = self._disk
        match work:
            case WriteValues(values, end):
                cells = [self._view(value.offset, _cell_bytes(value.record.size)) for value in values]
                checksums = [checksum_of(cell[: value.record.size]) for value, cell in zip(values, cells, strict=True)]
                rows = zip(values, checksums, cells, strict=True)
                disk.write([(value.key, value.record._replace(checksum=made), cell) for value, made, cell in rows], end)
                return ValuesWritten(tuple(checksums))
            case CommitValues(committed):
                disk.commit(committed)
            case MoveValues(moved, gone):
                for key, record, to in moved:
                    disk.copy(key, record, to)
                disk.change([to for _, _, to in moved], gone)
            case ForgetValues(sequences):
                disk.change([], sequences)
            case CreateSegment(segment, length):
                disk.create(segment, length)
            case RemoveSegments(segments):
                disk.remove(segments)
        return Done()

    def _read(self, work: ReadValues) -> ValuesRead:
        outcomes: list[str] = []
        try:
            for value in work.values:
                cell = self._view(value.offset, _cell_bytes(value.record.size))
                good = self._disk.read(value.key, value.record, cell, ahead=len(work.values) > 1)
                outcomes.append(GOOD if good else BAD)
        except DiskBusy as busy:
            log.debug("store_promotion_denied", reason=str(busy))
            return _filled(outcomes, BUSY, work)
        except DiskFault as fault:
            log.error("store_disk_off", reason=str(fault))
            return ValuesRead(_filled(outcomes, UNREAD, work).outcomes, str(fault))
        return ValuesRead(tuple(outcomes))


def _filled(outcomes: Sequence[str], with_what: str, work: ReadValues) -> ValuesRead:
    return ValuesRead((*outcomes, *(with_what,) * (len(work.values) - len(outcomes))))


def _passes(cause: BaseException | None) -> bool:
    """Return whether the disk, or the system, lacks room that it may have again."""
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, *SCARCE)


def _cell_bytes(size: int) -> int:
    """Bytes of a value's cell that are read or written: whole pages where it begins at one."""
    return round_up(size, PAGE_BYTES) if size >= LARGE_BYTES else size
