"""Messages between gateway and conductor that place requests."""

from enum import Enum
from typing import Annotated

from msgspec import Meta

from mooncake_zmq.core.messages.fields import (
    MAX_NODES,
    MAX_PRIORITY,
    Count,
    Keys,
    ModelName,
    Name,
    Priority,
    Record,
    RequestId,
    Seconds,
    Slo,
    TaggedRecord,
    Tenant,
)
from mooncake_zmq.core.messages.lending import Lenders
from mooncake_zmq.core.messages.sampling import MAX_CHOICES


class Schedule(TaggedRecord, frozen=True):
    """Request to place a request: the `keys` of its complete blocks, `tokens` in the prompt (and output so far)."""

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
    """Whether its client has received tokens: then it is no longer refused for its SLO, in any attempt."""
    waited_s: Seconds = 0.0
    """Time that its client has waited already: earlier attempts used up that much of `ttft_slo_s`."""
    choices: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    """Number of answers to this prompt, which is computed once; all of them run on one decode."""
    tenant: Tenant = ""
    adapter: ModelName = ""
    """Adapter with which a vLLM answers: only those that list it can."""
    kept_tokens: Count = 0
    """Number of `tokens` whose KV its decode is to hold, where that of the others is dropped; 0: all."""


class Placed(TaggedRecord, frozen=True):
    """Placement of a request on a prefill and a decode, or on a vLLM that is both. Up to `reuse_blocks` leading blocks are
    reused; those that the prefill's host lacks are at `sources`."""

    request_id: RequestId
    attempt: Count
    prefill: Name
    decode: Name
    reuse_blocks: Count
    sources: Annotated[tuple[Name, ...], Meta(max_length=16)]
    ttft_s: Seconds
    """Predicted time from this placement to the first token."""
    tbt_s: Seconds
    booking: Count = 0
    """The conductor's number for this placement, named again in the nodes' load reports; 0: none."""
    tbt_slo_s: Seconds = 0.0
    """Bound with which the decode compares its step once more when the prefill is done; 0: it does not."""
    stages: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    """Prefills that compute the later layers of a long prompt, in this order after `prefill`; none: that one computes them
    all."""
    coming_blocks: Count = 0
    """Number of leading reused blocks of which some are still being computed for another prompt: the prefill waits for them,
    for `coming_s` at most, or until a conductor's `WaitEnded`; 0: it does not wait."""
    coming_s: Seconds = 0.0
    least_priority: Priority = -MAX_PRIORITY
    """Earliest priority that the request may have: an earlier one would put it before requests that are late already."""
    lenders: Lenders = ()
    """Decodes that have room for the KV for which `decode` has none, in the order in which it asks them."""


class RejectReason(Enum):
    """Reason why a request was not placed."""

    TTFT = "ttft_slo"
    TBT = "tbt_slo"
    NO_PREFILL = "no_prefill"
    NO_DECODE = "no_decode"
    NO_ROOM = "no_room"
    """Decodes exist, but none has room for the KV of this request."""


class Rejected(TaggedRecord, frozen=True):
    """Rejection of a request that would miss its SLO or that no node can serve: HTTP 429 or 503 with Retry-After."""

    request_id: RequestId
    attempt: Count
    reason: RejectReason
    retry_after_s: Seconds
    predicted_s: Seconds = 0.0
    """Prediction that exceeds the request's SLO: its TBT, or its TTFT from its arrival on, with a margin where predictions have
    been too early; 0: it was another request's SLO."""


class Outcome(Record, frozen=True):
    """Result of an attempt, beside the predictions of its `Placed`."""

    ttft_s: Seconds
    """Time from the sending of `Schedule` to the first token's arrival."""
    predicted_ttft_s: Seconds
    tbt_s: Seconds
    """Mean of the longest tenth of the gaps between its tokens; 0 with fewer than two tokens."""
    predicted_tbt_s: Seconds
    max_tokens: Count
    """The value of its `Schedule`."""
    output_tokens: Count
    ended: bool
    """Whether the output ended by itself, so that its length is meaningful; else it was cut off."""


class RequestEnded(TaggedRecord, frozen=True):
    """Message from gateway to conductor to remove the booking of this attempt. `outcome`: that of an attempt with a token."""

    request_id: RequestId
    attempt: Count
    outcome: Outcome | None = None
    stalled: bool = False
    """Whether it ended because nothing arrived for too long."""


class NodesReported(TaggedRecord, frozen=True):
    """Message from conductor to gateways when a conversation begins and soon after each change: the cache-nodes that are up,
    the nodes of its configuration that are not up or whose blocks it does not have yet, and the nodes that accept nothing
    new."""

    cache_nodes: Annotated[tuple[Name, ...], Meta(max_length=MAX_NODES)] = ()
    missing: Annotated[tuple[Name, ...], Meta(max_length=MAX_NODES)] = ()
    cordoned: bool = False
    """Whether this conductor is cordoned: gateways use another one that is up and not cordoned, if there is any."""
    closed: Annotated[tuple[Name, ...], Meta(max_length=MAX_NODES)] = ()
    """Prefills, decodes and vLLMs that are up but get nothing new: they drain, their vLLM is gone, or requests there
    stalled."""
