"""Few tokens of a prompt kept: which ones, and that a decode goes on over them as if there had never been others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.core.messages import Eviction
from mooncake_zmq.core.selection import SINKS
from mooncake_zmq.engine import eviction as module
from mooncake_zmq.engine.eviction import ONE, AttentionSums, attention_received, evict, kept_tokens, sinks_and_recent
from mooncake_zmq.engine.kv_cache import KEY_TILE
from mooncake_zmq.engine.selection.few_of_many import FewOfMany
from mooncake_zmq.engine.toy import ToyEngine

RECENT = Eviction(kind="recent", kept=40)
ELASTIC = Eviction(kind="elastic", kept=40)
PROMPT = np.random.default_rng(4).integers(0, 500, 150).astype(np.int32)


@pytest.fixture
def engine(qwen):
    return qwen


def weights_of(queries, keys, positions):
    """Softmax of all queries over all tokens up to their own [kv_head, n, group, token], as one matrix."""
    scores = np.einsum("hngd,htd->hngt", queries, keys)
    scores = np.where(np.arange(keys.shape[1]) > positions[:, None, None], -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    return weights / weights.sum(axis=3, keepdims=True)


@given(seed=st.integers(0, 999), count=st.integers(1, 40), before=st.integers(0, 90), items=st.sampled_from([1, 300, 1 << 20]))
@settings(max_examples=30)
def test_attention_is_summed_as_one_matrix_would_be_in_little_memory(seed, count, before, items):
    rng, heads, group, dim = np.random.default_rng(seed), 2, 3, 8
    queries = rng.standard_normal((heads, count, group, dim)).astype(np.float32)
    tokens = before + count
    keys = rng.standard_normal((heads, tokens, dim)).astype(np.float32)
    tiles = -(-tokens // KEY_TILE)
    padded = np.full((heads, tiles * KEY_TILE, dim), np.nan, np.float32)
    padded[:, :tokens] = keys
    tiled = padded.reshape(heads, tiles, KEY_TILE, dim).transpose(0, 1, 3, 2)
    positions = np.arange(before, tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SCORES_ITEMS", items)
        found = attention_received(queries, tiled, positions)
    whole = weights_of(queries, keys, positions).sum(axis=(0, 1, 2))
    np.testing.assert_allclose(found / ONE, whole, rtol=1e-4, atol=2 * count * heads / ONE)


def test_what_a_prompt_attends_to_does_not_depend_on_its_chunks_and_is_that_of_its_queries(engine):
    sums = []
    for chunks in ([150], [64, 64, 22], [1, 149]):
        sequence = engine.new_sequence(150)
        found, at, seen = AttentionSums(engine.spec.layers, 150), 0, set()

        def on_rows(layer, queries, positions, sequence=sequence, found=found, seen=seen):
            seen |= {(layer, int(each)) for each in positions}
            found.add(layer, sequence.keys[layer], queries, positions)

        for count in chunks:
            engine.prefill(sequence, PROMPT[at : at + count], logits_at=None, on_rows=on_rows)
            at += count
        assert seen == {(layer, at) for layer in range(engine.spec.layers) for at in range(150)}
        heads = engine.spec.heads
        np.testing.assert_allclose(found.by_layer.sum(axis=1) / ONE, 150 * heads, rtol=1e-4)
        sums.append(found.by_layer)
    for other in sums[1:]:
        np.testing.assert_allclose(other / ONE, sums[0] / ONE, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("eviction", [RECENT, ELASTIC, ELASTIC.behind(7)])
def test_the_first_and_the_last_always_stay(eviction):
    received = np.random.default_rng(1).integers(0, 1 << 40, 150)
    kept = kept_tokens(eviction, 150, received if eviction.kind == "elastic" else None)
    assert len(kept) == len(set(kept.tolist())) == eviction.kept
    assert sorted(kept) == kept.tolist()
    assert {*range(SINKS), *range(150 - eviction.last, 150)} <= set(kept.tolist())
    if eviction.kind == "elastic":
        others = set(range(150)) - set(kept.tolist())
        chosen = [at for at in kept.tolist() if SINKS <= at < 150 - eviction.last]
        assert min(received[chosen]) >= max(received[list(others)])


def test_a_decode_goes_on_over_sinks_and_recent_tokens_as_if_it_had_forgotten_the_others(engine):
    sequence = engine.new_sequence(160)
    engine.prefill(sequence, PROMPT)
    few = FewOfMany(sequence, None, 0, following=10, recent=RECENT.kept - SINKS + 1)
    expected = engine.decode_over([few], np.array([7], np.int32))
    whole, other = engine.new_sequence(160), engine.new_sequence(160)
    engine.prefill(whole, PROMPT)
    engine.prefill(other, PROMPT[:99])
    exact = engine.decode([whole, other], np.array([7, 8], np.int32))
    evict(sequence, RECENT, None)
    assert (sequence.length, sequence.dropped, sequence.position) == (40, 110, 150)
    other.set_length(99)
    found = engine.decode([other, sequence], np.array([8, 7], np.int32))
    np.testing.assert_allclose(found[1], expected[0], rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(found[0], exact[1], rtol=2e-3, atol=2e-4)
    assert np.abs(found[1] - exact[0]).max() > 1e-3
    assert (sequence.length, sequence.position) == (41, 151)


def test_each_layer_keeps_what_is_attended_to_there_bit_for_bit(engine):
    spec, sequence = engine.spec, engine.new_sequence(150)
    engine.prefill(sequence, PROMPT)
    sums = AttentionSums(spec.layers, 150)
    sums.by_layer[:] = np.random.default_rng(2).integers(0, 1 << 40, (spec.layers, 150))
    before = np.empty((spec.layers, 2, 150, spec.kv_heads, spec.head_dim), np.float32)
    for layer in range(spec.layers):
        sequence.read_part(layer, 0, 150, before[layer])
    evict(sequence, ELASTIC, sums)
    after = np.empty((2, 40, spec.kv_heads, spec.head_dim), np.float32)
    for layer in range(spec.layers):
        sequence.read_part(layer, 0, 40, after)
        np.testing.assert_array_equal(after, before[layer][:, kept_tokens(ELASTIC, 150, sums.by_layer[layer])])


def test_an_answer_is_the_same_when_it_goes_on_from_its_tokens_so_far():
    """With the toy engine, whose choice and KV are the same whatever follows them."""
    toy, tokens = ToyEngine(), PROMPT.tolist()
    for eviction in (RECENT, ELASTIC):
        answer = [5]
        for resumed_at in (None, 3):
            sequence = toy.new_sequence(200)
            so_far = answer[:resumed_at] if resumed_at else [5]
            prompt = np.array([*tokens, *so_far[:-1]], np.int32)
            toy.prefill(sequence, prompt)
            own = eviction.behind(len(so_far) - 1)
            sums = AttentionSums(toy.spec.layers, len(prompt)) if eviction.kind == "elastic" else None
            evict(sequence, own, sums)
            made = list(so_far)
            while len(made) < 8:
                made.append(int(toy.decode([sequence], np.array(made[-1:], np.int32))[0].argmax()))
            assert resumed_at is None or made == answer
            answer = made


def test_a_window_has_so_many_tokens_in_all():
    assert sinks_and_recent(20, 6).tolist() == [0, 1, 2, 3, 18, 19]
    assert not Eviction(kind="recent", kept=4).fits(20), "nothing but sinks"
    assert not Eviction(kind="recent", kept=20).fits(20), "nothing goes"
    assert Eviction(kind="recent", kept=5).fits(20)
