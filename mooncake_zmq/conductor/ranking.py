"""Keeps nodes in the order of one figure that changes from time to time, so that a search visits the most promising first.
PURE."""

from typing import Generic, Protocol, TypeVar


class Named(Protocol):
    """Any object with a name of its own."""

    name: str


N = TypeVar("N", bound=Named)


class Ranking(Generic[N]):
    """Orders nodes by their figure, the smallest first, and equals by name."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, str, N]] = []
        """The order; callers only read it."""
        self._by_name: dict[str, tuple[float, str, N]] = {}

    def set(self, node: N, figure: float) -> None:
        """Set the node's figure."""
        name = node.name
        known = self._by_name.get(name)
        if known is not None:
            if known[0] == figure:
                return
            del self.entries[self._place(known[0], name)]
        self._by_name[name] = entry = (figure, name, node)
        self.entries.insert(self._place(figure, name), entry)

    def remove(self, node: N) -> None:
        """Remove a node."""
        known = self._by_name.pop(node.name, None)
        if known is not None:
            del self.entries[self._place(known[0], node.name)]

    def check(self) -> None:
        """Assert the invariants."""
        assert self.entries == sorted(self._by_name.values(), key=lambda entry: entry[:2])
        assert all(entry[1] == entry[2].name == name for name, entry in self._by_name.items())

    def _place(self, figure: float, name: str) -> int:
        """Return the index where an entry is, or belongs. `bisect` would compare whole entries, which is far slower."""
        entries = self.entries
        low, high = 0, len(entries)
        while low < high:
            middle = (low + high) >> 1
            known = entries[middle]
            if known[0] < figure or (known[0] == figure and known[1] < name):
                low = middle + 1
            else:
                high = middle
        return low
