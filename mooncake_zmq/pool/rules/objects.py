"""The objects of one host's store: named values of any size in slab cells, two-phase puts, leases, eviction. PURE.

It never touches bytes: it says which cell a value goes to, and notes in `fences` the generations that the segment must
show before any answer leaves.

With a log, `ObjectLog`, values live in two tiers. A key has one value: what both tiers have of it is the same; see `changes.py`
for how it gets another one, or none.
"""

import itertools
import math
from collections.abc import Iterable, Sequence

from mooncake_zmq.pool.rules import object_check
from mooncake_zmq.pool.rules.demotion import Demotion
from mooncake_zmq.pool.rules.entries import Entries, Found
from mooncake_zmq.pool.rules.holders import Holders, Lease, ObjectPut
from mooncake_zmq.pool.rules.object_log import ObjectLog
from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.rules.puts import Puts
from mooncake_zmq.pool.rules.victims import Victims

DISK_COUNTS = ("evicted_unsaved", "promoted", "promoted_bytes", "demoted", "demoted_bytes")


class Objects:
    """See the module. Clients are named by opaque bytes; their put and lease ids are theirs, and a repeat changes nothing."""

    def __init__(self, settings: ObjectSettings, log: ObjectLog | None = None) -> None:
        self.settings = settings
        self.log = log
        self.counts = dict.fromkeys(
            ("puts", "put_bytes", "evicted", "evicted_bytes", "units_taken_over", "dedup_hits", "dedup_bytes_saved")
            + ("puts_expired", "leases_expired", "quarantined", "no_room", "corrupt", "leased")
            + (DISK_COUNTS if log is not None else ())
            + (("evicted_over_quota",) if settings.tenants else ()),
            0,
        )
        self.entries = Entries(settings, log, self.counts)
        self.holders: Holders[bytes, ObjectPut] = Holders(self.entries)
        self.puts = Puts(self.entries, Victims(self.entries), self.holders)
        self.demotion = Demotion(self.entries)
        self.slabs, self.tenants, self.engine_blocks = self.entries.slabs, self.entries.tenants, self.entries.engine_blocks
        self.by_key, self.generation, self.fences = self.entries.by_key, self.entries.generation, self.entries.fences

    @property
    def max_object_bytes(self) -> int:
        return self.slabs.slab_bytes

    def cell_bytes(self, size: int) -> int:
        """Bytes that the cell of a value of this size takes."""
        size_class = self.slabs.class_of(size)
        return self.slabs.slab_bytes if size_class is None else self.slabs.sizes[size_class]

    def exist(self, keys: Sequence[str]) -> bytes:
        """1 or 0 a key: can it be read?"""
        found = bytes(map(self.by_key.__contains__, keys))
        if self.log is None or 0 not in found:
            return found
        on_disk = self.log.readable
        return bytes(here or key in on_disk for here, key in zip(found, keys, strict=True))

    def size_of(self, key: str) -> int | None:
        entry = self.by_key.get(key)
        return self.size_on_disk(key) if entry is None else self.entries.size[entry]

    def size_on_disk(self, key: str) -> int | None:
        return None if self.log is None else self.log.size_of(key)

    def remove(self, key: str) -> bool:
        """Make `key` unfindable; its readers may finish. Pins do not protect from this."""
        assert self.log is None or key not in self.log.by_key, "it would come back"
        entry = self.by_key.get(key)
        if entry is None:
            return False
        self.entries.forget(entry)
        return True

    def some_keys(self, limit: int, within: tuple[str, ...] | None = None) -> list[str]:
        """Up to `limit` keys that are here, of the tenants with the namespaces `within` if any are given; fewer only if that is
        all. It takes as long as that many do, whatever others have here. A value on its way to disk may have left memory."""
        tenants = None if within is None else sorted(set(map(self.tenants.of, within)))
        keys = list(itertools.islice(self._some_readable(tenants), limit))
        if self.log is not None and len(keys) < limit:
            written = (key for key in self.log.writing if tenants is None or self.tenants.of(key) in tenants)
            on_disk = itertools.chain(_some_on_disk(self.log, tenants), written)
            keys += itertools.islice((key for key in on_disk if key not in self.by_key), limit - len(keys))
        return keys

    def _some_readable(self, tenants: list[int] | None) -> Iterable[str]:
        if self.entries.holdings is None or tenants is None:
            return self.by_key
        rows = itertools.chain.from_iterable(map(self.entries.holdings.readable, tenants))
        return (key for row in rows if (key := self.entries.key[row]) is not None)

    def keys(self, cursor: int, limit: int) -> tuple[list[str], int]:
        """Up to `limit` rows' readable keys from `cursor` (0 at first) on, and where to go on; 0 when that was all."""
        on_disk = self.log.readable if self.log is not None else {}
        if cursor >= self.entries.table_rows and self.log is not None:
            page, cursor = self.log.keys(cursor - self.entries.table_rows, limit)
            return page, cursor and cursor + self.entries.table_rows
        start = max(cursor, self.entries.first)
        stop = min(start + limit, len(self.entries.key))
        page = [
            key
            for entry in range(start, stop)
            if (key := self.entries.key[entry]) is not None and self.by_key.get(key) == entry and key not in on_disk
        ]
        if stop == len(self.entries.key):
            stop = self.entries.table_rows if on_disk else 0
        return page, stop

    def lease(self, now: float, client: bytes, number: int, keys: Sequence[str], ttl_s: float | None) -> list[Found | None]:
        """Keep those of `keys` that are here from being evicted. The holder counts `ttl_s` from when it asked. None: until it
        is released, which the owner then sees to."""
        entries, usage = self.entries, self.holders.of(client).usage
        known = self.holders.lease_of(client, number)
        if known is not None:
            by_key = {entries.key[entry]: entry for entry in known.rows}
            return [entries.found(by_key[key]) if key in by_key else None for key in keys]
        if usage.leases >= self.settings.max_leases_per_client:
            self.counts["no_room"] += len(keys)
            return [None] * len(keys)
        rows = [self.by_key.get(key) for key in keys]
        leased = [row for row in rows if row is not None]
        if leased:
            entries.pin(leased)
            expires_at = math.inf if ttl_s is None else now + min(ttl_s, self.settings.max_ttl_s)
            self.holders.lease(Lease(client, number, expires_at, leased))
            self.counts["leased"] += len(leased)
        return [None if row is None else entries.found(row) for row in rows]

    def expire(self, now: float) -> None:
        """End what ran past its time."""
        self.holders.expire(now, self._on_lease_over, self.puts.on_late)

    def _on_lease_over(self, _: Lease[bytes]) -> None:
        self.counts["leases_expired"] += 1

    def bury(self, client: bytes) -> None:
        """The client is known dead, or never wrote here itself: everything it held is over."""
        self.puts.withdraw(client)
        self.holders.bury(client)

    def gauges(self) -> dict[str, float]:
        """All but the first four are zero when no client is at work."""
        return {
            "capacity_bytes": self.slabs.slabs * self.slabs.slab_bytes,
            "objects": len(self.by_key),
            "object_bytes": self.entries.object_bytes,
            "free_slabs": self.slabs.free_slabs,
            "leases": sum(len(holder.leases) for holder in self.holders.clients.values()),
            **self.puts.gauges(),
            **self.demotion.gauges(),
            **self._tenants_gauges(),
        }

    def check(self) -> None:
        """Assert the invariants. Slow: for tests and dumps."""
        object_check.check(self.entries, self.holders, self.puts)

    def _tenants_gauges(self) -> dict[str, float]:
        bytes_of: dict[str, float] = {}
        for tier, holdings in (("", self.entries.holdings), ("ssd_", self.log.holdings if self.log is not None else None)):
            if holdings is not None:
                bytes_of |= {f"{tier}tenant_bytes[tenant={name}]": count for name, count in holdings.named().items()}
        return bytes_of


def _some_on_disk(log: ObjectLog, tenants: list[int] | None) -> Iterable[str]:
    return log.by_key if tenants is None else itertools.chain.from_iterable(map(log.coldest, tenants))
