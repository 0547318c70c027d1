"""The bytes of one cache-node's SSD tier: fixed slots in segment files, and the index that finds them after a restart.

    directory/tier.lock        held by the one process that uses the directory
              index.sqlite     see disk_index.py
              segment-00000    slots, each a header page and the bytes of a memory slot:
                               | header 4096 | slot_bytes | header 4096 | slot_bytes | ...

A header names its block: layout, key, checksum, sequence number, and a checksum of its own. A read is good only if header
and bytes are those of the block asked for. So nothing has to be undone after a crash: a slot half written, or a row whose
slot has another block by now, is a miss that is counted and whose row goes.

Sketch: reads and writes pass the page cache by (O_DIRECT) and go straight from and to the slots in shared memory. A thread
takes a share of a batch, 1 MiB or one block: it hashes and counts all of it together, and what lies side by side on disk
moves in one system call. For a block of 64 KiB alone, Python and its lock would cost as much as the I/O; of large ones
hashing remains, at 10 GB/s a core from memory beside a disk's 2 to 4 GB/s, when others want the cores as well.

Measured on two such cores, busy with other work, 4 at once, medians of their ratio to bare I/O of single blocks: of 64 KiB
1.0 writing and 1.2 reading; of 1.4 MiB 0.8 to 0.9 and 0.9; of 16 MiB 0.85 and 0.95. That is with neighbours. Under LRU, with
chains that share, grow and leave, blocks keep 4 or 5 together on disk (simulated): 4 of 64 KiB reach 0.9 and 1.0, scattered
ones 0.5 and 0.7. Evicting from the disk by place left no more of them together than LRU's own order. More threads than
requests at the disk, to hash meanwhile, gained nothing.

Threads, not io_uring. Direct I/O with fio, 4 to 16 at once, on a virtual disk of a 2-core EPYC, GB/s, threads against
io_uring: 64 KiB read 0.8-1.8 and 0.9-1.2, write 2.3-3.1 and 2.0-2.7; 1.4 MiB read 1.4-2.0 and 1.1-1.7, write 2.5-4.6 and
2.7-3.7; 16 MiB read 1.2-2.0 and 1.3-2.6, write 2.9-5.2 and 2.2-3.0. Nothing there pays for a dependency.
"""

import contextlib
import itertools
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import structlog
import xxhash

from mooncake_zmq.core.work import DiskBlock
from mooncake_zmq.kv import reading
from mooncake_zmq.kv.checksum import part_checksums
from mooncake_zmq.kv.layout import PAGE_BYTES, BlockLayout, div_ceil
from mooncake_zmq.pool.ssd.disk_directory import (
    DiskError,
    DiskFault,
    Outcomes,
    Progress,
    Reporter,
    allows_direct,
    opening,
    sync_directory,
    take,
)
from mooncake_zmq.pool.ssd.disk_index import VERSION, DiskIndex, IndexFault, IndexUnusable, set_aside
from mooncake_zmq.transfer.own_files import open_own
from mooncake_zmq.transfer.process_lock import ProcessLock

MAGIC = b"MOONDISK"
MAX_SEGMENTS = 256
"""Segment files of a new tier, all of which may be open at once; a large tier gets larger ones."""
PIECE_BYTES = 64 << 20
"""Files grow by so much at a time."""
SHARE_BYTES = 1 << 20
"""A thread takes up to so many bytes of a batch at a time, or one block if that is larger."""
_HEADER = struct.Struct("<8sI16s16sQQ")
_HEADER_CHECKSUM = struct.Struct("<Q")

log = structlog.get_logger()

Placed = tuple[DiskBlock, memoryview]
"""A block and its bytes in memory: slot_bytes at a page boundary."""


class Disk:
    """One open tier. `write`, `commit`, `read` and `forget` may be called from several threads, for different slots."""

    def __init__(
        self,
        layout: BlockLayout,
        slots: int,
        threads: int,
        lock: ProcessLock,
        index: DiskIndex,
        files: "_SegmentFiles",
        recovered: "_Recovered",
    ) -> None:
        self.slots = slots
        """Capacity in blocks."""
        self.threads = threads
        """Reads, and also writes, that should be under way at once."""
        self.direct = files.direct
        self.recovered = recovered.blocks
        """The blocks found at the start, the oldest first. Large: the caller that took it over may set it to ()."""
        self._outcomes = Outcomes(("written", "read", "stale", "corrupt", "short"), "disk_fault")
        self.counts = self._outcomes.counts
        """Blocks by what became of them. Of the misses, stale: the slot has another block; corrupt: torn or changed; short:
        beyond its file's end."""
        self.counts["dropped"] = recovered.dropped
        self._layout = layout
        self._lock = lock
        self._index = index
        self._files = files
        self._sequences = itertools.count(recovered.last_sequence + 1)
        self._fingerprint = layout.fingerprint.encode()
        self._stride = PAGE_BYTES + layout.slot_bytes
        self._share_blocks = max(1, SHARE_BYTES // self._stride)
        self._pages = _Pages(self._share_blocks)

    @classmethod
    def open(
        cls,
        directory: str | Path,
        layout: BlockLayout,
        capacity_bytes: int,
        *,
        threads: int = 4,
        segment_bytes: int = 1 << 30,
        progress: Progress | None = None,
    ) -> "Disk":
        """Take the directory and load its index. `capacity_bytes` covers headers and bytes, not the index.

        An index that is damaged or of another layout is set aside, and the tier starts empty. `segment_bytes` is for a new
        tier; one that exists keeps its own. `progress(done, total)` is called as rows are loaded. Raises `DiskError`.
        """
        directory = Path(directory)
        stride = PAGE_BYTES + layout.slot_bytes
        slots = capacity_bytes // stride
        if slots < 1:
            raise DiskError(f"{directory}: {capacity_bytes} bytes hold no block of {stride} bytes")
        segment_slots = max(segment_bytes // stride, div_ceil(slots, MAX_SEGMENTS), 1)
        lock = take(directory)
        try:
            index, recovered = _recover(directory, layout, slots, segment_slots, Reporter(progress))
            files = _SegmentFiles(directory, stride, slots, index.segment_slots, direct=allows_direct(directory))
        except (OSError, IndexFault, IndexUnusable) as error:
            lock.release()
            raise DiskError(f"cannot use {directory}: {error}") from error
        except BaseException:
            lock.release()
            raise
        return cls(layout, slots, threads, lock, index, files, recovered)

    def share_out(self, blocks: Sequence[DiskBlock]) -> list[list[int]]:
        """Divide blocks, by index, among calls of `read` or `write` for the threads to take, neighbours on disk together.

        The call with the first block comes first, and so on.
        """
        order = sorted(range(len(blocks)), key=lambda index: blocks[index].slot)
        share = max(1, min(self._share_blocks, div_ceil(len(blocks), self.threads)))
        return sorted((order[start : start + share] for start in range(0, len(order), share)), key=min)

    def write(self, blocks: Sequence[Placed]) -> list[int]:
        """Write the slots of a share of blocks: their sequence numbers, for `commit`.

        They are not found before they are committed; what the slots held is gone. Raises `DiskFault`.
        """
        sequences = [next(self._sequences) for _ in blocks]
        buffers = self._buffers(blocks)
        for page, (block, _), sequence in zip(buffers[::2], blocks, sequences, strict=True):
            page[:] = _header(self._fingerprint, block, sequence).ljust(PAGE_BYTES, b"\0")
        slots = [block.slot for block, _ in blocks]
        with self._outcomes.faults("write"):
            for run in self._files.runs(slots):
                self._files.write(slots[run.start], buffers[2 * run.start : 2 * run.stop])
        return sequences

    def commit(self, written: Sequence[tuple[DiskBlock, int]], *, proves: bool = False) -> None:
        """Make blocks that were written durable and found: all of them, or none and `DiskFault`. `proves`: if that goes well,
        the disk works again."""
        with self._outcomes.faults("write"):
            self._files.sync(block.slot for block, _ in written)
            self._index.put(written)
        self._outcomes.count("written", len(written))
        if proves and written:
            self._outcomes.works("write", "read")

    def read(self, blocks: Sequence[Placed]) -> list[list[int] | None]:
        """Read a share of blocks straight into their places: the checksums of each one's parts, which were verified.

        None: that block does not stand there. It is a miss, counted and not found again. Raises `DiskFault` or `DiskBusy`.
        """
        buffers = self._buffers(blocks)
        slots = [block.slot for block, _ in blocks]
        whole: list[bool] = []
        with self._outcomes.faults("read"):
            for run in self._files.runs(slots):
                while (start := len(whole)) < run.stop:  # what one block's end cuts short goes on behind it
                    size = self._files.read(slots[start], buffers[2 * start : 2 * run.stop])
                    whole += [True] * (size // self._stride) or [False]
        pairs = zip(whole, buffers[::2], blocks, strict=True)
        found = [self._verified(is_whole, page, block, payload) for is_whole, page, (block, payload) in pairs]
        self._outcomes.count("read", len(found) - found.count(None))
        return found

    def _verified(self, is_whole: bool, page: memoryview, block: DiskBlock, payload: memoryview) -> list[int] | None:
        miss = _header_miss(page, self._fingerprint, block) if is_whole else "short"
        if not miss:
            parts = part_checksums(payload[: self._layout.block_bytes], self._layout.part_bytes)
            if reading.payload_stands(parts, block.checksum):
                return parts
            miss = "corrupt"
        self._outcomes.count(miss)
        log.warning("disk_block_missed", why=miss, slot=block.slot, key=block.key.hex())
        with contextlib.suppress(DiskFault):  # a full disk may not even take this; a row that stays is a miss again
            self.forget([block])
        return None

    def forget(self, blocks: Sequence[DiskBlock]) -> None:
        """Do not find these blocks again after a restart. Raises `DiskFault`."""
        with self._outcomes.faults("write"):
            self._index.delete(blocks)

    def close(self) -> None:
        """Give the directory up, when no other call is under way. May be called twice."""
        self._index.close()
        self._files.close()
        self._lock.release()

    def _buffers(self, blocks: Sequence[Placed]) -> list[memoryview]:
        """The buffers of blocks on disk: for each a page for its header, of this thread's own, and its payload."""
        assert len(blocks) <= self._share_blocks
        assert all(payload.nbytes == self._layout.slot_bytes for _, payload in blocks)
        return [buffer for page, (_, payload) in zip(self._pages.pages, blocks, strict=False) for buffer in (page, payload)]


class _SegmentFiles:
    """Slots in files, which grow as slots are first written. Raises OSError, on a short write as well."""

    def __init__(self, directory: Path, stride: int, slots: int, segment_slots: int, *, direct: bool) -> None:
        self.direct = direct
        self._directory = directory
        self._stride = stride
        self._slots = slots
        self._segment_slots = segment_slots
        self._lock = threading.Lock()
        """Guards what follows."""
        self._open: dict[int, int] = {}
        self._grown: set[tuple[int, int]] = set()
        """Pieces (segment, number) that have their room on disk."""

    def runs(self, slots: Sequence[int]) -> Iterator[range]:
        """The indices of `slots`, divided into runs of neighbours in one file."""
        start = 0
        for index in range(1, len(slots) + 1):
            if index == len(slots) or slots[index] != slots[index - 1] + 1 or slots[index] % self._segment_slots == 0:
                yield range(start, index)
                start = index

    def write(self, slot: int, buffers: list[memoryview]) -> None:
        """Write a run of slots from `slot` on, two buffers each."""
        segment, offset = self._place(slot)
        fd = self._fd(segment, create=True)
        whole = len(buffers) // 2 * self._stride
        self._grow(segment, fd, offset, whole)
        size = os.pwritev(fd, buffers, offset)
        if size != whole:
            raise OSError(f"only {size} of {whole} bytes were written")

    def read(self, slot: int, buffers: list[memoryview]) -> int:
        """Bytes that were there, of a run of slots as for `write`."""
        segment, offset = self._place(slot)
        try:
            with opening():
                fd = self._fd(segment, create=False)
        except FileNotFoundError:
            return 0
        return os.preadv(fd, buffers, offset)

    def sync(self, slots: Iterator[int]) -> None:
        """Data first: with this done before a row is written, no row of ours outlives its bytes even at power loss, and the
        failure of a buffered write is raised here."""
        for segment in sorted({self._place(slot)[0] for slot in slots}):
            os.fdatasync(self._fd(segment, create=False))

    def close(self) -> None:
        with self._lock:
            for fd in self._open.values():
                os.close(fd)
            self._open.clear()

    def _place(self, slot: int) -> tuple[int, int]:
        segment, index = divmod(slot, self._segment_slots)
        return segment, index * self._stride

    def _fd(self, segment: int, *, create: bool) -> int:
        with self._lock:
            fd = self._open.get(segment)
            if fd is None:
                flags = os.O_RDWR | (os.O_DIRECT if self.direct else 0) | (os.O_CREAT if create else 0)
                fd = self._open[segment] = open_own(_segment_path(self._directory, segment), flags)
                if create:
                    sync_directory(self._directory)
            return fd

    def _grow(self, segment: int, fd: int, offset: int, size: int) -> None:
        """Reserve room for the slots at `offset`, and for their neighbours: a full disk is noticed here."""
        first, last = offset // PIECE_BYTES, (offset + size - 1) // PIECE_BYTES
        end = min(self._segment_slots, self._slots - segment * self._segment_slots) * self._stride
        with self._lock:
            for number in range(first, last + 1):
                if (segment, number) not in self._grown:
                    start = number * PIECE_BYTES
                    os.posix_fallocate(fd, start, min(PIECE_BYTES, end - start))
                    self._grown.add((segment, number))


class _Pages(threading.local):
    """Pages at page boundaries, for each thread its own, as O_DIRECT wants them."""

    def __init__(self, count: int) -> None:
        memory = memoryview(mmap.mmap(-1, count * PAGE_BYTES))
        self.pages = [memory[start : start + PAGE_BYTES] for start in range(0, len(memory), PAGE_BYTES)]


class _Recovered:
    """The usable and the unusable rows of an index. Fed in the order of sequence numbers."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, DiskBlock] = {}
        self.useless: list[DiskBlock] = []
        self.last_sequence = 0

    def add(self, block: DiskBlock, sequence: int, *, reachable: bool) -> None:
        self.last_sequence = sequence
        # A row may have outlived its slot's use: of two with one key, the newer is true.
        older = self._blocks.pop(block.key, None)
        if older:
            self.useless.append(older)
        if reachable:
            self._blocks[block.key] = block
        else:
            self.useless.append(block)

    @property
    def blocks(self) -> tuple[DiskBlock, ...]:
        return tuple(self._blocks.values())

    @property
    def dropped(self) -> int:
        return len(self.useless)


def _recover(
    directory: Path, layout: BlockLayout, slots: int, segment_slots: int, progress: Progress
) -> tuple[DiskIndex, _Recovered]:
    """The index and what it knows; an empty one if it cannot be used."""
    path = directory / "index.sqlite"
    try:
        return _load(path, layout, slots, segment_slots, progress)
    except IndexUnusable as error:
        aside = set_aside(path)
        log.error("disk_index_unusable", error=str(error), set_aside=str(aside), consequence="the SSD tier starts empty")
    for _, segment in _segment_paths(directory):  # their blocks will not be found
        segment.unlink()
    return _load(path, layout, slots, segment_slots, progress)


def _load(path: Path, layout: BlockLayout, slots: int, segment_slots: int, progress: Progress) -> tuple[DiskIndex, _Recovered]:
    index = DiskIndex.open(path, layout.fingerprint, segment_slots)
    try:
        stride = PAGE_BYTES + layout.slot_bytes
        sizes = {segment: file.stat().st_size for segment, file in _segment_paths(path.parent)}
        recovered = _Recovered()
        for block, sequence in index.load(progress):
            segment, position = divmod(block.slot, index.segment_slots)
            reachable = block.slot < slots and (position + 1) * stride <= sizes.get(segment, 0)
            recovered.add(block, sequence, reachable=reachable)
        for segment, file in _segment_paths(path.parent):  # a tier that was larger once
            if segment * index.segment_slots >= slots:
                file.unlink()
        if recovered.dropped:  # on a full disk there may be room for that now
            log.warning("disk_blocks_dropped", count=recovered.dropped, why="beyond the capacity, or their file's end, or old")
            index.delete(recovered.useless)
    except BaseException:
        index.close()
        raise
    return index, recovered


def _segment_path(directory: Path, segment: int) -> Path:
    return directory / f"segment-{segment:05d}"


def _segment_paths(directory: Path) -> list[tuple[int, Path]]:
    """(number, path) of every segment file."""
    paths = sorted(directory.glob("segment-[0-9][0-9][0-9][0-9][0-9]"))
    return [(int(path.name.removeprefix("segment-")), path) for path in paths]


def _header(fingerprint: bytes, block: DiskBlock, sequence: int) -> bytes:
    fields = _HEADER.pack(MAGIC, VERSION, fingerprint, block.key, block.checksum, sequence)
    return fields + _HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def _header_miss(page: memoryview, fingerprint: bytes, block: DiskBlock) -> str:
    """Why this is not the header of `block`; empty if it is."""
    fields = bytes(page[: _HEADER.size])
    (own_checksum,) = _HEADER_CHECKSUM.unpack_from(page, _HEADER.size)
    if own_checksum != xxhash.xxh3_64_intdigest(fields):
        return "corrupt"
    *layout, key, checksum, _ = _HEADER.unpack(fields)
    named = layout == [MAGIC, VERSION, fingerprint] and reading.header_stands((key, checksum), (block.key, block.checksum))
    return "" if named else "stale"
