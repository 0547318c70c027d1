"""Reads of blocks in two halves, each at its own virtual time: a block can be evicted under its reader.

A read of slots and of a disk is verified by `kv.reading`, as live reads are.
"""

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import DiskBlock, SequenceBlock
from mooncake_zmq.simulation.machine import Machine, Running
from mooncake_zmq.simulation.memory import Segment, generation_stands, part_stands, tear


class SlotRead:
    """One layer's part of a slot, read in two halves and verified as `BlockLoad` says."""

    __slots__ = ("_half", "_layer", "_machine", "_ref", "_running", "_segment", "corrupt")

    def __init__(self, machine: Machine, running: Running, ref: SlotRef, layer: int) -> None:
        self._machine = machine
        self._running = running
        self._ref = ref
        self._layer = layer
        self._segment: Segment | None = None
        self._half: bytes | None = None
        self.corrupt = False
        """Whether there was a copy as named, with bytes that did not verify."""

    def first_half(self) -> bytes | None:
        """Return the first half of the bytes, or None when the source is gone or has another generation."""
        segment = self._machine.find(self._ref.node, self._ref.incarnation)
        if segment is None or not readable(self._machine, segment):
            return None
        if not generation_stands(segment, self._ref):
            return None
        self._machine.world.watcher.reading(self._machine, self._running, segment, self._ref)
        self._segment = segment
        part = segment.part(self._ref.slot, self._layer)
        self._half = bytes(part[: len(part) // 2])
        return self._half

    def second_half(self) -> bytes | None:
        """Return the whole part if it verified: every later use of the bytes depends on this."""
        segment = self._segment
        if segment is None or self._half is None or not readable(self._machine, segment, attached=True):
            return None
        view = segment.part(self._ref.slot, self._layer)
        part = self._half + bytes(view[len(self._half) :])
        world = self._machine.world
        if world.random.random() < world.copy_fail / self._machine.layout.layers:
            return None  # as when a connection breaks, or it comes too late
        if world.random.random() < world.copy_tear / self._machine.layout.layers:
            torn = bytearray(part)
            tear(world.random, memoryview(torn))
            part = bytes(torn)
        world.watcher.reading(self._machine, self._running, segment, self._ref)
        if not generation_stands(segment, self._ref):
            return None
        if not part_stands(segment, self._ref, self._layer, part):
            self.corrupt = True
            return None
        world.watcher.verified(segment, self._ref, self._layer, part)
        return part


class SequenceRead:
    """One layer's part of a complete block of a running sequence: private memory, which no other process writes."""

    __slots__ = ("_layer", "_machine", "_source", "corrupt")

    def __init__(self, machine: Machine, source: SequenceBlock, layer: int) -> None:
        self._machine = machine
        self._source = source
        self._layer = layer
        self.corrupt = False

    def first_half(self) -> bytes | None:
        part = self.second_half()
        return part[: len(part) // 2]

    def second_half(self) -> bytes:
        machine = self._machine
        start = self._source.block * machine.layout.block_tokens
        sequence = machine.sequences[self._source.sequence]
        return sequence.read_part(self._layer, start, start + machine.layout.block_tokens, machine.layout.block_tokens)


class DiskRead:
    """A whole block of the process's own disk, verified as one when its last byte is in."""

    __slots__ = ("_block", "_disk", "_half", "_payload", "corrupt", "part_bytes")

    def __init__(self, machine: Machine, block: DiskBlock) -> None:
        assert machine.disk is not None
        self._disk = machine.disk
        self._block = block
        self.part_bytes = machine.layout.part_bytes
        self._half = self._disk.read(block)[: machine.layout.block_bytes // 2]
        self._payload: bytes | None = None
        self.corrupt = False

    def payload(self) -> bytes | None:
        """Return the bytes if they verified. A copy that did not loses its row."""
        if self._disk.fault == "failing" or self.corrupt:
            return None
        if self._payload is None:
            whole = self._half + self._disk.read(self._block)[len(self._half) :]
            if not self._disk.stands(self._block, whole):
                self.corrupt = True
                self._disk.rows.pop(self._block.slot, None)
                return None
            self._payload = whole
        return self._payload


class DiskPart:
    """One layer's part of a block on disk."""

    __slots__ = ("_layer", "_read")

    def __init__(self, read: DiskRead, layer: int) -> None:
        self._read = read
        self._layer = layer

    @property
    def corrupt(self) -> bool:
        return self._read.corrupt

    def first_half(self) -> bytes | None:
        return None  # nothing reaches the target before it is verified

    def second_half(self) -> bytes | None:
        payload = self._read.payload()
        size = self._read.part_bytes
        return None if payload is None else payload[self._layer * size : (self._layer + 1) * size]


def readable(machine: Machine, segment: Segment, *, attached: bool = False) -> bool:
    """Return whether `machine` can read `segment`: a file on its own host, or through its running owner."""
    if segment.host == machine.host:
        return segment.linked or attached
    return machine.world.reach(machine.name, segment.node, segment.incarnation) == "yes"
