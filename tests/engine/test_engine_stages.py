"""A prompt's layers cut into stages: what the whole gives, chunk by chunk, in logits, tokens and KV."""

import numpy as np
import pytest

from mooncake_zmq.engine import weights
from mooncake_zmq.prefill.pipeline import stage_layers

TOKENS = np.random.default_rng(5).integers(0, 500, 300).astype(np.int32)


def in_stages(engine, tokens, chunk, stages):
    """Every stage with a sequence of its own, as on a node of its own: logits, and the KV put together."""
    layers = [stage_layers(engine.spec.layers, stage, stages) for stage in range(stages)]
    sequences = [engine.new_sequence(len(tokens) + 1) for _ in range(stages)]
    logits = None
    for start in range(0, len(tokens), chunk):
        passed = tokens[start : start + chunk]
        last = start + chunk >= len(tokens)
        for own, sequence in zip(layers, sequences, strict=True):
            passed = engine.prefill_layers(sequence, passed, own, logits=last)
        logits = passed
    return logits, [part_of(sequences[stage], layer, engine, len(tokens)) for stage in range(stages) for layer in layers[stage]]


def part_of(sequence, layer, engine, length):
    part = np.empty((2, length, engine.spec.kv_heads, engine.spec.head_dim), dtype=np.float32)
    sequence.read_part(layer, 0, length, part)
    return part


def whole(engine, tokens, chunk):
    sequence = engine.new_sequence(len(tokens) + 1)
    for start in range(0, len(tokens), chunk):
        last = start + chunk >= len(tokens)
        logits = engine.prefill(sequence, tokens[start : start + chunk], logits_at=(-1,) if last else None)
    return logits, [part_of(sequence, layer, engine, len(tokens)) for layer in range(engine.spec.layers)]


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 30])
def test_stages_cover_all_layers_once_and_evenly(layers):
    for stages in range(1, layers + 1):
        cut = [stage_layers(layers, stage, stages) for stage in range(stages)]
        assert [layer for own in cut for layer in own] == list(range(layers))
        assert {len(own) for own in cut} <= {layers // stages, layers // stages + 1}


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("chunk", [64, 100, 300])
def test_stages_give_what_the_whole_gives(engine, stages, chunk):
    if stages > engine.spec.layers:
        pytest.skip("fewer layers than stages")
    logits, kv = whole(engine, TOKENS, chunk)
    staged, staged_kv = in_stages(engine, TOKENS, chunk, stages)
    np.testing.assert_array_equal(staged, logits)
    for layer, (got, expected) in enumerate(zip(staged_kv, kv, strict=True)):
        np.testing.assert_array_equal(got, expected, err_msg=f"layer {layer}")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_of_the_default_model_give_its_golden_tokens(default_path, golden, golden_prompts, stages):
    engine = weights.load_engine(default_path)
    which = next(index for index, prompt in enumerate(golden_prompts) if len(prompt) >= 400)
    prompt = golden_prompts[which].astype(np.int32)
    logits, kv = whole(engine, prompt, 128)
    staged, staged_kv = in_stages(engine, prompt, 128, stages)
    np.testing.assert_array_equal(staged, logits)
    assert all(np.array_equal(got, expected) for got, expected in zip(staged_kv, kv, strict=True))
    assert int(staged[0].argmax()) == golden["greedy"][which][0]


def test_a_stage_calls_back_for_its_own_layers_alone_and_leaves_the_length_when_one_raises(engine):
    half = engine.spec.layers // 2
    first, later = range(half), range(half, engine.spec.layers)
    calls = []
    hidden = engine.prefill_layers(engine.new_sequence(400), TOKENS[:50], first, after_layer=calls.append)
    sequence = engine.new_sequence(400)
    assert engine.prefill_layers(sequence, hidden, later, before_layer=calls.append) is None
    assert calls == [*first, *later]
    assert sequence.length == 50

    def fail(layer):
        raise InterruptedError("the loader failed")

    with pytest.raises(InterruptedError):
        engine.prefill_layers(sequence, hidden, later, before_layer=fail)
    assert sequence.length == 50


def test_one_wrong_hidden_state_changes_the_toys_tokens():
    engine = weights.load_engine("toy")
    hidden = engine.prefill_layers(engine.new_sequence(100), TOKENS[:64], range(1))
    right = engine.prefill_layers(engine.new_sequence(100), hidden, range(1, 3), logits=True)
    for row, cell in ((0, 0), (30, 0), (63, 0), (63, 1), (63, 2), (63, 3)):
        wrong = hidden.copy()
        wrong[row, cell] += 1
        assert (engine.prefill_layers(engine.new_sequence(100), wrong, range(1, 3), logits=True) != right).mean() > 0.9


def test_what_cannot_enter_a_stage_is_refused(engine):
    spec, sequence = engine.spec, engine.new_sequence(400)
    hidden = np.zeros((4, spec.hidden), dtype=np.float32)
    for entering, layers in (
        (TOKENS[:4], range(1, spec.layers)),
        (hidden, range(1)),
        (hidden[:, 1:], range(1, spec.layers)),
        (hidden.astype(np.float64), range(1, spec.layers)),
        (hidden, range(1, spec.layers + 1)),
        (hidden, range(1, 1)),
        (hidden[:0], range(1, spec.layers)),
        (np.full(4, spec.vocab_size, dtype=np.int32), range(1)),
    ):
        with pytest.raises(ValueError):  # noqa: PT011 (each says what is wrong in its own words)
            engine.prefill_layers(sequence, entering, layers)
    assert sequence.length == 0
