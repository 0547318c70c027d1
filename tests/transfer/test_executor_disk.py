"""Demotions and promotions as works of the live executor, over real files."""

import errno
import itertools
import os
import threading

import pytest
import structlog
from msgspec import structs
from segment_bytes import slot_bytes
from test_executor import TIMEOUT_S, Rig

from mooncake_zmq.core.actor import OpenSequence, WorkDone
from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import (
    BlockLoad,
    BlocksCopied,
    BlocksPulled,
    CopyBlocks,
    DiskBlock,
    DiskWritten,
    PullBlocks,
    SlotGrant,
    WorkFailed,
    WriteToDisk,
)
from mooncake_zmq.pool.ssd.disk import Disk
from mooncake_zmq.pool.ssd.disk_copy import read_blocks, write_blocks
from mooncake_zmq.runtime.executor import disk_threads

BLOCKS = 6


def key(number):
    return number.to_bytes(16, "big")


@pytest.fixture
def disk(tmp_path, layout):
    opened = Disk.open(tmp_path / "ssd", layout, 8 * (4096 + layout.slot_bytes), threads=3)
    yield opened
    opened.close()


@pytest.fixture
def make_rig(make_segment, crashes, tmp_path, disk):
    rigs = []

    def make(name, **options):
        rigs.append(Rig(name, make_segment(name, slots=16), crashes, tmp_path, **({"disk": disk} | options)))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
        ended = [event.work_id for event in rig.events if isinstance(event, WorkDone)]
        assert sorted(ended) == list(range(1, rig.next_id + 1)), "every work ends exactly once"


@pytest.fixture
def rig(make_rig):
    return make_rig("a")


@pytest.fixture
def refs(rig, fill):
    return [fill(rig.segment, slot) for slot in range(BLOCKS)]


def demotion(refs):
    return WriteToDisk(tuple((ref, DiskBlock(7 - ref.slot, key(ref.slot), ref.checksum)) for ref in refs))


def altered(ref: SlotRef, **fields) -> SlotRef:
    return SlotRef(**({name: getattr(ref, name) for name in ref.__struct_fields__} | fields))


def fail(reason):
    def call(*args):
        raise OSError(reason, os.strerror(reason))

    return call


def test_blocks_go_to_disk_and_come_back_into_granted_slots(rig, refs, disk):
    work = demotion(refs)
    assert rig.run(work) == DiskWritten((True,) * BLOCKS)
    grants = rig.grants(*range(8, 8 + BLOCKS))
    copies = tuple((block, grant) for (_, block), grant in zip(work.blocks, grants, strict=True))
    assert rig.run(CopyBlocks(copies)) == BlocksCopied(tuple(ref.checksum for ref in refs))
    for ref, grant in zip(refs, grants, strict=True):
        assert slot_bytes(rig.segment, grant.slot) == slot_bytes(rig.segment, ref.slot)
        assert rig.segment.parts(grant.slot).tolist() == rig.segment.parts(ref.slot).tolist()
    rig.executor.open_sequence(OpenSequence(1, 32))
    promoted = rig.commit(grants, [ref.checksum for ref in refs])
    pulled = rig.run(PullBlocks(1, (BlockLoad(0, promoted[0], 0, 3, 4),)))
    assert isinstance(pulled, BlocksPulled)
    assert not pulled.failed


def test_a_restart_finds_what_a_work_wrote(rig, refs, disk, tmp_path, layout):
    work = demotion(refs)
    rig.run(work)
    rig.executor.close()
    disk.close()
    again = Disk.open(tmp_path / "ssd", layout, 8 * (4096 + layout.slot_bytes))
    assert sorted(again.recovered, key=lambda block: block.key) == [block for _, block in work.blocks]
    again.close()


def test_one_work_copies_from_disk_memory_and_another_host(make_rig, make_segment, fill, rig, refs):
    far = make_rig("b", host="there", serve=True, disk=None)
    rig.meet(far)
    there = fill(far.segment, 0)
    work = demotion(refs[:2])
    rig.run(work)
    sources = (work.blocks[0][1], refs[3], there, work.blocks[1][1])
    copies = tuple(zip(sources, rig.grants(8, 9, 10, 11), strict=True))
    checksums = (refs[0].checksum, refs[3].checksum, there.checksum, refs[1].checksum)
    assert rig.run(CopyBlocks(copies)) == BlocksCopied(checksums)


def test_only_what_is_as_named_is_written(rig, refs, disk):
    slot_bytes(rig.segment, 1)[0] ^= 1
    gone = altered(refs[2], generation=4)
    other = altered(refs[3], checksum=refs[3].checksum ^ 1)
    blocks = [(ref, DiskBlock(ref.slot, key(ref.slot), ref.checksum)) for ref in (refs[0], refs[1], gone, other)]
    blocks.append((refs[4], DiskBlock(4, key(4), refs[4].checksum ^ 1)))
    assert rig.run(WriteToDisk(tuple(blocks))) == DiskWritten((True, False, False, False, False), corrupt=(1, 3, 4))
    assert disk.counts["written"] == 1


def test_a_source_taken_away_while_it_is_written_is_not_indexed(rig, refs, disk, monkeypatch):
    real = disk.write

    def late(blocks):
        rig.executor.fence([(refs[1].slot, 3)])
        return real(blocks)

    monkeypatch.setattr(disk, "write", late)
    monkeypatch.setattr(disk, "share_out", lambda blocks: [[0, 1, 2]])
    assert rig.run(demotion(refs[:3])) == DiskWritten((True, False, True))
    assert disk.counts["written"] == 2


def test_a_disk_copy_that_does_not_verify_is_reported_corrupt(rig, refs, disk):
    work = demotion(refs[:3])
    rig.run(work)
    blocks = [block for _, block in work.blocks]
    wrong = DiskBlock(blocks[1].slot, key(9), blocks[1].checksum)
    never_written = DiskBlock(0, key(8), 1)
    sources = (blocks[0], wrong, blocks[2], never_written)
    copies = tuple(zip(sources, rig.grants(8, 9, 10, 11), strict=True))
    result = rig.run(CopyBlocks(copies))
    assert result == BlocksCopied((refs[0].checksum, None, refs[2].checksum, None), (1, 3))


def test_in_one_call_each_block_has_an_outcome_of_its_own(rig, refs, disk, monkeypatch):
    monkeypatch.setattr(disk, "share_out", lambda blocks: [sorted(range(len(blocks)), key=lambda at: blocks[at].slot)])
    slot_bytes(rig.segment, 1)[0] ^= 1
    work = demotion(refs)
    assert rig.run(work) == DiskWritten((True, False, True, True, True, True), corrupt=(1,))
    slot_bytes(rig.segment, 1)[0] ^= 1
    assert rig.run(demotion(refs[1:2])) == DiskWritten((True,))
    real = disk.read

    def late(blocks):
        found = real(blocks)
        rig.executor.fence([(11, 4)])
        return found

    monkeypatch.setattr(disk, "read", late)
    blocks = [block for _, block in work.blocks]
    blocks[2] = DiskBlock(blocks[2].slot, blocks[2].key, blocks[2].checksum ^ 1)
    grants = list(rig.grants(*range(8, 14)))
    grants[4] = SlotGrant("nobody", 1, 0, 1)
    rig.executor.fence([(9, 4)])
    result = rig.run(CopyBlocks(tuple(zip(blocks, grants, strict=True))))
    lost = {1: "granted to another before", 2: "another block", 3: "taken away meanwhile", 4: "nobody's slot"}
    assert result == BlocksCopied(tuple(None if i in lost else ref.checksum for i, ref in enumerate(refs)), corrupt=(2,))
    assert not rig.segment.parts(11).any(), "its checksums are another's as well"
    for index in set(range(BLOCKS)) - set(lost):
        assert slot_bytes(rig.segment, 8 + index) == slot_bytes(rig.segment, index)


def test_a_target_no_longer_granted_is_not_written(rig, refs):
    work = demotion(refs[:1])
    rig.run(work)
    before = bytes(slot_bytes(rig.segment, 8))
    (grant,) = rig.grants(8)
    rig.executor.fence([(8, 4)])
    nobody = SlotGrant("nobody", 1, 0, 1)
    block = work.blocks[0][1]
    assert rig.run(CopyBlocks(((block, grant), (block, nobody)))) == BlocksCopied((None, None))
    assert slot_bytes(rig.segment, 8) == before


def test_a_full_disk_ends_a_write_with_a_fault_and_the_node_goes_on(rig, refs, disk, monkeypatch):
    assert rig.run(demotion(refs[:1])) == DiskWritten((True,))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail(errno.ENOSPC))
        result = rig.run(demotion(refs))
    assert result.written == (False,) * BLOCKS
    assert "No space left" in result.fault
    assert rig.run(demotion(refs)) == DiskWritten((True,) * BLOCKS)


def test_a_fault_is_over_once_a_probe_is_written_whole(rig, refs, disk, monkeypatch):
    """And not when another block of the same batch is, or another batch: the tier is off then."""
    calls, write = itertools.count(), os.pwritev

    def fail_once(*args):
        return fail(errno.ENOSPC)(*args) if next(calls) == 0 else write(*args)

    probe = structs.replace(demotion(refs), is_probe=True)
    with structlog.testing.capture_logs() as logs:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fail_once)
            assert rig.run(probe).fault
        assert not rig.run(demotion(refs[:1])).fault
        assert [entry["event"] for entry in logs] == ["disk_fault"]
        assert not rig.run(probe).fault
        assert not rig.run(probe).fault
    assert [entry["event"] for entry in logs] == ["disk_fault", "disk_fault_over"]


def test_a_failing_sync_takes_the_whole_batch_with_it(rig, refs, disk, monkeypatch):
    monkeypatch.setattr(os, "fdatasync", fail(errno.EIO))
    result = rig.run(demotion(refs))
    assert result.written == (False,) * BLOCKS
    assert "Input/output error" in result.fault


def test_a_failing_read_is_a_fault_that_accuses_no_block(rig, refs, disk, monkeypatch):
    work = demotion(refs)
    rig.run(work)
    monkeypatch.setattr(os, "preadv", fail(errno.EIO))
    copies = tuple((block, grant) for (_, block), grant in zip(work.blocks, rig.grants(*range(8, 14)), strict=True))
    result = rig.run(CopyBlocks(copies))
    assert result.checksums == (None,) * BLOCKS
    assert result.corrupt == ()
    assert "Input/output error" in result.fault


def test_a_process_out_of_descriptors_reads_nothing_and_that_is_no_fault(rig, refs, disk, monkeypatch):
    work = demotion(refs)
    rig.run(work)
    copies = tuple((block, grant) for (_, block), grant in zip(work.blocks, rig.grants(*range(8, 14)), strict=True))
    disk._files.close()  # as after a restart
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail(errno.EMFILE))
        assert rig.run(CopyBlocks(copies)) == BlocksCopied((None,) * BLOCKS)
    assert rig.run(CopyBlocks(copies)) == BlocksCopied(tuple(ref.checksum for ref in refs))


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_cancelled_work_stops_between_shares(rig, refs, disk, monkeypatch, way):
    rig.run(demotion(refs))
    entered, go = threading.Semaphore(0), threading.Event()
    touched = []

    def held(real):
        def call(*args):
            touched.append(args)
            entered.release()
            assert go.wait(TIMEOUT_S)
            return real(*args)

        return call

    monkeypatch.setattr(disk, "share_out", lambda blocks: [[index] for index in range(len(blocks))])
    monkeypatch.setattr(disk_threads, "read_blocks", held(read_blocks))
    monkeypatch.setattr(disk_threads, "write_blocks", held(write_blocks))
    if way == "write":
        work = demotion(refs)
    else:
        copies = zip((block for _, block in demotion(refs).blocks), rig.grants(*range(8, 14)), strict=True)
        work = CopyBlocks(tuple(copies))
    work_id = rig.start(work)
    for _ in range(disk.threads):
        assert entered.acquire(timeout=TIMEOUT_S)
    rig.executor.cancel(work_id)
    go.set()
    assert rig.result(work_id) == WorkFailed("cancelled")
    assert len(touched) == disk.threads
    assert disk.counts["written"] == BLOCKS


def test_a_work_past_its_deadline_touches_nothing(rig, refs, disk):
    assert rig.run(demotion(refs), deadline_s=0.0) == WorkFailed("deadline")
    assert disk.counts["written"] == 0


def test_a_promotion_does_not_wait_for_demotions(rig, refs, disk, monkeypatch):
    work = demotion(refs)
    rig.run(work)
    go = threading.Event()

    def held(*args):
        assert go.wait(TIMEOUT_S)
        return write_blocks(*args)

    monkeypatch.setattr(disk_threads, "write_blocks", held)
    demoting = rig.start(demotion(refs))
    copies = ((work.blocks[0][1], rig.grants(8)[0]),)
    assert rig.run(CopyBlocks(copies)) == BlocksCopied((refs[0].checksum,))
    go.set()
    assert rig.result(demoting) == DiskWritten((True,) * BLOCKS)


def test_without_local_verification_only_generations_are_checked_of_committed_blocks(make_rig, fill, rig):
    trusting = make_rig("t", disk=None, verify_local=False)
    for node, good in ((rig, False), (trusting, True)):
        ref = fill(node.segment, 0)
        slot_bytes(node.segment, 0)[0] ^= 1
        node.executor.open_sequence(OpenSequence(1, 32))
        committed, open_ref = ref, altered(ref, generation=1, checksum=0)
        gone = altered(ref, generation=4)
        results = [node.run(PullBlocks(1, (BlockLoad(0, source, 0, 3, 4),))) for source in (committed, open_ref, gone)]
        assert [result.failed == () for result in results] == [good, False, False]
        assert [result.corrupt == (0,) for result in results] == [not good, True, False]
        sources = zip((committed, open_ref, gone), node.grants(8, 9, 10), strict=True)
        copied = node.run(CopyBlocks(tuple(sources)))
        assert copied.checksums == (ref.checksum if good else None, None, None)


def test_without_local_verification_the_disk_and_the_network_are_still_verified(make_rig, fill, disk):
    rig = make_rig("t", verify_local=False)
    far = make_rig("b", host="there", serve=True, disk=None)
    rig.meet(far)
    there, here = fill(far.segment, 0), fill(rig.segment, 0)
    slot_bytes(far.segment, 0)[0] ^= 1
    slot_bytes(rig.segment, 1)[:] = slot_bytes(rig.segment, 0)
    slot_bytes(rig.segment, 1)[0] ^= 1
    bad = DiskBlock(0, key(1), here.checksum)
    disk.commit([(bad, *disk.write([(bad, slot_bytes(rig.segment, 1))]))])
    result = rig.run(CopyBlocks(tuple(zip((bad, there), rig.grants(8, 9), strict=True))))
    assert result == BlocksCopied((None, None), (0, 1))
