"""Which slot holds a key, and which key a slot holds: a hash table in columns, 29 bytes a slot. PURE.

Linear probing over int32 slot numbers, at most half full; the keys stand in columns by slot. Deleting moves the rest of a
probe chain up, without tombstones, so that a table that was full for a year is as quick as a new one.
"""

from array import array
from collections.abc import Iterable, Sequence
from math import isqrt
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.kv.block_hash import KEY_BYTES, Key

EMPTY = -1
WORDS = Struct("<QQ")
"""A key is two words, low and high."""
FEW = 32
"""So many keys are found sooner one by one than all together."""


class KeyTable:
    """A one-to-one map between keys of 16 bytes and slots 0..capacity-1."""

    def __init__(self, capacity: int) -> None:
        assert 0 <= capacity < 1 << 30, "slots are int32, and homes are computed in 64 bits"
        self._size = _prime_from(2 * capacity + 1)
        self._by_low, self._by_high = int(self._size * 0.618), int(self._size * 0.414)
        """A key's home is `(low * by_low + high * by_high) % size`: digests need no more, and counters are spread as well,
        where homes side by side would grow into one long probe chain."""
        self._table = array("i", [EMPTY]) * self._size
        self._low = array("Q", [0]) * capacity
        self._high = array("Q", [0]) * capacity
        self._home = array("i", [0]) * capacity
        """Where the search for each slot's key begins: to compute that again takes longer than the rest of a deletion."""
        self._named = bytearray(capacity)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, key: Key) -> int | None:
        """The slot that holds `key`."""
        low, high = WORDS.unpack(key)
        at = (low * self._by_low + high * self._by_high) % self._size
        table, lows = self._table, self._low
        slot: int
        while (slot := table[at]) != EMPTY:
            if lows[slot] == low and self._high[slot] == high:
                return slot
            at += 1
            if at == self._size:
                at = 0
        return None

    def slots_of(self, keys: Iterable[Key]) -> list[int]:
        """The slot that holds each of `keys`, or `EMPTY`; as `get`, but one call for all keys of a lease or put."""
        size, by_low, by_high = self._size, self._by_low, self._by_high
        table, lows, highs = self._table, self._low, self._high
        slots: list[int] = []
        for low, high in WORDS.iter_unpack(b"".join(keys)):
            at = (low * by_low + high * by_high) % size
            while (slot := table[at]) != EMPTY and not (lows[slot] == low and highs[slot] == high):
                at += 1
                if at == size:
                    at = 0
            slots.append(slot)
        return slots

    def all_named(self, slots: Sequence[int]) -> bool:
        """Does each of `slots` hold a key?"""
        return all(map(self._named.__getitem__, slots))

    def is_named(self, slot: int) -> bool:
        """Does `slot` hold a key?"""
        return self._named[slot] != 0

    def key_of(self, slot: int) -> Key | None:
        """The key that `slot` holds."""
        return WORDS.pack(self._low[slot], self._high[slot]) if self._named[slot] else None

    def insert(self, key: Key, slot: int) -> None:
        """`slot` holds `key` from now on. The caller knows that no other slot does."""
        assert not self._named[slot], "a slot holds one key"
        low, high = WORDS.unpack(key)
        at = self._home[slot] = (low * self._by_low + high * self._by_high) % self._size
        table = self._table
        while table[at] != EMPTY:
            at += 1
            if at == self._size:
                at = 0
        table[at] = slot
        self._low[slot] = low
        self._high[slot] = high
        self._named[slot] = 1
        self._count += 1

    def remove(self, slot: int) -> Key:
        """`slot` holds nothing from now on; answers the key it held."""
        assert self._named[slot], "a slot without a key"
        table, size, homes = self._table, self._size, self._home
        hole = homes[slot]
        while table[hole] != slot:
            hole = (hole + 1) % size
        at = hole
        while (other := table[at := (at + 1) % size]) != EMPTY:
            # Whose home is not between the hole and its place would be cut off from it: it moves into the hole.
            if (at - homes[other]) % size >= (at - hole) % size:
                table[hole] = other
                hole = at
        table[hole] = EMPTY
        self._named[slot] = 0
        self._count -= 1
        return WORDS.pack(self._low[slot], self._high[slot])

    def find_many(self, keys: bytes) -> NDArray[np.int32]:
        """Slots [n] of n keys that lie one after the other in `keys`; -1 where a key is not in the table."""
        if len(keys) % KEY_BYTES:
            raise ValueError(f"{len(keys)} bytes are not a whole number of {KEY_BYTES}-byte keys")
        words = np.frombuffer(keys, dtype="<u8")
        low, high = words[0::2], words[1::2]
        at = self._homes(low, high)
        table, lows, highs = (np.frombuffer(column, dtype=column.typecode) for column in (self._table, self._low, self._high))
        found = np.full(len(low), EMPTY, dtype=np.int32)
        left = np.arange(len(low))
        while left.size > FEW:
            slots = table.take(at, mode="wrap")
            on = np.flatnonzero(slots != EMPTY)
            left, at, slots = left[on], at[on], slots[on]
            same = (lows[slots] == low[left]) & (highs[slots] == high[left])
            found[left[same]] = slots[same]
            on = np.flatnonzero(~same)
            left, at = left[on], at[on] + 1
        found[left] = self.slots_of([keys[index * KEY_BYTES : (index + 1) * KEY_BYTES] for index in left.tolist()])
        return found

    def named(self) -> NDArray[np.bool_]:
        """Which slots hold a key [capacity]; a view of the column, only to be read."""
        return np.frombuffer(self._named, dtype=np.bool_)

    def _homes(self, low: NDArray[np.uint64], high: NDArray[np.uint64]) -> NDArray[np.int64]:
        """As in `get`, but in words: nothing overflows, as the size is below 2**31."""
        size, by_low, by_high = np.uint64(self._size), np.uint64(self._by_low), np.uint64(self._by_high)
        return ((low % size * by_low + high % size * by_high) % size).astype(np.int64)


def _prime_from(least: int) -> int:
    """The first prime at or after `least`."""
    while any(least % divisor == 0 for divisor in range(2, isqrt(least) + 1)):
        least += 1
    return least
