"""The modelled engine: it takes the stated time, in the order of the layers, and its tokens follow from the tokens before."""

from dataclasses import replace

import numpy as np
import pytest

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.hardware import HARDWARE
from mooncake_zmq.core.messages import Sampling
from mooncake_zmq.engine.modelled import ModelledEngine
from mooncake_zmq.engine.sampling import sample
from mooncake_zmq.engine.sources.dummy import DUMMY_SHAPES

SPEC = replace(DUMMY_SHAPES["tiny"], layers=4)
COSTS = Costs(prefill_token_s=0.01, prefill_square_s=1e-5, decode_step_s=0.02, decode_request_s=0.003, decode_context_s=1e-4)
TOKENS = np.arange(200, dtype=np.int32)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(clock: Clock) -> ModelledEngine:
    return ModelledEngine(SPEC, COSTS, now=lambda: clock.now, sleep=clock.sleep)


def test_a_chunk_takes_what_the_costs_say_in_equal_shares_by_layer(engine: ModelledEngine, clock: Clock) -> None:
    sequence = engine.new_sequence(256)
    engine.prefill(sequence, TOKENS[:120])
    assert clock.now - 100 == pytest.approx(COSTS.compute_s(120, 0))
    began, done = clock.now, []
    engine.prefill(sequence, TOKENS[120:], after_layer=lambda layer: done.append(clock.now - began))
    whole = COSTS.compute_s(200, 120)
    assert done == pytest.approx([whole * share for share in (0.25, 0.5, 0.75, 1)])


def test_waiting_for_a_prefix_comes_on_top_and_computing_hides_the_rest(engine: ModelledEngine, clock: Clock) -> None:
    """Layer l of the prefix is there at 0.3 (l + 1) s: only what is longer than the computing of a layer is waited for."""
    sequence = engine.new_sequence(256)
    sequence.set_length(100)
    layer_s = COSTS.compute_s(200, 100) / SPEC.layers
    began = clock.now

    def loaded(layer: int) -> None:
        if (left_s := began + (layer_s + 0.3) * (layer + 1) - clock.now) > 0:
            clock.now += left_s

    engine.prefill(sequence, TOKENS[100:], before_layer=loaded)
    assert clock.now - began == pytest.approx((layer_s + 0.3) * SPEC.layers + layer_s)


def test_a_step_takes_what_the_costs_say_of_batch_and_contexts(engine: ModelledEngine, clock: Clock) -> None:
    batch = []
    for length in (10, 50):
        batch.append(engine.new_sequence(64))
        engine.prefill(batch[-1], TOKENS[:length])
    began = clock.now
    engine.decode(batch, TOKENS[:2])
    assert clock.now - began == pytest.approx(COSTS.step_s(2, 11 + 51))


def test_time_that_callbacks_took_is_not_slept_once_more(engine: ModelledEngine, clock: Clock) -> None:
    whole = COSTS.compute_s(200, 0)
    began = clock.now
    engine.prefill(engine.new_sequence(256), TOKENS, after_layer=lambda layer: setattr(clock, "now", clock.now + whole / 8))
    assert sum(clock.slept) == pytest.approx(whole - 3 * whole / 8)
    assert clock.now - began == pytest.approx(whole + whole / 8), "the last layer's callback comes after the chunk's time"


def generated(engine: ModelledEngine, prompt: np.ndarray, sampling: Sampling, count: int = 8) -> list[int]:  # type: ignore[type-arg]
    sequence = engine.new_sequence(256)
    logits = engine.prefill(sequence, prompt)
    tokens: list[int] = []
    for _ in range(count):
        assert logits is not None
        tokens.append(sample(logits[-1], sampling, sequence.length))
        logits = engine.decode([sequence], np.array(tokens[-1:], dtype=np.int32))
    return tokens


def test_tokens_are_a_function_of_the_tokens_so_far_and_the_seed(engine: ModelledEngine) -> None:
    other = ModelledEngine(SPEC, HARDWARE["a800-llama3-70b"], sleep=lambda seconds: None)
    warm = Sampling(temperature=1.0, seed=3)
    for sampling in (Sampling(), warm):
        assert generated(engine, TOKENS, sampling) == generated(other, TOKENS, sampling)
    changed = TOKENS.copy()
    changed[0] += 1
    assert generated(engine, TOKENS, Sampling()) != generated(engine, changed, Sampling())
    assert generated(engine, TOKENS, warm) != generated(engine, TOKENS, Sampling(temperature=1.0, seed=4))


@pytest.mark.parametrize("layer", range(SPEC.layers))
@pytest.mark.parametrize("half", [0, 1])
def test_wrong_kv_of_the_last_token_in_any_layer_changes_what_follows(engine: ModelledEngine, layer: int, half: int) -> None:
    sequence, right = engine.new_sequence(256), engine.new_sequence(256)
    for each in (sequence, right):
        engine.prefill(each, TOKENS)
    part = np.empty((2, 1, SPEC.kv_heads, SPEC.head_dim), dtype=np.float32)
    sequence.read_part(layer, 199, 200, part)
    part[half] += 1
    sequence.write_part(layer, 199, part)
    wrong, good = (engine.decode([each], TOKENS[:1]) for each in (sequence, right))
    assert not np.array_equal(wrong, good)


def test_the_named_hardware_takes_what_the_paper_says() -> None:
    paper = HARDWARE["a800-llama3-70b"]
    assert [paper.compute_s(tokens << 10, 0) for tokens in (8, 32, 128)] == pytest.approx([1.00, 4.48, 27.52], rel=0.03)
    assert [paper.step_s(1, tokens << 10) for tokens in (8, 32, 128)] == pytest.approx([0.0266, 0.0275, 0.0308], rel=0.01)
    assert paper.step_s(20, 20 << 13) / paper.step_s(1, 1 << 13) == pytest.approx((0.765 + 0.0149 * 20) / 0.7799, rel=0.01)
