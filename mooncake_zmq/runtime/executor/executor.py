"""Executes an actor's works: model steps on one thread, local copies on another, reads from other hosts on a third, and the SSD
tier's reads and writes on further threads.

KV is transferred by a one-sided read of its destination, from a mapped segment, in host or GPU memory, or from a data server;
only a put writes, into slots that it was granted. RDMA would be a third way to do the same read. Received blocks are verified
by the rule of `kv.reading`; those that fail are reported individually, as misses.

A work may have several subtasks (a chunk's computation and the loading of its prefix). Its `WorkDone` is emitted when the last
of them has ended, so that nothing of a work touches memory after its end.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from mooncake_zmq.core.actor import OpenSequence
from mooncake_zmq.core.messages import Hello
from mooncake_zmq.core.work import (
    REPORT_EVERY_S,
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
    ProcessProbed,
    PullBlocks,
    ReadTokens,
    Result,
    SampleTokens,
    SequenceForked,
    TakeBack,
    WatchEngine,
    Work,
    WriteChat,
    WriteToDisk,
)
from mooncake_zmq.engine.grammars import Grammars
from mooncake_zmq.engine.sampling import Past
from mooncake_zmq.engine.spec import Engine
from mooncake_zmq.pool.ssd.disk import Disk
from mooncake_zmq.runtime.executor.compute import Compute
from mooncake_zmq.runtime.executor.copies import Copies
from mooncake_zmq.runtime.executor.disk_threads import DiskThreads
from mooncake_zmq.runtime.executor.jobs import Job, Subtasks
from mooncake_zmq.runtime.executor.lending import Lending
from mooncake_zmq.runtime.executor.loads import Loads
from mooncake_zmq.runtime.executor.sampler import Sampler
from mooncake_zmq.runtime.executor.worker import Worker
from mooncake_zmq.runtime.executor.works import Emit, Works
from mooncake_zmq.transfer.directory import SegmentDirectory
from mooncake_zmq.transfer.network import RemoteReader
from mooncake_zmq.transfer.process_lock import is_alive
from mooncake_zmq.transfer.sockets import Sockets


class Executor:
    """Execute works. Methods are for the runtime's thread; `emit` and `on_crash` are called from the executor's threads too."""

    def __init__(
        self,
        directory: SegmentDirectory,
        *,
        engine: Engine | None,
        runtime_dir: str | Path,
        emit: Emit,
        on_crash: Callable[[BaseException], None],
        window_bytes: int = 32 << 20,
        progress_s: float = REPORT_EVERY_S,
        sockets: Sockets | None = None,
        disk: Disk | None = None,
        verify_local: bool = True,
        grammars: Grammars | None = None,
        lending: Callable[[Callable[[BaseException], None]], Lending] | None = None,
    ) -> None:
        """`directory`: of the own segment and the peers'. `disk` is closed by the caller, after this. Without
        `verify_local`, local reads of committed blocks check only generations, and checksums of bytes only for blocks from
        another host or a disk. `grammars`: for answers with a constraint, closed with this. `lending`: makes
        what a decode has that lends or borrows."""
        self._directory = directory
        self._runtime_dir = runtime_dir
        self._engine = engine
        self._grammars = grammars
        self._crashed = False

        def crash(error: BaseException) -> None:
            self._crashed = True
            on_crash(error)

        self._reader = RemoteReader(directory.layout, on_crash=crash, window_bytes=window_bytes, sockets=sockets)
        self._copier = Worker("copy", crash)
        self._sampler = Sampler(crash)
        self._works = Works(self._reader, self._sampler, emit)
        self._loads = Loads(directory, self._copier, verify_local=verify_local)
        self._compute = Compute(engine, directory, self._loads, emit, crash, progress_s=progress_s) if engine else None
        self._lending = lending(crash) if lending else None
        self._disk_threads = DiskThreads(disk, directory, crash) if disk else None
        self._copies = Copies(directory, self._copier, self._disk_threads, verify_local=verify_local)

    @property
    def read_counts(self) -> dict[str, int]:
        """Counters of the reads from other hosts."""
        return self._reader.counts

    def engine_overdue_s(self) -> float:
        """Return how far the engine's oldest work is past its deadline: if far, the engine's thread hangs."""
        return self._works.engine_overdue_s()

    # --- peers, sequences, generations

    def learn_peer(self, name: str, incarnation: int, hello: Hello) -> None:
        """Record where this incarnation's slots can be read, and forget older ones of the peer."""
        peer = (name, incarnation)
        replaced = self._directory.learn(peer, hello.host, hello.segment)
        if replaced:
            self._reader.forget(replaced)
        endpoint = self._directory.endpoint(peer)
        if endpoint:
            self._reader.learn(peer, endpoint)

    def forget_peer(self, name: str) -> None:
        """Forget a peer; reads from it over the network fail at once, copies under way finish."""
        peer = self._directory.forget(name)
        if peer:
            self._reader.forget(peer)

    def fence(self, generations: Iterable[tuple[int, int]]) -> None:
        """Set (slot, generation) in the own segment."""
        assert self._directory.own, "a node without a segment has nothing to fence"
        for slot, generation in generations:
            self._directory.own.set_generation(slot, generation)

    def open_sequence(self, asked: OpenSequence) -> None:
        assert self._engine, "a node without an engine has no sequences"
        past, sampling = None, asked.sampling
        if sampling is not None and sampling.reads_past:
            past = Past(sampling, asked.past, self._grammars, asked.tenant)
        self._works.open_sequence(asked, self._engine, past)

    def close_sequence(self, sequence: int) -> None:
        """Free a sequence's KV, at the end of the last work that uses it."""
        self._works.close_sequence(sequence)

    # --- works

    def start(self, work_id: int, work: Work, deadline_s: float) -> None:
        """Begin a work that may take `deadline_s` from now. It ends with exactly one `WorkDone` in any case."""
        job = self._works.add(work_id, work, time.monotonic() + deadline_s)
        if job.result is not None:
            self._works.begin(job, Subtasks())
        elif isinstance(work, SampleTokens):
            self._works.begin_sampling(job, work)
        else:
            self._works.begin(job, self._subtasks(job, work))

    def _subtasks(self, job: Job, work: Work) -> Subtasks:
        match work:
            case ComputeChunk() | ComputeStage() | DecodeStep():
                return self._engine_subtasks(job, work)
            case PullBlocks():
                return self._loads.pull(job, work)
            case CopyBlocks():
                return self._copies.copy(job, work)
            case WriteToDisk():
                assert self._disk_threads, "a node without a disk has nothing to demote to"
                return self._disk_threads.write(job, work)
            case LendSequence() | TakeBack() | BorrowParts():
                assert self._lending, "a node that neither lends nor borrows has no loans"
                return self._lending.begin(job, work)
            case ForkSequence():
                return Subtasks([(self._copier, partial(_fork, job, work))])
            case ProbeProcess():
                return Subtasks([(self._copier, partial(self._probe, work))])
            case Generate() | Embed() | ProbeEngine() | ReadTokens() | WriteChat() | WatchEngine() | SampleTokens():
                raise TypeError(work)  # a node beside vLLM uses `runtime.generation`

    def _engine_subtasks(self, job: Job, work: ComputeChunk | ComputeStage | DecodeStep) -> Subtasks:
        assert self._compute, "a node without an engine computes nothing"
        match work:
            case ComputeChunk():
                return self._compute.chunk(job, work)
            case ComputeStage():
                return self._compute.chunk(job, work.chunk, work)
            case DecodeStep():
                return self._compute.steps(job, work)

    def cancel(self, work_id: int) -> None:
        """Ask a work to stop early; see `Works.cancel`."""
        self._works.cancel(work_id)

    def close(self) -> None:
        """End all works, stop the threads, free all sequences. May be called twice. After a crash works may remain."""
        self._works.close()
        if self._compute is not None:
            self._compute.close()
        if self._lending is not None:
            self._lending.close()
        if self._grammars is not None:
            self._grammars.close()
        self._sampler.close()
        self._copier.close()
        if self._disk_threads is not None:
            self._disk_threads.close()
        self._reader.close()
        assert self._crashed or self._works.are_ended, "a work was left without its end"
        for sequence in list(self._works.sequences):
            self.close_sequence(sequence)
        self._directory.clear()

    def _probe(self, work: ProbeProcess) -> Result:
        return ProcessProbed(is_alive(self._runtime_dir, work.node, work.incarnation))


def _fork(job: Job, work: ForkSequence) -> Result:
    """Copy a sequence's KV into others; the result names those without memory."""
    source = job.sequences[work.source].kv
    without = tuple(target for target in work.targets if job.sequences[target].memory is None)
    for target in work.targets:
        job.check()
        if target in without:
            continue
        copy = job.sequences[target].kv
        copy.copy_from(source, work.tokens)
        copy.settle()
    return SequenceForked(without)
