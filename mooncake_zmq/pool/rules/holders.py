"""Leases and puts by which clients hold rows of a table, and when each is over. PURE.

The rules are the same for blocks and for values. What is leased is not evicted until its reader is done, or its time is over.
A put that is not committed in time keeps its rows in quarantine, as its writer may still write, until that answers or is known
to be dead.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from mooncake_zmq.core.actor import SetTimer
from mooncake_zmq.core.timers import Timers
from mooncake_zmq.pool.rules.table import Table
from mooncake_zmq.store.codes import Code

EXPIRE = ("expire",)
"""The timer of the next end of a lease or put."""
EXPIRY_S = 1e-3
"""Time by which a lease or put is ended later than it is over."""

ClientT = TypeVar("ClientT", bound=Hashable)


class Lease(Generic[ClientT]):
    """Rows that a client reads."""

    def __init__(self, client: ClientT, number: int, expires_at: float, rows: Sequence[int]) -> None:
        self.client, self.number, self.expires_at, self.rows = client, number, expires_at, rows


class Put(Generic[ClientT]):
    """Rows that a client may write until it commits, or its time is over."""

    def __init__(self, client: ClientT, number: int, expires_at: float) -> None:
        self.client, self.number, self.expires_at = client, number, expires_at
        self.rows: list[int] = []
        self.reserved = 0
        """The part of its client's share that it takes."""
        self.quarantined = False


class Grant(NamedTuple):
    """A cell to write, if `code` is OK."""

    code: Code
    entry: int = 0
    offset: int = 0
    generation: int = 0


class ObjectPut(Put[bytes]):
    """A put of values. `pins`: flags of `Pin`. It stands here as machine code has no interpreted subclasses."""

    def __init__(self, client: bytes, number: int, expires_at: float, keys: tuple[str, ...], pins: int) -> None:
        super().__init__(client, number, expires_at)
        self.keys, self.pins = keys, pins
        self.grants: list[Grant] = []


PutT = TypeVar("PutT", bound=Put[Any])


class Usage:
    """Sums of all that clients of one user hold, as a user may have many. A client without a user has its own."""

    def __init__(self, user: str | None) -> None:
        self.user = user
        self.clients = self.leases = self.puts = self.reserved = 0


class Holder(Generic[ClientT, PutT]):
    """Leases and puts of one client, by number."""

    def __init__(self, usage: Usage) -> None:
        self.usage = usage
        self.leases: dict[int, Lease[ClientT]] = {}
        self.puts: dict[int, PutT] = {}


class Holders(Generic[ClientT, PutT]):
    """All clients of one table."""

    def __init__(self, table: Table) -> None:
        self.clients: dict[ClientT, Holder[ClientT, PutT]] = {}
        self.usage_of_users: dict[str, Usage] = {}
        self.ends: Timers[Lease[ClientT] | PutT] = Timers()
        """When leases and puts are over, but for leases without end."""
        self.expires_at = math.inf
        """Nothing that is held ends before."""
        self._timer_at = math.inf
        """When the timer for that fires."""
        self._table = table

    def join(self, client: ClientT, user: str | None) -> None:
        """Begin a client of `user`, if it has one: all clients of a user share its limits."""
        assert client not in self.clients, "a client begins once"
        usage = self.usage_of_users.setdefault(user, Usage(user)) if user else Usage(None)
        usage.clients += 1
        self.clients[client] = Holder(usage)

    def of(self, client: ClientT, user: str | None = None) -> Holder[ClientT, PutT]:
        """Return what a client holds; one that is new joins."""
        if client not in self.clients:
            self.join(client, user)
        return self.clients[client]

    def busy(self) -> set[ClientT]:
        """Return the clients that hold something, whose processes are to be probed."""
        return {client for client, holder in self.clients.items() if holder.leases or holder.puts}

    def bury(self, client: ClientT) -> None:
        """End all that a client holds: it is known to be dead, or never wrote here itself."""
        holder = self.clients.pop(client, None)
        if holder is None:
            return
        usage = holder.usage
        usage.clients -= 1
        if usage.user is not None and not usage.clients:
            del self.usage_of_users[usage.user]
        for lease in holder.leases.values():
            self._end_lease(usage, lease)
        for put in holder.puts.values():
            self._end_put(usage, put)
            for row in put.rows:
                self._table.free(row)

    # --- leases

    def lease_of(self, client: ClientT, number: int) -> Lease[ClientT] | None:
        """Return a lease that is not over."""
        holder = self.clients.get(client)
        return None if holder is None else holder.leases.get(number)

    def lease(self, lease: Lease[ClientT]) -> None:
        """Begin a lease of rows that are pinned for it."""
        holder = self.of(lease.client)
        holder.leases[lease.number] = lease
        holder.usage.leases += 1
        self.time(lease)

    def release(self, client: ClientT, number: int) -> Lease[ClientT] | None:
        """End a lease, whose rows are unpinned. None if there is none, as it may have expired."""
        holder = self.clients.get(client)
        lease = None if holder is None else holder.leases.pop(number, None)
        if holder is not None and lease is not None:
            self._end_lease(holder.usage, lease)
        return lease

    def _end_lease(self, usage: Usage, lease: Lease[ClientT]) -> None:
        self.ends.cancel(lease)
        usage.leases -= 1
        self._table.unpin(lease.rows)

    # --- puts

    def put_of(self, client: ClientT, number: int) -> PutT | None:
        """Return a put that has not ended; it may be in quarantine."""
        holder = self.clients.get(client)
        return None if holder is None else holder.puts.get(number)

    def put(self, put: PutT) -> None:
        """Begin a put, for whose rows the caller has charged its client's usage."""
        holder = self.of(put.client)
        holder.puts[put.number] = put
        holder.usage.puts += 1
        self.time(put)

    def end_put(self, client: ClientT, number: int) -> PutT | None:
        """End a put, whose rows the caller commits or frees."""
        holder = self.clients.get(client)
        put = None if holder is None else holder.puts.pop(number, None)
        if holder is not None and put is not None:
            self._end_put(holder.usage, put)
        return put

    def quarantine(self, put: PutT) -> None:
        """Put the rows of a put that is late into quarantine."""
        put.quarantined = True
        self.ends.cancel(put)
        for row in put.rows:
            self._table.quarantine(row)

    def _end_put(self, usage: Usage, put: PutT) -> None:
        self.ends.cancel(put)
        usage.puts -= 1
        usage.reserved -= put.reserved

    # --- time

    def time(self, held: Lease[ClientT] | PutT) -> None:
        """Let a lease or put end at its `expires_at`, which may have changed."""
        if held.expires_at < math.inf:
            self.ends.set(held, held.expires_at, held)
            self.expires_at = min(self.expires_at, held.expires_at)

    def expire(self, now: float, over: Callable[[Lease[ClientT]], None], late: Callable[[PutT], None]) -> None:
        """End the leases whose time is over, which `over` is called with, and call `late` with the puts whose time is. To be
        called when `EXPIRE` has fired."""
        while self.ends.next_at() < now and (held := self.ends.pop_due(now)) is not None:
            if isinstance(held, Lease):
                self.release(held.client, held.number)
                over(held)
            else:
                late(held)
        self.expires_at, self._timer_at = self.ends.next_at(), math.inf

    def timer(self, now: float) -> list[SetTimer]:
        """Arm `EXPIRE` if what ends next ends before it. To be called after each event."""
        if self.expires_at >= self._timer_at:
            return []
        self._timer_at = self.expires_at
        return [SetTimer(EXPIRE, self._timer_at - now + EXPIRY_S)]
