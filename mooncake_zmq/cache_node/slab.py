"""Memory for values of any size: slabs of equal size, each cut into the cells of one size class. PURE: only offsets.

Sketch: classes lie at most an eighth apart, so a value wastes about a tenth of its cell, and a freed cell fits every later
value of its class: nothing fragments but whole slabs, and those the owner may empty and give to another class.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator

MIN_CELL_BYTES = 64
CLASS_STEP = 1.125
SMALL_ALIGN_BYTES = 64
LARGE_ALIGN_BYTES = 4096
LARGE_CELL_BYTES = 64 << 10
"""From this size on cells begin at multiples of LARGE_ALIGN_BYTES, as direct I/O and DMA want it."""
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
    """Hands out cells. An owner is a non-negative number of the caller's, told again when its slab must be emptied."""

    def __init__(self, capacity_bytes: int, slab_bytes: int) -> None:
        self.slab_bytes = min(slab_bytes, capacity_bytes) // LARGE_ALIGN_BYTES * LARGE_ALIGN_BYTES
        if self.slab_bytes == 0:
            raise ValueError(f"a pool of {capacity_bytes} bytes in slabs of {slab_bytes} holds no page")
        self.sizes = class_sizes(self.slab_bytes)
        self.slabs = capacity_bytes // self.slab_bytes
        self.slab_class = [_FREE] * self.slabs
        self.used_cells = [0] * self.slabs
        self._fresh = [0] * self.slabs
        """Cells from here on were not taken since the slab got its class."""
        self._returned = [array("I") for _ in range(self.slabs)]
        self._owners = [array("i") for _ in range(self.slabs)]
        self._roomy: list[dict[int, None]] = [{} for _ in self.sizes]
        """Slabs of each class with a free cell."""
        self._free_slabs = list(range(self.slabs - 1, -1, -1))

    def class_of(self, size_bytes: int) -> int | None:
        """The smallest class that holds `size_bytes`; None if none does."""
        index = bisect_left(self.sizes, size_bytes)
        return index if index < len(self.sizes) else None

    def slab_of(self, offset: int) -> int:
        return offset // self.slab_bytes

    def take(self, size_class: int, owner: int) -> int | None:
        """The byte offset of a free cell, of a fresh slab if need be; None if there is neither."""
        roomy = self._roomy[size_class]
        if not roomy:
            if not self._free_slabs:
                return None
            self._open(self._free_slabs.pop(), size_class)
        slab = next(iter(roomy))
        returned = self._returned[slab]
        if returned:
            cell = returned.pop()
            self._owners[slab][cell] = owner
        else:
            cell = self._fresh[slab]
            self._fresh[slab] += 1
            self._owners[slab].append(owner)
        self.used_cells[slab] += 1
        if self.used_cells[slab] == self._cells(size_class):
            del roomy[slab]
        return slab * self.slab_bytes + cell * self.sizes[size_class]

    def give(self, offset: int) -> None:
        """A cell is free again; a slab without any taken cell may serve another class."""
        slab = offset // self.slab_bytes
        size_class = self.slab_class[slab]
        cell, rest = divmod(offset - slab * self.slab_bytes, self.sizes[size_class])
        assert rest == 0, "not the offset of a cell"
        assert self._owners[slab][cell] != _FREE, "given twice"
        self.used_cells[slab] -= 1
        if self.used_cells[slab] == 0:
            self._close(slab, size_class)
            return
        self._owners[slab][cell] = _FREE
        self._returned[slab].append(cell)
        self._roomy[size_class][slab] = None

    def owners(self, slab: int) -> list[int]:
        """Who has a cell of this slab."""
        return [owner for owner in self._owners[slab] if owner != _FREE]

    def cells(self) -> Iterator[tuple[int, int, int]]:
        """(owner, offset, cell bytes) of every taken cell."""
        for slab, size_class in enumerate(self.slab_class):
            for cell, owner in enumerate(self._owners[slab]):
                if owner != _FREE:
                    yield owner, slab * self.slab_bytes + cell * self.sizes[size_class], self.sizes[size_class]

    @property
    def free_slabs(self) -> int:
        return len(self._free_slabs)

    def check(self) -> None:
        """Assert the invariants."""
        assert sorted(self._free_slabs) == [slab for slab in range(self.slabs) if self.slab_class[slab] == _FREE]
        for slab, size_class in enumerate(self.slab_class):
            taken = len(self.owners(slab))
            assert taken == self.used_cells[slab]
            assert self._fresh[slab] == len(self._owners[slab]) == taken + len(self._returned[slab])
            if size_class == _FREE:
                assert taken == 0
            else:
                assert 0 < taken <= self._cells(size_class)
                assert (slab in self._roomy[size_class]) == (taken < self._cells(size_class))

    def _cells(self, size_class: int) -> int:
        return self.slab_bytes // self.sizes[size_class]

    def _open(self, slab: int, size_class: int) -> None:
        self.slab_class[slab] = size_class
        self._roomy[size_class][slab] = None

    def _close(self, slab: int, size_class: int) -> None:
        self.slab_class[slab] = _FREE
        self._fresh[slab] = 0
        self._returned[slab] = array("I")
        self._owners[slab] = array("i")
        self._roomy[size_class].pop(slab, None)
        self._free_slabs.append(slab)
