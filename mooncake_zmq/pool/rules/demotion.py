"""Which values are written to the log next, and which copies have to go from there. PURE."""

import math
from collections.abc import Iterable, Sequence

from mooncake_zmq.kv.object_record import ObjectRecord
from mooncake_zmq.pool.rules.disk_quotas import DiskQuotas
from mooncake_zmq.pool.rules.entries import Entries, Unsaved
from mooncake_zmq.pool.rules.object_log import ObjectLog
from mooncake_zmq.pool.rules.write_back import WriteBackOrder


class Demotion:
    """Moves values of a table to the log, where there is one."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._quotas: DiskQuotas | None = None
        if entries.holdings is not None and entries.log is not None:
            entries.log.divide(entries.tenants)
            self._quotas = DiskQuotas(entries.holdings, entries.log, entries.key, entries.size, entries.by_key)

    @property
    def _tiers(self) -> tuple[ObjectLog, WriteBackOrder]:
        assert self._entries.log is not None, "there is no disk"
        assert self._entries.cold is not None
        return self._entries.log, self._entries.cold

    def unsaved(self, limit_bytes: int, limit: int, *, draining: bool = False) -> list[Unsaved]:
        """Choose values to write next; they are held until `end_writing`."""
        log, cold = self._tiers
        assert not self._entries.held
        free_bytes = self._entries.slabs.free_slabs * self._entries.slabs.slab_bytes
        target_bytes = math.inf if draining else log.settings.ahead * self._entries.settings.object_bytes - free_bytes
        # More than the disk holds would push out what was just written, without end.
        target_bytes = min(target_bytes, log.settings.kept_bytes)
        batch = []
        has_no_room = self._quotas.judge() if self._quotas is not None else None
        for entry in cold.unsaved(target_bytes, limit_bytes, limit, has_no_room):
            key = self._entries.key[entry]
            assert key is not None
            self._entries.held.add(entry)
            self._entries.blocked[self._entries.slabs.unit_of(self._entries.offset[entry])] += 1
            found = self._entries.found(entry)
            batch.append(Unsaved(key, entry, found.generation, found.offset, found.size, self._entries.pin_of[entry]))
        log.writing = frozenset(value.key for value in batch)
        return batch

    def outgrown(self, limit: int) -> list[tuple[str, ObjectRecord]]:
        """Copies that have to go from disk before `unsaved` may be asked again: see `DiskQuotas`."""
        found = self._quotas.outgrown(limit) if self._quotas is not None else []
        self._entries.look_again(key for key, _ in found)
        return found

    @property
    def unsaved_bytes(self) -> int:
        """The bytes of values that memory alone holds."""
        return self._tiers[1].unsaved_bytes

    @property
    def is_unfinished(self) -> bool:
        """`unsaved` had to stop before it had looked at all that may be due: ask it once more."""
        return self._tiers[1].is_unfinished

    def are_whole(self, batch: Sequence[Unsaved]) -> list[bool]:
        """The bytes of these were read: which of them are still those of the value?"""
        return list(map(self._entries.stands, batch))

    def end_writing(self, saved: Sequence[tuple[Unsaved, ObjectRecord]]) -> None:
        """These, and no others of the batch, stand on disk."""
        log, cold = self._tiers
        self._entries.let_all_go()
        for value, record in saved:
            log.add(value.key, record)
            self._entries.counts["demoted"] += 1
            self._entries.counts["demoted_bytes"] += value.size
            if self._entries.stands(value):
                cold.save(value.entry)
        log.writing = frozenset()

    def drop_from_disk(self, keys: Iterable[str]) -> None:
        """The copies of these are gone for good."""
        log, cold = self._tiers
        for key in keys:
            log.remove(key)
            self._entries.engine_blocks.touch(key)
            self._entries.look_again([key])
            entry = self._entries.by_key.get(key)
            if entry is not None:
                cold.lapse(entry)

    def gauges(self) -> dict[str, float]:
        log, cold = self._entries.log, self._entries.cold
        if log is None or cold is None:
            return {}
        unsaved = {"ssd_unsaved_bytes": cold.unsaved_bytes, "ssd_without_room_bytes": cold.parked_bytes}
        return {**log.gauges(), **unsaved, "ssd_demoting": len(self._entries.held)}
