"""Simulated stages of a pipeline: what the whole gives; hidden states pass through slots and are verified."""

import numpy as np
import pytest
from simulation_harness import LAYOUT, World
from test_simulated_machine import GREEDY, TOKENS, expected_token, grant, results

from mooncake_zmq.core.actor import Fence, OpenSequence, Start
from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import BlockLoad, BlocksPulled, ComputeChunk, ComputeStage, PullBlocks, StageComputed, WorkFailed
from mooncake_zmq.kv.checksum import part_checksum
from mooncake_zmq.kv.layout import div_ceil
from mooncake_zmq.simulation.engine import SimSequence

PLACES = {"first": "a", "later": "b", "decode": "a"}
HIDDEN_SLOTS = div_ceil(len(TOKENS) * LAYOUT.hidden_bytes, LAYOUT.block_bytes)


def ref(node: str, slot: int) -> SlotRef:
    return SlotRef(node=node, incarnation=1, slot=slot, generation=1, checksum=0)


def first_stage(world: World, layers: int) -> tuple[SlotRef, ...]:
    """`first` computes some layers of six tokens: where its hidden states stand."""
    outputs = tuple(grant("first", slot, 1) for slot in (0, 1))
    outgoing = tuple(grant("first", slot, 1) for slot in range(2, 2 + HIDDEN_SLOTS))
    chunk = ComputeChunk(7, 0, TOKENS.tobytes(), (), outputs, None)
    fence = Fence(tuple((slot, 1) for slot in range(2 + HIDDEN_SLOTS)))
    world.does("first", fence, OpenSequence(7, 8), Start(1, ComputeStage(chunk, 6, 0, layers, (), outgoing), 5.0))
    world.pass_time(0.2)
    result = results(world, "first")[1]
    assert isinstance(result, StageComputed)
    assert len(result.parts) == 2 * layers
    return tuple(ref("first", grant.slot) for grant in outgoing)


def last_stage(world: World, layers: int, entering: tuple[SlotRef, ...]) -> object:
    outputs = tuple(grant("later", slot, 1) for slot in (0, 1))
    work = ComputeStage(ComputeChunk(9, 0, b"", (), outputs, GREEDY), 6, layers, LAYOUT.layers, entering)
    world.does("later", Fence(((0, 1), (1, 1))), OpenSequence(9, 8), Start(1, work, 5.0))
    world.pass_time(0.2)
    return results(world, "later")[1]


@pytest.mark.parametrize("layers", [1, 2])
def test_two_stages_give_the_undisturbed_token_and_kv(layers: int) -> None:
    world = World(PLACES, slots=8)
    result = last_stage(world, layers, first_stage(world, layers))
    assert isinstance(result, StageComputed)
    assert result.token == expected_token()
    loads = [BlockLoad(i, ref("first", i), 0, layers, 4 - 2 * i) for i in (0, 1)]
    loads += [BlockLoad(i, ref("later", i), layers, LAYOUT.layers, 4 - 2 * i) for i in (0, 1)]
    world.does("decode", OpenSequence(1, 16), Start(1, PullBlocks(1, tuple(loads)), 1.0))
    world.pass_time(0.2)
    pulled = results(world, "decode")[1]
    assert isinstance(pulled, BlocksPulled)
    assert not pulled.failed
    whole = SimSequence(6)
    whole.run(0, TOKENS.astype(np.uint32))
    np.testing.assert_array_equal(world.machine("decode").sequences[1].kv[:, :, :6], whole.kv)


@pytest.mark.parametrize("harm", ["torn", "taken away", "unreachable"])
def test_hidden_states_that_do_not_verify_end_the_work(harm: str) -> None:
    world = World(PLACES, slots=8)
    entering = first_stage(world, 1)
    if harm == "torn":
        world.machine("first").segment.part(entering[0].slot, 0)[5] ^= 1
    elif harm == "taken away":
        world.does("first", Fence(((entering[0].slot, 3),)))
    else:
        world.simulator.crash("first")
    result = last_stage(world, 1, entering)
    assert isinstance(result, WorkFailed)
    assert "hidden states" in result.reason


def test_one_wrong_hidden_byte_changes_the_token() -> None:
    """What verification guards against: with the checksum forged along, the token is another."""
    world = World(PLACES, slots=8)
    entering = first_stage(world, 1)
    segment = world.machine("first").segment
    segment.part(entering[0].slot, 0)[0] ^= 1
    segment.parts[entering[0].slot][0] = part_checksum(segment.part(entering[0].slot, 0))
    result = last_stage(world, 1, entering)
    assert isinstance(result, StageComputed)
    assert result.token != expected_token()
