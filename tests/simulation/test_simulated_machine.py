"""Simulated memory and works: bytes move in two halves, everything is verified, every work ends exactly once."""

import numpy as np
import pytest
from msgspec.structs import replace
from simulation_harness import LAYOUT, World

from mooncake_zmq.core.actor import (
    CancelWork,
    CloseSequence,
    Fence,
    OpenSequence,
    PeerDown,
    Start,
    WorkDone,
    WorkProgress,
)
from mooncake_zmq.core.messages import Sampling, SlotRef
from mooncake_zmq.core.work import (
    BlockLoad,
    BlocksCopied,
    BlocksPulled,
    ChunkComputed,
    ComputeChunk,
    CopyBlocks,
    DecodeStep,
    PullBlocks,
    SequenceBlock,
    SlotGrant,
    StepDecoded,
    StepEntry,
    WorkFailed,
)
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.simulation import engine_works
from mooncake_zmq.simulation.engine import SimSequence
from mooncake_zmq.simulation.violation import Violation

GREEDY = Sampling()
TOKENS = np.arange(6, dtype="<i4")
PLACES = {"prefill": "a", "decode": "a", "far": "b"}


def expected_token(sampling: Sampling = GREEDY) -> int:
    sequence = SimSequence(6)
    sequence.run(0, TOKENS.astype(np.uint32))
    return sequence.next_token(6, sampling)


def results(world: World, name: str) -> dict[int, object]:
    done = world.puppet(name).events(WorkDone)
    assert len({event.work_id for event in done}) == len(done), "a work ends once"
    return {event.work_id: event.result for event in done}


def grant(node: str, slot: int, generation: int) -> SlotGrant:
    return SlotGrant(node, 1, slot, generation)


def computed(world: World) -> tuple[SlotRef, SlotRef]:
    """`prefill` computes six tokens into slots 0 and 1 and commits them."""
    work = ComputeChunk(7, 0, TOKENS.tobytes(), (), (grant("prefill", 0, 1), grant("prefill", 1, 1)), GREEDY)
    world.does("prefill", Fence(((0, 1), (1, 1))), OpenSequence(7, 8), Start(1, work, 5.0))
    world.pass_time(0.2)
    result = results(world, "prefill")[1]
    assert isinstance(result, ChunkComputed)
    assert result.token == expected_token()
    world.does("prefill", Fence(((0, 2), (1, 2))))
    first, second = (SlotRef(node="prefill", incarnation=1, slot=s, generation=2, checksum=result.checksums[s]) for s in (0, 1))
    return first, second


def pull(world: World, refs: tuple[SlotRef, ...], name: str = "decode", work_id: int = 1) -> object:
    loads = tuple(BlockLoad(i, ref, 0, LAYOUT.layers, 4 if i == 0 else 2) for i, ref in enumerate(refs))
    world.does(name, OpenSequence(work_id, 16), Start(work_id, PullBlocks(work_id, loads), 1.0))
    world.pass_time(0.2)
    return results(world, name)[work_id]


@pytest.mark.parametrize(("told_every_s", "told"), [(0.0, [1, 2, 3]), (3600.0, [1, 2])])
def test_the_last_layer_of_a_short_chunk_is_told_with_its_result(
    monkeypatch: pytest.MonkeyPatch, told_every_s: float, told: list[int]
) -> None:
    monkeypatch.setattr(engine_works, "REPORT_EVERY_S", told_every_s)
    world = World(PLACES)
    computed(world)
    assert [event.progress.stop_layer for event in world.puppet("prefill").events(WorkProgress)] == told


def test_compute_hand_off_and_decode_give_the_undisturbed_token() -> None:
    world = World(PLACES)
    refs = computed(world)
    for name in ("decode", "far"):
        pulled = pull(world, refs, name)
        assert isinstance(pulled, BlocksPulled)
        assert not pulled.failed
        rows = [[checksum for block, _, checksum in sorted(pulled.parts) if block == b] for b in (0, 1)]
        assert tuple(map(block_checksum, rows)) == tuple(ref.checksum for ref in refs)
        world.does(name, Start(2, DecodeStep((StepEntry(1, 9, 6, GREEDY),)), 1.0))
        world.pass_time(0.1)
        decoded = results(world, name)[2]
        reference = SimSequence(7)
        reference.run(0, np.array([*TOKENS, 9], dtype=np.uint32))
        assert isinstance(decoded, StepDecoded)
        assert decoded.tokens == ((reference.next_token(7, GREEDY),),)


def test_chunks_and_a_loaded_prefix_change_nothing() -> None:
    world = World(PLACES)
    first, _ = computed(world)
    prefix = (BlockLoad(0, first, 0, LAYOUT.layers, 4),)
    work = ComputeChunk(8, 4, TOKENS[4:].tobytes(), prefix, (grant("prefill", 2, 1),), GREEDY)
    world.does("prefill", Fence(((2, 1),)), OpenSequence(8, 8), Start(2, work, 5.0))
    world.pass_time(0.2)
    result = results(world, "prefill")[2]
    assert isinstance(result, ChunkComputed)
    assert result.token == expected_token()


@pytest.mark.parametrize("wrong", [{"generation": 4}, {"checksum": 5}, {"incarnation": 9}, {"node": "far"}])
def test_a_copy_that_is_not_the_one_named_fails(wrong: dict[str, int | str]) -> None:
    world = World(PLACES)
    first, second = computed(world)
    assert pull(world, (replace_ref(first, wrong), second)) == BlocksPulled(
        tuple((1, layer, part) for layer, part in enumerate(world.machine("prefill").segment.parts[1])),
        (0,),
        (0,) if "checksum" in wrong else (),
    )


def test_a_prefix_that_is_late_fails_its_blocks_and_accuses_none() -> None:
    world = World(PLACES)
    first, _ = computed(world)
    prefix = (BlockLoad(0, first, 0, LAYOUT.layers, 4),)
    work = ComputeChunk(8, 4, TOKENS[4:].tobytes(), prefix, (), GREEDY, 0.0001)
    busy = ComputeChunk(9, 0, TOKENS.tobytes(), (), (), GREEDY)
    world.does("prefill", OpenSequence(8, 8), OpenSequence(9, 8), Start(3, busy, 5.0), Start(2, work, 5.0))
    world.pass_time(0.2)
    result = results(world, "prefill")[2]
    assert isinstance(result, ChunkComputed)
    assert (result.failed, result.corrupt) == ((0,), ())


def replace_ref(ref: SlotRef, fields: dict[str, int | str]) -> SlotRef:
    values = {name: getattr(ref, name) for name in ("node", "incarnation", "slot", "generation", "checksum")}
    return SlotRef(**(values | fields))


@pytest.mark.parametrize("reader", ["decode", "far"])
def test_a_process_finds_no_slots_of_a_peer_that_it_was_not_told_of(reader: str) -> None:
    world = World(PLACES)
    refs = computed(world)
    world.machine(reader).learn(PeerDown("prefill", "its conversation ended"))
    pulled = pull(world, refs, reader)
    assert isinstance(pulled, BlocksPulled)
    assert (pulled.failed, pulled.corrupt) == ((0, 1), ()), "nothing is known of the bytes"


def test_a_slot_reused_between_the_halves_of_a_copy_is_noticed() -> None:
    world = World(PLACES)
    refs = computed(world)
    loads = tuple(BlockLoad(i, ref, 0, LAYOUT.layers, 4) for i, ref in enumerate(refs))
    world.does("decode", OpenSequence(1, 16), Start(1, PullBlocks(1, loads), 1.0))
    world.pass_time(0.0025)  # the first half is read
    world.does("prefill", Fence(((0, 3),)))
    world.pass_time(0.1)
    pulled = results(world, "decode")[1]
    assert isinstance(pulled, BlocksPulled)
    assert (pulled.failed, pulled.corrupt) == ((0,), ())


def test_a_flipped_bit_is_noticed() -> None:
    world = World(PLACES)
    refs = computed(world)
    world.machine("prefill").segment.memory[0] ^= 1
    pulled = pull(world, refs)
    assert isinstance(pulled, BlocksPulled)
    assert (pulled.failed, pulled.corrupt) == ((0,), (0,))


def test_copies_into_another_segment_carry_their_checksum() -> None:
    world = World(PLACES)
    refs = computed(world)
    pull(world, refs)
    world.does("far", Fence(((0, 1),)))
    copies = ((refs[0], grant("far", 0, 1)),)
    world.does("far", Start(5, CopyBlocks(copies), 1.0))
    world.pass_time(0.1)
    assert results(world, "far")[5] == BlocksCopied((refs[0].checksum,))
    world.does("decode", Fence(((0, 1),)), Start(6, CopyBlocks(((SequenceBlock(1, 0), grant("decode", 0, 1)),)), 1.0))
    world.pass_time(0.1)
    assert results(world, "decode")[6] == BlocksCopied((refs[0].checksum,))


@pytest.mark.parametrize("fault", ["copy_fail", "copy_tear"])
def test_an_injected_failure_is_reported(fault: str) -> None:
    world = World(PLACES)
    refs = computed(world)
    setattr(world.simulator, fault, 3.0)
    pulled = pull(world, refs)
    assert pulled == WorkFailed("injected failure") if fault == "copy_fail" else not pulled.parts  # type: ignore[attr-defined]


def test_a_dead_neighbours_file_is_readable_until_its_next_life_sweeps_it() -> None:
    world = World(PLACES)
    refs = computed(world)
    world.simulator.crash("prefill")
    pulled = pull(world, refs)
    assert isinstance(pulled, BlocksPulled)
    assert not pulled.failed
    world.simulator.restart("prefill")
    swept = pull(world, refs, work_id=2)
    assert isinstance(swept, BlocksPulled)
    assert swept.failed == (0, 1)


def test_a_silent_owner_on_another_host_costs_the_deadline() -> None:
    world = World(PLACES)
    refs = computed(world)
    world.simulator.pause("prefill")
    loads = (BlockLoad(0, refs[0], 0, 3, 4),)
    world.does("far", OpenSequence(1, 16), Start(1, PullBlocks(1, loads), 0.5))
    world.pass_time(0.45)
    assert 1 not in results(world, "far")
    world.pass_time(0.1)
    assert results(world, "far")[1] == BlocksPulled((), (0,))


def test_deadlines_and_cancels_end_works_once() -> None:
    world = World(PLACES)
    world.does("prefill", OpenSequence(7, 64), Fence(((0, 1),)))
    long = ComputeChunk(7, 0, np.zeros(60, dtype="<i4").tobytes(), (), (), GREEDY)
    world.does("prefill", *(Start(work_id, long, 0.03) for work_id in (1, 2, 3)), CancelWork(3), CancelWork(99))
    world.pass_time(1.0)
    assert all(isinstance(result, WorkFailed) for result in results(world, "prefill").values())
    assert set(results(world, "prefill")) == {1, 2, 3}


def test_a_stopped_writer_writes_late_and_the_checker_sees_whom_it_hits() -> None:
    world = World(PLACES)
    refs = computed(world)
    pull(world, refs)
    world.does("far", Fence(((0, 1),)))
    world.does("far", Start(5, CopyBlocks(((refs[0], grant("far", 0, 1)),)), 1.0))
    world.pass_time(0.005)
    world.simulator.pause("far")
    world.machine("far").segment.generations[0] = 3
    world.simulator.resume("far")
    with pytest.raises(Violation, match="I2.*granted at generation 1, which stands at 3"):
        world.pass_time(0.1)


def test_effects_that_make_no_sense_are_violations() -> None:
    world = World(PLACES)
    world.does("prefill", OpenSequence(7, 64))
    work = ComputeChunk(7, 0, TOKENS.tobytes(), (), (), GREEDY)
    with pytest.raises(Violation, match="closes sequence 7 under"):
        world.does("prefill", Start(1, work, 1.0), CloseSequence(7))
    with pytest.raises(Violation, match="closes sequence 8"):
        world.does("decode", CloseSequence(8))
    with pytest.raises(Violation, match="back to 0"):
        world.does("decode", Fence(((0, 0),)))
    with pytest.raises(Violation, match="not open"):
        world.does("decode", Start(1, replace(work, sequence=9), 1.0))
