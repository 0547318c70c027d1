"""Rows and cells for new values: free ones, or those of what was not used for longest, across size classes. PURE."""

import numpy as np

from mooncake_zmq.pool.rules.entries import Entries
from mooncake_zmq.pool.rules.slab import PARTS

SCAN_EVERY = 8
_NEVER = 1 << 62
"""Later than any use: not to be emptied."""


class Victims:
    """Finds room in a table of values; evicts what it must."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    def make_own_room(self, tenant: int, more_bytes: int) -> bool:
        """Evict values of a tenant that would be over its quota else; False where that does not help."""
        holdings = self._entries.holdings
        if holdings is None or (quota := holdings.quotas[tenant]) == 0:
            return True
        if more_bytes > quota:
            return False
        while holdings.over(tenant, more_bytes) > 0:
            # What is being written to disk goes last: that work is then in vain.
            free = (each for each in holdings.coldest(tenant) if each not in self._entries.held)
            entry = next(free, None) or next(holdings.coldest(tenant), None)
            if entry is None:
                return False
            self._entries.counts["evicted_over_quota"] += 1
            self._entries.evict(entry)
        return True

    def take_row(self) -> int | None:
        """A free row of the columns, evicting the least recently used object of all if there are too many."""
        if self._entries.free_rows:
            return self._entries.free_rows.pop()
        if (row := self._entries.add_row()) is not None:
            return row
        while True:
            for soft in (0, 1):
                oldest = [row for index in range(soft, self._entries.first, 2) if (row := self._coldest_of(index)) is not None]
                if oldest:
                    self._entries.evict(min(oldest, key=self._entries.used_at.__getitem__))
                    return self._entries.free_rows.pop()
            if not self._entries.let_all_go():
                return None

    def take_cell(self, size_class: int, entry: int) -> int | None:
        while (offset := self._entries.slabs.take(size_class, entry)) is None:
            if not self._evict_for(size_class) and not self._entries.let_all_go():
                return None
        return offset

    def _evict_for(self, size_class: int) -> bool:
        """Evict the class's least recently used object, or all in memory of other classes that was used even longer ago.

        Soft pins go last. False if nothing can be evicted.
        """
        for soft in (False, True):
            own = self._coldest_of(2 * size_class + soft)
            # A scan of all units: dear beside one eviction, so a class that can help itself looks around only at times.
            look = own is None or self._entries.counts["evicted"] % SCAN_EVERY == 0
            units, used_at = self._coldest(size_class, soft=soft) if look else (range(0), 0)
            if units and (own is None or used_at < self._entries.used_at[own]):
                self._entries.counts["units_taken_over"] += 1
                for entry in [entry for unit in units for entry in self._entries.slabs.owners(unit)]:
                    self._entries.evict(entry)
                return True
            if own is not None:
                self._entries.evict(own)
                return True
        return False

    def _coldest_of(self, index: int) -> int | None:
        """The first of an LRU list that is not being written to disk."""
        entry = self._entries.lru.first(index)
        while entry is not None and entry in self._entries.held:
            entry = self._entries.lru.after(index, entry)
        return entry

    def _coldest(self, size_class: int, *, soft: bool) -> tuple[range, int]:
        """The units to empty for this class, none of them of it: those not used for longest; and when they were last."""
        blocked, soft_pins, used_at = (
            np.frombuffer(each, np.int64) for each in (self._entries.blocked, self._entries.soft, self._entries.unit_used_at)
        )
        stuck = blocked if soft else blocked + soft_pins
        other = self._entries.slabs.unit_class
        used = np.where((other == size_class) | (stuck > 0), _NEVER, np.where(other < 0, -1, used_at))
        slabs = used.reshape(-1, PARTS).max(axis=1)
        slab = int(np.argmin(np.where(slabs < 0, _NEVER, slabs)))
        best = range(slab * PARTS, (slab + 1) * PARTS), int(slabs[slab])
        if size_class < self._entries.slabs.small_classes:
            parts = np.where((other >= 0) & (other < self._entries.slabs.small_classes), used, _NEVER)
            part = int(np.argmin(parts))
            if parts[part] <= best[1] or best[1] < 0:
                best = range(part, part + 1), int(parts[part])
        return best if 0 <= best[1] < _NEVER else (range(0), 0)
