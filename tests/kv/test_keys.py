"""Block keys, layout and checksums: chains, golden values, separation, and independence from the process."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.kv.block_hash import extend_keys, namespace, pack_tokens, unpack_tokens
from mooncake_zmq.kv.checksum import block_checksum, part_checksum
from mooncake_zmq.kv.codec import CODECS
from mooncake_zmq.kv.layout import PAGE_BYTES, BlockLayout, div_ceil

ROOT = namespace(model="m", layout="l", salt="s")
LAYOUT = BlockLayout(layers=30, kv_heads=3, head_dim=64, block_tokens=256)
tokens_lists = st.lists(st.integers(0, (1 << 31) - 1), max_size=40)


@given(tokens_lists)
def test_tokens_travel_as_int32_bytes(tokens):
    raw = pack_tokens(tokens)
    assert len(raw) == 4 * len(tokens)
    assert unpack_tokens(raw) == tokens


@given(tokens_lists, st.integers(1, 8), st.integers(0, 10))
def test_a_chain_may_be_extended_from_any_block(tokens, block_tokens, cut):
    keys = extend_keys(ROOT, pack_tokens(tokens), block_tokens)
    assert len(keys) == len(tokens) // block_tokens
    cut = min(cut, len(keys))
    parent = keys[cut - 1] if cut else ROOT
    assert keys[cut:] == extend_keys(parent, pack_tokens(tokens[cut * block_tokens :]), block_tokens)


@given(st.lists(st.integers(0, 9), min_size=8, max_size=8), st.integers(0, 7), st.integers(10, 99))
def test_a_changed_token_changes_its_key_and_all_that_follow(tokens, at, other):
    before = extend_keys(ROOT, pack_tokens(tokens), 2)
    after = extend_keys(ROOT, pack_tokens([*tokens[:at], other, *tokens[at + 1 :]]), 2)
    assert before[: at // 2] == after[: at // 2]
    assert not set(before[at // 2 :]) & set(after[at // 2 :])


def test_equal_blocks_at_different_places_have_different_keys():
    keys = extend_keys(ROOT, pack_tokens([1, 1, 1, 1]), 1)
    assert len(set(keys)) == 4


def test_namespaces_that_differ_anywhere_share_nothing():
    variants = [("m", "l", "s"), ("m2", "l", "s"), ("m", "l2", "s"), ("m", "l", ""), ("ml", "", "s"), ("m", "ls", "")]
    roots = [namespace(model=m, layout=lay, salt=s) for m, lay, s in variants]
    assert len(set(roots)) == len(variants)
    keys = [extend_keys(root, pack_tokens([1, 2]), 1) for root in roots]
    assert len({key for chain in keys for key in chain}) == 2 * len(variants)


GOLDEN = "67cc46e7db55747de1d5f362549d12c7", ["093d28c04c2750c95fb560a76228e137", "21471312d288d8629c51944710c08958"]


def test_golden_keys():
    assert ROOT.hex() == GOLDEN[0]
    assert [key.hex() for key in extend_keys(ROOT, pack_tokens(range(6)), 3)] == GOLDEN[1]


@pytest.mark.parametrize("seed", ["0", "1", "12345"])
def test_keys_are_the_same_in_every_process(seed):
    code = (
        "from mooncake_zmq.kv.block_hash import *;"
        "print([k.hex() for k in extend_keys(namespace(model='m', layout='l', salt='s'), pack_tokens(range(6)), 3)])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == str(GOLDEN[1])


def test_layout_parts_tile_the_block_and_slots_are_whole_pages():
    assert LAYOUT.layers * LAYOUT.part_bytes == LAYOUT.block_bytes
    assert int(np.prod(LAYOUT.part_shape)) * LAYOUT.itemsize == LAYOUT.part_bytes
    assert LAYOUT.slot_bytes % PAGE_BYTES == 0
    assert 0 <= LAYOUT.slot_bytes - LAYOUT.block_bytes < PAGE_BYTES


@given(st.integers(0, 10_000), st.integers(1, 600))
def test_blocks_for_holds_all_tokens_and_no_empty_block(tokens, size):
    layout = BlockLayout(layers=1, kv_heads=1, head_dim=1, block_tokens=size)
    blocks = layout.blocks_for(tokens)
    assert (blocks - 1) * size < tokens <= blocks * size or tokens == blocks == 0
    assert div_ceil(tokens, size) == blocks


def test_layouts_that_differ_have_different_fingerprints():
    base = {"layers": 30, "kv_heads": 3, "head_dim": 64, "block_tokens": 256, "dtype": "float32", "itemsize": 4}
    changes = [
        {},
        {"layers": 31},
        {"kv_heads": 4},
        {"head_dim": 65},
        {"block_tokens": 128},
        {"dtype": "float16", "itemsize": 2},
    ]
    prints = {BlockLayout(**(base | change)).fingerprint for change in changes}
    assert len(prints) == len(changes)
    assert LAYOUT.fingerprint == "26cd9aaa0571b92d"


def test_checksums_are_golden_and_see_order_and_every_byte():
    parts = [part_checksum(b"a" * 64), part_checksum(b"b" * 64)]
    assert part_checksum(b"") == 0x2D06800538D394C2
    assert block_checksum(parts) != block_checksum(parts[::-1])
    assert block_checksum(parts) == 5155820858073046896
    raw = bytearray(range(256))
    seen = {part_checksum(raw)}
    for i in range(256):
        flipped = bytearray(raw)
        flipped[i] ^= 1
        seen.add(part_checksum(memoryview(flipped)))
    assert len(seen) == 257


def test_layouts_of_different_codecs_share_no_key_and_name_their_codec():
    assert LAYOUT.coded("exact") is LAYOUT
    coded = {name: LAYOUT.coded(name) for name in CODECS}
    coded |= {f"{name}-": replace(layout, has_offsets=True) for name, layout in coded.items()}
    prints = [LAYOUT.fingerprint, *(layout.fingerprint for layout in coded.values())]
    assert coded["int4"].fingerprint == "int4-d52dc855bab", "that of models without biases stays"
    assert coded["int4-"].fingerprint == "int4-de0712bcdb0", "keys of 4 bits are divided too"
    assert replace(LAYOUT, has_offsets=True).fingerprint == LAYOUT.fingerprint, "exact KV has them"
    assert len(set(prints)) == len(prints)
    assert {len(each) for each in prints} == {16}, "the SSD's blocks have as many bytes for it"
    assert all(layout.fingerprint.startswith(f"{name.rstrip('-')}-") for name, layout in coded.items())
    assert len({namespace(model="m", layout=each, salt="s") for each in prints}) == len(prints)


def test_a_coded_part_has_the_bytes_of_its_tokens():
    for name, codec in CODECS.items():
        layout = LAYOUT.coded(name)
        assert layout.part_shape == (256, codec.token_bytes(3, 64))
        assert layout.part_bytes == 256 * codec.token_bytes(3, 64)
        assert layout.token_bytes == 30 * codec.token_bytes(3, 64)
    assert [LAYOUT.token_bytes // LAYOUT.coded(name).token_bytes for name in CODECS] == [3, 5, 7]
