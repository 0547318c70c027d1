"""What every engine promises, toy and real: chunks, batches, callbacks, KV parts."""

import numpy as np
import pytest

from mooncake_zmq.engine.modelled import ModelledEngine
from mooncake_zmq.engine.spec import LOGIT_ROWS
from mooncake_zmq.engine.toy import ToyEngine

TOKENS = np.random.default_rng(1).integers(0, 500, 300).astype(np.int32)


def prefill_in_chunks(engine, tokens, chunk, capacity=512):
    sequence = engine.new_sequence(capacity)
    for start in range(0, len(tokens), chunk):
        logits = engine.prefill(sequence, tokens[start : start + chunk])
    return sequence, logits


def same(engine, left, right):
    """Exact for those of whole numbers; float32 rounding for the real one."""
    if isinstance(engine, ToyEngine | ModelledEngine):
        np.testing.assert_array_equal(left, right)
    else:
        np.testing.assert_allclose(left, right, atol=2e-4)


@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 255])
def test_chunks_equal_the_whole(engine, chunk):
    _, whole = prefill_in_chunks(engine, TOKENS, len(TOKENS))
    sequence, chunked = prefill_in_chunks(engine, TOKENS, chunk)
    assert sequence.length == len(TOKENS)
    same(engine, chunked, whole)


def test_decode_equals_prefill(engine):
    sequence, _ = prefill_in_chunks(engine, TOKENS[:100], 100)
    for position in range(100, 140):
        decoded = engine.decode([sequence], TOKENS[position : position + 1])
    _, whole = prefill_in_chunks(engine, TOKENS[:140], 140)
    same(engine, decoded, whole)


def test_a_batch_equals_its_members_alone(engine):
    lengths = [1, 2, 63, 64, 65, 130, 200, 299]
    batch = [prefill_in_chunks(engine, TOKENS[:length], length)[0] for length in lengths]
    together = engine.decode(batch, TOKENS[lengths])
    for row, length in enumerate(lengths):
        alone, _ = prefill_in_chunks(engine, TOKENS[:length], length)
        same(engine, engine.decode([alone], TOKENS[length : length + 1]), together[row : row + 1])
        assert batch[row].length == length + 1


def test_cells_that_are_not_written_mean_nothing(engine):
    """A sequence may have the memory of one that ended."""
    results = []
    for content in (0, np.nan):
        sequence = engine.new_sequence(512)
        sequence.keys[:] = sequence.values[:] = content
        for chunk in (TOKENS[:130], TOKENS[130:170]):
            engine.prefill(sequence, chunk)
        results.append(np.concatenate([engine.decode([sequence], TOKENS[at : at + 1]) for at in range(170, 200)]))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("asked", [range(300), [5], range(3, 300, 4)])
def test_logits_in_slices_are_the_same_and_no_slice_is_large(engine, asked):
    whole = engine.prefill(engine.new_sequence(512), TOKENS, logits_at=asked)
    slices = []
    assert engine.prefill(engine.new_sequence(512), TOKENS, logits_at=asked, on_logits=slices.append) is None
    assert max(map(len, slices)) <= LOGIT_ROWS
    same(engine, np.concatenate(slices), whole)


def test_logits_only_where_asked(engine):
    asked = [0, -1, 17, 64]
    sequence = engine.new_sequence(512)
    logits = engine.prefill(sequence, TOKENS, logits_at=asked)
    assert logits.shape == (4, engine.spec.vocab_size)
    for row, position in enumerate([0, 299, 17, 64]):
        _, alone = prefill_in_chunks(engine, TOKENS[: position + 1], 300)
        same(engine, logits[row : row + 1], alone)
    assert engine.prefill(engine.new_sequence(512), TOKENS, logits_at=None) is None


@pytest.mark.parametrize(("block", "prefix"), [(64, 192), (128, 256), (48, 144), (1, 3)])
def test_kv_moved_as_parts_continues_the_sequence(engine, block, prefix):
    spec = engine.spec
    source, whole = prefill_in_chunks(engine, TOKENS, len(TOKENS))
    copy = engine.new_sequence(512)
    part = np.empty((2, block, spec.kv_heads, spec.head_dim), dtype=np.float32)

    def load(layer):
        for start in range(0, prefix, block):
            source.read_part(layer, start, start + block, part)
            copy.write_part(layer, start, part)

    copy.set_length(prefix)
    logits = engine.prefill(copy, TOKENS[prefix:], before_layer=load)
    same(engine, logits, whole)


@pytest.mark.parametrize("meets_at", [64, 128, 192])
def test_a_computed_head_and_a_loaded_tail_are_bit_for_bit_what_computing_alone_is(engine, meets_at):
    """In chunks of the same lengths, as other lengths round otherwise."""
    spec, stop, chunk = engine.spec, 256, 64
    alone, met = engine.new_sequence(512), engine.new_sequence(512)
    part = np.empty((2, chunk, spec.kv_heads, spec.head_dim), dtype=np.float32)
    for start in range(0, stop, chunk):
        engine.prefill(alone, TOKENS[start : start + chunk])
    whole = engine.prefill(alone, TOKENS[stop:])
    for start in range(0, meets_at, chunk):
        engine.prefill(met, TOKENS[start : start + chunk])

    def load(layer):
        for start in range(meets_at, stop, chunk):
            alone.read_part(layer, start, start + chunk, part)
            met.write_part(layer, start, part)

    met.set_length(stop)
    np.testing.assert_array_equal(engine.prefill(met, TOKENS[stop:], before_layer=load), whole)
    for layer in range(spec.layers):
        parts = np.empty((2, 2, len(TOKENS), spec.kv_heads, spec.head_dim), dtype=np.float32)
        for sequence, out in zip((alone, met), parts, strict=True):
            sequence.read_part(layer, 0, len(TOKENS), out)
        np.testing.assert_array_equal(*parts)


def test_a_layer_can_be_read_once_after_layer_ran(engine):
    reference, _ = prefill_in_chunks(engine, TOKENS, len(TOKENS))
    sequence = engine.new_sequence(512)
    engine.prefill(sequence, TOKENS[:100])
    order = []

    def after(layer):
        order.append(("after", layer))
        got, expected = (np.empty((2, 250, engine.spec.kv_heads, engine.spec.head_dim), dtype=np.float32) for _ in range(2))
        sequence.read_part(layer, 50, 300, got)
        reference.read_part(layer, 50, 300, expected)
        same(engine, got, expected)

    engine.prefill(sequence, TOKENS[100:], before_layer=lambda layer: order.append(("before", layer)), after_layer=after)
    for when in ("before", "after"):
        assert [layer for what, layer in order if what == when] == list(range(engine.spec.layers))
    for layer in range(engine.spec.layers):
        assert order.index(("before", layer)) < order.index(("after", layer))


@pytest.mark.parametrize("callback", ["before_layer", "after_layer"])
def test_a_callback_that_raises_leaves_the_length(engine, callback):
    sequence, _ = prefill_in_chunks(engine, TOKENS[:100], 100)

    def fail(layer):
        if layer == 1:
            raise InterruptedError("the loader failed")

    with pytest.raises(InterruptedError):
        engine.prefill(sequence, TOKENS[100:200], **{callback: fail})
    assert sequence.length == 100
    logits = engine.prefill(sequence, TOKENS[100:])
    same(engine, logits, prefill_in_chunks(engine, TOKENS, 300)[1])


def test_one_wrong_byte_of_kv_changes_the_toys_tokens():
    engine = ToyEngine()
    for layer in range(3):
        for half in range(2):
            for position in (0, 50, 63, 64, 99):
                sequence, _ = prefill_in_chunks(engine, TOKENS[:100], 100)
                part = np.empty((2, 1, 1, 2), dtype=np.float32)
                sequence.read_part(layer, position, position + 1, part)
                part[half, 0, 0, 1] += 1
                sequence.write_part(layer, position, part)
                wrong = engine.decode([sequence], TOKENS[:1])
                right = engine.decode([prefill_in_chunks(engine, TOKENS[:100], 100)[0]], TOKENS[:1])
                assert (wrong != right).mean() > 0.9


def test_impossible_requests_are_refused(engine):
    sequence = engine.new_sequence(10)
    for tokens in ([], [1] * 11, [engine.spec.vocab_size], [-1]):
        with pytest.raises(ValueError):
            engine.prefill(sequence, np.array(tokens, dtype=np.int32))
    engine.prefill(sequence, TOKENS[:10])
    with pytest.raises(ValueError, match="capacity"):
        engine.decode([sequence], TOKENS[:1])
    assert sequence.length == 10
