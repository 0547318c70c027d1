"""Segments: what is written is read through another mapping, a wrong file is refused, dead lives are swept."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from segment_bytes import slot_bytes

from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.store.segment import ObjectSegment
from mooncake_zmq.transfer.segment_file import SharedMemoryError, sweep
from mooncake_zmq.transfer.shared_memory import Segment


def test_attached_segment_shows_what_its_owner_writes(make_segment, fill, layout):
    owner = make_segment("a", slots=5)
    ref = fill(owner, 4)
    other = Segment.attach(owner.path, layout, 1)
    assert (other.slots, other.generation(4), other.generation(0)) == (5, ref.generation, 0)
    for layer in range(layout.layers):
        assert other.part_view(4, layer).shape == layout.part_shape
        assert np.array_equal(other.part_view(4, layer), owner.part_view(4, layer))
    assert other.parts(4).tolist() == owner.parts(4).tolist()
    assert bytes(slot_bytes(other, 4)) == bytes(slot_bytes(owner, 4))
    assert len(slot_bytes(other, 4)) == layout.slot_bytes
    assert bytes(other.layers_view(4, 1, 3)) == bytes(slot_bytes(other, 4)[layout.part_bytes : 3 * layout.part_bytes])


def test_slots_do_not_overlap(make_segment, layout):
    segment = make_segment("a", slots=3)
    for slot in range(3):
        slot_bytes(segment, slot)[:] = bytes([slot + 1]) * layout.slot_bytes
        segment.parts(slot)[:] = slot + 10
        segment.set_generation(slot, 2 * slot)
    for slot in range(3):
        assert bytes(slot_bytes(segment, slot)) == bytes([slot + 1]) * layout.slot_bytes
        assert segment.parts(slot).tolist() == [slot + 10] * layout.layers
        assert segment.generation(slot) == 2 * slot


def test_only_a_writable_mapping_can_write(make_segment, layout):
    owner = make_segment("a")
    with pytest.raises(ValueError, match="read-only"):
        Segment.attach(owner.path, layout, 1).part_view(0, 0)[...] = 1
    Segment.attach(owner.path, layout, 1, writable=True).part_view(0, 0)[...] = 1
    assert (owner.part_view(0, 0) == 1).all()


def test_an_odd_generation_forgets_the_checksums(make_segment, fill):
    segment = make_segment("a")
    fill(segment, 0)
    segment.set_generation(0, 3)
    assert not segment.parts(0).any()


def test_large_segments_start_their_data_on_a_huge_page(make_segment):
    layout = BlockLayout(layers=2, kv_heads=4, head_dim=64, block_tokens=64)
    segment = make_segment("a", slots=16, layout=layout)
    assert (os.stat(segment.path).st_size - 16 * layout.slot_bytes) % (2 << 20) == 0


def test_all_memory_is_taken_at_the_start(make_segment, layout):
    segment = make_segment("a", slots=64)
    assert os.stat(segment.path).st_blocks * 512 >= 64 * layout.slot_bytes


def test_attach_refuses_what_it_did_not_expect(make_segment, layout, tmp_path):
    segment = make_segment("a", incarnation=7)
    other = BlockLayout(layers=3, kv_heads=1, head_dim=2, block_tokens=8)
    with pytest.raises(SharedMemoryError, match="layout"):
        Segment.attach(segment.path, other, 7)
    with pytest.raises(SharedMemoryError, match="incarnation 7, not 8"):
        Segment.attach(segment.path, layout, 8)
    with pytest.raises(SharedMemoryError, match="cannot attach"):
        Segment.attach(tmp_path / "none", layout, 7)
    for text in (b"", b"x" * 5000):
        (tmp_path / "junk").write_bytes(text)
        with pytest.raises(SharedMemoryError):
            Segment.attach(tmp_path / "junk", layout, 7)
    (tmp_path / "cut").write_bytes(segment.path.read_bytes()[:-1])
    with pytest.raises(SharedMemoryError, match="bytes"):
        Segment.attach(tmp_path / "cut", layout, 7)


def test_a_segment_of_values_is_not_taken_for_one_of_blocks(make_segment, layout, tmp_path):
    values = ObjectSegment.create(tmp_path, "test", "a", 7, entries=4, memory_bytes=8192)
    with pytest.raises(SharedMemoryError, match="another kind: b'values"):
        Segment.attach(values.path, layout, 7)
    blocks = make_segment("a.objects", incarnation=7)
    with pytest.raises(SharedMemoryError, match="another kind: b'blocks"):
        ObjectSegment.attach(blocks.path, 7, entries=4, memory_bytes=8192)
    for shape in ({"entries": 5, "memory_bytes": 8192}, {"entries": 4, "memory_bytes": 4096}):
        with pytest.raises(SharedMemoryError, match="another shape"):
            ObjectSegment.attach(values.path, 7, **shape)
    values.close()


def test_too_little_space_is_told_before_anything_is_created(layout, tmp_path):
    with pytest.raises(SharedMemoryError, match=r"MiB free of the \d+ MiB needed: .*lower pool_bytes"):
        Segment.create(tmp_path, "test", "a", layout, 1 << 40, 1, setting="pool_bytes")
    assert not list(tmp_path.iterdir())


def test_no_file_is_left_when_the_memory_runs_out_after_all(layout, tmp_path, monkeypatch):
    def full(fd: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryError, match="No space left.*lower slots"):
        Segment.create(tmp_path, "test", "a", layout, 4, 1)
    assert not list(tmp_path.iterdir())


def test_a_mapping_outlives_its_owner(make_segment, fill, layout):
    owner = make_segment("a")
    fill(owner, 1)
    expected = bytes(slot_bytes(owner, 1))
    other = Segment.attach(owner.path, layout, 1)
    owner.close()
    owner.close()
    assert bytes(slot_bytes(other, 1)) == expected


DYING_OWNER = """
import os, sys
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.transfer.shared_memory import Segment
layout = BlockLayout(layers=3, kv_heads=1, head_dim=2, block_tokens=4)
for node, incarnation in [("dead", 1), ("c=d/e", 2), ("other", 3)]:
    Segment.create(sys.argv[1], "else" if node == "other" else "test", node, layout, 2, incarnation)
os._exit(0)
"""


def test_sweep_removes_the_segments_of_dead_lives_only(make_segment, tmp_path, layout):
    subprocess.run([sys.executable, "-c", DYING_OWNER, str(tmp_path)], check=True)
    living = make_segment("living", incarnation=9)
    (tmp_path / "mooncake=test=x=y").touch()
    assert len(list(tmp_path.iterdir())) == 5
    asked = []

    def is_alive(node: str, incarnation: int) -> bool:
        asked.append((node, incarnation))
        return node == "dead"

    (dead,) = tmp_path.glob("*c%3Dd%2Fe*")
    mapped = Segment.attach(dead, layout, 2, writable=True)
    mapped.set_generation(1, 2)
    with dead.open("rb") as file:
        assert os.fstat(file.fileno()).st_blocks > 0
        assert [path.name.split("=")[2] for path in sweep(tmp_path, "test", is_alive)] == ["c%3Dd%2Fe"]
        assert os.fstat(file.fileno()).st_blocks == 0, "its memory is free, whoever maps it"
    assert mapped.generation(1) == 0
    assert sorted(asked) == [("c=d/e", 2), ("dead", 1), ("living", 9)]
    assert living.path.exists(), "its owner lives, whatever the lock says"
    assert len(sweep(tmp_path, "test", lambda *_: False)) == 1
    assert {path.name.split("=")[1] for path in tmp_path.iterdir()} == {"else", "test"}
    for path in tmp_path.iterdir():
        if path != living.path:
            Path(path).unlink()
