"""The decoder of Llama, Mistral and Qwen2/3: chunked prefill over a cached prefix, batched decode. float32, one namespace.

Prefill gives each thread of a team some of the rows; a thread waits for another only to see the KV of earlier rows. Decode
distributes only its large products over threads: measured with two threads, to distribute the remaining work too, or the rows,
was slower than one thread, as its many short steps are bound by the interpreter's lock.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.attention import Attention
from mooncake_zmq.engine.backend import array_namespace, ended_on_error, release_staging, synchronize, to_host
from mooncake_zmq.engine.cpu import Device
from mooncake_zmq.engine.elsewhere import Elsewhere, FarKV, Floats, Partial
from mooncake_zmq.engine.kv_cache import NewSequence, SequenceKV, check_whole
from mooncake_zmq.engine.matrices.panels import PANEL_COLUMNS, Product, column, linear, panel_count, rows_needed, shared_linear
from mooncake_zmq.engine.rowwise import ArrayRowwise, Rowwise
from mooncake_zmq.engine.spec import (
    LOGIT_ROWS,
    LayerCallback,
    LogitsCallback,
    ModelSpec,
    RowsCallback,
    check_batch,
    check_entering,
    check_room,
    check_tokens,
)
from mooncake_zmq.engine.team import Team

_Rest = tuple[NDArray[np.int64], Any, Any]
"""The requested rows that one thread computed, in order, with their hidden states [n, hidden] and queries [kv_head, n, group,
head_dim]."""
ROWS_TOGETHER = 16  # a thread's rows are a multiple of it: product heights that divide it waste nothing


class Llama:
    """Implements `Engine`. `tensors` are float32 as `weights` stores them, and are never written."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Any],
        *,
        device: Device = "cpu",
        threads: int = 1,
        rowwise: Rowwise | None = None,
        sequences: NewSequence | None = None,
    ) -> None:
        xp: Any = array_namespace(device)
        self._new_sequence = sequences or functools.partial(SequenceKV, xp=xp)
        self.spec = spec
        self._xp = xp
        self._tensors: dict[str, Any] = {name: xp.asarray(tensor) for name, tensor in tensors.items()}
        self._layers = [Layer(self._tensors, layer) for layer in range(spec.layers)]
        self._group = spec.heads // spec.kv_heads
        self._query_width = spec.heads * spec.head_dim
        self.frequencies: Any = self._tensors["inv_freq"]
        self._kv_width = spec.kv_heads * spec.head_dim
        self._team = Team(threads)
        self._linear: Product = linear
        self._product: Product = functools.partial(shared_linear, self._team)
        self._rowwise = rowwise or ArrayRowwise(xp)
        self._seats = [_Seat(xp, spec, self._rowwise) for _ in range(threads)]
        release_staging(xp)  # weights that do not fit fail here

    def new_sequence(self, capacity_tokens: int) -> SequenceKV:
        spec = self.spec
        return self._new_sequence(
            layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, capacity_tokens=capacity_tokens
        )

    # ------------------------------------------------------------------------------------------------------- prefill

    @ended_on_error
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
        tokens = np.asarray(tokens, dtype=np.int32)
        count = len(tokens)
        check_room(sequence, count)
        check_tokens(tokens, self.spec.vocab_size)
        asked = None if logits_at is None else np.arange(count)[np.asarray(logits_at, dtype=np.int64)]
        positions = np.arange(sequence.length, sequence.length + count)
        _, logits = self._pass(
            sequence, tokens, positions, range(self.spec.layers), before_layer, after_layer, asked, on_logits, on_rows
        )
        return logits

    @ended_on_error
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
        check_room(sequence, len(entering))
        check_entering(self.spec, entering, layers)
        is_last = layers.stop == self.spec.layers
        asked = np.array([len(entering) - 1]) if logits and is_last else None
        positions = np.arange(sequence.length, sequence.length + len(entering))
        outgoing, result = self._pass(sequence, entering, positions, layers, before_layer, after_layer, asked)
        return result if is_last else outgoing

    @ended_on_error
    def prefill_rows(
        self,
        sequence: SequenceKV,
        entering: NDArray[Any],
        positions: NDArray[np.int64],
        layers: range,
        logits_at: Sequence[int] | None = None,
    ) -> NDArray[np.float32] | None:
        """Compute `layers` for the tokens at some ascending positions of a sequence that has, in these layers, the KV of all
        other tokens before the last of them. Return as `prefill_layers` does, the logits at these indices of the rows."""
        asked = None if logits_at is None else np.arange(len(entering))[np.asarray(logits_at, dtype=np.int64)]
        outgoing, logits = self._pass(sequence, entering, positions, layers, None, None, asked)
        return logits if layers.stop == self.spec.layers else outgoing

    @ended_on_error
    def store_rows(self, sequence: SequenceKV, entering: NDArray[Any], positions: NDArray[np.int64], layer: int) -> None:
        """Store a layer's KV of the tokens at these positions, whose hidden states enter it, and compute nothing else."""
        bounds = self._split_rows(positions)

        def compute(rank: int) -> None:
            own = slice(bounds[rank], bounds[rank + 1])
            rows = self.rows_of(rank, sequence, positions[own], entering[own])
            rows.project(layer)
            rows.store(layer)

        self._team.run(compute)
        synchronize(self._xp)

    def _pass(
        self,
        sequence: SequenceKV,
        entering: NDArray[Any],
        positions: NDArray[np.int64],
        layers: range,
        before_layer: LayerCallback | None,
        after_layer: LayerCallback | None,
        asked: NDArray[np.int64] | None,
        on_logits: LogitsCallback | None = None,
        on_rows: RowsCallback | None = None,
    ) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None]:
        """Run `layers` over tokens [n] or hidden states [n, hidden] at ascending positions; return the hidden states that leave
        them, unless they are the last ones, and the logits at `asked`."""
        check_whole(sequence)
        count, last = len(entering), self.spec.layers - 1
        outgoing = None if layers.stop > last else np.empty((count, self.spec.hidden), dtype=np.float32)
        results: dict[int, _Rest] = {}
        bounds = self._split_rows(positions)
        xp, team, last_rank = self._xp, self._team, self._team.size - 1

        def compute(rank: int) -> None:
            first, end = bounds[rank], bounds[rank + 1]
            rows = self.rows_of(rank, sequence, positions[first:end], entering[first:end])
            for index in layers:
                rows.project(index)
                if before_layer and rank == 0:  # the other threads wait for rank 0 before they read
                    before_layer(index)
                rows.store(index)
                if rank > 0:
                    team.wait_for(rank, of=rank - 1)
                if rank < last_rank:
                    team.signal(rank, to=rank + 1)
                elif after_layer:
                    synchronize(xp)  # only then is the layer stored for a thread that copies it
                    after_layer(index)
                if on_rows:
                    on_rows(index, rows.queries, positions[first:end])
                if index < last and first < end:
                    rows.finish(index)
            if outgoing is not None:
                outgoing[first:end] = to_host(rows.hidden)
            # The last layer's output is needed only where logits are requested: 1/30 of the work of SmolLM2-135M.
            if asked is not None:
                mine = np.flatnonzero((asked >= first) & (asked < end))
                few = xp.asarray(asked[mine] - first)
                results[rank] = mine, rows.hidden[few], rows.queries[:, few]

        team.run(compute)
        synchronize(xp)
        sequence.length = int(positions[-1]) + 1
        if asked is None:
            return outgoing, None
        if on_logits is None:
            return outgoing, self._last_rows(sequence, positions[asked], list(results.values()))
        for begin in range(0, len(asked), LOGIT_ROWS):
            some = [_between(rest, begin, begin + LOGIT_ROWS) for rest in results.values()]
            on_logits(self._last_rows(sequence, positions[asked[begin : begin + LOGIT_ROWS]], some))
        return outgoing, None

    def rows_of(self, rank: int, sequence: SequenceKV, positions: NDArray[np.int64], entering: NDArray[Any]) -> "Rows":
        """Return the rows of a thread that tokens [n] or hidden states [n, hidden] at these positions begin as."""
        return ArrayRows(self, self._seats[rank], sequence, positions, entering)

    def _split_rows(self, positions: NDArray[np.int64]) -> list[int]:
        """Return the bounds of the threads' rows, of about equal work: a later row sees more keys. Measured: a multiply-add
        of attention costs 1.4 of a product with weights. Bounds are such that products need no padding, unless there are few
        rows."""
        spec, size, count = self.spec, self._team.size, len(positions)
        products = spec.hidden * 2 * (spec.heads + spec.kv_heads) * spec.head_dim + 3 * spec.hidden * spec.ffn
        work = np.cumsum(products / (1.4 * 2 * self._query_width) + positions)
        cuts = np.searchsorted(work, work[-1] * np.arange(1, size) / size)
        if count >= 8 * ROWS_TOGETHER * size:
            cuts = (cuts + ROWS_TOGETHER // 2) // ROWS_TOGETHER * ROWS_TOGETHER
        return [0, *cuts.tolist(), count]

    def _last_rows(self, sequence: SequenceKV, positions: NDArray[np.int64], results: "list[_Rest]") -> NDArray[np.float32]:
        """Finish the last layer for the tokens at `positions` and return their logits. `results`: the rows that each thread
        computed, their hidden states [n, hidden] and queries [kv_head, n, group, head_dim]."""
        last, attention = self.spec.layers - 1, self._seats[0].attention
        few = Activations(self._xp, self.spec, len(positions))
        for rows, hidden, queries in results:
            few.hidden[self._xp.asarray(rows)] = hidden
            for at, row in enumerate(rows.tolist()):
                few.attended[row] = attention.one(sequence, last, queries[:, at], int(positions[row]) + 1)
        self._finish_layer(self._product, few, self._layers[last], len(positions))
        return self._logits(self._product, few, len(positions))

    # -------------------------------------------------------------------------------------------------------- decode

    @ended_on_error
    def decode(self, sequences: list[SequenceKV], tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        check_whole(*sequences)
        return self.decode_over(sequences, tokens)

    def decode_elsewhere(
        self, sequences: Sequence[SequenceKV | FarKV], tokens: NDArray[np.int32], elsewhere: Elsewhere
    ) -> NDArray[np.float32]:
        """Compute what `decode` does for sequences of which other processes hold KV: all of a `FarKV`, of others the tokens
        `before` their own. All are one token longer then, also those that failed elsewhere: drop them, or set them back. On a
        CPU alone."""
        elsewhere.begin(sequences)
        attention = self._seats[0].attention

        def attend(index: int, queries: Any, keys: Any, values: Any, out: Any) -> None:
            by_row = queries.transpose(1, 0, 2, 3)
            elsewhere.ask(index, by_row, keys, values)
            for row, sequence in enumerate(sequences):
                if isinstance(sequence, SequenceKV):
                    sequence.append(index, sequence.length, keys[row], values[row])
            own = attention.parts(sequences, [each.length + 1 for each in sequences], index, by_row)
            own.merge(elsewhere.answers(index))
            with np.errstate(invalid="ignore"):  # rows that failed
                out[: len(sequences)] = (own.mixed / own.states[..., 1:]).reshape(len(sequences), -1)

        return self._step(sequences, tokens, attend)

    def attend_part(self, layer: int, sequences: Sequence[SequenceKV], lengths: Sequence[int], queries: Floats) -> Partial:
        """Compute the attention of queries [n, kv_head, group, head_dim], rotated and scaled, over the first tokens of each
        row's sequence. Any thread may call it beside the one that computes. On a CPU alone."""
        return Attention(self._xp, self.spec, self._rowwise).parts(sequences, lengths, layer, queries)

    def decode_over(self, sequences: "Sequence[SequenceKV | Attending]", tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Compute what `decode` does for sequences of which some compute their own attention. On a CPU alone."""
        attention = self._seats[0].attention

        def attend(index: int, queries: Any, keys: Any, values: Any, out: Any) -> None:
            for row, sequence in enumerate(sequences):
                if isinstance(sequence, SequenceKV):
                    sequence.append(index, sequence.length, keys[row], values[row])
                    out[row] = attention.one(sequence, index, queries[:, row], sequence.length + 1)
                else:
                    out[row] = sequence.attend(index, queries[:, row], keys[row], values[row])

        return self._step(sequences, tokens, attend)

    def _step(
        self, sequences: "Sequence[SequenceKV | FarKV | Attending]", tokens: NDArray[np.int32], attend: "Attend"
    ) -> NDArray[np.float32]:
        tokens = np.asarray(tokens, dtype=np.int32)
        check_batch(sequences, tokens, self.spec.vocab_size)
        count, product = len(sequences), self._product
        work = self._seats[0].activations(count)
        rope = self._rope_tables(positions_of(sequences))
        work.hidden[:count] = self.embed(tokens)
        for index, layer in enumerate(self._layers):
            self._project(product, work, layer, count)
            attend(index, *self._rotate(work.qkv[:count], rope), work.attended)
            self._finish_layer(product, work, layer, count)
        result = self._logits(product, work, count)
        for sequence in sequences:
            sequence.length += 1
        return result

    # -------------------------------------------------------------------------------------------- steps of both

    def _enter(self, entering: NDArray[Any]) -> Any:
        return self.embed(entering) if entering.ndim == 1 else self._xp.asarray(entering)

    def embed(self, tokens: NDArray[np.int32]) -> Any:
        """Return the hidden states [n, hidden] of tokens as they enter the first layer."""
        ids = self._xp.asarray(tokens)
        return self._column(self._tensors["head"], ids) if self.spec.tied else self._tensors["embed"][ids]

    def _column(self, matrix: Any, index: Any) -> Any:
        return column(matrix, index)

    def _width(self, matrix: Any) -> int:
        return len(matrix) * PANEL_COLUMNS

    def _rope_tables(self, positions: NDArray[np.int64]) -> tuple[Any, Any]:
        """Return exp(i * angle), [n, 1, head_dim / 2], for queries (which it also scales) and keys.

        Angles in float32 steps, as the reference computes them.
        """
        xp = self._xp
        angles = xp.asarray(positions, dtype=xp.float32)[:, None, None] * self._tensors["inv_freq"]
        keys = (xp.cos(angles) + 1j * xp.sin(angles)).astype(xp.complex64)
        return keys * np.float32(1.0 / math.sqrt(self.spec.head_dim)), keys

    def _project(self, product: Product, work: "Activations", layer: "Layer", count: int) -> None:
        self._normalize(work.hidden, layer.attn_norm, work.normed, count)
        product(self._xp, work.normed, layer.qkv, work.qkv, count)
        self._finish_projection(work.qkv[:count], layer)

    def _finish_projection(self, qkv: Any, layer: "Layer") -> None:
        """Apply the bias and the norms of the heads, where a family has them, in place."""
        if layer.qkv_bias is not None:
            qkv[:, : len(layer.qkv_bias)] += layer.qkv_bias
        if layer.qk_norm is not None:
            self._normalize_heads(qkv[:, : layer.qk_norm.size], layer.qk_norm)

    def _normalize_heads(self, queries_and_keys: Any, weight: Any) -> None:
        """Apply RMSNorm to each head by itself, in place; `weight` is [heads + kv_heads, head_dim]."""
        heads = queries_and_keys.reshape(len(queries_and_keys), *weight.shape)
        mean_square = self._xp.einsum("nhd,nhd->nh", heads, heads) * np.float32(1.0 / self.spec.head_dim)
        heads *= (np.float32(1.0) / self._xp.sqrt(mean_square + np.float32(self.spec.norm_eps)))[:, :, None]
        heads *= weight

    def _rotate(self, qkv: Any, rope: tuple[Any, Any]) -> tuple[Any, Any, Any]:
        """Return (queries [kv_head, n, group, head_dim], keys, values [n, kv_head, head_dim]), rotated; queries also scaled.

        `weights` stores the rows of Q and K as rotation pairs side by side, so that a rotation is a complex product.
        """
        xp, spec, pairs, count = self._xp, self.spec, self.spec.head_dim // 2, len(qkv)
        rope_queries, rope_keys = rope
        query_end, key_end = self._query_width, self._query_width + self._kv_width
        pairs_of_queries = qkv[:, :query_end].view(xp.complex64).reshape(count, spec.kv_heads, self._group, pairs)
        pairs_of_keys = qkv[:, query_end:key_end].view(xp.complex64).reshape(count, spec.kv_heads, pairs)
        queries = xp.empty((spec.kv_heads, count, self._group, pairs), dtype=xp.complex64)
        xp.multiply(pairs_of_queries.transpose(1, 0, 2, 3), rope_queries, out=queries)
        keys = pairs_of_keys * rope_keys
        values = qkv[:, key_end : key_end + self._kv_width].reshape(count, spec.kv_heads, spec.head_dim)
        return queries.view(xp.float32), keys.view(xp.float32), values

    def _finish_layer(self, product: Product, work: "Activations", layer: "Layer", count: int) -> None:
        """Compute the output projection and feed-forward, each added to the hidden state."""
        xp, ffn, hidden = self._xp, self.spec.ffn, self.spec.hidden
        product(xp, work.attended, layer.out, work.delta, count)
        work.hidden[:count] += work.delta[:count, :hidden]
        self._normalize(work.hidden, layer.ffn_norm, work.normed, count)
        product(xp, work.normed, layer.gate_up, work.gate_up, count)
        gate, up = work.gate_up[:count, :ffn], work.gate_up[:count, ffn : 2 * ffn]
        self._rowwise.activate(gate, up, work.active[:count])
        product(xp, work.active, layer.down, work.delta, count)
        work.hidden[:count] += work.delta[:count, :hidden]

    def _logits(self, product: Product, work: "Activations", count: int) -> NDArray[np.float32]:
        head = self._tensors["head"]
        self._normalize(work.hidden, self._tensors["final_norm"], work.normed, count)
        out = self._xp.empty((len(work.normed), self._width(head)), dtype=self._xp.float32)
        product(self._xp, work.normed, head, out, count)
        logits: NDArray[np.float32] = to_host(out[:count, : self.spec.vocab_size])
        return logits

    def _normalize(self, x: Any, weight: Any, out: Any, count: int) -> None:
        self._rowwise.normalize(x[:count], weight, self.spec.norm_eps, out[:count])


def _between(rest: "_Rest", begin: int, end: int) -> "_Rest":
    """Return one thread's results for the rows from `begin` to `end`, counted from there."""
    rows, hidden, queries = rest
    first, stop = np.searchsorted(rows, (begin, end)).tolist()
    return rows[first:stop] - begin, hidden[first:stop], queries[:, first:stop]


Attend = Callable[[int, Any, Any, Any, Any], None]
"""A function of a layer, the queries [kv_head, n, group, head_dim] and new keys and values [n, kv_head, head_dim] of a step's
rows: it stores these, and writes the rows' attention into the first rows of the last argument [rows, heads * head_dim]."""


def positions_of(sequences: "Sequence[SequenceKV | FarKV | Attending]") -> NDArray[np.int64]:
    """Return the positions of the next tokens."""
    return np.array([sequence.position for sequence in sequences])


class Attending(Protocol):
    """A running sequence that keeps its KV as it likes."""

    length: int
    capacity: int

    @property
    def position(self) -> int:
        """The position of the next token."""

    def attend(self, layer: int, queries: Any, keys: Any, values: Any) -> Any:
        """Take the next token's key and value [kv_head, head_dim], and return its attention [heads * head_dim] for its queries
        [kv_head, group, head_dim], rotated and scaled."""


class Rows(Protocol):
    """One thread's rows of a prefill, which go through its layers one after another."""

    hidden: Any
    """The hidden states [n, hidden] that left the last finished layer."""
    queries: Any
    """The queries [kv_head, n, group, head_dim] of the last layer that was stored; scaled."""

    def project(self, layer: int) -> None:
        """Compute the queries, keys and values of a layer."""

    def store(self, layer: int) -> None:
        """Store those keys and values into the sequence."""

    def finish(self, layer: int) -> None:
        """Finish the layer, once the keys and values of all earlier tokens are in the sequence."""


class ArrayRows:
    """Rows computed by whole-array operations."""

    def __init__(
        self, engine: Llama, seat: "_Seat", sequence: SequenceKV, positions: NDArray[np.int64], entering: NDArray[Any]
    ) -> None:
        self._engine, self._seat, self._sequence, self._positions = engine, seat, sequence, positions
        self._count = len(entering)
        self._work = seat.activations(self._count)
        self._rope = engine._rope_tables(positions)
        self.hidden = self._work.hidden[: self._count]
        self.hidden[...] = engine._enter(entering)

    def place(self, positions: NDArray[np.int64]) -> None:
        """Store and attend from these positions instead of those for which keys are rotated."""
        self._positions = positions

    def project(self, layer: int) -> None:
        engine = self._engine
        engine._project(engine._linear, self._work, engine._layers[layer], self._count)
        self.queries, self._keys, self._values = engine._rotate(self._work.qkv[: self._count], self._rope)

    def store(self, layer: int) -> None:
        self._sequence.store_rows(layer, self._positions, self._keys, self._values)

    def finish(self, layer: int) -> None:
        engine, work, count = self._engine, self._work, self._count
        self._seat.attention.many(self._sequence, layer, self.queries, self._positions, work.attended)
        engine._finish_layer(engine._linear, work, engine._layers[layer], count)


class Layer:
    """One layer's tensors under their names. `qkv_bias` and `qk_norm` are None in families that have none."""

    attn_norm: Any
    down: Any
    ffn_norm: Any
    gate_up: Any
    out: Any
    qkv: Any
    qkv_bias: Any
    qk_norm: Any

    def __init__(self, tensors: dict[str, Any], layer: int) -> None:
        for name in self.__annotations__:
            setattr(self, name, tensors.get(f"{layer}.{name}"))


class _Seat:
    """The buffers of one thread, kept from step to step; as large as its largest step, so the caller's chunks bound them."""

    def __init__(self, xp: Any, spec: ModelSpec, rowwise: Rowwise) -> None:
        self.attention = Attention(xp, spec, rowwise)
        self._xp = xp
        self._spec = spec
        self._kept = Activations(xp, spec, 1)

    def activations(self, count: int) -> "Activations":
        """Return room for `count` rows; it holds the data of the last step."""
        if self._kept.rows < count:
            self._kept = Activations(self._xp, self._spec, count)
        return self._kept


class Activations:
    """The activations of one step, reused by all its layers. Products also read the padding rows of chunks, whose content is
    undefined."""

    def __init__(self, xp: Any, spec: ModelSpec, count: int) -> None:
        query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        rows = max(rows_needed(xp, count, depth) for depth in (spec.hidden, query, spec.ffn))

        def zeros(width: int) -> Any:
            return xp.zeros((rows, width), dtype=xp.float32)

        def panelled(width: int) -> Any:
            return zeros(panel_count(width) * PANEL_COLUMNS)

        self.rows = count
        self.hidden = zeros(spec.hidden)
        self.normed = zeros(spec.hidden)
        self.qkv = panelled(query + 2 * kv)
        self.attended = zeros(query)
        self.delta = panelled(spec.hidden)
        self.gate_up = panelled(2 * spec.ffn)
        self.active = zeros(spec.ffn)
