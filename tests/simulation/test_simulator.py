"""The simulated world by itself: time, wires, starts and faults, with actors that only do what they are told."""

import pytest
from simulation_harness import World

from mooncake_zmq.core.actor import (
    CancelTimer,
    PeerDown,
    PeerUp,
    Received,
    Send,
    SetTimer,
    Start,
    Started,
    TimerFired,
    WorkDone,
)
from mooncake_zmq.core.messages import EndStage
from mooncake_zmq.core.work import ProbeProcess, ProcessProbed
from mooncake_zmq.simulation.faults import Fault, FaultKind

PLACES = {"one": "a", "two": "a", "far": "b"}


def ended(number: int) -> EndStage:
    return EndStage(request_id="r", attempt=number)


def attempts(world: World, name: str) -> list[int]:
    return [event.message.attempt for event in world.puppet(name).events(Received)]


def test_processes_greet_each_other_and_messages_arrive_in_order() -> None:
    world = World(PLACES)
    assert isinstance(world.puppet("one").heard[0][1], Started)
    assert {event.peer for event in world.puppet("one").events(PeerUp)} == {"two", "far"}
    world.does("one", *(Send("far", ended(number)) for number in range(5)))
    world.pass_time(0.1)
    assert attempts(world, "far") == [0, 1, 2, 3, 4]


def test_timers_fire_once_at_their_time_and_can_be_replaced_or_cancelled() -> None:
    world = World(PLACES)
    now = world.simulator.now
    world.does("one", SetTimer(("a",), 0.5), SetTimer(("a",), 1.0), SetTimer(("b",), 0.2), CancelTimer(("b",)))
    world.pass_time(3.0)
    fired = [(at, event.key) for at, event in world.puppet("one").heard if isinstance(event, TimerFired)]
    assert fired == [(pytest.approx(now + 1.0), ("a",))]


@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.DUPLICATE, FaultKind.DELAY])
def test_bad_wires_cost_time_but_no_message(kind: FaultKind) -> None:
    world = World(PLACES)
    world.injection.schedule(Fault(kind, world.simulator.now, 30.0, (), 0.3))
    world.pass_time(0.01)
    for number in range(30):
        world.does("one", Send("far", ended(number)))
        world.pass_time(0.02)
    world.pass_time(3.0)
    assert attempts(world, "far") == list(range(30))
    assert not world.puppet("far").events(PeerDown)


def test_a_partition_ends_conversations_between_hosts_and_heals() -> None:
    world = World(PLACES)
    world.injection.schedule(Fault(FaultKind.PARTITION, world.simulator.now, 2.5, ("one", "far")))
    world.pass_time(2.4)
    assert {event.peer for event in world.puppet("far").events(PeerDown)} == {"one", "two"}
    assert not world.puppet("two").events(PeerDown) or {e.peer for e in world.puppet("two").events(PeerDown)} == {"far"}
    world.pass_time(2.0)
    assert [event.peer for event in world.puppet("far").events(PeerUp)].count("one") == 2


def test_one_way_means_one_way() -> None:
    world = World(PLACES)
    world.injection.schedule(Fault(FaultKind.ONE_WAY, world.simulator.now, 0.5, ("one", "far")))
    world.pass_time(0.01)
    world.does("one", Send("far", ended(1)))
    world.does("far", Send("one", ended(2)))
    world.pass_time(0.4)
    assert attempts(world, "one") == [2]
    assert attempts(world, "far") == []
    world.pass_time(1.5)
    assert attempts(world, "far") == [1]


def test_a_crash_loses_everything_and_the_next_life_is_another() -> None:
    world = World(PLACES)
    former = world.puppet("one")
    world.does("one", SetTimer(("never",), 0.6), Start(1, ProbeProcess("two", 1), 5.0))
    world.injection.schedule(Fault(FaultKind.CRASH, world.simulator.now, 0.3, ("one",)))
    world.pass_time(2.0)
    assert former is not world.puppet("one")
    assert world.puppet("one").incarnation == former.incarnation + 1
    for life in world.puppets["one"]:
        assert not life.events(TimerFired)
        assert not life.events(WorkDone)
    assert ("one", 2) in [(event.peer, event.incarnation) for event in world.puppet("two").events(PeerUp)]


def test_a_stopped_process_handles_everything_late_and_in_order() -> None:
    world = World(PLACES)
    now = world.simulator.now
    world.does("one", SetTimer(("late",), 0.1))
    world.injection.schedule(Fault(FaultKind.PAUSE, now, 0.8, ("one",)))
    world.pass_time(0.05)
    for number in range(3):
        world.does("two", Send("one", ended(number)))
    world.pass_time(0.7)
    assert attempts(world, "one") == []
    assert world.simulator.alive("one", 1)
    world.pass_time(1.0)
    assert attempts(world, "one") == [0, 1, 2]
    late = [at for at, event in world.puppet("one").heard if isinstance(event, TimerFired)]
    assert len(late) == 1
    assert late[0] >= now + 0.8


def test_processes_that_get_no_cpu_for_a_while_keep_their_conversations() -> None:
    world = World(PLACES)
    world.does("one", Send("far", ended(1)))
    world.injection.schedule(Fault(FaultKind.LATE, world.simulator.now, 3.4, tuple(PLACES)))
    world.pass_time(5.0)
    assert attempts(world, "far") == [1]
    assert not any(world.puppet(name).events(PeerDown) for name in PLACES)


def test_one_that_gets_no_cpu_is_told_from_a_dead_one_by_the_kernel_of_its_host_and_by_no_other() -> None:
    world = World(PLACES)
    world.injection.schedule(Fault(FaultKind.LATE, world.simulator.now, 3.4, ("one",)))
    world.does("two", Send("one", ended(1)))
    world.pass_time(3.3)
    assert not world.puppet("two").events(PeerDown)
    assert [down.reason for down in world.puppet("far").events(PeerDown)] == ["silent"]
    world.pass_time(2.0)
    assert attempts(world, "one") == [1]


def test_one_that_is_stopped_is_missed_on_its_host_too() -> None:
    world = World(PLACES)
    world.injection.schedule(Fault(FaultKind.PAUSE, world.simulator.now, 3.4, ("one",)))
    world.pass_time(2.0)
    assert [down.reason for down in world.puppet("two").events(PeerDown)] == ["silent"]


def test_probing_tells_the_dead_from_the_stopped() -> None:
    world = World(PLACES)
    world.simulator.pause("two")
    world.simulator.crash("far")
    world.does("one", Start(1, ProbeProcess("two", 1), 1.0), Start(2, ProbeProcess("far", 1), 1.0))
    world.pass_time(0.1)
    results = {event.work_id: event.result for event in world.puppet("one").events(WorkDone)}
    assert results == {1: ProcessProbed(True), 2: ProcessProbed(False)}


def test_garbage_is_dropped_and_counted() -> None:
    world = World(PLACES)
    world.simulator.crash("two")
    world.simulator.restart("two")
    world.pass_time(1.0)
    heard = len(world.puppet("one").heard)
    world.injection.schedule(Fault(FaultKind.GARBAGE, world.simulator.now, 0.0, ("one",), 200))
    world.pass_time(0.001)
    assert set(world.injection.garbage.counts) == {"noise", "truncated", "stranger", "version", "old_incarnation", "impostor"}
    assert len(world.puppet("one").heard) == heard


def test_a_fault_that_waits_for_a_moment_is_counted_once_it_strikes() -> None:
    world = World(PLACES)
    world.injection.schedule(Fault(FaultKind.CRASH_SENDER, world.simulator.now, 1.0, ("one",)))
    world.pass_time(0.1)
    assert not world.injection.begun
    world.simulator.half_sent("one")
    world.pass_time(0.1)
    assert world.injection.begun == {"crash_sender": 1}


def test_the_same_seed_gives_the_same_digest() -> None:
    digests = []
    for seed in (1, 1, 2):
        world = World(PLACES, seed=seed)
        world.injection.schedule(Fault(FaultKind.DROP, 0.6, 2.0, (), 0.3))
        world.pass_time(3.0)
        digests.append(world.simulator.digest)
    assert digests[0] == digests[1] != digests[2]
