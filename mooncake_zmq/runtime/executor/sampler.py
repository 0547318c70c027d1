"""A thread that samples for each job when its mask is ready, or has failed."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from typing import Any

import structlog

from mooncake_zmq.runtime.executor.jobs import Job, Unsampled
from mooncake_zmq.runtime.executor.worker import give_way

log = structlog.get_logger()


class Sampler:
    """Hold the jobs that wait for a constraint's mask."""

    def __init__(self, on_crash: Callable[[BaseException], None]) -> None:
        self._on_crash = on_crash
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._waiting: list[tuple[Job, Unsampled, Callable[[], None]]] = []
        self._woken: Future[None] = Future()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def put(self, job: Job, sample: Callable[[], None]) -> None:
        """Call `sample` when the job's tokens can be sampled, at its deadline or when it is stopped."""
        assert job.unsampled
        with self._lock:
            self._waiting.append((job, job.unsampled, sample))
        self.wake()

    def wake(self) -> None:
        """Wake the thread: a job was added or stopped."""
        with self._lock:
            woken, self._woken = self._woken, Future()
        woken.set_result(None)

    def close(self) -> None:
        """Finish the waiting jobs, then stop."""
        with self._lock:
            self._closed = True
        self.wake()
        self._thread.join()

    def _run(self) -> None:
        give_way()
        try:
            while self._go_on():
                pass
        except Exception as error:
            self._on_crash(error)
            log.critical("worker_crashed", thread=threading.current_thread().name, exc_info=error)

    def _go_on(self) -> bool:
        """Sample every job that can be sampled, or wait until something changes."""
        with self._lock:
            waiting, woken = list(self._waiting), self._woken
            if self._closed and not waiting:
                return False
        awaited, until_s = list[Future[Any]](), list[float]()
        for entry in waiting:
            job, unsampled, sample = entry
            future = None if job.stopped or job.is_late() else unsampled.awaited()
            if future is not None:
                awaited.append(future)
                until_s += [job.deadline - time.monotonic(), unsampled.left_s()]
                continue
            with self._lock:
                self._waiting.remove(entry)
            sample()
        if len(awaited) < len(waiting):
            return True  # another mask may have become ready during sampling
        wait_for([woken, *awaited], max(0.0, min(until_s)) if until_s else None, FIRST_COMPLETED)
        return True
