"""KV and places of a decode: one tenant that takes all it can get leaves room for another one."""

import pytest
from test_decode import B, Node

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import AttemptFailed, DecodeDenied
from mooncake_zmq.core.tenant_room import GROWN_OF_FREE, NEW_OF_FREE, leaves_room

WHOLE = 1000


def filled(tenants, part, multiple=NEW_OF_FREE):
    """What each tenant holds after all took parts by turns until none got more."""
    held, free = dict.fromkeys(tenants, 0), WHOLE

    def may(tenant):
        return part <= free and leaves_room(held[tenant], part, free=free, whole=WHOLE, multiple=multiple)

    while takers := [tenant for tenant in tenants if may(tenant)]:
        held[min(takers, key=held.__getitem__)] += part
        free -= part
    return held, free


@pytest.mark.parametrize(("tenants", "left"), [("a", 1 / 8), ("ab", 1 / 15), ("abc", 1 / 22)])
def test_tenants_that_want_all_get_equal_parts_and_leave_room(tenants, left):
    held, free = filled(tenants, 1)
    assert max(held.values()) - min(held.values()) <= 1
    assert free == pytest.approx(WHOLE * left, abs=len(tenants) + 1)
    assert leaves_room(0, free // 2, free=free, whole=WHOLE), "a tenant that comes gets of what is left"


def test_what_grows_leaves_less_room_than_what_comes():
    assert filled("a", 1, GROWN_OF_FREE)[1] < filled("a", 1, NEW_OF_FREE)[1]


@pytest.mark.parametrize(("tenant", "count"), [("alice", 28), ("", 32)])
def test_a_tenant_without_others_gets_seven_eighths_of_the_places(tenant, count):
    node = Node(max_requests=32, capacity_tokens=1000 * B)
    for number in range(40):
        node.reserve(f"r{number}", tenant=tenant)
    assert len(node.actor.requests) == count
    denied = node.take(DecodeDenied)
    assert len(denied) == 40 - count
    assert all(each.full for each in denied)
    assert denied[0].reason == ("alice has 28 requests in the decode" if tenant else "too many requests")


def test_beside_a_tenant_that_holds_all_it_may_another_one_is_admitted():
    node = Node(max_requests=100, capacity_tokens=64 * B)
    for number in range(64):
        node.reserve(f"alice-{number}", length=B - 1, tenant="alice")
    assert len(node.actor.requests) == 56
    node.take(DecodeDenied)
    for number in range(4):
        node.reserve(f"bob-{number}", length=B - 1, tenant="bob")
    assert node.take(DecodeDenied) == []


def test_a_tenants_answers_that_grow_leave_room_for_another_ones_request():
    node = Node(max_batch=16, max_requests=100, capacity_tokens=32 * B)
    for number in range(10):
        node.run(f"alice-{number}", length=B - 1, max_tokens=50, tenant="alice")
    while "preemptions" not in node.actor.counts:
        node.step()
        node.put_all()
    assert all(each.request_id.startswith("alice") for each in node.take(AttemptFailed))
    node.take(DecodeDenied)
    node.reserve("bob", length=B - 1, tenant="bob")
    assert node.take(DecodeDenied) == []


def test_a_tenant_is_preempted_for_its_own_growth_and_never_another_one():
    node = Node(max_batch=16, max_requests=100, capacity_tokens=32 * B)
    for number in range(8):
        node.run(f"bob-{number}", length=1, max_tokens=2 * B, tenant="bob")
    for number in range(3):
        node.run(f"alice-{number}", length=5 * B, max_tokens=200, tenant="alice")
    for _ in range(3 * B):
        node.step()
        node.put_all()
    failed = {each.request_id.partition("-")[0] for each in node.take(AttemptFailed)}
    assert failed <= {"alice"}


def test_the_only_request_of_a_tenant_may_have_all_the_kv():
    node = Node(capacity_tokens=8 * B)
    node.run("alice", length=2, max_tokens=8 * B - 3, tenant="alice")
    for _ in range(8 * B - 4):
        node.step()
        node.put_all()
    assert "preemptions" not in node.actor.counts


@pytest.mark.parametrize(("tenant", "refused"), [("alice", True), ("bob", False), ("", False)])
def test_a_tenant_that_makes_the_steps_long_is_refused_before_one_that_does_not(tenant, refused):
    """Steps of n requests take n * 10 ms, and five of them fit the SLO."""
    node = Node(costs=Costs(decode_step_s=1e-9, decode_request_s=0.01), max_batch=8, max_requests=12, capacity_tokens=200 * B)
    for number in range(4):
        node.run(f"r{number}", max_tokens=400, tenant="alice")
    node.reserve("r", length=10, tbt_slo_s=0.056, max_tokens=400, tenant=tenant)
    node.blocks("r", ready=False)
    assert bool(node.take(DecodeDenied)) is refused
