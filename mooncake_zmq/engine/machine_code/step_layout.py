"""The layout that the machine code and its callers share: int64 tables of addresses, shapes and numbers.

It is a module of its own, so that stored machine code is called without importing the compiler.
"""

from enum import IntEnum

QKV, OUT, GATE_UP, DOWN, MATRICES = range(5)  # of a layer; the head follows the last layer
FORM, VALUES, SCALES, MINIMA, GROUP_SHIFT, DEPTH, PANELS, MATRIX_FIELDS = range(8)  # of a row of `matrices`
KEYS_AT, VALUES_AT, CAPACITY, POSITION, HEAD_DIM, FEW_AT, CODEC, ROUND_AT, BIASES_AT, COS_AT, SIN_AT, DIVISORS_AT = range(12)
CACHE_FIELDS = 12
# of a row of `caches`; FEW_AT: 0, or the address of a table of `Few`; the last four are of `offsets`, or 0
PARTS, KV_HEADS, SCRATCH_AT, PLACING_FIELDS = range(CACHE_FIELDS, CACHE_FIELDS + 4)  # how tables of parts begin, after a cache
PART_KEYS_AT, PART_VALUES_AT, PART_LAYER, PART_START, PART_TOKENS, PART_FIELDS = range(6)  # of a row that follows there
CODED_AT, CODED_LAYER, CODED_START, CODED_TOKENS, CODED_PART_FIELDS = range(5)  # of a row for coded parts
ROTATES_KEYS, ROTATES_VALUES = 1 << 8, 1 << 9  # of CODEC, above the bits of a key's numbers and, times 16, of a value's
LEAST_OF_KEYS, LEAST_OF_VALUES = 16, 24  # bits of CODEC from which -log2 of the least scales stands
TOGETHER = 32  # tokens of a head whose keys are placed at once: longer runs of memory in a tile measured 5 % faster than 8
SPAN_TILES = 8  # of keys, scored before their values are read: long runs of memory measured a tenth faster than 1

LAYER_ROWS = 256  # of a prefill, through a layer: whose activations fit in a core's own cache beside the weights they meet
SMALLEST_TOTAL, LARGEST_TOTAL = 1e-26, 1e30  # of a row of exponentials, for softmax without a shift: exp(-60), exp(69)
ATTENDING_ROWS = 96  # of queries, whose scores of a span of keys fit there too

BUCKETS = 2048  # of tokens, by some bits of how much they matter
ARRAY_FIELDS = 6  # of a row of a step's table: an address and up to five dimensions


class Array(IntEnum):
    """The arrays of a step, or of a thread's rows of a prefill: the rows of its table. Where the two differ, the step's shape
    comes first; `some` are LAYER_ROWS, `few` are ATTENDING_ROWS or less."""

    BARRIER = 0  # int64: threads' arrivals; 0 as a step begins
    MATRICES = 1  # int64 [MATRICES * layers + 1, MATRIX_FIELDS]; of a prefill those of layers alone, in float32
    NORMS = 2  # float32, as all below but CACHES, SHIFTED and POSITIONS: [2 * layers + 1, hidden]
    BIASES = 3  # of Q, K and V [layers, width, or 0 where there are none]
    HEAD_NORMS = 4  # [layers, heads + kv_heads, or 0, head_dim]
    EPSILON = 5  # [1]
    CACHES = 6  # int64 [rows or 1, CACHE_FIELDS]
    COS = 7  # [rows, head_dim / 2], as SIN: the rotation at each row's position
    SIN = 8
    HIDDEN = 9  # [rows, hidden, padded]: holds the embedded tokens and is overwritten
    LOGITS = 10  # [rows, vocabulary, padded]: the result
    NORMED = 11  # [threads, rows, hidden] or [1, some, hidden]; this and the rest are scratch
    QKV = 12  # [rows, width, padded]
    QUERIES = 13  # [threads, group, head_dim] or [kv_heads, rows * group, head_dim]
    SCORES = 14  # [threads, group or few, SPAN_TILES * KEY_TILE]
    MIXED = 15  # [threads and, with ELSEWHERE, one more, rows, kv_heads, group, head_dim] or [1, 1, 1, few, head_dim]
    STATES = 16  # [..., (highest, total)], else as MIXED
    ATTENDED = 17  # [rows or some, query]
    GATE_UP = 18  # [rows or some, 2 * ffn, padded]
    ACTIVE = 19  # [rows or some, ffn]
    SHIFTED = 20  # int64 [layers]: of a prefill; 1 where scores have been too large or small for exponentials as they are
    POSITIONS = 21  # int64 [rows]: of a prefill, ascending
    ATTENDING = 22  # int64 [1]: of a step, if it is there the address of what computes a layer's ATTENDED from its QKV
    ELSEWHERE = 23  # as ATTENDING: of what asks with QKV before the attention, and after it puts the last MIXED and STATES


class Few(IntEnum):
    """The arrays of a sequence that attends to few of its tokens (`selection.few_of_many`): the rows of a table like a step's.
    `far` tokens are those behind the first ones that have left the ring of recent ones; a kind of selection has its own arrays,
    and the others' addresses are 0."""

    LENGTH = 0  # int64 [1]
    FETCHED = 1  # int64 [kv_heads]: rows copied from far memory so far
    WINDOW = 2  # float32, as all below but where said: [layers, heads of keys, then of values, first + recent, head_dim]
    RECENT = 3  # int64 [1]
    FAR = 4  # [layers, kv_heads, room, width]: a value, or a key and a value
    NEAR = 5  # [layers, or 1 where rows are not held from step to step, kv_heads, chosen, width]
    HELD = 6  # int64 [layers, kv_heads, chosen]: the row that each of NEAR is, counted over all heads, or -1
    WANTED = 7  # uint8 [kv_heads, room]: 0 between two calls
    SUMS = 8  # [layers, kv_heads, head_dim]: of far values, where values count
    NORMS = 9  # [layers, kv_heads, room]: of far values, where values count
    KEYS = 10  # of exact keys [layers, kv_heads, tiles, head_dim, KEY_TILE]
    CENTROIDS = 11  # of product codes [layers, kv_heads, 2, centroids, head_dim / 2]
    CODES = 12  # uint16 [layers, kv_heads, capacity]
    LOWEST = 13  # of blocks' bounds [layers, kv_heads, blocks, head_dim]
    HIGHEST = 14
    MATTER = 15  # [kv_heads, room]: how much each far token matters; this and the rest are scratch
    SCORES = 16  # [kv_heads, group, the most of: whole tiles of far tokens, window + chosen, pairs of centroids]
    WEIGHTS = 17  # as SCORES
    FOUND = 18  # int64 [kv_heads, room + chosen + 1]: what is chosen, and behind that what still may be
    BUCKETS = 19  # int64 [kv_heads, BUCKETS or pairs of centroids]: counts


class What(IntEnum):
    """The entry points. All but the last have a table int64 [len(Array), ARRAY_FIELDS]; those of a prefill work on one layer of
    one thread's rows, and ATTEND_PART on one layer."""

    DECODE_STEP = 0
    PROJECT_ROWS = 1  # HIDDEN into QKV
    STORE_ROWS = 2  # QKV into the cache and QUERIES
    FINISH_ROWS = 3  # QUERIES, and all the cache up to them, into HIDDEN
    ATTEND_PART = 4  # QUERIES [1, rows, kv_heads, group, head_dim] over the first POSITION tokens of CACHES: MIXED and STATES
    PLACE_PARTS = 5  # parts of blocks into the cache; table int64 [PLACING_FIELDS], then [PARTS, PART_FIELDS]


class Coding(IntEnum):
    """The work that one call of the machine code of codecs does. That code is made only where blocks are coded: a step calls it
    at the address ROUND_AT of a cache, which is 0 where nothing is rounded as it is stored."""

    ENCODE_PARTS = 0  # parts of the cache into coded ones; table int64 [PLACING_FIELDS], then [PARTS, CODED_PART_FIELDS]
    DECODE_PARTS = 1  # coded parts into the cache; the same table
    ROUND_KEY = 2  # a key in place, at an address; the table is a cache
    ROUND_VALUE = 3
