"""The shared memory of a store: a generation per entry and the bytes of all values, in one file under /dev/shm.

    page 0        head (`transfer.segment_file`)
    next          generations  uint64[entries]   odd: being written; changed before a cell serves another value
    data_offset   memory       bytes[memory_bytes]

Named like the block segments, so that the same sweep removes it after a crash. A client that maps it holds the lock on a lock
file beside it for as long as it runs, by which the server can distinguish a late writer from a dead one.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from mooncake_zmq.kv.layout import PAGE_BYTES, div_ceil
from mooncake_zmq.transfer.own_files import open_own
from mooncake_zmq.transfer.segment_file import (
    HUGE_PAGE_BYTES,
    MADV_POPULATE_WRITE,
    SegmentFile,
    SharedMemoryError,
    file_name,
    is_locked,
    parse_name,
)

KIND = b"values"
SUFFIX = ".objects"
"""The suffix of the node's name in the segment's: the same node has a segment of blocks."""
_SHAPE = struct.Struct("<QQ")
"""Entries, bytes of memory."""
_POPULATE_STEP_BYTES = 64 << 20


class ObjectSegment:
    """One store's values, mapped here. The creator owns the file and removes it."""

    def __init__(self, file: SegmentFile, entries: int, memory_bytes: int) -> None:
        self.path = file.path
        self.memory_bytes = memory_bytes
        self._file = file
        whole = memoryview(file.mapping)
        start = _data_offset(entries)
        self.generations = whole[PAGE_BYTES : PAGE_BYTES + entries * 8].cast("Q")
        self.memory = whole[start : start + memory_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(file.mapping)) + start
        """Where `memory` begins in this process."""

    @classmethod
    def create(
        cls, directory: str | Path, cluster: str, node: str, incarnation: int, *, entries: int, memory_bytes: int
    ) -> "ObjectSegment":
        """Make the file with all its memory, or raise SharedMemoryError with a reason."""
        total = _data_offset(entries) + memory_bytes
        shape = _SHAPE.pack(entries, memory_bytes)
        what = f"{memory_bytes} bytes of values for {node}"
        name = file_name(cluster, f"{node}{SUFFIX}", incarnation)
        file = SegmentFile.create(Path(directory), name, KIND, incarnation, shape, total, what=what, setting="object_bytes")
        segment = cls(file, entries, memory_bytes)
        _populate(segment.address, memory_bytes, lambda: segment)
        return segment

    @classmethod
    def attach(cls, path: str | Path, incarnation: int, *, entries: int, memory_bytes: int) -> "ObjectSegment":
        """Map a server's segment for reading and writing, after checking that it is that incarnation's and of that shape."""
        path = Path(path)
        named = parse_name(path.name)
        if not path.is_absolute() or named is None or not named[1].endswith(SUFFIX) or named[2] != incarnation:
            raise SharedMemoryError(f"{str(path)!r:.200} is no name of a store's segment")
        shape = _SHAPE.pack(entries, memory_bytes)

        def total_of(written: bytes) -> int:
            if not written.startswith(shape):
                raise SharedMemoryError(f"{path} has another shape than its store says")
            return _data_offset(entries) + memory_bytes

        segment = cls(SegmentFile.attach(path, KIND, incarnation, total_of, writable=True), entries, memory_bytes)
        # A second for 2 GiB: no caller should wait for it, nor should it keep the mapping alone.
        arguments = (segment.address, memory_bytes, weakref.ref(segment))
        threading.Thread(target=_populate, args=arguments, name="populate", daemon=True).start()
        return segment

    def close(self) -> None:
        """Owner: remove the file and its memory, which reads as zeros then. Either way this mapping ends when nothing refers to
        it any more. May be called twice."""
        self._file.remove(emptied=True)


class ClientLock:
    """A client's lock file: locked by it from before it maps the segment until it ends, whichever way."""

    def __init__(self, directory: Path, cluster: str, client: bytes) -> None:
        """Raises OSError where the directory cannot be written."""
        self.path = lock_path(directory, cluster, client)
        self._fd = open_own(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _locks.add(self)

    def end(self) -> None:
        """May be called twice."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            self.disown()

    def disown(self) -> None:
        """In a forked child: close the descriptor, or the child would keep its parent's lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_locks: "weakref.WeakSet[ClientLock]" = weakref.WeakSet()


def _disown_all() -> None:
    for lock in list(_locks):
        lock.disown()


os.register_at_fork(after_in_child=_disown_all)


def lock_path(directory: Path, cluster: str, client: bytes) -> Path:
    return directory / file_name(cluster, f"client-{client.hex()}", 0)


def client_runs(path: Path) -> bool:
    """Return whether a running process holds this lock file; a file that is not there, or another user's, means no."""
    try:
        return is_locked(path)
    except OSError:
        return False


def remove_lock(path: Path) -> bool:
    """Remove what a client that is dead has left: False if there is nothing of it, whatever others put there."""
    try:
        os.close(open_own(path, os.O_RDONLY))
        path.unlink()
    except OSError:
        return False
    return True


def host_mark(configured: str) -> str:
    """Return what the stores of this host have alone, and of one machine those with the same `configured` name of a host. It
    gives nothing away: with the boot id itself a client of another host could pass for one of this."""
    return hashlib.sha256(f"{boot_id() or socket.gethostname()}\0{configured}".encode()).hexdigest()[:16]


def boot_id() -> str:
    """The id of this kernel's run: two processes with the same one may share memory."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _data_offset(entries: int) -> int:
    return div_ceil(PAGE_BYTES + entries * 8, HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _populate(address: int, size: int, keep: Callable[[], object]) -> None:
    """Touch all pages, as the first touch of one costs as much as copying it. Lets other threads run meanwhile.

    `keep`: asked before each step for what keeps the mapping in place during it; None ends this.
    """
    madvise = ctypes.CDLL(None).madvise
    for start in range(0, size, _POPULATE_STEP_BYTES):
        kept = keep()
        length = ctypes.c_size_t(min(_POPULATE_STEP_BYTES, size - start))
        if kept is None or madvise(ctypes.c_void_p(address + start), length, MADV_POPULATE_WRITE):
            return  # before Linux 5.14: pages are then mapped as they are touched
        del kept
