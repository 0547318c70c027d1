"""Sampling repeats itself, follows the distribution, and cuts where it says."""

import numpy as np
import pytest
from near_tie import near_tie

from mooncake_zmq.core.messages import Sampling
from mooncake_zmq.engine.sampling import Past, choose, logprob, sample, scores
from mooncake_zmq.kv.block_hash import pack_tokens

LOGITS = np.random.default_rng(11).normal(scale=3, size=2000).astype(np.float32)
DRAWN_BY_THE_FIRST_VERSION = [896, 370, 195, 345, 165, 60, 732, 709]


def test_greedy_takes_the_best():
    assert sample(LOGITS, Sampling(), 5) == LOGITS.argmax()


def test_the_choice_depends_on_seed_and_position_alone():
    sampling = Sampling(temperature=1.0, seed=42)
    chosen = [sample(LOGITS, sampling, position) for position in range(100)]
    assert chosen == [sample(LOGITS, sampling, position) for position in reversed(range(100))][::-1]
    assert chosen != [sample(LOGITS, Sampling(temperature=1.0, seed=43), position) for position in range(100)]
    assert len(set(chosen)) > 5


def test_the_stream_never_changes():
    """A request resumed by another version must go on as it began: these were drawn by the first version."""
    drawn = [sample(np.zeros(1000, dtype=np.float32), Sampling(temperature=1.0, seed=7), at) for at in range(8)]
    assert drawn == DRAWN_BY_THE_FIRST_VERSION


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_softmax(temperature):
    logits = np.array([2.0, 1.0, 0.0, -1.0, 0.5], dtype=np.float32)
    expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    sampling = Sampling(temperature=temperature, seed=3)
    drawn = np.bincount([sample(logits, sampling, position) for position in range(20_000)], minlength=5) / 20_000
    np.testing.assert_allclose(drawn, expected, atol=0.012)


def test_top_k_keeps_the_k_best():
    kept = np.flatnonzero(np.isfinite(scores(LOGITS, Sampling(temperature=1.0, top_k=40), 9)))
    assert set(kept) == set(np.argsort(-LOGITS)[:40])


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.9999, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 50.0])
def test_top_p_keeps_the_smallest_nucleus(top_p, temperature):
    kept = np.isfinite(scores(LOGITS, Sampling(temperature=temperature, top_p=top_p), 9))
    probability = np.exp((LOGITS - LOGITS.max()) / temperature, dtype=np.float64)
    probability /= probability.sum()
    assert probability[kept].sum() >= top_p - 1e-9
    if top_p < 1:
        assert probability[kept].sum() - probability[kept].min() < top_p
    assert probability[kept].min() >= probability[~kept].max(initial=0)


def test_top_p_applies_to_what_top_k_left():
    kept = np.isfinite(scores(LOGITS, Sampling(temperature=5.0, top_k=10, top_p=0.5), 9)).sum()
    assert 1 <= kept < 10


def test_near_ties():
    assert near_tie(np.array([1.0, 1.005, 0.0], dtype=np.float32), Sampling(), 0)
    assert not near_tie(np.array([1.0, 1.02, 0.0], dtype=np.float32), Sampling(), 0)
    edge = np.array([9.0, 5.0, 1.0005, 1.0], dtype=np.float32)
    assert near_tie(edge, Sampling(temperature=1.0, top_k=3), 0)
    assert not near_tie(edge, Sampling(temperature=0.001, top_k=2), 0)


def test_a_temperature_near_zero_is_greedy():
    for temperature in (1e-3, 1e-30, 5e-324):
        assert sample(LOGITS, Sampling(temperature=temperature, top_p=0.9, seed=1), 3) == LOGITS.argmax()


def literally_penalized(logits, sampling, prompt, answer):
    """Token by token, as vLLM's documentation says it."""
    expected = [float(each) for each in logits]
    for token, bias in sampling.logit_bias:
        expected[token] += bias
    for token in {*prompt, *answer}:
        rate = sampling.repetition_penalty
        expected[token] = expected[token] / rate if expected[token] > 0 else expected[token] * rate
    for token in set(answer):
        expected[token] -= sampling.presence_penalty + sampling.frequency_penalty * answer.count(token)
    return expected


PROMPT, ANSWER = [3, 5, 5, 900], [5, 7, 7, 7, 1999]
ALL = Sampling(
    presence_penalty=-2,
    frequency_penalty=2,
    repetition_penalty=0.5,
    logit_bias=((7, 9.0), (3, -4.0)),
    prompt_tokens=4,
)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(presence_penalty=1.5, prompt_tokens=4),
        Sampling(frequency_penalty=-0.7, prompt_tokens=4),
        Sampling(repetition_penalty=1.3, prompt_tokens=4),
        ALL,
    ],
)
def test_penalties_are_those_of_the_formula_wherever_the_answer_was_resumed(sampling):
    expected = literally_penalized(LOGITS, sampling, PROMPT, ANSWER)
    for resumed_at in range(len(ANSWER) + 1):
        past = Past(sampling, sampling.past(pack_tokens(PROMPT + ANSWER[:resumed_at])))
        for index in range(resumed_at, len(ANSWER)):
            past.feed(ANSWER[index], len(PROMPT) + index)
        np.testing.assert_allclose(scores(LOGITS, sampling, 9, past), expected, rtol=1e-5, atol=1e-5)
        assert sample(LOGITS, sampling, 9, past) == int(np.argmax(expected))


def test_a_token_that_is_not_the_next_one_is_an_error():
    past = Past(Sampling(presence_penalty=1.0, prompt_tokens=4), b"")
    past.feed(5, 4)
    with pytest.raises(ValueError, match="at 4 where that at 5"):
        past.feed(6, 4)


def test_a_token_that_is_said_twice_counts_once():
    sampling = Sampling(presence_penalty=1.0, frequency_penalty=1.0, prompt_tokens=4)
    once, twice = Past(sampling, b""), Past(sampling, b"")
    for past, times in ((once, 1), (twice, 2)):
        for _ in range(times):
            past.feed(5, 4)
    np.testing.assert_array_equal(scores(LOGITS, sampling, 5, once), scores(LOGITS, sampling, 5, twice))


def test_a_bias_forces_and_forbids():
    assert sample(LOGITS, Sampling(logit_bias=((17, 100.0),)), 3) == 17
    best = int(LOGITS.argmax())
    assert sample(LOGITS, Sampling(logit_bias=((best, -100.0),)), 3) != best


def test_min_p_keeps_what_is_likely_enough_beside_the_best():
    sampling = Sampling(temperature=1.0, seed=5, min_p=0.1)
    kept = set(np.flatnonzero(np.exp(LOGITS - LOGITS.max()) >= 0.1))
    assert {sample(LOGITS, sampling, position) for position in range(3000)} == kept
    assert len(kept) > 1


def test_probabilities_are_the_models_own_whatever_the_choice():
    sampling = Sampling(temperature=2.0, seed=1, logit_bias=((4, 90.0),), logprobs=3)
    token, told = choose(LOGITS, sampling, 7)
    softmax = LOGITS.astype(np.float64) - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    best = np.argsort(-softmax)[:3]
    assert token == 4
    assert told[0] == pytest.approx(softmax[4])
    assert [each for each, _ in told[1]] == best.tolist()
    assert [value for _, value in told[1]] == pytest.approx(softmax[best].tolist())
    assert choose(LOGITS, Sampling(), 7) == (int(LOGITS.argmax()), None)


def test_equal_probabilities_come_in_the_order_of_their_ids():
    assert [token for token, _ in logprob(np.zeros(50, np.float32), 9, 5)[1]] == [0, 1, 2, 3, 4]
    assert logprob(np.array([0.0, -3e38], np.float32), 0, 0) == (0.0, ())


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "min_p": 0.1, "top_p": 0.9},
        {"temperature": 0.5, "top_k": 3},
        {"logit_bias": ((1, 9.0),), "logprobs": 2},
    ],
    ids=str,
)
def test_logits_that_are_no_numbers_choose_no_token(asked, wrong):
    logits = LOGITS.copy()
    logits[7] = wrong
    with pytest.raises(FloatingPointError, match="no finite logits"):
        choose(logits, Sampling(**asked), 5)
    with pytest.raises(FloatingPointError):
        choose(np.full(9, -np.inf, np.float32), Sampling(**asked), 5)
    with pytest.raises(FloatingPointError):
        logprob(logits, 3, 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_that_the_model_rules_out_is_no_fault(temperature):
    logits = LOGITS.copy()
    logits[: len(logits) // 2] = -np.inf
    assert sample(logits, Sampling(temperature=temperature), 5) >= len(logits) // 2
