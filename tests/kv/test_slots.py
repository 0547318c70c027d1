"""Slots against a naive model: eviction order, pins, quarantine, anonymous, restored and retired slots, the seqlock."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake_zmq.kv.slot_table import NEXT_STATE, SlotEvent, SlotState
from mooncake_zmq.kv.slots import Slots

CAPACITY = 5
ALL_KEYS = [bytes([i]) * 16 for i in range(8)]
KEYS = st.sampled_from(ALL_KEYS)


class SlotsMachine(RuleBasedStateMachine):
    """The model: one dict per slot, and the list of evictable slots in order of last use."""

    def __init__(self):
        super().__init__()
        self.slots = Slots(CAPACITY)
        self.model = [{"state": "free", "key": None, "pins": 0} for _ in range(CAPACITY)]
        self.order = []
        self.leases = []
        self.generations = [0] * CAPACITY

    def pick(self, data, *states):
        choices = [i for i, slot in enumerate(self.model) if slot["state"] in states]
        return data.draw(st.sampled_from(choices)) if choices else None

    def named(self, key):
        return next((i for i, slot in enumerate(self.model) if slot["key"] == key and key is not None), None)

    def let_go(self, slot):
        if self.model[slot]["key"] is None:
            self.model[slot]["state"] = "free"
        else:
            self.order.append(slot)

    @initialize(survivors=st.dictionaries(st.integers(0, CAPACITY - 1), st.integers(0, 7), max_size=CAPACITY))
    def recover(self, survivors):
        for slot, i in survivors.items():
            key = ALL_KEYS[i]
            if self.named(key) is not None:
                with pytest.raises(AssertionError):
                    self.slots.restore(slot, key, i)
                continue
            self.slots.restore(slot, key, i)
            self.model[slot] = {"state": "committed", "key": key, "pins": 0}
            self.order.append(slot)
            assert self.slots.checksum[slot] == i
        assert self.slots.take_fences() == (), "the generation stands"

    @rule(key=KEYS | st.none())
    def reserve(self, key):
        if key is not None and self.named(key) is not None:
            with pytest.raises(AssertionError):
                self.slots.reserve(key)
            return
        free = [i for i, slot in enumerate(self.model) if slot["state"] == "free"]
        got = self.slots.reserve(key)
        if free:
            assert got in free
        elif self.order:
            assert got == self.order.pop(0), "the least recently used goes"
            assert self.slots.evicted[-1] == self.model[got]["key"]
        else:
            assert got is None
            return
        self.model[got] = {"state": "writing", "key": key, "pins": 0}

    @rule(data=st.data(), checksum=st.integers(0, 99))
    def commit(self, data, checksum):
        slot = self.pick(data, "writing")
        if slot is not None:
            self.slots.commit(slot, checksum)
            self.model[slot]["state"] = "committed"
            if not self.model[slot]["pins"]:
                self.let_go(slot)
            assert self.slots.checksum[slot] == checksum

    @rule(data=st.data(), key=KEYS)
    def name(self, data, key):
        slot = self.pick(data, "writing")
        if slot is not None and self.model[slot]["key"] is None:
            taken = self.named(key) is not None
            assert self.slots.name(slot, key) == (not taken)
            if not taken:
                self.model[slot]["key"] = key

    @rule(data=st.data())
    def free(self, data):
        slot = self.pick(data, "writing", "quarantined")
        if slot is not None and not self.model[slot]["pins"]:
            self.slots.free(slot)
            self.model[slot] = {"state": "free", "key": None, "pins": 0}

    @rule(data=st.data())
    def quarantine(self, data):
        slot = self.pick(data, "writing")
        if slot is not None and not self.model[slot]["pins"]:
            self.slots.quarantine(slot)
            self.model[slot] = {"state": "quarantined", "key": None, "pins": 0}

    @rule(data=st.data())
    def retire(self, data):
        slot = self.pick(data, "committed")
        if slot is not None and not self.model[slot]["pins"] and sum(s["state"] == "retired" for s in self.model) < 2:
            key = self.model[slot]["key"]
            self.slots.evicted.clear()
            self.slots.retire(slot)
            assert self.slots.evicted == [key]
            self.model[slot] = {"state": "retired", "key": None, "pins": 0}
            self.order.remove(slot)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def demote(self, data):
        slot = data.draw(st.sampled_from(self.order))
        self.slots.demote(slot)
        self.order.remove(slot)
        self.order.insert(0, slot)

    @rule(limit=st.integers(0, CAPACITY + 1))
    def coldest(self, limit):
        assert self.slots.coldest(limit) == self.order[:limit]

    @rule(data=st.data())
    def forget(self, data):
        slot = self.pick(data, "committed")
        if slot is not None:
            self.slots.forget(slot)
            self.model[slot]["key"] = None
            if slot in self.order:
                self.order.remove(slot)
                self.model[slot]["state"] = "free"

    @rule(data=st.data())
    def lease(self, data):
        usable = [i for i, slot in enumerate(self.model) if slot["state"] in ("committed", "writing")]
        if usable:
            # A key asked for twice is pinned twice.
            chain = data.draw(st.lists(st.sampled_from(usable), min_size=1, max_size=3))
            self.slots.pin(chain)
            for slot in chain:
                self.model[slot]["pins"] += 1
                if slot in self.order:
                    self.order.remove(slot)
            self.leases.append(chain)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        chain = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.slots.unpin(chain)
        for slot in reversed(chain):
            self.model[slot]["pins"] -= 1
            if not self.model[slot]["pins"] and self.model[slot]["state"] == "committed":
                self.let_go(slot)

    @rule(data=st.data())
    def touch(self, data):
        chain = data.draw(st.lists(st.integers(0, CAPACITY - 1), max_size=3, unique=True))
        self.slots.touch(chain)
        for slot in reversed(chain):
            if slot in self.order:
                self.order.remove(slot)
                self.order.append(slot)

    @invariant()
    def agrees(self):
        self.slots.check()
        free = sum(1 for slot in self.model if slot["state"] == "free")
        assert self.slots.available == free + len(self.order)
        for i, slot in enumerate(self.model):
            assert self.slots.state_of(i).value == slot["state"]
            assert self.slots.key_of(i) == slot["key"]
            assert self.slots.pins[i] == slot["pins"]
            assert self.slots.generation[i] % 2 == (slot["state"] in ("writing", "quarantined"))
            if slot["key"] is not None:
                assert self.slots.held(slot["key"])
                assert (self.slots.committed(slot["key"]) == i) == (slot["state"] == "committed")
        readable = {slot["key"]: i for i, slot in enumerate(self.model) if slot["state"] == "committed" and slot["key"]}
        assert sorted(self.slots.committed_keys()) == sorted(readable)
        assert self.slots.find(b"".join(ALL_KEYS)).tolist() == [readable.get(key, -1) for key in ALL_KEYS]
        assert self.slots.pinned == sum(1 for slot in self.model if slot["pins"])
        for state in SlotState:
            assert self.slots.count(state) == sum(slot["state"] == state.value for slot in self.model)
        for slot, generation in self.slots.take_fences():
            assert generation > self.generations[slot], "a generation never returns"
            self.generations[slot] = generation
        assert self.generations == list(self.slots.generation), "every change is fenced"


TestSlotsMachine = SlotsMachine.TestCase
TestSlotsMachine.settings = settings(max_examples=150, stateful_step_count=40)


def key(i):
    return bytes([i]) * 16


def filled(count):
    slots = Slots(count)
    chain = []
    for i in range(count):
        slot = slots.reserve(key(i))
        slots.pin((slot,))
        slots.commit(slot, i)
        chain.append(slot)
    slots.unpin(chain)
    return slots, chain


def test_of_several_keys_those_that_are_held_are_told_and_the_others_get_slots_as_far_as_there_is_room():
    slots = Slots(4)
    held = slots.reserve(key(0))
    assert slots.reserve_missing([key(0), key(1), key(1), key(2), key(3)], 2) == ({1: 1, 3: 2}, 1 + 1), "a key once"
    assert [slots.key_of(slot) for slot in (held, 1, 2)] == [key(0), key(1), key(2)]
    assert slots.reserve_missing([key(4), key(5)], 9) == ({0: 3}, 0)
    assert slots.reserve_missing([key(5)], -1) == ({}, 0)
    slots.check()


def test_room_for_several_is_made_by_evicting_the_coldest():
    slots, chain = filled(3)
    granted, held = slots.reserve_missing([key(0), key(7), key(8)], 3)
    assert (granted, held) == ({1: chain[2], 2: chain[1]}, 1)
    assert slots.evicted == [key(2), key(1)]
    slots.check()


def test_slots_taken_at_once_are_fenced_and_anonymous():
    slots = Slots(3)
    taken = slots.reserve_anonymous(2)
    assert slots.take_fences() == tuple((slot, 1) for slot in taken)
    assert slots.being_written([*taken, 2]) == taken
    assert [slots.key_of(slot) for slot in taken] == [None, None]
    slots.commit(taken[0], 9)
    slots.check()


def test_a_slot_that_a_chain_names_twice_is_touched_once():
    slots, chain = filled(3)
    slots.touch([chain[2], chain[1], chain[2]])
    assert slots.coldest(3) == [chain[0], chain[1], chain[2]]


def test_a_chain_is_evicted_from_its_leaf():
    slots, _ = filled(3)
    for _ in range(3):
        slots.reserve(None)
    assert slots.evicted == [key(2), key(1), key(0)]


def test_a_pinned_slot_is_never_evicted():
    slots, chain = filled(3)
    slots.pin(chain)
    assert slots.reserve(None) is None
    assert slots.evicted == []


def test_an_anonymous_slot_is_free_again_after_its_last_pin_and_its_readers_notice():
    slots = Slots(1)
    slot = slots.reserve(None)
    slots.pin((slot,))
    slots.pin((slot,))
    slots.commit(slot, 7)
    granted = slots.generation[slot]
    slots.unpin([slot])
    assert slots.state_of(slot) is SlotState.COMMITTED
    assert slots.generation[slot] == granted
    slots.unpin([slot])
    assert slots.state_of(slot) is SlotState.FREE
    assert slots.generation[slot] != granted


def test_a_forgotten_slot_stays_with_its_readers_but_nobody_finds_it_and_its_key_may_come_again():
    slots, chain = filled(2)
    slots.pin(chain[:1])
    slots.forget(chain[0])
    assert slots.committed(key(0)) is None
    assert slots.evicted == [key(0)]
    assert slots.leading_run([key(0), key(1)]) == []
    again = slots.reserve(key(0))
    assert again != chain[0]
    slots.unpin([chain[0]])
    assert slots.state_of(chain[0]) is SlotState.FREE
    slots.check()


def test_a_quarantined_slot_is_nobodys_and_its_key_may_be_written_elsewhere():
    slots = Slots(2)
    late = slots.reserve(key(1))
    slots.quarantine(late)
    assert slots.evicted == [], "it was never announced"
    assert not slots.held(key(1))
    other = slots.reserve(key(1))
    assert other != late
    assert slots.reserve(None) is None
    slots.free(late)
    assert slots.reserve(None) == late


def test_a_life_cycle_breach_raises():
    slots = Slots(1)
    with pytest.raises(KeyError):
        slots.commit(0, 1)
    slots.reserve(key(1))
    slots.commit(0, 1)
    with pytest.raises(KeyError):
        slots.commit(0, 1)
    with pytest.raises(AssertionError):
        slots.unpin([0])
    assert (SlotState.QUARANTINED, SlotEvent.COMMIT) not in NEXT_STATE, "a late writer never commits"


def test_a_retired_slot_is_never_handed_out_again_and_its_readers_notice():
    slots, (first, second) = filled(2)
    granted = slots.generation[first]
    slots.retire(first)
    assert slots.committed(key(0)) is None
    assert slots.evicted == [key(0)]
    assert slots.generation[first] > granted
    assert slots.reserve(key(7)) == second
    slots.commit(second, 1)
    slots.retire(second)
    assert slots.reserve(None) is None
    assert slots.count(SlotState.RETIRED) == 2


def test_slots_that_did_not_survive_are_handed_out_before_any_that_did():
    slots = Slots(4)
    slots.restore(1, key(1), 11)
    slots.restore(0, key(0), 10)
    assert {slots.reserve(None), slots.reserve(None)} == {2, 3}
    assert slots.evicted == []
    assert (slots.reserve(None), slots.reserve(None)) == (1, 0), "in the order in which they were restored"
    assert slots.evicted == [key(1), key(0)]


def test_a_slot_restored_and_forgotten_is_handed_out_once():
    slots = Slots(3)
    slots.restore(1, key(1), 1)
    slots.forget(1)
    assert sorted(slots.reserve(None) for _ in range(3)) == [0, 1, 2]
    assert slots.reserve(None) is None


def test_a_slot_handed_out_before_is_not_restored():
    slots = Slots(2)
    slots.free(slots.reserve(None))
    with pytest.raises(AssertionError):
        slots.restore(0, key(1), 1)


def test_a_demoted_slot_is_the_next_victim_and_a_pinned_one_cannot_be_demoted():
    slots, chain = filled(3)
    slots.demote(chain[0])
    assert slots.coldest(2) == [chain[0], chain[2]]
    slots.pin(chain[:1])
    with pytest.raises(AssertionError):
        slots.demote(chain[0])
    assert slots.reserve(None) == chain[2]
