"""Threads whose time tenants share fairly: a tenant that submits much work delays only itself."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

from mooncake_zmq.core.turns import Turns

WorkT = TypeVar("WorkT")


class FairPool:
    """A pool of threads that tenants take turns to use. Its callers bound the queue: each work belongs to a call that has a
    slot, and is dropped when the call cancels it. A tenant's works run in the order in which they came, those of one flow one
    after another."""

    def __init__(self, name: str, threads: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._new_pool = partial(ThreadPoolExecutor, threads, thread_name_prefix=name)
        self._pool = self._new_pool()
        self._threads = threads
        self._clock = clock
        self._numbers = count()
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._busy = 0
        self._closed = False
        self._turns: Turns[_Work] = Turns()

    def new_flow(self) -> int:
        """Return the number of a new flow, whose works run one after another; it exists until it is dropped."""
        return next(self._numbers)

    def submit(self, tenant: str, work: Callable[[], WorkT], flow: int | None = None) -> Future[WorkT]:
        """Let a thread do the work when it is its tenant's and its flow's turn; without `flow` it is a flow by itself. Once the
        pool is closed it is cancelled at once. Raises RuntimeError where it has no thread, and none can be started."""
        done: Future[WorkT] = Future()
        number = self.new_flow() if flow is None else flow
        with self._lock:
            if self._closed:
                done.cancel()
                return done
            if self._busy < self._threads:
                try:
                    self._pool.submit(self._run)
                except RuntimeError:
                    if not self._busy:  # else the threads that run do it
                        self._pool.shutdown(wait=False, cancel_futures=True)  # the pool would keep it for a later thread
                        self._pool = self._new_pool()
                        raise
                self._busy += 1
            self._turns.put(tenant, number, _Work(tenant, number, done, work))
        if flow is None:
            done.add_done_callback(lambda _: self.drop(tenant, number))
        return done

    def drop(self, tenant: str, flow: int) -> None:
        """Forget a flow, and cancel its waiting works."""
        with self._lock:
            left = self._turns.drop(tenant, flow)
        for each in left:
            each.done.cancel()

    def close(self, *, wait: bool = False) -> None:
        """Begin no more works and cancel those that wait. `wait`: return only when running works have ended."""
        with self._lock:
            self._closed = True
            left = self._turns.clear()
        for each in left:
            each.done.cancel()
        self._pool.shutdown(wait=wait)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            if not work.done.set_running_or_notify_cancel():
                continue
            began = self._clock()
            try:
                result = work.does()
            except BaseException as error:
                self._charge(work, began)
                work.done.set_exception(error)
            else:
                self._charge(work, began)
                work.done.set_result(result)

    def _charge(self, work: "_Work", began: float) -> None:
        """Count the time of a work that has just ended, before its caller may submit again."""
        with self._lock:
            self._turns.charge(work.tenant, work.flow, self._clock() - began)

    def _next(self) -> "_Work | None":
        with self._lock:
            work = self._turns.take()
            self._busy -= work is None
            return work


@dataclass(frozen=True, slots=True)
class _Work:
    """A work that waits for its turn."""

    tenant: str
    flow: int
    done: Future[Any]
    does: Callable[[], Any]
