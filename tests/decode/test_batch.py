"""Who is in a step and who gives way, where one tenant asks for more than there is."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.decode.batch import step_members, victim


@dataclass(frozen=True)
class Asked:
    order: int
    tenant: str = ""


BATCHES = st.lists(st.sampled_from(["", "alice", "bob", "carol"]), max_size=40).map(
    lambda tenants: [Asked(order, tenant) for order, tenant in enumerate(tenants)]
)


def test_a_tenant_that_fills_the_batch_makes_room_for_another_ones_request():
    alices = [Asked(order, "alice") for order in range(8)]
    bobs = [Asked(8, "bob"), Asked(9, "bob")]
    assert step_members([*alices, *bobs], 4) == [*alices[:2], *bobs]
    assert step_members([*alices, *bobs[:1]], 4) == [*alices[:3], *bobs[:1]]


@given(BATCHES, st.integers(1, 12))
def test_a_step_is_as_full_as_it_can_be_and_no_tenant_has_two_more_than_one_that_waits(asked, max_batch):
    members = step_members(asked, max_batch)
    assert len(members) == min(len(asked), max_batch)
    assert members == sorted(members, key=lambda each: each.order)
    waiting = [each for each in asked if each not in members]
    for each in waiting:
        own = sum(member.tenant == each.tenant for member in members)
        assert all(member.order < each.order for member in members if member.tenant == each.tenant)
        assert all(sum(member.tenant == other.tenant for member in members) <= own + 1 for other in members)


@given(st.integers(0, 40), st.integers(1, 12))
def test_of_one_tenant_the_oldest_stay(count, max_batch):
    assert step_members([Asked(order) for order in reversed(range(count))], max_batch) == [
        Asked(order) for order in range(min(count, max_batch))
    ]


def test_kv_that_runs_short_is_taken_from_who_has_most_requests():
    alices = [Asked(order, "alice") for order in range(3)]
    assert victim([*alices, Asked(9, "bob")]) == alices[-1]
    assert victim([Asked(1, "alice"), Asked(9, "bob")]) == Asked(9, "bob")
    assert victim([]) is None


@given(BATCHES)
def test_the_oldest_of_all_never_gives_way_to_others(asked):
    if len(asked) > 1:
        assert victim(asked) != asked[0]
