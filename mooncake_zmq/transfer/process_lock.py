"""Liveness of a process on its host: a locked file that the kernel unlocks only when the process ends (SIGSTOP keeps it)."""

import fcntl
import os
import time
from pathlib import Path

from mooncake_zmq.transfer.own_files import open_own

TRIES = 20
TRY_INTERVAL_S = 0.01
"""A probe holds the lock for microseconds; only a live process holds it for longer than TRIES * TRY_INTERVAL_S."""


class ProcessLockError(Exception):
    """The lock belongs to another live process, or its file cannot be used."""


class ProcessLock:
    """The lock `<runtime_dir>/<node>.lock`, which a process holds until it ends; its file stores "pid incarnation".

    The file is never removed, as it remembers the last incarnation. Its descriptor is closed on exec, so child programs do
    not inherit it; a bare fork would, which is one more reason to use spawn alone.
    """

    def __init__(self, fd: int, path: Path, incarnation: int) -> None:
        self._fd = fd
        self.path = path
        self.incarnation = incarnation

    @classmethod
    def acquire(cls, runtime_dir: str | Path, node: str) -> "ProcessLock":
        """Take the lock with a new incarnation, greater than every earlier one even if the clock went back."""
        path = _path(runtime_dir, node)
        try:
            fd = open_own(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ProcessLockError(f"cannot use {path}: {error.strerror}; remove it, or name another directory") from error
        try:
            if not _try_exclusive(fd):
                pid, _ = _stored(fd)
                raise ProcessLockError(f"{node} is already running as pid {pid}: it holds {path}")
            _, last = _stored(fd)
            # Milliseconds, as an incarnation travels in a field of 48 bits.
            incarnation = max(time.time_ns() // 1_000_000, last + 1)
            text = f"{os.getpid()} {incarnation}\n".encode()
            try:
                os.pwrite(fd, text, 0)
                os.ftruncate(fd, len(text))
            except OSError as error:
                raise ProcessLockError(
                    f"cannot write {path}: {error.strerror}; make room, or name another directory"
                ) from error
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, path, incarnation)

    def release(self) -> None:
        """Release the lock. May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def is_alive(runtime_dir: str | Path, node: str, incarnation: int) -> bool:
    """Return whether `incarnation` of `node` still holds its lock. Also True while a new incarnation is just starting, or if
    the lock cannot be checked. False for an invalid name."""
    try:
        fd = open_own(_path(runtime_dir, node), os.O_RDONLY)
    except (FileNotFoundError, ProcessLockError):
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        # Read after the lock was found held: the number is the former one's until a new holder has written its own.
        return _stored(fd)[1] == incarnation
    else:
        return False
    finally:
        os.close(fd)


def holder(runtime_dir: str | Path, node: str) -> int | None:
    """Return the pid of the process that holds the lock of `node`, 0 while it is just taking it; None if no process does."""
    try:
        fd = open_own(_path(runtime_dir, node), os.O_RDONLY)
    except OSError:  # there is none, or it is another user's, whose process we may not signal
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _stored(fd)[0]
    else:
        return None
    finally:
        os.close(fd)


def _path(runtime_dir: str | Path, node: str) -> Path:
    if not node or "/" in node or node.startswith("."):
        raise ProcessLockError(f"{node!r} is no name for a node")
    return Path(runtime_dir) / f"{node}.lock"


def _try_exclusive(fd: int) -> bool:
    for _ in range(TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(TRY_INTERVAL_S)
        else:
            return True
    return False


def _stored(fd: int) -> tuple[int, int]:
    """Return (pid, incarnation) of the file; zeros when it is new or damaged."""
    try:
        pid, incarnation = os.pread(fd, 128, 0).split()
        return max(0, int(pid)), int(incarnation)  # to signal a negative one would mean a whole group
    except ValueError:
        return 0, 0
