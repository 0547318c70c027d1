"""Operations on rows of numbers in machine code: norm, activation, softmax."""

import numpy as np
from numba import njit

from mooncake_zmq.engine.machine_code.products import OPTIONS


@njit(**OPTIONS, inline="always")
def exp(x):
    """Return exp to 2 ulp over -87..88, and beyond that its value at the bound: a polynomial, so that loops of it become
    vectors."""
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


REORDERED = {"reassoc", "contract", "nsz"}  # lets sums be vectors


@njit(**OPTIONS, fastmath=REORDERED)
def normalize(x, weight, eps, out):
    """Compute the RMSNorm of one row."""
    total = np.float32(0.0)
    for index in range(len(weight)):
        total += x[index] * x[index]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(len(weight)) + eps)
    for index in range(len(weight)):
        out[index] = x[index] * scale * weight[index]


@njit(**OPTIONS, fastmath=REORDERED)
def exponentiate(scores, count, highest):
    """Compute exp(scores - highest) in place; return the sum."""
    total = np.float32(0.0)
    for index in range(count):
        value = exp(scores[index] - highest)
        scores[index] = value
        total += value
    return total


@njit(**OPTIONS, fastmath=REORDERED | {"nnan"})
def largest(scores, count):
    highest = scores[0]
    for index in range(count):
        highest = max(highest, scores[index])
    return highest


@njit(**OPTIONS, fastmath=REORDERED)
def silu_times(gate, up, out):
    for index in range(len(out)):
        out[index] = gate[index] / (np.float32(1.0) + exp(-gate[index])) * up[index]
