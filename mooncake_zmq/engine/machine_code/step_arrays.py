"""The arrays of a step's table, for functions that Numba compiles."""

from numba import njit

from mooncake_zmq.engine.machine_code.memory_access import floats, integers
from mooncake_zmq.engine.machine_code.products import OPTIONS


@njit(**OPTIONS, inline="always")
def floats_1(row):
    """Return the array that a row of a step's table describes; of one dimension, below of more."""
    return floats(row[0], (row[1],))


@njit(**OPTIONS, inline="always")
def floats_2(row):
    return floats(row[0], (row[1], row[2]))


@njit(**OPTIONS, inline="always")
def floats_3(row):
    return floats(row[0], (row[1], row[2], row[3]))


@njit(**OPTIONS, inline="always")
def floats_5(row):
    return floats(row[0], (row[1], row[2], row[3], row[4], row[5]))


@njit(**OPTIONS, inline="always")
def integers_1(row):
    return integers(row[0], (row[1],))


@njit(**OPTIONS, inline="always")
def integers_2(row):
    return integers(row[0], (row[1], row[2]))
