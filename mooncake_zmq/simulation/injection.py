"""Carries out a seed's faults on a simulator's cluster, and ends them."""

from collections import Counter
from collections.abc import Callable
from functools import partial

from mooncake_zmq.core.actor import DrainWanted
from mooncake_zmq.simulation.faults import TANGLES, Fault, FaultKind
from mooncake_zmq.simulation.garbage import Garbage
from mooncake_zmq.simulation.operator import Operator
from mooncake_zmq.simulation.simulator import Moment, Simulator

CLOCK_AHEAD = 1 << 32
DISK_FAULTS = {FaultKind.DISK_FULL: "full", FaultKind.DISK_FAIL: "failing"}
STOPS_AT = {
    FaultKind.STOP_ASKER: Moment.ASKING,
    FaultKind.STOP_WRITER: Moment.WRITING,
    FaultKind.STOP_READER: Moment.READING,
    FaultKind.STOP_LENDER: Moment.LENDING,
}


class Injection:
    """Carries out faults at their times. `begun`: the number of each kind; one that waits for a moment begins with it."""

    def __init__(self, simulator: Simulator) -> None:
        self.begun: Counter[str] = Counter()
        self.garbage = Garbage(simulator)
        self.operator = Operator(simulator)
        self._simulator = simulator
        self._active: list[Fault] = []

    def schedule(self, fault: Fault) -> None:
        """Schedule a fault at its time."""
        self._simulator.at(fault.at_s, self._strike, fault)

    def heal(self) -> None:
        """End all faults: links work, stopped processes go on, crashed and draining ones restart."""
        simulator = self._simulator
        for fault in self._active:
            if fault.kind is FaultKind.DRAIN:
                simulator.drain_timed_out(simulator.processes[fault.targets[0]])
        self._active.clear()
        simulator.traps.clear()
        simulator.wires.cut.clear()
        for disk in simulator.disks.values():
            disk.fault = ""
        self._apply_levels()
        simulator.wake_all()
        for name, process in simulator.processes.items():
            simulator.resume(name)
            if process.current is None:
                simulator.restart(name)
            self.operator.uncordon(name)

    def _strike(self, fault: Fault) -> None:
        simulator = self._simulator
        if simulator.log is not None:
            simulator.log.append(f"{simulator.now:9.4f} fault {fault}")
        self._active.append(fault)
        self._apply_levels()
        match fault.kind, fault.targets:
            case FaultKind.PARTITION | FaultKind.ONE_WAY, _:
                simulator.wires.cut.update(self._cut_pairs(fault))
            case FaultKind.CRASH, (name,):
                simulator.crash(name)
            case FaultKind.CLOCK, (name,):
                self._change_clock(name, CLOCK_AHEAD)
            case FaultKind.IMPOSTOR, (name, victim):
                self.garbage.impersonate(simulator.processes[victim], name)
            case FaultKind.PAUSE, (name,):
                simulator.pause(name)
            case FaultKind.SUSPEND, (name,) if fault.amount:
                host = simulator.processes[name].spec.host
                self._set_trap(fault, Moment.READING_REMOTE, host, partial(simulator.suspend, host, fault.duration_s))
                return
            case FaultKind.SUSPEND, (name,):
                simulator.suspend(simulator.processes[name].spec.host, fault.duration_s)
            case FaultKind.LATE, names:
                for name in names:
                    simulator.starve(name)
            case kind, (name,) if kind in STOPS_AT:
                self._set_trap(fault, STOPS_AT[kind], name, partial(simulator.pause, name))
                return
            case FaultKind.DRAIN, (name,):
                process = simulator.processes[name]
                simulator.in_incarnation(process, simulator.now, simulator.handle, process, DrainWanted())
                if simulator.stores is not None:
                    simulator.stores.drains(name)
            case FaultKind.ROLE, (name,):
                self.operator.ask_for_role(name)
            case FaultKind.CRASH_SENDER, (name,):
                self._set_trap(fault, Moment.SENDING, name, partial(simulator.crash, name))
                return
            case FaultKind.TANGLE, (name,):
                self._tangle(fault, name)
            case FaultKind.CORDON, (name,):
                self.operator.cordon(name, True)
            case FaultKind.BIT_FLIP, (name,):
                self._flip_bits(name, int(fault.amount))
            case FaultKind.DISK_FULL | FaultKind.DISK_FAIL, (name,):
                simulator.disks[name].fault = DISK_FAULTS[fault.kind]
            case FaultKind.GARBAGE, (name,):
                for _ in range(int(fault.amount)):
                    self.garbage.send(simulator.processes[name])
        self._begun(fault)

    def _set_trap(self, fault: Fault, moment: Moment, target: str, stop: Callable[[], None]) -> None:
        """Begin the fault at the next such moment, not before."""

        def strike() -> None:
            self._simulator.at(self._simulator.now, stop)
            self._begun(fault)

        self._simulator.traps[moment, target] = strike

    def _begun(self, fault: Fault) -> None:
        self.begun[fault.kind.value] += 1
        self._simulator.at(self._simulator.now + fault.duration_s, self._end, fault)

    def _end(self, fault: Fault) -> None:
        simulator = self._simulator
        if fault not in self._active:
            return
        self._active.remove(fault)
        self._apply_levels()
        match fault.kind, fault.targets:
            case FaultKind.PARTITION | FaultKind.ONE_WAY, _:
                simulator.wires.cut.subtract(self._cut_pairs(fault))
            case FaultKind.CRASH | FaultKind.CRASH_SENDER, (name,):
                simulator.restart(name)
            case FaultKind.TANGLE, (name,):
                simulator.restart(name)
                self.operator.uncordon(name)
            case FaultKind.CLOCK, (name,):
                self._change_clock(name, 0)
            case kind, (name,) if kind is FaultKind.PAUSE or kind in STOPS_AT:
                simulator.resume(name)
            case FaultKind.SUSPEND, (name,):
                simulator.wake_up(simulator.processes[name].spec.host)
            case FaultKind.LATE, names:
                for name in names:
                    simulator.feed(name)
            case FaultKind.DRAIN, (name,):
                simulator.drain_timed_out(simulator.processes[name])
            case FaultKind.CORDON, (name,):
                self.operator.uncordon(name)
            case FaultKind.ROLE, (name,):
                self.operator.ask_for_role(name)
            case FaultKind.DISK_FULL | FaultKind.DISK_FAIL, (name,):
                simulator.disks[name].fault = ""

    def _tangle(self, fault: Fault, name: str) -> None:
        """Begin its steps one after the other: the crash is over with the fault, as the cordon is."""
        simulator = self._simulator
        begin: dict[FaultKind, Callable[[], None]] = {
            FaultKind.CORDON: lambda: self.operator.cordon(name, True),
            FaultKind.ROLE: lambda: self.operator.ask_for_role(name),
            FaultKind.CRASH: lambda: simulator.crash(name),
        }
        for place, part in enumerate(TANGLES[int(fault.amount)]):
            simulator.at(simulator.now + place * fault.duration_s / 40, begin[part])

    def _change_clock(self, name: str, ahead: int) -> None:
        """Restart the host of a process, by another clock and without the lock file that names former incarnations."""
        simulator = self._simulator
        simulator.crash(name)
        simulator.processes[name].clock_ahead = ahead
        simulator.restart(name)

    def _apply_levels(self) -> None:
        simulator = self._simulator
        level = {kind: 0.0 for kind in FaultKind}
        simulator.slow.clear()
        for disk in simulator.disks.values():
            disk.slowness = 1.0
        for fault in self._active:
            level[fault.kind] = max(level[fault.kind], fault.amount)
            if fault.kind is FaultKind.SLOW:
                host = simulator.processes[fault.targets[0]].spec.host
                simulator.slow[host] = max(simulator.slow.get(host, 1.0), fault.amount)
            elif fault.kind is FaultKind.DISK_SLOW:
                disk = simulator.disks[fault.targets[0]]
                disk.slowness = max(disk.slowness, fault.amount)
        simulator.wires.drop = level[FaultKind.DROP]
        simulator.wires.duplicate = level[FaultKind.DUPLICATE]
        simulator.wires.delay_s = level[FaultKind.DELAY]
        simulator.copy_fail = level[FaultKind.COPY_FAIL]
        simulator.copy_tear = level[FaultKind.COPY_TEAR]

    def _cut_pairs(self, fault: Fault) -> list[tuple[str, str]]:
        """Return the directed pairs that are cut: between two hosts, or between the two processes when they share one."""
        simulator = self._simulator
        one, two = fault.targets
        here, there = simulator.processes[one].spec.host, simulator.processes[two].spec.host
        pairs = [(one, two)]
        if here != there:
            ours = [p.name for p in simulator.processes.values() if p.spec.host == here]
            theirs = [p.name for p in simulator.processes.values() if p.spec.host == there]
            pairs = [(a, b) for a in ours for b in theirs]
        return pairs if fault.kind is FaultKind.ONE_WAY else pairs + [(b, a) for a, b in pairs]

    def _flip_bits(self, name: str, blocks: int) -> None:
        simulator = self._simulator
        if name in simulator.disks:
            simulator.disks[name].flip(simulator.random, 4 * blocks)
        if simulator.stores is not None:
            simulator.stores.flip(name, blocks)
        running = simulator.processes[name].current
        if running is None or running.machine.segment is None:
            return
        segment = running.machine.segment
        stored = [slot for slot, generation in enumerate(segment.generations) if generation and generation % 2 == 0]
        for slot in simulator.random.sample(stored, min(blocks, len(stored))):
            at = slot * simulator.layout.block_bytes + simulator.random.randrange(simulator.layout.block_bytes)
            segment.memory[at] ^= 1 << simulator.random.randrange(8)
            segment.flipped.add(slot)
