"""Copies of whole blocks into granted slots: from this host's memory, from other hosts, or from the SSD."""

from functools import partial

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import CopyBlocks, DiskBlock, SequenceBlock, SlotGrant
from mooncake_zmq.kv.checksum import block_checksum
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.runtime.executor.disk_threads import Copied, DiskThreads
from mooncake_zmq.runtime.executor.jobs import Job, Subtasks
from mooncake_zmq.runtime.executor.worker import Worker
from mooncake_zmq.transfer.block_copy import copy_block, granted, store_block
from mooncake_zmq.transfer.channel import RemoteRead
from mooncake_zmq.transfer.directory import SegmentDirectory
from mooncake_zmq.transfer.shared_memory import Segment


class Copies:
    """Plans the copies of a work. `copier`: the thread of local copies."""

    def __init__(
        self, directory: SegmentDirectory, copier: Worker, disk_threads: DiskThreads | None, *, verify_local: bool
    ) -> None:
        self._directory, self._copier, self._disk_threads = directory, copier, disk_threads
        self._verify_local = verify_local

    def copy(self, job: Job, work: CopyBlocks) -> Subtasks:
        copied = Copied(len(work.copies))
        job.conclude = copied.result
        here: list[int] = []
        stored: list[int] = []
        subtasks = Subtasks()
        for index, (source, grant) in enumerate(work.copies):
            if isinstance(source, DiskBlock):
                stored.append(index)
                continue
            # Pinning takes seconds, longer than a heartbeat: the copy thread sorts out local blocks. A stream needs no pin.
            far = isinstance(source, SlotRef) and self._directory.endpoint((source.node, source.incarnation))
            target = self._directory.segment((grant.node, grant.incarnation), writable=True, pinned=False) if far else None
            if isinstance(source, SlotRef) and target:
                sink = _SlotSink(index, target, grant, copied)
                subtasks.reads.append(RemoteRead(source, range(self._directory.layout.layers), sink))
            else:
                here.append(index)
        if here:
            subtasks.turns.append((self._copier, partial(self._copy_blocks, job, work, here, copied)))
        if stored:
            assert self._disk_threads, "a node without a disk has nothing to promote"
            subtasks.turns += self._disk_threads.read(job, work, stored, copied)
        return subtasks

    def _copy_blocks(self, job: Job, work: CopyBlocks, indices: list[int], copied: Copied) -> None:
        for index in indices:
            if job.stopped or job.is_late():
                return
            source, grant = work.copies[index]
            target = self._directory.segment((grant.node, grant.incarnation), writable=True)
            if target is None:
                continue
            if isinstance(source, SequenceBlock):
                copied.checksums[index] = store_block(job.sequences[source.sequence].kv, source.block, target, grant)
                continue
            assert isinstance(source, SlotRef)
            segment = self._directory.segment((source.node, source.incarnation))
            if segment:
                copied.set(index, copy_block(segment, source, target, grant, verify_committed=self._verify_local))


class _SlotSink:
    """Put a block from another host straight into a granted slot."""

    def __init__(self, index: int, target: Segment, grant: SlotGrant, copied: Copied) -> None:
        self._index = index
        self._target = target
        self._grant = grant
        self._copied = copied
        self._checksums: list[int] = []

    def buffer(self) -> memoryview | None:
        if not granted(self._target, self._grant):
            return None
        return self._target.layers_view(self._grant.slot, 0, self._target.layout.layers)

    def part(self, layer: int, payload: memoryview, checksum: int) -> None:
        self._checksums.append(checksum)

    def end(self, failure: ReadFailure | None) -> None:
        if not granted(self._target, self._grant):  # another writer may have used it in the meantime
            return
        if failure is None:
            self._target.parts(self._grant.slot)[:] = self._checksums
        self._copied.set(self._index, failure or block_checksum(self._checksums))
