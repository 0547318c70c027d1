"""Load and blocks of nodes, and what the conductor asks of them."""

from typing import Annotated

from msgspec import Meta

from mooncake_zmq.core.messages.fields import Count, Keys, Name, Record, Seconds, TaggedRecord


class Measured(Record, frozen=True):
    """Recent work of one kind, older work counting less: what it took, and what the cost model says it takes. Both 0 if nothing
    was measured yet. Their ratio corrects the model for this node."""

    seconds: Seconds = 0.0
    predicted_s: Seconds = 0.0


class QueuedJob(Record, frozen=True):
    """One job of a prefill: its rank (see `core.order`) counted from now, so mostly below 0, and the work left."""

    booking: Count
    rank_s: Annotated[float, Meta(ge=-1e9, le=1e9)]
    left_s: Seconds


MAX_REPORTED = 512
"""Jobs or requests that a load report names one by one."""


class PrefillLoad(TaggedRecord, frozen=True):
    """A prefill's load, or a vLLM's as that, sent every report interval (lossy)."""

    jobs: Annotated[tuple[QueuedJob, ...], Meta(max_length=MAX_REPORTED)] = ()
    """All that are not computed to their end; past `MAX_REPORTED` their work is added to the last one named."""
    overtake: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    priority_s: Seconds = 0.0
    """Its rule of order, see `core.order`."""
    chunk_tokens: Count = 0
    """What is in flight is not interrupted for a job that goes first: 0, it is."""
    room: Count = 1 << 20
    """Further jobs it would queue."""
    compute: Measured = Measured()
    load: Measured = Measured()
    """Of reused KV, from the host's pool into the engine."""
    draining: bool = False
    token_s: Seconds = 0.0
    """A prompt's token by its own costs, which is what `compute` is held against; 0: by the conductor's."""


class DecodeLoad(TaggedRecord, frozen=True):
    """A decode's load, or a vLLM's as that, sent every report interval (lossy)."""

    running: Count
    """Requests in the batch, those that wait for a place in it too."""
    reserved: Count
    """Requests that hold KV and are not there yet."""
    free_tokens: Count
    capacity_tokens: Count
    context_tokens: Count = 0
    """KV that the running ones hold."""
    max_batch: Count = 1 << 20
    room: Count = 1 << 20
    """Further requests it would take, KV apart."""
    step_s: Seconds = 0.0
    """Measured duration of a recent step, 0 if none."""
    step: Measured = Measured()
    bookings: Annotated[tuple[Count, ...], Meta(max_length=MAX_REPORTED)] = ()
    """Of the requests that are running or reserved, as far as they fit."""
    draining: bool = False
    fixed_s: Seconds = 0.0
    """A step's fixed part by its own costs, which is what `step` is held against; 0: by the conductor's."""


class SourceRate(Record, frozen=True):
    """What fetching from one source takes a cache-node: `source` is another one, or empty for its own SSD."""

    source: Annotated[str, Meta(max_length=64)]
    block_s: Seconds
    """Seconds a block took lately; 0: not measured."""
    pending_blocks: Count
    """Asked for there and not here yet."""


class CacheLoad(TaggedRecord, frozen=True):
    """A cache-node's fetches, sent every report interval while there is something to tell (lossy)."""

    sources: Annotated[tuple[SourceRate, ...], Meta(max_length=256)]
    resting: bool = False
    """It serves nobody until it says otherwise; told at once, and whoever comes."""


class WaitEnded(TaggedRecord, frozen=True):
    """Conductor -> prefill: the blocks that the job of this placement waits for are at the cache-nodes `sources`; without any,
    they will not come: their computation ended early."""

    booking: Count
    sources: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()


class BlocksAnnounced(TaggedRecord, frozen=True):
    """Cache-node -> conductors: what its host now holds in DRAM, holds on SSD alone, and no longer holds; a key named anew has
    changed its tier. After a PeerUp the whole set is sent anew. A vLLM sends the same of its own prefix cache, and a prefill of
    its slab."""

    stored: Keys = ()
    removed: Keys = ()
    on_disk: Keys = ()
    complete: bool = False
    """The whole set has been sent: the last message of those that follow a PeerUp."""
    shelf: bool = False
    """Not of the pool: blocks of vLLMs, in the store. None of our own engines can read them."""


class ChangeRole(TaggedRecord, frozen=True):
    """Conductor -> prefill or decode: take nothing new, finish the rest, then come back as `role`. Where that is not permitted,
    or the node ends already, nothing happens. Said twice it is as if said once."""

    role: Name
