"""Placing requests: gateway and conductor."""

from enum import Enum
from typing import Annotated

from msgspec import Meta

from mooncake_zmq.core.messages.fields import (
    MAX_NODES,
    MAX_PRIORITY,
    Count,
    Keys,
    Name,
    Priority,
    Record,
    RequestId,
    Seconds,
    Slo,
    TaggedRecord,
)
from mooncake_zmq.core.messages.sampling import MAX_CHOICES


class Schedule(TaggedRecord, frozen=True):
    """Place this request: `keys` of its complete blocks, `tokens` in the prompt (and output so far)."""

    request_id: RequestId
    attempt: Count
    keys: Keys
    tokens: Count
    max_tokens: Count
    exclude: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    ttft_slo_s: Slo = None
    tbt_slo_s: Slo = None
    priority: Priority = 0
    begun: bool = False
    """Its client holds tokens already: it is not refused for its SLO any more, at whatever attempt."""
    waited_s: Seconds = 0.0
    """How long its client has waited already: earlier attempts used up that much of `ttft_slo_s`."""
    choices: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    """Answers wanted to this prompt: it is computed once, and all of them run on one decode."""


class Placed(TaggedRecord, frozen=True):
    """Use this pair, or a vLLM that is both. Reuse up to `reuse_blocks` leading blocks; what the prefill's host misses is at
    `sources`."""

    request_id: RequestId
    attempt: Count
    prefill: Name
    decode: Name
    reuse_blocks: Count
    sources: Annotated[tuple[Name, ...], Meta(max_length=16)]
    ttft_s: Seconds
    """From this placement to the first token, as predicted."""
    tbt_s: Seconds
    booking: Count = 0
    """The conductor's number for this placement, named again in the nodes' load reports; 0: none."""
    tbt_slo_s: Seconds = 0.0
    """What the decode holds its step against once more when the prefill is done; 0: it does not."""
    stages: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    """Prefills that compute the later layers of a long prompt, in this order after `prefill`; none: it computes them all."""
    coming_blocks: Count = 0
    """Another prompt's computation makes the reused blocks up to this one, and is not through: the prefill waits for them, for
    `coming_s` at most, or until a conductor's `WaitEnded`; 0: nothing is waited for."""
    coming_s: Seconds = 0.0
    least_priority: Priority = -MAX_PRIORITY
    """Its own priority, where that is earlier, would take it before requests that are late already: it has this one."""


class RejectReason(Enum):
    """Why a request was not placed."""

    TTFT = "ttft_slo"
    TBT = "tbt_slo"
    NO_PREFILL = "no_prefill"
    NO_DECODE = "no_decode"
    NO_ROOM = "no_room"
    """There are decodes, but none has the KV for this request."""


class Rejected(TaggedRecord, frozen=True):
    """The request would miss its SLO, or no node can serve it: HTTP 429 or 503 with Retry-After."""

    request_id: RequestId
    attempt: Count
    reason: RejectReason
    retry_after_s: Seconds
    predicted_s: Seconds = 0.0
    """What was held against the SLO of one that would miss it: its TBT, or its TTFT from its arrival on, with time to spare
    where promises come late; 0: it was another's SLO."""


class Outcome(Record, frozen=True):
    """What became of an attempt, beside what its `Placed` said."""

    ttft_s: Seconds
    """From `Schedule` sent to the first token's arrival."""
    predicted_ttft_s: Seconds
    tbt_s: Seconds
    """Mean of the longest tenth of the gaps between its tokens; 0 with fewer than two tokens."""
    predicted_tbt_s: Seconds
    max_tokens: Count
    """As its `Schedule` said."""
    output_tokens: Count
    ended: bool
    """The output ended by itself, so that its length says something; else it was cut off."""


class RequestEnded(TaggedRecord, frozen=True):
    """Gateway -> conductor: forget the booking of this attempt. `outcome`: of one that brought a token."""

    request_id: RequestId
    attempt: Count
    outcome: Outcome | None = None
    stalled: bool = False
    """It ended because nothing came for too long."""


class NodesHeard(TaggedRecord, frozen=True):
    """Conductor -> gateways, when a conversation begins and soon after each change: the cache-nodes that it hears, those of the
    nodes named in its config that it does not hear yet, or whose blocks it was not told yet, and who takes nothing new."""

    cache_nodes: Annotated[tuple[Name, ...], Meta(max_length=MAX_NODES)] = ()
    missing: Annotated[tuple[Name, ...], Meta(max_length=MAX_NODES)] = ()
    resting: bool = False
    """Ask another conductor, if one lives that does not rest."""
    closed: Annotated[tuple[Name, ...], Meta(max_length=MAX_NODES)] = ()
    """Prefills, decodes and vLLMs that are there and are sent nothing new: they drain, their vLLM is gone, or requests there
    ended in silence."""
