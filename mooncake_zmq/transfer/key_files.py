"""Keys on disk: DIR/NAME.secret, readable by its owner alone, and DIR/public_keys, by all users. Secrets go only to sockets.

A process reads its own secret once, and the public keys again whenever their file changes: a rotated key works without a
restart. A unit's secret is its credential `node.key`; its `public_keys` may be one too, but then they are read only once.
"""

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import structlog
import zmq

from mooncake_zmq.core import keys
from mooncake_zmq.core.keys import KeyBook, KeysError, Kind, PublicKey
from mooncake_zmq.transfer.own_files import make_own_directory, replace_own

log = structlog.get_logger()

PUBLIC_KEYS = "public_keys"
NEW_SECRET = ".secret.new"
"""The end of the name of a secret's file until its public key is known."""
CREDENTIAL = "node.key"
CREDENTIALS_VARIABLE = "CREDENTIALS_DIRECTORY"
MAX_FILE_BYTES = 1 << 20
SETTLED_S = 3.0
"""Time after which an incomplete file is no longer taken for one that is being copied."""
DROPPED_S = 60.0
"""Time after which a node ends if the file lacks its own key: no operator maintains its access list then."""
WORLD_READABLE = 0o644


@dataclass(slots=True, kw_only=True)
class Followed:
    """An access list in a file, followed as it changes; `refresh` is for one thread.

    An entry that is removed always loses access; one is added only by a complete file."""

    EVENTS: ClassVar[tuple[str, str, str]]
    """Names of its log events: the file is followed, it is not, and entries are removed although it is not."""
    path: Path
    _seen: tuple[int, int, int] | None
    """Identity of the file whose content is in use."""
    clock: Callable[[], float] = time.monotonic
    not_followed: str = ""
    """Reason why the present file is not in use; empty if it is."""
    _refused: tuple[int, int, int] | None = None
    _refused_at: float = 0.0

    def refresh(self) -> None:
        """Read the file if it has changed, and follow it. An unreadable file changes nothing; an incomplete one removes the
        entries that it lacks, once it has stayed so for SETTLED_S."""
        try:
            seen = identity_of(self.path)
            if seen == self._seen and not self.not_followed:
                return
            text = read_guarded(self.path)
        except (OSError, KeysError) as error:
            self._refuse(None, str(error))
            return
        try:
            count = self._take(text)
        except ValueError as error:
            self._refuse(seen, f"{self.path}: {error}")
            if self.clock() - self._refused_at >= SETTLED_S and (left := self._take_away(text)) is not None:
                log.info(self.EVENTS[2], path=str(self.path), keys=left)
        else:
            self._seen, self.not_followed, self._refused = seen, "", None
            log.info(self.EVENTS[0], path=str(self.path), keys=count)

    def _take(self, text: str) -> int:
        """Give access to its entries, and to no others; returns how many. Raises ValueError if it is not complete."""
        raise NotImplementedError

    def _take_away(self, text: str) -> int | None:
        """Remove the entries that it lacks; returns how many are left, None if none had to be removed."""
        raise NotImplementedError

    def _refuse(self, seen: tuple[int, int, int] | None, why: str) -> None:
        if not self.not_followed or seen != self._refused:
            self._refused, self._refused_at = seen, self.clock()
            log.warning(self.EVENTS[1], reason=why)
        self.not_followed = why


@dataclass(slots=True)
class Keys(Followed):
    """The keys of one process: its own pair, and all public keys of the present file. `book` is replaced whole, so that other
    threads may read it at any time. A file that lacks our own key is not complete."""

    EVENTS = ("public_keys_read", "public_keys_unreadable", "public_keys_taken_away")
    name: str
    public: str
    secret: bytes = field(repr=False)
    book: KeyBook
    _own_gone_at: float | None = None

    @property
    def own_is_dropped(self) -> bool:
        """Return whether the file has lacked our own key for DROPPED_S; one that cannot be read or parsed does not count."""
        return self._own_gone_at is not None and self.clock() - self._own_gone_at >= DROPPED_S

    def _take(self, text: str) -> int:
        gone_at, self._own_gone_at = self._own_gone_at, None
        book = keys.parse(text)
        if self.public not in book.of(self.name):  # an incomplete file, or our key was dropped
            self._own_gone_at = self.clock() if gone_at is None else gone_at
            raise KeysError(f"it does not have the public key of {self.name}")
        self.book = book
        return len(book.keys)

    def _take_away(self, text: str) -> int | None:
        left = self.book.still_in(text, self.public)
        if len(left.keys) == len(self.book.keys):
            return None
        self.book = left
        return len(left.keys)

    def _refuse(self, seen: tuple[int, int, int] | None, why: str) -> None:
        if seen is None:  # the file cannot be read
            self._own_gone_at = None
        Followed._refuse(self, seen, why)


def directory_of(setting: str) -> Path | None:
    """Return the directory of keys: `security.keys`, else systemd's credentials if they include keys; None if there are
    none."""
    public = credential(PUBLIC_KEYS)
    return Path(setting) if setting else public and public.parent


def credential(name: str) -> Path | None:
    """Return the path of the unit's systemd credential of this name, if it has one."""
    given = os.environ.get(CREDENTIALS_VARIABLE, "")
    path = Path(given) / name
    return path if given and path.is_file() else None


def load(directory: Path, name: str) -> Keys:
    """Return the keys of one process. Raises KeysError."""
    if not zmq.has("curve"):
        raise KeysError("this machine's libzmq was built without CURVE: install pyzmq's own wheel, which has it")
    path = directory / PUBLIC_KEYS
    try:
        seen = identity_of(path)
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror}") from None
    book = _read_book(path)
    secret = _read_secret(directory, name)
    try:
        public = zmq.curve_public(secret).decode()
    except (zmq.ZMQError, ValueError):
        raise KeysError(f"the secret of {name} is no secret key") from None
    if public not in book.of(name):
        raise KeysError(f"{path} does not have the public key of {name}'s secret: copy the file from where keys are made")
    return Keys(name, public, secret, book, path=path, _seen=seen)


def make(directory: Path, wanted: Iterable[tuple[str, tuple[Kind, ...]]]) -> list[PublicKey]:
    """Make a pair for each name that has none yet; returns the new public keys. Raises KeysError, OSError."""
    make_own_directory(directory, closes=False)
    with alone(directory):
        book, made = _book_or_none(directory), []
        _finish(directory, book)
        for name, kinds in wanted:
            if not keys.NAME_PATTERN.fullmatch(name):
                raise KeysError(f"{name!r} is no name: write 1 to 63 of a-z, 0-9, '.', '_', '-'")
            if not book.of(name):
                book, new = _with_new(directory, book, name, kinds)
                made.append(new)
        return made


def rotate(directory: Path, name: str) -> PublicKey:
    """Make a new pair; the former public key stays valid until it is dropped. Raises KeysError, OSError."""
    with alone(directory):
        book = read_book(directory)
        _finish(directory, book)
        former = next((each for each in book.keys if each.name == name), None)
        if former is None:
            raise KeysError(f"{directory} has no key of {name}")
        if len(book.of(name)) >= keys.MAX_KEYS_OF_ONE:
            raise KeysError(f"{name} has {keys.MAX_KEYS_OF_ONE} keys: drop the former one once {name} runs with the new one")
        return _with_new(directory, book, name, former.kinds)[1]


def drop(directory: Path, name: str) -> int:
    """Forget the former keys of `name`; returns how many. Raises KeysError, OSError."""
    with alone(directory):
        book = read_book(directory)
        _finish(directory, book)
        left = book.with_newest_only(name)
        _write_book(directory, left)
        return len(book.keys) - len(left.keys)


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Lock the keys there against other processes: of two that read and write the file, one would undo the other's change."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def read_book(directory: Path) -> KeyBook:
    """Return the public keys of a directory. Raises KeysError."""
    return _read_book(directory / PUBLIC_KEYS)


def _with_new(directory: Path, book: KeyBook, name: str, kinds: tuple[Kind, ...]) -> tuple[KeyBook, PublicKey]:
    """Add a new key. Its secret gets its name last, so that no process has a secret without a known public key; if this is
    interrupted, `_finish` goes on."""
    public, secret = zmq.curve_keypair()
    new = PublicKey(name, kinds, time.strftime("%Y-%m-%d", time.gmtime()), public.decode())
    book = book.with_key(new)
    replace_own(directory / f"{name}{NEW_SECRET}", secret + b"\n")
    _write_book(directory, book)
    _finish(directory, book)
    return book, new


def _finish(directory: Path, book: KeyBook) -> None:
    """Put new secrets in place whose public keys are known, and remove the others: nothing uses those."""
    for path in directory.glob(f"*{NEW_SECRET}"):
        name = path.name.removesuffix(NEW_SECRET)
        try:
            is_known = zmq.curve_public(_read(path)[0].strip()).decode() in book.of(name)
        except (zmq.ZMQError, ValueError, KeysError):
            is_known = False
        if is_known:
            path.replace(_secret_path(directory, name))
        else:
            path.unlink()


def _write_book(directory: Path, book: KeyBook) -> None:
    replace_own(directory / PUBLIC_KEYS, book.encoded().encode(), mode=WORLD_READABLE)


def _book_or_none(directory: Path) -> KeyBook:
    path = directory / PUBLIC_KEYS
    return _read_book(path) if path.exists() else KeyBook()


def _read_book(path: Path) -> KeyBook:
    """Return the public keys of a file. Raises KeysError."""
    try:
        return keys.parse(read_guarded(path))
    except (OSError, KeysError) as error:
        raise KeysError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def read_guarded(path: Path) -> str:
    """Return the text of a file that decides about access: only this user and root can have written it.

    Raises OSError, or KeysError, which does not name the path.
    """
    content, state = _read(path)
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KeysError("others can write it: chmod go-w it, and see that nothing foreign is in it")
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise KeysError("it is no text of keys") from None


def _read_secret(directory: Path, name: str) -> bytes:
    """Return the secret key of `name`. Raises KeysError."""
    given = credential(CREDENTIAL)
    path = given or _secret_path(directory, name)
    try:
        content, state = _read(path)
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror}; `mooncake-zmq keys make` makes it") from None
    except KeysError as error:
        raise KeysError(f"{path}: {error}") from None
    # systemd grants a service its credentials by an ACL, which shows as a group's permission; the directory is closed.
    if not given and state.st_mode & 0o077:
        raise KeysError(f"{path}: others can read it: chmod 600 it, and rotate the key")
    return content.strip()


def open_guarded(path: Path) -> tuple[int, os.stat_result]:
    """Return a descriptor of a file of this user or root, which the caller closes, and its status.

    Raises OSError, or KeysError, which does not name the path.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    state = os.fstat(fd)
    if stat.S_ISREG(state.st_mode) and state.st_uid in (0, os.geteuid()):
        return fd, state
    os.close(fd)
    if not stat.S_ISREG(state.st_mode):
        raise KeysError("it is no regular file")
    raise KeysError(f"it belongs to another user, uid {state.st_uid}")


def _read(path: Path) -> tuple[bytes, os.stat_result]:
    """Return the content of a file of this user or root. Raises OSError, or KeysError, which does not name the path."""
    fd, state = open_guarded(path)
    with open(fd, "rb") as file:
        return file.read(MAX_FILE_BYTES), state


def _secret_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.secret"


def identity_of(path: Path) -> tuple[int, int, int]:
    """Return an identity of a file's content, unless a change is hidden on purpose. Raises OSError."""
    state = path.stat()
    return state.st_ino, state.st_mtime_ns, state.st_size
