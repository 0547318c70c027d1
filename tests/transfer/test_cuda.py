"""KV in GPU memory, by a stand-in for CuPy whose copies are late and whose rules are CUDA's (see `cuda_stand_in`)."""

import errno
import gc
import os
import threading

import numpy as np
import pytest
from cuda_stand_in import Broken, CUDARuntimeError, Gpu
from one_block import load_layers, store_part

from mooncake_zmq.core.messages import SegmentRef, SlotRef
from mooncake_zmq.core.work import BlockLoad, SlotGrant
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.kv.checksum import block_checksum, part_checksum
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.transfer import cuda as cuda_module
from mooncake_zmq.transfer.block_copy import copy_block, load_blocks, store_block
from mooncake_zmq.transfer.cuda import DeviceSegment, DeviceSequence
from mooncake_zmq.transfer.directory import SegmentDirectory
from mooncake_zmq.transfer.segment_file import SharedMemoryError
from mooncake_zmq.transfer.shared_memory import HOST, Segment

SHAPE = {"layers": 3, "kv_heads": 1, "head_dim": 2, "capacity_tokens": 16}


def random_parts(layout, seed=3):
    random = np.random.default_rng(seed)
    return random.standard_normal((layout.layers, *layout.part_shape), dtype=np.float32)


def filled(cuda, blocks):
    """A device sequence that holds these blocks, [block, layer, *part_shape]."""
    sequence = DeviceSequence(cuda, **SHAPE)
    for index, parts in enumerate(blocks):
        for layer, part in enumerate(parts):
            sequence.write_part(layer, 4 * index, part)
    sequence.settle()
    return sequence


def commit(segment, slot, node="p"):
    segment.set_generation(slot, 2)
    checksum = block_checksum(segment.parts(slot).tolist())
    return SlotRef(node=node, incarnation=segment.incarnation, slot=slot, generation=2, checksum=checksum)


def put(segment, slot, sequence, block=0, node="p"):
    """Store a block of a sequence in a slot: the reference to it."""
    segment.set_generation(slot, 1)
    checksum = store_block(sequence, block, segment, SlotGrant(node, segment.incarnation, slot, 1))
    ref = commit(segment, slot, node)
    assert ref.checksum == checksum
    return ref


def whole(ref, block=0, tokens=4):
    return BlockLoad(block, ref, 0, 3, tokens)


def parts_of(sequence, block, tokens=4):
    out = np.empty((3, 2, tokens, 1, 2), np.float32)
    for layer in range(3):
        sequence.read_part(layer, 4 * block, 4 * block + tokens, out[layer])
    return out


def flip(gpu, address):
    (memory,) = (memory for base, (memory, _) in gpu.allocations.items() if base <= address < base + memory.nbytes)
    memory[address - memory.ctypes.data] ^= 4


# --- copies


def test_a_copy_to_the_device_is_there_once_it_is_settled_and_not_before(cuda):
    host = np.arange(8, dtype=np.float32)
    device = cuda.xp.empty(8)
    cuda.to_device(device.data.ptr, host)
    assert np.isnan(device._array).all(), "else this stand-in shows nothing"
    cuda.settle()
    assert np.array_equal(device._array, host)


def test_a_copy_to_the_host_is_there_on_return(cuda):
    device = cuda.xp.empty(8)
    cuda.to_device(device.data.ptr, np.arange(8, dtype=np.float32))
    out = np.zeros(8, np.float32)
    cuda.to_host(device.data.ptr, out)
    assert np.array_equal(out, np.arange(8))


@pytest.mark.parametrize("size", [1, 63, 64, 65, 200, 1000])
def test_staging_is_bounded_whatever_goes_through_it(cuda, monkeypatch, size):
    monkeypatch.setattr(cuda_module, "STAGING_BYTES", 64)
    cuda._staging_bytes = 64
    host = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    base = cuda.allocate(size, "a test")
    cuda.to_device(base, host)
    out = np.zeros(size, np.uint8)
    cuda.to_host(base, out)
    assert np.array_equal(out, host)
    tables = cuda._context().table.nbytes
    assert sum(memory.nbytes for memory in cuda.xp.runtime.host_memory.values()) == 64 + tables
    cuda.free(base)


def test_threads_do_not_share_staging_or_streams(cuda):
    lanes = [cuda._context()]
    thread = threading.Thread(target=lambda: lanes.append(cuda._context()))
    thread.start()
    thread.join()
    assert lanes[0] is cuda._context() is not lanes[1]
    assert lanes[0].stream.ptr != lanes[1].stream.ptr
    assert lanes[0].staging.ctypes.data != lanes[1].staging.ctypes.data


# --- pinned segments


def test_a_pinned_segment_is_copied_from_directly_until_it_is_forgotten(cuda, make_segment, fill, layout):
    owner = make_segment("c")
    ref = fill(owner, 1)
    mapped = Segment.attach(owner.path, layout, 1, writable=True)
    cuda.pin(mapped)
    assert cuda.counts["pinned_bytes"] == mapped.slots_memory().nbytes == 8 * layout.slot_bytes
    sequence = DeviceSequence(cuda, **SHAPE)
    assert load_layers(mapped, whole(ref), range(3), sequence) == owner.parts(1).tolist()
    assert cuda.counts["staged_bytes"] == 0
    view = mapped.part_view(0, 0)
    del mapped
    gc.collect()
    runtime = cuda.xp.runtime
    assert set(runtime.registered) == set(runtime.host_memory), "what remains is staging"
    assert cuda.counts["unpinned_bytes"] == cuda.counts["pinned_bytes"]
    assert not cuda.is_pinned(view[0]), "the memory is mapped still, but no longer pinned"
    assert not cuda.is_pinned(owner.part_view(0, 0))


def test_what_cannot_be_pinned_is_told_counted_and_staged(cuda, make_segment, fill, layout, capsys):
    cuda.xp.runtime.lock_limit = 0
    owner = make_segment("c")
    ref = fill(owner, 1)
    mapped = Segment.attach(owner.path, layout, 1, writable=True)
    cuda.pin(mapped)
    assert cuda.counts["pin_failures"] == 1
    assert "LimitMEMLOCK" in capsys.readouterr().out
    sequence = DeviceSequence(cuda, **SHAPE)
    assert load_layers(mapped, whole(ref), range(3), sequence) == owner.parts(1).tolist()
    assert cuda.counts["staged_bytes"] == 3 * layout.part_bytes
    mapped.set_generation(2, 1)
    assert store_block(sequence, 0, mapped, SlotGrant("c", 1, 2, 1)) == ref.checksum


def test_the_directory_maps_what_it_pins_writable_and_once(cuda, make_segment, layout):
    owner = make_segment("c")
    directory = SegmentDirectory("d", 1, "here", layout, None, cuda)
    directory.learn(("c", 1), "here", SegmentRef(path=str(owner.path), endpoint="ipc:///e", slots=8))
    reader = directory.segment(("c", 1))
    assert reader is directory.segment(("c", 1), writable=True)
    assert cuda.is_pinned(reader.part_view(7, 2))
    del reader
    directory.forget("c")
    gc.collect()
    assert cuda.counts["unpinned_bytes"] == cuda.counts["pinned_bytes"]


# --- sequences


def test_parts_come_and_go_between_a_device_sequence_and_host_memory(cuda, layout):
    blocks = np.stack([random_parts(layout, seed) for seed in range(4)])
    device, host = filled(cuda, blocks), SequenceKV(**SHAPE)
    for block, parts in enumerate(blocks):
        for layer, part in enumerate(parts):
            host.write_part(layer, 4 * block, part)
        assert np.array_equal(parts_of(device, block), parts)
    assert np.array_equal(device.keys._array, host.keys)
    assert np.array_equal(device.values._array, host.values)
    out = np.zeros((2, 9, 1, 2), np.float32)
    device.read_part(1, 3, 12, out)
    expected = np.zeros_like(out)
    host.read_part(1, 3, 12, expected)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_a_partial_block_is_loaded_as_far_as_it_counts(cuda, make_segment, fill, tokens):
    segment = make_segment("a")
    ref = fill(segment, 0)
    sequence = DeviceSequence(cuda, **SHAPE)
    assert load_layers(segment, whole(ref, 2, tokens), range(3), sequence) == segment.parts(0).tolist()
    loaded = parts_of(sequence, 2)
    for layer in range(3):
        assert np.array_equal(loaded[layer][:, :tokens], segment.part_view(0, layer)[:, :tokens])
    assert not loaded[:, :, tokens:].any()


def test_a_sequence_too_large_for_the_device_is_a_memory_error(cuda):
    cuda.xp.runtime.free_bytes = 100
    with pytest.raises(MemoryError):
        DeviceSequence(cuda, **SHAPE)


# --- slabs


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_a_slab_part_has_the_checksum_of_the_same_bytes_in_host_memory(cuda, make_slab, make_segment, layout, tokens):
    slab, plain = make_slab(cuda), make_segment("h")
    parts = random_parts(layout)
    device, host = filled(cuda, [parts]), SequenceKV(**SHAPE)
    for layer in range(3):
        host.write_part(layer, 0, parts[layer])
        checksum = store_part(device, layer, 0, tokens, slab, 2)
        assert checksum == store_part(host, layer, 0, tokens, plain, 2)
        assert slab.parts(2)[layer] == checksum
        out = np.ones(layout.part_shape, np.float32)
        slab.copy_layers(2, layer, layer + 1, out.reshape(-1).view(np.uint8))
        assert np.array_equal(out, plain.part_view(2, layer)), "the rest of a partial block is zero"


def test_own_hits_are_loaded_within_the_device(cuda, make_slab, layout):
    slab, parts = make_slab(cuda), random_parts(layout)
    ref = put(slab, 3, filled(cuda, [parts]))
    sequence = DeviceSequence(cuda, **SHAPE)
    assert load_layers(slab, whole(ref, block=1), range(3), sequence) == slab.parts(3).tolist()
    assert np.array_equal(parts_of(sequence, 1), parts)


@pytest.mark.parametrize("verify", [True, False])
def test_a_neighbour_loads_from_a_slab_it_opened(make_cuda, make_slab, layout, verify):
    prefill, decode = make_cuda(), make_cuda()
    slab, parts = make_slab(prefill), random_parts(layout)
    ref = put(slab, 3, filled(prefill, [parts]))
    opened = DeviceSegment.open(decode, slab.path, layout, 1, slab.device, slab.handle)
    sequence = DeviceSequence(decode, **SHAPE)
    loaded = load_layers(opened, whole(ref, block=1), range(3), sequence, verify_committed=verify)
    assert loaded == slab.parts(3).tolist()
    assert decode.counts["staged_bytes"] == (3 * layout.part_bytes if verify else 0)
    assert np.array_equal(parts_of(sequence, 1), parts)


@pytest.mark.parametrize("layer", range(3))
def test_a_flipped_bit_in_a_slab_does_not_verify_on_any_way_out(make_cuda, make_slab, make_segment, gpu, layout, layer):
    prefill, decode = make_cuda(), make_cuda()
    slab, pool = make_slab(prefill), make_segment("c")
    ref = put(slab, 0, filled(prefill, [random_parts(layout)]))
    opened = DeviceSegment.open(decode, slab.path, layout, 1, slab.device, slab.handle)
    flip(gpu, slab._part_at(0, layer) + layout.part_bytes - 1)
    grant = SlotGrant("c", 1, 0, 0)
    for segment, cuda in ((slab, prefill), (opened, decode)):
        assert load_layers(segment, whole(ref), range(3), DeviceSequence(cuda, **SHAPE)) is ReadFailure.CORRUPT
    assert copy_block(slab, ref, pool, grant) is ReadFailure.CORRUPT
    flip(gpu, slab._part_at(0, layer) + layout.part_bytes - 1)
    assert copy_block(slab, ref, pool, grant) == ref.checksum
    slab.parts(0)[layer] ^= 1
    fast = load_layers(opened, whole(ref), range(3), DeviceSequence(decode, **SHAPE), verify_committed=False)
    assert fast is ReadFailure.CORRUPT, "unhashed, the checksums told must still be the block's"


@pytest.mark.parametrize("verify", [True, False])
def test_a_block_being_written_is_read_part_by_part_and_never_before_its_part_is_sealed(cuda, make_slab, layout, verify):
    slab, parts = make_slab(cuda), random_parts(layout)
    source, sequence = filled(cuda, [parts]), DeviceSequence(cuda, **SHAPE)
    slab.set_generation(0, 3)
    ref = SlotRef(node="p", incarnation=1, slot=0, generation=3, checksum=0)
    for layer in range(3):
        load = BlockLoad(0, ref, layer, layer + 1, 4)
        early = load_layers(slab, load, range(layer, layer + 1), sequence, verify_committed=verify)
        assert early is ReadFailure.CORRUPT
        checksum = store_part(source, layer, 0, 4, slab, 0)
        assert load_layers(slab, load, range(layer, layer + 1), sequence, verify_committed=verify) == [checksum]
    assert np.array_equal(parts_of(sequence, 0), parts)


class Evicting:
    """Takes the source's slot away once the copy of a layer was asked for; the copy itself comes later."""

    def __init__(self, sequence, segment, at_layer, generation):
        self.sequence, self.segment, self.at_layer, self.generation = sequence, segment, at_layer, generation

    parts_at_once = 1

    def write_parts(self, parts):
        self.sequence.write_parts(parts)
        if parts[0][0] == self.at_layer:
            self.segment.set_generation(0, self.generation)

    def settle(self):
        self.sequence.settle()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("at_layer", range(3))
@pytest.mark.parametrize("where", ["slab", "pool"])
def test_eviction_during_a_late_copy_is_noticed(cuda, make_slab, make_segment, layout, where, at_layer, verify):
    segment = make_slab(cuda) if where == "slab" else make_segment("c")
    ref = put(segment, 0, filled(cuda, [random_parts(layout)]))
    sequence = DeviceSequence(cuda, **SHAPE)
    kept = load_layers(segment, whole(ref), range(3), Evicting(sequence, segment, at_layer, 2), verify_committed=verify)
    assert kept == segment.parts(0).tolist()
    taken = load_layers(segment, whole(ref), range(3), Evicting(sequence, segment, at_layer, 4), verify_committed=verify)
    assert taken is ReadFailure.UNREACHED


def test_a_pool_put_from_the_slab_keeps_the_checksum_and_needs_the_grant(cuda, make_slab, make_segment, layout):
    slab, parts = make_slab(cuda), random_parts(layout)
    pool = Segment.attach(make_segment("c").path, layout, 1, writable=True)
    cuda.pin(pool)
    ref = put(slab, 1, filled(cuda, [parts]))
    pool.set_generation(5, 7)
    assert copy_block(slab, ref, pool, SlotGrant("c", 1, 5, 9)) is ReadFailure.UNREACHED
    assert not pool.part_view(5, 0).any(), "nothing is written without a grant"
    staged = cuda.counts["staged_bytes"]
    assert copy_block(slab, ref, pool, SlotGrant("c", 1, 5, 7), verify_committed=False) == ref.checksum
    assert cuda.counts["staged_bytes"] == staged, "one DMA into the pinned slot"
    for layer in range(3):
        assert np.array_equal(pool.part_view(5, layer), parts[layer])


@pytest.mark.parametrize("pinned", [True, False])
def test_a_put_from_a_device_sequence_and_the_load_back_are_the_identity(cuda, make_segment, layout, pinned):
    pool = Segment.attach(make_segment("c").path, layout, 1, writable=True)
    blocks = np.stack([random_parts(layout, seed) for seed in range(3)])
    if pinned:
        cuda.pin(pool)
    ref = put(pool, 6, filled(cuda, blocks), block=2, node="c")
    assert ref.checksum == block_checksum([part_checksum(part.data) for part in blocks[2]])
    sequence = DeviceSequence(cuda, **SHAPE)
    assert load_layers(pool, whole(ref), range(3), sequence) == pool.parts(6).tolist()
    assert np.array_equal(parts_of(sequence, 0), blocks[2])


# --- handles


def test_a_handle_is_opened_only_for_the_life_the_layout_and_the_device_of_its_file(make_cuda, make_slab, layout):
    prefill, decode = make_cuda(), make_cuda()
    slab = make_slab(prefill, incarnation=7)
    other = BlockLayout(layers=3, kv_heads=1, head_dim=2, block_tokens=8)
    for asked in ((layout, 6, slab.device), (other, 7, slab.device), (layout, 7, b"x" * 16), (layout, 7, HOST)):
        with pytest.raises(SharedMemoryError):
            DeviceSegment.open(decode, slab.path, *asked, slab.handle)
    with pytest.raises(SharedMemoryError, match="63 bytes"):
        DeviceSegment.open(decode, slab.path, layout, 7, slab.device, slab.handle[:63])
    assert decode.counts["opened"] == decode.counts["open_failures"] == 0
    with pytest.raises(SharedMemoryError, match="slots on device"):
        Segment.attach(slab.path, layout, 7)


def test_a_host_segment_is_no_device_segment(cuda, make_segment, layout):
    segment = make_segment("a")
    with pytest.raises(SharedMemoryError, match="slots on device"):
        DeviceSegment.open(cuda, segment.path, layout, 1, cuda.uuid, b"h" * 64)


def test_the_stand_in_keeps_cudas_rules(make_cuda, make_slab, layout, gpu):
    prefill, decode = make_cuda(), make_cuda()
    slab = make_slab(prefill)
    with pytest.raises(SharedMemoryError, match="exported by this process"):
        DeviceSegment.open(prefill, slab.path, layout, 1, slab.device, slab.handle)
    assert prefill.handle(slab._address + 100) == slab.handle, "of the base, silently"
    with pytest.raises(Broken, match="not open here"):
        decode.checksums([slab._address], 8)
    opened = DeviceSegment.open(decode, slab.path, layout, 1, slab.device, slab.handle)
    with pytest.raises(Broken, match="has it open"):
        slab.free()
    del opened
    gc.collect()
    slab.free()
    assert not gpu.allocations
    memory = np.zeros(3 * 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    runtime = decode.xp.runtime
    with pytest.raises(CUDARuntimeError):
        runtime.hostRegister(memory.ctypes.data + start + 8, 4096, 0)
    runtime.hostRegister(memory.ctypes.data + start, 8192, 0)
    with pytest.raises(CUDARuntimeError, match="AlreadyRegistered"):
        runtime.hostRegister(memory.ctypes.data + start + 4096, 4096, 0)
    runtime.hostUnregister(memory.ctypes.data + start)


def test_the_stand_in_minds_memory_that_goes_before_its_copy(cuda):
    device = cuda.xp.empty(8)
    cuda.to_device(device.data.ptr, np.zeros(8, np.float32))
    del device
    gc.collect()
    with pytest.raises(Broken, match="went before"):
        cuda.settle()
    cuda.settle()


def test_a_slab_too_large_for_the_gpu_leaves_nothing_behind(cuda, gpu, layout, tmp_path, monkeypatch):
    with pytest.raises(SharedMemoryError, match=r"the GPU has 1024 MiB free of the .*lower prefill.slab_bytes"):
        DeviceSegment.allocate(cuda, tmp_path, "test", "p", layout, 1 << 30, 1, setting="prefill.slab_bytes")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryError, match="cannot create .*No space left"):
        DeviceSegment.allocate(cuda, tmp_path, "test", "p", layout, 4, 1)
    assert not gpu.allocations
    assert not list(tmp_path.iterdir())


def test_a_gpu_whose_memory_cannot_be_shared_is_told_in_one_line_and_leaves_nothing_behind(cuda, gpu, layout, tmp_path):
    def refuse(address):
        raise CUDARuntimeError("cudaErrorNotSupported: operation not supported")

    cuda.xp.runtime.ipcGetMemHandle = refuse
    with pytest.raises(SharedMemoryError, match=r"cannot be shared .*operation not supported") as refused:
        DeviceSegment.allocate(cuda, tmp_path, "test", "p", layout, 4, 1)
    assert "\n" not in str(refused.value)
    assert not gpu.allocations
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("slots", [1, 3, 20_000])
def test_a_slab_is_whole_pages_of_the_gpus(cuda, make_slab, gpu, layout, slots):
    slab = make_slab(cuda, slots=slots)
    size = gpu.allocations[slab._address][0].nbytes
    assert size % (2 << 20) == 0
    assert 0 <= size - slots * layout.slot_bytes < 2 << 20


@pytest.mark.parametrize("uuid", [b"0123456789abcdef", b"01234\x006789abcdef", b"\x00123456789abcdef", b"0123456789abcde\0"])
def test_a_slab_of_a_gpu_is_opened_whatever_zeros_its_uuid_has(make_cuda, make_slab, layout, uuid):
    gpu = Gpu(uuid=uuid)
    prefill, decode = make_cuda(gpu), make_cuda(Gpu(uuid=b"another GPU 1234"), others=[gpu])
    slab = make_slab(prefill)
    assert len(prefill.uuid) == 16
    assert prefill.uuid != HOST
    assert decode.sees(slab.device)
    assert not decode.sees(HOST)
    assert DeviceSegment.open(decode, slab.path, layout, 1, slab.device, slab.handle).handle == slab.handle


def test_the_file_of_a_slab_holds_no_slots(cuda, make_slab, layout):
    assert make_slab(cuda, slots=1000).path.stat().st_size < 1000 * layout.slot_bytes


# --- who can reach a slab


def ref_of(slab):
    return SegmentRef(path=str(slab.path), endpoint="ipc:///e", slots=slab.slots, device=slab.device, handle=slab.handle)


def test_a_slab_is_opened_once_a_life_and_closed_when_it_is_forgotten(make_cuda, make_slab, layout):
    prefill, decode = make_cuda(), make_cuda()
    slab = make_slab(prefill)
    directory = SegmentDirectory("d", 1, "here", layout, None, decode)
    for _ in range(2):
        directory.learn(("p", 1), "here", ref_of(slab))
    assert directory.endpoint(("p", 1)) is None
    reader = directory.segment(("p", 1))
    assert decode.xp.runtime.opened == {slab._address: 1}
    successor = make_slab(prefill, incarnation=2)
    assert directory.learn(("p", 2), "here", ref_of(successor)) == ("p", 1)
    assert directory.segment(("p", 1)) is None
    assert decode.xp.runtime.opened[slab._address] == 1, "a copy may be under way"
    del reader
    gc.collect()
    assert decode.xp.runtime.opened[slab._address] == 0
    assert directory.forget("p") == ("p", 2)
    gc.collect()
    assert decode.xp.runtime.opened[successor._address] == 0
    assert decode.counts["opened"] == decode.counts["closed"] == 2


def test_a_slab_out_of_reach_is_read_from_its_data_server(make_cuda, make_slab, layout, gpu):
    prefill, other = make_cuda(), make_cuda(Gpu(uuid=b"another GPU 1234"))
    slab = make_slab(prefill)
    blind = make_cuda()
    blind.xp.runtime.ipcOpenMemHandle = lambda handle: prefill.xp.runtime.ipcOpenMemHandle(handle)
    for cuda, host in ((None, "here"), (other, "here"), (make_cuda(), "there"), (blind, "here")):
        directory = SegmentDirectory("d", 1, host, layout, None, cuda)
        directory.learn(("p", 1), "here", ref_of(slab))
        assert directory.endpoint(("p", 1)) == "ipc:///e"
        assert directory.segment(("p", 1)) is None
        assert (cuda is blind) == bool(cuda and cuda.counts["open_failures"]), "nothing is opened that is not seen"


def test_another_gpu_that_the_process_sees_is_within_reach(make_cuda, make_slab, layout, gpu):
    prefill, decode = make_cuda(), make_cuda(Gpu(uuid=b"another GPU 1234"), others=[gpu])
    slab, parts = make_slab(prefill), random_parts(layout)
    ref = put(slab, 0, filled(prefill, [parts]))
    directory = SegmentDirectory("d", 1, "here", layout, None, decode)
    directory.learn(("p", 1), "here", ref_of(slab))
    sequence = DeviceSequence(decode, **SHAPE)
    assert load_layers(directory.segment(("p", 1)), whole(ref), range(3), sequence) == slab.parts(0).tolist()
    assert np.array_equal(parts_of(sequence, 0), parts)


def test_a_full_table_waits_before_staging_is_filled_that_it_would_give_away(
    make_cuda, make_segment, fill, layout, monkeypatch
):
    """Waiting frees the staging memory too: what is staged for a launch that has yet to come must not be in it."""
    monkeypatch.setattr(cuda_module, "PARTS_AT_ONCE", 1)
    cuda = make_cuda()
    monkeypatch.setattr(DeviceSequence, "parts_at_once", layout.layers)
    pool = make_segment("c")
    loads = [(pool, whole(fill(pool, block), block=block), range(layout.layers)) for block in range(4)]
    sequence = DeviceSequence(cuda, **SHAPE)
    assert load_blocks(loads, sequence) == [pool.parts(block).tolist() for block in range(4)]
    for block in range(4):
        expected = [pool.part_view(block, layer) for layer in range(layout.layers)]
        assert np.array_equal(parts_of(sequence, block), expected)
