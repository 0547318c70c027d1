"""Shares the time of one worker fairly among tenants, and among the answers of each tenant. PURE.

The next work is one of the tenant that has used the least time, and of its answer that has used the least. A tenant or an
answer that comes, or comes back, counts as having used its share of the time so far: turns cannot be saved up, and a stream of
new ones cannot keep another one waiting for ever. (Fair queueing with a virtual time, as start-time fair queueing has it.)
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

WorkT = TypeVar("WorkT")


@dataclass(slots=True)
class _Flow(Generic[WorkT]):
    """The works that one answer waits for, and the time that its works have taken."""

    used_s: float
    works: deque[WorkT] = field(default_factory=deque)


@dataclass(slots=True)
class _Tenant(Generic[WorkT]):
    used_s: float
    share_s: float = 0.0
    """The time that a flow has used that was here from the beginning."""
    flows: dict[int, _Flow[WorkT]] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """Flows that wait."""
        return sum(bool(flow.works) for flow in self.flows.values())


class Turns(Generic[WorkT]):
    """Works that wait, each of a flow of a tenant. A flow is known from its first work until it is dropped."""

    def __init__(self) -> None:
        self._share_s = 0.0
        """The time that a tenant has used that was here from the beginning."""
        self._tenants: dict[str, _Tenant[WorkT]] = {}

    def put(self, tenant: str, flow: int, work: WorkT) -> None:
        """Add a work behind the others of the same flow."""
        known = self._tenants.setdefault(tenant, _Tenant(self._share_s))
        if not known.waiting:
            known.used_s = max(known.used_s, self._share_s)
        waiting = known.flows.setdefault(flow, _Flow(known.share_s))
        if not waiting.works:
            waiting.used_s = max(waiting.used_s, known.share_s)
        waiting.works.append(work)

    def take(self) -> WorkT | None:
        """Remove and return the next work; None if none waits."""
        for name in [name for name, each in self._tenants.items() if not each.flows and each.used_s <= self._share_s]:
            del self._tenants[name]  # as if it had never been here
        tenants = [tenant for tenant in self._tenants.values() if tenant.waiting]
        if not tenants:
            return None
        flows = min(tenants, key=lambda each: each.used_s).flows.values()
        return min([flow for flow in flows if flow.works], key=lambda each: each.used_s).works.popleft()

    def charge(self, tenant: str, flow: int, seconds: float) -> None:
        """Count the seconds that a work of this flow took; of a flow that was dropped, for its tenant alone."""
        if (known := self._tenants.get(tenant)) is None:
            return
        others = sum(each.waiting > 0 for each in self._tenants.values() if each is not known)
        known.used_s += seconds
        self._share_s += seconds / (1 + others)
        charged = known.flows.get(flow)
        known.share_s += seconds / (1 + known.waiting - bool(charged and charged.works))
        if charged is not None:
            charged.used_s += seconds

    def drop(self, tenant: str, flow: int) -> list[WorkT]:
        """Forget a flow, and return its works that waited."""
        known = self._tenants.get(tenant)
        gone = None if known is None else known.flows.pop(flow, None)
        return [] if gone is None else list(gone.works)

    def clear(self) -> list[WorkT]:
        """Forget all flows, and return their works that waited."""
        tenants, self._tenants = self._tenants, {}
        return [work for tenant in tenants.values() for flow in tenant.flows.values() for work in flow.works]
