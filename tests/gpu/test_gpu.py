"""What only a GPU can show. Run them with `pytest tests/gpu -s`; without CuPy and a GPU they are skipped, and the reason told;
with REQUIRE_GPU=1 they fail, and tests/cluster/test_device_cluster.py runs on the GPU too.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import BlockLoad, SlotGrant
from mooncake_zmq.engine import weights
from mooncake_zmq.engine.backend import array_namespace
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.kv.checksum import block_checksum, part_checksum  # noqa: F401
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.transfer.block_copy import copy_block, load_blocks, store_block
from mooncake_zmq.transfer.cuda import Cuda, DeviceSegment, DeviceSequence
from mooncake_zmq.transfer.shared_memory import Segment

LAYOUT = BlockLayout(layers=4, kv_heads=8, head_dim=128, block_tokens=32)
SHAPE = {"layers": 4, "kv_heads": 8, "head_dim": 128}
TOKENS = np.random.default_rng(1).integers(0, 500, 300).astype(np.int32)


@pytest.fixture(scope="module", autouse=True)
def gpu():
    try:
        return array_namespace("cuda")
    except ValueError as error:
        if os.environ.get("REQUIRE_GPU") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def cuda(gpu):
    opened = Cuda(gpu, LAYOUT)
    yield opened
    opened.close()


@pytest.fixture
def slab(cuda, tmp_path):
    """Two committed blocks."""
    made = DeviceSegment.allocate(cuda, tmp_path, "test", "p", LAYOUT, 2, 7)
    sequence = DeviceSequence(cuda, **SHAPE, capacity_tokens=64)
    random = np.random.default_rng(2)
    made.blocks = random.standard_normal((2, 4, *LAYOUT.part_shape), dtype=np.float32)
    made.refs = []
    for block in range(2):
        for layer in range(4):
            sequence.write_part(layer, 32 * block, made.blocks[block, layer])
        sequence.settle()
        made.set_generation(block, 1)
        checksum = store_block(sequence, block, made, SlotGrant("p", 7, block, 1))
        made.set_generation(block, 2)
        made.refs.append(SlotRef(node="p", incarnation=7, slot=block, generation=2, checksum=checksum))
    yield made
    made.close()
    made.free()


def load_one(segment, load, sequence, **options):
    return load_blocks([(segment, load, range(4))], sequence, **options)[0]


def parts_of(sequence, block):
    out = np.empty((4, *LAYOUT.part_shape), np.float32)
    for layer in range(4):
        sequence.read_part(layer, 32 * block, 32 * block + 32, out[layer])
    return out


GROUPED = '{"layers": 3, "hidden": 96, "heads": 12, "kv_heads": 2, "head_dim": 24, "ffn": 200, "tied": true}'
QWEN3 = '{"family": "qwen3", "heads": 4, "kv_heads": 4, "head_dim": 128}'


@pytest.mark.parametrize("shape", ["tiny", GROUPED, QWEN3])
def test_logits_are_numpys(cuda, tmp_path, shape):
    path = prepare(f"dummy:{shape}", tmp_path)

    def new_sequence(**shape):
        return DeviceSequence(cuda, **shape)

    logits = []
    for engine in (weights.open_model(path), weights.open_model(path, device="cuda", sequences=new_sequence)):
        one, two = engine.new_sequence(400), engine.new_sequence(100)
        engine.prefill(one, TOKENS[:130], logits_at=None)
        of_prompt = engine.prefill(one, TOKENS[130:300], logits_at=(0, 63, -1))
        of_other = engine.prefill(two, TOKENS[:1])
        steps = [engine.decode([one, two], TOKENS[at : at + 2]) for at in range(3)]
        logits.append(np.concatenate([of_prompt, of_other, *steps]))
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-3)


def test_a_step_of_short_and_long_sequences_is_numpys(cuda, tmp_path):
    """Whose splits are many, one and none."""
    path = prepare("dummy:tiny", tmp_path)
    prompt = np.random.default_rng(5).integers(0, 500, 3000).astype(np.int32)
    logits = []
    for engine in (weights.open_model(path), weights.open_model(path, device="cuda")):
        sequences = [engine.new_sequence(3100) for _ in range(5)]
        for sequence, length in zip(sequences, (3000, 1, 63, 64, 700), strict=True):
            engine.prefill(sequence, prompt[:length], logits_at=None)
        logits.append(np.concatenate([engine.decode(sequences, TOKENS[at : at + 5]) for at in range(3)]))
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-3)


@pytest.fixture
def shared_memory():
    """A file of a disk cannot be pinned."""
    with tempfile.TemporaryDirectory(prefix="mooncake-test-", dir="/dev/shm") as path:
        yield Path(path)


def test_a_block_goes_through_sequence_slab_and_pool_and_stays_what_it_was(cuda, slab, shared_memory):
    owner = Segment.create(shared_memory, "test", "c", LAYOUT, 2, 1)
    pool = Segment.attach(owner.path, LAYOUT, 1, writable=True)
    cuda.pin(pool)
    assert cuda.counts["pin_failures"] == 0, "allow more locked memory: ulimit -l unlimited"
    assert copy_block(slab, slab.refs[1], pool, SlotGrant("c", 1, 0, 0)) == slab.refs[1].checksum
    for layer in range(4):
        assert np.array_equal(pool.part_view(0, layer), slab.blocks[1, layer])
    ref = SlotRef(node="c", incarnation=1, slot=0, generation=0, checksum=slab.refs[1].checksum)
    for segment, source in ((slab, slab.refs[1]), (pool, ref)):
        sequence = DeviceSequence(cuda, **SHAPE, capacity_tokens=64)
        assert load_one(segment, BlockLoad(1, source, 0, 4, 32), sequence) == slab.parts(1).tolist()
        assert np.array_equal(parts_of(sequence, 1), slab.blocks[1])
    del pool, segment
    assert cuda.counts["unpinned_bytes"] == cuda.counts["pinned_bytes"]
    owner.close()


NEIGHBOUR = """
import sys
import test_gpu as t
cuda = t.Cuda(t.array_namespace("cuda"), t.LAYOUT)
path, device, handle, checksum = sys.argv[1], *map(bytes.fromhex, sys.argv[2:4]), int(sys.argv[4])
assert cuda.sees(device)
slab = t.DeviceSegment.open(cuda, path, t.LAYOUT, 7, device, handle)
for verify in (True, False):
    sequence = t.DeviceSequence(cuda, **t.SHAPE, capacity_tokens=64)
    ref = t.SlotRef(node="p", incarnation=7, slot=1, generation=2, checksum=checksum)
    parts = t.load_one(slab, t.BlockLoad(0, ref, 0, 4, 32), sequence, verify_committed=verify)
    assert parts == slab.parts(1).tolist(), parts
    assert t.block_checksum([t.part_checksum(part.data) for part in t.parts_of(sequence, 0)]) == checksum
del slab
assert cuda.counts["closed"] == 1
print("read")
"""


def test_another_process_reads_a_slab_by_its_handle(slab):
    arguments = [str(slab.path), slab.device.hex(), slab.handle.hex(), str(slab.refs[1].checksum)]
    code = f"import sys\nsys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n{NEIGHBOUR}"
    told = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert (told.returncode, told.stdout) == (0, "read\n"), told.stderr


def test_bandwidths_are_told(cuda, gpu, capsys):
    size = 64 << 20
    device = gpu.empty(size, dtype=np.uint8)
    pageable, pinned = np.ones(size, np.uint8), cuda.pinned(size)
    pinned[:] = 1
    gpu.cuda.get_current_stream().synchronize()
    runtime, stream = gpu.cuda.runtime, cuda._context().stream

    def speed(target, source, kind):
        times = []
        for _ in range(7):
            began = time.perf_counter()
            runtime.memcpyAsync(target, source, size, kind, stream.ptr)
            stream.synchronize()
            times.append(time.perf_counter() - began)
        return size / sorted(times)[3] / 1e9

    at = device.data.ptr
    with capsys.disabled():
        for name, host in (("pinned", pinned), ("pageable", pageable)):
            into = speed(at, host.ctypes.data, runtime.memcpyHostToDevice)
            out = speed(host.ctypes.data, at, runtime.memcpyDeviceToHost)
            print(f"\n{name}: {into:.1f} GB/s to the GPU, {out:.1f} GB/s from it")
