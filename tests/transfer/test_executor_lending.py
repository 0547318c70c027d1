"""A sequence in several executors: its tokens are those of one that has it all, and what is taken back is asked for no more."""

import numpy as np
import pytest
from test_executor import GREEDY, Rig

from mooncake_zmq.core.actor import OpenSequence
from mooncake_zmq.core.work import (
    BlockLoad,
    BorrowParts,
    DecodeStep,
    Done,
    LendSequence,
    LentPart,
    PullBlocks,
    SequenceLent,
    StepEntry,
    TakeBack,
    WorkFailed,
)
from mooncake_zmq.engine import weights
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.engine.toy import ToyEngine
from mooncake_zmq.kv.codec import CODECS
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.runtime.executor.lending import Lending, why_not

B, STEPS = 16, 6
PROMPT = np.random.default_rng(3).integers(0, 500, 5 * B + 7).astype(np.int32)
LENDERS = {"d1": range(2), "d2": range(2, 3)}
"""The blocks that each holds; the borrower has those from the fourth on."""
ENDPOINT = "tcp://127.0.0.1:0"
LONG_S = 20.0


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return prepare('dummy:{"layers": 2}', tmp_path_factory.mktemp("lending"))


@pytest.fixture
def engine(model):
    return weights.load_engine(model)


@pytest.fixture
def rigs(engine, make_segment, crashes, tmp_path):
    spec = engine.spec
    layout = BlockLayout(layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, block_tokens=B)
    endpoints = dict.fromkeys(("me", *LENDERS), ENDPOINT)

    def lending(crash):
        return Lending(engine, ENDPOINT, endpoints, sealed=True, timeout_s=LONG_S, on_crash=crash)

    rigs = {
        name: Rig(name, make_segment(name, slots=8, layout=layout), crashes, tmp_path, engine=engine, lending=lending)
        for name in ("p", "me", *LENDERS)
    }
    for name in endpoints:
        rigs[name].meet(rigs["p"])
    yield rigs
    for rig in rigs.values():
        rig.close()
    assert crashes == []


@pytest.fixture
def prefilled(rigs, engine):
    """The blocks of PROMPT in the slab of a prefill, its first token, and those that follow."""
    rig = rigs["p"]
    rig.executor.open_sequence(OpenSequence(1, len(PROMPT) + STEPS))
    grants = rig.grants(*range(6))
    chunk = rig.result(rig.compute(1, 0, PROMPT, outputs=grants, sampling=GREEDY))
    refs = rig.commit(grants, chunk.checksums)
    tokens = [chunk.token]
    for position in range(len(PROMPT), len(PROMPT) + STEPS):
        step = rig.run(DecodeStep((StepEntry(1, tokens[-1], position, GREEDY),)))
        tokens.append(step.tokens[0][0])
    return refs, tokens


def pull(rig, sequence, refs):
    layers = rig.segment.layout.layers
    sizes = [min(B, len(PROMPT) - ref.slot * B) for ref in refs]
    loads = [BlockLoad(place, ref, 0, layers, size) for place, (ref, size) in enumerate(zip(refs, sizes, strict=True))]
    assert not rig.run(PullBlocks(sequence, tuple(loads))).failed


def lend(rig, refs):
    rig.executor.open_sequence(OpenSequence(7, len(refs) * B))
    lent = rig.run(LendSequence(7))
    assert isinstance(lent, SequenceLent)
    pull(rig, 7, refs)
    return LentPart(rig.name, lent.place, len(refs) * B)


def borrow(rigs, refs, sequence=1):
    parts = tuple(lend(rigs[name], [refs[block] for block in blocks]) for name, blocks in LENDERS.items())
    rigs["me"].executor.open_sequence(OpenSequence(sequence, len(PROMPT) - 3 * B + STEPS))
    assert rigs["me"].run(BorrowParts(sequence, parts)) == Done()
    pull(rigs["me"], sequence, refs[3:])
    return parts


def whole(rigs, refs, sequence=2):
    rigs["me"].executor.open_sequence(OpenSequence(sequence, len(PROMPT) + STEPS))
    pull(rigs["me"], sequence, refs)


def step(rigs, made, tokens, sequences=(1, 2), steps=1, lenders_s=LONG_S):
    entries = tuple(StepEntry(each, tokens[made], len(PROMPT) + made, GREEDY) for each in sequences)
    return rigs["me"].run(DecodeStep(entries, steps, lenders_s))


def test_tokens_are_those_of_a_sequence_that_is_all_here(rigs, prefilled):
    refs, tokens = prefilled
    borrow(rigs, refs)
    whole(rigs, refs)
    for made in range(3):
        assert step(rigs, made, tokens).tokens == ((tokens[made + 1],) * 2,)
    assert step(rigs, 3, tokens, steps=3).tokens == tuple((token,) * 2 for token in tokens[4:])


def test_a_lender_that_took_back_fails_the_row_alone_and_frees_its_memory(rigs, prefilled):
    refs, tokens = prefilled
    borrow(rigs, refs)
    whole(rigs, refs)
    assert step(rigs, 0, tokens).tokens == ((tokens[1],) * 2,)
    assert rigs["d1"].run(TakeBack(7)) == Done()
    rigs["d1"].executor.close_sequence(7)
    result = step(rigs, 1, tokens)
    ((row, failure),) = result.failed
    assert (row, failure.stuck, failure.avoid) == (0, False, "d1")
    assert result.tokens[0][1] == tokens[2]
    assert step(rigs, 2, tokens, sequences=(2,)).tokens == ((tokens[3],),)


def test_a_step_goes_on_without_a_row_whose_lender_stands_still_and_has_it_again(rigs, prefilled):
    refs, tokens = prefilled
    borrow(rigs, refs)
    whole(rigs, refs)
    assert step(rigs, 0, tokens).tokens == ((tokens[1],) * 2,)
    with rigs["d1"].executor._lending._host._lock:
        result = step(rigs, 1, tokens, steps=3, lenders_s=0.1)
        assert (result.tokens, result.late, result.failed) == (((0, tokens[2]),), ((0, "d1"),), ())
        assert step(rigs, 2, tokens, sequences=(2,)).tokens == ((tokens[3],),)
    late = (True,)
    while late:  # until what it owes has come
        result = step(rigs, 1, tokens, sequences=(1,))
        late = result.late
    assert result.tokens == ((tokens[2],),)
    assert step(rigs, 2, tokens, sequences=(1,)).tokens == ((tokens[3],),)


def test_a_lender_that_is_gone_is_not_connected(rigs, prefilled):
    refs, _ = prefilled
    part = lend(rigs["d1"], refs[:2])
    rigs["d1"].executor.close()
    rigs["me"].executor.open_sequence(OpenSequence(1, len(PROMPT)))
    result = rigs["me"].run(BorrowParts(1, (part,)))
    assert isinstance(result, WorkFailed)
    assert result.avoid == "d1"


def test_a_stream_that_ends_leaves_the_lender_its_memory(rigs, prefilled):
    """A copy may be under way into it."""
    refs, tokens = prefilled
    borrow(rigs, refs)
    assert not step(rigs, 0, tokens, sequences=(1,)).failed
    rigs["me"].executor.close_sequence(1)
    for _ in range(8):
        pull(rigs["d1"], 7, refs[:2])
    assert rigs["d1"].run(TakeBack(7)) == Done()


def test_engines_that_compute_no_parts_are_refused(engine, model):
    assert why_not(engine) == ""
    assert "ToyEngine" in why_not(ToyEngine())
    assert "exact" in why_not(weights.load_engine(model, codec=CODECS["int8"]))
