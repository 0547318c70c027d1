"""A segment: fixed-size block slots in one file under /dev/shm, which every process of the host can map.

    page 0       header: identity and shape
    next         generations  uint64[slots]          odd: being written; even: committed; changed before every reuse
    next         checksums    uint64[slots, layers]  of each layer's part, 0: not written since the slot was granted
    data_offset  slots        [slots, slot_bytes]

The slots of a process with a GPU may lie in that GPU's memory instead (`transfer.cuda`): its file then ends before them, and
its header names the device.

A generation works as a seqlock's counter: a reader compares it before and after its copy. Loads and stores of it are single
aligned 8-byte accesses; on CPUs that reorder them the part checksums, compared on every read, find what it misses. So the
checksums may be left out only on a CPU that keeps their order (`needs_checksums`).
"""

import contextlib
import fcntl
import mmap
import os
import platform
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.kv.checksum import part_checksum
from mooncake_zmq.kv.layout import PAGE_BYTES, BlockLayout, div_ceil
from mooncake_zmq.transfer.hashed_copy import copy_hashed
from mooncake_zmq.transfer.own_files import open_own, own_files

MAGIC = b"MOONKV\r\n"
VERSION = 2
FILE_PREFIX = "mooncake"
ORDERED_MACHINES = ("x86_64", "amd64", "i386", "i486", "i586", "i686", "s390x")
"""Machines, as `platform.machine` names them, that keep the order of loads and the order of stores."""
HUGE_PAGE_BYTES = 2 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap does not name it yet
UUID_BYTES = 16
HOST = bytes(UUID_BYTES)
"""Device UUID of a segment whose slots lie in the file."""
_HEADER = struct.Struct(f"<8sI16sQQIQQ{UUID_BYTES}s")


def needs_checksums(setting: str) -> str:
    """Return why `setting`, which leaves checksums of shared memory out, is not possible on this machine; empty if it is."""
    machine = platform.machine()
    if machine.lower() in ORDERED_MACHINES:
        return ""
    return f"{setting} needs a CPU that keeps the order of loads, as x86-64 does: on {machine} only checksums find a torn read"


class SharedMemoryError(Exception):
    """A segment that cannot be created, or a path that does not hold the expected segment."""


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


class Segment:
    """One process's slots, mapped here. The creator owns the file and removes it; attachers may come and go.

    Safe to read from several threads. An attached segment needs no `close`: it is unmapped when nothing refers to it any
    more, so that a reader in another thread never loses its memory.
    """

    def __init__(
        self,
        mapping: mmap.mmap,
        path: Path,
        layout: BlockLayout,
        slots: int,
        incarnation: int,
        owner_fd: int,
        device: bytes = HOST,
    ) -> None:
        self.path = path
        self.device = device
        """UUID of the GPU that holds the slots, or HOST."""
        self.layout = layout
        self.slots = slots
        self.incarnation = incarnation
        self._mapping = mapping
        self._owner_fd = owner_fd
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
        shape = (layout.fingerprint.encode(), slots, layout.slot_bytes, layout.layers)
        header = _HEADER.pack(MAGIC, VERSION, *shape, incarnation, offsets.total, device)
        what = f"{slots} slots of {layout.slot_bytes} bytes for {node}; lower {setting}"
        name = file_name(cluster, node, incarnation)
        path, fd, mapping = make_file(Path(directory), name, offsets.total, header, what, setting)
        with contextlib.suppress(OSError):  # an older kernel: pages are then mapped as they are touched
            mapping.madvise(MADV_POPULATE_WRITE)
        return cls(mapping, path, layout, slots, incarnation, fd, device)

    @classmethod
    def attach(
        cls, path: str | Path, layout: BlockLayout, incarnation: int, *, writable: bool = False, device: bytes = HOST
    ) -> Self:
        """Map a neighbour's segment, after checks that it has this incarnation, our layout and the expected device."""
        path = Path(path)
        try:
            fd = open_own(path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise SharedMemoryError(f"cannot attach {path}: {error.strerror}") from error
        try:
            slots = _check_header(path, os.pread(fd, _HEADER.size, 0), os.fstat(fd).st_size, layout, incarnation, device)
            mapping = map_file(fd, _Offsets.of(layout, slots, device).total, writable=writable)
        except (OSError, ValueError) as error:  # the latter: the file became shorter meanwhile
            raise SharedMemoryError(f"cannot attach {path}: {error}") from error
        finally:
            os.close(fd)
        return cls(mapping, path, layout, slots, incarnation, -1, device)

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
            self._parts[slot, layer][:, tokens:] = 0
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
        if self._owner_fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._owner_fd)
            self._owner_fd = -1
        self._generations = self._checksums = np.empty((0, 0), np.uint64)
        self._parts = self._bytes = np.empty((0, 0), np.uint8)
        # A stream may still be sending from this memory: then it is unmapped when that view is released.
        with contextlib.suppress(BufferError):
            self._mapping.close()


def sweep(directory: str | Path, cluster: str, is_alive: Callable[[str, int], bool]) -> list[Path]:
    """Remove this cluster's segments whose process has ended: `is_alive(node, incarnation)` is false and no process holds the
    file's lock. Files of other users are left alone."""
    removed = []
    for path in sorted(own_files(directory, f"{FILE_PREFIX}=")):
        named = parse_name(path.name)
        if named is None or named[0] != cluster or is_alive(named[1], named[2]):
            continue
        if not _owned(path):
            with contextlib.suppress(OSError):  # another sweep was first, or nothing can be removed there
                path.unlink()
                removed.append(path)
    return removed


def is_segment_of(path: str, node: str, incarnation: int, directory: Path | None) -> bool:
    """Return whether this can be the segment of an incarnation of a node, by its name and, if given, its directory."""
    where = Path(path)
    named = parse_name(where.name)
    is_there = directory is None or where.parent == directory
    return (
        where.is_absolute() and ".." not in where.parts and is_there and named is not None and named[1:] == (node, incarnation)
    )


def create_file(directory: Path, name: str) -> tuple[Path, int]:
    """Create a file for this user alone, under a random name if the name is taken. Raises SharedMemoryError."""
    for path in (directory / name, directory / f"{name}={secrets.token_hex(8)}"):
        try:
            return path, open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError as error:
            taken = error
        except OSError as error:
            raise SharedMemoryError(f"cannot create {path}: {error.strerror}") from error
    raise SharedMemoryError(f"cannot create {path}: {taken.strerror}") from taken


def make_file(directory: Path, name: str, size: int, header: bytes, what: str, setting: str) -> tuple[Path, int, mmap.mmap]:
    """Create a segment's file with all its memory and its header, map it and hold its lock. Raises SharedMemoryError, which
    names `setting` as the one to lower, and `what` the memory is for."""
    check_space(directory, size, what)
    path, fd = create_file(directory, name)
    try:
        # Held while this process runs: a sweep by another process, under any runtime directory, leaves the file alone.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A hole would kill the process that first touches it if memory has run out by then (SIGBUS).
        os.posix_fallocate(fd, 0, size)
        mapping = map_file(fd, size, writable=True)
        mapping[: len(header)] = header
    except OSError as error:
        os.unlink(path)
        os.close(fd)
        raise SharedMemoryError(f"cannot create {path} of {size} bytes: {error.strerror}; lower {setting}") from error
    return path, fd, mapping


def file_name(cluster: str, node: str, incarnation: int) -> str:
    """Return the name of an incarnation's segment, or of another file that the same sweep removes."""
    # Quoting leaves no "=" and no "/" in a name, so `parse_name` can split it.
    return f"{FILE_PREFIX}={quote(cluster, safe='')}={quote(node, safe='')}={incarnation}"


def parse_name(name: str) -> tuple[str, str, int] | None:
    """Return (cluster, node, incarnation), or None for any other file."""
    parts = name.split("=")
    if len(parts) not in (4, 5) or parts[0] != FILE_PREFIX or not parts[3].isascii() or not parts[3].isdigit():
        return None
    return unquote(parts[1]), unquote(parts[2]), int(parts[3])


def _owned(path: Path) -> bool:
    """Return whether a running creator holds the file's lock."""
    try:
        fd = open_own(path, os.O_RDONLY)
    except OSError:
        return True  # removed already, or out of descriptors: leave it for now
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def check_space(directory: Path, needed: int, why: str) -> None:
    """Raise SharedMemoryError unless `needed` bytes are free in the directory."""
    try:
        room = os.statvfs(directory)
    except OSError as error:
        raise SharedMemoryError(f"cannot use {directory}: {error.strerror}") from error
    free = room.f_bavail * room.f_frsize
    if free < needed:
        raise SharedMemoryError(f"{directory} has {free >> 20} MiB free of the {div_ceil(needed, 1 << 20)} MiB needed: {why}")


def _check_header(path: Path, raw: bytes, size: int, layout: BlockLayout, incarnation: int, device: bytes) -> int:
    """Return the number of slots. Raises SharedMemoryError if header or size are not those of the expected segment."""
    if len(raw) < _HEADER.size:
        raise SharedMemoryError(f"{path} is too short for a segment")
    magic, version, fingerprint, slots, slot_bytes, layers, written, total, where = _HEADER.unpack(raw)
    if magic != MAGIC or version != VERSION:
        raise SharedMemoryError(f"{path} is no segment of version {VERSION}")
    if fingerprint != layout.fingerprint.encode() or slot_bytes != layout.slot_bytes or layers != layout.layers:
        raise SharedMemoryError(f"{path} has another layout: {fingerprint!r} instead of {layout.fingerprint!r}")
    if written != incarnation:
        raise SharedMemoryError(f"{path} belongs to incarnation {written}, not {incarnation}")
    if where != device:
        raise SharedMemoryError(f"{path} has its slots on device {where.hex()}, not {device.hex()}")
    if not total == size == _Offsets.of(layout, slots, device).total:
        raise SharedMemoryError(f"{path} has {size} bytes, its header says {total}")
    return int(slots)


def map_file(fd: int, size: int, *, writable: bool) -> mmap.mmap:
    """Map a segment's file."""
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    with contextlib.suppress(OSError):  # has an effect only if shmem_enabled is "advise"
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _address(array: NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])


def _pages(size: int) -> int:
    return div_ceil(size, PAGE_BYTES) * PAGE_BYTES


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides))
