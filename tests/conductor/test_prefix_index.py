"""The index against a model so simple that it must be right."""

import pytest
from conductor_harness import keys
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.conductor.prefix_index import PrefixIndex

KEYS = keys("k", 24)
NODES = ("a", "b", "c", "d", "e")

some_keys = st.lists(st.sampled_from(KEYS), max_size=24)
operations = st.lists(
    st.tuples(st.sampled_from(("stored", "on_disk", "removed", "drop", "sweep")), st.sampled_from(NODES), some_keys),
    max_size=40,
)


class NaiveIndex:
    """One set of keys per node and tier."""

    def __init__(self):
        self.held = {}
        self.disk = {}

    def known(self):
        return set().union(*self.held.values()) if self.held else set()

    def stored(self, node, block_keys):
        self.held.setdefault(node, set()).update(block_keys)
        self.disk.setdefault(node, set()).difference_update(block_keys)

    def on_disk(self, node, block_keys):
        self.held.setdefault(node, set()).update(block_keys)
        self.disk.setdefault(node, set()).update(block_keys)

    def removed(self, node, block_keys):
        self.held.get(node, set()).difference_update(block_keys)
        self.disk.get(node, set()).difference_update(block_keys)

    def drop(self, node):
        self.held.pop(node, None)
        self.disk.pop(node, None)

    def match(self, block_keys):
        runs = {}
        for node in sorted(self.held):
            run = 0
            while run < len(block_keys) and block_keys[run] in self.held[node]:
                run += 1
            if run:
                runs[node] = run
        return runs


def apply(index, naive, operation, node, block_keys):
    if operation == "drop":
        index.drop(node)
        naive.drop(node)
    elif operation == "sweep":
        index.sweep(len(block_keys))
    else:
        getattr(index, operation)(node, block_keys)
        getattr(naive, operation)(node, block_keys)


@given(operations, st.lists(some_keys, min_size=1, max_size=6))
@settings(max_examples=300)
def test_equals_a_naive_model(ops, queries):
    index, naive = PrefixIndex(max_keys=1000), NaiveIndex()
    for operation, node, block_keys in ops:
        apply(index, naive, operation, node, block_keys)
        index.check()
        assert index.counts == {name: len(held) for name, held in naive.held.items()}
        for node in NODES:
            assert index.held_by(node) == len(naive.held.get(node, ()))
        for one in KEYS:
            assert index.copies(one) == sum(one in held for held in naive.held.values())
    index.sweep(10_000)
    index.sweep(10_000)
    assert not index.is_sweeping
    assert len(index) == len(naive.known())
    for query in [*queries, list(KEYS)]:
        if query:
            assert index.holders(query) == sorted(node for node, held in naive.held.items() if held.issuperset(query))
        got = index.match(query)
        assert got == naive.match(query)
        assert list(got) == sorted(got)
        on_disk = index.on_disk_alone(query) or [0] * len(query)
        for node in naive.held:
            bit = index.join(node)
            assert [mask >> bit & 1 for mask in on_disk] == [one in naive.disk[node] for one in query]


@given(operations, st.sampled_from((1, 5, 12)))
@settings(max_examples=200)
def test_at_the_limit_it_says_nothing_that_is_untrue(ops, max_keys):
    index, naive = PrefixIndex(max_keys=max_keys), NaiveIndex()
    for operation, node, block_keys in ops:
        apply(index, naive, operation, node, block_keys)
        index.touch(block_keys[:3])
        index.check()
        assert len(index) <= max_keys
        for one in KEYS:
            assert index.copies(one) <= sum(one in held for held in naive.held.values())


def test_runs_end_where_each_node_misses():
    index = PrefixIndex(max_keys=100)
    index.stored("long", KEYS[:20])
    index.stored("short", KEYS[:3])
    index.stored("hole", (*KEYS[:5], *KEYS[6:20]))
    index.stored("late", KEYS[1:])
    assert index.match(KEYS) == {"hole": 5, "long": 20, "short": 3}
    assert index.match(()) == {}


def test_a_full_index_takes_new_keys_and_forgets_those_not_asked_for_longest():
    many = keys("many", 5000)
    index = PrefixIndex(max_keys=1000)
    index.stored("a", KEYS)
    for start in range(0, 5000, 50):
        index.touch(KEYS)
        index.stored("a", many[start : start + 50])
        assert index.match(many[start : start + 50]) == {"a": 50}, "the newest is known"
    assert index.match(KEYS) == {"a": len(KEYS)}, "what is asked for all the time stays"
    assert index.copies(many[0]) == 0
    assert len(index) == 1000
    assert index.evicted == 5000 + len(KEYS) - 1000


def test_keys_that_come_back_are_no_reason_to_pass_the_limit():
    """The log has them still, so that they are not new to it."""
    index = PrefixIndex(max_keys=4)
    index.stored("a", KEYS[:2])
    index.removed("a", KEYS[:1])
    index.stored("a", KEYS[2:5])
    index.stored("a", KEYS[:1])
    index.check()
    assert len(index) == 4


def test_churn_leaves_no_ghosts_behind():
    index = PrefixIndex(max_keys=1000)
    for number in range(200):
        some = keys("churn", 40, start=40 * number)
        index.stored("a", some)
        index.removed("a", some[2:])
        index.stored("a", some[:20])
        index.removed("a", some)
        index.check()
    assert len(index) == 0


def test_a_node_that_leaves_is_gone_at_once_and_swept_out_in_bounded_pieces():
    many = keys("many", 6000)
    index = PrefixIndex(max_keys=100_000)
    index.stored("a", many)
    index.stored("b", many[:10])
    index.drop("a")
    assert index.match(many) == {"b": 10}
    assert index.is_sweeping
    index.check()
    index.stored("a", many[:1])
    assert index.match(many) == {"a": 1, "b": 10}, "back with another bit"
    pieces = 0
    while index.is_sweeping:
        index.sweep(500)
        index.check()
        pieces += 1
    assert 5 < pieces < 20
    assert len(index) == 10


def test_a_dropped_nodes_place_is_reused_without_its_keys():
    index = PrefixIndex(max_keys=100)
    for node in NODES:
        index.stored(node, KEYS[:4])
    index.drop("b")
    index.stored("new", KEYS[:1])
    index.check()
    assert index.match(KEYS) == {"a": 4, "c": 4, "d": 4, "e": 4, "new": 1}
    assert index.join("new") < len(NODES)


def test_more_nodes_than_a_machine_word_has_bits():
    index = PrefixIndex(max_keys=100)
    for i in range(100):
        index.stored(f"n{i:03}", KEYS[: 1 + i % 24])
    index.check()
    assert index.match(KEYS) == {f"n{i:03}": 1 + i % 24 for i in range(100)}
    runs = index.runs(KEYS)
    assert [blocks for blocks, _ in runs] == list(range(1, 25))
    for blocks, mask in runs:
        assert [bit for bit in range(100) if mask >> bit & 1] == [bit for bit in range(100) if 1 + bit % 24 == blocks]


def test_check_sees_a_wrong_count():
    index = PrefixIndex(max_keys=100)
    index.stored("a", KEYS)
    index._held[0] -= 1
    with pytest.raises(AssertionError):
        index.check()


def test_no_dict_grows_large_so_that_none_takes_long_to_grow():
    index = PrefixIndex(max_keys=100_000)
    for number in range(100):
        index.stored("a", keys(str(number), 200))
    assert len(index) == 20_000
    assert max(map(len, index._holders)) < 200
