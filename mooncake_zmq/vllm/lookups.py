"""Lookups in the pool on a separate thread: which blocks of a prompt are stored, held until they were read."""

import threading
from collections.abc import Callable, Sequence
from time import monotonic

from mooncake_zmq.store.client.client import Hold, StoreClient
from mooncake_zmq.vllm import ledger
from mooncake_zmq.vllm.worker import Worker

STEP_WAIT_S = 4e-3
"""How long the first looks at answers wait for them, all those of one step of the engine together: a pool on this host takes
about 0.2 ms."""
MAX_WAITING = 256
"""Most questions that wait for the thread; further ones are offered to it again at each look."""
_NOTHING = Hold(0, 0.0)


class Lookup:
    """One question to the pool. `release` may be called before its answer. `look`: called at each look at an answer that is
    not there."""

    def __init__(self, names: list[str], first: Sequence[str], look: Callable[["Lookup"], None]) -> None:
        self.names, self.first = names, first
        self.hold = _NOTHING
        self.released = False
        self.is_queued = self.is_seen = False
        """Whether the thread has it; whether its answer was waited for."""
        self.done = threading.Event()
        self._look = look

    def answer(self) -> int | None:
        if not self.done.is_set():
            self._look(self)
        return self.hold.count if self.done.is_set() else None

    @property
    def found(self) -> Sequence[bool]:
        return self.hold.found

    @property
    def until(self) -> float:
        return self.hold.until

    @property
    def holders(self) -> tuple[str, ...]:
        return self.hold.holders

    @property
    def reached(self) -> bool:
        return bool(self.hold.leases)

    def end(self, hold: Hold = _NOTHING) -> None:
        """Set the answer."""
        self.hold = hold
        self.done.set()


class Lookups:
    """Implement `ledger.Pool` by a client of stores."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._answered = threading.Condition()
        """Notified of each answer; it also guards whether a hold is released."""
        self._worker = Worker("kv-lookups", self._work, Lookup.end, MAX_WAITING)
        self._left_s = STEP_WAIT_S
        """How long this step may still wait."""
        self.deferred = 0
        """Lookups for which there was no room when they were begun."""

    def ask(self, names: list[str], first: Sequence[str] = ()) -> Lookup:
        """Begin a lookup, which has no answer for as long as too many others wait."""
        lookup = Lookup(names, first, self._look)
        lookup.is_queued = self._worker.offer(lookup)
        self.deferred += not lookup.is_queued
        return lookup

    def begin_step(self) -> None:
        """Allow the waits of another step."""
        self._left_s = STEP_WAIT_S

    def release(self, lookup: ledger.Lookup) -> None:
        assert isinstance(lookup, Lookup)
        with self._answered:
            lookup.released = True
            held = bool(lookup.hold.leases)
        if held:
            self._worker.offer(lookup)  # if refused, the hold expires

    def wait(self, wait_s: float) -> None:
        """Wait at most so long for the next answer."""
        with self._answered:
            self._answered.wait(wait_s)

    def close(self) -> None:
        self._worker.close()
        self._client.close()

    def _look(self, lookup: Lookup) -> None:
        if not lookup.is_queued:
            lookup.is_queued = self._worker.offer(lookup)
        if lookup.is_queued and not lookup.is_seen:
            lookup.is_seen = True
            began = monotonic()
            lookup.done.wait(self._left_s)
            self._left_s = max(0.0, self._left_s - (monotonic() - began))

    def _work(self, lookup: Lookup) -> None:
        hold = lookup.hold
        try:
            if not hold.leases and not lookup.released:
                hold = self._client.hold(lookup.names, lookup.first)
        finally:
            with self._answered:
                lookup.end(hold)
                released = lookup.released
                self._answered.notify_all()
        if released and hold.leases and monotonic() < hold.until:
            self._client.release(hold)
