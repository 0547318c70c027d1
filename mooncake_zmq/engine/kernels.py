"""The decode step in machine code, made by Numba when first used. Knows addresses and shapes, not files or models.

`decode_step` runs in each of T threads at once, without the GIL. Every product is cut into panels of outputs, and
attention into tiles of keys, in T equal shares; a barrier stands wherever one share needs another. Products are written
in vectors as wide as a panel: its weights are decoded once, in registers, and multiplied into up to eight rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from mooncake_zmq.engine.kv_cache import KEY_TILE
from mooncake_zmq.engine.panels import PANEL_COLUMNS
from mooncake_zmq.engine.quantized import PANEL_WIDTH, Form

QKV, OUT, GATE_UP, DOWN, MATRICES = range(5)  # of a layer; the head follows the last layer
FORM, VALUES, SCALES, MINIMA, GROUP_SHIFT, DEPTH, PANELS, MATRIX_FIELDS = range(8)  # of a row of `matrices`
KEYS_AT, VALUES_AT, CAPACITY, POSITION, CACHE_FIELDS = range(5)  # of a row of `caches`
STEPS = 8  # inputs taken in one turn of a product's loop, and 4-bit values in a word
SUM_FIRST_ROWS = 2  # up to here scale * sum(q * x) + minimum * sum(x) takes fewer operations than decoding q first
SPAN_TILES = 8  # of keys, scored before their values are read: long runs of memory measured a tenth faster than 1
SPINS = 4096  # looks at the barrier before the core is offered to others

FLOAT32, BFLOAT16, INT8, INT8_MINIMUM, INT4_MINIMUM = (int(form) for form in Form)
_FORM_BITS = {FLOAT32: 32, BFLOAT16: 16, INT8: 8, INT8_MINIMUM: 8, INT4_MINIMUM: 4}
LINE_BYTES = 64
PREFETCH_BYTES = 4096  # ahead of the reads, so that they do not stop at each page
FLOAT32_WIDTH = PANEL_COLUMNS  # weights.bin's own

_BYTE, _SHORT, _INT, _LONG, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_ITEM_BYTES = {_BYTE: 1, _SHORT: 2, _INT: 4, _FLOAT: 4}
# No error leaves compiled code: a thread that raised would leave the others waiting for ever.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


# ------------------------------------------------------------------------------------------------------------- products


class _Emitter:
    """LLVM instructions over vectors of `width` items."""

    def __init__(self, builder: Any, width: int) -> None:
        self.builder, self.width = builder, width
        self.vector = self.of(_FLOAT)

    def of(self, item: Any) -> Any:
        return ir.VectorType(item, self.width)

    def filled(self, item: Any, value: float) -> Any:
        return ir.Constant(self.of(item), [value] * self.width)

    def read_one(self, address: Any, index: Any) -> Any:
        return self.builder.load(self.builder.gep(self.builder.inttoptr(address, _FLOAT.as_pointer()), [index]), align=4)

    def read(self, address: Any, index: Any, item: Any = _FLOAT) -> Any:
        """A vector of `item`s from `index` items after an address."""
        first = self.builder.gep(self.builder.inttoptr(address, item.as_pointer()), [index])
        return self.builder.load(self.builder.bitcast(first, self.of(item).as_pointer()), align=_ITEM_BYTES[item])

    def prefetch(self, address: Any) -> None:
        """Ask for the cache line at an address, which may lie outside any mapping."""
        pointer = self.builder.inttoptr(address, _BYTE.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(function, [pointer, _INT(0), _INT(3), _INT(1)])

    def write(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, self.vector.as_pointer()), align=4)

    def spread(self, scalar: Any) -> Any:
        blank = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(blank, scalar, _INT(0))
        return self.builder.shuffle_vector(first, blank, self.filled(_INT, 0))

    def multiply_add(self, left: Any, right: Any, addend: Any) -> Any:
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.fmuladd.v{self.width}f32")
        return self.builder.call(function, [left, right, addend])


class _Product:
    """out[row, :width] += x[row, :depth] @ weights, for a fixed form, width and number of rows; sums stay in registers."""

    def __init__(self, emitter: _Emitter, form: int, rows: int, arguments: Sequence[Any]) -> None:
        self.emit, self.form = emitter, form
        self.x, self.x_stride, self.values, self.pitch, self.scales, self.minima, self.shift, self.depth, *out = arguments
        builder = emitter.builder
        self.x_rows = [builder.add(self.x, builder.mul(self.x_stride, _LONG(4 * row))) for row in range(rows)]
        self.out_rows = [builder.add(out[0], builder.mul(out[1], _LONG(4 * row))) for row in range(rows)]
        self.sum_first = form >= INT8 and rows <= SUM_FIRST_ROWS
        self.sums = [cgutils.alloca_once_value(builder, emitter.filled(_FLOAT, 0.0)) for _ in range(rows)]

    def write(self) -> None:
        emit, builder = self.emit, self.emit.builder
        with cgutils.for_range(builder, builder.udiv(self.depth, _LONG(STEPS))) as loop:
            self._turn(builder.mul(loop.index, _LONG(STEPS)), STEPS)
        if self.form in (FLOAT32, BFLOAT16):
            whole = builder.and_(self.depth, _LONG(-STEPS))
            with cgutils.for_range_slice(builder, whole, self.depth, _LONG(1)) as (at, _):
                self._turn(at, 1)
        for total, address in zip(self.sums, self.out_rows, strict=True):
            emit.write(builder.fadd(builder.load(total), emit.read(address, _LONG(0))), address)

    def _turn(self, at: Any, steps: int) -> None:
        """Inputs at..at + steps, into every row's sum."""
        emit, builder = self.emit, self.emit.builder
        scale = minimum = None
        if self.form >= INT8:
            group = builder.mul(builder.lshr(at, self.shift), _LONG(emit.width))
            scale = emit.read(self.scales, group)
            minimum = None if self.form == INT8 else emit.read(self.minima, group)
        weights = self._decoded(at, steps)
        if scale is not None and not self.sum_first:
            weights = [
                builder.fmul(each, scale) if minimum is None else emit.multiply_add(each, scale, minimum) for each in weights
            ]
        for x_row, total in zip(self.x_rows, self.sums, strict=True):
            inputs = [emit.read_one(x_row, builder.add(at, _LONG(step))) for step in range(steps)]
            # A sum of its own for each turn: turns then overlap instead of waiting for one another.
            fresh = self.sum_first or len(self.sums) <= SUM_FIRST_ROWS
            result = emit.filled(_FLOAT, 0.0) if fresh else builder.load(total)
            for weight, value in zip(weights, inputs, strict=True):
                result = emit.multiply_add(weight, emit.spread(value), result)
            if self.sum_first:
                result = emit.multiply_add(result, scale, builder.load(total))
                if minimum is not None:
                    result = emit.multiply_add(minimum, emit.spread(self._added(inputs)), result)
            elif fresh:
                result = builder.fadd(result, builder.load(total))
            builder.store(result, total)

    def _decoded(self, at: Any, steps: int) -> list[Any]:
        """The weights of each input, without their scales."""
        emit, builder = self.emit, self.emit.builder
        width_bytes = emit.width * _FORM_BITS[self.form] // 8
        if self.form == INT4_MINIMUM:
            start = builder.mul(at, _LONG(width_bytes))
            self._prefetch(builder.add(self.values, start), width_bytes * steps)
            word = emit.read(self.values, builder.mul(builder.udiv(at, _LONG(STEPS)), _LONG(emit.width)), _INT)
            shifted = [builder.lshr(word, emit.filled(_INT, 4 * step)) for step in range(steps)]
            return [builder.uitofp(builder.and_(each, emit.filled(_INT, 15)), emit.vector) for each in shifted]
        places = [builder.mul(builder.add(at, _LONG(step)), self.pitch) for step in range(steps)]
        if steps > 1:
            item_bytes = _LONG(_FORM_BITS[self.form] // 8)
            for place in places[:: max(1, LINE_BYTES // width_bytes)]:
                self._prefetch(builder.add(self.values, builder.mul(place, item_bytes)), width_bytes)
        if self.form == FLOAT32:
            return [emit.read(self.values, place) for place in places]
        if self.form == BFLOAT16:
            halves = [builder.zext(emit.read(self.values, place, _SHORT), emit.of(_INT)) for place in places]
            return [builder.bitcast(builder.shl(each, emit.filled(_INT, 16)), emit.vector) for each in halves]
        return [builder.sitofp(emit.read(self.values, place, _BYTE), emit.vector) for place in places]

    def _prefetch(self, address: Any, size_bytes: int) -> None:
        for line in range(0, size_bytes, LINE_BYTES):
            self.emit.prefetch(self.emit.builder.add(address, _LONG(PREFETCH_BYTES + line)))

    def _added(self, values: list[Any]) -> Any:
        while len(values) > 1:
            values = [self.emit.builder.fadd(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
        return values[0]


def _product(form: int, width: int, rows: int) -> Any:
    """f(x, x_stride, values, pitch, scales, minima, group_shift, depth, out, out_stride): addresses, strides in items."""

    @intrinsic
    def product(context, x, x_stride, values, pitch, scales, minima, shift, depth, out, out_stride):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _Product(_Emitter(builder, width), form, rows, arguments).write()
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return product


def _multiplier(form: int, width: int) -> Any:
    """The product for any number of rows: eights, sixes (where registers do), fours, threes, twos and a one."""
    many = 8 if width <= PANEL_WIDTH else 6
    product_many, product_4, product_3, product_2, product_1 = (_product(form, width, rows) for rows in (many, 4, 3, 2, 1))

    @njit(**_OPTIONS)
    def multiply(x, x_stride, values, pitch, scales, minima, shift, depth, out, out_stride, rows):
        row = 0
        while row < rows:
            left = rows - row
            here, there = x + 4 * row * x_stride, out + 4 * row * out_stride
            if left >= many:
                product_many(here, x_stride, values, pitch, scales, minima, shift, depth, there, out_stride)
                row += many
            elif left >= 4:
                product_4(here, x_stride, values, pitch, scales, minima, shift, depth, there, out_stride)
                row += 4
            elif left == 3:
                product_3(here, x_stride, values, pitch, scales, minima, shift, depth, there, out_stride)
                row += 3
            elif left == 2:
                product_2(here, x_stride, values, pitch, scales, minima, shift, depth, there, out_stride)
                row += 2
            else:
                product_1(here, x_stride, values, pitch, scales, minima, shift, depth, there, out_stride)
                row += 1

    return multiply


_multiply_float32 = _multiplier(FLOAT32, FLOAT32_WIDTH)
_multiply_bfloat16 = _multiplier(BFLOAT16, PANEL_WIDTH)
_multiply_int8 = _multiplier(INT8, PANEL_WIDTH)
_multiply_int8_minimum = _multiplier(INT8_MINIMUM, PANEL_WIDTH)
_multiply_int4_minimum = _multiplier(INT4_MINIMUM, PANEL_WIDTH)
_multiply_32, _multiply_16, _multiply_2 = (_multiplier(FLOAT32, width) for width in (32, 16, 2))


@njit(**_OPTIONS)
def _linear(matrix, x, out, add, thread, threads):
    """out (+)= x @ matrix, for this thread's share of its panels. `x` [rows, >= depth], `out` [rows, >= panels * width]."""
    form, depth, rows = matrix[FORM], matrix[DEPTH], x.shape[0]
    width = FLOAT32_WIDTH if form == FLOAT32 else PANEL_WIDTH
    panel_bits = depth * width * (32 if form == FLOAT32 else 16 if form == BFLOAT16 else 4 if form == INT4_MINIMUM else 8)
    shift, x_at, x_stride, out_stride = matrix[GROUP_SHIFT], x.ctypes.data, x.shape[1], out.shape[1]
    scales_bytes = (depth >> shift) * width * 4
    for panel in range(matrix[PANELS] * thread // threads, matrix[PANELS] * (thread + 1) // threads):
        first = panel * width
        if not add:
            for row in range(rows):
                out[row, first : first + width] = 0.0
        values = matrix[VALUES] + panel * panel_bits // 8
        scales, minima = matrix[SCALES] + panel * scales_bytes, matrix[MINIMA] + panel * scales_bytes
        here = out.ctypes.data + 4 * first
        if form == INT4_MINIMUM:
            _multiply_int4_minimum(x_at, x_stride, values, width, scales, minima, shift, depth, here, out_stride, rows)
        elif form == INT8:
            _multiply_int8(x_at, x_stride, values, width, scales, minima, shift, depth, here, out_stride, rows)
        elif form == INT8_MINIMUM:
            _multiply_int8_minimum(x_at, x_stride, values, width, scales, minima, shift, depth, here, out_stride, rows)
        elif form == BFLOAT16:
            _multiply_bfloat16(x_at, x_stride, values, width, scales, minima, shift, depth, here, out_stride, rows)
        else:
            _multiply_float32(x_at, x_stride, values, width, scales, minima, shift, depth, here, out_stride, rows)


# ---------------------------------------------------------------------------------------------------- threads and memory


@intrinsic
def _fetch_add(context, address, value):
    """Add to an int64 that other threads read; returns what it held."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _LONG.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _atomic_read(context, address):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _LONG.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def _pointer(context, address):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _FLOAT.as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@njit(**_OPTIONS)
def _meet(barrier, meetings, threads):
    """Wait until all threads are here; returns the number of meetings so far. `barrier` counts arrivals, from 0."""
    if threads == 1:
        return meetings
    meetings += 1
    address = barrier.ctypes.data
    _fetch_add(address, 1)
    spins = 0
    while _atomic_read(address) < meetings * threads:
        spins += 1
        if spins > SPINS:
            _sched_yield()
    return meetings


# ------------------------------------------------------------------------------------------------------------ the layers


@njit(**_OPTIONS, inline="always")
def _exp(x):
    """exp to 2 ulp over -87..88, and what it is there beyond: a polynomial, so that loops of it become vectors."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    turns = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    rest = x - turns * np.float32(0.693359375) + turns * np.float32(2.12194440e-4)
    series = np.float32(1.9875691500e-4)
    series = series * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    series = series * rest * rest + rest + np.float32(1.0)
    return series * np.int32((np.int32(turns) + np.int32(127)) << np.int32(23)).view(np.float32)


_REORDERED = {"reassoc", "contract", "nsz"}  # lets sums be vectors


@njit(**_OPTIONS, fastmath=_REORDERED)
def _normalize(x, weight, eps, out):
    """RMSNorm of one row."""
    total = np.float32(0.0)
    for index in range(len(weight)):
        total += x[index] * x[index]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(len(weight)) + eps)
    for index in range(len(weight)):
        out[index] = x[index] * scale * weight[index]


@njit(**_OPTIONS)
def _rotate(head, cos, sin, scale):
    """RoPE of one head in place, its pairs side by side."""
    for pair in range(len(cos)):
        real, imaginary = head[2 * pair], head[2 * pair + 1]
        head[2 * pair] = (real * cos[pair] - imaginary * sin[pair]) * scale
        head[2 * pair + 1] = (real * sin[pair] + imaginary * cos[pair]) * scale


@njit(**_OPTIONS)
def _prepared_head(qkv, head, bias, norms, eps, cos, sin, scale, out):
    """Query or key `head` of one row into `out` [head_dim]: bias, norm, rotation. Bias and norms are empty where unused."""
    dim = len(out)
    first = head * dim
    out[:] = qkv[first : first + dim]
    if len(bias):
        for index in range(dim):
            out[index] += bias[first + index]
    if len(norms):
        _normalize(out, norms[head], eps, out)
    _rotate(out, cos, sin, scale)


@njit(**_OPTIONS, fastmath=_REORDERED)
def _exponentiate(scores, count, highest):
    """exp(scores - highest) in place; returns their sum."""
    total = np.float32(0.0)
    for index in range(count):
        value = _exp(scores[index] - highest)
        scores[index] = value
        total += value
    return total


@njit(**_OPTIONS, fastmath=_REORDERED | {"nnan"})
def _highest(scores, count):
    highest = scores[0]
    for index in range(count):
        highest = max(highest, scores[index])
    return highest


@njit(**_OPTIONS)
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
            _multiply_float32(queries.ctypes.data, dim, here, KEY_TILE, 0, 0, 0, dim, out, span, group)
        for row in range(group):
            highest = max(state[row, 0], _highest(scores[row], count))
            total = _exponentiate(scores[row], count, highest)
            if highest > state[row, 0]:
                lowered = _exp(state[row, 0] - highest) if begin > first else np.float32(0.0)
                mixed[row] *= lowered
                state[row, 1] *= lowered
                state[row, 0] = highest
            state[row, 1] += total
        here, column = values + 4 * begin * KEY_TILE * dim, 0
        while column < dim:
            x, at, out = scores.ctypes.data, here + 4 * column, mixed.ctypes.data + 4 * column
            if dim - column >= 64:
                _multiply_float32(x, span, at, dim, 0, 0, 0, count, out, dim, group)
                column += 64
            elif dim - column >= 32:
                _multiply_32(x, span, at, dim, 0, 0, 0, count, out, dim, group)
                column += 32
            elif dim - column >= 16:
                _multiply_16(x, span, at, dim, 0, 0, 0, count, out, dim, group)
                column += 16
            else:
                _multiply_2(x, span, at, dim, 0, 0, 0, count, out, dim, group)
                column += 2


@njit(**_OPTIONS)
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
                tile = carray(_pointer(keys + 4 * (tiles - 1) * dim * KEY_TILE), (dim, KEY_TILE))
                _prepared_head(qkv[row], kv_heads * group + head, bias, norms, eps, cos[row], sin[row], one, queries[0])
                tile[:, position % KEY_TILE] = queries[0]
                value = carray(_pointer(values + 4 * position * dim), (dim,))
                source = (kv_heads * (group + 1) + head) * dim
                value[:] = qkv[row, source : source + dim]
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


@njit(**_OPTIONS)
def _merge(mixed, states, attended, thread, threads):
    """The threads' partial results into attended [row, head * head_dim]; heads are shared out among the threads."""
    rows, kv_heads, group, dim = mixed.shape[1:]
    for item in range(thread, rows * kv_heads * group, threads):
        row, number = divmod(item, kv_heads * group)
        head, query = divmod(number, group)
        highest = np.float32(-np.inf)
        for part in range(threads):
            if states[part, row, head, query, 1] > 0.0:
                highest = max(highest, states[part, row, head, query, 0])
        out = attended[row, number * dim : (number + 1) * dim]
        out[:] = 0.0
        total = np.float32(0.0)
        for part in range(threads):
            if states[part, row, head, query, 1] > 0.0:
                share = _exp(states[part, row, head, query, 0] - highest)
                total += share * states[part, row, head, query, 1]
                for index in range(dim):
                    out[index] += share * mixed[part, row, head, query, index]
        for index in range(dim):
            out[index] /= total


@njit(**_OPTIONS, fastmath=_REORDERED)
def _silu_times(gate, up, out):
    for index in range(len(out)):
        out[index] = gate[index] / (np.float32(1.0) + _exp(-gate[index])) * up[index]


@njit(**_OPTIONS)
def _activate(gate_up, active, thread, threads):
    """active = silu(gate) * up, for this thread's columns."""
    rows, ffn = active.shape
    first, last = ffn * thread // threads, ffn * (thread + 1) // threads
    for row in range(rows):
        _silu_times(gate_up[row, first:last], gate_up[row, ffn + first : ffn + last], active[row, first:last])


def decode_step(
    thread, threads, barrier, matrices, norms, biases, head_norms, eps, caches, cos, sin,
    hidden, normed, qkv, queries, scores, mixed, states, attended, gate_up, active, logits,
):  # fmt: skip
    """One token for each row, through all layers: KV into the caches, logits [row, vocabulary, padded] out.

    `hidden` [row, hidden, padded] holds the embedded tokens and is overwritten; `norms` [2 * layers + 1, hidden]. All rows'
    sequences have room. Called by `threads` threads with the same arrays, and a barrier of 0.
    """
    layers, rows, own = (len(norms) - 1) // 2, len(hidden), normed[thread]
    meetings = 0
    for layer in range(layers):
        first = MATRICES * layer
        bias, head_norm = biases[layer], head_norms[layer]
        for row in range(rows):
            _normalize(hidden[row], norms[2 * layer], eps, own[row])
        _linear(matrices[first + QKV], own, qkv, False, thread, threads)
        meetings = _meet(barrier, meetings, threads)
        _attend(
            layer, caches, qkv, bias, head_norm, eps, cos, sin, queries[thread], scores[thread], mixed, states, thread, threads
        )
        meetings = _meet(barrier, meetings, threads)
        _merge(mixed, states, attended, thread, threads)
        meetings = _meet(barrier, meetings, threads)
        _linear(matrices[first + OUT], attended, hidden, True, thread, threads)
        meetings = _meet(barrier, meetings, threads)
        for row in range(rows):
            _normalize(hidden[row], norms[2 * layer + 1], eps, own[row])
        _linear(matrices[first + GATE_UP], own, gate_up, False, thread, threads)
        meetings = _meet(barrier, meetings, threads)
        _activate(gate_up, active, thread, threads)
        meetings = _meet(barrier, meetings, threads)
        _linear(matrices[first + DOWN], active, hidden, True, thread, threads)
        meetings = _meet(barrier, meetings, threads)
    for row in range(rows):
        _normalize(hidden[row], norms[2 * layers], eps, own[row])
    _linear(matrices[MATRICES * layers], own, logits, False, thread, threads)
    _meet(barrier, meetings, threads)
