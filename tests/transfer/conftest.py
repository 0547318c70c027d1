"""Small segments full of random blocks, in host memory and on a stand-in's GPU, and a list that catches what a thread's crash
path reports."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_stand_in import FakeCupy, Gpu

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.kv.checksum import block_checksum, part_checksum
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.transfer.cuda import Cuda, DeviceSegment
from mooncake_zmq.transfer.shared_memory import Segment

LAYOUT = BlockLayout(layers=3, kv_heads=1, head_dim=2, block_tokens=4)

MakeSegment = Callable[..., Segment]
Fill = Callable[..., SlotRef]


@pytest.fixture
def layout() -> BlockLayout:
    return LAYOUT


@pytest.fixture
def make_segment(tmp_path: Path) -> Iterator[MakeSegment]:
    made: list[Segment] = []

    def make(node: str, *, slots: int = 8, incarnation: int = 1, layout: BlockLayout = LAYOUT) -> Segment:
        made.append(Segment.create(tmp_path, "test", node, layout, slots, incarnation))
        return made[-1]

    yield make
    for segment in made:
        segment.close()
    assert not list(tmp_path.glob("mooncake=*"))


@pytest.fixture
def fill() -> Fill:
    """Write a random committed block into a slot and return the reference to it."""
    random = np.random.default_rng(7)

    def fill_slot(segment: Segment, slot: int, *, node: str = "", generation: int = 2) -> SlotRef:
        node = node or segment.path.name.split("=")[2]
        segment.set_generation(slot, generation - 1)
        for layer in range(segment.layout.layers):
            part = segment.part_view(slot, layer)
            part[...] = random.standard_normal(part.shape, dtype=np.float32)
            segment.parts(slot)[layer] = part_checksum(part.data)
        segment.set_generation(slot, generation)
        checksum = block_checksum(segment.parts(slot).tolist())
        return SlotRef(node=node, incarnation=segment.incarnation, slot=slot, generation=generation, checksum=checksum)

    return fill_slot


@pytest.fixture
def crashes() -> Iterator[list[BaseException]]:
    """What `on_crash` was given; nothing, unless the test takes it out."""
    caught: list[BaseException] = []
    yield caught
    assert not caught


@pytest.fixture
def gpu():
    return Gpu()


@pytest.fixture
def make_cuda(gpu, layout):
    """One process's view of the GPU."""
    made = []

    def make(gpu=gpu, others=()):
        made.append(Cuda(FakeCupy(gpu, others), layout))
        return made[-1]

    yield make
    for cuda in made:
        assert not any(cuda.xp.runtime.streams.values()), "a copy was never waited for"
        assert cuda.xp.runtime.pageable_bytes == 0, "all copies go through pinned memory"
        cuda.close()
        assert not cuda.xp.runtime.host_memory


@pytest.fixture
def cuda(make_cuda):
    return make_cuda()


@pytest.fixture
def make_slab(layout, tmp_path):
    made = []
    directory = tmp_path / "slabs"
    directory.mkdir()

    def make(cuda, node="p", *, slots=4, incarnation=1):
        made.append(DeviceSegment.allocate(cuda, directory, "test", node, layout, slots, incarnation))
        return made[-1]

    yield make
    for slab in made:
        slab.close()
