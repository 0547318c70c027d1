"""Sampling repeats itself, follows the distribution, and cuts where it says."""

import numpy as np
import pytest

from mooncake_zmq.core.messages import Sampling
from mooncake_zmq.engine.sampling import near_tie, sample, scores

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
