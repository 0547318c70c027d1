"""Algorithm 1, branch by branch."""

import math

import pytest
from conductor_harness import BASE, BLOCK
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.conductor.estimates import compute_s
from mooncake_zmq.conductor.routing import (
    DecodeOption,
    PrefillOption,
    balance_ratio,
    choose_decode,
    choose_prefill,
    choose_sources,
    plan_prefill,
    reusable_blocks,
)
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.costs import Costs

COSTS = Costs()


def option(name="p", *, host=None, queue_s=0.0, token_s=0.0, local=0, can_fetch=True, last=0):
    return PrefillOption(name, host or f"h-{name}", queue_s, token_s, local, can_fetch, last)


def choose(options, *, tokens=8 * BLOCK + 10, best=0, settings=BASE, costs=COSTS):
    return choose_prefill(options, settings=settings, costs=costs, tokens=tokens, best_blocks=best, block_tokens=BLOCK)


def plan(one, *, tokens=8 * BLOCK + 10, best=0, settings=BASE, costs=COSTS):
    return plan_prefill(one, settings=settings, costs=costs, tokens=tokens, best_blocks=best, block_tokens=BLOCK)


def test_at_least_one_token_is_left_to_compute():
    assert reusable_blocks(tokens=4 * BLOCK, keys=4, block_tokens=BLOCK) == 3
    assert reusable_blocks(tokens=4 * BLOCK + 1, keys=4, block_tokens=BLOCK) == 4
    assert reusable_blocks(tokens=4 * BLOCK + 1, keys=9, block_tokens=BLOCK) == 4
    assert reusable_blocks(tokens=1, keys=0, block_tokens=BLOCK) == 0
    assert reusable_blocks(tokens=0, keys=3, block_tokens=BLOCK) == 0


def test_the_ratio_where_the_paper_leaves_it_open():
    assert balance_ratio(0, 0) == 1
    assert balance_ratio(3, 0) == math.inf
    assert balance_ratio(6, 4) == 1.5


def test_cache_aware_branch_computes_what_the_host_lacks():
    settings = ConductorSettings(kvcache_balancing_threshold=1.5)
    made = plan(option(local=6), best=8, settings=settings)
    assert (made.reuse_blocks, made.fetch) == (6, False)
    tokens, prefix = 8 * BLOCK + 10, 6 * BLOCK
    expected = compute_s(COSTS, tokens=tokens, prefix=prefix, token_s=0) + COSTS.load_s(prefix)
    assert made.ttft_s == pytest.approx(expected)


def test_balancing_branch_fetches_the_best_match():
    settings = ConductorSettings(kvcache_balancing_threshold=1.5)
    made = plan(option(local=4), best=8, settings=settings)
    assert (made.reuse_blocks, made.fetch) == (8, True)
    tokens, prefix = 8 * BLOCK + 10, 8 * BLOCK
    expected = compute_s(COSTS, tokens=tokens, prefix=prefix, token_s=0) + COSTS.load_s(prefix)
    assert made.ttft_s == pytest.approx(expected + COSTS.transfer_s(4 * BLOCK))


@pytest.mark.parametrize(("local", "fetch"), [(5, True), (6, False), (0, True), (8, False)])
def test_the_threshold_parts_the_branches(local, fetch):
    settings = ConductorSettings(kvcache_balancing_threshold=8 / 5)
    assert plan(option(local=local), best=8, settings=settings).fetch is fetch


def test_an_infinite_threshold_fetches_only_onto_a_host_without_a_match():
    settings = ConductorSettings(kvcache_balancing_threshold=math.inf)
    assert not plan(option(local=1), best=8, settings=settings).fetch
    assert plan(option(local=0), best=8, settings=settings).fetch


def test_a_fetch_slower_than_computing_is_left_out():
    slow = Costs(transfer_bytes_per_s=1e6)
    made = plan(option(), best=8, costs=slow)
    assert (made.reuse_blocks, made.fetch) == (0, False)


def test_without_a_cache_node_on_its_host_a_prefill_computes_all():
    made = plan(option(can_fetch=False), best=8)
    assert (made.reuse_blocks, made.fetch) == (0, False)


def test_a_longer_match_wins_while_queues_are_equal():
    assert choose([option("a", local=2), option("b", local=8)], best=8).name == "b"


def test_a_long_queue_loses_to_an_idle_node():
    chosen = choose([option("a", local=8, queue_s=60), option("b")], best=8)
    assert chosen.name == "b"
    assert chosen.fetch


def test_a_short_queue_does_not():
    costs = Costs(transfer_bytes_per_s=1e8)
    assert choose([option("a", local=8, queue_s=0.1), option("b")], best=8, costs=costs).name == "a"


def test_a_slow_node_loses_to_a_fast_one():
    assert choose([option("a", token_s=0.02), option("b", token_s=0.001)]).name == "b"


def test_ties_go_to_the_one_chosen_longest_ago_then_by_name():
    assert choose([option("a", last=3), option("b", last=1), option("c", last=2)]).name == "b"
    assert choose([option("b"), option("a")]).name == "a"
    assert choose([option("a", last=3, token_s=0.00300), option("b", token_s=0.00305)]).name == "b"
    assert choose([]) is None


def decode_option(name="d", *, host="h", tbt_s=0.05, free=10_000, batch=1):
    return DecodeOption(name, host, tbt_s, free, batch)


def pick(options, *, host="h", need=100):
    return choose_decode(options, settings=BASE, host=host, need_tokens=need)


def test_decode_by_tbt_then_host_then_room_then_name():
    assert pick([decode_option("a", tbt_s=0.08), decode_option("b", host="far")]).name == "b"
    assert pick([decode_option("a", host="far", free=90_000), decode_option("b")]).name == "b"
    assert pick([decode_option("a"), decode_option("b", free=20_000)]).name == "b"
    assert pick([decode_option("b"), decode_option("a")]).name == "a"


def test_decode_without_room_is_excluded():
    assert pick([decode_option("a", tbt_s=0.01, free=99), decode_option("b", free=100)]).name == "b"
    assert pick([decode_option("a", free=99)]) is None


def test_sources_best_first_never_the_own_host_and_equals_rotate():
    hosts = {"c0": "h0", "c1": "h1", "c2": "h2", "c3": "h3"}
    matches = {"c0": 9, "c1": 4, "c2": 8, "c3": 8}
    last = {"c2": 5, "c3": 4}
    assert choose_sources(matches, hosts=hosts, host="h0", local_blocks=4, last_fetched=last) == ("c3", "c2")
    assert choose_sources(matches, hosts=hosts, host="h1", local_blocks=4, last_fetched={}) == ("c0", "c2", "c3")
    assert choose_sources({}, hosts=hosts, host="h1", local_blocks=0, last_fetched={}) == ()


prefill_options = st.lists(
    st.builds(
        PrefillOption,
        name=st.text("abc", min_size=1, max_size=3),
        host=st.sampled_from(("h0", "h1")),
        queue_s=st.floats(0, 100),
        token_s=st.sampled_from((0.0, 1e-4, 3e-3)),
        local_blocks=st.integers(0, 8),
        can_fetch=st.booleans(),
        last_chosen=st.integers(0, 9),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda one: one.name,
)


@given(prefill_options, st.integers(0, 8), st.floats(1, 4))
def test_the_choice_is_near_the_best_and_ignores_the_order(options, extra, threshold):
    settings = ConductorSettings(kvcache_balancing_threshold=threshold)
    best = max(extra, *(one.local_blocks for one in options), 0)
    chosen = choose(options, best=best, settings=settings)
    plans = [plan(one, best=best, settings=settings) for one in options]
    assert chosen in plans
    assert chosen.ttft_s <= min(one.ttft_s for one in plans) * (1 + settings.tie_ratio)
    assert 0 <= chosen.reuse_blocks <= best
    assert choose(options[::-1], best=best, settings=settings) == chosen
