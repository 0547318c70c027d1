"""Blocks in the pool: leases, puts, replicas and corrupt copies.

The clients of a cache-node are prefill, decode, other cache-nodes and the conductor.
"""

from typing import Annotated

from msgspec import Meta

from mooncake_zmq.core.messages.fields import (
    MAX_BLOCKS,
    MAX_TOKENS,
    Checksum,
    Count,
    Counts,
    Key,
    Keys,
    Name,
    Record,
    Seconds,
    SlotRef,
    Slots,
    TaggedRecord,
    Tenant,
    Tokens,
)


class LeaseBlocks(TaggedRecord, frozen=True):
    """Promise not to evict the longest leading run of `keys`. What is missing in DRAM is promoted from the node's own SSD or
    fetched from `sources`, in at most `fetch_s`, and only as long as that is quicker than computing it."""

    lease_id: Count
    keys: Keys
    sources: Annotated[tuple[Name, ...], Meta(max_length=16)]
    fetch_s: Seconds
    ttl_s: Seconds
    compute_s: Seconds = 0.0
    """What computing one of these blocks takes the asker; 0: get it whatever it takes."""
    contents: bool = False
    """Tell what the blocks hold as well: the asker publishes KV events."""


class BlocksLeased(TaggedRecord, frozen=True):
    """The leading run, perhaps empty, of blocks in `node`'s slots, held until `ttl_s` after the holder *sent* its request.

    In columns, one entry a block: a record for each took the sender four times as long to make and to pack.
    """

    lease_id: Count
    node: Name
    incarnation: Count
    slots: Counts = ()
    generations: Counts = ()
    checksums: Annotated[tuple[Checksum, ...], Meta(max_length=MAX_BLOCKS)] = ()
    remote: Count = 0
    """How many of the blocks were fetched from another host for this lease."""
    parents: Annotated[tuple[Key | None, ...], Meta(max_length=MAX_BLOCKS)] = ()
    tokens: Annotated[tuple[Tokens, ...], Meta(max_length=MAX_BLOCKS)] = ()
    """If asked for: what each block follows (none: it begins a prompt) and holds, nothing where that is not known. No columns
    if it is not known of any. At most `MAX_TOKENS` in all."""
    tenants: Annotated[tuple[Tenant, ...], Meta(max_length=MAX_BLOCKS)] = ()
    """For another cache-node: whose each block is; no column if all are nobody's."""

    def __post_init__(self) -> None:
        blocks = len(self.slots)
        if not len(self.generations) == len(self.checksums) == blocks >= self.remote:
            raise ValueError("columns of different lengths")
        if self.tokens or self.parents:
            if not len(self.tokens) == len(self.parents) == blocks:
                raise ValueError("columns of different lengths")
            if sum(map(len, self.tokens)) > 4 * MAX_TOKENS:
                raise ValueError(f"more than {MAX_TOKENS} tokens")
        if self.tenants and len(self.tenants) != blocks:
            raise ValueError("columns of different lengths")

    @property
    def sources(self) -> tuple[SlotRef, ...]:
        """Where to read each block."""
        node, incarnation = self.node, self.incarnation
        columns = zip(self.slots, self.generations, self.checksums, strict=True)
        return tuple([SlotRef(node=node, incarnation=incarnation, slot=s, generation=g, checksum=c) for s, g, c in columns])


class RenewLease(TaggedRecord, frozen=True):
    """The holder still reads. Once `LeaseRenewed` confirms it, the lease lasts until `ttl_s` after this was sent."""

    lease_id: Count
    ttl_s: Seconds


class LeaseRenewed(TaggedRecord, frozen=True):
    """Confirms the oldest unconfirmed `RenewLease` of this lease; a lease that is gone is not confirmed."""

    lease_id: Count


class ReleaseLease(TaggedRecord, frozen=True):
    """The holder reads no more."""

    lease_id: Count


class ReserveSlots(TaggedRecord, frozen=True):
    """First phase of a put: slots for those of `keys` that are not held yet. The writer stops `ttl_s` after sending this."""

    put_id: Count
    keys: Keys
    ttl_s: Seconds
    parent: Key | None = None
    tokens: Tokens = b""
    """What the blocks hold, for KV events, and the block they follow (none: they begin a prompt): `keys` are a chain."""
    tenant: Tenant = ""
    more: bool = False
    """Blocks that follow these are put soon: the use of the whole chain counts with the last of them."""


class GrantedSlot(Record, frozen=True):
    """Write block `index` of the request into `slot` while its generation is `generation`."""

    index: Count
    slot: Count
    generation: Count


class SlotsReserved(TaggedRecord, frozen=True):
    """Granted slots. The other keys exist, are being written (dedup), or found no room or a limit."""

    put_id: Count
    grants: Annotated[tuple[GrantedSlot, ...], Meta(max_length=MAX_BLOCKS)]


class CommitSlots(TaggedRecord, frozen=True):
    """Second phase: (index, checksum) of the blocks written; every other grant of the put is given back."""

    put_id: Count
    checksums: Annotated[tuple[tuple[Count, Checksum], ...], Meta(max_length=MAX_BLOCKS)]


class ReclaimSlots(TaggedRecord, frozen=True):
    """Cache-node -> writer whose put ran past its ttl: answer `CommitSlots` (with nothing) as soon as no copy of it runs."""

    put_id: Count


class ChangeReplica(TaggedRecord, frozen=True):
    """Conductor -> cache-node: hold a copy of these blocks, fetched from `sources`; without sources: yours is one copy too
    many, let it be the first to go. A wish: a node without room or time leaves it."""

    keys: Keys
    sources: Annotated[tuple[Name, ...], Meta(max_length=16)]


class ReportCorrupt(TaggedRecord, frozen=True):
    """These copies did not verify when read: forget them, so that they are misses."""

    slots: Slots
