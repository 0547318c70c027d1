"""The copies between slots and sequences. Every read is verified: generation before and after, checksum of each part.

Sketch: a part is touched twice, by the copy and, while still in the CPU's cache, by the hash (three times its speed), so a
verified read should reach about three quarters of a plain memory copy. A device backend replaces `write_part` and
`read_part` of its sequences and may hash pinned source bytes just the same.

The hash covers the bytes at the *source*, right after they were copied. A source that changes between the two is told by
its generation, which its writer makes odd before the first byte.
"""

from collections.abc import Sequence
from enum import Enum

from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.kv.checksum import block_checksum, part_checksum
from mooncake_zmq.messages import SlotRef
from mooncake_zmq.transfer.shared_memory import Segment
from mooncake_zmq.work import BlockLoad, SlotGrant


class ReadFailure(Enum):
    """Why a read gave no block."""

    CORRUPT = "corrupt"
    """The copy named stands, but its bytes or checksums are not what the reader was told: nobody should find it again."""
    UNREACHED = "unreached"
    """It did not come, not in time, or the copy named is no longer there: this says nothing about anybody's bytes."""


def generation_fits(generation: int, expected: int, *, committed: bool) -> bool:
    """A committed block must still have its generation; one being written may have been committed meanwhile."""
    return generation == expected or (not committed and generation == expected + 1)


def trusted_parts(parts: Sequence[int], checksum: int) -> bool:
    """Do a copy's part checksums fold to the block checksum its reader was told? 0: none was told yet."""
    return checksum == 0 or block_checksum(parts) == checksum


def load_layers(segment: Segment, load: BlockLoad, layers: range, sequence: SequenceKV) -> list[int] | ReadFailure:
    """Copy layers of a block into a sequence: their parts' checksums, if all verified."""
    expected = _expected(segment, load.source, layers)
    if isinstance(expected, ReadFailure):
        return expected
    start = load.block * segment.layout.block_tokens
    for layer, checksum in zip(layers, expected, strict=True):
        part = segment.part_view(load.source.slot, layer)
        sequence.write_part(layer, start, part[:, : load.tokens])
        if part_checksum(part.data) != checksum:
            return _mismatch(segment, load.source)
    return expected if _fits(segment, load.source) else ReadFailure.UNREACHED


def copy_block(segment: Segment, source: SlotRef, target: Segment, grant: SlotGrant) -> int | ReadFailure:
    """Copy a whole block from slot to slot: the checksum of what now stands in the target."""
    layers = range(segment.layout.layers)
    expected = _expected(segment, source, layers)
    if isinstance(expected, ReadFailure):
        return expected
    if not granted(target, grant):
        return ReadFailure.UNREACHED
    for layer, checksum in zip(layers, expected, strict=True):
        part = target.part_view(grant.slot, layer)
        part[...] = segment.part_view(source.slot, layer)
        if part_checksum(part.data) != checksum:
            return _mismatch(segment, source) if granted(target, grant) else ReadFailure.UNREACHED
    if not _fits(segment, source):
        return ReadFailure.UNREACHED
    target.parts(grant.slot)[:] = expected
    checksum_here = _committable(target, grant)
    return ReadFailure.UNREACHED if checksum_here is None else checksum_here


def store_part(sequence: SequenceKV, layer: int, start: int, stop: int, target: Segment, slot: int) -> int:
    """Copy tokens `start..stop` of one layer into a slot's part, the rest of which becomes zero; returns its checksum."""
    part = target.part_view(slot, layer)
    sequence.read_part(layer, start, stop, part[:, : stop - start])
    part[:, stop - start :] = 0
    checksum = part_checksum(part.data)
    target.parts(slot)[layer] = checksum
    return checksum


def store_block(sequence: SequenceKV, block: int, target: Segment, grant: SlotGrant) -> int | None:
    """Copy a complete block of a sequence into a slot: its checksum, or None if the grant is void."""
    start = block * target.layout.block_tokens
    stop = start + target.layout.block_tokens
    for layer in range(target.layout.layers):
        if not granted(target, grant):
            return None
        store_part(sequence, layer, start, stop, target, grant.slot)
    return _committable(target, grant)


def granted(target: Segment, grant: SlotGrant) -> bool:
    """Is the slot still ours to write?"""
    return grant.slot < target.slots and target.generation(grant.slot) == grant.generation


def _committable(target: Segment, grant: SlotGrant) -> int | None:
    checksum = block_checksum(target.parts(grant.slot).tolist())
    return checksum if granted(target, grant) else None


def _fits(segment: Segment, source: SlotRef) -> bool:
    return generation_fits(segment.generation(source.slot), source.generation, committed=source.checksum != 0)


def _mismatch(segment: Segment, source: SlotRef) -> ReadFailure:
    """What was read is not what was told: torn, if the copy was taken away meanwhile."""
    return ReadFailure.CORRUPT if _fits(segment, source) else ReadFailure.UNREACHED


def _expected(segment: Segment, source: SlotRef, layers: range) -> list[int] | ReadFailure:
    """The checksums that these layers must have, if the block is the one that the reader was told."""
    if source.slot >= segment.slots or layers.stop > segment.layout.layers or not _fits(segment, source):
        return ReadFailure.UNREACHED
    parts: list[int] = segment.parts(source.slot).tolist()
    return parts[layers.start : layers.stop] if trusted_parts(parts, source.checksum) else _mismatch(segment, source)
