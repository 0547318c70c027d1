"""Threads that run tasks in their order."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

import structlog

log = structlog.get_logger()


class Worker:
    """One thread, or `threads` of them, that take their tasks from one queue."""

    def __init__(self, name: str, on_crash: Callable[[BaseException], None], threads: int = 1) -> None:
        self._on_crash = on_crash
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def put(self, task: Callable[[], None]) -> None:
        self._queue.put(task)

    def close(self) -> None:
        """Finish the tasks in the queue, then stop."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        give_way()
        while task := self._queue.get():
            try:
                task()
            except Exception as error:
                # A thread has no caller that could crash: the process must be stopped,
                # even if logging fails.
                self._on_crash(error)
                log.critical("worker_crashed", thread=threading.current_thread().name, exc_info=error)


def give_way() -> None:
    """Keep the calling thread from preempting the loop of this or another process when it wakes, unless an operator chose
    how its process is scheduled. An engine's further threads, for which it waits, are unchanged."""
    with suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
