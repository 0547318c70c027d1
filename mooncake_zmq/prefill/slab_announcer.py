"""Announces to the conductors which complete blocks are in a prefill's slab, from the end of their chunk on, whether the
pool has a copy or not. PURE."""

from collections.abc import Iterable

from mooncake_zmq.core.actor import Effect, Send
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import BlocksAnnounced
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.pool.node.announcer import announcements


class SlabAnnouncer:
    """Collect what one event changed in `slots`, the slab."""

    def __init__(self, slots: Slots, counts: Tally) -> None:
        self._slots = slots
        self._counts = counts
        self._new: list[Key] = []

    def whole(self) -> list[BlocksAnnounced]:
        """Return the announcements of all blocks in the slab, for a new conductor."""
        return announcements(self._slots.committed_keys())

    def computed(self, keys: Iterable[Key]) -> None:
        """Record blocks that have just been committed under their keys."""
        self._new += keys

    def flush(self, conductors: Iterable[str]) -> list[Effect]:
        """Return the announcements of what changed since the last call, and clear the slots' list of evicted keys."""
        gone = self._slots.evicted
        if not self._new and not gone:
            return []
        present = self._slots.committed
        stored = [key for key in dict.fromkeys(self._new) if present(key) is not None]
        removed = [key for key in dict.fromkeys(gone) if present(key) is None]
        self._new.clear()
        gone.clear()
        messages = announcements(stored, removed)
        self._counts.add("announced_blocks[change=stored]", len(stored))
        self._counts.add("announced_blocks[change=removed]", len(removed))
        return [Send(conductor, message) for message in messages for conductor in conductors]
