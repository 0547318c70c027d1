"""The engine on a GPU: `Llama` whose products are whole matrices, and whose steps between them are kernels (device.cu).

A decode step of all sequences is some dozen launches a layer, whatever the batch: the host launches the next one long before
the last has ended, so that a step takes as long as the GPU needs to read its weights and KV.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.engine.backend import array_namespace, ended_on_error
from mooncake_zmq.engine.kv_cache import KEY_TILE, NewSequence, SequenceKV, check_whole, start_of_run
from mooncake_zmq.engine.llama import Activations, Layer, Llama
from mooncake_zmq.engine.matrices.panels import Product
from mooncake_zmq.engine.spec import ModelSpec, check_batch

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 256
"""Threads of a block, in every kernel that does not say otherwise: as in device.cu."""
BLOCKS_WANTED = 528
"""Blocks of `attend`: sequences are cut into splits until so many can run side by side, four on each of an H100's 132
processors."""
LEAST_SPAN_TILES = THREADS // KEY_TILE
"""The least size of a split: the tiles that one block takes at a time."""


class Kernels:
    """The functions of device.cu, compiled for a model's heads. Compiled code is kept where CuPy keeps it."""

    def __init__(self, xp: Any, spec: ModelSpec) -> None:
        group = spec.heads // spec.kv_heads
        if spec.head_dim > THREADS:
            raise ValueError(
                f"device 'cuda' computes heads of at most {THREADS} dimensions, and {spec.name} has {spec.head_dim}"
            )
        sizes = {"GROUP": group, "DIM": spec.head_dim, "KEY_TILE": KEY_TILE}
        options = tuple(f"-D{name}={size}" for name, size in sizes.items())
        module = xp.RawModule(code=SOURCE.read_text(), options=options)
        names = ("normalize", "activate", "exponentiate", "rotate", "attend", "combine")
        self.normalize, self.activate, self.exponentiate, self.rotate, self.attend, self.combine = map(
            module.get_function, names
        )


class DeviceRowwise:
    """Implements `Rowwise`: each of its steps is one launch. Arrays are float32, contiguous within a row."""

    def __init__(self, xp: Any, kernels: Kernels) -> None:
        self._xp = xp
        self._kernels = kernels

    def normalize(self, x: Any, weight: Any, eps: float, out: Any) -> None:
        rows, width = out.shape
        arguments = (x, _stride(x), weight, np.float32(eps), out, _stride(out), np.int32(width))
        self._kernels.normalize((rows,), (THREADS,), arguments)

    def activate(self, gate: Any, up: Any, out: Any) -> None:
        rows, width = out.shape
        assert _stride(gate) == _stride(up)
        arguments = (gate, up, _stride(gate), out, _stride(out), np.int32(width))
        self._kernels.activate((rows, -(-width // THREADS)), (THREADS,), arguments)

    def exponentiate(self, scores: Any, positions: NDArray[np.int64], *, shift: bool) -> Any:
        start = start_of_run(positions)
        if start is None:
            raise ValueError("a GPU computes tokens that follow one another")
        heads, tokens, group, width = scores.shape
        totals = self._xp.empty((heads, tokens, group, 1), dtype=np.float32)
        arguments = (scores, np.int64(width), np.int32(tokens), np.int32(group), np.int64(start + 1), totals)
        self._kernels.exponentiate((heads * tokens * group,), (THREADS,), arguments)
        return totals


class DeviceLlama(Llama):
    """`Llama` on the GPU. Raises ValueError where there is no GPU, and for heads without kernels."""

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, NDArray[np.float32]], *, sequences: NewSequence | None = None
    ) -> None:
        xp = array_namespace("cuda")
        self._kernels = Kernels(xp, spec)
        on_device = {name: _whole(xp, tensor) for name, tensor in tensors.items()}
        super().__init__(spec, on_device, device="cuda", rowwise=DeviceRowwise(xp, self._kernels), sequences=sequences)
        self._linear = self._product = self._products = _Products(xp)
        self._partial: Any = xp.empty(0, dtype=np.float32)

    @ended_on_error
    def decode(self, sequences: list[SequenceKV], tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        tokens = np.asarray(tokens, dtype=np.int32)
        check_batch(sequences, tokens, self.spec.vocab_size)
        check_whole(*sequences)
        count = len(sequences)
        if not count:
            return np.empty((0, self.spec.vocab_size), dtype=np.float32)
        work, caches = self._seats[0].activations(count), self._caches(sequences)
        span, splits = self._cut(count, max(sequence.length for sequence in sequences) + 1)
        work.hidden[:count] = self.embed(tokens)
        for index, layer in enumerate(self._layers):
            self._project(self._product, work, layer, count)
            self._attend(work, caches, index, count, span, splits)
            self._finish_layer(self._product, work, layer, count)
        result = self._logits(self._product, work, count)
        for sequence in sequences:
            sequence.length += 1
        return result

    def _caches(self, sequences: list[SequenceKV]) -> Any:
        """Return the rows of device.cu's `caches`."""
        rows = [
            (each.keys.data.ptr, each.values.data.ptr, each.keys.shape[2], each.capacity, each.length) for each in sequences
        ]
        return self._xp.asarray(np.array(rows, dtype=np.int64))

    def _cut(self, count: int, longest: int) -> tuple[int, int]:
        """Return (tiles in a split, splits) of the longest sequence; the others' last splits may be empty."""
        tiles = -(-longest // KEY_TILE)
        wanted = -(-BLOCKS_WANTED // (count * self.spec.kv_heads))
        span = max(LEAST_SPAN_TILES, -(-tiles // wanted))
        return span, -(-tiles // span)

    def _attend(self, work: Any, caches: Any, index: int, count: int, span: int, splits: int) -> None:
        """Compute `work.attended` from `work.qkv`, and store the new tokens' KV."""
        spec, kernels, layer, kv_heads = self.spec, self._kernels, np.int32(index), np.int32(self.spec.kv_heads)
        size = count * spec.heads * splits * (spec.head_dim + 2)
        if self._partial.size < size:
            self._partial = self._xp.empty(size, dtype=np.float32)
        scale, queries = np.float32(1.0 / math.sqrt(spec.head_dim)), work.attended  # free until it is written
        rotated = (work.qkv, _stride(work.qkv), self._tensors["inv_freq"], caches, layer, kv_heads, scale, queries)
        kernels.rotate((count,), (THREADS,), rotated)
        attended = (queries, caches, layer, kv_heads, np.int32(span), self._partial)
        kernels.attend((splits, spec.kv_heads, count), (THREADS,), attended)
        kernels.combine((spec.heads, count), (spec.head_dim,), (self._partial, kv_heads, np.int32(splits), work.attended))

    def _finish_layer(self, product: Product, work: Activations, layer: Layer, count: int) -> None:
        add, ffn = self._products.add, self.spec.ffn
        add(work.attended, layer.out, work.hidden, count)
        self._normalize(work.hidden, layer.ffn_norm, work.normed, count)
        product(self._xp, work.normed, layer.gate_up, work.gate_up, count)
        self._rowwise.activate(work.gate_up[:count, :ffn], work.gate_up[:count, ffn : 2 * ffn], work.active[:count])
        add(work.active, layer.down, work.hidden, count)

    def _column(self, matrix: Any, index: Any) -> Any:
        return matrix[:, index].T

    def _width(self, matrix: Any) -> int:
        width: int = matrix.shape[1]
        return width


def _whole(xp: Any, tensor: NDArray[np.float32]) -> Any:
    """Return a tensor on the device, panels [panel, in, 64] as one matrix [in, out]."""
    array = xp.asarray(tensor)
    if array.ndim != 3:
        return array
    panels, depth, columns = array.shape
    matrix = xp.empty((depth, panels * columns), dtype=np.float32)
    matrix.reshape(depth, panels, columns)[...] = array.transpose(1, 0, 2)
    return matrix


class _Products:
    """cuBLAS's float32 product, called directly: CuPy's own call takes the host longer than a small product takes the GPU."""

    def __init__(self, xp: Any) -> None:
        self._library, self._handle = xp.cuda.cublas, xp.cuda.device.get_cublas_handle
        self._one, self._zero = (np.array(factor, dtype=np.float32) for factor in (1, 0))

    def __call__(self, xp: Any, x: Any, matrix: Any, out: Any, count: int) -> None:
        """Compute `panels.linear` with one matrix: out = x @ matrix for the first `count` rows."""
        self._sgemm(x, matrix, self._zero, out, count)

    def add(self, x: Any, matrix: Any, out: Any, count: int) -> None:
        """Add to out: out += x @ matrix for the first `count` rows and as many columns as `out` has."""
        self._sgemm(x, matrix, self._one, out, count)

    def _sgemm(self, x: Any, matrix: Any, keep: NDArray[np.float32], out: Any, count: int) -> None:
        """Call cuBLAS, which has columns where we have rows: out^T = matrix^T x^T."""
        plain, (depth, stored) = self._library.CUBLAS_OP_N, matrix.shape
        columns, alpha, beta = min(stored, out.shape[1]), self._one.ctypes.data, keep.ctypes.data
        weights, rows, to = (matrix.data.ptr, stored), (x.data.ptr, x.shape[1]), (out.data.ptr, out.shape[1])
        self._library.sgemm(self._handle(), plain, plain, columns, count, depth, alpha, *weights, *rows, beta, *to)


def _stride(rows: Any) -> np.int64:
    """Return the stride in floats."""
    return np.int64(rows.strides[0] // 4)
