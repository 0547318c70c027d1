"""One job of a prefill and the table of its life. PURE."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mooncake_zmq.core.messages import HandoffDone, Sibling, SlotRef, StartPrefill
from mooncake_zmq.core.shell import Named
from mooncake_zmq.core.work import BlockLoad
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.prefill.pipeline import Group


class Tokens(Protocol):
    """Token ids as int32 bytes. A replayed trace makes those of its prompts as they are read, so code that was compiled for
    `bytes` must not touch them: it reads them by what is here."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> bytes: ...


def tokens_of(request: StartPrefill) -> Tokens:
    """Its prompt, and the output of earlier attempts."""
    return request.tokens


def are_known(request: StartPrefill, layout: BlockLayout) -> bool:
    """Does the model have all tokens of a request?"""
    return layout.has_tokens(request.tokens)


class JobState(Named):
    """Life of a job."""

    WAITING = "waiting"
    """For blocks that another prompt's computation makes: it holds no place in the queue."""
    QUEUED = "queued"
    PREPARING = "preparing"
    """Waiting for the pool's lease, room in the slab, and the decode's reservation, if that is not only on its way."""
    GATHERING = "gathering"
    """Of a pipeline: waiting for its other stages."""
    READY = "ready"
    """Waiting for its turn to compute the next chunk."""
    COMPUTING = "computing"
    TRAILING = "trailing"
    """Of a pipeline: all computed here, and not by its other stages."""
    SAMPLING = "sampling"
    """All computed, and it is not known yet what the first token may be: it holds no place and needs no turn."""
    HANDING_OFF = "handing off"
    """All computed; the decode is still reading."""
    ABANDONED = "abandoned"
    """Over, but a chunk in flight still writes its slots."""
    ENDED = "ended"


class JobEvent(Named):
    """What moves it on."""

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
class Estimate:
    """Seconds by the cost model: of computing the next chunk (or the one in flight), of loading what it needs for that, and of
    computing all that comes after it."""

    compute_s: float
    load_s: float
    rest_s: float


def choices_of(request: StartPrefill) -> tuple[Sibling, ...]:
    """The request itself and its siblings."""
    own = Sibling(request_id=request.request_id, attempt=request.attempt, seed=request.sampling.seed)
    return (own, *request.siblings)


def attempts_of(request: StartPrefill) -> dict[str, int]:
    """Those of all its choices, by request id."""
    return {choice.request_id: choice.attempt for choice in choices_of(request)}


@dataclass(slots=True)
class Job:
    """One attempt of one request: what was asked, and what is held for it."""

    request: StartPrefill
    gateway: str
    order: int
    rank: float
    """Fixed at arrival, see `core.order`."""
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
    """Slab slots for the blocks behind the prefix, the last perhaps partial. Where another job has computed a block meanwhile,
    that job's slot stands here."""
    checksums: list[int] = field(default_factory=list)
    """Of the blocks behind the prefix, as far as they are computed."""
    found: list[BlockLoad] = field(default_factory=list)
    """Blocks behind the prefix that another job computed here, to be loaded by the next chunk."""
    found_blocks: int = 0
    """All such blocks of this job."""
    lease_id: int | None = None
    leased: bool = False
    held_blocks: int | None = None
    """Blocks the decode loads itself; None until it says so."""
    done: HandoffDone | None = None
    """What the decode was sent when all was computed."""
    reserved: bool = False
    """The decode has said that it made room."""
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
    chunk_told_layers: int = 0
    """Of these layers the decode knows."""
    chunk_began_at: float = 0.0
    estimate: Estimate | None = None
    """Of what is left; None when that has changed."""
    started_at: float = 0.0
    computing_at: float = 0.0
    """When its first chunk began."""
    load_s: float = 0.0
    """From then until its prefix was loaded."""
    sampling_id: int = 0
    """The work that samples its first tokens, while it is set aside; else 0."""
    group: Group | None = None
    """The pipeline that computes it, if one does."""
    choices: dict[str, int] = field(default_factory=dict)
    """Requests that still want it, with their attempts: its own and its siblings."""
    waited: bool = False
    """It waited for blocks of another prompt, or would have."""
    sources: tuple[str, ...] = ()
    """Cache-nodes of other hosts to fetch reused blocks from."""

    def __post_init__(self) -> None:
        self.choices = attempts_of(self.request)
        self.sources = self.request.sources

    @property
    def tenant(self) -> str:
        """Name of the tenant that asked."""
        return self.request.tenant

    @property
    def is_begun(self) -> bool:
        """Whether anything was asked for it: reservation, lease, room."""
        return self.state is not JobState.QUEUED and self.state is not JobState.WAITING

    @property
    def share(self) -> float:
        """Part of the model's layers that is computed here."""
        return self.group.share if self.group else 1.0

    @property
    def held_slots(self) -> list[int]:
        """Slab slots pinned for it, as often as they are."""
        return self.own_slots + self.new_slots + (self.group.hidden.slots if self.group else [])

    def cut_prefix(self, blocks: int) -> list[int]:
        """Reuse the first `blocks` at most, of which what was fetched comes last: own slots that are reused no more."""
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
        """Take blocks from index `first` on, which another job computed into `slots` (pinned for this one), in the places from
        `place` on of those reserved."""
        self.new_slots[place : place + len(slots)] = slots
        self.checksums += [ref.checksum for ref in refs]
        self.found += [BlockLoad(block, ref, 0, layout.layers, layout.block_tokens) for block, ref in enumerate(refs, first)]
        self.found_blocks += len(slots)
        self.computed = (first + len(slots)) * layout.block_tokens
        self.estimate = None

    @property
    def tokens(self) -> Tokens:
        """Those of its request."""
        return self.request.tokens

    @property
    def past(self) -> bytes:
        """What its sampling depends on."""
        return self.request.sampling.past(self.request.tokens)

    @property
    def length(self) -> int:
        """Prompt tokens."""
        return len(self.request.tokens) // 4
