"""Threads that tenants take turns at: who asks for much waits for his own."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

WorkT = TypeVar("WorkT")


class FairPool:
    """What waits is its callers' to bound: each work is of a call that has a slot, and is forgotten when that cancels it."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._threads = threads
        self._lock = threading.Lock()
        """Guards what follows."""
        self._busy = 0
        self._closed = False
        self._waiting: OrderedDict[str, OrderedDict[Future[Any], Callable[[], Any]]] = OrderedDict()
        """By tenant, the next one first."""

    def submit(self, tenant: str, work: Callable[[], WorkT]) -> Future[WorkT]:
        """Have it done by a thread, when it is the tenant's turn; once the pool is closed it is cancelled at once."""
        done: Future[WorkT] = Future()
        with self._lock:
            if self._closed:
                done.cancel()
                return done
            self._waiting.setdefault(tenant, OrderedDict())[done] = work
            if self._busy < self._threads:
                self._busy += 1
                self._pool.submit(self._work)
        done.add_done_callback(lambda _: self._forget(tenant, done))
        return done

    def close(self) -> None:
        """Begin nothing more."""
        with self._lock:
            self._closed = True
            left = [done for waiting in self._waiting.values() for done in waiting]
        self._pool.shutdown(wait=False, cancel_futures=True)
        for done in left:
            done.cancel()

    def _work(self) -> None:
        while (next_one := self._next()) is not None:
            done, work = next_one
            if not done.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # the caller's to see
                done.set_exception(error)
            else:
                done.set_result(result)

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._lock:
            if not self._waiting:
                self._busy -= 1
                return None
            tenant, waiting = self._waiting.popitem(last=False)
            first = waiting.popitem(last=False)
            if waiting:
                self._waiting[tenant] = waiting
            return first

    def _forget(self, tenant: str, done: Future[Any]) -> None:
        with self._lock:
            if (waiting := self._waiting.get(tenant)) is not None:
                waiting.pop(done, None)
                if not waiting:
                    del self._waiting[tenant]
