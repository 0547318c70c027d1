"""Copies of blocks: into a sequence, and into slots.

A copy writes its first half at one virtual time and the second at a later one: a writer that is stopped in between writes late.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import (
    BlocksCopied,
    BlocksPulled,
    CopyBlocks,
    DiskBlock,
    PullBlocks,
    SequenceBlock,
    SlotGrant,
    WorkFailed,
)
from mooncake_zmq.kv.checksum import block_checksum, part_checksum
from mooncake_zmq.simulation.machine import NO_ANSWER, Machine, Running, Steps
from mooncake_zmq.simulation.memory import Segment, tear
from mooncake_zmq.simulation.reads import DiskPart, DiskRead, SequenceRead, SlotRead


@dataclass(slots=True)
class _BlockCopy:
    target: Segment | None
    grant: SlotGrant
    reads: "Sequence[SlotRead | SequenceRead | DiskPart]"
    corrupt: bool = False


def pull(machine: Machine, running: Running, work: PullBlocks) -> Steps:
    reads = [
        (load, layer, SlotRead(machine, running, load.source, layer))
        for load in work.loads
        for layer in range(load.first_layer, load.stop_layer)
    ]
    stop = yield from machine.approach(running, [load.source for load in work.loads])
    if stop == NO_ANSWER:
        return BlocksPulled((), tuple(dict.fromkeys(load.block for load in work.loads)))
    if stop:
        return WorkFailed(stop)
    if machine.world.random.random() < machine.world.copy_fail:
        return WorkFailed("injected failure")
    for _, _, read in reads:
        read.first_half()
    machine.half_read([load.source for load in work.loads])
    yield machine.took(machine.copy_s(len(reads) / machine.layout.layers, [load.source for load in work.loads]))
    parts: list[tuple[int, int, int]] = []
    failed: dict[int, None] = {}
    corrupt: dict[int, None] = {}
    sequence = machine.sequences[work.sequence]
    for load, layer, read in reads:
        part = read.second_half()
        if part is None:
            failed[load.block] = None
            if read.corrupt:
                corrupt[load.block] = None
            continue
        machine.store(sequence, load, layer, part)
        parts.append((load.block, layer, part_checksum(part)))
    return BlocksPulled(tuple(part for part in parts if part[0] not in failed), tuple(failed), tuple(corrupt))


def copy(machine: Machine, running: Running, work: CopyBlocks) -> Steps:
    layers = machine.layout.layers
    sources = [source for source, _ in work.copies if isinstance(source, SlotRef)]
    stop = yield from machine.approach(running, sources)
    if stop == NO_ANSWER:
        return BlocksCopied((None,) * len(work.copies))
    if stop:
        return WorkFailed(stop)
    stored = [source.slot for source, _ in work.copies if isinstance(source, DiskBlock)]
    machine.disk_reads.update(stored)
    copies: list[_BlockCopy] = []
    for source, grant in work.copies:
        target = machine.find(grant.node, grant.incarnation)
        if target is None or not target.linked or target.host != machine.host:
            copies.append(_BlockCopy(None, grant, []))
            continue
        usable = target.generations[grant.slot] == grant.generation
        block = DiskRead(machine, source) if isinstance(source, DiskBlock) else None
        reads = [DiskPart(block, layer) if block else _reader(machine, running, source, layer) for layer in range(layers)]
        copies.append(_BlockCopy(target if usable else None, grant, reads))
    fail = machine.world.random.random() < machine.world.copy_fail
    for copy in copies:
        if copy.target is None:
            continue
        machine.world.watcher.writing(machine, running, copy.target, copy.grant)
        for layer, read in enumerate(copy.reads):
            part = read.first_half()
            if part is not None:
                copy.target.part(copy.grant.slot, layer)[: len(part)] = part
    if any(copy.target is not machine.segment for copy in copies if copy.target is not None):
        machine.world.half_written(machine.name)
    machine.half_read(sources)
    # From here on a stopped process writes late: the generation was checked, the bytes are on their way.
    yield machine.took(machine.copy_s(len(copies), sources) + machine.disk_block_s() * len(stored))
    machine.disk_reads.subtract(stored)
    if fail:
        return WorkFailed("injected failure")
    checksums = tuple(finish_copy(machine, running, copy) for copy in copies)
    fault = "input/output error" if stored and machine.disk and machine.disk.fault == "failing" else ""
    return BlocksCopied(checksums, tuple(index for index, copy in enumerate(copies) if copy.corrupt), fault)


def finish_copy(machine: Machine, running: Running, copy: "_BlockCopy") -> int | None:
    target, grant = copy.target, copy.grant
    if target is None:
        return None
    machine.world.watcher.writing(machine, running, target, grant)
    good = True
    for layer, read in enumerate(copy.reads):
        part = read.second_half()
        if part is None:
            good = False
            copy.corrupt = copy.corrupt or read.corrupt
            continue
        target.part(grant.slot, layer)[:] = part
        target.parts[grant.slot][layer] = part_checksum(part)
    if not good or target.generations[grant.slot] != grant.generation:
        return None
    if machine.world.random.random() < machine.world.copy_tear:
        tear(machine.world.random, target.part(grant.slot, machine.world.random.randrange(machine.layout.layers)))
    standing = [part_checksum(target.part(grant.slot, layer)) for layer in range(machine.layout.layers)]
    return block_checksum(standing) if standing == target.parts[grant.slot] else None


def _reader(
    machine: Machine, running: Running, source: SlotRef | SequenceBlock | DiskBlock, layer: int
) -> "SlotRead | SequenceRead":
    if isinstance(source, SlotRef):
        return SlotRead(machine, running, source, layer)
    assert isinstance(source, SequenceBlock)
    return SequenceRead(machine, source, layer)
