"""Which block follows which in DRAM, so that a use of a block is a use of all before it: children go before parents. PURE."""

from array import array
from collections.abc import Sequence

from mooncake_zmq.kv.slots import Slots

MAX_ANCESTORS = 1024
"""Blocks touched before a block that is put; older ones of a longer chain keep their place. Bounds the time of an event."""
NONE = -1


class Chains:
    """A parent slot per slot, trusted only while that slot still has the generation it was linked at."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._parent = array("i", [NONE]) * slots.capacity
        self._generation = array("Q", [0]) * slots.capacity

    def link(self, slot: int, parent: int | None) -> None:
        """The block in `slot` follows the one in `parent`, if that is known."""
        self._parent[slot] = NONE if parent is None else parent
        self._generation[slot] = 0 if parent is None else self._slots.generation[parent]

    def touch(self, slots: Sequence[int]) -> None:
        """A chain was used: it and what it follows, the root last."""
        if slots:
            self._slots.touch(self._before(slots[0]) + list(slots))

    def _before(self, slot: int) -> list[int]:
        ancestors: list[int] = []
        while len(ancestors) < MAX_ANCESTORS:
            parent = self._parent[slot]
            if parent == NONE or self._slots.generation[parent] != self._generation[slot]:
                break
            ancestors.append(parent)
            slot = parent
        ancestors.reverse()
        return ancestors
