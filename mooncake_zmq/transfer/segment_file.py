"""Files under /dev/shm that one process makes and others of the host map: their names, their head and their end.

    page 0    magic  version  kind  incarnation  total bytes  shape

The kind is what lies in the file, the shape what a reader must know to find it; both belong to the kind's own module. The
owner holds the file's lock while it runs, so that a sweep removes what a killed process has left, and nothing else.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote

from mooncake_zmq.kv.layout import PAGE_BYTES, div_ceil
from mooncake_zmq.transfer.own_files import open_own, own_files

MAGIC = b"MOONSEG\n"
VERSION = 1
FILE_PREFIX = "mooncake"
HUGE_PAGE_BYTES = 2 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap does not name it yet
HEAD = struct.Struct("<8sI8sQQ")
"""Magic, version, kind, incarnation, total bytes."""


class SharedMemoryError(Exception):
    """A segment that cannot be created, or a path that does not hold the expected segment."""


class SegmentFile:
    """One file, mapped here. The creator owns it and removes it; attachers may come and go."""

    def __init__(self, path: Path, mapping: mmap.mmap, shape: bytes, incarnation: int, owner_fd: int) -> None:
        self.path = path
        self.mapping = mapping
        self.shape = shape
        """The shape as its kind wrote it; that of an attached file is followed by zeros to the page's end."""
        self.incarnation = incarnation
        self._owner_fd = owner_fd

    @classmethod
    def create(
        cls, directory: Path, name: str, kind: bytes, incarnation: int, shape: bytes, total: int, *, what: str, setting: str
    ) -> Self:
        """Make the file with all its memory, under a random name if `name` is taken. Raises SharedMemoryError, which says
        `what` the memory is for and names `setting` as the one to lower."""
        _check_space(directory, total, f"{what}; lower {setting}")
        path, fd = _create(directory, name)
        try:
            # Held while this process runs: a sweep by another process, under any runtime directory, leaves the file alone.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A hole would kill the process that first touches it if memory has run out by then (SIGBUS).
            os.posix_fallocate(fd, 0, total)
            mapping = _map(fd, total, writable=True)
            first = HEAD.pack(MAGIC, VERSION, kind, incarnation, total) + shape
            mapping[: len(first)] = first
        except OSError as error:
            os.unlink(path)
            os.close(fd)
            raise SharedMemoryError(f"cannot create {path} of {total} bytes: {error.strerror}; lower {setting}") from error
        return cls(path, mapping, shape, incarnation, fd)

    @classmethod
    def attach(
        cls, path: Path, kind: bytes, incarnation: int, total_of: Callable[[bytes], int], *, writable: bool = False
    ) -> Self:
        """Map another process's file, after checks that it is of this kind and incarnation. Raises SharedMemoryError.

        `total_of`: checks a shape, or raises SharedMemoryError; returns how long such a file is.
        """
        try:
            fd = open_own(path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise SharedMemoryError(f"cannot attach {path}: {error.strerror}") from error
        try:
            shape, total = check_head(path, os.pread(fd, PAGE_BYTES, 0), os.fstat(fd).st_size, kind, incarnation, total_of)
            mapping = _map(fd, total, writable=writable)
        except (OSError, ValueError) as error:  # the latter: the file became shorter meanwhile
            raise SharedMemoryError(f"cannot attach {path}: {error}") from error
        finally:
            os.close(fd)
        return cls(path, mapping, shape, incarnation, -1)

    def remove(self, *, emptied: bool = False) -> None:
        """Remove the file if it is this process's; the mapping stays. `emptied`: its memory is free at once, as processes that
        still map it may be idle for long. May be called twice."""
        if self._owner_fd >= 0:
            if emptied:
                _empty(self._owner_fd)
            self.path.unlink(missing_ok=True)
            os.close(self._owner_fd)
            self._owner_fd = -1


def check_head(
    path: Path, raw: bytes, size: int, kind: bytes, incarnation: int, total_of: Callable[[bytes], int]
) -> tuple[bytes, int]:
    """Return the shape and the total bytes of a file of `size` bytes that begins with `raw`. Raises SharedMemoryError unless
    it is the expected one."""
    if len(raw) < PAGE_BYTES:
        raise SharedMemoryError(f"{path} is too short for a segment")
    magic, version, held, written, total = HEAD.unpack_from(raw)
    if magic != MAGIC or version != VERSION:
        raise SharedMemoryError(f"{path} is no segment of version {VERSION}")
    if held != kind.ljust(len(held), b"\0"):
        raise SharedMemoryError(f"{path} is a segment of another kind: {held!r} instead of {kind!r}")
    if written != incarnation:
        raise SharedMemoryError(f"{path} belongs to incarnation {written}, not {incarnation}")
    shape = raw[HEAD.size :]
    if not total == size == total_of(shape):
        raise SharedMemoryError(f"{path} has {size} bytes, its head says {total}")
    return shape, total


def file_name(cluster: str, node: str, incarnation: int) -> str:
    """Return the name of an incarnation's segment, or of another file that the same sweep removes."""
    # Quoting leaves no "=" and no "/" in a name, so `parse_name` can split it.
    return f"{FILE_PREFIX}={quote(cluster, safe='')}={quote(node, safe='')}={incarnation}"


def parse_name(name: str) -> tuple[str, str, int] | None:
    """Return (cluster, node, incarnation), or None for any other file."""
    parts = name.split("=")
    if len(parts) not in (4, 5) or parts[0] != FILE_PREFIX or not parts[3].isascii() or not parts[3].isdigit():
        return None
    return unquote(parts[1]), unquote(parts[2]), int(parts[3])


def is_segment_of(path: str, node: str, incarnation: int, directory: Path | None) -> bool:
    """Return whether this can be the segment of an incarnation of a node, by its name and, if given, its directory."""
    where = Path(path)
    named = parse_name(where.name)
    is_there = directory is None or where.parent == directory
    return (
        where.is_absolute() and ".." not in where.parts and is_there and named is not None and named[1:] == (node, incarnation)
    )


def sweep(directory: str | Path, cluster: str, is_alive: Callable[[str, int], bool]) -> list[Path]:
    """Remove this cluster's segments whose process has ended, and free their memory: `is_alive(node, incarnation)` is false and
    no process holds the file's lock. Files of other users are left alone."""
    removed = []
    for path in sorted(own_files(directory, f"{FILE_PREFIX}=")):
        named = parse_name(path.name)
        if named is None or named[0] != cluster or is_alive(named[1], named[2]):
            continue
        with contextlib.suppress(OSError):  # another sweep was first, or descriptors have run out: left for now
            if not is_locked(path):
                fd = open_own(path, os.O_RDWR)
                try:
                    _empty(fd)
                finally:
                    os.close(fd)
                path.unlink()
                removed.append(path)
    return removed


def is_locked(path: Path) -> bool:
    """Return whether a running process holds the file's lock. Raises OSError if it is not there or not this user's."""
    fd = open_own(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _create(directory: Path, name: str) -> tuple[Path, int]:
    for path in (directory / name, directory / f"{name}={secrets.token_hex(8)}"):
        try:
            return path, open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError as error:
            taken = error
        except OSError as error:
            raise SharedMemoryError(f"cannot create {path}: {error.strerror}") from error
    raise SharedMemoryError(f"cannot create {path}: {taken.strerror}") from taken


def _empty(fd: int) -> None:
    """Free a file's pages, mapped or not, in ascending order: generations lie before what they stand for, so that a reader
    of bytes that went finds its generation gone too. Does nothing to an empty file, or where the file system cannot."""
    with contextlib.suppress(OSError, ValueError), mmap.mmap(fd, 0) as mapping:
        for start in range(0, len(mapping), HUGE_PAGE_BYTES):
            mapping.madvise(mmap.MADV_REMOVE, start, min(HUGE_PAGE_BYTES, len(mapping) - start))


def _check_space(directory: Path, needed: int, why: str) -> None:
    try:
        room = os.statvfs(directory)
    except OSError as error:
        raise SharedMemoryError(f"cannot use {directory}: {error.strerror}") from error
    free = room.f_bavail * room.f_frsize
    if free < needed:
        raise SharedMemoryError(f"{directory} has {free >> 20} MiB free of the {div_ceil(needed, 1 << 20)} MiB needed: {why}")


def _map(fd: int, size: int, *, writable: bool) -> mmap.mmap:
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    with contextlib.suppress(OSError):  # has an effect only if shmem_enabled is "advise"
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
