"""Copies between slots, sequences and the SSD tier. Every read is verified: generation before and after, checksum of each part;
for local reads of committed blocks the checksums may be left out.

A part that is copied unchanged is hashed on the way (`hashed_copy`): the hash covers the copied bytes. One that a sequence lays
out anew is hashed at its *source*, right after, while it is in the CPU's cache, or, for a copy into a GPU, meanwhile. A source
that changes between the two is found by its generation, which its writer makes odd before the first byte, and which is checked
once the copies have ended. `transfer.cuda` describes copies from or to GPU memory.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import BlockLoad, SlotGrant
from mooncake_zmq.engine.kv_cache import Part, SequenceKV
from mooncake_zmq.kv import reading
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.transfer.shared_memory import HOST, Segment


def load_blocks(
    loads: Sequence[tuple[Segment, BlockLoad, range]], sequence: SequenceKV, *, verify_committed: bool = True
) -> list[list[int] | ReadFailure]:
    """Copy layers of blocks into a sequence; returns the checksums of each block's parts if all verified.

    Without `verify_committed` the bytes of a committed block, or of any in GPU memory, are assumed to be as they were written.
    """
    hashed = [verify_committed or (load.source.checksum == 0 and segment.device == HOST) for segment, load, _ in loads]
    outcomes = [_expected(*load, is_hashed=is_hashed) for load, is_hashed in zip(loads, hashed, strict=True)]
    parts = [
        (index, layer, checksum)
        for index, (outcome, (_, _, layers)) in enumerate(zip(outcomes, loads, strict=True))
        if not isinstance(outcome, ReadFailure)
        for layer, checksum in zip(layers, outcome, strict=True)
    ]
    try:
        for first in range(0, len(parts), sequence.parts_at_once):
            together = parts[first : first + sequence.parts_at_once]
            sequence.write_parts([_placed(*loads[index][:2], layer) for index, layer, _ in together])
            for index in _torn([part for part in together if hashed[part[0]]], loads):
                outcomes[index] = mismatch(loads[index][0], loads[index][1].source)
    finally:
        sequence.settle()  # before either side is read or freed, also after a failure
    return [
        outcome if isinstance(outcome, ReadFailure) or fits(segment, load.source) else ReadFailure.UNREACHED
        for outcome, (segment, load, _) in zip(outcomes, loads, strict=True)
    ]


def _expected(segment: Segment, load: BlockLoad, layers: range, *, is_hashed: bool) -> list[int] | ReadFailure:
    """Return the checksums that the parts must have. Parts that are not compared must at least have been written."""
    expected = expected_parts(segment, load.source, layers)
    if isinstance(expected, list) and 0 in expected and not is_hashed:
        return mismatch(segment, load.source)
    return expected


def _placed(segment: Segment, load: BlockLoad, layer: int) -> Part:
    start = load.block * segment.layout.block_tokens
    return layer, start, load.tokens, segment.part_view(load.source.slot, layer)


def _torn(parts: Sequence[tuple[int, int, int]], loads: Sequence[tuple[Segment, BlockLoad, range]]) -> list[int]:
    """Return the loads whose (load, layer, checksum)s differ from the present content of their slots."""
    torn = []
    for index, group in groupby(parts, key=lambda part: part[0]):
        (segment, load, _), layers = loads[index], list(group)
        found = segment.checksums([(load.source.slot, layer) for _, layer, _ in layers])
        if not all(map(reading.part_stands, found, [checksum for _, _, checksum in layers])):
            torn.append(index)
    return torn


def copy_block(
    segment: Segment, source: SlotRef, target: Segment, grant: SlotGrant, *, verify_committed: bool = True
) -> int | ReadFailure:
    """Copy a whole block from slot to slot; returns the checksum of the target's content. See `load_blocks`."""
    verify = verify_committed or source.checksum == 0
    layers = range(segment.layout.layers)
    expected = expected_parts(segment, source, layers)
    if isinstance(expected, ReadFailure):
        return expected
    if not granted(target, grant):
        return ReadFailure.UNREACHED
    out: NDArray[np.uint8] = np.frombuffer(target.layers_view(grant.slot, 0, layers.stop), np.uint8)
    if not _copied(segment, source.slot, layers, out, expected if verify else None):
        return mismatch(segment, source) if granted(target, grant) else ReadFailure.UNREACHED
    if not fits(segment, source):
        return ReadFailure.UNREACHED
    target.parts(grant.slot)[:] = expected
    checksum_here = committable(target, grant)
    return ReadFailure.UNREACHED if checksum_here is None else checksum_here


def read_parts(segment: Segment, source: SlotRef, layers: range, out: NDArray[np.uint8]) -> ReadFailure | None:
    """Copy the bytes of some layers' parts of a slot into `out`, whatever their meaning; always verified."""
    expected = expected_parts(segment, source, layers)
    if isinstance(expected, ReadFailure):
        return expected
    if not _copied(segment, source.slot, layers, out, expected):
        return mismatch(segment, source)
    return None if fits(segment, source) else ReadFailure.UNREACHED


def _copied(segment: Segment, slot: int, layers: range, out: NDArray[np.uint8], expected: list[int] | None) -> bool:
    """Copy the bytes of some layers' parts; returns False if their checksums are not the `expected` ones, if given."""
    if expected is None:
        segment.copy_layers(slot, layers.start, layers.stop, out)
        return True
    return all(map(reading.part_stands, segment.copy_parts(slot, layers, out), expected))


def store_parts(sequence: SequenceKV, target: Segment, parts: Sequence[tuple[int, int, int, int]]) -> list[int]:
    """Copy a layer's tokens into the slot of each (slot, layer, start, tokens) and zero the remaining ones; returns the
    checksums."""
    checksums = []
    for first in range(0, len(parts), sequence.parts_at_once):
        together = parts[first : first + sequence.parts_at_once]
        rooms = [(layer, start, tokens, target.part_view(slot, layer)) for slot, layer, start, tokens in together]
        sequence.read_parts(rooms)
        checksums += target.seal_parts([(slot, layer, tokens) for slot, layer, _, tokens in together])
    return checksums


def store_block(sequence: SequenceKV, block: int, target: Segment, grant: SlotGrant) -> int | None:
    """Copy a complete block of a sequence into a slot; returns its checksum, or None if the grant is void."""
    tokens = target.layout.block_tokens
    parts = [(grant.slot, layer, block * tokens, tokens) for layer in range(target.layout.layers)]
    for first in range(0, len(parts), sequence.parts_at_once):
        if not granted(target, grant):
            return None
        store_parts(sequence, target, parts[first : first + sequence.parts_at_once])
    return committable(target, grant)


def granted(target: Segment, grant: SlotGrant) -> bool:
    """Return whether the slot's grant is still valid."""
    return grant.slot < target.slots and target.generation(grant.slot) == grant.generation


def committable(target: Segment, grant: SlotGrant) -> int | None:
    checksum = block_checksum(target.parts(grant.slot).tolist())
    return checksum if granted(target, grant) else None


def fits(segment: Segment, source: SlotRef) -> bool:
    return reading.generation_stands(segment.generation(source.slot), source.generation, committed=source.checksum != 0)


def mismatch(segment: Segment, source: SlotRef) -> ReadFailure:
    """Return the failure of a read whose bytes are not the expected ones."""
    return reading.failure(stands=fits(segment, source))


def expected_parts(segment: Segment, source: SlotRef, layers: range) -> list[int] | ReadFailure:
    """Return the checksums that these layers must have, if the block is the one that `source` describes."""
    if source.slot >= segment.slots or layers.stop > segment.layout.layers or not fits(segment, source):
        return ReadFailure.UNREACHED
    parts: list[int] = segment.parts(source.slot).tolist()
    return parts[layers.start : layers.stop] if reading.row_stands(parts, source.checksum) else mismatch(segment, source)
