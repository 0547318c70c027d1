"""The stages of one long prompt, between prefills. The first stage leads, and speaks with gateway and decode."""

from typing import Annotated

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
    """Compute layers `[first_layer, stop_layer)` of a prompt of `tokens` tokens, chunk by chunk as they are sent: make room for
    its KV, and get hold of the leading run of `keys`. The stage behind which no layer is left samples."""

    request_id: RequestId
    attempt: Count
    tokens: Count
    chunk_tokens: Count
    """In the longest chunk."""
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
    """Of further choices, for each of which a token is sampled too."""
    tenant: Tenant = ""


class StageReady(TaggedRecord, frozen=True):
    """Room is made; the KV of `blocks` leading blocks can be loaded here."""

    request_id: RequestId
    attempt: Count
    blocks: Count


class StageChunk(TaggedRecord, frozen=True):
    """The next chunk: its hidden states stand at `entering`. Chunks are contiguous; the first begins behind the blocks that all
    stages reuse. The buffer of the chunk before the last one may be overwritten."""

    request_id: RequestId
    attempt: Count
    start: Count
    count: Count
    entering: Slots


class StageDone(TaggedRecord, frozen=True):
    """The chunk at `start` is computed: KV of the stage's layers at `sources`, with the part checksums `parts` of one block
    after the other, and the hidden states at `leaving`, or the token sampled."""

    request_id: RequestId
    attempt: Count
    start: Count
    sources: Slots
    parts: Annotated[tuple[Checksum, ...], Meta(max_length=1 << 16)]
    leaving: Slots = ()
    token: Token | None = None
    logprob: TokenLogprob | None = None
    others: Annotated[tuple[Sampled, ...], Meta(max_length=MAX_CHOICES)] = ()
    """By the other seeds."""


class StageFailed(TaggedRecord, frozen=True):
    """The stage is over here, and with it the attempt. `full`: there was only no room. `unreached`: reused blocks were not
    reached, and the next attempt should compute them. `stuck`: as in `AttemptFailed`."""

    request_id: RequestId
    attempt: Count
    reason: Text
    full: bool = False
    unreached: bool = False
    stuck: bool = False


class EndStage(TaggedRecord, frozen=True):
    """First stage -> later ones: let go of everything of this attempt."""

    request_id: RequestId
    attempt: Count
