"""Owners of the slots of one tier, and whose slots are evicted when an owner needs room: shares are limits and promises alike.
PURE.

An owner with a share never has more slots than that, and those evicted for it are its own: at its share always, else once no
slot is free and the owners without a share have none to give. So within its share it loses nothing to others. Owners without
one have what is left, in one order.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from mooncake_zmq.kv.eviction import Lru

NO_OWNER = 0
"""The owner of blocks that belong to no tenant; it has no share."""


class Shares:
    """Owners are numbered from 1; `most[i]`: the slots that owner i + 1 may have, 0 for one without a share. There is an order
    (`eviction.Lru`) for each share, and one for all that have none."""

    def __init__(self, order: Lru, capacity: int, most: Sequence[int]) -> None:
        assert sum(most) <= capacity, "what is promised is there"
        self.of = bytearray(capacity)
        """The owner of each slot, while it is not free."""
        self.held = [0] * (len(most) + 1)
        """Slots that each owner has: being written, committed, in quarantine."""
        self.most = [0, *most]
        self._capacity = capacity
        self._orders = [order.sibling() if share else order for share in self.most]
        self._ordered = [NO_OWNER, *(owner for owner, share in enumerate(self.most) if share)]
        """Owners with an eviction order of their own, and `NO_OWNER`, whose order all others have in common."""

    def victims(self, owner: int, *, free: bool) -> Lru | None:
        """The order from which its next slot comes, which may be empty: it gets none. None: from the free ones, of which there
        are some if `free`."""
        own, others = self._orders[owner], self._orders[NO_OWNER]
        if self.most[owner] and self.held[owner] >= self.most[owner]:
            return own
        return None if free else others or own

    def take(self, slot: int, owner: int) -> None:
        """A slot that belonged to no owner is reserved for this one."""
        self.of[slot] = owner
        self.held[owner] += 1

    def give(self, slot: int) -> None:
        """It is free, or its owner's no more."""
        self.held[self.of[slot]] -= 1

    def room(self, owner: int) -> int:
        """Slots that it can count on."""
        return self.most[owner] or self._capacity - sum(self.most)

    def windows(self, share: float) -> list[int]:
        """How many of the coldest are that share of the room that each order has, free slots being as good."""
        shared = self._capacity - sum(self.held[owner] for owner in self._ordered[1:])
        free = self._capacity - sum(self.held)
        own = (int(share * self.most[owner]) - self.most[owner] + self.held[owner] for owner in self._ordered[1:])
        return [max(0, window) for window in (int(share * shared) - free, *own)]

    def cold_ends(self, windows: Sequence[int]) -> list[int]:
        """The coldest of each order, so many as `windows` says."""
        windows_of = zip(self._ordered, windows, strict=True)
        return [slot for owner, window in windows_of for slot in self._orders[owner].coldest(window)]

    # --- as `eviction.Lru`

    def insert(self, slots: Sequence[int]) -> None:
        for order, some in self._runs(slots):
            order.insert(slots[some])

    def touch(self, slots: Sequence[int]) -> None:
        for order, some in self._runs(slots):
            order.touch(slots[some])

    def remove(self, slots: Sequence[int]) -> None:
        for order, some in self._runs(slots):
            order.remove(slots[some])

    def _runs(self, slots: Sequence[int]) -> Iterator[tuple[Lru, slice]]:
        """Those of one owner after the other, with the order in which they stand."""
        start = 0
        for owner, some in groupby(slots, self.of.__getitem__):
            stop = start + len(list(some))
            yield self._orders[owner], slice(start, stop)
            start = stop

    def coldest(self, limit: int) -> list[int]:
        return self.cold_ends([limit] * len(self._ordered))[:limit]

    def demote(self, slot: int) -> None:
        self._orders[self.of[slot]].demote(slot)

    def __len__(self) -> int:
        return sum(len(self._orders[owner]) for owner in self._ordered)

    def __contains__(self, slot: int) -> bool:
        return slot in self._orders[self.of[slot]]

    def check(self, taken: Sequence[int]) -> None:
        """Assert the invariants, given all slots that are not free."""
        held = [0] * len(self.held)
        for slot in taken:
            held[self.of[slot]] += 1
        assert held == self.held, "it is known what each owner has"
        assert all(has <= share for has, share in zip(held, self.most, strict=True) if share), "a share is a limit"
