"""A prompt computed by several executors, each some of the layers: hidden states and KV pass through slots alone."""

import numpy as np
import pytest
from test_executor import GREEDY, PROMPT, TIMEOUT_S, make_rig, reference

from mooncake_zmq.core.actor import OpenSequence
from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import (
    BlockLoad,
    BlocksPulled,
    ComputeChunk,
    ComputeStage,
    DecodeStep,
    PullBlocks,
    SlotGrant,
    StageComputed,
    StepEntry,
    WorkFailed,
)
from mooncake_zmq.kv.layout import div_ceil
from mooncake_zmq.prefill.pipeline import stage_layers
from mooncake_zmq.transfer.hidden_states import EnteringStates, store_hidden

assert make_rig  # a fixture of the tests of the executor

HIDDEN_BYTES = 16
FIRST_HIDDEN_SLOT = 8


def refs(grants):
    return tuple(SlotRef(node=g.node, incarnation=1, slot=g.slot, generation=g.generation, checksum=0) for g in grants)


class Stage:
    """One node of the pipeline. Its blocks go to slots 0.., its hidden states to FIRST_HIDDEN_SLOT.."""

    def __init__(self, rig, stage, stages):
        self.rig, self.layers = rig, stage_layers(3, stage, stages)
        self.last = stage == stages - 1
        self.grants = rig.grants(0, 1, 2, 3)
        rig.executor.open_sequence(OpenSequence(1, 32))

    def work(self, start, stop, entering=(), prefix=()):
        layout = self.rig.segment.layout
        slots = div_ceil((stop - start) * HIDDEN_BYTES, layout.block_bytes)
        outgoing = () if self.last else self.rig.grants(*range(FIRST_HIDDEN_SLOT, FIRST_HIDDEN_SLOT + slots))
        chunk = ComputeChunk(
            sequence=1,
            start=start,
            tokens=PROMPT[start:stop].tobytes() if self.layers.start == 0 else b"",
            prefix=tuple(prefix),
            outputs=self.grants[start // 4 : layout.blocks_for(stop)],
            sampling=GREEDY if self.last and stop == len(PROMPT) else None,
            prefix_s=TIMEOUT_S,
        )
        return ComputeStage(chunk, stop - start, self.layers.start, self.layers.stop, entering, outgoing)


def rigs_of(make_rig, stages, hosts):
    rigs = [make_rig(f"stage{i}", host=hosts[i % len(hosts)], serve=len(hosts) > 1) for i in range(stages + 1)]
    for rig in rigs:
        rig.meet(*(other for other in rigs if other is not rig))
    return rigs


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("hosts", [("a",), ("a", "b")], ids=["one host", "two hosts"])
def test_stages_compute_what_one_node_computes(make_rig, stages, hosts):
    *nodes, decode = rigs_of(make_rig, stages, hosts)
    pipeline = [Stage(rig, index, stages) for index, rig in enumerate(nodes)]
    parts = {}
    token = None
    for start, stop in ((0, 8), (8, len(PROMPT))):
        entering = ()
        for stage in pipeline:
            work = stage.work(start, stop, entering)
            result = stage.rig.run(work)
            assert isinstance(result, StageComputed), result
            blocks = range(start // 4, start // 4 + len(work.chunk.outputs))
            cells = [(block, layer) for block in blocks for layer in stage.layers]
            parts |= dict(zip(cells, result.parts, strict=True))
            entering, token = refs(work.outgoing), result.token
    first, more = reference()
    assert token == first
    decode.executor.open_sequence(OpenSequence(1, 32))
    loads = [
        BlockLoad(block, ref, stage.layers.start, stage.layers.stop, min(4, len(PROMPT) - 4 * block))
        for stage in pipeline
        for block, ref in enumerate(refs(stage.grants))
    ]
    pulled = decode.run(PullBlocks(1, tuple(loads)))
    assert isinstance(pulled, BlocksPulled)
    assert not pulled.failed
    assert {(block, layer): checksum for block, layer, checksum in pulled.parts} == parts
    tokens = [token]
    for position in range(len(PROMPT), len(PROMPT) + 3):
        tokens.append(decode.run(DecodeStep((StepEntry(1, tokens[-1], position, GREEDY),))).tokens[0][0])
    assert tokens == [first, *more[:3]]


def test_a_later_stage_loads_its_layers_of_a_prefix_alone(make_rig):
    alone, one, two = rigs_of(make_rig, 2, ("a",))
    stored, token = alone.prefill()
    prefix = [BlockLoad(block, ref, 0, 3, 4) for block, ref in enumerate(stored[:2])]
    entering, result = (), None
    for index, rig in enumerate((one, two)):
        stage = Stage(rig, index, 2)
        mine = [BlockLoad(b.block, b.source, stage.layers.start, stage.layers.stop, 4) for b in prefix]
        work = stage.work(8, len(PROMPT), entering, mine)
        result = rig.run(work)
        assert isinstance(result, StageComputed)
        entering = refs(work.outgoing)
    assert result.token == token


@pytest.mark.parametrize("hosts", [("a",), ("a", "b")], ids=["one host", "two hosts"])
@pytest.mark.parametrize("harm", ["torn", "taken away", "unknown"])
def test_hidden_states_that_are_not_what_was_written_end_the_work(make_rig, hosts, harm):
    one, two, _ = rigs_of(make_rig, 2, hosts)
    first, second = Stage(one, 0, 2), Stage(two, 1, 2)
    work = first.work(0, 8)
    assert isinstance(one.run(work), StageComputed)
    slot = work.outgoing[0].slot
    entering = refs(work.outgoing)
    if harm == "torn":
        one.segment.part_view(slot, 0).reshape(-1).view(np.uint8)[3] ^= 1
    elif harm == "taken away":
        one.executor.fence([(slot, work.outgoing[0].generation + 2)])
    else:
        two.executor.forget_peer(one.name)
    result = two.run(second.work(0, 8, entering))
    assert isinstance(result, WorkFailed)
    assert "hidden states" in result.reason


def test_hidden_states_pass_through_slots_in_gpu_memory(cuda, make_slab, layout):
    slab = make_slab(cuda)
    rows = layout.block_bytes * 3 // (2 * HIDDEN_BYTES)  # one slot and a half
    states = np.random.default_rng(2).standard_normal((rows, HIDDEN_BYTES // 4), dtype=np.float32)
    for slot in (0, 1):
        slab.set_generation(slot, 1)
    grants = [SlotGrant("p", slab.incarnation, slot, 1) for slot in (0, 1)]
    assert store_hidden(states, slab, grants)
    entering = EnteringStates(layout, refs(grants), rows, HIDDEN_BYTES // 4)
    entering.read_here(lambda _: slab, lambda _: False)
    np.testing.assert_array_equal(entering.wait(lambda: None, 0.0), states)


def test_hidden_states_go_to_no_slot_that_is_not_granted(make_rig):
    one, _, _ = rigs_of(make_rig, 2, ("a",))
    work = Stage(one, 0, 2).work(0, 8)
    one.executor.fence([(work.outgoing[0].slot, work.outgoing[0].generation + 2)])
    result = one.run(work)
    assert isinstance(result, WorkFailed)
    assert "no longer granted" in result.reason


def test_a_stage_that_waits_for_a_silent_host_ends_when_it_is_cancelled(make_rig):
    one, two, _ = rigs_of(make_rig, 2, ("a", "b"))
    first, second = Stage(one, 0, 2), Stage(two, 1, 2)
    work = first.work(0, 8)
    one.run(work)
    one.server.close()
    one.server = None
    running = two.start(second.work(0, 8, refs(work.outgoing)))
    two.executor.cancel(running)
    assert isinstance(two.result(running), WorkFailed)
