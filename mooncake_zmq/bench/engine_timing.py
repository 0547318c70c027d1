"""Timing of one engine: a prefill behind a prefix, and steps of a decode batch. Prompts are random tokens; sampling is
greedy."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.messages import Sampling
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.sampling import sample
from mooncake_zmq.engine.spec import Engine, ModelSpec

WARM_UP_STEPS = 2


def random_prompt(random: np.random.Generator, tokens: int, vocab_size: int) -> NDArray[np.int32]:
    """Return ids [tokens], without the low ones, which are special in many vocabularies."""
    return random.integers(min(100, vocab_size // 2), vocab_size, tokens).astype(np.int32)


def prefill(engine: Engine, sequence: SequenceKV, prompt: NDArray[np.int32], chunk_tokens: int = 0) -> int:
    """Append `prompt`, in chunks unless that is 0; return the next token."""
    step = chunk_tokens or len(prompt)
    starts = range(0, len(prompt), step)
    for start in starts:
        last = start == starts[-1]
        logits = engine.prefill(sequence, prompt[start : start + step], logits_at=(-1,) if last else None)
    assert logits is not None
    return sample(logits[0], Sampling(), sequence.length)


def prefill_times_s(
    engine: Engine, random: np.random.Generator, lengths: Sequence[int], *, prefix: int, chunk_tokens: int
) -> list[float]:
    """Return the time to the first token of a prompt of each length, behind `prefix` tokens whose KV is there."""
    vocab_size, took_s = engine.spec.vocab_size, []
    with closing(engine.new_sequence(prefix + max(lengths))) as sequence:
        sequence.expect(sequence.capacity)
        if prefix:
            prefill(engine, sequence, random_prompt(random, prefix, vocab_size), chunk_tokens)
        for length in lengths:
            sequence.set_length(prefix)  # The KV beyond the prefix is written again.
            prompt = random_prompt(random, length, vocab_size)
            began = time.perf_counter()
            prefill(engine, sequence, prompt, chunk_tokens)
            took_s.append(time.perf_counter() - began)
    return took_s


def decode_step_s(
    engine: Engine, prompts: Sequence[NDArray[np.int32]], *, steps: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the mean time of a step of a batch that continues `prompts`, all of one length; WARM_UP_STEPS do not count.

    The rows begin with tokens of their own but with the KV of the first: a prefill of each would only take longer.
    """
    room = len(prompts[0]) + steps + WARM_UP_STEPS
    sequences = [engine.new_sequence(room) for _ in prompts]
    try:
        for sequence in sequences:
            sequence.expect(len(prompts[0]))
        first = sequences[0]
        prefill(engine, first, prompts[0])
        for sequence in sequences[1:]:
            _copy(engine.spec, first, sequence)
        tokens: NDArray[np.int32] = np.array([prompt[-1] for prompt in prompts], np.int32)
        for number in range(WARM_UP_STEPS + steps):
            if number == WARM_UP_STEPS:
                began = clock()
            logits = engine.decode(sequences, tokens)
            tokens = np.array(
                [sample(row, Sampling(), sequence.length) for row, sequence in zip(logits, sequences, strict=True)], np.int32
            )
        return (clock() - began) / steps
    finally:
        for sequence in sequences:
            sequence.close()


def greedy(engine: Engine, prompt: NDArray[np.int32], count: int) -> list[int]:
    """Return the first `count` tokens after `prompt`."""
    with closing(engine.new_sequence(len(prompt) + count)) as sequence:
        tokens = [prefill(engine, sequence, prompt)]
        while len(tokens) < count:
            logits = engine.decode([sequence], np.array(tokens[-1:], np.int32))
            tokens.append(sample(logits[0], Sampling(), sequence.length))
    return tokens


def _copy(spec: ModelSpec, source: SequenceKV, target: SequenceKV) -> None:
    """Copy the KV into memory of its own, which is quicker than a second prefill."""
    part: NDArray[np.float32] = np.empty((2, source.length, spec.kv_heads, spec.head_dim), np.float32)
    for layer in range(spec.layers):
        source.read_part(layer, 0, source.length, part)
        target.write_part(layer, 0, part)
    target.set_length(source.length)
