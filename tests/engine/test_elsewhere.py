"""Attention over KV in several places equals attention over all of it in one."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from mooncake_zmq.engine.elsewhere import FarKV, Partial, no_tokens

LENT, TOKENS, STEPS = (64, 96), (150, 131), 3


@pytest.fixture
def engine(qwen):
    return qwen


class Here:
    """KV elsewhere that is in this process: parts of rows, of which one merges after another."""

    def __init__(self, engine, parts):
        """`parts`: (row, sequence, whether it takes the row's new KV)."""
        self.engine, self.parts = engine, parts

    def begin(self, sequences):
        pass

    def ask(self, layer, queries, keys, values):
        self.queries = queries
        for row, sequence, grows in self.parts:
            if grows:
                sequence.append(layer, sequence.length, keys[row], values[row])

    def answers(self, layer):
        result = no_tokens(*self.queries.shape)
        for row, sequence, grows in self.parts:
            part = self.engine.attend_part(layer, [sequence], [sequence.length + grows], self.queries[[row]])
            result.merge(part, [row])
        return result


def filled(engine):
    """Whole sequences, and the same cut in two: what is lent, and what is kept."""
    random, whole, lent, kept = np.random.default_rng(3), [], [], []
    spec = engine.spec
    for count, cut in zip(TOKENS, LENT, strict=True):
        sequence = engine.new_sequence(count + STEPS)
        engine.prefill(sequence, random.integers(0, 500, count).astype(np.int32))
        first, last = engine.new_sequence(cut), engine.new_sequence(count - cut + STEPS)
        for layer in range(spec.layers):
            for target, start, stop in ((first, 0, cut), (last, cut, count)):
                part = np.empty((2, stop - start, spec.kv_heads, spec.head_dim), np.float32)
                sequence.read_part(layer, start, stop, part)
                target.write_part(layer, 0, part)
        first.set_length(cut)
        last.set_length(count - cut)
        last.before = cut
        whole.append(sequence)
        lent.append(first)
        kept.append(last)
    return whole, lent, kept


def test_a_lent_part_changes_no_answer(engine):
    whole, lent, kept = filled(engine)
    tokens = np.array([7, 8], np.int32)
    for _ in range(STEPS):
        exact = engine.decode(whole, tokens)
        found = engine.decode_elsewhere(kept, tokens, Here(engine, [(0, lent[0], False), (1, lent[1], False)]))
        assert_allclose(found, exact, rtol=2e-3, atol=2e-4)
        tokens = exact.argmax(axis=1).astype(np.int32)
    assert [each.before + each.length for each in kept] == [each.length for each in whole]


def test_rows_with_all_some_and_none_of_their_kv_elsewhere_go_together(engine):
    whole, lent, kept = filled(engine)
    exact, tokens = [], np.array([7, 8, 9], np.int32)
    third, _, _ = filled(engine)
    far = FarKV(TOKENS[1], TOKENS[1] + STEPS)
    holder, _, _ = filled(engine)
    for _ in range(STEPS):
        exact = engine.decode([whole[0], whole[1], third[0]], tokens)
        here = Here(engine, [(0, lent[0], False), (1, holder[1], True)])
        found = engine.decode_elsewhere([kept[0], far, holder[0]], tokens, here)
        holder[1].set_length(holder[1].length + 1)
        assert_allclose(found, exact, rtol=2e-3, atol=2e-4)
        tokens = exact.argmax(axis=1).astype(np.int32)
    assert far.length == whole[1].length


def test_what_has_not_all_its_kv_here_is_no_sequence_for_other_steps(engine):
    tokens = np.array([7], np.int32)
    kept = filled(engine)[2][0]
    length = kept.length
    with pytest.raises(ValueError, match="elsewhere"):
        engine.decode([kept], tokens)
    with pytest.raises(ValueError, match="elsewhere"):
        engine.prefill(kept, tokens)
    assert kept.length == length


def test_a_part_of_several_spans_is_the_attention_over_all_its_tokens(engine):
    spec, random, tokens = engine.spec, np.random.default_rng(4), 600
    kv = random.normal(size=(2, tokens, spec.kv_heads, spec.head_dim)).astype(np.float32)
    queries = random.normal(size=(1, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)).astype(np.float32)
    sequence = engine.new_sequence(tokens)
    sequence.write_part(0, 0, kv)
    sequence.set_length(tokens)
    found = engine.attend_part(0, [sequence], [tokens], queries)
    scores = np.einsum("hgd,thd->hgt", queries[0], kv[0])
    weights = np.exp(scores - found.states[0, ..., :1])
    assert_allclose(found.states[0, ..., 0], scores.max(axis=-1), rtol=1e-4)
    assert_allclose(found.states[0, ..., 1], weights.sum(axis=-1), rtol=1e-4)
    assert_allclose(found.mixed[0], np.einsum("hgt,thd->hgd", weights, kv[1]), rtol=1e-3, atol=1e-3)


def test_what_fails_elsewhere_fails_the_step(engine):
    _, _, kept = filled(engine)

    class Failing(Here):
        def answers(self, layer):
            raise KeyError(layer)

    with pytest.raises(KeyError):
        engine.decode_elsewhere(kept, np.array([7, 8], np.int32), Failing(engine, []))
    assert [each.before + each.length for each in kept] == list(TOKENS)


def test_merging_is_exact_in_any_order():
    random = np.random.default_rng(0)
    scores, values = random.normal(0, 30, 12).astype(np.float32), random.normal(size=(12, 4)).astype(np.float32)

    def part(chosen):
        highest = scores[chosen].max()
        weights = np.exp(scores[chosen] - highest)
        states = np.array([[[[highest, weights.sum()]]]], np.float32)
        return Partial((weights @ values[chosen]).reshape(1, 1, 1, 4), states)

    whole = part(range(12))
    for cuts in ((3, 7), (7, 3), (1, 11)):
        parts = [part(range(*each)) for each in ((0, min(cuts)), (min(cuts), max(cuts)), (max(cuts), 12))]
        for order in (parts, parts[::-1]):
            merged = no_tokens(1, 1, 1, 4)
            for each in order:
                merged.merge(each)
            assert_allclose(merged.mixed / merged.states[..., 1:], whole.mixed / whole.states[..., 1:], rtol=1e-5)
