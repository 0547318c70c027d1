"""A cache-node's simulated SSD: outlives its processes, tears what a crash interrupts, and may flip, fill up or fail.

As on the real one, a slot holds a header (key, checksum) beside the bytes, and an index row that may be older than both.
"""

from dataclasses import dataclass, field
from random import Random

from mooncake_zmq.core.work import DiskBlock
from mooncake_zmq.kv import reading
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.checksum import part_checksums
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.node.disk_tier import DiskContents


@dataclass(slots=True)
class SimDisk:
    """A simulated SSD. `fault`: "" while it works, "full", or "failing"; `slowness`: the factor by which a block takes
    longer."""

    layout: BlockLayout
    slots: int
    memory: bytearray = field(init=False)
    headers: dict[int, tuple[Key, int]] = field(default_factory=dict)
    rows: dict[int, DiskBlock] = field(default_factory=dict)
    """The index, the oldest row first."""
    fault: str = ""
    slowness: float = 1.0

    def __post_init__(self) -> None:
        self.memory = bytearray(self.slots * self.layout.block_bytes)

    def write(self, block: DiskBlock, payload: bytes, *, half: bool) -> None:
        """Write the first half of a block, without its header, or all of it. The old row stands until `index`."""
        size = self.layout.block_bytes
        stop = size // 2 if half else size
        self.memory[block.slot * size : block.slot * size + stop] = payload[:stop]
        if not half:
            self.headers[block.slot] = (block.key, block.checksum)

    def index(self, block: DiskBlock) -> None:
        """Write the slot's row, replacing its former one."""
        self.rows.pop(block.slot, None)
        self.rows[block.slot] = block

    def contents(self) -> DiskContents:
        """Return the blocks that an incarnation finds. A row may have outlived its slot's use: of two with one key the newer is
        true, as `transfer.disk` has it."""
        newest: dict[Key, DiskBlock] = {}
        for block in self.rows.values():
            newest.pop(block.key, None)
            newest[block.key] = block
        self.rows = {block.slot: block for block in newest.values()}
        return DiskContents(self.slots, tuple(newest.values()))

    def read(self, block: DiskBlock) -> bytes:
        """Return the slot's bytes, whatever they are."""
        size = self.layout.block_bytes
        return bytes(self.memory[block.slot * size : (block.slot + 1) * size])

    def stands(self, block: DiskBlock, payload: bytes) -> bool:
        """Return whether the slot has the bytes of that block, by header and checksum."""
        header = self.headers.get(block.slot, (b"", 0))
        parts = part_checksums(payload, self.layout.part_bytes)
        return reading.header_stands(header, (block.key, block.checksum)) and reading.payload_stands(parts, block.checksum)

    def flip(self, random: Random, blocks: int) -> None:
        """Flip one bit of each of some indexed blocks."""
        for slot in random.sample(list(self.rows), min(blocks, len(self.rows))):
            at = slot * self.layout.block_bytes + random.randrange(self.layout.block_bytes)
            self.memory[at] ^= 1 << random.randrange(8)
