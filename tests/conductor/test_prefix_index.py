"""The index against a model so simple that it must be right."""

import pytest
from conductor_harness import keys
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.conductor.prefix_index import PrefixIndex

KEYS = keys("k", 24)
NODES = ("a", "b", "c", "d", "e")

some_keys = st.lists(st.sampled_from(KEYS), max_size=24)
operations = st.lists(st.tuples(st.sampled_from(("stored", "removed", "drop")), st.sampled_from(NODES), some_keys), max_size=40)


class NaiveIndex:
    """One set of keys per node."""

    def __init__(self, max_keys):
        self.max_keys = max_keys
        self.held = {}

    def known(self):
        return set().union(*self.held.values()) if self.held else set()

    def stored(self, node, block_keys):
        mine = self.held.setdefault(node, set())
        dropped = 0
        for one in block_keys:
            if one in self.known() or len(self.known()) < self.max_keys:
                mine.add(one)
            else:
                dropped += 1
        return dropped

    def removed(self, node, block_keys):
        self.held.get(node, set()).difference_update(block_keys)

    def drop(self, node):
        self.held.pop(node, None)

    def match(self, block_keys):
        runs = {}
        for node in sorted(self.held):
            run = 0
            while run < len(block_keys) and block_keys[run] in self.held[node]:
                run += 1
            if run:
                runs[node] = run
        return runs


@given(operations, st.lists(some_keys, min_size=1, max_size=6), st.sampled_from((1, 5, 12, 1000)))
@settings(max_examples=300, deadline=None)
def test_equals_a_naive_model(ops, queries, max_keys):
    index, naive = PrefixIndex(max_keys=max_keys), NaiveIndex(max_keys)
    for operation, node, block_keys in ops:
        if operation == "drop":
            index.drop(node)
            naive.drop(node)
        else:
            assert getattr(index, operation)(node, block_keys) == getattr(naive, operation)(node, block_keys)
        index.check()
        assert len(index) == len(naive.known())
        assert index.counts == {name: len(held) for name, held in naive.held.items()}
        for node in NODES:
            assert index.held_by(node) == len(naive.held.get(node, ()))
        for one in KEYS:
            assert index.copies(one) == sum(one in held for held in naive.held.values())
    for query in [*queries, list(KEYS)]:
        if query:
            assert index.holders(query) == sorted(node for node, held in naive.held.items() if held.issuperset(query))
        got = index.match(query)
        assert got == naive.match(query)
        assert list(got) == sorted(got)


def test_runs_end_where_each_node_misses():
    index = PrefixIndex(max_keys=100)
    index.stored("long", KEYS[:20])
    index.stored("short", KEYS[:3])
    index.stored("hole", (*KEYS[:5], *KEYS[6:20]))
    index.stored("late", KEYS[1:])
    assert index.match(KEYS) == {"hole": 5, "long": 20, "short": 3}
    assert index.match(()) == {}


def test_at_the_limit_new_keys_are_dropped_and_known_ones_still_gain_holders():
    index = PrefixIndex(max_keys=4)
    assert index.stored("a", KEYS[:6]) == 2
    assert index.stored("b", KEYS[:6]) == 2
    assert index.match(KEYS) == {"a": 4, "b": 4}
    index.removed("a", KEYS[:6])
    assert len(index) == 4
    index.drop("b")
    assert len(index) == 0
    assert index.stored("a", KEYS[2:6]) == 0


def test_a_dropped_nodes_place_is_reused_without_its_keys():
    index = PrefixIndex(max_keys=100)
    for node in NODES:
        index.stored(node, KEYS[:4])
    index.drop("b")
    index.stored("new", KEYS[:1])
    index.check()
    assert index.match(KEYS) == {"a": 4, "c": 4, "d": 4, "e": 4, "new": 1}


def test_more_nodes_than_a_machine_word_has_bits():
    index = PrefixIndex(max_keys=100)
    for i in range(100):
        index.stored(f"n{i:03}", KEYS[: 1 + i % 24])
    index.check()
    assert index.match(KEYS) == {f"n{i:03}": 1 + i % 24 for i in range(100)}


def test_check_sees_a_wrong_count():
    index = PrefixIndex(max_keys=100)
    index.stored("a", KEYS)
    index._counts["a"] -= 1
    with pytest.raises(AssertionError):
        index.check()
