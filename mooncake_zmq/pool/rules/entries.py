"""The table of a store's values: a row of columns for each, which cell it has, who reads it, and what may be evicted. PURE.

Rows are reused, and generations never are. `fences` are the generations that the segment must show before any answer leaves.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mooncake_zmq.kv.slot_table import TRANSITIONS, SlotEvent
from mooncake_zmq.pool.rules.engine_blocks import EngineBlocks
from mooncake_zmq.pool.rules.holdings import Holdings
from mooncake_zmq.pool.rules.linked_rows import LinkedRows
from mooncake_zmq.pool.rules.object_log import ObjectLog
from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.rules.slab import SlabAllocator
from mooncake_zmq.pool.rules.table import report_corrupt
from mooncake_zmq.pool.rules.tenants import Tenants
from mooncake_zmq.pool.rules.write_back import WriteBackOrder
from mooncake_zmq.store.codes import Pin

_SOFT, _HARD, _PROMOTION = int(Pin.SOFT), int(Pin.HARD), int(Pin.PROMOTION)
"""As plain numbers: an operation on flags takes as long as the rest of what it decides."""


class Found(NamedTuple):
    """A readable value; `checksum` 0: none was made."""

    entry: int
    offset: int
    size: int
    generation: int
    checksum: int


class Unsaved(NamedTuple):
    """A value in memory that is to be written to disk."""

    key: str
    entry: int
    generation: int
    offset: int
    size: int
    pin: int


class Entries:
    """The rows of all values in memory, with the cells that they take."""

    def __init__(self, settings: ObjectSettings, log: ObjectLog | None, counts: dict[str, int]) -> None:
        self.settings, self.log, self.counts = settings, log, counts
        self.slabs = SlabAllocator(settings.object_bytes, settings.slab_bytes)
        self.by_key: dict[str, int] = {}
        """Readable objects. Others may look keys up in it, and must not change it."""
        self.engine_blocks = EngineBlocks()
        """Blocks of vLLMs that are here; the owner asks it for changes."""
        self.fences: list[tuple[int, int]] = []
        """(entry, generation) in the order in which the segment must show them; the owner clears the list."""
        classes = len(self.slabs.sizes)
        self.first = 2 * classes
        self.lru = LinkedRows(2 * classes)
        """Evictable entries, least recently used first: list 2c for class c, 2c + 1 for its soft pins."""
        rows = range(self.first)
        self.generation, self.checksum, self.size, self.offset, self.used_at = (array("Q", (0 for _ in rows)) for _ in range(5))
        self.leases = array("I", (0 for _ in rows))
        self.size_class = array("H", (0 for _ in rows))
        self.state, self.pin_of = (array("B", (0 for _ in rows)) for _ in range(2))
        self.key: list[str | None] = [None for _ in rows]
        self.free_rows = array("i")
        # Of each unit of memory: entries that cannot be evicted now, soft pins, and when any of its objects was last used.
        self.blocked, self.soft, self.unit_used_at = (array("q", bytes(8 * self.slabs.units)) for _ in range(3))
        self.object_bytes = 0
        self._clock = 0
        """Counts uses: the order of the LRU lists across classes."""
        self.tenants = Tenants(settings.tenants)
        self.holdings: Holdings | None = None
        """Cells of memory by tenant, and what of them can be evicted, soft pins last."""
        if settings.tenants:
            quotas = [each.dram_bytes for each in settings.tenants]
            self.holdings = Holdings(self.tenants, quotas, rows=self.first, kinds=2)
        tenant_of = self.holdings.of if self.holdings is not None else ()
        self.cold = WriteBackOrder(self.first, self.size, tenant_of) if log is not None else None
        self.held: set[int] = set()
        """Entries being written to disk: not evicted meanwhile, so that the work is not in vain."""

    @property
    def table_rows(self) -> int:
        """Rows that a table indexed by entry needs."""
        return self.first + self.settings.max_objects

    def charge(self, size_class: int) -> int:
        """Bytes of a tenant's quota that a value takes: its cell, and its share of the rows at least, as those run out too."""
        return max(self.slabs.sizes[size_class], self.settings.object_bytes // self.settings.max_objects)

    def found(self, entry: int) -> Found:
        return Found(entry, self.offset[entry], self.size[entry], self.generation[entry], self.checksum[entry])

    def find(self, key: str) -> Found | None:
        """A readable value, which counts as used. Unleased: it may be evicted as soon as this event is over."""
        entry = self.by_key.get(key)
        if entry is None:
            return None
        if entry in self.lru:
            self.keep(entry)
            self.make_evictable(entry)
        if self.log is not None:
            self.log.use(key)
        return self.found(entry)

    def add_row(self) -> int | None:
        """A new row of the columns; None where there are as many as may be."""
        if len(self.key) >= self.table_rows:
            return None
        for column in (self.generation, self.checksum, self.size, self.offset, self.used_at):
            column.append(0)
        for small in (self.leases, self.size_class, self.state, self.pin_of):
            small.append(0)
        self.key.append(None)
        self.lru.add_row()
        if self.cold is not None:
            self.cold.add_row()
        if self.holdings is not None:
            self.holdings.add_row()
        return len(self.key) - 1

    def begin(self, entry: int, size: int, offset: int, size_class: int, pins: int, tenant: int) -> None:
        """A free row has a cell now, which a client writes."""
        self.move(entry, SlotEvent.RESERVE)
        self.size[entry], self.offset[entry], self.size_class[entry] = size, offset, size_class
        self.pin_of[entry] = pins & (_SOFT | _HARD)
        unit = self.slabs.unit_of(offset)
        self.blocked[unit] += 1
        if pins & _SOFT:
            self.soft[unit] += 1
        if self.holdings is not None:
            self.holdings.take(entry, tenant, self.charge(size_class))
        self.fence(entry, self.generation[entry] + 1)

    def publish(self, entry: int, key: str, checksum: int, *, promoted: bool) -> None:
        """Make what was written readable by this key."""
        self.move(entry, SlotEvent.COMMIT)
        self.fence(entry, self.generation[entry] + 1)
        self.checksum[entry] = checksum
        self.key[entry] = key
        self.by_key[key] = entry
        if self.holdings is not None:
            self.holdings.show(entry)
        self.engine_blocks.touch(key)
        self.object_bytes += self.size[entry]
        self.counts["promoted" if promoted else "puts"] += 1
        self.counts["promoted_bytes" if promoted else "put_bytes"] += self.size[entry]
        if self.cold is not None:
            self.cold.add(entry, saved=promoted)
        if self.pin_of[entry] & _HARD:
            self.use(entry)
        else:
            self.make_evictable(entry)

    def pin(self, entries: Sequence[int]) -> None:
        """See `Table`: one more reader of each, which is a use of it."""
        for entry in entries:
            if entry in self.lru:
                self.keep(entry)
            self.leases[entry] += 1
            if self.log is not None and (key := self.key[entry]) is not None:
                self.log.use(key)

    def unpin(self, entries: Sequence[int]) -> None:
        """See `Table`: one reader fewer of each; the last one of a value that was removed frees its cell."""
        for entry in entries:
            assert self.leases[entry] > 0, "a lease ends once"
            self.leases[entry] -= 1
            if self.leases[entry] == 0:
                if self.key[entry] is None:
                    self.free(entry)
                elif not self.pin_of[entry] & _HARD:
                    self.make_evictable(entry)

    def set_checksum(self, made_of: Found | Unsaved, checksum: int) -> bool:
        """Remember a checksum made later than at its put. False if it may be of other bytes: that copy is gone, or has another
        checksum already, and then it can be found no more. The first one stands, or damage would be vouched for."""
        entry, generation = made_of.entry, made_of.generation
        if self.generation[entry] != generation:
            return False
        if self.checksum[entry] not in (0, checksum):
            self.report_corrupt(entry, generation)
            return False
        self.checksum[entry] = checksum
        return True

    def report_corrupt(self, entry: int, generation: int) -> None:
        """Forget a copy whose bytes did not verify, unless it is gone already."""
        self.counts["corrupt"] += report_corrupt(self, entry, generation)

    def is_readable(self, entry: int, generation: int) -> bool:
        if not self.first <= entry < len(self.generation) or self.generation[entry] != generation:
            return False
        key = self.key[entry]
        return key is not None and self.by_key.get(key) == entry

    def stands(self, value: Unsaved) -> bool:
        """Whether it can still be read. One that was removed may keep its bytes until its readers are done."""
        return self.generation[value.entry] == value.generation and self.by_key.get(value.key) == value.entry

    def evict(self, entry: int) -> None:
        self.counts["evicted"] += 1
        self.counts["evicted_bytes"] += self.size[entry]
        if self.cold is not None and not self.cold.is_saved(entry):
            self.counts["evicted_unsaved"] += 1
        self.forget(entry)

    def forget(self, entry: int) -> None:
        """See `Table`: take a readable object's name."""
        key = self.key[entry]
        assert key is not None
        del self.by_key[key]
        if self.holdings is not None:
            self.holdings.hide(entry)
        self.engine_blocks.touch(key)
        self.key[entry] = None
        self.object_bytes -= self.size[entry]
        if self.cold is not None:
            self.cold.remove(entry)
            if self.cold.is_saved(entry):  # a copy that memory does not have makes room for others of its tenant
                self.look_again([key])
        if entry in self.held:
            self.let_go(entry)
        if entry in self.lru:
            self.keep(entry)
        if self.leases[entry] == 0:
            self.free(entry)

    def free(self, entry: int) -> None:
        """See `Table`: free the cell of an entry that is in no list and has no readers."""
        self.move(entry, SlotEvent.FREE)
        self.fence(entry, self.generation[entry] + (1 if self.generation[entry] % 2 else 2))
        unit = self.slabs.unit_of(self.offset[entry])
        self.blocked[unit] -= 1
        if self.pin_of[entry] & _SOFT:
            self.soft[unit] -= 1
        if self.holdings is not None:
            self.holdings.give(entry, self.charge(self.size_class[entry]))
        self.slabs.give(self.offset[entry])
        self.free_rows.append(entry)

    def use(self, entry: int) -> None:
        self._clock += 1
        self.used_at[entry] = self._clock
        if self.cold is not None:
            self.cold.use(entry)
        self.unit_used_at[self.slabs.unit_of(self.offset[entry])] = self._clock

    def let_all_go(self) -> bool:
        """Where nothing else can be evicted, what is being written is; that work is then in vain. False if nothing is."""
        held = list(self.held)
        for entry in held:
            self.let_go(entry)
        return bool(held)

    def let_go(self, entry: int) -> None:
        """It may be evicted although it is being written, or was."""
        self.held.discard(entry)
        self.blocked[self.slabs.unit_of(self.offset[entry])] -= 1

    def look_again(self, keys: Iterable[str]) -> None:
        """Tenants of these may have room on disk now."""
        if self.cold is not None and self.holdings is not None:
            for key in keys:
                self.cold.look_again(self.tenants.of(key))

    def is_on_disk_only(self, key: str, pins: int) -> bool:
        return self.log is not None and not pins & _PROMOTION and key in self.log.readable

    def make_evictable(self, entry: int) -> None:
        """Evictable from now on, after everything else of its class."""
        self.use(entry)
        self.lru.append(2 * self.size_class[entry] + bool(self.pin_of[entry] & _SOFT), entry)
        if self.holdings is not None:
            self.holdings.append(entry, bool(self.pin_of[entry] & _SOFT))
        self.blocked[self.slabs.unit_of(self.offset[entry])] -= 1

    def keep(self, entry: int) -> None:
        self.lru.remove(entry)
        if self.holdings is not None:
            self.holdings.remove(entry)
        self.blocked[self.slabs.unit_of(self.offset[entry])] += 1

    def quarantine(self, entry: int) -> None:
        self.move(entry, SlotEvent.QUARANTINE)

    def move(self, entry: int, event: SlotEvent) -> None:
        self.state[entry] = TRANSITIONS[event][self.state[entry]][0]

    def fence(self, entry: int, generation: int) -> None:
        self.generation[entry] = generation
        self.fences.append((entry, generation))
