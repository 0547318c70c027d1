"""The bytes of a store's SSD tier: segment files that are only ever appended to, and the index that finds what is in them.

    directory/tier.lock         held by the one process that uses the directory
              index.sqlite      see object_index.py
              segment-00000001  records one after another, see kv/object_record.py

A read is good only if header and bytes are those of the value asked for. So nothing has to be undone after a crash: what was
written without a row is never looked at, and a row without its bytes is a miss that is counted and whose row goes.

Sketch: a write is a batch of values of up to 16 MiB in one system call, direct (O_DIRECT) from their cells where these are
at pages, then a sync and one commit for all of them: some milliseconds, beside 5 to 15 of writing. A read is one call.
"""

import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import structlog

from mooncake_zmq.kv.layout import PAGE_BYTES
from mooncake_zmq.kv.object_record import LARGE_BYTES, ObjectRecord, header, header_bytes, record_bytes, round_up, why_missed
from mooncake_zmq.pool.node.tiers import BATCH_RECORDS
from mooncake_zmq.pool.ssd.disk_directory import (
    DiskError,
    Outcomes,
    Progress,
    Reporter,
    allows_direct,
    opening,
    sync_directory,
    take,
)
from mooncake_zmq.pool.ssd.disk_index import IndexFault, IndexUnusable, set_aside
from mooncake_zmq.pool.ssd.object_index import ObjectIndex
from mooncake_zmq.store.memory import checksum_of
from mooncake_zmq.transfer.process_lock import ProcessLock

COPY_BYTES = 4 << 20

log = structlog.get_logger()


class ObjectDisk:
    """One open tier. `read` may be called from several threads; all else from one thread at a time."""

    def __init__(
        self,
        directory: Path,
        lock: ProcessLock,
        index: ObjectIndex,
        lengths: dict[int, int],
        rows: dict[str, ObjectRecord],
        dropped: int,
        *,
        direct: bool,
    ) -> None:
        self.direct = direct
        self.lengths = lengths
        """Bytes of each segment file found at the start, in the order of their numbers."""
        self.recovered = rows
        """The records found at the start. Large: the caller that took it over may set it to {}."""
        self._outcomes = Outcomes(("read", "stale", "corrupt", "short"), "store_disk_fault")
        self.counts = self._outcomes.counts
        """Values by what became of them. Of the misses, stale: another value stands there; corrupt: torn or changed; short:
        beyond its file's end."""
        self.counts["unrecovered"] = dropped
        self._directory = directory
        self._lock = lock
        self._index = index
        self._open: tuple[int, int] | None = None
        """(segment, descriptor) being written."""
        self._buffer = memoryview(mmap.mmap(-1, BATCH_RECORDS * (LARGE_BYTES + PAGE_BYTES)))
        self._bounce = _Bounce()

    @classmethod
    def open(cls, directory: str | Path, largest_bytes: int, progress: Progress | None = None) -> "ObjectDisk":
        """Take the directory and load its index; one that is damaged or foreign is set aside, and the tier starts empty.

        Values of more than `largest_bytes` are dropped, as no memory takes them. `progress(done, total)` is called as rows are
        loaded. Raises `DiskError`.
        """
        directory = Path(directory)
        lock = take(directory)
        try:
            index, lengths, rows, dropped = _recover(directory, largest_bytes, Reporter(progress))
        except (OSError, IndexFault, IndexUnusable) as error:
            lock.release()
            raise DiskError(f"cannot use {directory}: {error}") from error
        except BaseException:
            lock.release()
            raise
        return cls(directory, lock, index, lengths, rows, dropped, direct=allows_direct(directory))

    # --- reading

    def read(self, key: str, record: ObjectRecord, cell: memoryview, *, ahead: bool = False) -> bool:
        """Read a value into the begin of its cell, which is at a page if the value is large: is it good? Raises `DiskFault` or
        `DiskBusy`.

        If not it is a miss, which is counted. The record may have moved meanwhile, then it is worth another try. `ahead`: the
        same thread will read more, maybe of what stands behind it.
        """
        name = key.encode()
        miss = (
            self._read_large(name, record, cell) if record.size >= LARGE_BYTES else self._read_small(name, record, cell, ahead)
        )
        self._outcomes.count(miss or "read")
        if miss:
            log.warning("store_disk_missed", why=miss, segment=record.segment, offset=record.offset, size=record.size)
        return not miss

    def _read_large(self, key: bytes, record: ObjectRecord, cell: memoryview) -> str:
        """Why it is a miss; empty if it is none."""
        bounce = self._bounce
        bounce.size = 0
        buffers = [bounce.view[:PAGE_BYTES], cell[: round_up(record.size, PAGE_BYTES)]]
        with self._outcomes.faults("read"):
            size = self._read(record.segment, buffers, record.offset)
        if size < record_bytes(key, record.size):
            return "short"
        expected = header(key, record)
        miss = why_missed(bytes(buffers[0][: len(expected)]), expected)
        return miss or ("" if checksum_of(cell[: record.size]) == record.checksum else "corrupt")

    def _read_small(self, key: bytes, record: ObjectRecord, cell: memoryview, ahead: bool) -> str:
        """The same. Values that share pages, or lie close by, come with one read."""
        bounce = self._bounce
        stop = record.offset + record_bytes(key, record.size)
        if ahead and bounce.holds(record.segment, record.offset, stop) and not self._take_small(key, record, cell):
            return ""
        start = record.offset // PAGE_BYTES * PAGE_BYTES
        buffer = bounce.view if ahead else bounce.view[: round_up(stop, PAGE_BYTES) - start]
        bounce.segment, bounce.start, bounce.size = record.segment, start, 0
        with self._outcomes.faults("read"):
            bounce.size = self._read(record.segment, [buffer], start)
        return self._take_small(key, record, cell) if bounce.holds(record.segment, record.offset, stop) else "short"

    def _take_small(self, key: bytes, record: ObjectRecord, cell: memoryview) -> str:
        """Copy a value out of what was read."""
        at = record.offset - self._bounce.start
        expected = header(key, record)
        miss = why_missed(bytes(self._bounce.view[at : at + len(expected)]), expected)
        if not miss:
            at += len(expected)
            cell[: record.size] = self._bounce.view[at : at + record.size]
            miss = "" if checksum_of(cell[: record.size]) == record.checksum else "corrupt"
        return miss

    def _read(self, segment: int, buffers: list[memoryview], offset: int) -> int:
        """Bytes that were there. The file is opened each time: a segment may go at any time, and there may be thousands."""
        try:
            with opening():
                fd = os.open(self._path(segment), os.O_RDONLY | os.O_CLOEXEC | self._flags)
        except FileNotFoundError:
            return 0
        try:
            return os.preadv(fd, buffers, offset)
        finally:
            os.close(fd)

    # --- writing

    def create(self, segment: int, length: int) -> None:
        """Create a file with all its room: a full disk is noticed here. Raises `DiskFault`."""
        with self._outcomes.faults("write"):
            try:
                os.posix_fallocate(self._descriptor(segment, os.O_CREAT | os.O_EXCL), 0, length)
                sync_directory(self._directory)
            except BaseException:
                self._close_segment()
                self._path(segment).unlink(missing_ok=True)
                raise

    def write(self, values: Sequence[tuple[str, ObjectRecord, memoryview]], end: int) -> None:
        """Write records that follow one another, up to `end`. Cells of large values are at pages. Raises `DiskFault`.

        None is found before `commit`. What stands behind a large value in its last page is written as it is.
        """
        start = values[0][1].offset // PAGE_BYTES * PAGE_BYTES
        buffers: list[memoryview] = []
        run = used = 0
        at = start
        """File offset that `used` of the buffer goes to."""
        for key, record, cell in values:
            skipped = record.offset - at
            name = header(key.encode(), record)
            begin = used + skipped
            self._buffer[used:begin] = bytes(skipped)
            self._buffer[begin : begin + len(name)] = name
            used, at = begin + header_bytes(key.encode(), record.size), record.offset + header_bytes(key.encode(), record.size)
            if record.size >= LARGE_BYTES:
                buffers += [self._buffer[run:used], cell[: round_up(record.size, PAGE_BYTES)]]
                run, at = used, at + round_up(record.size, PAGE_BYTES)
            else:
                self._buffer[used : used + record.size] = cell[: record.size]
                used, at = used + record.size, at + record.size
        if at < end:
            self._buffer[used : used + end - at] = bytes(end - at)
            used += end - at
        if run < used:
            buffers.append(self._buffer[run:used])
        with self._outcomes.faults("write"):
            self._write(values[0][1].segment, buffers, start)

    def commit(self, rows: Iterable[tuple[str, ObjectRecord]]) -> None:
        """Make records that were written to the newest segment durable and found: all of them, or none and `DiskFault`."""
        with self._outcomes.faults("write"):
            self._sync()
            self._index.put(rows)
        self._outcomes.works("write", "move", "remove")  # nothing is written while the tier is off

    def copy(self, key: str, record: ObjectRecord, to: ObjectRecord) -> None:
        """Copy the pages of a record to where it will stand after `change`, in the newest segment.

        Nothing is verified: its reader does that. Raises `DiskFault` or `DiskBusy`.
        """
        start, begin = (each.offset // PAGE_BYTES * PAGE_BYTES for each in (record, to))
        stop = record.offset + record_bytes(key.encode(), record.size)
        with self._outcomes.faults("move"):
            for done in range(0, stop - start, COPY_BYTES):
                piece = self._buffer[: min(COPY_BYTES, round_up(stop - start, PAGE_BYTES) - done)]
                self._read(record.segment, [piece], start + done)
                self._write(to.segment, [piece], begin + done)

    def change(self, moved: Sequence[ObjectRecord], gone: Iterable[int]) -> None:
        """Make copies durable and the ones to be found, and other records, by sequence, not found. Raises `DiskFault`."""
        with self._outcomes.faults("write"):
            if moved:
                self._sync()
            self._index.change(moved=moved, gone=gone)

    def remove(self, segments: Iterable[int]) -> None:
        """Remove files, durably. Raises `DiskFault`."""
        with self._outcomes.faults("remove"):
            for segment in segments:
                if self._open is not None and self._open[0] == segment:
                    self._close_segment()
                self._path(segment).unlink(missing_ok=True)
            sync_directory(self._directory)

    def close(self) -> None:
        """Give the directory up, when no other call is under way. May be called twice."""
        self._index.close()
        self._close_segment()
        self._lock.release()

    @property
    def _flags(self) -> int:
        return os.O_DIRECT if self.direct else 0

    def _path(self, segment: int) -> Path:
        return self._directory / f"segment-{segment:08d}"

    def _descriptor(self, segment: int, flags: int = 0) -> int:
        if self._open is None or self._open[0] != segment:
            self._close_segment()
            fd = os.open(self._path(segment), os.O_RDWR | os.O_CLOEXEC | self._flags | flags, 0o600)
            self._open = segment, fd
        return self._open[1]

    def _close_segment(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            os.close(opened[1])

    def _write(self, segment: int, buffers: list[memoryview], offset: int) -> None:
        size = sum(buffer.nbytes for buffer in buffers)
        written = os.pwritev(self._descriptor(segment), buffers, offset)
        if written != size:
            raise OSError(f"only {written} of {size} bytes were written")

    def _sync(self) -> None:
        if self._open is not None:
            os.fdatasync(self._open[1])


class _Bounce(threading.local):
    """At a page boundary, for each thread its own: what was read of small values, or of a large one's header."""

    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, LARGE_BYTES + 2 * PAGE_BYTES))
        self.segment = self.start = self.size = 0

    def holds(self, segment: int, start: int, stop: int) -> bool:
        """Was all of this read? It may have changed since only where nothing stood yet."""
        return segment == self.segment and self.start <= start and stop <= self.start + self.size


_Recovered = tuple[ObjectIndex, dict[int, int], dict[str, ObjectRecord], int]


def _recover(directory: Path, largest_bytes: int, progress: Progress) -> _Recovered:
    """The index, the lengths of the files, what stands in them and how many rows went; all empty if it cannot be used."""
    path = directory / "index.sqlite"
    try:
        return _load(path, largest_bytes, progress)
    except IndexUnusable as error:
        aside = set_aside(path)
        log.error("store_index_unusable", error=str(error), set_aside=str(aside), consequence="the SSD tier starts empty")
    return _load(path, largest_bytes, progress)


def _load(path: Path, largest_bytes: int, progress: Progress) -> _Recovered:
    index = ObjectIndex.open(path)
    try:
        files = {_number(file): file for file in path.parent.glob("segment-*") if _number(file)}
        lengths = {number: files[number].stat().st_size for number in sorted(files)}
        rows: dict[str, ObjectRecord] = {}
        gone: list[int] = []
        for key, record in index.load(progress):
            end = record.offset + record_bytes(key.encode(), record.size)
            misplaced = record.size >= LARGE_BYTES and record.offset % PAGE_BYTES
            if end > lengths.get(record.segment, 0) or record.size > largest_bytes or misplaced:
                gone.append(record.sequence)
                continue
            older = rows.pop(key, None)
            if older is not None:  # the newer is true; there should be but one
                gone.append(older.sequence)
            rows[key] = record
        used = {record.segment for record in rows.values()}
        for number in [number for number in lengths if number not in used]:  # their values will not be found
            files[number].unlink()
            del lengths[number]
        if gone:  # on a full disk there may be room for that now
            log.warning("store_rows_dropped", count=len(gone), why="beyond their file's end, too large, or old")
            index.change(gone=gone)
    except BaseException:
        index.close()
        raise
    return index, lengths, rows, len(gone)


def _number(file: Path) -> int:
    """The number of a segment's file; 0 for another file."""
    digits = file.name.removeprefix("segment-")
    return int(digits) if digits.isascii() and digits.isdigit() else 0
