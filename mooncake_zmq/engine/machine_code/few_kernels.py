"""Attention to few of many tokens in machine code: `selection.few_of_many` and its selectors, one head of a layer at a time."""

import numpy as np
from numba import njit

from mooncake_zmq.engine.kv_cache import KEY_TILE
from mooncake_zmq.engine.machine_code.attention_kernels import copy, mix, prepared_head, score
from mooncake_zmq.engine.machine_code.memory_access import codes, floats, integers, prefetch, shorts, words
from mooncake_zmq.engine.machine_code.products import LINE_BYTES, OPTIONS
from mooncake_zmq.engine.machine_code.row_kernels import REORDERED, exp, exponentiate, largest
from mooncake_zmq.engine.machine_code.step_layout import ARRAY_FIELDS, BUCKETS, Few
from mooncake_zmq.engine.selection.sizes import BLOCK_TOKENS, CENTROIDS, SUBSPACES

ARRAYS = len(Few)
PAIRS = CENTROIDS**SUBSPACES
DIGITS = ((21, 2047), (10, 2047), (0, 1023))
"""The bits of a float32 in three parts, by shift and mask."""
ROWS_AHEAD = 8
"""Rows that are prefetched before they are copied."""


@njit(**OPTIONS)
def _at(few, array, layer, head, item_bytes):
    """Return the address of one head's part of an array [layers, kv_heads, ...]."""
    row = few[array]
    items = row[3] * max(row[4], 1) * max(row[5], 1)
    return row[0] + item_bytes * items * (layer * row[2] + head)


@njit(**OPTIONS, fastmath=REORDERED)
def _dots(queries, keys, pitch, count, out, column):
    """Compute the scores of `count` keys, `pitch` numbers apart from the address `keys`, into out [group, ...] from a column
    on."""
    group, dim = queries.shape
    for token in range(count):
        key = floats(keys + 4 * pitch * token, (dim,))
        for query in range(group):
            total = np.float32(0.0)
            for index in range(dim):
                total += queries[query, index] * key[index]
            out[query, column + token] = total


# --------------------------------------------------------------------------------------------------- a token goes far


@njit(**OPTIONS, fastmath=REORDERED)
def _send(few, layer, head, place, token, dim):
    """Store the token at a place of the window far, as the `token`th there, with what its selector keeps of it."""
    kv_heads, width = few[Few.FAR, 2], few[Few.FAR, 4]
    key = floats(_at(few, Few.WINDOW, layer, head, 4) + 4 * place * dim, (dim,))
    value = floats(_at(few, Few.WINDOW, layer, kv_heads + head, 4) + 4 * place * dim, (dim,))
    row = floats(_at(few, Few.FAR, layer, head, 4) + 4 * token * width, (width,))
    if width > dim:
        copy(key, row[:dim])
    copy(value, row[width - dim :])
    if few[Few.NORMS, 0]:
        sums, squares = floats(_at(few, Few.SUMS, layer, head, 4), (dim,)), np.float32(0.0)
        for index in range(dim):
            sums[index] += value[index]
            squares += value[index] * value[index]
        floats(_at(few, Few.NORMS, layer, head, 4) + 4 * token, (1,))[0] = np.sqrt(squares)
    if few[Few.KEYS, 0]:
        tile = floats(_at(few, Few.KEYS, layer, head, 4) + 4 * (token // KEY_TILE) * dim * KEY_TILE, (dim, KEY_TILE))
        copy(key, tile[:, token % KEY_TILE])
    elif few[Few.CODES, 0]:
        shorts(_at(few, Few.CODES, layer, head, 2) + 2 * token, (1,))[0] = _code(few, layer, head, key)
    elif few[Few.LOWEST, 0]:
        block = 4 * (token // BLOCK_TOKENS) * dim
        lowest = floats(_at(few, Few.LOWEST, layer, head, 4) + block, (dim,))
        highest = floats(_at(few, Few.HIGHEST, layer, head, 4) + block, (dim,))
        is_first = token % BLOCK_TOKENS == 0
        for index in range(dim):
            lowest[index] = key[index] if is_first else min(lowest[index], key[index])
            highest[index] = key[index] if is_first else max(highest[index], key[index])


@njit(**OPTIONS, fastmath=REORDERED)
def _code(few, layer, head, key):
    """Return the numbers of the centroids nearest to the parts of a key, the first part's times those of the others."""
    part_dim = len(key) // SUBSPACES
    centroids = floats(_at(few, Few.CENTROIDS, layer, head, 4), (SUBSPACES, CENTROIDS, part_dim))
    code = 0
    for part in range(SUBSPACES):
        nearest, nearness = 0, np.float32(-np.inf)
        for number in range(CENTROIDS):
            own = np.float32(0.0)
            for index in range(part_dim):
                each = centroids[part, number, index]
                own += (key[part * part_dim + index] - np.float32(0.5) * each) * each
            if own > nearness:
                nearest, nearness = number, own
        code = code * CENTROIDS + nearest
    return code


# ------------------------------------------------------------------------------------------------ which tokens matter


@njit(**OPTIONS)
def _sum_softmax(scores, weights, count, matter, state):
    """Compute the softmax of each row's scores, and their sum over the rows into matter; `state`: each row's highest score and
    total. `weights` is scratch."""
    for query in range(len(state)):
        highest = largest(scores[query], count)
        copy(scores[query, :count], weights[query])
        total = exponentiate(weights[query], count, highest)
        state[query, 0], state[query, 1] = highest, total
        _add(weights[query], np.float32(1.0) / total, count, matter, query == 0)


@njit(**OPTIONS)
def _add(weights, scale, count, out, is_first):
    """Add scale * weights to out, which holds nothing before the first."""
    if is_first:
        for index in range(count):
            out[index] = scale * weights[index]
    else:
        for index in range(count):
            out[index] += scale * weights[index]


@njit(**OPTIONS)
def _weigh_keys(few, layer, head, queries, scores, weights, count, matter, state):
    """Compute how tokens matter by their keys; `scores` stay, as they are exact."""
    (group, dim), span = queries.shape, scores.shape[1]
    tiles = (count + KEY_TILE - 1) // KEY_TILE
    keys = _at(few, Few.KEYS, layer, head, 4)
    for query in range(group):
        scores[query, : tiles * KEY_TILE] = 0.0
    for tile in range(tiles):
        at, out = keys + 4 * tile * dim * KEY_TILE, scores.ctypes.data + 4 * tile * KEY_TILE
        score(queries.ctypes.data, dim, at, out, span, group)
    _sum_softmax(scores, weights, count, matter, state)


@njit(**OPTIONS, fastmath=REORDERED | {"nnan"})
def _weigh_pairs(pairs, counts, state):
    """Exponentiate the scores of all pairs of centroids in place; `counts`: the tokens of each. The highest score is that of a
    pair that has some."""
    highest = np.float32(-3e38)
    for pair in range(PAIRS):
        highest = max(highest, pairs[pair] if counts[pair] else np.float32(-3e38))
    total = np.float32(0.0)
    for pair in range(PAIRS):
        value = exp(min(pairs[pair] - highest, np.float32(0.0)))
        pairs[pair] = value
        total += value * np.float32(counts[pair])
    state[0], state[1] = highest, total


@njit(**OPTIONS)
def _weigh_codes(few, layer, head, queries, scores, weights, count, matter, state, counts):
    """Compute how tokens matter by the centroids that stand for their keys."""
    group, dim = queries.shape
    part_dim = dim // SUBSPACES
    centroids = _at(few, Few.CENTROIDS, layer, head, 4)
    own = shorts(_at(few, Few.CODES, layer, head, 2), (count,))
    counts[:PAIRS] = 0
    for token in range(count):
        counts[own[token]] += 1
    for part in range(SUBSPACES):
        at = centroids + 4 * part * CENTROIDS * part_dim
        _dots(queries[:, part * part_dim : (part + 1) * part_dim], at, part_dim, CENTROIDS, scores, part * CENTROIDS)
    for query in range(group):
        for first in range(CENTROIDS):
            for second in range(CENTROIDS):
                weights[query, first * CENTROIDS + second] = scores[query, first] + scores[query, CENTROIDS + second]
        _weigh_pairs(weights[query], counts, state[query])
    for query in range(group):
        _add(weights[query], np.float32(1.0) / state[query, 1], PAIRS, scores[0], query == 0)
    for token in range(count):
        matter[token] = scores[0, own[token]]


@njit(**OPTIONS, fastmath=REORDERED)
def _weigh_bounds(few, layer, head, queries, scores, weights, count, matter, state):
    """Compute how tokens matter by the bounds of their blocks."""
    group, dim = queries.shape
    blocks = (count + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    lowest = floats(_at(few, Few.LOWEST, layer, head, 4), (blocks, dim))
    highest = floats(_at(few, Few.HIGHEST, layer, head, 4), (blocks, dim))
    for block in range(blocks):
        for query in range(group):
            total = np.float32(0.0)
            for index in range(dim):
                number = queries[query, index]
                total += max(number * lowest[block, index], number * highest[block, index])
            scores[query, block] = total
    _sum_softmax(scores, weights, blocks, matter, state)
    for token in range(count - 1, -1, -1):  # a block's number is at or before its tokens'
        matter[token] = matter[token // BLOCK_TOKENS]


# ------------------------------------------------------------------------------------- the choice, and what it fetches


@njit(**OPTIONS)
def choose(matter, count, chosen, found, buckets):
    """Put the indices of the `chosen` largest of `count` numbers, of which none is negative, first into found [> chosen +
    count]. They are found by their bits, part by part: those above the last that is chosen, and then those as large as it."""
    bits = words(matter.ctypes.data, (count,))
    taken, left = 0, count
    for turn in range(len(DIGITS)):
        shift, mask = DIGITS[turn]
        for bucket in range(BUCKETS):
            buckets[bucket] = 0
        for index in range(left):
            token = index if turn == 0 else found[chosen + index]
            buckets[(np.int64(bits[token]) >> shift) & mask] += 1
        digit, more = mask, chosen - taken
        while buckets[digit] < more:
            more -= buckets[digit]
            digit -= 1
        kept = 0
        for index in range(left):  # without branches: half of them would be guessed wrong
            token = index if turn == 0 else found[chosen + index]
            own = (np.int64(bits[token]) >> shift) & mask
            found[taken] = token
            taken += own > digit
            found[chosen + kept] = token
            kept += own == digit
        left = kept
    for index in range(chosen - taken):
        found[taken + index] = found[chosen + index]


@njit(**OPTIONS)
def _fetch(few, layer, head, found, chosen):
    """Copy the chosen rows near; where rows are held from step to step, those that are not there yet."""
    room, width = few[Few.FAR, 3], few[Few.FAR, 4]
    far, fetched = _at(few, Few.FAR, layer, head, 4), integers(few[Few.FETCHED, 0] + 8 * head, (1,))
    if not few[Few.HELD, 0]:
        near = _at(few, Few.NEAR, 0, head, 4)
        for index in range(chosen):
            _copy_row(far, found, index, chosen, near + 4 * index * width, width)
        fetched[0] += chosen
        return
    near, first = _at(few, Few.NEAR, layer, head, 4), head * room
    held, wanted = integers(_at(few, Few.HELD, layer, head, 8), (chosen,)), codes(few[Few.WANTED, 0] + first, (room,))
    for index in range(chosen):
        wanted[found[index]] = 1
    for place in range(chosen):
        if held[place] >= 0 and wanted[held[place] - first]:
            wanted[held[place] - first] = 0
        else:
            held[place] = -1
    new = 0
    for index in range(chosen):  # the order stays, as in a filter
        token = found[index]
        found[new] = token
        new += wanted[token]
        wanted[token] = 0
    place = 0
    for index in range(new):
        while held[place] >= 0:
            place += 1
        _copy_row(far, found, index, new, near + 4 * place * width, width)
        held[place] = first + found[index]
    fetched[0] += new


@njit(**OPTIONS)
def _copy_row(far, found, index, count, near, width):
    """Copy a row, and prefetch one that follows soon."""
    ahead = far + 4 * width * found[min(index + ROWS_AHEAD, count - 1)]
    for line in range(4 * width // LINE_BYTES):
        prefetch(ahead + line * LINE_BYTES)
    copy(floats(far + 4 * width * found[index], (width,)), floats(near, (width,)))


# ------------------------------------------------------------------------------------------------------------- together


@njit(**OPTIONS)
def _weigh(few, layer, head, queries, count, matter, state):
    """Compute how the far tokens matter to the queries."""
    group, span = len(queries), few[Few.SCORES, 3]
    scores = floats(few[Few.SCORES, 0] + 4 * head * group * span, (group, span))
    weights = floats(few[Few.WEIGHTS, 0] + 4 * head * group * span, (group, span))
    if few[Few.KEYS, 0]:
        _weigh_keys(few, layer, head, queries, scores, weights, count, matter, state)
    elif few[Few.CODES, 0]:
        counts = integers(few[Few.BUCKETS, 0] + 8 * head * few[Few.BUCKETS, 2], (few[Few.BUCKETS, 2],))
        _weigh_codes(few, layer, head, queries, scores, weights, count, matter, state, counts)
    else:
        _weigh_bounds(few, layer, head, queries, scores, weights, count, matter, state)
    if few[Few.NORMS, 0]:
        norms = floats(_at(few, Few.NORMS, layer, head, 4), (count,))
        for token in range(count):
            matter[token] *= norms[token]


@njit(**OPTIONS)
def _leave_others(few, layer, head, found, chosen, state):
    """Take the chosen tokens' weights, as far as they are known, off the totals of all far tokens."""
    group, span = len(state), few[Few.SCORES, 3]
    weights = floats(few[Few.WEIGHTS, 0] + 4 * head * group * span, (group, span))
    own = shorts(_at(few, Few.CODES, layer, head, 2), (few[Few.CODES, 3],))
    for query in range(group):
        of_chosen = np.float32(0.0)
        for index in range(chosen):
            of_chosen += weights[query, own[found[index]] if few[Few.CODES, 0] else found[index]]
        state[query, 1] = max(state[query, 1] - of_chosen, np.float32(0.0))


@njit(**OPTIONS)
def _attend(few, layer, head, queries, found, chosen, far_tokens, mixed, state):
    """Compute attention over the window and the rows that are near; `state` enters with that of the far tokens that are not
    chosen."""
    (group, dim), span, window = queries.shape, few[Few.SCORES, 3], few[Few.WINDOW, 3]
    weights = floats(few[Few.WEIGHTS, 0] + 4 * head * group * span, (group, span))
    width = few[Few.FAR, 4]
    near = _at(few, Few.NEAR, layer if few[Few.HELD, 0] else 0, head, 4)
    if few[Few.KEYS, 0]:
        scores = floats(few[Few.SCORES, 0] + 4 * head * group * span, (group, span))
        for query in range(group):
            for index in range(chosen):
                weights[query, window + index] = scores[query, found[index]]
    else:
        _dots(queries, near, width, chosen, weights, window)
    _dots(queries, _at(few, Few.WINDOW, layer, head, 4), dim, window, weights, 0)
    others_count = chosen > 0 and few[Few.NORMS, 0] != 0 and few[Few.LOWEST, 0] == 0
    sums = floats(_at(few, Few.SUMS, layer, head, 4), (dim,))
    for query in range(group):
        mixed[query] = 0.0
        row, highest_of_far, of_others = weights[query], state[query, 0], state[query, 1]
        highest = largest(row, window + chosen)
        total = exponentiate(row, window, highest)
        total += exponentiate(row[window:], chosen, highest)
        if others_count:  # as one that has the mean of far values
            others = of_others * exp(min(highest_of_far - highest, np.float32(80.0)))
            for index in range(dim):
                mixed[query, index] = others / np.float32(far_tokens) * sums[index]
            total += others
        state[query, 0], state[query, 1] = highest, total
    values = _at(few, Few.WINDOW, layer, few[Few.FETCHED, 1] + head, 4)
    mix(weights.ctypes.data, span, values, dim, dim, window, mixed.ctypes.data, group)
    if chosen:
        at = weights.ctypes.data + 4 * window
        mix(at, span, near + 4 * (width - dim), width, dim, chosen, mixed.ctypes.data, group)


@njit(**OPTIONS)
def attend_few(table, layer, head, qkv, bias, norms, eps, cos, sin, scale, queries, mixed, state):
    """Compute the attention of one head's new queries over few tokens: partial results in mixed [group, head_dim] and state
    [group, (highest, total)]. The new key and value are stored first, and the token whose place they take goes far.

    `table`: the address of one of `Few`; `qkv`, `cos`, `sin`: of the new token; `queries` [group, head_dim] is scratch.
    """
    few = integers(table, (ARRAYS, ARRAY_FIELDS))
    group, dim = mixed.shape
    kv_heads, window, recent = few[Few.FETCHED, 1], few[Few.WINDOW, 3], integers(few[Few.RECENT, 0], (1,))[0]
    length, chosen = integers(few[Few.LENGTH, 0], (1,))[0], few[Few.NEAR, 3]
    place = window - recent + (length - (window - recent)) % recent
    far_tokens = length - window + 1
    if few[Few.FAR, 3]:
        _send(few, layer, head, place, far_tokens - 1, dim)
    key = floats(_at(few, Few.WINDOW, layer, head, 4) + 4 * place * dim, (dim,))
    value = floats(_at(few, Few.WINDOW, layer, kv_heads + head, 4) + 4 * place * dim, (dim,))
    prepared_head(qkv, kv_heads * group + head, bias, norms, eps, cos, sin, np.float32(1.0), key)
    source = (kv_heads * (group + 1) + head) * dim
    copy(qkv[source : source + dim], value)
    if len(bias):
        for index in range(dim):
            value[index] += bias[source + index]
    for query in range(group):
        prepared_head(qkv, head * group + query, bias, norms, eps, cos, sin, scale, queries[query])
    found = integers(few[Few.FOUND, 0] + 8 * head * few[Few.FOUND, 2], (few[Few.FOUND, 2],))
    if chosen:
        matter = floats(few[Few.MATTER, 0] + 4 * head * few[Few.MATTER, 2], (few[Few.MATTER, 2],))
        buckets = integers(few[Few.BUCKETS, 0] + 8 * head * few[Few.BUCKETS, 2], (few[Few.BUCKETS, 2],))
        _weigh(few, layer, head, queries, far_tokens, matter, state)
        choose(matter, far_tokens, chosen, found, buckets)
        if few[Few.NORMS, 0] and not few[Few.LOWEST, 0]:
            _leave_others(few, layer, head, found, chosen, state)
        _fetch(few, layer, head, found, chosen)
    _attend(few, layer, head, queries, found, chosen, far_tokens, mixed, state)
