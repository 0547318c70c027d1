"""The SSD tier of one host's store: which value stands where in a log of segments, and which segment goes next. PURE.

Values are appended, never overwritten. Where there is no room for another segment the oldest goes as a whole; what was read
of it since it was written, and memory does not have, is moved to the new one first, within limits, and before that what is
pinned hard or belongs to tenants with a quota: of these the segment that goes has no more than can be moved. So a log needs
neither a list of free places nor an order of use, and the disk sees long sequential writes only.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mooncake_zmq.kv.layout import PAGE_BYTES
from mooncake_zmq.kv.object_record import ObjectRecord, moved_bytes, place, round_up, taken_bytes
from mooncake_zmq.pool.rules.holdings import Holdings
from mooncake_zmq.pool.rules.tenants import Tenants
from mooncake_zmq.store.codes import Pin

SEGMENT_BYTES = 256 << 20
MIN_SEGMENTS = 8
"""Smaller tiers get smaller segments: what goes at a time is an eighth at most."""
_NOWHERE = 1 << 62
_HARD = int(Pin.HARD)
MOVED_SHARE = 0.5
"""The largest part of a new segment, and of all rows, that what is moved there takes; of the rows half as much more for what
is not promised."""
ROWS_AT_ONCE = 4096
"""Rows of a segment that goes, moved or dropped in one step: others wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSsdSettings:
    """The store's second tier: files on this host's SSD, found again after a restart."""

    directory: str = ""
    """Where the files lie, each node's in a directory of its name below this one. Empty: no SSD tier."""
    bytes: int = 16 << 30
    """Room for values on the SSD; at least eight of the largest."""
    ahead: float = 0.25
    """The coldest share of the memory whose values are on SSD as well, so that making room there loses nothing.
    1: everything is written as soon as the disk is idle, and survives a crash; else what memory alone held is lost with it."""
    threads: int = 4
    """Values read from disk at a time. One further thread writes."""
    max_objects: int = 4 << 20
    """About 50 bytes of process memory each once in use, besides key and dict. With more, the oldest go."""

    def __post_init__(self) -> None:
        if self.bytes < 1 << 20:
            raise ValueError("objects.ssd.bytes must be at least 1048576")
        if not 0 <= self.ahead <= 1:
            raise ValueError("objects.ssd.ahead must be between 0 and 1")
        if not 1 <= self.threads <= 256:
            raise ValueError("objects.ssd.threads must be between 1 and 256")
        if self.max_objects < 1:
            raise ValueError("objects.ssd.max_objects must be at least 1")

    @property
    def segment_bytes(self) -> int:
        return min(SEGMENT_BYTES, self.bytes // MIN_SEGMENTS) // PAGE_BYTES * PAGE_BYTES

    @property
    def kept_bytes(self) -> int:
        """How many bytes of what memory has are written as well, at most: with more, one value's copy would make another's go,
        which would be due again. No copy is promised to stay by this."""
        return (self.bytes - 2 * self.segment_bytes) // 2

    def promised_bytes(self, largest_bytes: int) -> int:
        """Disk quotas of so many bytes together are promises, where values take up to `largest_bytes`: of all segments but the
        newest, the one with the least of them has no more than can be moved on."""
        room = min(int(self.segment_bytes * MOVED_SHARE), self.segment_bytes - round_up(largest_bytes, PAGE_BYTES) - PAGE_BYTES)
        return (self.bytes // self.segment_bytes - 1) * max(0, room)


class Place(NamedTuple):
    """Where records of one write go: a segment, their offsets in it, and where the write ends."""

    segment: int
    offsets: list[int]
    end: int


@dataclass(slots=True)
class _Segment:
    length: int
    rows: "array[int]"
    """Rows that were put here, the oldest first; some of them may have gone, or serve another value by now."""
    live: int = 0
    promised_bytes: int = 0
    """Bytes of this segment's values that are pinned hard or whose tenants have a quota: they would be moved elsewhere."""


class ObjectLog:
    """`by_key` has every value of which a copy stands on disk and could be found after a restart."""

    def __init__(self, settings: ObjectSsdSettings) -> None:
        self.settings = settings
        self.by_key: dict[str, int] = {}
        self.readable: dict[str, int] = self.by_key
        """Values that can be served: `by_key`, or nothing once the disk fails. Others may look keys up in both."""
        self.writing: frozenset[str] = frozenset()
        """Keys whose values are on their way to disk."""
        self.bytes = 0
        """Bytes of all values."""
        self._sequence = array("Q")
        self._segment = array("Q")
        self._offset = array("Q")
        self._size = array("Q")
        self._checksum = array("Q")
        self._pin = array("B")
        self._used = bytearray()
        self._key: list[str | None] = []
        self._free = array("I")
        self._segments: dict[int, _Segment] = {}
        """In the order in which they were opened."""
        self._end = 0
        """Where the next write begins in the newest segment."""
        self._next_sequence = 1
        self._next_segment = 1
        self.holdings: Holdings | None = None
        """Values by tenant, if there are any, in the order of their use."""

    # --- what stands where

    def find(self, key: str) -> ObjectRecord | None:
        """Where the value stands, as far as it can be read."""
        row = self.readable.get(key)
        return None if row is None else self._record(row)

    def record(self, key: str) -> ObjectRecord | None:
        """Where a copy stands that would be found after a restart."""
        row = self.by_key.get(key)
        return None if row is None else self._record(row)

    def size_of(self, key: str) -> int | None:
        row = self.readable.get(key)
        return None if row is None else self._size[row]

    def use(self, key: str) -> None:
        """It was read, here or in memory: its copy, if there is one, is worth to be kept when its segment goes."""
        row = self.by_key.get(key)
        if row is not None:
            self._used[row] = True
            if self.holdings is not None:
                self.holdings.remove(row)
                self.holdings.append(row)

    def coldest(self, tenant: int) -> Iterator[str]:
        """A tenant's keys, those used longest ago first; nothing may change meanwhile."""
        rows = self.holdings.coldest(tenant) if self.holdings is not None else iter(())
        return (key for row in rows if (key := self._key[row]) is not None)

    def keys(self, cursor: int, limit: int) -> tuple[list[str], int]:
        """Up to `limit` rows' keys from row `cursor` on, and where to go on; 0 when that was all."""
        stop = min(cursor + limit, len(self._key))
        page = [key for key in self._key[cursor:stop] if key is not None] if self.readable is self.by_key else []
        return page, 0 if stop >= len(self._key) else stop

    # --- writing

    @property
    def next_sequence(self) -> int:
        """The sequence number of one more record; not given twice."""
        self._next_sequence += 1
        return self._next_sequence - 1

    def place(self, values: Iterable[tuple[bytes, int]]) -> Place | None:
        """Where to write values of these (key, size); None where they need a new segment."""
        newest = next(reversed(self._segments), None)
        if newest is None or (len(self.by_key) >= self.settings.max_objects and self._segments[newest].live):
            return None
        offsets, end = place(values, self._end)
        return None if end > self._segments[newest].length else Place(newest, offsets, end)

    def place_pages(self, size: int) -> Place | None:
        """Room for so many bytes at a page."""
        newest = next(reversed(self._segments), None)
        end = round_up(self._end + size, PAGE_BYTES)
        return None if newest is None or end > self._segments[newest].length else Place(newest, [self._end], end)

    def take(self, place: Place) -> None:
        """Something is written there, whether or not it will be found."""
        self._end = place.end

    def new_segment(self) -> int:
        """The number for one more."""
        return self._next_segment

    def open(self, segment: int, length: int) -> None:
        """From now on writes go to this segment."""
        assert segment >= self._next_segment, "numbers only grow"
        self._segments[segment] = _Segment(length, array("I"))
        self._next_segment = segment + 1
        self._end = 0

    def add(self, key: str, record: ObjectRecord) -> None:
        """This value stands there, durably."""
        assert key not in self.by_key, "a value has one copy on disk"
        row = self._free.pop() if self._free else self._add_row()
        self._sequence[row], self._size[row], self._checksum[row] = record.sequence, record.size, record.checksum
        self._pin[row], self._used[row], self._key[row] = record.pin, False, key
        self.by_key[key] = row
        self.bytes += record.size
        if self.holdings is not None:
            self._hold(self.holdings, row, key)
        self._stand(row, record.segment, record.offset)

    def moved(self, key: str, sequence: int, segment: int, offset: int) -> None:
        """The value stands elsewhere, durably; unless it went meanwhile."""
        row = self.by_key.get(key)
        if row is not None and self._sequence[row] == sequence:
            self._leave(row)
            self._used[row] = False
            self._stand(row, segment, offset)

    def remove(self, key: str) -> None:
        """Its row went."""
        row = self.by_key.pop(key, None)
        if row is not None:
            self._leave(row)
            self.bytes -= self._size[row]
            if self.holdings is not None:
                self.holdings.remove(row)
                self.holdings.give(row, self.charge(key, self._size[row]))
            self._key[row] = None
            self._free.append(row)

    # --- making room

    def victim(self, room_bytes: int = 0) -> int | None:
        """The segment that is to go now, so that another one fits in beside the newest; None if none has to. One in which
        nothing stands, else the oldest of which what is promised finds room elsewhere, else that in which the least is."""
        if len(self._segments) < 2:
            return None
        old = list(self._segments)[:-1]
        total = sum(segment.length for segment in self._segments.values())
        if total + self.settings.segment_bytes <= self.settings.bytes and len(self.by_key) < self.settings.max_objects:
            return None
        if empty := [number for number in old if self._segments[number].live == 0]:
            return empty[0]
        fitting = (number for number in old if self._segments[number].promised_bytes <= room_bytes)
        return next(fitting, min(old, key=lambda number: self._segments[number].promised_bytes))

    @property
    def left_bytes(self) -> int:
        """Bytes left in the newest segment."""
        newest = next(reversed(self._segments.values()), None)
        return max(0, newest.length - self._end) if newest is not None else 0

    def promised_bytes(self, segment: int) -> int:
        """Bytes of the segment that are moved on when it is removed."""
        return self._segments[segment].promised_bytes

    def is_promised(self, key: str) -> bool:
        """Return whether the value, which stands here, is pinned hard or one of a tenant with a quota."""
        return self._is_promised(self.by_key[key])

    def standing(self, segment: int) -> Iterator[list[tuple[str, ObjectRecord, bool]]]:
        """(key, record, read since it was written) of what stands there, some at a time: between two steps rows may go."""
        rows = self._segments[segment].rows
        seen: set[int] = set()
        for start in range(0, len(rows), ROWS_AT_ONCE):
            # A row is there once for each value that it served.
            some = [row for row in dict.fromkeys(rows[start : start + ROWS_AT_ONCE]) if row not in seen]
            some = [row for row in some if self._segment[row] == segment]
            seen.update(some)
            standing = [(key, self._record(row), bool(self._used[row])) for row in some if (key := self._key[row]) is not None]
            yield standing

    def close_segment(self, segment: int) -> None:
        """Nothing stands there any more."""
        assert self._segments[segment].live == 0
        if segment == next(reversed(self._segments)):
            self._end = _NOWHERE  # what is the newest then is full for all we know
        del self._segments[segment]

    def fail(self) -> None:
        """Nothing is read any more. What stands there stays known, as it may have to go for good."""
        self.readable = {}

    # --- tenants

    def divide(self, tenants: Tenants) -> None:
        """From now on record each value's tenant."""
        quotas = [each.ssd_bytes for each in tenants.known]
        self.holdings = Holdings(tenants, quotas, rows=len(self._key))
        for segment in self._segments.values():
            segment.promised_bytes = 0
        for key, row in self.by_key.items():
            self._hold(self.holdings, row, key)
            self._segments[self._segment[row]].promised_bytes += self._promised_bytes(row)

    def charge(self, key: str, size: int) -> int:
        """Bytes of its tenant's quota that a value takes: its record, and its share of the rows at least, as those run out
        too."""
        return max(taken_bytes(key.encode(), size), self.settings.bytes // self.settings.max_objects)

    def _hold(self, holdings: Holdings, row: int, key: str) -> None:
        holdings.take(row, holdings.tenants.of(key), self.charge(key, self._size[row]))
        holdings.append(row)

    # --- a restart

    def restore(self, lengths: dict[int, int], rows: Iterable[tuple[str, ObjectRecord]]) -> None:
        """Restore the state of an earlier incarnation: files of these lengths, in the order of their numbers, and the records
        in them."""
        tail = 0
        for segment, length in lengths.items():
            self.open(segment, length)
        newest = next(reversed(self._segments), None)
        for key, record in rows:
            self.add(key, record)
            self._next_sequence = max(self._next_sequence, record.sequence + 1)
            if record.segment == newest:
                tail = max(tail, place([(key.encode(), record.size)], record.offset)[1])
        self._end = tail

    def gauges(self) -> dict[str, float]:
        return {
            "ssd_capacity_bytes": self.settings.bytes,
            "ssd_readable": self.readable is self.by_key,
            "ssd_objects": len(self.by_key),
            "ssd_object_bytes": self.bytes,
            "ssd_segments": len(self._segments),
        }

    def check(self) -> None:
        """Assert the invariants. Slow: for tests."""
        live, promised = dict.fromkeys(self._segments, 0), dict.fromkeys(self._segments, 0)
        ranges: dict[int, list[tuple[int, int]]] = {segment: [] for segment in self._segments}
        for key, row in self.by_key.items():
            assert self._key[row] == key
            segment = self._segment[row]
            live[segment] += 1
            promised[segment] += self._promised_bytes(row)
            ranges[segment].append((self._offset[row], self._offset[row] + self._size[row]))
            assert row in self._segments[segment].rows
        assert live == {number: segment.live for number, segment in self._segments.items()}
        assert promised == {number: segment.promised_bytes for number, segment in self._segments.items()}
        for taken in ranges.values():
            taken.sort()
            assert all(before[1] <= after[0] for before, after in zip(taken, taken[1:], strict=False)), "no two overlap"
        assert self.bytes == sum(self._size[row] for row in self.by_key.values())
        assert len(self.by_key) + len(self._free) == len(self._key)
        sequences = [self._sequence[row] for row in self.by_key.values()]
        assert len(set(sequences)) == len(sequences)
        if self.holdings is not None:
            sums = [0] * len(self.holdings.bytes)
            for key, row in self.by_key.items():
                assert self.holdings.of[row] == self.holdings.tenants.of(key)
                sums[self.holdings.of[row]] += self.charge(key, self._size[row])
            assert sums == self.holdings.bytes
            held = [row for tenant in range(len(sums)) for row in self.holdings.coldest(tenant)]
            assert sorted(held) == sorted(self.by_key.values())

    # --- inside

    def _record(self, row: int) -> ObjectRecord:
        where = self._sequence[row], self._segment[row], self._offset[row]
        return ObjectRecord(*where, self._size[row], self._checksum[row], self._pin[row])

    def _stand(self, row: int, segment: int, offset: int) -> None:
        self._segment[row], self._offset[row] = segment, offset
        self._segments[segment].rows.append(row)
        self._segments[segment].live += 1
        self._segments[segment].promised_bytes += self._promised_bytes(row)

    def _leave(self, row: int) -> None:
        """It stands no more where it stood."""
        segment = self._segments[self._segment[row]]
        segment.live -= 1
        segment.promised_bytes -= self._promised_bytes(row)

    def _is_promised(self, row: int) -> bool:
        has_quota = self.holdings is not None and self.holdings.quotas[self.holdings.of[row]] > 0
        return has_quota or bool(self._pin[row] & _HARD)

    def _promised_bytes(self, row: int) -> int:
        key = self._key[row]
        return moved_bytes(key.encode(), self._offset[row], self._size[row]) if key and self._is_promised(row) else 0

    def _add_row(self) -> int:
        for column in (self._sequence, self._segment, self._offset, self._size, self._checksum, self._pin, self._used):
            column.append(0)
        self._key.append(None)
        if self.holdings is not None:
            self.holdings.add_row()
        return len(self._key) - 1
