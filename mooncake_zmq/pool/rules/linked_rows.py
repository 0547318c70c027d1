"""Doubly linked lists whose nodes are the rows of a table. PURE."""

from array import array
from collections.abc import Iterable


class LinkedRows:
    """Circular lists over rows of two columns; row `i < lists` is the sentinel of list `i`."""

    def __init__(self, lists: int) -> None:
        self._next = array("i", range(lists))
        self._previous = array("i", range(lists))

    def add_row(self) -> None:
        self._next.append(-1)
        self._previous.append(-1)

    def append(self, index: int, row: int) -> None:
        last = self._previous[index]
        self._next[last] = self._previous[index] = row
        self._previous[row], self._next[row] = last, index

    def insert(self, before: int, row: int) -> None:
        """Right behind a row of a list, or its sentinel."""
        self.append(self._next[before], row)

    def remove(self, row: int) -> None:
        before, after = self._previous[row], self._next[row]
        self._next[before], self._previous[after] = after, before
        self._next[row] = self._previous[row] = -1

    def first(self, index: int) -> int | None:
        return self.after(index, index)

    def after(self, index: int, row: int) -> int | None:
        """The row behind `row` of list `index`, whose sentinel stands before the first."""
        row = self._next[row]
        return None if row == index else row

    def before(self, row: int) -> int:
        """The row in front of this one, or the sentinel."""
        return self._previous[row]

    def __contains__(self, row: int) -> bool:
        return self._next[row] >= 0

    def rows(self, index: int) -> Iterable[int]:
        row = self._next[index]
        while row != index:
            yield row
            row = self._next[row]
