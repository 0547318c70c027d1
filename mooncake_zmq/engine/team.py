"""A few threads that run one function together, each its share, and wait for one another at points inside it.

NumPy frees the interpreter's lock during a product, so that as many threads compute as there are cores; BLAS itself uses
one thread.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

Share = Callable[[int], None]
"""A function that is called with the thread's rank, 0 .. size - 1."""


class Team:
    """`size` threads: those of ranks 0 to `size` - 2 are the team's own, the last is the caller's. Not reentrant.

    The threads end when the team is no longer referred to.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError("a team has at least one thread")
        self.size = size
        self._ranks = range(size)
        self._notes: list[list[SimpleQueue[bool]]] = [[SimpleQueue() for _ in self._ranks] for _ in self._ranks]
        """Queues from a rank (first) to a rank (second): true from `signal`, false when the sender has failed."""
        self._tasks: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in range(size - 1)]
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._failures: list[Future[None]] = [Future() for _ in self._ranks]
        """Each thread's error, if it has failed."""
        self._has_failed = False
        for rank, tasks in enumerate(self._tasks):
            threading.Thread(target=_work, args=(tasks,), name=f"compute-{rank}", daemon=True).start()
            weakref.finalize(self, tasks.put, None)

    def run(self, share: Share) -> None:
        """Call `share(rank)` in every thread. Raises the error of the first rank that failed, once all have ended."""
        if self.size == 1:
            share(0)
            return
        for rank, tasks in enumerate(self._tasks):
            tasks.put(lambda rank=rank: self._run(share, rank))  # type: ignore[misc]
        self._run(share, self.size - 1)
        for _ in self._ranks:
            self._ended.get()
        if self._has_failed:
            failures, self._failures = self._failures, [Future() for _ in self._ranks]
            self._has_failed = False
            for notes in self._notes:
                for queue in notes:
                    while not queue.empty():
                        queue.get()
            next(failure for failure in failures if failure.done()).result()

    def signal(self, rank: int, to: int) -> None:
        """Let thread `to` pass one of its `wait_for` calls, now or later. Ends this share if another has failed."""
        if self._has_failed:
            raise _Abandoned
        self._notes[rank][to].put(True)

    def wait_for(self, rank: int, of: int) -> None:
        """Wait for one `signal` of thread `of`."""
        if not self._notes[of][rank].get():
            raise _Abandoned

    def _run(self, share: Share, rank: int) -> None:
        try:
            share(rank)
        except _Abandoned:
            self._abandon_others(rank)
        except BaseException as error:
            self._failures[rank].set_exception(error)
            self._has_failed = True
            self._abandon_others(rank)
        finally:
            self._ended.put(None)

    def _abandon_others(self, rank: int) -> None:
        """End the waits of the other threads for this one."""
        for other in self._ranks:
            self._notes[rank][other].put(False)


class _Abandoned(Exception):
    """Another thread of the team failed: this one has nothing to wait for."""


def _work(tasks: "SimpleQueue[Callable[[], None] | None]") -> None:
    while task := tasks.get():
        task()
        del task  # else it would keep the team alive
