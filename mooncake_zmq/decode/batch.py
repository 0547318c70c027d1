"""The continuous batch's rules: who is in the next step, who is preempted when KV runs short, who may not join. PURE."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol, TypeVar

from mooncake_zmq.core.costs import Costs

MAX_RETRY_S = 60.0
"""What is known of those that are here reaches no further."""


class Member(Protocol):
    """What the rules look at."""

    @property
    def order(self) -> int:
        """Reservation number: larger is younger."""

    @property
    def tenant(self) -> str:
        """Who asked; empty where nobody is known."""


M = TypeVar("M", bound=Member)
BY_ORDER: Callable[[Member], int] = attrgetter("order")


def step_members(ready: Iterable[M], max_batch: int) -> list[M]:
    """At most `max_batch` requests: each tenant's oldest one, then each one's second, and so on, of equals the oldest. Those of
    one tenant stay until they end, and a new one joins as soon as there is a place; a tenant that fills the batch by itself
    makes room for another one's."""
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
    """Return how many of the others have a place in a full batch before a newcomer of this tenant: its own, and of each other
    tenant as many and one more, as `step_members` has it."""
    counts = Counter(member.tenant for member in others)
    own = counts.pop(tenant, 0)
    return own + sum(min(count, own + 1) for count in counts.values())


def victim(members: Sequence[M]) -> M | None:
    """Of the tenant that has most requests here the youngest gives way: it has lost least, and the oldest of all always goes
    on, so the batch as a whole does."""
    counts = Counter(member.tenant for member in members)
    return max(members, key=lambda member: (counts[member.tenant], member.order), default=None)


@dataclass(frozen=True, slots=True)
class Place:
    """A request in the batch, or about to join it: tokens of KV that its next step reads, and steps it may still take."""

    context: int
    left: int


def retry_after_s(
    costs: Costs, *, slowness: float, slo_s: float, max_batch: int, others: Sequence[Place], own_context: int, ahead: int
) -> float | None:
    """How long until a step with one request more, which reads `own_context` tokens, takes no longer than `slo_s`: so many of
    `others` must have ended first. None if it may come now. Alone it may always: waiting would make nothing faster.

    A batch is never larger than `max_batch`: a request waits for a place while as many have one before it, `ahead` of the
    others, and that is its first gap.
    """
    leaving = sorted(others, key=lambda place: place.left)
    batch, context = len(others) + 1, sum(place.context for place in others) + own_context
    waiting = max(0, ahead + 1 - max_batch)
    step_s = slowness * costs.step_s(min(batch, max_batch), context)
    wait_s = 0.0
    for gone in range(batch):
        if gone:
            context -= leaving[gone - 1].context
            wait_s = leaving[gone - 1].left * step_s
        fits = slowness * costs.step_s(min(batch - gone, max_batch), context) <= slo_s or batch - gone == 1
        if gone >= waiting and fits:
            in_time = gone == waiting and wait_s <= slo_s
            return None if in_time else min(wait_s, MAX_RETRY_S)
    return min(wait_s, MAX_RETRY_S)
