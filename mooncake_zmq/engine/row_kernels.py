"""Rows of numbers in machine code: what the decode step takes of it, and whole steps of a prefill, as `Rowwise` has them."""

import numpy as np
from numba import njit

from mooncake_zmq.engine.memory_access import floats
from mooncake_zmq.engine.products import OPTIONS


@njit(**OPTIONS, inline="always")
def exp(x):
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


@njit(**OPTIONS, fastmath=_REORDERED)
def normalize(x, weight, eps, out):
    """RMSNorm of one row."""
    total = np.float32(0.0)
    for index in range(len(weight)):
        total += x[index] * x[index]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(len(weight)) + eps)
    for index in range(len(weight)):
        out[index] = x[index] * scale * weight[index]


@njit(**OPTIONS, fastmath=_REORDERED)
def exponentiate(scores, count, highest):
    """exp(scores - highest) in place; returns their sum."""
    total = np.float32(0.0)
    for index in range(count):
        value = exp(scores[index] - highest)
        scores[index] = value
        total += value
    return total


@njit(**OPTIONS, fastmath=_REORDERED | {"nnan"})
def largest(scores, count):
    highest = scores[0]
    for index in range(count):
        highest = max(highest, scores[index])
    return highest


@njit(**OPTIONS, fastmath=_REORDERED)
def silu_times(gate, up, out):
    for index in range(len(out)):
        out[index] = gate[index] / (np.float32(1.0) + exp(-gate[index])) * up[index]


# ------------------------------------------------------------------------------------------------------- steps of a prefill


@njit(**OPTIONS)
def normalize_rows(numbers):
    x, stride, weight, out = numbers[0], numbers[1], numbers[2], numbers[3]
    out_stride, rows, width, eps = numbers[4], numbers[5], numbers[6], numbers[7]
    for row in range(rows):
        source = floats(x + 4 * row * stride, (width,))
        normalize(source, floats(weight, (width,)), floats(eps, (1,))[0], floats(out + 4 * row * out_stride, (width,)))


@njit(**OPTIONS)
def activate_rows(numbers):
    gate, gate_stride, up, up_stride = numbers[0], numbers[1], numbers[2], numbers[3]
    out, out_stride, rows, width = numbers[4], numbers[5], numbers[6], numbers[7]
    for row in range(rows):
        gates, ups = floats(gate + 4 * row * gate_stride, (width,)), floats(up + 4 * row * up_stride, (width,))
        silu_times(gates, ups, floats(out + 4 * row * out_stride, (width,)))


@njit(**OPTIONS)
def exponentiate_rows(numbers):
    scores, width, heads, tokens = numbers[0], numbers[1], numbers[2], numbers[3]
    group, visible, totals, shift = numbers[4], numbers[5], numbers[6], numbers[7]
    for row in range(heads * tokens * group):
        count = visible + row // group % tokens
        own = floats(scores + 4 * row * width, (width,))
        highest = largest(own, count) if shift else np.float32(0.0)  # measured: it takes twice as long as the rest
        floats(totals + 4 * row, (1,))[0] = exponentiate(own, count, highest)
        for index in range(count, visible + tokens - 1):
            own[index] = np.float32(0.0)
