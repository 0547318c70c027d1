"""The decode step that Numba compiles to machine code, and the entry point of all machine code. It knows addresses and shapes,
not files or models.

`decode_step` runs in each of T threads at once, without the GIL. Every product is cut into panels of outputs, and
attention into tiles of keys, in T equal shares; a barrier stands wherever one share needs another.
"""

import numpy as np
from numba import njit, types

from mooncake_zmq.engine.kv_cache import KEY_TILE
from mooncake_zmq.engine.machine_code.attention_kernels import attend_tiles, places, prepared_head, store_token
from mooncake_zmq.engine.machine_code.few_kernels import attend_few
from mooncake_zmq.engine.machine_code.memory_access import atomic_read, call, fetch_add, integers
from mooncake_zmq.engine.machine_code.part_kernels import place_parts
from mooncake_zmq.engine.machine_code.prefill_kernels import finish_rows, project_rows, store_rows
from mooncake_zmq.engine.machine_code.products import OPTIONS, linear
from mooncake_zmq.engine.machine_code.row_kernels import exp, normalize, silu_times
from mooncake_zmq.engine.machine_code.step_arrays import floats_1, floats_2, floats_3, floats_5, integers_1, integers_2
from mooncake_zmq.engine.machine_code.step_layout import (
    ARRAY_FIELDS,
    DOWN,
    FEW_AT,
    GATE_UP,
    MATRICES,
    OUT,
    POSITION,
    QKV,
    Array,
    What,
)

SPINS = 4096  # reads of the barrier before the core is offered to others

ARRAYS = len(Array)
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


# --------------------------------------------------------------------------------------------------------------- threads


@njit(**OPTIONS)
def _meet(barrier, meetings, threads):
    """Wait until all threads have arrived; return the number of meetings so far. `barrier` counts arrivals, from 0."""
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
def _attend(layer, caches, qkv, bias, norms, eps, cos, sin, queries, scores, mixed, states, thread, threads):
    """Compute this thread's share of all rows' tiles: partial results in mixed and states [thread, row, kv_head, group, ...].

    The thread that takes a head's last tile stores the new key and value first. A share of no tiles has a total of 0.
    """
    rows, kv_heads, group, dim = mixed.shape[1:]
    tiles_of_all = 0
    for row in range(rows):
        tiles_of_all += kv_heads * (caches[row, POSITION] // KEY_TILE + 1)
    first, last = tiles_of_all * thread // threads, tiles_of_all * (thread + 1) // threads
    scale = np.float32(1.0) / np.sqrt(np.float32(dim))
    begin = 0
    for row in range(rows):
        position = caches[row, POSITION]
        tiles = position // KEY_TILE + 1
        if caches[row, FEW_AT]:
            states[thread, row, :, :, 1] = 0.0
            for turn in range((kv_heads - (thread + row + layer) % threads + threads - 1) // threads):
                head = (thread + row + layer) % threads + turn * threads
                attend_few(
                    caches[row, FEW_AT],
                    layer,
                    head,
                    qkv[row],
                    bias,
                    norms,
                    eps,
                    cos[row],
                    sin[row],
                    scale,
                    queries,
                    mixed[thread, row, head],
                    states[thread, row, head],
                )
            continue
        for head in range(kv_heads):
            own_first, own_last = max(first - begin, 0), min(last - begin, tiles)
            begin += tiles
            states[thread, row, head, :, 1] = 0.0
            if own_first >= own_last:
                continue
            keys, values = places(caches[row], layer, kv_heads, head, dim)
            if own_last == tiles:
                own = queries[0]
                store_token(
                    qkv[row],
                    head,
                    group,
                    kv_heads,
                    bias,
                    norms,
                    eps,
                    cos[row],
                    sin[row],
                    keys,
                    values,
                    caches[row],
                    position,
                    own,
                )
            for query in range(group):
                number = head * group + query
                prepared_head(qkv[row], number, bias, norms, eps, cos[row], sin[row], scale, queries[query])
            attend_tiles(
                queries,
                scores,
                mixed[thread, row, head],
                states[thread, row, head],
                keys,
                values,
                own_first,
                own_last,
                caches[row, POSITION : POSITION + 1],
                group,
                True,
            )


@njit(**OPTIONS)
def _merge(mixed, states, attended, thread, threads):
    """Merge all partial results into attended [row, head * head_dim]; heads are distributed over the threads."""
    parts, rows, kv_heads, group, dim = mixed.shape
    heads = kv_heads * group
    for turn in range((rows * heads - thread + threads - 1) // threads):  # a range with a step could raise, as divmod could
        item = thread + turn * threads
        row, number = item // heads, item % heads
        head, query = number // group, number % group
        highest = np.float32(-np.inf)
        for part in range(parts):
            if states[part, row, head, query, 1] > 0.0:
                highest = max(highest, states[part, row, head, query, 0])
        out = attended[row, number * dim : (number + 1) * dim]
        out[:] = 0.0
        total = np.float32(0.0)
        for part in range(parts):
            if states[part, row, head, query, 1] > 0.0:
                share = exp(states[part, row, head, query, 0] - highest)
                total += share * states[part, row, head, query, 1]
                for index in range(dim):
                    out[index] += share * mixed[part, row, head, query, index]
        for index in range(dim):
            out[index] /= total


@njit(**OPTIONS)
def _attend_part(layer, arrays):
    """Compute partial results of the queries of some rows, each over the first tokens of its own cache: one or more."""
    caches, queries, scores = integers_2(arrays[Array.CACHES]), floats_5(arrays[Array.QUERIES]), floats_3(arrays[Array.SCORES])
    mixed, states = floats_5(arrays[Array.MIXED]), floats_5(arrays[Array.STATES])
    rows, kv_heads, group, dim = mixed.shape[1:]
    for row in range(rows):
        caches[row, POSITION] -= 1
        tiles = caches[row, POSITION] // KEY_TILE + 1
        for head in range(kv_heads):
            keys, values = places(caches[row], layer, kv_heads, head, dim)
            attend_tiles(
                queries[0, row, head],
                scores[0],
                mixed[0, row, head],
                states[0, row, head],
                keys,
                values,
                0,
                tiles,
                caches[row, POSITION : POSITION + 1],
                group,
                True,
            )


@njit(**OPTIONS)
def _activate(gate_up, active, thread, threads):
    """Compute active = silu(gate) * up, for this thread's columns."""
    rows, ffn = active.shape
    first, last = ffn * thread // threads, ffn * (thread + 1) // threads
    for row in range(rows):
        silu_times(gate_up[row, first:last], gate_up[row, ffn + first : ffn + last], active[row, first:last])


@njit(**OPTIONS)
def _decode_step(thread, table):
    """Compute one token for each row, through all layers: KV into the caches, logits out. All rows' sequences have room.

    `table`: address of int64 [len(Array), ARRAY_FIELDS], each row an array's address and shape. Called by all `threads`
    (there are as many as NORMED has) with the same table.
    """
    arrays = integers(table, (ARRAYS, ARRAY_FIELDS))
    barrier, eps = arrays[Array.BARRIER, 0], floats_1(arrays[Array.EPSILON])[0]
    matrices, caches = integers_2(arrays[Array.MATRICES]), integers_2(arrays[Array.CACHES])
    norms, biases = floats_2(arrays[Array.NORMS]), floats_2(arrays[Array.BIASES])
    head_norms = floats_3(arrays[Array.HEAD_NORMS])
    cos, sin = floats_2(arrays[Array.COS]), floats_2(arrays[Array.SIN])
    hidden, logits = floats_2(arrays[Array.HIDDEN]), floats_2(arrays[Array.LOGITS])
    normed, qkv = floats_3(arrays[Array.NORMED]), floats_2(arrays[Array.QKV])
    queries, scores = floats_3(arrays[Array.QUERIES]), floats_3(arrays[Array.SCORES])
    mixed, states = floats_5(arrays[Array.MIXED]), floats_5(arrays[Array.STATES])
    attended, active = floats_2(arrays[Array.ATTENDED]), floats_2(arrays[Array.ACTIVE])
    gate_up = floats_2(arrays[Array.GATE_UP])
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
        if arrays[Array.ATTENDING, 0]:
            if thread == 0:
                call(integers_1(arrays[Array.ATTENDING])[0], layer, 0, 0)
        else:
            if arrays[Array.ELSEWHERE, 0] and thread == 0:
                call(integers_1(arrays[Array.ELSEWHERE])[0], layer, 1, 0)
            _attend(
                layer,
                caches,
                qkv,
                bias,
                head_norm,
                eps,
                cos,
                sin,
                queries[thread],
                scores[thread],
                mixed,
                states,
                thread,
                threads,
            )
            if arrays[Array.ELSEWHERE, 0] and thread == 0:
                call(integers_1(arrays[Array.ELSEWHERE])[0], layer, 0, 0)
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
    """Enter the machine code. `table`: the address of the table that step_layout.What describes; `thread`: of a decode step,
    else a layer."""
    if what == What.DECODE_STEP:
        _decode_step(thread, table)
        return
    if what == What.PLACE_PARTS:
        place_parts(table)
        return
    arrays = integers(table, (ARRAYS, ARRAY_FIELDS))
    if what == What.PROJECT_ROWS:
        project_rows(thread, arrays)
    elif what == What.STORE_ROWS:
        store_rows(thread, arrays)
    elif what == What.FINISH_ROWS:
        finish_rows(thread, arrays)
    elif what == What.ATTEND_PART:
        _attend_part(thread, arrays)
