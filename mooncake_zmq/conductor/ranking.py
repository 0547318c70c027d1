"""Keeps nodes in the order of one figure that changes from time to time, so that a search visits the most promising first.
PURE."""

from typing import Generic, Protocol, TypeVar


class Named(Protocol):
    """Any object with a name of its own."""

    name: str


N = TypeVar("N", bound=Named)


class Ranked(Generic[N]):
    """A node with its figure."""

    __slots__ = ("figure", "name", "node")

    def __init__(self, node: N, figure: float) -> None:
        self.node = node
        self.name = node.name
        self.figure = figure


class Ranking(Generic[N]):
    """Orders nodes by their figure, the smallest first, and equals by name."""

    def __init__(self) -> None:
        self.entries: list[Ranked[N]] = []
        """The order; callers only read it."""
        self._ranked: dict[N, Ranked[N]] = {}

    def set(self, node: N, figure: float) -> None:
        """Set the node's figure."""
        entry = self._ranked.get(node)
        if entry is None:
            entry = self._ranked[node] = Ranked(node, figure)
        elif entry.figure == figure:
            return
        else:
            del self.entries[self._place(entry)]
            entry.figure = figure
        self.entries.insert(self._place(entry), entry)

    def remove(self, node: N) -> None:
        """Remove a node."""
        entry = self._ranked.pop(node, None)
        if entry is not None:
            del self.entries[self._place(entry)]

    def check(self) -> None:
        """Assert the invariants."""
        assert self.entries == sorted(self._ranked.values(), key=lambda entry: (entry.figure, entry.name))
        assert all(entry.node is node and entry.name == node.name for node, entry in self._ranked.items())

    def _place(self, entry: Ranked[N]) -> int:
        """Return the index where an entry is, or belongs. `bisect` with a key would call Python for every comparison."""
        entries, figure, name = self.entries, entry.figure, entry.name
        low, high = 0, len(entries)
        while low < high:
            middle = (low + high) >> 1
            known = entries[middle]
            if known.figure < figure or (known.figure == figure and known.name < name):
                low = middle + 1
            else:
                high = middle
        return low
