"""Coded parts of blocks, between slots and a sequence's memory, and the entry point of the machine code of codecs."""

import numpy as np
from numba import njit

from mooncake_zmq.engine.kv_cache import KEY_TILE
from mooncake_zmq.engine.machine_code.attention_kernels import copy, places, shift_key, shift_value
from mooncake_zmq.engine.machine_code.codec_kernels import decode_head, encode_head, rotate, round_key, round_value
from mooncake_zmq.engine.machine_code.memory_access import floats, integers, prefetch
from mooncake_zmq.engine.machine_code.part_kernels import SIDE, place_columns, transpose
from mooncake_zmq.engine.machine_code.products import LINE_BYTES, OPTIONS
from mooncake_zmq.engine.machine_code.step_layout import (
    BIASES_AT,
    CACHE_FIELDS,
    CODEC,
    CODED_AT,
    CODED_LAYER,
    CODED_PART_FIELDS,
    CODED_START,
    CODED_TOKENS,
    COS_AT,
    DIVISORS_AT,
    HEAD_DIM,
    KV_HEADS,
    LEAST_OF_KEYS,
    LEAST_OF_VALUES,
    PARTS,
    PLACING_FIELDS,
    ROTATES_KEYS,
    ROTATES_VALUES,
    SCRATCH_AT,
    SIN_AT,
    TOGETHER,
    Coding,
)

MINUS, PLUS = np.float32(-1.0), np.float32(1.0)


@njit(**OPTIONS)
def _fields_of(codec, kv_heads, dim):
    """Return where the values' codes, the keys' scales and the values' scales of a token begin, and its bytes."""
    values = kv_heads * dim * (codec & 15) // 8
    scales = values + kv_heads * dim * ((codec >> 4) & 15) // 8
    return values, scales, scales + 2 * kv_heads, scales + 4 * kv_heads


@njit(**OPTIONS)
def _prefetch(tile_at, value_at, turn, turns, dim):
    """Begin to bring near one of `turns` shares of the columns of a tile, and a value. Each of a tile's channels lies
    by itself, and would be waited for: decoding took 1.2 to 1.3 times, encoding 1.05 to 1.2 times as long (2-core Xeon)."""
    for channel in range(turn * dim // turns, (turn + 1) * dim // turns):
        for line in range(0, 4 * turns, LINE_BYTES):
            prefetch(tile_at + 4 * channel * KEY_TILE + line)
    for line in range(0, 4 * dim, LINE_BYTES):
        prefetch(value_at + line)


@njit(**OPTIONS)
def _shift_keys(begins, layer, head, position, tokens, keys_at, sign):
    """Multiply keys of a head [tokens, dim] by their divisors and add their offsets, or with a sign of -1 undo both."""
    dim, row = begins[HEAD_DIM], 2 * layer * begins[KV_HEADS] + head
    bias = floats(begins[BIASES_AT] + 4 * row * dim, (dim,))
    which = row if sign > 0 else row + begins[KV_HEADS]
    for token in range(tokens):
        key, turn = floats(keys_at + 4 * token * dim, (dim,)), 4 * (position + token) * (dim // 2)
        if sign < 0:
            shift_key(key, bias, floats(begins[COS_AT] + turn, (dim // 2,)), floats(begins[SIN_AT] + turn, (dim // 2,)), sign)
        if begins[DIVISORS_AT]:
            factors = floats(begins[DIVISORS_AT] + 4 * which * dim, (dim,))
            for index in range(dim):
                key[index] *= factors[index]
        if sign > 0:
            shift_key(key, bias, floats(begins[COS_AT] + turn, (dim // 2,)), floats(begins[SIN_AT] + turn, (dim // 2,)), sign)


@njit(**OPTIONS)
def _shift_values(begins, layer, head, tokens, values_at, sign):
    """Add their offset to values of a head [tokens, dim], or take it off."""
    dim = begins[HEAD_DIM]
    bias = floats(begins[BIASES_AT] + 4 * ((2 * layer + 1) * begins[KV_HEADS] + head) * dim, (dim,))
    for token in range(tokens):
        shift_value(floats(values_at + 4 * token * dim, (dim,)), bias, sign)


@njit(**OPTIONS)
def encode_parts(table):
    """Write parts of the cache into slots; `table`: the address of the table of `Coding.ENCODE_PARTS`."""
    begins = integers(table, (PLACING_FIELDS,))
    codec, kv_heads, dim, scratch = begins[CODEC], begins[KV_HEADS], begins[HEAD_DIM], begins[SCRATCH_AT]
    biased = begins[BIASES_AT] != 0
    key_bits, value_bits = codec & 15, (codec >> 4) & 15
    least_of_keys, least_of_values = (codec >> LEAST_OF_KEYS) & 255, (codec >> LEAST_OF_VALUES) & 255
    values_at, key_scales_at, value_scales_at, token_bytes = _fields_of(codec, kv_heads, dim)
    parts = integers(table + 8 * PLACING_FIELDS, (begins[PARTS], CODED_PART_FIELDS))
    for row in range(len(parts)):
        layer, start, tokens, out = (
            parts[row, CODED_LAYER],
            parts[row, CODED_START],
            parts[row, CODED_TOKENS],
            parts[row, CODED_AT],
        )
        at = 0
        while at < tokens:
            tile, column = (start + at) // KEY_TILE, (start + at) % KEY_TILE
            run = min(min(TOGETHER, tokens - at), KEY_TILE - column)
            for head in range(kv_heads):
                keys, values = places(begins, layer, kv_heads, head, dim)
                next_keys, _ = places(begins, layer, kv_heads, head + 1, dim)
                tile_at = 4 * (tile * dim * KEY_TILE + column)
                _take_columns(keys + tile_at, run, dim, scratch)
                if biased:
                    _shift_keys(begins, layer, head, start + at, run, scratch, MINUS)
                for token in range(run):
                    _prefetch(next_keys + tile_at, values + 4 * (start + at + token) * dim, token, run, dim)
                    here, number = out + (at + token) * token_bytes, scratch + 4 * token * dim
                    if codec & ROTATES_KEYS:
                        rotate(number, dim)
                    codes_at = here + head * (dim * key_bits // 8)
                    encode_head(number, dim, key_bits, least_of_keys, codes_at, here + key_scales_at + 2 * head)
                for token in range(run):
                    here, number = out + (at + token) * token_bytes, values + 4 * (start + at + token) * dim
                    if codec & ROTATES_VALUES or biased:
                        copy(floats(number, (dim,)), floats(scratch, (dim,)))
                        number = scratch
                    if biased:
                        _shift_values(begins, layer, head, 1, number, MINUS)
                    if codec & ROTATES_VALUES:
                        rotate(number, dim)
                    codes_at = here + values_at + head * (dim * value_bits // 8)
                    encode_head(number, dim, value_bits, least_of_values, codes_at, here + value_scales_at + 2 * head)
            at += run


@njit(**OPTIONS)
def _take_columns(source, tokens, dim, target):
    """Copy columns of a tile, keys of one head, as rows [tokens, dim]."""
    whole, square = tokens - tokens % SIDE, dim - dim % SIDE
    for index in range(0, square, SIDE):
        for token in range(0, whole, SIDE):
            transpose(source + 4 * (index * KEY_TILE + token), 4 * KEY_TILE, target + 4 * (token * dim + index), 4 * dim)
    for token in range(tokens):
        for index in range(square if token < whole else 0, dim):
            floats(target + 4 * (token * dim + index), (1,))[0] = floats(source + 4 * (index * KEY_TILE + token), (1,))[0]


@njit(**OPTIONS)
def decode_parts(table):
    """Place coded parts into the cache; `table`: the address of the table of `Coding.DECODE_PARTS`."""
    begins = integers(table, (PLACING_FIELDS,))
    codec, kv_heads, dim, scratch = begins[CODEC], begins[KV_HEADS], begins[HEAD_DIM], begins[SCRATCH_AT]
    biased = begins[BIASES_AT] != 0
    key_bits, value_bits = codec & 15, (codec >> 4) & 15
    values_at, key_scales_at, value_scales_at, token_bytes = _fields_of(codec, kv_heads, dim)
    parts = integers(table + 8 * PLACING_FIELDS, (begins[PARTS], CODED_PART_FIELDS))
    for row in range(len(parts)):
        layer, start, tokens, given = (
            parts[row, CODED_LAYER],
            parts[row, CODED_START],
            parts[row, CODED_TOKENS],
            parts[row, CODED_AT],
        )
        at = 0
        while at < tokens:
            tile, column = (start + at) // KEY_TILE, (start + at) % KEY_TILE
            run = min(min(TOGETHER, tokens - at), KEY_TILE - column)
            for head in range(kv_heads):
                keys, values = places(begins, layer, kv_heads, head, dim)
                tile_at = keys + 4 * (tile * dim * KEY_TILE + column)
                for token in range(run):
                    _prefetch(tile_at, values + 4 * (start + at + token) * dim, token, run, dim)
                    here, number = given + (at + token) * token_bytes, scratch + 4 * token * dim
                    codes_at = here + head * (dim * key_bits // 8)
                    decode_head(codes_at, here + key_scales_at + 2 * head, key_bits, floats(number, (dim,)))
                    if codec & ROTATES_KEYS:
                        rotate(number, dim)
                if biased:
                    _shift_keys(begins, layer, head, start + at, run, scratch, PLUS)
                place_columns(scratch, 4 * dim, run, dim, tile_at)
                for token in range(run):
                    here, number = given + (at + token) * token_bytes, values + 4 * (start + at + token) * dim
                    codes_at = here + values_at + head * (dim * value_bits // 8)
                    decode_head(codes_at, here + value_scales_at + 2 * head, value_bits, floats(number, (dim,)))
                    if codec & ROTATES_VALUES:
                        rotate(number, dim)
                if biased:
                    _shift_values(begins, layer, head, run, values + 4 * (start + at) * dim, PLUS)
            at += run


def run(what, address, table):
    """Enter the machine code. `address`: of a key or value that is rounded; `table`: the address of the table that
    step_layout.Coding describes."""
    if what == Coding.ENCODE_PARTS:
        encode_parts(table)
    elif what == Coding.DECODE_PARTS:
        decode_parts(table)
    elif what == Coding.ROUND_KEY:
        round_key(address, integers(table, (CACHE_FIELDS,)))
    elif what == Coding.ROUND_VALUE:
        round_value(address, integers(table, (CACHE_FIELDS,)))
