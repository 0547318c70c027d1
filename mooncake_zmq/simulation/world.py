"""A world under virtual time: one heap of events, processes with their incarnations, and the effects of actors carried out.

Three seams make it a test bed or a laboratory: the *link* brings messages, the *machine* carries out works, and an *observer*
sees every event with its effects. Nothing here knows what an actor means, or what may go wrong.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Generic, Protocol, TypeVar

from mooncake_zmq.core.actor import (
    Actor,
    Answered,
    CancelTimer,
    CancelWork,
    CloseSequence,
    Drained,
    Effect,
    Event,
    Fence,
    FromClient,
    OpenSequence,
    Publish,
    SetTimer,
    Start,
    TimerFired,
    TimerKey,
    ToClient,
    WorkDone,
    WorkProgress,
)
from mooncake_zmq.core.messages import Part
from mooncake_zmq.core.node import Node
from mooncake_zmq.core.work import Progress, Result, Work
from mooncake_zmq.pool.node.disk_tier import DiskContents

LINGER_S = 1.0
ANEW_S = 0.2
"""The time from the end of an incarnation to the start of the next one where the process changes its role."""
RECENT_FRAMES = 32
"""The number of an incarnation's last frames that are kept to be replayed after its end."""
MIN_STALE = 4096
"""The number of replaced or cancelled timers in the heap from which on it is swept."""

Observe = Callable[[Event, list[Effect]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process of the cluster. `make` builds its actor for an incarnation, from the contents of its disk; `slots`: the size
    of its segment; `disk_slots`: that of its disk, 0 for none. `may_become`, `part`: its settings of these names. `model`: the
    one of several that it is for; empty: all of them."""

    name: str
    role: str
    host: str
    peers: tuple[str, ...]
    make: Callable[[int, DiskContents], Actor]
    slots: int = 0
    disk_slots: int = 0
    may_become: str = ""
    part: Part = "both"
    model: str = ""


class Carrier(Protocol):
    """A machine: carries out the works of one incarnation, each of which ends exactly once."""

    def start(self, work_id: int, work: Work, deadline_s: float) -> None: ...
    def cancel(self, work_id: int) -> None: ...
    def fence(self, generations: Sequence[tuple[int, int]]) -> None: ...
    def open(self, asked: OpenSequence) -> None: ...
    def close(self, sequence: int) -> None: ...


M = TypeVar("M", bound=Carrier)


class Incarnation(Generic[M]):
    """One incarnation of a process: everything here is lost when it ends."""

    def __init__(self, incarnation: int, machine: M, actor: Actor, observe: Observe | None = None) -> None:
        self.incarnation = incarnation
        self.machine = machine
        self.actor = actor
        self.observe = observe
        self.node: Node | None = None
        """The process's sessions, if its link has them."""
        self.timers: dict[TimerKey, int] = {}
        self.postponed: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        """The calls due while it was stopped, and while it was catching up."""
        self.paused = False
        self.drained = False
        self.become = ""
        """The role of the process's next incarnation; empty: this one is the last."""
        self.sent_at = float("-inf")
        """The time of its last message, if its link records it."""
        self.recent: deque[tuple[str, bytes]] = deque(maxlen=RECENT_FRAMES)


class Process(Generic[M]):
    """A process through all its incarnations. `specs`: its possible roles; it begins as the first."""

    def __init__(self, specs: Sequence[ProcessSpec]) -> None:
        self.spec = specs[0]
        """The present spec, or that of the last incarnation."""
        self.by_role = {spec.role: spec for spec in specs}
        self.configured = specs[0].role
        self.name = self.spec.name
        self.starts = 0
        self.clock_ahead = 0
        """The number by which its host's clock raises new incarnations."""
        self.slept_s = 0.0
        """The total time for which its host has been suspended, and its monotonic clock stood still."""
        self.still_since: float | None = None
        """The time at which its host was suspended; None while it runs."""
        self.current: Incarnation[M] | None = None
        self.former_frames: deque[tuple[str, bytes]] = deque(maxlen=RECENT_FRAMES)

    @property
    def next_incarnation(self) -> int:
        """Return the number of the incarnation that begins now, once it is counted among `starts`."""
        return self.starts + self.clock_ahead


class Link(Protocol):
    """The transport of messages between processes."""

    def attach(self, world: "World[Any]") -> None:
        """Keep the world whose messages it carries."""

    def begin(self, process: Process[Any]) -> None:
        """Start a new incarnation's actor, and greet its peers."""

    def end(self, process: Process[Any], current: Incarnation[Any]) -> None:
        """Drop the state of an incarnation that has ended."""

    def handle(self, process: Process[Any], event: Event) -> None:
        """Have the actor handle an event, carry its effects out, and send its messages."""

    def pending(self, process: Process[Any]) -> int:
        """Return the number of a process's messages that may not have arrived yet."""


class World(Generic[M]):
    """Processes, virtual time and a heap of events. `specs`: several of one name are the roles of one process. `build`: makes
    the machine and the actor of a new incarnation. `watch`: returns its observer, if any. `anew_s`: see `ANEW_S`."""

    def __init__(
        self,
        *,
        specs: Iterable[ProcessSpec],
        link: Link,
        build: Callable[[Process[M]], tuple[M, Actor]],
        watch: Callable[[Process[M]], Observe | None],
        anew_s: float = ANEW_S,
    ) -> None:
        self.now = 0.0
        self.events = 0
        self.link = link
        named: dict[str, list[ProcessSpec]] = {}
        for spec in specs:
            named.setdefault(spec.name, []).append(spec)
        self.processes: dict[str, Process[M]] = {name: Process(its) for name, its in named.items()}
        self.to_client: Callable[[str, str, Any], None] = lambda gateway, request_id, output: None
        self.on_death: Callable[[str], None] = lambda name: None
        self._build = build
        self._watch = watch
        self._anew_s = anew_s
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._mail: deque[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = deque()
        """Entries as in the heap, of messages that all take equally long: these arrive in the order in which they were sent."""
        self._order = 0
        self._stale = 0
        """The number of replaced or cancelled timers in the heap."""
        self.acts: dict[type[Effect], Callable[[Process[M], Incarnation[M], Any], None]] = {
            SetTimer: self._set_timer,
            CancelTimer: self._cancel_timer,
            Start: lambda process, current, effect: current.machine.start(effect.work_id, effect.work, effect.deadline_s),
            CancelWork: lambda process, current, effect: current.machine.cancel(effect.work_id),
            Fence: lambda process, current, effect: current.machine.fence(effect.generations),
            OpenSequence: lambda process, current, effect: current.machine.open(effect),
            CloseSequence: lambda process, current, effect: current.machine.close(effect.sequence),
            ToClient: lambda process, current, effect: self.to_client(process.name, effect.request_id, effect.output),
            Publish: lambda process, current, effect: None,
            Answered: lambda process, current, effect: None,
            Drained: self._drained,
        }
        """The action for each type of effect; matching patterns takes three times as long."""
        link.attach(self)

    # --- time

    def clock(self, process: Process[M]) -> float:
        """Return the monotonic clock of a process's host."""
        return (self.now if process.still_since is None else process.still_since) - process.slept_s

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call."""
        self._order += 1
        heappush(self._heap, (time, self._order, action, arguments))

    def post(self, time: float, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Schedule a call, as `at`, that is no earlier than any call posted before."""
        self._order += 1
        self._mail.append((time, self._order, action, arguments))

    def in_incarnation(self, process: Process[M], time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call that happens in the process's present incarnation only, and not while it is stopped."""
        self._order += 1
        heappush(self._heap, (time, self._order, self._alive, (process, process.starts, action, arguments)))

    def run_until(self, time: float) -> None:
        """Let time pass."""
        heap, mail = self._heap, self._mail
        while heap or mail:
            if mail and (not heap or mail[0] < heap[0]):
                if mail[0][0] > time:
                    break
                self.now, _, action, arguments = mail.popleft()
            else:
                if heap[0][0] > time:
                    break
                self.now, _, action, arguments = heappop(heap)
            self.events += 1
            action(*arguments)
        self.now = time

    def take_out(self, host: str) -> list[tuple[float, int, Callable[..., None], tuple[Any, ...]]]:
        """Take all calls that are due in a host's processes out of the heap: see `put_back`."""
        due = (self._alive, self._timer)
        held = [entry for entry in self._heap if entry[2] in due and entry[3][0].spec.host == host]
        taken = {order for _, order, _, _ in held}
        self._heap[:] = [entry for entry in self._heap if entry[1] not in taken]  # in place: `run_until` holds it
        heapify(self._heap)
        return held

    def put_back(self, held: Iterable[tuple[float, int, Callable[..., None], tuple[Any, ...]]], later_s: float) -> None:
        """Put calls back into the heap, to happen so much later."""
        for time, order, action, arguments in held:
            heappush(self._heap, (time + later_s, order, action, arguments))

    def _alive(self, process: Process[M], starts: int, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        current = process.current
        if current is None or process.starts != starts:
            return
        if current.paused or current.postponed:
            current.postponed.append((action, arguments))
        else:
            action(*arguments)

    def let(self, current: Incarnation[M], action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Act now, or in turn once the process has caught up."""
        if current.paused or current.postponed:
            current.postponed.append((action, arguments))
        else:
            action(*arguments)

    # --- incarnations

    def restart(self, name: str, role: str = "") -> None:
        """Begin a process's next incarnation, unless it runs: in the role that it is configured for, if in no other."""
        process = self.processes[name]
        if process.current is not None:
            return
        process.spec = process.by_role[role or process.configured]
        process.starts += 1
        machine, actor = self._build(process)
        process.current = Incarnation(process.next_incarnation, machine, actor, self._watch(process))
        self.link.begin(process)

    def crash(self, name: str) -> None:
        """End an incarnation at once."""
        process = self.processes[name]
        current = process.current
        if current is None:
            return
        process.former_frames = current.recent
        process.current = None
        self._stale += len(current.timers)
        self.link.end(process, current)
        self.on_death(name)

    def alive(self, node: str, incarnation: int) -> bool:
        """Return whether this incarnation still holds its lock, as a stopped process does."""
        process = self.processes.get(node)
        return process is not None and process.current is not None and process.current.incarnation == incarnation

    def _leave(self, process: Process[M], latest: float) -> None:
        """End a drained process once its last messages are acknowledged, or after a while."""
        if self.now < latest and self.link.pending(process):
            self.in_incarnation(process, self.now + 0.1, self._leave, process, latest)
        else:
            self.in_incarnation(process, self.now, self._exit, process)

    def _exit(self, process: Process[M]) -> None:
        assert process.current is not None
        become, starts = process.current.become, process.starts
        self.crash(process.name)
        if become:
            self.at(self.now + self._anew_s, self._begin_as, process, starts, become)

    def _begin_as(self, process: Process[M], starts: int, role: str) -> None:
        if process.starts == starts:  # else it has been restarted meanwhile, as what it is configured for
            self.restart(process.name, role)

    # --- events

    def handle(self, process: Process[M], event: Event) -> None:
        """Handle an event other than a message."""
        if process.current is not None:
            self.link.handle(process, event)

    def from_client(self, gateway: str, request_id: str, value: Any) -> None:
        """Pass a client's input to a gateway."""
        process = self.processes[gateway]
        self.in_incarnation(process, self.now, self.handle, process, FromClient(request_id, value))

    def work_done(self, process: Process[M], work_id: int, result: Result) -> None:
        """Report a work's result to its process."""
        self.handle(process, WorkDone(work_id, result))

    def progressed(self, process: Process[M], work_id: int, progress: Progress) -> None:
        """Report a work's progress to its process."""
        self.handle(process, WorkProgress(work_id, progress))

    def _timer(self, process: Process[M], starts: int, key: TimerKey, order: int) -> None:
        current = process.current
        if current is None or process.starts != starts or current.timers.get(key) != order:
            self._stale -= 1
        elif current.paused or current.postponed:
            current.postponed.append((self._fire, (process, key, order)))
        else:
            del current.timers[key]
            self.handle(process, TimerFired(key))

    def _fire(self, process: Process[M], key: TimerKey, order: int) -> None:
        """Fire a timer that came due while its process was stopped."""
        current = process.current
        if current is None or current.timers.get(key) != order:
            self._stale -= 1
            return
        del current.timers[key]
        self.handle(process, TimerFired(key))

    # --- effects

    def carry_out(self, process: Process[M], current: Incarnation[M], effect: Effect) -> None:
        """Carry out an actor's effect; sending messages is up to the link."""
        self.acts[type(effect)](process, current, effect)

    def _set_timer(self, process: Process[M], current: Incarnation[M], effect: SetTimer) -> None:
        self._order = order = self._order + 1
        if effect.key in current.timers:
            self._replaced()
        current.timers[effect.key] = order
        heappush(self._heap, (self.now + effect.delay_s, order, self._timer, (process, process.starts, effect.key, order)))

    def _cancel_timer(self, process: Process[M], current: Incarnation[M], effect: CancelTimer) -> None:
        if current.timers.pop(effect.key, None) is not None:
            self._replaced()

    def _drained(self, process: Process[M], current: Incarnation[M], effect: Drained) -> None:
        current.become = effect.become
        if not current.drained:
            current.drained = True
            self._leave(process, self.now + LINGER_S)

    def _replaced(self) -> None:
        """Count a timer that will not fire, and sweep the heap once half of it is such, or far deadlines would pile up."""
        self._stale += 1
        if self._stale > MIN_STALE and 2 * self._stale > len(self._heap):
            fires = self._timer
            # In place: `run_until` holds it. Equal times keep their order, which is part of the entry.
            self._heap[:] = [entry for entry in self._heap if entry[2] != fires or _stands(*entry[3])]
            heapify(self._heap)
            self._stale = 0


def _stands(process: Process[Any], starts: int, key: TimerKey, order: int) -> bool:
    current = process.current
    return current is not None and process.starts == starts and current.timers.get(key) == order
