"""Every long work an actor can ask for, and how it may end. PURE data: an executor (live or simulated) carries it out.

Those of our own engine move or make KV bytes. A failed read never raises in the actor: it is reported per block and is a
miss. Only a `corrupt` one says something about the copy that was read: its bytes are there and are not what its reader was
told. The others did not come in time, from where they were said to be, or no longer existed.
"""

import math

from msgspec import Struct, structs

from mooncake_zmq.core.messages import Sampled, Sampling, SlotRef, StopRule, TokenLogprob
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.engine_events import EngineEvent


class SlotGrant(Struct, frozen=True, gc=False):
    """Permission to write one slot of `node`'s segment while its generation is `generation` (odd)."""

    node: str
    incarnation: int
    slot: int
    generation: int


class BlockLoad(Struct, frozen=True, gc=False):
    """Copy layers `[first_layer, stop_layer)` of `source` into block `block` of a sequence; its first `tokens` tokens count.

    A source with checksum 0 is still being written: verify the parts against the segment's part checksums alone, and
    accept its granted (odd) generation or the next (committed) one. Otherwise the generation must be equal and the part
    checksums must fold to `source.checksum`.
    """

    block: int
    source: SlotRef
    first_layer: int
    stop_layer: int
    tokens: int


class ComputeChunk(Struct, frozen=True):
    """Prefill: run `tokens` (int32 bytes) at position `start` of `sequence`, whose blocks are `block_tokens` long.

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
    """What of the prefix is not loaded so long after the start has failed: the lease on it may be over."""
    seeds: tuple[int, ...] = ()
    """Sample as often more, by each of these in place of the seed of `sampling`."""
    prompt_logprobs: int | None = None
    """Tell the probability of each token but the first, and of the one in `following`, and so many of the likeliest ones'."""
    following: bytes = b""
    """The token after these (int32 bytes); empty where the prompt ends."""

    @property
    def samplings(self) -> tuple[Sampling, ...]:
        """Of each choice whose next token is sampled; none while more chunks follow."""
        if self.sampling is None:
            return ()
        return (self.sampling, *(structs.replace(self.sampling, seed=seed) for seed in self.seeds))


TOLD_EVERY_S = 0.02
"""A chunk's layers are told of at most this often, and those of a shorter one with its result: each time takes the
interpreter's lock from the computation for a moment."""


class LayersComputed(Struct, frozen=True, gc=False):
    """Progress of `ComputeChunk`: layers below `stop_layer` of every output slot are written, their part checksums set. Once it
    has ended all are, whether that was told before or not."""

    stop_layer: int


class ChunkComputed(Struct, frozen=True):
    """`checksums`: one per output block. `failed`: prefix blocks that were not loaded; then nothing else is valid."""

    checksums: tuple[int, ...]
    token: int | None
    """None while more chunks follow, and where it is not known in time what may come next: `SampleTokens` samples it then."""
    elapsed_s: float
    failed: tuple[int, ...] = ()
    corrupt: tuple[int, ...] = ()
    """Those of `failed` whose bytes did not verify."""
    loaded_s: float = 0.0
    """How long after the start the last of the prefix was loaded, if the engine knows."""
    waited_s: float = 0.0
    """Part of `elapsed_s` in which computing stood still for it."""
    logprob: TokenLogprob | None = None
    others: tuple[Sampled, ...] = ()
    """By the other seeds."""
    scored: tuple[TokenLogprob, ...] = ()
    """Of the prompt, from the chunk's second token on."""


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """The layers that stage `stage` of `stages` computes: all in order, numbers as equal as can be."""
    return range(layers * stage // stages, layers * (stage + 1) // stages)


class ComputeStage(Struct, frozen=True):
    """Prefill in a pipeline: run layers `[first_layer, stop_layer)` of a chunk of `count` tokens, whose KV alone is read,
    stored and copied to the chunk's `outputs`.

    `chunk.tokens` enter the first stage and are empty in the others: there the hidden states enter that stand in the slots
    `entering`, one row after the other, as opaque bytes under the part checksums of their slots. What leaves is written to
    `leaving` alike; the last stage has none, and samples.
    """

    chunk: ComputeChunk
    count: int
    first_layer: int
    stop_layer: int
    entering: tuple[SlotRef, ...] = ()
    leaving: tuple[SlotGrant, ...] = ()

    @property
    def sequence(self) -> int:
        """Whose KV this is."""
        return self.chunk.sequence

    @property
    def layers(self) -> range:
        """Those computed here."""
        return range(self.first_layer, self.stop_layer)


class StageComputed(Struct, frozen=True):
    """`parts`: the part checksums of the stage's layers, one output block after the other. The rest as of
    `ChunkComputed`, what was waited for the hidden states being part of `waited_s`."""

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
    """Decode: copy blocks, or single layers of them, into a sequence's KV, from shared memory or over the network."""

    sequence: int
    loads: tuple[BlockLoad, ...]


class BlocksPulled(Struct, frozen=True):
    """`parts`: (block, layer, part checksum) of all that arrived and verified. `failed`: blocks that did not."""

    parts: tuple[tuple[int, int, int], ...]
    failed: tuple[int, ...]
    corrupt: tuple[int, ...] = ()
    """Those of `failed` whose bytes did not verify."""


class ForkSequence(Struct, frozen=True):
    """Decode: copy the KV of the first `tokens` tokens of a sequence into others, which may be fed meanwhile behind them."""

    source: int
    targets: tuple[int, ...]
    tokens: int


class SequenceForked(Struct, frozen=True):
    """All of them hold it, but for those `without_memory`."""

    without_memory: tuple[int, ...] = ()


class SampleTokens(Struct, frozen=True):
    """Sample from what the last work on the sequence `logits_of` computed and did not sample, as soon as it is known what may
    come next. The sequence may be closed meanwhile: its KV is not needed."""

    logits_of: int


class TokensSampled(Struct, frozen=True):
    """A token by each of the seeds of that work."""

    sampled: tuple[Sampled, ...]


class StepEntry(Struct, frozen=True, gc=False):
    """Feed `token` at `position`; sample the one for `position + 1`. The step waits for what may come there for at most
    `mask_s`, counted from when all else is computed."""

    sequence: int
    token: int
    position: int
    sampling: Sampling
    mask_s: float = 0.0


class DecodeStep(Struct, frozen=True):
    """Up to `steps` steps of the continuous batch, with the same members: each feeds what the one before it sampled.

    More than one is for engines whose steps nobody watches token by token. `CancelWork` ends it at the next border between two
    steps, with what it has, so that a request that became ready need not wait.
    """

    entries: tuple[StepEntry, ...]
    steps: int = 1


class StepDecoded(Struct, frozen=True):
    """The sampled tokens: for each step made, at least one, a token per entry, in order. `elapsed_s`: of all the steps."""

    tokens: tuple[tuple[int, ...], ...]
    elapsed_s: float
    logprobs: tuple[tuple[TokenLogprob | None, ...], ...] = ()
    """Alike; empty where no entry asks."""
    failed: tuple[tuple[int, "WorkFailed"], ...] = ()
    """Entries, by their places, whose answers cannot follow their constraints, and why: their tokens of the last step are
    none."""
    sat_out: tuple[int, ...] = ()
    """Entries for which it was not known in time what may come next. Their tokens of the last step are none either:
    `SampleTokens` samples them."""


class SequenceBlock(Struct, frozen=True, gc=False):
    """Block `block` (complete) of a running sequence, as a source."""

    sequence: int
    block: int


class DiskBlock(Struct, frozen=True, gc=False):
    """The copy of block `key` in slot `slot` of this node's own SSD tier: what must be found there, or be written there."""

    slot: int
    key: Key
    checksum: int
    parent: Key | None = None
    tokens: bytes = b""
    """What is known of the block when it is written, and after a restart; nothing depends on it but KV events."""
    tenant: str = ""
    """Whose it is, after a restart too."""


class CopyBlocks(Struct, frozen=True):
    """Copy whole blocks into granted slots: pool puts (from a sequence or the own slab), fetches from another host, and
    promotions from the own SSD tier.

    Checked before and after: the source as `BlockLoad` tells; the target's generation must still be the granted one. What
    is read from disk must bear the key and fold to the checksum of its `DiskBlock`.
    """

    copies: tuple[tuple[SlotRef | SequenceBlock | DiskBlock, SlotGrant], ...]


class BlocksCopied(Struct, frozen=True):
    """Per copy: the checksum of what now stands in the target, or None if it failed."""

    checksums: tuple[int | None, ...]
    corrupt: tuple[int, ...] = ()
    """Indices of the failed copies whose bytes did not verify. A disk copy that did not is not found again after a restart."""
    fault: str = ""
    """Why the disk cannot be trusted with reads any more; empty while it works."""


class WriteToDisk(Struct, frozen=True):
    """Demote: write committed blocks of the own segment to the SSD tier, each with its key and checksum, and index them so
    that they are found again after a restart. What a target slot held before is gone from the moment this starts. The
    sources need no pin: one that is evicted meanwhile, told by its generation, is not written. `is_probe`: the disk failed,
    and if nothing of this does, it works again."""

    blocks: tuple[tuple[SlotRef, DiskBlock], ...]
    is_probe: bool = False


class DiskWritten(Struct, frozen=True):
    """Per block of `WriteToDisk`: does it stand on disk, indexed?"""

    written: tuple[bool, ...]
    fault: str = ""
    """Why nothing more can be written (full, read-only, failing); empty while it works."""
    corrupt: tuple[int, ...] = ()
    """Indices of blocks whose bytes in memory did not verify."""


class Generate(Struct, frozen=True):
    """Have the engine beside this node go on from `tokens` (int32 bytes) until `stop` ends it, `count` output tokens being
    among them. Its cache is shared by requests of the same `root` alone. What it reuses may stand at `sources`, cache-nodes;
    the KV of `coming_tokens` does, or will in a moment. No token for `quiet_s`: it has failed."""

    tokens: bytes
    count: int
    root: Key
    sampling: Sampling
    stop: StopRule
    sources: tuple[str, ...] = ()
    quiet_s: float = math.inf
    coming_tokens: int = 0


class TokensGenerated(Struct, frozen=True, gc=False):
    """Progress of `Generate`: the next tokens."""

    tokens: tuple[int, ...]


class Generated(Struct, frozen=True):
    """It ended by itself, with these last tokens, at least one. `reused`: tokens at the front whose KV was not computed."""

    tokens: tuple[int, ...]
    reused: int = 0


class WatchEngine(Struct, frozen=True):
    """Tell which blocks the engine beside this node comes to hold and lets go, until cancelled."""


class EngineTold(Struct, frozen=True):
    """Progress of `WatchEngine`: in the order in which it happened there."""

    events: tuple[EngineEvent, ...]


class ProbeEngine(Struct, frozen=True):
    """Does the engine beside this node answer? `generate`: by a token, which takes more than being there."""

    generate: bool = False


class EngineProbed(Struct, frozen=True):
    """`reason`: why not."""

    ready: bool
    reason: str = ""


class ProbeProcess(Struct, frozen=True):
    """Is the life `incarnation` of `node`, on this host, over? Answered by its lock: dropped by the kernel at death only."""

    node: str
    incarnation: int


class ProcessProbed(Struct, frozen=True):
    alive: bool


class WorkFailed(Struct, frozen=True):
    """The work as a whole did not happen, or not in time. `stuck`: the answer cannot follow its constraint, nor could it
    anywhere else."""

    reason: str
    stuck: bool = False


Work = (
    ComputeChunk
    | PullBlocks
    | DecodeStep
    | CopyBlocks
    | WriteToDisk
    | ProbeProcess
    | ComputeStage
    | Generate
    | ProbeEngine
    | WatchEngine
    | ForkSequence
    | SampleTokens
)
Progress = LayersComputed | TokensGenerated | EngineTold
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
    | EngineProbed
    | SequenceForked
    | TokensSampled
)
