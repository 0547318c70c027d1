"""Fair turns by time: the key that has used the least of a worker's time goes next. PURE.

A key that comes, or comes back, counts as having used its share of the time so far: turns cannot be saved up, and a stream of
new keys cannot keep another one waiting for ever. (Fair queueing with a virtual time, as start-time fair queueing has it.)
"""

from collections import deque
from collections.abc import Hashable
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
WorkT = TypeVar("WorkT")


class Shares(Generic[KeyT]):
    """The time that each key has used of one worker. Each call takes amortized logarithmic time in the number of keys."""

    def __init__(self) -> None:
        self._share_s = 0.0
        """The time that a key has used that was here from the beginning."""
        self._used_s: dict[KeyT, float] = {}
        self._waiting: dict[KeyT, None] = {}
        self._heap: list[tuple[float, int, KeyT]] = []
        """Keys that wait, by the time that each had used when it was put here; by now it may be more."""
        self._debtors: list[tuple[float, int, KeyT]] = []
        """Keys that do not wait and may have used more than their share, each once, likewise by time."""
        self._listed: set[KeyT] = set()
        """Keys in `_debtors`."""
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._used_s)

    def wait(self, key: KeyT) -> None:
        """Begin to wait for the worker."""
        if key not in self._waiting:
            self._used_s[key] = max(self._used_s.get(key, 0.0), self._share_s)
            self._waiting[key] = None
            heappush(self._heap, (self._used_s[key], next(self._numbers), key))

    def rest(self, key: KeyT) -> None:
        """Stop waiting. The time used counts until it is no more than the share."""
        if self._waiting.pop(key, self) is None:
            if key not in self._listed:
                self._listed.add(key)
                heappush(self._debtors, (self._used_s[key], next(self._numbers), key))
            if len(self._heap) > 2 * len(self._waiting) + 8:  # the heap holds many stale entries
                self._heap = sorted((self._used_s[each], next(self._numbers), each) for each in self._waiting)

    def forget(self, key: KeyT) -> None:
        """Remove a key that does not come again."""
        self.rest(key)
        self._used_s.pop(key, None)

    def used_s(self, key: KeyT) -> float:
        """Return the time that a key has used, for comparison with others."""
        return self._used_s.get(key, self._share_s)

    def first(self) -> KeyT | None:
        """Return the waiting key that has used the least time; None if none waits."""
        while self._heap:
            used_s, number, key = self._heap[0]
            if key in self._waiting and self._used_s[key] == used_s:
                return key
            heappop(self._heap)
            if key in self._waiting and self._used_s[key] > used_s:
                heappush(self._heap, (self._used_s[key], number, key))
        return None

    def charge(self, key: KeyT, seconds: float) -> None:
        """Count the seconds that the worker spent on a key."""
        others = len(self._waiting) - (key in self._waiting)
        self._share_s += seconds / (1 + others)
        if key in self._used_s:
            self._used_s[key] += seconds
        self._forgive()

    def _forgive(self) -> None:
        """Forget the keys that do not wait and have used no more than their share."""
        while self._debtors and self._debtors[0][0] <= self._share_s:
            _, number, key = heappop(self._debtors)
            if key not in self._waiting and self._used_s.get(key, 0.0) > self._share_s:
                heappush(self._debtors, (self._used_s[key], number, key))
                continue
            self._listed.remove(key)
            if key not in self._waiting:
                self._used_s.pop(key, None)  # as for a key that never used any time


class _Tenant(Generic[WorkT]):
    __slots__ = ("flows", "shares")

    def __init__(self) -> None:
        self.shares: Shares[int] = Shares()
        self.flows: dict[int, deque[WorkT]] = {}


class Turns(Generic[WorkT]):
    """Works that wait, each of a flow of a tenant: the time is shared by the tenants, and a tenant's by its flows. A flow is
    known from its first work until it is dropped."""

    def __init__(self) -> None:
        self._shares: Shares[str] = Shares()
        self._tenants: dict[str, _Tenant[WorkT]] = {}
        """Tenants that have flows."""

    def put(self, tenant: str, flow: int, work: WorkT) -> None:
        """Add a work behind the others of the same flow."""
        known = self._tenants.setdefault(tenant, _Tenant())
        known.flows.setdefault(flow, deque()).append(work)
        known.shares.wait(flow)
        self._shares.wait(tenant)

    def take(self) -> WorkT | None:
        """Remove and return the next work; None if none waits."""
        if (tenant := self._shares.first()) is None:
            return None
        known = self._tenants[tenant]
        flow = known.shares.first()
        assert flow is not None
        works = known.flows[flow]
        work = works.popleft()
        if not works:
            self._rest(tenant, known, flow)
        return work

    def charge(self, tenant: str, flow: int, seconds: float) -> None:
        """Count the seconds that a work of this flow took; of a flow that was dropped, for its tenant alone."""
        self._shares.charge(tenant, seconds)
        if (known := self._tenants.get(tenant)) is not None:
            known.shares.charge(flow, seconds)

    def drop(self, tenant: str, flow: int) -> list[WorkT]:
        """Forget a flow, and return its works that waited."""
        known = self._tenants.get(tenant)
        works = None if known is None else known.flows.pop(flow, None)
        if known is None or works is None:
            return []
        if works:
            self._rest(tenant, known, flow)
        known.shares.forget(flow)
        if not known.flows:
            del self._tenants[tenant]
        return list(works)

    def clear(self) -> list[WorkT]:
        """Forget all flows, and return their works that waited."""
        works = [work for tenant in self._tenants.values() for flow in tenant.flows.values() for work in flow]
        self._shares, self._tenants = Shares(), {}
        return works

    def _rest(self, tenant: str, known: _Tenant[WorkT], flow: int) -> None:
        known.shares.rest(flow)
        if known.shares.first() is None:
            self._shares.rest(tenant)
