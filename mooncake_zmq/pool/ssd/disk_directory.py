"""A directory in which one process keeps a tier: its lock, what its file system allows, names that last, how loading goes."""

import contextlib
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import structlog

from mooncake_zmq.kv.layout import PAGE_BYTES
from mooncake_zmq.pool.ssd.disk_index import IndexFault
from mooncake_zmq.transfer.own_files import make_own_directory, open_own
from mooncake_zmq.transfer.process_lock import ProcessLock, ProcessLockError, holder

LOG_INTERVAL_S = 1.0
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_LOCK = "tier"

log = structlog.get_logger()

Progress = Callable[[int, int], None]
"""Called with (done, total)."""


class DiskError(Exception):
    """The tier cannot be opened: the directory is another process's, or cannot be used."""


class DiskBusy(Exception):
    """The system lacks what a read needs, and may have it again: this says nothing about the disk."""


class DiskFault(Exception):
    """The disk does not do its work any more: full, failing, read-only."""


class Outcomes:
    """Counts of the outcomes of a tier's reads and writes, and the one way in which a fault of its disk is reported."""

    def __init__(self, names: Iterable[str], fault_event: str) -> None:
        """`fault_event`: what the log calls a fault of this tier."""
        self.counts = dict.fromkeys((*names, "failed"), 0)
        self._fault_event = fault_event
        self._faulty: set[str] = set()
        """Operations that failed, and have not succeeded since."""
        self._lock = threading.Lock()

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self.counts[name] += by

    @contextlib.contextmanager
    def faults(self, operation: str) -> Iterator[None]:
        """Turns what a disk or an index that does not work raises into DiskFault."""
        try:
            yield
        except (OSError, IndexFault) as error:
            self.count("failed")
            self._faulty.add(operation)
            log.error(self._fault_event, operation=operation, error=str(error))
            raise DiskFault(f"{operation}: {error}") from error

    def works(self, *operations: str) -> None:
        """If one of these had failed, that is over. Who does without the disk meanwhile knows: on one that is full much goes
        well beside what fails."""
        for operation in operations:
            if operation in self._faulty:
                self._faulty.discard(operation)
                log.info(f"{self._fault_event}_over", operation=operation)


class Reporter:
    """Passes progress on, and to the log at the start and about every second."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._next_log = time.monotonic() + LOG_INTERVAL_S

    def __call__(self, done: int, total: int) -> None:
        if self._progress:
            self._progress(done, total)
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + LOG_INTERVAL_S
            log.info("disk_recovery", done=done, total=total)


@contextlib.contextmanager
def opening() -> Iterator[None]:
    """Open a segment here. Raises DiskBusy where the system lacks descriptors or memory for now, and OSError."""
    try:
        yield
    except OSError as error:
        if error.errno in SCARCE:
            raise DiskBusy(f"cannot open a segment now: {error.strerror}") from error
        raise


def take(directory: Path) -> ProcessLock:
    """Make the directory, ours alone, and lock it for this process. Raises DiskError."""
    try:
        make_own_directory(directory)
    except OSError as error:
        raise DiskError(f"cannot use {directory}: {error.strerror}") from error
    try:
        return ProcessLock.acquire(directory, _LOCK)
    except ProcessLockError as error:
        pid = holder(directory, _LOCK)
        raise DiskError(f"{directory} is used by pid {pid}; one cache-node per directory" if pid else str(error)) from error


def allows_direct(directory: Path) -> bool:
    """Can files here be read and written past the page cache?"""
    path = directory / "probe"
    page = mmap.mmap(-1, PAGE_BYTES)
    try:
        fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        try:
            os.pwrite(fd, page, 0)
            os.preadv(fd, [page], 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            return True  # a disk that is full or fails: what it is asked for next says so, and is tried again
        log.warning("disk_not_direct", directory=str(directory), reason=f"O_DIRECT: {error.strerror}")
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def sync_directory(directory: Path) -> None:
    """Make the names of new files durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
