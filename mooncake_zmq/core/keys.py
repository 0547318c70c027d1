"""The cluster's public keys: their names, and the sockets to which each key gives access. PURE: `transfer` does files and
sockets.

A `public_keys` file is text, one key a line: NAME KINDS DATE KEY; empty lines and those that begin with # are ignored. A name
may have two keys, the newer one last: while a key is rotated both are valid, so no process has to wait for another.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

Plane = Literal["control", "data", "store", "events"]
"""Use of a listening socket: messages between actors, reads of blocks, store clients, subscribers of KV events."""
PLANES: tuple[Plane, ...] = get_args(Plane)
ReadT = TypeVar("ReadT")
Kind = Literal["node", "store", "events"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LETS_IN: Mapping[Plane, Kind] = {"control": "node", "data": "node", "store": "store", "events": "events"}
"""Kind of key that a plane requires. The messages that a node may then send stand in `routes.SAYS`."""
MAX_KEYS_OF_ONE = 2
MAX_KEYS = 4096
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
"""Name of a node, a host or a client."""
_KEY_PATTERN = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
_DATE_PATTERN = re.compile(r"\d{4}-\d\d-\d\d")
_HEADER = (
    "# The public keys of this cluster: NAME KINDS DATE KEY. Copy this file to each of its hosts; nothing here is secret.\n"
)


class KeysError(ValueError):
    """A mistake in the keys' files or settings; the message is one line."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """One public key. `key`: 40 characters of Z85. `made`: YYYY-MM-DD, for information only."""

    name: str
    kinds: tuple[Kind, ...]
    made: str
    key: str

    @property
    def fingerprint(self) -> str:
        """A digest short enough to compare by eye."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class KeyBook:
    """All public keys of a cluster, in the file's order."""

    keys: tuple[PublicKey, ...] = ()
    _by_key: dict[str, PublicKey] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_key", {each.key: each for each in self.keys})
        if len(self.keys) > MAX_KEYS:
            raise KeysError(f"more than {MAX_KEYS} keys")
        if len(self._by_key) < len(self.keys):
            raise KeysError("a key is there twice")
        for each in self.keys:
            if len(self.of(each.name)) > MAX_KEYS_OF_ONE:
                raise KeysError(f"{each.name} has more than {MAX_KEYS_OF_ONE} keys: drop the old ones")

    def of(self, name: str) -> tuple[str, ...]:
        """Return the keys of `name`, the newest first."""
        return tuple(each.key for each in reversed(self.keys) if each.name == name)

    def admitted(self, plane: str, key: str) -> str | None:
        """Return the name of the holder of `key` if the key gives access to the plane; else None."""
        known = self._by_key.get(key)
        return known.name if known is not None and LETS_IN.get(plane) in known.kinds else None  # type: ignore[call-overload]

    def with_key(self, added: PublicKey) -> "KeyBook":
        """Return the book with one more key. Raises KeysError."""
        return KeyBook((*self.keys, added))

    def with_newest_only(self, name: str) -> "KeyBook":
        """Return the book without the older keys of `name`."""
        newest = self.of(name)[:1]
        return KeyBook(tuple(each for each in self.keys if each.name != name or each.key in newest))

    def still_in(self, text: str, own: str) -> "KeyBook":
        """Return the book without the keys that a text lacks, but for the key `own`. The text may be no valid book: a key that
        was removed from it is removed whatever else is wrong with it."""
        left = {(each.name, each.kinds, each.key) for each in each_readable(text, lambda line: _entries([line]))}
        return KeyBook(tuple(each for each in self.keys if each.key == own or (each.name, each.kinds, each.key) in left))

    def encoded(self) -> str:
        """Return the file's text."""
        lines = (f"{each.name} {','.join(each.kinds)} {each.made} {each.key}\n" for each in self.keys)
        return _HEADER + "".join(lines)


def parse(text: str) -> KeyBook:
    """Return the book in a file's text. Raises KeysError with the line's number."""
    return KeyBook(tuple(_entries(text.splitlines())))


def each_readable(text: str, read: Callable[[str], Iterable[ReadT]]) -> Iterator[ReadT]:
    """Return what `read` makes of each line by itself, without the lines for which it raises ValueError."""
    for line in text.splitlines():
        with suppress(ValueError):
            yield from tuple(read(line))


def _entries(lines: Iterable[str]) -> Iterable[PublicKey]:
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            words = line.split()
            if len(words) != len(("NAME", "KINDS", "DATE", "KEY")):
                raise KeysError(f"line {number}: write NAME KINDS DATE KEY")
            name, kinds, made, key = words
            known: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind in kinds.split(","))
            if not NAME_PATTERN.fullmatch(name) or not _KEY_PATTERN.fullmatch(key) or not _DATE_PATTERN.fullmatch(made):
                raise KeysError(f"line {number}: that is no name, date or key")
            if len(known) != len(kinds.split(",")):
                raise KeysError(f"line {number}: the kinds of keys are {', '.join(KINDS)}")
            yield PublicKey(name, known, made, key)
