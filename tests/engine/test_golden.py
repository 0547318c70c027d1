"""The engine alone against Hugging Face transformers in float32 on the same GGUF (golden/make_golden.py)."""

from functools import cache

import numpy as np
import pytest
from near_tie import near_tie

from mooncake_zmq.core.messages import Sampling

TOLERANCE = 1e-3
TIES_MAX_SHARE = 0.02
PROMPTS = range(9)


def assert_rows_match(golden, prompt, logits_of):
    """Compare every recorded position of one prompt; `logits_of` maps position to logits."""
    for row in np.flatnonzero(golden["row_prompt"] == prompt):
        logits = logits_of[int(golden["row_position"][row])]
        np.testing.assert_allclose(logits[golden["top_ids"][row]], golden["top_logits"][row], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(logits[golden["fixed_ids"]], golden["fixed_logits"][row], rtol=0, atol=TOLERANCE)


def prefilled(model, golden, prompt, tokens, chunk, room=0):
    """Compute one prompt in chunks; return its sequence, and the logits at each recorded position and the last one."""
    last = len(tokens) - 1
    wanted = sorted({last, *map(int, golden["row_position"][golden["row_prompt"] == prompt])})
    sequence = model.new_sequence(len(tokens) + room)
    logits_of = {}
    for start in range(0, len(tokens), chunk):
        inside = [position for position in wanted if start <= position < start + chunk]
        logits = model.prefill(
            sequence, tokens[start : start + chunk], logits_at=[position - start for position in inside] or None
        )
        logits_of |= dict(zip(inside, logits if inside else [], strict=True))
    return sequence, logits_of


@pytest.fixture(scope="module")
def whole(default_model, golden, golden_prompts):
    """A function that returns a prompt computed in one piece, with room for its answer; each is computed once."""

    @cache
    def computed(prompt):
        tokens = golden_prompts[prompt]
        sequence, logits_of = prefilled(default_model, golden, prompt, tokens, len(tokens), golden["greedy"].shape[1])
        opened.append(sequence)
        return sequence, logits_of

    opened = []
    yield computed
    for sequence in opened:
        sequence.close()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits(whole, golden, prompt):
    assert_rows_match(golden, prompt, whole(prompt)[1])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_of_a_prompt_in_chunks(default_model, golden, golden_prompts, prompt):
    sequence, logits_of = prefilled(default_model, golden, prompt, golden_prompts[prompt], 333)
    sequence.close()
    assert_rows_match(golden, prompt, logits_of)


def test_greedy_tokens_by_i3(default_model, whole, golden, golden_prompts):
    """All prompts in one continuous batch. Each step is given the reference's tokens and must choose the next one."""
    sequences, logits = [], []
    for prompt, tokens in enumerate(golden_prompts):
        sequence, logits_of = whole(prompt)
        sequences.append(sequence)
        logits.append(logits_of[len(tokens) - 1])
    ties = 0
    for step in range(golden["greedy"].shape[1]):
        for prompt, row in enumerate(logits):
            if near_tie(row, Sampling(), len(golden_prompts[prompt]) + step):
                ties += 1
            else:
                assert row.argmax() == golden["greedy"][prompt, step], f"prompt {prompt}, token {step}"
        logits = default_model.decode(sequences, golden["greedy"][:, step])
    assert ties <= TIES_MAX_SHARE * golden["greedy"].size


def test_token_ids(default_tokenizer, golden):
    expected = np.split(golden["text_ids"], np.cumsum(golden["text_lengths"])[:-1])
    for text, ids in zip(golden["texts"], expected, strict=True):
        assert default_tokenizer.encode(str(text)).tolist() == ids.tolist()


def test_chat_template(default_tokenizer, golden):
    chat = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of Japan? Answer in 1 word."},
    ]
    assert default_tokenizer.chat(chat).tolist() == golden["chat_ids"].tolist()
