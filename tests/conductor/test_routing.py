"""Who prefills: the choice against a literal Algorithm 1, branch by branch, and the policies that the paper compares it
with."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from conductor_harness import BLOCK, COSTS, Cluster, keys

from mooncake_zmq.conductor.plans import reusable_blocks
from mooncake_zmq.core.actor import Received
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import (
    BlocksAnnounced,
    CacheLoad,
    PrefillLoad,
    QueuedJob,
    RequestEnded,
    Schedule,
    SourceRate,
)

FAST_LINKS = Costs(transfer_bytes_per_s=1e12, load_bytes_per_s=1e12)
"""Fetching is always quicker than computing, as Algorithm 1 takes for granted."""
DOC = keys("doc", 20)
TOKENS = 20 * BLOCK + 10


def test_at_least_one_token_is_left_to_compute():
    assert reusable_blocks(tokens=4 * BLOCK, keys=4, block_tokens=BLOCK) == 3
    assert reusable_blocks(tokens=4 * BLOCK + 1, keys=4, block_tokens=BLOCK) == 4
    assert reusable_blocks(tokens=4 * BLOCK + 1, keys=9, block_tokens=BLOCK) == 4
    assert reusable_blocks(tokens=1, keys=0, block_tokens=BLOCK) == 0
    assert reusable_blocks(tokens=0, keys=3, block_tokens=BLOCK) == 0


def literal_algorithm_1(costs, tokens, queues, matches, threshold):
    """The paper's, line by line: (instance, blocks reused, whether they are fetched)."""
    best_prefix_len = max(matches.values())
    ttft, chosen = math.inf, None
    for instance, prefix_len in matches.items():
        t_queue = queues[instance]
        ratio = best_prefix_len / prefix_len if prefix_len else (math.inf if best_prefix_len else 1.0)
        if ratio < threshold or best_prefix_len == prefix_len:
            reused, fetched = prefix_len, False
            t_transfer = 0.0
        else:
            reused, fetched = best_prefix_len, True
            t_transfer = costs.transfer_s((best_prefix_len - prefix_len) * BLOCK)
        t_prefill = max(costs.compute_s(tokens, reused * BLOCK), costs.load_s(reused * BLOCK))
        if t_transfer + t_queue + t_prefill < ttft:
            ttft, chosen = t_transfer + t_queue + t_prefill, (instance, reused, fetched)
    return chosen, ttft


@pytest.mark.parametrize("threshold", [1.0, 1.5, 4.0, math.inf])
def test_the_choice_is_that_of_a_literal_algorithm_1(threshold):
    """A thousand random clusters each: queues, matches and prompts of all lengths."""
    chance = random.Random(5)
    hosts = 6
    cluster = Cluster(hosts, costs=FAST_LINKS, kvcache_balancing_threshold=threshold, tie_ratio=1e-12)

    def say(sender, message):
        return cluster.conductor.handle(cluster.now, Received(sender, message))

    for number in range(1000):
        held = {f"p{i}": chance.choice((0, 0, chance.randrange(21))) for i in range(hosts)}
        queues = {f"p{i}": chance.random() * chance.choice((1, 40)) for i in range(hosts)}
        for i in range(hosts):
            say(f"c{i}", BlocksAnnounced(removed=DOC, stored=DOC[: held[f"p{i}"]]))
            say(f"p{i}", PrefillLoad(jobs=(QueuedJob(booking=0, rank_s=0.0, left_s=queues[f"p{i}"]),)))
        ask = Schedule(request_id=f"r{number}", attempt=1, keys=DOC, tokens=TOKENS, max_tokens=5)
        placed = say("g", ask)[-1].message
        (instance, reused, fetched), ttft = literal_algorithm_1(FAST_LINKS, TOKENS, queues, held, threshold)
        assert (placed.prefill, placed.reuse_blocks, bool(placed.sources)) == (instance, reused, fetched)
        assert placed.ttft_s == pytest.approx(ttft, rel=1e-6, abs=1e-6)
        for source in placed.sources:
            assert held["p" + source[1:]] > held[placed.prefill]
        if fetched:
            assert held["p" + placed.sources[0][1:]] == max(held.values())
        say("g", RequestEnded(request_id=f"r{number}", attempt=1))
        cluster.now += 60.0  # links are free again


def one_by_one(queues=(0, 0, 0), held=(0, 0, 0), costs=COSTS, **settings):
    cluster = Cluster(len(queues), costs=costs, **settings)
    for i, (queued_s, blocks) in enumerate(zip(queues, held, strict=True)):
        cluster.prefill_load(f"p{i}", queued_s)
        cluster.announce(f"c{i}", DOC[:blocks])
    return cluster


@pytest.mark.parametrize(("local", "fetch"), [(5, True), (6, False), (0, True), (8, False)])
def test_the_threshold_parts_the_branches(local, fetch):
    cluster = one_by_one((60, 0), (8, local), kvcache_balancing_threshold=8 / 5)
    answer = cluster.schedule(DOC[:8])
    assert (answer.prefill, bool(answer.sources), answer.reuse_blocks) == ("p1", fetch, 8 if fetch else local)


def test_auto_fetches_wherever_that_is_predicted_to_be_quicker():
    assert one_by_one((60, 0), (20, 19)).schedule(DOC).sources == ("c0",)
    slow = Costs(transfer_bytes_per_s=1e6)
    assert one_by_one((60, 0), (20, 0), costs=slow).schedule(DOC).sources == ()


def test_loading_hides_behind_computing():
    hidden = one_by_one((0,), (20,), costs=Costs(load_bytes_per_s=1e12)).schedule(DOC).ttft_s
    assert one_by_one((0,), (20,), costs=Costs(load_bytes_per_s=1e10)).schedule(DOC).ttft_s == pytest.approx(hidden)
    slow = Costs(load_bytes_per_s=1e7)
    assert one_by_one((0,), (20,), costs=slow).schedule(DOC).ttft_s == pytest.approx(slow.load_s(20 * BLOCK))


EVEN = Costs(prefill_token_s=1e-3, prefill_square_s=1e-8, kv_bytes_per_token=1000, transfer_bytes_per_s=1e6)
"""A token is fetched about as quickly as it is computed."""


def meeting(queued_s=0.0, *, costs=EVEN, meets=True, blocks=20):
    """The answer where one host holds a document and the other, which is asked, nothing."""
    cluster = Cluster(2, costs=costs)
    cluster.announce("c0", DOC[:blocks])
    cluster.prefill_load("p0", 1e6)
    cluster.prefill_load("p1", queued_s, meets=meets)
    return cluster.schedule(DOC)


def best_meeting_s(costs):
    """The best by trial: the engine computes the first so many tokens, and the others are fetched meanwhile."""
    cached = 20 * BLOCK
    times = [max(costs.compute_s(head, 0), costs.transfer_s(cached - head)) for head in range(cached + 1)]
    return min(times) + costs.compute_s(TOKENS, cached)


@pytest.mark.parametrize("rate", [0.25, 1, 4, 1000])
def test_both_ends_of_a_prompt_meet_where_that_is_soonest(rate):
    costs = replace(EVEN, transfer_bytes_per_s=rate * 1e6)
    answer = meeting(costs=costs)
    assert answer.prefill == "p1"
    assert (answer.reuse_blocks, answer.sources) == (20, ("c0",))
    assert answer.ttft_s == pytest.approx(best_meeting_s(costs), rel=0.002)


@pytest.mark.parametrize("queued_s", [0.01, 8.0])
def test_a_prefill_with_a_queue_is_predicted_to_compute_nothing_that_it_fetches(queued_s):
    assert meeting(queued_s).ttft_s == pytest.approx(meeting(queued_s, meets=False).ttft_s)


def test_even_a_slow_source_is_fetched_from_where_both_ends_meet():
    slow = Costs(transfer_bytes_per_s=5e6)
    alone, met = (meeting(costs=slow, meets=meets) for meets in (False, True))
    assert (alone.sources, met.sources) == ((), ("c0",))
    assert met.ttft_s < 0.8 * alone.ttft_s


def test_both_ends_meet_of_blocks_on_the_own_ssd_too():
    def ttft_s(meets):
        cluster = Cluster(1, costs=replace(EVEN, disk_bytes_per_s=1e6))
        cluster.say("c0", BlocksAnnounced(stored=DOC[:4], on_disk=DOC[4:]))
        cluster.prefill_load("p0", meets=meets)
        return cluster.schedule(DOC).ttft_s

    assert ttft_s(meets=True) < 0.62 * ttft_s(meets=False)


def test_blocks_on_ssd_cost_their_promotion():
    cluster = Cluster(1)
    cluster.say("c0", BlocksAnnounced(on_disk=DOC))
    cold = cluster.schedule(DOC).ttft_s
    cluster.down("g")
    cluster.up("g", "gateway", "h0")
    cluster.announce("c0", DOC[:5])
    warmer = cluster.schedule(DOC).ttft_s
    assert cold - warmer == pytest.approx(COSTS.disk_s(5 * BLOCK))


def test_what_the_cache_nodes_measured_prices_a_fetch_and_fades():
    def fetched(cluster):
        answer = cluster.schedule(DOC)
        cluster.end(answer)
        cluster.advance(20)
        return answer.prefill, answer.ttft_s

    cluster = one_by_one((0, 0), (20, 0), kvcache_balancing_threshold=1)
    cluster.prefill_load("p0", queued_s=1e6)
    _, modelled = fetched(cluster)
    cluster.say("c1", CacheLoad(sources=(SourceRate(source="c0", block_s=0.1, pending_blocks=0),)))
    _, measured = fetched(cluster)
    assert measured == pytest.approx(modelled + 20 * (0.1 - COSTS.transfer_s(BLOCK)), rel=1e-3)
    cluster.advance(1000)
    _, later = fetched(cluster)
    assert later == pytest.approx(modelled, rel=1e-3)


def test_fetches_queue_behind_what_is_on_its_way():
    cluster = one_by_one((1e6, 0), (20, 0))
    first = cluster.schedule(DOC)
    cluster.say("c1", CacheLoad(sources=(SourceRate(source="c0", block_s=0.0, pending_blocks=100),)))
    second = cluster.schedule(DOC)
    grown = second.ttft_s - 2 * first.ttft_s
    assert first.sources == second.sources == ("c0",)
    assert grown == pytest.approx(COSTS.transfer_s(100 * BLOCK))


def test_a_slow_node_loses_to_a_fast_one():
    cluster = Cluster(2)
    for _ in range(20):
        cluster.prefill_load("p0", token_s=0.02 + cluster.now / 1e9)
        cluster.advance(0.25)
    assert cluster.schedule(tokens=1000).prefill == "p1"


def test_sources_best_first_never_the_own_host():
    cluster = one_by_one((0, 1e6, 1e6, 1e6), (4, 9, 8, 2))
    answer = cluster.schedule(DOC[:9])
    assert (answer.prefill, answer.sources) == ("p0", ("c1", "c2"))


def test_at_most_four_sources_are_named_however_many_hold_it():
    cluster = Cluster(40)
    for i in range(1, 40):
        cluster.announce(f"c{i}", DOC)
        cluster.prefill_load(f"p{i}", queued_s=1e6)
    answer = cluster.schedule(DOC)
    assert answer.sources == ("c1", "c10", "c11", "c12"), "of equals in name order"


# --- the other policies


def test_local_reuses_its_own_hosts_blocks_and_fetches_nothing():
    cluster = one_by_one((60, 0, 0), (20, 5, 0), policy="local")
    answer = cluster.schedule(DOC)
    assert (answer.prefill, answer.reuse_blocks, answer.sources) == ("p1", 5, ())


def test_match_goes_where_the_longest_prefix_is_whatever_the_queue():
    cluster = one_by_one((1e6, 0, 0), (20, 19, 0), policy="match")
    assert cluster.schedule(DOC).prefill == "p0"


def test_load_goes_where_the_queue_is_shortest_whatever_the_prefix():
    cluster = one_by_one((3, 2, 1), (20, 19, 0), policy="load")
    answer = cluster.schedule(DOC)
    assert (answer.prefill, answer.reuse_blocks) == ("p2", 0)


def test_round_robin_takes_turns():
    cluster = one_by_one((9, 0, 5), (20, 0, 0), policy="round-robin")
    assert [cluster.schedule(DOC).prefill for _ in range(5)] == ["p0", "p1", "p2", "p0", "p1"]


def test_random_is_a_function_of_the_request_and_spreads():
    one, other = (Cluster(4, policy="random") for _ in range(2))
    chosen = [one.schedule(tokens=10, request_id=f"x{i}").prefill for i in range(200)]
    assert chosen == [other.schedule(tokens=10, request_id=f"x{i}").prefill for i in range(200)]
    assert all(30 <= count <= 70 for count in Counter(chosen).values())
    one.prefill_load("p1", draining=True)
    assert "p1" not in {one.schedule(tokens=10, request_id=f"y{i}").prefill for i in range(50)}
