"""A model with KV of floats, texts that it has not learned, and the error of its answers: for benches of KV quality."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import mooncake_zmq
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.llama import ArrayRows, Llama
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.engine.tokenizer import Tokenizer

Floats = NDArray[np.float32]
Logs = NDArray[np.float64]
Tokens = NDArray[np.int32]
StudyT = TypeVar("StudyT")
PREFILL_TOKENS = 512


def prepared_model(model: str, cache_dir: str, **options: Any) -> Path:
    """Prepare a model whose KV is numbers; `options`: see `prepare`. Raises ModelError."""
    path = prepare(model, cache_dir, **options)
    if str(path) == "toy":
        raise ModelError("the toy engine has no KV of floats: give another model")
    return path


def studied(
    study: Callable[[Path], StudyT], model: str, cache_dir: str, progress: Callable[[str], None], **options: Any
) -> StudyT:
    """Prepare a model, and return the study of it. Raises ModelError where it cannot be studied."""
    progress(f"preparing the model {model}")
    return study(prepared_model(model, cache_dir, **options))


def check_positions(engine: Llama, needed: int) -> None:
    """Raise ModelError for a model whose context is shorter."""
    if needed > engine.spec.max_positions:
        raise ModelError(f"{engine.spec.name} has {engine.spec.max_positions} positions, and this needs {needed}")


def manual_page(page: str) -> str:
    """Return a page of our own manual, which is in no training set that ended before it."""
    return (Path(mooncake_zmq.__file__).parent / "docs" / f"{page}.md").read_text()


def manual_tokens(tokenizer: Tokenizer, *pages: str) -> Tokens:
    """Return the tokens of pages of our own manual, one behind the other."""
    return np.asarray(tokenizer.encode("\n".join(map(manual_page, pages))), np.int32)


def prefilled(engine: Llama, context: Tokens, following: int = 0) -> SequenceKV:
    """Return a sequence that has the KV of a context, and room for more tokens."""
    sequence = engine.new_sequence(len(context) + following)
    for begin in range(0, len(context), PREFILL_TOKENS):
        engine.prefill(sequence, context[begin : begin + PREFILL_TOKENS], logits_at=None)
    return sequence


@dataclass(frozen=True, slots=True)
class Computed:
    """A layer of some tokens of a prompt: queries [kv_head, n, group, head_dim], scaled, keys and values [k/v, n, kv_head,
    head_dim], the hidden states [n, hidden] that left it, unless it is the last one, and the multiply-adds of all that."""

    queries: Floats
    kv: Floats
    hidden: Floats
    multiply_adds: int


def computed(engine: Llama, scratch: SequenceKV, layer: int, entering: NDArray[Any], positions: NDArray[np.int64]) -> Computed:
    """Compute a layer for the tokens or hidden states at ascending positions, which attend to each other alone, in NumPy.
    `scratch`: a sequence with room for them, whose layer is overwritten."""
    rows, spec, count = engine.rows_of(0, scratch, positions, entering), engine.spec, len(entering)
    assert isinstance(rows, ArrayRows)
    rows.place(np.arange(count))
    rows.project(layer)
    rows.store(layer)
    kv = np.empty((2, count, spec.kv_heads, spec.head_dim), np.float32)
    SequenceKV.read_part(scratch, layer, 0, count, kv)
    query = spec.heads * spec.head_dim
    work = count * spec.hidden * (query + 2 * spec.kv_heads * spec.head_dim)
    if layer + 1 < spec.layers:
        rows.finish(layer)
        work += count * spec.hidden * (query + 3 * spec.ffn) + count * (count + 1) * query
    return Computed(rows.queries, kv, rows.hidden.copy(), work)


def causal_weights(layer: Computed, first: int = 0) -> Floats:
    """Return how the queries from `first` on attend to all tokens up to their own [kv_head, group, n, token]."""
    queries = layer.queries[:, first:].transpose(0, 2, 1, 3)
    scores = queries @ layer.kv[0].transpose(1, 2, 0)[:, None]
    asking = scores.shape[2]
    scores[..., first:][..., np.triu(np.ones((asking, asking), bool), 1)] = -np.inf
    weights: Floats = np.exp(scores - scores.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    return weights


def log_probabilities(engine: Llama, sequence: SequenceKV, following: NDArray[np.int32]) -> Logs:
    """Return the log probabilities of the next token after each of these, which are appended to the sequence."""
    logits = engine.prefill(sequence, following, logits_at=list(range(len(following))))
    assert logits is not None
    return logs_of(logits)


def logs_of(numbers: Floats) -> Logs:
    """Return the log probabilities for which logits [n, vocab_size] stand."""
    logits = np.asarray(numbers, np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    logs: Logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logs


def divergence(exact: Logs, other: Logs) -> float:
    """Return the mean KL divergence of the next token's distributions from the exact ones, in nats."""
    return float((np.exp(exact) * (exact - other)).sum(axis=-1).mean())


def agreement(exact: Logs, other: Logs) -> float:
    """Return the share of next tokens that are the likeliest in both."""
    return float((exact.argmax(-1) == other.argmax(-1)).mean())
