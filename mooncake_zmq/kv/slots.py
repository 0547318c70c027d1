"""The slots of one segment: which key each holds, generations, pins, LRU. PURE; used by the pool and by a prefill's slab.

A slot's generation is odd while somebody may write it and even once committed or free (a seqlock): a reader that finds the
generation it was given, before and after its copy, has read what was granted. Every method that changes a generation
notes it in `fences`, which the actor hands to the runtime ahead of any message that tells of the change.
"""

from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum

from mooncake_zmq.kv.block_hash import Key


class SlotState(Enum):
    """Life of a slot."""

    FREE = "free"
    WRITING = "writing"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"
    """Its writer ran past its lease and may still write: nobody gets it until that writer answers or is known dead."""


NEXT_STATE: dict[tuple[SlotState, str], SlotState] = {
    (SlotState.FREE, "reserve"): SlotState.WRITING,
    (SlotState.COMMITTED, "reserve"): SlotState.WRITING,
    (SlotState.WRITING, "commit"): SlotState.COMMITTED,
    (SlotState.WRITING, "free"): SlotState.FREE,
    (SlotState.WRITING, "quarantine"): SlotState.QUARANTINED,
    (SlotState.QUARANTINED, "free"): SlotState.FREE,
    (SlotState.COMMITTED, "free"): SlotState.FREE,
}


class Slots:
    """Parallel plain structures indexed by slot. A key names at most one slot; a slot may be anonymous (no key)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.generation = [0] * capacity
        self.checksum = [0] * capacity
        self.pins = [0] * capacity
        """Leases and copies that cover the slot: it is not evicted while above 0."""
        self.key: list[Key | None] = [None] * capacity
        self.state = [SlotState.FREE] * capacity
        self.fences: list[tuple[int, int]] = []
        self.evicted: list[Key] = []
        """Keys whose last copy here went, for whoever announces them; the owner clears the list."""
        self.transitions: dict[str, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._by_key: dict[Key, int] = {}
        self._lru: OrderedDict[int, None] = OrderedDict()
        """Committed slots without a pin, the next to evict first."""

    @property
    def available(self) -> int:
        """Slots that `reserve` can still hand out."""
        return len(self._free) + len(self._lru)

    def committed(self, key: Key) -> int | None:
        """The slot that holds `key`, readable now."""
        slot = self._by_key.get(key)
        return slot if slot is not None and self.state[slot] is SlotState.COMMITTED else None

    def held(self, key: Key) -> bool:
        """Is `key` here or being written?"""
        return key in self._by_key

    def committed_keys(self) -> list[Key]:
        """Every readable key."""
        return [key for key, slot in self._by_key.items() if self.state[slot] is SlotState.COMMITTED]

    def count(self, state: SlotState) -> int:
        """Slots in `state`."""
        return sum(1 for s in self.state if s is state)

    def leading_run(self, keys: Sequence[Key]) -> list[int]:
        """Slots of the longest leading run of `keys` that is readable."""
        run: list[int] = []
        for key in keys:
            slot = self.committed(key)
            if slot is None:
                break
            run.append(slot)
        return run

    def reserve(self, key: Key | None) -> int | None:
        """A slot to write, evicting the least recently used if none is free; None if all are pinned or being written."""
        assert key is None or key not in self._by_key, "a key is stored once"
        if self._free:
            slot = self._free.pop()
        elif self._lru:
            slot, _ = self._lru.popitem(last=False)
            self._unname(slot)
        else:
            return None
        self._move(slot, "reserve")
        self._set_generation(slot, self.generation[slot] + 1)
        if key is not None:
            self.key[slot] = key
            self._by_key[key] = slot
        return slot

    def commit(self, slot: int, checksum: int) -> None:
        """The bytes stand: readable from now on, never changed while the generation stands."""
        self._move(slot, "commit")
        self._set_generation(slot, self.generation[slot] + 1)
        self.checksum[slot] = checksum
        if self.pins[slot] == 0:
            self._release(slot)

    def name(self, slot: int, key: Key) -> bool:
        """Give an anonymous slot its key; False if another slot has it already."""
        assert self.key[slot] is None
        if key in self._by_key:
            return False
        self.key[slot] = key
        self._by_key[key] = slot
        return True

    def free(self, slot: int) -> None:
        """Give a reserved or quarantined slot back; whatever was written there was never visible."""
        assert self.pins[slot] == 0
        self._unname(slot, announce=False)
        self._move(slot, "free")
        self._set_generation(slot, self.generation[slot] + 1)
        self._free.append(slot)

    def quarantine(self, slot: int) -> None:
        """Keep a reserved slot away from everybody while its late writer may still write."""
        self._unname(slot, announce=False)
        self._move(slot, "quarantine")

    def forget(self, slot: int) -> None:
        """Drop a committed copy that did not verify: no new reader finds it; the slot is reused once unpinned."""
        assert self.state[slot] is SlotState.COMMITTED
        if self.key[slot] is None:
            return
        self._unname(slot)
        if self.pins[slot] == 0:
            self._lru.pop(slot, None)
            self._release(slot)

    def pin(self, slot: int) -> None:
        """Cover a slot by a lease or copy."""
        assert self.state[slot] in (SlotState.COMMITTED, SlotState.WRITING)
        self.pins[slot] += 1
        self._lru.pop(slot, None)

    def unpin(self, slots: Sequence[int]) -> None:
        """End a cover. Given a chain's slots from the root on, the leaf becomes the next to evict, the root the last."""
        for slot in reversed(slots):
            assert self.pins[slot] > 0, "a pin ends once"
            self.pins[slot] -= 1
            if self.pins[slot] == 0 and self.state[slot] is SlotState.COMMITTED:
                self._release(slot)

    def touch(self, slots: Sequence[int]) -> None:
        """Mark a chain as used just now, root last, so that children are evicted before their parents."""
        for slot in reversed(slots):
            if slot in self._lru:
                self._lru.move_to_end(slot)

    def take_fences(self) -> tuple[tuple[int, int], ...]:
        """The generations changed since the last call."""
        fences = tuple(self.fences)
        self.fences.clear()
        return fences

    def check(self) -> None:
        """Assert the invariants."""
        counts = {state: self.count(state) for state in SlotState}
        assert sum(counts.values()) == self.capacity
        assert len(self._free) == counts[SlotState.FREE]
        for slot in range(self.capacity):
            state = self.state[slot]
            writing = state in (SlotState.WRITING, SlotState.QUARANTINED)
            assert (self.generation[slot] % 2 == 1) == writing, "odd while it may be written"
            assert (slot in self._lru) == (state is SlotState.COMMITTED and self.pins[slot] == 0)
            key = self.key[slot]
            assert key is None or self._by_key.get(key) == slot
            assert self.pins[slot] >= 0
            assert self.pins[slot] == 0 or state in (SlotState.COMMITTED, SlotState.WRITING)
        assert len(self._by_key) == sum(1 for key in self.key if key is not None)

    def _release(self, slot: int) -> None:
        """A committed slot lost its last pin: evictable, or free at once if nobody could find it."""
        if self.key[slot] is None:
            self._move(slot, "free")
            self._set_generation(slot, self.generation[slot] + 2)
            self._free.append(slot)
        else:
            self._lru[slot] = None

    def _unname(self, slot: int, *, announce: bool = True) -> None:
        key = self.key[slot]
        if key is not None:
            del self._by_key[key]
            self.key[slot] = None
            if announce:
                self.evicted.append(key)

    def _move(self, slot: int, event: str) -> None:
        before = self.state[slot]
        after = NEXT_STATE[(before, event)]
        self.state[slot] = after
        name = f"slot {before.value} -> {after.value}"
        self.transitions[name] = self.transitions.get(name, 0) + 1

    def _set_generation(self, slot: int, generation: int) -> None:
        self.generation[slot] = generation
        self.fences.append((slot, generation))
