"""A plan is data: the same for a seed, and no kind of fault is left out for another's sake."""

import pytest

from mooncake_zmq.chaos.plan import LONG_S, Kind, draw_plan
from mooncake_zmq.core.roles import Role

ROLES: tuple[Role, ...] = ("conductor", "gateway", "cache-node", "prefill", "decode")
NODES: dict[str, Role] = {f"{role}-{host}": role for host in "ab" for role in ROLES}


def test_a_seed_gives_one_plan() -> None:
    assert draw_plan(7, 120, NODES) == draw_plan(7, 120, NODES)
    assert draw_plan(7, 120, NODES) != draw_plan(8, 120, NODES)


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_comes_before_any_comes_again(seed: int) -> None:
    kinds = [fault.kind for fault in draw_plan(seed, 3600, NODES)]
    assert set(kinds[: len(Kind)]) == set(Kind)
    assert len(kinds) > 10 * len(Kind)


@pytest.mark.parametrize("seed", range(20))
def test_times_are_in_order_and_within_the_run(seed: int) -> None:
    plan = draw_plan(seed, 60, NODES)
    assert [fault.at_s for fault in plan] == sorted(fault.at_s for fault in plan)
    assert all(0 < fault.at_s < 60 for fault in plan)


def test_only_the_wanted_kinds_and_only_nodes_that_exist() -> None:
    plan = draw_plan(3, 600, NODES, [Kind.KILL, Kind.FLIP_DISK])
    assert {fault.kind for fault in plan} == {Kind.KILL, Kind.FLIP_DISK}
    assert all(target in NODES for fault in plan for target in fault.targets)


@pytest.mark.parametrize("kind", [Kind.ROLLING, Kind.ROTATE])
def test_a_long_run_restarts_every_node_in_turn_and_gives_each_a_new_key(kind: Kind) -> None:
    restarts = [fault for fault in draw_plan(1, LONG_S * 6, NODES) if fault.kind is kind]
    assert restarts[0].targets == tuple(NODES)


def test_a_node_that_flaps_dies_several_times_in_a_row() -> None:
    assert all(fault.amount >= 3 for fault in draw_plan(1, 600, NODES, [Kind.FLAP]))


def test_what_no_process_ends_of() -> None:
    lasting = {kind for kind in Kind if not kind.ends_processes}
    assert {Kind.STOP, Kind.PARTITION, Kind.FORGE, Kind.DISK_FULL, Kind.FLIP_MEMORY} <= lasting
    assert lasting.isdisjoint(
        {Kind.KILL, Kind.FLAP, Kind.DRAIN, Kind.ROLLING, Kind.ROTATE, Kind.REBOOT, Kind.CLOCK, Kind.POOLS}
    )
