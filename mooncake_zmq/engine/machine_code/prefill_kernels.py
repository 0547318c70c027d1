"""A prefill that Numba compiles to machine code: the work of one thread on its rows in one layer, LAYER_ROWS at a time."""

import numpy as np
from numba import njit

from mooncake_zmq.engine.kv_cache import KEY_TILE
from mooncake_zmq.engine.machine_code.attention_kernels import attend_tiles, places, prepared_head, store_token
from mooncake_zmq.engine.machine_code.products import OPTIONS, multiply_panels
from mooncake_zmq.engine.machine_code.row_kernels import normalize, silu_times
from mooncake_zmq.engine.machine_code.step_arrays import floats_1, floats_2, floats_3, floats_5, integers_1, integers_2
from mooncake_zmq.engine.machine_code.step_layout import (
    DOWN,
    GATE_UP,
    LARGEST_TOTAL,
    LAYER_ROWS,
    MATRICES,
    OUT,
    QKV,
    SMALLEST_TOTAL,
    Array,
)


@njit(**OPTIONS)
def _normalize(x, weight, eps, out, first, count):
    for row in range(count):
        normalize(x[first + row], weight, eps, out[row])


@njit(**OPTIONS)
def project_rows(layer, arrays):
    """Normalize HIDDEN and multiply it by the projections into QKV."""
    matrices, norms = integers_2(arrays[Array.MATRICES]), floats_2(arrays[Array.NORMS])
    eps = floats_1(arrays[Array.EPSILON])[0]
    hidden, qkv, normed = floats_2(arrays[Array.HIDDEN]), floats_2(arrays[Array.QKV]), floats_3(arrays[Array.NORMED])[0]
    for first in range(0, len(hidden), LAYER_ROWS):
        count, width = min(LAYER_ROWS, len(hidden) - first), qkv.shape[1]
        _normalize(hidden, norms[2 * layer], eps, normed, first, count)
        out = qkv.ctypes.data + 4 * first * width
        multiply_panels(matrices[MATRICES * layer + QKV], normed, count, out, width, False)


@njit(**OPTIONS)
def store_rows(layer, arrays):
    """Store keys and values of QKV into the cache, queries into QUERIES: with bias and norm, rotated, and queries scaled."""
    bias, norms = floats_2(arrays[Array.BIASES])[layer], floats_3(arrays[Array.HEAD_NORMS])[layer]
    eps, cache = floats_1(arrays[Array.EPSILON])[0], integers_2(arrays[Array.CACHES])[0]
    cos, sin, qkv = floats_2(arrays[Array.COS]), floats_2(arrays[Array.SIN]), floats_2(arrays[Array.QKV])
    queries, scratch = floats_3(arrays[Array.QUERIES]), floats_5(arrays[Array.MIXED])[0, 0, 0, 0]
    rows, kv_heads, dim, positions = len(qkv), len(queries), queries.shape[2], integers_1(arrays[Array.POSITIONS])
    group = queries.shape[1] // max(1, rows)
    scale = np.float32(1.0) / np.sqrt(np.float32(dim))
    for head in range(kv_heads):
        keys, values = places(cache, layer, kv_heads, head, dim)
        for row in range(rows):
            at = positions[row]
            store_token(qkv[row], head, group, kv_heads, bias, norms, eps, cos[row], sin[row], keys, values, cache, at, scratch)
            for query in range(group):
                out = queries[head, row * group + query]
                prepared_head(qkv[row], head * group + query, bias, norms, eps, cos[row], sin[row], scale, out)


@njit(**OPTIONS)
def _attend(layer, arrays, first, count):
    """Compute ATTENDED of rows first..first + count. Ordinary scores, within about +-60, need no shift to be exponentiated.
    Others show in their sums: they are computed again, and the layer's are shifted from then on."""
    cache, shifted = integers_2(arrays[Array.CACHES])[0], integers_1(arrays[Array.SHIFTED])
    positions = integers_1(arrays[Array.POSITIONS])
    queries, scores = floats_3(arrays[Array.QUERIES]), floats_3(arrays[Array.SCORES])[0]
    mixed, states = floats_5(arrays[Array.MIXED])[0, 0, 0], floats_5(arrays[Array.STATES])[0, 0, 0]
    attended, rows = floats_2(arrays[Array.ATTENDED]), len(floats_2(arrays[Array.HIDDEN]))
    kv_heads, dim = len(queries), queries.shape[2]
    group = queries.shape[1] // rows
    tokens = len(scores) // group
    for head in range(kv_heads):
        keys, values = places(cache, layer, kv_heads, head, dim)
        for turn in range((count + tokens - 1) // tokens):
            begin = first + turn * tokens
            height = group * min(tokens, first + count - begin)
            own = queries[head, begin * group : begin * group + height]
            seen = positions[begin : begin + height // group]
            tiles = seen[height // group - 1] // KEY_TILE + 1
            shift = shifted[layer] != 0
            attend_tiles(own, scores, mixed, states, keys, values, 0, tiles, seen, group, shift)
            if not shift and not _is_ordinary(states, height):
                shifted[layer] = 1
                attend_tiles(own, scores, mixed, states, keys, values, 0, tiles, seen, group, True)
            for row in range(height):
                column = (head * group + row % group) * dim
                out = attended[begin - first + row // group]
                for index in range(dim):
                    out[column + index] = mixed[row, index] / states[row, 1]


@njit(**OPTIONS)
def _is_ordinary(states, rows):
    ordinary = 0
    for row in range(rows):
        ordinary += SMALLEST_TOTAL < states[row, 1] < LARGEST_TOTAL
    return ordinary == rows


@njit(**OPTIONS)
def finish_rows(layer, arrays):
    """Finish the layer: attention over all tokens up to each row, output projection and feed-forward, each added to HIDDEN."""
    matrices, norms = integers_2(arrays[Array.MATRICES]), floats_2(arrays[Array.NORMS])
    eps, own = floats_1(arrays[Array.EPSILON])[0], MATRICES * layer
    hidden, normed = floats_2(arrays[Array.HIDDEN]), floats_3(arrays[Array.NORMED])[0]
    attended, gate_up, active = (
        floats_2(arrays[Array.ATTENDED]),
        floats_2(arrays[Array.GATE_UP]),
        floats_2(arrays[Array.ACTIVE]),
    )
    width, ffn = hidden.shape[1], active.shape[1]
    for first in range(0, len(hidden), LAYER_ROWS):
        count, here = min(LAYER_ROWS, len(hidden) - first), hidden.ctypes.data + 4 * first * width
        _attend(layer, arrays, first, count)
        multiply_panels(matrices[own + OUT], attended, count, here, width, True)
        _normalize(hidden, norms[2 * layer + 1], eps, normed, first, count)
        multiply_panels(matrices[own + GATE_UP], normed, count, gate_up.ctypes.data, gate_up.shape[1], False)
        for row in range(count):
            silu_times(gate_up[row, :ffn], gate_up[row, ffn : 2 * ffn], active[row])
        multiply_panels(matrices[own + DOWN], active, count, here, width, True)
