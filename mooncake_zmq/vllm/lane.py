"""Threads for what none of vLLM's hooks may wait for: one that does job after job from a bounded queue; some that share one."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
CLOSE_S = 5.0


class Lane(Generic[T]):
    """Every job taken is either worked on or dropped, whatever happens to the thread. A daemon: it keeps no process alive."""

    def __init__(self, name: str, work: Callable[[T], None], drop: Callable[[T], None], limit: int) -> None:
        """`work`, `drop`: called on the thread. `limit`: jobs that wait; further ones are refused."""
        self._work, self._drop = work, drop
        self._limit = limit
        self._jobs: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def offer(self, job: T) -> bool:
        """False if it is not taken: there are too many, or the thread has ended."""
        with self._changed:
            taken = not self._closed and len(self._jobs) < self._limit
            if taken:
                self._jobs.append(job)
                self._changed.notify()
            return taken

    def close(self) -> None:
        """Waits for the job under way, for a while. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _next(self) -> T | None:
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            return None if self._closed else self._jobs.popleft()

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._work(job)
        finally:
            with self._changed:
                self._closed = True
                left = list(self._jobs)
                self._jobs.clear()
            for job in left:
                self._drop(job)


class Crew:
    """Cuts a job into ranges that the caller's thread and others of its own work on side by side. One caller at a time."""

    def __init__(self, name: str, threads: int) -> None:
        """`threads`: the caller's included."""
        self._lanes = [Lane(f"{name}-{number}", _Share.run, _Share.end, limit=1) for number in range(1, threads)]

    def share(self, count: int, work: Callable[[int, int], Sequence[int]], lost: int) -> list[int]:
        """What `work(start, stop)` answers for each of `count`; `lost` where its thread has come to an end."""
        hands = max(1, min(len(self._lanes) + 1, count))
        cuts = [count * hand // hands for hand in range(hands + 1)]
        shares = [_Share(work, start, stop, [lost] * (stop - start)) for start, stop in zip(cuts, cuts[1:], strict=False)]
        refused = [share for lane, share in zip(self._lanes, shares[1:], strict=False) if not lane.offer(share)]
        try:
            for share in (shares[0], *refused):
                share.run()
        finally:  # nobody may still be at work on what the caller thinks is over
            for share in shares:
                if share not in refused:
                    share.over.wait()
        return [answer for share in shares for answer in share.answers]

    def close(self) -> None:
        """Waits for shares under way, for a while."""
        for lane in self._lanes:
            lane.close()


@dataclass(slots=True, eq=False)
class _Share:
    work: Callable[[int, int], Sequence[int]]
    start: int
    stop: int
    answers: Sequence[int]
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            self.answers = self.work(self.start, self.stop)
        finally:
            self.end()

    def end(self) -> None:
        self.over.set()
