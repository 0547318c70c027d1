"""The format of a value on disk: a header that names it, and its bytes. PURE.

    small, below LARGE_BYTES   | header, key | bytes |                    at a multiple of ALIGN_BYTES
    large                      | header, key, up to a page | bytes |      at a page, as its cell in memory is: direct I/O

A header can be computed from the row that leads to it, so a reader compares what it finds with what it expects.
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

from mooncake_zmq.kv.layout import PAGE_BYTES

MAGIC = b"MOONVAL\n"
VERSION = 1
"""The version of headers and of the index's rows."""
ALIGN_BYTES = 64
LARGE_BYTES = 64 << 10
_FIELDS = struct.Struct("<8sIIQQQB7x")
_CHECKSUM = struct.Struct("<Q")
FIXED_BYTES = _FIELDS.size + _CHECKSUM.size


class ObjectRecord(NamedTuple):
    """One value on disk. `sequence` names it: no other value ever has the same, and it keeps it when it is moved."""

    sequence: int
    segment: int
    offset: int
    size: int
    checksum: int
    pin: int


def header_bytes(key: bytes, size: int) -> int:
    """From a record's begin to its value's."""
    return PAGE_BYTES if size >= LARGE_BYTES else FIXED_BYTES + len(key)


def record_bytes(key: bytes, size: int) -> int:
    """The size of the whole record, pages being filled up where it is large."""
    return header_bytes(key, size) + (round_up(size, PAGE_BYTES) if size >= LARGE_BYTES else size)


def taken_bytes(key: bytes, size: int) -> int:
    """Bytes of disk that a record takes: all of it, and the padding up to where the next one may begin in the same write."""
    return round_up(record_bytes(key, size), ALIGN_BYTES)


def moved_bytes(key: bytes, offset: int, size: int) -> int:
    """Bytes that a record at this offset takes elsewhere: the pages that it is in."""
    return round_up(offset % PAGE_BYTES + record_bytes(key, size), PAGE_BYTES)


def place(values: Iterable[tuple[bytes, int]], start: int) -> tuple[list[int], int]:
    """The offsets of records of these (key, size), one after another from a page boundary on; and the next page boundary."""
    offsets = []
    for key, size in values:
        start = round_up(start, PAGE_BYTES if size >= LARGE_BYTES else ALIGN_BYTES)
        offsets.append(start)
        start += record_bytes(key, size)
    return offsets, round_up(start, PAGE_BYTES)


def header(key: bytes, record: ObjectRecord) -> bytes:
    """The bytes before the value's, without the padding of a page."""
    fields = _FIELDS.pack(MAGIC, VERSION, len(key), record.sequence, record.size, record.checksum, record.pin)
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields + key)) + key


def why_missed(found: bytes, expected: bytes) -> str:
    """`found`, as long as `expected`, is no header or another value's; empty if it is the one expected."""
    if found == expected:
        return ""
    _, _, key_bytes, *_ = _FIELDS.unpack_from(found)
    (checksum,) = _CHECKSUM.unpack_from(found, _FIELDS.size)
    other = found[: _FIELDS.size] + found[FIXED_BYTES : FIXED_BYTES + key_bytes]
    is_whole = FIXED_BYTES + key_bytes <= len(found) and checksum == xxhash.xxh3_64_intdigest(other)
    return "stale" if is_whole and found.startswith(MAGIC) else "corrupt"


def round_up(count: int, step: int) -> int:
    return -(-count // step) * step
