"""Parts of blocks placed into a sequence's memory in machine code: keys in transposed tiles, values by head."""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from mooncake_zmq.engine.kv_cache import KEY_TILE
from mooncake_zmq.engine.machine_code.attention_kernels import copy, places
from mooncake_zmq.engine.machine_code.memory_access import floats, integers
from mooncake_zmq.engine.machine_code.products import OPTIONS
from mooncake_zmq.engine.machine_code.step_layout import (
    HEAD_DIM,
    KV_HEADS,
    PART_FIELDS,
    PART_KEYS_AT,
    PART_LAYER,
    PART_START,
    PART_TOKENS,
    PART_VALUES_AT,
    PARTS,
    PLACING_FIELDS,
    TOGETHER,
)

SIDE = 8  # of a square of numbers that is transposed in registers

_LONG, _VECTOR = ir.IntType(64), ir.VectorType(ir.FloatType(), SIDE)


@intrinsic
def transpose(context, source, row_bytes, target, column_bytes):
    """Transpose SIDE rows of SIDE float32, `row_bytes` apart, to `target`, where rows are `column_bytes` apart."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, row_bytes, target, column_bytes = arguments

        def address(first: Any, step: Any, index: int) -> Any:
            return builder.inttoptr(builder.add(first, builder.mul(step, _LONG(index))), _VECTOR.as_pointer())

        rows = [builder.load(address(source, row_bytes, index), align=4) for index in range(SIDE)]
        half = SIDE // 2
        for _ in range(SIDE.bit_length() - 1):  # each turn interleaves row i with row i + SIDE / 2
            rows = [
                builder.shuffle_vector(rows[index], rows[index + half], _interleaved(first))
                for index in range(half)
                for first in (0, half)
            ]
        for index, row in enumerate(rows):
            builder.store(row, address(target, column_bytes, index), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


def _interleaved(first: int) -> Any:
    """Return the indices of SIDE numbers of two vectors in turns, from number `first` of each."""
    numbers = [first + turn + part * SIDE for turn in range(SIDE // 2) for part in (0, 1)]
    return ir.Constant(ir.VectorType(ir.IntType(32), SIDE), numbers)


@njit(**OPTIONS)
def place_columns(source, token_bytes, tokens, dim, target):
    """Store keys of one head, `token_bytes` apart, as columns of a tile from `target`: whole cache lines, one channel after the
    other."""
    whole, square = tokens - tokens % SIDE, dim - dim % SIDE
    for index in range(0, square, SIDE):
        for token in range(0, whole, SIDE):
            place = target + 4 * (index * KEY_TILE + token)
            transpose(source + token * token_bytes + 4 * index, token_bytes, place, 4 * KEY_TILE)
    for token in range(tokens):
        for index in range(square if token < whole else 0, dim):
            floats(target + 4 * (index * KEY_TILE + token), (1,))[0] = floats(source + token * token_bytes + 4 * index, (1,))[0]


@njit(**OPTIONS)
def place_parts(table):
    """Store parts into the cache; `table`: the address of the table of `What.PLACE_PARTS`. Every part is within the cache."""
    begins = integers(table, (PLACING_FIELDS,))
    kv_heads, dim = begins[KV_HEADS], begins[HEAD_DIM]
    token_bytes, head_bytes = 4 * kv_heads * dim, 4 * dim
    parts = integers(table + 8 * PLACING_FIELDS, (begins[PARTS], PART_FIELDS))
    for row in range(len(parts)):
        layer, start, tokens = parts[row, PART_LAYER], parts[row, PART_START], parts[row, PART_TOKENS]
        at = 0
        while at < tokens:  # in the order in which the part lies in memory
            tile, column = (start + at) // KEY_TILE, (start + at) % KEY_TILE
            run = min(min(TOGETHER, tokens - at), KEY_TILE - column)
            for head in range(kv_heads):
                keys, _ = places(begins, layer, kv_heads, head, dim)
                source = parts[row, PART_KEYS_AT] + at * token_bytes + head * head_bytes
                place_columns(source, token_bytes, run, dim, keys + 4 * (tile * dim * KEY_TILE + column))
            at += run
        for token in range(tokens):
            for head in range(kv_heads):
                _, values = places(begins, layer, kv_heads, head, dim)
                source = parts[row, PART_VALUES_AT] + token * token_bytes + head * head_bytes
                copy(floats(source, (dim,)), floats(values + (start + token) * head_bytes, (dim,)))
