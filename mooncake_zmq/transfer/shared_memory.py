"""A segment: fixed-size block slots in one file under /dev/shm, which every process of the host can map.

    page 0       head (`transfer.segment_file`)
    next         generations  uint64[slots]          odd: being written; even: committed; changed before every reuse
    next         checksums    uint64[slots, layers]  of each layer's part, 0: not written since the slot was granted
    data_offset  slots        [slots, slot_bytes]

The slots of a process with a GPU may lie in that GPU's memory instead (`transfer.cuda`): its file then ends before them, and
its head names the device.

A generation works as a seqlock's counter: a reader compares it before and after its copy. Loads and stores of it are single
aligned 8-byte accesses; on CPUs that reorder them the part checksums, compared on every read, find what it misses. So the
checksums may be left out only on a CPU that keeps their order (`needs_checksums`).
"""

import contextlib
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.kv.checksum import part_checksum
from mooncake_zmq.kv.layout import PAGE_BYTES, BlockLayout, div_ceil
from mooncake_zmq.transfer.hashed_copy import copy_hashed
from mooncake_zmq.transfer.segment_file import HUGE_PAGE_BYTES, MADV_POPULATE_WRITE, SegmentFile, SharedMemoryError, file_name

KIND = b"blocks"
ORDERED_MACHINES = ("x86_64", "amd64", "i386", "i486", "i586", "i686", "s390x")
"""Machines, as `platform.machine` names them, that keep the order of loads and the order of stores."""
UUID_BYTES = 16
HOST = bytes(UUID_BYTES)
"""Device UUID of a segment whose slots lie in the file."""
_SHAPE = struct.Struct(f"<16sQQI{UUID_BYTES}s")
"""Layout's fingerprint, slots, bytes of a slot, layers, device."""


def needs_checksums(setting: str) -> str:
    """Return why `setting`, which leaves checksums of shared memory out, is not possible on this machine; empty if it is."""
    machine = platform.machine()
    if machine.lower() in ORDERED_MACHINES:
        return ""
    return f"{setting} needs a CPU that keeps the order of loads, as x86-64 does: on {machine} only checksums find a torn read"


@dataclass(frozen=True, slots=True)
class _Offsets:
    """Offsets of a segment's tables and data in its file."""

    generations: int
    checksums: int
    data: int
    total: int

    @classmethod
    def of(cls, layout: BlockLayout, slots: int, device: bytes) -> "_Offsets":
        checksums = PAGE_BYTES + _pages(slots * 8)
        tables_end = checksums + _pages(slots * layout.layers * 8)
        data_bytes = slots * layout.slot_bytes if device == HOST else 0
        # Large segments begin their data on a huge page's border, so that the kernel may use huge pages.
        align = HUGE_PAGE_BYTES if data_bytes >= HUGE_PAGE_BYTES else PAGE_BYTES
        data = div_ceil(tables_end, align) * align
        return cls(PAGE_BYTES, checksums, data, data + data_bytes)


def total_bytes(path: Path, layout: BlockLayout, device: bytes, shape: bytes) -> int:
    """Return how long the file of a segment of this shape is. Raises SharedMemoryError if it has another layout or device."""
    fingerprint, slots, slot_bytes, layers, where = _SHAPE.unpack_from(shape)
    if fingerprint != layout.fingerprint.encode() or slot_bytes != layout.slot_bytes or layers != layout.layers:
        raise SharedMemoryError(f"{path} has another layout: {fingerprint!r} instead of {layout.fingerprint!r}")
    if where != device:
        raise SharedMemoryError(f"{path} has its slots on device {where.hex()}, not {device.hex()}")
    return _Offsets.of(layout, slots, device).total


class Segment:
    """One process's slots, mapped here. The creator owns the file and removes it; attachers may come and go.

    Safe to read from several threads. An attached segment needs no `close`: it is unmapped when nothing refers to it any
    more, so that a reader in another thread never loses its memory.
    """

    def __init__(self, file: SegmentFile, layout: BlockLayout, slots: int, device: bytes = HOST) -> None:
        self.path = file.path
        self.incarnation = file.incarnation
        self.device = device
        """UUID of the GPU that holds the slots, or HOST."""
        self.layout = layout
        self.slots = slots
        self._file = file
        mapping = file.mapping
        offsets = _Offsets.of(layout, slots, device)
        slot_bytes, part_bytes, dtype = layout.slot_bytes, layout.part_bytes, np.dtype(layout.dtype)
        assert dtype.itemsize == layout.itemsize
        strides = (slot_bytes, part_bytes, *_strides(layout.part_shape, dtype.itemsize))
        mapped = slots if device == HOST else 0
        shape = (mapped, layout.layers, *layout.part_shape)
        self._generations: NDArray[np.uint64] = np.ndarray((slots,), np.uint64, mapping, offsets.generations)
        self._checksums: NDArray[np.uint64] = np.ndarray((slots, layout.layers), np.uint64, mapping, offsets.checksums)
        self._parts: NDArray[Any] = np.ndarray(shape, dtype, mapping, offsets.data, strides)
        self._bytes: NDArray[np.uint8] = np.ndarray((mapped, slot_bytes), np.uint8, mapping, offsets.data)

    @classmethod
    def create(
        cls,
        directory: str | Path,
        cluster: str,
        node: str,
        layout: BlockLayout,
        slots: int,
        incarnation: int,
        *,
        setting: str = "slots",
        device: bytes = HOST,
    ) -> Self:
        """Make the file with all its memory. Raises SharedMemoryError, which names `setting` as the one to lower."""
        offsets = _Offsets.of(layout, slots, device)
        shape = _SHAPE.pack(layout.fingerprint.encode(), slots, layout.slot_bytes, layout.layers, device)
        what = f"{slots} slots of {layout.slot_bytes} bytes for {node}"
        name = file_name(cluster, node, incarnation)
        file = SegmentFile.create(Path(directory), name, KIND, incarnation, shape, offsets.total, what=what, setting=setting)
        with contextlib.suppress(OSError):  # an older kernel: pages are then mapped as they are touched
            file.mapping.madvise(MADV_POPULATE_WRITE)
        return cls(file, layout, slots, device)

    @classmethod
    def attach(
        cls, path: str | Path, layout: BlockLayout, incarnation: int, *, writable: bool = False, device: bytes = HOST
    ) -> Self:
        """Map a neighbour's segment, after checks that it has this incarnation, our layout and the expected device."""
        path = Path(path)
        total_of = partial(total_bytes, path, layout, device)
        file = SegmentFile.attach(path, KIND, incarnation, total_of, writable=writable)
        return cls(file, layout, _SHAPE.unpack_from(file.shape)[1], device)

    def generation(self, slot: int) -> int:
        return int(self._generations[slot])

    def set_generation(self, slot: int, generation: int) -> None:
        """Change a slot's generation. An odd one also clears its parts' checksums, so that no part verifies before it is
        written."""
        self._generations[slot] = generation
        if generation % 2:
            self._checksums[slot] = 0

    def parts(self, slot: int) -> NDArray[np.uint64]:
        """Return a view of the checksums of a slot's parts, one per layer."""
        row: NDArray[np.uint64] = self._checksums[slot]
        return row

    def part_view(self, slot: int, layer: int) -> Any:
        """Return one layer's part, of `layout.part_shape`, in place, for a sequence's `write_parts` and `read_parts`."""
        return self._parts[slot, layer]

    def copy_layers(self, slot: int, first_layer: int, stop_layer: int, out: NDArray[np.uint8]) -> None:
        """Copy a range of layers' parts, which are contiguous, into host memory."""
        part_bytes = self.layout.part_bytes
        out[...] = self._bytes[slot, first_layer * part_bytes : stop_layer * part_bytes]

    def copy_parts(self, slot: int, layers: range, out: NDArray[np.uint8]) -> list[int]:
        """Copy as `copy_layers` does; returns the checksum of each copied part."""
        part_bytes = self.layout.part_bytes
        assert out.nbytes == len(layers) * part_bytes
        assert out.flags.c_contiguous
        held = self._bytes[slot, layers.start * part_bytes : layers.stop * part_bytes]  # keeps the mapping
        source, target = _address(held), _address(out)
        return [copy_hashed(target + at, source + at, part_bytes) for at in range(0, out.nbytes, part_bytes)]

    def checksums(self, parts: Sequence[tuple[int, int]]) -> list[int]:
        """Return the present checksums of (slot, layer)s."""
        return [part_checksum(self._parts[slot, layer].data) for slot, layer in parts]

    def seal_parts(self, parts: Sequence[tuple[int, int, int]]) -> list[int]:
        """Keep the first `tokens` tokens of each part (slot, layer, tokens), zero the remaining ones, and store and return the
        checksums."""
        for slot, layer, tokens in parts:
            part = self._parts[slot, layer]
            (part[:, tokens:] if self.layout.token_axis else part[tokens:])[...] = 0
        return self._sealed(parts)

    def write_part(self, slot: int, layer: int, part: NDArray[Any]) -> int:
        """Copy one layer's part from host memory; returns its checksum."""
        self._parts[slot, layer] = part
        return self._sealed([(slot, layer, self.layout.block_tokens)])[0]

    def _sealed(self, parts: Sequence[tuple[int, int, int]]) -> list[int]:
        checksums = self.checksums([(slot, layer) for slot, layer, _ in parts])
        for (slot, layer, _), checksum in zip(parts, checksums, strict=True):
            self._checksums[slot, layer] = checksum
        return checksums

    def slots_memory(self) -> NDArray[np.uint8]:
        """Return a view of all slots' bytes."""
        return self._bytes.reshape(-1)

    def layers_view(self, slot: int, first_layer: int, stop_layer: int) -> memoryview:
        """Return a view of the bytes of a range of layers' parts, which are contiguous."""
        part_bytes = self.layout.part_bytes
        view: memoryview = self._bytes[slot, first_layer * part_bytes : stop_layer * part_bytes].data
        return view

    def close(self) -> None:
        """Remove the file and the mapping of an owned segment, which is not used afterwards. May be called twice."""
        self._file.remove()
        self._generations = self._checksums = np.empty((0, 0), np.uint64)
        self._parts = self._bytes = np.empty((0, 0), np.uint8)
        # A stream may still be sending from this memory: then it is unmapped when that view is released.
        with contextlib.suppress(BufferError):
            self._file.mapping.close()


def _address(array: NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])


def _pages(size: int) -> int:
    return div_ceil(size, PAGE_BYTES) * PAGE_BYTES


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides))
