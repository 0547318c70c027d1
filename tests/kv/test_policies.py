"""Each policy against a naive model of it, and what all promise."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from mooncake_zmq.kv import eviction
from mooncake_zmq.kv.eviction import MAX_DEPTH, MAX_USES, POLICIES, make_policy

CAPACITY = 6


class Model:
    """A list from the coldest use to the hottest, and facts of each block; `rank` says who goes first."""

    def __init__(self):
        self.order = []
        self.uses = [0] * CAPACITY
        self.depth = [0] * CAPACITY
        self.demoted = []

    def insert(self, slot, depth):
        self.uses[slot] += 1
        self.depth[slot] = max(self.depth[slot], depth)
        self.order.append(slot)

    def remove(self, slot):
        self.order.remove(slot)
        if slot in self.demoted:
            self.demoted.remove(slot)

    def forget(self, slot):
        self.uses[slot] = self.depth[slot] = 0

    def demote(self, slot):
        self.remove(slot)
        self.order.append(slot)
        self.demoted.insert(0, slot)

    def victims(self):
        return self.demoted + sorted((slot for slot in self.order if slot not in self.demoted), key=self.rank)

    def pop(self):
        slot = self.victims()[0]
        self.remove(slot)
        return slot


class LruModel(Model):
    def rank(self, slot):
        return 0


class LfuModel(Model):
    def rank(self, slot):
        return self.uses[slot]


class LengthAwareModel(Model):
    def rank(self, slot):
        return -self.depth[slot]


class SieveModel(Model):
    """A ring that those taken out for now stay in, marks for the blocks used again, and the slot at which the hand stands."""

    def __init__(self):
        super().__init__()
        self.ring = []
        self.marked = set()
        self.hand = None

    def insert(self, slot, depth):
        self.order.append(slot)
        if slot in self.ring:
            self.marked.add(slot)
        else:
            self.ring.append(slot)

    def leave(self, slot):
        if slot == self.hand:
            self.advance()
        self.ring.remove(slot)
        self.marked.discard(slot)

    def advance(self):
        self.hand = next(iter(self.ring[self.ring.index(self.hand) + 1 :]), None)

    def forget(self, slot):
        if slot in self.ring:
            self.leave(slot)

    def demote(self, slot):
        self.leave(slot)
        at = self.ring.index(self.hand) if self.hand is not None else 0
        self.ring.insert(at, slot)
        self.hand = slot

    def victims(self):
        at = self.ring.index(self.hand) if self.hand is not None else 0
        turn = [slot for slot in self.ring[at:] + self.ring[:at] if slot in self.order]
        return sorted(turn, key=lambda slot: slot in self.marked)

    def pop(self):
        while True:
            self.hand = self.ring[0] if self.hand is None else self.hand
            if self.hand in self.order and self.hand not in self.marked:
                self.order.remove(self.hand)
                return self.hand
            if self.hand in self.order:
                self.marked.remove(self.hand)
            self.advance()


MODELS = {"lru": LruModel, "lfu": LfuModel, "length_aware": LengthAwareModel, "sieve": SieveModel}


def machine_of(name):
    class PolicyMachine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.policy = make_policy(name, CAPACITY)
            self.model = MODELS[name]()

        def pick(self, data, *, inside):
            return data.draw(st.sampled_from([slot for slot in range(CAPACITY) if (slot in self.model.order) == inside]))

        @precondition(lambda self: len(self.model.order) < CAPACITY)
        @rule(data=st.data(), depth=st.integers(0, 3), new=st.booleans())
        def insert(self, data, depth, new):
            slot = self.pick(data, inside=False)
            if new:
                self.policy.forget(slot)
                self.model.forget(slot)
            self.policy.insert((slot,), (depth,))
            self.model.insert(slot, depth)

        @precondition(lambda self: self.model.order)
        @rule(data=st.data(), depth=st.integers(0, 3))
        def touch(self, data, depth):
            slot = self.pick(data, inside=True)
            self.policy.touch((slot,), (depth,))
            self.model.remove(slot)
            self.model.insert(slot, depth)

        @precondition(lambda self: self.model.order)
        @rule(data=st.data())
        def remove(self, data):
            slots = data.draw(st.lists(st.sampled_from(sorted(self.model.order)), min_size=1, unique=True))
            self.policy.remove(slots)
            for slot in slots:
                self.model.remove(slot)

        @precondition(lambda self: self.model.order)
        @rule(data=st.data())
        def demote(self, data):
            slot = self.pick(data, inside=True)
            self.policy.demote(slot)
            self.model.demote(slot)
            assert self.policy.coldest(1) == [slot]

        @precondition(lambda self: self.model.order)
        @rule()
        def pop(self):
            assert self.policy.pop() == self.model.pop()

        @invariant()
        def agrees(self):
            assert len(self.policy) == len(self.model.order)
            assert [slot in self.policy for slot in range(CAPACITY)] == [slot in self.model.order for slot in range(CAPACITY)]
            assert self.policy.coldest(CAPACITY) == self.model.victims()
            assert self.policy.coldest(2) == self.model.victims()[:2]

    return PolicyMachine


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_evicts_as_its_model_does(name):
    run_state_machine_as_test(machine_of(name), settings=settings(max_examples=120, stateful_step_count=40, deadline=None))


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
def test_children_go_before_parents(name, data):
    """However often each of several chains was used, and by lease or by touch, no block outlives its parent's eviction."""
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    chains, capacity = [], 0
    for length in lengths:
        chains.append(range(capacity, capacity + length))
        capacity += length
    policy = make_policy(name, capacity)

    def use(chain, how):
        if how == "lease":
            policy.remove(chain)
        for depth, slot in reversed(list(enumerate(chain))):
            if how == "touch":
                policy.touch((slot,), (depth,))
        if how != "touch":
            policy.insert(chain[::-1], range(len(chain))[::-1])

    for chain in chains:
        use(chain, "put")
    for index, how in data.draw(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(("lease", "touch"))), max_size=8)):
        use(chains[index % len(chains)], how)
    order = [policy.pop() for _ in range(capacity)]
    for chain in chains:
        assert [slot for slot in order if slot in chain] == list(reversed(chain))


@pytest.mark.parametrize("name", POLICIES)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_what_is_coldest_is_what_is_popped(name, uses):
    policy = make_policy(name, len(uses))
    for slot, count in enumerate(uses):
        policy.insert((slot,), (count,))
        for _ in range(count):
            policy.touch((slot,), (0,))
    coldest = policy.coldest(len(uses))
    assert [policy.pop() for _ in uses] == coldest
    with pytest.raises(AssertionError):
        policy.pop()


@pytest.mark.parametrize("name", POLICIES)
def test_a_slot_is_inserted_once_and_removed_once(name):
    policy = make_policy(name, 2)
    policy.insert((0,), (0,))
    with pytest.raises(AssertionError):
        policy.insert((0,), (0,))
    for breach in (lambda slot: policy.remove((slot,)), lambda slot: policy.touch((slot,), (0,)), policy.demote):
        with pytest.raises(AssertionError):
            breach(1)


def test_counts_and_depths_saturate():
    lfu = make_policy("lfu", 2)
    for slot in (0, 1):
        lfu.insert((slot,), (0,))
        for _ in range(MAX_USES + slot):
            lfu.touch((slot,), (0,))
    assert lfu.coldest(2) == [0, 1]
    length_aware = make_policy("length_aware", 2)
    length_aware.insert((0, 1), (MAX_DEPTH + 9, MAX_DEPTH))
    assert length_aware.coldest(2) == [0, 1], "equal from there on: the one used longer ago"


def test_a_policy_has_no_object_per_slot():
    for name in POLICIES:
        for column in vars(make_policy(name, 1000)).values():
            assert isinstance(column, int | bytearray | eviction.array), f"{name}: {type(column)}"


def test_an_unknown_policy_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'fifo': one of length_aware, lfu, lru, sieve"):
        make_policy("fifo", 1)
