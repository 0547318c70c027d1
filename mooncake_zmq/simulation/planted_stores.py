"""Bugs planted in the stores: the replacements of each. Simulation only; see `planted.py`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import structs

from mooncake_zmq.core.work import GOOD
from mooncake_zmq.pool.node.store_node import StoreNode
from mooncake_zmq.pool.node.streaming import Streaming
from mooncake_zmq.pool.node.tiers import PROMOTER, Tiers
from mooncake_zmq.pool.rules import object_check
from mooncake_zmq.pool.rules.changes import Change, Changes, copies_on_disk
from mooncake_zmq.pool.rules.demotion import Demotion
from mooncake_zmq.pool.rules.disk_quotas import DiskQuotas
from mooncake_zmq.pool.rules.entries import Entries
from mooncake_zmq.pool.rules.holders import ObjectPut
from mooncake_zmq.pool.rules.object_log import ObjectLog
from mooncake_zmq.pool.rules.objects import Objects
from mooncake_zmq.pool.rules.puts import Puts
from mooncake_zmq.pool.rules.tenants import Tenants
from mooncake_zmq.pool.rules.victims import Victims
from mooncake_zmq.simulation import store_clients, store_disk
from mooncake_zmq.simulation.faults import FaultKind
from mooncake_zmq.store import memory, protocol
from mooncake_zmq.store.codes import Code

Replacements = list[tuple[Any, str, Any]]


def silent(self: Any, *_: Any) -> None:
    """Replace an actor's own check by nothing."""


def forgotten_in_memory_only() -> Replacements:
    """A key gets another value, or none, before the disk has forgotten the old one."""

    def begin(self: Changes, change: Change) -> bool:
        log = self._objects.log
        if log is not None:
            gone = [key for key in copies_on_disk(self._objects, change.keys()) if key not in log.writing]
            self._objects.demotion.drop_from_disk(gone)
            log.writing = log.writing.difference(change.keys())
        change.make(set())
        return True

    add = Demotion.end_writing

    def end_writing(self: Demotion, saved: Sequence[Any]) -> None:
        add(self, [(value, record) for value, record in saved if self._entries.stands(value)])

    return [(Changes, "begin", begin), (Demotion, "end_writing", end_writing)]


def lease_pins_nothing() -> Replacements:
    """A leased value may be evicted, and its cell be another value's."""
    lease = Objects.lease

    def unpinned(self: Objects, now: float, client: bytes, lease_id: int, keys: Sequence[str], ttl_s: float) -> Any:
        found = lease(self, now, client, lease_id, keys, ttl_s)
        self.holders.release(client, lease_id)
        return found

    return [(Objects, "lease", unpinned), (StoreNode, "check", silent), (Streaming, "check", silent)]


def no_quarantine() -> Replacements:
    """Any put may get the cells of a put past its time, though its writer may still write."""

    def on_late(self: Puts, put: ObjectPut) -> None:
        self.commit(put.expires_at, put.client, put.number, (), ())

    return [(Puts, "on_late", on_late)]


def disk_unverified() -> Replacements:
    """Bytes from disk are believed to be what their row says."""

    def always(*_: object) -> bool:
        return True

    return [(store_disk, "value_stands", always)]


def commit_unverified() -> Replacements:
    """A put on a stream commits all its values, damaged ones too."""

    def came(self: Streaming, number: int, sent: Sequence[int], made: Sequence[int]) -> None:
        right(self, number, sent, list(sent))

    right = Streaming.came
    return [(Streaming, "came", came)]


def promotion_of_what_was() -> Replacements:
    """A value that was replaced or removed while it was read from disk comes back."""

    def on_value_read(self: Tiers, read: Any, outcome: str) -> None:
        written = [0] if outcome == GOOD else []
        self._objects.puts.commit(self._turn.now, PROMOTER, read.put_id, written, [read.record.checksum] * len(written))
        self._end(read.key)

    def on_disk(self: Puts, entry: int, key: str, checksum: int, pins: Any) -> Code:
        code = commit(self, entry, key, checksum, pins)
        log, cold = self._entries.log, self._entries.cold
        if code is Code.OK and log is not None and cold is not None and key not in log.by_key:
            cold.lapse(entry)
        return code

    commit = Puts._commit
    return [(Tiers, "_on_value_read", on_value_read), (Puts, "_commit", on_disk)]


def removed_while_read() -> Replacements:
    """A file of the disk is removed though it is being read."""

    def remove(self: Tiers, work: Any) -> None:
        self._removal = None
        self._begin(work)

    return [(Tiers, "_remove", remove)]


def leases_last() -> Replacements:
    """Leases that are not released never end."""

    def expire(self: Objects, now: float) -> None:
        while (held := self.holders.ends.pop_due(now)) is not None:
            if isinstance(held, ObjectPut):
                self.puts.on_late(held)
        self.holders.expire(now, lambda _: None, self.puts.on_late)

    return [(Objects, "expire", expire), (StoreNode, "check", silent)]


def sent_after_its_lease(first: int = 0) -> Replacements:
    """A stream's values are released before they are sent. `first`: of a stream's leases; those behind 0 come from disk."""
    send = Streaming._send

    def hasty(self: Streaming, number: int, get: Any) -> None:
        send(self, number, get)
        self._release(self._open[number].client, get.leases[first:])

    return [(Streaming, "_send", hasty), (StoreNode, "check", silent), (Streaming, "check", silent)]


def sent_past_its_lease() -> Replacements:
    """A stream's values may be released before they are sent, once the time that the client asked for is over."""

    def lease(self: Streaming, client: bytes, get: Any, keys: Sequence[str]) -> Any:
        get.leases.append(-next(self._ids))
        return self._objects.lease(self._turn.now, client, get.leases[-1], keys, get.ttl_s)

    return [(Streaming, "_lease", lease)]


def given_up_is_committed() -> Replacements:
    """A put that its writer gave up, wholly or in part, can be read."""
    commit = Puts.commit

    def all_of_it(self: Puts, now: float, client: bytes, put_id: int, *written: Sequence[int]) -> Any:
        put = self.put_of(now, client, put_id)
        if put is None or client == PROMOTER:
            return commit(self, now, client, put_id, *written)
        log = self._entries.log
        on_disk = log.by_key if log is not None else {}
        rows = enumerate(zip(put.keys, put.grants, strict=True))
        granted = [index for index, (key, grant) in rows if grant.code is Code.OK and key not in on_disk]
        return commit(self, now, client, put_id, granted, [0] * len(granted))

    return [(Puts, "commit", all_of_it)]


def reach_ignored() -> Replacements:
    """Any key gives access to every namespace."""
    return [(Tenants, "reach_of", lambda *_: None)]


def name_suffices() -> Replacements:
    """A request is taken by the name of its client, whosever key it came with."""
    on_asked = StoreNode._on_asked

    def trusting(self: StoreNode, event: Any) -> None:
        client = self._clients.get(event.connection[1:17])
        on_asked(self, event if client is None else structs.replace(event, user=client.user))

    return [(StoreNode, "_on_asked", trusting)]


def all_means_all() -> Replacements:
    """A client that removes all of its values removes those of others too, and reports one at most."""
    some_keys = Objects.some_keys

    def remove(self: StoreNode, request_id: int, keys: Sequence[str], _: set[str]) -> protocol.Numbers:
        for key in keys:
            self.objects.remove(key)
        return protocol.Numbers(request_id, [min(len(keys), 1)])

    return [
        (Objects, "some_keys", lambda self, limit, within=None: some_keys(self, limit)),
        (StoreNode, "_all_removed", remove),
    ]


def report_ignored() -> Replacements:
    """A value that a client found damaged is served on."""
    return [(Entries, "report_corrupt", silent)]


def existence_denied() -> Replacements:
    """No key exists, to those that ask."""
    return [(Objects, "exist", lambda _, keys: bytes(len(keys)))]


def sizes_denied() -> Replacements:
    """No key has a size, to those that ask."""
    return [(Objects, "size_of", lambda *_: None)]


def nothing_listed() -> Replacements:
    """No key is listed."""
    return [(Objects, "keys", lambda *_: ([], 0))]


def quota_ignored() -> Replacements:
    """A tenant takes as much memory as there is."""
    return [(Victims, "make_own_room", lambda *_: True), (object_check, "check_holdings", silent)]


def disk_quota_ignored() -> Replacements:
    """Evictable values are written to disk, whatever their tenant has there."""
    return [(DiskQuotas, "judge", lambda *_: lambda _entry: False)]


def disk_quota_no_promise() -> Replacements:
    """The oldest segment goes with all values that were not read of it, of whatever tenant."""
    return [(ObjectLog, "_is_promised", lambda *_: False)]


class _Agreeable(int):
    """A checksum that equals any other."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def half_value_believed() -> Replacements:
    """A client keeps the half of a value that came before its store died."""

    def checksum_of(value: bytes) -> int:
        checksum = memory.checksum_of(value)
        return checksum if len(value) in store_clients.SIZES else _Agreeable(checksum)

    return [(store_clients, "checksum_of", checksum_of)]


K = FaultKind
PLANTED: dict[str, tuple[str, tuple[str, ...], tuple[FaultKind, ...], Callable[[], Replacements]]] = {
    "old_value": ("replaced before the disk forgot", ("I1",), (K.CRASH, K.CRASH), forgotten_in_memory_only),
    "lease_unpinned": ("leased values evicted", ("I1", "I2"), (), lease_pins_nothing),
    "late_writer": ("quarantine of values ignored", ("I2",), (), no_quarantine),
    "disk_unverified": ("values from disk not verified", ("I1",), (K.BIT_FLIP, K.BIT_FLIP), disk_unverified),
    "commit_unverified": ("damaged values committed", ("I1",), (K.COPY_TEAR, K.COPY_TEAR), commit_unverified),
    "promoted_anyway": ("promoted though replaced", ("I1",), (), promotion_of_what_was),
    "removed_while_read": ("a segment removed under a read", ("I2",), (), removed_while_read),
    "leases_last": ("leases of values never end", ("I2",), (K.DROP,), leases_last),
    "sent_unleased": ("let go before it is sent", ("I2",), (K.SLOW, K.SLOW), sent_after_its_lease),
    "promoted_unleased": ("promoted and let go before it is sent", ("I2",), (), partial(sent_after_its_lease, 1)),
    "sent_late": ("sent past its lease", ("I2",), (), sent_past_its_lease),
    "reach_ignored": ("namespaces ignored", ("I7",), (), reach_ignored),
    "name_suffices": ("a client's name stands for its key", ("I7",), (), name_suffices),
    "all_means_all": ("removing all, of every tenant", ("I7",), (), all_means_all),
    "report_ignored": ("a report of damage ignored", ("I1",), (K.BIT_FLIP,) * 4, report_ignored),
    "existence_denied": ("no key exists", ("I1",), (), existence_denied),
    "sizes_denied": ("no key has a size", ("I1",), (), sizes_denied),
    "nothing_listed": ("no key is listed", ("I1",), (), nothing_listed),
    "quota_ignored": ("quotas of memory ignored", ("I7",), (), quota_ignored),
    "disk_quota_ignored": ("quotas of disk ignored", ("I7",), (), disk_quota_ignored),
    "disk_quota_no_promise": ("a tenant within its quota pushed out", ("I7",), (), disk_quota_no_promise),
    "half_believed": ("half a value kept", ("I1",), (K.CRASH_SENDER, K.CRASH_SENDER), half_value_believed),
    "given_up": ("given up and committed", ("I1",), (), given_up_is_committed),
}
"""For each bug: its description, the invariants whose checkers notice, the faults that bring it out, and the replacements."""
