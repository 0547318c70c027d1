"""The arithmetic of `engine.codecs` on one head in machine code, byte for byte: codes and scale of a key or value, and the
rounding of both as they are stored. A codec is one number here, the CODEC of a cache."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from mooncake_zmq.engine.machine_code.memory_access import codes, floats, shorts, words
from mooncake_zmq.engine.machine_code.products import OPTIONS
from mooncake_zmq.engine.machine_code.step_layout import (
    CODEC,
    HEAD_DIM,
    LEAST_OF_KEYS,
    LEAST_OF_VALUES,
    ROTATES_KEYS,
    ROTATES_VALUES,
)
from mooncake_zmq.kv.codec import BENT, CUBIC, LINEAR, STEEP

SIDE = 8  # numbers of a vector
RUN = 64  # numbers that one rotation mixes, at most
LINEAR_PART, CUBIC_PART = np.float32(LINEAR), np.float32(CUBIC)
STEEP_PART, BENT_PART = np.float32(STEEP), np.float32(BENT)
USUAL_LEAST = 100  # -log2 of the scale below which numbers are zero, where no larger one is the least

_LONG, _INT, _VECTOR = ir.IntType(64), ir.IntType(32), ir.VectorType(ir.FloatType(), SIDE)


@intrinsic
def _rotate_run(context, address):
    """Multiply RUN numbers in place by a Hadamard matrix / 8: first vectors with each other, then the numbers of each."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places = [
            builder.inttoptr(builder.add(arguments[0], _LONG(4 * SIDE * row)), _VECTOR.as_pointer())
            for row in range(RUN // SIDE)
        ]
        rows = [builder.load(place, align=4) for place in places]
        distance = 1
        while distance < len(rows):
            for row in range(len(rows)):
                if not row & distance:
                    one, two = rows[row], rows[row + distance]
                    rows[row], rows[row + distance] = builder.fadd(one, two), builder.fsub(one, two)
            distance *= 2
        distance = 1
        while distance < SIDE:
            partners = ir.Constant(ir.VectorType(_INT, SIDE), [index ^ distance for index in range(SIDE)])
            signs = ir.Constant(_VECTOR, [-1.0 if index & distance else 1.0 for index in range(SIDE)])
            rows = [builder.fadd(builder.shuffle_vector(row, row, partners), builder.fmul(row, signs)) for row in rows]
            distance *= 2
        factor = ir.Constant(_VECTOR, [0.125] * SIDE)
        for row, place in zip(rows, places, strict=True):
            builder.store(builder.fmul(row, factor), place, align=4)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@njit(**OPTIONS)
def rotate(address, dim):
    """Rotate a head [dim] in place."""
    run = min(dim & -dim, RUN)
    if run == RUN:
        for turn in range(dim // RUN):
            _rotate_run(address + 4 * RUN * turn)
        return
    numbers = floats(address, (dim,))
    distance = SIDE
    while distance < run:
        _mix(numbers, distance)
        distance *= 2
    distance = 1
    while distance < min(run, SIDE):
        _mix(numbers, distance)
        distance *= 2
    factor = np.float32(1.0 / np.sqrt(np.float64(run)))
    for index in range(dim):
        numbers[index] *= factor


@njit(**OPTIONS)
def _mix(numbers, distance):
    """Replace numbers that are `distance` apart by their sum and difference."""
    for index in range(len(numbers)):
        if not index & distance:
            one, two = numbers[index], numbers[index + distance]
            numbers[index], numbers[index + distance] = one + two, one - two


@njit(**OPTIONS)
def _highest(address, dim):
    """Return the largest magnitude of a head, which is not finite if one of them is not: as integers they have the same
    order."""
    numbers, highest = words(address, (dim,)), np.uint32(0)
    for index in range(dim):
        highest = max(highest, np.uint32(numbers[index] & np.uint32(0x7FFFFFFF)))
    return np.uint32(highest).view(np.float32)


@njit(**OPTIONS, inline="always")
def _scale_of(address, dim, bits, least):
    """Return the scale of a head, exact in bfloat16. `least`: -log2 of the least one."""
    part = np.float32(1.0) / np.float32(127.0) if bits == 8 else np.float32(1.0) / np.float32(7.5)
    word = np.float32(_highest(address, dim) * part).view(np.uint32)
    word = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    scale = np.uint32(word).view(np.float32)
    smallest = np.uint32((127 - least) << 23).view(np.float32)
    if scale < smallest:
        return smallest if least < USUAL_LEAST else np.float32(0.0)
    return scale


@njit(**OPTIONS, inline="always")
def _step_of(scale):
    return np.float32(1.0) / scale if scale > np.float32(0.0) else np.float32(0.0)


@njit(**OPTIONS, inline="always")
def _code_of(number, step):
    """Return the code of 8 bits of a number."""
    # What is not negative is rounded down by it.
    return np.int32(min(max(number * step + np.float32(128.5), np.float32(1.0)), np.float32(255.0)))


@njit(**OPTIONS, inline="always")
def _level_code_of(number, step):
    """Return the code of 4 bits of a number."""
    scaled = number * step
    code = scaled * (STEEP_PART - BENT_PART * abs(scaled)) + np.float32(8.0)
    return np.int32(min(max(code, np.float32(0.0)), np.float32(15.0)))


@njit(**OPTIONS, inline="always")
def _level_of(code):
    """Return the level of a code of 4 bits. All products are exact."""
    from_zero = np.float32(np.int32(code)) - np.float32(7.5)
    return from_zero * (LINEAR_PART + CUBIC_PART * (from_zero * from_zero))


def _scaled(builder: Any, address: Any, step: Any) -> Any:
    """Return SIDE numbers times `step`, the inverse of their scale."""
    numbers = builder.load(builder.inttoptr(address, _VECTOR.as_pointer()), align=4)
    steps = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), step, _INT(0))
    steps = builder.shuffle_vector(steps, steps, ir.Constant(ir.VectorType(_INT, SIDE), [0] * SIDE))
    return builder.fmul(numbers, steps)


def _all(number: float) -> Any:
    return ir.Constant(_VECTOR, [number] * SIDE)


def _codes_of_side(builder: Any, numbers: Any, half: float, least: float, most: float) -> Any:
    """Return the codes of SIDE numbers: rounded down from `half` above them, and from `least` to `most`."""
    numbers = builder.fadd(numbers, _all(half))
    for nearer, bound in ((">", least), ("<", most)):
        numbers = builder.select(builder.fcmp_ordered(nearer, numbers, _all(bound)), numbers, _all(bound))
    return builder.fptoui(numbers, ir.VectorType(_INT, SIDE))


def _level_codes_of_side(builder: Any, scaled: Any) -> Any:
    """Return the codes of 4 bits of SIDE numbers / scale."""
    is_negative = builder.fcmp_ordered("<", scaled, _all(0.0))
    magnitudes = builder.select(is_negative, builder.fsub(_all(0.0), scaled), scaled)
    slopes = builder.fsub(_all(float(STEEP_PART)), builder.fmul(_all(float(BENT_PART)), magnitudes))
    return _codes_of_side(builder, builder.fmul(scaled, slopes), 8.0, 0.0, 15.0)


def _store_bytes(builder: Any, numbers: Any, address: Any) -> None:
    kind = ir.VectorType(ir.IntType(8), SIDE)
    builder.store(builder.trunc(numbers, kind), builder.inttoptr(address, kind.as_pointer()), align=1)


@intrinsic
def _write_bytes(context, numbers_at, step, out_at):
    """Write the codes of 8 bits of SIDE numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers_at, step, out_at = arguments
        _store_bytes(builder, _codes_of_side(builder, _scaled(builder, numbers_at, step), 128.5, 1.0, 255.0), out_at)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), generate


@intrinsic
def _write_pairs(context, low_at, high_at, step, out_at):
    """Write the codes of 4 bits of SIDE numbers and of SIDE others, in pairs."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        low, high = (_level_codes_of_side(builder, _scaled(builder, each, arguments[2])) for each in arguments[:2])
        fours = ir.Constant(ir.VectorType(_INT, SIDE), [4] * SIDE)
        _store_bytes(builder, builder.or_(low, builder.shl(high, fours)), arguments[3])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


@njit(**OPTIONS)
def encode_head(address, dim, bits, least, out_at, scale_at):
    """Write the codes and the scale of one head [dim]."""
    numbers = floats(address, (dim,))
    scale = _scale_of(address, dim, bits, least)
    step = _step_of(scale)
    shorts(scale_at, (1,))[0] = np.uint16(np.float32(scale).view(np.uint32) >> np.uint32(16))
    if bits == 8:
        out, whole = codes(out_at, (dim,)), dim - dim % SIDE
        for index in range(0, whole, SIDE):
            _write_bytes(address + 4 * index, step, out_at + index)
        for index in range(whole, dim):
            out[index] = np.uint8(_code_of(numbers[index], step))
        return
    half = dim // 2
    out, whole = codes(out_at, (half,)), half - half % SIDE
    for index in range(0, whole, SIDE):
        _write_pairs(address + 4 * index, address + 4 * (half + index), step, out_at + index)
    for index in range(whole, half):
        low, high = _level_code_of(numbers[index], step), _level_code_of(numbers[half + index], step)
        out[index] = np.uint8(low | (high << 4))


@njit(**OPTIONS)
def decode_head(in_at, scale_at, bits, numbers):
    """Read one head [dim] from its codes and scale."""
    scale, dim = np.uint32(np.uint32(shorts(scale_at, (1,))[0]) << np.uint32(16)).view(np.float32), len(numbers)
    if bits == 8:
        given = codes(in_at, (dim,))
        for index in range(dim):
            numbers[index] = (np.float32(np.int32(given[index])) - np.float32(128.0)) * scale
        return
    half, given = dim // 2, codes(in_at, (dim // 2,))
    for index in range(half):
        numbers[index] = _level_of(given[index] & 15) * scale
    for index in range(half):
        numbers[half + index] = _level_of(given[index] >> 4) * scale


@njit(**OPTIONS)
def _round_head(address, dim, bits, least, is_rotated):
    """Round one head in place, as encoding and decoding do."""
    if is_rotated:
        rotate(address, dim)
    numbers = floats(address, (dim,))
    scale = _scale_of(address, dim, bits, least)
    step = _step_of(scale)
    if bits == 8:
        for index in range(dim):
            numbers[index] = (np.float32(_code_of(numbers[index], step)) - np.float32(128.0)) * scale
    else:
        for index in range(dim):
            numbers[index] = _level_of(_level_code_of(numbers[index], step)) * scale
    if is_rotated:
        rotate(address, dim)


@njit(**OPTIONS)
def round_key(address, cache):
    """Round a key in place as the codec of its cache does."""
    codec = cache[CODEC]
    _round_head(address, cache[HEAD_DIM], codec & 15, (codec >> LEAST_OF_KEYS) & 255, codec & ROTATES_KEYS != 0)


@njit(**OPTIONS)
def round_value(address, cache):
    """Round a value in place as the codec of its cache does."""
    codec = cache[CODEC]
    _round_head(address, cache[HEAD_DIM], (codec >> 4) & 15, (codec >> LEAST_OF_VALUES) & 255, codec & ROTATES_VALUES != 0)
