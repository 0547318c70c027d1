"""Access to memory by its address, for functions that Numba compiles: as arrays, and as numbers that threads share."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

_LONG = ir.IntType(64)


@intrinsic
def fetch_add(context, address, value):
    """Add to an int64 that other threads read; return its former value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _LONG.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_read(context, address):
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _LONG.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def prefetch(context, address):
    """Begin to bring a cache line near that is read or written soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), *3 * [ir.IntType(32)]])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        for_writing, near, of_data = (ir.Constant(ir.IntType(32), number) for number in (1, 3, 1))
        builder.call(function, [pointer, for_writing, near, of_data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def call(context, function, what, address, table):
    """Call machine code at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), 3 * [_LONG])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*4 * [types.int64]), generate


def _array_of(item: Any, ir_item: Any, item_bytes: int) -> Any:
    """Return f(address, shape), which gives the memory there as an array. Numba's `carray` would need its runtime."""

    @intrinsic
    def array(context, address, shape):
        kind = types.Array(item, len(shape), "C")

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            result = make_array(kind)(context, builder)
            dimensions, strides = cgutils.unpack_tuple(builder, arguments[1]), [_LONG(item_bytes)]
            for dimension in dimensions[:0:-1]:
                strides.insert(0, builder.mul(strides[0], dimension))
            pointer = builder.inttoptr(arguments[0], ir_item.as_pointer())
            populate_array(result, pointer, dimensions, strides, strides[-1], None)
            return result._getvalue()

        return kind(types.int64, types.UniTuple(types.int64, len(shape))), generate

    return array


floats, integers = _array_of(types.float32, ir.FloatType(), 4), _array_of(types.int64, _LONG, 8)
codes, shorts = _array_of(types.uint8, ir.IntType(8), 1), _array_of(types.uint16, ir.IntType(16), 2)
words = _array_of(types.uint32, ir.IntType(32), 4)
