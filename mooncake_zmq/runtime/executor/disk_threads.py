"""Reads and writes of the SSD tier, on separate threads, so that no promotion waits behind demotions."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import structlog

from mooncake_zmq.core.work import BlocksCopied, CopyBlocks, DiskBlock, DiskWritten, Result, WriteToDisk
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.pool.ssd.disk import Disk
from mooncake_zmq.pool.ssd.disk_copy import read_blocks, write_blocks
from mooncake_zmq.pool.ssd.disk_directory import DiskFault
from mooncake_zmq.runtime.executor.jobs import Job, Subtasks, Turn
from mooncake_zmq.runtime.executor.worker import Worker
from mooncake_zmq.transfer.directory import SegmentDirectory

log = structlog.get_logger()


class Copied:
    """Record of a `CopyBlocks`; every index has one writer."""

    def __init__(self, count: int) -> None:
        self.checksums: list[int | None] = [None] * count
        self.fault = ""
        self._corrupt: list[int] = []

    def set(self, index: int, outcome: int | ReadFailure) -> None:
        if not isinstance(outcome, ReadFailure):
            self.checksums[index] = outcome
        elif outcome is ReadFailure.CORRUPT:
            self._corrupt.append(index)

    def result(self) -> Result:
        return BlocksCopied(tuple(self.checksums), tuple(sorted(self._corrupt)), self.fault)


class DiskThreads:
    """Run the threads of one disk, which the caller closes."""

    def __init__(self, disk: Disk, directory: SegmentDirectory, on_crash: Callable[[BaseException], None]) -> None:
        self._disk, self._directory = disk, directory
        self._reads = Worker("disk-read", on_crash, disk.threads)
        self._writes = Worker("disk-write", on_crash, disk.threads)

    def close(self) -> None:
        self._reads.close()
        self._writes.close()

    def read(self, job: Job, work: CopyBlocks, indices: list[int], copied: Copied) -> list[tuple[Worker, Turn]]:
        """Return turns that read the blocks at `indices` of the work from the disk."""
        blocks = [source for source, _ in work.copies if isinstance(source, DiskBlock)]
        shares = deque([indices[place] for place in share] for share in self._disk.share_out(blocks))
        turn = partial(self._read_blocks, job, work, shares, copied)
        return [(self._reads, turn)] * min(self._disk.threads, len(shares))

    def write(self, job: Job, work: WriteToDisk) -> Subtasks:
        """Write blocks of the own segment to the disk."""
        shares = deque(self._disk.share_out([block for _, block in work.blocks]))
        threads = min(self._disk.threads, len(shares))
        written = _Written(len(work.blocks), threads)
        job.conclude = written.result
        return Subtasks([(self._writes, partial(self._write_blocks, job, work, shares, written))] * threads)

    def _read_blocks(self, job: Job, work: CopyBlocks, shares: deque[list[int]], copied: Copied) -> None:
        for share in _taken(shares):
            if job.stopped or job.is_late() or copied.fault:
                return
            indices, copies = [], []
            for index in share:
                block, grant = work.copies[index]
                assert isinstance(block, DiskBlock)
                target = self._directory.segment((grant.node, grant.incarnation), writable=True)
                if target:
                    indices.append(index)
                    copies.append((block, target, grant))
            try:
                for index, outcome in zip(indices, read_blocks(self._disk, copies), strict=True):
                    copied.set(index, outcome)
            except DiskFault as fault:
                copied.fault = str(fault)

    def _write_blocks(self, job: Job, work: WriteToDisk, shares: deque[list[int]], written: "_Written") -> None:
        """Write shares until none remains; the last thread to end makes them all durable at once."""
        assert self._directory.own, "a node without a segment has nothing to demote"
        for share in _taken(shares):
            if job.stopped or job.is_late() or written.fault:
                break
            try:
                outcomes = write_blocks(self._directory.own, self._disk, [work.blocks[index] for index in share])
            except DiskFault as fault:
                written.fault = str(fault)
                break
            for index, outcome in zip(share, outcomes, strict=True):
                written.set(index, outcome)
                if outcome is ReadFailure.CORRUPT:
                    source, block = work.blocks[index]
                    log.error("block_corrupt_in_memory", slot=source.slot, key=block.key.hex())
        if written.is_last() and not job.stopped:
            try:
                written.commit(work, self._disk)
            except DiskFault as fault:
                written.fault = written.fault or str(fault)


class _Written:
    """Record of a `WriteToDisk`; every index has one writer. `sequences`: numbers of the blocks whose bytes are written."""

    def __init__(self, count: int, threads: int) -> None:
        self.sequences: list[int | None] = [None] * count
        self.fault = ""
        self._corrupt: list[int] = []
        self._committed = False
        self._lock = threading.Lock()
        self._threads = threads

    def set(self, index: int, outcome: int | ReadFailure) -> None:
        if not isinstance(outcome, ReadFailure):
            self.sequences[index] = outcome
        elif outcome is ReadFailure.CORRUPT:
            self._corrupt.append(index)

    def is_last(self) -> bool:
        """Return whether the calling thread is the last to end; each thread calls this once at its end."""
        with self._lock:
            self._threads -= 1
            return self._threads == 0

    def commit(self, work: WriteToDisk, disk: Disk) -> None:
        numbered = zip(work.blocks, self.sequences, strict=True)
        whole = [(block, sequence) for (_, block), sequence in numbered if sequence is not None]
        disk.commit(whole, proves=work.is_probe and not self.fault)
        self._committed = True

    def result(self) -> Result:
        written = tuple(self._committed and sequence is not None for sequence in self.sequences)
        return DiskWritten(written, self.fault, tuple(sorted(self._corrupt)))


def _taken(shares: deque[list[int]]) -> Iterator[list[int]]:
    """Take turns with other threads at one list of shares."""
    while True:
        try:
            yield shares.popleft()
        except IndexError:
            return
