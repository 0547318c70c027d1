"""The slab allocator against a naive model: cells never overlap, all memory comes back, waste is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake_zmq.pool.rules.slab import MIN_CELL_BYTES, PARTS, SlabAllocator, class_sizes

SLAB = 1 << 16
SIZES = st.one_of(st.integers(1, 600), st.integers(1, SLAB))


class SlabMachine(RuleBasedStateMachine):
    """The model: the byte ranges taken, by owner."""

    def __init__(self):
        super().__init__()
        self.slabs = SlabAllocator(4 * SLAB + 100, SLAB)
        self.taken = {}
        self.next_owner = 0

    @rule(size=SIZES)
    def take(self, size):
        size_class = self.slabs.class_of(size)
        offset = self.slabs.take(size_class, self.next_owner)
        if offset is None:
            assert self.slabs.free_slabs == 0
            return
        cell = self.slabs.sizes[size_class]
        assert size <= cell
        assert offset // SLAB == (offset + cell - 1) // SLAB, "a cell lies in one slab"
        assert self.slabs.unit_of(offset) == self.slabs.unit_of(offset + cell - 1), "and in one unit"
        assert all(offset + cell <= start or stop <= offset for start, stop in self.taken.values())
        self.taken[self.next_owner] = (offset, offset + cell)
        self.next_owner += 1

    @rule(data=st.data())
    def give(self, data):
        if self.taken:
            owner = data.draw(st.sampled_from(sorted(self.taken)))
            self.slabs.give(self.taken.pop(owner)[0])

    @rule(unit=st.integers(0, 4 * PARTS - 1))
    def empty_a_unit(self, unit):
        for owner in self.slabs.owners(unit):
            assert self.slabs.unit_of(self.taken[owner][0]) == unit
            self.slabs.give(self.taken.pop(owner)[0])
        assert self.slabs.unit_class[unit] == -1

    @invariant()
    def agrees(self):
        self.slabs.check()
        assert {owner: offset for owner, offset, _ in self.slabs.cells()} == {o: s for o, (s, _) in self.taken.items()}


TestSlabs = SlabMachine.TestCase


@given(st.integers(4096, 9 << 20))
def test_a_value_of_4_kib_to_9_mib_wastes_at_most_a_seventh_of_its_cell(size):
    slabs = SlabAllocator(64 << 20, 64 << 20)
    cell = slabs.sizes[slabs.class_of(size)]
    assert size <= cell
    assert (cell - size) / cell <= 1 / 7 + 0.001


@given(st.integers(1, 64).map(lambda pages: pages * 65536))
def test_classes_ascend_and_large_ones_are_whole_pages(slab_bytes):
    sizes = class_sizes(slab_bytes)
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= MIN_CELL_BYTES
    assert sizes[-1] == slab_bytes
    assert all(size % (4096 if size >= 65536 else 64) == 0 for size in sizes)


def test_a_value_above_the_slab_has_no_class_and_a_pool_below_a_page_is_refused():
    assert SlabAllocator(2 * SLAB, SLAB).class_of(SLAB + 1) is None
    with pytest.raises(ValueError, match="holds no 16 pages"):
        SlabAllocator(100, SLAB)
