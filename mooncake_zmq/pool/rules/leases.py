"""Leases: what is read is not evicted until its reader is done, or its time is over. PURE."""

import math
from collections.abc import Sequence

from mooncake_zmq.pool.rules.entries import Entries, Found
from mooncake_zmq.pool.rules.holders import Client, Holders, Lease, Usage


class Leases:
    """The leases of all clients."""

    def __init__(self, entries: Entries, holders: Holders) -> None:
        self._entries, self._holders = entries, holders

    def lease(self, now: float, client: bytes, lease_id: int, keys: Sequence[str], ttl_s: float | None) -> list[Found | None]:
        """Keep those of `keys` that are here from being evicted. The holder counts `ttl_s` from when it asked. None: until it
        is released, which the owner then sees to."""
        holder = self._holders.of(client)
        known = holder.leases.get(lease_id)
        if known is not None:
            by_key = {self._entries.key[entry]: entry for entry in known.entries}
            return [self._entries.found(by_key[key]) if key in by_key else None for key in keys]
        if holder.usage.leases >= self._entries.settings.max_leases_per_client:
            self._entries.counts["no_room"] += len(keys)
            return [None] * len(keys)
        found: list[Found | None] = []
        entries: list[int] = []
        for key in keys:
            entry = self._entries.by_key.get(key)
            if entry is None:
                found.append(None)
                continue
            self._entries.pin_leased(entry, key)
            entries.append(entry)
            found.append(self._entries.found(entry))
        if entries:
            expires_at = math.inf if ttl_s is None else now + min(ttl_s, self._entries.settings.max_ttl_s)
            lease = holder.leases[lease_id] = Lease(client, lease_id, expires_at, entries)
            holder.usage.leases += 1
            self._holders.time(lease)
            self._entries.counts["leased"] += len(entries)
        return found

    def release(self, client: bytes, lease_id: int) -> None:
        """No more reading under this lease; of an unknown one nothing is said, as it may have expired."""
        holder = self._holders.clients.get(client)
        lease = holder.leases.pop(lease_id, None) if holder else None
        if holder is not None and lease is not None:
            self.end(holder.usage, lease)

    def end(self, usage: Usage, lease: Lease) -> None:
        self._holders.untime(lease)
        usage.leases -= 1
        for entry in lease.entries:
            self._entries.unpin_leased(entry)

    def end_all(self, holder: Client) -> None:
        """The client is gone for good: it reads nothing any more."""
        for lease in holder.leases.values():
            self.end(holder.usage, lease)
