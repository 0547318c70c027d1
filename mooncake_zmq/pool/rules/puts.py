"""Two-phase puts: cells are reserved, written by the client and committed, or kept in quarantine past their time. PURE.

A writer that runs past its time may still write: its cells stay in quarantine until it answers or is buried.
"""

from collections.abc import Iterable, Sequence

from mooncake_zmq.pool.rules.entries import Entries
from mooncake_zmq.pool.rules.holders import Grant, Holders, ObjectPut, Usage
from mooncake_zmq.pool.rules.tenants import NO_TENANT
from mooncake_zmq.pool.rules.victims import Victims
from mooncake_zmq.store.codes import Code, Pin, is_key

_UPSERT, _PROMOTION = int(Pin.UPSERT), int(Pin.PROMOTION)


class Puts:
    """The puts of all clients under way."""

    def __init__(self, entries: Entries, victims: Victims, holders: Holders[bytes, ObjectPut]) -> None:
        self._entries, self._victims, self._holders = entries, victims, holders
        self.writing: dict[str, int] = {}
        """Keys of plain puts under way."""
        settings = entries.settings
        self._client_bytes = max(settings.max_client_share * settings.object_bytes, entries.slabs.slab_bytes)
        """Bytes that one client may hold reserved or in quarantine."""

    def reserve(
        self,
        now: float,
        client: bytes,
        put_id: int,
        keys: Sequence[str],
        sizes: Sequence[int],
        *,
        pins: Pin = Pin.NONE,
        ttl_s: float,
    ) -> list[Grant]:
        """Cells for these values, each key answered on its own."""
        holder = self._holders.of(client)
        known = holder.puts.get(put_id)
        if known is not None:
            return known.grants
        # Promotions are one put a value, and have the limit of bytes alone: a reader brings many small values in one work.
        if holder.usage.puts >= self._entries.settings.max_puts_per_client and not pins & _PROMOTION:
            self._entries.counts["no_room"] += len(keys)
            return [Grant(Code.NO_ROOM)] * len(keys)
        put = ObjectPut(client, put_id, now + min(ttl_s, self._entries.settings.max_ttl_s), tuple(keys), int(pins))
        for key, size in zip(keys, sizes, strict=True):
            put.grants.append(self._reserve(holder.usage, put, key, size))
        put.rows = [grant.entry for grant in put.grants if grant.code is Code.OK]
        if put.rows:
            self._holders.put(put)
        return put.grants

    def commit(
        self, now: float, client: bytes, put_id: int, indexes: Sequence[int], checksums: Sequence[int]
    ) -> list[Code] | None:
        """End a put: the keys at `indexes` were written, the others were given up. None if there is no such put."""
        put = self._holders.end_put(client, put_id)
        if put is None:
            return None
        self._withdraw(put)
        on_time = now <= put.expires_at and not put.quarantined
        written = dict(zip(indexes, checksums, strict=True)) if on_time else {}
        codes = [grant.code if on_time else Code.EXPIRED for grant in put.grants]
        for index, grant in enumerate(put.grants):
            if grant.code is not Code.OK:
                continue
            if index in written:
                codes[index] = self._commit(grant.entry, put.keys[index], written[index], put.pins)
            else:
                self._entries.free(grant.entry)
        return codes

    def put_of(self, now: float, client: bytes, put_id: int) -> ObjectPut | None:
        """A put that may still be committed."""
        put = self._holders.put_of(client, put_id)
        return None if put is None or put.quarantined or now > put.expires_at else put

    def supersede(self, client: bytes, keys: Iterable[str]) -> None:
        """Puts of this client with these keys under way end as if their time were over: it begins them anew."""
        holder = self._holders.clients.get(client)
        entries = {self.writing[key] for key in keys if key in self.writing}
        if holder is None or not entries:
            return
        for put in list(holder.puts.values()):
            if not put.quarantined and not entries.isdisjoint(put.rows):
                self.on_late(put)

    def on_late(self, put: ObjectPut) -> None:
        """The time of a put is over: its writer may still write."""
        self._holders.quarantine(put)
        self._withdraw(put)
        self._entries.counts["puts_expired"] += 1
        self._entries.counts["quarantined"] += len(put.rows)

    def withdraw(self, client: bytes) -> None:
        """Let others put what a client that is gone for good was putting."""
        holder = self._holders.clients.get(client)
        for put in holder.puts.values() if holder is not None else ():
            self._withdraw(put)

    def _withdraw(self, put: ObjectPut) -> None:
        for key, grant in zip(put.keys, put.grants, strict=True):
            if grant.code is Code.OK and self.writing.get(key) == grant.entry:
                del self.writing[key]

    def gauges(self) -> dict[str, float]:
        """Sums of the puts under way; all zero when no client writes."""
        puts = [put for holder in self._holders.clients.values() for put in holder.puts.values()]
        return {
            "puts": len(puts),
            "writing_objects": sum(len(put.rows) for put in puts if not put.quarantined),
            "quarantined_objects": sum(len(put.rows) for put in puts if put.quarantined),
            "reserved_bytes": sum(put.reserved for put in puts),
        }

    def _reserve(self, usage: Usage, put: ObjectPut, key: str, size: int) -> Grant:
        entries = self._entries
        size_class = entries.slabs.class_of(size) if size > 0 else None
        if size_class is None or not is_key(key):
            return Grant(Code.INVALID)
        pins = put.pins
        if not pins & _UPSERT and (key in entries.by_key or key in self.writing or entries.is_on_disk_only(key, pins)):
            if not pins & _PROMOTION:
                entries.counts["dedup_hits"] += 1
                entries.counts["dedup_bytes_saved"] += size
            return Grant(Code.EXISTS)
        cell_bytes = entries.slabs.sizes[size_class]
        tenant = entries.tenants.of(key) if entries.holdings is not None else NO_TENANT
        within = usage.reserved + cell_bytes <= self._client_bytes and self._victims.make_own_room(
            tenant, entries.charge(size_class)
        )
        entry = self._victims.take_row() if within else None
        offset = None if entry is None else self._victims.take_cell(size_class, entry)
        if entry is None or offset is None:
            if entry is not None:
                entries.free_rows.append(entry)
            entries.counts["no_room"] += 1
            return Grant(Code.NO_ROOM)
        usage.reserved += cell_bytes
        put.reserved += cell_bytes
        entries.begin(entry, size, offset, size_class, pins, tenant)
        if not pins & _UPSERT:
            self.writing[key] = entry
        return Grant(Code.OK, entry, offset, entries.generation[entry])

    def _commit(self, entry: int, key: str, checksum: int, pins: int) -> Code:
        old = self._entries.by_key.get(key)
        if not pins & _UPSERT and (old is not None or self._entries.is_on_disk_only(key, pins)):
            self._entries.free(entry)
            return Code.EXISTS
        log = self._entries.log
        assert log is None or key not in log.by_key or pins & _PROMOTION, "another value would come back"
        if old is not None:
            self._entries.forget(old)
        self._entries.publish(entry, key, checksum, promoted=bool(pins & _PROMOTION))
        return Code.OK
