"""Messages of nodes' load and blocks, and the conductor's requests to nodes."""

from typing import Annotated, Final

from msgspec import Meta

from mooncake_zmq.core.messages.fields import MAX_TOKENS, Count, Keys, ModelName, Name, Record, Seconds, TaggedRecord, Tenant


class Measured(Record, frozen=True):
    """Measured and predicted time of recent work of one kind, older work counting less. Both are 0 if nothing was measured yet.
    Their ratio corrects the cost model for this node."""

    seconds: Seconds = 0.0
    predicted_s: Seconds = 0.0


class QueuedJob(Record, frozen=True):
    """One job of a prefill: its rank (see `core.order`) relative to now, so mostly below 0, and the work left."""

    booking: Count
    rank_s: Annotated[float, Meta(ge=-1e9, le=1e9)]
    left_s: Seconds
    tenant: Tenant = ""


MAX_REPORTED: Final = 512
"""Jobs or requests that a load report names one by one."""


MAX_OVERTAKE: Final = 1e6


class PrefillLoad(TaggedRecord, frozen=True):
    """Load of a prefill, or of a vLLM as a prefill, sent every report interval (lossy)."""

    jobs: Annotated[tuple[QueuedJob, ...], Meta(max_length=MAX_REPORTED)] = ()
    """Jobs that are not finished; the work of those beyond `MAX_REPORTED` is added to the last one."""
    overtake: Annotated[float, Meta(ge=0, le=MAX_OVERTAKE)] = 0.0
    priority_s: Seconds = 0.0
    """Its parameter of the order, see `core.order`."""
    chunk_tokens: Count = 0
    """Length of its chunks: the chunk in flight is not interrupted for a job that goes first. 0: it is."""
    room: Count = 1 << 20
    """Number of further jobs that it would queue."""
    compute: Measured = Measured()
    load: Measured = Measured()
    """Measured loads of reused KV, from the host's pool into the engine."""
    draining: bool = False
    token_s: Seconds = 0.0
    """Seconds of a prompt's token by its own costs, with which `compute` was predicted; 0: by the conductor's."""
    meets: bool = False
    """Whether it computes the head of a prompt while its tail is fetched, where it has nothing else to compute."""


MAX_ADAPTERS: Final = 4096
"""The most adapters of one vLLM; further ones count as not listed."""


class AdaptersListed(TaggedRecord, frozen=True):
    """The adapters that a vLLM serves, sent to conductors once its server has listed them, and after each change."""

    adapters: Annotated[tuple[ModelName, ...], Meta(max_length=MAX_ADAPTERS)] = ()


class DecodeLoad(TaggedRecord, frozen=True):
    """Load of a decode, or of a vLLM as a decode, sent every report interval (lossy)."""

    running: Count
    """Requests in the batch, including those that wait for a place in it."""
    reserved: Count
    """Requests that hold KV but have not arrived yet."""
    free_tokens: Count
    capacity_tokens: Count
    context_tokens: Count = 0
    """KV tokens that the running requests hold."""
    max_batch: Count = 1 << 20
    room: Count = 1 << 20
    """Number of further requests that it would take, apart from their KV."""
    step_s: Seconds = 0.0
    """Measured duration of a recent step, 0 if none."""
    step: Measured = Measured()
    bookings: Annotated[tuple[Count, ...], Meta(max_length=MAX_REPORTED)] = ()
    """Bookings of the running and reserved requests, as many as fit."""
    draining: bool = False
    fixed_s: Seconds = 0.0
    """Fixed seconds of a step by its own costs, with which `step` was predicted; 0: by the conductor's."""
    lendable: Count = 0
    """KV tokens of whole blocks that it would lend to another decode now."""
    borrows: bool = False
    """Whether it takes requests of which other decodes hold KV."""
    own_tokens: Count = MAX_TOKENS
    """The KV of a prompt that is here before it borrows."""
    lends: Count = 0
    """KV tokens that it lends at most."""


class SourceRate(Record, frozen=True):
    """A cache-node's rate of fetching from one source: another cache-node, or its own SSD if `source` is empty."""

    source: Annotated[str, Meta(max_length=64)]
    block_s: Seconds
    """Recent seconds per block; 0: not measured."""
    pending_blocks: Count
    """Blocks that were requested there and have not arrived yet."""


class CacheLoad(TaggedRecord, frozen=True):
    """Fetches of a cache-node, sent every report interval while it has any (lossy)."""

    sources: Annotated[tuple[SourceRate, ...], Meta(max_length=256)]
    cordoned: bool = False
    """Whether it is cordoned and serves no request; sent at once on each change, and to each conductor that comes up."""


class WaitEnded(TaggedRecord, frozen=True):
    """Message from conductor to prefill: the blocks that the job of this placement waits for are at the cache-nodes `sources`.
    Without any they will not come, as their computation ended early."""

    booking: Count
    sources: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()


class BlocksAnnounced(TaggedRecord, frozen=True):
    """Message from a cache-node to conductors: blocks that its host now holds in DRAM, holds on SSD alone, and no longer holds;
    a key that comes again has changed its tier. After a PeerUp the whole set is sent. A vLLM sends the same of its own prefix
    cache, and a prefill of its slab."""

    stored: Keys = ()
    removed: Keys = ()
    on_disk: Keys = ()
    complete: bool = False
    """Whether this is the last message of the whole set that follows a PeerUp."""
    engine_blocks: bool = False
    """Whether these are blocks of vLLMs in the store, not of the pool. Our own engines cannot read them."""


class ChangeRole(TaggedRecord, frozen=True):
    """Request of a conductor to a prefill or decode to drain and then restart as `role`. Ignored if that is not permitted, or
    if the node ends already. Idempotent."""

    role: Name
