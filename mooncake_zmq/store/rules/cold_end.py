"""The values in memory in the order of their last use, and how far from the cold end on all of them are on disk too. PURE.

    coldest |- saved, saved, saved -|- unsaved, saved, unsaved, ... -| last used
                    cold            ^ the next to be written

What is cold can be evicted without a loss. Every step costs the same however many values there are; nothing is scanned.
"""

from array import array
from collections.abc import Callable

from mooncake_zmq.store.rules.linked_rows import LinkedRows

_HEAD = 0
"""The sentinel of the one list; rows that hold no value are below the first entry, so it is none's."""
MAX_STEPS = 1024
"""Rows walked over in one call."""


class ColdEnd:
    """Rows are those of the owner's table, whose `sizes` it shares."""

    def __init__(self, rows: int, sizes: "array[int]") -> None:
        self._order = LinkedRows(1)
        for _ in range(rows - 1):
            self._order.add_row()
        self._sizes = sizes
        self._saved = bytearray(rows)
        self._cold = bytearray(rows)
        self._last_cold = _HEAD
        self._lapsed: dict[int, None] = {}
        """Cold ones whose copy on disk went."""
        self.cold_bytes = 0
        self.unsaved_bytes = 0

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

    def unsaved(
        self, target_bytes: float, limit_bytes: int, limit: int, skip: Callable[[int], bool] | None = None
    ) -> list[int]:
        """The next to be written so that the coldest `target_bytes` are saved; the first of them may be over the limit. `skip`
        is asked of each and may say no: that one stays in memory alone."""
        rows: list[int] = []
        room = limit_bytes
        for lapsed in self._lapsed:
            if len(rows) == limit or (rows and self._sizes[lapsed] > room):
                return rows
            if skip is not None and skip(lapsed):
                continue
            rows.append(lapsed)
            room -= self._sizes[lapsed]
        self._advance()
        ahead = self.cold_bytes
        following = self._order.after(_HEAD, self._last_cold)
        for _ in range(MAX_STEPS):
            row = following
            if row is None or ahead >= target_bytes or len(rows) == limit:
                break
            ahead += self._sizes[row]
            if not self._saved[row]:
                if rows and self._sizes[row] > room:
                    break
                if skip is None or not skip(row):
                    rows.append(row)
                    room -= self._sizes[row]
            following = self._order.after(_HEAD, row)
        return rows

    def check(self, rows: list[int]) -> None:
        """Assert the invariants, `rows` being those that hold a value."""
        order = list(self._order.rows(_HEAD))
        assert sorted(order) == sorted(rows)
        cold = [row for row in order if self._cold[row]]
        assert cold == order[: len(cold)]
        assert self._last_cold == (cold[-1] if cold else _HEAD)
        assert self.cold_bytes == sum(self._sizes[row] for row in cold)
        assert set(self._lapsed) == {row for row in cold if not self._saved[row]}
        assert self.unsaved_bytes == sum(self._sizes[row] for row in rows if not self._saved[row])

    def _advance(self) -> None:
        for _ in range(MAX_STEPS):
            row = self._order.after(_HEAD, self._last_cold)
            if row is None or not self._saved[row]:
                break
            self._cold[row] = True
            self._last_cold = row
            self.cold_bytes += self._sizes[row]

    def _unlink(self, row: int) -> None:
        if self._cold[row]:
            self._cold[row] = False
            self._lapsed.pop(row, None)
            self.cold_bytes -= self._sizes[row]
            if row == self._last_cold:
                self._last_cold = self._order.before(row)
        self._order.remove(row)
