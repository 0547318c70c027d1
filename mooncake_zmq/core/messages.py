"""Every message between actors: frozen, tagged, bounded; their `encode` and `decode` live only here.

The wire is MessagePack; types are checked on arrival. Messages name blocks and never carry a KV byte. They send durations,
never clock readings: a holder counts `ttl_s` from when it *sent* the request, the granter from when it handled it, so the
holder always stops first. Delivery (at most once, in order, within a conversation) is `core.session`'s work.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, structs

PROTOCOL_VERSION = 15
MAX_MESSAGE_BYTES = 4 << 20
MAX_BODIES = 64
"""Messages that one envelope may hold."""
MAX_BLOCKS = 16_384
"""Blocks one message may name; longer lists are split by the sender."""

Name = Annotated[str, Meta(min_length=1, max_length=64)]
Tenant = Annotated[str, Meta(max_length=64)]
"""Name of an API key, whose shares of the pools a request's blocks are charged to; empty: nobody's."""
MAX_TEXT = 512
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
Count = Annotated[int, Meta(ge=0, le=1 << 48)]
Counts = Annotated[tuple[Count, ...], Meta(max_length=MAX_BLOCKS)]
Checksum = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=1e7)]
Key = Annotated[bytes, Meta(min_length=16, max_length=16)]
Keys = Annotated[tuple[Key, ...], Meta(max_length=MAX_BLOCKS)]
Token = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
MAX_RUN = 4096
"""Tokens of one request that one message may bring."""
RunOfTokens = Annotated[tuple[Token, ...], Meta(max_length=MAX_RUN)]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
MAX_LOGPROBS = 20
"""Of the likeliest tokens at one position."""
Likeliest = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
MAX_SCORED = 1024
"""Tokens of a prompt of whose probabilities one message tells: a third of a MiB at most."""
LEAST_LOGPROB = -1e30
MAX_CONSTRAINT_BYTES = 96 << 10
Logprob = Annotated[float, Meta(ge=LEAST_LOGPROB, le=0)]
TokenLogprob = tuple[Logprob, Annotated[tuple[tuple[Token, Logprob], ...], Meta(max_length=MAX_LOGPROBS)]]
"""A token's logarithmic probability as the model gave it, and the likeliest tokens with theirs, in order."""
Slo = Annotated[float, Meta(ge=0, le=1e7)] | None
"""A bound in seconds; None: the deployment's own; 0: none."""
MAX_PRIORITY = 1000
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
"""A larger number waits longer, as in vLLM."""
MAX_NODES = 4096
"""Nodes that one message may name."""
MAX_TOKENS = 1 << 19
Tokens = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
"""Token ids as little-endian int32 bytes."""


class ProtocolError(Exception):
    """Bytes that are no message of ours: the peer's fault; drop and count."""


class _Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A part of a message."""


class Measured(_Record, frozen=True):
    """Recent work of one kind, older work counting less: what it took, and what the cost model says it takes. Both 0 if nothing
    was measured yet. Their ratio corrects the model for this node."""

    seconds: Seconds = 0.0
    predicted_s: Seconds = 0.0


class Sampling(_Record, frozen=True):
    """How to choose a token. Temperature 0 is greedy; top_k 0 and top_p 1 cut nothing. Randomness: (seed, position) alone."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: Seed = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Tokens with less than this share of the likeliest one's probability are cut."""
    presence_penalty: Penalty = 0.0
    """Off the logit of each token that the answer has."""
    frequency_penalty: Penalty = 0.0
    """Off it once more for each time."""
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    """By this the logits of tokens in prompt or answer are divided, or multiplied where negative."""
    logit_bias: Annotated[tuple[tuple[Token, Annotated[float, Meta(ge=-100, le=100)]], ...], Meta(max_length=1024)] = ()
    logprobs: Likeliest | None = None
    """Tell each token's logarithmic probability, and so many of the likeliest ones'. None: tell nothing."""
    prompt_tokens: Count = 0
    """Where the answer begins: the same in every attempt."""
    constraint: Annotated[bytes, Meta(max_length=MAX_CONSTRAINT_BYTES)] = b""
    """The grammar that the answer's text follows, as `engine.constraint` reads it; empty: none."""

    @property
    def penalizes(self) -> bool:
        """Do tokens count less where they stand already?"""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def reads_past(self) -> bool:
        """Does a choice depend on more of the tokens before it than their KV tells?"""
        return self.penalizes or bool(self.constraint)

    @property
    def past_from(self) -> int:
        """The first token that it depends on."""
        return 0 if self.repetition_penalty != 1.0 else self.prompt_tokens

    def past(self, tokens: bytes) -> bytes:
        """What it depends on, of a prompt and the answer so far (int32 bytes)."""
        return tokens[4 * self.past_from :] if self.reads_past else b""

    def fits(self, past: bytes, tokens: int) -> bool:
        """Can this be the past of `tokens` tokens?"""
        wanted = tokens - self.past_from if self.reads_past else 0
        return self.prompt_tokens <= tokens and len(past) == 4 * wanted

    @property
    def largest_token(self) -> int:
        """Of those it names."""
        return max((token for token, _ in self.logit_bias), default=0)


def clip(reason: str) -> str:
    """A reason cut to what `Text` holds: one that quotes an exception or a peer's reason may be of any length."""
    return reason[:MAX_TEXT]


class StopRule(_Record, frozen=True):
    """When a request's tokens end; the one place that decides it, for gateway and decode alike."""

    max_tokens: Count
    min_tokens: Count = 0
    eos_ids: Annotated[tuple[Token, ...], Meta(max_length=64)] = ()

    def reason(self, token: int, count: int) -> str | None:
        """Finish reason after `count` output tokens, the last being `token`; None to go on."""
        if token in self.eos_ids and count > self.min_tokens:
            return "stop"
        return "length" if count >= self.max_tokens else None

    def cut(self, tokens: Sequence[int], count: int) -> tuple[int, bool]:
        """How many of `tokens`, sampled in a run after `count` output tokens, belong to the request, and whether they end it:
        what `reason` says of each, for all at once."""
        room = min(len(tokens), max(1, self.max_tokens - count))
        if self.eos_ids and not set(self.eos_ids).isdisjoint(tokens):
            for index in range(max(0, self.min_tokens - count), room):
                if tokens[index] in self.eos_ids:
                    return index + 1, True
        return room, room >= self.max_tokens - count


class Sibling(_Record, frozen=True):
    """A further choice for a prompt, a request of its own from its first token on: it differs in its seed alone."""

    request_id: RequestId
    attempt: Count
    seed: Seed


MAX_CHOICES = 128
Siblings = Annotated[tuple[Sibling, ...], Meta(max_length=MAX_CHOICES - 1)]
Sampled = tuple[Token, TokenLogprob | None]
"""A token that was chosen, and its probability if that is asked for."""


class SegmentRef(_Record, frozen=True):
    """Where a node's block slots can be read: a shared-memory file on its host, a data endpoint from elsewhere.

    Slots in GPU memory: the UUID of the `device` and the IPC `handle` of the whole slab, both empty for slots in the file.
    """

    path: Text
    endpoint: Text
    slots: Count
    device: Annotated[bytes, Meta(max_length=16)] = b""
    handle: Annotated[bytes, Meta(max_length=64)] = b""


class SlotRef(_Record, frozen=True):
    """One copy of a block for reading. Checksum 0: not committed yet, see `core.work.BlockLoad`."""

    node: Name
    incarnation: Count
    slot: Count
    generation: Count
    checksum: Checksum


Slots = Annotated[tuple[SlotRef, ...], Meta(max_length=MAX_BLOCKS)]


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True, tag=True, gc=False):
    """Base of all messages: encodes as `[tag, field, ...]`."""


Part = Literal["both", "prefill", "decode"]
"""What a vLLM does of the requests that it gets."""


class Hello(_Message, frozen=True):
    """The first message of every conversation. Fingerprints must be equal, or the peer is refused."""

    protocol: Count
    role: Name
    host: Name
    model: Text
    tokenizer: Text
    layout: Text
    segment: SegmentRef | None = None
    may_become: Annotated[str, Meta(max_length=64)] = ""
    """The role that a conductor may ask it to change to; empty: none."""
    part: Part = "both"
    """Of a vLLM: whether others go on with what it prefills, or it with what others do."""


# --- gateway <-> conductor


class Schedule(_Message, frozen=True):
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


class Placed(_Message, frozen=True):
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


class Rejected(_Message, frozen=True):
    """The request would miss its SLO, or no node can serve it: HTTP 429 or 503 with Retry-After."""

    request_id: RequestId
    attempt: Count
    reason: RejectReason
    retry_after_s: Seconds
    predicted_s: Seconds = 0.0
    """What was held against the SLO of one that would miss it: its TBT, or its TTFT from its arrival on, with time to spare
    where promises come late; 0: it was another's SLO."""


class Outcome(_Record, frozen=True):
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


class RequestEnded(_Message, frozen=True):
    """Gateway -> conductor: forget the booking of this attempt. `outcome`: of one that brought a token."""

    request_id: RequestId
    attempt: Count
    outcome: Outcome | None = None
    stalled: bool = False
    """It ended because nothing came for too long."""


class NodesHeard(_Message, frozen=True):
    """Conductor -> gateways, when a conversation begins and soon after each change: the cache-nodes that it hears, those of the
    nodes named in its config that it does not hear yet, or whose blocks it was not told yet, and who takes nothing new."""

    cache_nodes: Annotated[tuple[Name, ...], Meta(max_length=MAX_NODES)] = ()
    missing: Annotated[tuple[Name, ...], Meta(max_length=MAX_NODES)] = ()
    resting: bool = False
    """Ask another conductor, if one lives that does not rest."""
    closed: Annotated[tuple[Name, ...], Meta(max_length=MAX_NODES)] = ()
    """Prefills, decodes and vLLMs that are there and are sent nothing new: they drain, their vLLM is gone, or requests there
    ended in silence."""


# --- nodes -> conductor


class QueuedJob(_Record, frozen=True):
    """One job of a prefill: its rank (see `core.order`) counted from now, so mostly below 0, and the work left."""

    booking: Count
    rank_s: Annotated[float, Meta(ge=-1e9, le=1e9)]
    left_s: Seconds


MAX_REPORTED = 512
"""Jobs or requests that a load report names one by one."""


class PrefillLoad(_Message, frozen=True):
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


class DecodeLoad(_Message, frozen=True):
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


class SourceRate(_Record, frozen=True):
    """What fetching from one source takes a cache-node: `source` is another one, or empty for its own SSD."""

    source: Annotated[str, Meta(max_length=64)]
    block_s: Seconds
    """Seconds a block took lately; 0: not measured."""
    pending_blocks: Count
    """Asked for there and not here yet."""


class CacheLoad(_Message, frozen=True):
    """A cache-node's fetches, sent every report interval while there is something to tell (lossy)."""

    sources: Annotated[tuple[SourceRate, ...], Meta(max_length=256)]
    resting: bool = False
    """It serves nobody until it says otherwise; told at once, and whoever comes."""


class WaitEnded(_Message, frozen=True):
    """Conductor -> prefill: the blocks that the job of this placement waits for are at the cache-nodes `sources`; without any,
    they will not come: their computation ended early."""

    booking: Count
    sources: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()


class BlocksAnnounced(_Message, frozen=True):
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


# --- gateway <-> prefill


class StartPrefill(_Message, frozen=True):
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


class FirstToken(_Message, frozen=True):
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


class PromptScored(_Message, frozen=True):
    """Prefill -> gateway, before the first token: probabilities of the tokens from position `first` on, in order."""

    request_id: RequestId
    attempt: Count
    first: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    logprobs: Annotated[tuple[TokenLogprob, ...], Meta(max_length=MAX_SCORED)]


class AttemptFailed(_Message, frozen=True):
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


class CancelRequest(_Message, frozen=True):
    """Gateway -> prefill and decode: drop everything of this attempt and older ones."""

    request_id: RequestId
    attempt: Count


# --- prefill <-> decode


class ReserveDecode(_Message, frozen=True):
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


class DecodeReserved(_Message, frozen=True):
    """The decode undertakes to load the first `held_blocks` from its own host's pool; hand off the rest. Sent again with fewer
    where its pool does not get as many: the prefill hands off the difference too."""

    request_id: RequestId
    attempt: Count
    held_blocks: Count


class DecodeDenied(_Message, frozen=True):
    """This decode does not take the request. `full`: there is only no room now, or it drains. `refused`, `retry_after_s`: see
    `AttemptFailed`."""

    request_id: RequestId
    attempt: Count
    reason: Text
    full: bool
    refused: bool = False
    retry_after_s: Seconds = 0.0


class HandoffBlocks(_Message, frozen=True):
    """Blocks from `first_block` on can be read at `sources`, all layers now (`ready`) or each after its `LayersReady`. Of some
    layers alone if `stop_layer` is not 0: those that one stage of a pipeline computed, ready."""

    request_id: RequestId
    attempt: Count
    first_block: Count
    sources: Slots
    ready: bool
    first_layer: Count = 0
    stop_layer: Count = 0


class LayersReady(_Message, frozen=True):
    """Layers below `stop_layer` of the blocks announced at `first_block` are written."""

    request_id: RequestId
    attempt: Count
    first_block: Count
    stop_layer: Count


class HandoffDone(_Message, frozen=True):
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


class HandoffReceived(_Message, frozen=True):
    """Decode -> prefill: all bytes are here; slots and leases may go."""

    request_id: RequestId
    attempt: Count


class HandoffFailed(_Message, frozen=True):
    """Either side -> the other: this attempt is over; free what it holds."""

    request_id: RequestId
    attempt: Count
    reason: Text


# --- decode -> gateway


class DecodeAccount(_Record, frozen=True):
    """Where a request's time went at its decode, told with its last token."""

    request_id: RequestId
    attempt: Count
    handoff_s: Seconds
    """From its reservation until all KV was verified."""
    wait_s: Seconds
    """Until its first step."""
    decode_s: Seconds
    steps: Count


class TokensDecoded(_Message, frozen=True):
    """The tokens of one work, mostly of one step, for one gateway: (request_id, attempt, output index of the first, tokens)."""

    entries: Annotated[tuple[tuple[RequestId, Count, Count, RunOfTokens], ...], Meta(max_length=4096)]
    logprobs: Annotated[tuple[Annotated[tuple[TokenLogprob, ...], Meta(max_length=MAX_RUN)], ...], Meta(max_length=4096)] = ()
    """Of each entry's tokens, nothing of those that did not ask; empty where nobody did."""
    reused: Annotated[tuple[tuple[RequestId, Count, Count], ...], Meta(max_length=4096)] = ()
    """Of requests whose engine tells it with their last token alone, and so not in `FirstToken`: (request_id, attempt, tokens
    whose KV was not computed)."""
    accounts: Annotated[tuple[DecodeAccount, ...], Meta(max_length=4096)] = ()
    """Of requests that end with this."""


# --- clients of a cache-node: prefill, decode, other cache-nodes


class LeaseBlocks(_Message, frozen=True):
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


class BlocksLeased(_Message, frozen=True):
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


class RenewLease(_Message, frozen=True):
    """The holder still reads. Once `LeaseRenewed` confirms it, the lease lasts until `ttl_s` after this was sent."""

    lease_id: Count
    ttl_s: Seconds


class LeaseRenewed(_Message, frozen=True):
    """Confirms the oldest unconfirmed `RenewLease` of this lease; a lease that is gone is not confirmed."""

    lease_id: Count


class ReleaseLease(_Message, frozen=True):
    """The holder reads no more."""

    lease_id: Count


class ReserveSlots(_Message, frozen=True):
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


class GrantedSlot(_Record, frozen=True):
    """Write block `index` of the request into `slot` while its generation is `generation`."""

    index: Count
    slot: Count
    generation: Count


class SlotsReserved(_Message, frozen=True):
    """Granted slots. The other keys exist, are being written (dedup), or found no room or a limit."""

    put_id: Count
    grants: Annotated[tuple[GrantedSlot, ...], Meta(max_length=MAX_BLOCKS)]


class CommitSlots(_Message, frozen=True):
    """Second phase: (index, checksum) of the blocks written; every other grant of the put is given back."""

    put_id: Count
    checksums: Annotated[tuple[tuple[Count, Checksum], ...], Meta(max_length=MAX_BLOCKS)]


class ReclaimSlots(_Message, frozen=True):
    """Cache-node -> writer whose put ran past its ttl: answer `CommitSlots` (with nothing) as soon as no copy of it runs."""

    put_id: Count


class ChangeReplica(_Message, frozen=True):
    """Conductor -> cache-node: hold a copy of these blocks, fetched from `sources`; without sources: yours is one copy too
    many, let it be the first to go. A wish: a node without room or time leaves it."""

    keys: Keys
    sources: Annotated[tuple[Name, ...], Meta(max_length=16)]


class ChangeRole(_Message, frozen=True):
    """Conductor -> prefill or decode: take nothing new, finish the rest, then come back as `role`. Where that is not permitted,
    or the node ends already, nothing happens. Said twice it is as if said once."""

    role: Name


class ReportCorrupt(_Message, frozen=True):
    """These copies did not verify when read: forget them, so that they are misses."""

    slots: Slots


# --- prefill <-> prefill: the stages of one long prompt. The first stage leads, and speaks with gateway and decode.


class StartStage(_Message, frozen=True):
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


class StageReady(_Message, frozen=True):
    """Room is made; the KV of `blocks` leading blocks can be loaded here."""

    request_id: RequestId
    attempt: Count
    blocks: Count


class StageChunk(_Message, frozen=True):
    """The next chunk: its hidden states stand at `entering`. Chunks are contiguous; the first begins behind the blocks that all
    stages reuse. The buffer of the chunk before the last one may be overwritten."""

    request_id: RequestId
    attempt: Count
    start: Count
    count: Count
    entering: Slots


class StageDone(_Message, frozen=True):
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


class StageFailed(_Message, frozen=True):
    """The stage is over here, and with it the attempt. `full`: there was only no room. `unreached`: reused blocks were not
    reached, and the next attempt should compute them. `stuck`: as in `AttemptFailed`."""

    request_id: RequestId
    attempt: Count
    reason: Text
    full: bool = False
    unreached: bool = False
    stuck: bool = False


class EndStage(_Message, frozen=True):
    """First stage -> later ones: let go of everything of this attempt."""

    request_id: RequestId
    attempt: Count


# --- who looks on: answered by `core.node`, never by the actors

MAX_WATCH_S = 120.0
MAX_LEVELS = 512
"""Counters and gauges that one report may name."""
MAX_MOVES = 256
MAX_REFUSALS = 32
MAX_DUMP_BYTES = 1 << 20
Label = Annotated[str, Meta(min_length=1, max_length=160)]
MAX_LEVEL = 1e18
Levels = Annotated[tuple[tuple[Label, Annotated[float, Meta(ge=-MAX_LEVEL, le=MAX_LEVEL)]], ...], Meta(max_length=MAX_LEVELS)]
"""Counters or gauges by name, as `core.actor.Actor` names them."""


class Watch(_Message, frozen=True):
    """Gateway -> anybody: report now and each second, until `for_s` have passed since this came. Said again it lasts from
    then."""

    for_s: Annotated[float, Meta(gt=0, le=MAX_WATCH_S)]


class Moved(_Record, frozen=True):
    """KV that a node has moved in this life. `peer`: where from, of a `put` where to; empty: its own SSD."""

    kind: Annotated[str, Meta(min_length=1, max_length=16)]
    peer: Annotated[str, Meta(max_length=64)]
    bytes: Count


class Report(_Message, frozen=True):
    """How a node is, for those who watch it (lossy)."""

    uptime_s: Seconds
    draining: bool = False
    gauges: Levels = ()
    counts: Levels = ()
    moved: Annotated[tuple[Moved, ...], Meta(max_length=MAX_MOVES)] = ()
    refused: Annotated[tuple[tuple[Name, Text], ...], Meta(max_length=MAX_REFUSALS)] = ()
    """Peers that it does not talk with, and why."""
    left_off: Count = 0
    """Of all these, what a report has no room for."""
    resting: bool = False
    """It drains because an operator asked it to, and stays."""


class SetResting(_Message, frozen=True):
    """Gateway -> anybody: an operator wants you to accept nothing new, finish what you have and stay; or, not
    `resting`, to accept again. Reports tell of it. Said twice it is as if said once."""

    resting: bool


class AskState(_Message, frozen=True):
    """Gateway -> anybody: tell all of your state, once."""

    ask_id: Count


class StateTold(_Message, frozen=True):
    """The answer: JSON, or why there is none."""

    ask_id: Count
    state: Annotated[bytes, Meta(max_length=MAX_DUMP_BYTES)] = b""
    error: Text = ""


Message = (
    Hello
    | Schedule
    | Placed
    | Rejected
    | RequestEnded
    | PrefillLoad
    | DecodeLoad
    | CacheLoad
    | WaitEnded
    | BlocksAnnounced
    | StartPrefill
    | FirstToken
    | PromptScored
    | AttemptFailed
    | CancelRequest
    | ReserveDecode
    | DecodeReserved
    | DecodeDenied
    | HandoffBlocks
    | LayersReady
    | HandoffDone
    | HandoffReceived
    | HandoffFailed
    | TokensDecoded
    | LeaseBlocks
    | BlocksLeased
    | RenewLease
    | LeaseRenewed
    | ReleaseLease
    | ReserveSlots
    | SlotsReserved
    | CommitSlots
    | ReclaimSlots
    | ChangeReplica
    | ReportCorrupt
    | ChangeRole
    | StartStage
    | StageReady
    | StageChunk
    | StageDone
    | StageFailed
    | EndStage
    | NodesHeard
    | Watch
    | Report
    | AskState
    | StateTold
    | SetResting
)


class Envelope(_Record, frozen=True):
    """What one ZeroMQ frame holds: who speaks, in which conversation, and encoded messages, `sequence` being the first's; none
    is a ping.

    The fields' rules are told in `core.session`.
    """

    version: Count
    sender: Name
    incarnation: Count
    epoch: Count
    to_incarnation: Count
    floor: Count
    sequence: Count
    ack_epoch: Count
    ack: Count
    bodies: Annotated[tuple[Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)], ...], Meta(max_length=MAX_BODIES)] = ()
    late_ms: Count = 0
    """How late the sender's loop was recently."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message | Envelope) -> bytes:
    """MessagePack bytes of a message or an envelope."""
    packed = _encoder.encode(message)
    if len(packed) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(packed)} bytes exceeds {MAX_MESSAGE_BYTES}; split it")
    return packed


# Typed: a length is held against its field's limit before anything is allocated for it, and one pass is enough.
_NOT_OURS = (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError)
_message_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)


def decode(raw: bytes) -> Message:
    """The message in `raw`; raises ProtocolError, and nothing else, on any other bytes."""
    try:
        return _message_decoder.decode(raw)
    except _NOT_OURS as error:
        raise ProtocolError(f"not a message: {error}") from None


def decode_envelope(raw: bytes) -> Envelope:
    """The envelope in `raw`; raises ProtocolError, and nothing else, on any other bytes."""
    try:
        return _envelope_decoder.decode(raw)
    except _NOT_OURS as error:
        raise ProtocolError(f"not an envelope: {error}") from None
