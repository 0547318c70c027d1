"""Blocks of a codec between sequences and slots, of one host and of another: what verifies is loaded, else it is a miss."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from one_block import load_layers
from segment_bytes import slot_bytes

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import BlockLoad, SlotGrant
from mooncake_zmq.engine.coded_kv import CodedSequenceKV
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.kv.codec import CODECS, Codec
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.runtime.executor.loads import _SequenceSink
from mooncake_zmq.transfer.block_copy import copy_block, store_block, store_parts
from mooncake_zmq.transfer.shared_memory import Segment

SHAPE = {"layers": 3, "kv_heads": 2, "head_dim": 16}
each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))


def sequence_of(codec: Codec) -> CodedSequenceKV:
    sequence = CodedSequenceKV(codec, **SHAPE, capacity_tokens=16)
    sequence.keys[:] = sequence.values[:] = 0.0
    return sequence


def computed(codec: Codec) -> CodedSequenceKV:
    """Return a sequence of three blocks of four tokens."""
    random, sequence = np.random.default_rng(2), sequence_of(codec)
    for layer in range(3):
        sequence.store(layer, 0, *random.standard_normal((2, 12, 2, 16), dtype=np.float32))
    return sequence


def stored(make_segment, codec: Codec, node: str = "a") -> tuple[Segment, SlotRef, CodedSequenceKV]:
    """Return a segment whose slot 1 has the second block of a sequence."""
    layout = BlockLayout(**SHAPE, block_tokens=4).coded(codec.name)
    segment, sequence = make_segment(node, layout=layout), computed(codec)
    segment.set_generation(1, 1)
    checksum = store_block(sequence, 1, segment, SlotGrant(node, 1, 1, 1))
    assert checksum is not None
    segment.set_generation(1, 2)
    return segment, SlotRef(node=node, incarnation=1, slot=1, generation=2, checksum=checksum), sequence


def codes(sequence: CodedSequenceKV, start: int, stop: int) -> bytes:
    out = np.zeros((3, stop - start, sequence._codec.token_bytes(2, 16)), np.uint8)
    for layer in range(3):
        sequence.read_part(layer, start, stop, out[layer])
    return out.tobytes()


@each_codec
def test_a_block_goes_through_a_slot_and_through_another_hosts_slot(make_segment, codec: Codec) -> None:
    segment, ref, sequence = stored(make_segment, codec)
    other, loaded = make_segment("b", layout=segment.layout), sequence_of(codec)
    assert copy_block(segment, ref, other, SlotGrant("b", 1, 0, 0)) == ref.checksum
    assert bytes(slot_bytes(other, 0)) == bytes(slot_bytes(segment, 1))
    assert load_layers(segment, BlockLoad(1, ref, 0, 3, 4), range(3), loaded) == segment.parts(1).tolist()
    if codec.rounds_when_stored:
        assert codes(loaded, 4, 8) == codes(sequence, 4, 8)
    assert not loaded.values[:, :, :4].any()
    assert not loaded.values[:, :, 8:].any()


@each_codec
def test_of_a_part_of_a_block_its_tokens_count_and_the_rest_is_zero(make_segment, codec: Codec) -> None:
    segment, _, sequence = stored(make_segment, codec)
    segment.part_view(0, 2)[...] = 255
    store_parts(sequence, segment, [(0, 2, 8, 3)])
    part = segment.part_view(0, 2)
    assert part[:3].any(axis=1).all()
    assert not part[3:].any()
    loaded = sequence_of(codec)
    loaded.write_parts([(2, 0, 3, part)])
    assert loaded.values[2, :, :3].any(axis=-1).all()
    assert not loaded.values[2, :, 3:].any()


@each_codec
@pytest.mark.parametrize("at", ["first code", "last scale"])
def test_a_damaged_block_is_a_miss(make_segment, codec: Codec, at: str) -> None:
    segment, ref, _ = stored(make_segment, codec)
    part, load = segment.layout.part_bytes, BlockLoad(1, ref, 0, 3, 4)
    slot_bytes(segment, 1)[part if at == "first code" else 2 * part - 1] ^= 16
    assert load_layers(segment, load, range(3), sequence_of(codec)) is ReadFailure.CORRUPT
    assert copy_block(segment, ref, make_segment("b", layout=segment.layout), SlotGrant("b", 1, 0, 0)) is ReadFailure.CORRUPT


@dataclass
class Record:
    """What a sink reports."""

    checksums: list[int] = field(default_factory=list)

    def arrived(self, block: int, layers: range, checksums: tuple[int, ...]) -> None:
        self.checksums += checksums


@each_codec
def test_a_block_of_another_host_goes_into_a_sequence(make_segment, codec: Codec) -> None:
    segment, ref, sequence = stored(make_segment, codec)
    loaded, record = sequence_of(codec), Record()
    sink = _SequenceSink(BlockLoad(1, ref, 0, 3, 3), loaded, segment.layout, record)  # type: ignore[arg-type]
    for layer in range(3):
        sink.part(layer, memoryview(segment.layers_view(1, layer, layer + 1)), int(segment.parts(1)[layer]))
    assert block_checksum(record.checksums) == ref.checksum
    if codec.rounds_when_stored:
        assert codes(loaded, 4, 7) == codes(sequence, 4, 7)
    assert not loaded.values[:, :, 7:].any()
