"""The LRU list of the values in memory, and the write-back window: how far from its coldest value on all are on disk too. PURE.

    coldest |- saved, saved, saved -|- unsaved, saved, unsaved, ... -| last used
                    cold            ^ the next to be written

What is cold can be evicted without a loss. Every step costs the same however many values there are; nothing is scanned.

A value whose tenant has no room on disk is parked: out of that order, so that what others have is written as if it were not
there. It is looked at again when it is used, or once its tenant may have room.
"""

import itertools
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence

from mooncake_zmq.pool.rules.linked_rows import LinkedRows

_HEAD = 0
"""The sentinel of the one list; rows that hold no value are below the first entry, so it is none's."""
MAX_STEPS = 1024
"""Rows walked over in one call."""
PARKED_STEPS = 128
"""Parked rows of each tenant looked at again in one call."""


class WriteBackOrder:
    """Rows are those of the owner's table, whose `sizes` it shares, as it does whose each is: `tenant_of`."""

    def __init__(self, rows: int, sizes: "array[int]", tenant_of: Sequence[int] = ()) -> None:
        self._order = LinkedRows(1)
        for _ in range(rows - 1):
            self._order.add_row()
        self._sizes = sizes
        self._tenant_of = tenant_of
        self._saved = bytearray(rows)
        self._cold = bytearray(rows)
        self._last_cold = _HEAD
        self._lapsed: dict[int, None] = {}
        """Cold ones whose copy on disk went."""
        self._parked: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
        """By tenant; a row that holds a value is here or in the order."""
        self._again: dict[int, int] = {}
        """How many of them are to be looked at again, by tenant."""
        self.is_unfinished = False
        """Is there more to look at than `unsaved` did?"""
        self.cold_bytes = 0
        self.unsaved_bytes = 0
        """Those of `parked_bytes` included."""
        self.parked_bytes = 0

    def add_row(self) -> None:
        self._order.add_row()
        self._saved.append(0)
        self._cold.append(0)

    def add(self, row: int, *, saved: bool) -> None:
        """A new value, the last used."""
        self._saved[row] = saved
        self.unsaved_bytes += 0 if saved else self._sizes[row]
        self._order.append(_HEAD, row)

    def use(self, row: int) -> None:
        self._unlink(row)
        self._order.append(_HEAD, row)

    def remove(self, row: int) -> None:
        self._unlink(row)
        self.unsaved_bytes -= 0 if self._saved[row] else self._sizes[row]

    def is_saved(self, row: int) -> bool:
        return bool(self._saved[row])

    def save(self, row: int) -> None:
        """It is on disk now."""
        if not self._saved[row]:
            assert row in self._order, "what has no room is not written"
            self._saved[row] = True
            self._lapsed.pop(row, None)
            self.unsaved_bytes -= self._sizes[row]

    def lapse(self, row: int) -> None:
        """It is not on disk any more."""
        if self._saved[row]:
            self._saved[row] = False
            self.unsaved_bytes += self._sizes[row]
            if self._cold[row]:
                self._lapsed[row] = None

    def look_again(self, tenant: int) -> None:
        """It may have room on disk now."""
        if self._parked[tenant]:
            self._again[tenant] = len(self._parked[tenant])

    def unsaved(
        self, target_bytes: float, limit_bytes: int, limit: int, has_no_room: Callable[[int], bool] | None = None
    ) -> list[int]:
        """The next write-back batch, so that the coldest `target_bytes` are saved; its first value may exceed the limit. Those
        for which `has_no_room` is true are parked, and count neither for the target nor for the limits."""
        rows: list[int] = []
        room = limit_bytes
        for row in self._due(target_bytes):
            if len(rows) == limit or (rows and self._sizes[row] > room):
                break
            if has_no_room is not None and has_no_room(row):
                self._park(row)
            else:
                rows.append(row)
                room -= self._sizes[row]
        return rows

    def check(self, rows: list[int]) -> None:
        """Assert the invariants, `rows` being those that hold a value."""
        order = list(self._order.rows(_HEAD))
        parked = [row for each in self._parked.values() for row in each]
        assert sorted(order + parked) == sorted(rows)
        assert not any(self._saved[row] or self._cold[row] for row in parked)
        assert all(self._tenant_of[row] == tenant for tenant, each in self._parked.items() for row in each)
        assert self.parked_bytes == sum(self._sizes[row] for row in parked)
        cold = [row for row in order if self._cold[row]]
        assert cold == order[: len(cold)]
        assert self._last_cold == (cold[-1] if cold else _HEAD)
        assert self.cold_bytes == sum(self._sizes[row] for row in cold)
        assert set(self._lapsed) == {row for row in cold if not self._saved[row]}
        assert self.unsaved_bytes == sum(self._sizes[row] for row in rows if not self._saved[row])

    def _due(self, target_bytes: float) -> Iterator[int]:
        """Unsaved values, one after the other; the caller may park what it was given. Parked ones come last: their tenants have
        too much."""
        self.is_unfinished = True
        yield from list(itertools.islice(self._lapsed, MAX_STEPS))
        self._advance()
        ahead = self.cold_bytes
        row = self._order.after(_HEAD, self._last_cold)
        for _ in range(MAX_STEPS):
            if row is None or ahead >= target_bytes:
                break
            following = self._order.after(_HEAD, row)
            ahead += self._sizes[row]
            if not self._saved[row]:
                yield row
                if row not in self._order:
                    ahead -= self._sizes[row]
            row = following
        is_through = row is None or ahead >= target_bytes
        for tenant in list(self._again):
            yield from self._parked_of(tenant)
        self.is_unfinished = not is_through or bool(self._lapsed or self._again)

    def _parked_of(self, tenant: int) -> Iterator[int]:
        """The next of a tenant's that are to be looked at again, each back in the order, where what is cold ends."""
        parked = self._parked[tenant]
        for _ in range(min(PARKED_STEPS, self._again[tenant], len(parked))):
            self._again[tenant] -= 1
            row = next(iter(parked))
            self._unpark(row)
            self._order.insert(self._last_cold, row)
            yield row
        if not (self._again[tenant] and parked):
            del self._again[tenant]

    def _park(self, row: int) -> None:
        self._unlink(row)
        self._parked[self._tenant_of[row]][row] = None
        self.parked_bytes += self._sizes[row]

    def _unpark(self, row: int) -> None:
        del self._parked[self._tenant_of[row]][row]
        self.parked_bytes -= self._sizes[row]

    def _advance(self) -> None:
        for _ in range(MAX_STEPS):
            row = self._order.after(_HEAD, self._last_cold)
            if row is None or not self._saved[row]:
                break
            self._cold[row] = True
            self._last_cold = row
            self.cold_bytes += self._sizes[row]

    def _unlink(self, row: int) -> None:
        if row not in self._order:
            self._unpark(row)
            return
        if self._cold[row]:
            self._cold[row] = False
            self._lapsed.pop(row, None)
            self.cold_bytes -= self._sizes[row]
            if row == self._last_cold:
                self._last_cold = self._order.before(row)
        self._order.remove(row)
