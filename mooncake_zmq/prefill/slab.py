"""The slab of a prefill: the slots from which its KV is handed off and reused, as works and readers name them. PURE."""

from collections.abc import Iterable, Sequence

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import SlotGrant
from mooncake_zmq.kv.slot_table import SlotState
from mooncake_zmq.kv.slots import Slots

NO_SLOT = -1
"""In place of a slot, for a block that is expected from the pool."""


class Slab:
    """Hold the slots of the prefill `name` in its present incarnation."""

    def __init__(self, name: str, incarnation: int, slots: Slots) -> None:
        self.slots = slots
        self.name = name
        self._incarnation = incarnation

    def reserve(self, count: int) -> list[int]:
        """Take anonymous slots and pin them; the caller has checked that there is room."""
        taken = self.slots.reserve_anonymous(count)
        self.slots.pin(taken)
        return taken

    def release(self, held: Iterable[int]) -> None:
        """Free slots that are pinned here and were never committed; `NO_SLOT` among them is none."""
        for slot in [each for each in held if each != NO_SLOT]:
            self.slots.unpin((slot,))
            self.slots.free(slot)

    def let_go(self, held: Sequence[int]) -> None:
        """Unpin all slots of a job that ended, and free those that were still being written."""
        self.slots.unpin(held)
        for slot in self.slots.being_written(held):
            self.slots.free(slot)

    def grants(self, granted: Iterable[int]) -> tuple[SlotGrant, ...]:
        """Return slots as works name them."""
        name, incarnation, generations = self.name, self._incarnation, self.slots.generation
        return tuple([SlotGrant(name, incarnation, slot, generations[slot]) for slot in granted])

    def written(self, slots: Iterable[int]) -> tuple[SlotRef, ...]:
        """Return slots that are written and not committed, as readers name them."""
        name, incarnation, generations = self.name, self._incarnation, self.slots.generation
        return tuple(
            [SlotRef(node=name, incarnation=incarnation, slot=slot, generation=generations[slot], checksum=0) for slot in slots]
        )

    def refs(self, slots: Iterable[int]) -> list[SlotRef]:
        """Return committed slots as readers name them."""
        name, incarnation, generations = self.name, self._incarnation, self.slots.generation
        checksums = self.slots.checksum
        return [
            SlotRef(node=name, incarnation=incarnation, slot=slot, generation=generations[slot], checksum=checksums[slot])
            for slot in slots
        ]

    def forget(self, refs: Iterable[SlotRef]) -> None:
        """Forget those of these blocks that are here: their bytes did not verify."""
        for ref in refs:
            mine = (ref.node, ref.incarnation) == (self.name, self._incarnation) and ref.slot < self.slots.capacity
            stands = mine and self.slots.generation[ref.slot] == ref.generation
            if stands and self.slots.state_of(ref.slot) is SlotState.COMMITTED:
                self.slots.forget(ref.slot)
