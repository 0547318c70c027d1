"""Counters, ids and state tables that all actors share. PURE."""

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar


class Tally(dict[str, int]):
    """Monotonic counters by name; a label goes in brackets: `misses[reason=evicted]`."""

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a counter; a name that was never counted has no entry."""
        if amount:
            self[name] = self[name] + amount if name in self else amount  # `get` of a subclass of dict is slow as machine code


class Ids:
    """Numbers from 2 on, each given once in an incarnation."""

    def __init__(self) -> None:
        self._last = 1

    def new(self) -> int:
        """Return the next number."""
        self._last += 1
        return self._last


class Named(Enum):
    """States and events of a `Lifecycle`. A member is equal to itself alone, so it may hash by identity: `Enum` hashes the name
    in Python, which took most of a transition's time."""

    __hash__ = object.__hash__


S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Lifecycle(Generic[S, E]):
    """A life cycle as a table: state and event give the next state, and a missing entry is a bug.

    The table holds all allowed transitions; `taken` counts those made, for coverage.
    """

    def __init__(self, what: str, table: Mapping[tuple[S, E], S], taken: Tally) -> None:
        self._transitions = {
            (state, event): (following, move_name(what, state, following)) for (state, event), following in table.items()
        }
        self._taken = taken

    def after(self, state: S, event: E) -> S:
        """Return the next state. Raises KeyError if the table has no such transition."""
        following, name = self._transitions[state, event]
        taken = self._taken
        taken[name] = taken.get(name, 0) + 1
        return following


def move_name(what: str, before: Enum, after: Enum) -> str:
    """Return the name under which a transition is counted."""
    return f"{what} {before.value} -> {after.value}"
