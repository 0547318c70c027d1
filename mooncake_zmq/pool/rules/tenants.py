"""Whose keys are whose in a store, who may use them, and how much of memory and disk they may take up. PURE.

A namespace is what keys begin with, and belongs to one tenant: whose a value is its key tells, after a restart too. Who uses a
store is known by the key of his connection, never by what he says. What is outside of his namespaces he is told as if its key
were empty, which no value has and no put gets: there is nothing, and nothing can be put or removed there.
"""

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mooncake_zmq.core.keys import NAME_PATTERN
from mooncake_zmq.pool.rules.linked_rows import LinkedRows

MAX_TENANTS = 64
MAX_NAMESPACE_CHARS = 512
HIDDEN = ""
"""In place of a key that is none of the asker's business."""
NOBODY = 0
"""The number of no tenant, to whom all keys belong that are in no namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTenant:
    """One tenant of the stores of a deployment."""

    name: str
    namespaces: tuple[str, ...]
    """What its keys begin with, such as "team-a/"."""
    clients: tuple[str, ...] = ()
    """Names of keys (`mooncake-zmq keys make --store NAME`) that may read, put and remove there."""
    readers: tuple[str, ...] = ()
    """Names of keys that may read there."""
    dram_bytes: int = 0
    """Of each store's memory, cells that are being written included; 0: as much as there is. A value counts as
    `object_bytes` / `max_objects` at least, so that this is a share of the rows as well. Over it, the tenant's own values make
    room, those used longest ago first; where all are leased or pinned hard, a put gets none."""
    ssd_bytes: int = 0
    """Of each store's disk, records with their headers and keys, each counted as `ssd.bytes` / `ssd.max_objects` at least;
    0: as much as there is. Over it, those that memory does not have go. Within it, none goes for others: all share one log,
    and of a segment that goes, to make room for another, what belongs to tenants with a quota moves on. That is a promise as
    long as the quotas together are no more than `ObjectSsdSettings.promised_bytes`, nearly half of the disk, in which a value
    of less than a page counts as one or two."""

    def __post_init__(self) -> None:
        for name in (self.name, *self.clients, *self.readers):
            if not NAME_PATTERN.fullmatch(name):
                raise ValueError(f"tenants: {name!r} is no name: write 1 to 63 of a-z, 0-9, '.', '_', '-'")
        if not self.namespaces or not all(0 < len(each) <= MAX_NAMESPACE_CHARS for each in self.namespaces):
            raise ValueError(f"tenants: {self.name} needs namespaces of 1 to {MAX_NAMESPACE_CHARS} characters")
        if min(self.dram_bytes, self.ssd_bytes) < 0:
            raise ValueError(f"tenants: {self.name}: dram_bytes and ssd_bytes are at least 0")


@dataclass(frozen=True, slots=True)
class Reach:
    """The namespaces that one client may read, and those that it may change."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def readable(self, keys: Iterable[str]) -> list[str]:
        """With those hidden that it may not read."""
        return [key if key.startswith(self.reads) else HIDDEN for key in keys]

    def writable(self, keys: Iterable[str]) -> list[str]:
        """With those hidden that it may not change."""
        return [key if key.startswith(self.writes) else HIDDEN for key in keys]


class Tenants:
    """Those of one store, numbered from 1."""

    def __init__(self, known: Sequence[StoreTenant]) -> None:
        self.known = known
        self._by_namespace = {space: number for number, each in enumerate(known, 1) for space in each.namespaces}
        self._lengths = sorted({len(space) for space in self._by_namespace})

    def of(self, key: str) -> int:
        """Whose this key is."""
        for length in self._lengths:
            number = self._by_namespace.get(key[:length])
            if number is not None:
                return number
        return NOBODY

    def reach_of(self, user: str | None) -> Reach | None:
        """What the holder of the key `user` may do; None: everything, as there are no tenants, or as it is this very user of
        the machine, who needed no key."""
        if user is None or not self.known:
            return None
        writes = [space for each in self.known if user in each.clients for space in each.namespaces]
        reads = [space for each in self.known if user in each.readers for space in each.namespaces]
        return Reach((*writes, *reads), tuple(writes))


class Holdings:
    """What each tenant takes up of one tier, against its quotas; and its rows of the tier's table in the order of their use.

    `kinds`: several such orders for each tenant. Rows are in one of them, or in none.
    """

    def __init__(self, tenants: Tenants, quotas: Iterable[int], *, rows: int = 0, kinds: int = 1) -> None:
        self.tenants = tenants
        self.quotas = [0, *quotas]
        self.bytes = [0] * len(self.quotas)
        self.of = array("H")
        """Whose each row is."""
        self._kinds = kinds
        self._lists = kinds * len(self.quotas)
        self._order = LinkedRows(self._lists)
        self._readable = LinkedRows(len(self.quotas))
        for _ in range(rows):
            self.add_row()

    def add_row(self) -> None:
        self.of.append(NOBODY)
        self._order.add_row()
        self._readable.add_row()

    def take(self, row: int, tenant: int, size_bytes: int) -> None:
        """From now on the row is the tenant's."""
        self.of[row] = tenant
        self.bytes[tenant] += size_bytes

    def give(self, row: int, size_bytes: int) -> None:
        """It is free."""
        self.bytes[self.of[row]] -= size_bytes

    def append(self, row: int, kind: int = 0) -> None:
        """It was used last, of its order."""
        self._order.append(self._kinds * self.of[row] + kind, self._lists + row)

    def remove(self, row: int) -> None:
        """From its order."""
        self._order.remove(self._lists + row)

    def show(self, row: int) -> None:
        """It has a value that can be read."""
        self._readable.append(self.of[row], len(self.quotas) + row)

    def hide(self, row: int) -> None:
        """No more."""
        self._readable.remove(len(self.quotas) + row)

    def readable(self, tenant: int) -> Iterator[int]:
        """Rows of one tenant that were shown, the oldest first; nothing may change meanwhile."""
        return (row - len(self.quotas) for row in self._readable.rows(tenant))

    def coldest(self, tenant: int) -> Iterator[int]:
        """Rows of one tenant, those used longest ago first, one kind after the other; nothing may change meanwhile."""
        orders = (self._order.rows(self._kinds * tenant + kind) for kind in range(self._kinds))
        return (row - self._lists for row in itertools.chain.from_iterable(orders))

    def over(self, tenant: int, more_bytes: int = 0) -> int:
        """By how many bytes it is over its quota, or would be with some more; 0 or less: it is not."""
        quota = self.quotas[tenant]
        return self.bytes[tenant] + more_bytes - quota if quota else 0

    def named(self) -> dict[str, int]:
        """Bytes by name of the tenant."""
        return {each.name: self.bytes[number] for number, each in enumerate(self.tenants.known, 1)}


def check_tenants(tenants: Sequence[StoreTenant]) -> None:
    """Raises ValueError where it is not certain whose a key is."""
    if len(tenants) > MAX_TENANTS:
        raise ValueError(f"more than {MAX_TENANTS} tenants")
    spaces = sorted((space, each.name) for each in tenants for space in each.namespaces)
    for (space, name), (longer, other) in itertools.pairwise(spaces):
        if longer.startswith(space):
            raise ValueError(f"tenants: {longer!r} of {other} is within {space!r} of {name}: a key belongs to one namespace")
    names = [each.name for each in tenants]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"tenants: {repeated[0]} is there twice")
