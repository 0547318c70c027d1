"""The order of eviction against a naive model of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake_zmq.kv import eviction
from mooncake_zmq.kv.eviction import SPARE_AGES, Lru

CAPACITY = 6


class LruMachine(RuleBasedStateMachine):
    """The model is a list from the coldest use to the hottest, with the time of each use; a sibling has its own."""

    def __init__(self):
        super().__init__()
        self.orders = [Lru(CAPACITY)]
        self.orders.append(self.orders[0].sibling())
        self.models = [{}, {}]
        self.now = [0, 0]
        self.spare = set()

    def victims(self, which):
        """The model's slots in the order in which they go: by age; spare ones age faster."""
        model, now = self.models[which], self.now[which]
        early = {slot for slot, used in model.items() if slot in self.spare or not used}
        ages = {slot: (now - used) * (SPARE_AGES if slot in early else 1) for slot, used in model.items()}
        kept, spare = ([slot for slot in model if (slot in early) == which] for which in (False, True))
        order = []
        while kept or spare:
            first = spare if spare and (not kept or ages[spare[0]] >= ages[kept[0]]) else kept
            order.append(first.pop(0))
        return order

    def one(self, data):
        which = data.draw(st.integers(0, 1))
        return self.orders[which], self.models[which]

    def some(self, data, slots):
        return data.draw(st.lists(st.sampled_from(slots), unique=True)) if slots else []

    @rule(data=st.data())
    def insert(self, data):
        order, model = self.one(data)
        slots = self.some(data, [slot for slot in range(CAPACITY) if not any(slot in model for model in self.models)])
        order.insert(slots)
        self.use(order, model, slots)

    def use(self, order, model, slots):
        which = self.orders.index(order)
        self.now[which] += len(slots)
        model.update(dict.fromkeys(slots, self.now[which]))

    @rule(data=st.data(), spare=st.booleans())
    def mark(self, data, spare):
        slots = self.some(data, [slot for slot in range(CAPACITY) if not any(slot in model for model in self.models)])
        self.orders[0].mark(slots, spare=spare)
        self.spare = self.spare | set(slots) if spare else self.spare - set(slots)

    @rule(data=st.data(), again=st.booleans())
    def remove_or_touch(self, data, again):
        order, model = self.one(data)
        slots = self.some(data, list(model))
        (order.touch if again else order.remove)(slots)
        for slot in slots:
            del model[slot]
        if again:
            self.use(order, model, slots)

    @precondition(lambda self: self.models[0])
    @rule(data=st.data())
    def demote(self, data):
        slot = data.draw(st.sampled_from(list(self.models[0])))
        self.orders[0].demote(slot)
        del self.models[0][slot]
        self.models[0] = {slot: 0, **self.models[0]}
        assert self.orders[0].coldest(1) == [slot]

    @precondition(lambda self: self.models[0])
    @rule()
    def pop(self):
        first = self.victims(0)[0]
        assert self.orders[0].pop() == first
        del self.models[0][first]

    @invariant()
    def agrees(self):
        for which, order in enumerate(self.orders):
            victims = self.victims(which)
            assert len(order) == len(victims)
            assert [order.coldest(limit) for limit in (2, CAPACITY)] == [victims[:2], victims]
        assert [slot in self.orders[0] for slot in range(CAPACITY)] == [
            any(slot in model for model in self.models) for slot in range(CAPACITY)
        ]


TestLru = LruMachine.TestCase
TestLru.settings = settings(max_examples=150, stateful_step_count=40)


@given(data=st.data())
def test_children_go_before_parents(data):
    """However often each of several chains was used, and by lease or by touch, no block outlives its parent's eviction."""
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    chains, capacity = [], 0
    for length in lengths:
        chains.append(range(capacity, capacity + length))
        capacity += length
    order = Lru(capacity)
    for chain in chains:
        order.insert(chain[::-1])
    for index, lease in data.draw(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=8)):
        chain = chains[index % len(chains)]
        if lease:
            order.remove(chain)
            order.insert(chain[::-1])
        else:
            order.touch(chain[::-1])
    evicted = [order.pop() for _ in range(capacity)]
    for chain in chains:
        assert [slot for slot in evicted if slot in chain] == list(reversed(chain))


def test_a_spare_copy_goes_at_a_quarter_of_the_age_of_the_others():
    order, blocks = Lru(100), {}
    for block in range(1000):
        slot = order.pop() if len(blocks) == 100 else block
        blocks[slot] = block
        order.mark((slot,), spare=block % 2 == 1)
        order.insert((slot,))
    kept, spare = ([block for block in blocks.values() if block % 2 == odd] for odd in (0, 1))
    assert (1000 - min(kept)) / (1000 - min(spare)) == pytest.approx(SPARE_AGES, rel=0.1)


def test_a_slot_is_inserted_once_and_removed_once():
    order = Lru(2)
    order.insert((0,))
    with pytest.raises(AssertionError):
        order.insert((0,))
    with pytest.raises(AssertionError):
        order.mark((0,), spare=True)
    for breach in (lambda slot: order.remove((slot,)), lambda slot: order.touch((slot,)), order.demote):
        with pytest.raises(AssertionError):
            breach(1)
    order.pop()
    with pytest.raises(AssertionError):
        order.pop()


def test_the_order_has_no_object_per_slot():
    for column in vars(Lru(1000)).values():
        assert isinstance(column, int | eviction.array), type(column)
