"""The workload: what it asks, what it expects, and the engine it expects it from."""

from random import Random

import numpy as np

from mooncake_zmq.core.messages import Sampling
from mooncake_zmq.kv.block_hash import extend_keys, unpack_tokens
from mooncake_zmq.simulation.engine import SimSequence, sim_layout
from mooncake_zmq.simulation.traces import Workload, generate

LAYOUT = sim_layout(8)


def test_chats_extend_prompt_and_answer_and_know_their_blocks() -> None:
    trace = generate(Random(3), Workload(), LAYOUT)
    turns = [turn for chat in trace.chats for turn in chat.turns]
    assert len(turns) == 40
    assert any(turn.cancel_after_s is not None or turn.cancel_after_tokens is not None for turn in turns)
    assert {turn.request.sampling.temperature > 0 for turn in turns} == {True, False}
    assert {len(turn.request.tokens) // 4 % LAYOUT.block_tokens for turn in turns} >= {0, 1, 7}
    assert {answer.reason for turn in turns for answer in turn.answers} == {"stop", "length"}
    for chat in trace.chats:
        for turn, following in zip(chat.turns, chat.turns[1:], strict=False):
            so_far = unpack_tokens(turn.request.tokens) + list(turn.answer)
            assert unpack_tokens(following.request.tokens)[: len(so_far)] == so_far
    for turn in turns:
        request = turn.request
        assert request.keys == tuple(extend_keys(request.root, request.tokens, LAYOUT.block_tokens))
        assert all(len(trace.blocks[key]) == LAYOUT.block_bytes for key in request.keys)


def test_the_same_seed_asks_the_same() -> None:
    assert generate(Random(5), Workload(), LAYOUT) == generate(Random(5), Workload(), LAYOUT)


def test_any_wrong_byte_changes_the_token() -> None:
    tokens = np.arange(20, dtype=np.uint32)
    right = SimSequence(24)
    right.run(0, tokens)
    expected = right.next_token(20, Sampling())
    random = Random(1)
    changed = 0
    for _ in range(50):
        wrong = SimSequence(24)
        wrong.run(0, tokens)
        cell = tuple(random.randrange(size) for size in (3, 2, 20, 2))
        wrong.kv[cell] ^= 1 << random.randrange(32)
        changed += wrong.next_token(20, Sampling()) != expected
    assert changed >= 48  # one in 512 tokens is equal by chance


def test_chunks_and_steps_equal_one_run() -> None:
    tokens = np.arange(20, dtype=np.uint32)
    whole, parts = SimSequence(20), SimSequence(20)
    whole.run(0, tokens)
    parts.run(0, tokens[:7])
    for layer in range(3):
        parts.run_layer(slice(layer, layer + 1), 7, tokens[7:19])
    parts.run(19, tokens[19:])
    assert np.array_equal(whole.kv, parts.kv)
    sampled = Sampling(temperature=1.0, seed=4)
    assert (
        whole.next_token(20, sampled) == parts.next_token(20, sampled) != whole.next_token(20, Sampling(temperature=1, seed=5))
    )
