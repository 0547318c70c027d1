"""Encryption and authentication of a stream's bytes in records: AES-256-GCM, one key for each direction of each stream.

    record: length of the sealed bytes, u32 little-endian | that many bytes, encrypted | tag, 16 bytes

A record's nonce is its number, from 0 on, and its length is authenticated with it: one that is left out, repeated, moved, cut
or changed does not open, nor does any later one. Borders of records and of messages are independent.

Sketch: 13.9 GB/s on one core of a Xeon with wide AES instructions, in and out alike, so 19 us for the longest record, for which
the interpreter's lock is held; and a record that long is still in the cache when its bytes are hashed.
"""

import struct
from collections.abc import Iterator, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

RECORD_BYTES = 256 << 10
"""Longest record; also the bytes that are received and hashed at a time on a stream that is not sealed."""
TAG_BYTES = 16
MAX_RECORDS = 1 << 24
"""Records under one key: 4 TiB, far below the limits of AES-GCM. The stream then ends, and the next one has keys of its own."""
GATHERED_BELOW_BYTES = 64 << 10
"""Size below which views are copied together into one record; larger ones are sealed in place."""
_LENGTH = struct.Struct("<I")
_NONCE = struct.Struct(">4xQ")
_FIRST_ROOM_BYTES = 64 << 10


class Broken(Exception):
    """A record that does not open, or one too many: nothing more of the stream is valid."""


class Sealer:
    """Seals the bytes that leave on one stream."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._count = 0
        self._room = memoryview(bytearray(_record_bytes(_FIRST_ROOM_BYTES)))

    def records(self, views: Sequence[memoryview]) -> Iterator[memoryview]:
        """Yield records of the bytes of `views`, one view after the other; each record is valid until the next one is made."""
        gathered: list[memoryview] = []
        gathered_bytes = 0
        for view in views:
            if len(view) < GATHERED_BELOW_BYTES:
                gathered.append(view)
                gathered_bytes += len(view)
                if gathered_bytes < GATHERED_BELOW_BYTES:
                    continue
            if gathered_bytes:
                yield self._sealed(gathered[0] if len(gathered) == 1 else memoryview(b"".join(gathered)))
                gathered, gathered_bytes = [], 0
            if len(view) >= GATHERED_BELOW_BYTES:
                for start in range(0, len(view), RECORD_BYTES):
                    yield self._sealed(view[start : start + RECORD_BYTES])
        if gathered_bytes:
            yield self._sealed(gathered[0] if len(gathered) == 1 else memoryview(b"".join(gathered)))

    def _sealed(self, view: memoryview) -> memoryview:
        size = _record_bytes(len(view))
        if size > len(self._room):
            self._room = memoryview(bytearray(_record_bytes(RECORD_BYTES)))
        record = self._room[:size]
        _LENGTH.pack_into(record, 0, len(view))
        self._aead.encrypt_into(_nonce(self._count), view, record[: _LENGTH.size], record[_LENGTH.size :])
        self._count += 1
        return record


class Opener:
    """Opens the records of one stream: the caller receives into `wanted` and gets the plain bytes from `take`."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._count = 0
        self._room = memoryview(bytearray(_record_bytes(_FIRST_ROOM_BYTES)))
        self._came = 0
        self._size = 0
        """Size of the incoming record, once its length has arrived."""
        self._opened = memoryview(b"")
        """Opened bytes that were not taken yet."""

    def wanted(self) -> memoryview:
        """Return the room for the missing bytes of the incoming record. Not to be called while `take` returns any bytes."""
        return self._room[self._came : self._size or _LENGTH.size]

    def came(self, size_bytes: int) -> None:
        """Note that so many bytes were received in `wanted`. Raises Broken for a length that no record has."""
        self._came += size_bytes
        if self._size or self._came < _LENGTH.size:
            return
        (length,) = _LENGTH.unpack_from(self._room)
        if not 0 < length <= RECORD_BYTES:
            raise Broken(f"a record of {length} bytes")
        self._size = _record_bytes(length)
        if self._size > len(self._room):
            room = memoryview(bytearray(_record_bytes(RECORD_BYTES)))
            room[: _LENGTH.size] = self._room[: _LENGTH.size]
            self._room = room

    def take(self, view: memoryview) -> int:
        """Fill the beginning of `view`, which is not empty; returns how many bytes, 0: more must be received. Raises Broken."""
        if not self._opened:
            if not self._size or self._came < self._size:
                return 0
            length = self._size - _LENGTH.size - TAG_BYTES
            if length <= len(view):
                self._open(view[:length])
                return length
            opened = memoryview(bytearray(length))
            self._open(opened)
            self._opened = opened
        count = min(len(view), len(self._opened))
        view[:count] = self._opened[:count]
        self._opened = self._opened[count:]
        return count

    def _open(self, into: memoryview) -> None:
        """Open the record straight into its target: if that fails, the target's content is not used."""
        record = self._room[: self._size]
        try:
            self._aead.decrypt_into(_nonce(self._count), record[_LENGTH.size :], record[: _LENGTH.size], into)
        except InvalidTag:
            raise Broken("a record that does not open") from None
        self._count += 1
        self._came = self._size = 0


def _nonce(count: int) -> bytes:
    if count >= MAX_RECORDS:
        raise Broken("as many records as a key is for")
    return _NONCE.pack(count)


def _record_bytes(length: int) -> int:
    return _LENGTH.size + length + TAG_BYTES
