"""The objects of one host's store: named values of any size in slab cells, two-phase puts, leases, eviction. PURE.

It never touches bytes: it says which cell a value goes to, and notes in `fences` the generations that the segment must
show before any answer leaves. An object's row in the columns is its entry; entries are reused, generations never are.

A put reserves cells, its writer fills them, a commit makes them readable. A writer that runs past its time may still write:
its cells stay in quarantine until it answers or is buried.

With a log, `ObjectLog`, values live in two tiers. A key has one value: what both tiers have of it is the same; see `changes.py`
for how it gets another one, or none.
"""

import heapq
import itertools
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from mooncake_zmq.kv.layout import PAGE_BYTES
from mooncake_zmq.pool.rules.cold_end import ColdEnd
from mooncake_zmq.pool.rules.disk_quotas import DiskQuotas
from mooncake_zmq.pool.rules.linked_rows import LinkedRows
from mooncake_zmq.pool.rules.object_log import MIN_SEGMENTS, SEGMENT_BYTES, ObjectLog, ObjectSsdSettings
from mooncake_zmq.pool.rules.object_record import ObjectRecord
from mooncake_zmq.pool.rules.shelf import Shelf
from mooncake_zmq.pool.rules.slab import PARTS, SlabAllocator
from mooncake_zmq.pool.rules.tenants import NOBODY, Holdings, StoreTenant, Tenants, check_tenants
from mooncake_zmq.store.codes import Code, Pin, is_key

SCAN_EVERY = 8
LEAST_ENDS = 64
"""Leases and puts that are over are not worth to be looked for among fewer than these."""
DISK_COUNTS = ("evicted_unsaved", "promoted", "promoted_bytes", "demoted", "demoted_bytes")
_NEVER = 1 << 62
"""Later than any use: not to be emptied."""


_SOFT, _HARD, _UPSERT, _PROMOTION = int(Pin.SOFT), int(Pin.HARD), int(Pin.UPSERT), int(Pin.PROMOTION)
"""As plain numbers: an operation on flags takes as long as the rest of what it decides."""


class State(IntEnum):
    """Life of an entry."""

    FREE = 0
    WRITING = 1
    COMMITTED = 2
    QUARANTINED = 3


class EntryEvent(IntEnum):
    """What moves it on."""

    RESERVE = 0
    COMMIT = 1
    FREE = 2
    QUARANTINE = 3


NEXT_STATE: dict[tuple[State, EntryEvent], State] = {
    (State.FREE, EntryEvent.RESERVE): State.WRITING,
    (State.WRITING, EntryEvent.COMMIT): State.COMMITTED,
    (State.WRITING, EntryEvent.FREE): State.FREE,
    (State.WRITING, EntryEvent.QUARANTINE): State.QUARANTINED,
    (State.QUARANTINED, EntryEvent.FREE): State.FREE,
    (State.COMMITTED, EntryEvent.FREE): State.FREE,
}
_MOVES: list[dict[int, int]] = [{} for _ in EntryEvent]
"""The same by event and by plain numbers: to look two names up takes longer than all else of a move."""
for (_before, _event), _after in NEXT_STATE.items():
    _MOVES[_event][int(_before)] = int(_after)
_RESERVE, _COMMIT, _FREE, _QUARANTINE = _MOVES


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings:
    """The second half of a cache-node: values of any size for store clients."""

    object_bytes: int = 1 << 30
    """Shared memory for values."""
    slab_bytes: int = 64 << 20
    """The largest value, and what classes of values above 1/128 of it take of the memory at a time; of smaller ones 1/16.
    64 MiB: a value of 4 KiB to 10 MiB wastes at most a seventh of its cell, one of 16 MiB nothing."""
    max_objects: int = 1 << 20
    """About 60 bytes of process memory each once in use, besides key and dict."""
    max_ttl_s: float = 30.0
    """Longest time for a put or a lease, whatever was asked."""
    max_leases_per_client: int = 1024
    """Of all clients with one key together, as a key may call itself by many names; who comes without a key counts for itself.
    1024: four streams of each of 256 engines."""
    max_puts_per_client: int = 1024
    """Counted in the same way."""
    max_client_share: float = 0.5
    """Part of the memory that one client may hold reserved or in quarantine; all clients with one key count as one."""
    ssd: ObjectSsdSettings = field(default_factory=ObjectSsdSettings)
    tenants: tuple[StoreTenant, ...] = ()
    """Who may use which keys over TCP, and how much they may take up. None: whoever has a key of the kind `store` may use all.
    Else nobody may use what is not his; who connects by `ipc://`, as this user of the machine, may use all still."""

    def __post_init__(self) -> None:
        check_tenants(self.tenants)
        if self.slab_bytes < 1 << 16 or self.object_bytes < self.slab_bytes:
            raise ValueError("slab_bytes must be at least 65536 and object_bytes at least slab_bytes")
        if self.max_objects < 1 or min(self.max_leases_per_client, self.max_puts_per_client) < 1:
            raise ValueError("max_objects, max_leases_per_client and max_puts_per_client must be at least 1")
        if self.max_ttl_s <= 0 or not 0 < self.max_client_share <= 1:
            raise ValueError("max_ttl_s must be positive and max_client_share in (0, 1]")
        if self.ssd.directory and self.ssd.max_objects < 2 * self.max_objects:
            raise ValueError("objects.ssd.max_objects must be at least twice objects.max_objects")
        if self.ssd.directory and self.slab_bytes + PAGE_BYTES > SEGMENT_BYTES:
            raise ValueError(f"slab_bytes must be at most {SEGMENT_BYTES - PAGE_BYTES} where values go to disk")
        if self.ssd.directory and self.ssd.segment_bytes < self.slab_bytes + PAGE_BYTES:
            least = MIN_SEGMENTS * (self.slab_bytes + PAGE_BYTES)
            raise ValueError(f"objects.ssd.bytes must be at least {least}, eight values of slab_bytes; or lower slab_bytes")


class Grant(NamedTuple):
    """A cell to write, if `code` is OK."""

    code: Code
    entry: int = 0
    offset: int = 0
    generation: int = 0


class Found(NamedTuple):
    """A readable value; `checksum` 0: none was made."""

    entry: int
    offset: int
    size: int
    generation: int
    checksum: int


class Unsaved(NamedTuple):
    """A value in memory that is to be written to disk."""

    key: str
    entry: int
    generation: int
    offset: int
    size: int
    pin: int


@dataclass(slots=True)
class Put:
    """Cells that a client may write until it commits, or its time is over."""

    client: bytes
    expires_at: float
    keys: tuple[str, ...]
    pins: int
    """Of `Pin`."""
    grants: list[Grant]
    reserved_bytes: int
    put_id: int
    quarantined: bool = False
    over: bool = False


@dataclass(slots=True)
class _Lease:
    client: bytes
    lease_id: int
    expires_at: float
    entries: list[int]
    over: bool = False


@dataclass(slots=True)
class _Account:
    """What all clients with one key hold together, as a key may call itself by many names. Who has no key has one alone."""

    user: str | None
    clients: int = 0
    leases: int = 0
    puts: int = 0
    reserved_bytes: int = 0


@dataclass(slots=True)
class _Client:
    """What one client holds."""

    account: _Account
    leases: dict[int, _Lease] = field(default_factory=dict)
    puts: dict[int, Put] = field(default_factory=dict)


class Objects:
    """See the module. Clients are named by opaque bytes; their put and lease ids are theirs, and a repeat changes nothing."""

    def __init__(self, settings: ObjectSettings, log: ObjectLog | None = None) -> None:
        self.settings = settings
        self.log = log
        self.slabs = SlabAllocator(settings.object_bytes, settings.slab_bytes)
        self.by_key: dict[str, int] = {}
        """Readable objects. Others may look keys up in it, and must not change it."""
        self.shelf = Shelf()
        """What is there of vLLMs' blocks; the owner asks it for changes."""
        self.fences: list[tuple[int, int]] = []
        """(entry, generation) in the order in which the segment must show them; the owner clears the list."""
        self.counts = dict.fromkeys(
            ("puts", "put_bytes", "evicted", "evicted_bytes", "units_taken_over", "dedup_hits", "dedup_bytes_saved")
            + ("puts_expired", "leases_expired", "quarantined", "no_room", "corrupt", "leased")
            + (DISK_COUNTS if log is not None else ())
            + (("evicted_over_quota",) if settings.tenants else ()),
            0,
        )
        classes = len(self.slabs.sizes)
        self._first_entry = 2 * classes
        self._lru = LinkedRows(2 * classes)
        """Evictable entries, least recently used first: list 2c for class c, 2c + 1 for its soft pins."""
        rows = range(self._first_entry)
        self.generation = array("Q", (0 for _ in rows))
        self._checksum = array("Q", (0 for _ in rows))
        self._size = array("Q", (0 for _ in rows))
        self._offset = array("Q", (0 for _ in rows))
        self._used_at = array("Q", (0 for _ in rows))
        self._leases = array("I", (0 for _ in rows))
        self._class = array("H", (0 for _ in rows))
        self._state = array("B", (0 for _ in rows))
        self._pin = array("B", (0 for _ in rows))
        self._key: list[str | None] = [None for _ in rows]
        self._free_entries = array("i")
        # Of each unit of memory: entries that cannot be evicted now, soft pins, and when any of its objects was last used.
        self._blocked, self._soft, self._unit_used_at = (array("q", bytes(8 * self.slabs.units)) for _ in range(3))
        self.expires_at = math.inf
        """Nothing that is held ends before."""
        self._clock = 0
        """Counts uses: the order of the LRU lists across classes."""
        self._clients: dict[bytes, _Client] = {}
        self._accounts: dict[str, _Account] = {}
        """By the name of the key."""
        self._ends: list[tuple[float, int, _Lease | Put]] = []
        """A heap of when leases and puts are over, but for leases without end. What ended before stays until it comes up, or
        until it is most of the heap."""
        self._timed = 0
        """Those in the heap that are not over."""
        self._end_numbers = itertools.count()
        self._writing: dict[str, int] = {}
        """Keys of plain puts under way."""
        self._object_bytes = 0
        self._client_bytes = max(settings.max_client_share * settings.object_bytes, self.slabs.slab_bytes)
        """What one client may hold reserved or in quarantine."""
        self.tenants = Tenants(settings.tenants)
        self._disk_quotas: DiskQuotas | None = None
        self._holdings: Holdings | None = None
        """Of memory: cells by tenant, and what of them can be evicted, soft pins last."""
        if settings.tenants:
            quotas = [each.dram_bytes for each in settings.tenants]
            self._holdings = Holdings(self.tenants, quotas, rows=self._first_entry, kinds=2)
            if log is not None:
                log.divide(self.tenants)
                self._disk_quotas = DiskQuotas(self._holdings, log, self._key, self._size, self.by_key)
        tenant_of = self._holdings.of if self._holdings is not None else ()
        self._cold = ColdEnd(self._first_entry, self._size, tenant_of) if log is not None else None
        self._held: set[int] = set()
        """Entries being written to disk: not evicted meanwhile, so that the work is not in vain."""

    @property
    def max_object_bytes(self) -> int:
        return self.slabs.slab_bytes

    def cell_bytes(self, size: int) -> int:
        """What a value of this size takes."""
        size_class = self.slabs.class_of(size)
        return self.slabs.slab_bytes if size_class is None else self.slabs.sizes[size_class]

    def _charge(self, size_class: int) -> int:
        """Bytes of a tenant's quota that a value takes: its cell, and its share of the rows at least, as those run out too."""
        return max(self.slabs.sizes[size_class], self.settings.object_bytes // self.settings.max_objects)

    @property
    def table_entries(self) -> int:
        """Rows that a table indexed by entry needs."""
        return self._first_entry + self.settings.max_objects

    def join(self, client: bytes, user: str | None) -> None:
        """A client begins, with the key `user` if it has one: all with that key share its limits."""
        assert client not in self._clients, "a client begins once"
        account = self._accounts.setdefault(user, _Account(user)) if user else _Account(None)
        account.clients += 1
        self._clients[client] = _Client(account)

    # --- writers

    def reserve(
        self,
        now: float,
        client: bytes,
        put_id: int,
        keys: Sequence[str],
        sizes: Sequence[int],
        *,
        pins: Pin = Pin.NONE,
        ttl_s: float,
    ) -> list[Grant]:
        """Cells for these values, each key answered on its own."""
        holder = self._holder(client)
        known = holder.puts.get(put_id)
        if known is not None:
            return known.grants
        if holder.account.puts >= self.settings.max_puts_per_client:
            self.counts["no_room"] += len(keys)
            return [Grant(Code.NO_ROOM)] * len(keys)
        put = Put(client, now + min(ttl_s, self.settings.max_ttl_s), tuple(keys), int(pins), [], 0, put_id)
        for key, size in zip(keys, sizes, strict=True):
            put.grants.append(self._reserve(holder.account, put, key, size))
        if any(grant.code is Code.OK for grant in put.grants):
            holder.puts[put_id] = put
            holder.account.puts += 1
            self._time(put)
        return put.grants

    def commit(
        self, now: float, client: bytes, put_id: int, indexes: Sequence[int], checksums: Sequence[int]
    ) -> list[Code] | None:
        """End a put: the keys at `indexes` were written, the others were given up. None if there is no such put."""
        holder = self._clients.get(client)
        put = holder.puts.pop(put_id, None) if holder else None
        if holder is None or put is None:
            return None
        self._close_put(holder.account, put)
        on_time = now <= put.expires_at and not put.quarantined
        written = dict(zip(indexes, checksums, strict=True)) if on_time else {}
        codes = [grant.code if on_time else Code.EXPIRED for grant in put.grants]
        for index, grant in enumerate(put.grants):
            if grant.code is not Code.OK:
                continue
            key = put.keys[index]
            if self._writing.get(key) == grant.entry:
                del self._writing[key]
            if index in written:
                codes[index] = self._commit(grant.entry, key, written[index], put.pins)
            else:
                self._free(grant.entry)
        return codes

    def put_of(self, now: float, client: bytes, put_id: int) -> "Put | None":
        """A put that may still be committed."""
        holder = self._clients.get(client)
        put = holder.puts.get(put_id) if holder else None
        return None if put is None or put.quarantined or now > put.expires_at else put

    def supersede(self, client: bytes, keys: Iterable[str]) -> None:
        """Puts of this client with these keys under way end as if their time were over: it begins them anew."""
        holder = self._clients.get(client)
        entries = {self._writing[key] for key in keys if key in self._writing}
        if holder is None or not entries:
            return
        for put_id, put in list(holder.puts.items()):
            if not put.quarantined and any(grant.entry in entries for grant in put.grants):
                self._expire_put(holder, put_id)

    # --- readers

    def exist(self, keys: Sequence[str]) -> bytes:
        """1 or 0 a key: can it be read?"""
        found = bytes(map(self.by_key.__contains__, keys))
        if self.log is None or 0 not in found:
            return found
        on_disk = self.log.readable
        return bytes(here or key in on_disk for here, key in zip(found, keys, strict=True))

    def find(self, key: str) -> Found | None:
        """A readable value, which counts as used. Unleased: it may be evicted as soon as this event is over."""
        entry = self.by_key.get(key)
        if entry is None:
            return None
        if entry in self._lru:
            self._unshelve(entry)
            self._shelve(entry)
        if self.log is not None:
            self.log.use(key)
        return self._found(entry)

    def size_of(self, key: str) -> int | None:
        entry = self.by_key.get(key)
        return self.size_on_disk(key) if entry is None else self._size[entry]

    def size_on_disk(self, key: str) -> int | None:
        return None if self.log is None else self.log.size_of(key)

    def lease(self, now: float, client: bytes, lease_id: int, keys: Sequence[str], ttl_s: float | None) -> list[Found | None]:
        """Keep those of `keys` that are here from being evicted. The holder counts `ttl_s` from when it asked. None: until it
        is released, which the owner then sees to."""
        holder = self._holder(client)
        known = holder.leases.get(lease_id)
        if known is not None:
            by_key = {self._key[entry]: entry for entry in known.entries}
            return [self._found(by_key[key]) if key in by_key else None for key in keys]
        if holder.account.leases >= self.settings.max_leases_per_client:
            self.counts["no_room"] += len(keys)
            return [None] * len(keys)
        found: list[Found | None] = []
        entries: list[int] = []
        for key in keys:
            entry = self.by_key.get(key)
            if entry is None:
                found.append(None)
                continue
            if entry in self._lru:
                self._unshelve(entry)
            self._leases[entry] += 1
            if self.log is not None:
                self.log.use(key)
            entries.append(entry)
            found.append(self._found(entry))
        if entries:
            expires_at = math.inf if ttl_s is None else now + min(ttl_s, self.settings.max_ttl_s)
            lease = holder.leases[lease_id] = _Lease(client, lease_id, expires_at, entries)
            holder.account.leases += 1
            self._time(lease)
            self.counts["leased"] += len(entries)
        return found

    def release(self, client: bytes, lease_id: int) -> None:
        """No more reading under this lease; of an unknown one nothing is said, as it may have expired."""
        holder = self._clients.get(client)
        lease = holder.leases.pop(lease_id, None) if holder else None
        if holder is not None and lease is not None:
            self._end_lease(holder.account, lease)

    def set_checksum(self, made_of: Found | Unsaved, checksum: int) -> bool:
        """Remember a checksum made later than at its put. False if it may be of other bytes: that copy is gone, or has another
        checksum already, and then nobody shall find it any more. The first one stands, or damage would be vouched for."""
        entry, generation = made_of.entry, made_of.generation
        if self.generation[entry] != generation:
            return False
        if self._checksum[entry] not in (0, checksum):
            self.report_corrupt(entry, generation)
            return False
        self._checksum[entry] = checksum
        return True

    # --- removal

    def remove(self, key: str) -> bool:
        """Nobody finds `key` any more; its readers may finish. Pins do not protect from this."""
        assert self.log is None or key not in self.log.by_key, "it would come back"
        entry = self.by_key.get(key)
        if entry is None:
            return False
        self._retire(entry)
        return True

    def some_keys(self, limit: int, within: tuple[str, ...] | None = None) -> list[str]:
        """Up to `limit` keys that are here, of the tenants with the namespaces `within` if any are given; fewer only if that is
        all. It takes as long as that many do, whatever others have here."""
        tenants = None if within is None else sorted(set(map(self.tenants.of, within)))
        keys = list(itertools.islice(self._some_readable(tenants), limit))
        if self.log is not None and len(keys) < limit:
            others = (key for key in _some_on_disk(self.log, tenants) if key not in self.by_key)
            keys += itertools.islice(others, limit - len(keys))
        return keys

    def report_corrupt(self, entry: int, generation: int) -> None:
        """A reader found bytes that do not verify: nobody else shall find them, unless that copy is gone already."""
        if self._first_entry <= entry < len(self.generation) and self.generation[entry] == generation:
            key = self._key[entry]
            if key is not None and self.by_key.get(key) == entry:
                self.counts["corrupt"] += 1
                self._retire(entry)

    def keys(self, cursor: int, limit: int) -> tuple[list[str], int]:
        """Up to `limit` rows' readable keys from `cursor` (0 at first) on, and where to go on; 0 when that was all."""
        on_disk = self.log.readable if self.log is not None else {}
        if cursor >= self.table_entries and self.log is not None:
            page, cursor = self.log.keys(cursor - self.table_entries, limit)
            return page, cursor and cursor + self.table_entries
        start = max(cursor, self._first_entry)
        stop = min(start + limit, len(self._key))
        page = [
            key
            for entry in range(start, stop)
            if (key := self._key[entry]) is not None and self.by_key.get(key) == entry and key not in on_disk
        ]
        if stop == len(self._key):
            stop = self.table_entries if on_disk else 0
        return page, stop

    # --- disk

    def unsaved(self, limit_bytes: int, limit: int, *, draining: bool = False) -> list[Unsaved]:
        """What is to be written next, if anything is; it is held until `end_writing`."""
        log, cold = self._tiers
        assert not self._held
        free_bytes = self.slabs.free_slabs * self.slabs.slab_bytes
        target_bytes = math.inf if draining else log.settings.ahead * self.settings.object_bytes - free_bytes
        # More than the disk holds would push out what was just written, without end.
        target_bytes = min(target_bytes, log.settings.kept_bytes)
        batch = []
        has_no_room = self._disk_quotas.judge() if self._disk_quotas is not None else None
        for entry in cold.unsaved(target_bytes, limit_bytes, limit, has_no_room):
            key = self._key[entry]
            assert key is not None
            self._held.add(entry)
            self._blocked[self.slabs.unit_of(self._offset[entry])] += 1
            found = self._found(entry)
            batch.append(Unsaved(key, entry, found.generation, found.offset, found.size, self._pin[entry]))
        log.writing = frozenset(value.key for value in batch)
        return batch

    def outgrown(self, limit: int) -> list[tuple[str, ObjectRecord]]:
        """Copies that have to go from disk before `unsaved` may be asked again: see `DiskQuotas`."""
        found = self._disk_quotas.outgrown(limit) if self._disk_quotas is not None else []
        self._look_again(key for key, _ in found)
        return found

    @property
    def unsaved_bytes(self) -> int:
        """Of values that memory alone holds."""
        return self._tiers[1].unsaved_bytes

    @property
    def is_unfinished(self) -> bool:
        """`unsaved` had to stop before it had looked at all that may be due: ask it once more."""
        return self._tiers[1].is_unfinished

    def are_whole(self, batch: Sequence[Unsaved]) -> list[bool]:
        """The bytes of these were read: which of them are still those of the value?"""
        return list(map(self._stands, batch))

    def end_writing(self, saved: Sequence[tuple[Unsaved, ObjectRecord]]) -> None:
        """These, and no others of the batch, stand on disk."""
        log, cold = self._tiers
        self._let_all_go()
        for value, record in saved:
            log.add(value.key, record)
            self.counts["demoted"] += 1
            self.counts["demoted_bytes"] += value.size
            if self._stands(value):
                cold.save(value.entry)
        log.writing = frozenset()

    def _stands(self, value: Unsaved) -> bool:
        """Can it still be read? One that went may keep its bytes for who reads it, but is nobody's any more."""
        return self.generation[value.entry] == value.generation and self.by_key.get(value.key) == value.entry

    def drop_from_disk(self, keys: Iterable[str]) -> None:
        """The copies of these are gone for good."""
        log, cold = self._tiers
        for key in keys:
            log.remove(key)
            self.shelf.touch(key)
            self._look_again([key])
            entry = self.by_key.get(key)
            if entry is not None:
                cold.lapse(entry)

    # --- time and death

    def expire(self, now: float) -> None:
        """End what ran past its time."""
        while self.next_expiry() < now:
            held = heapq.heappop(self._ends)[2]
            holder = self._clients[held.client]
            if isinstance(held, Put):
                self._expire_put(holder, held.put_id)
            else:
                self._end_lease(holder.account, holder.leases.pop(held.lease_id))
                self.counts["leases_expired"] += 1
        self.expires_at = self.next_expiry()

    def holders(self) -> set[bytes]:
        """Clients that hold something, whose lives the owner should look at."""
        return {client for client, holder in self._clients.items() if holder.leases or holder.puts}

    def next_expiry(self) -> float:
        """When the next lease or put is over; infinite if there is none."""
        while self._ends and self._ends[0][2].over:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def bury(self, client: bytes) -> None:
        """The client is known dead, or never wrote here itself: everything it held is over."""
        holder = self._clients.pop(client, None)
        if holder is None:
            return
        for lease in holder.leases.values():
            self._end_lease(holder.account, lease)
        for put in holder.puts.values():
            self._close_put(holder.account, put)
            self._drop_put(put)
        holder.account.clients -= 1
        if holder.account.user is not None and not holder.account.clients:
            del self._accounts[holder.account.user]

    def gauges(self) -> dict[str, float]:
        """All but the first four are zero when no client is at work."""
        puts = [put for holder in self._clients.values() for put in holder.puts.values()]
        states = [(put.quarantined, sum(grant.code is Code.OK for grant in put.grants)) for put in puts]
        return {
            "capacity_bytes": self.slabs.slabs * self.slabs.slab_bytes,
            "objects": len(self.by_key),
            "object_bytes": self._object_bytes,
            "free_slabs": self.slabs.free_slabs,
            "leases": sum(len(holder.leases) for holder in self._clients.values()),
            "puts": len(puts),
            "writing_objects": sum(count for quarantined, count in states if not quarantined),
            "quarantined_objects": sum(count for quarantined, count in states if quarantined),
            "reserved_bytes": sum(put.reserved_bytes for put in puts),
            **self._disk_gauges(),
            **self._tenants_gauges(),
        }

    def check(self) -> None:
        """Assert the invariants. Slow: for tests and dumps."""
        self.slabs.check()
        leases = [0] * len(self._key)
        writing: dict[int, State] = {}
        for holder in self._clients.values():
            for lease in holder.leases.values():
                for entry in lease.entries:
                    leases[entry] += 1
            for put in holder.puts.values():
                state = State.QUARANTINED if put.quarantined else State.WRITING
                writing |= {grant.entry: state for grant in put.grants if grant.code is Code.OK}
        self._check_accounts()
        cells = {owner: (offset, size) for owner, offset, size in self.slabs.cells()}
        blocked, soft = np.zeros(self.slabs.units, np.int64), np.zeros(self.slabs.units, np.int64)
        for entry in range(self._first_entry, len(self._key)):
            state, key = State(self._state[entry]), self._key[entry]
            assert (state in (State.WRITING, State.QUARANTINED)) == (entry in writing)
            assert writing.get(entry, state) is state
            assert self.generation[entry] % 2 == (entry in writing), "odd while it may be written"
            assert self._leases[entry] == leases[entry]
            assert (state is State.FREE) == (entry not in cells), "a cell for each entry in use"
            readable = key is not None and self.by_key.get(key) == entry
            assert state is State.COMMITTED or not readable
            evictable = readable and leases[entry] == 0 and not self._pin[entry] & _HARD
            assert (entry in self._lru) == evictable
            assert state is not State.COMMITTED or readable or leases[entry], "an orphan lives as long as its readers"
            if state is not State.FREE:
                offset, cell_bytes = cells[entry]
                assert offset == self._offset[entry]
                assert 0 < self._size[entry] <= cell_bytes
                blocked[self.slabs.unit_of(offset)] += (not evictable) + (entry in self._held)
                soft[self.slabs.unit_of(offset)] += bool(self._pin[entry] & _SOFT)
        assert (blocked == self._blocked).all()
        assert (soft == self._soft).all()
        assert len(self.by_key) == sum(1 for key, entry in self.by_key.items() if self._key[entry] == key)
        assert self._object_bytes == sum(self._size[entry] for entry in self.by_key.values())
        assert len(cells) + len(self._free_entries) == len(self._key) - self._first_entry
        assert set(self._writing.values()) <= set(writing)
        for index in range(self._first_entry):
            used = [self._used_at[entry] for entry in self._lru.rows(index)]
            assert used == sorted(used)
        if self._holdings is not None:
            self._check_holdings(self._holdings, {owner: cell_bytes for owner, (_, cell_bytes) in cells.items()})
        if self.log is not None and self._cold is not None:
            self.log.check()
            self._cold.check(list(self.by_key.values()))
            for key, entry in self.by_key.items():
                assert self._cold.is_saved(entry) == (key in self.log.by_key)
                record = self.log.record(key)
                assert record is None or record.size == self._size[entry]

    def _check_accounts(self) -> None:
        accounts = {id(holder.account): holder.account for holder in self._clients.values()}
        assert all(id(account) in accounts for account in self._accounts.values())
        for account in accounts.values():
            holders = [holder for holder in self._clients.values() if holder.account is account]
            puts = [put for holder in holders for put in holder.puts.values()]
            assert account.clients == len(holders)
            assert account.leases == sum(len(holder.leases) for holder in holders)
            assert account.puts == len(puts)
            assert account.reserved_bytes == sum(put.reserved_bytes for put in puts)
        held = {id(held) for _, _, held in self._ends if not held.over}
        leases = [lease for holder in self._clients.values() for lease in holder.leases.values()]
        timed = {id(lease) for lease in leases if lease.expires_at < math.inf}
        timed |= {id(put) for holder in self._clients.values() for put in holder.puts.values() if not put.quarantined}
        assert held == timed
        assert self._timed == len(timed)

    def _check_holdings(self, holdings: Holdings, cells: dict[int, int]) -> None:
        taken = [0] * len(holdings.quotas)
        row_bytes = self.settings.object_bytes // self.settings.max_objects
        for entry, cell_bytes in cells.items():
            key = self._key[entry]
            assert key is None or holdings.of[entry] == self.tenants.of(key)
            taken[holdings.of[entry]] += max(cell_bytes, row_bytes)
        assert taken == holdings.bytes
        readable = [entry for tenant in range(len(taken)) for entry in holdings.readable(tenant)]
        assert sorted(readable) == sorted(self.by_key.values())
        shelved = [entry for tenant in range(len(taken)) for entry in holdings.coldest(tenant)]
        assert sorted(shelved) == [entry for entry in range(self._first_entry, len(self._key)) if entry in self._lru]
        assert all(holdings.over(tenant) <= 0 for tenant in range(len(taken))), "nobody has more than his quota"

    # --- inside

    def _holder(self, client: bytes) -> _Client:
        if client not in self._clients:
            self.join(client, None)
        return self._clients[client]

    def _time(self, held: "_Lease | Put") -> None:
        """It ends when its time is over."""
        if held.expires_at == math.inf:
            return
        self._timed += 1
        if len(self._ends) > 2 * self._timed + LEAST_ENDS:
            self._ends = [end for end in self._ends if not end[2].over]
            heapq.heapify(self._ends)
        heapq.heappush(self._ends, (held.expires_at, next(self._end_numbers), held))
        self.expires_at = min(self.expires_at, held.expires_at)

    def _untime(self, held: "_Lease | Put") -> None:
        if not held.over and held.expires_at < math.inf:
            self._timed -= 1
        held.over = True

    def _close_put(self, account: _Account, put: Put) -> None:
        self._untime(put)
        account.puts -= 1
        account.reserved_bytes -= put.reserved_bytes

    def _reserve(self, account: _Account, put: Put, key: str, size: int) -> Grant:
        size_class = self.slabs.class_of(size) if size > 0 else None
        if size_class is None or not is_key(key):
            return Grant(Code.INVALID)
        pins = put.pins
        if not pins & _UPSERT and (key in self.by_key or key in self._writing or self._is_on_disk_only(key, pins)):
            if not pins & _PROMOTION:
                self.counts["dedup_hits"] += 1
                self.counts["dedup_bytes_saved"] += size
            return Grant(Code.EXISTS)
        cell_bytes = self.slabs.sizes[size_class]
        tenant = self.tenants.of(key) if self._holdings is not None else NOBODY
        within = account.reserved_bytes + cell_bytes <= self._client_bytes and self._make_own_room(
            tenant, self._charge(size_class)
        )
        entry = self._take_entry() if within else None
        offset = None if entry is None else self._take_cell(size_class, entry)
        if entry is None or offset is None:
            if entry is not None:
                self._free_entries.append(entry)
            self.counts["no_room"] += 1
            return Grant(Code.NO_ROOM)
        account.reserved_bytes += cell_bytes
        put.reserved_bytes += cell_bytes
        self._move(entry, _RESERVE)
        self._size[entry], self._offset[entry], self._class[entry] = size, offset, size_class
        self._pin[entry] = pins & (_SOFT | _HARD)
        unit = self.slabs.unit_of(offset)
        self._blocked[unit] += 1
        if pins & _SOFT:
            self._soft[unit] += 1
        if self._holdings is not None:
            self._holdings.take(entry, tenant, self._charge(size_class))
        self._fence(entry, self.generation[entry] + 1)
        if not pins & _UPSERT:
            self._writing[key] = entry
        return Grant(Code.OK, entry, offset, self.generation[entry])

    def _some_readable(self, tenants: list[int] | None) -> Iterable[str]:
        if self._holdings is None or tenants is None:
            return self.by_key
        rows = itertools.chain.from_iterable(map(self._holdings.readable, tenants))
        return (key for row in rows if (key := self._key[row]) is not None)

    def _make_own_room(self, tenant: int, more_bytes: int) -> bool:
        """Evict values of a tenant that would be over its quota else; False where that does not help."""
        holdings = self._holdings
        if holdings is None or (quota := holdings.quotas[tenant]) == 0:
            return True
        if more_bytes > quota:
            return False
        while holdings.over(tenant, more_bytes) > 0:
            # What is being written to disk goes last: that work is then in vain.
            free = (each for each in holdings.coldest(tenant) if each not in self._held)
            entry = next(free, None) or next(holdings.coldest(tenant), None)
            if entry is None:
                return False
            self.counts["evicted_over_quota"] += 1
            self._evict(entry)
        return True

    def _take_entry(self) -> int | None:
        """A free row of the columns, evicting the least recently used object of all if there are too many."""
        if self._free_entries:
            return self._free_entries.pop()
        if len(self._key) < self.table_entries:
            for column in (self.generation, self._checksum, self._size, self._offset, self._used_at):
                column.append(0)
            for small in (self._leases, self._class, self._state, self._pin):
                small.append(0)
            self._key.append(None)
            self._lru.add_row()
            if self._cold is not None:
                self._cold.add_row()
            if self._holdings is not None:
                self._holdings.add_row()
            return len(self._key) - 1
        while True:
            for soft in (0, 1):
                oldest = [row for index in range(soft, self._first_entry, 2) if (row := self._coldest_of(index)) is not None]
                if oldest:
                    self._evict(min(oldest, key=self._used_at.__getitem__))
                    return self._free_entries.pop()
            if not self._let_all_go():
                return None

    def _take_cell(self, size_class: int, entry: int) -> int | None:
        while (offset := self.slabs.take(size_class, entry)) is None:
            if not self._evict_for(size_class) and not self._let_all_go():
                return None
        return offset

    def _evict_for(self, size_class: int) -> bool:
        """Evict the class's least recently used object, or all in memory of other classes that was used even longer ago.

        Soft pins go last. False if nothing can be evicted.
        """
        for soft in (False, True):
            own = self._coldest_of(2 * size_class + soft)
            # A scan of all units: dear beside one eviction, so a class that can help itself looks around only at times.
            look = own is None or self.counts["evicted"] % SCAN_EVERY == 0
            units, used_at = self._coldest(size_class, soft=soft) if look else (range(0), 0)
            if units and (own is None or used_at < self._used_at[own]):
                self.counts["units_taken_over"] += 1
                for entry in [entry for unit in units for entry in self.slabs.owners(unit)]:
                    self._evict(entry)
                return True
            if own is not None:
                self._evict(own)
                return True
        return False

    def _coldest_of(self, index: int) -> int | None:
        """The first of an LRU list that is not being written to disk."""
        entry = self._lru.first(index)
        while entry is not None and entry in self._held:
            entry = self._lru.after(index, entry)
        return entry

    def _coldest(self, size_class: int, *, soft: bool) -> tuple[range, int]:
        """The units to empty for this class, none of them of it: those not used for longest; and when they were last."""
        blocked, soft_pins, used_at = (
            np.frombuffer(each, np.int64) for each in (self._blocked, self._soft, self._unit_used_at)
        )
        stuck = blocked if soft else blocked + soft_pins
        other = self.slabs.unit_class
        used = np.where((other == size_class) | (stuck > 0), _NEVER, np.where(other < 0, -1, used_at))
        slabs = used.reshape(-1, PARTS).max(axis=1)
        slab = int(np.argmin(np.where(slabs < 0, _NEVER, slabs)))
        best = range(slab * PARTS, (slab + 1) * PARTS), int(slabs[slab])
        if size_class < self.slabs.small_classes:
            parts = np.where((other >= 0) & (other < self.slabs.small_classes), used, _NEVER)
            part = int(np.argmin(parts))
            if parts[part] <= best[1] or best[1] < 0:
                best = range(part, part + 1), int(parts[part])
        return best if 0 <= best[1] < _NEVER else (range(0), 0)

    def _commit(self, entry: int, key: str, checksum: int, pins: int) -> Code:
        old = self.by_key.get(key)
        if not pins & _UPSERT and (old is not None or self._is_on_disk_only(key, pins)):
            self._free(entry)
            return Code.EXISTS
        assert self.log is None or key not in self.log.by_key or pins & _PROMOTION, "another value would come back"
        if old is not None:
            self._retire(old)
        self._move(entry, _COMMIT)
        self._fence(entry, self.generation[entry] + 1)
        self._checksum[entry] = checksum
        self._key[entry] = key
        self.by_key[key] = entry
        if self._holdings is not None:
            self._holdings.show(entry)
        self.shelf.touch(key)
        self._object_bytes += self._size[entry]
        promoted = bool(pins & _PROMOTION)
        self.counts["promoted" if promoted else "puts"] += 1
        self.counts["promoted_bytes" if promoted else "put_bytes"] += self._size[entry]
        if self._cold is not None:
            self._cold.add(entry, saved=promoted)
        if self._pin[entry] & _HARD:
            self._use(entry)
        else:
            self._shelve(entry)
        return Code.OK

    def _expire_put(self, holder: _Client, put_id: int) -> None:
        put = holder.puts[put_id]
        self.counts["puts_expired"] += 1
        put.quarantined = True
        self._untime(put)
        for key, grant in zip(put.keys, put.grants, strict=True):
            if grant.code is Code.OK:
                self._move(grant.entry, _QUARANTINE)
                self.counts["quarantined"] += 1
                if self._writing.get(key) == grant.entry:
                    del self._writing[key]

    def _drop_put(self, put: Put) -> None:
        for key, grant in zip(put.keys, put.grants, strict=True):
            if grant.code is Code.OK:
                if self._writing.get(key) == grant.entry:
                    del self._writing[key]
                self._free(grant.entry)

    def _end_lease(self, account: _Account, lease: _Lease) -> None:
        self._untime(lease)
        account.leases -= 1
        for entry in lease.entries:
            assert self._leases[entry] > 0, "a lease ends once"
            self._leases[entry] -= 1
            if self._leases[entry] == 0:
                if self._key[entry] is None:
                    self._free(entry)
                elif not self._pin[entry] & _HARD:
                    self._shelve(entry)

    def _found(self, entry: int) -> Found:
        return Found(entry, self._offset[entry], self._size[entry], self.generation[entry], self._checksum[entry])

    def _evict(self, entry: int) -> None:
        self.counts["evicted"] += 1
        self.counts["evicted_bytes"] += self._size[entry]
        if self._cold is not None and not self._cold.is_saved(entry):
            self.counts["evicted_unsaved"] += 1
        self._retire(entry)

    def _retire(self, entry: int) -> None:
        """Take a readable object's name; its cell is free when its last lease ends."""
        key = self._key[entry]
        assert key is not None
        del self.by_key[key]
        if self._holdings is not None:
            self._holdings.hide(entry)
        self.shelf.touch(key)
        self._key[entry] = None
        self._object_bytes -= self._size[entry]
        if self._cold is not None:
            self._cold.remove(entry)
            if self._cold.is_saved(entry):  # a copy that memory does not have makes room for others of its tenant
                self._look_again([key])
        if entry in self._held:
            self._let_go(entry)
        if entry in self._lru:
            self._unshelve(entry)
        if self._leases[entry] == 0:
            self._free(entry)

    def _free(self, entry: int) -> None:
        """An entry that is in no list and that nobody reads: its cell may be somebody else's from now on."""
        self._move(entry, _FREE)
        self._fence(entry, self.generation[entry] + (1 if self.generation[entry] % 2 else 2))
        unit = self.slabs.unit_of(self._offset[entry])
        self._blocked[unit] -= 1
        if self._pin[entry] & _SOFT:
            self._soft[unit] -= 1
        if self._holdings is not None:
            self._holdings.give(entry, self._charge(self._class[entry]))
        self.slabs.give(self._offset[entry])
        self._free_entries.append(entry)

    def _use(self, entry: int) -> None:
        self._clock += 1
        self._used_at[entry] = self._clock
        if self._cold is not None:
            self._cold.use(entry)
        self._unit_used_at[self.slabs.unit_of(self._offset[entry])] = self._clock

    @property
    def _tiers(self) -> tuple[ObjectLog, ColdEnd]:
        assert self.log is not None, "there is no disk"
        assert self._cold is not None
        return self.log, self._cold

    def _let_all_go(self) -> bool:
        """Where nothing else can be evicted, what is being written is; that work is then in vain. False if nothing is."""
        held = list(self._held)
        for entry in held:
            self._let_go(entry)
        return bool(held)

    def _let_go(self, entry: int) -> None:
        """It may be evicted although it is being written, or was."""
        self._held.discard(entry)
        self._blocked[self.slabs.unit_of(self._offset[entry])] -= 1

    def _look_again(self, keys: Iterable[str]) -> None:
        """Tenants of these may have room on disk now."""
        if self._cold is not None and self._holdings is not None:
            for key in keys:
                self._cold.look_again(self.tenants.of(key))

    def _is_on_disk_only(self, key: str, pins: int) -> bool:
        return self.log is not None and not pins & _PROMOTION and key in self.log.readable

    def _disk_gauges(self) -> dict[str, float]:
        if self.log is None or self._cold is None:
            return {}
        unsaved = {"ssd_unsaved_bytes": self._cold.unsaved_bytes, "ssd_without_room_bytes": self._cold.parked_bytes}
        return {**self.log.gauges(), **unsaved, "ssd_demoting": len(self._held)}

    def _tenants_gauges(self) -> dict[str, float]:
        told: dict[str, float] = {}
        for tier, holdings in (("", self._holdings), ("ssd_", self.log.holdings if self.log is not None else None)):
            if holdings is not None:
                told |= {f"{tier}tenant_bytes[tenant={name}]": count for name, count in holdings.named().items()}
        return told

    def _shelve(self, entry: int) -> None:
        """Evictable from now on, after everything else of its class."""
        self._use(entry)
        self._lru.append(2 * self._class[entry] + bool(self._pin[entry] & _SOFT), entry)
        if self._holdings is not None:
            self._holdings.append(entry, bool(self._pin[entry] & _SOFT))
        self._blocked[self.slabs.unit_of(self._offset[entry])] -= 1

    def _unshelve(self, entry: int) -> None:
        self._lru.remove(entry)
        if self._holdings is not None:
            self._holdings.remove(entry)
        self._blocked[self.slabs.unit_of(self._offset[entry])] += 1

    def _move(self, entry: int, moves: dict[int, int]) -> None:
        self._state[entry] = moves[self._state[entry]]

    def _fence(self, entry: int, generation: int) -> None:
        self.generation[entry] = generation
        self.fences.append((entry, generation))


def _some_on_disk(log: ObjectLog, tenants: list[int] | None) -> Iterable[str]:
    return log.by_key if tenants is None else itertools.chain.from_iterable(map(log.coldest, tenants))
