"""A cluster under virtual time: one heap of events, one source of randomness, faults as drawn. Drives the live actors.

Every frame is encoded and decoded by the sessions. Nothing here knows what an actor means by what it does.
"""

import heapq
import struct
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import xxhash

from mooncake_zmq.cache_node.disk_tier import DiskContents
from mooncake_zmq.core.actor import (
    Actor,
    CancelTimer,
    CancelWork,
    CloseSequence,
    Drained,
    DrainWanted,
    Effect,
    Event,
    Fence,
    FromClient,
    OpenSequence,
    Publish,
    Send,
    SetTimer,
    Start,
    Started,
    TimerFired,
    TimerKey,
    ToClient,
    WorkDone,
    WorkProgress,
)
from mooncake_zmq.core.messages import PROTOCOL_VERSION, Envelope, Hello, LeaseBlocks, ReserveSlots, SegmentRef, encode
from mooncake_zmq.core.node import Node, Outer, Transmit
from mooncake_zmq.core.session import Session, SessionSettings
from mooncake_zmq.core.work import Progress, Result
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.simulation.checkers import Checkers, Violation
from mooncake_zmq.simulation.disk import SimDisk
from mooncake_zmq.simulation.faults import Fault, FaultKind
from mooncake_zmq.simulation.hardware import Hardware, Machine, Segment
from mooncake_zmq.simulation.traces import MODEL

LINGER_S = 1.0
CATCH_UP_S = 0.0006
"""Longest time that a process takes for each thing that came while it was stopped."""
DISK_FAULTS = {FaultKind.DISK_FULL: "full", FaultKind.DISK_FAIL: "failing"}
RECENT_FRAMES = 32
"""Frames of a life that are kept to be replayed after its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process of the cluster. `make` builds its actor for a life, from what its disk holds; `slots`: size of its segment,
    `disk_slots`: of its disk, 0 for none."""

    name: str
    role: str
    host: str
    peers: tuple[str, ...]
    make: Callable[[int, DiskContents], Actor]
    slots: int = 0
    disk_slots: int = 0


@dataclass(slots=True)
class Life:
    """One life of a process: everything here is lost when it ends."""

    incarnation: int
    node: Node
    machine: Machine
    actor: Actor
    timers: dict[TimerKey, int] = field(default_factory=dict)
    postponed: deque[Callable[[], None]] = field(default_factory=deque)
    """What came while it was stopped, and then while it still caught up."""
    paused: bool = False
    drained: bool = False
    recent: deque[tuple[str, bytes]] = field(default_factory=lambda: deque(maxlen=RECENT_FRAMES))


class Process:
    """A process through all its lives."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.lives = 0
        self.life: Life | None = None
        self.former_frames: deque[tuple[str, bytes]] = deque(maxlen=RECENT_FRAMES)


class _Watched:
    """The actor as its node sees it, with the checkers looking on."""

    def __init__(self, actor: Actor, observe: Callable[[Event, list[Effect]], None]) -> None:
        self.counts = actor.counts
        self._actor = actor
        self._observe = observe
        self.check = actor.check
        self.gauges = actor.gauges
        self.dump = actor.dump

    def handle(self, now: float, event: Event) -> list[Effect]:
        effects = self._actor.handle(now, event)
        self._observe(event, effects)
        return effects


class Simulator:
    """The world: virtual time, processes, wires, memory and the faults among them."""

    def __init__(
        self,
        *,
        random: Random,
        specs: Sequence[ProcessSpec],
        layout: BlockLayout,
        hardware: Hardware,
        session: SessionSettings,
        checkers: Checkers,
    ) -> None:
        self.now = 0.0
        self.random = random
        self.hardware = hardware
        self.watcher = checkers
        self.segments: dict[tuple[str, int], Segment] = {}
        self.disks = {spec.name: SimDisk(layout, spec.disk_slots) for spec in specs if spec.disk_slots}
        self.copy_fail = 0.0
        self.copy_tear = 0.0
        self.faults_begun: Counter[str] = Counter()
        self.garbage: Counter[str] = Counter()
        self.events = 0
        self.to_client: Callable[[str, str, Any], None] = lambda gateway, request_id, output: None
        self.on_death: Callable[[str], None] = lambda name: None
        self.log: list[str] | None = None
        self.processes = {spec.name: Process(spec) for spec in specs}
        self._layout = layout
        self._session = session
        self._heap: list[tuple[float, int, Process | None, int, Callable[[], None]]] = []
        self._order = 0
        self._digest = xxhash.xxh3_64()
        self._active: list[Fault] = []
        self._traps: dict[tuple[FaultKind, str], Fault] = {}
        self._blocked: Counter[tuple[str, str]] = Counter()
        self._drop = self._duplicate = self._delay_s = 0.0
        self._slow: dict[str, float] = {}
        self._wires: dict[tuple[str, str], float] = {}
        """When the last frame of each directed pair arrives: without a fault the wire keeps its order."""
        checkers.attach(self)
        for process in self.processes.values():
            self.restart(process.name)

    @property
    def digest(self) -> str:
        """Of everything that happened so far, in order."""
        return self._digest.hexdigest()

    # --- time

    def at(self, time: float, action: Callable[[], None], process: Process | None = None) -> None:
        """Do something at a time; for a process, only in its present life, and not while it is stopped."""
        self._order += 1
        life = process.lives if process else 0
        heapq.heappush(self._heap, (time, self._order, process, life, action))

    def run_until(self, time: float) -> None:
        """Let time pass."""
        while self._heap and self._heap[0][0] <= time:
            self.now, _, process, life_number, action = heapq.heappop(self._heap)
            self.events += 1
            if process is None:
                action()
                continue
            life = process.life
            if life is None or process.lives != life_number:
                continue
            self._let(process, life, action)
        self.now = time

    def _let(self, process: Process, life: Life, action: Callable[[], None]) -> None:
        """Act now, or in turn once the process has caught up."""
        if life.paused or life.postponed:
            life.postponed.append(action)
        else:
            action()

    # --- processes

    def restart(self, name: str) -> None:
        """Begin a process's next life: nothing of the former is left but the segment file, which is swept."""
        process = self.processes[name]
        if process.life is not None:
            return
        spec = process.spec
        for (node, _), old in self.segments.items():
            if node == name:
                old.linked = False
        process.lives += 1
        incarnation = process.lives
        segment = None
        if spec.slots:
            segment = Segment(name, incarnation, spec.host, self._layout, spec.slots)
            self.segments[name, incarnation] = segment
        disk = self.disks.get(name)
        actor = spec.make(incarnation, DiskContents(disk.slots, tuple(disk.rows.values())) if disk else DiskContents())
        machine = Machine(
            self,
            name=name,
            incarnation=incarnation,
            host=spec.host,
            layout=self._layout,
            segment=segment,
            disk=disk,
            later=lambda delay_s, action: self.at(self.now + delay_s, action, process),
            done=partial(self._work_done, process),
            progressed=partial(self._progressed, process),
        )
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            role=spec.role,
            host=spec.host,
            model=MODEL,
            tokenizer=MODEL,
            layout=self._layout.fingerprint,
            segment=None
            if segment is None
            else SegmentRef(path=f"{name}.{incarnation}", endpoint=f"sim:{name}", slots=spec.slots),
        )
        session = Session(me=name, incarnation=incarnation, hello=hello, peers=spec.peers, settings=self._session, now=self.now)
        watched = _Watched(actor, lambda event, effects: self._observe(process, event, effects))
        process.life = Life(incarnation, Node(watched, session, validate=True), machine, actor)
        self.at(self.now, partial(self._begin, process), process)
        self.at(self.now + session.tick_s * self.random.random(), partial(self._tick, process), process)

    def crash(self, name: str) -> None:
        """End a life at once."""
        process = self.processes[name]
        life = process.life
        if life is None:
            return
        self._note(b"crash", process)
        process.former_frames = life.recent
        process.life = None
        self.watcher.died(name, life.incarnation)
        self.on_death(name)

    def pause(self, name: str) -> None:
        """SIGSTOP."""
        life = self.processes[name].life
        if life is not None:
            life.paused = True
            life.machine.stopped_at = self.now

    def resume(self, name: str) -> None:
        """SIGCONT: everything that came meanwhile is handled now, in order."""
        life = self.processes[name].life
        if life is None or not life.paused:
            return
        life.paused = False
        life.machine.stopped_at = self.now
        self._catch_up(life)

    def _catch_up(self, life: Life) -> None:
        """One thing that came while the process was stopped; the next takes its own moment."""
        if life.paused or not life.postponed or self.processes[life.machine.name].life is not life:
            return
        action = life.postponed[0]
        action()
        if life.postponed:
            life.postponed.popleft()
        self.at(self.now + CATCH_UP_S * self.random.random(), partial(self._catch_up, life))

    def from_client(self, gateway: str, request_id: str, value: Any) -> None:
        """A client speaks to a gateway."""
        process = self.processes[gateway]
        self.at(self.now, lambda: self._handle(process, FromClient(request_id, value)), process)

    def _observe(self, process: Process, event: Event, effects: list[Effect]) -> None:
        if self.log is not None:
            self.log.append(f"{self.now:9.4f} {process.name:<12} {_short(event)}")
            self.log.extend(f"{'':9} {'':<12}   -> {_short(effect)}" for effect in effects)
        assert process.life is not None
        process.life.machine.hear(event)
        self.watcher.observed(process.spec, process.life.incarnation, process.life.actor, event, effects)
        if any(isinstance(effect, Send) and isinstance(effect.message, LeaseBlocks | ReserveSlots) for effect in effects):
            self._spring(FaultKind.STOP_ASKER, process.name)

    def _leave(self, process: Process, latest: float) -> None:
        """A drained process exits once its last messages are acknowledged, or after a while."""
        assert process.life is not None
        if self.now < latest and process.life.node.session.unacknowledged:
            self.at(self.now + 0.1, partial(self._leave, process, latest), process)
        else:
            self.at(self.now, partial(self.crash, process.name), process)

    def _begin(self, process: Process) -> None:
        assert process.life is not None
        self._carry_out(process, process.life.node.start(self.now, Started()))

    def _tick(self, process: Process) -> None:
        assert process.life is not None
        node = process.life.node
        self._carry_out(process, node.tick(self.now))
        self.at(self.now + node.session.tick_s, partial(self._tick, process), process)

    def _handle(self, process: Process, event: Event) -> None:
        if process.life is None:
            return
        self._note(type(event).__name__.encode(), process)
        self._carry_out(process, process.life.node.handle(self.now, event))

    def _timer(self, process: Process, key: TimerKey, order: int) -> None:
        assert process.life is not None
        if process.life.timers.get(key) == order:
            del process.life.timers[key]
            self._handle(process, TimerFired(key))

    def _work_done(self, process: Process, work_id: int, result: Result) -> None:
        self._handle(process, WorkDone(work_id, result))

    def _progressed(self, process: Process, work_id: int, progress: Progress) -> None:
        self._handle(process, WorkProgress(work_id, progress))

    def _carry_out(self, process: Process, outers: Sequence[Outer]) -> None:
        life = process.life
        assert life is not None
        for outer in outers:
            match outer:
                case Transmit(to, frame):
                    life.recent.append((to, frame))
                    self._transmit(process.name, to, frame)
                case SetTimer(key, delay_s):
                    life.timers[key] = self._order
                    self.at(self.now + delay_s, partial(self._timer, process, key, self._order), process)
                case CancelTimer(key):
                    life.timers.pop(key, None)
                case Start(work_id, work, deadline_s):
                    life.machine.start(work_id, work, deadline_s)
                case CancelWork(work_id):
                    life.machine.cancel(work_id)
                case Fence(generations):
                    life.machine.fence(generations)
                case OpenSequence(sequence, capacity_tokens):
                    life.machine.open(sequence, capacity_tokens)
                case CloseSequence(sequence):
                    life.machine.close(sequence)
                case ToClient(request_id, output):
                    self.to_client(process.name, request_id, output)
                case Publish():
                    pass
                case Drained():
                    if not life.drained:
                        life.drained = True
                        self._leave(process, self.now + LINGER_S)
                case _:
                    raise TypeError(outer)

    def half_written(self, name: str) -> None:
        """`name` is in the middle of a copy into a pool."""
        self._spring(FaultKind.STOP_WRITER, name)

    # --- wires

    def reach(self, reader: str, owner: str, incarnation: int) -> str:
        """Can `reader` read from the life `incarnation` of `owner` over the network: "yes", "no", or "silent"?"""
        life = self.processes[owner].life
        if life is None or life.incarnation != incarnation:
            return "no"
        cut = self._blocked[reader, owner] or self._blocked[owner, reader]
        return "silent" if life.paused or cut else "yes"

    def alive(self, node: str, incarnation: int) -> bool:
        """Does this life still hold its lock? A stopped process does."""
        process = self.processes.get(node)
        return process is not None and process.life is not None and process.life.incarnation == incarnation

    def slowness(self, host: str) -> float:
        """By how much copies and computing are stretched on a host."""
        return self._slow.get(host, 1.0)

    def _transmit(self, sender: str, to: str, frame: bytes) -> None:
        random = self.random
        if self._blocked[sender, to] or (self._drop and random.random() < self._drop):
            return
        copies = 2 if self._duplicate and random.random() < self._duplicate else 1
        process = self.processes[to]
        for _ in range(copies):
            arrival = self.now + self.hardware.frame_s * (1 + self.hardware.jitter * random.random())
            if self._delay_s:
                arrival += self._delay_s * random.random()
            else:
                arrival = max(arrival, self._wires.get((sender, to), 0.0))
                self._wires[sender, to] = arrival
            self.at(arrival, partial(self._arrive, process, frame))

    def _arrive(self, process: Process, frame: bytes) -> None:
        """Frames reach whichever life there is now: envelopes tell for which they are meant."""
        life = process.life
        if life is None:
            return
        self._let(process, life, partial(self._receive, process, frame))

    def _receive(self, process: Process, frame: bytes) -> None:
        assert process.life is not None
        self._note(frame, process)
        self._carry_out(process, process.life.node.receive(self.now, frame))

    def _note(self, what: bytes, process: Process) -> None:
        self._digest.update(struct.pack("<d", self.now))
        self._digest.update(process.name.encode())
        self._digest.update(what)

    # --- faults

    def schedule(self, fault: Fault) -> None:
        """Let a fault happen at its time."""
        self.at(fault.at_s, lambda: self._strike(fault))

    def heal(self) -> None:
        """End all faults: links work, the stopped go on, the dead and the draining begin a new life."""
        for fault in self._active:
            if fault.kind is FaultKind.DRAIN:
                self.crash(*fault.targets)
        self._active.clear()
        self._traps.clear()
        self._blocked.clear()
        for disk in self.disks.values():
            disk.fault = ""
        self._apply_levels()
        for name, process in self.processes.items():
            self.resume(name)
            if process.life is None:
                self.restart(name)

    def _strike(self, fault: Fault) -> None:
        self.faults_begun[fault.kind.value] += 1
        if self.log is not None:
            self.log.append(f"{self.now:9.4f} fault {fault}")
        self._active.append(fault)
        self._apply_levels()
        match fault.kind, fault.targets:
            case FaultKind.PARTITION | FaultKind.ONE_WAY, _:
                self._blocked.update(self._cut_pairs(fault))
            case FaultKind.CRASH, (name,):
                self.crash(name)
            case FaultKind.PAUSE, (name,):
                self.pause(name)
            case FaultKind.STOP_ASKER | FaultKind.STOP_WRITER, (name,):
                self._traps[fault.kind, name] = fault
                return
            case FaultKind.DRAIN, (name,):
                process = self.processes[name]
                self.at(self.now, lambda: self._handle(process, DrainWanted()), process)
            case FaultKind.BIT_FLIP, (name,):
                self._flip_bits(name, int(fault.amount))
            case FaultKind.DISK_FULL | FaultKind.DISK_FAIL, (name,):
                self.disks[name].fault = DISK_FAULTS[fault.kind]
            case FaultKind.GARBAGE, (name,):
                for _ in range(int(fault.amount)):
                    self._garbage(self.processes[name])
        self.at(self.now + fault.duration_s, lambda: self._end(fault))

    def _spring(self, kind: FaultKind, name: str) -> None:
        """Stop a process at the moment that was waited for."""
        fault = self._traps.pop((kind, name), None)
        if fault is not None:
            self.at(self.now, partial(self.pause, name))
            self.at(self.now + fault.duration_s, lambda: self._end(fault))

    def _end(self, fault: Fault) -> None:
        if fault not in self._active:
            return
        self._active.remove(fault)
        self._apply_levels()
        match fault.kind, fault.targets:
            case FaultKind.PARTITION | FaultKind.ONE_WAY, _:
                self._blocked.subtract(self._cut_pairs(fault))
            case FaultKind.CRASH, (name,):
                self.restart(name)
            case FaultKind.PAUSE | FaultKind.STOP_ASKER | FaultKind.STOP_WRITER, (name,):
                self.resume(name)
            case FaultKind.DRAIN, (name,):
                self.crash(name)
                self.restart(name)
            case FaultKind.DISK_FULL | FaultKind.DISK_FAIL, (name,):
                self.disks[name].fault = ""

    def _apply_levels(self) -> None:
        level = {kind: 0.0 for kind in FaultKind}
        self._slow.clear()
        for disk in self.disks.values():
            disk.slowness = 1.0
        for fault in self._active:
            level[fault.kind] = max(level[fault.kind], fault.amount)
            if fault.kind is FaultKind.SLOW:
                host = self.processes[fault.targets[0]].spec.host
                self._slow[host] = max(self._slow.get(host, 1.0), fault.amount)
            elif fault.kind is FaultKind.DISK_SLOW:
                disk = self.disks[fault.targets[0]]
                disk.slowness = max(disk.slowness, fault.amount)
        self._drop = level[FaultKind.DROP]
        self._duplicate = level[FaultKind.DUPLICATE]
        self._delay_s = level[FaultKind.DELAY]
        self.copy_fail = level[FaultKind.COPY_FAIL]
        self.copy_tear = level[FaultKind.COPY_TEAR]

    def _cut_pairs(self, fault: Fault) -> list[tuple[str, str]]:
        """Directed pairs cut: between two hosts, or between the two processes when they share one."""
        one, two = fault.targets
        here, there = self.processes[one].spec.host, self.processes[two].spec.host
        pairs = [(one, two)]
        if here != there:
            ours = [p.name for p in self.processes.values() if p.spec.host == here]
            theirs = [p.name for p in self.processes.values() if p.spec.host == there]
            pairs = [(a, b) for a in ours for b in theirs]
        return pairs if fault.kind is FaultKind.ONE_WAY else pairs + [(b, a) for a, b in pairs]

    def _flip_bits(self, name: str, blocks: int) -> None:
        if name in self.disks:
            self.disks[name].flip(self.random, 4 * blocks)
        life = self.processes[name].life
        if life is None or life.machine.segment is None:
            return
        segment = life.machine.segment
        stored = [slot for slot, generation in enumerate(segment.generations) if generation and generation % 2 == 0]
        for slot in self.random.sample(stored, min(blocks, len(stored))):
            at = slot * self._layout.block_bytes + self.random.randrange(self._layout.block_bytes)
            segment.memory[at] ^= 1 << self.random.randrange(8)
            segment.flipped.add(slot)

    def _garbage(self, process: Process) -> None:
        """A frame that must be dropped and counted, and do nothing else."""
        life = process.life
        if life is None or life.paused:
            return
        kind, frame = self._draw_garbage(process)
        self.garbage[kind] += 1
        before = _dropped(life.node.session)
        outers = life.node.receive(self.now, frame)
        if outers or _dropped(life.node.session) != before + 1:
            raise Violation("I6", f"{process.name} did not drop and count a {kind} frame: {outers}")

    def _draw_garbage(self, process: Process) -> tuple[str, bytes]:
        random, peers = self.random, process.spec.peers
        former = [frame for peer in peers for frame in self._stale_frames(process, peer)]
        kinds = ["noise", "truncated", "stranger", "version"] + (["old_life"] * 2 if former else [])
        kind = random.choice(kinds)
        if kind == "old_life":
            return kind, random.choice(former)
        if kind == "noise":
            return kind, random.randbytes(random.randrange(200))
        envelope = Envelope(
            version=99 if kind == "version" else PROTOCOL_VERSION,
            sender="stranger" if kind == "stranger" else random.choice(peers),
            incarnation=1 << 40,
            epoch=1,
            to_incarnation=process.lives,
            floor=1,
            sequence=1,
            ack_epoch=1,
            ack=0,
            bodies=(b"\x90",),
        )
        frame = encode(envelope)
        return kind, frame[: random.randrange(len(frame))] if kind == "truncated" else frame

    def _stale_frames(self, process: Process, peer: str) -> list[bytes]:
        """Frames to `process` of a life of `peer` that it knows to be over."""
        assert process.life is not None
        peers: Any = process.life.node.session.dump()["peers"]
        current = self.processes[peer].life
        if current is None or peers[peer]["incarnation"] != current.incarnation:
            return []
        return [frame for to, frame in self.processes[peer].former_frames if to == process.name]


def _dropped(session: Session) -> int:
    return sum(count for name, count in session.counts.items() if name.startswith("dropped["))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else text[:400] + "..."
