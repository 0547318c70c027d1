"""A tenant that floods leaves room at the decodes, in the conductor's plans too: others are placed beside it."""

from dataclasses import replace

from conductor_harness import COSTS, Cluster

from mooncake_zmq.core.messages import Placed, Rejected, RejectReason

CAPACITY = 80_000


def busy(**settings):
    """A cluster of one prefill and one decode, which has KV for eight prompts of 10,000 tokens."""
    cluster = Cluster(1, ttft_slo_s=0, **settings)
    cluster.decode_load("d0", free=CAPACITY, capacity=CAPACITY)
    return cluster


def fill(cluster, tenant, tokens=9_500, **more):
    """Place requests until one is refused; return how many were placed, and the refusal."""
    placed = 0
    while not isinstance(answer := cluster.schedule(tokens=tokens, tenant=tenant, **more), Rejected):
        placed += 1
        assert placed < 1_000
    return placed, answer


def test_a_tenant_finds_room_beside_another_ones_queue_that_will_need_all_kv():
    cluster = busy()
    _, refused = fill(cluster, "alice")
    assert refused.reason is RejectReason.NO_ROOM
    assert isinstance(cluster.schedule(tokens=6_000, tenant="bob"), Placed)


def test_without_tenants_a_queue_that_will_need_all_kv_leaves_none():
    cluster = busy()
    fill(cluster, "")
    assert isinstance(cluster.schedule(tokens=6_000), Rejected)


def test_a_tenant_gets_no_more_of_a_decode_than_leaves_an_eighth_to_others():
    cluster, others = busy(), busy()
    cluster.prefill_load("p0")
    alices, _ = fill(cluster, "alice", tokens=900)
    all_of_it, _ = fill(others, "", tokens=900)
    assert alices <= all_of_it * 7 / 8 + 1
    bobs, _ = fill(cluster, "bob", tokens=900)
    assert bobs >= all_of_it // 16


def test_a_tenant_whose_requests_make_steps_slow_is_refused_before_one_that_has_none():
    quick = replace(COSTS, prefill_token_s=1e-9, prefill_square_s=0.0, load_bytes_per_s=1e15, transfer_bytes_per_s=1e15)
    cluster = busy(tbt_slo_s=2 * COSTS.decode_step_s, costs=quick)
    room = {"free": 1 << 30, "capacity": 1 << 30, "max_batch": 10_000}
    cluster.decode_load("d0", **room)
    running = 0
    while isinstance(answer := cluster.schedule(tokens=2_000, tenant="alice"), Placed):
        running += 1
        cluster.advance(0.01)
        cluster.decode_load("d0", running=running, context_tokens=2_000 * running, **room)
    assert answer.reason is RejectReason.TBT
    assert isinstance(cluster.schedule(tokens=2_000, tenant="bob"), Placed)
    assert fill(cluster, "bob", tokens=2_000)[1].reason is RejectReason.TBT


def test_a_tenants_placements_are_forgotten_with_their_requests():
    cluster = busy()
    placed = [cluster.schedule(tokens=900, tenant="alice") for _ in range(5)]
    for answer in placed:
        cluster.end(answer)
    assert not any(node.tenants for node in cluster.conductor._decodes.nodes)
