"""The slots of one segment: which is written or evicted next, and which are pinned. PURE; used by the pool and by a prefill.

`slot_table` has the columns that hold what each slot holds; here are the order of eviction, the pins and the free slots.
"""

from array import array
from collections.abc import Sequence

from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.eviction import Lru
from mooncake_zmq.kv.key_table import EMPTY
from mooncake_zmq.kv.shares import NO_OWNER, Shares
from mooncake_zmq.kv.slot_table import COMMITTED, FREE, STATES, TRANSITIONS, WRITING, SlotEvent, SlotState, SlotTable


class Slots(SlotTable):
    """A table of slots that hands them out. `most`: what each owner may have, see `kv.shares`; with none, no slot has an
    owner."""

    def __init__(self, capacity: int, most: Sequence[int] = ()) -> None:
        super().__init__(capacity)
        self.pins = array("I", [0]) * capacity
        """Leases and copies that cover the slot: it is not evicted while above 0."""
        self._pinned = 0
        self._order = Lru(capacity)
        self.shares = Shares(self._order, capacity, most) if most else None
        self._evictable: Lru | Shares = self._order if self.shares is None else self.shares
        """Committed slots with a key and without a pin."""
        self._untouched = 0
        """Slots from here on have never been handed out in this incarnation: they are free, or restored."""
        self._free = array("i")
        """The free slots before that, the next to hand out last."""

    @property
    def available(self) -> int:
        """Slots that `reserve` can still hand out."""
        return self._counts[FREE] + len(self._evictable)

    @property
    def pinned(self) -> int:
        """Slots covered by at least one lease or copy."""
        return self._pinned

    def owner_of(self, slot: int) -> int:
        """The owner of a slot that is not free."""
        return self.shares.of[slot] if self.shares is not None else NO_OWNER

    def reserve(self, key: Key | None, owner: int = NO_OWNER) -> int | None:
        """A slot to write, evicting the coldest if none is free; None if all are pinned, written or retired, or
        other owners'."""
        assert key is None or not self.held(key), "a key is stored once"
        slots = self._take((owner,))
        if not slots:
            return None
        if key is not None:
            self._by_key.insert(key, slots[0])
        return slots[0]

    def reserve_missing(
        self, keys: Sequence[Key], most: int, owners: Sequence[int] = (), found: Sequence[int] | None = None
    ) -> tuple[dict[int, int], int]:
        """As `reserve` of those of `keys` that are not held, as far as there is room, of `most` at most: slots by index in
        `keys`. And how many are held: what this evicts for them was. `owners`: of each key; empty: no key has an owner.
        `found`: what `find_all` says of `keys`, if that is known."""
        missing: dict[Key, int] = {}
        for index, slot in enumerate(self._by_key.slots_of(keys) if found is None else found):
            if slot == EMPTY:
                missing.setdefault(keys[index], index)
        wanted = list(missing.items())[: max(0, most)]
        slots = self._take([owners[index] for _, index in wanted] if owners else [NO_OWNER] * len(wanted))
        granted: dict[int, int] = {}
        for (key, index), slot in zip(wanted, slots, strict=False):
            self._by_key.insert(key, slot)
            granted[index] = slot
        return granted, len(keys) - len(missing)

    def reserve_anonymous(self, count: int) -> list[int]:
        """As `reserve` of so many without a key; there is room for them."""
        slots = self._take([NO_OWNER] * count)
        assert len(slots) == count, "no room"
        return slots

    def restore(self, slot: int, key: Key, checksum: int, owner: int = NO_OWNER) -> None:
        """A copy that survived on its medium is readable again, the generation as it is. Call it for the coldest first: of what
        is more than its owner's share, the coldest go.

        Only for slots never handed out in this incarnation, so before the first `reserve`: what was handed out was overwritten.
        """
        assert slot >= self._untouched, "handed out before"
        assert not self.held(key), "a key is stored once"
        if self.shares is not None:
            if colder := self.shares.victims(owner, free=True):
                self._drop(colder.pop())
            self.shares.take(slot, owner)
        self._by_key.insert(key, slot)
        self._move(slot, SlotEvent.RESTORE)
        self.checksum[slot] = checksum
        self._evictable.insert((slot,))

    def commit(self, slot: int, checksum: int) -> None:
        """The bytes stand: readable from now on, never changed while the generation stands."""
        self.commit_all((slot,), (checksum,))

    def commit_all(self, slots: Sequence[int], checksums: Sequence[int]) -> None:
        """As `commit` of each, of one at least: the blocks of a put come together."""
        states, generations, pins, fences = self._state, self.generation, self.pins, self.fences
        unpinned: list[int] = []
        transitions = TRANSITIONS[SlotEvent.COMMIT]
        for slot, checksum in zip(slots, checksums, strict=True):
            states[slot] = transitions[states[slot]][0]
            generations[slot] += 1
            fences.append((slot, generations[slot]))
            self.checksum[slot] = checksum
            if not pins[slot]:
                unpinned.append(slot)
        self._count(WRITING, *transitions[WRITING], len(slots))
        self._release(unpinned)

    def name(self, slot: int, key: Key) -> bool:
        """Give an anonymous slot its key; False if another slot has it already."""
        if self.held(key):
            assert self.key_of(slot) is None
            return False
        self._by_key.insert(key, slot)
        return True

    def free(self, slot: int) -> None:
        """Give a reserved or quarantined slot back; whatever was written there was never visible."""
        assert self.pins[slot] == 0
        self._unname(slot, announce=False)
        self._disown(slot)
        self._move(slot, SlotEvent.FREE)
        self._set_generation(slot, self.generation[slot] + 1)
        self._put_back(slot)

    def quarantine(self, slot: int) -> None:
        """Keep a reserved slot away from everybody while its late writer may still write."""
        self._unname(slot, announce=False)
        self._move(slot, SlotEvent.QUARANTINE)

    def retire(self, slot: int) -> None:
        """A committed and unpinned slot whose medium failed is never handed out again in this incarnation."""
        assert self.pins[slot] == 0
        self._move(slot, SlotEvent.RETIRE)
        self._evictable.remove((slot,))
        self._unname(slot)
        self._disown(slot)
        self._set_generation(slot, self.generation[slot] + 2)

    def forget(self, slot: int) -> None:
        """Drop a committed copy that did not verify: no new reader finds it; the slot is reused once unpinned."""
        assert self._state[slot] == COMMITTED
        if self.key_of(slot) is None:
            return
        if self.pins[slot] == 0:
            self._evictable.remove((slot,))
        self._unname(slot)
        if self.pins[slot] == 0:
            self._release((slot,))

    def mark(self, slots: Sequence[int], *, spare: bool) -> None:
        """Note of slots that are pinned or being written whether their copies are spare, see `kv.eviction`."""
        self._order.mark(slots, spare=spare)

    def pin(self, slots: Sequence[int]) -> None:
        """Cover slots by a lease or copy, each as often as it is named."""
        pins, states = self.pins, self._state
        evictable: list[int] = []
        begun = 0
        for slot in slots:
            before = pins[slot]
            pins[slot] = before + 1
            if before == 0:
                begun += 1
                if states[slot] == COMMITTED:
                    evictable.append(slot)
                else:
                    assert states[slot] == WRITING
        self._pinned += begun
        self._evictable.remove(evictable)

    def unpin(self, slots: Sequence[int]) -> None:
        """End a cover. Given a chain's slots from the root on, the leaf becomes the next to evict, the root the last."""
        pins, states = self.pins, self._state
        over: list[int] = []
        for slot in reversed(slots):
            left = pins[slot] - 1
            assert left >= 0, "a pin ends once"
            pins[slot] = left
            if left == 0:
                self._pinned -= 1
                if states[slot] == COMMITTED:
                    over.append(slot)
        self._release(over)

    def touch(self, slots: Sequence[int]) -> None:
        """Mark a chain as used just now, root last, so that children are evicted before their parents."""
        states, pins = self._state, self.pins
        used = dict.fromkeys(slot for slot in slots if states[slot] == COMMITTED and not pins[slot])
        self._evictable.touch(list(used)[::-1])

    def coldest(self, limit: int) -> list[int]:
        """Up to `limit` slots in the order in which `reserve` would evict them if none had an owner; changes nothing."""
        return self._evictable.coldest(limit)

    def windows(self, share: float) -> list[int]:
        """How many evictable slots are the coldest `share` of the room, those that are free being as good: of each order, as
        there are several where owners have shares."""
        if self.shares is not None:
            return self.shares.windows(share)
        return [max(0, int(self.capacity * share) - self._counts[FREE])]

    def cold_ends(self, windows: Sequence[int]) -> list[int]:
        """So many of the coldest evictable slots of each order."""
        return self.shares.cold_ends(windows) if self.shares is not None else self._order.coldest(*windows)

    def room(self, owner: int) -> int:
        """Slots that an owner can count on."""
        return self.shares.room(owner) if self.shares is not None else self.capacity

    def demote(self, slot: int) -> None:
        """Make an unpinned committed slot the next victim."""
        self._evictable.demote(slot)

    def check(self) -> None:
        """Assert the invariants."""
        assert self._counts == [self._state.count(state) for state in range(len(STATES))]
        writable = (WRITING, STATES.index(SlotState.QUARANTINED))
        for slot, (state, pins, generation) in enumerate(zip(self._state, self.pins, self.generation, strict=True)):
            key = self._by_key.key_of(slot)
            evictable = slot in self._evictable
            assert (generation % 2 == 1) == (state in writable), "odd while it may be written"
            assert evictable == (state == COMMITTED and pins == 0)
            assert key is None or (self._by_key.get(key) == slot and state in (WRITING, COMMITTED))
            assert key is not None or not evictable, "no key finds it: it should be free"
            assert pins == 0 or state in (COMMITTED, WRITING)
        assert self._pinned == self.capacity - self.pins.count(0)
        assert len(self._evictable) == len(self._evictable.coldest(self.capacity))
        assert len(self._by_key) == sum(map(bool, self._by_key.named()))
        assert len(self._free) == len(set(self._free)) == self._state.count(FREE, 0, self._untouched)
        assert all(self._state[slot] == FREE for slot in self._free)
        if self.shares is not None:
            gone = (FREE, STATES.index(SlotState.RETIRED))
            self.shares.check([slot for slot in range(self.capacity) if self._state[slot] not in gone])

    def _take(self, owners: Sequence[int]) -> list[int]:
        """A slot to write, which holds nothing, for each of `owners`: those that are free, then the coldest, as far as
        there are any."""
        slots, free = self._take_any(len(owners)) if self.shares is None else self._take_shared(self.shares, owners)
        self.mark(slots, spare=False)
        states, generations, fences = self._state, self.generation, self.fences
        for slot in slots:
            states[slot] = WRITING
            generation = generations[slot] = generations[slot] + 1
            fences.append((slot, generation))
        transitions = TRANSITIONS[SlotEvent.RESERVE]
        self._count(FREE, *transitions[FREE], free)
        self._count(COMMITTED, *transitions[COMMITTED], len(slots) - free)
        return slots

    def _take_any(self, most: int) -> tuple[list[int], int]:
        """And how many were free."""
        free = min(most, self._counts[FREE])
        again = min(free, len(self._free))
        slots = self._free[len(self._free) - again :].tolist()[::-1]
        del self._free[len(self._free) - again :]
        slots += [self._take_free() for _ in range(free - again)]
        return slots + [self._evict(self._order) for _ in range(min(most - free, len(self._order)))], free

    def _take_shared(self, shares: Shares, owners: Sequence[int]) -> tuple[list[int], int]:
        """Likewise, as their shares allow; the first that gets none ends it."""
        slots: list[int] = []
        free = 0
        for owner in owners:
            victims = shares.victims(owner, free=self._counts[FREE] > free)
            if victims is None:
                slot = self._take_free()
                free += 1
            elif victims:
                slot = self._evict(victims)
                shares.give(slot)
            else:
                break
            shares.take(slot, owner)
            slots.append(slot)
        return slots, free

    def _evict(self, order: Lru) -> int:
        slot = order.pop()
        self.evicted.append(self._by_key.remove(slot))
        return slot

    def _take_free(self) -> int:
        """The slot freed last, which may still be in a cache; else the first that was never used."""
        if self._free:
            return self._free.pop()
        slot = self._state.find(FREE, self._untouched)
        self._untouched = slot + 1
        return slot

    def _release(self, slots: Sequence[int]) -> None:
        """Committed slots have no pin (any more): evictable, or free at once if they could not be found."""
        if self._by_key.all_named(slots):
            self._evictable.insert(slots)
            return
        lost = slots
        if self._by_key:  # else all are anonymous, as in the slab of a prefill
            named = self._by_key.is_named
            self._evictable.insert([slot for slot in slots if named(slot)])
            lost = [slot for slot in slots if not named(slot)]
        if self.shares is not None:
            for slot in lost:
                self.shares.give(slot)
        self._vacate(lost)

    def _vacate(self, slots: Sequence[int]) -> None:
        """Committed slots that could not be found are free."""
        states, generations, fences, untouched = self._state, self.generation, self.fences, self._untouched
        for slot in slots:
            states[slot] = FREE
            generation = generations[slot] = generations[slot] + 2
            fences.append((slot, generation))
            if slot < untouched:  # as `_put_back`
                self._free.append(slot)
        self._count(COMMITTED, *TRANSITIONS[SlotEvent.FREE][COMMITTED], len(slots))

    def _drop(self, slot: int) -> None:
        """A committed slot is not found any more, and none may read it: it is free."""
        self._unname(slot, announce=False)
        self._disown(slot)
        self._vacate((slot,))

    def _disown(self, slot: int) -> None:
        if self.shares is not None:
            self.shares.give(slot)

    def _put_back(self, slot: int) -> None:
        if slot < self._untouched:  # else it was restored, and its turn as one never handed out is still to come
            self._free.append(slot)
