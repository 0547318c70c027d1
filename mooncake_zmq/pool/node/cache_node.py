"""The actor of one host's KV pool: leases for readers, two-phase puts, two tiers, announcements. PURE.

It never touches bytes: readers and writers on its host do through shared memory; its own copies, from other hosts and from
and to the SSD, are works. `gathering` brings together what a lease misses, `disk_tier` decides what goes to the SSD,
`block_puts` grants the slots of puts, and `conductors` sends what changed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mooncake_zmq.core.actor import (
    CancelTimer,
    DrainTimedOut,
    DrainWanted,
    Effect,
    Event,
    Fence,
    PeerDown,
    PeerUp,
    Received,
    RestWanted,
    Send,
    SetTimer,
    ShelfTold,
    Started,
    TimerFired,
    WorkDone,
    WorkProgress,
)
from mooncake_zmq.core.leaving import Leaving
from mooncake_zmq.core.messages import (
    MAX_TOKENS,
    BlocksLeased,
    ChangeReplica,
    CommitSlots,
    LeaseBlocks,
    LeaseRenewed,
    ReleaseLease,
    RenewLease,
    ReportCorrupt,
    ReserveSlots,
    SlotRef,
)
from mooncake_zmq.core.reactions import Reactions
from mooncake_zmq.core.reports import REPORT
from mooncake_zmq.core.shell import Ids, Tally
from mooncake_zmq.core.work import BlocksCopied, DiskWritten, ProcessProbed, SlotGrant, WorkFailed
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.events import BlocksStored, Medium
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.lease import GrantedLease, HolderId
from mooncake_zmq.kv.slot_table import SlotState
from mooncake_zmq.kv.slots import Slots
from mooncake_zmq.pool.node.announcer import IN_DRAM, ON_DISK, Announcer
from mooncake_zmq.pool.node.block_puts import BlockPuts
from mooncake_zmq.pool.node.chains import Chains
from mooncake_zmq.pool.node.conductors import Conductors
from mooncake_zmq.pool.node.contents import UNKNOWN, Contents, in_chains
from mooncake_zmq.pool.node.disk_tier import RETRY, DiskContents, DiskTier
from mooncake_zmq.pool.node.gathering import DISK, Gatherer, Gathering
from mooncake_zmq.pool.node.misses import CORRUPT, DENIED, Misses
from mooncake_zmq.pool.node.peers import Peers
from mooncake_zmq.pool.node.settings import CacheNodeSettings, KvEventsSettings, SsdSettings
from mooncake_zmq.pool.node.tenants import PoolTenants, slots_of

__all__ = ["CacheNode", "CacheNodeSettings", "DiskContents", "KvEventsSettings", "SsdSettings"]

WISH_S = 30.0
"""How long a wish for a copy may take."""


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
        self._tenants = PoolTenants(settings.tenants)
        slots = settings.pool_bytes // layout.slot_bytes
        most = slots_of([each.dram_bytes for each in settings.tenants], settings.pool_bytes, slots)
        self.slots = Slots(slots, most)
        self._settings = settings
        self._ids = Ids()
        self._misses = Misses()
        events = settings.kv_events
        self._contents = Contents(self.slots.capacity, layout.block_tokens if events.endpoint and events.tokens else 0)
        self.disk = self._disk_tier(disk)
        self._chains = Chains(self.slots, self._contents)
        self._announcer = Announcer(self.tiers, self.counts)
        self._gatherer = Gatherer(
            settings,
            self.slots,
            self._contents,
            self.disk,
            tenants=self._tenants,
            grant=self._grant,
            new_id=self._ids.new,
            stored=self._copied_here,
            counts=self.counts,
        )
        self._peers = Peers()
        self._leases: dict[HolderId, GrantedLease] = {}
        self._has_disk = disk.slots > 0
        self._leaving = Leaving("", self.counts)
        self._puts = BlockPuts(
            settings,
            layout,
            self.slots,
            self._contents,
            chains=self._chains,
            tenants=self._tenants,
            peers=self._peers,
            drain=self._leaving,
            new_id=self._ids.new,
            stored=self._note_stored,
            advance=self._gatherer.advance_waiting,
            counts=self.counts,
        )
        self._conductors = Conductors(
            self.slots,
            self.disk,
            self._gatherer,
            peers=self._peers,
            announcer=self._announcer,
            misses=self._misses,
            drain=self._leaving,
            report_s=settings.report_s,
            counts=self.counts,
        )
        self._reactions = self._reactions_to_messages()

    def _disk_tier(self, disk: DiskContents) -> DiskTier:
        settings = self._settings
        return DiskTier(
            settings.ssd,
            disk,
            self.slots,
            self._contents,
            tenants=self._tenants,
            most=slots_of([each.ssd_bytes for each in settings.tenants], settings.ssd.bytes, disk.slots),
            ref=self._ref,
            new_id=self._ids.new,
            counts=self.counts,
            going=self._misses.going,
        )

    def _reactions_to_messages(self) -> Reactions:
        return Reactions(
            self.counts,
            {
                LeaseBlocks: self._on_lease,
                ReleaseLease: self._on_release,
                RenewLease: self._on_renew,
                ReserveSlots: self._puts.on_reserve,
                CommitSlots: self._puts.on_commit,
                ReportCorrupt: self._on_corrupt,
                ChangeReplica: self._on_change_replica,
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
        """See `core.actor`."""
        effects = self._dispatch(now, event)
        while self._gatherer.finished:
            effects += self._answer(now, self._gatherer.finished.pop(0))
        if self._has_disk:
            effects += self.disk.demote()
            self.disk.slots.fences.clear()  # its slots are files' places: nobody maps them
        if self.slots.fences:
            effects.insert(0, Fence(self.slots.take_fences()))
        effects += self._conductors.announce()
        effects += self._conductors.begin_reports()
        return effects + self._drained() if self._leaving.draining else effects

    def _dispatch(self, now: float, event: Event) -> list[Effect]:
        # As with messages, the frequent ones first: see `Reactions`.
        if type(event) is Received:
            return self._reactions.to(now, event.sender, event.message)
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
            case TimerFired(("lease", str(node), int(incarnation), int(number))):
                return self._on_lease_expired(now, HolderId(node, incarnation, number))
            case TimerFired(("put", str(node), int(incarnation), int(number))):
                return self._puts.on_expired(HolderId(node, incarnation, number))
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
            case ShelfTold() as told:
                return self._conductors.on_store_changed(told)
            case DrainWanted():
                self._leaving.drain()
                self._take_no_more()
                return []
            case RestWanted(resting):
                return self._on_rest(resting)
            case Started() | DrainTimedOut() | TimerFired() | WorkProgress() | WorkDone():
                return []
            case _:
                raise TypeError(event)

    def check(self, now: float) -> None:
        """See `core.actor`."""
        self.slots.check()
        self.disk.slots.check()
        unsaved = sum(1 for key in self.slots.committed_keys() if self.disk.slots.committed(key) is None)
        assert self.disk.unsaved == unsaved, "it is known how much DRAM alone holds"
        pins = [0] * self.slots.capacity
        for lease in self._leases.values():
            for slot in lease.slots:
                pins[slot] += 1
        for gathering in self._gatherer.gatherings.values():
            for slot in gathering.pinned:
                pins[slot] += 1
        assert pins == list(self.slots.pins), "every pin is a lease's or a gathering's"
        writing = sorted(self._puts.writing + self._gatherer.writing)
        states = (SlotState.WRITING, SlotState.QUARANTINED)
        assert writing == [s for s in range(self.slots.capacity) if self.slots.state_of(s) in states]

    def gauges(self, now: float) -> dict[str, float]:
        """See `core.actor`."""
        oldest = min((lease.expires_at for lease in self._leases.values()), default=None)
        return {
            "capacity_blocks": self.slots.capacity,
            "cached_blocks": self.slots.count(SlotState.COMMITTED),
            "capacity_disk_blocks": self.disk.capacity,
            "cached_disk_blocks": self.disk.slots.count(SlotState.COMMITTED),
            "leased_blocks": self.slots.pinned,
            "leases": len(self._leases),
            "oldest_lease_seconds_left": 0.0 if oldest is None else max(0.0, oldest - now),
            "pending_leases": len(self._gatherer.gatherings),
            "writing_blocks": self.slots.count(SlotState.WRITING),
            "quarantined_blocks": self.slots.count(SlotState.QUARANTINED),
            "demoting_blocks": self.disk.demoting,
            **{f"disk_degraded[what={what}]": degraded for what, degraded in self.disk.degraded.items()},
            "fetches": self._gatherer.fetches,
            **self._by_tenant(),
        }

    def _by_tenant(self) -> dict[str, float]:
        """What each tenant has in both tiers, and its shares: 0 where it has none."""
        told: dict[str, float] = {}
        for tier, shares in (("dram", self.slots.shares), ("disk", self.disk.slots.shares)):
            columns = zip(self._tenants.names, shares.held, shares.most, strict=True) if shares is not None else ()
            for name, held, most in columns:
                if name:
                    told[f"cached_tenant_blocks[tenant={name},tier={tier}]"] = held
                    told[f"capacity_tenant_blocks[tenant={name},tier={tier}]"] = most
        return told

    def dump(self, now: float) -> dict[str, Any]:
        """See `core.actor`."""
        gatherings = self._gatherer.gatherings
        return {
            "gauges": self.gauges(now),
            "leases": [[str(h), len(lease.slots), lease.expires_at - now] for h, lease in self._leases.items()],
            "puts": [[str(h), len(put.slots), put.quarantined] for h, put in self._puts.open.items()],
            "sources": [[rate.source, rate.block_s, rate.pending_blocks] for rate in self._gatherer.sources(now)],
            "pending": [[str(h), len(g.keys), g.here, g.limits, g.deadline - now] for h, g in gatherings.items()],
            "disk": {"readable": self.disk.readable, "writable": self.disk.writable, "fault": self.disk.fault},
            "draining": self._leaving.draining,
        }

    # --- readers

    def _on_lease(self, now: float, sender: str, message: LeaseBlocks) -> list[Effect]:
        holder = self._peers.holder(sender, message.lease_id)
        gatherings = self._gatherer.gatherings
        if holder in self._leases or holder in gatherings:
            return []
        mine = sum(1 for h in self._leases if h.node == sender) + sum(1 for h in gatherings if h.node == sender)
        if self._leaving.draining or mine >= self._settings.max_leases_per_client:
            self.counts.add("leases_denied")
            if self._computes(sender):
                self._count_missed({DENIED: len(message.keys)})
            return [Send(sender, BlocksLeased(lease_id=message.lease_id, node=self.name, incarnation=self.incarnation))]
        fetch_s = min(message.fetch_s, self._settings.max_lease_s)
        gathering = Gathering(
            holder=holder,
            keys=message.keys,
            deadline=now + fetch_s,
            ttl_s=min(message.ttl_s, self._settings.max_lease_s),
            compute_s=message.compute_s,
            contents=message.contents,
        )
        return self._gather(now, gathering, message.sources, fetch_s)

    def _gather(self, now: float, gathering: Gathering, sources: Sequence[str], within_s: float) -> list[Effect]:
        known = [s for s in sources if self._peers.has_role(s, "cache-node")]
        effects = self._gatherer.begin(now, gathering, known)
        holder = gathering.holder
        if holder in self._gatherer.gatherings:
            effects.append(SetTimer(("gathering", holder.node, holder.incarnation, holder.number), within_s))
        return effects

    def _answer(self, now: float, gathering: Gathering) -> list[Effect]:
        """Grant the leading run that is here; whatever else was pinned for it is let go."""
        holder, run = gathering.holder, gathering.keys[: gathering.here]
        if gathering.wish:
            self.slots.unpin(gathering.pinned)
            return []
        if gathering.ahead:
            self.slots.unpin(list(gathering.ahead.values()))
        origins = [gathering.came_from[key] for key in run if key in gathering.came_from] if gathering.came_from else []
        disk = origins.count(DISK)
        remote = len(origins) - disk
        if self._computes(holder.node):
            self.counts.add("lookup_blocks[result=local]", len(run) - len(origins))
            self.counts.add("lookup_blocks[result=disk]", disk)
            self.counts.add("lookup_blocks[result=remote]", remote)
            self._count_misses(gathering)
        slots = tuple(gathering.run)
        parents, tokens = self._told(slots) if gathering.contents else ((), ())
        leased = BlocksLeased(
            lease_id=holder.number,
            node=self.name,
            incarnation=self.incarnation,
            slots=slots,
            generations=tuple(map(self.slots.generation.__getitem__, slots)),
            checksums=tuple(map(self.slots.checksum.__getitem__, slots)),
            remote=remote,
            parents=parents,
            tokens=tokens,
            tenants=self._owners(holder.node, slots),
        )
        reply = Send(holder.node, leased)
        if not run:
            return [reply]
        self.disk.used(len(run))
        self._leases[holder] = GrantedLease(slots, now + gathering.ttl_s)
        return [reply, SetTimer(("lease", holder.node, holder.incarnation, holder.number), gathering.ttl_s)]

    def _count_misses(self, gathering: Gathering) -> None:
        missed = gathering.keys[gathering.here :]
        if missed:
            coming = self._gatherer.coming(gathering)
            self._count_missed(self._misses.count(missed, self.tiers(missed), coming=coming, lost=gathering.lost))

    def _count_missed(self, reasons: Mapping[str, int]) -> None:
        self.counts.add("lookup_blocks[result=miss]", sum(reasons.values()))
        for why, blocks in reasons.items():
            self.counts.add(f"lookup_misses[reason={why}]", blocks)

    def _computes(self, asker: str) -> bool:
        """Does it compute what it misses? Only such lookups are counted: what another cache-node asks for is counted there, and
        a decode asks again for what a prefill reuses."""
        return self._peers.has_role(asker, "prefill")

    def _owners(self, holder: str, slots: Sequence[int]) -> tuple[str, ...]:
        """Whose these blocks are, for another cache-node, which will have copies of them."""
        if self.slots.shares is None or not self._peers.has_role(holder, "cache-node"):
            return ()
        owners = [self.slots.owner_of(slot) for slot in slots]
        return tuple([self._tenants.names[owner] for owner in owners]) if any(owners) else ()

    def _told(self, slots: Sequence[int]) -> tuple[tuple[Key | None, ...], tuple[bytes, ...]]:
        """What these blocks follow and hold, in columns, as far as a message has room; none if nothing is known."""
        if not self._contents.token_bytes:
            return (), ()
        room = 4 * MAX_TOKENS // self._contents.token_bytes
        contents = [content if content.tokens else UNKNOWN for content in map(self._contents.of, slots[:room])]
        contents += [UNKNOWN] * (len(slots) - len(contents))
        if not any(content.tokens for content in contents):
            return (), ()
        return tuple([content.parent for content in contents]), tuple([content.tokens for content in contents])

    def _on_renew(self, now: float, sender: str, message: RenewLease) -> list[Effect]:
        holder = self._peers.holder(sender, message.lease_id)
        lease = self._leases.get(holder)
        if lease is None:
            return []
        ttl_s = min(message.ttl_s, self._settings.max_lease_s)
        lease.expires_at = now + ttl_s
        return [
            SetTimer(("lease", holder.node, holder.incarnation, holder.number), ttl_s),
            Send(sender, LeaseRenewed(lease_id=message.lease_id)),
        ]

    def _on_release(self, _now: float, sender: str, message: ReleaseLease) -> list[Effect]:
        holder = self._peers.holder(sender, message.lease_id)
        self._gatherer.drop(holder)
        if holder not in self._leases:
            return []
        self._end_lease(holder)
        return [CancelTimer(("lease", holder.node, holder.incarnation, holder.number))]

    def _on_lease_expired(self, now: float, holder: HolderId) -> list[Effect]:
        lease = self._leases.get(holder)
        if lease is None:
            return []
        if now < lease.expires_at - 1e-9:
            return [SetTimer(("lease", holder.node, holder.incarnation, holder.number), lease.expires_at - now)]
        self.counts.add("leases_expired")
        self._end_lease(holder)
        return []

    def _end_lease(self, holder: HolderId) -> None:
        lease = self._leases.pop(holder, None)
        if lease is not None:
            self.slots.unpin(lease.slots)
            self.disk.used(len(lease.slots))  # pinned, they were not seen among what is to be written

    def _on_corrupt(self, _now: float, _sender: str, message: ReportCorrupt) -> list[Effect]:
        for ref in message.slots:
            current = ref.node == self.name and ref.incarnation == self.incarnation and ref.slot < self.slots.capacity
            stands = current and self.slots.generation[ref.slot] == ref.generation
            if stands and self.slots.state_of(ref.slot) is SlotState.COMMITTED:
                self._misses.going([key for key in (self.slots.key_of(ref.slot),) if key is not None], CORRUPT)
                self.slots.forget(ref.slot)
                self.counts.add("corrupt_blocks[tier=dram]")
        return []

    # --- copies on a conductor's wish

    def _on_change_replica(self, now: float, sender: str, message: ChangeReplica) -> list[Effect]:
        if not self._peers.has_role(sender, "conductor"):
            self.counts.add("unexpected_messages[type=ChangeReplica]")
            return []
        if not message.sources:
            for key in message.keys:
                self._let_go_first(key)
            return []
        wishes = sum(1 for gathering in self._gatherer.gatherings.values() if gathering.wish)
        if self._leaving.draining or wishes >= self._settings.max_wishes:
            self.counts.add("wishes_left")
            return []
        holder = HolderId(self.name, self.incarnation, self._ids.new())
        wish = Gathering(holder=holder, keys=message.keys, deadline=now + WISH_S, wish=True)
        return self._gather(now, wish, message.sources, WISH_S)

    def _let_go_first(self, key: Key) -> None:
        for tier in (self.slots, self.disk.slots):
            slot = tier.committed(key)
            if slot is not None and not tier.pins[slot]:
                tier.demote(slot)

    # --- what comes

    def _copied_here(self, keys: Sequence[Key]) -> None:
        slots = {key: slot for key, slot in zip(keys, self.slots.present(keys), strict=True) if slot is not None}
        events = in_chains(Medium.CPU, [(key, self._contents.of(slot)) for key, slot in slots.items()])
        for event in events:
            self._chains.touch(event.parent or None, [slots[key] for key in event.keys])
        self._note_stored(events)

    def _note_stored(self, stored: Sequence[BlocksStored]) -> None:
        keys = [key for event in stored for key in event.keys]
        self._announcer.stored(stored, keys)
        self.disk.unsaved += self.disk.slots.present(keys).count(None)

    def _on_probed(self, work_id: int, result: ProcessProbed | WorkFailed) -> list[Effect]:
        dead = self._puts.on_probed(work_id, result)
        if dead is not None:
            node, incarnation = dead
            self._bury(node, range(incarnation, incarnation + 1))
        return []

    def _bury(self, node: str, incarnations: range) -> None:
        """These lives of `node` are over: their leases and puts end. A clock that went back gives a later life a smaller
        number, so only older ones than one that is met, and the one that was probed, are known to be."""
        for holder in [h for h in self._leases if h.node == node and h.incarnation in incarnations]:
            self._end_lease(holder)
        for holder in [h for h in self._gatherer.gatherings if h.node == node and h.incarnation in incarnations]:
            self._gatherer.drop(holder)
        self._puts.end(node, incarnations)

    # --- peers

    def _on_peer_up(self, up: PeerUp) -> list[Effect]:
        self._bury(up.peer, range(up.incarnation))
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
        for holder in [h for h, g in self._gatherer.gatherings.items() if g.wish]:
            self._gatherer.drop(holder)
        self.disk.begin_drain()

    def _on_rest(self, resting: bool) -> list[Effect]:
        self._leaving.rest(resting)
        if self._leaving.leaves:
            return []
        if resting:
            self._take_no_more()
            return self._conductors.cordoned()
        self.disk.end_drain()
        return self._conductors.uncordoned()

    def _drained(self) -> list[Effect]:
        busy = self._leases or self._puts.open or self._gatherer.gatherings or self._gatherer.fetches or self.disk.demoting
        return self._leaving.drained(idle=not busy)

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
