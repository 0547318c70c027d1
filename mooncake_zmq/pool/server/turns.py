"""A store's actor among threads: the thread that has an event takes a turn, and each effect goes to the thread that carries it
out.

An actor needs its events one after another, not a thread of its own: handing each request of a stream to another thread and its
answer back cost 64 KiB from memory 25 us more on top of 82.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import structlog

from mooncake_zmq.core.actor import Fence, SetTimer, TimerFired, TimerKey
from mooncake_zmq.core.timers import Timers
from mooncake_zmq.pool.node.store_events import Event
from mooncake_zmq.pool.node.store_node import StoreNode
from mooncake_zmq.store.segment import ObjectSegment

log = structlog.get_logger()


class Turns:
    """`with turns as node` is for looks at it; `take` for events. Both are for moments, and never across a wait."""

    def __init__(self, node: StoreNode, segment: ObjectSegment) -> None:
        self.segment = segment
        self._node = node
        self._lock = threading.Lock()
        self._acts: dict[type[Any], Callable[[Any], None]] = {Fence: self._fence}

    def carry_out(self, acts: Mapping[type[Any], Callable[[Any], None]]) -> None:
        """Register what carries out each kind of effect: called within a turn, so it only hands over what takes time."""
        self._acts.update(acts)

    def __enter__(self) -> StoreNode:
        self._lock.acquire()
        return self._node

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def take(self, event: Event, now: float | None = None) -> None:
        """Handle an event. Changes are visible in the segment before any client is answered. `now`: the monotonic clock's,
        unless given."""
        acts = self._acts
        with self._lock:
            for effect in self._node.handle(time.monotonic() if now is None else now, event):
                acts[type(effect)](effect)

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes of a cell."""
        return self.segment.memory[offset : offset + size]

    def _fence(self, effect: Fence) -> None:
        generations = self.segment.generations
        for entry, generation in effect.generations:
            generations[entry] = generation


class TimerThread:
    """Takes turns when it is time. Works from construction until `close`."""

    def __init__(self, turns: Turns, on_crash: Callable[[BaseException], None]) -> None:
        self._turns = turns
        self._on_crash = on_crash
        self._changed = threading.Condition()
        """Guards what follows."""
        turns.carry_out({SetTimer: self.set})
        self._timers: Timers[TimerKey] = Timers()
        self._acts: deque[Callable[[], object]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="store-timers", daemon=True)
        self._thread.start()

    def set(self, effect: SetTimer) -> None:
        """To fire once; in the place of what it was set to before."""
        at = time.monotonic() + effect.delay_s
        with self._changed:
            if at < self._timers.next_at():
                self._changed.notify()
            self._timers.set(effect.key, at, effect.key)

    def then(self, act: Callable[[], object]) -> None:
        """Do this on the thread of timers, after the turn."""
        with self._changed:
            self._acts.append(act)
            self._changed.notify()

    def fire(self, now: float) -> None:
        """All that are due by then; not those set meanwhile."""
        with self._changed:
            due = list(iter(partial(self._timers.pop_due, now), None))
        for key in due:
            self._turns.take(TimerFired(key), now)
        while self._acts:
            self._acts.popleft()()

    def close(self) -> None:
        """No timer fires any more."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    if not (self._stopping or self._acts):
                        at = self._timers.next_at()
                        self._changed.wait(at - time.monotonic() if at < math.inf else None)
                    if self._stopping:
                        return
                self.fire(time.monotonic())
        except Exception as error:
            self._on_crash(error)
            log.critical("store_timers_crashed", exc_info=error)
