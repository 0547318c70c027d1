"""Threads under a seeded schedule: one runs at a time, and which one goes on is drawn between bytecodes of the watched modules.

The modules under test get locks, conditions, queues, threads and a clock of this schedule in place of the real ones. Time is
virtual: it passes when no thread can run. The same seed gives the same run; a deadlock is an error like any other.
"""

import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, _base
from contextlib import ExitStack, contextmanager
from random import Random
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

SWITCH_SHARE = 0.15
"""Between so many bytecodes another thread may go on."""
REDRAW_SHARE = 0.05
"""At so many switches a thread that was slow becomes fast, or the other way."""
MAX_SWITCHES = 100_000


class Stuck(AssertionError):
    """No thread can go on, or they go on for ever."""


class _Abandoned(BaseException):
    """Ends the threads that are left once a run has failed."""


class Task:
    """One thread of a schedule."""

    def __init__(self, schedule: "Schedule", body: Callable[[], object], name: str) -> None:
        self.name = name
        self.done = False
        self.stand_in: object = self
        """The thread as the modules under test know it."""
        self.error: BaseException | None = None
        self.can_go_on: Callable[[], bool] | None = None
        """The condition that it waits for, if it waits."""
        self.until = math.inf
        """The time at which it waits no longer."""
        self.weight = 0.0
        """How readily it is chosen: some threads hardly ever go on while others run far ahead."""
        self._random = schedule.random
        self.draw_weight()
        self.baton = threading.Lock()
        self.baton.acquire()
        self._schedule = schedule
        self._body = body
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def draw_weight(self) -> None:
        self.weight = 0.02 + self._random.random() ** 4

    def _run(self) -> None:
        self.baton.acquire()
        sys.settrace(self._schedule.trace)
        try:
            self._body()
        except _Abandoned:
            pass
        except BaseException as error:  # raised again by Schedule.run
            self.error = error
        finally:
            sys.settrace(None)
            self.done = True
            self._schedule.ended(self)


class Schedule:
    """The threads of one run and their virtual time."""

    def __init__(self, seed: int, watched: Iterable[ModuleType]) -> None:
        self.now = 0.0
        self.random = Random(seed)
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self._files = {module.__file__ for module in watched}
        self._switches = 0
        self._choosing = False
        """The conditions that threads wait for are being looked at, which is no part of the run."""
        self._error: BaseException | None = None
        self._over = threading.Event()

    # --- for tests

    def run(self, body: Callable[[], object]) -> None:
        """Run `body` as the first thread, until all threads have ended. Raises the first error of any."""
        self.spawn(body, "main")
        self._hand_over()
        self._over.wait()
        for task in self.tasks:
            task.thread.join()
        if self._error is not None:
            raise self._error

    def spawn(self, body: Callable[[], object], name: str = "") -> Task:
        """Begin another thread."""
        task = Task(self, body, name or f"thread-{len(self.tasks)}")
        self.tasks.append(task)
        return task

    def together(self, *bodies: Callable[[], object]) -> None:
        """Run these side by side, until all have ended."""
        tasks = [self.spawn(body) for body in bodies]
        self.wait_until(lambda: all(task.done for task in tasks))

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.wait_until(lambda: False, seconds)

    # --- for the primitives

    def wait_until(self, can_go_on: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Let others run until the condition holds, or so much virtual time has passed; says which."""
        me = self.current
        assert me is not None, "only a thread of the schedule waits"
        me.can_go_on, me.until = can_go_on, math.inf if timeout_s is None else self.now + max(0.0, timeout_s)
        self.switch()
        me.can_go_on, me.until = None, math.inf
        self._choosing = True
        try:
            return can_go_on()
        finally:
            self._choosing = False

    def switch(self) -> None:
        """Let a thread go on that is drawn among those that can: perhaps another, perhaps this one."""
        me = self.current
        assert me is not None
        assert me.thread is threading.current_thread()
        self._switches += 1
        if self._error is None and self._switches > MAX_SWITCHES:
            self._fail(Stuck(f"no end after {MAX_SWITCHES} switches"))
        if self._error is not None:
            raise _Abandoned
        self._hand_over()
        me.baton.acquire()
        if self._error is not None:
            raise _Abandoned

    def ended(self, task: Task) -> None:
        """A thread has ended."""
        if task.error is not None and self._error is None:
            self._fail(task.error)
        if self._error is None:
            self._hand_over()

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        """Watch the bytecodes of the modules under test."""
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._between_bytecodes

    def _between_bytecodes(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and not self._choosing and self._error is None and self.random.random() < SWITCH_SHARE:
            self.switch()
        return self._between_bytecodes

    def _hand_over(self) -> None:
        self._choosing = True
        try:
            chosen = self._choose()
        except Exception as error:
            self._fail(error)
            return
        finally:
            self._choosing = False
        if chosen is None:
            self._over.set()
        else:
            self.current = chosen
            chosen.baton.release()

    def _choose(self) -> Task | None:
        """The thread that goes on, or None: all have ended."""
        left = [task for task in self.tasks if not task.done]
        if not left:
            return None
        ready = [task for task in left if task.can_go_on is None or task.can_go_on() or task.until <= self.now]
        if not ready:
            self.now = min(task.until for task in left)
            ready = [task for task in left if task.until <= self.now < math.inf]
        if not ready:
            raise Stuck(f"no thread can go on: {[task.name for task in left]} wait")
        if self.random.random() < REDRAW_SHARE:
            self.random.choice(left).draw_weight()
        return self.random.choices(ready, [task.weight for task in ready])[0]

    def _fail(self, error: BaseException) -> None:
        self._error = error
        for task in self.tasks:
            if not task.done and task.baton.locked():
                task.baton.release()
        self._over.set()


class Lock:
    """As `threading.Lock` or, if `again`, as `threading.RLock`."""

    def __init__(self, schedule: Schedule, *, again: bool = False) -> None:
        self._schedule = schedule
        self._again = again
        self._holder: Task | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        schedule = self._schedule
        if not (self._again and self._holder is schedule.current):
            if not blocking and self._holder is not None:
                return False
            if not schedule.wait_until(lambda: self._holder is None, None if timeout < 0 else timeout):
                return False
        self._holder = schedule.current
        self._depth += 1
        return True

    def release(self) -> None:
        assert self._holder is self._schedule.current, "a lock is released by the thread that holds it"
        self._depth -= 1
        if not self._depth:
            self._holder = None

    def locked(self) -> bool:
        return self._holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """As `threading.Condition`."""

    def __init__(self, schedule: Schedule, lock: Lock | None = None) -> None:
        self._schedule = schedule
        self._lock = lock if lock is not None else Lock(schedule, again=True)
        self._waiting: deque[list[bool]] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def wait(self, timeout: float | None = None) -> bool:
        notified = [False]
        self._waiting.append(notified)
        self.release()
        self._schedule.wait_until(lambda: notified[0], timeout)
        self.acquire()
        if not notified[0]:
            self._waiting.remove(notified)
        return notified[0]

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until = None if timeout is None else self._schedule.now + timeout
        while not predicate():
            left_s = None if until is None else until - self._schedule.now
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return predicate()

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            self._waiting.popleft()[0] = True

    def notify_all(self) -> None:
        self.notify(len(self._waiting))

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Event:
    """As `threading.Event`."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._schedule.wait_until(self.is_set, timeout)


class SimpleQueue:
    """As `queue.SimpleQueue`."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        while not self._items:
            self._schedule.wait_until(lambda: bool(self._items))
        return self._items.popleft()


class Thread:
    """As `threading.Thread`."""

    def __init__(
        self,
        schedule: Schedule,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        name: str = "",
        daemon: bool = False,
    ) -> None:
        self.name = name
        self._schedule = schedule
        self._body = lambda: target(*args)
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._schedule.spawn(self._body, self.name)
        self._task.stand_in = self

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        assert task is not None
        self._schedule.wait_until(lambda: task.done, timeout)


class Pool:
    """As `concurrent.futures.ThreadPoolExecutor`."""

    def __init__(self, schedule: Schedule, threads: int, thread_name_prefix: str = "") -> None:
        self._schedule = schedule
        self._items: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._shut = False
        self._tasks = [schedule.spawn(self._run, f"{thread_name_prefix}_{number}") for number in range(threads)]

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self._shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self._items.append((future, call, arguments))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._shut = True
        while cancel_futures and self._items:
            self._items.popleft()[0].cancel()
        if wait:
            self._schedule.wait_until(lambda: all(task.done for task in self._tasks))

    def _run(self) -> None:
        while True:
            self._schedule.wait_until(lambda: bool(self._items) or self._shut)
            if self._items:
                future, call, arguments = self._items.popleft()
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(call(*arguments))
                    except Exception as error:
                        future.set_exception(error)
            elif self._shut:
                return


@contextmanager
def interleaved(seed: int, *watched: ModuleType) -> Iterator[Schedule]:
    """Give the watched modules this schedule's primitives. Only threads of the schedule may use what is made meanwhile."""
    schedule = Schedule(seed, watched)
    stand_ins: dict[str, Any] = {
        "threading": SimpleNamespace(
            Lock=lambda: Lock(schedule),
            RLock=lambda: Lock(schedule, again=True),
            Condition=lambda lock=None: Condition(schedule, lock),
            Event=lambda: Event(schedule),
            Thread=lambda **options: Thread(schedule, **options),
            current_thread=lambda: schedule.current and schedule.current.stand_in,
            local=threading.local,
        ),
        "ThreadPoolExecutor": lambda threads, thread_name_prefix="": Pool(schedule, threads, thread_name_prefix),
        "SimpleQueue": lambda: SimpleQueue(schedule),
        "time": SimpleNamespace(monotonic=lambda: schedule.now, perf_counter=lambda: schedule.now, sleep=schedule.sleep),
    }
    with ExitStack() as stack:
        for module in watched:
            for name, stand_in in stand_ins.items():
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, stand_in))
        stack.enter_context(patch.object(_base, "threading", stand_ins["threading"]))
        yield schedule


def first_failure(case: Callable[[Schedule], Callable[[], object]], seeds: Iterable[int], *watched: ModuleType) -> str:
    """Run a case once for each seed; says which seed failed first and how, or nothing. `case` makes the body of a run."""
    for seed in seeds:
        with interleaved(seed, *watched) as schedule:
            try:
                schedule.run(case(schedule))
            except Exception as error:
                return f"seed {seed}: {type(error).__name__}: {error}"
    return ""


@contextmanager
def its_descriptors(owner: Any, *closed: str) -> Iterator[Any]:
    """Close them after a run that failed, in which the owner's own `close` was not reached."""
    try:
        yield owner
    finally:
        if owner._stop >= 0:
            for name in closed:
                getattr(owner, name).close()
            os.close(owner._stop)
