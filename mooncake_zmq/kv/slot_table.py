"""The columns of a segment's slots: key, state, generation and checksum. PURE.

A slot's generation is odd while a process may write it and even otherwise (a seqlock): a reader that finds the
generation it was given, before and after its copy, has read what was granted. Every method that changes a generation
notes it in `fences`, which the actor hands to the runtime ahead of any message that reports the change.

Everything is a column indexed by slot, about 60 bytes for each with its key; no slot has an object of its own.
"""

from array import array
from collections.abc import Sequence
from enum import Enum, IntEnum

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.key_table import EMPTY, KeyTable


class SlotState(Enum):
    """The states of a slot."""

    FREE = "free"
    WRITING = "writing"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"
    """Its writer ran past its lease and may still write: it is kept until that writer answers or is known dead."""
    RETIRED = "retired"
    """Its medium failed: it is not handed out again in this incarnation."""


class SlotEvent(IntEnum):
    """The events that change the state of a slot."""

    RESERVE = 0
    RESTORE = 1
    COMMIT = 2
    FREE = 3
    QUARANTINE = 4
    RETIRE = 5


NEXT_STATE: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.RESERVE): SlotState.WRITING,
    (SlotState.COMMITTED, SlotEvent.RESERVE): SlotState.WRITING,
    (SlotState.FREE, SlotEvent.RESTORE): SlotState.COMMITTED,
    (SlotState.WRITING, SlotEvent.COMMIT): SlotState.COMMITTED,
    (SlotState.WRITING, SlotEvent.FREE): SlotState.FREE,
    (SlotState.WRITING, SlotEvent.QUARANTINE): SlotState.QUARANTINED,
    (SlotState.QUARANTINED, SlotEvent.FREE): SlotState.FREE,
    (SlotState.COMMITTED, SlotEvent.FREE): SlotState.FREE,
    (SlotState.COMMITTED, SlotEvent.RETIRE): SlotState.RETIRED,
}

STATES = tuple(SlotState)
"""A slot's state is its place in here, one byte in the state column."""
FREE, WRITING, COMMITTED = (STATES.index(state) for state in (SlotState.FREE, SlotState.WRITING, SlotState.COMMITTED))
TRANSITIONS: list[dict[int, tuple[int, str]]] = [{} for _ in SlotEvent]
"""`NEXT_STATE` by event and in bytes, each move with the name under which it is counted."""
for (_before, _event), _after in NEXT_STATE.items():
    TRANSITIONS[_event][STATES.index(_before)] = (STATES.index(_after), f"slot {_before.value} -> {_after.value}")


class SlotTable:
    """The columns of all slots, with every lookup in them. A key names at most one slot; a slot may be anonymous (no key)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.generation = array("Q", [0]) * capacity
        self.checksum = array("Q", [0]) * capacity
        self.fences: list[tuple[int, int]] = []
        self.evicted: list[Key] = []
        """Keys whose last copy here went; the owner announces them and clears the list."""
        self.transitions: dict[str, int] = {}
        self._state = bytearray(capacity)
        self._counts = [capacity] + [0] * (len(STATES) - 1)
        self._by_key = KeyTable(capacity)

    def state_of(self, slot: int) -> SlotState:
        """Return the state of `slot`."""
        return STATES[self._state[slot]]

    def key_of(self, slot: int) -> Key | None:
        """Return the key that `slot` holds or will hold; None: nothing, or an anonymous block."""
        return self._by_key.key_of(slot)

    def committed(self, key: Key) -> int | None:
        """The slot that holds `key`, readable now."""
        slot = self._by_key.get(key)
        return slot if slot is not None and self._state[slot] == COMMITTED else None

    def is_readable(self, slot: int, generation: int) -> bool:
        """Return whether what was read under this generation can still be found there."""
        stands = slot < self.capacity and self.generation[slot] == generation and self._state[slot] == COMMITTED
        return stands and self._by_key.is_named(slot)

    def present(self, keys: Sequence[Key]) -> list[int | None]:
        """As `committed`, of each of `keys`."""
        if not self._by_key:  # a pool without an SSD asks that tier as well
            return [None] * len(keys)
        states = self._state
        return [slot if slot != EMPTY and states[slot] == COMMITTED else None for slot in self._by_key.slots_of(keys)]

    def held(self, key: Key) -> bool:
        """Is `key` here or being written?"""
        return self._by_key.get(key) is not None

    def find(self, keys: bytes) -> NDArray[np.int32]:
        """Slots [n] of n keys that lie one after the other in `keys`; -1 for a key that is not readable now."""
        slots = self._by_key.find_many(keys)
        here = np.flatnonzero(slots >= 0)
        slots[here[self._states()[slots[here]] != COMMITTED]] = -1
        return slots

    def find_all(self, keys: Sequence[Key]) -> list[int]:
        """The slot that holds each of `keys` or is to hold it; `EMPTY` if there is none."""
        return self._by_key.slots_of(keys)

    def committed_keys(self) -> list[Key]:
        """Every readable key."""
        readable = np.flatnonzero((self._states() == COMMITTED) & self._by_key.named())
        return [key for slot in readable.tolist() if (key := self._by_key.key_of(slot)) is not None]

    def count(self, state: SlotState) -> int:
        """Slots in `state`."""
        return self._counts[STATES.index(state)]

    def leading_run(self, keys: Sequence[Key]) -> list[int]:
        """Slots of the longest leading run of `keys` that is readable."""
        states = self._state
        run: list[int] = []
        for slot in self._by_key.slots_of(keys):
            if slot == EMPTY or states[slot] != COMMITTED:
                break
            run.append(slot)
        return run

    def committed_of(self, slots: Sequence[int]) -> list[int]:
        """Those of `slots` that are readable; `EMPTY` is none."""
        states = self._state
        return [slot for slot in slots if slot != EMPTY and states[slot] == COMMITTED]

    def being_written(self, slots: Sequence[int]) -> list[int]:
        """Those of `slots` that somebody may write."""
        states = self._state
        return [slot for slot in slots if states[slot] == WRITING]

    def take_fences(self) -> tuple[tuple[int, int], ...]:
        """The generations changed since the last call."""
        fences = tuple(self.fences)
        self.fences.clear()
        return fences

    # --- changes, for the subclass

    def _unname(self, slot: int, *, announce: bool = True) -> None:
        if self._by_key.is_named(slot):
            key = self._by_key.remove(slot)
            if announce:
                self.evicted.append(key)

    def _move(self, slot: int, event: SlotEvent) -> None:
        before = self._state[slot]
        after, name = TRANSITIONS[event][before]
        self._state[slot] = after
        self._count(before, after, name, 1)

    def _count(self, before: int, after: int, name: str, moved: int) -> None:
        if moved:
            self._counts[before] -= moved
            self._counts[after] += moved
            self.transitions[name] = self.transitions.get(name, 0) + moved

    def _set_generation(self, slot: int, generation: int) -> None:
        self.generation[slot] = generation
        self.fences.append((slot, generation))

    def _states(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._state, dtype=np.uint8)
