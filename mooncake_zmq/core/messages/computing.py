"""Messages of a request between gateway, prefill and decode: prompt, handoff and tokens."""

from typing import Annotated, Final, Literal, TypeVar

from msgspec import Meta, structs

from mooncake_zmq.core.messages.fields import (
    MAX_MESSAGE_BYTES,
    MAX_RUN,
    MAX_SCORED,
    MAX_TOKENS,
    MAX_WEIGHT_VERSIONS,
    Checksum,
    Count,
    Key,
    Keys,
    Likeliest,
    ModelName,
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
    WeightVersion,
)
from mooncake_zmq.core.messages.lending import Lenders
from mooncake_zmq.core.messages.rendering import Images
from mooncake_zmq.core.messages.sampling import MAX_CHOICES, Sampling, Sibling, Siblings, StopRule
from mooncake_zmq.core.selection import SINKS

MAX_TEXTS: Final = 64
"""Texts that one request may embed."""
MAX_VECTORS_BYTES: Final = 4 << 20
"""Bytes of the vectors of one request: 16,384 floats for each of the most texts."""


class Embedding(Record, frozen=True):
    """The texts for each of which a request asks for a vector, in place of tokens: `lengths` are their numbers of tokens, in
    order, and `dimensions` the numbers in a vector; 0: as many as the model gives."""

    lengths: Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_TOKENS)], ...], Meta(max_length=MAX_TEXTS)]
    dimensions: Annotated[int, Meta(ge=0, le=MAX_VECTORS_BYTES // 4)] = 0

    def has(self, vectors: bytes) -> bool:
        """Return whether these bytes are as many vectors as there are texts, of the dimensions that were asked for."""
        width, rest = divmod(len(vectors), max(1, 4 * len(self.lengths)))
        return not rest and width > 0 and self.dimensions in (0, width)


EvictionKind = Literal["elastic", "recent"]


class Eviction(Record, frozen=True):
    """How few tokens of a prompt a decode holds: `kept` of them, the first and the `last` ones among them, and of the others as
    `kind` says, see `engine.eviction.kept_tokens`."""

    kind: EvictionKind
    kept: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    last: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 1

    def behind(self, tokens: int) -> "Eviction":
        """Return how few are held of a prompt with so many tokens of its answer behind it, which all stay."""
        return Eviction(kind=self.kind, kept=self.kept + tokens, last=self.last + tokens)

    def fits(self, tokens: int) -> bool:
        """Return whether a prompt of so many tokens can be held so, and loses some of them."""
        return SINKS + self.last <= self.kept < tokens


class StartPrefill(TaggedRecord, frozen=True):
    """Request to compute the KV of `tokens`, sample the token after them and hand off to `decode`.

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
    """Further choices: each gets a first token and a place at the decode of its own."""
    prompt_logprobs: Likeliest | None = None
    """Number of likeliest tokens whose logprobs are returned for each of `tokens` but the first, beside its own. No KV is
    reused then. None: no logprobs."""
    coming_blocks: Count = 0
    """See `Placed`, also for `coming_s`."""
    coming_s: Seconds = 0.0
    conductor: Annotated[str, Meta(max_length=64)] = ""
    """The conductor that placed the request and ends such a wait; while it is down the prefill does not wait."""
    gateway: Annotated[str, Meta(max_length=64)] = ""
    """Gateway of the request, where a vLLM that prefilled passes the request on to its decode, with the first token and its KV
    in the stores."""
    adapter: ModelName = ""
    """The adapter of a vLLM with which the model answers, which `root` covers; empty: none."""
    embedding: Embedding | None = None
    """The texts in `tokens` that a vLLM embeds, with which the request ends; None: it generates."""
    images: Images = ()
    """The images in `tokens`, in order, each with its data URL, for a vLLM."""
    exact: bool = False
    """Whether the answer must not be approximate, as it is over KV of other prompts' parts."""
    lenders: Lenders = ()
    """See `Placed`."""
    eviction: Eviction | None = None
    """How few of `tokens` the decode is to hold; there are no keys then, as no KV of it is exact. None: it holds all."""


class FirstToken(TaggedRecord, frozen=True):
    """The first token, from prefill to gateway. `own`, `local`, `remote`: tokens whose KV was loaded and verified, by where it
    came from."""

    request_id: RequestId
    attempt: Count
    index: Count
    token: Token
    own: Count
    local: Count
    remote: Count
    queue_s: Seconds
    prefill_s: Seconds
    """Time from its turn in the queue to this token."""
    logprob: TokenLogprob | None = None
    prepare_s: Seconds = 0.0
    """Part of `prefill_s` until the engine began: lease, reservation, room."""
    load_s: Seconds = 0.0
    """Time from then until reused KV was loaded, concurrently with computing."""
    met: Count = 0
    """Tokens with KV elsewhere that were computed while KV after them was fetched."""
    parts: Count = 0
    """Tokens with KV of earlier prompts, computed behind other tokens: the answer is approximate if there are any."""
    recomputed: Count = 0
    """Tokens of these that were computed again."""
    dropped: Count = 0
    """Tokens whose KV the decode does not get: what follows is approximate if there are any."""


class PromptScored(TaggedRecord, frozen=True):
    """Logprobs of a prompt, from prefill to gateway before the first token: those of the tokens from position `first` on, in
    order."""

    request_id: RequestId
    attempt: Count
    first: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    logprobs: Annotated[tuple[TokenLogprob, ...], Meta(max_length=MAX_SCORED)]


class TextsEmbedded(TaggedRecord, frozen=True):
    """The vectors of all texts of a request, from vLLM to gateway, with which the request ends: little-endian float32 bytes,
    one after the other, of equal length. `queue_s`, `prefill_s`: as in `FirstToken`."""

    request_id: RequestId
    attempt: Count
    vectors: Annotated[bytes, Meta(min_length=4, max_length=MAX_VECTORS_BYTES)]
    queue_s: Seconds = 0.0
    prefill_s: Seconds = 0.0


class WeightsReported(TaggedRecord, frozen=True):
    """Versions of the weights that made a node's tokens of an attempt, from vLLM to gateway before the last one: (version,
    output index of the first token that they made), in order. `stop`: output index after the node's last token."""

    request_id: RequestId
    attempt: Count
    stop: Count
    versions: Annotated[tuple[tuple[WeightVersion, Count], ...], Meta(max_length=MAX_WEIGHT_VERSIONS)]


class AttemptFailed(TaggedRecord, frozen=True):
    """The end of this attempt at a prefill or decode, sent to the gateway, which places the request again from its tokens so
    far.

    `full`: nothing failed, there was only no room. `avoid`: the node to avoid, the sender if empty. `refused`: the decode would
    miss the request's TBT now that its prefill is done; a request without a token ends as if it had been rejected. `stuck`: no
    attempt can do what is asked: the answer cannot follow its constraint, the model does not embed so, or takes no such image.
    The request ends.
    """

    request_id: RequestId
    attempt: Count
    reason: Text
    full: bool = False
    avoid: Annotated[str, Meta(max_length=64)] = ""
    refused: bool = False
    retry_after_s: Seconds = 0.0
    stuck: bool = False


MAX_MOVED: Final = 4096
"""Attempts that one message asks to place elsewhere."""


class PlaceElsewhere(TaggedRecord, frozen=True):
    """Request of a draining node to a gateway to place these attempts, as (request_id, attempt), on other nodes. The node goes
    on with each until it is cancelled, and asks again for those that stay."""

    attempts: Annotated[tuple[tuple[RequestId, Count], ...], Meta(max_length=MAX_MOVED)]


class CancelRequest(TaggedRecord, frozen=True):
    """Request of the gateway to prefill and decode to drop everything of this attempt and older ones."""

    request_id: RequestId
    attempt: Count


MAX_RESERVE_BYTES: Final = MAX_MESSAGE_BYTES - (2 << 20)
"""Bytes that `past` and `block_tokens` of one `ReserveDecode` may have together: all else in it takes less than 2 MiB."""


class ReserveDecode(TaggedRecord, frozen=True):
    """Request to reserve KV for `tokens` prompt tokens and their output. `reuse_keys`: leading blocks that the prefill reuses;
    the decode loads them from its own host's pool if that has them or gets them from the cache-nodes `sources`."""

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
    """See `Sampling.past`, of the prompt tokens."""
    tenant: Tenant = ""
    siblings: Siblings = ()
    """Further choices that begin with the same KV, each with room of its own; those without room are placed elsewhere."""
    sources: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    new_keys: Keys = ()
    """Keys of the complete blocks after `reuse_keys`, which the decode offers to its host's pool once it has them."""
    block_tokens: Tokens = b""
    """Tokens of the blocks of both, for KV events; empty: the blocks are not offered, as those of a prompt that is too long to
    be here and in `past`."""
    lenders: Lenders = ()
    """See `Placed`."""
    approximate: bool = False
    """Whether the answer may be approximate."""
    kept_tokens: Count = 0
    """Number of `tokens` whose KV is handed off, where that of the others is dropped: nothing of it is exact then, or gets a
    key. 0: all."""

    @property
    def handed_tokens(self) -> int:
        """Number of `tokens` whose KV is handed off."""
        return self.kept_tokens or self.tokens


ForChoices = TypeVar("ForChoices", StartPrefill, ReserveDecode)


def for_sibling(message: ForChoices, sibling: Sibling) -> ForChoices:
    """Return the same message for a further choice by itself."""
    return structs.replace(
        message,
        request_id=sibling.request_id,
        attempt=sibling.attempt,
        sampling=structs.replace(message.sampling, seed=sibling.seed),
        siblings=(),
    )


class DecodeReserved(TaggedRecord, frozen=True):
    """Reply of the decode, which will load the first `held_blocks` from its own host's pool; the prefill hands off the rest.
    Sent again with fewer if its pool does not get as many: the prefill then hands off the difference too."""

    request_id: RequestId
    attempt: Count
    held_blocks: Count
    keeps: bool = False
    """Whether its host's pool will keep the prompt, so that the copies of the prefill's host are spare."""


class DecodeDenied(TaggedRecord, frozen=True):
    """Refusal of a request by a decode. `full`: there is only no room now, or it drains. `refused`, `retry_after_s`: see
    `AttemptFailed`."""

    request_id: RequestId
    attempt: Count
    reason: Text
    full: bool
    refused: bool = False
    retry_after_s: Seconds = 0.0


class HandoffBlocks(TaggedRecord, frozen=True):
    """Blocks from `first_block` on can be read at `sources`, all layers now (`ready`) or each after its `LayersReady`. If
    `stop_layer` is not 0, only the layers that one stage of a pipeline computed, ready."""

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
    """End of a handoff: everything is written. It is valid only if its last `blocks` blocks of `layers` layers fold to
    `checksum`. Sent again for more blocks if the decode got fewer from its pool than it had announced."""

    request_id: RequestId
    attempt: Count
    layers: Count
    blocks: Count
    checksum: Checksum
    """`block_checksum` over the block checksums of the blocks handed off, in order."""
    token: Token
    index: Count
    keys: Keys = ()
    """Keys of the last complete blocks, if a pipeline computed them: no stage has all their layers, so the decode offers them
    to its pool."""
    parent: Key | None = None
    """Key of the block before them; None: they begin the prompt."""
    block_tokens: Tokens = b""
    """Tokens of these blocks, for KV events."""
    siblings: Annotated[tuple[tuple[RequestId, Token], ...], Meta(max_length=MAX_CHOICES)] = ()
    """The first tokens of the further choices that are still wanted."""
    wanted: bool = True
    """False if the first choice was cancelled and only further ones remain. The decode may have received its cancellation too
    early."""
    exact_blocks: Count | None = None
    """Number of leading blocks whose KV is exact: what follows them, and is decoded behind them, gets no key. None: all."""


class HandoffReceived(TaggedRecord, frozen=True):
    """Message from decode to prefill that all bytes have arrived; slots and leases may be released."""

    request_id: RequestId
    attempt: Count


class HandoffFailed(TaggedRecord, frozen=True):
    """Message of either side to the other that this attempt is over; the receiver frees what it holds."""

    request_id: RequestId
    attempt: Count
    reason: Text


class DecodeTimes(Record, frozen=True):
    """Times of a request at its decode, sent with its last token."""

    request_id: RequestId
    attempt: Count
    handoff_s: Seconds
    """Time from its reservation until all KV was verified."""
    wait_s: Seconds
    """Time from then until its first step."""
    decode_s: Seconds
    steps: Count
    borrowed_tokens: Count = 0
    """Tokens whose KV other decodes held."""


class TokensDecoded(TaggedRecord, frozen=True):
    """The tokens of one work, mostly of one step, for one gateway: (request_id, attempt, output index of the first, tokens)."""

    entries: Annotated[tuple[tuple[RequestId, Count, Count, RunOfTokens], ...], Meta(max_length=4096)]
    logprobs: Annotated[tuple[Annotated[tuple[TokenLogprob, ...], Meta(max_length=MAX_RUN)], ...], Meta(max_length=4096)] = ()
    """Logprobs of each entry's tokens; an entry that did not request them has none, and without any request this is empty."""
    reused: Annotated[tuple[tuple[RequestId, Count, Count], ...], Meta(max_length=4096)] = ()
    """Reuse of requests whose engine reports it only with the last token, not in `FirstToken`: (request_id, attempt, tokens
    whose KV was not computed)."""
    times: Annotated[tuple[DecodeTimes, ...], Meta(max_length=4096)] = ()
    """Times of the requests that end with this message."""
    approximate: Annotated[tuple[tuple[RequestId, Count], ...], Meta(max_length=4096)] = ()
    """Requests whose answer is approximate from these tokens on, if not before: (request_id, attempt)."""
