"""One value of each kind for each node, side by side: what is asked of all nodes at once is then a few vector operations. PURE.

A node's slot is its place in name order, so that the order of arrival decides nothing; slots move when nodes come and go.
"""

from bisect import bisect_left
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Slotted(Protocol):
    """A node that knows its slot."""

    name: str
    slot: int


N = TypeVar("N", bound=Slotted)


class Columns(Generic[N]):
    """`nodes` in the order of their slots, and arrays as long, one attribute each."""

    def __init__(self, **initial: float) -> None:
        """`initial`: the names of the arrays, and what a new node has there."""
        self.nodes: list[N] = []
        self.by_name: dict[str, N] = {}
        self._initial = initial
        for name in initial:
            setattr(self, name, np.empty(0))

    def insert(self, node: N) -> None:
        """A node came."""
        slot = bisect_left([each.name for each in self.nodes], node.name)
        self.nodes.insert(slot, node)
        self.by_name[node.name] = node
        for name, value in self._initial.items():
            setattr(self, name, np.insert(getattr(self, name), slot, value))
        self._number()

    def delete(self, node: N) -> None:
        """A node left."""
        del self.nodes[node.slot]
        del self.by_name[node.name]
        for name in self._initial:
            setattr(self, name, np.delete(getattr(self, name), node.slot))
        self._number()

    def _number(self) -> None:
        for slot, node in enumerate(self.nodes):
            node.slot = slot


class Cells:
    """Rows of cells under the columns, as many as the fullest column needs; an empty cell holds `empty`."""

    def __init__(self, empty: float) -> None:
        self.rows = np.full((0, 0), empty)
        self._empty = empty

    def insert(self, slot: int) -> None:
        """A column came."""
        self.rows = np.insert(self.rows, slot, self._empty, axis=1)

    def delete(self, slot: int) -> None:
        """A column left."""
        self.rows = np.delete(self.rows, slot, axis=1)

    def reach(self, count: int) -> None:
        """Have room for `count` cells in a column."""
        have = len(self.rows)
        if count > have:
            more = np.full((max(count, 2 * have, 4) - have, self.rows.shape[1]), self._empty)
            self.rows = np.concatenate((self.rows, more))
