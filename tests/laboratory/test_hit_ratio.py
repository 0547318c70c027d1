"""The hit ratio of a trace over the pool's slots, by hand."""

from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.laboratory.hit_ratio import hit_ratio, infinite_hit_ratio


def trace_of(*prompts):
    return [tuple(number.to_bytes(16, "little") for number in ids) for ids in prompts]


def test_a_hit_has_all_its_parents_there():
    trace = trace_of([1, 2, 3], [1, 2, 4], [9, 2, 3], [1, 2, 3])
    assert infinite_hit_ratio(trace) == (0 + 2 + 0 + 3) / 12
    assert hit_ratio(trace, Slots(100)) == infinite_hit_ratio(trace)


def test_the_root_is_kept_and_the_leaf_is_evicted():
    slots = Slots(3)
    assert hit_ratio(trace_of([1, 2, 3], [7], [1, 2, 3]), slots) == 2 / 7
    slots.check()


def test_a_prompt_longer_than_the_pool_fills_it_and_no_more():
    slots = Slots(3)
    assert hit_ratio(trace_of([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), slots) == 3 / 10
    assert slots.pinned == 0
    slots.check()


def test_a_block_twice_in_one_prompt_is_stored_once():
    slots = Slots(3)
    hit_ratio(trace_of([1, 1, 2], [1, 1, 2]), slots)
    assert len(slots.committed_keys()) == 2
    slots.check()
