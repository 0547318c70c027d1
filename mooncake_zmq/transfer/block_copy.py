"""The copies between slots, sequences and the SSD tier. Every read is verified: generation before and after, checksum of
each part; of local reads of committed blocks the checksums may be left out.

Sketch: a part is touched twice, by the copy and, while still in the CPU's cache, by the hash (three times its speed), so a
verified read should reach about three quarters of a plain memory copy.

The hash covers the bytes at the *source*, right after they were copied, or, into a GPU, while they are. A source that changes
between the two is told by its generation, which its writer makes odd before the first byte, and which is looked at once
the copies have ended. What that means where one side or both are GPU memory stands in `transfer.cuda`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import BlockLoad, DiskBlock, SlotGrant
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.kv import reading
from mooncake_zmq.kv.checksum import block_checksum, part_checksum, part_checksums
from mooncake_zmq.kv.layout import div_ceil
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.transfer.disk import Disk
from mooncake_zmq.transfer.shared_memory import HOST, Segment


def load_layers(
    segment: Segment, load: BlockLoad, layers: range, sequence: SequenceKV, *, verify_committed: bool = True
) -> list[int] | ReadFailure:
    """Copy layers of a block into a sequence: their parts' checksums, if all verified.

    Without `verify_committed` the bytes of a committed block, or of any in GPU memory, are taken for what they were when they
    were written.
    """
    verify = verify_committed or (load.source.checksum == 0 and segment.device == HOST)
    expected = _expected(segment, load.source, layers)
    if isinstance(expected, ReadFailure):
        return expected
    if not verify and 0 in expected:  # not written yet
        return _mismatch(segment, load.source)
    start = load.block * segment.layout.block_tokens
    try:
        for layer, checksum in zip(layers, expected, strict=True):
            part = segment.part_view(load.source.slot, layer)
            sequence.write_part(layer, start, part[:, : load.tokens])
            if verify and not reading.part_stands(segment.checksum(part), checksum):
                return _mismatch(segment, load.source)
    finally:
        sequence.settle()  # before anybody reads or frees either side, whatever came of it
    return expected if _fits(segment, load.source) else ReadFailure.UNREACHED


def copy_block(
    segment: Segment, source: SlotRef, target: Segment, grant: SlotGrant, *, verify_committed: bool = True
) -> int | ReadFailure:
    """Copy a whole block from slot to slot: the checksum of what now stands in the target. See `load_layers`."""
    verify = verify_committed or source.checksum == 0
    layers = range(segment.layout.layers)
    expected = _expected(segment, source, layers)
    if isinstance(expected, ReadFailure):
        return expected
    if not granted(target, grant):
        return ReadFailure.UNREACHED
    for layer, checksum in zip(layers, expected, strict=True):
        part = target.part_view(grant.slot, layer)
        segment.copy_part(source.slot, layer, part)
        if verify and not reading.part_stands(part_checksum(part.data), checksum):
            return _mismatch(segment, source) if granted(target, grant) else ReadFailure.UNREACHED
    if not _fits(segment, source):
        return ReadFailure.UNREACHED
    target.parts(grant.slot)[:] = expected
    checksum_here = _committable(target, grant)
    return ReadFailure.UNREACHED if checksum_here is None else checksum_here


def read_parts(segment: Segment, source: SlotRef, layers: range, out: NDArray[np.uint8]) -> ReadFailure | None:
    """Copy the bytes of some layers' parts of a slot into `out`, whatever they mean; always verified."""
    expected = _expected(segment, source, layers)
    if isinstance(expected, ReadFailure):
        return expected
    shape, dtype = segment.layout.part_shape, segment.layout.dtype
    for layer, part, checksum in zip(layers, out.reshape(len(layers), -1), expected, strict=True):
        segment.copy_part(source.slot, layer, part.view(dtype).reshape(shape))
        if part_checksum(part.data) != checksum:
            return _mismatch(segment, source)
    return None if _fits(segment, source) else ReadFailure.UNREACHED


def read_blocks(disk: Disk, copies: Sequence[tuple[DiskBlock, Segment, SlotGrant]]) -> list[int | ReadFailure]:
    """Promote blocks from the SSD tier into slots: the checksum of each. Raises `DiskFault`."""
    outcomes: list[int | ReadFailure] = [ReadFailure.UNREACHED] * len(copies)
    wanted = [index for index, (_, target, grant) in enumerate(copies) if granted(target, grant)]
    places = [(block, _slot_view(target, grant.slot)) for block, target, grant in map(copies.__getitem__, wanted)]
    for index, parts in zip(wanted, disk.read(places), strict=True):
        _, target, grant = copies[index]
        if parts is None:
            outcomes[index] = ReadFailure.CORRUPT
        elif granted(target, grant):
            target.parts(grant.slot)[:] = parts
            checksum = _committable(target, grant)
            outcomes[index] = ReadFailure.UNREACHED if checksum is None else checksum
    return outcomes


def write_blocks(segment: Segment, disk: Disk, blocks: Sequence[tuple[SlotRef, DiskBlock]]) -> list[int | ReadFailure]:
    """Write committed blocks to the SSD tier, each verified as it leaves memory: sequence numbers, to be committed there.

    Raises `DiskFault`.
    """
    views = [_verified_view(segment, source, block) for source, block in blocks]
    placed = [(block, view) for (_, block), view in zip(blocks, views, strict=True) if isinstance(view, memoryview)]
    sequences = iter(disk.write(placed))
    outcomes: list[int | ReadFailure] = []
    for (source, _), view in zip(blocks, views, strict=True):
        outcome = view if isinstance(view, ReadFailure) else next(sequences)
        outcomes.append(outcome if _fits(segment, source) else ReadFailure.UNREACHED)
    return outcomes


def store_part(sequence: SequenceKV, layer: int, start: int, stop: int, target: Segment, slot: int) -> int:
    """Copy tokens `start..stop` of one layer into a slot's part, the rest of which becomes zero; returns its checksum."""
    part = target.part_room(slot, layer)
    sequence.read_part(layer, start, stop, part[:, : stop - start])
    return target.seal_part(slot, layer, part, stop - start)


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


def _slot_view(segment: Segment, slot: int) -> memoryview:
    """All bytes of a slot, with the padding after the last layer's part: whole pages."""
    layout = segment.layout
    view = segment.layers_view(slot, 0, div_ceil(layout.slot_bytes, layout.part_bytes))  # ends at the slot's end
    assert view.nbytes == layout.slot_bytes
    return view


def _verified_view(segment: Segment, source: SlotRef, block: DiskBlock) -> memoryview | ReadFailure:
    """The bytes of a committed block's slot, if they are those that `block` is to have."""
    told = _expected(segment, source, range(segment.layout.layers))
    if isinstance(told, ReadFailure):
        return told
    view = _slot_view(segment, source.slot)
    parts = part_checksums(view[: segment.layout.block_bytes], segment.layout.part_bytes)
    return view if reading.row_stands(parts, block.checksum) else _mismatch(segment, source)


def _committable(target: Segment, grant: SlotGrant) -> int | None:
    checksum = block_checksum(target.parts(grant.slot).tolist())
    return checksum if granted(target, grant) else None


def _fits(segment: Segment, source: SlotRef) -> bool:
    return reading.generation_stands(segment.generation(source.slot), source.generation, committed=source.checksum != 0)


def _mismatch(segment: Segment, source: SlotRef) -> ReadFailure:
    """What was read is not what was told."""
    return reading.failure(stands=_fits(segment, source))


def _expected(segment: Segment, source: SlotRef, layers: range) -> list[int] | ReadFailure:
    """The checksums that these layers must have, if the block is the one that the reader was told."""
    if source.slot >= segment.slots or layers.stop > segment.layout.layers or not _fits(segment, source):
        return ReadFailure.UNREACHED
    parts: list[int] = segment.parts(source.slot).tolist()
    return parts[layers.start : layers.stop] if reading.row_stands(parts, source.checksum) else _mismatch(segment, source)
