"""The proving ground: a world with one source of randomness and faults as drawn, in which the live actors must hold.

Every frame is encoded and decoded by the sessions. Nothing here knows what an actor means by what it does.
"""

import struct
from collections import Counter
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import xxhash

from mooncake_zmq.core.actor import Actor, Asked, DrainTimedOut, DrainWanted, Effect, Event, Send
from mooncake_zmq.core.asks import SetRole
from mooncake_zmq.core.messages import (
    PROTOCOL_VERSION,
    Envelope,
    Hello,
    LeaseBlocks,
    ReserveSlots,
    SegmentRef,
    decode_envelope,
    encode,
)
from mooncake_zmq.core.roles import BECOMES
from mooncake_zmq.core.session import Session, SessionSettings
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.node.disk_tier import DiskContents
from mooncake_zmq.simulation.checkers import Checkers, Violation
from mooncake_zmq.simulation.disk import SimDisk
from mooncake_zmq.simulation.faults import Fault, FaultKind
from mooncake_zmq.simulation.hardware import Hardware, Machine, Segment
from mooncake_zmq.simulation.links import Sessions, Wires
from mooncake_zmq.simulation.shelf import Shelf
from mooncake_zmq.simulation.stores import Stores
from mooncake_zmq.simulation.traces import MODEL
from mooncake_zmq.simulation.world import LINGER_S, Life, Observe, Process, ProcessSpec, World

__all__ = ["ProcessSpec", "Simulator"]

CLOCK_AHEAD = 1 << 32
CHECK_EVERY = 4
"""An actor's check costs more than its turn does; what it would find wrong lasts, and one seed played back looks each time."""
CATCH_UP_S = 0.0006
"""Longest time that a process takes for each thing that came while it was stopped."""
LEAVES_WITHIN_S = LINGER_S + 0.2
"""A process whose drain has run out of time is gone so soon."""
LOOK_EVERY_S = 0.7
ASKS_A_POOL = (LeaseBlocks, ReserveSlots)
_PACK_TIME = struct.Struct("<d").pack
DISK_FAULTS = {FaultKind.DISK_FULL: "full", FaultKind.DISK_FAIL: "failing"}


class Simulator(World[Machine]):
    """The proving ground: sessions over wires that lose frames, real bytes, and checkers that look on."""

    def __init__(
        self,
        *,
        random: Random,
        specs: Sequence[ProcessSpec],
        layout: BlockLayout,
        hardware: Hardware,
        session: SessionSettings,
        checkers: Checkers,
        keyed: bool = False,
        check_every: int = CHECK_EVERY,
    ) -> None:
        """`keyed`: the wire tells by whose key each frame came. `check_every`: turns from one look at an actor's invariants to
        the next."""
        self.wires = Wires(hardware.frame_s, hardware.jitter)
        link = Sessions(
            settings=session,
            hello=self._hello,
            wires=self.wires,
            random=random,
            note=self._note,
            keyed=keyed,
            layout=layout,
            starved=self._is_starved,
        )
        self._starving: set[str] = set()
        self._sessions = link
        self._silence_s = session.peer_timeout_s
        super().__init__(specs=specs, link=link, build=self._embody, watch=self._watched)
        self.random = random
        self.hardware = hardware
        self.watcher = checkers
        self.segments: dict[tuple[str, int], Segment] = {}
        self.disks = {spec.name: SimDisk(layout, spec.disk_slots) for spec in specs if spec.disk_slots}
        self.copy_fail = 0.0
        self.copy_tear = 0.0
        self.faults_begun: Counter[str] = Counter()
        self.garbage: Counter[str] = Counter()
        self.log: list[str] | None = None
        self._layout = layout
        self._digest = xxhash.xxh3_64()
        self._active: list[Fault] = []
        self._traps: dict[tuple[FaultKind, str], Fault] = {}
        self._slow: dict[str, float] = {}
        self._suspended: dict[str, list[Any]] = {}
        """By suspended host: what is due there once it goes on."""
        self._check_every = check_every
        self._turns = 0
        self._late: set[tuple[str, int]] = set()
        """Lives whose drain has run out of time: they leave whatever they still have."""
        self.stores: Stores | None = None
        """Beside the cache-nodes, if there are any."""
        checkers.attach(self)
        for process in self.processes.values():
            self.restart(process.name)

    @property
    def digest(self) -> str:
        """Of everything that happened so far, in order."""
        return self._digest.hexdigest()

    # --- lives

    def _embody(self, process: Process[Machine]) -> tuple[Machine, Actor]:
        """Nothing of the former life is left but the segment file, which is swept, and the disk."""
        name, spec = process.name, process.spec
        for (node, _), old in self.segments.items():
            if node == name:
                old.linked = False
        incarnation = process.next_incarnation
        segment = None
        if spec.slots:
            shelf = Shelf() if spec.role == "cache-node" else None
            segment = Segment(name, incarnation, spec.host, self._layout, spec.slots, shelf)
            self.segments[name, incarnation] = segment
        disk = self.disks.get(name)
        actor = spec.make(incarnation, disk.contents() if disk else DiskContents())
        machine = Machine(
            self,
            name=name,
            incarnation=incarnation,
            host=spec.host,
            layout=self._layout,
            segment=segment,
            disk=disk,
            later=lambda delay_s, action: self.in_life(process, self.now + delay_s, action),
            done=partial(self.work_done, process),
            progressed=partial(self.progressed, process),
            clock=partial(self.clock, process),
        )
        return machine, actor

    def _hello(self, process: Process[Any]) -> Hello:
        name, slots = process.name, process.spec.slots
        return Hello(
            protocol=PROTOCOL_VERSION,
            role=process.spec.role,
            host=process.spec.host,
            model=MODEL,
            tokenizer=MODEL,
            layout=self._layout.fingerprint,
            segment=SegmentRef(path=f"{name}.{process.lives}", endpoint=f"sim:{name}", slots=slots) if slots else None,
            may_become=process.spec.may_become,
            part=process.spec.part,
        )

    def restart(self, name: str, role: str = "") -> None:
        """Begin a process's next life, unless it lives."""
        process = self.processes[name]
        if process.life is None:
            super().restart(name, role)
            if process.still_since is not None:
                self.pause(name)
            if self.stores is not None:
                self.stores.began(process)

    def crash(self, name: str) -> None:
        """End a life at once."""
        process = self.processes[name]
        if process.life is None:
            return
        self._note(b"crash", process)
        if self.stores is not None:
            self.stores.died(name)
        incarnation = process.life.incarnation
        self.watcher.died(name, incarnation)
        super().crash(name)

    def pause(self, name: str) -> None:
        """SIGSTOP."""
        life = self.processes[name].life
        if life is not None:
            life.paused = True
            life.machine.stopped_at = life.machine.now

    def resume(self, name: str) -> None:
        """SIGCONT: everything that came meanwhile is handled now, in order."""
        process = self.processes[name]
        life = process.life
        if life is None or not life.paused or process.still_since is not None:
            return
        life.paused = False
        life.machine.stopped_at = life.machine.now
        self._catch_up(life)

    def suspend(self, host: str, for_s: float) -> None:
        """A host and its clock stand still, until it wakes."""
        if host in self._suspended:
            return
        for name in self._on(host):
            self.processes[name].still_since = self.now
            self.pause(name)
        self._suspended[host] = self.take_out(host)
        if self.stores is not None:
            self.stores.suspended(self._on(host), self.now + for_s)

    def _wake_up(self, host: str) -> None:
        """The host goes on as if no time had passed; what its neighbours have done meanwhile it has yet to find out."""
        if host not in self._suspended:
            return
        slept_s = 0.0
        for name in self._on(host):
            process = self.processes[name]
            assert process.still_since is not None
            slept_s = self.now - process.still_since
            process.still_since = None
            process.slept_s += slept_s
            if process.life is not None:
                process.life.machine.woke_at = self.now
            self.resume(name)
        self.put_back(self._suspended.pop(host), slept_s)

    def _on(self, host: str) -> list[str]:
        return [name for name, process in self.processes.items() if process.spec.host == host]

    def starve(self, name: str) -> None:
        """Give a process no CPU."""
        self.pause(name)
        self._starving.add(name)

    def _feed(self, name: str) -> None:
        """Give it the CPU again."""
        self._starving.discard(name)
        life = self.processes[name].life
        if life is not None and life.paused:
            self._sessions.read_first(life)
            self.resume(name)

    def _is_starved(self, process: Process[Machine], peer: str, incarnation: int) -> bool:
        """What the kernel shows of a neighbour on the same host."""
        here = self.processes[peer].spec.host == process.spec.host
        return here and peer in self._starving and self.alive(peer, incarnation)

    def _catch_up(self, life: Life[Machine]) -> None:
        """One thing that came while the process was stopped; the next takes its own moment."""
        if life.paused or not life.postponed or self.processes[life.machine.name].life is not life:
            return
        action, arguments = life.postponed[0]
        action(*arguments)
        if life.postponed:
            life.postponed.popleft()
        self.at(self.now + CATCH_UP_S * self.random.random(), self._catch_up, life)

    # --- looking on

    def look_on(self, gateways: Sequence[str], until_s: float) -> None:
        """Somebody looks at the cluster by one gateway after the other, and what that keeps anywhere is bounded."""
        first, *rest = gateways
        process = self.processes[first]
        if process.life is not None:
            self.in_life(process, self.now, self._sessions.look, process, 2 * LOOK_EVERY_S)
        self._check_watching(len(gateways))
        if self.now + LOOK_EVERY_S < until_s:
            self.at(self.now + LOOK_EVERY_S, self.look_on, (*rest, first), until_s)

    def _check_watching(self, gateways: int) -> None:
        for process in self.processes.values():
            life = process.life
            if life is None or life.node is None:
                continue
            node, works = life.node, len(life.machine.works)
            kept = (len(node.watchers), len(node.looking.heard), len(node.moves) if node.moves is not None else 0)
            if kept[0] > gateways or kept[1] > len(process.spec.peers) or kept[2] > works:
                raise Violation("I4", f"{process.name} keeps {kept} of watchers, reports and moves, with {works} works")

    def handle(self, process: Process[Machine], event: Event) -> None:
        """Something that a process learns now, beside messages."""
        if process.life is not None:
            self._note(type(event).__name__.encode(), process)
            super().handle(process, event)

    def _watched(self, process: Process[Machine]) -> Observe:
        return partial(self._observe, process)

    def write_down(self, who: str, event: object, effects: Sequence[object]) -> None:
        """A turn, for the trace of a run."""
        if self.log is not None:
            self.log.append(f"{self.now:9.4f} {who:<12} {_short(event)}")
            self.log.extend(f"{'':9} {'':<12}   -> {_short(effect)}" for effect in effects)

    def _observe(self, process: Process[Machine], event: Event, effects: list[Effect]) -> None:
        if self.log is not None:
            self.write_down(process.name, event, effects)
        assert process.life is not None
        process.life.machine.hear(event)
        self.watcher.observed(process.spec, process.life.incarnation, process.life.actor, event, effects)
        self._turns += 1
        if self._turns % self._check_every == 0:
            process.life.actor.check(self.clock(process))
        if self._traps and any(isinstance(effect, Send) and isinstance(effect.message, ASKS_A_POOL) for effect in effects):
            self._spring(FaultKind.STOP_ASKER, process.name)

    def note(self, what: bytes, name: str) -> None:
        """Something happened at a process: part of the digest."""
        self._note(what, self.processes[name])

    def _note(self, what: bytes, process: Process[Any]) -> None:
        self._digest.update(_PACK_TIME(self.now) + process.name.encode() + what)

    # --- what machines ask

    def half_written(self, name: str) -> None:
        """`name` is in the middle of a copy into a pool."""
        self._spring(FaultKind.STOP_WRITER, name)

    def half_read(self, name: str, *, remote: bool) -> None:
        """`name` is in the middle of a read of another's slots."""
        self._spring(FaultKind.STOP_READER, name)
        if remote and self._traps:
            self._spring(FaultKind.SUSPEND, self.processes[name].spec.host)

    def reach(self, reader: str, owner: str, incarnation: int) -> str:
        """Can `reader` read from the life `incarnation` of `owner` over the network: "yes", "no", or "silent"?"""
        life = self.processes[owner].life
        if life is None or life.incarnation != incarnation:
            return "no"
        cut = self.wires.cut[reader, owner] or self.wires.cut[owner, reader]
        return "silent" if life.paused or cut else "yes"

    def slowness(self, host: str) -> float:
        """By how much copies and computing are stretched on a host."""
        return self._slow.get(host, 1.0)

    # --- faults

    def schedule(self, fault: Fault) -> None:
        """Let a fault happen at its time."""
        self.at(fault.at_s, self._strike, fault)

    def heal(self) -> None:
        """End all faults: links work, the stopped go on, the dead and the draining begin a new life."""
        for fault in self._active:
            if fault.kind is FaultKind.DRAIN:
                self._drain_timed_out(self.processes[fault.targets[0]])
        self._active.clear()
        self._traps.clear()
        self.wires.cut.clear()
        for disk in self.disks.values():
            disk.fault = ""
        self._apply_levels()
        for name in sorted(self._starving):
            self._feed(name)
        for host in sorted(self._suspended):
            self._wake_up(host)
        for name, process in self.processes.items():
            self.resume(name)
            if process.life is None:
                self.restart(name)
            self._wake(name)

    def _strike(self, fault: Fault) -> None:
        self.faults_begun[fault.kind.value] += 1
        if self.log is not None:
            self.log.append(f"{self.now:9.4f} fault {fault}")
        self._active.append(fault)
        self._apply_levels()
        match fault.kind, fault.targets:
            case FaultKind.PARTITION | FaultKind.ONE_WAY, _:
                self.wires.cut.update(self._cut_pairs(fault))
            case FaultKind.CRASH, (name,):
                self.crash(name)
            case FaultKind.CLOCK, (name,):
                self._change_clock(name, CLOCK_AHEAD)
            case FaultKind.IMPOSTOR, (name, victim):
                self._impersonate(self.processes[victim], name)
            case FaultKind.PAUSE, (name,):
                self.pause(name)
            case FaultKind.SUSPEND, (name,) if fault.amount:
                self._traps[fault.kind, self.processes[name].spec.host] = fault
                return
            case FaultKind.SUSPEND, (name,):
                self.suspend(self.processes[name].spec.host, fault.duration_s)
            case FaultKind.LATE, names:
                for name in names:
                    self.starve(name)
            case FaultKind.STOP_ASKER | FaultKind.STOP_WRITER | FaultKind.STOP_READER, (name,):
                self._traps[fault.kind, name] = fault
                return
            case FaultKind.DRAIN, (name,):
                process = self.processes[name]
                self.in_life(process, self.now, self.handle, process, DrainWanted())
                if self.stores is not None:
                    self.stores.drains(name)
            case FaultKind.ROLE, (name,):
                self._ask_for_role(name)
            case FaultKind.REST, (name,):
                self._have_rest(name, True)
            case FaultKind.BIT_FLIP, (name,):
                self._flip_bits(name, int(fault.amount))
            case FaultKind.DISK_FULL | FaultKind.DISK_FAIL, (name,):
                self.disks[name].fault = DISK_FAULTS[fault.kind]
            case FaultKind.GARBAGE, (name,):
                for _ in range(int(fault.amount)):
                    self._garbage(self.processes[name])
        self.at(self.now + fault.duration_s, self._end, fault)

    def _spring(self, kind: FaultKind, name: str) -> None:
        """Stop a process, or suspend a host, at the moment that was waited for."""
        fault = self._traps.pop((kind, name), None)
        if fault is not None:
            stop = partial(self.suspend, name, fault.duration_s) if kind is FaultKind.SUSPEND else partial(self.pause, name)
            self.at(self.now, stop)
            self.at(self.now + fault.duration_s, self._end, fault)

    def _end(self, fault: Fault) -> None:
        if fault not in self._active:
            return
        self._active.remove(fault)
        self._apply_levels()
        match fault.kind, fault.targets:
            case FaultKind.PARTITION | FaultKind.ONE_WAY, _:
                self.wires.cut.subtract(self._cut_pairs(fault))
            case FaultKind.CRASH, (name,):
                self.restart(name)
            case FaultKind.CLOCK, (name,):
                self._change_clock(name, 0)
            case FaultKind.PAUSE | FaultKind.STOP_ASKER | FaultKind.STOP_WRITER | FaultKind.STOP_READER, (name,):
                self.resume(name)
            case FaultKind.SUSPEND, (name,):
                self._wake_up(self.processes[name].spec.host)
            case FaultKind.LATE, names:
                for name in names:
                    self._feed(name)
            case FaultKind.DRAIN, (name,):
                self._drain_timed_out(self.processes[name])
            case FaultKind.REST, (name,):
                self._wake(name)
            case FaultKind.ROLE, (name,):
                self._ask_for_role(name)
            case FaultKind.DISK_FULL | FaultKind.DISK_FAIL, (name,):
                self.disks[name].fault = ""

    def _change_clock(self, name: str, ahead: int) -> None:
        """The host of a process is started anew, by another clock and without the lock file that told of former lives."""
        self.crash(name)
        self.processes[name].clock_ahead = ahead
        self.restart(name)

    def _impersonate(self, process: Process[Machine], name: str) -> None:
        """One frame to `process` by somebody who says that he is `name` in a new life, and no more."""
        life = process.life
        if life is None or life.paused or name not in process.spec.peers:
            return
        if self._sessions.keyed:
            self._betray(process, life.incarnation, name)
            return
        frame = Envelope(
            version=PROTOCOL_VERSION,
            sender=name,
            incarnation=self.random.choice((1, 1 << 48)),
            epoch=1,
            to_incarnation=0,
            floor=1,
            sequence=0,
            ack_epoch=0,
            ack=0,
        )
        self._sessions.arrive(process, encode(frame), name)

    def _betray(self, process: Process[Machine], incarnation: int, name: str) -> None:
        """One frame to `process` by another member, who knows all there is to know of `name`, and says that it begins anew."""
        known: Any = _session(process).dump()["peers"]
        victim = known[name]
        frame = Envelope(
            version=PROTOCOL_VERSION,
            sender=name,
            incarnation=victim["incarnation"] or 1,
            epoch=victim["remote_epoch"] + 1,
            to_incarnation=incarnation,
            floor=victim["epoch"] + 1,
            sequence=0,
            ack_epoch=0,
            ack=0,
        )
        members = [each for each in self.processes if each not in (name, process.name)]
        self._must_drop(process, encode(frame), "traitor's", self.random.choice(members))

    def _ask_for_role(self, name: str) -> None:
        """The operator asks a conductor that lives, if there is one."""
        spec = self.processes[name].spec
        conductors = [each for each in self.processes.values() if each.spec.role == "conductor" and each.life is not None]
        if conductors:
            process = self.random.choice(conductors)
            wish = SetRole(name, BECOMES[spec.role])
            self.in_life(process, self.now, self.handle, process, Asked("role", wish))

    def _have_rest(self, name: str, resting: bool) -> None:
        """The operator says so to a gateway that lives, if there is one."""
        gateways = [each for each in self.processes.values() if each.spec.role == "gateway" and each.life is not None]
        talking = [each for each in gateways if name in (each.name, *each.spec.peers)]
        if talking:
            process = self.random.choice(talking)
            self.in_life(process, self.now, self._sessions.rest, process, name, resting)

    def _wake(self, name: str, looks: int = 2) -> None:
        """The operator says so until it serves, and looks once more: what he said before by a gateway that was stopped may come
        late."""
        life = self.processes[name].life
        if life is not None and life.node is not None and life.node.resting:
            self._have_rest(name, False)
            looks = 2
        if looks > 1:
            self.at(self.now + LOOK_EVERY_S, self._wake, name, looks - 1)

    def _drain_timed_out(self, process: Process[Machine]) -> None:
        """It hands over what it has left and leaves; a new life begins."""
        lives = process.lives
        self.in_life(process, self.now, self._hand_over, process)
        self.at(self.now + LEAVES_WITHIN_S, self._begin_anew, process, lives)

    def _hand_over(self, process: Process[Machine]) -> None:
        self._late.add((process.name, process.lives))
        self.handle(process, DrainTimedOut())
        self._leave(process, self.now + LINGER_S)

    def _begin_anew(self, process: Process[Machine], lives: int) -> None:
        if process.lives == lives:  # else somebody has started it meanwhile
            self.crash(process.name)  # one that is stopped, and has not heard
            self.restart(process.name)

    def _leave(self, process: Process[Machine], latest: float) -> None:
        if (process.name, process.lives) not in self._late:
            self.watcher.leaves(process)
        super()._leave(process, latest)

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
        self.wires.drop = level[FaultKind.DROP]
        self.wires.duplicate = level[FaultKind.DUPLICATE]
        self.wires.delay_s = level[FaultKind.DELAY]
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
        if self.stores is not None:
            self.stores.flip(name, blocks)
        life = self.processes[name].life
        if life is None or life.machine.segment is None:
            return
        segment = life.machine.segment
        stored = [slot for slot, generation in enumerate(segment.generations) if generation and generation % 2 == 0]
        for slot in self.random.sample(stored, min(blocks, len(stored))):
            at = slot * self._layout.block_bytes + self.random.randrange(self._layout.block_bytes)
            segment.memory[at] ^= 1 << self.random.randrange(8)
            segment.flipped.add(slot)

    def _garbage(self, process: Process[Machine]) -> None:
        """A frame that must be dropped and counted, and do nothing else."""
        life = process.life
        if life is None or life.paused:
            return
        kind, frame = self._draw_garbage(process)
        self._must_drop(process, frame, kind, self.random.choice(list(process.spec.peers)))

    def _must_drop(self, process: Process[Machine], frame: bytes, kind: str, speaker: str) -> None:
        self.garbage[kind] += 1
        session = _session(process)
        before = _dropped(session)
        assert process.life is not None
        assert process.life.node is not None
        outers = process.life.node.receive(self.clock(process), frame, speaker if self._sessions.keyed else None)
        if outers or _dropped(session) != before + 1:
            raise Violation("I6", f"{process.name} did not drop and count a {kind} frame: {outers}")

    def _draw_garbage(self, process: Process[Machine]) -> tuple[str, bytes]:
        random, peers = self.random, process.spec.peers
        former = [frame for peer in peers for frame in self._stale_frames(process, peer)]
        speaking = [peer for peer in peers if self._speaks(process, peer)]
        kinds = ["noise", "truncated", "stranger", "version"]
        kinds += ["old_life"] * 2 * bool(former) + ["impostor"] * 2 * bool(speaking)
        kind = random.choice(kinds)
        if kind == "old_life":
            return kind, random.choice(former)
        if kind == "noise":
            return kind, random.randbytes(random.randrange(200))
        impostor = kind == "impostor"
        envelope = Envelope(
            version=99 if kind == "version" else PROTOCOL_VERSION,
            sender="stranger" if kind == "stranger" else random.choice(speaking if impostor else peers),
            incarnation=1 << 40,
            epoch=1,
            to_incarnation=0 if impostor else process.next_incarnation,
            floor=1,
            sequence=1,
            ack_epoch=1,
            ack=0,
            bodies=(b"\x90",),
        )
        frame = encode(envelope)
        return kind, frame[: random.randrange(len(frame))] if kind == "truncated" else frame

    def _stale_frames(self, process: Process[Machine], peer: str) -> list[bytes]:
        """Frames to `process` of a life of `peer` that it knows to be over: it is in conversation with a newer one. Of a peer
        that has been silent for too long it hears any life."""
        current = self.processes[peer].life
        if _session(process).silent_s(self.clock(process), peer) >= self._silence_s:
            return []
        peers: Any = _session(process).dump()["peers"]
        known = peers[peer]
        if current is None or not known["up"] or known["incarnation"] != current.incarnation:
            return []
        former = [frame for to, frame in self.processes[peer].former_frames if to == process.name]
        return [frame for frame in former if decode_envelope(frame).incarnation < current.incarnation]

    def _speaks(self, process: Process[Machine], peer: str) -> bool:
        """Has `process` heard `peer` just now, so that it hears nobody else by that name?"""
        session = _session(process)
        return peer in session.up_peers and session.silent_s(self.clock(process), peer) < session.tick_s


def _session(process: Process[Machine]) -> Session:
    assert process.life is not None
    assert process.life.node is not None
    return process.life.node.session


def _dropped(session: Session) -> int:
    return sum(count for name, count in session.counts.items() if name.startswith("dropped["))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else text[:400] + "..."
