"""Which block follows which in DRAM, so that a use of a block is a use of all before it: children go before parents. PURE."""

from collections.abc import Sequence

from mooncake_zmq.kv.block_hash import KEY_BYTES, Key
from mooncake_zmq.kv.slots import Slots

MAX_ANCESTORS = 1024
"""Blocks touched before a block that is used; older ones of a longer chain keep their place. Bounds the time of an event."""
NONE = bytes(KEY_BYTES)


class Chains:
    """The parent's key of each slot's block: it finds the parent again wherever that stands now."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._parents = bytearray(KEY_BYTES * slots.capacity)

    def link(self, slot: int, parent: Key | None) -> None:
        """The block in `slot` follows `parent`, if that is known."""
        self._parents[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] = parent or NONE

    def touch(self, parent: Key | None, slots: Sequence[int]) -> None:
        """A chain after `parent` was used: it and what it follows, the root last."""
        self._slots.touch(self._up_to(parent) + list(slots))

    def _up_to(self, key: Key | None) -> list[int]:
        ancestors: list[int] = []
        while key is not None and len(ancestors) < MAX_ANCESTORS:
            slot = self._slots.committed(key)
            if slot is None:
                break
            ancestors.append(slot)
            parent = bytes(self._parents[slot * KEY_BYTES : (slot + 1) * KEY_BYTES])
            key = None if parent == NONE else parent
        ancestors.reverse()
        return ancestors
