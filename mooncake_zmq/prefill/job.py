"""One job of a prefill, and the table of its states. PURE."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mooncake_zmq.core.actor_parts import Named
from mooncake_zmq.core.messages import HandoffDone, Sibling, SlotRef, StartPrefill
from mooncake_zmq.core.work import BlockLoad, ReusedPart
from mooncake_zmq.kv.block_hash import Key
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.prefill.meeting import Meeting
from mooncake_zmq.prefill.pipeline import Group
from mooncake_zmq.prefill.slab import NO_SLOT


class Tokens(Protocol):
    """Token ids as int32 bytes. A replayed trace creates those of its prompts as they are read, so code compiled for `bytes`
    must not touch them: it uses the methods below."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> bytes: ...


def tokens_of(request: StartPrefill) -> Tokens:
    """Return the prompt and the output of earlier attempts."""
    return request.tokens


def are_known(request: StartPrefill, layout: BlockLayout) -> bool:
    """Return whether the model has all tokens of a request."""
    return layout.has_tokens(request.tokens)


class JobState(Named):
    """States of a job."""

    WAITING = "waiting"
    """Waiting for blocks that another prompt's computation creates; the job holds no place in the queue."""
    QUEUED = "queued"
    PREPARING = "preparing"
    """Waiting for the pool's lease, room in the slab, and, where needed, the decode's reservation."""
    GATHERING = "gathering"
    """Waiting for the other stages of its pipeline."""
    READY = "ready"
    """Waiting for its turn to compute the next chunk, or for blocks that are fetched from the last one on."""
    COMPUTING = "computing"
    TRAILING = "trailing"
    """Computed here, but not by the other stages of its pipeline."""
    SAMPLING = "sampling"
    """Computed, but the mask of the first token is not ready; the job holds no place and needs no turn."""
    HANDING_OFF = "handing off"
    """Computed; the decode is still reading."""
    ABANDONED = "abandoned"
    """The job ended, but a chunk in flight still writes its slots."""
    ENDED = "ended"


class JobEvent(Named):
    """Events that change the state of a job."""

    RELEASED = "release"
    ACTIVATED = "activate"
    GATHER = "gather"
    PREPARED = "prepared"
    CHUNK_BEGAN = "chunk"
    CHUNK_DONE = "chunk done"
    OWN_DONE = "own done"
    SET_ASIDE = "set aside"
    ALL_DONE = "all done"
    END = "end"


NEXT_STATE: dict[tuple[JobState, JobEvent], JobState] = {
    (JobState.WAITING, JobEvent.RELEASED): JobState.QUEUED,
    (JobState.QUEUED, JobEvent.ACTIVATED): JobState.PREPARING,
    (JobState.PREPARING, JobEvent.PREPARED): JobState.READY,
    (JobState.PREPARING, JobEvent.GATHER): JobState.GATHERING,
    (JobState.GATHERING, JobEvent.PREPARED): JobState.READY,
    (JobState.READY, JobEvent.CHUNK_BEGAN): JobState.COMPUTING,
    (JobState.COMPUTING, JobEvent.CHUNK_DONE): JobState.READY,
    (JobState.COMPUTING, JobEvent.OWN_DONE): JobState.TRAILING,
    (JobState.COMPUTING, JobEvent.ALL_DONE): JobState.HANDING_OFF,
    (JobState.COMPUTING, JobEvent.SET_ASIDE): JobState.SAMPLING,
    (JobState.SAMPLING, JobEvent.ALL_DONE): JobState.HANDING_OFF,
    (JobState.SAMPLING, JobEvent.END): JobState.ENDED,
    (JobState.TRAILING, JobEvent.ALL_DONE): JobState.HANDING_OFF,
    (JobState.HANDING_OFF, JobEvent.END): JobState.ENDED,
    (JobState.WAITING, JobEvent.END): JobState.ENDED,
    (JobState.QUEUED, JobEvent.END): JobState.ENDED,
    (JobState.PREPARING, JobEvent.END): JobState.ENDED,
    (JobState.GATHERING, JobEvent.END): JobState.ENDED,
    (JobState.READY, JobEvent.END): JobState.ENDED,
    (JobState.TRAILING, JobEvent.END): JobState.ENDED,
    (JobState.COMPUTING, JobEvent.END): JobState.ABANDONED,
    (JobState.ABANDONED, JobEvent.END): JobState.ENDED,
}


@dataclass(frozen=True, slots=True)
class Blend:
    """The end of a job that is computed over KV of parts, and so is approximate."""

    exact_blocks: int
    """The blocks before it, which are exact."""
    parts: tuple[ReusedPart, ...]
    loads: tuple[BlockLoad, ...]
    """The blocks of the parts, to be loaded behind the prompt's own."""
    slots: list[int]
    """Slab slots pinned for them, each as often as it is pinned."""

    @property
    def tokens(self) -> int:
        """The tokens of the parts."""
        return sum([part.tokens for part in self.parts])


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds by the cost model: of computing the next chunk (or the one in flight), of loading what it needs, and of
    computing everything after it."""

    compute_s: float
    load_s: float
    remaining_s: float


def choices_of(request: StartPrefill) -> tuple[Sibling, ...]:
    """Return the request itself and its siblings."""
    own = Sibling(request_id=request.request_id, attempt=request.attempt, seed=request.sampling.seed)
    return (own, *request.siblings)


def attempts_of(request: StartPrefill) -> dict[str, int]:
    """Return the attempts of all choices of a request, by request id."""
    return {choice.request_id: choice.attempt for choice in choices_of(request)}


@dataclass(slots=True)
class Job:
    """One attempt of one request, and everything that is held for it."""

    request: StartPrefill
    gateway: str
    order: int
    rank: float
    """Rank fixed at arrival, see `core.order`."""
    arrived_at: float
    state: JobState = JobState.QUEUED
    sequence: int | None = None
    computed: int = 0
    """Tokens whose KV is in the sequence, or will be loaded by the next chunk."""
    prefix: list[SlotRef] = field(default_factory=list)
    """Reused blocks, in order, not loaded yet or loaded by the first chunk."""
    loaded: bool = False
    own_slots: list[int] = field(default_factory=list)
    """Slab slots pinned as own hits."""
    new_slots: list[int] = field(default_factory=list)
    """Slab slots for the blocks after the prefix, the last perhaps partial. Where another job has computed a block in the
    meantime, it is that job's slot; none (`NO_SLOT`) for a block that is expected from the pool or came from there."""
    checksums: list[int] = field(default_factory=list)
    """Checksums of the blocks after the prefix, as far as they are computed."""
    found: list[BlockLoad] = field(default_factory=list)
    """Blocks after the prefix that another job computed here, or that were fetched, to be loaded by the next chunk."""
    found_blocks: int = 0
    """Number of all blocks of this job that another one computed here."""
    blend: Blend | None = None
    """The reuse of other prompts' KV, if there is any."""
    recomputed: int = 0
    """Tokens of these parts that were computed again."""
    meeting: Meeting | None = None
    """The blocks that are fetched for it while it computes, if any are."""
    lease_id: int | None = None
    leased: bool = False
    held_blocks: int | None = None
    """Blocks that the decode loads itself; None until its answer."""
    done: HandoffDone | None = None
    """The proof of completeness sent to the decode."""
    reserved: bool = False
    """The decode has confirmed the reservation."""
    spare: bool = False
    """The pool of the decode's host keeps the prompt, so the copies in this host's pool may go sooner."""
    computes_anew: bool = False
    """No block of its prompt may be reused from the pool."""
    local_blocks: int = 0
    remote_blocks: int = 0
    chunk_work: int = 0
    """The work that computes the chunk in flight."""
    chunk_first_block: int = 0
    chunk_stop: int = 0
    chunk_loads: tuple[BlockLoad, ...] = ()
    """Reused blocks that the chunk in flight loads."""
    chunk_reported_layers: int = 0
    """Layers of the current chunk already announced to the decode."""
    chunk_began_at: float = 0.0
    estimate: Estimate | None = None
    """Estimate of the remaining work; None when that has changed."""
    started_at: float = 0.0
    computing_at: float = 0.0
    """When its first chunk began."""
    load_s: float = 0.0
    """Seconds from then until its prefix was loaded."""
    sampling_id: int = 0
    """The work that samples its first tokens while it is set aside; else 0."""
    group: Group | None = None
    """The pipeline that computes it, if there is one."""
    choices: dict[str, int] = field(default_factory=dict)
    """Choices that are still needed, by request id, with their attempts."""
    waited: bool = False
    """It waited for blocks of another prompt, or would have."""
    sources: tuple[str, ...] = ()
    """Cache-nodes of other hosts that have reused blocks."""

    def __post_init__(self) -> None:
        self.choices = attempts_of(self.request)
        self.sources = self.request.sources

    @property
    def tenant(self) -> str:
        """Tenant of the request."""
        return self.request.tenant

    @property
    def is_begun(self) -> bool:
        """Whether reservation, lease or room were requested for it."""
        return self.state is not JobState.QUEUED and self.state is not JobState.WAITING

    @property
    def share(self) -> float:
        """Fraction of the model's layers that is computed here."""
        return self.group.share if self.group else 1.0

    @property
    def held_slots(self) -> list[int]:
        """Slab slots pinned for it, each as often as it is pinned."""
        new = self.new_slots if self.meeting is None else [slot for slot in self.new_slots if slot != NO_SLOT]
        return self.own_slots + new + (self.group.hidden.slots if self.group else []) + (self.blend.slots if self.blend else [])

    @property
    def blended_chunk(self) -> Blend | None:
        """The reuse of other prompts' KV by the chunk in flight, if there is any."""
        return self.blend if self.blend is not None and self.chunk_first_block == self.blend.exact_blocks else None

    @property
    def exact_blocks(self) -> int:
        """The leading complete blocks whose KV is exact: only those get their keys."""
        return len(self.request.keys) if self.blend is None else self.blend.exact_blocks

    @property
    def must_be_exact(self) -> bool:
        """Whether its KV may not be approximate as computed: it refuses that, needs every token's logits or attention, goes on
        with an answer, failed elsewhere or is computed by several prefills."""
        request = self.request
        again = request.attempt > 1 or request.first_index > 0
        whole = request.prompt_logprobs is not None or request.eviction is not None or self.group is not None
        return request.exact or again or whole

    def computes(self, block: int, key: Key) -> bool:
        """Return whether it is decided that it computes this block exactly, for which it does not wait itself."""
        request, decided = self.request, self.must_be_exact or self.sequence is not None
        waits = self.state is JobState.WAITING and block < request.coming_blocks
        return decided and not waits and block < self.exact_blocks and request.keys[block] == key

    def cut_prefix(self, blocks: int) -> list[int]:
        """Reuse at most the first `blocks` and return the own slots that are no longer reused. Fetched blocks come last in
        the prefix."""
        cut = len(self.prefix) - max(blocks, len(self.own_slots))
        fetched = max(0, min(cut, self.remote_blocks))
        self.remote_blocks -= fetched
        self.local_blocks -= max(0, cut) - fetched
        unused = self.own_slots[blocks:]
        del self.own_slots[blocks:]
        del self.prefix[blocks:]
        return unused

    def reuse_computed(
        self, first: int, place: int, slots: Sequence[int], refs: Sequence[SlotRef], layout: BlockLayout
    ) -> None:
        """Reuse blocks from index `first` on that another job computed into `slots` (pinned for this job), in place of the
        reserved slots from `place` on."""
        self.new_slots[place : place + len(slots)] = slots
        self.found_blocks += len(slots)
        self.load(first, refs, layout)

    def load(self, first: int, refs: Sequence[SlotRef], layout: BlockLayout) -> None:
        """Load these blocks from index `first` on with the next chunk, instead of computing them."""
        self.checksums += [ref.checksum for ref in refs]
        self.found += [BlockLoad(block, ref, 0, layout.layers, layout.block_tokens) for block, ref in enumerate(refs, first)]
        self.computed = (first + len(refs)) * layout.block_tokens
        self.estimate = None

    @property
    def tokens(self) -> Tokens:
        """Tokens of its request."""
        return self.request.tokens

    @property
    def past(self) -> bytes:
        """State that its sampling depends on."""
        return self.request.sampling.past(self.request.tokens)

    @property
    def length(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.tokens) // 4

    @property
    def handed_tokens(self) -> int:
        """Number of prompt tokens whose KV the decode gets."""
        eviction = self.request.eviction
        return self.length if eviction is None else eviction.kept

    @property
    def hands_off_chunk(self) -> bool:
        """Whether KV of the chunk in flight is handed off: of a prompt that is evicted, behind its last chunk."""
        return self.request.eviction is None or self.chunk_stop == self.length
