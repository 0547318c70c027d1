"""The SSD tier of one host's pool: which block stands in which disk slot, and what is demoted next. PURE.

Demotion is write-behind: the coldest share of DRAM is kept on disk as well, so that evicting it later costs nothing and a
put never waits for a write. Both tiers use the same slots and eviction policy; a disk slot is pinned while it is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mooncake_zmq.cache_node.settings import SsdSettings
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.slots import Slots, SlotState
from mooncake_zmq.messages import SlotRef
from mooncake_zmq.runtime.actor import Effect, Start
from mooncake_zmq.work import DiskBlock, DiskWritten, WorkFailed, WriteToDisk

MAX_SCAN = 4096
"""Cold DRAM slots looked at for one batch; bounds the time of an event, not what is demoted in the end."""


@dataclass(frozen=True, slots=True)
class DiskContents:
    """What a recovery scan found: `slots` in all, and the blocks that stand there, the oldest first."""

    slots: int = 0
    blocks: tuple[DiskBlock, ...] = field(default=(), repr=False)


@dataclass(slots=True)
class _Demotion:
    """One block under way from a DRAM slot, which is pinned, to a disk slot, which is being written."""

    slot: int
    block: DiskBlock


class DiskTier:
    """`ref` names a committed DRAM slot as a source; `new_id` gives work ids of the owning actor, which lends its `counts`."""

    def __init__(
        self,
        settings: SsdSettings,
        contents: DiskContents,
        dram: Slots,
        *,
        policy: str,
        ref: Callable[[int], SlotRef],
        new_id: Callable[[], int],
        counts: dict[str, int],
    ) -> None:
        self.slots = Slots(contents.slots, policy)
        self.readable = self.writable = contents.slots > 0
        self.fault = ""
        """Why the tier is off, or only read any more."""
        self.stored: list[Key] = []
        """Keys newly on disk, for whoever announces them; the owner clears the list."""
        self.due = True
        """May there be something to demote? Set by the owner whenever blocks came or leases ended."""
        self._settings = settings
        self._dram = dram
        self._ref = ref
        self._new_id = new_id
        self._counts = counts
        self._writing: dict[int, list[_Demotion]] = {}
        for block in contents.blocks:
            self.slots.restore(block.slot, block.key, block.checksum)
            self.stored.append(block.key)

    @property
    def demoting(self) -> int:
        """Blocks on their way to disk."""
        return sum(len(batch) for batch in self._writing.values())

    @property
    def pinned_dram_slots(self) -> list[int]:
        """DRAM slots that a write reads from, for the owner's `check`."""
        return [demotion.slot for batch in self._writing.values() for demotion in batch]

    def find(self, key: Key) -> DiskBlock | None:
        """The copy of `key` that can be promoted."""
        slot = self.slots.committed(key) if self.readable else None
        return None if slot is None else DiskBlock(slot, key, self.slots.checksum[slot])

    def demote(self, *, everything: bool) -> list[Effect]:
        """Write the coldest DRAM blocks that are not on disk yet, one batch at a time. `everything`: not only the coldest."""
        if not self.due or not self.writable or self._writing:
            return []
        demotions: list[_Demotion] = []
        for slot in self._dram.coldest(self._window(everything)):
            key = self._dram.key_of(slot)
            if key is None or self.slots.held(key):
                continue
            target = self.slots.reserve(key)
            if target is None:
                break
            demotions.append(_Demotion(slot, DiskBlock(target, key, self._dram.checksum[slot])))
            if len(demotions) == self._settings.batch_blocks:
                break
        self.due = bool(demotions)
        if not demotions:
            return []
        for demotion in demotions:
            self._dram.pin(demotion.slot)
        work_id = self._new_id()
        self._writing[work_id] = demotions
        blocks = tuple((self._ref(demotion.slot), demotion.block) for demotion in demotions)
        return [Start(work_id, WriteToDisk(blocks), self._settings.write_s)]

    def writes(self, work_id: int) -> bool:
        """Is this work one of ours?"""
        return work_id in self._writing

    def on_written(self, work_id: int, result: DiskWritten | WorkFailed) -> None:
        """A batch is over."""
        demotions = self._writing.pop(work_id)
        written = result.written if isinstance(result, DiskWritten) else (False,) * len(demotions)
        for demotion, done in zip(demotions, written, strict=True):
            if done and self.readable:
                self.slots.commit(demotion.block.slot, demotion.block.checksum)
                self.stored.append(demotion.block.key)
            else:
                self.slots.free(demotion.block.slot)
        slots = [demotion.slot for demotion in demotions]
        self._dram.unpin(slots)
        for slot in reversed(slots):
            if not self._dram.pins[slot] and self._dram.state_of(slot) is SlotState.COMMITTED:
                self._dram.demote(slot)  # to be copied is no use of a block: it is as cold as before
        self._count("demoted_blocks", sum(written))
        self._count("demotion_failures", len(written) - sum(written))
        self.due = any(written)  # after a batch of which nothing succeeded, the next commit is soon enough
        if isinstance(result, DiskWritten) and result.fault and self.writable:
            self.writable = False
            self.fault = result.fault
            self._count("disk_faults[operation=write]")

    def corrupt(self, block: DiskBlock) -> None:
        """A copy did not verify: a miss from now on, and nothing is written to its place any more. Call when it is unpinned."""
        if self.slots.state_of(block.slot) is SlotState.COMMITTED and self.slots.key_of(block.slot) == block.key:
            self._count("corrupt_blocks[tier=disk]")
            if self.slots.pins[block.slot]:
                self.slots.forget(block.slot)  # another reader is at it, and will find the same
            else:
                self.slots.retire(block.slot)

    def fail(self, reason: str) -> None:
        """The disk cannot be read any more: nothing is served from it, or written to it, in this life."""
        if self.readable:
            self._count("disk_faults[operation=read]")
            self.readable = self.writable = False
            self.fault = reason
            for key in self.slots.committed_keys():
                slot = self.slots.committed(key)
                assert slot is not None
                self.slots.forget(slot)

    def left_dram(self, keys: Sequence[Key]) -> None:
        """Blocks that DRAM just evicted were used more lately than what lies on disk untouched: the LRU spans both tiers."""
        for key in keys:
            slot = self.slots.committed(key)
            if slot is not None:
                self.slots.touch([slot])

    def _window(self, everything: bool) -> int:
        """How many of the coldest evictable slots are to be on disk as well, those that are free being as good.

        At most half of the disk's slots: else writing one block could take the place of another that is then due again.
        """
        most = self.slots.capacity // 2
        if everything:
            return min(self._dram.capacity, most)
        share = int(self._dram.capacity * self._settings.ahead)
        return max(0, min(share - self._dram.count(SlotState.FREE), MAX_SCAN, most))

    def _count(self, name: str, amount: int = 1) -> None:
        if amount:
            self._counts[name] = self._counts.get(name, 0) + amount
