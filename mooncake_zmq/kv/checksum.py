"""Checksums of a block's copy: one per layer part, and one over those, so a single pass serves both granularities.

A layer can be verified alone while it streams; the 8-byte block checksum that travels in messages covers all of them.
"""

import struct
from collections.abc import Sequence

import xxhash

Buffer = bytes | bytearray | memoryview


def part_checksum(part: Buffer) -> int:
    """xxh3-64 of one layer's part."""
    return xxhash.xxh3_64_intdigest(part)


def part_checksums(payload: Buffer, part_bytes: int) -> list[int]:
    """The checksum of each part of a block's bytes, in order."""
    return [part_checksum(payload[start : start + part_bytes]) for start in range(0, len(payload), part_bytes)]


def block_checksum(parts: Sequence[int]) -> int:
    """xxh3-64 over the little-endian part checksums of all layers, in order."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(parts)}Q", *parts))


def block_checksums(parts: Sequence[int], layers: int) -> list[int]:
    """The block checksums of several blocks, whose part checksums follow one another."""
    packed, size = struct.pack(f"<{len(parts)}Q", *parts), 8 * layers
    return [xxhash.xxh3_64_intdigest(packed[start : start + size]) for start in range(0, len(packed), size)]
