"""What every actor counts, numbers and moves: the shell that none of them writes again. PURE."""

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar


class Tally(dict[str, int]):
    """Monotonic counters by name; a label goes in brackets: `misses[reason=evicted]`."""

    def add(self, name: str, amount: int = 1) -> None:
        """Count; a name that was never counted does not stand there."""
        if amount:
            self[name] = self[name] + amount if name in self else amount  # `get` of a dict's subclass is slow as machine code


class Ids:
    """Numbers that are never used again in one life, from 2 on."""

    def __init__(self) -> None:
        self._last = 1

    def new(self) -> int:
        """The next one."""
        self._last += 1
        return self._last


class Named(Enum):
    """States and events of a `Lifecycle`. A member is equal to itself alone, so it may hash by identity: `Enum` hashes the name
    in Python, which took most of a move."""

    __hash__ = object.__hash__


S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Lifecycle(Generic[S, E]):
    """The life of things of one kind as a table: state and event give the next state, and a missing entry is our bug.

    The table is all there is to know of what may follow what; `taken` counts the moves, for coverage.
    """

    def __init__(self, what: str, table: Mapping[tuple[S, E], S], taken: Tally) -> None:
        self._moves = {
            (state, event): (following, move_name(what, state, following)) for (state, event), following in table.items()
        }
        self._taken = taken

    def after(self, state: S, event: E) -> S:
        """The next state. Raises KeyError if nothing like that may happen."""
        following, name = self._moves[state, event]
        taken = self._taken
        taken[name] = taken.get(name, 0) + 1
        return following


def move_name(what: str, before: Enum, after: Enum) -> str:
    """How a move is counted."""
    return f"{what} {before.value} -> {after.value}"
