"""The SSD tier: what is read is what was written under that key, or a miss that is counted; whatever happened between."""

import contextlib
import errno
import mmap
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mooncake_zmq.core.work import DiskBlock
from mooncake_zmq.kv.checksum import block_checksum, part_checksum
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.ssd import disk as disk_module
from mooncake_zmq.pool.ssd import disk_directory, disk_index
from mooncake_zmq.pool.ssd.disk import Disk
from mooncake_zmq.pool.ssd.disk_directory import DiskError, DiskFault

LAYOUT = BlockLayout(layers=3, kv_heads=1, head_dim=2, block_tokens=100)  # 4,800 bytes in two pages
OTHER = BlockLayout(layers=2, kv_heads=1, head_dim=2, block_tokens=100)
STRIDE = 4096 + LAYOUT.slot_bytes
SLOTS = 8
PER_SEGMENT = 3


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Slab:
    """One slot's memory, at a page boundary as in a segment."""

    def __init__(self, layout: BlockLayout = LAYOUT) -> None:
        self.layout = layout
        self.view = memoryview(mmap.mmap(-1, layout.slot_bytes))

    def fill(self, seed: object, slot: int, block_key: bytes) -> DiskBlock:
        self.view[:] = random.Random(repr(seed)).randbytes(len(self.view))
        return DiskBlock(slot, block_key, block_checksum(self.parts()))

    def parts(self) -> list[int]:
        size = self.layout.part_bytes
        return [part_checksum(self.view[start : start + size]) for start in range(0, self.layout.block_bytes, size)]


def open_disk(directory: Path, slots: int = SLOTS, **options) -> Disk:
    layout = options.pop("layout", LAYOUT)
    stride = 4096 + layout.slot_bytes
    return Disk.open(directory, layout, slots * stride, **({"segment_bytes": PER_SEGMENT * stride} | options))


def put(disk: Disk, slot: int, number: int, seed: object = 0, *, proves: bool = False) -> DiskBlock:
    slab = Slab()
    block = slab.fill((number, seed), slot, key(number))
    disk.commit([(block, *disk.write([(block, slab.view)]))], proves=proves)
    return block


def stands(disk: Disk, block: DiskBlock) -> bool:
    """Read a block: is it there? If so, its bytes were verified here once more."""
    slab = Slab()
    (parts,) = disk.read([(block, slab.view)])
    assert parts is None or (parts == slab.parts() and block_checksum(parts) == block.checksum)
    return parts is not None


def put_share(disk: Disk, slots: Sequence[int], seed: object = 0) -> list[DiskBlock]:
    """Write blocks in one call, each with its slot's number for a key."""
    slabs = [Slab() for _ in slots]
    blocks = [slab.fill((slot, seed), slot, key(slot)) for slot, slab in zip(slots, slabs, strict=True)]
    disk.commit(list(zip(blocks, disk.write([*zip(blocks, (slab.view for slab in slabs), strict=True)]), strict=True)))
    return blocks


def share_stands(disk: Disk, blocks: Sequence[DiskBlock]) -> list[bool]:
    """As `stands`, of blocks read in one call."""
    slabs = [Slab() for _ in blocks]
    found = disk.read([(block, slab.view) for block, slab in zip(blocks, slabs, strict=True)])
    for block, slab, parts in zip(blocks, slabs, found, strict=True):
        assert parts is None or (parts == slab.parts() and block_checksum(parts) == block.checksum)
    return [parts is not None for parts in found]


def place(directory: Path, slot: int) -> tuple[Path, int]:
    return directory / f"segment-{slot // PER_SEGMENT:05d}", slot % PER_SEGMENT * STRIDE


def overwrite(directory: Path, slot: int, offset: int, change) -> None:
    """Replace the rest of a slot from `offset` on by what `change` makes of it."""
    path, start = place(directory, slot)
    with path.open("r+b") as file:
        file.seek(start + offset)
        old = file.read(STRIDE - offset)
        file.seek(start + offset)
        file.write(change(old))


def flip(old: bytes) -> bytes:
    """Change the first byte; to do it again does not undo it."""
    return bytes([(old[0] + 1) % 256]) + old[1:]


def misses(disk: Disk) -> dict[str, int]:
    return {name: disk.counts[name] for name in ("stale", "corrupt", "short") if disk.counts[name]}


@pytest.fixture
def home(tmp_path):
    return tmp_path / "ssd"


@pytest.fixture
def disk(home):
    opened = open_disk(home)
    yield opened
    opened.close()


def test_what_is_written_is_read_back(disk):
    blocks = [put(disk, slot, slot) for slot in range(SLOTS)]
    assert all(stands(disk, block) for block in blocks)
    assert disk.slots == SLOTS
    assert disk.counts == {"written": 8, "read": 8, "stale": 0, "corrupt": 0, "short": 0, "failed": 0, "dropped": 0}


def test_files_are_for_their_owner_alone(home, disk):
    put(disk, 0, 1)
    assert home.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in home.iterdir()} == {0o600}


def test_a_restart_finds_the_blocks_the_oldest_first(home):
    disk = open_disk(home)
    blocks = [put(disk, slot, slot) for slot in (4, 0, 7, 2)]
    again = put(disk, 0, 9)
    disk.close()
    seen = []
    disk = open_disk(home, progress=lambda done, total: seen.append((done, total)))
    assert disk.recovered == (blocks[0], blocks[2], blocks[3], again)
    assert seen == [(0, 4), (4, 4)]
    assert all(stands(disk, block) for block in disk.recovered)
    newest = put(disk, 1, 10)
    disk.close()
    disk = open_disk(home)
    assert disk.recovered[-1] == newest
    disk.close()


def test_a_restart_finds_what_was_known_of_the_blocks(home):
    disk = open_disk(home)
    slab = Slab()
    known = ((None, b"", ""), (None, b"root", "alice"), (key(9), b"tokens", ""), (key(9), b"", "bob"))
    blocks = []
    for slot, (parent, tokens, tenant) in enumerate(known):
        block = replace(slab.fill(slot, slot, key(slot)), parent=parent, tokens=tokens, tenant=tenant)
        disk.commit([(block, *disk.write([(block, slab.view)]))])
        blocks.append(block)
    disk.close()
    disk = open_disk(home)
    assert disk.recovered == tuple(blocks)
    assert all(stands(disk, replace(block, parent=None, tokens=b"")) for block in blocks), "reading does not depend on it"
    disk.close()


def test_what_was_not_committed_is_not_found_after_a_restart(home):
    disk = open_disk(home)
    slab = Slab()
    disk.write([(slab.fill(1, 0, key(1)), slab.view)])
    disk.close()
    disk = open_disk(home)
    assert disk.recovered == ()
    disk.close()


def test_what_was_forgotten_is_not_found_after_a_restart(home):
    disk = open_disk(home)
    first, second = put(disk, 0, 1), put(disk, 1, 2)
    disk.forget([first, DiskBlock(1, key(2), second.checksum ^ 1)])
    disk.close()
    disk = open_disk(home)
    assert disk.recovered == (second,)
    disk.close()


def test_of_two_rows_with_one_key_the_newer_counts(home):
    disk = open_disk(home)
    put(disk, 0, 1, "old")
    newer = put(disk, 5, 1, "new")
    disk.close()
    disk = open_disk(home)
    assert disk.recovered == (newer,)
    assert disk.counts["dropped"] == 1
    disk.close()


def test_a_slot_being_written_again_is_a_miss_under_its_old_key(home):
    disk = open_disk(home)
    old = put(disk, 0, 1)
    slab = Slab()
    disk.write([(slab.fill(2, 0, key(2)), slab.view)])  # and no commit: the process is killed here
    disk.close()
    disk = open_disk(home)
    assert disk.recovered == (old,)
    assert not stands(disk, old)
    assert misses(disk) == {"stale": 1}
    disk.close()


@pytest.mark.parametrize("offset", [4096, 4096 + LAYOUT.part_bytes - 1, 4096 + LAYOUT.block_bytes - 1])
def test_a_bit_flipped_in_the_bytes_is_a_miss_and_forgotten(home, disk, offset):
    block = put(disk, 4, 1)
    overwrite(home, 4, offset, flip)
    assert not stands(disk, block)
    assert misses(disk) == {"corrupt": 1}
    disk.close()
    disk = open_disk(home)
    assert disk.recovered == ()
    disk.close()


@pytest.mark.parametrize("offset", [0, 8, 12, 28, 44, 52, 60])
def test_a_bit_flipped_in_the_header_is_a_miss(home, disk, offset):
    block = put(disk, 4, 1)
    overwrite(home, 4, offset, flip)
    assert not stands(disk, block)
    assert misses(disk) == {"corrupt": 1}


def test_another_keys_copy_is_a_miss_even_if_its_bytes_are_the_same(disk):
    block = put(disk, 0, 1)
    assert not stands(disk, DiskBlock(0, key(2), block.checksum))
    assert misses(disk) == {"stale": 1}
    assert stands(disk, block)


def test_a_block_in_another_slots_place_is_a_miss(home, disk):
    one, two = put(disk, 0, 1), put(disk, 1, 2)
    path, start = place(home, 1)
    misplaced = path.read_bytes()[start : start + STRIDE]
    overwrite(home, 0, 0, lambda _: misplaced)
    assert not stands(disk, one)
    assert stands(disk, two)


@pytest.mark.parametrize("page", range(3))
def test_a_torn_slot_is_a_miss(home, disk, page):
    """Pages up to `page` are the new block's, the rest still the old one's."""
    old = put(disk, 0, 1)
    before = place(home, 0)[0].read_bytes()[:STRIDE]
    new = put(disk, 0, 2)
    overwrite(home, 0, page * 4096, lambda _: before[page * 4096 :])
    assert not stands(disk, new)
    assert stands(disk, old) == (page == 0)


def test_a_file_that_ends_early_is_a_miss(home, disk):
    one, two = put(disk, 0, 1), put(disk, 1, 2)
    os.truncate(place(home, 0)[0], STRIDE + 4096)
    assert stands(disk, one)
    assert not stands(disk, two)
    assert misses(disk) == {"short": 1}


def test_a_file_that_went_is_a_miss(home):
    disk = open_disk(home)
    block = put(disk, 0, 1)
    disk.close()
    place(home, 0)[0].unlink()
    disk = open_disk(home)
    assert disk.recovered == ()
    assert not stands(disk, block)
    assert misses(disk) == {"short": 1}
    disk.close()


def test_blocks_beyond_their_files_end_are_dropped_at_the_start(home):
    disk = open_disk(home)
    one, _ = put(disk, 0, 1), put(disk, 1, 2)
    disk.close()
    os.truncate(place(home, 0)[0], 2 * STRIDE - 1)
    disk = open_disk(home)
    assert disk.recovered == (one,)
    assert disk.counts["dropped"] == 1
    disk.close()


def test_a_smaller_tier_drops_what_lies_beyond_it(home):
    disk = open_disk(home)
    kept = [put(disk, slot, slot) for slot in range(SLOTS)][:4]
    disk.close()
    disk = open_disk(home, slots=4)
    assert disk.recovered == tuple(kept)
    assert disk.counts["dropped"] == 4
    assert sorted(path.name for path in home.glob("segment-*")) == ["segment-00000", "segment-00001"]
    disk.close()
    disk = open_disk(home)
    assert disk.recovered == tuple(kept)
    assert all(stands(disk, block) for block in kept)
    disk.close()


def test_a_tier_keeps_the_file_size_it_was_made_with(home):
    disk = open_disk(home)
    blocks = [put(disk, slot, slot) for slot in range(SLOTS)]
    disk.close()
    disk = open_disk(home, slots=12, segment_bytes=5 * STRIDE)
    assert all(stands(disk, block) for block in blocks)
    assert stands(disk, put(disk, 11, 11))
    assert len(list(home.glob("segment-*"))) == 4
    disk.close()


def test_a_large_tier_has_a_limited_number_of_files(home, monkeypatch):
    monkeypatch.setattr(disk_module, "MAX_SEGMENTS", 2)
    disk = open_disk(home, slots=9, segment_bytes=1)
    for slot in range(9):
        put(disk, slot, slot)
    assert len(list(home.glob("segment-*"))) == 2
    disk.close()


def test_a_tier_without_room_for_a_block_is_refused(home):
    with pytest.raises(DiskError, match="hold no block"):
        Disk.open(home, LAYOUT, STRIDE - 1)


@pytest.mark.parametrize("damage", ["layout", "version", "garbage", "page", "rows", "parents", "shape", "columns"])
def test_an_index_of_no_use_is_set_aside_and_the_tier_starts_empty(home, damage):
    layout = OTHER if damage == "layout" else LAYOUT
    disk = open_disk(home, layout=layout)
    slab = Slab(layout)
    for number in range(SLOTS):
        block = slab.fill(number, number, key(number))
        disk.commit([(block, *disk.write([(block, slab.view)]))])
    disk.close()
    path = home / "index.sqlite"
    statements = {
        "version": "PRAGMA user_version = 2",  # whose rows did not tell whose blocks are
        "rows": "UPDATE blocks SET key = x'00' WHERE slot = 3",
        "parents": "UPDATE blocks SET parent = x'00' WHERE slot = 3",
        "shape": "DELETE FROM tier",
        "columns": "ALTER TABLE blocks DROP COLUMN tenant",
    }
    if damage in statements:
        with sqlite3.connect(path) as db:
            db.execute(statements[damage])
        db.close()
    elif damage == "garbage":
        path.write_bytes(b"not a database" * 1000)
    elif damage == "page":
        with path.open("r+b") as file:
            file.seek(2 * 4096)  # the table's only page
            file.write(b"\xff" * 4096)
    with structlog.testing.capture_logs() as logs:
        disk = open_disk(home)
    (told,) = (entry for entry in logs if entry["event"] == "disk_index_unusable")
    assert told["log_level"] == "error"
    assert disk.recovered == ()
    assert (home / "index.sqlite.set-aside").exists()
    assert not list(home.glob("segment-*"))
    block = put(disk, 0, 1)
    disk.close()
    disk = open_disk(home)
    assert disk.recovered == (block,)
    disk.close()


def test_a_second_process_is_told_who_has_the_directory(home, disk):
    with pytest.raises(DiskError, match=f"used by pid {os.getpid()}"):
        open_disk(home)
    disk.close()
    open_disk(home).close()


def test_a_place_that_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="cannot use"):
        open_disk(tmp_path / "file")


def test_neighbours_in_one_file_move_in_one_call(disk, monkeypatch):
    calls = []

    def noted(name):
        real = getattr(os, name)

        def call(fd, buffers, offset):
            calls.append((name, offset // STRIDE, len(buffers) // 2))
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, name, call)

    noted("pwritev")
    noted("preadv")
    blocks = put_share(disk, (1, 2, 3, 5, 6, 7))
    assert all(share_stands(disk, blocks))
    runs = [(1, 2), (0, 1), (2, 1), (0, 2)]
    assert calls == [("pwritev", *run) for run in runs] + [("preadv", *run) for run in runs]
    assert disk.counts["written"] == disk.counts["read"] == 6


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("offset", [0, 4096])
def test_a_changed_block_is_a_miss_and_its_neighbours_in_the_call_are_not(home, disk, bad, offset):
    blocks = put_share(disk, (3, 4, 5))
    overwrite(home, 3 + bad, offset, flip)
    assert share_stands(disk, blocks) == [index != bad for index in range(3)]
    assert misses(disk) == {"corrupt": 1}
    disk.close()
    disk = open_disk(home)
    assert disk.recovered == tuple(block for index, block in enumerate(blocks) if index != bad)
    disk.close()


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("pages", [0, 1, 2])
def test_a_read_that_ends_within_one_block_goes_on_behind_it(disk, monkeypatch, bad, pages):
    blocks = put_share(disk, (3, 4, 5))
    real = os.preadv
    end = bad * STRIDE + pages * 4096

    def short(fd, buffers, offset):
        size = real(fd, buffers, offset)
        return end - offset if offset <= end < offset + size else size

    monkeypatch.setattr(os, "preadv", short)
    assert share_stands(disk, blocks) == [index != bad for index in range(3)]
    assert misses(disk) == {"short": 1}


def test_all_beyond_a_files_end_is_missed_and_what_stands_before_it_is_not(home, disk):
    blocks = put_share(disk, range(SLOTS))
    path, start = place(home, 4)
    os.truncate(path, start + 4096)
    assert share_stands(disk, blocks) == [slot not in (4, 5) for slot in range(SLOTS)]
    assert misses(disk) == {"short": 2}


def test_files_grow_ahead_of_all_that_a_call_writes(disk, monkeypatch):
    grown = []
    monkeypatch.setattr(disk_module, "PIECE_BYTES", 4 * 4096)
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, start, size: grown.append((start, size)))
    put_share(disk, (1, 2))
    assert grown == [(0, 4 * 4096), (4 * 4096, 4 * 4096), (8 * 4096, 3 * STRIDE - 8 * 4096)]


def test_a_fault_on_the_way_commits_nothing_of_a_share(disk, monkeypatch):
    real = os.pwritev

    def second_fails(fd, buffers, offset):
        monkeypatch.setattr(os, "pwritev", lambda *args: 4096)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", second_fails)
    with pytest.raises(DiskFault, match="only 4096 of"):
        put_share(disk, (0, 1, 4, 5))
    assert disk.counts["written"] == 0
    assert disk.counts["failed"] == 1


@settings(max_examples=60)
@given(st.lists(st.integers(0, 255), max_size=80, unique=True), st.integers(1, 5))
def test_blocks_are_shared_out_evenly_neighbours_together_and_the_first_first(slots, threads):
    with tempfile.TemporaryDirectory() as directory:
        disk = open_disk(Path(directory), 256, threads=threads)
        shares = disk.share_out([DiskBlock(slot, key(slot), 0) for slot in slots])
        disk.close()
    assert sorted(index for share in shares for index in share) == list(range(len(slots)))
    assert [min(share) for share in shares] == sorted(min(share) for share in shares)
    by_slot = sorted(shares, key=lambda share: slots[share[0]])
    assert [slots[index] for share in by_slot for index in share] == sorted(slots), "each has what lies between its ends"
    most = min(disk_module.SHARE_BYTES // STRIDE, -(-len(slots) // threads))
    assert all(len(share) == most for share in by_slot[:-1])
    assert all(1 <= len(share) <= most for share in by_slot)


def test_a_share_holds_at_least_one_block_and_not_more_bytes_than_it_may(home, monkeypatch):
    for limit, size in ((1, 1), (2 * STRIDE - 1, 1), (2 * STRIDE, 2), (100 * STRIDE, 8)):
        monkeypatch.setattr(disk_module, "SHARE_BYTES", limit)
        disk = open_disk(home, threads=1)
        assert [len(share) for share in disk.share_out([DiskBlock(slot, key(slot), 0) for slot in range(SLOTS)])] == [size] * (
            SLOTS // size
        )
        disk.close()


def test_without_direct_io_the_page_cache_serves_and_the_reason_is_told(home, monkeypatch):
    opened = os.open

    def refuse(path, flags, *args, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with structlog.testing.capture_logs() as logs:
        disk = open_disk(home)
    assert not disk.direct
    (told,) = (entry for entry in logs if entry["event"] == "disk_not_direct")
    assert told["reason"] == "O_DIRECT: Invalid argument"
    assert stands(disk, put(disk, 0, 1))
    disk.close()


@pytest.fixture
def small_mount(tmp_path):
    """A file system of 256 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "none", str(path)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True, timeout=10)
    except OSError as error:
        pytest.skip(f"mount: {error}")
    if mounted.returncode:
        pytest.skip(mounted.stderr.strip())
    yield path
    subprocess.run(["umount", str(path)], check=True, timeout=10)


def test_a_full_disk_is_a_fault_and_what_stands_is_still_read(small_mount):
    disk = open_disk(small_mount, slots=100)
    blocks = []

    def fill():
        for slot in range(100):
            blocks.append(put(disk, slot, slot))

    with pytest.raises(DiskFault, match="No space left|disk is full"):
        fill()
    assert blocks
    assert disk.counts["failed"] == 1
    assert all(stands(disk, block) for block in blocks)
    disk.close()


def fill(directory: Path) -> Path:
    """Leave no room on a file system; the file that takes it."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


def test_a_tier_on_a_full_disk_can_be_made_smaller(small_mount):
    disk = open_disk(small_mount)
    kept = [put(disk, slot, slot) for slot in range(SLOTS)][:4]
    disk.close()
    fill(small_mount)
    disk = open_disk(small_mount, slots=4)
    assert disk.recovered == tuple(kept)
    disk.close()


def test_a_disk_that_was_full_is_written_again_as_soon_as_there_is_room(small_mount):
    """The same open tier: what failed before, in its files or in its index, is made good."""
    disk = open_disk(small_mount, slots=8)
    ballast = fill(small_mount)
    with pytest.raises(DiskFault, match="No space left|disk is full"):
        put(disk, 0, 0)
    ballast.unlink()
    with structlog.testing.capture_logs() as logs:
        blocks = [put(disk, slot, slot) for slot in range(7)]
        unproved = list(logs)
        blocks.append(put(disk, 7, 7, proves=True))
    assert not unproved, "what goes well says little of a disk that was full"
    assert [entry["event"] for entry in logs] == ["disk_fault_over"]
    assert all(stands(disk, block) for block in blocks)
    disk.close()
    disk = open_disk(small_mount, slots=8)
    assert sorted(block.slot for block in disk.recovered) == list(range(8))
    disk.close()


@pytest.mark.parametrize("call", ["posix_fallocate", "pwritev", "fdatasync"])
@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_write_that_fails_is_a_fault_and_not_found(home, monkeypatch, call, reason):
    disk = open_disk(home)
    good = put(disk, 7, 7)

    def fail(*args):
        raise OSError(reason, os.strerror(reason))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(DiskFault, match=os.strerror(reason)):
            put(disk, 0, 1)
    assert stands(disk, good)
    disk.close()
    disk = open_disk(home)
    assert disk.recovered == (good,)
    disk.close()


def test_a_short_write_is_a_fault(disk, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 4096)
    with pytest.raises(DiskFault, match="only 4096 of"):
        put(disk, 0, 1)


def test_an_index_that_cannot_grow_is_a_fault(home, disk):
    for slot in range(SLOTS):
        put(disk, slot, slot)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    slab = Slab()
    block = slab.fill(9, 0, key(9))
    (sequence,) = disk.write([(block, slab.view)])
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((home / "index.sqlite-wal").stat().st_size, hard))
        with pytest.raises(DiskFault, match="write: disk"):
            disk.commit([(block, sequence)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    disk.commit([(block, sequence)])
    disk.close()
    disk = open_disk(home)
    assert disk.recovered[-1] == block
    disk.close()


def test_a_read_that_fails_is_a_fault_and_its_row_stays(home, disk, monkeypatch):
    block = put(disk, 0, 1)

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(DiskFault, match="read: .*Input/output error"):
            stands(disk, block)
    disk.close()
    disk = open_disk(home)
    assert disk.recovered == (block,)
    assert stands(disk, block)
    disk.close()


def test_a_miss_on_a_disk_too_full_to_forget_it_is_still_a_miss(home, disk, monkeypatch):
    block = put(disk, 0, 1)
    overwrite(home, 0, 4096, flip)

    def full(self, blocks):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(disk_index.DiskIndex, "delete", full)
    assert not stands(disk, block)


def test_rows_are_written_some_at_a_time_all_or_none(home, monkeypatch):
    monkeypatch.setattr(disk_index, "ROWS_PER_STATEMENT", 3)
    disk = open_disk(home)
    disk.commit([])
    blocks = put_share(disk, range(SLOTS))
    with pytest.raises(DiskFault):
        disk.commit([(block, 100 if block.slot < 7 else "no number") for block in reversed(blocks)])
    disk.close()
    disk = open_disk(home)
    assert disk.recovered == tuple(blocks)
    disk.close()


def test_rows_are_loaded_in_pieces(home, monkeypatch):
    monkeypatch.setattr(disk_index, "ROWS_PER_PIECE", 3)
    monkeypatch.setattr(disk_directory, "LOG_INTERVAL_S", 0.0)
    disk = open_disk(home)
    for slot in range(SLOTS):
        put(disk, slot, slot)
    disk.close()
    seen = []
    with structlog.testing.capture_logs() as logs:
        disk = open_disk(home, progress=lambda done, total: seen.append(done))
    assert seen == [0, 3, 6, 8]
    assert [entry["done"] for entry in logs if entry["event"] == "disk_recovery"] == seen
    disk.close()


WRITER = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_disk import open_disk, put_share, SLOTS
disk = open_disk(Path(sys.argv[1]))
for number in range(1_000_000):
    start = number * 5 % SLOTS
    put_share(disk, range(start, min(start + 2, SLOTS)), number)
    if number == 2 * SLOTS:
        print("begun", flush=True)
"""


def test_what_is_found_after_kill_9_in_the_middle_of_writing_verifies_or_is_a_counted_miss(home):
    for _ in range(3):
        before = open_disk(home)
        before.close()
        command = [sys.executable, "-c", WRITER, str(home), str(Path(__file__).parent), *sys.path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout.readline() == "begun\n"
            writer.kill()
        disk = open_disk(home)
        found = [stands(disk, block) for block in disk.recovered]
        assert found.count(True) >= SLOTS - 2  # at most the slots under way are lost
        assert found.count(False) == sum(misses(disk).values())
        disk.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, SLOTS - 1), st.integers(0, 11)),
        st.tuples(st.just("torn"), st.integers(0, SLOTS - 1), st.integers(0, 11)),
        st.tuples(st.just("flip"), st.integers(0, SLOTS - 1), st.integers(0, STRIDE - 1)),
        st.tuples(st.just("reopen"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_any_writes_damage_and_reopens_agree_with_a_dict(steps):
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        disk = open_disk(home)
        slots: dict[int, tuple[DiskBlock, bool]] = {}  # what each slot's row names, and is it whole?
        for step, (what, slot, number) in enumerate(steps):
            if what == "write":
                slots[slot] = (put(disk, slot, number, step), True)
            elif what == "torn":
                slab = Slab()
                disk.write([(slab.fill(step, slot, key(number)), slab.view)])
                if slot in slots:
                    slots[slot] = (slots[slot][0], False)
            elif what == "flip" and slot in slots:
                # Only bytes that mean something: a header is 68 bytes, the rest of its page and the padding say nothing.
                if number < 68 or 4096 <= number < 4096 + LAYOUT.block_bytes:
                    overwrite(home, slot, number, flip)
                    slots[slot] = (slots[slot][0], False)
            elif what == "reopen":
                disk.close()
                disk = open_disk(home)
                newest = {row.key: row for row in disk.recovered}
                assert {row.key for row, _ in slots.values()} == set(newest)
                slots = {at: held for at, held in slots.items() if newest[held[0].key] == held[0]}
                assert len(slots) == len(newest)
        standing = [slots[at] for at in sorted(slots)]
        assert share_stands(disk, [block for block, _ in standing]) == [whole for _, whole in standing]
        assert [stands(disk, block) for block, _ in standing] == [whole for _, whole in standing]
        disk.close()


@pytest.mark.parametrize(("reason", "direct"), [(errno.EINVAL, False), (errno.ENOSPC, True), (errno.EIO, True)])
def test_a_disk_that_is_full_at_the_start_is_direct_all_the_same(tmp_path, monkeypatch, reason, direct):
    def refuse(*_arguments):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(disk_directory.os, "pwrite", refuse)
    assert disk_directory.allows_direct(tmp_path) is direct
