"""All long works that an actor can start, and their results. PURE data: an executor (live or simulated) carries them out.

Works of our own engine move or compute KV bytes. A failed read never raises in the actor: it is reported per block and is a
miss. Only a `corrupt` one means that the copy is bad: its bytes exist and are not what they should be. The others did not
arrive in time, were not where they should be, or no longer existed.
"""

import math

from msgspec import Struct, structs

from mooncake_zmq.core.messages import (
    CallRead,
    Embedding,
    End,
    Eviction,
    Image,
    LoanPlace,
    Parsers,
    Sampled,
    Sampling,
    SlotRef,
    StopRule,
    TokenLogprob,
)
from mooncake_zmq.core.selection import Selection
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.engine_events import EngineEvent
from mooncake_zmq.kv.object_record import ObjectRecord


class SlotGrant(Struct, frozen=True, gc=False):
    """Permission to write one slot of `node`'s segment while its generation is `generation` (odd)."""

    node: str
    incarnation: int
    slot: int
    generation: int


class BlockLoad(Struct, frozen=True, gc=False):
    """Copy of layers `[first_layer, stop_layer)` of `source` into block `block` of a sequence; its first `tokens` tokens count.

    A source with checksum 0 is still being written: verify the parts against the segment's part checksums alone, and
    accept its granted (odd) generation or the next (committed) one. Otherwise the generation must be equal and the part
    checksums must fold to `source.checksum`.
    """

    block: int
    source: SlotRef
    first_layer: int
    stop_layer: int
    tokens: int


class ReusedPart(Struct, frozen=True, gc=False):
    """KV of `tokens` tokens of a chunk from position `at` on, as it was computed from `computed_at` on behind other tokens. Its
    blocks are loaded with the chunk's prefix into the sequence, behind the prompt, from block `block` on."""

    at: int
    computed_at: int
    block: int
    tokens: int


class ComputeChunk(Struct, frozen=True):
    """Work of a prefill: run `tokens` (int32 bytes) at position `start` of `sequence`, whose blocks are `block_tokens` long.

    `prefix` are blocks to load just in time, layer by layer, before layer l first reads them. Each layer's new KV is copied to
    `outputs`, the slots of the blocks from `start` on, the last perhaps partial (`start` is a multiple of the block size).
    `sampling`: sample the next token, at position `start + len(tokens)`, or None while more chunks follow.
    """

    sequence: int
    start: int
    tokens: bytes
    prefix: tuple[BlockLoad, ...]
    outputs: tuple[SlotGrant, ...]
    sampling: Sampling | None
    prefix_s: float = math.inf
    """Time after the start when prefix blocks that are not loaded count as failed, as the lease on them may be over."""
    seeds: tuple[int, ...] = ()
    """Seeds of further samples, each used in place of the seed of `sampling`."""
    prompt_logprobs: int | None = None
    """Number of likeliest tokens whose logprobs are returned beside those of each token but the first, and of `following`."""
    following: bytes = b""
    """The token after the chunk (int32 bytes); empty if the prompt ends."""
    parts: tuple[ReusedPart, ...] = ()
    """KV reused behind other tokens, ascending and without overlap: what is computed is approximate if there is any."""
    again: float = 0.0
    """Share of the parts' tokens that are computed again."""
    eviction: Eviction | None = None
    """How few tokens of the whole prompt are kept: `outputs` hold these, and are of the last chunk alone. None: all."""

    @property
    def samplings(self) -> tuple[Sampling, ...]:
        """Sampling parameters of each choice; empty while more chunks follow."""
        if self.sampling is None:
            return ()
        return (self.sampling, *(structs.replace(self.sampling, seed=seed) for seed in self.seeds))


REPORT_EVERY_S = 0.02
"""Least interval of a chunk's progress reports; a shorter chunk reports its layers with its result. Each report takes the
interpreter's lock from the computation for a moment."""


class LayersComputed(Struct, frozen=True, gc=False):
    """Progress of `ComputeChunk`: layers below `stop_layer` of every output slot are written, with their part checksums.
    Once the chunk has ended all are, whether that was reported or not."""

    stop_layer: int


class ChunkComputed(Struct, frozen=True):
    """Result of `ComputeChunk`. `checksums`: one per output block. `failed`: prefix blocks that were not loaded; then nothing
    else is valid."""

    checksums: tuple[int, ...]
    token: int | None
    """The sampled token. None while more chunks follow, and if its constraint's mask is not ready in time: then `SampleTokens`
    samples it."""
    elapsed_s: float
    failed: tuple[int, ...] = ()
    corrupt: tuple[int, ...] = ()
    """Blocks of `failed` whose bytes did not verify."""
    loaded_s: float = 0.0
    """Time from the start until the last block of the prefix was loaded, if the engine knows."""
    waited_s: float = 0.0
    """Part of `elapsed_s` in which computing waited for the prefix."""
    logprob: TokenLogprob | None = None
    others: tuple[Sampled, ...] = ()
    """Tokens sampled with the other seeds."""
    scored: tuple[TokenLogprob, ...] = ()
    """Logprobs of the prompt's tokens, from the chunk's second token on."""
    recomputed: int = 0
    """Tokens of the parts that were computed again."""


class ComputeStage(Struct, frozen=True):
    """Work of a prefill in a pipeline: run layers `[first_layer, stop_layer)` of a chunk of `count` tokens. Only the KV of
    these layers is read, stored and copied to the chunk's `outputs`.

    `chunk.tokens` enter the first stage and are empty in the others: these take the hidden states from the slots `entering`,
    one row after the other, as opaque bytes under the part checksums of their slots. The stage's own hidden states are written
    to `outgoing` alike; the last stage writes none, and samples.
    """

    chunk: ComputeChunk
    count: int
    first_layer: int
    stop_layer: int
    entering: tuple[SlotRef, ...] = ()
    outgoing: tuple[SlotGrant, ...] = ()

    @property
    def sequence(self) -> int:
        """The sequence that the KV belongs to."""
        return self.chunk.sequence

    @property
    def layers(self) -> range:
        """The layers computed here."""
        return range(self.first_layer, self.stop_layer)


class StageComputed(Struct, frozen=True):
    """Result of `ComputeStage`. `parts`: the part checksums of the stage's layers, one output block after the other. The other
    fields are as in `ChunkComputed`; `waited_s` includes the wait for the hidden states."""

    parts: tuple[int, ...]
    token: int | None
    elapsed_s: float
    failed: tuple[int, ...] = ()
    corrupt: tuple[int, ...] = ()
    loaded_s: float = 0.0
    waited_s: float = 0.0
    logprob: TokenLogprob | None = None
    others: tuple[Sampled, ...] = ()


class PullBlocks(Struct, frozen=True):
    """Work of a decode: copy blocks, or single layers of them, into a sequence's KV, from shared memory or over the network."""

    sequence: int
    loads: tuple[BlockLoad, ...]


class BlocksPulled(Struct, frozen=True):
    """Result of `PullBlocks`. `parts`: (block, layer, part checksum) of all that arrived and verified. `failed`: the other
    blocks."""

    parts: tuple[tuple[int, int, int], ...]
    failed: tuple[int, ...]
    corrupt: tuple[int, ...] = ()
    """Blocks of `failed` whose bytes did not verify."""


class ForkSequence(Struct, frozen=True):
    """Work of a decode: copy the KV of a sequence's first `tokens` tokens into others, which may be fed later tokens
    meanwhile."""

    source: int
    targets: tuple[int, ...]
    tokens: int


class SequenceForked(Struct, frozen=True):
    """Result of `ForkSequence`: all of them hold the KV, except those `without_memory`."""

    without_memory: tuple[int, ...] = ()


class SampleTokens(Struct, frozen=True):
    """Work that samples from the logits that the last work on the sequence `logits_of` left unsampled, as soon as the
    constraint's mask is ready. The sequence may be closed meanwhile, as its KV is not needed."""

    logits_of: int


class TokensSampled(Struct, frozen=True):
    """Result of `SampleTokens`: one token for each seed of the earlier work."""

    sampled: tuple[Sampled, ...]


class StepEntry(Struct, frozen=True, gc=False):
    """Entry of a step: feed `token` at `position` and sample the one for `position + 1`. The step waits for its constraint's
    mask for at most `mask_s` after everything else is computed."""

    sequence: int
    token: int
    position: int
    sampling: Sampling
    mask_s: float = 0.0
    selection: Selection | None = None
    """How the tokens to attend to are chosen of more; None: all are attended to. Once a sequence has one, it keeps it, and what
    is computed from then on is approximate and not in the sequence's KV."""


class DecodeStep(Struct, frozen=True):
    """Up to `steps` steps of the continuous batch, with the same members: each feeds the tokens that the one before it sampled.

    More than one step is for engines whose tokens are not observed one by one. `CancelWork` ends it before its next step, with
    the tokens so far, so that a request that became ready need not wait.
    """

    entries: tuple[StepEntry, ...]
    steps: int = 1
    lenders_s: float = 0.0
    """How long each step waits for lenders in all; it goes on without the entries of whose KV one has not answered then."""


class StepDecoded(Struct, frozen=True):
    """Result of `DecodeStep`: for each step made, at least one, a token per entry, in order. `elapsed_s`: time of all steps."""

    tokens: tuple[tuple[int, ...], ...]
    elapsed_s: float
    logprobs: tuple[tuple[TokenLogprob | None, ...], ...] = ()
    """Logprobs in the same order; empty if no entry requests them."""
    failed: tuple[tuple[int, "WorkFailed"], ...] = ()
    """Entries, by their indices, whose answers cannot follow their constraints, or of whose KV a lender was lost, and why: they
    have no valid token of the last step."""
    sat_out: tuple[int, ...] = ()
    """Indices of entries whose constraint's mask was not ready in time. They have no valid token of the last step either:
    `SampleTokens` samples it."""
    late: tuple[tuple[int, str], ...] = ()
    """Entries, by their indices, of whose KV a lender did not answer in time, and that lender: a further step may make it."""


class LendSequence(Struct, frozen=True):
    """Attend to a sequence, all of which counts, for another decode."""

    sequence: int


class SequenceLent(Struct, frozen=True):
    """Result of `LendSequence`."""

    place: LoanPlace


class TakeBack(Struct, frozen=True):
    """Attend to a sequence no more: once this is `Done`, no query reads it."""

    sequence: int


class LentPart(Struct, frozen=True):
    """The next `tokens` leading tokens of a sequence, which a lender holds."""

    lender: str
    place: LoanPlace
    tokens: int


class BorrowParts(Struct, frozen=True):
    """Connect a sequence with all that lenders hold of it, in order; its own KV begins behind that."""

    sequence: int
    parts: tuple[LentPart, ...]


class SequenceBlock(Struct, frozen=True, gc=False):
    """Block `block` (complete) of a running sequence, as a source."""

    sequence: int
    block: int


class DiskBlock(Struct, frozen=True, gc=False):
    """The copy of block `key` in slot `slot` of this node's own SSD tier, to be read or written."""

    slot: int
    key: Key
    checksum: int
    parent: Key | None = None
    tokens: bytes = b""
    """Tokens of the block if known, also after a restart; only KV events depend on them."""
    tenant: str = ""
    """Tenant that owns the block, also after a restart."""


class CopyBlocks(Struct, frozen=True):
    """Copy whole blocks into granted slots: pool puts (from a sequence or the own slab), fetches from another host, and
    promotions from the own SSD tier.

    Checked before and after: the source as in `BlockLoad`; the target's generation must still be the granted one. A block
    that is read from disk must have the key and fold to the checksum of its `DiskBlock`.
    """

    copies: tuple[tuple[SlotRef | SequenceBlock | DiskBlock, SlotGrant], ...]


class BlocksCopied(Struct, frozen=True):
    """Result of `CopyBlocks`: the checksum of each target's content, or None if its copy failed."""

    checksums: tuple[int | None, ...]
    corrupt: tuple[int, ...] = ()
    """Indices of the failed copies whose bytes did not verify. A disk copy that did not is not found again after a restart."""
    fault: str = ""
    """Reason why the disk is no longer used for reads; empty while it works."""


class WriteToDisk(Struct, frozen=True):
    """Demote: write committed blocks of the own segment to the SSD tier, each with its key and checksum, and index them so
    that they are found again after a restart. The former content of a target slot is lost as soon as this starts. The sources
    need no pin: one that is evicted meanwhile, as its generation shows, is not written. `is_probe`: the disk has failed, and
    works again if all of this succeeds."""

    blocks: tuple[tuple[SlotRef, DiskBlock], ...]
    is_probe: bool = False


class DiskWritten(Struct, frozen=True):
    """Result of `WriteToDisk`: whether each block is on disk and indexed."""

    written: tuple[bool, ...]
    fault: str = ""
    """Reason why nothing more can be written (full, read-only, failing); empty while it works."""
    corrupt: tuple[int, ...] = ()
    """Indices of blocks whose bytes in memory did not verify."""


class Generate(Struct, frozen=True):
    """Work of the engine beside this node: continue from `tokens` (int32 bytes), of which the last `count` are output, until
    `stop` ends it, with the `adapter` if one is named. Only requests of the same `root`, which covers the adapter, share its
    cache. Reused KV may be at the cache-nodes `sources`; that of `coming_tokens` is there, or will soon be. Without a token for
    `quiet_s` it has failed. `prompt_likeliest`: the number of likeliest tokens whose logprobs are computed for each of `tokens`
    but the first, beside its own, before the answer; None: no logprobs of the prompt. `images`: those in `tokens`, in order."""

    tokens: bytes
    count: int
    root: Key
    sampling: Sampling
    stop: StopRule
    sources: tuple[str, ...] = ()
    quiet_s: float = math.inf
    coming_tokens: int = 0
    adapter: str = ""
    prompt_likeliest: int | None = None
    images: tuple[Image, ...] = ()


class PromptScoresGenerated(Struct, frozen=True):
    """Progress of `Generate`: logprobs of the prompt's tokens from position `first` on, in order, before any token; MAX_SCORED
    at most."""

    first: int
    logprobs: tuple[TokenLogprob, ...]


class TokensGenerated(Struct, frozen=True, gc=False):
    """Progress of `Generate`: the next tokens, with their logprobs if the request has them."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Generated(Struct, frozen=True):
    """Result of `Generate`: it ended by itself, with these last tokens, at least one. `reused`: leading tokens whose KV was not
    computed."""

    tokens: tuple[int, ...]
    reused: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    """Those of the tokens, if the request has them."""
    versions: tuple[tuple[str, int], ...] = ()
    """Versions of the weights that made all tokens of the work, each with the number of tokens before it, as far as the engine
    reports them."""


class Embed(Struct, frozen=True):
    """Work of the engine beside this node: a vector for each text of `embedding`, which stand in `tokens` (int32 bytes) one
    after the other. Only requests of the same `root` share its cache. Without an answer for `quiet_s` it has failed."""

    tokens: bytes
    embedding: Embedding
    root: Key
    adapter: str = ""
    quiet_s: float = math.inf


class Embedded(Struct, frozen=True):
    """Result of `Embed`: the vectors of all texts, as in `TextsEmbedded`."""

    vectors: bytes


class WatchEngine(Struct, frozen=True):
    """Work that reports, until cancelled, which blocks the engine beside this node stores and removes."""


class EngineReported(Struct, frozen=True):
    """Progress of `WatchEngine`: the engine's events in their order."""

    events: tuple[EngineEvent, ...]


class ProbeEngine(Struct, frozen=True):
    """Work that checks whether the engine beside this node answers; with `generate`, whether it generates a token, or embeds
    one if that is what its model does; with `parsers`, which parsers it was started with."""

    generate: bool = False
    parsers: bool = False


class EngineProbed(Struct, frozen=True):
    """Result of `ProbeEngine`. `reason`: why it is not ready. `adapters`: the names of adapters that it lists; None: not
    known. `parsers`: those that it was started with; None: not asked, or not known."""

    ready: bool
    reason: str = ""
    adapters: tuple[str, ...] | None = None
    parsers: Parsers | None = None


class ReadTokens(Struct, frozen=True):
    """Work of the engine beside this node: its parsers read the next tokens of an answer. The fields are those of
    `ReadAnswer`."""

    chat: bytes
    prompt: bytes
    tokens: bytes
    state: bytes = b""
    end: End = ""
    whole: bool = False


class TokensRead(Struct, frozen=True):
    """Result of `ReadTokens`. The fields are those of `AnswerRead`."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[CallRead, ...] = ()
    state: bytes = b""


class WriteChat(Struct, frozen=True):
    """Work of the engine beside this node: it writes a chat with images as tokens. The fields are those of `RenderChat`."""

    chat: bytes


class ChatWritten(Struct, frozen=True):
    """Result of `WriteChat`. The fields are those of `ChatRendered`."""

    tokens: bytes
    images: tuple[Image, ...]


class ProbeProcess(Struct, frozen=True):
    """Work that checks whether `incarnation` of `node`, on this host, has ended, by its lock: the kernel drops that only
    then."""

    node: str
    incarnation: int


class ProcessProbed(Struct, frozen=True):
    alive: bool


class ReadValue(Struct, frozen=True, gc=False):
    """One value on disk, and the offset of the memory to which it is to be read."""

    key: str
    record: ObjectRecord
    offset: int


class ReadValues(Struct, frozen=True, gc=False):
    """Work of a store: read values into their cells, one after the other. Ends with `ValuesRead`."""

    values: tuple[ReadValue, ...]


class WrittenValue(Struct, frozen=True, gc=False):
    """One value to be written. The writer makes the checksum of its `record`."""

    key: str
    record: ObjectRecord
    offset: int


class WriteValues(Struct, frozen=True, gc=False):
    """Work of a store: write records that follow one another up to `end`. They cannot be found before their commit. Ends with
    `ValuesWritten`."""

    values: tuple[WrittenValue, ...]
    end: int


class CommitValues(Struct, frozen=True, gc=False):
    """Work of a store: make what was written last durable, and let it be found."""

    rows: tuple[tuple[str, ObjectRecord], ...]


class MoveValues(Struct, frozen=True, gc=False):
    """Work of a store: copy records to the newest segment, `(key, from, to)`, and let them be found there; forget those of
    `gone`, by sequence."""

    moved: tuple[tuple[str, ObjectRecord, ObjectRecord], ...]
    gone: tuple[int, ...]


class ForgetValues(Struct, frozen=True, gc=False):
    """Work of a store: forget records, by sequence, durably."""

    sequences: tuple[int, ...]


class CreateSegment(Struct, frozen=True, gc=False):
    """Work of a store: make a file with all its room."""

    segment: int
    length: int


class RemoveSegments(Struct, frozen=True, gc=False):
    """Work of a store: remove files, durably. `instead`: number of values that could not be forgotten otherwise, and come back
    if this fails too."""

    segments: tuple[int, ...]
    instead: int = 0


GOOD, BAD, BUSY, UNREAD = "good", "bad", "busy", "unread"
"""Outcomes of the read of one value. Bad: not what its record says; busy: the system could not read it now."""


class ValuesRead(Struct, frozen=True, gc=False):
    """Result of `ReadValues`: one of GOOD, BAD, BUSY and UNREAD for each value. `fault`: why the disk is not used any more."""

    outcomes: tuple[str, ...]
    fault: str = ""


class ValuesWritten(Struct, frozen=True, gc=False):
    """Result of `WriteValues`: the checksums of what stands on disk."""

    checksums: tuple[int, ...]


class Done(Struct, frozen=True, gc=False):
    """Result of a work that returns nothing."""


NO_FINITE_LOGITS = "the model computed no finite logits"
"""The reason in a failure of an answer for which the model has no next token."""


class WorkFailed(Struct, frozen=True):
    """Result of a work that failed as a whole or missed its deadline. `stuck`: it fails on every node, as the answer cannot
    follow its constraint, the model computes no token for it, does not embed so or takes no such image. `full`: the disk has
    no room. `avoid`: the lender that was lost."""

    reason: str
    stuck: bool = False
    full: bool = False
    avoid: str = ""


def lender_lost(name: str, reason: str) -> WorkFailed:
    """Return the result for a sequence of whose KV a lender was lost."""
    return WorkFailed(f"{name} was lost, which held a part of the KV: {reason}", avoid=name)


StoreWork = ReadValues | WriteValues | CommitValues | MoveValues | ForgetValues | CreateSegment | RemoveSegments
"""Works of a store's disk: one that changes it at a time, several that read."""
StoreResult = ValuesRead | ValuesWritten | Done | WorkFailed
VllmWork = Generate | Embed | ProbeEngine | ReadTokens | WriteChat | WatchEngine
"""Works of a node beside a vLLM."""
Work = (
    ComputeChunk
    | PullBlocks
    | DecodeStep
    | CopyBlocks
    | WriteToDisk
    | ProbeProcess
    | ComputeStage
    | VllmWork
    | ForkSequence
    | SampleTokens
    | LendSequence
    | TakeBack
    | BorrowParts
)
Progress = LayersComputed | PromptScoresGenerated | TokensGenerated | EngineReported
Result = (
    ChunkComputed
    | BlocksPulled
    | StepDecoded
    | BlocksCopied
    | DiskWritten
    | ProcessProbed
    | WorkFailed
    | StageComputed
    | Generated
    | Embedded
    | EngineProbed
    | TokensRead
    | ChatWritten
    | SequenceForked
    | TokensSampled
    | SequenceLent
    | Done
)
