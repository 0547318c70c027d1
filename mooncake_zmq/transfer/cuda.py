"""KV in GPU memory: pinned host memory, copies on streams, and slots in one allocation that neighbours open by IPC handle.

Written without a GPU, against a stand-in for CuPy that keeps CUDA's rules; not yet run on one.

What is verified, and where. A part's checksum is made of its bytes in host memory, which every part of a device slab visits
once: in pinned staging, right after it was written to its slot and before its neighbours hear of it. From then on it is
compared on every way a part can go:
- host slot to GPU: the source's bytes are hashed while the DMA reads them, as `verify_local` says; a source that changes
  between the two is told by its generation, looked at once the copy has ended (`block_copy`);
- device slab to DRAM slot (a pool's put) and to another host's frame: the bytes that arrived are hashed there;
- device slab to another sequence of this host, on one GPU or between two: with `verify_local` the copy is hashed too, by way of
  pinned staging; without, generations guard it, and the checksums that were told fold to the block's.
So a lost, torn or foreign block is a miss on each of them, and never a wrong answer.

Streams. Each thread copies on a stream of its own that waits for no other; the engine computes on the default stream. They
agree through the host alone: an engine has waited for its stream before it says that KV is stored, and a copy is announced
after `settle`. So neither side ever reads what the other still writes, without a single event.

Sketch, all of it estimates: a part of 262 kB (8 heads of 128, 32 tokens) takes 10 us over PCIe 4 at 25 GB/s, if its host memory
is pinned, about three times that if it is not; its hash takes 13 us and runs beside a load's DMA. Sealing a part costs the
writer 20 to 30 us, some 5 % of what a 7B model computes for it, and the GPU is idle meanwhile: sealing a whole layer's parts
with one wait is the first thing to try on a GPU.
"""

import ctypes
import threading
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import structlog
from numpy.typing import NDArray

from mooncake_zmq.engine.backend import array_namespace
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.kv.checksum import part_checksum
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.transfer.shared_memory import HOST, UUID_BYTES, Segment, SharedMemoryError

log = structlog.get_logger()

STAGING_BYTES = 4 << 20
"""Pinned memory of each thread that copies: what is larger waits for the stream in between. A part must fit in, so the largest
part is the least size."""

ALLOCATION_BYTES = 2 << 20
"""What is shared is whole pages of the GPU's, lest a neighbour sees what else lies in its last one."""
HANDLE_BYTES = 64


@dataclass(slots=True)
class _Lane:
    """What one thread copies with. The first `used` bytes of `staging` are in use until its stream is synchronized."""

    stream: Any
    staging: NDArray[np.uint8]
    used: int = 0


class Cuda:
    """The GPU of this process, by way of CuPy's runtime calls. Any thread may use it; one thread's copies keep their order."""

    def __init__(self, cupy: Any, layout: BlockLayout) -> None:
        """`cupy`: the module, or a stand-in."""
        self.xp = cupy
        names = ("pinned_bytes", "unpinned_bytes", "pin_failures", "staged_bytes", "opened", "closed", "open_failures")
        self.counts = dict.fromkeys(names, 0)
        self._runtime = cupy.cuda.runtime
        self._staging_bytes = max(STAGING_BYTES, layout.part_bytes)
        self._lanes = threading.local()
        self._lock = threading.RLock()  # a segment may end, and be unpinned, wherever its last reference happens to go
        self._pinned: tuple[tuple[int, int], ...] = ()
        """Address ranges of pinned host memory; replaced as a whole, so that readers need no lock."""
        self._allocated: list[int] = []
        self._uuids = [self._uuid(device) for device in range(self._runtime.getDeviceCount())]
        self.uuid = self._uuids[self._runtime.getDevice()]

    @classmethod
    def open(cls, layout: BlockLayout) -> Self:
        """Raises ValueError with one line that says what to do."""
        return cls(array_namespace("cuda"), layout)

    def close(self) -> None:
        """Free the staging memory, once no thread copies any more."""
        with self._lock:
            allocated, self._allocated = self._allocated, []
        for address in allocated:
            self._runtime.freeHost(address)

    # --- copies, on the calling thread's stream

    def stream(self) -> AbstractContextManager[Any]:
        """What CuPy is asked to do within goes to this thread's stream."""
        stream: AbstractContextManager[Any] = self._lane().stream
        return stream

    def settle(self) -> None:
        """Return once all that this thread asked for is done."""
        lane = self._lane()
        lane.stream.synchronize()
        lane.used = 0

    def to_device(self, host: NDArray[Any]) -> Any:
        """A device array with what `host` holds; both are to stay as they are until `settle`."""
        lane = self._lane()
        with lane.stream:
            device = self.xp.empty(host.shape, dtype=host.dtype)
        at = device.data.ptr
        for run in _runs(host):
            source = run
            if not self.is_pinned(run):
                source = self._stage(lane, run.nbytes)
                source[:] = _bytes(run)
            self._copy(at, source.ctypes.data, run.nbytes, self._runtime.memcpyHostToDevice)
            at += run.nbytes
        return device

    def to_host(self, address: int, out: NDArray[Any]) -> None:
        """Copy device memory into `out`: it is there on return."""
        lane = self._lane()
        for run in _runs(out):
            if self.is_pinned(run):
                self._copy(run.ctypes.data, address, run.nbytes, self._runtime.memcpyDeviceToHost)
            else:
                for first in range(0, run.nbytes, self._staging_bytes):
                    piece = _bytes(run)[first : first + self._staging_bytes]
                    staged = self._stage(lane, piece.nbytes)
                    self._copy(staged.ctypes.data, address + first, piece.nbytes, self._runtime.memcpyDeviceToHost)
                    self.settle()
                    piece[:] = staged
            address += run.nbytes
        self.settle()

    def within(self, target: int, source: int, size_bytes: int) -> None:
        """From GPU memory to GPU memory, a neighbour's GPU included."""
        self._copy(target, source, size_bytes, self._runtime.memcpyDefault)

    def checksum(self, address: int, size_bytes: int) -> int:
        """Of at most a part of device memory, by way of the host's."""
        staged = self._stage(self._lane(), size_bytes)
        self._copy(staged.ctypes.data, address, size_bytes, self._runtime.memcpyDeviceToHost)
        self.settle()
        return part_checksum(staged.data)

    def _copy(self, target: int, source: int, size_bytes: int, kind: int) -> None:
        self._runtime.memcpyAsync(target, source, size_bytes, kind, self._lane().stream.ptr)

    def _stage(self, lane: _Lane, size_bytes: int) -> NDArray[np.uint8]:
        """Room in the thread's staging memory until `settle`; if there is none, wait until what uses it is done."""
        if lane.used + size_bytes > len(lane.staging):
            self.settle()
        room = lane.staging[lane.used : lane.used + size_bytes]
        assert room.nbytes == size_bytes
        lane.used += size_bytes
        self.counts["staged_bytes"] += size_bytes
        return room

    def _lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._lanes, "lane", None)
        if lane is None:
            lane = self._lanes.lane = _Lane(self.xp.cuda.Stream(non_blocking=True), self.pinned(self._staging_bytes))
        return lane

    # --- host memory

    def pinned(self, size_bytes: int) -> NDArray[np.uint8]:
        """Host memory that the GPU copies to and from by itself, until `close`."""
        address = self._runtime.hostAlloc(size_bytes, 0)
        with self._lock:
            self._allocated.append(address)
            self._pinned += ((address, address + size_bytes),)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))

    def pin(self, segment: Segment) -> None:
        """Register an attached segment's slots, for as long as it lives. Where that is not allowed, copies are staged."""
        memory = segment.slots_memory()
        address, size_bytes = memory.ctypes.data, memory.nbytes
        try:
            self._runtime.hostRegister(address, size_bytes, 0)
        except self._runtime.CUDARuntimeError as error:
            self.counts["pin_failures"] += 1
            advice = "allow more locked memory (ulimit -l unlimited, LimitMEMLOCK=infinity); copies are staged meanwhile"
            log.warning("segment_not_pinned", path=str(segment.path), bytes=size_bytes, error=str(error), advice=advice)
            return
        with self._lock:
            self._pinned += ((address, address + size_bytes),)
        self.counts["pinned_bytes"] += size_bytes
        # A segment's end comes before its mapping's, and after the end of every copy that holds it.
        weakref.finalize(segment, self._unpin, address, size_bytes).atexit = False

    def is_pinned(self, memory: NDArray[Any]) -> bool:
        """Whether contiguous host memory is pinned as a whole."""
        start, stop = memory.ctypes.data, memory.ctypes.data + memory.nbytes
        return any(first <= start and stop <= last for first, last in self._pinned)

    def _unpin(self, address: int, size_bytes: int) -> None:
        with self._lock:
            self._pinned = tuple(each for each in self._pinned if each[0] != address)
        self._runtime.hostUnregister(address)
        self.counts["unpinned_bytes"] += size_bytes

    # --- device memory that neighbours share

    def sees(self, uuid: bytes) -> bool:
        """Whether this process may open handles of that device."""
        return uuid in self._uuids

    def allocate(self, size_bytes: int, why: str) -> int:
        """An allocation of its own, outside CuPy's pool: a handle stands for the base of one. Raises SharedMemoryError."""
        try:
            return int(self._runtime.malloc(-(-size_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES))
        except self._runtime.CUDARuntimeError as error:
            free, _ = self._runtime.memGetInfo()
            reason = f"the GPU has {free >> 20} MiB free of the {size_bytes >> 20} MiB needed"
            raise SharedMemoryError(f"{reason}: {why} ({error})") from error

    def free(self, address: int) -> None:
        """Only while nobody can have it open: freeing what is open elsewhere is undefined."""
        self._runtime.free(address)

    def handle(self, address: int) -> bytes:
        """What a neighbour opens the allocation at `address` with. Raises SharedMemoryError."""
        try:
            return bytes(self._runtime.ipcGetMemHandle(address))
        except self._runtime.CUDARuntimeError as error:
            reason = "device 'cuda' needs CUDA IPC, which this system does not offer"
            raise SharedMemoryError(f"GPU memory cannot be shared with other processes: {reason} ({error})") from error

    def open_handle(self, handle: bytes) -> int:
        """Map a neighbour's allocation. Raises SharedMemoryError."""
        if len(handle) != HANDLE_BYTES:
            raise SharedMemoryError(f"a handle of {len(handle)} bytes is none")
        try:
            address = int(self._runtime.ipcOpenMemHandle(handle))
        except self._runtime.CUDARuntimeError as error:
            self.counts["open_failures"] += 1
            raise SharedMemoryError(f"cannot open a neighbour's GPU memory: {error}") from error
        self.counts["opened"] += 1
        return address

    def close_handle(self, address: int) -> None:
        """The end of `open_handle`, after the last copy from there."""
        self._runtime.ipcCloseMemHandle(address)
        self.counts["closed"] += 1

    def _uuid(self, device: int) -> bytes:
        """As CuPy tells it: up to the first zero byte. Never that of host memory."""
        uuid = bytes(self._runtime.getDeviceProperties(device)["uuid"])[:UUID_BYTES].ljust(UUID_BYTES, b"\0")
        return uuid if uuid != HOST else b"\1" + uuid[1:]


class DeviceSegment(Segment):
    """A segment whose slots are one allocation of GPU memory. Generations, checksums and the owner's lock stay in its file.

    The owner's memory goes with its process, not before: a neighbour may have it open, and keeps it then until it closes.
    """

    _cuda: Cuda
    _address: int
    handle: bytes

    @classmethod
    def allocate(
        cls,
        cuda: Cuda,
        directory: str | Path,
        cluster: str,
        node: str,
        layout: BlockLayout,
        slots: int,
        incarnation: int,
        *,
        setting: str = "slots",
    ) -> Self:
        """As `Segment.create`; `setting` is what an operator lowers to need less."""
        address = cuda.allocate(slots * layout.slot_bytes, f"{slots} slots for {node}; lower {setting}")
        try:
            handle = cuda.handle(address)
            segment = cls.create(directory, cluster, node, layout, slots, incarnation, setting=setting, device=cuda.uuid)
        except BaseException:
            cuda.free(address)
            raise
        segment._cuda, segment._address, segment.handle = cuda, address, handle
        return segment

    @classmethod
    def open(cls, cuda: Cuda, path: str | Path, layout: BlockLayout, incarnation: int, device: bytes, handle: bytes) -> Self:
        """A neighbour's. Its file says first that it is of this life, layout and device: only then is the handle opened. It is
        closed when nothing refers to the segment any more."""
        segment = cls.attach(path, layout, incarnation, device=device)
        segment._cuda, segment._address = cuda, cuda.open_handle(handle)
        segment.handle = handle
        weakref.finalize(segment, cuda.close_handle, segment._address).atexit = False
        return segment

    def free(self) -> None:
        """Give an owner's memory back before its process ends, where no neighbour has it open."""
        self._cuda.free(self._address)

    def part_view(self, slot: int, layer: int) -> Any:
        """A copy of the part in this process's own GPU memory, on the calling thread's stream."""
        return self._taken(self._part_at(slot, layer))

    def copy_part(self, slot: int, layer: int, out: NDArray[Any]) -> None:
        self._cuda.to_host(self._part_at(slot, layer), out)

    def copy_layers(self, slot: int, first_layer: int, stop_layer: int, out: NDArray[np.uint8]) -> None:
        """Copy a range of layers' parts, which are contiguous, into host memory."""
        assert out.nbytes == (stop_layer - first_layer) * self.layout.part_bytes
        self._cuda.to_host(self._part_at(slot, first_layer), out)

    def checksum(self, part: Any) -> int:
        return self._cuda.checksum(part.data.ptr, part.nbytes)

    def part_room(self, slot: int, layer: int) -> Any:
        with self._cuda.stream():
            return self._cuda.xp.empty(self.layout.part_shape, dtype=self.layout.dtype)

    def seal_part(self, slot: int, layer: int, part: Any, tokens: int) -> int:
        """As in host memory; what is hashed is read back from the slot."""
        address = self._part_at(slot, layer)
        with self._cuda.stream():
            part[:, tokens:] = 0
        self._cuda.within(address, part.data.ptr, self.layout.part_bytes)
        checksum = self._cuda.checksum(address, self.layout.part_bytes)
        self.parts(slot)[layer] = checksum
        return checksum

    def write_part(self, slot: int, layer: int, part: NDArray[Any]) -> int:
        room = self._cuda.to_device(part)
        self._cuda.settle()
        return self.seal_part(slot, layer, room, self.layout.block_tokens)

    def layers_view(self, slot: int, first_layer: int, stop_layer: int) -> memoryview:
        raise AssertionError("slots in GPU memory have no view in host memory: see copy_layers")

    def staging(self, size_bytes: int) -> NDArray[np.uint8]:
        """Pinned memory for `copy_layers`, for as long as the process uses its GPU."""
        return self._cuda.pinned(size_bytes)

    def _taken(self, address: int) -> Any:
        with self._cuda.stream():
            part = self._cuda.xp.empty(self.layout.part_shape, dtype=self.layout.dtype)
        self._cuda.within(part.data.ptr, address, self.layout.part_bytes)
        return part

    def _part_at(self, slot: int, layer: int) -> int:
        assert slot < self.slots
        return self._address + slot * self.layout.slot_bytes + layer * self.layout.part_bytes


class DeviceSequence(SequenceKV):
    """A sequence in GPU memory, whose parts come and go on the calling thread's stream, from host or GPU memory."""

    __slots__ = ("_cuda",)

    def __init__(self, cuda: Cuda, *, layers: int, kv_heads: int, head_dim: int, capacity_tokens: int) -> None:
        self._cuda = cuda
        with cuda.stream():  # a sequence is opened by the thread of the event loop, which is not to wait for the engine
            super().__init__(layers=layers, kv_heads=kv_heads, head_dim=head_dim, capacity_tokens=capacity_tokens, xp=cuda.xp)

    def write_part(self, layer: int, start: int, part: Any) -> None:
        part = self._cuda.to_device(part) if isinstance(part, np.ndarray) else part
        with self._cuda.stream():
            super().write_part(layer, start, part)

    def settle(self) -> None:
        self._cuda.settle()

    def read_part(self, layer: int, start: int, stop: int, out: Any) -> None:
        """Into host memory it is there on return; into GPU memory, in its order on the stream."""
        with self._cuda.stream():
            if not isinstance(out, np.ndarray):
                super().read_part(layer, start, stop, out)
                return
            dense = self._cuda.xp.empty(out.shape, dtype=out.dtype)
            super().read_part(layer, start, stop, dense)
        self._cuda.to_host(dense.data.ptr, out)


def _runs(part: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Contiguous pieces of a part: it, or, of a partial block's, keys and values."""
    runs = (part,) if part.flags.c_contiguous else tuple(part)
    assert all(run.flags.c_contiguous for run in runs)
    return runs


def _bytes(run: NDArray[Any]) -> NDArray[np.uint8]:
    return run.reshape(-1).view(np.uint8)
