"""A world with one source of randomness, in which processes crash, stop and sleep, and checkers look on.

Every frame is encoded and decoded by the sessions. Nothing here knows what an actor means by what it does; which faults strike,
and when, is up to `injection`.
"""

import enum
import struct
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, Protocol

import xxhash

from mooncake_zmq.core.actor import Actor, DrainTimedOut, Effect, Event, Send
from mooncake_zmq.core.messages import (
    PROTOCOL_VERSION,
    Hello,
    LeaseBlocks,
    ReserveSlots,
    SegmentRef,
)
from mooncake_zmq.core.session import SessionSettings
from mooncake_zmq.core.work import LentPart
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.pool.node.disk_tier import DiskContents
from mooncake_zmq.simulation.checkers import Checkers
from mooncake_zmq.simulation.disk import SimDisk
from mooncake_zmq.simulation.engine import SimSequence
from mooncake_zmq.simulation.engine_store import EngineStore
from mooncake_zmq.simulation.links import ProtocolsOf, Sessions, Wires
from mooncake_zmq.simulation.machine import Hardware, Machine, Slot
from mooncake_zmq.simulation.memory import Segment
from mooncake_zmq.simulation.models import MODEL
from mooncake_zmq.simulation.releases import THIS
from mooncake_zmq.simulation.works import steps_of
from mooncake_zmq.simulation.world import LINGER_S, Incarnation, Observe, Process, ProcessSpec, World

CHECK_EVERY = 4
"""The number of turns between checks of an actor, as a check costs more than a turn; what it would find wrong lasts, and a seed
that is repeated alone checks each turn."""
CATCH_UP_S = 0.0006
"""The longest time that a process takes for each event that came while it was stopped."""
LEAVES_WITHIN_S = LINGER_S + 0.2
"""The time within which a process is gone whose drain has run out of time."""
POOL_REQUESTS = (LeaseBlocks, ReserveSlots)
_PACK_TIME = struct.Struct("<d").pack


class Moment(enum.Enum):
    """A moment in the middle of what a process does, at which a fault can be set to strike."""

    ASKING = "it has just asked a pool for blocks or slots"
    WRITING = "it is in the middle of a copy into a pool"
    READING = "it is in the middle of a read of another process's slots"
    LENDING = "it is asked for its part of a step's attention"
    SENDING = "its store has sent half of a value on a stream"
    READING_REMOTE = "a process of this host is in the middle of a read of another host's slots"


class Neighbours(Protocol):
    """The stores beside cache-nodes, as far as a simulator must inform them."""

    def began(self, process: Process[Any]) -> None: ...
    def died(self, name: str) -> None: ...
    def suspended(self, names: Sequence[str], until: float) -> None: ...
    def drains(self, name: str) -> None: ...
    def flip(self, name: str, count: int) -> None: ...


class Simulator(World[Machine]):
    """The simulated cluster: sessions over wires that lose frames, real bytes, and checkers that look on."""

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
        protocols: ProtocolsOf = lambda process: THIS,
    ) -> None:
        """`keyed`: the wire names the key by which each frame came. `check_every`: the number of turns between checks of an
        actor's invariants."""
        self._models = sorted({spec.model for spec in specs if spec.model}) or [MODEL]
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
            protocols=protocols,
        )
        self._starving: set[str] = set()
        self.sessions = link
        self.silence_s = session.peer_timeout_s
        super().__init__(specs=specs, link=link, build=self._embody, watch=self._watched)
        self.random = random
        self.hardware = hardware
        self.watcher = checkers
        self.segments: dict[tuple[str, int], Segment] = {}
        self.approximate: set[Slot] = set()
        self.disks = {spec.name: SimDisk(layout, spec.disk_slots) for spec in specs if spec.disk_slots}
        self.copy_fail = 0.0
        self.copy_tear = 0.0
        self.log: list[str] | None = None
        self.layout = layout
        self._digest = xxhash.xxh3_64()
        self.traps: dict[tuple[Moment, str], Callable[[], None]] = {}
        """Actions to do once, at the next such moment of a process or, when it reads from another host, of its host."""
        self.slow: dict[str, float] = {}
        """The factor by which copies and computing are slower on each host."""
        self._suspended: dict[str, list[Any]] = {}
        """The calls of each suspended host that are due once it goes on."""
        self._check_every = check_every
        self._turns = 0
        self._late: set[tuple[str, int]] = set()
        """The incarnations whose drain has run out of time: they leave, whatever they still have."""
        self.stores: Neighbours | None = None
        """The stores beside the cache-nodes, if there are any."""
        checkers.attach(self)
        for process in self.processes.values():
            self.restart(process.name)

    @property
    def digest(self) -> str:
        """Return the digest of everything that happened so far, in order."""
        return self._digest.hexdigest()

    # --- incarnations

    def _embody(self, process: Process[Machine]) -> tuple[Machine, Actor]:
        """Make a new incarnation's machine and actor. Of the former one only the segment file, which is removed, and the disk
        are left."""
        name, spec = process.name, process.spec
        for (node, _), old in self.segments.items():
            if node == name:
                old.linked = False
        incarnation = process.next_incarnation
        segment = None
        if spec.slots:
            engine_store = EngineStore() if spec.role == "cache-node" else None
            segment = Segment(name, incarnation, spec.host, self.layout, spec.slots, engine_store)
            self.segments[name, incarnation] = segment
        disk = self.disks.get(name)
        actor = spec.make(incarnation, disk.contents() if disk else DiskContents())
        machine = Machine(
            self,
            name=name,
            incarnation=incarnation,
            host=spec.host,
            layout=self.layout,
            segment=segment,
            disk=disk,
            model=spec.model,
            later=lambda delay_s, action: self.in_incarnation(process, self.now + delay_s, action),
            done=partial(self.work_done, process),
            progressed=partial(self.progressed, process),
            clock=partial(self.clock, process),
            steps_of=steps_of,
        )
        return machine, actor

    def _hello(self, process: Process[Any]) -> Hello:
        name, slots = process.name, process.spec.slots
        return Hello(
            protocol=PROTOCOL_VERSION,
            role=process.spec.role,
            host=process.spec.host,
            model=process.spec.model or " ".join(self._models),
            tokenizer=MODEL,
            layout=self.layout.fingerprint,
            segment=SegmentRef(path=f"{name}.{process.starts}", endpoint=f"sim:{name}", slots=slots) if slots else None,
            may_become=process.spec.may_become,
            part=process.spec.part,
        )

    def restart(self, name: str, role: str = "") -> None:
        """Begin a process's next incarnation, unless it runs."""
        process = self.processes[name]
        if process.current is None:
            super().restart(name, role)
            if process.still_since is not None:
                self.pause(name)
            if self.stores is not None:
                self.stores.began(process)

    def crash(self, name: str) -> None:
        """End a process at once."""
        process = self.processes[name]
        if process.current is None:
            return
        self._note(b"crash", process)
        if self.stores is not None:
            self.stores.died(name)
        incarnation = process.current.incarnation
        self.watcher.died(name, incarnation)
        super().crash(name)

    def pause(self, name: str) -> None:
        """Stop a process, as by SIGSTOP."""
        current = self.processes[name].current
        if current is not None:
            current.paused = True
            current.machine.stopped_at = current.machine.now

    def resume(self, name: str) -> None:
        """Continue a process, as by SIGCONT: everything that came meanwhile is handled now, in order."""
        process = self.processes[name]
        current = process.current
        if current is None or not current.paused or process.still_since is not None:
            return
        current.paused = False
        current.machine.stopped_at = current.machine.now
        self._catch_up(current)

    def suspend(self, host: str, for_s: float) -> None:
        """Suspend a host and its clock until it wakes."""
        if host in self._suspended:
            return
        for name in self._on(host):
            self.processes[name].still_since = self.now
            self.pause(name)
        self._suspended[host] = self.take_out(host)
        if self.stores is not None:
            self.stores.suspended(self._on(host), self.now + for_s)

    def wake_up(self, host: str) -> None:
        """Wake a host, which goes on as if no time had passed; it has yet to find out what its neighbours have done
        meanwhile."""
        if host not in self._suspended:
            return
        slept_s = 0.0
        for name in self._on(host):
            process = self.processes[name]
            assert process.still_since is not None
            slept_s = self.now - process.still_since
            process.still_since = None
            process.slept_s += slept_s
            if process.current is not None:
                process.current.machine.woke_at = self.now
            self.resume(name)
        self.put_back(self._suspended.pop(host), slept_s)

    def _on(self, host: str) -> list[str]:
        return [name for name, process in self.processes.items() if process.spec.host == host]

    def starve(self, name: str) -> None:
        """Give a process no CPU."""
        self.pause(name)
        self._starving.add(name)

    def feed(self, name: str) -> None:
        """Give it the CPU again."""
        self._starving.discard(name)
        current = self.processes[name].current
        if current is not None and current.paused:
            self.sessions.read_first(current)
            self.resume(name)

    def wake_all(self) -> None:
        """Let every process and host go on that is starved or suspended."""
        for name in sorted(self._starving):
            self.feed(name)
        for host in sorted(self._suspended):
            self.wake_up(host)

    def _is_starved(self, process: Process[Machine], peer: str, incarnation: int) -> bool:
        """Return whether the kernel shows that a neighbour on the same host gets no CPU."""
        here = self.processes[peer].spec.host == process.spec.host
        return here and peer in self._starving and self.alive(peer, incarnation)

    def _catch_up(self, current: Incarnation[Machine]) -> None:
        """Handle one event that came while the process was stopped; the next one takes its own time."""
        if current.paused or not current.postponed or self.processes[current.machine.name].current is not current:
            return
        action, arguments = current.postponed[0]
        action(*arguments)
        if current.postponed:
            current.postponed.popleft()
        self.at(self.now + CATCH_UP_S * self.random.random(), self._catch_up, current)

    # --- observing

    def handle(self, process: Process[Machine], event: Event) -> None:
        """Handle an event other than a message."""
        if process.current is not None:
            self._note(type(event).__name__.encode(), process)
            super().handle(process, event)

    def _watched(self, process: Process[Machine]) -> Observe:
        return partial(self._observe, process)

    def write_down(self, who: str, event: object, effects: Sequence[object]) -> None:
        """Write a turn into the trace of a run."""
        if self.log is not None:
            self.log.append(f"{self.now:9.4f} {who:<12} {_short(event)}")
            self.log.extend(f"{'':9} {'':<12}   -> {_short(effect)}" for effect in effects)

    def _observe(self, process: Process[Machine], event: Event, effects: list[Effect]) -> None:
        if self.log is not None:
            self.write_down(process.name, event, effects)
        assert process.current is not None
        process.current.machine.learn(event)
        self.watcher.observed(process.spec, process.current.incarnation, process.current.actor, event, effects)
        self._turns += 1
        if self._turns % self._check_every == 0:
            process.current.actor.check(self.clock(process))
        if self.traps and any(isinstance(effect, Send) and isinstance(effect.message, POOL_REQUESTS) for effect in effects):
            self._spring(Moment.ASKING, process.name)

    def note(self, what: bytes, name: str) -> None:
        """Add an event of a process to the digest."""
        self._note(what, self.processes[name])

    def _note(self, what: bytes, process: Process[Any]) -> None:
        self._digest.update(_PACK_TIME(self.now) + process.name.encode() + what)

    # --- called by machines

    def half_written(self, name: str) -> None:
        """Note that `name` is in the middle of a copy into a pool."""
        self._spring(Moment.WRITING, name)

    def half_read(self, name: str, *, remote: bool) -> None:
        """Note that `name` is in the middle of a read of another's slots."""
        self._spring(Moment.READING, name)
        if remote and self.traps:
            self._spring(Moment.READING_REMOTE, self.processes[name].spec.host)

    def asked_of(self, name: str) -> None:
        """Note that `name` is asked for its part of a step's attention."""
        self._spring(Moment.LENDING, name)

    def half_sent(self, name: str) -> None:
        """Note that the store beside `name` is in the middle of an answer on a stream."""
        self._spring(Moment.SENDING, name)

    def _spring(self, moment: Moment, name: str) -> None:
        strike = self.traps.pop((moment, name), None)
        if strike is not None:
            strike()

    def reach(self, reader: str, owner: str, incarnation: int) -> str:
        """Return whether `reader` can read from the incarnation `incarnation` of `owner` over the network: "yes", "no", or
        "silent"."""
        current = self.processes[owner].current
        if current is None or current.incarnation != incarnation:
            return "no"
        cut = self.wires.cut[reader, owner] or self.wires.cut[owner, reader]
        return "silent" if current.paused or cut else "yes"

    def lent(self, name: str, part: LentPart) -> SimSequence | None:
        """Return what a lender attends to for the process `name`; None if that has ended, or is not reached."""
        incarnation = int.from_bytes(part.place.token)
        if self.reach(name, part.lender, incarnation) != "yes":
            return None
        current = self.processes[part.lender].current
        assert current is not None
        return current.machine.lent.get(part.place.number)

    def slowness(self, host: str) -> float:
        """Return the factor by which copies and computing are slower on a host."""
        return self.slow.get(host, 1.0)

    # --- drains

    def drain_timed_out(self, process: Process[Machine]) -> None:
        """End a drain: the process hands over what it has left and leaves; a new incarnation begins."""
        starts = process.starts
        self.in_incarnation(process, self.now, self._hand_over, process)
        self.at(self.now + LEAVES_WITHIN_S, self._begin_anew, process, starts)

    def _hand_over(self, process: Process[Machine]) -> None:
        self._late.add((process.name, process.starts))
        self.handle(process, DrainTimedOut())
        self._leave(process, self.now + LINGER_S)

    def _begin_anew(self, process: Process[Machine], starts: int) -> None:
        if process.starts == starts:  # else it has been restarted meanwhile
            self.crash(process.name)  # a stopped process has not received it
            self.restart(process.name)

    def _leave(self, process: Process[Machine], latest: float) -> None:
        if (process.name, process.starts) not in self._late:
            self.watcher.leaves(process)
        super()._leave(process, latest)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else text[:400] + "..."
