"""Tenants: how much of a pool the blocks and values of each may take up, and who may use which keys of a store. PURE.

A tenant of blocks is the name of an API key.

A namespace is a prefix of keys, and belongs to one tenant: a value's key names its tenant, after a restart too. A user of a
store is known by the key of the connection, never by what it claims. A request outside of its namespaces is answered as if the
key were empty, which no value has and no put gets: there is nothing, and nothing can be put or removed there.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mooncake_zmq.core.keys import NAME_PATTERN
from mooncake_zmq.kv.shares import NO_OWNER

MAX_TENANTS = 64
MAX_NAMESPACE_CHARS = 512
HIDDEN = ""
"""In place of a key that is none of the asker's business."""
NO_TENANT = NO_OWNER
"""The number of no tenant: of a name that is not configured, and of keys in no namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTenant:
    """Limits of one tenant in each pool."""

    name: str
    """The name of an API key."""
    dram_bytes: int = 0
    """Bytes of `pool_bytes`; 0: what the others' shares leave, which all without one have in common. Over it, the tenant's own
    blocks make room, least recently used first, and a put gets none where all are leased. Within it, it loses no block to
    others."""
    ssd_bytes: int = 0
    """Bytes of `ssd.bytes`, likewise."""

    def __post_init__(self) -> None:
        _check_tenant(self, (self.name,))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTenant:
    """One tenant of the stores of a deployment."""

    name: str
    namespaces: tuple[str, ...]
    """Prefixes of its keys, such as "team-a/"."""
    clients: tuple[str, ...] = ()
    """Names of keys (`mooncake-zmq keys make --store NAME`) that may read, put and remove there."""
    readers: tuple[str, ...] = ()
    """Names of keys that may read there."""
    dram_bytes: int = 0
    """Bytes of each store's memory, cells that are being written included; 0: as much as there is. A value counts as
    `object_bytes` / `max_objects` at least, so that this is a share of the rows as well. Over it, the tenant's own values make
    room, those used longest ago first; where all are leased or pinned hard, a put gets none."""
    ssd_bytes: int = 0
    """Bytes of each store's disk, records with their headers and keys, each counted as `ssd.bytes` / `ssd.max_objects` at
    least; 0: as much as there is. Over it, those that memory does not have go. Within it, none goes for others: all share one
    log, and of a segment that goes, to make room for another, what belongs to tenants with a quota moves on. That is a promise
    as long as the quotas together are no more than `ObjectSsdSettings.promised_bytes`, nearly half of the disk, in which a
    value of less than a page counts as one or two."""

    def __post_init__(self) -> None:
        _check_tenant(self, (self.name, *self.clients, *self.readers))
        if not self.namespaces or not all(0 < len(each) <= MAX_NAMESPACE_CHARS for each in self.namespaces):
            raise ValueError(f"tenants: {self.name} needs namespaces of 1 to {MAX_NAMESPACE_CHARS} characters")


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


class PoolTenants:
    """Tenants of the blocks of one pool, numbered from 1. A request names its tenant, and so do the puts of the
    node that computes it; the tenant's salt is in the keys, so that the blocks stay its on another host or tier."""

    def __init__(self, known: Sequence[PoolTenant]) -> None:
        self.names = ("", *(each.name for each in known))
        """By number."""
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def number(self, name: str) -> int:
        """The number of a tenant; one that the configuration does not name has `NO_TENANT`."""
        return self._numbers.get(name, NO_TENANT)


def slots_of(shares_bytes: Sequence[int], room_bytes: int, slots: int) -> tuple[int, ...]:
    """How many of all slots each share of a tier's bytes is. One of less than a block is none."""
    return tuple(share * slots // room_bytes for share in shares_bytes)


class Tenants:
    """Those of one store, numbered from 1."""

    def __init__(self, known: Sequence[StoreTenant]) -> None:
        self.known = known
        self._by_namespace = {space: number for number, each in enumerate(known, 1) for space in each.namespaces}
        self._lengths = sorted({len(space) for space in self._by_namespace})

    def of(self, key: str) -> int:
        """The tenant of this key."""
        for length in self._lengths:
            number = self._by_namespace.get(key[:length])
            if number is not None:
                return number
        return NO_TENANT

    def reach_of(self, user: str | None) -> Reach | None:
        """The keys that the holder of the key `user` may use; None: all, as there are no tenants, or as it is this very user of
        the machine, who needed no key."""
        if user is None or not self.known:
            return None
        writes = [space for each in self.known if user in each.clients for space in each.namespaces]
        reads = [space for each in self.known if user in each.readers for space in each.namespaces]
        return Reach((*writes, *reads), tuple(writes))


def check_tenants(tenants: Sequence[StoreTenant]) -> None:
    """Raises ValueError where it is not certain whose a key is."""
    _check_unique(tenants)
    spaces = sorted((space, each.name) for each in tenants for space in each.namespaces)
    for (space, name), (longer, other) in itertools.pairwise(spaces):
        if longer.startswith(space):
            raise ValueError(f"tenants: {longer!r} of {other} is within {space!r} of {name}: a key belongs to one namespace")


def check_shares(known: Sequence[PoolTenant], dram_bytes: int, ssd_bytes: int) -> None:
    """Raises ValueError for shares that cannot all be kept. `ssd_bytes`: 0 where there is no SSD."""
    _check_unique(known)
    if sum(each.dram_bytes for each in known) > dram_bytes:
        raise ValueError(f"tenants: their dram_bytes are more than pool_bytes, {dram_bytes}: a share is a promise")
    if ssd_bytes and sum(each.ssd_bytes for each in known) > ssd_bytes:
        raise ValueError(f"tenants: their ssd_bytes are more than ssd.bytes, {ssd_bytes}: a share is a promise")


def _check_tenant(tenant: PoolTenant | StoreTenant, names: Iterable[str]) -> None:
    for name in names:
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(f"tenants: {name!r} is no name: write 1 to 63 of a-z, 0-9, '.', '_', '-'")
    if min(tenant.dram_bytes, tenant.ssd_bytes) < 0:
        raise ValueError(f"tenants: {tenant.name}: dram_bytes and ssd_bytes are at least 0")


def _check_unique(tenants: Sequence[PoolTenant | StoreTenant]) -> None:
    if len(tenants) > MAX_TENANTS:
        raise ValueError(f"more than {MAX_TENANTS} tenants")
    names = [each.name for each in tenants]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"tenants: {repeated[0]} is there twice")
