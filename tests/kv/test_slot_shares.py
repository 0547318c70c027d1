"""Shares of a tier: limits for those who have them, and promises to them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.kv.shares import NO_OWNER
from mooncake_zmq.kv.slot_table import SlotState
from mooncake_zmq.kv.slots import Slots

CAPACITY = 8
RED, BLUE, GREEN = 1, 2, 3
MOST = (3, 2, 0)


def key(number):
    return number.to_bytes(16, "big")


class Tier:
    """Slots of three owners, of whom one has no share; `owners`: of every key ever stored."""

    def __init__(self, most=MOST):
        self.slots = Slots(CAPACITY, most)
        self.owners = {}

    def reserve(self, owner):
        number = key(len(self.owners))
        slot = self.slots.reserve(number, owner)
        if slot is not None:
            self.owners[number] = owner
        return slot

    def store(self, owner, count=1):
        slots = [self.reserve(owner) for _ in range(count)]
        for slot in slots:
            self.slots.commit(slot, 1)
        self.slots.check()
        return slots

    def gone(self):
        """Whose the evicted blocks were."""
        owners = [self.owners[each] for each in self.slots.evicted]
        self.slots.evicted.clear()
        return owners


def test_over_its_share_an_owners_own_blocks_make_room_though_slots_are_free():
    tier = Tier()
    tier.store(RED, 3)
    tier.store(RED, 2)
    assert tier.gone() == [RED, RED]
    assert tier.slots.count(SlotState.FREE) == CAPACITY - 3


def test_within_its_share_an_owner_loses_nothing_to_others():
    tier = Tier()
    tier.store(RED, 3)
    tier.store(BLUE, 2)
    tier.store(NO_OWNER, 3)
    for owner in (NO_OWNER, GREEN, NO_OWNER, GREEN, BLUE):
        tier.store(owner, 2)
    assert set(tier.gone()) == {NO_OWNER, GREEN, BLUE}
    assert tier.slots.shares.held[RED] == 3


def test_who_has_a_share_gets_it_from_those_who_have_none():
    tier = Tier()
    tier.store(NO_OWNER, 5)
    tier.store(GREEN, 3)
    tier.store(RED, 3)
    assert tier.gone() == [NO_OWNER] * 3, "used longest ago"
    assert tier.slots.shares.held == [2, 3, 0, 3]


def test_what_nobody_can_give_is_the_owners_own_or_nothing():
    tier = Tier()
    pinned = tier.store(NO_OWNER, 7)
    tier.slots.pin(pinned)
    tier.store(RED)
    tier.store(RED)
    assert tier.gone() == [RED], "below its share, but there is no other room"
    assert tier.reserve(BLUE) is None
    assert tier.reserve(NO_OWNER) is None
    tier.slots.unpin(pinned)
    tier.store(BLUE)


def test_what_is_written_or_in_quarantine_counts_too():
    tier = Tier()
    first, *_ = [tier.reserve(BLUE) for _ in range(2)]
    assert tier.reserve(BLUE) is None
    tier.slots.quarantine(first)
    assert tier.reserve(BLUE) is None
    tier.slots.free(first)
    assert tier.reserve(BLUE) is not None


def test_of_more_than_a_share_that_was_left_the_coldest_go():
    slots = Slots(CAPACITY, MOST)
    for number in range(5):
        slots.restore(number, key(number), 7, BLUE)
    assert slots.committed_keys() == [key(3), key(4)]
    assert not slots.evicted
    slots.check()


def test_the_cold_end_is_each_orders_own():
    tier = Tier()
    red = tier.store(RED, 3)
    assert tier.slots.windows(0.5) == [0, 1, 0], "at its share, though most of the pool is free"
    assert tier.slots.cold_ends([0, 1, 0]) == red[:1]
    nobodys = tier.store(NO_OWNER, 3)
    assert tier.slots.windows(1.0) == [3, 3, 0]
    assert set(tier.slots.cold_ends([2, 3, 0])) == {*red, *nobodys[:2]}


OPERATIONS = st.tuples(
    st.sampled_from(("reserve", "commit", "free", "pin", "unpin", "forget", "demote", "retire")),
    st.integers(NO_OWNER, GREEN),
    st.integers(0, CAPACITY - 1),
)


@settings(max_examples=200)
@given(st.lists(OPERATIONS, max_size=60))
def test_whatever_happens_shares_are_kept(operations):
    tier = Tier()
    slots = tier.slots
    for what, owner, slot in operations:
        state, pinned = slots.state_of(slot), slots.pins[slot] > 0
        match what:
            case "reserve":
                held = list(slots.shares.held)
                tier.reserve(owner)
                for other, (has, had) in enumerate(zip(slots.shares.held, held, strict=True)):
                    assert has >= had or other in (NO_OWNER, GREEN), "only who has no share gives to others"
            case "commit" if state is SlotState.WRITING:
                slots.commit(slot, 1)
            case "free" if state is SlotState.WRITING and not pinned:
                slots.free(slot)
            case "pin" if state is SlotState.COMMITTED:
                slots.pin([slot])
            case "unpin" if pinned:
                slots.unpin([slot])
            case "forget" if state is SlotState.COMMITTED:
                slots.forget(slot)
            case "demote" if state is SlotState.COMMITTED and not pinned:
                slots.demote(slot)
            case "retire" if state is SlotState.COMMITTED and not pinned:
                slots.retire(slot)
        slots.check()
