"""Registered buffers in a GPU's memory: values go to and from there, and memory that is nobody's is refused."""

import ctypes
import mmap
import os

import pytest
from cuda_stand_in import FakeCupy, Gpu
from store_harness import SLAB_BYTES, Memory
from structlog.testing import capture_logs

from mooncake_zmq.store.client import device_memory
from mooncake_zmq.store.client.device_memory import DeviceMemory, is_readable
from mooncake_zmq.transfer.cuda import DeviceCopies


class Device:
    """A GPU's memory, which the host sees only by copies."""

    def __init__(self, monkeypatch):
        self.cupy = FakeCupy(Gpu())
        self.runtime = self.cupy.cuda.runtime
        monkeypatch.setattr(device_memory, "is_readable", lambda address: self.runtime.owner(address, 1) is None)

    def memory(self):
        return DeviceMemory(lambda: DeviceCopies(self.cupy))

    def buffer(self, content):
        address = self.runtime.malloc(len(content))
        self.view(address)[:] = content
        return address

    def view(self, address):
        return memoryview(self.runtime.gpu.allocations[address][0])


@pytest.fixture
def device(monkeypatch, store):
    device = Device(monkeypatch)
    store._memory.device = device.memory()
    return device


def test_values_go_from_and_to_a_gpu(store, device, monkeypatch):
    monkeypatch.setattr(device_memory, "STAGING_BYTES", 100_000)  # several turns
    sizes = [70_000, 1, 40_000, SLAB_BYTES]
    values = [os.urandom(size) for size in sizes]
    sources = [device.buffer(value) for value in values]
    targets = [device.buffer(bytes(size)) for size in sizes]
    for address, size in zip(sources + targets, sizes * 2, strict=True):
        assert store.register_buffer(address, size) == 0
    keys = list("abcd")
    assert store.batch_put_from(keys, sources, sizes) == [0] * 4
    assert store.get_batch(keys) == values
    assert store.batch_get_into([*keys, "none"], [*targets, targets[0]], [*sizes, 9]) == [*sizes, -704]
    assert [bytes(device.view(target)) for target in targets] == values
    assert store.get_into("a", targets[1], 1) == -600
    assert not device.runtime.pageable_bytes, "all copies are of pinned memory"


def test_one_value_may_lie_in_a_gpu_and_in_the_host(store, device):
    host, content = Memory(8), os.urandom(5000)
    address = device.buffer(content + bytes(5000))
    assert store.register_buffer(address, 10_000) == 0
    parts = [[address, host.address, address + 100]]
    assert store.batch_put_from_multi_buffers(["k"], parts, [[10, 8, 4900]]) == [0]
    assert store.get("k") == content[:10] + bytes(8) + content[100:]
    assert store.batch_get_into_multi_buffers(["k"], [[address + 5000, host.address]], [[4000, 8]]) == [-600]
    room = Memory(2000)
    assert store.batch_get_into_multi_buffers(["k"], [[address + 5000, room.address]], [[4000, 2000]]) == [4918]
    assert bytes(device.view(address)[5000:9000]) + room.bytes(0, 918) == store.get("k")
    assert store.get_into_ranges([address], [["k"]], [[[3]]], [[[4]]], [[[5]]]) == [[[5]]]
    assert bytes(device.view(address)[3:8]) == content[4:9]


def test_a_buffer_that_is_unregistered_is_the_gpus_no_more(store, device):
    address = device.buffer(bytes(10))
    assert store.register_buffer(address, 10) == 0
    assert store._memory.device.holds([[(address, 10)]])
    assert store.unregister_buffer(address) == 0
    assert not store._memory.device.holds([[(address, 10)]])


def test_memory_that_nobody_can_reach_is_refused_in_one_line(store):

    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    unreadable = libc.mmap(None, ctypes.c_size_t(mmap.PAGESIZE), 0, 0x22, -1, ctypes.c_long(0))
    assert not is_readable(unreadable)
    with capture_logs() as lines:
        assert store.register_buffer(unreadable, mmap.PAGESIZE) == -600
    (line,) = lines
    assert "not the host's" in line["reason"]
    assert "\n" not in line["reason"]
    assert "gpu-cu12" in line["reason"]
    assert store.unregister_buffer(unreadable) == -600
    # A connector that goes on all the same gets an answer, and its process lives.
    assert store.batch_put_from(["k"], [unreadable], [8]) == [-600]
    assert store.put("k", b"12345678") == 0
    assert store.get_into("k", unreadable + 8, 8) == -600
    assert store.get_into_ranges([unreadable], [["k"]], [[[0]]], [[[0]]], [[[8]]]) == [[[-600]]]


def test_host_memory_needs_no_gpu(store):
    memory = Memory(100)
    assert is_readable(memory.address)
    assert store.register_buffer(memory.address, 100) == 0
    assert not store._memory.device.holds([[(memory.address, 100)]])
