"""Prefills that compute one prompt in stages: the protocol between them, and nothing left over whatever ends it, and when."""

from collections import deque
from dataclasses import replace

import pytest
from actor_harness import Harness, leased

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.messages import (
    AttemptFailed,
    BlocksLeased,
    CancelRequest,
    DecodeDenied,
    DecodeReserved,
    EndStage,
    FirstToken,
    HandoffBlocks,
    HandoffDone,
    HandoffFailed,
    HandoffReceived,
    LeaseBlocks,
    PrefillLoad,
    ReportCorrupt,
    ReserveDecode,
    ReserveSlots,
    Sampling,
    SlotRef,
    SlotsReserved,
    StageChunk,
    StageDone,
    StageFailed,
    StageReady,
    StartPrefill,
    StartStage,
    StopRule,
)
from mooncake_zmq.core.work import (
    ChunkComputed,
    ComputeChunk,
    ComputeStage,
    SampleTokens,
    StageComputed,
    TokensSampled,
    WorkFailed,
)
from mooncake_zmq.kv.block_hash import extend_keys, namespace, pack_tokens
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.slot_table import SlotState
from mooncake_zmq.prefill.pipeline import BUFFERS, Group, hidden_slots, stage_layers
from mooncake_zmq.prefill.prefill import Prefill
from mooncake_zmq.prefill.settings import PrefillSettings

LAYOUT = BlockLayout(layers=3, kv_heads=1, head_dim=2, block_tokens=4, hidden_bytes=16)
B = LAYOUT.block_tokens
ROOT = namespace(model="m", layout="l")
PROMPT = list(range(30))  # seven blocks and a half: chunks of 8, 8, 8 and 6 tokens
KEYS = tuple(extend_keys(ROOT, pack_tokens(PROMPT), B))
SETTINGS = PrefillSettings(slab_bytes=16 * LAYOUT.slot_bytes, chunk_tokens=2 * B, max_active=2)
STAGES = ("p1", "p2")


def part(block, layer):
    """What stands for a part checksum."""
    return 1000 * (layer + 1) + block


class Node(Harness):
    def __init__(self, name, *, layout=LAYOUT, **settings):
        changed = replace(SETTINGS, **settings)
        actor = Prefill(name=name, host=f"h-{name}", incarnation=2, settings=changed, layout=layout, costs=Costs())
        super().__init__(actor, name=name)
        self.name = name
        for peer in ("g", "d", "k"):
            self.up(peer, 7)
        self.up("c", 7, host=f"h-{name}")
        for peer in ("p0", *STAGES):
            if peer != name:
                self.up(peer, 2)


class Line:
    """The first stage and the later ones: every message between them, every answer of pool and decode, every finished chunk is
    one step."""

    def __init__(self, stages=STAGES, blocks=None, held=0, **settings):
        self.stages = stages
        self.nodes = {name: Node(name, **settings) for name in ("p0", *stages)}
        self.first = self.nodes["p0"]
        self.blocks = blocks or {}
        """Leading blocks that each node's pool holds."""
        self.held = held
        self.computed = []
        """(stage, first token) of all chunks, in the order they ended."""
        self.inbox = deque()
        self.pool = []

    def start(self, attempt=1, **changes):
        fields = {
            "request_id": "r",
            "attempt": attempt,
            "tokens": pack_tokens(PROMPT),
            "root": ROOT,
            "keys": KEYS,
            "first_index": 0,
            "sampling": Sampling(),
            "stop": StopRule(max_tokens=9),
            "decode": "d",
            "reuse_blocks": 0,
            "sources": (),
            "deadline_s": 60.0,
            "stages": self.stages,
        }
        self.first.say("g", StartPrefill(**(fields | changes)))

    def step(self):
        """Let one thing happen; False if nothing can."""
        return self.deliver() or any(self.compute(name) for name in reversed(self.nodes))

    def settle(self):
        """Deliver all that is said, computing nothing."""
        while self.deliver():
            pass

    def deliver(self):
        """One message, or one answer of pool or decode."""
        for node in self.nodes.values():
            for to, message in node.sent[:]:
                if to in self.nodes:
                    node.sent.remove((to, message))
                    if node.name in self.nodes[to].peers:
                        self.nodes[to].say(node.name, message)
                    return True
                if to not in node.peers:
                    node.sent.remove((to, message))
                    return True
                if to == "c" and isinstance(message, LeaseBlocks):
                    node.sent.remove((to, message))
                    count = min(len(message.keys), self.blocks.get(node.name, 0))
                    refs = [SlotRef(node="c", incarnation=7, slot=i, generation=2, checksum=500 + i) for i in range(count)]
                    node.say("c", leased(message.lease_id, refs, node="c"))
                    return True
                if to == "c" and isinstance(message, ReserveSlots):
                    node.sent.remove((to, message))
                    node.say("c", SlotsReserved(put_id=message.put_id, grants=()))
                    return True
                if to == "d" and isinstance(message, ReserveDecode):
                    node.sent.remove((to, message))
                    node.say("d", DecodeReserved(request_id=message.request_id, attempt=message.attempt, held_blocks=self.held))
                    return True
        return False

    def compute(self, name, result=None):
        """The chunk in flight on a node ends."""
        node = self.nodes[name]
        for work_id, work in list(node.works.items()):
            if isinstance(work, ComputeChunk):  # of a prompt of its own
                node.done(work_id, ChunkComputed(tuple(range(len(work.outputs))), 5 if work.sampling else None, 0.01))
                return True
        works = [(i, work) for i, work in node.works.items() if isinstance(work, ComputeStage)]
        if not works:
            return False
        ((work_id, work),) = works
        self.computed.append((name, work.chunk.start))
        first = work.chunk.start // B
        blocks = range(first, first + len(work.chunk.outputs))
        parts = tuple(part(block, layer) for block in blocks for layer in work.layers)
        token = 77 if work.chunk.sampling is not None else None
        node.done(work_id, result or StageComputed(parts, token, 0.01))
        return True

    def run(self, steps=1000):
        """So many steps, or to the end; returns how many were made."""
        made = 0
        while made < steps and self.step():
            made += 1
        return made

    def received(self):
        self.first.say("d", HandoffReceived(request_id="r", attempt=1))
        self.run()

    def busy(self):
        return {name: busy for name, node in self.nodes.items() if (busy := node.busy())}

    def leftovers(self):
        """What is held, open or still to be done once all is over."""
        sequences = {name: node.sequences for name, node in self.nodes.items() if node.sequences}
        timers = [key for node in self.nodes.values() for key in node.timers if "deadline" in key[0]]
        return self.busy() or sequences or timers

    def handed(self):
        """(block, layer) -> where, of all that the decode was told."""
        told = {}
        for message in self.first.take(HandoffBlocks, "d"):
            assert message.ready, "a pipeline's layers are told of when they are there"
            for block, ref in enumerate(message.sources, message.first_block):
                for layer in range(message.first_layer, message.stop_layer or LAYOUT.layers):
                    assert told.setdefault((block, layer), ref) == ref
        return told


def done_of(line):
    return line.first.one(HandoffDone, "d")


# --- the way of a prompt


@pytest.mark.parametrize("stages", [("p1",), STAGES], ids=["two stages", "three stages"])
def test_every_layer_of_every_block_is_handed_off_and_proved(stages):
    line = Line(stages)
    line.start()
    line.run()
    assert line.first.one(FirstToken, "g").token == 77
    told, done = line.handed(), done_of(line)
    assert set(told) == {(block, layer) for block in range(8) for layer in range(3)}
    for index, name in enumerate(("p0", *stages)):
        for layer in stage_layers(3, index, 1 + len(stages)):
            assert {told[block, layer].node for block in range(8)} == {name}
    folded = [block_checksum([part(block, layer) for layer in range(3)]) for block in range(8)]
    assert (done.layers, done.blocks, done.checksum) == (3, 8, block_checksum(folded))
    assert (done.keys, done.parent, done.block_tokens) == (KEYS, None, pack_tokens(PROMPT[: 7 * B]))
    assert not any(node.take(ReserveSlots) for node in line.nodes.values()), "no stage has a block's layers all"
    line.received()
    assert not line.leftovers()
    assert not any(node.actor.slots.count(SlotState.COMMITTED) for node in line.nodes.values())


def test_stages_compute_different_chunks_at_the_same_time():
    line = Line()
    line.start()
    for name in ("p0", "p0", "p1"):
        line.settle()
        assert line.compute(name)
    line.settle()
    starts = [next(iter(node.works.values())).chunk.start for node in line.nodes.values()]
    assert starts == [16, 8, 0]
    line.run()
    assert done_of(line)


def test_a_stage_is_at_most_two_chunks_ahead_and_its_buffers_change_their_generation():
    line = Line(("p1",))
    line.start()
    for _ in range(2):
        line.settle()
        assert line.compute("p0")
    line.settle()
    assert not line.first.works, "the third chunk's hidden states would go where the first one's stand"
    entering = next(iter(line.nodes["p1"].works.values())).entering
    line.compute("p1")
    line.settle()
    assert line.first.works
    assert all(line.first.actor.slots.generation[ref.slot] != ref.generation for ref in entering)


def test_only_blocks_that_every_stage_holds_are_reused_and_each_loads_its_layers():
    line = Line(blocks={"p0": 5, "p1": 3, "p2": 4})
    line.start()
    loads = {}
    while line.step():
        for name, node in line.nodes.items():
            for work in node.works.values():
                if isinstance(work, ComputeStage) and work.chunk.prefix:
                    loads[name] = work.chunk.prefix, work.layers, work.chunk.start
    for prefix, layers, start in loads.values():
        assert [load.block for load in prefix] == [0, 1, 2]
        assert {(load.first_layer, load.stop_layer) for load in prefix} == {(layers.start, layers.stop)}
        assert start == 3 * B
    assert set(loads) == set(line.nodes)
    first, done, told = line.first.one(FirstToken), done_of(line), line.handed()
    assert (first.own, first.local, first.remote) == (0, 3 * B, 0)
    assert {told[block, layer].node for block in range(3) for layer in range(3)} == {"c"}
    folded = [500, 501, 502] + [block_checksum([part(block, layer) for layer in range(3)]) for block in range(3, 8)]
    assert done.checksum == block_checksum(folded)
    assert (done.keys, done.parent) == (KEYS[3:], KEYS[2])
    line.received()
    assert not line.leftovers()


def test_blocks_of_the_own_slab_are_reused_by_the_stage_that_has_them():
    line = Line(("p1",), blocks={"p0": 2})
    slots = line.nodes["p1"].actor.slots
    for key in KEYS[:2]:
        slots.commit(slots.reserve(key), 9)
    slots.take_fences()
    line.start()
    line.run()
    assert line.first.one(FirstToken).local == 2 * B
    line.received()
    assert not line.leftovers()


def test_a_short_prompt_needs_no_other_stage():
    line = Line()
    line.start(stages=())
    line.settle()
    assert any(isinstance(work, ComputeChunk) for work in line.first.works.values())
    assert not any(isinstance(message, StartStage) for _, message in line.first.sent)
    assert not any(node.works or node.sequences for name, node in line.nodes.items() if name != "p0")


def test_a_stage_takes_its_turn_among_its_own_prompts_and_is_reported():
    """The engine has one chunk at a time, and a prompt that is less work goes first."""
    line = Line(("p1",))
    line.start()
    line.settle()
    line.compute("p0")
    node = line.nodes["p1"]
    node.say("g", own_request(PROMPT[:8]))
    line.settle()
    assert node.actor.gauges(node.now)["stages"] == 1
    node.take(PrefillLoad)
    node.advance(1.0)
    assert len(node.take(PrefillLoad, "k")[-1].jobs) == 2, "the conductor hears of the stage's work too"
    (work,) = node.works.values()
    later = ComputeStage if isinstance(work, ComputeChunk) else ComputeChunk
    for work_id in list(node.works):
        ended = ChunkComputed((1, 2), 5, 0.01) if isinstance(work, ComputeChunk) else StageComputed((1, 2, 3, 4), None, 0.01)
        node.done(work_id, ended)
    (work,) = node.works.values()
    assert isinstance(work, later)


def own_request(tokens):
    packed = pack_tokens(tokens)
    return StartPrefill(
        request_id="own",
        attempt=1,
        tokens=packed,
        root=ROOT,
        keys=tuple(extend_keys(ROOT, packed, B)),
        first_index=0,
        sampling=Sampling(),
        stop=StopRule(max_tokens=9),
        decode="d",
        reuse_blocks=0,
        sources=(),
        deadline_s=60.0,
    )


# --- what ends it

FAILURES = {
    "cancelled": lambda line: line.first.say("g", CancelRequest(request_id="r", attempt=1)),
    "newer attempt": lambda line: line.start(attempt=2, stages=(), tokens=pack_tokens(PROMPT[:2]), keys=()),
    "deadline at the first": lambda line: line.first.advance(61.0),
    "deadline at a later one": lambda line: line.nodes["p2"].advance(61.0),
    "decode denies": lambda line: line.first.say("d", DecodeDenied(request_id="r", attempt=1, reason="full", full=True)),
    "decode gives up": lambda line: line.first.say("d", HandoffFailed(request_id="r", attempt=1, reason="test")),
    "gateway down": lambda line: line.first.down("g"),
    "decode down": lambda line: line.first.down("d"),
    "a later one down": lambda line: _part(line, "p1"),
    "the last one down": lambda line: _part(line, "p2"),
    "pool of a later one down": lambda line: line.nodes["p1"].down("c"),
}


def _part(line, name):
    """The conversation with a stage ends, on both sides."""
    line.first.down(name)
    line.nodes[name].down("p0")


def steps_in_all():
    line = Line(blocks={"p0": 2, "p1": 2, "p2": 2})
    line.start()
    return line.run()


@pytest.mark.parametrize("failure", sorted(FAILURES))
def test_whatever_ends_it_at_whatever_moment_nothing_is_left(failure):
    for moment in range(steps_in_all() + 1):
        line = Line(blocks={"p0": 2, "p1": 2, "p2": 2})
        line.start()
        line.run(moment)
        FAILURES[failure](line)
        line.run()
        finished = bool(line.first.take(FirstToken, "g"))
        if "d" in line.first.peers:
            line.first.say("d", HandoffReceived(request_id="r", attempt=2 if failure == "newer attempt" else 1))
        line.run()
        assert not line.leftovers(), f"after {moment} steps"
        failed = line.first.take(AttemptFailed, "g")
        if not finished and failure not in ("cancelled", "newer attempt", "gateway down", "pool of a later one down"):
            assert len(failed) == 1, f"after {moment} steps: the request is placed again, once"


@pytest.mark.parametrize("name", ["p0", "p1", "p2"])
@pytest.mark.parametrize("chunk", [0, 1, 3])
@pytest.mark.parametrize("kind", ["failed", "corrupt", "unreached"])
def test_a_chunk_that_fails_anywhere_ends_the_attempt(name, chunk, kind):
    line = Line(blocks=dict.fromkeys(("p0", *STAGES), 2))
    line.start()
    ended = 0
    while True:
        works = [work for work in line.nodes[name].works.values() if isinstance(work, ComputeStage)]
        if works and ended == min(chunk, 2):
            break
        before = len([each for each, _ in line.computed if each == name])
        assert line.step()
        ended += len([each for each, _ in line.computed if each == name]) - before
    failed = (0,) if kind != "failed" else ()
    corrupt = (0,) if kind == "corrupt" else ()
    line.compute(name, WorkFailed("test") if kind == "failed" else StageComputed((), None, 0.01, failed, corrupt))
    line.run()
    (answer,) = line.first.take(AttemptFailed, "g")
    assert not answer.full
    assert line.first.one(HandoffFailed, "d")
    assert bool(line.nodes[name].take(ReportCorrupt, "c")) == (kind == "corrupt")
    assert not line.leftovers()
    line.start(attempt=2)
    asked = []
    while line.step():
        asked += [m for _, m in line.first.sent if isinstance(m, StartStage)]
    assert asked
    assert (asked[0].keys == ()) == (kind == "unreached"), "blocks out of reach are computed the next time"


def test_a_constraint_that_the_last_stage_cannot_follow_is_told_to_the_gateway():
    line = Line(("p1",))
    line.start()
    while not any(getattr(work.chunk, "sampling", None) for work in line.nodes["p1"].works.values()):
        assert line.step()
    line.compute("p1", WorkFailed("constraint: no token can follow", stuck=True))
    line.run()
    assert line.first.one(AttemptFailed, "g").stuck
    assert not line.leftovers()


def set_aside(line):
    """Everything is computed, and the last stage does not know in time what the first token may be."""
    line.start()
    last = line.nodes["p1"]
    while not any(getattr(getattr(work, "chunk", None), "sampling", None) for work in last.works.values()):
        assert line.step()
    ((work_id, work),) = last.works.items()
    first = work.chunk.start // B
    parts = tuple(part(first + index, layer) for index in range(len(work.chunk.outputs)) for layer in work.layers)
    last.done(work_id, StageComputed(parts, None, 0.01))
    line.settle()
    return last, last.work(SampleTokens)[0]


def test_a_last_stage_whose_first_token_waits_for_its_grammar_is_set_aside():
    line = Line(("p1",))
    last, sampling = set_aside(line)
    assert line.first.take(FirstToken, "g") == []
    assert last.actor.counts["jobs_set_aside"] == 1
    last.done(sampling, TokensSampled(((77, None),)))
    line.run()
    assert line.first.one(FirstToken, "g").token == 77
    line.received()
    assert not line.leftovers()


@pytest.mark.parametrize("stuck", [True, False])
def test_a_last_stage_whose_first_token_cannot_be_sampled_ends_the_attempt(stuck):
    line = Line(("p1",))
    last, sampling = set_aside(line)
    last.done(sampling, WorkFailed("constraint: not ready", stuck=stuck))
    line.run()
    failed = line.first.one(AttemptFailed, "g")
    assert failed.stuck is stuck
    assert "no first token: constraint: not ready" in failed.reason
    assert not line.leftovers()


def test_a_stage_that_ends_while_it_is_set_aside_stops_that_work():
    line = Line(("p1",))
    last, sampling = set_aside(line)
    line.first.say("g", CancelRequest(request_id="r", attempt=1))
    line.settle()
    assert last.cancelled == [sampling]
    last.done(sampling, WorkFailed("cancelled"))
    line.run()
    assert not line.leftovers()


def test_a_stage_without_room_says_so_and_holds_nothing():
    line = Line(("p1",))
    slots = line.nodes["p1"].actor.slots
    taken = [slots.reserve(None) for _ in range(9)]
    slots.pin(taken)
    slots.take_fences()
    checked, line.nodes["p1"].actor.check = line.nodes["p1"].actor.check, lambda now: None
    line.start()
    line.run()
    (answer,) = line.first.take(AttemptFailed, "g")
    assert answer.full
    assert answer.avoid == "p1"
    slots.unpin(taken)
    for slot in taken:
        slots.free(slot)
    checked(0.0)
    assert not line.leftovers()


def test_a_draining_stage_takes_no_part_and_ends_what_it_has():
    line = Line(("p1",))
    line.start()
    line.run(6)
    node = line.nodes["p1"]
    node.drain()
    assert not node.drained
    line.run()
    line.received()
    assert node.drained
    line.start(attempt=2)
    line.run()
    assert line.first.one(AttemptFailed, "g").full


def test_a_stage_whose_drain_ran_out_of_time_says_so_to_the_first_one():
    line = Line(("p1",))
    line.start()
    line.run(6)
    node = line.nodes["p1"]
    node.drain()
    node.run_out_of_drain()
    line.run()
    failed = line.first.one(AttemptFailed, "g")
    assert (failed.full, failed.avoid) == (True, "p1")
    assert node.drained


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        (("p1", "p1"), "no such pipeline"),
        (("p0",), "no such pipeline"),
        (("p1", "p2", "x"), "no such pipeline"),
        (("x",), "not reachable"),
    ],
)
def test_an_impossible_pipeline_is_refused(stages, reason):
    line = Line()
    line.start(stages=stages)
    (answer,) = line.first.take(AttemptFailed, "g")
    assert reason in answer.reason
    assert not line.leftovers()


def test_a_model_that_is_not_cut_refuses_pipelines():
    line = Line(layout=replace(LAYOUT, hidden_bytes=0))
    line.start()
    assert "not computed in stages" in line.first.one(AttemptFailed, "g").reason


def test_chunks_that_no_stage_could_report_are_refused_by_the_first_stage_and_by_a_later_one():
    """The prompt has 8 blocks, of 2^15 layers each: a stage of half of them can report 4 blocks, one of 2^13 layers all."""
    line = Line(("p1",), layout=replace(LAYOUT, layers=1 << 15), slab_bytes=1 << 30, chunk_tokens=10 * B)
    line.start()
    assert "too long for a pipeline" in line.first.one(AttemptFailed, "g").reason
    asked = {"attempt": 1, "tokens": 30, "chunk_tokens": 30, "keys": KEYS, "reuse_blocks": 0, "sources": (), "deadline_s": 60.0}
    for name, layers in (("fits", 1 << 13), ("too long", (1 << 13) + 1)):
        ask = StartStage(request_id=name, first_layer=1, stop_layer=1 + layers, sampling=Sampling(), **asked)
        line.nodes["p1"].say("p0", ask)
    (failed,) = line.nodes["p1"].take(StageFailed, "p0")
    assert (failed.request_id, failed.reason) == ("too long", "chunks are too long for a pipeline")


# --- messages twice, late, or wrong


def begun():
    """A stage that has been told of its first chunk, and what was said to it."""
    line = Line(("p1",))
    line.start()
    heard = []
    while not line.nodes["p1"].works:
        heard += [message for to, message in line.first.sent if to == "p1"]
        line.step()
    return line, heard


def test_messages_that_come_twice_change_nothing():
    line, heard = begun()
    node = line.nodes["p1"]
    start = next(message for message in heard if isinstance(message, StartStage))
    before = node.actor.dump(node.now)
    node.say("p0", start)
    assert node.actor.dump(node.now) == before
    line.first.say("p1", StageReady(request_id="r", attempt=1, blocks=0))
    line.run()
    assert done_of(line)
    line.received()
    for message in (EndStage(request_id="r", attempt=1), StageChunk(request_id="r", attempt=1, start=0, count=8, entering=())):
        node.say("p0", message)
    assert not line.leftovers()


@pytest.mark.parametrize(
    "changes",
    [{"start": 4}, {"count": 0}, {"count": 10}, {"start": 16, "count": 8}, {"entering": ()}],
    ids=lambda changes: ",".join(changes),
)
def test_a_chunk_out_of_order_ends_the_stage(changes):
    line, heard = begun()
    chunk = next(message for message in heard if isinstance(message, StageChunk))
    fields = {"start": 8, "count": 8, "entering": chunk.entering} | changes
    line.nodes["p1"].say("p0", StageChunk(request_id="r", attempt=1, **fields))
    assert "out of order" in line.nodes["p1"].one(StageFailed).reason
    line.compute("p1")
    assert not line.nodes["p1"].busy()


@pytest.mark.parametrize(
    "changes", [{"start": 8}, {"sources": ()}, {"parts": (1, 2)}, {"token": 5}], ids=lambda changes: ",".join(changes)
)
def test_a_stage_that_computed_something_else_ends_the_attempt(changes):
    line, _ = begun()
    line.compute("p1")
    done = line.nodes["p1"].one(StageDone)
    line.first.say("p1", StageDone(**({name: getattr(done, name) for name in done.__struct_fields__} | changes)))
    assert "something else" in line.first.one(AttemptFailed, "g").reason
    line.run()
    assert not line.leftovers()


def test_a_stage_obeys_its_leader_alone():
    line, _ = begun()
    node = line.nodes["p1"]
    node.up("p9", 2)
    node.say("p9", EndStage(request_id="r", attempt=1))
    node.say("p9", StageChunk(request_id="r", attempt=1, start=8, count=8, entering=()))
    line.run()
    assert done_of(line)


def test_a_newer_attempt_of_another_leader_ends_the_older_one():
    line, heard = begun()
    node = line.nodes["p1"]
    node.up("p9", 2)
    start = next(message for message in heard if isinstance(message, StartStage))
    fields = {name: getattr(start, name) for name in start.__struct_fields__}
    node.say("p9", StartStage(**(fields | {"attempt": 2})))
    line.run()
    assert "newer attempt" in line.first.one(AttemptFailed, "g").reason
    node.say("p0", start)
    assert node.one(StageFailed, "p0")
    node.say("p9", EndStage(request_id="r", attempt=2))
    line.run()
    assert not line.leftovers()


def test_leases_of_stages_and_jobs_are_told_apart():
    line = Line(("p1",), blocks={"p1": 2})
    line.start()
    node = line.nodes["p1"]
    while not any(isinstance(message, LeaseBlocks) for _, message in node.sent):
        line.step()
    (ask,) = node.take(LeaseBlocks)
    line.first.say("g", CancelRequest(request_id="r", attempt=1))
    line.run()
    node.say("c", BlocksLeased(lease_id=ask.lease_id, node="c", incarnation=7, slots=(1,), generations=(2,), checksums=(3,)))
    assert not line.leftovers()


def test_a_stage_whose_pool_was_not_heard_waits_for_what_the_plan_reuses():
    line = Line(("p1",), blocks={"p0": 2, "p1": 2})
    node = line.nodes["p1"]
    node.down("c")
    line.start(reuse_blocks=2)
    line.run()
    assert line.computed == []
    node.up("c", 7, host="h-p1")
    line.run()
    assert line.computed[0] == ("p0", 2 * B)
    line.received()
    assert not line.leftovers()


def test_a_stage_does_without_a_pool_that_is_not_heard():
    line = Line(("p1",), blocks={"p0": 2, "p1": 2})
    line.nodes["p1"].down("c")
    line.start(reuse_blocks=2)
    line.run()
    line.nodes["p1"].advance(1.0)
    line.run()
    assert line.computed[0] == ("p0", 0)
    line.received()
    assert not line.leftovers()


# --- the rule


def test_nobody_starts_before_its_input_is_there_or_its_buffer_is_free():
    """Every order in which stages may work ends with all done, and none overruns a buffer that is still to be read."""
    request = StartPrefill(
        request_id="r", attempt=1, tokens=pack_tokens(PROMPT), root=ROOT, keys=KEYS, first_index=0, sampling=Sampling(),
        stop=StopRule(max_tokens=9), decode="d", reuse_blocks=0, sources=(), deadline_s=60.0, stages=STAGES,
    )  # fmt: skip
    group = Group(request, LAYOUT, SETTINGS.chunk_tokens)
    group.plan(0)
    assert group.may_begin(0)
    assert not group.may_begin(1)
    assert not group.may_begin(2)
    assert group.room == 8 + BUFFERS * hidden_slots(LAYOUT, 8 + 1)
