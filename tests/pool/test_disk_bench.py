"""The bench of the SSD tier runs, verifies what it moved, and leaves nothing behind."""

from mooncake_zmq.bench.disk import disk_rows


def test_every_size_is_written_and_read_beside_bare_io(tmp_path):
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    disk.mkdir()
    memory.mkdir()
    rows = disk_rows(disk, rounds=1, working_set_bytes=16 << 20, memory_directory=memory)
    assert [row.name for row in rows] == [
        f"ssd {way} {size}" for size in ("64 KiB", "1.41 MiB", "16 MiB") for way in ("write", "read")
    ]
    assert all(row.value > 0 and row.reference > 0 for row in rows)
    assert not list(disk.iterdir())
    assert not list(memory.iterdir())
