"""Which values of tenants may go to disk, and which have to go from there so that no tenant exceeds its quota. PURE.

What memory has as well stays on disk: it would be written again at once, and push out the next. So a tenant whose values are
all in memory has the rest of them there alone, and one that goes on writing loses what it used longest ago.
"""

import itertools
from array import array
from collections.abc import Callable, Container, Iterator, Sequence

from mooncake_zmq.kv.object_record import ObjectRecord
from mooncake_zmq.pool.rules.holdings import Holdings
from mooncake_zmq.pool.rules.object_log import ObjectLog

MAX_STEPS = 1024
"""Copies of one tenant looked at in one call."""


class DiskQuotas:
    """Entries are those of the owner's table, whose `keys` and `sizes` it shares, as it does what is `in_memory`."""

    def __init__(
        self,
        entries: Holdings,
        log: ObjectLog,
        keys: Sequence[str | None],
        sizes: "array[int]",
        in_memory: Container[str],
    ) -> None:
        assert log.holdings is not None
        self._entries, self._log, self._on_disk = entries, log, log.holdings
        self._keys, self._sizes, self._in_memory = keys, sizes, in_memory
        self._crowded = [0] * len(self._on_disk.quotas)
        """Bytes of values that were to be written and had no room, by tenant."""

    def judge(self) -> Callable[[int], bool]:
        """Returns a function that says of one entry after the other whether its tenant has no room for it, beside the entries
        that had room before."""
        planned = [0] * len(self._crowded)
        self._crowded = [0] * len(self._crowded)

        def has_no_room(entry: int) -> bool:
            tenant, key = self._entries.of[entry], self._keys[entry]
            assert key is not None
            taken = self._log.charge(key, self._sizes[entry])
            if self._on_disk.over(tenant, planned[tenant] + taken) <= 0:
                planned[tenant] += taken
                return False
            if taken <= self._on_disk.quotas[tenant]:
                self._crowded[tenant] += taken
            return True

        return has_no_room

    def outgrown(self, limit: int) -> list[tuple[str, ObjectRecord]]:
        """Up to `limit` copies that have to go: for what had no room, and where a quota has become smaller."""
        crowded, self._crowded = self._crowded, [0] * len(self._crowded)
        over = ((tenant, self._on_disk.over(tenant, more)) for tenant, more in enumerate(crowded))
        found = itertools.chain.from_iterable(self._coldest(tenant, size) for tenant, size in over if size > 0)
        return list(itertools.islice(found, limit))

    def _coldest(self, tenant: int, size_bytes: int) -> Iterator[tuple[str, ObjectRecord]]:
        """Copies of a tenant that memory does not have, those used longest ago first, of so many bytes at least."""
        for key in itertools.islice(self._log.coldest(tenant), MAX_STEPS):
            if size_bytes <= 0:
                return
            record = self._log.record(key)
            if record is not None and key not in self._in_memory:
                size_bytes -= self._log.charge(key, record.size)
                yield key, record
