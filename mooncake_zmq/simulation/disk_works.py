"""Writes to a simulated disk."""

from mooncake_zmq.core.work import DiskWritten, WorkFailed, WriteToDisk
from mooncake_zmq.simulation.machine import Machine, Running, Steps
from mooncake_zmq.simulation.memory import generation_stands


def write_to_disk(machine: Machine, _: Running, work: WriteToDisk) -> Steps:
    """Write block by block, each in two halves: a crash in between leaves a torn slot under whatever row it had."""
    disk, segment = machine.disk, machine.segment
    if disk is None or segment is None:
        machine.world.watcher.broken(machine, "writes to a disk it does not have")
        return WorkFailed("no disk")
    written = [False] * len(work.blocks)
    stop = yield machine.took(machine.world.hardware.disk_start_s)
    for index, (source, block) in enumerate(work.blocks):
        if stop or disk.fault:
            break
        if not generation_stands(segment, source):
            continue
        if machine.disk_reads[block.slot] > 0:
            machine.world.watcher.broken(machine, f"writes disk slot {block.slot}, which a copy reads")
        disk.write(block, segment.block(source.slot), half=True)
        stop = yield machine.took(machine.disk_block_s())
        payload = segment.block(source.slot)
        disk.write(block, payload, half=False)
        if generation_stands(segment, source) and disk.stands(block, payload):
            disk.index(block)
            written[index] = True
    return DiskWritten(tuple(written), {"": "", "full": "no space left", "failing": "input/output error"}[disk.fault])
