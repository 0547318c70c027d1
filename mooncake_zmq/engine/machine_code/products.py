"""Products with matrices in each of their forms, in LLVM's vectors; compiled by Numba as part of a step.

A vector is as wide as a panel: its weights are decoded once, in registers, and multiplied into up to eight rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from mooncake_zmq.engine.machine_code.memory_access import floats
from mooncake_zmq.engine.machine_code.step_layout import DEPTH, FORM, GROUP_SHIFT, MINIMA, PANELS, SCALES, VALUES
from mooncake_zmq.engine.matrices.panels import PANEL_COLUMNS
from mooncake_zmq.engine.matrices.quantized import PANEL_WIDTH, Form

# No error leaves compiled code: a thread that raised would leave the others waiting for ever. Without Numba's runtime
# (nrt), it counts no references and calls nothing of Numba's.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
STEPS = 8  # inputs taken in one turn of a product's loop, and 4-bit values in a word
SUM_FIRST_ROWS = 2  # up to here scale * sum(q * x) + minimum * sum(x) takes fewer operations than decoding q first

FLOAT32, BFLOAT16, INT8, INT8_MINIMUM, INT4_MINIMUM = (int(form) for form in Form)
_FORM_BITS = {FLOAT32: 32, BFLOAT16: 16, INT8: 8, INT8_MINIMUM: 8, INT4_MINIMUM: 4}
LINE_BYTES = 64
PREFETCH_BYTES = 4096  # ahead of the reads, so that they do not stop at each page
FLOAT32_WIDTH = PANEL_COLUMNS  # weights.bin's own
WIDE = bool(llvm.get_host_cpu_features().get("avx512f"))
TILE_COLUMNS = FLOAT32_WIDTH if WIDE else 16  # whose sums of six rows fit in the registers, with a row of weights beside

_BYTE, _SHORT, _INT, _LONG, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_ITEM_BYTES = {_BYTE: 1, _SHORT: 2, _INT: 4, _FLOAT: 4}


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
        """Read a vector of `item`s from `index` items after an address."""
        first = self.builder.gep(self.builder.inttoptr(address, item.as_pointer()), [index])
        return self.builder.load(self.builder.bitcast(first, self.of(item).as_pointer()), align=_ITEM_BYTES[item])

    def prefetch(self, address: Any) -> None:
        """Prefetch the cache line at an address, which may lie outside any mapping."""
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
    """Emits out[row, :width] += x[row, :depth] @ weights, for a fixed form, width and number of rows; sums stay in
    registers."""

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
        """Add inputs at..at + steps to every row's sum."""
        emit, builder = self.emit, self.emit.builder
        scale = minimum = None
        if self.form >= INT8:
            group = builder.mul(builder.lshr(at, self.shift), _LONG(emit.width))
            scale = emit.read(self.scales, group)
            minimum = None if self.form == INT8 else emit.read(self.minima, group)
        weights = self._decoded(at, steps)
        if scale is not None and not self.sum_first:
            weights = (
                builder.fmul(each, scale) if minimum is None else emit.multiply_add(each, scale, minimum) for each in weights
            )
        if len(self.sums) > SUM_FIRST_ROWS:
            self._add_input_by_input(weights, at)
            return
        held = list(weights)
        for x_row, total in zip(self.x_rows, self.sums, strict=True):
            values = [emit.read_one(x_row, builder.add(at, _LONG(step))) for step in range(steps)]
            # A sum of its own for each turn: turns then overlap instead of waiting for one another.
            result = emit.filled(_FLOAT, 0.0)
            for weight, value in zip(held, values, strict=True):
                result = emit.multiply_add(weight, emit.spread(value), result)
            if self.sum_first:
                result = emit.multiply_add(result, scale, builder.load(total))
                if minimum is not None:
                    result = emit.multiply_add(minimum, emit.spread(self._added(values)), result)
            else:
                result = builder.fadd(result, builder.load(total))
            builder.store(result, total)

    def _add_input_by_input(self, weights: Iterator[Any], at: Any) -> None:
        """Read each input's weights and multiply all rows by them before the next: measured with float32, 160 GFLOP/s where
        those of a whole turn, row by row, made 133."""
        emit, builder = self.emit, self.emit.builder
        for step, weight in enumerate(weights):
            place = builder.add(at, _LONG(step))
            for x_row, total in zip(self.x_rows, self.sums, strict=True):
                value = emit.spread(emit.read_one(x_row, place))
                builder.store(emit.multiply_add(weight, value, builder.load(total)), total)

    def _decoded(self, at: Any, steps: int) -> Iterator[Any]:
        """Yield the weights of each input, without their scales."""
        emit, builder = self.emit, self.emit.builder
        width_bytes = emit.width * _FORM_BITS[self.form] // 8
        if self.form == INT4_MINIMUM:
            start = builder.mul(at, _LONG(width_bytes))
            self._prefetch(builder.add(self.values, start), width_bytes * steps)
            word = emit.read(self.values, builder.mul(builder.udiv(at, _LONG(STEPS)), _LONG(emit.width)), _INT)
            for step in range(steps):
                shifted = builder.lshr(word, emit.filled(_INT, 4 * step))
                yield builder.uitofp(builder.and_(shifted, emit.filled(_INT, 15)), emit.vector)
            return
        item_bytes, lines = _LONG(_FORM_BITS[self.form] // 8), max(1, LINE_BYTES // width_bytes)
        for step in range(steps):
            place = builder.mul(builder.add(at, _LONG(step)), self.pitch)
            if steps > 1 and step % lines == 0:
                self._prefetch(builder.add(self.values, builder.mul(place, item_bytes)), width_bytes)
            if self.form == FLOAT32:
                yield emit.read(self.values, place)
            elif self.form == BFLOAT16:
                halves = builder.zext(emit.read(self.values, place, _SHORT), emit.of(_INT))
                yield builder.bitcast(builder.shl(halves, emit.filled(_INT, 16)), emit.vector)
            else:
                yield builder.sitofp(emit.read(self.values, place, _BYTE), emit.vector)

    def _prefetch(self, address: Any, size_bytes: int) -> None:
        for line in range(0, size_bytes, LINE_BYTES):
            self.emit.prefetch(self.emit.builder.add(address, _LONG(PREFETCH_BYTES + line)))

    def _added(self, values: list[Any]) -> Any:
        while len(values) > 1:
            values = [self.emit.builder.fadd(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
        return values[0]


def _product(form: int, width: int, rows: int) -> Any:
    """Return f(x, x_stride, values, pitch, scales, minima, group_shift, depth, out, out_stride): addresses, strides in
    items."""

    @intrinsic
    def product(context, x, x_stride, values, pitch, scales, minima, shift, depth, out, out_stride):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _Product(_Emitter(builder, width), form, rows, arguments).write()
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return product


def _multiplier(form: int, width: int, many: int) -> Any:
    """Return the product for any number of rows: of `many` together, fours, threes, twos and a one."""
    product_many, product_4, product_3, product_2, product_1 = (_product(form, width, rows) for rows in (many, 4, 3, 2, 1))

    @njit(**OPTIONS)
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


_multiply_bfloat16, _multiply_int8, _multiply_int8_minimum, _multiply_int4_minimum = (
    _multiplier(form, PANEL_WIDTH, 8) for form in (BFLOAT16, INT8, INT8_MINIMUM, INT4_MINIMUM)
)
multiply_float32, multiply_32 = (_multiplier(FLOAT32, width, 6) for width in (FLOAT32_WIDTH, 32))
multiply_16, multiply_2 = (_multiplier(FLOAT32, width, 8) for width in (16, 2))
multiply_tile = multiply_float32 if WIDE else _multiplier(FLOAT32, TILE_COLUMNS, 6)


@njit(**OPTIONS)
def multiply_panels(matrix, x, rows, out, out_stride, add):
    """Compute out (+)= x @ matrix for the first rows of `x` [>= rows, >= depth] and a matrix in float32; `out`: an address. A
    panel, or as much of one as the registers have sums for, meets all rows before the next. Measured with AVX-512: 160 GFLOP/s
    where OpenBLAS makes 120 of it."""
    depth = matrix[DEPTH]
    for tile in range(matrix[PANELS] * (FLOAT32_WIDTH // TILE_COLUMNS)):
        column = tile * TILE_COLUMNS
        panel, within = column // FLOAT32_WIDTH, column % FLOAT32_WIDTH
        here = out + 4 * column
        if not add:
            for row in range(rows):
                floats(here + 4 * row * out_stride, (TILE_COLUMNS,))[:] = 0.0
        weights = matrix[VALUES] + 4 * (panel * depth * FLOAT32_WIDTH + within)
        multiply_tile(x.ctypes.data, x.shape[1], weights, FLOAT32_WIDTH, 0, 0, 0, depth, here, out_stride, rows)


@njit(**OPTIONS)
def linear(matrix, x, out, add, thread, threads):
    """Compute out (+)= x @ matrix, for this thread's share of its panels. `x` [rows, >= depth], `out` [rows, >= panels *
    width]."""
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
            multiply_float32(x_at, x_stride, values, width, scales, minima, shift, depth, here, out_stride, rows)
