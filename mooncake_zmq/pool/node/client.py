"""A pool client's half of leases and puts, used by prefill and decode: clocks that stop first, and bounded puts. PURE."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from mooncake_zmq.core.actor import CancelTimer, Effect, PeerUp, Send, SetTimer, Start
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import (
    BlocksArrived,
    BlocksLeased,
    CommitSlots,
    LeaseBlocks,
    LeaseRenewed,
    Message,
    ReclaimSlots,
    ReleaseLease,
    RenewLease,
    ReportCorrupt,
    ReserveSlots,
    ShortenFetch,
    SlotRef,
    SlotsReserved,
    has_field,
)
from mooncake_zmq.core.work import BlocksCopied, CopyBlocks, SequenceBlock, SlotGrant, WorkFailed
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.lease import HeldLease


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolClientSettings:
    """How prefill and decode use their host's pool."""

    lease_ttl_s: float = 15.0
    """How long a lease or a put lasts unless renewed. Above session.peer_timeout_s: a cut-off client must not outlive it."""
    fetch_s: float = 5.0
    """Seconds after which blocks that other hosts have not delivered are computed instead."""
    max_puts: int = 64
    """Puts in flight; a further one is skipped and counted: the pool is a cache, the request does not wait for it."""
    verify_local: bool = True
    """Hash what is read from the own host's memory too. False trusts that memory: only what crosses the network or a disk is
    then verified, and a block overwritten by a stray writer would be used. Refused on CPUs that reorder loads, as ARM's do:
    there only the hash shows that a block was overwritten while it was read."""

    def __post_init__(self) -> None:
        if not 0 < self.fetch_s < self.lease_ttl_s:
            raise ValueError("fetch_s must be positive and below lease_ttl_s")
        if self.max_puts < 1:
            raise ValueError("max_puts must be at least 1")


COPY_MARGIN = 0.25
"""Part of a lease's time kept back: a copy must end this much before the lease does."""

RENEW = ("renew",)
"""The timer of the next renewal of all leases."""

POOL_ABSENT = "pool absent"
"""The kind of the timers that end the wait for a cache-node; their keys end with the lease's id."""

OF_POOLS = frozenset((BlocksLeased, BlocksArrived, LeaseRenewed, SlotsReserved, ReclaimSlots))


@dataclass(slots=True)
class _Put:
    token: Any
    keys: tuple[Key, ...]
    sources: tuple[SlotRef | SequenceBlock, ...]
    sent_at: float
    indexes: list[int] = field(default_factory=list)
    copying: bool = False


@dataclass(slots=True)
class PutEnded:
    """The effects of a step of the put protocol; `token`: the put that just ended, if one did."""

    effects: list[Effect] = field(default_factory=list)
    tokens: list[object] = field(default_factory=list)


class PoolClient:
    """Talks to the cache-node of `host`, whichever that is. Ids come from the owning actor, which also lends its `counts`."""

    def __init__(self, host: str, settings: PoolClientSettings, counts: Tally) -> None:
        self.settings = settings
        self._counts = counts
        self.node: str | None = None
        """The host's cache-node while it is up."""
        self._incarnation = 0
        self._grows = False
        """Whether that cache-node can have a lease grow from its tail."""
        self._host = host
        self._leases: dict[int, HeldLease] = {}
        self._unasked: dict[int, LeaseBlocks] = {}
        """Leases to ask for once the cache-node is known. Empty while `node` is known."""
        self._puts: dict[int, _Put] = {}
        self._copies: dict[int, int] = {}

    @property
    def leases(self) -> int:
        """Leases held, asked for, or to be asked for."""
        return len(self._leases) + len(self._unasked)

    @property
    def puts(self) -> int:
        """Puts in flight."""
        return len(self._puts)

    @property
    def tokens(self) -> list[object]:
        """Tokens of the puts in flight, for the owner's `check`."""
        return [put.token for put in self._puts.values()]

    def peer_up(self, now: float, up: PeerUp) -> list[Effect]:
        """Somebody appeared: if it is the cache-node of our host, it is asked for the leases that wait for it."""
        if self.node is not None or up.hello.role != "cache-node" or up.hello.host != self._host:
            return []
        self.node, self._incarnation = up.peer, up.incarnation
        self._grows = has_field(up.hello.protocol, "LeaseBlocks.tail_first")
        effects: list[Effect] = []
        for ask in self._unasked.values():
            effects += [CancelTimer((POOL_ABSENT, ask.lease_id)), *self._ask(now, ask)]
        self._unasked.clear()
        return effects

    def peer_down(self, peer: str) -> PutEnded:
        """Our cache-node is gone: leases are void, puts that have not begun to copy end."""
        ended = PutEnded()
        if peer != self.node:
            return ended
        self.node = None
        self._leases.clear()
        for put_id in [i for i, put in self._puts.items() if not put.copying]:
            ended.tokens.append(self._puts.pop(put_id).token)
        return ended

    def may_say(self, sender: str, message: Message) -> bool:
        """False for messages that only our own host's cache-node may send us, if `sender` is another one."""
        return sender == self.node or type(message) not in OF_POOLS

    # --- leases

    def lease(
        self,
        now: float,
        lease_id: int,
        keys: Sequence[Key],
        sources: Sequence[str],
        *,
        fetch: bool,
        compute_s: float = 0.0,
        wait_s: float = 0.0,
        tail_first: int = 0,
    ) -> list[Effect]:
        """Ask for the leading run of `keys`; while `node` is None, wait up to `wait_s` for it to be known; then the timer
        `POOL_ABSENT` lets the owner `forgo` the lease.

        `fetch`: what DRAM lacks is worth waiting for, unless it takes longer than `compute_s` a block (0: not known).
        `tail_first`: see `LeaseBlocks`. Such a fetch may last as long as computing, which is `wait_s`, but may always last as
        long as any.
        """
        ask = LeaseBlocks(
            lease_id=lease_id,
            keys=tuple(keys),
            sources=tuple(sources),
            fetch_s=max(self.settings.fetch_s, wait_s if tail_first else 0.0) if fetch else 0.0,
            ttl_s=self.settings.lease_ttl_s,
            compute_s=compute_s,
            tail_first=tail_first,
        )
        if self.node is not None:
            return self._ask(now, ask)
        self._unasked[lease_id] = ask
        return [SetTimer((POOL_ABSENT, lease_id), min(wait_s, self.settings.fetch_s))]

    def _ask(self, now: float, ask: LeaseBlocks) -> list[Effect]:
        assert self.node is not None
        self._leases[ask.lease_id] = HeldLease(now + self.settings.lease_ttl_s)
        if ask.tail_first and not self._grows:  # the answer must come before the lease ends
            ask = structs.replace(ask, tail_first=0, fetch_s=min(ask.fetch_s, self.settings.fetch_s))
        return [Send(self.node, ask)]

    def wants(self, lease_id: int) -> bool:
        """Whether this lease is held, asked for or to be asked for: not, if the cache-node went that was asked."""
        return lease_id in self._leases or lease_id in self._unasked

    def forgo(self, lease_id: int) -> bool:
        """The cache-node was not known in time. Returns whether the lease still waited for it."""
        return self._unasked.pop(lease_id, None) is not None

    def on_leased(self, message: BlocksLeased) -> tuple[SlotRef, ...] | None:
        """Where to read the blocks of a lease still wanted, else None. An empty lease is over at once, and one of what is
        not in our cache-node's own slots is no lease."""
        if message.lease_id not in self._leases:
            return None
        ours = (message.node, message.incarnation) == (self.node, self._incarnation)
        if ours and (message.slots or message.more):
            self._leases[message.lease_id].granted = True
            return message.sources
        del self._leases[message.lease_id]
        return ()

    def on_arrived(self, message: BlocksArrived) -> tuple[SlotRef, ...]:
        """Where to read further blocks of a lease still held."""
        lease = self._leases.get(message.lease_id)
        ours = (message.node, message.incarnation) == (self.node, self._incarnation)
        return message.sources if ours and lease is not None and lease.granted else ()

    def shorten(self, lease_id: int, first: int) -> list[Effect]:
        """The blocks of a lease before this one need not be fetched any more."""
        if lease_id not in self._leases or self.node is None:
            return []
        return [Send(self.node, ShortenFetch(lease_id=lease_id, first=first))]

    def reading_time_s(self, now: float, lease_id: int | None) -> float:
        """How long a copy that begins now may take; 0 if the lease is over or nearly so."""
        lease = None if lease_id is None else self._leases.get(lease_id)
        if lease is None:
            return 0.0
        return max(0.0, lease.expires_at - now - COPY_MARGIN * self.settings.lease_ttl_s)

    def renewal_timer(self) -> SetTimer:
        """Return the timer of the next call of `renew`."""
        return SetTimer(RENEW, self.settings.lease_ttl_s / 5)

    def renew(self, now: float) -> list[Effect]:
        """Renew every lease granted; call at least every quarter of `lease_ttl_s`.

        One only asked for would not be confirmed, and so never be renewed again.
        """
        effects: list[Effect] = []
        for lease_id, lease in self._leases.items():
            if lease.granted and lease.renewal_sent_at is None and self.node is not None:
                lease.renewal_sent_at = now
                effects.append(Send(self.node, RenewLease(lease_id=lease_id, ttl_s=self.settings.lease_ttl_s)))
        return effects

    def on_renewed(self, _now: float, _sender: str, message: LeaseRenewed) -> list[Effect]:
        """The lease lasts `lease_ttl_s` from when the renewal was sent."""
        lease = self._leases.get(message.lease_id)
        if lease is not None and lease.renewal_sent_at is not None:
            lease.expires_at = lease.renewal_sent_at + self.settings.lease_ttl_s
            lease.renewal_sent_at = None
        return []

    def release(self, lease_id: int, *, spare: bool | None = None) -> list[Effect]:
        """No more reading under this lease. `spare`: see `ReleaseLease`."""
        if self.forgo(lease_id):
            return [CancelTimer((POOL_ABSENT, lease_id))]
        if self._leases.pop(lease_id, None) is None or self.node is None:
            return []
        return [Send(self.node, ReleaseLease(lease_id=lease_id, spare=spare))]

    def report_corrupt(self, refs: Sequence[SlotRef]) -> list[Effect]:
        """Report to the pool which of its copies did not verify."""
        ours = tuple(ref for ref in refs if ref.node == self.node)
        return [Send(self.node, ReportCorrupt(slots=ours))] if self.node is not None and ours else []

    # --- puts

    def put(
        self,
        now: float,
        put_id: int,
        keys: Sequence[Key],
        sources: Sequence[SlotRef | SequenceBlock],
        token: Any,
        *,
        parent: Key | None,
        tokens: bytes,
        tenant: str,
        more: bool = False,
        spare: bool = False,
    ) -> list[Effect] | None:
        """Offer a chain of a tenant's blocks after the block `parent` (None: from the beginning), of `tokens` (int32 bytes), to
        the pool; `more` blocks of it follow soon, in another put. `spare`: another pool keeps them too.

        None if it was skipped; else `token` returns in `PutEnded.tokens` when the sources may go.
        """
        if self.node is None or len(self._puts) >= self.settings.max_puts or not keys:
            if keys:
                self._counts.add("puts_skipped", len(keys))
            return None
        self._puts[put_id] = _Put(token, tuple(keys), tuple(sources), now)
        reserve = ReserveSlots(
            put_id=put_id,
            keys=tuple(keys),
            ttl_s=self.settings.lease_ttl_s,
            parent=parent,
            tokens=tokens,
            tenant=tenant,
            more=more,
            spare=spare,
        )
        return [Send(self.node, reserve)]

    def on_reserved(self, now: float, message: SlotsReserved, work_id: int) -> PutEnded:
        """Copy into the granted slots, as work `work_id`."""
        put = self._puts.get(message.put_id)
        ended = PutEnded()
        if put is None or put.copying or self.node is None:
            return ended
        time_left = put.sent_at + self.settings.lease_ttl_s * (1 - COPY_MARGIN) - now
        if not message.grants or time_left <= 0 or any(g.index >= len(put.keys) for g in message.grants):
            del self._puts[message.put_id]
            ended.tokens.append(put.token)
            if message.grants:
                ended.effects.append(Send(self.node, CommitSlots(put_id=message.put_id, checksums=())))
            return ended
        put.copying = True
        put.indexes = [grant.index for grant in message.grants]
        self._copies[work_id] = message.put_id
        sources, node, incarnation = put.sources, self.node, self._incarnation
        copies = tuple([(sources[g.index], SlotGrant(node, incarnation, g.slot, g.generation)) for g in message.grants])
        ended.effects.append(Start(work_id, CopyBlocks(copies), time_left))
        return ended

    def copying(self, work_id: int) -> bool:
        """Is this work one of ours?"""
        return work_id in self._copies

    def on_copied(self, work_id: int, result: BlocksCopied | WorkFailed) -> PutEnded:
        """Commit what was written."""
        put_id = self._copies.pop(work_id)
        put = self._puts.pop(put_id)
        checksums: list[tuple[int, int]] = []
        if isinstance(result, BlocksCopied):
            for index, checksum in zip(put.indexes, result.checksums, strict=True):
                if checksum is not None:
                    checksums.append((index, checksum))
        self._counts.add("put_failures", len(put.indexes) - len(checksums))
        effects: list[Effect] = []
        if self.node is not None:
            effects.append(Send(self.node, CommitSlots(put_id=put_id, checksums=tuple(checksums))))
        return PutEnded(effects, [put.token])

    def on_reclaim(self, _now: float, _sender: str, message: ReclaimSlots) -> list[Effect]:
        """The pool asks about a put that ran past its time: answer unless a copy of it still runs."""
        if message.put_id in self._puts or self.node is None:
            return []
        return [Send(self.node, CommitSlots(put_id=message.put_id, checksums=()))]
