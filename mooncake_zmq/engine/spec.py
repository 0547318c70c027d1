"""The interface of a model for all other modules: its shape and identity, and the methods every engine has."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.kv_cache import SequenceKV

LAYERS_MAX = 1024  # both bound the work that a file with a false shape can cause
SIZE_MAX = 1 << 24
KV_ITEM_BYTES = {"float32": 4}

LayerCallback = Callable[[int], None]
RowsCallback = Callable[[int, Any, NDArray[np.int64]], None]
"""Takes a layer, and the queries [kv_head, n, group, head_dim] of some rows at ascending positions, rotated and scaled. The
keys of all tokens up to the last of them are stored then. It may be called from several threads at once."""


@dataclass(frozen=True, slots=True)
class Family:
    """The features of a model family beyond RMSNorm, RoPE, grouped-query attention and SwiGLU."""

    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {"llama": Family(), "mistral": Family(), "qwen2": Family(qkv_bias=True), "qwen3": Family(qk_norm=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shape and identity of one model. `fingerprint` covers shape and weights, not the tokenizer.

    `max_positions` never exceeds `sliding_window`: within its window such a model attends to everything, as all others do.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied: bool
    eos_ids: tuple[int, ...]
    bos_id: int | None
    fingerprint: str
    family: str = "llama"
    rope_scaling: str = "default"
    sliding_window: int | None = None
    kv_dtype: str = "float32"

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * KV_ITEM_BYTES[self.kv_dtype]


LogitsCallback = Callable[[NDArray[np.float32]], None]
"""Takes some rows of logits, [n, vocab_size]."""
LOGIT_ROWS = 64
"""Rows of logits in one call: 12 MB with a vocabulary of 49 thousand ids."""


class Engine(Protocol):
    """One model in one process. Not thread-safe: one compute thread calls prefill and decode."""

    @property
    def spec(self) -> ModelSpec: ...

    def new_sequence(self, capacity_tokens: int) -> SequenceKV: ...

    def prefill(
        self,
        sequence: SequenceKV,
        tokens: NDArray[np.int32],
        *,
        before_layer: LayerCallback | None = None,
        after_layer: LayerCallback | None = None,
        logits_at: Sequence[int] | None = (-1,),
        on_logits: LogitsCallback | None = None,
        on_rows: RowsCallback | None = None,
    ) -> NDArray[np.float32] | None:
        """Append `tokens` at `sequence.length`; return the logits at the asked indices into `tokens`. With `on_logits` that
        function is called with them instead, in order, `LOGIT_ROWS` at a time: those of a whole chunk may not fit into memory.

        `before_layer(l)` runs before layer l first reads earlier KV, `after_layer(l)` once layer l's KV of these tokens
        is stored, each in the order of the layers; they may come from two threads. `on_rows` is called with the queries of
        all rows in each layer, by engines that attend. Exceptions of these propagate, and `sequence.length` stays as it was.
        """
        ...

    def prefill_layers(
        self,
        sequence: SequenceKV,
        entering: NDArray[Any],
        layers: range,
        *,
        before_layer: LayerCallback | None = None,
        after_layer: LayerCallback | None = None,
        logits: bool = False,
    ) -> NDArray[np.float32] | None:
        """Compute one stage of a pipeline: `prefill` for some of the layers, whose KV alone is read and stored.

        `entering`: the tokens [n], int32, for the first layer, else the hidden states [n, hidden], float32, that left the layer
        before. Return the hidden states that leave; behind the last layer the logits [1, vocab_size] after the last token, or
        None without `logits`. Stages over the same chunks give what `prefill` gives, bit for bit on one kind of engine. An
        engine that cannot be cut raises NotImplementedError.
        """
        ...

    def decode(self, sequences: list[SequenceKV], tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Compute one token for each sequence; return logits [len(sequences), vocab_size]."""
        ...


def check_spec(spec: ModelSpec) -> None:
    """Raise ModelError unless an engine of this shape can be built. Any field may hold anything: it comes from a file."""
    sizes = (spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.ffn, spec.vocab_size, spec.max_positions)
    numbers = (spec.rope_theta, spec.norm_eps)
    sound = (
        all(type(size) is int and 0 < size <= SIZE_MAX for size in sizes)
        and type(spec.layers) is int
        and 0 < spec.layers <= LAYERS_MAX
        and spec.heads % spec.kv_heads == 0
        and spec.heads * spec.head_dim <= SIZE_MAX
        and spec.head_dim % 2 == 0
        and all(isinstance(number, int | float) and math.isfinite(number) and number > 0 for number in numbers)
        and all(type(token) is int and 0 <= token < spec.vocab_size for token in (*spec.eos_ids, spec.bos_id or 0))
        and type(spec.tied) is bool
        and spec.family in FAMILIES
        and spec.kv_dtype in KV_ITEM_BYTES
    )
    if not sound:
        raise ModelError(f"the shape of {spec.name} makes no sense: {spec}"[:1000])


class Room(Protocol):
    """A thing with room for a number of tokens."""

    length: int
    capacity: int


def check_room(sequence: Room, token_count: int) -> None:
    """Raise ValueError unless `token_count` more tokens fit."""
    if token_count < 1:
        raise ValueError("no tokens given")
    if sequence.length + token_count > sequence.capacity:
        raise ValueError(f"{sequence.length} + {token_count} tokens exceed the sequence's capacity of {sequence.capacity}")


def check_batch(sequences: Sequence[Room], tokens: NDArray[Any], vocab_size: int) -> None:
    """Raise ValueError unless there is a token for each sequence, of the vocabulary and with room for it."""
    if len(sequences) != len(tokens):
        raise ValueError("decode needs one token for each sequence")
    for sequence in sequences:
        check_room(sequence, 1)
    check_tokens(tokens, vocab_size)


def check_entering(spec: ModelSpec, entering: NDArray[Any], layers: range) -> None:
    """Raise ValueError unless these can enter these layers of the model: tokens the first, hidden states any other."""
    if not (0 <= layers.start < layers.stop <= spec.layers and layers.step == 1):
        raise ValueError(f"{layers} are not layers of a model of {spec.layers}")
    if layers.start == 0:
        if entering.ndim != 1 or entering.dtype != np.int32:
            raise ValueError("tokens enter the first layer")
        check_tokens(entering, spec.vocab_size)
    elif entering.shape[1:] != (spec.hidden,) or entering.dtype != np.float32:
        raise ValueError(f"hidden states [n, {spec.hidden}] enter layer {layers.start}, not {entering.shape}")


def check_tokens(tokens: NDArray[Any], vocab_size: int) -> None:
    """Raise ValueError when an id lies outside the vocabulary."""
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        raise ValueError(f"token id out of range: the vocabulary has {vocab_size} ids")


def row_by_row(rows: Iterable[NDArray[np.float32]], on_logits: LogitsCallback | None) -> NDArray[np.float32] | None:
    """Return the result of `Engine.prefill` for these rows of logits, [vocab_size] each, each made when it is needed."""
    if on_logits is None:
        return np.stack(list(rows))
    for row in rows:
        on_logits(row[None])
    return None
