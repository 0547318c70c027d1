"""The order in which slots are evicted: least recently used first. PURE; columns only, no object per slot.

It holds the slots that may be evicted now: committed, found by a key, without a pin. A lease takes its slots out (`remove`)
and gives them back (`insert`), so an insert is a use of the block. Chains are inserted and touched from the leaf to the root,
so that the leaf is evicted first.

A *spare* copy is one of a block that another pool keeps as well. Spare copies age faster than the others, so that of two
copies that were last used together one is evicted long before the other.
"""

from array import array
from collections.abc import Sequence
from copy import copy
from typing import Final, Self

OUT = -1
"""In place of a link: the slot is not in the order."""
SPARE_AGES: Final = 4
"""How many times as fast as the others a spare copy ages."""


class Lru:
    """Two doubly linked rings through two int32 columns, with the time of each slot's last use: 17 bytes a slot.

    Node `end`, behind the slots, is the beginning and end of the ring of copies that are not spare; `next` leads from there to
    the coldest slot, and on to the hottest. The node after it is that of the spare copies. Time counts the slots used.
    """

    def __init__(self, capacity: int) -> None:
        self._next = array("i", [OUT]) * capacity
        self._previous = self._next[:]
        self._spare = array("B", [False]) * capacity
        self._used = array("Q", [0]) * capacity
        self._begin()

    def _begin(self) -> None:
        """Make the order empty, with rings of its own."""
        self._end = len(self._next)
        self._next.extend((self._end, self._end + 1))
        self._previous.extend((self._end, self._end + 1))
        self._count = self._now = 0

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
        """Make `slots` evictable, used just now, one after the other."""
        spare = self._spare
        kept = [slot for slot in slots if not spare[slot]]
        self._now += len(slots)
        self._splice(self._end, kept)
        if len(kept) < len(slots):
            self._splice(self._end + 1, [slot for slot in slots if spare[slot]])
        self._count += len(slots)

    def _splice(self, end: int, slots: Sequence[int]) -> None:
        """Put slots at the hot end of one ring, all at once: the end of a lease is most of what a pool does."""
        following, previous, used, now = self._next, self._previous, self._used, self._now
        hottest = previous[end]
        for slot in slots:
            assert following[slot] == OUT, "evictable already"
            following[hottest], previous[slot] = slot, hottest
            following[slot], used[slot] = end, now
            hottest = slot
        previous[end] = hottest

    def mark(self, slots: Sequence[int], *, spare: bool) -> None:
        """Note of slots that are not in here whether their copies are spare."""
        for slot in slots:
            assert self._next[slot] == OUT, "evictable"
            self._spare[slot] = spare

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
        slot = self._colder(self._next[self._end], self._next[self._end + 1])
        self.remove((slot,))
        return slot

    def _colder(self, kept: int, spare: int) -> int:
        """Return which one of two slots goes first, one in each ring, or the end of a ring without one."""
        if kept == self._end or spare == self._end + 1:
            return spare if kept == self._end else kept
        now, used = self._now, self._used
        return spare if SPARE_AGES * (now - used[spare]) >= now - used[kept] else kept

    def coldest(self, limit: int) -> list[int]:
        """Return up to `limit` slots in the order in which `pop` would; changes nothing."""
        slots: list[int] = []
        kept, spare = self._next[self._end], self._next[self._end + 1]
        for _ in range(min(limit, self._count)):
            slot = self._colder(kept, spare)
            slots.append(slot)
            if slot == kept:
                kept = self._next[kept]
            else:
                spare = self._next[spare]
        return slots

    def demote(self, slot: int) -> None:
        """Make a slot in here the next victim, until it is used, by a place among the spare copies as one never used."""
        self.remove((slot,))
        end = self._end + 1
        after = self._next[end]
        self._next[slot], self._previous[slot] = after, end
        self._next[end] = self._previous[after] = slot
        self._used[slot] = 0
        self._count += 1
