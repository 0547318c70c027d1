"""Threads for work that no hook of vLLM may wait for: one that works off a bounded queue, and a crew that shares a job."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import structlog

log = structlog.get_logger()

T = TypeVar("T")
CLOSE_S = 5.0


class Worker(Generic[T]):
    """A thread with a queue: every accepted job is either worked on or dropped, even if the thread ends. A job that raises an
    Exception ends alone. It is a daemon thread."""

    def __init__(self, name: str, work: Callable[[T], None], drop: Callable[[T], None], limit: int) -> None:
        """`work`, `drop`: called on the thread. `limit`: most waiting jobs; further ones are refused."""
        self._work, self._drop = work, drop
        self._limit = limit
        self._jobs: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.failures = 0
        """Jobs that raised an Exception."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def offer(self, job: T) -> bool:
        """Queue a job; return False if too many wait or the thread has ended."""
        with self._changed:
            taken = not self._closed and len(self._jobs) < self._limit
            if taken:
                self._jobs.append(job)
                self._changed.notify()
            return taken

    def close(self) -> None:
        """Wait up to a limit for the job under way, and end the thread. May be called twice."""
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
                try:
                    self._work(job)
                except Exception as error:
                    self.failures += 1
                    log.critical("worker_job_failed", thread=self._thread.name, exc_info=error)
        finally:
            with self._changed:
                self._closed = True
                left = list(self._jobs)
                self._jobs.clear()
            for job in left:
                self._drop(job)


class Crew:
    """Cut a job into ranges that the caller's thread and further threads work on in parallel. One caller at a time."""

    def __init__(self, name: str, threads: int) -> None:
        """`threads`: their number, including the caller's."""
        self._workers = [Worker(f"{name}-{number}", _Share.run, _Share.end, limit=1) for number in range(1, threads)]

    def share(self, count: int, work: Callable[[int, int], Sequence[int]], lost: int) -> list[int]:
        """Return what `work(start, stop)` returns for each of `count`; `lost` where its thread has ended."""
        hands = max(1, min(len(self._workers) + 1, count))
        cuts = [count * hand // hands for hand in range(hands + 1)]
        shares = [_Share(work, start, stop, [lost] * (stop - start)) for start, stop in zip(cuts, cuts[1:], strict=False)]
        refused = [share for worker, share in zip(self._workers, shares[1:], strict=False) if not worker.offer(share)]
        try:
            for share in (shares[0], *refused):
                share.run()
        finally:  # no thread may still work on what the caller takes for finished
            for share in shares:
                if share not in refused:
                    share.over.wait()
        return [answer for share in shares for answer in share.answers]

    def close(self) -> None:
        """Wait up to a limit for the ranges under way, and end the threads."""
        for worker in self._workers:
            worker.close()


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
