"""Bounds the loop's time for what clients bring (connections, bytes, calls), and shares it by turns among the clients.

A thousand connections that come at once would otherwise take the loop for a second, in which every stream and every other
client waits. PURE but for its clock and its loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from mooncake_zmq.core.turns import Shares

TURN_S = 0.003
"""The loop's time for this in one turn, all clients together; the rest waits for the next turn. A call passes some twelve turns
from its connection to its answer, in each of which it may wait for so long."""

Owner = tuple[str, str]
"""A tenant, or without a known key an address: see `Connection.owner`."""
Work = Callable[[], None]


class LoopTurns:
    """Works of clients, each done at once while this turn of the loop has time left, else in a later turn. Then the owner that
    has used least time comes first, and an owner's works go in order."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._shares: Shares[Owner] = Shares()
        self._works: dict[Owner, deque[tuple[Work, float]]] = {}
        self._is_begun = False
        self._ends = 0.0

    def __len__(self) -> int:
        """Return the number of works that wait."""
        return sum(map(len, self._works.values()))

    @property
    def has_time(self) -> bool:
        """Whether a work would be done at once."""
        if not self._is_begun:
            self._begin()
        return not self._works and self._clock() < self._ends

    def spend(self, seconds: float) -> None:
        """Count time that the loop will need for a work that was done at once."""
        self._ends -= seconds

    def add(self, owner: Owner, work: Work, later_s: float = 0.0) -> None:
        """Have `work` done in a later turn. `later_s`: the time that the loop needs for it afterwards, by estimate."""
        if not self._is_begun:
            self._begin()
        if (works := self._works.get(owner)) is None:
            works = self._works[owner] = deque()
            self._shares.wait(owner)
        works.append((work, later_s))

    def _begin(self) -> None:
        self._is_begun = True
        self._ends = self._clock() + TURN_S
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Do what was left over, before anything new."""
        self._is_begun = False
        if self._works:
            self._begin()
        clock = self._clock
        while (began := clock()) < self._ends and (owner := self._shares.first()) is not None:
            works, later_s = self._works[owner], 0.0
            try:
                while True:
                    work, after_s = works.popleft()
                    if not works:
                        del self._works[owner]
                        self._shares.rest(owner)
                    later_s += after_s
                    self.spend(after_s)
                    work()
                    if not works or len(self._works) > 1 or clock() >= self._ends:  # alone, an owner stays the first
                        break
            finally:
                self._shares.charge(owner, clock() - began + later_s)
