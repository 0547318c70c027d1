"""A thread that does one kind of job after another, so that none of vLLM's hooks has to. Its queue is bounded."""

import threading
from collections import deque
from collections.abc import Callable
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
