"""The SSD tier of one host's pool: which block stands in which disk slot, and what is demoted next. PURE.

Demotion is write-behind: the coldest share of DRAM is kept on disk as well, so that evicting it later costs nothing and a
put never waits for a write. Both tiers use the same slots and order of eviction; a disk slot is pinned while it is read.

A disk that takes no more writes is read on; one that cannot be read has lost all. Either is tried again after a pause.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake_zmq.core.actor import Effect, SetTimer, Start
from mooncake_zmq.core.work import DiskBlock, DiskWritten, WorkFailed, WriteToDisk
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.events import TOKEN_BYTES
from mooncake_zmq.kv.slot_table import SlotState
from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.pool.node.contents import UNKNOWN, Content, Contents
from mooncake_zmq.pool.node.misses import CORRUPT, DISK_FAILED
from mooncake_zmq.pool.node.parts import Parts
from mooncake_zmq.pool.node.settings import RETRY_S
from mooncake_zmq.pool.rules.tenants import slots_of

RETRY = ("disk_retry",)
"""The timer that lets a disk which has failed be tried again."""
BATCHES = 2
"""Under way at once: one's bytes move while the rows of the other are committed."""
MAX_SCAN = 4096
"""Cold DRAM slots looked at in one event, but for a drain."""


@dataclass(frozen=True, slots=True)
class DiskContents:
    """The result of a recovery scan: `slots` in all, and the blocks that stand there, the oldest first."""

    slots: int = 0
    blocks: tuple[DiskBlock, ...] = field(default=(), repr=False)


@dataclass(slots=True)
class _Demotion:
    """One block under way from a DRAM slot, which is pinned, to a disk slot, which is being written."""

    slot: int
    block: DiskBlock


class DiskTier:
    """The tier's slots, what is written to them from DRAM, and whether the disk works."""

    def __init__(self, parts: Parts, contents: DiskContents) -> None:
        settings = parts.settings
        most = slots_of([each.ssd_bytes for each in settings.tenants], settings.ssd.bytes, contents.slots)
        self.slots = Slots(contents.slots, most)
        self._tenants = parts.tenants
        self.readable = self.writable = contents.slots > 0
        self.fault = ""
        """Why the tier is off, or was when it was last written; empty once a write was good again."""
        self._pause_s = RETRY_S
        """Before the next try, should the disk fail now."""
        self._tried_at = float("-inf")
        self._retry_s = 0.0
        """The timer to be armed; 0: none."""
        self.stored: list[tuple[Key, Content]] = []
        """Blocks newly on disk, to be announced; the owner clears the list."""
        self._settings = settings.ssd
        self._dram = parts.slots
        self._dram_contents = parts.contents
        block_tokens = parts.contents.token_bytes // TOKEN_BYTES
        self._contents = Contents(contents.slots, block_tokens) if block_tokens else None
        """Kept for KV events alone."""
        self._ref = parts.ref
        self._new_id = parts.new_id
        self._counts = parts.counts
        self._going = parts.misses.going
        self._draining = False
        self._clean = 0
        """At least so many of the coldest DRAM slots were on disk or free when last looked at, less those used since."""
        self.unsaved = 0
        """Blocks that DRAM alone holds; the owner adds those that come."""
        self._todo: deque[tuple[int, int]] = deque()
        """(DRAM slot, generation) to be written, the coldest first."""
        self._writing: dict[int, list[_Demotion]] = {}
        for block in contents.blocks:
            self.slots.restore(block.slot, block.key, block.checksum, parts.tenants.number(block.tenant))
        for block in contents.blocks:
            if self.slots.shares is None or self.slots.held(block.key):  # else the share of its tenant has become smaller
                self._note(block)

    @property
    def capacity(self) -> int:
        """Blocks that the tier can hold; 0 once it takes no more."""
        return self.slots.capacity - self.slots.count(SlotState.RETIRED) if self.writable else 0

    @property
    def degraded(self) -> dict[str, float]:
        """1 for what the tier should do and does not, by name."""
        there = self.slots.capacity > 0
        return {"reads": float(there and not self.readable), "writes": float(there and not self.writable)}

    @property
    def demoting(self) -> int:
        """Blocks on their way to disk."""
        return sum(len(batch) for batch in self._writing.values())

    def find(self, key: Key) -> DiskBlock | None:
        """The copy of `key` that can be promoted."""
        slot = self.slots.committed(key) if self.readable else None
        return None if slot is None else DiskBlock(slot, key, self.slots.checksum[slot])

    def content(self, slot: int) -> Content:
        """The known content of the block in a disk slot."""
        return self._contents.of(slot) if self._contents else UNKNOWN

    def used(self, blocks: int) -> None:
        """Blocks of DRAM were leased, perhaps from its write-back window, or came back to it."""
        self._clean -= blocks

    def begin_drain(self) -> None:
        """Write all that DRAM alone holds, as far as there is room, and nothing that comes later."""
        self._draining = True
        self._look()

    def end_drain(self) -> None:
        """Go on as before."""
        self._draining, self._clean = False, 0

    def demote(self) -> list[Effect]:
        """Write the coldest DRAM blocks that are not on disk yet, a batch at a time, and beside it one that is full, if the
        disk works. Of one that has just failed: arm the timer of the next try."""
        effects: list[Effect] = [SetTimer(RETRY, self._retry_s)] if self._retry_s else []
        self._retry_s = 0.0
        while self.writable and len(self._writing) < (1 if self.fault else BATCHES):
            if not self._todo and not self._draining and self.unsaved > 0 and self._clean <= sum(self._windows()) * 3 // 4:
                self._look()
            if self._writing and len(self._todo) < self._settings.batch_blocks:
                break
            demotions = self._next_batch()
            if not demotions:
                break
            work_id = self._new_id()
            self._writing[work_id] = demotions
            blocks = tuple((self._ref(demotion.slot), demotion.block) for demotion in demotions)
            effects.append(Start(work_id, WriteToDisk(blocks, is_probe=bool(self.fault)), self._settings.write_s))
        return effects

    def _next_batch(self) -> list[_Demotion]:
        """The blocks to write first, each with its place reserved."""
        demotions: list[_Demotion] = []
        while self._todo and len(demotions) < self._settings.batch_blocks:
            slot, generation = self._todo.popleft()
            key = self._dram.key_of(slot)
            if self._dram.generation[slot] != generation or key is None or self.slots.held(key):
                continue
            owner = self._dram.owner_of(slot)
            target = self.slots.reserve(key, owner)
            if target is None:
                if self.slots.shares is None:
                    break
                continue  # others may have room
            content, tenant = self._content_above(slot), self._tenants.names[owner]
            demotions.append(_Demotion(slot, DiskBlock(target, key, self._dram.checksum[slot], *content, tenant)))
        return demotions

    def _content_above(self, slot: int) -> Content:
        """The content to write into the index row of the block in a DRAM slot."""
        content = self._dram_contents.of(slot)
        return content if content.tokens else UNKNOWN

    def _look(self) -> None:
        """Find the blocks in DRAM's write-back window that are not on disk. Repeated only when a quarter of the window is used
        up."""
        windows = self._windows()
        self._clean = sum(windows)
        due: dict[int, int] = {}
        for slot in self._dram.cold_ends(windows):
            key = self._dram.key_of(slot)
            if key is None or self.slots.held(key):
                continue
            owner = self._dram.owner_of(slot)
            due[owner] = due.get(owner, 0) + 1
            if due[owner] <= self.slots.room(owner) // 2:
                self._todo.append((slot, self._dram.generation[slot]))

    def writes(self, work_id: int) -> bool:
        """Is this work one of ours?"""
        return work_id in self._writing

    def on_written(self, now: float, work_id: int, result: DiskWritten | WorkFailed) -> None:
        """A batch is over."""
        demotions = self._writing.pop(work_id)
        if isinstance(result, WorkFailed):
            result = DiskWritten((False,) * len(demotions))
        for demotion, done in zip(demotions, result.written, strict=True):
            if done and self.readable:
                self.slots.commit(demotion.block.slot, demotion.block.checksum)
                self._note(demotion.block)
                self.unsaved -= self._dram.committed(demotion.block.key) is not None
            else:
                self.slots.free(demotion.block.slot)
        for index in result.corrupt:
            slot, key = demotions[index].slot, demotions[index].block.key
            if self._dram.committed(key) == slot and self._dram.checksum[slot] == demotions[index].block.checksum:
                self._going((key,), CORRUPT)
                self._dram.forget(slot)
                self._counts.add("corrupt_blocks[tier=dram]")
        self._counts.add("demoted_blocks", sum(result.written))
        self._counts.add("demotion_failures", len(demotions) - sum(result.written))
        if result.fault and self.writable:
            self.writable = False
            self._try_later(now, result.fault, "write")
        elif self.writable and any(result.written):
            self.fault = ""

    def _note(self, block: DiskBlock) -> None:
        """A block stands on disk now."""
        content = UNKNOWN
        if self._contents:
            self._contents.put(block.slot, block.parent, block.tokens)
            content = Content(block.parent, block.tokens if self._contents.fits(block.tokens) else b"")
        self.stored.append((block.key, content))

    def corrupt(self, block: DiskBlock) -> None:
        """A copy did not verify: a miss from now on, and nothing is written to its place any more. Call when it is unpinned."""
        if self.slots.state_of(block.slot) is SlotState.COMMITTED and self.slots.key_of(block.slot) == block.key:
            self._counts.add("corrupt_blocks[tier=disk]")
            self._going((block.key,), CORRUPT)
            if self.slots.pins[block.slot]:
                self.slots.forget(block.slot)  # another reader is at it, and will find the same
            else:
                self.slots.retire(block.slot)

    def fail(self, now: float, reason: str) -> None:
        """The disk cannot be read: its blocks are forgotten, in this incarnation."""
        if self.readable:
            self.readable = self.writable = False
            self._try_later(now, reason, "read")
            self._going(self.slots.committed_keys(), DISK_FAILED)
            for key in self.slots.committed_keys():
                slot = self.slots.committed(key)
                assert slot is not None
                self.slots.forget(slot)

    def _try_later(self, now: float, fault: str, operation: str) -> None:
        """Pauses grow until the disk has worked for as long as the longest one."""
        self._counts.add(f"disk_faults[operation={operation}]")
        self.fault = fault
        if now - self._tried_at > self._settings.retry_max_s:
            self._pause_s = RETRY_S
        self._retry_s = self._pause_s
        self._pause_s = min(2 * self._pause_s, self._settings.retry_max_s)

    def retry(self, now: float) -> None:
        """A pause is over: whether the disk works again, the next batches find out."""
        self._counts.add("disk_retries")
        self._tried_at = now
        self.readable = self.writable = True
        self._todo.clear()
        self._look()

    def left(self, dram: Sequence[Key], disk: Sequence[Key]) -> None:
        """Blocks that went from either tier. Those that DRAM evicted were used more lately than what lies on disk untouched:
        the order of use spans both tiers."""
        self._clean -= len(dram)
        lost = 0
        left_disk = set(disk)
        for key, slot in zip(dram, self.slots.present(dram), strict=True):
            if slot is not None:
                self.slots.touch([slot])
            elif key not in left_disk:
                lost += 1
        self.unsaved += sum(slot is not None for slot in self._dram.present(disk)) - lost
        self._counts.add("evicted_unsaved_blocks", lost if self.slots.capacity else 0)
        if lost and self._dram.shares is not None:
            self._clean = 0  # one tenant's write-back window may be used up long before all are

    def _windows(self) -> list[int]:
        """How many of the coldest evictable slots of each order are to be on disk as well, those that are free being as good.

        At most half of the disk's slots: else writing one block could take the place of another that is then due again.
        """
        windows = self._dram.windows(1.0 if self._draining else self._settings.ahead)
        most, total = min(self.slots.capacity // 2, self._dram.capacity if self._draining else MAX_SCAN), sum(windows)
        return windows if total <= most else [window * most // total for window in windows]
