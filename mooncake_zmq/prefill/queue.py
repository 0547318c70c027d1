"""The order of a prefill's jobs: tenants share the engine's time, and within a tenant `core.order` decides. KV plays no role.
PURE.

A place is the right to hold KV and to get chunks, and `max_active` jobs hold one. The next place goes to the tenant that holds
fewest, or of equals to the one that has used the least of the engine's time, and there to the job with the smallest rank. A few
further places are for a job that ranks before another one that holds a place, and for a job of a tenant that has none. So the
first job of all, and of every tenant, is nearly always prepared when the engine is free. The conductor predicts waits by the
same turns (`conductor.prefills`).
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from mooncake_zmq.core.turns import Shares


class Ranked(Protocol):
    """A job, as far as the queue looks at it."""

    @property
    def rank(self) -> float:
        """See `core.order`."""

    @property
    def order(self) -> int:
        """Unique arrival number, which decides ties."""

    @property
    def arrived_at(self) -> float:
        """Time of arrival: the rank of a job without priority and overtaking."""

    @property
    def tenant(self) -> str:
        """Tenant of the job; empty without tenants."""


J = TypeVar("J", bound=Ranked)
Entry = tuple[float, int, J]


class JobQueue(Generic[J]):
    """Hold the jobs that wait for a place, and those that have one, both by rank."""

    def __init__(self, max_active: int, further: int) -> None:
        self._max_active = max_active
        self._further = further
        self._waiting: list[Entry[J]] = []
        self._active: list[Entry[J]] = []
        self._shares: Shares[str] = Shares()
        """The engine's time, by tenant."""
        self._places: Counter[str] = Counter()
        """Places that each tenant's jobs hold."""
        self._jobs: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Number of jobs without a place."""
        return len(self._waiting)

    def waiting_of(self, tenant: str) -> int:
        """Return the number of this tenant's jobs without a place."""
        return self._jobs[tenant] - self._places[tenant]

    def __len__(self) -> int:
        return len(self._waiting) + len(self._active)

    def arrive(self, job: J) -> None:
        """Add a job that waits for a place."""
        insort(self._waiting, (job.rank, job.order, job))
        self._jobs[job.tenant] += 1
        self._shares.wait(job.tenant)

    def activate(self) -> J | None:
        """Give the next job a place and return it; None if no job gets one. To be called until then."""
        held = len(self._active)
        if not self._waiting or held >= self._max_active + self._further:
            return None
        place = self._next()
        entry = self._waiting[place]
        is_first_of_tenant = not self._places[entry[2].tenant]
        if held >= self._max_active and not is_first_of_tenant and bisect_left(self._active, entry) >= self._max_active:
            return None
        del self._waiting[place]
        insort(self._active, entry)
        self._places[entry[2].tenant] += 1
        return entry[2]

    def _next(self) -> int:
        """Return the index of the job that gets the next place: the first by rank, among the tenants that hold the fewest
        places, or of equals have used the least time."""
        firsts = self._firsts(self._waiting, len(self._jobs))
        return min(firsts, key=lambda first: self._claim(first[1]))[0]

    def _firsts(self, entries: list[Entry[J]], tenants: int, wanted: Callable[[J], bool] | None = None) -> list[tuple[int, J]]:
        """Return the first wanted job of each tenant and its index. The search ends once so many tenants have one."""
        firsts: dict[str, tuple[int, J]] = {}
        for place, (_, _, job) in enumerate(entries):
            if job.tenant not in firsts and (wanted is None or wanted(job)):
                firsts[job.tenant] = place, job
                if len(firsts) == tenants:
                    break
        return list(firsts.values())

    def _claim(self, job: J) -> tuple[int, float, float]:
        return self._places[job.tenant], self._used_s(job), job.rank

    def _used_s(self, job: J) -> float:
        """Return the time that its tenant has used, plus as many seconds as the job ranks after its arrival, or minus as
        many as before. So a priority is worth as much among tenants as within one."""
        return self._shares.used_s(job.tenant) + job.rank - job.arrived_at

    def leave(self, job: J) -> None:
        """Remove a job that needs no more place or turns; it may have been removed before."""
        entry = (job.rank, job.order, job)
        for entries in (self._active, self._waiting):
            index = bisect_left(entries, entry)
            if index < len(entries) and entries[index][2] is job:
                del entries[index]
                if entries is self._active:
                    self._take_one(self._places, job.tenant)
                if self._take_one(self._jobs, job.tenant):
                    self._shares.rest(job.tenant)
                return

    def _take_one(self, counter: Counter[str], tenant: str) -> bool:
        """Decrement a tenant's count. Returns whether it is 0 now."""
        counter[tenant] -= 1
        if counter[tenant]:
            return False
        del counter[tenant]
        return True

    def charge(self, job: J, seconds: float) -> None:
        """Record that the engine worked so long for a job."""
        self._shares.charge(job.tenant, seconds)

    def first(self, wanted: Callable[[J], bool]) -> J | None:
        """Return the first active job for which `wanted` holds, of the tenant that has used the least time."""
        firsts = [job for _, job in self._firsts(self._active, len(self._places), wanted)]
        return min(firsts, key=self._used_s, default=None)

    def active(self) -> list[J]:
        """Return the jobs that hold a place, by rank."""
        return [job for _, _, job in self._active]

    def __iter__(self) -> Iterator[J]:
        """Iterate over all jobs by rank."""
        return (job for _, _, job in sorted(self._active + self._waiting))
