"""The copies between slots and the SSD tier, each verified as it leaves memory or the disk: see `block_copy`."""

from collections.abc import Sequence

import structlog

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import DiskBlock, SlotGrant
from mooncake_zmq.kv import reading
from mooncake_zmq.kv.checksum import part_checksums
from mooncake_zmq.kv.layout import div_ceil
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.pool.ssd.disk import Disk
from mooncake_zmq.pool.ssd.disk_directory import DiskBusy
from mooncake_zmq.transfer.block_copy import committable, expected_parts, fits, granted, mismatch
from mooncake_zmq.transfer.shared_memory import Segment

log = structlog.get_logger()


def read_blocks(disk: Disk, copies: Sequence[tuple[DiskBlock, Segment, SlotGrant]]) -> list[int | ReadFailure]:
    """Promote blocks from the SSD tier into slots: the checksum of each. Raises `DiskFault`."""
    outcomes: list[int | ReadFailure] = [ReadFailure.UNREACHED] * len(copies)
    wanted = [index for index, (_, target, grant) in enumerate(copies) if granted(target, grant)]
    places = [(block, _slot_view(target, grant.slot)) for block, target, grant in map(copies.__getitem__, wanted)]
    try:
        read = disk.read(places)
    except DiskBusy as busy:
        log.debug("disk_blocks_not_read", reason=str(busy))
        return outcomes
    for index, parts in zip(wanted, read, strict=True):
        _, target, grant = copies[index]
        if parts is None:
            outcomes[index] = ReadFailure.CORRUPT
        elif granted(target, grant):
            target.parts(grant.slot)[:] = parts
            checksum = committable(target, grant)
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
        outcomes.append(outcome if fits(segment, source) else ReadFailure.UNREACHED)
    return outcomes


def _slot_view(segment: Segment, slot: int) -> memoryview:
    """All bytes of a slot, with the padding after the last layer's part: whole pages."""
    layout = segment.layout
    view = segment.layers_view(slot, 0, div_ceil(layout.slot_bytes, layout.part_bytes))  # ends at the slot's end
    assert view.nbytes == layout.slot_bytes
    return view


def _verified_view(segment: Segment, source: SlotRef, block: DiskBlock) -> memoryview | ReadFailure:
    """The bytes of a committed block's slot, if they are those that `block` is to have."""
    expected = expected_parts(segment, source, range(segment.layout.layers))
    if isinstance(expected, ReadFailure):
        return expected
    view = _slot_view(segment, source.slot)
    parts = part_checksums(view[: segment.layout.block_bytes], segment.layout.part_bytes)
    return view if reading.row_stands(parts, block.checksum) else mismatch(segment, source)
