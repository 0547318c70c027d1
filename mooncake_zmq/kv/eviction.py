"""The order in which slots are evicted: least recently used first. PURE; columns only, no object per slot.

It holds the slots that may be evicted now: committed, found by a key, without a pin. A lease takes its slots out (`remove`)
and gives them back (`insert`), so an insert is a use of the block. Chains are inserted and touched from the leaf to the root,
so that the leaf is evicted first.
"""

from array import array
from collections.abc import Sequence
from copy import copy
from typing import Self

OUT = -1
"""In place of a link: the slot is not in the order."""


class Lru:
    """A doubly linked ring through two int32 columns, 8 bytes a slot.

    Node `end`, behind the slots, is the ring's beginning and end; `next` leads from there to the coldest slot, and on to the
    hottest.
    """

    def __init__(self, capacity: int) -> None:
        self._next = array("i", [OUT]) * capacity
        self._previous = self._next[:]
        self._begin()

    def _begin(self) -> None:
        """Make the order empty, with a ring of its own."""
        self._end = len(self._next)
        self._next.append(self._end)
        self._previous.append(self._end)
        self._count = 0

    def sibling(self) -> Self:
        """Return one more order over the same slots and columns, empty: a slot is in at most one of them."""
        other = copy(self)
        other._begin()
        return other

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: int) -> bool:
        return self._next[slot] != OUT

    def insert(self, slots: Sequence[int]) -> None:
        """Make `slots` evictable, used just now, one after the other. All in one splice at the hot end: the end of a lease is
        most of what a pool does."""
        following, previous = self._next, self._previous
        hottest = previous[self._end]
        for slot in slots:
            assert following[slot] == OUT, "evictable already"
            following[hottest], previous[slot] = slot, hottest
            following[slot] = self._end
            hottest = slot
        previous[self._end] = hottest
        self._count += len(slots)

    def touch(self, slots: Sequence[int]) -> None:
        """Note that different slots in here were used just now, one after the other."""
        self.remove(slots)
        self.insert(slots)

    def remove(self, slots: Sequence[int]) -> None:
        """Keep slots in here from being evicted."""
        following, previous = self._next, self._previous
        for slot in slots:
            before, after = previous[slot], following[slot]
            assert after != OUT, "not evictable"
            following[before] = after
            previous[after] = before
            following[slot] = OUT
        self._count -= len(slots)

    def pop(self) -> int:
        """Take the next victim out; there must be one."""
        assert self._count, "nothing to evict"
        slot = self._next[self._end]
        self.remove((slot,))
        return slot

    def coldest(self, limit: int) -> list[int]:
        """Return up to `limit` slots in the order in which `pop` would; changes nothing."""
        slots: list[int] = []
        slot = self._next[self._end]
        while slot != self._end and len(slots) < limit:
            slots.append(slot)
            slot = self._next[slot]
        return slots

    def demote(self, slot: int) -> None:
        """Make a slot in here the next victim."""
        self.remove((slot,))
        after = self._next[self._end]
        self._next[slot], self._previous[slot] = after, self._end
        self._next[self._end] = self._previous[after] = slot
        self._count += 1
