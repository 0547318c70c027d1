"""The files of a store's SSD tier: what is read is the value asked for or a miss that is counted, whatever happened between."""

import contextlib
import errno
import mmap
import os
import random
import resource
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.kv.object_record import ObjectRecord, header, place, record_bytes, round_up, why_missed
from mooncake_zmq.pool.ssd import object_disk
from mooncake_zmq.pool.ssd.disk_directory import DiskError, DiskFault
from mooncake_zmq.pool.ssd.object_disk import ObjectDisk
from mooncake_zmq.store.memory import checksum_of

SEGMENT_BYTES = 1 << 20
LARGEST = 1 << 19
SIZES = [1, 64, 4000, 65_535, 65_536, 65_537, 300_000]


def cell(size: int, content: bytes = b"") -> memoryview:
    view = memoryview(mmap.mmap(-1, round_up(size, 4096)))
    view[: len(content)] = content
    return view


def value(key: str, size: int) -> bytes:
    return random.Random(key).randbytes(size)


def write(disk: ObjectDisk, sizes: dict[str, int], *, segment: int = 1, start: int = 0, sequence: int = 1, commit: bool = True):
    """Write values under these keys; their records, and where the next write begins."""
    offsets, end = place([(key.encode(), size) for key, size in sizes.items()], start)
    rows, cells = {}, []
    for number, ((key, size), offset) in enumerate(zip(sizes.items(), offsets, strict=True)):
        content = value(key, size)
        rows[key] = ObjectRecord(sequence + number, segment, offset, size, checksum_of(content), 0)
        cells.append((key, rows[key], cell(size, content)))
    disk.write(cells, end)
    if commit:
        disk.commit(rows.items())
    return rows, end


def stands(disk: ObjectDisk, key: str, record: ObjectRecord, *, ahead: bool = False) -> bool:
    target = cell(record.size)
    good = disk.read(key, record, target, ahead=ahead)
    assert not good or target[: record.size] == value(key, record.size)
    return good


def misses(disk: ObjectDisk) -> dict[str, int]:
    return {name: disk.counts[name] for name in ("stale", "corrupt", "short") if disk.counts[name]}


@pytest.fixture
def home(tmp_path):
    return tmp_path / "ssd"


@pytest.fixture(params=["direct", "cached"])
def disk(request, home, monkeypatch):
    if request.param == "cached":
        monkeypatch.setattr(object_disk, "allows_direct", lambda _: False)
    opened = ObjectDisk.open(home, LARGEST)
    opened.create(1, SEGMENT_BYTES)
    yield opened
    opened.close()


def reopen(home: Path, **options) -> ObjectDisk:
    return ObjectDisk.open(home, options.pop("largest", LARGEST), **options)


def test_values_of_all_sizes_are_read_back_from_one_write(disk):
    rows, end = write(disk, {f"k{size}": size for size in SIZES})
    more, _ = write(disk, {"x" * 1024: 70, "é" * 500: 65_536, "y" * 1024: 65_535}, start=end, sequence=20)
    assert all(stands(disk, key, record) for key, record in (rows | more).items())
    assert disk.counts["read"] == len(SIZES) + 3
    assert not misses(disk)


def test_the_largest_batch_of_small_values_fits_its_buffer(disk):
    keys = {f"{number:0>1024}": 65_535 for number in range(object_disk.BATCH_RECORDS)}
    disk.create(2, 16 << 20)
    rows, _ = write(disk, keys, segment=2)
    assert all(stands(disk, key, record) for key, record in list(rows.items())[::17])


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=1024), st.integers(1, 200_000)), max_size=9), st.integers(0, 9))
def test_records_lie_one_after_another_where_their_bytes_can_be_moved_directly(values, pages):
    start = pages * 4096
    offsets, end = place(values, start)
    last = start
    for (key, size), offset in zip(values, offsets, strict=True):
        assert offset >= last
        assert offset % (4096 if size >= 65_536 else 64) == 0
        last = offset + record_bytes(key, size)
    assert end % 4096 == 0
    assert last <= end < last + 4096


def test_a_restart_finds_what_was_committed_and_nothing_else(disk, home):
    rows, end = write(disk, {"a": 10, "b": 70_000})
    write(disk, {"lost": 10}, start=end, sequence=9, commit=False)
    disk.close()
    seen = []
    again = reopen(home, progress=lambda done, total: seen.append((done, total)))
    assert again.recovered == rows
    assert again.lengths == {1: SEGMENT_BYTES}
    assert seen == [(0, 2), (2, 2)]
    assert all(stands(again, key, record) for key, record in rows.items())
    again.close()


def test_files_are_for_their_owner_alone(disk, home):
    write(disk, {"a": 10})
    assert home.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in home.iterdir()} == {0o600}


@pytest.mark.parametrize("size", [100, 65_536])
@pytest.mark.parametrize("at", ["magic", "size", "key", "first", "last"])
def test_a_flipped_bit_is_a_miss(disk, home, size, at):
    rows, _ = write(disk, {"before": 50, "key": size, "after": 50})
    record = rows["key"]
    begin = record.offset + record_bytes(b"key", size) - (round_up(size, 4096) if size >= 65_536 else size)
    place_of = {"magic": 0, "size": 24, "key": len(header(b"key", record)) - 1}
    offset = record.offset + place_of[at] if at in place_of else begin + (0 if at == "first" else size - 1)
    with (home / "segment-00000001").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
    assert not stands(disk, "key", record)
    assert misses(disk) == {"corrupt": 1}
    assert stands(disk, "before", rows["before"])
    assert stands(disk, "after", rows["after"])


def test_a_torn_record_is_a_miss(disk, home):
    rows, _ = write(disk, {"key": 200_000})
    with (home / "segment-00000001").open("r+b") as file:
        file.seek(100_000)
        file.write(bytes(4096))
    assert not stands(disk, "key", rows["key"])
    assert misses(disk) == {"corrupt": 1}


@pytest.mark.parametrize("change", [{"sequence": 7}, {"checksum": 1}, {"pin": 2}, {"size": 99}], ids=str)
def test_another_value_than_the_one_asked_for_is_a_miss(disk, change):
    rows, _ = write(disk, {"key": 100})
    assert not disk.read("key", rows["key"]._replace(**change), cell(100))
    assert not disk.read("kex", rows["key"], cell(100))
    assert misses(disk) == {"stale": 2}


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader_of_headers(found):
    expected = header(b"key", ObjectRecord(1, 1, 0, 10, 5, 0))
    found = found[: len(expected)].ljust(len(expected), b"\0")
    assert (why_missed(found, expected) == "") == (found == expected)


def test_what_lies_beyond_its_files_end_is_a_miss_and_not_found_after_a_restart(disk, home):
    rows, _ = write(disk, {"a": 10, "b": 70_000})
    os.truncate(home / "segment-00000001", 20_000)
    assert not stands(disk, "b", rows["b"])
    assert not stands(disk, "gone", rows["a"]._replace(segment=5))
    assert misses(disk) == {"short": 2}
    disk.close()
    for dropped in (1, 0):
        again = reopen(home)
        assert again.recovered == {"a": rows["a"]}
        assert again.counts["unrecovered"] == dropped
        again.close()


def test_values_larger_than_memory_takes_are_dropped(disk, home):
    rows, _ = write(disk, {"a": 10, "b": 70_000})
    disk.close()
    again = reopen(home, largest=60_000)
    assert again.recovered == {"a": rows["a"]}
    again.close()


def test_a_copy_is_found_where_it_was_moved_and_others_are_forgotten(disk, home):
    rows, _ = write(disk, {"small": 10, "other": 20, "large": 70_000})
    disk.create(2, SEGMENT_BYTES)
    pages = {"small": 0, "large": 4096}
    moved = [rows[key]._replace(segment=2, offset=page + rows[key].offset % 4096) for key, page in pages.items()]
    for key, to in zip(pages, moved, strict=True):
        disk.copy(key, rows[key], to)
    disk.change(moved, [rows["other"].sequence])
    disk.remove([1])
    disk.close()
    again = reopen(home)
    assert again.recovered == {"small": moved[0], "large": moved[1]}
    assert all(stands(again, key, record) for key, record in again.recovered.items())
    again.close()


def test_a_file_that_nothing_stands_in_goes_at_the_start(disk, home):
    disk.create(2, SEGMENT_BYTES)
    write(disk, {"a": 10})
    disk.close()
    reopen(home).close()
    assert [path.name for path in home.glob("segment-*")] == ["segment-00000001"]


def garble(path):
    path.write_bytes(b"no database at all" * 1000)


def foreign(path):
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE blocks (slot INTEGER)")
        db.execute("PRAGMA user_version = 1")


def nonsense(path):
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE objects SET offset = -1")


@pytest.mark.parametrize("damage", [garble, foreign, nonsense])
def test_an_index_that_cannot_be_used_is_set_aside_and_the_tier_starts_empty(disk, home, damage):
    write(disk, {"a": 10})
    disk.close()
    damage(home / "index.sqlite")
    again = reopen(home)
    assert again.recovered == {}
    assert not list(home.glob("segment-*"))
    assert (home / "index.sqlite.set-aside").exists()
    again.create(1, SEGMENT_BYTES)
    rows, _ = write(again, {"b": 10})
    again.close()
    again = reopen(home)
    assert again.recovered == rows
    again.close()


def test_two_processes_cannot_use_one_directory(disk, home):
    code = "import sys; from mooncake_zmq.pool.ssd.object_disk import ObjectDisk; ObjectDisk.open(sys.argv[1], 1)"
    run = subprocess.run([sys.executable, "-c", code, str(home)], capture_output=True, text=True, check=False)
    assert f"is used by pid {os.getpid()}" in run.stderr
    with pytest.raises(DiskError, match="is used by pid"):
        reopen(home)


def test_a_full_disk_is_a_fault_and_leaves_no_file(disk, home):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SEGMENT_BYTES, hard))
    try:
        with pytest.raises(DiskFault):
            disk.create(2, 2 * SEGMENT_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (home / "segment-00000002").exists()
    with structlog.testing.capture_logs() as logs:
        disk.change((), [99])
        assert not logs, "that has gone well on a full disk too"
        rows, _ = write(disk, {"a": 10})
    assert [entry["event"] for entry in logs] == ["store_disk_fault_over"]
    assert stands(disk, "a", rows["a"])
    assert disk.counts["failed"] == 1


@pytest.mark.parametrize(("call", "answer"), [("pwritev", 7), ("pwritev", errno.ENOSPC), ("fdatasync", errno.EIO)], ids=str)
def test_what_cannot_be_written_whole_is_a_fault_and_not_found(disk, home, monkeypatch, call, answer):
    def fail(*_):
        if answer == 7:
            return answer
        raise OSError(answer, os.strerror(answer))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(DiskFault):
            write(disk, {"a": 10})
    disk.close()
    again = reopen(home)
    assert again.recovered == {}
    again.close()


def test_a_disk_that_cannot_be_read_is_a_fault(disk, monkeypatch):
    rows, _ = write(disk, {"a": 10})

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(DiskFault):
        disk.read("a", rows["a"], cell(10))
    assert disk.counts["failed"] == 1


def test_small_values_that_lie_together_are_read_at_once(disk, monkeypatch):
    rows, _ = write(disk, {f"k{number}": 4000 for number in range(30)} | {"large": 70_000, "last": 10})
    reads = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: reads.append(arguments[2]) or preadv(*arguments))
    assert all(stands(disk, key, record, ahead=True) for key, record in rows.items())
    assert len(reads) == 4
    assert all(stands(disk, key, record, ahead=True) for key, record in reversed(rows.items()))
    assert not misses(disk)


def test_what_was_not_there_when_its_place_was_read_is_read_again(disk):
    rows, end = write(disk, {"first": 100})
    assert stands(disk, "first", rows["first"], ahead=True)
    more, _ = write(disk, {"second": 100}, start=end, sequence=9)
    assert stands(disk, "second", more["second"], ahead=True)
    assert not misses(disk)
