"""Lookups in the pool on a separate thread: which blocks of a prompt are stored, held until they were read."""

import threading
import time
from collections.abc import Sequence

from mooncake_zmq.store.client.client import Hold, StoreClient
from mooncake_zmq.vllm import ledger
from mooncake_zmq.vllm.worker import Worker

FIRST_WAIT_S = 4e-3
"""How long the first look at an answer waits for it: a pool on this host takes about 0.2 ms."""
MAX_WAITING = 256
_NOTHING = Hold(0, 0.0)


class Lookup:
    """One question to the pool. `release` may be called before its answer."""

    def __init__(self, names: list[str], first: Sequence[str]) -> None:
        self.names, self.first = names, first
        self.hold = _NOTHING
        self.released = False
        self._done = threading.Event()
        self._wait_s = FIRST_WAIT_S

    def answer(self) -> int | None:
        wait_s, self._wait_s = self._wait_s, 0.0
        return self.hold.count if self._done.wait(wait_s) else None

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
        self._done.set()


class Lookups:
    """Implement `ledger.Pool` by a client of stores."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._answered = threading.Condition()
        """Notified of each answer; it also guards whether a hold is released."""
        self._worker = Worker("kv-lookups", self._work, Lookup.end, MAX_WAITING)

    def ask(self, names: list[str], first: Sequence[str] = ()) -> Lookup:
        """Begin a lookup, which is answered with 0 at once where too many already wait."""
        lookup = Lookup(names, first)
        if not self._worker.offer(lookup):
            lookup.end()
        return lookup

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
        if released and hold.leases and time.monotonic() < hold.until:
            self._client.release(hold)
