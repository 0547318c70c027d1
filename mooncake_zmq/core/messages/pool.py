"""Messages about blocks in the pool: leases, puts, replicas and corrupt copies.

The clients of a cache-node are prefill, decode, other cache-nodes and the conductor.
"""

from typing import Annotated

from msgspec import Meta

from mooncake_zmq.core.messages.fields import (
    MAX_BLOCKS,
    MAX_MESSAGE_BYTES,
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

COUNT_BYTES, KEY_BYTES, TOKENS_BYTES, TENANT_BYTES = 9, 18, 5, 3 + 4 * 64
"""The most bytes of a number, a key, the beginning of a block's tokens and a tenant's name in a message."""
MAX_FETCHED_BLOCKS = (MAX_MESSAGE_BYTES - 4096 - 4 * MAX_TOKENS) // (3 * COUNT_BYTES + KEY_BYTES + TOKENS_BYTES + TENANT_BYTES)
"""Blocks that one lease of another cache-node has: with their tokens and tenants they fit a message, and its envelope."""


class LeaseBlocks(TaggedRecord, frozen=True):
    """Request for a lease on the longest leading run of `keys`. Blocks missing in DRAM are promoted from the node's own SSD or
    fetched from `sources`, in at most `fetch_s`, and only while that is quicker than computing them, unless these are fetched
    from the tail."""

    lease_id: Count
    keys: Keys
    sources: Annotated[tuple[Name, ...], Meta(max_length=16)]
    fetch_s: Seconds
    ttl_s: Seconds
    compute_s: Seconds = 0.0
    """Time in which the client computes one of these blocks; 0: get them however long it takes."""
    contents: bool = False
    """Whether to return the blocks' tokens as well, for a client that publishes KV events."""
    tail_first: Count = 0
    """Unless 0, the first so many of `keys` are fetched from the last one on, while the client computes from the first one on:
    the answer comes at once, and what is fetched follows in `BlocksArrived`."""


class BlocksLeased(TaggedRecord, frozen=True):
    """A lease on the leading run, perhaps empty, of blocks in `node`'s slots, until `ttl_s` after the holder *sent* its
    request.

    The blocks stand in columns: a record for each took the sender four times as long to make and to pack.
    """

    lease_id: Count
    node: Name
    incarnation: Count
    slots: Counts = ()
    generations: Counts = ()
    checksums: Annotated[tuple[Checksum, ...], Meta(max_length=MAX_BLOCKS)] = ()
    remote: Count = 0
    """Number of blocks that were fetched from another host for this lease."""
    parents: Annotated[tuple[Key | None, ...], Meta(max_length=MAX_BLOCKS)] = ()
    tokens: Annotated[tuple[Tokens, ...], Meta(max_length=MAX_BLOCKS)] = ()
    """Contents, if requested: the block that each block follows (None: it begins a prompt), and its tokens, empty if not known.
    No columns if they are not known of any block. At most `MAX_TOKENS` in all."""
    tenants: Annotated[tuple[Tenant, ...], Meta(max_length=MAX_BLOCKS)] = ()
    """Tenant of each block, for another cache-node; no column if no block has one."""
    more: bool = False
    """Whether further blocks of the lease follow in `BlocksArrived`."""
    block_s: Seconds = 0.0
    """Recent seconds for each block that is fetched; 0 if they were not measured."""

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
        """Return the slot to read each block from."""
        return _sources(self)


class BlocksArrived(TaggedRecord, frozen=True):
    """Further blocks of a lease that is fetched from its tail, which last as long as the others: `blocks` are their indices in
    its keys."""

    lease_id: Count
    node: Name
    incarnation: Count
    blocks: Counts = ()
    slots: Counts = ()
    generations: Counts = ()
    checksums: Annotated[tuple[Checksum, ...], Meta(max_length=MAX_BLOCKS)] = ()
    remote: Count = 0
    """Number of these blocks that were fetched from another host for this lease."""
    last: bool = False
    """Whether no further block follows."""

    def __post_init__(self) -> None:
        if not len(self.slots) == len(self.generations) == len(self.checksums) == len(self.blocks) >= self.remote:
            raise ValueError("columns of different lengths")

    @property
    def sources(self) -> tuple[SlotRef, ...]:
        """Return the slot to read each block from."""
        return _sources(self)


def _sources(message: BlocksLeased | BlocksArrived) -> tuple[SlotRef, ...]:
    node, incarnation = message.node, message.incarnation
    columns = zip(message.slots, message.generations, message.checksums, strict=True)
    return tuple([SlotRef(node=node, incarnation=incarnation, slot=s, generation=g, checksum=c) for s, g, c in columns])


class ShortenFetch(TaggedRecord, frozen=True):
    """Message of a client that computes the blocks of a lease before index `first` itself: they need not be fetched any
    more."""

    lease_id: Count
    first: Count


class RenewLease(TaggedRecord, frozen=True):
    """Request of a holder that still reads. Once `LeaseRenewed` confirms it, the lease lasts until `ttl_s` after this was
    sent."""

    lease_id: Count
    ttl_s: Seconds


class LeaseRenewed(TaggedRecord, frozen=True):
    """Confirmation of the oldest unconfirmed `RenewLease` of this lease; a lease that is gone is not confirmed."""

    lease_id: Count


class ReleaseLease(TaggedRecord, frozen=True):
    """End of a lease: the holder has stopped reading."""

    lease_id: Count
    spare: bool | None = None
    """Whether another pool keeps the same blocks and these copies may go sooner; None: as it was."""


class ReserveSlots(TaggedRecord, frozen=True):
    """First phase of a put: request slots for those of `keys` that are not held yet. The writer stops `ttl_s` after sending
    this."""

    put_id: Count
    keys: Keys
    ttl_s: Seconds
    parent: Key | None = None
    tokens: Tokens = b""
    """Tokens of the blocks, for KV events; `keys` are a chain that follows `parent` (None: it begins a prompt)."""
    tenant: Tenant = ""
    more: bool = False
    """Whether the blocks after these are put soon: the use of the whole chain counts with the last of them."""
    spare: bool = False
    """Whether another pool keeps the same blocks, so that these copies may go sooner."""


class GrantedSlot(Record, frozen=True):
    """Permission to write block `index` of the request into `slot` while its generation is `generation`."""

    index: Count
    slot: Count
    generation: Count


class SlotsReserved(TaggedRecord, frozen=True):
    """Granted slots. The other keys exist, are being written (dedup), or got none for lack of room or by a limit."""

    put_id: Count
    grants: Annotated[tuple[GrantedSlot, ...], Meta(max_length=MAX_BLOCKS)]


class CommitSlots(TaggedRecord, frozen=True):
    """Second phase of a put: (index, checksum) of the blocks written; every other grant of the put is given back."""

    put_id: Count
    checksums: Annotated[tuple[tuple[Count, Checksum], ...], Meta(max_length=MAX_BLOCKS)]


class ReclaimSlots(TaggedRecord, frozen=True):
    """Request of a cache-node to a writer whose put ran past its ttl: send `CommitSlots` (empty) as soon as no copy of it
    runs."""

    put_id: Count


class ChangeReplica(TaggedRecord, frozen=True):
    """Hint of a conductor to a cache-node: hold a copy of these blocks, fetched from `sources`; without sources, evict your
    copy first, as there is one too many. A node without room or time ignores it."""

    keys: Keys
    sources: Annotated[tuple[Name, ...], Meta(max_length=16)]


class ReportCorrupt(TaggedRecord, frozen=True):
    """Report that these copies did not verify when read; the receiver forgets them, so that they are misses."""

    slots: Slots
