"""A request between gateway, prefill and decode: prompt, handoff and tokens."""

from typing import Annotated, TypeVar

from msgspec import Meta, structs

from mooncake_zmq.core.messages.fields import (
    MAX_RUN,
    MAX_SCORED,
    MAX_TOKENS,
    Checksum,
    Count,
    Key,
    Keys,
    Likeliest,
    Name,
    Priority,
    Record,
    RequestId,
    RunOfTokens,
    Seconds,
    Slots,
    TaggedRecord,
    Tenant,
    Text,
    Token,
    TokenLogprob,
    Tokens,
)
from mooncake_zmq.core.messages.sampling import MAX_CHOICES, Sampling, Sibling, Siblings, StopRule


class StartPrefill(TaggedRecord, frozen=True):
    """Compute the KV of `tokens`, sample the token after them, hand off to `decode`.

    `first_index`: output index of the token to sample: 0, or more when the request resumes from its tokens so far.
    """

    request_id: RequestId
    attempt: Count
    tokens: Tokens
    root: Key
    """Namespace digest: the parent of the first block's key."""
    keys: Keys
    first_index: Count
    sampling: Sampling
    stop: StopRule
    decode: Name
    reuse_blocks: Count
    sources: Annotated[tuple[Name, ...], Meta(max_length=16)]
    deadline_s: Seconds
    booking: Count = 0
    priority: Priority = 0
    tbt_slo_s: Seconds = 0.0
    stages: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    """See `Placed`."""
    tenant: Tenant = ""
    siblings: Siblings = ()
    """Further choices: each is given a first token of its own, and a place at the decode."""
    prompt_logprobs: Likeliest | None = None
    """Tell the probability of each of `tokens` but the first, and so many of the likeliest ones' in its place. Nothing is
    reused then."""
    coming_blocks: Count = 0
    """See `Placed`, `coming_s` too."""
    coming_s: Seconds = 0.0
    conductor: Annotated[str, Meta(max_length=64)] = ""
    """The one that placed it, and ends such a wait; while it is down nothing is waited for."""
    gateway: Annotated[str, Meta(max_length=64)] = ""
    """Who asked, where a vLLM that prefilled passes the request on to its decode: with the first token, and its KV in the
    stores."""


class FirstToken(TaggedRecord, frozen=True):
    """Prefill -> gateway. `own`, `local`, `remote`: tokens whose KV was loaded and verified, by where it came from."""

    request_id: RequestId
    attempt: Count
    index: Count
    token: Token
    own: Count
    local: Count
    remote: Count
    queue_s: Seconds
    prefill_s: Seconds
    """From its turn in the queue to this token."""
    logprob: TokenLogprob | None = None
    prepare_s: Seconds = 0.0
    """Of that, until the engine began: lease, reservation, room."""
    load_s: Seconds = 0.0
    """From then until reused KV was loaded, beside computing."""


class PromptScored(TaggedRecord, frozen=True):
    """Prefill -> gateway, before the first token: probabilities of the tokens from position `first` on, in order."""

    request_id: RequestId
    attempt: Count
    first: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    logprobs: Annotated[tuple[TokenLogprob, ...], Meta(max_length=MAX_SCORED)]


class AttemptFailed(TaggedRecord, frozen=True):
    """Prefill or decode -> gateway: this attempt is over here; place the request again from its tokens so far.

    `full`: nothing broke, there was only no room. `avoid`: the node to keep away from, the sender if empty. `refused`: the
    decode would miss the request's TBT now that its prefill is done; a request without a token ends as if it had been rejected.
    `stuck`: its answer cannot follow its constraint, and no attempt will: the request ends.
    """

    request_id: RequestId
    attempt: Count
    reason: Text
    full: bool = False
    avoid: Annotated[str, Meta(max_length=64)] = ""
    refused: bool = False
    retry_after_s: Seconds = 0.0
    stuck: bool = False


class CancelRequest(TaggedRecord, frozen=True):
    """Gateway -> prefill and decode: drop everything of this attempt and older ones."""

    request_id: RequestId
    attempt: Count


class ReserveDecode(TaggedRecord, frozen=True):
    """Reserve KV for `tokens` prompt tokens and their output. `reuse_keys`: leading blocks that the prefill reuses, which the
    decode loads from its own host's pool as far as that has them or gets them from the cache-nodes `sources`."""

    request_id: RequestId
    attempt: Count
    gateway: Name
    tokens: Count
    reuse_keys: Keys
    last_key: Key
    """Key of the last complete prompt block, or the root: parent of the blocks that decode will complete."""
    tail: Tokens
    """Prompt tokens after the last complete block."""
    first_index: Count
    sampling: Sampling
    stop: StopRule
    deadline_s: Seconds
    booking: Count = 0
    tbt_slo_s: Seconds = 0.0
    """See `Placed`."""
    past: Tokens = b""
    """See `Sampling.past`: of the prompt tokens."""
    tenant: Tenant = ""
    siblings: Siblings = ()
    """Further choices that begin with the same KV, each with room of its own; those for which there is none go elsewhere."""
    sources: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    new_keys: Keys = ()
    """The complete blocks after `reuse_keys`, which the decode offers to its host's pool once it has them."""
    block_tokens: Tokens = b""
    """What the blocks of both hold, for KV events; empty: they are not offered."""


ForChoices = TypeVar("ForChoices", StartPrefill, ReserveDecode)


def for_sibling(message: ForChoices, sibling: Sibling) -> ForChoices:
    """The same for a further choice, by itself."""
    return structs.replace(
        message,
        request_id=sibling.request_id,
        attempt=sibling.attempt,
        sampling=structs.replace(message.sampling, seed=sibling.seed),
        siblings=(),
    )


class DecodeReserved(TaggedRecord, frozen=True):
    """The decode undertakes to load the first `held_blocks` from its own host's pool; hand off the rest. Sent again with fewer
    where its pool does not get as many: the prefill hands off the difference too."""

    request_id: RequestId
    attempt: Count
    held_blocks: Count


class DecodeDenied(TaggedRecord, frozen=True):
    """This decode does not take the request. `full`: there is only no room now, or it drains. `refused`, `retry_after_s`: see
    `AttemptFailed`."""

    request_id: RequestId
    attempt: Count
    reason: Text
    full: bool
    refused: bool = False
    retry_after_s: Seconds = 0.0


class HandoffBlocks(TaggedRecord, frozen=True):
    """Blocks from `first_block` on can be read at `sources`, all layers now (`ready`) or each after its `LayersReady`. Of some
    layers alone if `stop_layer` is not 0: those that one stage of a pipeline computed, ready."""

    request_id: RequestId
    attempt: Count
    first_block: Count
    sources: Slots
    ready: bool
    first_layer: Count = 0
    stop_layer: Count = 0


class LayersReady(TaggedRecord, frozen=True):
    """Layers below `stop_layer` of the blocks announced at `first_block` are written."""

    request_id: RequestId
    attempt: Count
    first_block: Count
    stop_layer: Count


class HandoffDone(TaggedRecord, frozen=True):
    """Everything is written. The handoff counts only if its last `blocks` blocks of `layers` layers fold to `checksum`. Sent
    again for more blocks where the decode got fewer from its pool than it had undertaken."""

    request_id: RequestId
    attempt: Count
    layers: Count
    blocks: Count
    checksum: Checksum
    """`block_checksum` over the block checksums of the blocks handed off, in order."""
    token: Token
    index: Count
    keys: Keys = ()
    """The last complete blocks, computed by a pipeline: no stage has all their layers, so the decode offers them to its
    pool."""
    parent: Key | None = None
    """The block before them; none: they begin the prompt."""
    block_tokens: Tokens = b""
    """What they hold, for KV events."""
    siblings: Annotated[tuple[tuple[RequestId, Token], ...], Meta(max_length=MAX_CHOICES)] = ()
    """The first tokens of the further choices that are still wanted."""
    wanted: bool = True
    """False: the first choice was cancelled, and there are only further ones. The decode may have heard of that too early."""


class HandoffReceived(TaggedRecord, frozen=True):
    """Decode -> prefill: all bytes are here; slots and leases may go."""

    request_id: RequestId
    attempt: Count


class HandoffFailed(TaggedRecord, frozen=True):
    """Either side -> the other: this attempt is over; free what it holds."""

    request_id: RequestId
    attempt: Count
    reason: Text


class DecodeTimes(Record, frozen=True):
    """Where a request's time went at its decode, told with its last token."""

    request_id: RequestId
    attempt: Count
    handoff_s: Seconds
    """From its reservation until all KV was verified."""
    wait_s: Seconds
    """Until its first step."""
    decode_s: Seconds
    steps: Count


class TokensDecoded(TaggedRecord, frozen=True):
    """The tokens of one work, mostly of one step, for one gateway: (request_id, attempt, output index of the first, tokens)."""

    entries: Annotated[tuple[tuple[RequestId, Count, Count, RunOfTokens], ...], Meta(max_length=4096)]
    logprobs: Annotated[tuple[Annotated[tuple[TokenLogprob, ...], Meta(max_length=MAX_RUN)], ...], Meta(max_length=4096)] = ()
    """Of each entry's tokens, nothing of those that did not ask; empty where nobody did."""
    reused: Annotated[tuple[tuple[RequestId, Count, Count], ...], Meta(max_length=4096)] = ()
    """Of requests whose engine tells it with their last token alone, and so not in `FirstToken`: (request_id, attempt, tokens
    whose KV was not computed)."""
    accounts: Annotated[tuple[DecodeTimes, ...], Meta(max_length=4096)] = ()
    """Of requests that end with this."""
