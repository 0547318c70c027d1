"""Flips bytes of stored blocks: in files on SSD, and in committed slots of shared memory."""

import os
from pathlib import Path
from random import Random

from mooncake_zmq.engine.toy import TOY_SPEC
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.transfer.segment_file import SharedMemoryError
from mooncake_zmq.transfer.shared_memory import Segment


def flip_files(directory: Path, count: int, random: Random) -> int:
    """Change `count` bytes in the files with blocks below `directory`; return how many there were to change."""
    files = [path for path in sorted(directory.glob("**/segment-*")) if path.stat().st_size]
    for _ in range(count if files else 0):
        path = random.choice(files)
        fd = os.open(path, os.O_RDWR)
        try:
            offset = random.randrange(os.fstat(fd).st_size)
            os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 1 << random.randrange(8)]), offset)
        finally:
            os.close(fd)
    return count if files else 0


def flip_blocks(path: Path, incarnation: int, layout: BlockLayout, count: int, random: Random) -> int:
    """Change one byte in each of `count` committed blocks of a segment, or in as many as there are; return in how many."""
    try:
        segment = Segment.attach(path, layout, incarnation, writable=True)
    except SharedMemoryError:  # its owner has just ended
        return 0
    slots = [slot for slot in range(segment.slots) if segment.generation(slot) and segment.generation(slot) % 2 == 0]
    flipped = 0
    for slot in random.sample(slots, min(count, len(slots))):
        generation = segment.generation(slot)
        at = random.randrange(layout.block_bytes)
        if generation % 2 == 0:  # its owner may just have begun to write it anew
            view = segment.layers_view(slot, 0, layout.layers)
            view[at] ^= 1 << random.randrange(8)
            flipped += 1
    segment.close()
    return flipped


def toy_layout(block_tokens: int) -> BlockLayout:
    """Return the toy engine's layout."""
    return BlockLayout(
        layers=TOY_SPEC.layers, kv_heads=TOY_SPEC.kv_heads, head_dim=TOY_SPEC.head_dim, block_tokens=block_tokens
    )
