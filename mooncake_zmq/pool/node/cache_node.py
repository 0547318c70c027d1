"""The actor of one host's KV pool: leases for readers, two-phase puts, two tiers, announcements. PURE.

It never touches bytes: readers and writers on its host do through shared memory; its own copies, from other hosts and from
and to the SSD, are works. `gathering` brings together what a lease misses, `disk_tier` decides what goes to the SSD.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

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
    Start,
    Started,
    TimerFired,
    WorkDone,
    WorkProgress,
)
from mooncake_zmq.core.leaving import Leaving
from mooncake_zmq.core.messages import (
    MAX_TOKENS,
    BlocksAnnounced,
    BlocksLeased,
    CacheLoad,
    ChangeReplica,
    CommitSlots,
    GrantedSlot,
    LeaseBlocks,
    LeaseRenewed,
    Message,
    ReclaimSlots,
    ReleaseLease,
    RenewLease,
    ReportCorrupt,
    ReserveSlots,
    SlotRef,
    SlotsReserved,
)
from mooncake_zmq.core.reactions import Reactions
from mooncake_zmq.core.reports import REPORT
from mooncake_zmq.core.shell import Ids, Tally
from mooncake_zmq.core.work import BlocksCopied, DiskWritten, ProbeProcess, ProcessProbed, SlotGrant, WorkFailed
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.events import BlocksStored, Medium
from mooncake_zmq.kv.key_table import EMPTY
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.lease import GrantedLease, HolderId
from mooncake_zmq.kv.shares import NOBODY
from mooncake_zmq.kv.slots import Slots, SlotState
from mooncake_zmq.pool.node.announcer import IN_DRAM, ON_DISK, Announcer, announcements
from mooncake_zmq.pool.node.chains import Chains
from mooncake_zmq.pool.node.contents import UNKNOWN, Contents, in_chains
from mooncake_zmq.pool.node.disk_tier import RETRY, DiskContents, DiskTier
from mooncake_zmq.pool.node.gathering import DISK, Gatherer, Gathering
from mooncake_zmq.pool.node.misses import CORRUPT, DENIED, Misses
from mooncake_zmq.pool.node.settings import CacheNodeSettings, KvEventsSettings, SsdSettings
from mooncake_zmq.pool.node.tenants import PoolTenants, slots_of

__all__ = ["CacheNode", "CacheNodeSettings", "DiskContents", "KvEventsSettings", "SsdSettings"]

MAX_SOURCES = 256
"""Sources that one `CacheLoad` tells of."""
WISH_S = 30.0
"""How long a wish for a copy may take."""


@dataclass(slots=True)
class _Put:
    """A client's reserved slots by index in its request, and what to tell of them once they stand."""

    keys: tuple[Key, ...]
    slots: dict[int, int]
    parent: Key | None
    tokens: bytes
    more: bool = False
    quarantined: bool = False


@dataclass(frozen=True, slots=True)
class _Client:
    incarnation: int
    role: str


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
        self._layout = layout
        self._ids = Ids()
        self._misses = Misses()
        events = settings.kv_events
        self._contents = Contents(self.slots.capacity, layout.block_tokens if events.endpoint and events.tokens else 0)
        self.disk = DiskTier(
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
        self._peers: dict[str, _Client] = {}
        self._leases: dict[HolderId, GrantedLease] = {}
        self._puts: dict[HolderId, _Put] = {}
        self._probes: dict[int, tuple[str, int]] = {}
        self._shelf: dict[Key, None] = {}
        """Blocks of vLLMs in the store beside the pool."""
        self._newcomers: list[str] = []
        """Conductors met in this event."""
        self._has_disk = disk.slots > 0
        self._reporting = False
        """The timer of the next `CacheLoad` is armed."""
        self._leaving = Leaving("", self.counts)
        self._reactions = Reactions(
            self.counts,
            {
                LeaseBlocks: self._on_lease,
                ReleaseLease: self._on_release,
                RenewLease: self._on_renew,
                ReserveSlots: self._on_reserve,
                CommitSlots: self._on_commit,
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
        effects += self._announce()
        if not self._reporting:
            effects += self._begin_reports()
        return effects + self._drained() if self._leaving.draining else effects

    def _dispatch(self, now: float, event: Event) -> list[Effect]:
        # As with messages, the frequent ones first: see `Reactions`.
        if type(event) is Received:
            return self._reactions.to(now, event.sender, event.message)
        if type(event) is TimerFired and event.key == REPORT:
            return self._report(now)
        match event:
            case WorkDone(work_id, BlocksCopied() | WorkFailed() as copied) if self._gatherer.copies(work_id):
                return self._gatherer.on_copied(now, work_id, copied)
            case WorkDone(work_id, DiskWritten() | WorkFailed() as written) if self.disk.writes(work_id):
                self.disk.on_written(now, work_id, written)
                return []
            case WorkDone(work_id, ProcessProbed() | WorkFailed() as probed) if work_id in self._probes:
                return self._on_probed(work_id, probed)
            case TimerFired(("lease", str(node), int(incarnation), int(number))):
                return self._on_lease_expired(now, HolderId(node, incarnation, number))
            case TimerFired(("put", str(node), int(incarnation), int(number))):
                return self._on_put_expired(HolderId(node, incarnation, number))
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
                return self._on_shelf(told)
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
        writing = sorted([slot for put in self._puts.values() for slot in put.slots.values()] + self._gatherer.writing)
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
            "puts": [[str(h), len(put.slots), put.quarantined] for h, put in self._puts.items()],
            "sources": [[rate.source, rate.block_s, rate.pending_blocks] for rate in self._gatherer.sources(now)],
            "pending": [[str(h), len(g.keys), g.here, g.limits, g.deadline - now] for h, g in gatherings.items()],
            "disk": {"readable": self.disk.readable, "writable": self.disk.writable, "fault": self.disk.fault},
            "draining": self._leaving.draining,
        }

    # --- readers

    def _on_lease(self, now: float, sender: str, message: LeaseBlocks) -> list[Effect]:
        holder = self._holder(sender, message.lease_id)
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
        known = [s for s in sources if s in self._peers and self._peers[s].role == "cache-node"]
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
        return asker in self._peers and self._peers[asker].role == "prefill"

    def _owners(self, holder: str, slots: Sequence[int]) -> tuple[str, ...]:
        """Whose these blocks are, for another cache-node, which will have copies of them."""
        if self.slots.shares is None or self._peers[holder].role != "cache-node":
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

    def _on_release(self, _now: float, sender: str, message: ReleaseLease) -> list[Effect]:
        holder = self._holder(sender, message.lease_id)
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
        if self._peers[sender].role != "conductor":
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

    # --- writers

    def _on_reserve(self, now: float, sender: str, message: ReserveSlots) -> list[Effect]:
        writer = self._holder(sender, message.put_id)
        if writer in self._puts:
            return []
        found = self.slots.find_all(message.keys)
        if found.count(EMPTY) > self.slots.count(SlotState.FREE):  # a put must not evict the chain that it continues
            self._chains.touch(message.parent, self.slots.committed_of(found))
        tokens = self._fitting_tokens(message)
        owner = self._tenants.number(message.tenant)
        room = 0 if self._leaving.draining else self._room_for_puts(sender)
        owners = [owner] * len(message.keys) if owner != NOBODY else ()
        slots, held = self.slots.reserve_missing(message.keys, room, owners, found)
        generations = self.slots.generation
        grants = [GrantedSlot(index=index, slot=slot, generation=generations[slot]) for index, slot in slots.items()]
        denied = len(message.keys) - held - len(grants)
        self.counts.add("put_blocks[result=granted]", len(grants))
        self.counts.add("put_blocks[result=held]", held)
        self.counts.add("put_blocks[result=denied]", denied)
        if owner != NOBODY:
            self.counts.add(f"tenant_put_blocks[tenant={message.tenant},result=granted]", len(grants))
            self.counts.add(f"tenant_put_blocks[tenant={message.tenant},result=denied]", denied)
        self.counts.add("dedup_saved_bytes", held * self._layout.block_bytes)
        reply = Send(sender, SlotsReserved(put_id=message.put_id, grants=tuple(grants)))
        if not grants:
            return [reply]
        self._puts[writer] = _Put(message.keys, slots, message.parent, tokens, message.more)
        ttl_s = min(message.ttl_s, self._settings.max_lease_s)
        return [SetTimer(("put", writer.node, writer.incarnation, writer.number), ttl_s), reply]

    def _room_for_puts(self, client: str) -> int:
        """Slots that this client may reserve beside those it has reserved, or has in quarantine, already."""
        open_slots = sum(len(put.slots) for writer, put in self._puts.items() if writer.node == client)
        return max(1, int(self._settings.max_put_share * self.slots.capacity)) - open_slots

    def _fitting_tokens(self, message: ReserveSlots) -> bytes:
        """The tokens of a put, unless they cannot be those of its blocks: they are told to others, not used here."""
        fits = len(message.tokens) == len(message.keys) * self._layout.block_tokens * 4
        if message.tokens and not fits:
            self.counts.add("put_tokens_misfit")
        return message.tokens if fits and self._settings.kv_events.tokens else b""

    def _on_commit(self, now: float, sender: str, message: CommitSlots) -> list[Effect]:
        writer = self._holder(sender, message.put_id)
        put = self._puts.pop(writer, None)
        if put is None:
            return []
        checksums = {} if put.quarantined else dict(message.checksums)
        if put.quarantined:
            self.counts.add("late_commits")
        stored: list[int] = []
        slots: list[int] = []
        size = self._contents.token_bytes
        for index, slot in put.slots.items():
            if index in checksums:
                parent = put.keys[index - 1] if index else put.parent
                self._contents.put(slot, parent, put.tokens[index * size : (index + 1) * size] if size else b"")
                stored.append(index)
                slots.append(slot)
            else:
                self.slots.free(slot)
        effects: list[Effect] = [CancelTimer(("put", writer.node, writer.incarnation, writer.number))]
        if not stored:
            return effects
        self.slots.commit_all(slots, [checksums[index] for index in stored])
        if not put.more:
            self._chains.touch(put.parent, slots)
        self._tell_stored(put, stored)
        return effects + self._gatherer.advance_waiting(now, [put.keys[index] for index in stored])

    def _tell_stored(self, put: _Put, stored: Sequence[int]) -> None:
        """One event for each unbroken part of the put's chain."""
        size = self._layout.block_tokens * 4
        for first, stop in _runs(stored):
            parent = put.keys[first - 1] if first else put.parent
            keys = put.keys[first:stop]
            self._tell([BlocksStored(keys, Medium.CPU, parent or b"", put.tokens[first * size : stop * size])])

    def _copied_here(self, keys: Sequence[Key]) -> None:
        slots = {key: slot for key, slot in zip(keys, self.slots.present(keys), strict=True) if slot is not None}
        events = in_chains(Medium.CPU, [(key, self._contents.of(slot)) for key, slot in slots.items()])
        for event in events:
            self._chains.touch(event.parent or None, [slots[key] for key in event.keys])
        self._tell(events)

    def _tell(self, stored: Sequence[BlocksStored]) -> None:
        keys = [key for event in stored for key in event.keys]
        self._announcer.stored(stored, keys)
        self.disk.unsaved += self.disk.slots.present(keys).count(None)

    def _on_put_expired(self, writer: HolderId) -> list[Effect]:
        """The writer may still write: keep its slots from everybody until it answers or is known dead."""
        put = self._puts.get(writer)
        if put is None:
            return []
        if not put.quarantined:
            put.quarantined = True
            self.counts.add("puts_quarantined")
            for slot in put.slots.values():
                self.slots.quarantine(slot)
        probe_id = self._ids.new()
        self._probes[probe_id] = (writer.node, writer.incarnation)
        return [
            SetTimer(("put", writer.node, writer.incarnation, writer.number), self._settings.probe_s),
            Send(writer.node, ReclaimSlots(put_id=writer.number)),
            Start(probe_id, ProbeProcess(writer.node, writer.incarnation), self._settings.probe_s),
        ]

    def _on_probed(self, work_id: int, result: ProcessProbed | WorkFailed) -> list[Effect]:
        node, incarnation = self._probes.pop(work_id)
        if isinstance(result, ProcessProbed) and not result.alive:
            self._bury(node, range(incarnation, incarnation + 1))
        return []

    def _bury(self, node: str, incarnations: range) -> None:
        """These lives of `node` are over: their leases and puts end. A clock that went back gives a later life a smaller
        number, so only older ones than one that is met, and the one that was probed, are known to be."""
        for holder in [h for h in self._leases if h.node == node and h.incarnation in incarnations]:
            self._end_lease(holder)
        for holder in [h for h in self._gatherer.gatherings if h.node == node and h.incarnation in incarnations]:
            self._gatherer.drop(holder)
        for writer in [w for w in self._puts if w.node == node and w.incarnation in incarnations]:
            for slot in self._puts.pop(writer).slots.values():
                self.slots.free(slot)

    # --- peers

    def _on_peer_up(self, up: PeerUp) -> list[Effect]:
        self._bury(up.peer, range(up.incarnation))
        self._peers[up.peer] = _Client(up.incarnation, up.hello.role)
        if up.hello.role == "conductor":
            self._newcomers.append(up.peer)
        return []

    def _on_peer_down(self, now: float, peer: str) -> list[Effect]:
        """Leases and puts of a silent client stay until they expire: it may only be cut off, and still read or write."""
        self._peers.pop(peer, None)
        for holder in [h for h in self._gatherer.gatherings if h.node == peer]:
            self._gatherer.drop(holder)
        return self._gatherer.source_down(now, peer)

    def _announce(self) -> list[Effect]:
        """Tell of what this event changed, in either tier; a conductor just met hears of all that is held now."""
        changed = self._announcer.pending or self.disk.stored or self.slots.evicted or self.disk.slots.evicted
        if not changed and not self._newcomers:
            return []
        if self.disk.stored:
            new = [key for key, _ in self.disk.stored if self.slots.committed(key) is None]
            self._announcer.stored(in_chains(Medium.DISK, self.disk.stored), new)
            self.disk.stored.clear()
        left_dram, left_disk = tuple(self.slots.evicted), tuple(self.disk.slots.evicted)
        if left_dram or left_disk:
            self.disk.left(left_dram, left_disk)
            self.counts.add("evicted_blocks[tier=dram]", len(left_dram))
            self.counts.add("evicted_blocks[tier=disk]", len(left_disk))
            self.slots.evicted.clear()
            self.disk.slots.evicted.clear()
        effects = self._announcer.flush([(Medium.CPU, left_dram), (Medium.DISK, left_disk)], self._informed())
        self._misses.left(self._announcer.gone)
        if self._newcomers:
            everything: list[Message] = [] if self._leaving.resting else [*self._all_held()]
            everything += _of_shelf(list(self._shelf))
            if self._leaving.resting:
                everything.append(CacheLoad(sources=(), resting=True))
            everything.append(BlocksAnnounced(complete=True))
            effects += [Send(newcomer, message) for newcomer in self._newcomers for message in everything]
            self._newcomers.clear()
        return effects

    def _all_held(self) -> list[BlocksAnnounced]:
        dram = self.slots.committed_keys()
        disk = [key for key in self.disk.slots.committed_keys() if self.slots.committed(key) is None]
        return announcements(dram, on_disk=disk if self.disk.readable else ())

    def _take_no_more(self) -> None:
        for holder in [h for h, g in self._gatherer.gatherings.items() if g.wish]:
            self._gatherer.drop(holder)
        self.disk.begin_drain()

    def _on_rest(self, resting: bool) -> list[Effect]:
        """Nothing that is held here is to be had while it rests, so conductors plan without; then they hear of all of it."""
        self._leaving.rest(resting)
        if self._leaving.leaves:
            return []
        told: list[Message] = [CacheLoad(sources=(), resting=resting)]
        if resting:
            self._take_no_more()
            held = dict.fromkeys([*self.slots.committed_keys(), *self.disk.slots.committed_keys()])
            told += announcements((), list(held))
        else:
            self.disk.end_drain()
            self._newcomers = self._conductors()
        return [Send(name, message) for message in told for name in self._conductors()]

    def _conductors(self) -> list[str]:
        return [name for name, peer in self._peers.items() if peer.role == "conductor"]

    def _informed(self) -> list[str]:
        """Conductors that hear of what changes."""
        return [] if self._leaving.resting else [name for name in self._conductors() if name not in self._newcomers]

    def _on_shelf(self, told: ShelfTold) -> list[Effect]:
        """Kept for conductors that come later."""
        self._shelf |= dict.fromkeys(told.stored)
        for key in told.removed:
            self._shelf.pop(key, None)
        informed = [name for name in self._conductors() if name not in self._newcomers]
        return [Send(name, message) for message in _of_shelf(told.stored, told.removed) for name in informed]

    # --- what fetching takes

    def _begin_reports(self) -> list[Effect]:
        """As soon as anything is fetched."""
        if self._reporting or not self._gatherer.fetches:
            return []
        self._reporting = True
        return [SetTimer(REPORT, self._settings.report_s)]

    def _report(self, now: float) -> list[Effect]:
        """Until nothing is fetched any more and what was measured is too old to say anything, which ends with an empty one."""
        sources = self._gatherer.sources(now)
        self._reporting = bool(sources)
        load = CacheLoad(sources=tuple(sources[:MAX_SOURCES]), resting=self._leaving.resting)
        timers: list[Effect] = [SetTimer(REPORT, self._settings.report_s)] if sources else []
        return [*[Send(name, load, lossy=True) for name in self._conductors()], *timers]

    def _drained(self) -> list[Effect]:
        busy = self._leases or self._puts or self._gatherer.gatherings or self._gatherer.fetches or self.disk.demoting
        return self._leaving.drained(idle=not busy)

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


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending indices as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs


def _of_shelf(stored: Sequence[Key], removed: Sequence[Key] = ()) -> list[BlocksAnnounced]:
    return [structs.replace(message, shelf=True) for message in announcements(stored, removed)]
