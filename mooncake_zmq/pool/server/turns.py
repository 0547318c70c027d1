"""A store's actor among threads: whoever has an event takes a turn, and what the actor asks for goes to whoever carries it out.

An actor needs its events one after another, not a thread of its own: handing each request of a stream to another thread and
its answer back cost 64 KiB from memory 25 us more on top of 82.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Any

import structlog

from mooncake_zmq.core.actor import Fence, SetTimer, TimerFired, TimerKey
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
        """Who does what: called within a turn, so it only hands over what takes time."""
        self._acts.update(acts)

    def __enter__(self) -> StoreNode:
        self._lock.acquire()
        return self._node

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def take(self, event: Event, now: float | None = None) -> None:
        """What changed is visible in the segment before anybody is told. `now`: that of the monotonic clock, unless given."""
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


class Timers:
    """Takes turns when it is time. Works from construction until `close`."""

    def __init__(self, turns: Turns, on_crash: Callable[[BaseException], None]) -> None:
        self._turns = turns
        self._on_crash = on_crash
        self._changed = threading.Condition()
        """Guards what follows."""
        turns.carry_out({SetTimer: self.set})
        self._due: list[tuple[float, int, TimerKey]] = []
        self._order: dict[TimerKey, int] = {}
        """The number of each timer that is to fire; others in the heap were replaced."""
        self._acts: deque[Callable[[], object]] = deque()
        self._number = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="store-timers", daemon=True)
        self._thread.start()

    def set(self, effect: SetTimer) -> None:
        """To fire once; in the place of what it was set to before."""
        with self._changed:
            self._number += 1
            self._order[effect.key] = self._number
            heappush(self._due, (time.monotonic() + effect.delay_s, self._number, effect.key))
            if self._due[0][1] == self._number:
                self._changed.notify()

    def then(self, act: Callable[[], object]) -> None:
        """Do this on the thread of timers, after the turn."""
        with self._changed:
            self._acts.append(act)
            self._changed.notify()

    def fire(self, now: float) -> None:
        """All that are due by then; not those set meanwhile."""
        for key in self._due_by(now):
            self._turns.take(TimerFired(key), now)
        while self._acts:
            self._acts.popleft()()

    def close(self) -> None:
        """No timer fires any more."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _due_by(self, now: float) -> list[TimerKey]:
        due = []
        with self._changed:
            while self._due and self._due[0][0] <= now:
                _, number, key = heappop(self._due)
                if self._order.get(key) == number:
                    del self._order[key]
                    due.append(key)
        return due

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    if not (self._stopping or self._acts):
                        self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                    if self._stopping:
                        return
                self.fire(time.monotonic())
        except Exception as error:
            self._on_crash(error)
            log.critical("store_timers_crashed", exc_info=error)
