"""The continuous batch's rules: who is in the next step, and who is preempted when KV runs short. PURE."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class Member(Protocol):
    """What the rules look at."""

    @property
    def order(self) -> int:
        """Reservation number: larger is younger."""


M = TypeVar("M", bound=Member)


def step_members(ready: Iterable[M], max_batch: int) -> list[M]:
    """The oldest `max_batch` requests: those running stay, a new one joins as soon as there is a place."""
    return sorted(ready, key=lambda member: member.order)[:max_batch]


def victim(members: Sequence[M]) -> M | None:
    """The youngest gives way: it has lost least, and the oldest always goes on, so the batch as a whole does."""
    return max(members, key=lambda member: member.order, default=None)
