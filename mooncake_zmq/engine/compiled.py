"""An optional engine: decode in machine code over the weights in the fewest exact bits; of prefill the products with weights
and all that is no product.

Decode reads every weight once a step and does little else: a quarter or a fifth of the bytes is most of its gain, and
the rest is that all threads share a step without returning to Python. Needs Numba (extra `compiled`).
"""

import ctypes
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine import machine_code
from mooncake_zmq.engine.kv_cache import KEY_TILE, SequenceKV
from mooncake_zmq.engine.llama import Llama
from mooncake_zmq.engine.panels import PANEL_COLUMNS
from mooncake_zmq.engine.quantized import Form, Panels
from mooncake_zmq.engine.spec import ModelSpec, check_batch
from mooncake_zmq.engine.step_layout import ARRAY_FIELDS, CACHE_FIELDS, ROW_NUMBERS, SPAN_TILES, Array, What

_LAYER_MATRICES = ("qkv", "out", "gate_up", "down")  # in the order of step_layout.QKV..DOWN


class CompiledRowwise:
    """Implements `Rowwise`: each of its steps in one pass over the rows. Arrays are float32, contiguous within a row."""

    def __init__(self, code: machine_code.MachineCode) -> None:
        self._code = code

    def normalize(self, x: Any, weight: Any, eps: float, out: Any) -> None:
        held = np.array([eps], dtype=np.float32)
        self._run(What.NORMALIZE, *_rows(x), _address(weight), *_rows(out), *out.shape, _address(held))

    def activate(self, gate: Any, up: Any, out: Any) -> None:
        self._run(What.ACTIVATE, *_rows(gate), *_rows(up), *_rows(out), *out.shape)

    def exponentiate(self, scores: Any, visible: int, *, shift: bool) -> Any:
        heads, tokens, group, width = scores.shape
        assert scores.flags.c_contiguous
        totals = np.empty((heads, tokens, group, 1), dtype=np.float32)
        self._run(What.EXPONENTIATE, _address(scores), width, heads, tokens, group, visible, _address(totals), shift)
        return totals

    def multiply(self, xp: Any, x: Any, panels: Any, out: Any, count: int) -> None:
        """As `panels.linear`, without scratch rows. Measured with AVX-512, 160 GFLOP/s where OpenBLAS makes 120 of it."""
        total, depth, _ = panels.shape
        assert len(x) >= count <= len(out)
        assert panels.flags.c_contiguous
        assert x.shape[1] == depth
        assert out.shape[1] >= total * PANEL_COLUMNS
        self._run(What.PRODUCT, *_rows(x), _address(panels), *_rows(out), count, depth, total)

    def _run(self, what: What, *numbers: int) -> None:
        table = (ctypes.c_int64 * ROW_NUMBERS)(*numbers)
        self._code(what, ctypes.addressof(table))


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _rows(array: NDArray[np.float32]) -> tuple[int, int]:
    """Address and stride, in floats, of rows."""
    assert array.dtype == np.float32
    assert array.strides[1] == 4 or array.shape[1] == 1
    return _address(array), array.strides[0] // 4


class CompiledLlama(Llama):
    """`Llama` with a decode step of its own; `panels` holds those matrices that have a shorter form.

    `threads` share each step: more of them than idle cores make it slower, since they wait for each other in loops.
    Machine code is kept in `cache_dir`; the first process on a machine takes some seconds to make it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: dict[str, NDArray[np.float32]],
        panels: Mapping[str, Panels],
        *,
        threads: int = 1,
        cache_dir: Path,
    ) -> None:
        self._code = _machine_code(cache_dir)
        rowwise = CompiledRowwise(self._code)
        super().__init__(spec, tensors, threads=threads, rowwise=rowwise)
        self._linear = rowwise.multiply
        self._panels = panels  # as of the tensors, the kernel knows their addresses only
        names = [f"{layer}.{name}" for layer in range(spec.layers) for name in _LAYER_MATRICES]
        norms = [f"{layer}.{name}" for layer in range(spec.layers) for name in ("attn_norm", "ffn_norm")]
        self._model: dict[Array, NDArray[Any]] = {
            Array.MATRICES: np.array([self._matrix(name) for name in (*names, "head")], dtype=np.int64),
            Array.NORMS: np.stack([tensors[name] for name in (*norms, "final_norm")]),
            Array.BIASES: self._of_each_layer("qkv_bias", (0,)),
            Array.HEAD_NORMS: self._of_each_layer("qk_norm", (0, spec.head_dim)),
            Array.EPSILON: np.array([spec.norm_eps], dtype=np.float32),
        }

    def decode(self, sequences: list[SequenceKV], tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        tokens = np.asarray(tokens, dtype=np.int32)
        check_batch(sequences, tokens, self.spec.vocab_size)
        if not sequences:
            return np.empty((0, self.spec.vocab_size), dtype=np.float32)
        work = _workspace(self.spec, len(sequences), self._team.size)
        work[Array.CACHES][:] = [
            (sequence.keys.ctypes.data, sequence.values.ctypes.data, sequence.capacity, sequence.length)
            for sequence in sequences
        ]
        angles = np.array([[sequence.length] for sequence in sequences], dtype=np.float32) * self._tensors["inv_freq"]
        work[Array.COS][:], work[Array.SIN][:] = np.cos(angles), np.sin(angles)
        work[Array.HIDDEN][:, : self.spec.hidden] = self._embed(tokens)
        self._run(_table(self._model | work))
        for sequence in sequences:
            sequence.length += 1
        return work[Array.LOGITS][:, : self.spec.vocab_size]

    def _run(self, table: NDArray[np.int64]) -> None:
        """One step in all threads of the team; `table` and what it tells of live until the last has ended."""
        self._team.run(lambda rank: self._code(What.DECODE_STEP, table.ctypes.data, rank))

    def _matrix(self, name: str) -> list[int]:
        """A row of step_layout.MATRIX_FIELDS."""
        panels = self._panels.get(name)
        if panels is None:
            values = self._tensors[name]
            return [Form.FLOAT32, values.ctypes.data, 0, 0, 0, values.shape[1], len(values)]
        values, scales, minima = panels.values, panels.scales, panels.minima
        depth = self._tensors[name].shape[1]
        shift = 0 if scales is None else int(math.log2(depth // scales.shape[1]))
        addresses = [0 if array is None else array.ctypes.data for array in (values, scales, minima)]
        return [panels.form, *addresses, shift, depth, len(values)]

    def _of_each_layer(self, name: str, shape_of_none: tuple[int, ...]) -> NDArray[np.float32]:
        if f"0.{name}" not in self._tensors:
            return np.empty((self.spec.layers, *shape_of_none), dtype=np.float32)
        return np.stack([self._tensors[f"{layer}.{name}"] for layer in range(self.spec.layers)])


def _workspace(spec: ModelSpec, rows: int, threads: int) -> dict[Array, NDArray[Any]]:
    """The arrays of one step that are not the model's. Widths are rounded up to whole panels."""
    group, dim, query = spec.heads // spec.kv_heads, spec.head_dim, spec.heads * spec.head_dim

    def floats(*shape: int) -> NDArray[np.float32]:
        return np.empty(shape, dtype=np.float32)

    def panelled(width: int) -> NDArray[np.float32]:
        return floats(rows, -(-width // PANEL_COLUMNS) * PANEL_COLUMNS)

    return {
        Array.BARRIER: np.zeros(1, dtype=np.int64),
        Array.CACHES: np.empty((rows, CACHE_FIELDS), dtype=np.int64),
        Array.COS: floats(rows, dim // 2),
        Array.SIN: floats(rows, dim // 2),
        Array.HIDDEN: panelled(spec.hidden),
        Array.LOGITS: panelled(spec.vocab_size),
        Array.NORMED: floats(threads, rows, spec.hidden),
        Array.QKV: panelled(query + 2 * spec.kv_heads * dim),
        Array.QUERIES: floats(threads, group, dim),
        Array.SCORES: floats(threads, group, SPAN_TILES * KEY_TILE),
        Array.MIXED: floats(threads, rows, spec.kv_heads, group, dim),
        Array.STATES: floats(threads, rows, spec.kv_heads, group, 2),
        Array.ATTENDED: floats(rows, query),
        Array.GATE_UP: panelled(2 * spec.ffn),
        Array.ACTIVE: floats(rows, spec.ffn),
    }


def _table(arrays: Mapping[Array, NDArray[Any]]) -> NDArray[np.int64]:
    """Where all the arrays of a step lie: what a decode step takes."""
    table = np.zeros((len(Array), ARRAY_FIELDS), dtype=np.int64)
    for row, array in arrays.items():
        assert array.flags.c_contiguous, row.name
        table[row, : 1 + array.ndim] = array.ctypes.data, *array.shape
    return table


_machine_code = functools.cache(machine_code.load)
