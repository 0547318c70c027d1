"""The machine of one simulated process: it carries out `core.work` under virtual time.

It decides nothing that an actor decides. Each kind of work is carried out by `works`; what several kinds need stands here.
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from mooncake_zmq.core.actor import Event, OpenSequence, PeerDown, PeerUp
from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.core.work import (
    BlockLoad,
    BorrowParts,
    ComputeChunk,
    ComputeStage,
    CopyBlocks,
    DecodeStep,
    Embed,
    ForkSequence,
    Generate,
    LendSequence,
    LentPart,
    ProbeEngine,
    ProbeProcess,
    Progress,
    PullBlocks,
    ReadTokens,
    Result,
    SampleTokens,
    SequenceBlock,
    SlotGrant,
    TakeBack,
    WatchEngine,
    Work,
    WorkFailed,
    WriteChat,
    WriteToDisk,
)
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.simulation.cross_hits import CrossHits
from mooncake_zmq.simulation.disk import SimDisk
from mooncake_zmq.simulation.engine import SimSequence
from mooncake_zmq.simulation.memory import Segment

Slot = tuple[str, int, int, int]
"""A slot in one of its generations: (node, incarnation, slot, generation)."""
NO_ANSWER = "no answer"
"""The reason why a work stops that waited for a silent peer: its blocks were not reached."""
LONGEST_S = 20.0
"""The longest step of a work, which a slow disk of a slow host would exceed beyond any bound on what follows faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Virtual durations in seconds. Every one is stretched by up to `jitter` at random, and by a host's slowness."""

    frame_s: float = 0.0004
    """The time of one control frame to another process."""
    compute_token_s: float = 0.001
    compute_start_s: float = 0.002
    step_s: float = 0.012
    step_entry_s: float = 0.001
    copy_start_s: float = 0.002
    copy_block_s: float = 0.001
    network_start_s: float = 0.004
    network_block_s: float = 0.003
    disk_start_s: float = 0.002
    disk_block_s: float = 0.005
    probe_s: float = 0.001
    jitter: float = 0.5


class Watcher(Protocol):
    """The checkers, as the machines report to them."""

    @property
    def cross_hits(self) -> CrossHits: ...
    def fenced(self, segment: Segment, slot: int, generation: int) -> None: ...
    def writing(self, machine: "Machine", work: "Running", segment: Segment, grant: SlotGrant) -> None: ...
    def reading(self, machine: "Machine", work: "Running", segment: Segment, ref: SlotRef) -> None: ...
    def verified(self, segment: Segment, ref: SlotRef, layer: int, part: bytes) -> None: ...
    def closing(self, machine: "Machine", sequence: int, works: Sequence["Running"]) -> None: ...
    def broken(self, machine: "Machine", text: str) -> None: ...


class World(Protocol):
    """The simulator, as far as a machine needs it."""

    now: float
    random: Random
    hardware: Hardware
    copy_fail: float
    copy_tear: float
    segments: dict[tuple[str, int], Segment]
    approximate: set[Slot]
    """The slots with blended KV, which no prefill commits."""

    @property
    def watcher(self) -> Watcher: ...
    def slowness(self, host: str) -> float: ...
    def reach(self, reader: str, owner: str, incarnation: int) -> str: ...
    def alive(self, node: str, incarnation: int) -> bool: ...
    def half_written(self, name: str) -> None: ...
    def half_read(self, name: str, *, remote: bool) -> None: ...
    def asked_of(self, name: str) -> None: ...
    def lent(self, name: str, part: LentPart) -> SimSequence | None: ...


Steps = Generator[float, str | None, Result]
"""A work as a coroutine: yields how long its next step takes, is sent the reason to stop (or None), and returns its result."""


@dataclass(slots=True)
class Running:
    """A work in flight."""

    work_id: int
    work: Work
    started_at: float
    deadline: float
    steps: Steps
    sequences: frozenset[int]
    cancelled: bool = False


class Machine:
    """One incarnation of one process: its sequences, its segment and its works in flight."""

    def __init__(
        self,
        world: World,
        *,
        name: str,
        incarnation: int,
        host: str,
        layout: BlockLayout,
        segment: Segment | None,
        disk: SimDisk | None = None,
        model: str = "",
        later: Callable[[float, Callable[[], None]], None],
        done: Callable[[int, Result], None],
        progressed: Callable[[int, Progress], None],
        clock: Callable[[], float],
        steps_of: "Callable[[Machine, Running], Steps]",
    ) -> None:
        """`steps_of`: returns the steps of a work, by its kind."""
        self.world = world
        self.name = name
        self.incarnation = incarnation
        self.host = host
        self.layout = layout
        self.segment = segment
        self.disk = disk
        self.model = model
        self.stopped_at = float("-inf")
        """The time when the process was last stopped: a work begun before that may be late without being wrong."""
        self.woke_at = float("-inf")
        """The world's time when the last suspension of its host ended: its leases may have ended unnoticed."""
        self.sequences: dict[int, SimSequence] = {}
        self.lent: dict[int, SimSequence] = {}
        """The sequences that it attends to for others."""
        self._peers: dict[str, int] = {}
        """The incarnation of each peer that is up: its Hello named its segment."""
        self.works: dict[int, Running] = {}
        self._used_ids: set[int] = set()
        self.disk_reads: Counter[int] = Counter()
        """The disk slots that copies under way read from."""
        self._compute_free_at = 0.0
        self._later = later
        self._done = done
        self.progressed = progressed
        self._clock = clock
        self._steps_of = steps_of

    @property
    def now(self) -> float:
        """Return the host's monotonic clock."""
        return self._clock()

    def learn(self, event: Event) -> None:
        """Note peers that come and go, before the actor handles the event."""
        if isinstance(event, PeerUp):
            self._peers[event.peer] = event.incarnation
        elif isinstance(event, PeerDown):
            self._peers.pop(event.peer, None)

    def find(self, node: str, incarnation: int) -> Segment | None:
        """Return the segment of an incarnation: its own, or that of a peer that is up."""
        own = (node, incarnation) == (self.name, self.incarnation)
        known = own or self._peers.get(node) == incarnation
        return self.world.segments.get((node, incarnation)) if known else None

    def fence(self, generations: Sequence[tuple[int, int]]) -> None:
        """Set slot generations of the own segment."""
        if self.segment is None:
            return self.world.watcher.broken(self, "fences without a segment")
        for slot, generation in generations:
            self.world.watcher.fenced(self.segment, slot, generation)
            self.segment.generations[slot] = generation
            if generation % 2:
                self.segment.flipped.discard(slot)
        return None

    def open(self, asked: OpenSequence) -> None:
        """Allocate a sequence's KV."""
        if asked.sequence in self.sequences:
            self.world.watcher.broken(self, f"opens sequence {asked.sequence} twice")
        self.sequences[asked.sequence] = SimSequence(asked.capacity_tokens, asked.past, dropped=asked.dropped_tokens)

    def close(self, sequence: int) -> None:
        """Free a sequence's KV; nothing may be using it."""
        if sequence not in self.sequences:
            return self.world.watcher.broken(self, f"closes sequence {sequence}, which is not open")
        if sequence in self.lent:
            return self.world.watcher.broken(self, f"closes sequence {sequence}, for which others may still ask")
        busy = [work for work in self.works.values() if sequence in work.sequences]
        self.world.watcher.closing(self, sequence, busy)
        del self.sequences[sequence]
        return None

    def start(self, work_id: int, work: Work, deadline_s: float) -> None:
        """Begin a work; it ends in exactly one `done`."""
        if work_id in self._used_ids:
            self.world.watcher.broken(self, f"reuses work id {work_id}")
        self._used_ids.add(work_id)
        now = self.now
        running = Running(work_id, work, now, now + deadline_s, iter(()), _sequences_of(work))  # type: ignore[arg-type]
        unknown = [sequence for sequence in running.sequences if sequence not in self.sequences]
        if unknown:
            self.world.watcher.broken(self, f"starts {type(work).__name__} on sequence {unknown[0]}, which is not open")
        running.steps = self._steps_of(self, running)
        self.works[work_id] = running
        self._resume(running, None, first=True)

    def cancel(self, work_id: int) -> None:
        """Ask a work to stop at its next step."""
        if work_id in self.works:
            self.works[work_id].cancelled = True

    def _resume(self, running: Running, _: None = None, *, first: bool = False) -> None:
        late = self.now > running.deadline
        stop = "deadline" if late else "cancelled" if running.cancelled else None
        try:
            delay_s = next(running.steps) if first else running.steps.send(stop)
        except StopIteration as end:
            del self.works[running.work_id]
            self._done(running.work_id, WorkFailed("deadline") if late else end.value)
            return
        self._later(delay_s, lambda: self._resume(running))

    def disk_block_s(self) -> float:
        """Return the present time for one block of the disk."""
        return self.world.hardware.disk_block_s * (self.disk.slowness if self.disk else 1.0)

    def took(self, seconds: float) -> float:
        """Stretch a duration at random, and by the slowness of the host, at most so that it ends within the run."""
        world = self.world
        return min(LONGEST_S, seconds * (1 + world.hardware.jitter * world.random.random()) * world.slowness(self.host))

    def wait_for_compute(self, running: Running, took_s: float) -> float:
        """Queue for the one compute thread; return the time to wait, at most until just after the deadline."""
        now = self.now
        begin = max(now, self._compute_free_at)
        if begin > running.deadline:
            return running.deadline - now + 1e-6
        self._compute_free_at = begin + took_s
        return begin - now

    def approach(self, running: Running, sources: Sequence[SlotRef]) -> Generator[float, str | None, str | None]:
        """Wait for the way to the sources; a peer that does not answer costs the whole deadline."""
        remote = [source for source in sources if self.is_remote(source)]
        stop = yield self.took(self.world.hardware.network_start_s if remote else self.world.hardware.copy_start_s)
        if stop:
            return stop
        if any(self.world.reach(self.name, source.node, source.incarnation) == "silent" for source in remote):
            stop = yield max(0.0, running.deadline - self.now - 1e-6)
            return stop or NO_ANSWER
        return None

    def half_read(self, sources: Sequence[SlotRef]) -> None:
        """Report that a read of these slots is half done, if they are another process's."""
        if any(source.node != self.name for source in sources):
            self.world.half_read(self.name, remote=any(map(self.is_remote, sources)))

    def is_remote(self, source: SlotRef) -> bool:
        """Return whether the slot is on another host."""
        segment = self.find(source.node, source.incarnation)
        return segment is not None and segment.host != self.host

    def copy_s(self, blocks: float, sources: Sequence[SlotRef]) -> float:
        """Return the time to copy so many blocks: by the network if any of their sources is remote."""
        hardware = self.world.hardware
        if any(self.is_remote(source) for source in sources):
            return hardware.network_block_s * blocks + hardware.network_start_s
        return hardware.copy_block_s * blocks + hardware.copy_start_s

    def store(self, sequence: SimSequence, load: BlockLoad, layer: int, part: bytes) -> None:
        """Write one layer's part of a block into a sequence."""
        start = load.block * self.layout.block_tokens
        sequence.write_part(layer, start, load.tokens, part)
        if slot_of(load.source) in self.world.approximate:
            sequence.approximate_from = min(start, sequence.approximate_from)


def slot_of(named: SlotRef | SlotGrant) -> Slot:
    """Return the slot that is read or written."""
    return named.node, named.incarnation, named.slot, named.generation


def _sequences_of(work: Work) -> frozenset[int]:
    match work:
        case ComputeChunk() | ComputeStage() | PullBlocks() | LendSequence() | TakeBack() | BorrowParts():
            return frozenset((work.sequence,))
        case DecodeStep():
            return frozenset(entry.sequence for entry in work.entries)
        case CopyBlocks():
            return frozenset(source.sequence for source, _ in work.copies if isinstance(source, SequenceBlock))
        case ForkSequence():
            return frozenset((work.source, *work.targets))
        case WriteToDisk() | ProbeProcess() | SampleTokens():
            return frozenset()
        case Generate() | Embed() | ProbeEngine() | ReadTokens() | WriteChat() | WatchEngine():
            return frozenset()
