"""Puts and leases that clients of a store hold, and when each is over. PURE."""

import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from mooncake_zmq.store.codes import Code

LEAST_ENDS = 64
"""Leases and puts that are over are not worth to be looked for among fewer than these."""


class Grant(NamedTuple):
    """A cell to write, if `code` is OK."""

    code: Code
    entry: int = 0
    offset: int = 0
    generation: int = 0


@dataclass(slots=True)
class Put:
    """Cells that a client may write until it commits, or its time is over."""

    client: bytes
    expires_at: float
    keys: tuple[str, ...]
    pins: int
    """Flags of `Pin`."""
    grants: list[Grant]
    reserved_bytes: int
    put_id: int
    quarantined: bool = False
    over: bool = False


@dataclass(slots=True)
class Lease:
    client: bytes
    lease_id: int
    expires_at: float
    entries: list[int]
    over: bool = False


@dataclass(slots=True)
class Usage:
    """Sum of all that clients with one key hold, as they may use many names. A client without a key has its own."""

    user: str | None
    clients: int = 0
    leases: int = 0
    puts: int = 0
    reserved_bytes: int = 0


@dataclass(slots=True)
class Client:
    """Puts and leases of one client."""

    usage: Usage
    leases: dict[int, Lease] = field(default_factory=dict)
    puts: dict[int, Put] = field(default_factory=dict)


class Holders:
    """Clients by their names; all with one key have one usage."""

    def __init__(self) -> None:
        self.clients: dict[bytes, Client] = {}
        self.usage_of_keys: dict[str, Usage] = {}
        """By the name of the key."""
        self.expires_at = math.inf
        """Nothing that is held ends before."""
        self.ends: list[tuple[float, int, Lease | Put]] = []
        """A heap of when leases and puts are over, but for leases without end. What ended before stays until it comes up, or
        until it is most of the heap."""
        self.timed = 0
        """Those in the heap that are not over."""
        self._numbers = itertools.count()

    def join(self, client: bytes, user: str | None) -> None:
        """A client begins, with the key `user` if it has one: all with that key share its limits."""
        assert client not in self.clients, "a client begins once"
        usage = self.usage_of_keys.setdefault(user, Usage(user)) if user else Usage(None)
        usage.clients += 1
        self.clients[client] = Client(usage)

    def of(self, client: bytes) -> Client:
        if client not in self.clients:
            self.join(client, None)
        return self.clients[client]

    def time(self, held: Lease | Put) -> None:
        """It ends when its time is over."""
        if held.expires_at == math.inf:
            return
        self.timed += 1
        if len(self.ends) > 2 * self.timed + LEAST_ENDS:
            self.ends = [end for end in self.ends if not end[2].over]
            heapq.heapify(self.ends)
        heapq.heappush(self.ends, (held.expires_at, next(self._numbers), held))
        self.expires_at = min(self.expires_at, held.expires_at)

    def untime(self, held: Lease | Put) -> None:
        if not held.over and held.expires_at < math.inf:
            self.timed -= 1
        held.over = True

    def next_expiry(self) -> float:
        """When the next lease or put is over; infinite if there is none."""
        while self.ends and self.ends[0][2].over:
            heapq.heappop(self.ends)
        return self.ends[0][0] if self.ends else math.inf

    def due(self, now: float) -> Lease | Put | None:
        """The next of those whose time is over, which leaves the heap."""
        return heapq.heappop(self.ends)[2] if self.next_expiry() < now else None

    def leave(self, client: bytes) -> Client | None:
        """A client is gone for good: what it held, which the caller ends."""
        holder = self.clients.pop(client, None)
        if holder is not None:
            holder.usage.clients -= 1
            if holder.usage.user is not None and not holder.usage.clients:
                del self.usage_of_keys[holder.usage.user]
        return holder

    def busy(self) -> set[bytes]:
        """Clients that hold something, whose processes the owner should probe."""
        return {client for client, holder in self.clients.items() if holder.leases or holder.puts}
