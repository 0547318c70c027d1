"""What the machine code and its callers agree on: int64 tables of addresses, shapes and numbers.

Apart from both, so that stored machine code is called without importing the compiler.
"""

from enum import IntEnum

QKV, OUT, GATE_UP, DOWN, MATRICES = range(5)  # of a layer; the head follows the last layer
FORM, VALUES, SCALES, MINIMA, GROUP_SHIFT, DEPTH, PANELS, MATRIX_FIELDS = range(8)  # of a row of `matrices`
KEYS_AT, VALUES_AT, CAPACITY, POSITION, CACHE_FIELDS = range(5)  # of a row of `caches`
SPAN_TILES = 8  # of keys, scored before their values are read: long runs of memory measured a tenth faster than 1

ROW_NUMBERS = 8  # in the table of any work but DECODE_STEP

ARRAY_FIELDS = 6  # of a row of a step's table: an address and up to five dimensions


class Array(IntEnum):
    """The arrays of a step: the rows of its table."""

    BARRIER = 0  # int64: threads' arrivals; 0 as a step begins
    MATRICES = 1  # int64 [MATRICES * layers + 1, MATRIX_FIELDS]
    NORMS = 2  # float32, as all below but CACHES: [2 * layers + 1, hidden]
    BIASES = 3  # of Q, K and V [layers, width, or 0 where there are none]
    HEAD_NORMS = 4  # [layers, heads + kv_heads, or 0, head_dim]
    EPSILON = 5  # [1]
    CACHES = 6  # int64 [rows, CACHE_FIELDS]
    COS = 7  # [rows, head_dim / 2], as SIN: the rotation at each row's position
    SIN = 8
    HIDDEN = 9  # [rows, hidden, padded]: holds the embedded tokens and is overwritten
    LOGITS = 10  # [rows, vocabulary, padded]: the result
    NORMED = 11  # [threads, rows, hidden]; this and the rest are scratch
    QKV = 12  # [rows, width, padded]
    QUERIES = 13  # [threads, group, head_dim]
    SCORES = 14  # [threads, group, SPAN_TILES * KEY_TILE]
    MIXED = 15  # [threads, rows, kv_heads, group, head_dim]
    STATES = 16  # [threads, rows, kv_heads, group, (highest, total)]
    ATTENDED = 17  # [rows, query]
    GATE_UP = 18  # [rows, 2 * ffn, padded]
    ACTIVE = 19  # [rows, ffn]


class What(IntEnum):
    """The works, and their tables. Strides and widths count floats; `eps` and all that is not a number is an address."""

    DECODE_STEP = 0  # [len(Array), ARRAY_FIELDS]
    NORMALIZE = 1  # x, stride, weight, out, stride, rows, width, eps
    ACTIVATE = 2  # gate, stride, up, stride, out, stride, rows, width
    EXPONENTIATE = 3  # scores, width, heads, tokens, group, visible, totals, shift
    PRODUCT = 4  # x, stride, panels, out, stride, rows, depth, how many panels
