"""A use of a block in DRAM is a use of all blocks that it follows: children go before parents. PURE."""

from collections.abc import Sequence

from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.pool.node.contents import Contents

MAX_ANCESTORS = 1024
"""Blocks touched before a block that is used; older ones of a longer chain keep their place. Bounds the time of an event."""


class Chains:
    """Finds the slot of each block's parent, wherever that stands now; `contents` has the parent's key of each slot's block."""

    def __init__(self, slots: Slots, contents: Contents) -> None:
        self._slots = slots
        self._contents = contents

    def touch(self, parent: Key | None, slots: Sequence[int]) -> None:
        """A chain after `parent` was used: it and what it follows, the root last."""
        self._slots.touch(self._up_to(parent) + list(slots))

    def _up_to(self, key: Key | None) -> list[int]:
        ancestors: list[int] = []
        if key is None:
            return ancestors
        find, parent_of = self._slots.committed, self._contents.parent
        while key is not None and len(ancestors) < MAX_ANCESTORS and (slot := find(key)) is not None:
            ancestors.append(slot)
            key = parent_of(slot)
        ancestors.reverse()
        return ancestors
