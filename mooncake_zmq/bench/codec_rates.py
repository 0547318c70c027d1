"""How fast one core encodes and decodes parts of blocks, out of a sequence and into one, beside exact copies of them."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np

from mooncake_zmq.bench.report import Progress, Row
from mooncake_zmq.engine.coded_kv import CodedSequenceKV
from mooncake_zmq.engine.kv_cache import NewSequence, Part, SequenceKV
from mooncake_zmq.engine.prepare import default_cache_dir
from mooncake_zmq.kv.codec import CODECS, EXACT
from mooncake_zmq.kv.layout import BlockLayout

LAYOUT = BlockLayout(layers=30, kv_heads=3, head_dim=64, block_tokens=32)
"""The default model's."""


def rate_rows(blocks: int, rounds: int, progress: Progress) -> Iterator[Row]:
    """Yield GB/s of float32 of one core, medians of rounds in which all sides take turns."""
    exact, coded, kind = makers()
    sides = {EXACT: _side(exact, LAYOUT, blocks)}
    sides |= {name: _side(partial(coded, codec), LAYOUT.coded(name), blocks) for name, codec in CODECS.items()}
    took: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        progress(f"rates, round {number} of {rounds}" if number else "rates, warming up")
        for name, (sequence, parts) in sides.items():
            for what, move in (("encode", sequence.read_parts), ("decode", sequence.write_parts)):
                begun = time.process_time()
                for first in range(0, len(parts), sequence.parts_at_once):
                    move(parts[first : first + sequence.parts_at_once])
                took.setdefault((what, name), []).append(time.process_time() - begun)
    gigabytes = blocks * LAYOUT.block_bytes / 1e9
    rates = {key: gigabytes / max(median(seconds[1:]), 1e-9) for key, seconds in took.items()}
    unit = "GB/s of float32 a core"
    for what, plain in (("encode", "read exactly by NumPy"), ("decode", "placed exactly")):
        for name in CODECS:
            yield Row(f"{what} {name}, {kind} / {plain}", unit, rates[what, name], rates[what, EXACT], higher=True)


def _side(make: NewSequence, layout: BlockLayout, blocks: int) -> tuple[SequenceKV, list[Part]]:
    """Return a sequence of so many blocks, and its parts with room for each."""
    sequence, tokens = filled(make, blocks), layout.block_tokens
    room = np.zeros((blocks, layout.layers, *layout.part_shape), layout.dtype)
    places = ((block, layer) for block in range(blocks) for layer in range(layout.layers))
    return sequence, [(layer, block * tokens, tokens, room[block, layer]) for block, layer in places]


def filled(make: NewSequence, blocks: int, seed: int = 1) -> SequenceKV:
    """Return a sequence of the default model's shape with so many blocks of random KV."""
    tokens, shape = blocks * LAYOUT.block_tokens, (LAYOUT.kv_heads, LAYOUT.head_dim)
    sequence = make(layers=LAYOUT.layers, kv_heads=shape[0], head_dim=shape[1], capacity_tokens=tokens)
    keys, values = np.random.default_rng(seed).standard_normal((2, tokens, *shape), np.float32)
    for layer in range(LAYOUT.layers):
        sequence.store(layer, 0, keys, values)
    return sequence


def makers() -> tuple[NewSequence, Callable[..., SequenceKV], str]:
    """Return what makes exact and coded sequences as engines have them here, and their kind."""
    try:
        from mooncake_zmq.engine.machine_code import object_code
        from mooncake_zmq.engine.machine_code.placed_parts import PlacingCodedKV, PlacingSequenceKV
    except ImportError:
        return SequenceKV, CodedSequenceKV, "NumPy"
    exact, coded = (object_code.load(default_cache_dir(), entry) for entry in (object_code.STEPS, object_code.CODECS))
    return partial(PlacingSequenceKV, exact), partial(PlacingCodedKV, coded), "machine code"
