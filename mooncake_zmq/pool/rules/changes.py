"""May a key get another value, or none, while a copy of it is on disk? No: after a crash the old one would be back. PURE.

So whatever would do that waits here until the disk has forgotten the copies, and then all that waits is done at once, before
anything else can get to the disk. Which keys a change is about is asked anew each time, as things change while it waits: its
put may run out of time, another of its keys may get to disk, or the disk may fail.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mooncake_zmq.kv.object_record import ObjectRecord
from mooncake_zmq.pool.rules.objects import Objects
from mooncake_zmq.store.codes import Code, Pin

MAX_WAITING = 4096
"""Changes that wait for the disk; of a further one nothing becomes."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change to values. `keys`: those that get another value, or none, as things stand. `make`: do it, given the keys whose
    copies had to go for waiting changes; a change that takes such a key's name away removes it from that set, so that later
    ones do not find it."""

    keys: Callable[[], Sequence[str]]
    make: Callable[[set[str]], None]


class Changes:
    """The changes of one store that wait."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._waiting: list[Change] = []
        self._erased: set[str] = set()
        """Keys whose copies went for what waits."""

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, change: Change) -> bool:
        """Make it now or, if it has to wait, later. False if too many wait already."""
        if not copies_on_disk(self._objects, change.keys()):
            change.make(set())
        elif len(self._waiting) >= MAX_WAITING:
            return False
        else:
            self._waiting.append(change)
        return True

    def in_the_way(self) -> list[tuple[str, ObjectRecord]]:
        """Copies that the disk has to forget before anything that waits can be done. To be asked while nothing is written."""
        log = self._objects.log
        assert log is not None
        assert not log.writing
        keys = dict.fromkeys(itertools.chain.from_iterable(change.keys() for change in self._waiting))
        return [(key, record) for key in keys if (record := log.record(key)) is not None]

    def forgotten(self, keys: Iterable[str]) -> None:
        """The disk has no copy of these any more, for good."""
        gone = list(keys)
        self._objects.demotion.drop_from_disk(gone)
        self._erased.update(gone)

    def make(self) -> None:
        """All that waits, as nothing is in its way."""
        waiting, self._waiting = self._waiting, []
        erased, self._erased = self._erased, set()
        for change in waiting:
            change.make(erased)


def copies_on_disk(objects: Objects, keys: Sequence[str]) -> list[str]:
    """Those of `keys` of which a copy is on disk, or on its way there."""
    log = objects.log
    return [] if log is None else [key for key in keys if key in log.by_key or key in log.writing]


def replaced(objects: Objects, now: float, client: bytes, put_id: int, indexes: Iterable[int]) -> list[str]:
    """Keys that a commit of these would give another value than they may have on disk."""
    put, log = objects.puts.put_of(now, client, put_id), objects.log
    if put is None or log is None:
        return []
    written = [put.keys[index] for index in indexes if index < len(put.keys) and put.grants[index].code is Code.OK]
    hides = put.pins & Pin.UPSERT or log.readable is not log.by_key
    return written if hides else [key for key in written if key in log.writing]
