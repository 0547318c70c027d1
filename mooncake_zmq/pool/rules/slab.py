"""Memory for values of any size: slabs of equal size, each cut into the cells of one size class. PURE: only offsets.

Sketch: classes lie at most an eighth apart, so a value wastes about a tenth of its cell, and a freed cell fits every later
value of its class: nothing fragments but whole slabs, and those the owner may empty and give to another class. So that many
classes of small cells can share a small pool, these are cut from sixteenths of a slab. What serves one class is a *unit*:
a sixteenth, or a whole slab, which then goes by the number of its first sixteenth.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.kv.object_record import LARGE_BYTES

MIN_CELL_BYTES = 64
CLASS_STEP = 1.125
SMALL_ALIGN_BYTES = 64
LARGE_ALIGN_BYTES = 4096
LARGE_CELL_BYTES = LARGE_BYTES
"""From this size on cells begin at multiples of LARGE_ALIGN_BYTES, as direct I/O and DMA want it."""
PARTS = 16
"""Into which a slab is split for classes of small cells: at least eight cells fit a part."""
_FREE = -1


def class_sizes(slab_bytes: int) -> list[int]:
    """Cell sizes in ascending order: slab_bytes / n, rounded down to the alignment, at most CLASS_STEP apart where n allows."""
    sizes = [slab_bytes]
    cells = 1
    while True:
        cells = max(cells + 1, int(slab_bytes * CLASS_STEP / sizes[-1]))
        size = slab_bytes // cells
        size -= size % (LARGE_ALIGN_BYTES if size >= LARGE_CELL_BYTES else SMALL_ALIGN_BYTES)
        if size < MIN_CELL_BYTES:
            return sizes[::-1]
        if size < sizes[-1]:
            sizes.append(size)


class SlabAllocator:
    """Hands out cells. An owner is a non-negative number of the caller's, returned when its unit must be emptied."""

    def __init__(self, capacity_bytes: int, slab_bytes: int) -> None:
        self.slab_bytes = min(slab_bytes, capacity_bytes) // (PARTS * LARGE_ALIGN_BYTES) * (PARTS * LARGE_ALIGN_BYTES)
        if self.slab_bytes == 0:
            raise ValueError(f"a pool of {capacity_bytes} bytes in slabs of {slab_bytes} holds no {PARTS} pages")
        self.slabs = capacity_bytes // self.slab_bytes
        self.units = self.slabs * PARTS
        self._part_bytes = self.slab_bytes // PARTS
        small = [size for size in class_sizes(self._part_bytes) if size <= self._part_bytes // 8]
        self.sizes = small + [size for size in class_sizes(self.slab_bytes) if size > small[-1]]
        self.small_classes = len(small)
        """Classes below this one are cut from sixteenths."""
        self.unit_class: NDArray[np.int32] = np.full(self.units, _FREE, np.int32)
        """Class of each unit, negative if it is free or a part of a whole slab."""
        self.used_cells = [0] * self.units
        self.is_split = [False] * self.slabs
        self._fresh = [0] * self.units
        """Cells from here on were not taken since the unit got its class."""
        self._returned = [array("I") for _ in range(self.units)]
        self._owners = [array("i") for _ in range(self.units)]
        self._roomy: list[dict[int, None]] = [{} for _ in self.sizes]
        """Units of each class with a free cell."""
        self._free_slabs = list(range(self.slabs - 1, -1, -1))
        self._free_parts: dict[int, None] = {}
        """Free sixteenths of split slabs."""

    def class_of(self, size_bytes: int) -> int | None:
        """The smallest class that holds `size_bytes`; None if none does."""
        index = bisect_left(self.sizes, size_bytes)
        return index if index < len(self.sizes) else None

    def unit_of(self, offset: int) -> int:
        """The unit that a cell lies in."""
        part = offset // self._part_bytes
        slab = part // PARTS
        return part if self.is_split[slab] else slab * PARTS

    def take(self, size_class: int, owner: int) -> int | None:
        """The byte offset of a free cell, of a fresh unit if need be; None if there is neither."""
        roomy = self._roomy[size_class]
        if not roomy and not self._open(size_class):
            return None
        unit = next(iter(roomy))
        returned = self._returned[unit]
        if returned:
            cell = returned.pop()
            self._owners[unit][cell] = owner
        else:
            cell = self._fresh[unit]
            self._fresh[unit] += 1
            self._owners[unit].append(owner)
        self.used_cells[unit] += 1
        if self.used_cells[unit] == self._cells(size_class):
            del roomy[unit]
        return unit * self._part_bytes + cell * self.sizes[size_class]

    def give(self, offset: int) -> None:
        """A cell is free again; a unit without any taken cell may serve another class."""
        unit = self.unit_of(offset)
        size_class = int(self.unit_class[unit])
        cell, rest = divmod(offset - unit * self._part_bytes, self.sizes[size_class])
        assert rest == 0, "not the offset of a cell"
        assert self._owners[unit][cell] != _FREE, "given twice"
        self.used_cells[unit] -= 1
        if self.used_cells[unit] == 0:
            self._close(unit, size_class)
            return
        self._owners[unit][cell] = _FREE
        self._returned[unit].append(cell)
        self._roomy[size_class][unit] = None

    def owners(self, unit: int) -> list[int]:
        """The owners of the cells of this unit."""
        return [owner for owner in self._owners[unit] if owner != _FREE]

    def cells(self) -> Iterator[tuple[int, int, int]]:
        """(owner, offset, cell bytes) of every taken cell."""
        for unit, size_class in enumerate(self.unit_class.tolist()):
            for cell, owner in enumerate(self._owners[unit]):
                if owner != _FREE:
                    yield owner, unit * self._part_bytes + cell * self.sizes[size_class], self.sizes[size_class]

    @property
    def free_slabs(self) -> int:
        return len(self._free_slabs)

    def check(self) -> None:
        """Assert the invariants."""
        for slab in range(self.slabs):
            units = range(slab * PARTS, (slab + 1) * PARTS)
            classes = [self.unit_class[unit] for unit in units]
            free = [unit for unit in units if unit in self._free_parts]
            assert self.is_split[slab] or (not free and all(size_class == _FREE for size_class in classes[1:]))
            assert (slab in self._free_slabs) == (all(size_class == _FREE for size_class in classes))
            if self.is_split[slab]:
                assert free == [unit for unit in units if self.unit_class[unit] == _FREE]
                assert len(free) < PARTS
        for unit, size_class in enumerate(self.unit_class.tolist()):
            taken = len(self.owners(unit))
            assert taken == self.used_cells[unit]
            assert self._fresh[unit] == len(self._owners[unit]) == taken + len(self._returned[unit])
            if size_class == _FREE:
                assert taken == 0
            else:
                assert 0 < taken <= self._cells(size_class)
                assert (unit in self._roomy[size_class]) == (taken < self._cells(size_class))
                assert (size_class < self.small_classes) == self.is_split[unit // PARTS]

    def _cells(self, size_class: int) -> int:
        return (self._part_bytes if size_class < self.small_classes else self.slab_bytes) // self.sizes[size_class]

    def _open(self, size_class: int) -> bool:
        """Give the class a free unit; False if there is none."""
        if size_class < self.small_classes and self._free_parts:
            unit, _ = self._free_parts.popitem()
        elif self._free_slabs:
            unit = self._free_slabs.pop() * PARTS
            if size_class < self.small_classes:
                self.is_split[unit // PARTS] = True
                self._free_parts.update(dict.fromkeys(range(unit + 1, unit + PARTS)))
        else:
            return False
        self.unit_class[unit] = size_class
        self._roomy[size_class][unit] = None
        return True

    def _close(self, unit: int, size_class: int) -> None:
        self.unit_class[unit] = _FREE
        self._fresh[unit] = 0
        self._returned[unit] = array("I")
        self._owners[unit] = array("i")
        self._roomy[size_class].pop(unit, None)
        slab = unit // PARTS
        if self.is_split[slab]:
            self._free_parts[unit] = None
            parts = range(slab * PARTS, (slab + 1) * PARTS)
            if not all(part in self._free_parts for part in parts):
                return
            for part in parts:
                del self._free_parts[part]
            self.is_split[slab] = False
        self._free_slabs.append(slab)
