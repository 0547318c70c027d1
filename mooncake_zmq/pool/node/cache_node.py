"""The actor of one host's KV pool: leases for readers, two-phase puts, two tiers, announcements. PURE.

It never touches bytes: readers and writers on its host do through shared memory; its own copies, from other hosts and from
and to the SSD, are works. `gathering` brings together what a lease misses, `disk_tier` decides what goes to the SSD,
`block_puts` grants the slots of puts, and `conductors` sends what changed.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mooncake_zmq.core.actor import (
    CordonWanted,
    DrainTimedOut,
    DrainWanted,
    Effect,
    EngineBlocksReported,
    Event,
    Fence,
    PeerDown,
    PeerUp,
    Received,
    Started,
    TimerFired,
    WorkDone,
    WorkProgress,
)
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.handlers import Handlers
from mooncake_zmq.core.messages import (
    BlocksLeased,
    ChangeReplica,
    CommitSlots,
    LeaseBlocks,
    ReleaseLease,
    RenewLease,
    ReportCorrupt,
    ReserveSlots,
    ShortenFetch,
)
from mooncake_zmq.core.reports import REPORT
from mooncake_zmq.core.work import BlocksCopied, DiskWritten, ProcessProbed, WorkFailed
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.events import BlocksStored, Medium
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.lease import HolderId
from mooncake_zmq.kv.slot_table import SlotState
from mooncake_zmq.pool.node.announcer import IN_DRAM, ON_DISK, Announcer
from mooncake_zmq.pool.node.block_leases import BlockLeases
from mooncake_zmq.pool.node.block_puts import BlockPuts
from mooncake_zmq.pool.node.conductors import Conductors
from mooncake_zmq.pool.node.contents import in_chains
from mooncake_zmq.pool.node.disk_tier import RETRY, DiskContents, DiskTier
from mooncake_zmq.pool.node.gathering import Gatherer
from mooncake_zmq.pool.node.parts import Parts
from mooncake_zmq.pool.node.settings import CacheNodeSettings, KvEventsSettings, SsdSettings
from mooncake_zmq.pool.rules.holders import EXPIRE

__all__ = ["CacheNode", "CacheNodeSettings", "DiskContents", "KvEventsSettings", "SsdSettings"]


class CacheNode:
    """One host's pool."""

    def __init__(
        self,
        *,
        name: str,
        host: str,
        incarnation: int,
        settings: CacheNodeSettings,
        layout: BlockLayout,
        disk: DiskContents = DiskContents(),
    ) -> None:
        self.name = name
        self.host = host
        self.incarnation = incarnation
        self.counts = Tally()
        self._parts = parts = Parts(name, incarnation, settings, layout, self.counts)
        self.slots = parts.slots
        self._contents = parts.contents
        self._holders = parts.holders
        self._drain = parts.drain
        self._peers = parts.peers
        self._has_disk = disk.slots > 0
        self.disk = DiskTier(parts, disk)
        self._announcer = Announcer(self.tiers, self.counts)
        self._gatherer = Gatherer(parts, self.disk, stored=self._copied_here)
        self._leases = BlockLeases(parts, self.disk, self._gatherer, self.tiers)
        self._puts = BlockPuts(parts, stored=self._note_stored, advance=self._gatherer.advance_waiting)
        self._conductors = Conductors(parts, self.disk, self._gatherer, self._announcer)
        self._handlers = self._message_handlers()

    def _message_handlers(self) -> Handlers:
        return Handlers(
            self.counts,
            {
                LeaseBlocks: self._leases.on_lease,
                ReleaseLease: self._leases.on_release,
                RenewLease: self._leases.on_renew,
                ShortenFetch: self._leases.on_shorten,
                ReserveSlots: self._puts.on_reserve,
                CommitSlots: self._puts.on_commit,
                ReportCorrupt: self._leases.on_corrupt,
                ChangeReplica: self._leases.on_change_replica,
                BlocksLeased: self._gatherer.on_leased,
            },
        )

    @property
    def transitions(self) -> dict[str, int]:
        """Slot state transitions taken in both tiers, for coverage."""
        return dict(Counter(self.slots.transitions) + Counter(self.disk.slots.transitions))

    def holds(self, key: Key) -> bool:
        """Can this block be served, from whichever tier?"""
        return self.tiers((key,)) != [None]

    def tiers(self, keys: Sequence[Key]) -> list[Medium | None]:
        """The quickest tier that each of these blocks can be served from."""
        if not self._has_disk:
            return [None if dram is None else IN_DRAM for dram in self.slots.present(keys)]
        found = zip(self.slots.present(keys), self.disk.slots.present(keys), strict=True)
        return [IN_DRAM if dram is not None else ON_DISK if disk is not None else None for dram, disk in found]

    def handle(self, now: float, event: Event) -> list[Effect]:
        effects = self._dispatch(now, event)
        while self._gatherer.finished:
            effects += self._leases.answer(now, self._gatherer.finished.pop(0))
        while self._gatherer.grown:
            effects += self._leases.hand_over(self._gatherer.grown.pop(0))
        if self._has_disk:
            effects += self.disk.demote()
            self.disk.slots.fences.clear()  # its slots are files' places: they are not mapped
        if self.slots.fences:
            effects.insert(0, Fence(self.slots.take_fences()))
        effects += self._holders.timer(now)
        effects += self._conductors.announce()
        effects += self._conductors.begin_reports()
        return effects + self._drained() if self._drain.draining else effects

    def _dispatch(self, now: float, event: Event) -> list[Effect]:
        # As with messages, the frequent ones first: see `Handlers`.
        if type(event) is Received:
            return self._handlers.to(now, event.sender, event.message)
        if type(event) is TimerFired and event.key == REPORT:
            return self._conductors.report(now)
        match event:
            case WorkDone(work_id, BlocksCopied() | WorkFailed() as copied) if self._gatherer.copies(work_id):
                return self._gatherer.on_copied(now, work_id, copied)
            case WorkDone(work_id, DiskWritten() | WorkFailed() as written) if self.disk.writes(work_id):
                self.disk.on_written(now, work_id, written)
                return []
            case WorkDone(work_id, ProcessProbed() | WorkFailed() as probed) if self._puts.probes(work_id):
                return self._on_probed(work_id, probed)
            case TimerFired(key) if key == EXPIRE:
                return self._expire(now)
            case TimerFired(("gathering", str(node), int(incarnation), int(number))):
                self._gatherer.expire(now, HolderId(node, incarnation, number))
                return []
            case TimerFired(key) if key == RETRY:
                self.disk.retry(now)
                return []
            case PeerUp() as up:
                return self._on_peer_up(up)
            case PeerDown(peer, _):
                return self._on_peer_down(now, peer)
            case EngineBlocksReported() as report:
                return self._conductors.on_store_changed(report)
            case DrainWanted():
                self._drain.drain()
                self._take_no_more()
                return []
            case CordonWanted(cordoned):
                return self._on_cordon(cordoned)
            case Started() | DrainTimedOut() | TimerFired() | WorkProgress() | WorkDone():
                return []
            case _:
                raise TypeError(event)

    def check(self, now: float) -> None:
        self.slots.check()
        self.disk.slots.check()
        unsaved = sum(1 for key in self.slots.committed_keys() if self.disk.slots.committed(key) is None)
        assert self.disk.unsaved == unsaved, "it is known how much DRAM alone holds"
        pins = [0] * self.slots.capacity
        for lease in self._leases.all:
            for slot in lease.rows:
                pins[slot] += 1
        for gathering in self._gatherer.gatherings.values():
            for slot in gathering.pinned:
                pins[slot] += 1
        assert pins == list(self.slots.pins), "every pin is a lease's or a gathering's"
        writing = sorted(self._puts.writing + self._gatherer.writing)
        states = (SlotState.WRITING, SlotState.QUARANTINED)
        assert writing == [s for s in range(self.slots.capacity) if self.slots.state_of(s) in states]

    def gauges(self, now: float) -> dict[str, float]:
        leases = self._leases.all
        oldest = min((lease.expires_at for lease in leases), default=None)
        return {
            "capacity_blocks": self.slots.capacity,
            "cached_blocks": self.slots.count(SlotState.COMMITTED),
            "capacity_disk_blocks": self.disk.capacity,
            "cached_disk_blocks": self.disk.slots.count(SlotState.COMMITTED),
            "leased_blocks": self.slots.pinned,
            "leases": len(leases),
            "oldest_lease_seconds_left": 0.0 if oldest is None else max(0.0, oldest - now),
            "pending_leases": sum(not gathering.begun for gathering in self._gatherer.gatherings.values()),
            "writing_blocks": self.slots.count(SlotState.WRITING),
            "quarantined_blocks": self.slots.count(SlotState.QUARANTINED),
            "demoting_blocks": self.disk.demoting,
            **{f"disk_degraded[what={what}]": degraded for what, degraded in self.disk.degraded.items()},
            "fetches": self._gatherer.fetches,
            **self._by_tenant(),
        }

    def _by_tenant(self) -> dict[str, float]:
        """Blocks and shares of each tenant in both tiers: 0 where it has none."""
        blocks_of: dict[str, float] = {}
        for tier, shares in (("dram", self.slots.shares), ("disk", self.disk.slots.shares)):
            columns = zip(self._parts.tenants.names, shares.held, shares.most, strict=True) if shares is not None else ()
            for name, held, most in columns:
                if name:
                    blocks_of[f"cached_tenant_blocks[tenant={name},tier={tier}]"] = held
                    blocks_of[f"capacity_tenant_blocks[tenant={name},tier={tier}]"] = most
        return blocks_of

    def dump(self, now: float) -> dict[str, Any]:
        gatherings = self._gatherer.gatherings
        return {
            "gauges": self.gauges(now),
            "leases": [[*lease.client, lease.number, len(lease.rows), lease.expires_at - now] for lease in self._leases.all],
            "puts": [[*put.client, put.number, len(put.rows), put.quarantined] for put in self._puts.open],
            "sources": [[rate.source, rate.block_s, rate.pending_blocks] for rate in self._gatherer.sources(now)],
            "pending": [[str(h), len(g.keys), g.here, g.limits, g.deadline - now] for h, g in gatherings.items()],
            "disk": {"readable": self.disk.readable, "writable": self.disk.writable, "fault": self.disk.fault},
            "draining": self._drain.draining,
        }

    # --- what comes

    def _copied_here(self, keys: Sequence[Key]) -> None:
        slots = {key: slot for key, slot in zip(keys, self.slots.present(keys), strict=True) if slot is not None}
        events = in_chains(Medium.CPU, [(key, self._contents.of(slot)) for key, slot in slots.items()])
        for event in events:
            self._parts.chains.touch(event.parent or None, [slots[key] for key in event.keys])
        self._note_stored(events)

    def _note_stored(self, stored: Sequence[BlocksStored]) -> None:
        keys = [key for event in stored for key in event.keys]
        self._announcer.stored(stored, keys)
        self.disk.unsaved += self.disk.slots.present(keys).count(None)

    def _on_probed(self, work_id: int, result: ProcessProbed | WorkFailed) -> list[Effect]:
        dead = self._puts.on_probed(work_id, result)
        if dead is not None:
            node, incarnation = dead
            self._leases.bury(node, range(incarnation, incarnation + 1))
        return []

    def _expire(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        self._holders.expire(now, self._leases.on_over, lambda put: effects.extend(self._puts.on_late(now, put)))
        return effects

    # --- peers

    def _on_peer_up(self, up: PeerUp) -> list[Effect]:
        self._leases.bury(up.peer, range(up.incarnation))
        self._peers.connected(up)
        if up.hello.role == "conductor":
            self._conductors.connected(up.peer)
        return []

    def _on_peer_down(self, now: float, peer: str) -> list[Effect]:
        """Leases and puts of a silent client stay until they expire: it may only be cut off, and still read or write."""
        self._peers.disconnected(peer)
        for holder in [h for h in self._gatherer.gatherings if h.node == peer]:
            self._gatherer.drop(holder)
        return self._gatherer.source_down(now, peer)

    def _take_no_more(self) -> None:
        for holder in [h for h, g in self._gatherer.gatherings.items() if g.requested]:
            self._gatherer.drop(holder)
        self.disk.begin_drain()

    def _on_cordon(self, cordoned: bool) -> list[Effect]:
        self._drain.set_cordon(cordoned)
        if self._drain.leaves:
            return []
        if cordoned:
            self._take_no_more()
            return self._conductors.cordoned()
        self.disk.end_drain()
        return self._conductors.uncordoned()

    def _drained(self) -> list[Effect]:
        busy = self._holders.busy() or self._gatherer.gatherings or self._gatherer.fetches or self.disk.demoting
        return self._drain.drained(idle=not busy)
