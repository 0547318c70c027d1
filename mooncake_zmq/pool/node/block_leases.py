"""Leases of a pool's clients on its DRAM slots, from the request to the end, and copies that conductors request. PURE.

A lease is answered with the leading run of its blocks once `gathering` has brought together what it can; what it misses is
counted, each block with a reason. A lease that is gathered from its tail begins at once and grows.
"""

from collections.abc import Callable, Mapping, Sequence

from mooncake_zmq.core.actor import Effect, Send, SetTimer
from mooncake_zmq.core.messages import (
    MAX_BLOCKS,
    MAX_FETCHED_BLOCKS,
    MAX_TOKENS,
    BlocksArrived,
    BlocksLeased,
    ChangeReplica,
    LeaseBlocks,
    LeaseRenewed,
    ReleaseLease,
    RenewLease,
    ReportCorrupt,
    ShortenFetch,
)
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.events import Medium
from mooncake_zmq.kv.lease import HolderId, Process
from mooncake_zmq.pool.node.contents import UNKNOWN
from mooncake_zmq.pool.node.disk_tier import DiskTier
from mooncake_zmq.pool.node.gathering import DISK, Gatherer, Gathering
from mooncake_zmq.pool.node.misses import CORRUPT, DENIED, MET
from mooncake_zmq.pool.node.parts import Parts
from mooncake_zmq.pool.rules.holders import Lease
from mooncake_zmq.pool.rules.table import report_corrupt

COPY_REQUEST_S = 30.0
"""How long a requested copy may take."""


class BlockLeases:
    """Grants leases and ends them. `tiers`: the quickest tier that each of some blocks can be served from."""

    def __init__(
        self, parts: Parts, disk: DiskTier, gatherer: Gatherer, tiers: Callable[[Sequence[Key]], list[Medium | None]]
    ) -> None:
        self._parts = parts
        self._slots = parts.slots
        self._holders = parts.holders
        self._peers = parts.peers
        self._counts = parts.counts
        self._settings = parts.settings
        self._disk = disk
        self._gatherer = gatherer
        self._tiers = tiers

    @property
    def all(self) -> list[Lease[Process]]:
        """The leases that are not over."""
        return [lease for holder in self._holders.clients.values() for lease in holder.leases.values()]

    def on_lease(self, now: float, sender: str, message: LeaseBlocks) -> list[Effect]:
        """Begin to gather what a lease asks for; it is answered by `answer`."""
        holder = self._peers.holder(sender, message.lease_id)
        gatherings = self._gatherer.gatherings
        if holder in gatherings or self._holders.lease_of(holder.process, holder.number) is not None:
            return []
        mine = self._holders.of(holder.process, sender).usage.leases + sum(
            1 for h, gathering in gatherings.items() if h.node == sender and not gathering.begun
        )
        if self._parts.drain.draining or mine >= self._settings.max_leases_per_client:
            self._counts.add("leases_denied")
            if self._computes(sender):
                self._count_missed({DENIED: len(message.keys)})
            return [
                Send(
                    sender, BlocksLeased(lease_id=message.lease_id, node=self._parts.name, incarnation=self._parts.incarnation)
                )
            ]
        fetch_s = min(message.fetch_s, self._settings.max_lease_s)
        gathering = Gathering(
            holder=holder,
            keys=message.keys[: MAX_FETCHED_BLOCKS if self._peers.has_role(sender, "cache-node") else MAX_BLOCKS],
            deadline=now + fetch_s,
            ttl_s=min(message.ttl_s, self._settings.max_lease_s),
            compute_s=message.compute_s,
            contents=message.contents,
        )
        tail_first = min(message.tail_first, len(gathering.keys))
        return self._gather(now, gathering, message.sources, fetch_s, tail_first=tail_first)

    def _gather(
        self, now: float, gathering: Gathering, sources: Sequence[str], within_s: float, *, tail_first: int = 0
    ) -> list[Effect]:
        known = [s for s in sources if self._peers.has_role(s, "cache-node")]
        effects = self._gatherer.begin(now, gathering, known, tail_first=tail_first)
        holder = gathering.holder
        if holder in self._gatherer.gatherings:
            effects.append(SetTimer(("gathering", holder.node, holder.incarnation, holder.number), within_s))
            if gathering.tail is not None:
                effects.append(self._grant(now, gathering, more=True))
        return effects

    def answer(self, now: float, gathering: Gathering) -> list[Effect]:
        """Grant the leading run that is here; whatever else was pinned for it is let go. A lease that grows gets what came at
        last."""
        if gathering.requested:
            self._slots.unpin(gathering.pinned)
            return []
        if gathering.ahead:
            self._slots.unpin(list(gathering.ahead.values()))
        if self._computes(gathering.holder.node):
            self._count_lookup(gathering)
        effects: list[Effect] = []
        if not gathering.begun:
            tail = gathering.tail
            effects.append(self._grant(now, gathering, more=bool(tail and tail.fresh)))
        if gathering.begun:  # before, or by this
            effects += self.hand_over(gathering, last=True)
        return effects

    def hand_over(self, gathering: Gathering, *, last: bool = False) -> list[Effect]:
        """Let a lease that has begun have the blocks that have come since."""
        holder, tail = gathering.holder, gathering.tail
        fresh = tail.hand_over() if tail is not None else []
        if not (fresh or last):
            return []
        slots = tuple([slot for _, slot in fresh])
        lease = self._holders.lease_of(holder.process, holder.number)
        assert lease is not None, "a gathering is dropped with its lease"
        lease.rows = [*lease.rows, *slots]
        self._disk.used(len(slots))
        origins = [gathering.came_from.get(gathering.keys[index], DISK) for index, _ in fresh]
        arrived = BlocksArrived(
            lease_id=holder.number,
            node=self._parts.name,
            incarnation=self._parts.incarnation,
            blocks=tuple([index for index, _ in fresh]),
            slots=slots,
            generations=tuple(map(self._slots.generation.__getitem__, slots)),
            checksums=tuple(map(self._slots.checksum.__getitem__, slots)),
            remote=len(origins) - origins.count(DISK),
            last=last,
        )
        return [Send(holder.node, arrived)]

    def on_shorten(self, now: float, sender: str, message: ShortenFetch) -> list[Effect]:
        """Fetch nothing more of what the holder computes itself."""
        return self._gatherer.shorten(now, self._peers.holder(sender, message.lease_id), message.first)

    def _grant(self, now: float, gathering: Gathering, *, more: bool) -> Send:
        """Begin the lease of the leading run that is here; `more`: it grows."""
        holder, slots = gathering.holder, tuple(gathering.run)
        remote = sum([gathering.came_from.get(key, DISK) != DISK for key in gathering.keys[: len(slots)]])
        parents, tokens = self._contents_of(slots) if gathering.contents else ((), ())
        leased = BlocksLeased(
            lease_id=holder.number,
            node=self._parts.name,
            incarnation=self._parts.incarnation,
            slots=slots,
            generations=tuple(map(self._slots.generation.__getitem__, slots)),
            checksums=tuple(map(self._slots.checksum.__getitem__, slots)),
            remote=remote,
            parents=parents,
            tokens=tokens,
            tenants=self._owners(holder.node, slots),
            more=more,
            block_s=self._gatherer.expected_block_s(now, gathering) if more else 0.0,
        )
        if slots or more:
            self._disk.used(len(slots))
            self._holders.lease(Lease(holder.process, holder.number, now + gathering.ttl_s, slots))
            gathering.begun, gathering.run = more, []
        return Send(holder.node, leased)

    def _count_lookup(self, gathering: Gathering) -> None:
        """Count what a lease has of the blocks that were asked for, by where it was, and the others with their reasons."""
        keys, tail = gathering.keys, gathering.tail
        if tail is None:
            found, missed = keys[: gathering.here], keys[gathering.here :]
        else:
            has = [index < tail.run or index in tail.given for index in range(len(keys))]
            found = tuple([key for key, here in zip(keys, has, strict=True) if here])
            missed = tuple([key for key, here in zip(keys[tail.first :], has[tail.first :], strict=True) if not here])
        origins = [gathering.came_from[key] for key in found if key in gathering.came_from] if gathering.came_from else []
        disk = origins.count(DISK)
        self._counts.add("lookup_blocks[result=local]", len(found) - len(origins))
        self._counts.add("lookup_blocks[result=disk]", disk)
        self._counts.add("lookup_blocks[result=remote]", len(origins) - disk)
        if met := len(keys) - len(found) - len(missed):
            self._count_missed({MET: met})
        if missed:
            coming = self._gatherer.coming(gathering)
            self._count_missed(self._parts.misses.count(missed, self._tiers(missed), coming=coming, lost=gathering.lost))

    def _count_missed(self, reasons: Mapping[str, int]) -> None:
        self._counts.add("lookup_blocks[result=miss]", sum(reasons.values()))
        for why, blocks in reasons.items():
            self._counts.add(f"lookup_misses[reason={why}]", blocks)

    def _computes(self, asker: str) -> bool:
        """Does it compute what it misses? Only such lookups are counted: what another cache-node asks for is counted there, and
        a decode asks again for what a prefill reuses."""
        return self._peers.has_role(asker, "prefill")

    def _owners(self, holder: str, slots: Sequence[int]) -> tuple[str, ...]:
        """The owners of these blocks, sent to another cache-node, which will have copies of them."""
        if self._slots.shares is None or not self._peers.has_role(holder, "cache-node"):
            return ()
        owners = [self._slots.owner_of(slot) for slot in slots]
        return tuple([self._parts.tenants.names[owner] for owner in owners]) if any(owners) else ()

    def _contents_of(self, slots: Sequence[int]) -> tuple[tuple[Key | None, ...], tuple[bytes, ...]]:
        """Parents and tokens of these blocks, in columns, as far as a message has room; none if nothing is known."""
        if not self._parts.contents.token_bytes:
            return (), ()
        room = 4 * MAX_TOKENS // self._parts.contents.token_bytes
        contents = [content if content.tokens else UNKNOWN for content in map(self._parts.contents.of, slots[:room])]
        contents += [UNKNOWN] * (len(slots) - len(contents))
        if not any(content.tokens for content in contents):
            return (), ()
        return tuple([content.parent for content in contents]), tuple([content.tokens for content in contents])

    def on_renew(self, now: float, sender: str, message: RenewLease) -> list[Effect]:
        """Let a lease last longer; that of one which is over is not answered."""
        holder = self._peers.holder(sender, message.lease_id)
        lease = self._holders.lease_of(holder.process, holder.number)
        if lease is None:
            return []
        lease.expires_at = now + min(message.ttl_s, self._settings.max_lease_s)
        self._holders.time(lease)
        return [Send(sender, LeaseRenewed(lease_id=message.lease_id))]

    def on_release(self, _now: float, sender: str, message: ReleaseLease) -> list[Effect]:
        """End a lease, or forget the request for it."""
        holder = self._peers.holder(sender, message.lease_id)
        self._gatherer.drop(holder)
        lease = self._holders.lease_of(holder.process, holder.number)
        if lease is not None:
            if message.spare is not None:
                self._slots.mark(lease.rows, spare=message.spare)
            self._holders.release(holder.process, holder.number)
            self._disk.used(len(lease.rows))  # pinned, they were not seen among what is to be written
        return []

    def on_over(self, lease: Lease[Process]) -> None:
        """Count a lease that has expired; what was still gathered for it is given up."""
        self._gatherer.drop(HolderId(*lease.client, lease.number))
        self._counts.add("leases_expired")
        self._disk.used(len(lease.rows))

    def bury(self, node: str, incarnations: range) -> None:
        """End what these incarnations of `node` hold and wait for. A clock that went back gives a later incarnation a smaller
        number, so only those older than a connected one, and the one that was probed, are known to have ended."""
        for process in [each for each in self._holders.clients if each[0] == node and each[1] in incarnations]:
            self._disk.used(sum(len(lease.rows) for lease in self._holders.clients[process].leases.values()))
            self._holders.bury(process)
        for holder in [h for h in self._gatherer.gatherings if h.node == node and h.incarnation in incarnations]:
            self._gatherer.drop(holder)

    def on_corrupt(self, _now: float, _sender: str, message: ReportCorrupt) -> list[Effect]:
        """Forget the copies whose bytes a reader found to be damaged."""
        for ref in message.slots:
            if ref.node != self._parts.name or ref.incarnation != self._parts.incarnation:
                continue
            key = self._slots.key_of(ref.slot) if self._slots.is_readable(ref.slot, ref.generation) else None
            if key is not None and report_corrupt(self._slots, ref.slot, ref.generation):
                self._parts.misses.going((key,), CORRUPT)
                self._counts.add("corrupt_blocks[tier=dram]")
        return []

    def on_change_replica(self, now: float, sender: str, message: ChangeReplica) -> list[Effect]:
        """Fetch copies of blocks that a conductor wants here, or let copies go first that it does not."""
        if not self._peers.has_role(sender, "conductor"):
            self._counts.add("unexpected_messages[type=ChangeReplica]")
            return []
        if not message.sources:
            for key in message.keys:
                self._let_go_first(key)
            return []
        requested = sum(1 for gathering in self._gatherer.gatherings.values() if gathering.requested)
        if self._parts.drain.draining or requested >= self._settings.max_requested_copies:
            self._counts.add("copies_not_made")
            return []
        holder = HolderId(self._parts.name, self._parts.incarnation, self._parts.new_id())
        gathering = Gathering(holder=holder, keys=message.keys, deadline=now + COPY_REQUEST_S, requested=True)
        return self._gather(now, gathering, message.sources, COPY_REQUEST_S)

    def _let_go_first(self, key: Key) -> None:
        for tier in (self._slots, self._disk.slots):
            slot = tier.committed(key)
            if slot is not None and not tier.pins[slot]:
                tier.demote(slot)
