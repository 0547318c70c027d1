"""Rules of the continuous batch: the members of the next step, preemption when KV runs short, and refusals. PURE."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol, TypeVar

from mooncake_zmq.core.costs import Costs

MAX_RETRY_S = 60.0
"""The longest wait that can be predicted from the requests present."""


class Member(Protocol):
    """A request as far as the rules look at it."""

    @property
    def order(self) -> int:
        """Return the reservation number: the larger, the younger."""

    @property
    def tenant(self) -> str:
        """Return the tenant of the request; empty without tenants."""


M = TypeVar("M", bound=Member)
BY_ORDER: Callable[[Member], int] = attrgetter("order")


def step_members(ready: Iterable[M], max_batch: int) -> list[M]:
    """Choose at most `max_batch` requests: the oldest of each tenant, then the second of each, and so on, the oldest first
    among equals. A tenant's members stay until they end, and a new one joins as soon as there is a place. A tenant that
    fills the batch alone makes room for another tenant."""
    oldest_first = sorted(ready, key=BY_ORDER)
    if len(oldest_first) <= max_batch:
        return oldest_first
    rounds: Counter[str] = Counter()
    ranked: list[tuple[int, int, M]] = []
    for member in oldest_first:
        ranked.append((rounds[member.tenant], member.order, member))
        rounds[member.tenant] += 1
    ranked.sort(key=lambda each: each[:2])
    return sorted([member for _, _, member in ranked[:max_batch]], key=BY_ORDER)


def ahead_of(others: Iterable[Member], tenant: str) -> int:
    """Return how many of the others get a place in a full batch before a new request of this tenant: all of its own
    tenant's, and of each other tenant as many and one more, in the order of `step_members`."""
    counts = Counter(member.tenant for member in others)
    own = counts.pop(tenant, 0)
    return own + sum(min(count, own + 1) for count in counts.values())


def victim(members: Sequence[M]) -> M | None:
    """Choose the request to preempt: the youngest of the tenant with the most requests here. It has lost least, and the
    oldest request always goes on, so the batch as a whole makes progress."""
    counts = Counter(member.tenant for member in members)
    return max(members, key=lambda member: (counts[member.tenant], member.order), default=None)


@dataclass(frozen=True, slots=True)
class Place:
    """A request in the batch or about to join it: the tokens of KV that its next step reads, and the steps that it may still
    take."""

    context: int
    left: int


def retry_after_s(
    costs: Costs, *, slowness: float, slo_s: float, max_batch: int, others: Sequence[Place], own_context: int, ahead: int
) -> float | None:
    """Return how long until a step with one more request, which reads `own_context` tokens, takes at most `slo_s`: enough of
    `others` must have ended by then. Return None if the request may join now. A request alone always may, since waiting would
    make nothing faster.

    A batch never has more than `max_batch` members: a request waits for a place while `ahead` of the others come before it, and
    that wait is its first gap.
    """
    ending = sorted(others, key=lambda place: place.left)
    batch, context = len(others) + 1, sum(place.context for place in others) + own_context
    waiting = max(0, ahead + 1 - max_batch)
    step_s = slowness * costs.step_s(min(batch, max_batch), context)
    wait_s = 0.0
    for gone in range(batch):
        if gone:
            context -= ending[gone - 1].context
            wait_s = ending[gone - 1].left * step_s
        fits = slowness * costs.step_s(min(batch - gone, max_batch), context) <= slo_s or batch - gone == 1
        if gone >= waiting and fits:
            in_time = gone == waiting and wait_s <= slo_s
            return None if in_time else min(wait_s, MAX_RETRY_S)
    return min(wait_s, MAX_RETRY_S)
