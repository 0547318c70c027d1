"""A store's simulated SSD: outlives its processes, loses or tears what was not synced, and may flip, fill up or fail.

Records lie in their segments as on the real one, header before bytes; rows that find them change all together or not at all.
"""

from dataclasses import dataclass, field
from random import Random

from mooncake_zmq.core.work import (
    BAD,
    GOOD,
    UNREAD,
    CommitValues,
    CreateSegment,
    Done,
    ForgetValues,
    MoveValues,
    ReadValues,
    RemoveSegments,
    StoreResult,
    StoreWork,
    ValuesRead,
    ValuesWritten,
    WorkFailed,
    WriteValues,
    WrittenValue,
)
from mooncake_zmq.kv.object_record import ObjectRecord, header, header_bytes, record_bytes, why_missed
from mooncake_zmq.simulation.disk import SimDisk
from mooncake_zmq.store.memory import checksum_of

WORK_S = 2e-3
BYTES_PER_S = 2e7
HELD_UP, HELD_UP_SHARE = 30.0, 0.3
"""The factor by which a read may be slower, and the share of such reads; other works go on meanwhile."""


@dataclass(slots=True)
class StoreDisk:
    """A simulated SSD of values. `like`: the disk of the blocks of the same process, whose faults it shares."""

    like: SimDisk
    random: Random
    segments: dict[int, bytearray] = field(default_factory=dict)
    rows: dict[int, tuple[str, ObjectRecord]] = field(default_factory=dict)
    """The index, by sequence."""
    unsynced: list[tuple[int, int, int]] = field(default_factory=list)
    """The (segment, offset, bytes) of writes that are not synced."""

    def seconds(self, work: StoreWork) -> float:
        """Return the time of a work."""
        match work:
            case ReadValues(values) | WriteValues(values):
                size = sum(value.record.size for value in values)
            case MoveValues(moved):
                size = 2 * sum(record.size for _, record, _ in moved)
            case _:
                size = 0
        held_up = isinstance(work, ReadValues) and self.random.random() < HELD_UP_SHARE
        stretched = HELD_UP if held_up else 1.0
        return (WORK_S + size / BYTES_PER_S) * self.like.slowness * stretched * self.random.uniform(0.5, 1.5)

    def lose_power(self) -> None:
        """Keep, lose or tear each write that was not synced."""
        for segment, offset, size in self.unsynced:
            content = self.segments.get(segment)
            kept = int(size * self.random.choice((0.0, self.random.random(), 1.0)))
            if content is not None:
                content[offset + kept : offset + size] = bytes(size - kept)
        self.unsynced.clear()

    def recovered(self) -> tuple[dict[int, int], list[tuple[str, ObjectRecord]]]:
        """Return the lengths of the segments and the newest row of each key; segments without a row are removed."""
        newest = {key: sequence for sequence, (key, _) in sorted(self.rows.items())}
        self.rows = {sequence: self.rows[sequence] for sequence in sorted(newest.values())}
        self.rows = {sequence: row for sequence, row in self.rows.items() if row[1].segment in self.segments}
        used = {record.segment for _, record in self.rows.values()}
        for segment in [segment for segment in self.segments if segment not in used]:
            del self.segments[segment]
        return {segment: len(self.segments[segment]) for segment in sorted(self.segments)}, list(self.rows.values())

    def flip(self, count: int) -> None:
        """Flip one bit of each of some values."""
        standing = [sequence for sequence, (_, record) in self.rows.items() if record.segment in self.segments]
        for sequence in self.random.sample(standing, min(count, len(standing))):
            key, record = self.rows[sequence]
            at = record.offset + header_bytes(key.encode(), record.size) + self.random.randrange(record.size)
            self.segments[record.segment][at] ^= 1 << self.random.randrange(8)

    # --- works

    def half(self, work: StoreWork, memory: bytearray) -> None:
        """Do the first half of a work."""
        if isinstance(work, WriteValues) and not self.like.fault:
            for value in work.values:
                self._write(value, memory, checksum=0, half=True)

    def finish(self, work: StoreWork, memory: bytearray, checksums: tuple[int, ...]) -> StoreResult:
        """Do the second half of a work; return its result. `checksums`: those made when it began, if it writes."""
        failed = self._fault(work)
        if failed is not None:
            return failed
        match work:
            case ReadValues(values):
                return ValuesRead(tuple(self._read(value.key, value.record, value.offset, memory) for value in values))
            case WriteValues(values):
                for value, checksum in zip(values, checksums, strict=True):
                    self._write(value, memory, checksum=checksum, half=False)
                return ValuesWritten(checksums)
            case CommitValues(rows):
                self.unsynced.clear()
                self.rows.update({record.sequence: (key, record) for key, record in rows})
            case MoveValues(moved, gone):
                for key, record, to in moved:
                    size = record_bytes(key.encode(), record.size)
                    copied = self.segments[record.segment][record.offset : record.offset + size]
                    self.segments[to.segment][to.offset : to.offset + size] = copied
                    self.rows[to.sequence] = key, to
                self._forget(gone)
            case ForgetValues(sequences):
                self._forget(sequences)
            case CreateSegment(segment, length):
                self.segments[segment] = bytearray(length)
            case RemoveSegments(segments):
                for segment in segments:
                    self.segments.pop(segment, None)
        return Done()

    def _fault(self, work: StoreWork) -> StoreResult | None:
        match self.like.fault, work:
            case "failing", ReadValues(values):
                return ValuesRead((UNREAD,) * len(values), "the disk fails")
            case "failing", _:
                return WorkFailed("the disk fails")
            case "full", ForgetValues() if self.random.random() < 0.5:
                return WorkFailed("no space, not even for the index", full=True)
            case "full", WriteValues() | CommitValues() | MoveValues() | CreateSegment():
                return WorkFailed("no space", full=True)
        return None

    def _write(self, value: WrittenValue, memory: bytearray, *, checksum: int, half: bool) -> None:
        record = value.record._replace(checksum=checksum)
        name = value.key.encode()
        begin = record.offset + header_bytes(name, record.size)
        stop = record.size // 2 if half else record.size
        content = self.segments[record.segment]
        content[begin : begin + stop] = memory[value.offset : value.offset + stop]
        if not half:
            head = header(name, record)
            content[record.offset : record.offset + len(head)] = head
        self.unsynced.append((record.segment, record.offset, record_bytes(name, record.size)))

    def _read(self, key: str, record: ObjectRecord, offset: int, memory: bytearray) -> str:
        content = self.segments.get(record.segment, bytearray())
        expected = header(key.encode(), record)
        begin = record.offset + header_bytes(key.encode(), record.size)
        value = bytes(content[begin : begin + record.size])
        memory[offset : offset + len(value)] = value
        found = bytes(content[record.offset : record.offset + len(expected)])
        return GOOD if value_stands(found, expected, value, record) else BAD

    def _forget(self, sequences: "tuple[int, ...] | list[int]") -> None:
        for sequence in sequences:
            self.rows.pop(sequence, None)


def value_stands(found: bytes, expected: bytes, value: bytes, record: ObjectRecord) -> bool:
    """Return whether this header and these bytes are those of the value."""
    whole = len(found) == len(expected) and len(value) == record.size
    return whole and not why_missed(found, expected) and checksum_of(value) == record.checksum
