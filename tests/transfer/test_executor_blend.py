"""A blended chunk on the live executor: its KV is what the engine makes of the parts, which are verified as any other block."""

import numpy as np
import pytest
from segment_bytes import slot_bytes
from test_executor import GREEDY, Rig

from mooncake_zmq.core.actor import OpenSequence
from mooncake_zmq.core.work import BlockLoad, ChunkComputed, ComputeChunk, ReusedPart, WorkFailed
from mooncake_zmq.engine import blend, weights
from mooncake_zmq.engine.blend import CACHEBLEND, moved_run, prefill_blended, read_kv, why_not
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.engine.toy import ToyEngine
from mooncake_zmq.kv.codec import CODECS, EXACT
from mooncake_zmq.kv.layout import BlockLayout

B = 16
RANDOM = np.random.default_rng(3)
SYSTEM, ONE, TWO, QUESTION = (RANDOM.integers(0, 500, count).astype(np.int32) for count in (2 * B, 3 * B, 2 * B, 7))
FIRST, SHUFFLED = np.concatenate((SYSTEM, ONE, TWO)), np.concatenate((SYSTEM, TWO, QUESTION, ONE, QUESTION))
BLOCKS = -(-len(SHUFFLED) // B)
PARTS = (ReusedPart(2 * B, 5 * B, BLOCKS, 2 * B), ReusedPart(4 * B + 7, 2 * B, BLOCKS + 2, 3 * B))
"""The blocks of TWO and then of ONE are loaded behind the prompt."""


@pytest.fixture
def family():
    return "llama"


@pytest.fixture
def model(family, tmp_path_factory):
    return prepare(f'dummy:{{"layers": 4, "family": "{family}"}}', tmp_path_factory.getbasetemp() / "blend")


@pytest.fixture
def codec():
    return EXACT


@pytest.fixture
def engine(model, codec):
    return weights.load_engine(model, codec=CODECS.get(codec))


@pytest.fixture
def rig(engine, codec, make_segment, crashes, tmp_path):
    spec = engine.spec
    layout = BlockLayout(layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, block_tokens=B).coded(codec)
    rig = Rig("p", make_segment("p", slots=24, layout=layout), crashes, tmp_path, engine=engine)
    yield rig
    rig.close()
    assert crashes == []


def computed_first(rig):
    """The committed blocks of FIRST."""
    rig.executor.open_sequence(OpenSequence(1, len(FIRST)))
    grants = rig.grants(*range(7))
    chunk = rig.result(rig.compute(1, 0, FIRST, outputs=grants))
    return rig.commit(grants, chunk.checksums)


def start_blended(rig, refs, again):
    """Start SHUFFLED behind SYSTEM; returns the work and the slots that it writes."""
    rig.executor.open_sequence(OpenSequence(2, (BLOCKS + 5) * B, filled_tokens=len(SHUFFLED)))
    outputs = rig.grants(*range(8, 8 + BLOCKS - 2))
    layers = rig.segment.layout.layers
    places = [*enumerate(refs[:2]), *enumerate([*refs[5:], *refs[2:5]], BLOCKS)]
    prefix = tuple(BlockLoad(block, ref, 0, layers, B) for block, ref in places)
    tokens = SHUFFLED[2 * B :].tobytes()
    return rig.start(ComputeChunk(2, 2 * B, tokens, prefix, outputs, GREEDY, 10.0, parts=PARTS, again=again)), outputs


def blended(rig, refs, again):
    """The result of SHUFFLED behind SYSTEM, with the KV that it wrote."""
    work_id, outputs = start_blended(rig, refs, again)
    result, layers = rig.result(work_id), rig.segment.layout.layers
    if rig.segment.layout.codec != EXACT:
        return result, [[rig.segment.part_view(grant.slot, layer).copy() for grant in outputs] for layer in range(layers)]
    parts = [[rig.segment.part_view(grant.slot, layer).copy() for grant in outputs] for layer in range(layers)]
    kv = np.stack([np.concatenate(each, axis=1) for each in parts])[:, :, : len(SHUFFLED) - 2 * B]
    return result, kv


def test_with_everything_computed_again_it_is_what_a_prefill_gives(rig, engine):
    sequence = engine.new_sequence(len(SHUFFLED))
    logits = engine.prefill(sequence, SHUFFLED)
    result, kv = blended(rig, computed_first(rig), 1.0)
    assert isinstance(result, ChunkComputed)
    assert result.token == int(logits[-1].argmax())
    assert result.recomputed == 5 * B
    np.testing.assert_allclose(kv, read_kv(engine, sequence, 2 * B, len(SHUFFLED)), atol=2e-5)


def test_it_reuses_the_parts_at_their_places_and_computes_a_share_of_them_again(rig, engine):
    sequence, alone = engine.new_sequence(len(SHUFFLED)), engine.new_sequence(len(FIRST))
    engine.prefill(alone, FIRST)
    engine.prefill(sequence, SYSTEM)
    places = [(part.computed_at, part.at, part.tokens) for part in PARTS]
    reused = [moved_run(read_kv(engine, alone, at, at + count), here, at) for at, here, count in places]
    expected = prefill_blended(engine, sequence, SHUFFLED[2 * B :], reused)
    result, kv = blended(rig, computed_first(rig), CACHEBLEND.share)
    assert result.token == int(expected.logits.argmax())
    assert result.recomputed == round(CACHEBLEND.share * 5 * B)
    np.testing.assert_allclose(kv, read_kv(engine, sequence, 2 * B, len(SHUFFLED)), atol=2e-5)


def test_a_part_that_changed_fails_the_chunk_by_its_block(rig):
    refs = computed_first(rig)
    slot_bytes(rig.segment, refs[3].slot)[5] ^= 1
    result, _ = blended(rig, refs, 0.15)
    assert result.corrupt == (BLOCKS + 3,)
    assert result.token is None


@pytest.mark.parametrize(
    ("codec", "family", "most_others"), [("int8", "llama", 0), ("int4", "llama", 0), ("int8", "qwen2", 0.01)]
)
def test_parts_of_a_codec_are_used_as_their_blocks_hold_them(rig, engine, codec, most_others):
    """With offsets they are taken off and added once more on the way: few codes may be the next ones."""
    spec, alone = engine.spec, engine.new_sequence(len(FIRST))
    engine.prefill(alone, FIRST)
    loaded = engine.new_sequence(len(SHUFFLED))
    part = np.empty((B, CODECS[codec].token_bytes(spec.kv_heads, spec.head_dim)), np.uint8)
    for layer in range(spec.layers):
        for start in range(0, len(FIRST), B):
            alone.read_part(layer, start, start + B, part)
            loaded.write_part(layer, start, part)
    loaded.set_length(len(FIRST))
    reused = [moved_run(read_kv(engine, loaded, p.computed_at, p.computed_at + p.tokens), p.at, p.computed_at) for p in PARTS]
    loaded.set_length(2 * B)
    expected = prefill_blended(engine, loaded, SHUFFLED[2 * B :], reused)
    result, parts = blended(rig, computed_first(rig), CACHEBLEND.share)
    assert result.token == int(expected.logits.argmax())
    for layer, row in enumerate(parts):
        for block, got in enumerate(row[:-1], 2):
            loaded.read_part(layer, block * B, (block + 1) * B, part)
            assert (got != part).mean() <= most_others


def test_it_ends_between_its_chunks_where_it_is_cancelled(rig, engine, monkeypatch):
    monkeypatch.setattr(blend, "CHUNK_ROWS", B)
    refs, rows, computed = computed_first(rig), engine.prefill_rows, []

    def cancelled(*arguments):
        computed.append(arguments)
        rig.executor.cancel(rig.next_id)
        return rows(*arguments)

    monkeypatch.setattr(engine, "prefill_rows", cancelled)
    work_id, _ = start_blended(rig, refs, CACHEBLEND.share)
    assert rig.result(work_id) == WorkFailed("cancelled")
    assert len(computed) == 1


def test_engines_that_cannot_are_refused(engine):
    assert why_not(engine) == ""
    assert "ToyEngine" in why_not(ToyEngine())
