"""Messages between the prefills that compute one long prompt in stages. The first stage leads, and is the one that exchanges
messages with gateway and decode."""

from typing import Annotated, Final

from msgspec import Meta

from mooncake_zmq.core.messages.fields import (
    Checksum,
    Count,
    Keys,
    Name,
    Priority,
    RequestId,
    Seconds,
    Seed,
    Slots,
    TaggedRecord,
    Tenant,
    Text,
    Token,
    TokenLogprob,
    Tokens,
)
from mooncake_zmq.core.messages.sampling import MAX_CHOICES, Sampled, Sampling


class StartStage(TaggedRecord, frozen=True):
    """Request to compute layers `[first_layer, stop_layer)` of a prompt of `tokens` tokens, chunk by chunk as they are sent:
    the stage reserves room for its KV, and leases the leading run of `keys`. The stage of the last layer samples."""

    request_id: RequestId
    attempt: Count
    tokens: Count
    chunk_tokens: Count
    """Number of tokens in the longest chunk."""
    first_layer: Count
    stop_layer: Count
    keys: Keys
    reuse_blocks: Count
    sources: Annotated[tuple[Name, ...], Meta(max_length=16)]
    sampling: Sampling
    deadline_s: Seconds
    booking: Count = 0
    priority: Priority = 0
    past: Tokens = b""
    """See `Sampling.past`."""
    seeds: Annotated[tuple[Seed, ...], Meta(max_length=MAX_CHOICES)] = ()
    """Seeds of further choices, for each of which a token is sampled too."""
    tenant: Tenant = ""


class StageReady(TaggedRecord, frozen=True):
    """Reply that room is reserved and that the KV of `blocks` leading blocks can be loaded here."""

    request_id: RequestId
    attempt: Count
    blocks: Count


class StageChunk(TaggedRecord, frozen=True):
    """The next chunk, with its hidden states at `entering`. Chunks are contiguous; the first begins behind the blocks that all
    stages reuse. The buffer of the chunk before the last one may be overwritten."""

    request_id: RequestId
    attempt: Count
    start: Count
    count: Count
    entering: Slots


MAX_PARTS: Final = 1 << 16
"""Parts, each a layer of a block, that one stage computes of a chunk."""


class StageDone(TaggedRecord, frozen=True):
    """Result of the chunk at `start`: KV of the stage's layers at `sources`, with the part checksums `parts` of one block
    after the other, and the hidden states at `outgoing`, or the token sampled."""

    request_id: RequestId
    attempt: Count
    start: Count
    sources: Slots
    parts: Annotated[tuple[Checksum, ...], Meta(max_length=MAX_PARTS)]
    outgoing: Slots = ()
    token: Token | None = None
    logprob: TokenLogprob | None = None
    others: Annotated[tuple[Sampled, ...], Meta(max_length=MAX_CHOICES)] = ()
    """Tokens sampled with the other seeds."""


class StageFailed(TaggedRecord, frozen=True):
    """Failure of the stage, and with it of the attempt. `full`: there was only no room. `unreached`: reused blocks could not be
    loaded, and the next attempt should compute them. `stuck`: as in `AttemptFailed`."""

    request_id: RequestId
    attempt: Count
    reason: Text
    full: bool = False
    unreached: bool = False
    stuck: bool = False


class EndStage(TaggedRecord, frozen=True):
    """Request of the first stage to later ones to release everything of this attempt."""

    request_id: RequestId
    attempt: Count
