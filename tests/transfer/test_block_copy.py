"""Copies between slots and sequences: what verifies is equal to its source, what was touched meanwhile does not verify."""

import numpy as np
import pytest
from one_block import load_layers, store_part
from segment_bytes import slot_bytes

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import BlockLoad, SlotGrant
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.simulation.planted import planting
from mooncake_zmq.transfer import shared_memory
from mooncake_zmq.transfer.block_copy import copy_block, store_block
from mooncake_zmq.transfer.hashed_copy import copy_hashed


@pytest.fixture
def sequence(layout):
    opened = SequenceKV(layers=3, kv_heads=1, head_dim=2, capacity_tokens=16)
    yield opened
    opened.close()


def part_of(sequence, layout, layer, start, stop):
    out = np.empty((2, stop - start, 1, 2), np.float32)
    sequence.read_part(layer, start, stop, out)
    return out


def whole(ref: SlotRef, block: int = 0, tokens: int = 4) -> BlockLoad:
    return BlockLoad(block, ref, 0, 3, tokens)


def altered(ref: SlotRef, **fields) -> SlotRef:
    return SlotRef(**({name: getattr(ref, name) for name in ref.__struct_fields__} | fields))


def test_load_puts_the_block_at_its_place(make_segment, fill, layout, sequence):
    segment = make_segment("a")
    ref = fill(segment, 2)
    assert load_layers(segment, whole(ref, block=1), range(3), sequence) == segment.parts(2).tolist()
    for layer in range(3):
        assert np.array_equal(part_of(sequence, layout, layer, 4, 8), segment.part_view(2, layer))
        assert not part_of(sequence, layout, layer, 0, 4).any()
        assert not part_of(sequence, layout, layer, 8, 16).any()


def test_load_of_a_partial_block_writes_only_its_tokens(make_segment, fill, layout, sequence):
    segment = make_segment("a")
    ref = fill(segment, 0)
    assert load_layers(segment, whole(ref, block=2, tokens=3), range(1, 2), sequence) == segment.parts(0).tolist()[1:2]
    assert np.array_equal(part_of(sequence, layout, 1, 8, 11), segment.part_view(0, 1)[:, :3])
    assert not part_of(sequence, layout, 1, 11, 16).any()
    assert not part_of(sequence, layout, 0, 8, 11).any()


def test_load_refuses_a_wrong_reference(make_segment, fill, sequence):
    segment = make_segment("a")
    ref = fill(segment, 0)
    for wrong in (altered(ref, generation=4), altered(ref, generation=1), altered(ref, slot=1), altered(ref, slot=8)):
        assert load_layers(segment, whole(wrong), range(3), sequence) is ReadFailure.UNREACHED
    other_bytes = altered(ref, checksum=ref.checksum ^ 1)
    assert load_layers(segment, whole(other_bytes), range(3), sequence) is ReadFailure.CORRUPT
    assert load_layers(segment, whole(ref), range(2, 4), sequence) is ReadFailure.UNREACHED


def test_an_open_source_may_be_committed_meanwhile_but_not_reused(make_segment, fill, sequence):
    segment = make_segment("a")
    ref = fill(segment, 0, generation=4)
    for granted, good in ((4, True), (3, True), (2, False), (5, False)):
        load = whole(altered(ref, generation=granted, checksum=0))
        assert (load_layers(segment, load, range(3), sequence) is not ReadFailure.UNREACHED) is good


def test_an_open_source_is_refused_before_its_part_is_written(make_segment, fill, sequence):
    segment = make_segment("a")
    ref = fill(segment, 0)
    segment.set_generation(0, 3)
    assert load_layers(segment, whole(altered(ref, generation=3, checksum=0)), range(1), sequence) is ReadFailure.CORRUPT


@pytest.mark.parametrize("layer", range(3))
def test_flipped_data_or_checksum_does_not_verify(make_segment, fill, layout, sequence, layer):
    segment, target = make_segment("a"), make_segment("b")
    grant = SlotGrant("b", 1, 0, 0)
    ref = fill(segment, 0)
    position = (layer + 1) * layout.part_bytes - 1
    slot_bytes(segment, 0)[position] ^= 4
    assert load_layers(segment, whole(ref), range(3), sequence) is ReadFailure.CORRUPT
    assert copy_block(segment, ref, target, grant) is ReadFailure.CORRUPT
    slot_bytes(segment, 0)[position] ^= 4
    assert copy_block(segment, ref, target, grant) == ref.checksum
    segment.parts(0)[layer] ^= 1
    assert load_layers(segment, whole(ref), range(3), sequence) is ReadFailure.CORRUPT
    assert copy_block(segment, ref, target, grant) is ReadFailure.CORRUPT


class EvictingSequence:
    """Lets the source be taken away in the middle of its copy."""

    parts_at_once = 1

    def __init__(self, segment, at_layer, generation):
        self.segment, self.at_layer, self.generation = segment, at_layer, generation

    def write_parts(self, parts):
        if parts[0][0] == self.at_layer:
            self.segment.set_generation(0, self.generation)

    def settle(self):
        pass


@pytest.mark.parametrize("at_layer", range(3))
def test_eviction_during_the_copy_is_noticed(make_segment, fill, at_layer):
    segment = make_segment("a")
    ref = fill(segment, 0)
    assert load_layers(segment, whole(ref), range(3), EvictingSequence(segment, at_layer, 2)) == segment.parts(0).tolist()
    assert load_layers(segment, whole(ref), range(3), EvictingSequence(segment, at_layer, 4)) is ReadFailure.UNREACHED


@pytest.mark.parametrize("torn", [0, 1])
@pytest.mark.parametrize("at_layer", range(3))
def test_eviction_during_a_slot_copy_is_noticed_and_no_corrupt_source(make_segment, fill, monkeypatch, at_layer, torn):
    segment, target = make_segment("a"), make_segment("b")
    ref = fill(segment, 0)
    hashed = []

    def copy_and_evict(to, where, size):
        checksum = copy_hashed(to, where, size)
        hashed.append(checksum)
        if len(hashed) == at_layer + 1:
            segment.set_generation(0, 4)
        return checksum ^ (torn and len(hashed) > at_layer)

    monkeypatch.setattr(shared_memory, "copy_hashed", copy_and_evict)
    assert copy_block(segment, ref, target, SlotGrant("b", 1, 0, 0)) is ReadFailure.UNREACHED


def test_copy_keeps_the_checksum_and_needs_the_grant(make_segment, fill, layout):
    segment, target = make_segment("a"), make_segment("b")
    ref = fill(segment, 3)
    target.set_generation(5, 7)
    assert copy_block(segment, ref, target, SlotGrant("b", 1, 5, 9)) is ReadFailure.UNREACHED
    assert copy_block(segment, ref, target, SlotGrant("b", 1, 99, 7)) is ReadFailure.UNREACHED
    assert not any(slot_bytes(target, 5)), "nothing is written without a grant"
    assert copy_block(segment, ref, target, SlotGrant("b", 1, 5, 7)) == ref.checksum
    size = layout.block_bytes
    assert bytes(slot_bytes(target, 5)[:size]) == bytes(slot_bytes(segment, 3)[:size])
    target.set_generation(5, 8)
    assert copy_block(target, altered(ref, slot=5, generation=8), segment, SlotGrant("a", 1, 0, 0)) == ref.checksum


class RevokingSequence:
    parts_at_once = 1

    def __init__(self, target, at_layer):
        self.target, self.at_layer = target, at_layer

    def read_parts(self, parts):
        ((layer, _, _, out),) = parts
        out[...] = 1
        if layer == self.at_layer:
            self.target.set_generation(0, 9)


@pytest.mark.parametrize("at_layer", range(3))
def test_a_grant_revoked_during_a_put_gives_no_checksum(make_segment, at_layer):
    target = make_segment("b")
    target.set_generation(0, 7)
    assert store_block(RevokingSequence(target, at_layer), 0, target, SlotGrant("b", 1, 0, 7)) is None


def test_store_then_load_is_the_identity(make_segment, layout, sequence):
    target = make_segment("b")
    random = np.random.default_rng(1)
    for layer in range(3):
        sequence.write_part(layer, 0, random.standard_normal((2, 16, 1, 2), dtype=np.float32))
    target.set_generation(0, 1)
    checksum = store_block(sequence, 2, target, SlotGrant("b", 1, 0, 1))
    target.set_generation(0, 2)
    ref = SlotRef(node="b", incarnation=1, slot=0, generation=2, checksum=checksum)
    other = SequenceKV(layers=3, kv_heads=1, head_dim=2, capacity_tokens=16)
    assert load_layers(target, whole(ref), range(3), other) == target.parts(0).tolist()
    for layer in range(3):
        assert np.array_equal(part_of(other, layout, layer, 0, 4), part_of(sequence, layout, layer, 8, 12))


def test_the_rest_of_a_partial_block_is_zero(make_segment, sequence):
    target = make_segment("b")
    slot_bytes(target, 0)[:] = b"\xff" * len(slot_bytes(target, 0))
    sequence.write_part(1, 0, np.ones((2, 4, 1, 2), np.float32))
    checksum = store_part(sequence, 1, 0, 3, target, 0)
    assert target.parts(0)[1] == checksum
    part = target.part_view(0, 1)
    assert (part[:, :3] == 1).all()
    assert not part[:, 3:].any()
    assert block_checksum(target.parts(0).tolist())


def test_live_reads_follow_the_rule_that_seeds_are_tried_with(make_segment, fill, sequence):
    """The bug planted in the simulation's reads is in these as well: there is no second copy of the rule."""
    segment, target = make_segment("a"), make_segment("b")
    ref = fill(segment, 0)
    slot_bytes(segment, 0)[0] ^= 4
    wrong = altered(ref, generation=ref.generation + 4, checksum=5)
    with planting("no_generation_check"):
        assert not isinstance(load_layers(segment, whole(wrong), range(3), sequence), ReadFailure)
        assert not isinstance(copy_block(segment, wrong, target, SlotGrant("b", 1, 0, 0)), ReadFailure)
    assert isinstance(load_layers(segment, whole(wrong), range(3), sequence), ReadFailure)
