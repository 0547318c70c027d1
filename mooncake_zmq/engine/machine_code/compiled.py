"""An optional engine: decode in machine code over the weights in the fewest exact bits, and prefill over the weights in
float32.

Decode reads every weight once a step and does little else: a quarter or a fifth of the bytes is most of its gain, the other
part is that all threads share a step without returning to Python. Needs Numba (extra `compiled`).
"""

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.elsewhere import Elsewhere, FarKV, Floats, Partial
from mooncake_zmq.engine.kv_cache import KEY_TILE, NewSequence, SequenceKV, check_whole
from mooncake_zmq.engine.llama import Attend, Attending, Llama, positions_of
from mooncake_zmq.engine.machine_code import object_code
from mooncake_zmq.engine.machine_code.few_tables import FewTable, has_machine_code, table_of
from mooncake_zmq.engine.machine_code.placed_parts import NO_CACHE, PlacingCodedKV, PlacingSequenceKV, cache_row
from mooncake_zmq.engine.machine_code.step_layout import (
    ATTENDING_ROWS,
    CACHE_FIELDS,
    FEW_AT,
    LAYER_ROWS,
    SPAN_TILES,
    Array,
    What,
)
from mooncake_zmq.engine.matrices.panels import PANEL_COLUMNS
from mooncake_zmq.engine.matrices.quantized import Form, Panels
from mooncake_zmq.engine.offsets import offsets_of
from mooncake_zmq.engine.selection.few_of_many import FewOfMany
from mooncake_zmq.engine.spec import ModelSpec, check_batch
from mooncake_zmq.kv.codec import Codec

_LAYER_CALL = ctypes.CFUNCTYPE(None, *3 * [ctypes.c_int64])
_Projected = Callable[[NDArray[Any]], tuple[Any, Any, Any]]
"""A function of a layer's QKV, which it finishes: it returns the queries, keys and values, as in `Attend`."""
_CalledBack = Callable[[int, int, _Projected, Mapping[Array, NDArray[Any]]], None]
"""A function of a layer, whether it is called before the attention, what that has, and a step's arrays."""
_LAYER_MATRICES = ("qkv", "out", "gate_up", "down")  # in the order of step_layout.QKV..DOWN


class CompiledRows:
    """Implements `Rows`; only between its calls it holds the interpreter's lock."""

    def __init__(
        self,
        code: object_code.MachineCode,
        arrays: Mapping[Array, NDArray[Any]],
        hidden: NDArray[np.float32],
        group: int,
    ) -> None:
        """`arrays`: all arrays of a prefill, kept here because the table only has their addresses. `hidden`: HIDDEN without its
        padding, with the entering states. `group`: queries per key head."""
        self._code, self._arrays, self._table = code, arrays, _table(arrays)
        queries = arrays[Array.QUERIES]
        self.hidden, self.queries = hidden, queries.reshape(len(queries), len(hidden), group, queries.shape[2])

    def project(self, layer: int) -> None:
        self._code(What.PROJECT_ROWS, self._table.ctypes.data, layer)

    def store(self, layer: int) -> None:
        self._code(What.STORE_ROWS, self._table.ctypes.data, layer)

    def finish(self, layer: int) -> None:
        self._code(What.FINISH_ROWS, self._table.ctypes.data, layer)


class CompiledLlama(Llama):
    """`Llama` with a decode step of its own; `panels` holds those matrices that have a shorter form.

    `threads` share each step: more of them than idle cores make it slower, since they wait for each other in loops.
    Machine code is kept in `cache_dir`; the first process on a machine compiles it in some seconds.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: dict[str, NDArray[np.float32]],
        panels: Mapping[str, Panels],
        *,
        threads: int = 1,
        codec: Codec | None = None,
        cache_dir: Path,
    ) -> None:
        self._code = _machine_code(cache_dir)
        sequences: NewSequence = functools.partial(PlacingSequenceKV, self._code)
        if codec is not None:
            code = _machine_code(cache_dir, object_code.CODECS)
            sequences = functools.partial(PlacingCodedKV, code, codec, offsets_of(spec, tensors, codec))
        super().__init__(spec, tensors, threads=threads, sequences=sequences)
        self._panels = panels  # kept here, as the tensors are: the kernel has their addresses only
        names = [f"{layer}.{name}" for layer in range(spec.layers) for name in _LAYER_MATRICES]
        self._shortest = {Array.MATRICES: np.array([self._matrix(name) for name in (*names, "head")], dtype=np.int64)}
        self._exact = {
            Array.MATRICES: np.array([self._float32_matrix(name) for name in names], dtype=np.int64),
            Array.SHIFTED: np.zeros(spec.layers, dtype=np.int64),
        }
        self._kept: dict[int, dict[Array, NDArray[Any]]] = {}
        """The arrays of each rank's largest prefill, by rank."""
        self._few_tables: WeakKeyDictionary[FewOfMany, FewTable] = WeakKeyDictionary()
        norms = [f"{layer}.{name}" for layer in range(spec.layers) for name in ("attn_norm", "ffn_norm")]
        self._model: dict[Array, NDArray[Any]] = {
            Array.NORMS: np.stack([tensors[name] for name in (*norms, "final_norm")]),
            Array.BIASES: self._of_each_layer("qkv_bias", (0,)),
            Array.HEAD_NORMS: self._of_each_layer("qk_norm", (0, spec.head_dim)),
            Array.EPSILON: np.array([spec.norm_eps], dtype=np.float32),
        }

    def decode(self, sequences: list[SequenceKV], tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        check_whole(*sequences)
        return self.decode_over(sequences, tokens)

    def decode_over(self, sequences: Sequence[SequenceKV | Attending], tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """See `Llama.decode_over`. Attention to few of many tokens is machine code too, that of others is called."""
        if not all(isinstance(each, SequenceKV) or _chooses_in_machine_code(each) for each in sequences):
            return super().decode_over(sequences, tokens)
        tokens = np.asarray(tokens, dtype=np.int32)
        check_batch(sequences, tokens, self.spec.vocab_size)
        if not sequences:
            return np.empty((0, self.spec.vocab_size), dtype=np.float32)
        work = self._begun(sequences, tokens)
        self._run(_table(self._model | self._shortest | work))
        for sequence in sequences:
            sequence.length += 1
        return work[Array.LOGITS][:, : self.spec.vocab_size]

    def decode_elsewhere(
        self, sequences: Sequence[SequenceKV | FarKV], tokens: NDArray[np.int32], elsewhere: Elsewhere
    ) -> NDArray[np.float32]:
        """See `Llama.decode_elsewhere`. One thread asks before all compute what is here; answers are merged as a thread's."""
        elsewhere.begin(sequences)

        def attend(layer: int, is_asking: int, projected: _Projected, work: Mapping[Array, NDArray[Any]]) -> None:
            if is_asking:
                queries, keys, values = projected(work[Array.QKV].copy())  # the attention finishes it too
                elsewhere.ask(layer, queries.transpose(1, 0, 2, 3), keys, values)
            else:
                work[Array.MIXED][-1], work[Array.STATES][-1] = elsewhere.answers(layer)

        return self._called_step(sequences, tokens, Array.ELSEWHERE, attend)

    def attend_part(self, layer: int, sequences: Sequence[SequenceKV], lengths: Sequence[int], queries: Floats) -> Partial:
        spec, rows = self.spec, len(sequences)
        group, dim = spec.heads // spec.kv_heads, spec.head_dim
        work: dict[Array, NDArray[Any]] = {
            Array.CACHES: np.array([cache_row(*each) for each in zip(sequences, lengths, strict=True)], dtype=np.int64),
            Array.QUERIES: np.ascontiguousarray(queries)[None],
            Array.SCORES: _floats(1, group, SPAN_TILES * KEY_TILE),
            Array.MIXED: _floats(1, rows, spec.kv_heads, group, dim),
            Array.STATES: _floats(1, rows, spec.kv_heads, group, 2),
        }
        self._code(What.ATTEND_PART, _table(work).ctypes.data, layer)
        return Partial(work[Array.MIXED][0], work[Array.STATES][0])

    def _step(
        self, sequences: Sequence[SequenceKV | FarKV | Attending], tokens: NDArray[np.int32], attend: Attend
    ) -> NDArray[np.float32]:
        """Run the step in machine code but for the attention: one thread calls `attend` where all have the projections."""
        return self._called_step(
            sequences,
            tokens,
            Array.ATTENDING,
            lambda layer, _, projected, work: attend(layer, *projected(work[Array.QKV]), work[Array.ATTENDED]),
        )

    def _called_step(
        self, sequences: Sequence[SequenceKV | FarKV | Attending], tokens: NDArray[np.int32], why: Array, attend: _CalledBack
    ) -> NDArray[np.float32]:
        """Run a step of which one thread calls `attend` in each layer: ATTENDING or ELSEWHERE."""
        tokens = np.asarray(tokens, dtype=np.int32)
        check_batch(sequences, tokens, self.spec.vocab_size)
        if not sequences:
            return np.empty((0, self.spec.vocab_size), dtype=np.float32)
        work = self._begun(sequences, tokens, parts_elsewhere=int(why is Array.ELSEWHERE))
        rope = self._rope_tables(positions_of(sequences))
        failure: Future[None] = Future()  # nothing can be raised through machine code

        def projected(layer: int, qkv: NDArray[Any]) -> tuple[Any, Any, Any]:
            self._finish_projection(qkv, self._layers[layer])
            return self._rotate(qkv, rope)

        def attend_layer(layer: int, is_asking: int, _unused: int) -> None:
            try:
                if not failure.done():
                    attend(layer, is_asking, functools.partial(projected, layer), work)
            except BaseException as error:
                failure.set_exception(error)

        callback = _LAYER_CALL(attend_layer)
        work[why] = np.array([ctypes.cast(callback, ctypes.c_void_p).value], dtype=np.int64)
        self._run(_table(self._model | self._shortest | work))
        if failure.done():
            failure.result()
        for sequence in sequences:
            sequence.length += 1
        return work[Array.LOGITS][:, : self.spec.vocab_size]

    def _begun(
        self, sequences: Sequence[SequenceKV | FarKV | Attending], tokens: NDArray[np.int32], parts_elsewhere: int = 0
    ) -> dict[Array, NDArray[Any]]:
        """Return the arrays of a step of these tokens, but for the caches of sequences that are none of ours."""
        work = _workspace(self.spec, len(sequences), self._team.size, parts_elsewhere)
        for row, sequence in zip(work[Array.CACHES], sequences, strict=True):
            row[:] = cache_row(sequence, sequence.length) if isinstance(sequence, SequenceKV) else NO_CACHE
            if isinstance(sequence, FewOfMany):
                row[FEW_AT] = self._few_table(sequence).address(sequence.length)
        self._turn(work, positions_of(sequences))
        work[Array.HIDDEN][:, : self.spec.hidden] = self.embed(tokens)
        return work

    def _few_table(self, sequence: FewOfMany) -> FewTable:
        if sequence not in self._few_tables:
            self._few_tables[sequence] = FewTable(sequence, self._group)
        return self._few_tables[sequence]

    def rows_of(self, rank: int, sequence: SequenceKV, positions: NDArray[np.int64], entering: NDArray[Any]) -> CompiledRows:
        spec, rows = self.spec, len(entering)
        if rank not in self._kept or len(self._kept[rank][Array.HIDDEN]) < rows:
            self._kept[rank] = _rows_workspace(spec, rows)
        work = _first_rows(self._kept[rank], rows, self._group)
        work[Array.CACHES][:] = cache_row(sequence, sequence.length)
        work[Array.POSITIONS] = np.ascontiguousarray(positions, dtype=np.int64)
        self._turn(work, positions)
        hidden = work[Array.HIDDEN][:, : spec.hidden]
        hidden[:] = self._enter(entering)
        return CompiledRows(self._code, self._model | self._exact | work, hidden, self._group)

    def _turn(self, work: Mapping[Array, NDArray[Any]], positions: NDArray[np.int64]) -> None:
        """Compute the rotary angles of the rows."""
        angles = positions.astype(np.float32)[:, None] * self._tensors["inv_freq"]
        work[Array.COS][:], work[Array.SIN][:] = np.cos(angles), np.sin(angles)

    def _run(self, table: NDArray[np.int64]) -> None:
        """Run one step in all threads of the team; `table` and the arrays it names exist until the last thread has ended."""
        self._team.run(lambda rank: self._code(What.DECODE_STEP, table.ctypes.data, rank))

    def _matrix(self, name: str) -> list[int]:
        """Return a row of step_layout.MATRIX_FIELDS."""
        panels = self._panels.get(name)
        if panels is None:
            return self._float32_matrix(name)
        values, scales, minima = panels.values, panels.scales, panels.minima
        depth = self._tensors[name].shape[1]
        shift = 0 if scales is None else int(math.log2(depth // scales.shape[1]))
        addresses = [0 if array is None else array.ctypes.data for array in (values, scales, minima)]
        return [panels.form, *addresses, shift, depth, len(values)]

    def _float32_matrix(self, name: str) -> list[int]:
        values = self._tensors[name]
        return [Form.FLOAT32, values.ctypes.data, 0, 0, 0, values.shape[1], len(values)]

    def _of_each_layer(self, name: str, shape_of_none: tuple[int, ...]) -> NDArray[np.float32]:
        if f"0.{name}" not in self._tensors:
            return np.empty((self.spec.layers, *shape_of_none), dtype=np.float32)
        return np.stack([self._tensors[f"{layer}.{name}"] for layer in range(self.spec.layers)])


def _workspace(spec: ModelSpec, rows: int, threads: int, parts_elsewhere: int) -> dict[Array, NDArray[Any]]:
    """Return the arrays of one step that are not the model's. Widths are rounded up to whole panels."""
    parts = threads + parts_elsewhere
    group, dim, query = spec.heads // spec.kv_heads, spec.head_dim, spec.heads * spec.head_dim
    return {
        Array.BARRIER: np.zeros(1, dtype=np.int64),
        Array.CACHES: np.empty((rows, CACHE_FIELDS), dtype=np.int64),
        Array.COS: _floats(rows, dim // 2),
        Array.SIN: _floats(rows, dim // 2),
        Array.HIDDEN: _panelled(rows, spec.hidden),
        Array.LOGITS: _panelled(rows, spec.vocab_size),
        Array.NORMED: _floats(threads, rows, spec.hidden),
        Array.QKV: _panelled(rows, query + 2 * spec.kv_heads * dim),
        Array.QUERIES: _floats(threads, group, dim),
        Array.SCORES: _floats(threads, group, SPAN_TILES * KEY_TILE),
        Array.MIXED: _floats(parts, rows, spec.kv_heads, group, dim),
        Array.STATES: _floats(parts, rows, spec.kv_heads, group, 2),
        Array.ATTENDED: _floats(rows, query),
        Array.GATE_UP: _panelled(rows, 2 * spec.ffn),
        Array.ACTIVE: _floats(rows, spec.ffn),
    }


def _rows_workspace(spec: ModelSpec, rows: int) -> dict[Array, NDArray[Any]]:
    """Return the arrays of one thread's rows of a prefill that are not the model's."""
    group, dim, query = spec.heads // spec.kv_heads, spec.head_dim, spec.heads * spec.head_dim
    some, few = min(rows, LAYER_ROWS), max(1, ATTENDING_ROWS // group) * group
    return {
        Array.CACHES: np.empty((1, CACHE_FIELDS), dtype=np.int64),
        Array.COS: _floats(rows, dim // 2),
        Array.SIN: _floats(rows, dim // 2),
        Array.HIDDEN: _panelled(rows, spec.hidden),
        Array.NORMED: _floats(1, some, spec.hidden),
        Array.QKV: _panelled(rows, query + 2 * spec.kv_heads * dim),
        Array.QUERIES: _floats(spec.kv_heads, rows * group, dim),
        Array.SCORES: _floats(1, few, SPAN_TILES * KEY_TILE),
        Array.MIXED: _floats(1, 1, 1, few, dim),
        Array.STATES: _floats(1, 1, 1, few, 2),
        Array.ATTENDED: _floats(some, query),
        Array.GATE_UP: _panelled(some, 2 * spec.ffn),
        Array.ACTIVE: _floats(some, spec.ffn),
    }


def _first_rows(work: Mapping[Array, NDArray[Any]], rows: int, group: int) -> dict[Array, NDArray[Any]]:
    """Return the first `rows` rows of arrays that have as many or more."""
    fewer = {each: work[each][:rows] for each in (Array.COS, Array.SIN, Array.HIDDEN, Array.QKV)}
    queries = work[Array.QUERIES]
    heads, _, dim = queries.shape
    packed = queries.reshape(-1)[: heads * rows * group * dim].reshape(heads, rows * group, dim)
    return {**work, **fewer, Array.QUERIES: packed}


def _floats(*shape: int) -> NDArray[np.float32]:
    return np.empty(shape, dtype=np.float32)


def _panelled(rows: int, width: int) -> NDArray[np.float32]:
    return _floats(rows, -(-width // PANEL_COLUMNS) * PANEL_COLUMNS)


def _chooses_in_machine_code(sequence: SequenceKV | Attending) -> bool:
    return isinstance(sequence, FewOfMany) and has_machine_code(sequence)


def _table(arrays: Mapping[Array, NDArray[Any]]) -> NDArray[np.int64]:
    """Return the addresses of all the arrays of a step, the argument of a decode step."""
    return table_of(arrays, len(Array))


_machine_code = functools.cache(object_code.load)
