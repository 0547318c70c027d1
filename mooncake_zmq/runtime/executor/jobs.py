"""State of a started work, and of an open sequence."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.core.messages import Sampled, Sampling
from mooncake_zmq.core.work import (
    BorrowParts,
    ComputeChunk,
    ComputeStage,
    CopyBlocks,
    DecodeStep,
    Embed,
    ForkSequence,
    Generate,
    LendSequence,
    ProbeEngine,
    ProbeProcess,
    PullBlocks,
    ReadTokens,
    Result,
    SampleTokens,
    SequenceBlock,
    TakeBack,
    WatchEngine,
    Work,
    WriteChat,
    WriteToDisk,
)
from mooncake_zmq.engine.eviction import AttentionSums
from mooncake_zmq.engine.kv_cache import SequenceKV
from mooncake_zmq.engine.sampling import Past, choose
from mooncake_zmq.engine.selection.few_of_many import FewOfMany
from mooncake_zmq.runtime.executor.load_records import Prefix
from mooncake_zmq.runtime.executor.worker import Worker
from mooncake_zmq.transfer.channel import ReadBatch, RemoteRead
from mooncake_zmq.transfer.hidden_states import EnteringStates
from mooncake_zmq.transfer.partials import Borrowed, Lender

Turn = Callable[[], Result | None]
"""A subtask of a job; a result ends the job for its other subtasks too."""


@dataclass(slots=True)
class Subtasks:
    """The subtasks of a job: turns of worker threads, and reads from other hosts until `reads_until` (monotonic time)."""

    turns: list[tuple[Worker, Turn]] = field(default_factory=list)
    reads: list[RemoteRead] = field(default_factory=list)
    reads_until: float = math.inf


class Stopped(Exception):
    """Raised in a work that has to end without a result."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True, eq=False)
class OpenedSequence:
    """KV of one sequence, and the works that use it."""

    memory: SequenceKV | None
    """Memory of the KV; None if there was none free."""
    past: Past | None = None
    """The tokens so far, where choices depend on them."""
    unsampled: "Unsampled | None" = None
    """Logits that its last work computed and did not sample."""
    uses: int = 0
    """Number of works that use its KV."""
    samples: int = 0
    """Number of works that use only its past."""
    closing: bool = False
    borrowed: list[Borrowed] = field(default_factory=list)
    """Its parts that lenders hold, to whom it is connected."""
    few: FewOfMany | None = None
    """The KV with which it goes on once its steps choose what they attend to."""
    sums: AttentionSums | None = None
    """How much the tokens of a prompt are attended to that is to be evicted by that."""

    @property
    def kv(self) -> SequenceKV:
        assert self.memory, "no work begins on a sequence without memory"
        return self.memory

    def take_unused(self) -> list[SequenceKV | Past | Lender]:
        """Return everything that can be closed: once the sequence is closing, whatever no work uses. Each object is returned
        once."""
        unused: list[SequenceKV | Past | Lender] = []
        if self.closing and not self.uses:
            unused += [each.lender for each in self.borrowed]
            self.borrowed.clear()
            self.few = None
            if self.memory:
                unused.append(self.memory)
                self.memory = None
            if self.past and not self.samples:
                unused.append(self.past)
                self.past = None
        return unused


@dataclass(slots=True, eq=False)
class Unsampled:
    """Logits at `position`, from which a token is to be sampled in each of these ways once that is possible."""

    source: OpenedSequence
    logits: NDArray[np.float32]
    samplings: Sequence[Sampling]
    position: int

    def sample(self) -> tuple[Sampled, ...]:
        """Sample the tokens. May wait, and raises what `sampling.sample` does."""
        return tuple(choose(self.logits, sampling, self.position, self.source.past) for sampling in self.samplings)

    def awaited(self) -> Future[bytes] | None:
        """Return the future that `sample` would wait for."""
        return self.source.past.awaited() if self.source.past else None

    def left_s(self) -> float:
        """Return how much longer it may be awaited."""
        return self.source.past.left_s() if self.source.past else 0.0


def _nothing() -> Result:
    raise AssertionError("a work without subtasks that give a result")


@dataclass(slots=True, eq=False)
class Job:
    """A started work. `stopped`: why its subtasks should end early."""

    work_id: int
    work: Work
    deadline: float
    subtasks: int = 0
    """Number of subtasks that have not ended yet."""
    stopped: str = ""
    cut: bool = False
    """A run of steps is to end at its next border."""
    result: Result | None = None
    conclude: Callable[[], Result] = _nothing
    prefix: Prefix | None = None
    waited_s: float = 0.0
    """Seconds spent on waiting for the prefix."""
    entering: EnteringStates | None = None
    batch: ReadBatch | None = None
    unsampled: Unsampled | None = None
    sequences: dict[int, OpenedSequence] = field(default_factory=dict)

    def is_late(self) -> bool:
        return time.monotonic() >= self.deadline

    def check(self) -> None:
        """Raise Stopped for a job that is to end."""
        if self.stopped:
            raise Stopped(self.stopped)
        if self.is_late():
            raise Stopped("deadline")

    def before_layer(self, layer: int) -> None:
        """Return once this layer of the prefix is loaded."""
        self.check()
        if self.prefix:
            waits = time.perf_counter()
            self.prefix.wait(layer, self.check, self.deadline)
            self.waited_s += time.perf_counter() - waits


def needed_sequences(work: Work) -> list[int]:
    """Return the sequences whose memory a work cannot do without."""
    return [work.source] if isinstance(work, ForkSequence) else sequences_of(work)


def sequences_of(work: Work) -> list[int]:
    """Return the sequences that a work reads or writes, each once."""
    match work:
        case ComputeChunk() | ComputeStage() | PullBlocks() | LendSequence() | TakeBack() | BorrowParts():
            return [work.sequence]
        case DecodeStep():
            return list(dict.fromkeys(entry.sequence for entry in work.entries))
        case CopyBlocks():
            return list(dict.fromkeys(source.sequence for source, _ in work.copies if isinstance(source, SequenceBlock)))
        case ForkSequence():
            return [work.source, *work.targets]
        case WriteToDisk() | ProbeProcess() | SampleTokens():
            return []
        case Generate() | Embed() | ProbeEngine() | ReadTokens() | WriteChat() | WatchEngine():
            return []
