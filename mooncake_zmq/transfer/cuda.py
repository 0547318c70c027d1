"""KV in GPU memory: pinned host memory, copies on streams, and slots in one allocation that neighbours open by IPC handle.

Between a sequence and slots in any memory, parts are copied by our own kernels (parts.cu), hundreds in a launch: a kernel reads
and writes its GPU's memory, a neighbour's by its handle, and pinned host memory, all by address. Other memory is copied by way
of pinned staging memory. Measured on an H100 (`bench gpu`): one part a call moved 1 to 2 GB/s, as each call takes time on the
host; so the methods here take many parts.

Verification. A part's checksum is made from its bytes in host memory, to which every part of a device slab is copied once: in
pinned staging, right after it was written to its slot and before it is announced to neighbours. From then on it is compared on
every path of a part:
- host slot to GPU: the source's bytes are hashed while the kernel reads them, as `verify_local` says; a source that changes
  between the two is found by its generation, checked once the copy has ended (`block_copy`);
- device slab to DRAM slot (a pool's put) and to another host's stream: the copied bytes are hashed there;
- device slab to a sequence of this host, on one GPU or between two: with `verify_local` the source's bytes are hashed as well,
  by way of pinned staging; without, generations protect it, and the reported checksums fold to the block's.
So a lost, torn or foreign block is a miss on each of them, and never a wrong answer.

Streams. Each thread copies on a stream of its own that waits for no other; the engine computes on the default stream. They
synchronize through the host alone: an engine waits for its stream before it reports stored KV, and a copy is announced after
`settle`. So neither side ever reads memory that the other still writes, without any CUDA event.
"""

import ctypes
import functools
import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import structlog
from numpy.typing import NDArray

from mooncake_zmq.engine.backend import array_namespace
from mooncake_zmq.engine.kv_cache import KEY_TILE, Part, SequenceKV
from mooncake_zmq.kv.checksum import part_checksum, part_checksums
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.transfer.segment_file import SharedMemoryError
from mooncake_zmq.transfer.shared_memory import HOST, UUID_BYTES, Segment

log = structlog.get_logger()

STAGING_BYTES = 4 << 20
"""Pinned memory of each copying thread: larger copies wait for the stream in between. The size is at least one part's."""

PARTS_AT_ONCE = 256
"""Parts of one launch: some 30 MiB of a 1B model, which take half a millisecond over PCIe 5, forty times a launch's time."""
THREADS, PIECE_ELEMENTS = 256, 2048
"""Threads of a block, and the elements of a part's half that it copies."""
MEMORY_TYPE_DEVICE = 2
"""CUDA's number for GPU memory in a pointer's attributes."""
REGISTERED_AS_IS = 91
"""CUDA's number for the device attribute that kernels may use the host's address of registered memory."""
SOURCE = Path(__file__).with_name("parts.cu")
PART_FIELDS = 5
PartRow = tuple[int, int, int, int, int]
"""A row of parts.cu's `parts`."""

ALLOCATION_BYTES = 2 << 20
"""Size of the GPU's pages: shared memory is whole pages, lest a neighbour can read other data in the last one."""
HANDLE_BYTES = 64


@dataclass(slots=True)
class _CopyContext:
    """One thread's stream and memory for copies. The first `used` bytes of `staging` and `rows` of `table`, both pinned, are in
    use until the stream is synchronized."""

    stream: Any
    staging: NDArray[np.uint8]
    table: NDArray[np.int64]
    used: int = 0
    rows: int = 0


class Cuda:
    """The GPU of this process, by way of CuPy's runtime calls. Any thread may use it; one thread's copies keep their order."""

    def __init__(self, cupy: Any, layout: BlockLayout) -> None:
        """Use the current device. `cupy`: the module, or a fake."""
        self.xp = cupy
        names = ("pinned_bytes", "unpinned_bytes", "pin_failures", "staged_bytes", "opened", "closed", "open_failures")
        self.counts = dict.fromkeys(names, 0)
        self._runtime = cupy.cuda.runtime
        self._staging_bytes = max(STAGING_BYTES, layout.part_bytes)
        self._contexts = threading.local()
        self._lock = threading.RLock()  # a segment may be freed, and unpinned, in any thread and at any point
        self._pinned: tuple[tuple[int, int], ...] = ()
        """Address ranges of pinned host memory; replaced as a whole, so that readers need no lock."""
        self._allocated: list[int] = []
        self._uuids = [self._uuid(device) for device in range(self._runtime.getDeviceCount())]
        device = self._runtime.getDevice()
        self.uuid = self._uuids[device]
        self.block_tokens = layout.block_tokens
        self._kernels = _Kernels(cupy, layout)
        self._reads_registered = bool(self._runtime.deviceGetAttribute(REGISTERED_AS_IS, device))

    @classmethod
    def open(cls, layout: BlockLayout) -> Self:
        """Open this process's GPU. Raises ValueError with one line that says what to do."""
        return cls(array_namespace("cuda"), layout)

    def close(self) -> None:
        """Free the staging memory, once no thread copies any more."""
        with self._lock:
            allocated, self._allocated = self._allocated, []
        for address in allocated:
            self._runtime.freeHost(address)

    # --- copies, on the calling thread's stream

    def stream(self) -> AbstractContextManager[Any]:
        """Return a context in which CuPy's work goes to this thread's stream."""
        stream: AbstractContextManager[Any] = self._context().stream
        return stream

    def settle(self) -> None:
        """Wait for all copies that this thread has started."""
        context = self._context()
        context.stream.synchronize()
        context.used = context.rows = 0

    def write_parts(self, keys: Any, values: Any, parts: Sequence[Part]) -> None:
        """Copy parts into a sequence, from GPU memory or from host memory, which must not change until `settle`."""
        self._make_rows(len(parts))
        rows: list[PartRow] = []
        for layer, start, tokens, part in parts:
            halves = self._halves_within_reach(part)
            if halves is None:
                size_bytes = part[:, :tokens].nbytes
                if not self._has_room(size_bytes):
                    self._launch(self._kernels.scatter, keys, values, rows)  # before the wait frees what it reads
                    rows = []
                staged = self._staged(part[:, :tokens])
                halves = _halves(staged)
            rows.append((*halves, layer, start, tokens))
        self._launch(self._kernels.scatter, keys, values, rows)

    def read_parts(self, keys: Any, values: Any, parts: Sequence[Part], room_tokens: int) -> None:
        """Copy tokens of a sequence into parts of `room_tokens`, and zero the remaining ones. Parts in host memory are complete
        on return, those in GPU memory in the order of the stream."""
        self._make_rows(len(parts))
        rows: list[PartRow] = []
        staged: list[tuple[NDArray[Any], NDArray[Any]]] = []

        def flush() -> None:
            self._launch(self._kernels.gather, keys, values, rows, room_tokens)
            if any(not isinstance(part, DevicePart) for _, _, _, part in parts):
                self.settle()
            for out, arrived in staged:
                out[...] = arrived
            rows.clear()
            staged.clear()

        for layer, start, tokens, part in parts:
            halves = self._halves_within_reach(part)
            if halves is None:
                if not self._has_room(part.nbytes):
                    flush()
                staged.append((part, self._room_like(part)))
                halves = _halves(staged[-1][1])
            rows.append((*halves, layer, start, tokens))
        flush()

    def to_device(self, address: int, host: NDArray[Any]) -> None:
        """Copy contiguous host memory, which must not change until `settle`, to device memory."""
        for first, piece in self._pieces(host):
            source = piece if self.is_pinned(piece) else self._staged(piece)
            self._copy(address + first, source.ctypes.data, piece.nbytes, self._runtime.memcpyHostToDevice)

    def to_host(self, address: int, out: NDArray[Any]) -> None:
        """Copy device memory into contiguous `out`, which is complete on return."""
        for first, piece in self._pieces(out):
            is_direct = self.is_pinned(piece)
            arrived = piece if is_direct else self._room_like(piece)
            self._copy(arrived.ctypes.data, address + first, piece.nbytes, self._runtime.memcpyDeviceToHost)
            if not is_direct:
                self.settle()
                piece[:] = arrived
        self.settle()

    def checksums(self, addresses: Sequence[int], size_bytes: int) -> list[int]:
        """Return the checksums of parts of device memory, which are copied to the host for it."""
        checksums: list[int] = []
        at_once = self._staging_bytes // size_bytes
        for first in range(0, len(addresses), at_once):
            self.settle()
            copies = [self._fetched(address, size_bytes) for address in addresses[first : first + at_once]]
            self.settle()
            checksums += [part_checksum(copy.data) for copy in copies]
        return checksums

    def _fetched(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """Start a copy of device memory into staging memory, which is valid once the stream is synchronized."""
        room = self._stage(self._context(), size_bytes)
        self._copy(room.ctypes.data, address, size_bytes, self._runtime.memcpyDeviceToHost)
        return room

    def _make_rows(self, count: int) -> None:
        """Make room in the table for so many rows, before any part is staged: waiting for it frees all staging memory."""
        context = self._context()
        if context.rows + count > len(context.table):
            self.settle()

    def _launch(self, kernel: Any, keys: Any, values: Any, rows: Sequence[PartRow], *more: int) -> None:
        """Launch a kernel on these rows, after `_make_rows`."""
        if not rows:
            return
        context = self._context()
        table = context.table[context.rows : context.rows + len(rows)]
        table[...] = rows
        context.rows += len(rows)
        sizes = map(np.int64, (keys.shape[2], values.shape[2], *more))
        with context.stream:
            kernel((self._kernels.pieces, len(rows)), (THREADS,), (np.int64(table.ctypes.data), keys, values, *sizes))

    def _pieces(self, host: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Return (offset, bytes) of host memory: all at once if it is pinned, else in pieces that fit into staging memory."""
        whole: NDArray[np.uint8] = host.reshape(-1).view(np.uint8)
        step = whole.nbytes if self.is_pinned(whole) else self._staging_bytes
        return ((first, whole[first : first + step]) for first in range(0, whole.nbytes, step))

    def _halves_within_reach(self, part: "NDArray[Any] | DevicePart") -> tuple[int, int] | None:
        """Return the addresses of a part's keys and values, if a kernel can use them."""
        if isinstance(part, DevicePart):
            return part.halves
        keys, values = _halves(part)
        stop = values + part.shape[1] * part.strides[1]
        return (keys, values) if self._reads_registered and self._is_pinned(keys, stop) else None

    def _has_room(self, size_bytes: int) -> bool:
        """Return whether staging memory has room without waiting."""
        context = self._context()
        return context.used + size_bytes <= len(context.staging)

    def _staged(self, host: NDArray[Any]) -> NDArray[Any]:
        staged = self._room_like(host)
        staged[...] = host
        return staged

    def _room_like(self, host: NDArray[Any]) -> NDArray[Any]:
        room: NDArray[Any] = self._stage(self._context(), host.nbytes).view(host.dtype).reshape(host.shape)
        return room

    def _copy(self, target: int, source: int, size_bytes: int, kind: int) -> None:
        self._runtime.memcpyAsync(target, source, size_bytes, kind, self._context().stream.ptr)

    def _stage(self, context: _CopyContext, size_bytes: int) -> NDArray[np.uint8]:
        """Return room in the thread's staging memory, valid until `settle`; if there is none, wait for its users first."""
        if context.used + size_bytes > len(context.staging):
            self.settle()
        room = context.staging[context.used : context.used + size_bytes]
        assert room.nbytes == size_bytes
        context.used += size_bytes
        self.counts["staged_bytes"] += size_bytes
        return room

    def _context(self) -> _CopyContext:
        context: _CopyContext | None = getattr(self._contexts, "context", None)
        if context is None:
            rows = 4 * PARTS_AT_ONCE
            table = self.pinned(8 * rows * PART_FIELDS).view(np.int64).reshape(rows, PART_FIELDS)
            context = self._contexts.context = _CopyContext(
                self.xp.cuda.Stream(non_blocking=True), self.pinned(self._staging_bytes), table
            )
        return context

    # --- host memory

    def pinned(self, size_bytes: int) -> NDArray[np.uint8]:
        """Allocate pinned host memory, which is valid until `close`."""
        address = self._runtime.hostAlloc(size_bytes, 0)
        with self._lock:
            self._allocated.append(address)
            self._pinned += ((address, address + size_bytes),)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))

    def pin(self, segment: Segment) -> None:
        """Pin an attached segment's slots as long as it exists. If the system does not allow it, copies are staged."""
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
        # A segment is freed before its mapping, and after the end of every copy that holds it.
        weakref.finalize(segment, self._unpin, address, size_bytes).atexit = False

    def is_pinned(self, memory: NDArray[Any]) -> bool:
        """Return whether contiguous host memory is pinned as a whole."""
        start = memory.ctypes.data
        return self._is_pinned(start, start + memory.nbytes)

    def _is_pinned(self, start: int, stop: int) -> bool:
        # Called for every part; twice as fast as a generator.
        for first, last in self._pinned:  # noqa: SIM110
            if first <= start and stop <= last:
                return True
        return False

    def _unpin(self, address: int, size_bytes: int) -> None:
        with self._lock:
            self._pinned = tuple(each for each in self._pinned if each[0] != address)
        self._runtime.hostUnregister(address)
        self.counts["unpinned_bytes"] += size_bytes

    # --- device memory that neighbours share

    def sees(self, uuid: bytes) -> bool:
        """Return whether this process may open handles of that device."""
        return uuid in self._uuids

    def allocate(self, size_bytes: int, why: str) -> int:
        """Allocate device memory outside of CuPy's pool, as a handle means a whole allocation. Raises SharedMemoryError."""
        try:
            return int(self._runtime.malloc(-(-size_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES))
        except self._runtime.CUDARuntimeError as error:
            free, _ = self._runtime.memGetInfo()
            reason = f"the GPU has {free >> 20} MiB free of the {size_bytes >> 20} MiB needed"
            raise SharedMemoryError(f"{reason}: {why} ({error})") from error

    def free(self, address: int) -> None:
        """Free an allocation that no other process can have open; otherwise the behaviour is undefined."""
        self._runtime.free(address)

    def handle(self, address: int) -> bytes:
        """Return the handle by which a neighbour opens the allocation at `address`. Raises SharedMemoryError."""
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
        """Unmap a neighbour's allocation, after the last copy from there."""
        self._runtime.ipcCloseMemHandle(address)
        self.counts["closed"] += 1

    def _uuid(self, device: int) -> bytes:
        """Return a device's UUID as CuPy has it, up to the first zero byte, but never HOST."""
        uuid = bytes(self._runtime.getDeviceProperties(device)["uuid"])[:UUID_BYTES].ljust(UUID_BYTES, b"\0")
        return uuid if uuid != HOST else b"\1" + uuid[1:]


class DeviceCopies:
    """Copies by address between pinned host memory and memory that others allocated on this process's GPU. Thread-safe."""

    def __init__(self, cupy: Any) -> None:
        """Use the current device. `cupy`: the module, or a fake."""
        self._xp, self._runtime = cupy, cupy.cuda.runtime
        self._own = threading.local()

    @classmethod
    def open(cls) -> Self:
        """Open this process's GPU. Raises ValueError with one line that says what to do."""
        return cls(array_namespace("cuda"))

    def holds(self, address: int) -> bool:
        """Return whether an address is in a GPU's memory."""
        try:
            kind = self._runtime.pointerGetAttributes(address).type
        except self._runtime.CUDARuntimeError:
            return False
        return bool(kind == MEMORY_TYPE_DEVICE)

    def pinned(self, size_bytes: int, *, former: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Allocate pinned host memory; `former`, which must not be in use, is freed first."""
        if former is not None:
            self._runtime.freeHost(former.ctypes.data)
        address = self._runtime.hostAlloc(size_bytes, 0)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))

    def start(self, target: int, source: int, size_bytes: int, *, to_device: bool) -> None:
        """Start a copy between GPU memory and pinned host memory, which is complete after `settle`."""
        kind = self._runtime.memcpyHostToDevice if to_device else self._runtime.memcpyDeviceToHost
        self._runtime.memcpyAsync(target, source, size_bytes, kind, self._stream().ptr)

    def settle(self) -> None:
        """Wait for all copies that this thread has started."""
        self._stream().synchronize()

    def _stream(self) -> Any:
        stream = getattr(self._own, "stream", None)
        if stream is None:
            stream = self._own.stream = self._xp.cuda.Stream(non_blocking=True)
        return stream


class DeviceSegment(Segment):
    """A segment whose slots are one allocation of GPU memory. Generations, checksums and the owner's lock stay in its file.

    The owner's memory is freed with its process, not before: a neighbour may have it open, and keeps it until it closes.
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
        """Allocate the slots and create the file, see `Segment.create`. Errors name `setting` as the one to lower."""
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
        """Open a neighbour's segment: the handle only after the file has confirmed incarnation, layout and device. The handle
        is closed when nothing refers to the segment any more."""
        segment = cls.attach(path, layout, incarnation, device=device)
        segment._cuda, segment._address = cuda, cuda.open_handle(handle)
        segment.handle = handle
        weakref.finalize(segment, cuda.close_handle, segment._address).atexit = False
        return segment

    def free(self) -> None:
        """Free an owner's memory before its process ends, if no neighbour has it open."""
        self._cuda.free(self._address)

    def part_view(self, slot: int, layer: int) -> "DevicePart":
        return DevicePart(self._part_at(slot, layer), self.layout.part_bytes)

    def copy_layers(self, slot: int, first_layer: int, stop_layer: int, out: NDArray[np.uint8]) -> None:
        assert out.nbytes == (stop_layer - first_layer) * self.layout.part_bytes
        self._cuda.to_host(self._part_at(slot, first_layer), out)

    def copy_parts(self, slot: int, layers: range, out: NDArray[np.uint8]) -> list[int]:
        self.copy_layers(slot, layers.start, layers.stop, out)
        return part_checksums(out.data, self.layout.part_bytes)

    def checksums(self, parts: Sequence[tuple[int, int]]) -> list[int]:
        return self._cuda.checksums([self._part_at(slot, layer) for slot, layer in parts], self.layout.part_bytes)

    def seal_parts(self, parts: Sequence[tuple[int, int, int]]) -> list[int]:
        """Store and return the checksums of parts that a sequence's `read_parts` wrote, which has zeroed the remaining tokens.
        The hashed bytes are read back from the slots."""
        return self._sealed(parts)

    def write_part(self, slot: int, layer: int, part: NDArray[Any]) -> int:
        self._cuda.to_device(self._part_at(slot, layer), np.ascontiguousarray(part))
        return self._sealed([(slot, layer, self.layout.block_tokens)])[0]

    def layers_view(self, slot: int, first_layer: int, stop_layer: int) -> memoryview:
        raise AssertionError("slots in GPU memory have no view in host memory: see copy_layers")

    def staging(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return pinned memory for `copy_layers`, valid as long as the process uses its GPU."""
        return self._cuda.pinned(size_bytes)

    def _part_at(self, slot: int, layer: int) -> int:
        assert slot < self.slots
        return self._address + slot * self.layout.slot_bytes + layer * self.layout.part_bytes


@dataclass(frozen=True, slots=True)
class DevicePart:
    """A part in a slot of GPU memory, of this process or a neighbour."""

    address: int
    size_bytes: int

    @property
    def halves(self) -> tuple[int, int]:
        """Addresses of its keys and its values."""
        return self.address, self.address + self.size_bytes // 2


class DeviceSequence(SequenceKV):
    """A sequence in GPU memory, whose parts are copied on the calling thread's stream, from and to host or GPU memory."""

    __slots__ = ("_cuda",)

    parts_at_once = PARTS_AT_ONCE

    def __init__(self, cuda: Cuda, *, layers: int, kv_heads: int, head_dim: int, capacity_tokens: int) -> None:
        self._cuda = cuda
        with cuda.stream():  # the event loop's thread opens sequences, and must not wait for the engine
            super().__init__(layers=layers, kv_heads=kv_heads, head_dim=head_dim, capacity_tokens=capacity_tokens, xp=cuda.xp)

    def write_parts(self, parts: Sequence[Part]) -> None:
        self._cuda.write_parts(self.keys, self.values, parts)

    def read_parts(self, parts: Sequence[Part]) -> None:
        """Copy tokens into parts and zero the remaining ones; those in GPU memory are complete in the order of the stream."""
        self._cuda.read_parts(self.keys, self.values, parts, self._cuda.block_tokens)

    def write_part(self, layer: int, start: int, part: NDArray[Any]) -> None:
        self._check_range(start, start + part.shape[1])
        self.write_parts([(layer, start, part.shape[1], part)])

    def read_part(self, layer: int, start: int, stop: int, out: NDArray[Any]) -> None:
        self._check_range(start, stop)
        self._cuda.read_parts(self.keys, self.values, [(layer, start, stop - start, out)], stop - start)

    def copy_from(self, source: SequenceKV, tokens: int) -> None:
        with self._cuda.stream():
            super().copy_from(source, tokens)

    def settle(self) -> None:
        self._cuda.settle()


def _halves(part: NDArray[Any]) -> tuple[int, int]:
    """Return the addresses of a part's keys and values, each contiguous. Making an array of each would take the host longer
    than the copy takes the GPU."""
    assert part.strides[1:] == _dense(part.shape[1:], part.itemsize)
    keys: int = part.__array_interface__["data"][0]
    return keys, keys + part.strides[0]


@functools.cache
def _dense(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides of a contiguous array."""
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class _Kernels:
    """parts.cu's functions, compiled for a layout."""

    def __init__(self, xp: Any, layout: BlockLayout) -> None:
        sizes = {"HEADS": layout.kv_heads, "DIM": layout.head_dim, "KEY_TILE": KEY_TILE}
        module = xp.RawModule(code=SOURCE.read_text(), options=tuple(f"-D{name}={size}" for name, size in sizes.items()))
        self.scatter, self.gather = module.get_function("scatter"), module.get_function("gather")
        self.pieces = -(-layout.part_bytes // (2 * layout.itemsize) // PIECE_ELEMENTS)
