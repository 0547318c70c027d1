"""Attention in machine code, for a token of a decode step and for many of a prefill: heads, scores, softmax, values."""

import numpy as np
from numba import njit

from mooncake_zmq.engine.kv_cache import KEY_TILE
from mooncake_zmq.engine.machine_code.memory_access import call, floats
from mooncake_zmq.engine.machine_code.products import (
    OPTIONS,
    TILE_COLUMNS,
    multiply_2,
    multiply_16,
    multiply_32,
    multiply_float32,
    multiply_tile,
)
from mooncake_zmq.engine.machine_code.row_kernels import exp, exponentiate, largest, normalize
from mooncake_zmq.engine.machine_code.step_layout import BIASES_AT, CAPACITY, KEYS_AT, ROUND_AT, SPAN_TILES, VALUES_AT, Coding

FEW_ROWS = 6
"""Fewer rows meet keys as wide as they lie in memory, in long runs; more rows meet as many columns as the registers have sums
for."""


@njit(**OPTIONS)
def copy(source, out):
    """Copy without NumPy's assignment, which would check for an overlap and allocate."""
    for index in range(len(out)):
        out[index] = source[index]


@njit(**OPTIONS)
def _rotate(head, cos, sin, scale):
    """Apply RoPE to one head in place, its pairs side by side."""
    for pair in range(len(cos)):
        real, imaginary = head[2 * pair], head[2 * pair + 1]
        head[2 * pair] = (real * cos[pair] - imaginary * sin[pair]) * scale
        head[2 * pair + 1] = (real * sin[pair] + imaginary * cos[pair]) * scale


@njit(**OPTIONS)
def prepared_head(qkv, head, bias, norms, eps, cos, sin, scale, out):
    """Write query or key `head` of one row into `out` [head_dim]: bias, norm, rotation. Bias and norms are empty where
    unused."""
    dim = len(out)
    first = head * dim
    copy(qkv[first : first + dim], out)
    if len(bias):
        for index in range(dim):
            out[index] += bias[first + index]
    if len(norms):
        normalize(out, norms[head], eps, out)
    _rotate(out, cos, sin, scale)


@njit(**OPTIONS)
def shift_key(key, bias, cos, sin, sign):
    """Add the offset of a key in place, or with a `sign` of -1 take it off: its bias [head_dim], rotated as the key is."""
    for pair in range(len(cos)):
        real, imaginary = bias[2 * pair], bias[2 * pair + 1]
        key[2 * pair] += (real * cos[pair] - imaginary * sin[pair]) * sign
        key[2 * pair + 1] += (real * sin[pair] + imaginary * cos[pair]) * sign


@njit(**OPTIONS)
def shift_value(value, bias, sign):
    """Add the offset of a value in place, or with a `sign` of -1 take it off."""
    for index in range(len(value)):
        value[index] += bias[index] * sign


@njit(**OPTIONS)
def _round_key(key, bias, cos, sin, cache):
    """Round what a key is beside its offset, in place, as the codec of its cache does."""
    if cache[BIASES_AT]:
        shift_key(key, bias, cos, sin, np.float32(-1.0))
    call(cache[ROUND_AT], np.int64(Coding.ROUND_KEY), key.ctypes.data, cache.ctypes.data)
    if cache[BIASES_AT]:
        shift_key(key, bias, cos, sin, np.float32(1.0))


@njit(**OPTIONS)
def _round_value(value, bias, cache):
    """Round a value as `_round_key` does a key."""
    if cache[BIASES_AT]:
        shift_value(value, bias, np.float32(-1.0))
    call(cache[ROUND_AT], np.int64(Coding.ROUND_VALUE), value.ctypes.data, cache.ctypes.data)
    if cache[BIASES_AT]:
        shift_value(value, bias, np.float32(1.0))


@njit(**OPTIONS)
def places(cache, layer, kv_heads, head, dim):
    """Return the addresses of the keys and the values of one head of a sequence; `cache` is its row of Array.CACHES."""
    tiles_of_room = (cache[CAPACITY] + KEY_TILE - 1) // KEY_TILE
    keys = cache[KEYS_AT] + 4 * (layer * kv_heads + head) * tiles_of_room * dim * KEY_TILE
    return keys, cache[VALUES_AT] + 4 * (layer * kv_heads + head) * cache[CAPACITY] * dim


@njit(**OPTIONS)
def store_token(qkv, head, group, kv_heads, bias, norms, eps, cos, sin, keys, values, cache, position, scratch):
    """Store key and value `head` of one row into the cache, whose head begins at `keys` and `values`, rounded if its codec
    rounds what is stored; `scratch` [head_dim]."""
    dim = len(scratch)
    tile = floats(keys + 4 * (position // KEY_TILE) * dim * KEY_TILE, (dim, KEY_TILE))
    prepared_head(qkv, kv_heads * group + head, bias, norms, eps, cos, sin, np.float32(1.0), scratch)
    if cache[ROUND_AT]:
        first = (kv_heads * group + head) * dim
        _round_key(scratch, bias[first : first + dim], cos, sin, cache)
    copy(scratch, tile[:, position % KEY_TILE])
    value = floats(values + 4 * position * dim, (dim,))
    source = (kv_heads * (group + 1) + head) * dim
    copy(qkv[source : source + dim], value)
    if len(bias):
        for index in range(dim):
            value[index] += bias[source + index]
    if cache[ROUND_AT]:
        _round_value(value, bias[source : source + dim], cache)


@njit(**OPTIONS)
def score(queries, dim, tile, out, span, rows):
    """Add to out: out += queries @ a tile of keys."""
    if rows < FEW_ROWS:
        multiply_float32(queries, dim, tile, KEY_TILE, 0, 0, 0, dim, out, span, rows)
        return
    for part in range(KEY_TILE // TILE_COLUMNS):
        column = 4 * part * TILE_COLUMNS
        multiply_tile(queries, dim, tile + column, KEY_TILE, 0, 0, 0, dim, out + column, span, rows)


@njit(**OPTIONS)
def mix(scores, span, values, pitch, dim, count, out, rows):
    """Add to out: out += scores @ values, `count` of them, `pitch` numbers apart."""
    column = 0
    while column < dim:
        at, here = values + 4 * column, out + 4 * column
        if rows >= FEW_ROWS and dim - column >= TILE_COLUMNS:
            multiply_tile(scores, span, at, pitch, 0, 0, 0, count, here, dim, rows)
            column += TILE_COLUMNS
        elif dim - column >= 64:
            multiply_float32(scores, span, at, pitch, 0, 0, 0, count, here, dim, rows)
            column += 64
        elif dim - column >= 32:
            multiply_32(scores, span, at, pitch, 0, 0, 0, count, here, dim, rows)
            column += 32
        elif dim - column >= 16:
            multiply_16(scores, span, at, pitch, 0, 0, 0, count, here, dim, rows)
            column += 16
        else:
            multiply_2(scores, span, at, pitch, 0, 0, 0, count, here, dim, rows)
            column += 2


@njit(**OPTIONS)
def _exponentiate(scores, count, state, mixed, shift):
    """Exponentiate one row's scores in place, and add their sum to its state. `shift`: subtract the highest so far, and rescale
    the earlier sums to it. Measured: to find the highest takes twice as long as all else."""
    highest = np.float32(0.0)
    if shift:
        highest = max(state[0], largest(scores, count))
        if highest > state[0]:
            lowered = exp(state[0] - highest) if state[1] > 0.0 else np.float32(0.0)
            for index in range(len(mixed)):
                mixed[index] *= lowered
            state[1] *= lowered
            state[0] = highest
    state[1] += exponentiate(scores, count, highest)


@njit(**OPTIONS)
def attend_tiles(queries, scores, mixed, state, keys, values, first, last, positions, group, shift):
    """Compute the attention of some queries over tiles first..last of one head: online softmax, without dividing.

    queries and mixed [rows, head_dim], scores [>= rows, SPAN_TILES * KEY_TILE], state [rows, (highest, total)]; keys and values
    are addresses of the head's first tile and token. Each `group` of rows is a token's, which sees the keys up to its position;
    positions ascend.
    """
    (rows, dim), span = queries.shape, scores.shape[1]
    for row in range(rows):
        mixed[row] = 0.0
        state[row, 0] = -np.inf if shift else 0.0
        state[row, 1] = 0.0
    for begin in range(first, last, SPAN_TILES):
        end = min(begin + SPAN_TILES, last)
        count = min((end - begin) * KEY_TILE, positions[(rows - 1) // group] + 1 - begin * KEY_TILE)
        for row in range(rows):
            scores[row] = 0.0
        for tile in range(begin, end):
            here, out = keys + 4 * tile * dim * KEY_TILE, scores.ctypes.data + 4 * (tile - begin) * KEY_TILE
            score(queries.ctypes.data, dim, here, out, span, rows)
        for row in range(rows):
            own = max(0, min(count, positions[row // group] + 1 - begin * KEY_TILE))
            if own:
                _exponentiate(scores[row], own, state[row], mixed[row], shift)
            for index in range(own, count):
                scores[row, index] = 0.0
        mix(scores.ctypes.data, span, values + 4 * begin * KEY_TILE * dim, dim, dim, count, mixed.ctypes.data, rows)
