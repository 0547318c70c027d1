"""Attention over few of many tokens: exact where all are chosen, and nothing else read from far than what was chosen."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_zmq.core.selection import Selection
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.machine_code.few_kernels import _weigh_pairs, choose
from mooncake_zmq.engine.machine_code.step_layout import BUCKETS
from mooncake_zmq.engine.selection.exact_keys import ExactKeys
from mooncake_zmq.engine.selection.few_of_many import FewOfMany
from mooncake_zmq.engine.selection.kinds import selected
from mooncake_zmq.engine.selection.product_codes import ProductCodes, k_means, nearest
from mooncake_zmq.engine.selection.quest import Quest
from mooncake_zmq.engine.selection.sizes import BLOCK_TOKENS, CENTROIDS

SELECTORS = [ExactKeys, ProductCodes, Quest]
LAYERS, KV_HEADS, GROUP, DIM = 2, 3, 2, 8


@pytest.fixture
def engine(qwen):
    return qwen


def floats(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def filled(rng, length):
    """A sequence, and its keys and values [layer, k/v, token, kv_head, head_dim]."""
    source = SequenceKV(layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, capacity_tokens=length)
    kv = floats(rng, LAYERS, 2, length, KV_HEADS, DIM)
    for layer in range(LAYERS):
        source.store(layer, 0, *kv[layer])
    source.set_length(length)
    return source, kv


def chosen_from(selector, chosen, rng, length=150, following=40):
    """What attends to few tokens of a sequence, which is poisoned; and its KV."""
    source, kv = filled(rng, length)
    few = FewOfMany(source, selector(LAYERS, KV_HEADS, DIM, length + following), chosen, following=following, sinks=3, recent=9)
    source.keys[...] = source.values[...] = np.nan
    return few, kv


@pytest.mark.parametrize("selector", SELECTORS)
def test_all_tokens_chosen_give_exact_attention(engine, selector):
    spec, rng = engine.spec, np.random.default_rng(1)
    sequences = [engine.new_sequence(120) for _ in range(2)]
    for sequence in sequences:
        engine.prefill(sequence, rng.integers(0, 500, 100).astype(np.int32))
    few = []
    for sequence in sequences:
        choice = selector(spec.layers, spec.kv_heads, spec.head_dim, 120)
        few.append(FewOfMany(sequence, choice, 101 - 36, following=20))
    tokens = np.array([7, 8], np.int32)
    np.testing.assert_allclose(engine.decode_over(few, tokens), engine.decode(sequences, tokens), rtol=2e-3, atol=2e-4)
    assert [each.length for each in few] == [101, 101]


def test_a_sequence_in_the_same_step_attends_to_all_of_its_own_kv(engine):
    rng = np.random.default_rng(1)
    sequences = [engine.new_sequence(120) for _ in range(3)]
    for sequence in sequences:
        engine.prefill(sequence, rng.integers(0, 500, 100).astype(np.int32))
    few = selected(sequences[1], Selection("kcache", 20))
    tokens = np.array([7, 8, 9], np.int32)
    mixed = engine.decode_over([sequences[0], few, sequences[2]], tokens)
    assert [each.length for each in (*sequences, few)] == [101, 100, 101, 101]
    for sequence in sequences:
        sequence.set_length(100)
    exact = engine.decode(sequences, tokens)
    np.testing.assert_allclose(mixed[[0, 2]], exact[[0, 2]], rtol=2e-3, atol=2e-4)
    assert np.abs(mixed[1] - exact[1]).max() > 1e-3


def test_what_fails_in_a_layer_fails_the_step(engine):
    class Failing:
        position = length = 3
        capacity = 4

        def attend(self, layer, queries, keys, values):
            raise KeyError(layer)

    failing = Failing()
    with pytest.raises(KeyError, match="0"):
        engine.decode_over([failing], np.array([1], np.int32))
    assert failing.length == 3


def test_a_full_one_is_refused(engine):
    source = engine.new_sequence(50)
    engine.prefill(source, np.arange(50, dtype=np.int32))
    few = FewOfMany(source, None, 0, following=1)
    engine.decode_over([few], np.array([1], np.int32))
    with pytest.raises(ValueError, match="capacity"):
        engine.decode_over([few], np.array([1], np.int32))


@pytest.mark.parametrize("selector", SELECTORS)
@given(seed=st.integers(0, 99), chosen=st.integers(1, 60))
@settings(max_examples=10)
def test_each_step_attends_to_what_was_chosen_and_to_the_first_and_last_tokens(selector, seed, chosen):
    """Everything else is poisoned: the sequence that it began with, and in every step the far rows that were not chosen."""
    rng = np.random.default_rng(seed)
    few, kv = chosen_from(selector, chosen, rng)
    before = {}
    for _ in range(25):
        new = floats(rng, LAYERS, 2, 1, KV_HEADS, DIM)
        kv = np.concatenate((kv, new), axis=2)
        for layer in range(LAYERS):
            queries = floats(rng, KV_HEADS, GROUP, DIM)
            kept, fetched, select, seen = few.far[layer].copy(), few.fetched_bytes, few.select, []

            def poisoning(layer, queries, far_tokens, select=select, seen=seen, kept=kept):
                found, weighed = select(layer, queries, far_tokens)
                seen.append(found)
                unseen = np.ones(len(few.far[layer]), bool)
                unseen[found + few._heads] = False
                kept[:] = few.far[layer]  # with the token that left the window
                few.far[layer][unseen] = np.nan
                return found, weighed

            few.select = poisoning
            out = few.attend(layer, queries, new[layer, 0, 0], new[layer, 1, 0]).reshape(KV_HEADS, GROUP, DIM)
            few.select, few.far[layer] = select, kept
            (found,) = seen
            assert found.shape == (KV_HEADS, chosen)
            tokens = [[*range(3), *sorted(each + 3), *range(few.length - 8, few.length + 1)] for each in found]
            assert all(len(set(each)) == 12 + chosen for each in tokens)
            for head, own in enumerate(tokens):
                keys, values = kv[layer, :, own, head].transpose(1, 0, 2)
                weights = np.exp(queries[head] @ keys.T)
                np.testing.assert_allclose(
                    out[head], weights @ values / weights.sum(axis=1, keepdims=True), rtol=1e-4, atol=1e-5
                )
            fresh = {(head, token) for head, each in enumerate(found) for token in each.tolist()}
            moved = len(fresh - before.get(layer, set())) * 2 if not few.selector.exact else len(fresh)
            assert few.fetched_bytes - fetched == 4 * DIM * moved
            before[layer] = fresh
        few.length += 1
    rows = 1 if few.selector.exact else 2
    assert few.stored_bytes == 25 * LAYERS * KV_HEADS * DIM * 4 * rows


def test_without_a_selector_other_tokens_are_forgotten():
    rng = np.random.default_rng(2)
    source, kv = filled(rng, 40)
    few = FewOfMany(source, None, 0, following=1, sinks=3, recent=9)
    source.keys[...] = source.values[...] = np.nan
    queries, new = floats(rng, KV_HEADS, GROUP, DIM), floats(rng, 2, KV_HEADS, DIM)
    kept = np.concatenate((kv[0, :, :3], kv[0, :, 32:], new[:, None]), axis=1)
    weights = np.exp(queries @ kept[0].transpose(1, 2, 0))
    expected = weights @ kept[1].transpose(1, 0, 2) / weights.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(few.attend(0, queries, *new), expected.reshape(-1), rtol=1e-5, atol=1e-6)
    assert few.fetched_bytes == few.far.nbytes == 0


def test_the_exact_choice_has_the_largest_weights():
    rng = np.random.default_rng(3)
    few, kv = chosen_from(ExactKeys, 20, rng)
    queries = floats(rng, KV_HEADS, GROUP, DIM)
    found, weighed = few.select(1, queries, 138)
    exact = queries @ kv[1, 0, 3:-9].transpose(1, 2, 0)
    weights = np.exp(exact)
    matter = (weights / weights.sum(axis=2, keepdims=True)).sum(axis=1)
    assert [set(each) for each in found] == [set(each) for each in np.argsort(matter)[:, -20:]]
    np.testing.assert_allclose(weighed.scores, exact, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.exp(weighed.total), weights.sum(axis=2, keepdims=True), rtol=1e-4)


def test_by_values_large_ones_are_chosen_and_their_mean_stands_for_the_others():
    rng = np.random.default_rng(8)
    source, kv = filled(rng, 60)
    few = FewOfMany(source, ExactKeys(LAYERS, KV_HEADS, DIM, 61), 20, following=1, sinks=3, recent=9, values=True)
    new, queries = floats(rng, 2, KV_HEADS, DIM), floats(rng, KV_HEADS, GROUP, DIM)
    keys, values = np.concatenate((kv[1], new[:, None]), axis=1).transpose(0, 2, 1, 3)
    weights = np.exp(queries @ keys.transpose(0, 2, 1))
    means = values[:, 3:-9].mean(axis=1)
    out = few.attend(1, queries, *new).reshape(KV_HEADS, GROUP, DIM)
    found = few.select(1, queries, 49)[0] + 3
    matter = (weights / weights[:, :, 3:52].sum(axis=2, keepdims=True)).sum(axis=1) * np.linalg.norm(values, axis=2)
    assert [set(each) for each in found] == [set(each) for each in 3 + np.argsort(matter[:, 3:52])[:, -20:]]
    for head in range(KV_HEADS):
        others = np.setdiff1d(np.arange(3, 52), found[head])
        values[head, others] = means[head]
    np.testing.assert_allclose(out, weights @ values / weights.sum(axis=2, keepdims=True), rtol=1e-4, atol=1e-5)


@given(seed=st.integers(0, 99), pieces=st.lists(st.integers(1, 40), min_size=1, max_size=6))
@settings(max_examples=20)
def test_the_bound_of_a_block_is_above_all_its_scores(seed, pieces):
    rng = np.random.default_rng(seed)
    quest, keys = Quest(LAYERS, KV_HEADS, DIM, sum(pieces)), floats(rng, sum(pieces), KV_HEADS, DIM)
    for first, count in zip(np.cumsum(pieces) - pieces, pieces, strict=True):
        quest.add(1, first, keys[first : first + count])
    queries = floats(rng, KV_HEADS, GROUP, DIM)
    bounds, scores = quest.bounds(1, queries, len(keys)), queries @ keys.transpose(1, 2, 0)
    assert bounds.shape[2] == -(-len(keys) // BLOCK_TOKENS)
    assert (np.repeat(bounds, BLOCK_TOKENS, axis=2)[:, :, : len(keys)] >= scores - 1e-4).all()
    assert quest.weigh(1, queries, len(keys)).matter.shape == (KV_HEADS, len(keys))


def test_codes_name_the_nearest_centroids_and_stand_for_the_keys():
    """The score of a code differs from the exact one by no more than its key differs from the centroids, times the query."""
    rng = np.random.default_rng(4)
    codes, keys = ProductCodes(LAYERS, KV_HEADS, DIM, 220), floats(rng, 220, KV_HEADS, DIM)
    codes.add(0, 0, keys[:200])
    made = codes.centroids.copy()
    for at in range(200, 220):
        codes.add(0, at, keys[at : at + 1])
    assert (codes.centroids == made).all(), "later keys change no centroid"
    halves = np.stack((codes.codes[0] // CENTROIDS, codes.codes[0] % CENTROIDS))  # [half, kv_head, token]
    meant = np.concatenate([[made[0, head, half][halves[half, head]] for head in range(KV_HEADS)] for half in (0, 1)], axis=2)
    for half, numbers in enumerate(np.split(keys.transpose(1, 0, 2), 2, axis=2)):
        distances = ((numbers[:, :, None] - made[0, :, half, None]) ** 2).sum(axis=3)
        assert (distances.argmin(axis=2) == halves[half]).all()
    queries = floats(rng, KV_HEADS, GROUP, DIM)
    scores, exact = (queries @ each.transpose(0, 2, 1) for each in (meant, keys.transpose(1, 0, 2)))
    bound = np.linalg.norm(queries, axis=2)[:, :, None] * np.linalg.norm(meant - keys.transpose(1, 0, 2), axis=2)[:, None]
    assert (np.abs(scores - exact) <= bound + 1e-4).all()
    weights = np.exp(scores)
    weighed = codes.weigh(0, queries, 220)
    np.testing.assert_allclose(weighed.matter, (weights / weights.sum(axis=2, keepdims=True)).sum(axis=1), rtol=1e-4)
    np.testing.assert_allclose(np.exp(weighed.total), weights.sum(axis=2, keepdims=True), rtol=1e-4)
    found = np.tile([5, 0, 219], (KV_HEADS, 1))
    share = weights[:, :, [5, 0, 219]].sum(axis=2, keepdims=True) / weights.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(weighed.share(found), share, rtol=1e-4)


def test_scores_far_apart_leave_numbers():
    codes = ProductCodes(1, 1, 2, 200)
    codes.add(0, 0, np.linspace(-300, 300, 400, dtype=np.float32).reshape(200, 1, 2))
    matter, total, *_ = codes.weigh(0, np.array([[[50, -50]]], np.float32), 200)
    assert np.isfinite(total).all()
    assert np.isfinite(matter).all()
    assert matter.sum() == pytest.approx(1, rel=1e-3)


def test_a_pair_of_centroids_that_no_key_has_hides_no_other_in_machine_code():
    pairs, state = np.full(CENTROIDS**2, -300, np.float32), np.zeros(2, np.float32)
    counts = np.zeros(len(pairs), np.int64)
    pairs[:3], counts[1:3] = (300, 1, 0), (2, 1)
    _weigh_pairs(pairs, counts, state)
    np.testing.assert_allclose(pairs[1:3], np.exp([0, -1]), rtol=1e-5)
    np.testing.assert_allclose(state, [1, 2 + np.exp(-1)], rtol=1e-5)


@given(seed=st.integers(0, 999), count=st.integers(1, 300), levels=st.integers(1, 300))
@settings(max_examples=50)
def test_machine_code_chooses_the_largest_and_of_equal_ones_the_earliest(seed, count, levels):
    rng = np.random.default_rng(seed)
    matter = (rng.integers(0, levels, count) * 10.0 ** rng.integers(-30, 30)).astype(np.float32)
    chosen = int(rng.integers(1, count + 1))
    found = np.empty(count + chosen + 1, np.int64)
    choose(matter, count, chosen, found, np.empty(BUCKETS, np.int64))
    assert sorted(found[:chosen]) == sorted(np.argsort(-matter, kind="stable")[:chosen])


def test_centroids_are_closer_than_those_they_began_with_and_few_points_suffice():
    points = floats(np.random.default_rng(5), 500, 4)
    begun = points[np.linspace(0, 499, CENTROIDS).astype(int)]

    def error(centroids):
        return ((points - centroids[nearest(points, centroids)]) ** 2).sum()

    assert error(k_means(points)) < 0.8 * error(begun)
    assert k_means(points[:3]).shape == (CENTROIDS, 4)
    assert np.isfinite(k_means(np.zeros((5, 4), np.float32))).all()


@pytest.mark.parametrize("chosen", [-1, 150])
def test_more_tokens_than_there_are_cannot_be_chosen(chosen):
    with pytest.raises(ValueError, match="no choice"):
        chosen_from(Quest, chosen, np.random.default_rng(6))


def test_what_is_near_is_counted():
    rng = np.random.default_rng(7)
    (exact, _), (codes, _) = (chosen_from(each, 6, rng) for each in (ExactKeys, ProductCodes))
    row = LAYERS * KV_HEADS * DIM * 4
    assert exact.whole_bytes() == codes.whole_bytes() == 2 * row * 150
    assert exact.near_bytes() == row * (138 + 2 * 12) + 6 * row // LAYERS, "keys, the window, and one layer's chosen values"
    held = LAYERS * KV_HEADS * 6 * 8 + KV_HEADS * (150 + 40 - 12)
    assert codes.near_bytes() == 2 * row * (12 + 6) + held + LAYERS * KV_HEADS * 2 * 138 + CENTROIDS * row


class InNumpy:
    """A sequence of few tokens whose attention is called, on any engine. Of tokens that matter as much the earliest are chosen,
    as machine code does; without that any may be."""

    def __init__(self, few):
        self.few, self.capacity = few, few.capacity
        self._select = few.select
        few.select = self._earliest

    def _earliest(self, layer, queries, far_tokens):
        few, (_, weighed) = self.few, self._select(layer, queries, far_tokens)
        matter = weighed.matter * (few.norms[layer, :, :far_tokens] if len(few.norms) else 1)
        return np.argsort(-matter, axis=1, kind="stable")[:, : few.chosen], weighed

    @property
    def position(self):
        return self.few.position

    @property
    def length(self):
        return self.few.length

    @length.setter
    def length(self, length):
        self.few.length = length

    def attend(self, *layer_and_token):
        return self.few.attend(*layer_and_token)


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("selector", [*SELECTORS, None])
@pytest.mark.parametrize("qwen", ["compiled", "compiled, 2 threads"], indirect=True)
def test_machine_code_attends_as_numpy_does(engine, selector, values):
    """Step after step, in a batch: sequences of other lengths, one of which attends to all of its tokens."""
    spec, rng = engine.spec, np.random.default_rng(9)
    shape = spec.layers, spec.kv_heads, spec.head_dim

    def some():
        few = []
        for length, chosen in ((150, 40), (90, 20), (240, 1)):
            source = engine.new_sequence(300)
            engine.prefill(source, np.random.default_rng(length).integers(0, 500, length).astype(np.int32))
            choice = selector and selector(*shape, length + 60)
            few.append(FewOfMany(source, choice, chosen if choice else 0, following=60, sinks=3, recent=20, values=values))
            source.close()
        whole = engine.new_sequence(300)
        engine.prefill(whole, np.arange(70, dtype=np.int32))
        return few, whole

    (few, whole), (called, called_whole) = some(), some()
    in_numpy = [InNumpy(each) for each in called]
    for _ in range(40):
        tokens = rng.integers(0, 500, 4).astype(np.int32)
        found = engine.decode_over([few[0], whole, *few[1:]], tokens)
        expected = engine.decode_over([in_numpy[0], called_whole, *in_numpy[1:]], tokens)
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
    for one, other in zip(few, called, strict=True):
        assert one.length == other.length
        assert one.stored_bytes == other.stored_bytes
        assert one.fetched_bytes == pytest.approx(other.fetched_bytes, rel=0.02)
        assert not one.wanted.any()
        np.testing.assert_allclose(one.sums, other.sums, rtol=1e-3, atol=1e-3)
