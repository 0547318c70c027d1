"""The invariants of a store's tables, asserted by tests, simulations and dumps. Slow. PURE."""

import math

import numpy as np

from mooncake_zmq.kv.slot_table import STATES, SlotState
from mooncake_zmq.pool.rules.entries import Entries
from mooncake_zmq.pool.rules.holders import Holders, Lease, ObjectPut
from mooncake_zmq.pool.rules.holdings import Holdings
from mooncake_zmq.pool.rules.puts import Puts
from mooncake_zmq.store.codes import Pin

_SOFT, _HARD = int(Pin.SOFT), int(Pin.HARD)


def check(entries: Entries, holders: Holders[bytes, ObjectPut], puts: Puts) -> None:
    """Assert the invariants. Slow: for tests and dumps."""
    entries.slabs.check()
    leases = [0] * len(entries.key)
    writing: dict[int, SlotState] = {}
    for holder in holders.clients.values():
        for lease in holder.leases.values():
            for entry in lease.rows:
                leases[entry] += 1
        for put in holder.puts.values():
            state = SlotState.QUARANTINED if put.quarantined else SlotState.WRITING
            writing |= dict.fromkeys(put.rows, state)
    _check_usage(holders)
    cells = {owner: (offset, size) for owner, offset, size in entries.slabs.cells()}
    blocked, soft = np.zeros(entries.slabs.units, np.int64), np.zeros(entries.slabs.units, np.int64)
    for entry in range(entries.first, len(entries.key)):
        state, key = STATES[entries.state[entry]], entries.key[entry]
        assert (state in (SlotState.WRITING, SlotState.QUARANTINED)) == (entry in writing)
        assert writing.get(entry, state) is state
        assert entries.generation[entry] % 2 == (entry in writing), "odd while it may be written"
        assert entries.leases[entry] == leases[entry]
        assert (state is SlotState.FREE) == (entry not in cells), "a cell for each entry in use"
        readable = key is not None and entries.by_key.get(key) == entry
        assert state is SlotState.COMMITTED or not readable
        evictable = readable and leases[entry] == 0 and not entries.pin_of[entry] & _HARD
        assert (entry in entries.lru) == evictable
        assert state is not SlotState.COMMITTED or readable or leases[entry], "an orphan exists as long as its readers"
        if state is not SlotState.FREE:
            offset, cell_bytes = cells[entry]
            assert offset == entries.offset[entry]
            assert 0 < entries.size[entry] <= cell_bytes
            blocked[entries.slabs.unit_of(offset)] += (not evictable) + (entry in entries.held)
            soft[entries.slabs.unit_of(offset)] += bool(entries.pin_of[entry] & _SOFT)
    assert (blocked == entries.blocked).all()
    assert (soft == entries.soft).all()
    assert len(entries.by_key) == sum(1 for key, entry in entries.by_key.items() if entries.key[entry] == key)
    assert entries.object_bytes == sum(entries.size[entry] for entry in entries.by_key.values())
    assert len(cells) + len(entries.free_rows) == len(entries.key) - entries.first
    assert set(puts.writing.values()) <= set(writing)
    for index in range(entries.first):
        used = [entries.used_at[entry] for entry in entries.lru.rows(index)]
        assert used == sorted(used)
    if entries.holdings is not None:
        check_holdings(entries, entries.holdings, {owner: cell_bytes for owner, (_, cell_bytes) in cells.items()})
    if entries.log is not None and entries.cold is not None:
        entries.log.check()
        entries.cold.check(list(entries.by_key.values()))
        for key, entry in entries.by_key.items():
            assert entries.cold.is_saved(entry) == (key in entries.log.by_key)
            record = entries.log.record(key)
            assert record is None or record.size == entries.size[entry]


def _check_usage(holders: Holders[bytes, ObjectPut]) -> None:
    usages = {id(holder.usage): holder.usage for holder in holders.clients.values()}
    assert all(id(usage) in usages for usage in holders.usage_of_users.values())
    for usage in usages.values():
        sharing = [holder for holder in holders.clients.values() if holder.usage is usage]
        puts = [put for holder in sharing for put in holder.puts.values()]
        assert usage.clients == len(sharing)
        assert usage.leases == sum(len(holder.leases) for holder in sharing)
        assert usage.puts == len(puts)
        assert usage.reserved == sum(put.reserved for put in puts)
    leases = [lease for holder in holders.clients.values() for lease in holder.leases.values()]
    timed: list[Lease[bytes] | ObjectPut] = [lease for lease in leases if lease.expires_at < math.inf]
    timed += [put for holder in holders.clients.values() for put in holder.puts.values() if not put.quarantined]
    assert all(held in holders.ends for held in timed)
    assert len(holders.ends) == len(timed)
    assert holders.ends.next_at() >= holders.expires_at


def check_holdings(entries: Entries, holdings: Holdings, cells: dict[int, int]) -> None:
    taken = [0] * len(holdings.quotas)
    row_bytes = entries.settings.object_bytes // entries.settings.max_objects
    for entry, cell_bytes in cells.items():
        key = entries.key[entry]
        assert key is None or holdings.of[entry] == entries.tenants.of(key)
        taken[holdings.of[entry]] += max(cell_bytes, row_bytes)
    assert taken == holdings.bytes
    readable = [entry for tenant in range(len(taken)) for entry in holdings.readable(tenant)]
    assert sorted(readable) == sorted(entries.by_key.values())
    evictable = [entry for tenant in range(len(taken)) for entry in holdings.coldest(tenant)]
    assert sorted(evictable) == [entry for entry in range(entries.first, len(entries.key)) if entry in entries.lru]
    assert all(holdings.over(tenant) <= 0 for tenant in range(len(taken))), "no tenant has more than its quota"
