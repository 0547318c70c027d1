"""The actor of one host's KV pool: leases for readers, two-phase puts, fetches from other hosts, announcements. PURE.

It never touches bytes: readers and writers on its host do through shared memory, its own fetches are `CopyBlocks` works.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.lease import GrantedLease, HolderId
from mooncake_zmq.kv.slots import Slots, SlotState
from mooncake_zmq.messages import (
    MAX_BLOCKS,
    BlocksAnnounced,
    BlocksLeased,
    CommitSlots,
    GrantedSlot,
    LeaseBlocks,
    LeasedBlock,
    LeaseRenewed,
    ReclaimSlots,
    ReleaseLease,
    RenewLease,
    ReportCorrupt,
    ReserveSlots,
    SlotRef,
    SlotsReserved,
)
from mooncake_zmq.runtime.actor import (
    Drained,
    DrainWanted,
    Effect,
    Event,
    Fence,
    PeerDown,
    PeerUp,
    Received,
    Send,
    SetTimer,
    Start,
    Started,
    TimerFired,
    WorkDone,
    WorkProgress,
)
from mooncake_zmq.work import BlocksCopied, CopyBlocks, ProbeProcess, ProcessProbed, SlotGrant, WorkFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNodeSettings:
    """The pool of one host."""

    pool_bytes: int = 1 << 30
    """DRAM for blocks. 1 GiB holds about 23,000 tokens of the default model."""
    max_lease_s: float = 60.0
    """Longest lease granted, whatever was asked: a holder that hangs keeps blocks no longer."""
    fetch_lease_s: float = 20.0
    """Lease taken at another cache-node for the time of a fetch."""
    fetch_batch_blocks: int = 256
    """Blocks asked of another host at a time; bounds what one fetch pins on both sides."""
    probe_s: float = 1.0
    """How often a writer past its lease is asked again, and its process's lock looked at."""
    max_leases_per_client: int = 1024
    """Leases one client may hold; a further one is answered with no blocks."""
    max_quarantined_per_client: int = 64
    """Slots a client may have in quarantine; past it its puts are denied, or late writers could take the pool."""

    def __post_init__(self) -> None:
        if self.pool_bytes <= 0:
            raise ValueError("pool_bytes must be positive")
        if min(self.max_lease_s, self.fetch_lease_s, self.probe_s) <= 0:
            raise ValueError("max_lease_s, fetch_lease_s and probe_s must be positive")
        if self.fetch_lease_s > self.max_lease_s:
            raise ValueError("fetch_lease_s must be at most max_lease_s, or the granter stops before the holder")
        if not 1 <= self.fetch_batch_blocks <= MAX_BLOCKS:
            raise ValueError(f"fetch_batch_blocks must be in 1..{MAX_BLOCKS}")
        if min(self.max_leases_per_client, self.max_quarantined_per_client) < 1:
            raise ValueError("max_leases_per_client and max_quarantined_per_client must be at least 1")


@dataclass(slots=True)
class _Put:
    """A client's reserved slots: index in its request -> (key, slot, generation)."""

    slots: dict[int, tuple[Key, int, int]]
    quarantined: bool = False


@dataclass(slots=True)
class _Pending:
    """A lease request that waits for blocks of other hosts. `pinned` keeps what is here from being evicted meanwhile."""

    holder: HolderId
    keys: tuple[Key, ...]
    sources: list[str]
    deadline: float
    ttl_s: float
    pinned: dict[Key, int] = field(default_factory=dict)
    fetched: set[Key] = field(default_factory=set)
    asking: int | None = None
    """Our lease at another cache-node that was asked for, or that the copy in flight reads under."""


@dataclass(slots=True)
class _Fetch:
    """Blocks on their way from `source`: our lease there, asked for `pending`'s sake, then a copy into own slots."""

    source: str
    pending: HolderId
    keys: tuple[Key, ...]
    asked_at: float
    copies: list[tuple[Key, int, SlotRef]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Client:
    incarnation: int
    role: str


class CacheNode:
    """One host's pool."""

    def __init__(self, *, name: str, host: str, incarnation: int, settings: CacheNodeSettings, layout: BlockLayout) -> None:
        self.name = name
        self.host = host
        self.incarnation = incarnation
        self.slots = Slots(settings.pool_bytes // layout.slot_bytes)
        self.counts: dict[str, int] = {}
        self._settings = settings
        self._layout = layout
        self._peers: dict[str, _Client] = {}
        self._leases: dict[HolderId, GrantedLease] = {}
        self._puts: dict[HolderId, _Put] = {}
        self._pending: dict[HolderId, _Pending] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._copying: dict[int, int] = {}
        """Work id of a copy -> fetch."""
        self._probes: dict[int, tuple[str, int]] = {}
        self._stored: list[Key] = []
        self._next_id = 1
        self._draining = False

    @property
    def transitions(self) -> dict[str, int]:
        """Slot state transitions taken, for coverage."""
        return self.slots.transitions

    def handle(self, now: float, event: Event) -> list[Effect]:
        """See `runtime.actor`."""
        effects = self._dispatch(now, event)
        fences = self.slots.take_fences()
        announcements = self._announce()
        head: list[Effect] = [Fence(fences)] if fences else []
        return head + effects + announcements + self._drained()

    def _dispatch(self, now: float, event: Event) -> list[Effect]:
        match event:
            case Received(sender, LeaseBlocks() as message):
                return self._on_lease(now, sender, message)
            case Received(sender, RenewLease() as message):
                return self._on_renew(now, sender, message)
            case Received(sender, ReleaseLease() as message):
                return self._on_release(now, sender, message)
            case Received(sender, ReserveSlots() as message):
                return self._on_reserve(now, sender, message)
            case Received(sender, CommitSlots() as message):
                return self._on_commit(now, sender, message)
            case Received(_, ReportCorrupt() as message):
                return self._on_corrupt(message)
            case Received(sender, BlocksLeased() as message):
                return self._on_source_leased(now, sender, message)
            case WorkDone(work_id, BlocksCopied() | WorkFailed() as result) if work_id in self._copying:
                return self._on_fetched(now, work_id, result)
            case WorkDone(work_id, ProcessProbed() | WorkFailed() as result) if work_id in self._probes:
                return self._on_probed(now, work_id, result)
            case TimerFired(("lease", str(node), int(incarnation), int(number))):
                return self._on_lease_expired(now, HolderId(node, incarnation, number))
            case TimerFired(("put", str(node), int(incarnation), int(number))):
                return self._on_put_expired(now, HolderId(node, incarnation, number))
            case TimerFired(("fetch", str(node), int(incarnation), int(number))):
                return self._answer(now, HolderId(node, incarnation, number))
            case PeerUp() as up:
                return self._on_peer_up(now, up)
            case PeerDown(peer, _):
                return self._on_peer_down(now, peer)
            case DrainWanted():
                self._draining = True
                return []
            case Received(_, message):
                self._count(f"unexpected_messages[type={type(message).__name__}]")
                return []
            case Started() | TimerFired() | WorkProgress() | WorkDone():
                return []
            case _:
                raise TypeError(event)

    def check(self, now: float) -> None:
        """See `runtime.actor`."""
        self.slots.check()
        pins = [0] * self.slots.capacity
        for lease in self._leases.values():
            for slot in lease.slots:
                pins[slot] += 1
        for pending in self._pending.values():
            for slot in pending.pinned.values():
                pins[slot] += 1
        assert pins == self.slots.pins, "every pin is a lease's or a pending lease's"
        writing = sorted(slot for put in self._puts.values() for _, slot, _ in put.slots.values())
        writing += sorted(slot for fetch in self._fetches.values() for _, slot, _ in fetch.copies)
        states = (SlotState.WRITING, SlotState.QUARANTINED)
        assert sorted(writing) == [s for s in range(self.slots.capacity) if self.slots.state[s] in states]

    def gauges(self, now: float) -> dict[str, float]:
        """See `runtime.actor`."""
        oldest = min((lease.expires_at for lease in self._leases.values()), default=None)
        return {
            "capacity_blocks": self.slots.capacity,
            "cached_blocks": self.slots.count(SlotState.COMMITTED),
            "leased_blocks": sum(1 for pins in self.slots.pins if pins),
            "leases": len(self._leases),
            "oldest_lease_seconds_left": 0.0 if oldest is None else max(0.0, oldest - now),
            "pending_leases": len(self._pending),
            "writing_blocks": self.slots.count(SlotState.WRITING),
            "quarantined_blocks": self.slots.count(SlotState.QUARANTINED),
            "fetches": len(self._fetches),
        }

    def dump(self, now: float) -> dict[str, Any]:
        """See `runtime.actor`."""
        return {
            "gauges": self.gauges(now),
            "leases": [[str(h), len(lease.slots), lease.expires_at - now] for h, lease in self._leases.items()],
            "puts": [[str(h), len(put.slots), put.quarantined] for h, put in self._puts.items()],
            "pending": [[str(h), len(p.keys), p.sources, p.deadline - now] for h, p in self._pending.items()],
            "draining": self._draining,
        }

    # --- readers

    def _on_lease(self, now: float, sender: str, message: LeaseBlocks) -> list[Effect]:
        holder = self._holder(sender, message.lease_id)
        if holder in self._leases or holder in self._pending:
            return []
        mine = sum(1 for h in self._leases if h.node == sender) + sum(1 for h in self._pending if h.node == sender)
        if self._draining or mine >= self._settings.max_leases_per_client:
            self._count("leases_denied")
            return [Send(sender, BlocksLeased(lease_id=message.lease_id, blocks=()))]
        fetch_s = min(message.fetch_s, self._settings.max_lease_s)
        pending = _Pending(
            holder=holder,
            keys=message.keys,
            sources=[s for s in message.sources if s in self._peers and self._peers[s].role == "cache-node"],
            deadline=now + fetch_s,
            ttl_s=min(message.ttl_s, self._settings.max_lease_s),
        )
        self._pending[holder] = pending
        self._pin_present(pending)
        effects = self._advance(now, pending)
        if holder in self._pending:
            effects.append(SetTimer(("fetch", holder.node, holder.incarnation, holder.number), fetch_s))
        return effects

    def _pin_present(self, pending: _Pending) -> None:
        for key in pending.keys:
            if key not in pending.pinned:
                slot = self.slots.committed(key)
                if slot is not None:
                    self.slots.pin(slot)
                    pending.pinned[key] = slot

    def _advance(self, now: float, pending: _Pending) -> list[Effect]:
        """Answer if nothing more can come; else ask the next source for what is missing."""
        missing = [key for key in pending.keys if key not in pending.pinned]
        if pending.asking is not None:
            return []
        wanted = [key for key in missing if not self.slots.held(key)]
        awaited = len(wanted) < len(missing)
        if missing and pending.sources and wanted and now < pending.deadline:
            return self._ask(now, pending, pending.sources.pop(0), tuple(wanted[: self._settings.fetch_batch_blocks]))
        if awaited and now < pending.deadline and self._being_fetched(missing):
            return []
        return self._answer(now, pending.holder)

    def _being_fetched(self, keys: Sequence[Key]) -> bool:
        """Is the first missing key on its way here for another lease? (A put's writer owes us no haste.)"""
        flying = {key for fetch in self._fetches.values() for key, _, _ in fetch.copies}
        return bool(keys) and keys[0] in flying

    def _ask(self, now: float, pending: _Pending, source: str, keys: tuple[Key, ...]) -> list[Effect]:
        fetch_id = self._new_id()
        pending.asking = fetch_id
        self._fetches[fetch_id] = _Fetch(source=source, pending=pending.holder, keys=keys, asked_at=now)
        ask = LeaseBlocks(lease_id=fetch_id, keys=keys, sources=(), fetch_s=0.0, ttl_s=self._settings.fetch_lease_s)
        return [Send(source, ask)]

    def _on_source_leased(self, now: float, sender: str, message: BlocksLeased) -> list[Effect]:
        fetch = self._fetches.get(message.lease_id)
        if fetch is None or fetch.source != sender or fetch.copies:
            return [Send(sender, ReleaseLease(lease_id=message.lease_id))]
        pending = self._pending.get(fetch.pending)
        time_left = fetch.asked_at + self._settings.fetch_lease_s - now
        if pending is not None:
            time_left = min(time_left, pending.deadline - now)
        if pending is None or not message.blocks or time_left <= 0:
            return self._end_fetch(now, message.lease_id)
        for key, block in zip(fetch.keys, message.blocks, strict=False):
            if self.slots.held(key):
                continue
            slot = self.slots.reserve(key)
            if slot is None:
                self._count("fetches_denied[reason=no_room]")
                break
            fetch.copies.append((key, slot, block.source))
        if not fetch.copies:
            return self._end_fetch(now, message.lease_id)
        work_id = self._new_id()
        self._copying[work_id] = message.lease_id
        copies = tuple((ref, self._grant(slot)) for _, slot, ref in fetch.copies)
        return [Start(work_id, CopyBlocks(copies), time_left)]

    def _on_fetched(self, now: float, work_id: int, result: BlocksCopied | WorkFailed) -> list[Effect]:
        fetch_id = self._copying.pop(work_id)
        fetch = self._fetches[fetch_id]
        checksums: Sequence[int | None] = result.checksums if isinstance(result, BlocksCopied) else [None] * len(fetch.copies)
        pending = self._pending.get(fetch.pending)
        corrupt = tuple(fetch.copies[i][2] for i in result.corrupt) if isinstance(result, BlocksCopied) else ()
        whole = len(fetch.copies) == len(fetch.keys)
        for (key, slot, ref), checksum in zip(fetch.copies, checksums, strict=True):
            if checksum is not None and checksum == ref.checksum:
                self.slots.commit(slot, checksum)
                self._stored.append(key)
                self._count("fetched_blocks")
                if pending is not None:
                    pending.fetched.add(key)
            else:
                self.slots.free(slot)
                self._count("fetch_failures")
                whole = False
        self._count("fetched_blocks_corrupt", len(corrupt))
        if pending is not None and whole and fetch.source in self._peers:
            pending.sources.insert(0, fetch.source)  # it held all of this batch and may hold the next
        fetch.copies = []
        effects: list[Effect] = [Send(fetch.source, ReportCorrupt(slots=corrupt))] if corrupt else []
        return effects + self._end_fetch(now, fetch_id)

    def _end_fetch(self, now: float, fetch_id: int) -> list[Effect]:
        """A source is done with: release our lease there, then see to everyone who waited for these keys."""
        fetch = self._fetches.pop(fetch_id)
        effects: list[Effect] = [Send(fetch.source, ReleaseLease(lease_id=fetch_id))]
        for pending in list(self._pending.values()):
            if pending.asking == fetch_id:
                pending.asking = None
            self._pin_present(pending)
        for pending in list(self._pending.values()):
            effects += self._advance(now, pending)
        return effects

    def _answer(self, now: float, holder: HolderId) -> list[Effect]:
        """Grant the leading run that is here now; what is still on its way comes too late for this lease."""
        pending = self._pending.pop(holder, None)
        if pending is None:
            return []
        run: list[int] = []
        for key in pending.keys:
            slot = pending.pinned.pop(key, None)
            if slot is None:
                break
            run.append(slot)
        self.slots.unpin(list(pending.pinned.values()))
        blocks = tuple(
            LeasedBlock(source=self._ref(slot), remote=key in pending.fetched)
            for key, slot in zip(pending.keys, run, strict=False)
        )
        remote = sum(1 for block in blocks if block.remote)
        self._count("lookup_blocks[result=local]", len(run) - remote)
        self._count("lookup_blocks[result=remote]", remote)
        self._count("lookup_blocks[result=miss]", len(pending.keys) - len(run))
        reply = Send(holder.node, BlocksLeased(lease_id=holder.number, blocks=blocks))
        if not run:
            return [reply]
        self._leases[holder] = GrantedLease(tuple(run), now + pending.ttl_s)
        return [SetTimer(("lease", holder.node, holder.incarnation, holder.number), pending.ttl_s), reply]

    def _on_renew(self, now: float, sender: str, message: RenewLease) -> list[Effect]:
        holder = self._holder(sender, message.lease_id)
        lease = self._leases.get(holder)
        if lease is None:
            return []
        ttl_s = min(message.ttl_s, self._settings.max_lease_s)
        lease.expires_at = now + ttl_s
        return [
            SetTimer(("lease", holder.node, holder.incarnation, holder.number), ttl_s),
            Send(sender, LeaseRenewed(lease_id=message.lease_id)),
        ]

    def _on_release(self, now: float, sender: str, message: ReleaseLease) -> list[Effect]:
        holder = self._holder(sender, message.lease_id)
        pending = self._pending.pop(holder, None)
        if pending is not None:
            self.slots.unpin(list(pending.pinned.values()))
        self._end_lease(holder)
        return []

    def _on_lease_expired(self, now: float, holder: HolderId) -> list[Effect]:
        lease = self._leases.get(holder)
        if lease is None:
            return []
        if now < lease.expires_at - 1e-9:
            return [SetTimer(("lease", holder.node, holder.incarnation, holder.number), lease.expires_at - now)]
        self._count("leases_expired")
        self._end_lease(holder)
        return []

    def _end_lease(self, holder: HolderId) -> None:
        lease = self._leases.pop(holder, None)
        if lease is not None:
            self.slots.unpin(lease.slots)

    def _on_corrupt(self, message: ReportCorrupt) -> list[Effect]:
        for ref in message.slots:
            current = ref.node == self.name and ref.incarnation == self.incarnation and ref.slot < self.slots.capacity
            stands = current and self.slots.generation[ref.slot] == ref.generation
            if stands and self.slots.state[ref.slot] is SlotState.COMMITTED:
                self.slots.forget(ref.slot)
                self._count("corrupt_blocks")
        return []

    # --- writers

    def _on_reserve(self, now: float, sender: str, message: ReserveSlots) -> list[Effect]:
        writer = self._holder(sender, message.put_id)
        if writer in self._puts:
            return []
        grants: list[GrantedSlot] = []
        held = denied = 0
        put = _Put({})
        late = sum(len(p.slots) for w, p in self._puts.items() if w.node == sender and p.quarantined)
        refused = self._draining or late >= self._settings.max_quarantined_per_client
        present: list[int] = []
        for index, key in enumerate(message.keys):
            if self.slots.held(key):
                held += 1
                slot = self.slots.committed(key)
                if slot is not None:
                    present.append(slot)
                continue
            slot = None if refused else self.slots.reserve(key)
            if slot is None:
                denied += 1
                continue
            generation = self.slots.generation[slot]
            put.slots[index] = (key, slot, generation)
            grants.append(GrantedSlot(index=index, slot=slot, generation=generation))
        self.slots.touch(present)
        self._count("put_blocks[result=granted]", len(grants))
        self._count("put_blocks[result=held]", held)
        self._count("put_blocks[result=denied]", denied)
        reply = Send(sender, SlotsReserved(put_id=message.put_id, grants=tuple(grants)))
        if not grants:
            return [reply]
        self._puts[writer] = put
        ttl_s = min(message.ttl_s, self._settings.max_lease_s)
        return [SetTimer(("put", writer.node, writer.incarnation, writer.number), ttl_s), reply]

    def _on_commit(self, now: float, sender: str, message: CommitSlots) -> list[Effect]:
        writer = self._holder(sender, message.put_id)
        put = self._puts.pop(writer, None)
        if put is None:
            return []
        checksums = {} if put.quarantined else dict(message.checksums)
        if put.quarantined:
            self._count("late_commits")
        for index, (key, slot, _) in put.slots.items():
            checksum = checksums.get(index)
            if checksum is None:
                self.slots.free(slot)
            else:
                self.slots.commit(slot, checksum)
                self._stored.append(key)
        effects: list[Effect] = []
        for pending in list(self._pending.values()):
            self._pin_present(pending)
            effects += self._advance(now, pending)
        return effects

    def _on_put_expired(self, now: float, writer: HolderId) -> list[Effect]:
        """The writer may still write: keep its slots from everybody until it answers or is known dead."""
        put = self._puts.get(writer)
        if put is None:
            return []
        if not put.quarantined:
            put.quarantined = True
            self._count("puts_quarantined")
            for _, slot, _ in put.slots.values():
                self.slots.quarantine(slot)
        probe_id = self._new_id()
        self._probes[probe_id] = (writer.node, writer.incarnation)
        return [
            SetTimer(("put", writer.node, writer.incarnation, writer.number), self._settings.probe_s),
            Send(writer.node, ReclaimSlots(put_id=writer.number)),
            Start(probe_id, ProbeProcess(writer.node, writer.incarnation), self._settings.probe_s),
        ]

    def _on_probed(self, now: float, work_id: int, result: ProcessProbed | WorkFailed) -> list[Effect]:
        node, incarnation = self._probes.pop(work_id)
        if isinstance(result, ProcessProbed) and not result.alive:
            self._bury(node, incarnation)
        return []

    def _bury(self, node: str, last_incarnation: int) -> None:
        """Lives of `node` up to this one are over: their leases and puts end."""
        for holder in [h for h in self._leases if h.node == node and h.incarnation <= last_incarnation]:
            self._end_lease(holder)
        for holder in [h for h in self._pending if h.node == node and h.incarnation <= last_incarnation]:
            self.slots.unpin(list(self._pending.pop(holder).pinned.values()))
        for writer in [w for w in self._puts if w.node == node and w.incarnation <= last_incarnation]:
            for _, slot, _ in self._puts.pop(writer).slots.values():
                self.slots.free(slot)

    # --- peers

    def _on_peer_up(self, now: float, up: PeerUp) -> list[Effect]:
        self._bury(up.peer, up.incarnation - 1)
        self._peers[up.peer] = _Client(up.incarnation, up.hello.role)
        if up.hello.role != "conductor":
            return []
        keys = self.slots.committed_keys()
        parts = range(0, len(keys), MAX_BLOCKS)
        return [Send(up.peer, BlocksAnnounced(stored=tuple(keys[i : i + MAX_BLOCKS]))) for i in parts]

    def _on_peer_down(self, now: float, peer: str) -> list[Effect]:
        """Leases and puts of a silent client stay until they expire: it may only be cut off, and still read or write."""
        self._peers.pop(peer, None)
        effects: list[Effect] = []
        for holder in [h for h in self._pending if h.node == peer]:
            self.slots.unpin(list(self._pending.pop(holder).pinned.values()))
        for pending in self._pending.values():
            pending.sources = [source for source in pending.sources if source != peer]
        for fetch_id in [i for i, f in self._fetches.items() if f.source == peer and not f.copies]:
            effects += self._end_fetch(now, fetch_id)
        return effects

    def _announce(self) -> list[Effect]:
        """Tell the conductors what this event changed. A key stored and evicted at once appears in neither list's place."""
        stored = tuple(dict.fromkeys(key for key in self._stored if self.slots.committed(key) is not None))
        removed = tuple(dict.fromkeys(key for key in self.slots.evicted if self.slots.committed(key) is None))
        self._stored.clear()
        self.slots.evicted.clear()
        if not stored and not removed:
            return []
        self._count("announced_blocks[change=stored]", len(stored))
        self._count("announced_blocks[change=removed]", len(removed))
        message = BlocksAnnounced(stored=stored, removed=removed)
        return [Send(name, message) for name, peer in self._peers.items() if peer.role == "conductor"]

    def _drained(self) -> list[Effect]:
        idle = not (self._leases or self._puts or self._pending or self._fetches)
        return [Drained()] if self._draining and idle else []

    def _holder(self, sender: str, number: int) -> HolderId:
        return HolderId(sender, self._peers[sender].incarnation, number)

    def _ref(self, slot: int) -> SlotRef:
        return SlotRef(
            node=self.name,
            incarnation=self.incarnation,
            slot=slot,
            generation=self.slots.generation[slot],
            checksum=self.slots.checksum[slot],
        )

    def _grant(self, slot: int) -> SlotGrant:
        return SlotGrant(self.name, self.incarnation, slot, self.slots.generation[slot])

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _count(self, name: str, amount: int = 1) -> None:
        if amount:
            self.counts[name] = self.counts.get(name, 0) + amount
