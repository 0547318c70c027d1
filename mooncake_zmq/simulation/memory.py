"""The simulated memory of a process: slots of real, small byte strings with generations and checksums by part."""

from dataclasses import dataclass, field
from random import Random

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.kv import reading
from mooncake_zmq.kv.checksum import part_checksum
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.simulation.engine_store import EngineStore


@dataclass(slots=True)
class Segment:
    """The shared-memory file of one incarnation of a node: its slots."""

    node: str
    incarnation: int
    host: str
    layout: BlockLayout
    slots: int
    memory: bytearray = field(init=False)
    engine_store: EngineStore | None = None
    """The blocks that the store beside it holds for vLLMs, if it is a cache-node's."""
    generations: list[int] = field(init=False)
    parts: list[list[int]] = field(init=False)
    """The part checksums of each slot, set by the writer of the part."""
    flipped: set[int] = field(default_factory=set)
    """The slots whose bytes a fault has changed since they were reserved."""
    linked: bool = True
    """Whether processes can attach the file: false once the owner's next incarnation has removed it."""

    def __post_init__(self) -> None:
        self.memory = bytearray(self.slots * self.layout.block_bytes)
        self.generations = [0] * self.slots
        self.parts = [[0] * self.layout.layers for _ in range(self.slots)]

    def part(self, slot: int, layer: int) -> memoryview:
        """Return the bytes of one layer's part, writable."""
        start = slot * self.layout.block_bytes + layer * self.layout.part_bytes
        return memoryview(self.memory)[start : start + self.layout.part_bytes]

    def block(self, slot: int) -> bytes:
        """Return a copy of a slot's bytes."""
        start = slot * self.layout.block_bytes
        return bytes(self.memory[start : start + self.layout.block_bytes])


def generation_stands(segment: Segment, ref: SlotRef) -> bool:
    """Return whether the slot still holds the copy that `ref` names."""
    return reading.generation_stands(segment.generations[ref.slot], ref.generation, committed=ref.checksum != 0)


def part_stands(segment: Segment, ref: SlotRef, layer: int, part: bytes) -> bool:
    """Return whether the bytes read are the ones that were stored."""
    row = segment.parts[ref.slot]
    return reading.part_stands(part_checksum(part), row[layer]) and reading.row_stands(row, ref.checksum)


def tear(random: Random, part: memoryview) -> None:
    """Change one bit of a part."""
    part[random.randrange(len(part))] ^= 1 << random.randrange(8)
