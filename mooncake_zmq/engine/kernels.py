"""The decode step as Numba makes it into machine code, and its entry. Knows addresses and shapes, not files or models.

`decode_step` runs in each of T threads at once, without the GIL. Every product is cut into panels of outputs, and
attention into tiles of keys, in T equal shares; a barrier stands wherever one share needs another.
"""

import numpy as np
from numba import njit, types

from mooncake_zmq.engine.kv_cache import KEY_TILE
from mooncake_zmq.engine.memory_access import atomic_read, fetch_add, floats, integers
from mooncake_zmq.engine.products import (
    OPTIONS,
    linear,
    multiply_2,
    multiply_16,
    multiply_32,
    multiply_float32,
    multiply_panels,
)
from mooncake_zmq.engine.row_kernels import (
    activate_rows,
    exp,
    exponentiate,
    exponentiate_rows,
    largest,
    normalize,
    normalize_rows,
    silu_times,
)
from mooncake_zmq.engine.step_layout import (
    ARRAY_FIELDS,
    CAPACITY,
    DOWN,
    GATE_UP,
    KEYS_AT,
    MATRICES,
    OUT,
    POSITION,
    QKV,
    ROW_NUMBERS,
    SPAN_TILES,
    VALUES_AT,
    Array,
    What,
)

SPINS = 4096  # looks at the barrier before the core is offered to others

ARRAYS = len(Array)
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


# ---------------------------------------------------------------------------------------------------- threads and memory


@njit(**OPTIONS, inline="always")
def _floats_1(row):
    """The array that a row of a step's table tells of; of one dimension, below of more."""
    return floats(row[0], (row[1],))


@njit(**OPTIONS, inline="always")
def _floats_2(row):
    return floats(row[0], (row[1], row[2]))


@njit(**OPTIONS, inline="always")
def _floats_3(row):
    return floats(row[0], (row[1], row[2], row[3]))


@njit(**OPTIONS, inline="always")
def _floats_5(row):
    return floats(row[0], (row[1], row[2], row[3], row[4], row[5]))


@njit(**OPTIONS, inline="always")
def _integers_2(row):
    return integers(row[0], (row[1], row[2]))


@njit(**OPTIONS)
def _meet(barrier, meetings, threads):
    """Wait until all threads are here; returns the number of meetings so far. At `barrier` arrivals are counted, from 0."""
    if threads == 1:
        return meetings
    meetings += 1
    fetch_add(barrier, 1)
    spins = 0
    while atomic_read(barrier) < meetings * threads:
        spins += 1
        if spins > SPINS:
            _sched_yield()
    return meetings


# ------------------------------------------------------------------------------------------------------------ the layers


@njit(**OPTIONS)
def _copy(source, out):
    """NumPy's assignment would ask whether they overlap, and allocate where they did."""
    for index in range(len(out)):
        out[index] = source[index]


@njit(**OPTIONS)
def _rotate(head, cos, sin, scale):
    """RoPE of one head in place, its pairs side by side."""
    for pair in range(len(cos)):
        real, imaginary = head[2 * pair], head[2 * pair + 1]
        head[2 * pair] = (real * cos[pair] - imaginary * sin[pair]) * scale
        head[2 * pair + 1] = (real * sin[pair] + imaginary * cos[pair]) * scale


@njit(**OPTIONS)
def _prepared_head(qkv, head, bias, norms, eps, cos, sin, scale, out):
    """Query or key `head` of one row into `out` [head_dim]: bias, norm, rotation. Bias and norms are empty where unused."""
    dim = len(out)
    first = head * dim
    _copy(qkv[first : first + dim], out)
    if len(bias):
        for index in range(dim):
            out[index] += bias[first + index]
    if len(norms):
        normalize(out, norms[head], eps, out)
    _rotate(out, cos, sin, scale)


@njit(**OPTIONS)
def _attend_tiles(queries, scores, mixed, state, keys, values, first, last, visible):
    """Attention of one group of queries over tiles first..last of one head: softmax as it goes, without dividing.

    queries and mixed [group, head_dim], scores [group, SPAN_TILES * KEY_TILE], state [group, (highest, total)]; keys and
    values are addresses of the head's first tile and token.
    """
    (group, dim), span = queries.shape, scores.shape[1]
    mixed[:] = 0.0
    state[:, 0] = -np.inf
    state[:, 1] = 0.0
    for begin in range(first, last, SPAN_TILES):
        end = min(begin + SPAN_TILES, last)
        count = min((end - begin) * KEY_TILE, visible - begin * KEY_TILE)
        scores[:] = 0.0
        for tile in range(begin, end):
            here, out = keys + 4 * tile * dim * KEY_TILE, scores.ctypes.data + 4 * (tile - begin) * KEY_TILE
            multiply_float32(queries.ctypes.data, dim, here, KEY_TILE, 0, 0, 0, dim, out, span, group)
        for row in range(group):
            highest = max(state[row, 0], largest(scores[row], count))
            total = exponentiate(scores[row], count, highest)
            if highest > state[row, 0]:
                lowered = exp(state[row, 0] - highest) if begin > first else np.float32(0.0)
                for index in range(dim):
                    mixed[row, index] *= lowered
                state[row, 1] *= lowered
                state[row, 0] = highest
            state[row, 1] += total
        here, column = values + 4 * begin * KEY_TILE * dim, 0
        while column < dim:
            x, at, out = scores.ctypes.data, here + 4 * column, mixed.ctypes.data + 4 * column
            if dim - column >= 64:
                multiply_float32(x, span, at, dim, 0, 0, 0, count, out, dim, group)
                column += 64
            elif dim - column >= 32:
                multiply_32(x, span, at, dim, 0, 0, 0, count, out, dim, group)
                column += 32
            elif dim - column >= 16:
                multiply_16(x, span, at, dim, 0, 0, 0, count, out, dim, group)
                column += 16
            else:
                multiply_2(x, span, at, dim, 0, 0, 0, count, out, dim, group)
                column += 2


@njit(**OPTIONS)
def _attend(layer, caches, qkv, bias, norms, eps, cos, sin, queries, scores, mixed, states, thread, threads):
    """This thread's share of all rows' tiles: partial results in mixed and states [thread, row, kv_head, group, ...].

    Whoever takes a head's last tile stores the new key and value first. A share of no tiles has a total of 0.
    """
    rows, kv_heads, group, dim = mixed.shape[1:]
    tiles_of_all = 0
    for row in range(rows):
        tiles_of_all += kv_heads * (caches[row, POSITION] // KEY_TILE + 1)
    first, last = tiles_of_all * thread // threads, tiles_of_all * (thread + 1) // threads
    scale, one = np.float32(1.0) / np.sqrt(np.float32(dim)), np.float32(1.0)
    begin = 0
    for row in range(rows):
        position, capacity = caches[row, POSITION], caches[row, CAPACITY]
        tiles, tiles_of_room = position // KEY_TILE + 1, (capacity + KEY_TILE - 1) // KEY_TILE
        for head in range(kv_heads):
            own_first, own_last = max(first - begin, 0), min(last - begin, tiles)
            begin += tiles
            states[thread, row, head, :, 1] = 0.0
            if own_first >= own_last:
                continue
            keys = caches[row, KEYS_AT] + 4 * (layer * kv_heads + head) * tiles_of_room * dim * KEY_TILE
            values = caches[row, VALUES_AT] + 4 * (layer * kv_heads + head) * capacity * dim
            if own_last == tiles:
                tile = floats(keys + 4 * (tiles - 1) * dim * KEY_TILE, (dim, KEY_TILE))
                _prepared_head(qkv[row], kv_heads * group + head, bias, norms, eps, cos[row], sin[row], one, queries[0])
                _copy(queries[0], tile[:, position % KEY_TILE])
                value = floats(values + 4 * position * dim, (dim,))
                source = (kv_heads * (group + 1) + head) * dim
                _copy(qkv[row, source : source + dim], value)
                if len(bias):
                    for index in range(dim):
                        value[index] += bias[source + index]
            for query in range(group):
                number = head * group + query
                _prepared_head(qkv[row], number, bias, norms, eps, cos[row], sin[row], scale, queries[query])
            _attend_tiles(
                queries,
                scores,
                mixed[thread, row, head],
                states[thread, row, head],
                keys,
                values,
                own_first,
                own_last,
                position + 1,
            )


@njit(**OPTIONS)
def _merge(mixed, states, attended, thread, threads):
    """The threads' partial results into attended [row, head * head_dim]; heads are shared out among the threads."""
    rows, kv_heads, group, dim = mixed.shape[1:]
    heads = kv_heads * group
    for turn in range((rows * heads - thread + threads - 1) // threads):  # a range with a step could raise, as divmod could
        item = thread + turn * threads
        row, number = item // heads, item % heads
        head, query = number // group, number % group
        highest = np.float32(-np.inf)
        for part in range(threads):
            if states[part, row, head, query, 1] > 0.0:
                highest = max(highest, states[part, row, head, query, 0])
        out = attended[row, number * dim : (number + 1) * dim]
        out[:] = 0.0
        total = np.float32(0.0)
        for part in range(threads):
            if states[part, row, head, query, 1] > 0.0:
                share = exp(states[part, row, head, query, 0] - highest)
                total += share * states[part, row, head, query, 1]
                for index in range(dim):
                    out[index] += share * mixed[part, row, head, query, index]
        for index in range(dim):
            out[index] /= total


@njit(**OPTIONS)
def _activate(gate_up, active, thread, threads):
    """active = silu(gate) * up, for this thread's columns."""
    rows, ffn = active.shape
    first, last = ffn * thread // threads, ffn * (thread + 1) // threads
    for row in range(rows):
        silu_times(gate_up[row, first:last], gate_up[row, ffn + first : ffn + last], active[row, first:last])


@njit(**OPTIONS)
def _decode_step(thread, table):
    """One token for each row, through all layers: KV into the caches, logits out. All rows' sequences have room.

    `table`: address of int64 [len(Array), ARRAY_FIELDS], each row an array's address and shape. Called by all `threads`
    (there are as many as NORMED has) with the same table.
    """
    arrays = integers(table, (ARRAYS, ARRAY_FIELDS))
    barrier, eps = arrays[Array.BARRIER, 0], _floats_1(arrays[Array.EPSILON])[0]
    matrices, caches = _integers_2(arrays[Array.MATRICES]), _integers_2(arrays[Array.CACHES])
    norms, biases = _floats_2(arrays[Array.NORMS]), _floats_2(arrays[Array.BIASES])
    head_norms = _floats_3(arrays[Array.HEAD_NORMS])
    cos, sin = _floats_2(arrays[Array.COS]), _floats_2(arrays[Array.SIN])
    hidden, logits = _floats_2(arrays[Array.HIDDEN]), _floats_2(arrays[Array.LOGITS])
    normed, qkv = _floats_3(arrays[Array.NORMED]), _floats_2(arrays[Array.QKV])
    queries, scores = _floats_3(arrays[Array.QUERIES]), _floats_3(arrays[Array.SCORES])
    mixed, states = _floats_5(arrays[Array.MIXED]), _floats_5(arrays[Array.STATES])
    attended, active = _floats_2(arrays[Array.ATTENDED]), _floats_2(arrays[Array.ACTIVE])
    gate_up = _floats_2(arrays[Array.GATE_UP])
    threads = len(normed)
    layers, rows, own = (len(norms) - 1) // 2, len(hidden), normed[thread]
    meetings = 0
    for layer in range(layers):
        first = MATRICES * layer
        bias, head_norm = biases[layer], head_norms[layer]
        for row in range(rows):
            normalize(hidden[row], norms[2 * layer], eps, own[row])
        linear(matrices[first + QKV], own, qkv, False, thread, threads)
        meetings = _meet(barrier, meetings, threads)
        _attend(
            layer, caches, qkv, bias, head_norm, eps, cos, sin, queries[thread], scores[thread], mixed, states, thread, threads
        )
        meetings = _meet(barrier, meetings, threads)
        _merge(mixed, states, attended, thread, threads)
        meetings = _meet(barrier, meetings, threads)
        linear(matrices[first + OUT], attended, hidden, True, thread, threads)
        meetings = _meet(barrier, meetings, threads)
        for row in range(rows):
            normalize(hidden[row], norms[2 * layer + 1], eps, own[row])
        linear(matrices[first + GATE_UP], own, gate_up, False, thread, threads)
        meetings = _meet(barrier, meetings, threads)
        _activate(gate_up, active, thread, threads)
        meetings = _meet(barrier, meetings, threads)
        linear(matrices[first + DOWN], active, hidden, True, thread, threads)
        meetings = _meet(barrier, meetings, threads)
    for row in range(rows):
        normalize(hidden[row], norms[2 * layers], eps, own[row])
    linear(matrices[MATRICES * layers], own, logits, False, thread, threads)
    _meet(barrier, meetings, threads)


def run(what, thread, table):
    """What the machine code is entered by. `table`: the address of what step_layout.What says."""
    if what == What.DECODE_STEP:
        _decode_step(thread, table)
        return
    numbers = integers(table, (ROW_NUMBERS,))
    if what == What.NORMALIZE:
        normalize_rows(numbers)
    elif what == What.ACTIVATE:
        activate_rows(numbers)
    elif what == What.EXPONENTIATE:
        exponentiate_rows(numbers)
    elif what == What.PRODUCT:
        multiply_panels(numbers)
