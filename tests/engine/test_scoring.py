"""A prompt's probabilities against a direct forward in float64, and the default model's against Hugging Face transformers."""

import naive_llama
import numpy as np
import pytest

from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.engine.scoring import PromptScores
from mooncake_zmq.engine.sources.dummy import DummySource
from mooncake_zmq.engine.weights import load_engine

TOKENS = np.random.default_rng(2).integers(0, 512, 150).astype(np.int32)


def scored(engine, tokens, likeliest, chunk):
    """As a prefill has it done: chunk by chunk, each knowing the token behind it."""
    sequence, told = engine.new_sequence(len(tokens)), []
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        scores = PromptScores(tokens[start + 1 : start + 1 + len(part)].tolist(), likeliest)
        engine.prefill(sequence, part, logits_at=range(len(part)), on_logits=scores)
        assert scores.last.shape == (1, engine.spec.vocab_size)
        told += scores.scored
    sequence.close()
    return told


@pytest.mark.parametrize("chunk", [150, 70])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", ["tiny", '{"family": "qwen3", "head_dim": 24, "hidden": 40}'])
def test_each_token_is_scored_as_the_mathematics_say(tmp_path, shape, threads, chunk):
    logits = naive_llama.logits(DummySource(shape), TOKENS)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    told = scored(load_engine(prepare(f"dummy:{shape}", tmp_path), threads=threads), TOKENS, 3, chunk)
    assert len(told) == len(TOKENS) - 1
    for row, token, (own, likeliest) in zip(expected, TOKENS[1:], told, strict=False):
        assert own == pytest.approx(row[token], abs=1e-4)
        assert [value for _, value in likeliest] == pytest.approx(np.sort(row)[:-4:-1], abs=1e-4)
        assert [row[each] for each, _ in likeliest] == pytest.approx([value for _, value in likeliest], abs=1e-4)


def test_the_default_model_ranks_a_prompts_tokens_as_transformers_do(default_model, golden, golden_prompts):
    prompt = int(np.argmin([len(tokens) for tokens in golden_prompts]))
    tokens = golden_prompts[prompt]
    told = scored(default_model, tokens, 5, 48)
    for row in np.flatnonzero(golden["row_prompt"] == prompt):
        position = int(golden["row_position"][row])
        if position + 1 < len(tokens):
            known = dict(zip(golden["top_ids"][row].tolist(), golden["top_logits"][row].tolist(), strict=True))
            (best, best_value), *others = told[position][1]
            assert known[best] == pytest.approx(max(known.values()), abs=2e-3)
            for token, value in others:
                assert value - best_value == pytest.approx(known[token] - known[best], abs=2e-3)
