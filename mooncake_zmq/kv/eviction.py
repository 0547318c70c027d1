"""Which slot goes next: the seam of eviction, and the policies behind it. PURE; columns only, no object per slot.

A policy knows the slots that may be evicted now: committed, found by a key, without a pin. A lease takes its slots out
(`remove`) and gives them back (`insert`), so an insert is a use of the block, and leases that overlap are one use; `forget`
ends the block itself. Chains are inserted and touched from the leaf to the root, and each policy then evicts the leaf first.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import islice
from typing import Protocol, Self

OUT = -1
"""In place of a link: the slot is in no list."""
MAX_USES = 255
"""Where LFU stops counting."""
MAX_DEPTH = 4095
"""Deeper blocks count as this deep: 2 million tokens at 512 a block."""


class Evictable(Protocol):
    """The evictable slots of one tier, each of which has its turn."""

    def insert(self, slots: Sequence[int], depths: Sequence[int]) -> None:
        """`slots` may be evicted from now on, used just now, one after the other; the block of each stands at its depth in its
        chain, as far as is known."""

    def touch(self, slots: Sequence[int], depths: Sequence[int]) -> None:
        """Different slots in here were used just now, one after the other, as with `insert`."""

    def remove(self, slots: Sequence[int]) -> None:
        """Slots in here may not be evicted for now; what is known of their blocks stays."""

    def forget(self, slot: int) -> None:
        """The block of a slot that is not in here is gone: what comes next there is new."""

    def coldest(self, limit: int) -> list[int]:
        """Up to `limit` slots that are next to go; changes nothing."""

    def demote(self, slot: int) -> None:
        """Make a slot in here the next victim."""

    def __len__(self) -> int: ...

    def __contains__(self, slot: int) -> bool: ...


class Eviction(Evictable, Protocol):
    """All in one order: what `coldest` answers is what as many calls of `pop` would."""

    def pop(self) -> int:
        """Take the next victim out; there must be one."""

    def sibling(self) -> Self:
        """One more order over the same slots and columns, empty: a slot is in one of them, until its block is forgotten."""


class Lru:
    """Least recently used first: a doubly linked ring through two int32 columns, 8 bytes a slot.

    Node `end`, behind the slots, is the ring's beginning and end; `next` leads from there to the coldest slot, and on to the
    hottest.
    """

    def __init__(self, capacity: int, rings: int = 1) -> None:
        self._next = array("i", [OUT]) * capacity
        self._previous = self._next[:]
        self._rings = rings
        self._begin()

    def _begin(self) -> None:
        """Empty, with rings of its own."""
        self._end = len(self._next)
        own = range(self._end, self._end + self._rings)
        self._next.extend(own)
        self._previous.extend(own)
        self._count = 0

    def sibling(self) -> Self:
        other = copy(self)
        other._begin()
        return other

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: int) -> bool:
        return self._next[slot] != OUT

    def insert(self, slots: Sequence[int], depths: Sequence[int]) -> None:
        """All in one splice at the hot end: the end of a lease is most of what a pool does."""
        following, previous = self._next, self._previous
        hottest = previous[self._end]
        for slot in slots:
            assert following[slot] == OUT, "evictable already"
            following[hottest], previous[slot] = slot, hottest
            following[slot] = self._end
            hottest = slot
        previous[self._end] = hottest
        self._count += len(slots)

    def touch(self, slots: Sequence[int], depths: Sequence[int]) -> None:
        self.remove(slots)
        self.insert(slots, depths)

    def remove(self, slots: Sequence[int]) -> None:
        following, previous = self._next, self._previous
        for slot in slots:
            before, after = previous[slot], following[slot]
            assert after != OUT, "not evictable"
            following[before] = after
            previous[after] = before
            following[slot] = OUT
        self._count -= len(slots)

    def forget(self, slot: int) -> None:
        pass

    def pop(self) -> int:
        assert self._count, "nothing to evict"
        following, end = self._next, self._end
        slot = following[end]
        after = following[end] = following[slot]
        self._previous[after] = end
        following[slot] = OUT
        self._count -= 1
        return slot

    def coldest(self, limit: int) -> list[int]:
        return list(islice(self._in_order(), limit))

    def demote(self, slot: int) -> None:
        self.remove((slot,))
        self._link(slot, self._next[self._end])

    def _link(self, slot: int, after: int) -> None:
        """Put `slot` on the colder side of `after`."""
        assert self._next[slot] == OUT, "evictable already"
        before = self._previous[after]
        self._next[slot], self._previous[slot] = after, before
        self._next[before] = self._previous[after] = slot
        self._count += 1

    def _in_order(self) -> Iterator[int]:
        return self._between(self._next[self._end], self._end)

    def _between(self, start: int, end: int) -> Iterator[int]:
        """The slots from `start` on, hotter and hotter, as far as `end`, which is not among them."""
        while start != end:
            yield start
            start = self._next[start]


class _Ranked(Lru):
    """The lowest rank first, the least recently used within it: a ring for each rank. Rank 0 is for the demoted alone."""

    def __init__(self, capacity: int, ranks: int) -> None:
        super().__init__(capacity, rings=ranks)

    def _begin(self) -> None:
        super()._begin()
        self._in_use = 0
        """Bit r is set while some slot has rank r."""

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            before = self._previous[slot]
            super().remove((slot,))
            if self._next[before] == before:  # only a ring's own node is left of it
                self._in_use ^= 1 << (before - self._end)

    def pop(self) -> int:
        assert self._count, "nothing to evict"
        lowest = (self._in_use & -self._in_use).bit_length() - 1
        slot = self._next[self._end + lowest]
        self.remove((slot,))
        return slot

    def demote(self, slot: int) -> None:
        super().demote(slot)
        self._in_use |= 1

    def _rank(self, slot: int, rank: int) -> None:
        """Put `slot` at the hot end of its rank."""
        self._link(slot, self._end + rank)
        self._in_use |= 1 << rank

    def _in_order(self) -> Iterator[int]:
        ranks = self._in_use
        while ranks:
            end = self._end + (ranks & -ranks).bit_length() - 1
            yield from self._between(self._next[end], end)
            ranks &= ranks - 1


class Lfu(_Ranked):
    """Least often used first; a block that is evicted loses its count."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, ranks=MAX_USES + 1)
        self._uses = bytearray(capacity)

    def insert(self, slots: Sequence[int], depths: Sequence[int]) -> None:
        for slot in slots:
            uses = self._uses[slot] = min(self._uses[slot] + 1, MAX_USES)
            self._rank(slot, uses)

    def forget(self, slot: int) -> None:
        self._uses[slot] = 0


class LengthAware(_Ranked):
    """The deepest in its chain first, wherever it was last seen."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, ranks=MAX_DEPTH + 2)
        self._depth = array("H", [0]) * capacity

    def insert(self, slots: Sequence[int], depths: Sequence[int]) -> None:
        for slot, depth in zip(slots, depths, strict=True):
            deepest = self._depth[slot] = min(max(self._depth[slot], depth), MAX_DEPTH)
            self._rank(slot, MAX_DEPTH + 1 - deepest)

    def forget(self, slot: int) -> None:
        self._depth[slot] = 0


class Sieve(Lru):
    """A hand goes round from the oldest block to the newest, spares once each that was used again, and evicts the others.

    A use moves nothing, so a lease does not either: its slots keep their places, and the hand passes over them. Of a chain
    the leaf is the older, and goes first; but a hand that stood amid the chain when all of it was used may end on the root.
    """

    ABSENT, KNOWN, USED, HELD = range(4)

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._use = bytearray(capacity)

    def _begin(self) -> None:
        super()._begin()
        self._held = 0
        """Slots in the ring that may not be evicted for now."""
        self._hand = self._end
        """Where to look next; at the ring's own node, it begins again at the oldest."""

    def __len__(self) -> int:
        return self._count - self._held

    def __contains__(self, slot: int) -> bool:
        return self._use[slot] in (self.KNOWN, self.USED)

    def insert(self, slots: Sequence[int], depths: Sequence[int]) -> None:
        for slot in slots:
            if self._use[slot] == self.ABSENT:
                self._link(slot, self._end)
                self._use[slot] = self.KNOWN
            else:
                assert self._use[slot] == self.HELD, "evictable already"
                self._held -= 1
                self._use[slot] = self.USED

    def touch(self, slots: Sequence[int], depths: Sequence[int]) -> None:
        for slot in slots:
            assert slot in self, "not evictable"
            self._use[slot] = self.USED

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            assert slot in self, "not evictable"
            self._use[slot] = self.HELD
        self._held += len(slots)

    def forget(self, slot: int) -> None:
        if self._use[slot] == self.HELD:
            self._held -= 1
            self._take_out(slot)
        self._use[slot] = self.ABSENT

    def pop(self) -> int:
        assert len(self), "nothing to evict"
        while (use := self._use[slot := self._at_hand()]) != self.KNOWN:
            if use == self.USED:
                self._use[slot] = self.KNOWN
            self._hand = self._next[slot]
        self.remove((slot,))
        return slot

    def demote(self, slot: int) -> None:
        assert slot in self, "not evictable"
        self._take_out(slot)
        self._link(slot, self._at_hand())
        self._use[slot] = self.KNOWN
        self._hand = slot

    def _at_hand(self) -> int:
        if self._hand == self._end:
            self._hand = self._next[self._end]
        return self._hand

    def _take_out(self, slot: int) -> None:
        if slot == self._hand:
            self._hand = self._next[slot]
        super().remove((slot,))

    def _in_order(self) -> Iterator[int]:
        """Two rounds of the hand: who is not spared goes in the first. May walk over all slots for a few victims."""
        for use in (self.KNOWN, self.USED):
            for start, end in ((self._hand, self._end), (self._next[self._end], self._hand)):
                yield from (slot for slot in self._between(start, end) if self._use[slot] == use)


POLICIES: dict[str, Callable[[int], Eviction]] = {"lru": Lru, "lfu": Lfu, "length_aware": LengthAware, "sieve": Sieve}


def make_policy(name: str, capacity: int) -> Eviction:
    """The policy `name` over slots 0..capacity-1, empty; ValueError if there is none of that name."""
    if name not in POLICIES:
        raise ValueError(f"no eviction policy {name!r}: one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](capacity)
