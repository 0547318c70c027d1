"""Opens, makes and replaces files that only this user controls, in directories that others may share.

A symlink at a path's end is never followed, a FIFO never waited for, and no file of another user trusted. Processes that
share files run as one user; see `NotOurs`.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

FILE_MODE, DIRECTORY_MODE = 0o600, 0o700
MAX_BYTES = 64 << 20
"""Upper limit of a file that is read whole."""
_GUARDED = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotOurs(OSError):
    """A path whose file is another user's, or of another kind than expected. `strerror` says which."""


def open_own(path: str | Path, flags: int) -> int:
    """Return a descriptor of a regular file of this user; with O_CREAT it may be made. Raises OSError, NotOurs among them."""
    try:
        fd = os.open(path, flags | _GUARDED, FILE_MODE)
    except ValueError as error:  # a path from a peer may hold a NUL
        raise NotOurs(errno.EINVAL, str(error)) from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise NotOurs(errno.ELOOP, "it is a symbolic link") from None
    try:
        _look(os.fstat(fd), stat.S_ISREG, "it is no regular file")
    except NotOurs:
        os.close(fd)
        raise
    return fd


def read_own(path: Path) -> bytes:
    """Return the first `MAX_BYTES` of a file of this user. Raises OSError."""
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read(MAX_BYTES)


def replace_own(path: Path, content: bytes, *, mode: int = FILE_MODE) -> None:
    """Replace a file's content whole or not at all. Raises OSError, which names `path`, and leaves nothing behind."""
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    try:
        with open(open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask
            file.write(content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def own_files(directory: str | Path, prefix: str) -> Iterator[Path]:
    """Yield the regular files of this user whose names begin with `prefix`; others are skipped. A directory that cannot be
    read has none."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                with suppress(OSError):  # gone meanwhile, or another user's
                    _look(entry.stat(follow_symlinks=False), stat.S_ISREG, "")
                    yield Path(entry.path)


def make_own_directory(directory: Path, *, closes: bool = True) -> None:
    """Make a directory that only this user can enter, or check that only this user can write into it; `closes`: one that others
    can read is closed to them. Raises OSError, NotOurs among them, which names it; parents may belong to others, and be
    symlinks."""
    with suppress(FileExistsError):
        directory.mkdir(mode=DIRECTORY_MODE, parents=True)
    state = directory.lstat()
    try:
        if stat.S_ISLNK(state.st_mode):
            raise NotOurs(errno.ELOOP, "it is a symbolic link: name the directory itself")
        _look(state, stat.S_ISDIR, "it is no directory")
        if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise NotOurs(errno.EPERM, "others can write into it: chmod go-w it, and see that nothing foreign is there")
    except NotOurs as error:
        error.filename = str(directory)
        raise
    if closes and stat.S_IMODE(state.st_mode) & ~DIRECTORY_MODE & 0o777:
        directory.chmod(DIRECTORY_MODE)


def _look(state: os.stat_result, is_kind: Callable[[int], bool], otherwise: str) -> None:
    if not is_kind(state.st_mode):
        raise NotOurs(errno.EINVAL, otherwise)
    if state.st_uid != os.geteuid():
        raise NotOurs(errno.EPERM, f"it belongs to another user, uid {state.st_uid}")
