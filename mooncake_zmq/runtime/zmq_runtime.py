"""Drives one `Node` over ZeroMQ: one thread owns the actor, its timers and its `PeerSockets`.

Two drivers share one core: `run` blocks on a poller, `attach` runs in an asyncio loop beside an HTTP server (a raw
descriptor with `add_reader`, drained until empty, serves about four times the messages of `zmq.asyncio`).
"""

import asyncio
import math
import os
import select
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import structlog

from mooncake_zmq.core.actor import (
    Actor,
    Answered,
    CancelTimer,
    CancelWork,
    CloseSequence,
    Drained,
    DrainTimedOut,
    DrainWanted,
    Effect,
    Event,
    Fence,
    OpenSequence,
    Outer,
    PeerDown,
    PeerUp,
    Publish,
    SetTimer,
    Start,
    Started,
    TimerFired,
    ToClient,
    Transmit,
)
from mooncake_zmq.core.actor_parts import Tally
from mooncake_zmq.core.messages import Hello
from mooncake_zmq.core.node import Node
from mooncake_zmq.core.timers import Timers
from mooncake_zmq.core.work import Work
from mooncake_zmq.kv.events import KvEvent
from mooncake_zmq.runtime.peer_sockets import PeerSockets
from mooncake_zmq.runtime.starvation import LatenessLog
from mooncake_zmq.transfer.sockets import Sockets

log = structlog.get_logger()

FRAMES_PER_TURN = 512
"""Frames taken before timers and finished works get their turn again."""
READ_FIRST_TURNS = 8
"""Turns for which overdue timers wait for frames to be read, even if more are left."""
LINGER_S = 1.0
"""How long a process that ends waits for the acknowledgement of its last messages, beside its own or a peer's lateness."""


class WorkExecutor(Protocol):
    """Executor of long works, which owns this process's segment and sequences (`runtime.executor.executor`)."""

    def start(self, work_id: int, work: Work, deadline_s: float) -> None: ...
    def cancel(self, work_id: int) -> None: ...
    def fence(self, generations: tuple[tuple[int, int], ...]) -> None: ...
    def open_sequence(self, asked: OpenSequence) -> None: ...
    def close_sequence(self, sequence: int) -> None: ...
    def learn_peer(self, name: str, incarnation: int, hello: Hello) -> None: ...
    def forget_peer(self, name: str) -> None: ...


@dataclass(slots=True)
class _Introducing:
    """The actor, with each peer announced to the executor first: works that the actor then starts may name that peer."""

    actor: Actor
    executor: WorkExecutor
    counts: Tally

    def handle(self, now: float, event: Event) -> list[Effect]:
        if isinstance(event, PeerUp):
            self.executor.learn_peer(event.peer, event.incarnation, event.hello)
        elif isinstance(event, PeerDown):
            self.executor.forget_peer(event.peer)  # else a dead peer's memory would stay mapped
        return self.actor.handle(now, event)

    def check(self, now: float) -> None:
        self.actor.check(now)

    def gauges(self, now: float) -> dict[str, float]:
        return self.actor.gauges(now)

    def dump(self, now: float) -> dict[str, Any]:
        return self.actor.dump(now)


class ZmqRuntime:
    """Carry out a node's effects, in their order, and pass it frames, timers, ticks and finished works."""

    def __init__(
        self,
        node: Node,
        *,
        endpoint: str,
        peers: Mapping[str, str],
        executor: WorkExecutor | None = None,
        deliver: Callable[[ToClient], None] | None = None,
        publish: Callable[[tuple[KvEvent, ...]], None] | None = None,
        answer: Callable[[Answered], None] | None = None,
        sockets: Sockets | None = None,
    ) -> None:
        """`endpoint`: where to listen. `peers`: endpoint by name. `deliver`: receives a gateway's `ToClient` effects.
        `publish`: receives a cache-node's KV events, if given. `answer`: receives answers to the operator. `sockets`: shared
        with the process's other components; by default own ones without keys."""
        self.node = node
        self.stopped = False
        self.become = ""
        """The role in which the actor wants its process to begin its next incarnation; empty: none."""
        self.endpoint = endpoint
        self._executor = executor
        self._deliver = deliver
        self._publish = publish
        self._answer = answer
        if executor is not None:
            node.actor = _Introducing(node.actor, executor, node.actor.counts)
        self._timers: Timers[Callable[[], None]] = Timers()
        self._inbox: deque[Callable[[], None]] = deque()
        self._drained_at: float | None = None
        self._logged_cordon = False
        """Whether the log says that the node is cordoned."""
        self._lateness = LatenessLog()
        self._turns_unread = 0
        """Turns since timers last had theirs."""
        self._logged_states: dict[str, str] = {}
        """State of each peer as last logged."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakeup: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0
        self._on_stop: Callable[[], None] | None = None
        self._on_crash: Callable[[BaseException], None] | None = None
        self._closed = False
        self._peers = PeerSockets(
            endpoint, peers, sockets or Sockets(io_threads=1), lambda error: self.call(partial(_raise, error))
        )
        self.counts = self._peers.counts
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # --- from any thread

    def post(self, event: Event) -> None:
        """Pass the actor an event; from any thread or signal handler."""
        self.call(partial(self._feed, event))

    def call(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the thread that owns the sockets; once closed, never."""
        self._inbox.append(callback)
        if not self._closed:
            os.eventfd_write(self._wake_fd, 1)

    # --- from the owning thread

    def handle(self, event: Event) -> None:
        """Pass the actor an event now; its effects are carried out before this returns. Once closed, nothing happens.

        May be called within a `ToClient` too (its client is too slow); the outer event's remaining effects then follow.
        """
        if self._closed:
            return
        try:
            self._feed(event)
            self._arm(busy=False)
        except BaseException as error:
            self._crashed(error)
            raise

    def drain(self) -> None:
        """Ask the actor to finish; the runtime stops once it has."""
        self._feed(DrainWanted())

    def hand_over(self) -> None:
        """End a drain that ran out of time: the actor hands over its requests, and the runtime stops once that is
        acknowledged."""
        self._feed(DrainTimedOut())
        self._drained_at = self._drained_at or time.monotonic()

    def stop(self) -> None:
        """Stop at once."""
        self.stopped = True
        self._stop_reading(self._peers.fileno())  # unread frames would keep the loop busy until we are closed
        if self._on_stop is not None:
            self._on_stop()

    def every(self, interval_s: float, callback: Callable[[], None]) -> None:
        """Call `callback` about every `interval_s`, from the loop itself: a stuck loop does not call it."""

        def again() -> None:
            self._timers.set(("every", id(again)), time.monotonic() + interval_s, again)
            callback()

        self._timers.set(("every", id(again)), time.monotonic() + interval_s, again)

    def look(self, for_s: float) -> None:
        """Have the peers report for so long, if they do; see `Node.look`."""
        if not self._closed:
            self._carry_out(self.node.look(time.monotonic(), for_s))

    def ask_state(self, peer: str, ask_id: int, part: str = "") -> None:
        if not self._closed:
            self._carry_out(self.node.ask_state(time.monotonic(), peer, ask_id, part))

    def set_cordon(self, peer: str, cordoned: bool) -> None:
        if not self._closed:
            self._carry_out(self.node.set_cordon(time.monotonic(), peer, cordoned))

    def gauges(self) -> dict[str, float]:
        """Return the actor's current gauges."""
        return self.node.actor.gauges(time.monotonic())

    def dump(self) -> dict[str, Any]:
        """Return the state of the whole process as JSON-able values."""
        now = time.monotonic()
        runtime = {"counts": dict(self.counts), "timers": len(self._timers), "inbox": len(self._inbox)}
        return {**self.node.dump(now), "gauges": self.node.actor.gauges(now), "runtime": runtime}

    def run(self) -> None:
        """Serve until stopped, in this thread."""
        # The ROUTER's own descriptor: zmq.Poller asks every socket for its state before and after, twice the price of a frame.
        poller = select.poll()
        poller.register(self._peers.fileno(), select.POLLIN)
        poller.register(self._wake_fd, select.POLLIN)
        self._begin()
        while not self.stopped:
            busy = self._turn()
            for descriptor, _ in poller.poll(0 if busy or self.stopped else math.ceil(self._wait_s() * 1000)):
                if descriptor == self._wake_fd:
                    self._take_wake()

    def attach(
        self, loop: asyncio.AbstractEventLoop, on_stop: Callable[[], None], on_crash: Callable[[BaseException], None]
    ) -> None:
        """Serve from within `loop` until stopped; `on_stop` is called then. The loop's thread owns the sockets.

        `on_crash` is called for a bug: the loop would log it and continue with an actor in an unknown state.
        """
        self._loop, self._on_stop, self._on_crash = loop, on_stop, on_crash
        loop.add_reader(self._peers.fileno(), self._turn_in_loop)
        loop.add_reader(self._wake_fd, self._woken_in_loop)
        self._begin()
        self._turn_in_loop()

    def close(self) -> None:
        """Close every socket and remove the socket file. Worker threads must have ended."""
        self._closed = True
        self._stop_reading(self._peers.fileno())
        self._stop_reading(self._wake_fd)
        if self._wakeup is not None:
            self._wakeup.cancel()
        self._peers.close()
        os.close(self._wake_fd)
        if self.endpoint.startswith("ipc://"):
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def _stop_reading(self, descriptor: int) -> None:
        if self._loop is not None:
            # libuv's returns nothing, while machine code would insist on the declared bool.
            remove: Callable[[int], object] = self._loop.remove_reader
            remove(descriptor)

    # --- turns

    def _begin(self) -> None:
        self.every(self.node.session.tick_s, self._tick)
        self._carry_out(self.node.start(time.monotonic(), Started()))

    def _woken_in_loop(self) -> None:
        self._take_wake()
        self._turn_in_loop()

    def _take_wake(self) -> None:
        """Clear the wake-up while its descriptor is readable, before the inbox is emptied: later entries wake the loop
        again."""
        os.eventfd_read(self._wake_fd)

    def _turn_in_loop(self) -> None:
        """One turn, then the wake-up for the next timer."""
        if not self.stopped:
            try:
                self._arm(busy=self._turn())
            except BaseException as error:
                self._crashed(error)
                raise

    def _crashed(self, error: BaseException) -> None:
        if self._on_crash is not None:
            self._on_crash(error)

    def _arm(self, *, busy: bool) -> None:
        """Schedule a turn for the next timer. One that is scheduled earlier stays, and schedules this one: mostly the same
        tick."""
        if self._loop is None or self.stopped:
            return
        wait_s = 0.0 if busy else self._wait_s()
        at = time.monotonic() + wait_s
        if self._wakeup is not None:
            if self._wakes_at <= at:
                return
            self._wakeup.cancel()
        self._wakes_at = at
        self._wakeup = self._loop.call_later(wait_s, self._wake_up)

    def _wake_up(self) -> None:
        self._wakeup = None
        self._turn_in_loop()

    def _wait_s(self) -> float:
        at = self._timers.next_at()
        return 1.0 if at == math.inf else max(0.0, at - time.monotonic())

    def _turn(self) -> bool:
        """Do everything that is due, once. Return True if frames may be left, which the ROUTER's descriptor will not show:
        it is edge-triggered, and shows only frames that arrive after a read found none."""
        for _ in range(len(self._inbox)):
            if not self.stopped:
                self._inbox.popleft()()
        busy = self._receive()
        if not self._reads_on(busy):
            self._fire_due()
        if self._drained_at is not None:
            session = self.node.session
            over = time.monotonic() - self._drained_at > LINGER_S + session.lateness_s
            if over or not session.unacknowledged:
                self.stop()
        return busy

    def _reads_on(self, busy: bool) -> bool:
        """Return whether to read on before firing timers that are late: a timer for a missing frame may be wrong while that
        frame is still unread after this turn."""
        late = time.monotonic() - self._timers.next_at() > self.node.session.tick_s
        self._turns_unread = self._turns_unread + 1 if busy and late else 0
        return 0 < self._turns_unread <= READ_FIRST_TURNS

    def _fire_due(self) -> None:
        now = time.monotonic()
        while not self.stopped and (callback := self._timers.pop_due(now)) is not None:
            callback()

    def _receive(self) -> bool:
        for number in range(FRAMES_PER_TURN):
            # Most turns find one frame. Asking for a second costs half of the exception for none; in a burst, trying
            # costs nothing.
            if self.stopped or (number == 1 and not self._peers.has_frames()):
                break
            taken = self._peers.take()
            if taken is None:
                break
            frame, key_of = taken
            if frame is not None:
                self._carry_out(self.node.receive(time.monotonic(), frame, key_of))
        else:
            return True
        self._peers.drained()
        return False

    def _tick(self) -> None:
        now = time.monotonic()
        self._carry_out(self.node.tick(now))
        self._peers.try_other_keys(time.monotonic())
        self._log_peers(now)
        if self.node.cordoned != self._logged_cordon:
            self._logged_cordon = self.node.cordoned
            log.info("cordoned" if self._logged_cordon else "serves_again")

    def _log_peers(self, now: float) -> None:
        """Log which peers came, went or were refused since the last tick; this shows a lost link or a wrong model. If this
        loop was late, that is logged first: silent peers may have sent what it did not read."""
        session = self.node.session
        known = {name: f"refused: {why}" for name, why in session.refusals.items()}
        known |= dict.fromkeys(session.departed, "left") | dict.fromkeys(session.up_peers, "up")
        changed = {
            name: state
            for name in sorted(known.keys() | self._logged_states.keys())
            if (state := known.get(name, "down")) != self._logged_states.get(name, "down")
        }
        late_s, late_loops = session.recent_late_s, session.counts.get("late_loops", 0)
        self._lateness.note(now, late_loops, late_s, at_once="down" in changed.values())
        for name, state in changed.items():
            late = {"own_late_s": round(late_s, 3)} if state == "down" and late_s >= session.tick_s else {}
            (log.info if state in ("up", "left") else log.warning)("peer", peer=name, state=state, **late)
        self._logged_states = known

    def _feed(self, event: Event) -> None:
        self._carry_out(self.node.handle(time.monotonic(), event))

    # --- effects

    def _carry_out(self, effects: list[Outer]) -> None:
        to_client, deliver = ToClient, self._deliver
        for effect in effects:
            if type(effect) is to_client:  # most effects of a gateway
                assert deliver is not None, "this process has no clients"
                deliver(effect)
                continue
            match effect:
                case Transmit(to, frame):
                    self._peers.transmit(to, frame)
                case SetTimer(key, delay_s):
                    self._timers.set(("actor", key), time.monotonic() + delay_s, partial(self._feed, TimerFired(key)))
                case CancelTimer(key):
                    self._timers.cancel(("actor", key))
                case Publish(events):
                    if self._publish is not None:
                        self._publish(events)
                case Answered():
                    assert self._answer is not None, "nobody asked"
                    self._answer(effect)
                case Drained(become):
                    self._drained_at = self._drained_at or time.monotonic()  # set again after every event
                    self.become = become
                case _:
                    self._execute(effect)

    def _execute(self, effect: Outer) -> None:
        assert self._executor is not None, f"this process has no executor for {effect}"
        match effect:
            case Start(work_id, work, deadline_s):
                self._executor.start(work_id, work, deadline_s)
            case CancelWork(work_id):
                self._executor.cancel(work_id)
            case Fence(generations):
                self._executor.fence(generations)
            case OpenSequence():
                self._executor.open_sequence(effect)
            case CloseSequence(sequence):
                self._executor.close_sequence(sequence)
            case _:
                raise TypeError(effect)


def _raise(error: BaseException) -> None:
    """Raise a worker thread's error in the thread that owns the sockets: it ends the process."""
    raise error
