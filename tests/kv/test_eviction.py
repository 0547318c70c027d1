"""The order of eviction against a naive model of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake_zmq.kv import eviction
from mooncake_zmq.kv.eviction import Lru

CAPACITY = 6


class LruMachine(RuleBasedStateMachine):
    """The model is a list from the coldest use to the hottest; a sibling has its own."""

    def __init__(self):
        super().__init__()
        self.orders = [Lru(CAPACITY)]
        self.orders.append(self.orders[0].sibling())
        self.models = [[], []]

    def one(self, data):
        which = data.draw(st.integers(0, 1))
        return self.orders[which], self.models[which]

    def some(self, data, slots):
        return data.draw(st.lists(st.sampled_from(slots), unique=True)) if slots else []

    @rule(data=st.data())
    def insert(self, data):
        order, model = self.one(data)
        slots = self.some(data, [slot for slot in range(CAPACITY) if slot not in self.models[0] + self.models[1]])
        order.insert(slots)
        model.extend(slots)

    @rule(data=st.data(), again=st.booleans())
    def remove_or_touch(self, data, again):
        order, model = self.one(data)
        slots = self.some(data, model)
        (order.touch if again else order.remove)(slots)
        model[:] = [slot for slot in model if slot not in slots] + (slots if again else [])

    @precondition(lambda self: self.models[0])
    @rule(data=st.data())
    def demote(self, data):
        slot = data.draw(st.sampled_from(self.models[0]))
        self.orders[0].demote(slot)
        self.models[0].remove(slot)
        self.models[0].insert(0, slot)

    @precondition(lambda self: self.models[0])
    @rule()
    def pop(self):
        assert self.orders[0].pop() == self.models[0].pop(0)

    @invariant()
    def agrees(self):
        for order, model in zip(self.orders, self.models, strict=True):
            assert len(order) == len(model)
            assert [order.coldest(limit) for limit in (2, CAPACITY)] == [model[:2], model]
        assert [slot in self.orders[0] for slot in range(CAPACITY)] == [
            slot in sum(self.models, []) for slot in range(CAPACITY)
        ]


TestLru = LruMachine.TestCase
TestLru.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


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


def test_a_slot_is_inserted_once_and_removed_once():
    order = Lru(2)
    order.insert((0,))
    with pytest.raises(AssertionError):
        order.insert((0,))
    for breach in (lambda slot: order.remove((slot,)), lambda slot: order.touch((slot,)), order.demote):
        with pytest.raises(AssertionError):
            breach(1)
    order.pop()
    with pytest.raises(AssertionError):
        order.pop()


def test_the_order_has_no_object_per_slot():
    for column in vars(Lru(1000)).values():
        assert isinstance(column, int | eviction.array), type(column)
