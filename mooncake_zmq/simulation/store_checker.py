"""Checks I1, I2, I4 and I7 for values: the answers and bytes that clients of stores get, against books of its own. Trusts no
actor.

A key has one value at a time. It changes in the turn in which the store answers the put or the removal, and with nothing else:
not with a crash, not with what the disk brings back. A client that reads a key finds that value, or nothing.

I7: no client learns of a key in another's namespace, or changes its value; no tenant has more memory or disk than its quota,
and none within its quota of the disk loses a value there to make room for others.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mooncake_zmq.core.actor import Fence, Start, TimerFired, WorkDone
from mooncake_zmq.core.work import MoveValues, RemoveSegments, StoreResult, StoreWork, WorkFailed
from mooncake_zmq.kv.object_record import taken_bytes
from mooncake_zmq.pool.node.store_events import (
    Asked,
    ClientDied,
    Effect,
    Event,
    ReceiveValues,
    Reply,
    SendValues,
    Serve,
    StreamAsked,
    StreamEnded,
    ValuesSent,
)
from mooncake_zmq.pool.node.store_node import StoreNode
from mooncake_zmq.pool.rules.holders import EXPIRE
from mooncake_zmq.pool.rules.object_log import ObjectLog
from mooncake_zmq.simulation.checkers import EPSILON_S
from mooncake_zmq.simulation.store_disk import StoreDisk
from mooncake_zmq.simulation.violation import Violation
from mooncake_zmq.store import protocol, stream_messages
from mooncake_zmq.store.memory import checksum_of

Value = bytes | None
LATE_S = 0.01
"""The most by which a timer may be late if nothing has stopped its process."""


class CheckedCaller(Protocol):
    """A client, as far as the checker looks at it."""

    name: bytes
    putting: list[bytes]


class CheckedStore(Protocol):
    """One incarnation of a store, as far as the checker looks at it."""

    name: str
    incarnation: int
    memory: bytearray
    generations: list[int]
    flipped: set[tuple[int, int]]
    node: StoreNode

    @property
    def is_running(self) -> bool: ...
    @property
    def now(self) -> float: ...
    @property
    def pipes(self) -> "Mapping[int, CheckedStream]": ...


class CheckedStream(Protocol):
    """A stream, as far as the checker looks at it."""

    number: int

    @property
    def client(self) -> CheckedCaller: ...
    @property
    def store(self) -> CheckedStore: ...


@dataclass(slots=True)
class _Lease:
    """A lease. `cells`: entry -> (generation, offset, size, the value that it must be)."""

    expires_at: float
    cells: dict[int, tuple[int, int, int, bytes]]


@dataclass(slots=True)
class _Put:
    """The cells granted to a writer, by the index of their key: (offset, size)."""

    keys: Sequence[str]
    cells: dict[int, tuple[int, int]]


@dataclass(slots=True)
class _Books:
    """The answers of one store through all its incarnations; what follows `values` is of the present one."""

    values: dict[str, Value] = field(default_factory=dict)
    since: dict[str, list[tuple[float, Value]]] = field(default_factory=dict)
    """Every value that a key has had, with the time from which on it had it."""
    may_return: dict[str, set[bytes]] = field(default_factory=dict)
    """The values that the disk could not be made to forget, as the store has reported to its operator."""
    leases: dict[tuple[bytes, int], _Lease] = field(default_factory=dict)
    puts: dict[tuple[bytes, int], _Put] = field(default_factory=dict)
    asked: dict[int, tuple[float, Any]] = field(default_factory=dict)
    """The present request of each stream, and when it came."""
    answered: dict[int, int] = field(default_factory=dict)
    """The number of answered keys of each stream's get."""
    sending: dict[int, _Lease] = field(default_factory=dict)
    waiting: dict[tuple[bytes, int], tuple[float, Any]] = field(default_factory=dict)
    """The requests without an answer yet, and when they came."""
    reported: set[tuple[int, int]] = field(default_factory=set)
    """The (entry, generation) of cells whose bytes a client found damaged."""
    here: frozenset[str] = frozenset()
    """The keys in memory as of the last turn; by then so many values had left it as evicted or damaged."""
    left: int = 0
    removed: set[str] = field(default_factory=set)
    """The keys that this turn took from memory as clients had asked, or may have."""
    on_disk: dict[str, int] = field(default_factory=dict)
    """The bytes of each tenant as of the last turn: after a restart they may exceed its quota, but not grow."""


class StoreChecker:
    """Checks every store's answers. `clock`: the world's time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.covered: Counter[str] = Counter()
        self.works: Counter[str] = Counter()
        self._clock = clock
        self._books: dict[str, _Books] = {}
        self._intents: dict[tuple[bytes, int], dict[int, bytes]] = {}
        """The value that each index shall have, by (client, put)."""
        self._users: dict[bytes, str | None] = {}
        self._streamed: dict[tuple[str, int, int], list[bytes]] = {}

    # --- reported by clients

    def is_called(self, client: bytes, user: str | None) -> None:
        """Note a client's new incarnation, whose key has this name; None: it is this machine's user."""
        self._users[client] = user

    def intends(self, client: bytes, put_id: int, values: dict[int, bytes]) -> None:
        """Note the values that a client has written and will commit."""
        self._intents[client, put_id] = values

    def intends_stream(self, pipe: CheckedStream) -> None:
        """Note that a client puts the stream's values."""
        self._streamed[pipe.store.name, pipe.store.incarnation, pipe.number] = pipe.client.putting

    def writes(self, store: CheckedStore, entry: int, generation: int) -> None:
        """Check I2: a client of the host writes into a cell that it was granted, maybe late."""
        if store.is_running and store.generations[entry] != generation:
            where = f"{store.name} entry {entry}"
            raise Violation("I2", f"{where} is written as {generation}, which stands at {store.generations[entry]}")

    def read_leased(self, store: CheckedStore, client: bytes, lease_id: int, entry: int, value: bytes) -> None:
        """Check I1: a value that a client of the host read, and found good."""
        lease = self._of(store).leases.get((client, lease_id))
        if store.is_running and lease is not None and entry in lease.cells and lease.cells[entry][3] != value:
            raise Violation("I1", f"{store.name}: entry {entry} was read as other bytes than leased")
        self.covered["read in shared memory"] += 1

    def read_streamed(self, pipe: CheckedStream, key: str, value: bytes, asked_at: float) -> None:
        """Check I1: a value that a client got on a stream, and found good."""
        self._was_value(pipe.store, self._of(pipe.store), key, value, asked_at)

    # --- reported by the world

    def sent(self, store: CheckedStore, asked: SendValues, payload: Sequence[bytes]) -> None:
        """Check I2: the bytes that left on a stream, read by its client or not, are of the announced values."""
        cells = self._of(store).sending[asked.stream].cells
        for found, part in zip(asked.found, payload, strict=True):
            if found.entry in cells and (found.entry, found.generation) not in store.flipped:
                self.covered["bytes sent"] += 1
                if not cells[found.entry][3].startswith(part):
                    where = f"{store.name} entry {found.entry}"
                    raise Violation("I2", f"{where}: bytes of another value left on stream {asked.stream}")

    def store_died(self, store: CheckedStore) -> None:
        """Void what a store that died has granted; its keys keep their values."""
        books = self._of(store)
        self._books[store.name] = _Books(books.values, books.since, books.may_return)

    def disk_did(self, name: str, disk: StoreDisk, work: StoreWork, result: StoreResult) -> None:
        """Check the end of a disk's work."""
        self.works[type(work).__name__] += 1
        if isinstance(result, WorkFailed):
            self.covered[f"{type(work).__name__} failed"] += 1
            if isinstance(work, RemoveSegments) and work.instead:
                books = self._books.setdefault(name, _Books())
                for key in {key for key, record in disk.rows.values() if record.segment in work.segments}:
                    books.may_return.setdefault(key, set()).update(value for _, value in books.since.get(key, ()) if value)

    def observed(self, store: CheckedStore, event: Event, effects: Sequence[Effect]) -> None:
        """Check a turn of the actor."""
        books = self._of(store)
        if isinstance(event, Asked) and event.user != self._users.get(event.connection[1:17]):
            self._refuses(store, event, effects)
        else:
            self._observed(store, books, event)
        fenced: dict[int, int] = {}
        for effect in effects:
            match effect:
                case Fence(changes):
                    self._fenced(store, books, changes)
                    fenced.update(changes)
                case Reply(connection, reply):
                    self._replied(store, books, connection[1:17], reply)
                case SendValues():
                    self._sends(store, books, effect, fenced)
                case ReceiveValues():
                    self._receives(store, books, effect)
                case Serve(stream, stream_messages.Ended(codes)):
                    self._said(store, books, stream, codes)
                case Serve(stream, None):
                    books.asked.pop(stream, None)
                case Start(_, MoveValues() as work):
                    self._keeps_promises(store, work)
        if isinstance(event, TimerFired) and event.key == EXPIRE:
            self._expired(store, books)
        if isinstance(event, WorkDone) or any(isinstance(effect, Fence) for effect in effects):
            self._within_quotas(store, books)
        self._keeps(store, books)

    def at_end(self, store: CheckedStore) -> None:
        """Check I1 once nothing is in progress: the values in memory are those of their keys."""
        objects = store.node.objects
        for key, entry in objects.by_key.items():
            found = objects.entries.found(entry)
            if (entry, found.generation) not in store.flipped:
                self._is_value(store, key, bytes(store.memory[found.offset : found.offset + found.size]), "at rest")

    # --- internal

    def _of(self, store: CheckedStore) -> _Books:
        return self._books.setdefault(store.name, _Books())

    def _observed(self, store: CheckedStore, books: _Books, event: Event) -> None:
        now = self._clock()
        match event:
            case Asked(connection, protocol.Release(leases, puts)):
                for lease_id in leases:
                    books.leases.pop((connection[1:17], lease_id), None)
                for put_id in puts:
                    books.puts.pop((connection[1:17], put_id), None)
            case Asked(connection, protocol.ReportCorrupt(entries, generations)):
                if connection[1:17] in store.node.shared_clients():
                    books.reported.update(zip(entries, generations, strict=True))
            case Asked(connection, request) if not isinstance(request, protocol.ReportCorrupt | protocol.Release):
                books.waiting[connection[1:17], request.id] = now, request
            case ClientDied(client):
                books.leases = {key: lease for key, lease in books.leases.items() if key[0] != client}
                books.puts = {key: put for key, put in books.puts.items() if key[0] != client}
            case StreamAsked(stream, request):
                books.asked[stream] = now, request
                books.answered[stream] = 0
                if isinstance(request, stream_messages.Promote):
                    client = store.pipes[stream].client.name
                    for lease_id in request.leases:
                        books.leases.pop((client, lease_id), None)
            case ValuesSent(stream):
                books.sending.pop(stream, None)
            case StreamEnded(stream):
                books.sending.pop(stream, None)
                books.puts.pop((b"", stream), None)
                books.asked.pop(stream, None)

    def _replied(self, store: CheckedStore, books: _Books, client: bytes, reply: protocol.Reply) -> None:
        if isinstance(reply, protocol.Welcome | protocol.Stranger):
            return
        asked_at, request = books.waiting.pop((client, reply.id), (0.0, None))
        match request, reply:
            case protocol.Lease(), protocol.Leased():
                self._leased(store, books, client, request, reply)
            case protocol.Reserve(keys=keys, sizes=sizes), protocol.Reserved(codes=codes, offsets=offsets):
                cells = {i: (offsets[i], sizes[i]) for i, code in enumerate(codes) if code == 0}
                self._grant(store, books, (client, request.id), _Put(keys, cells))
            case protocol.Commit(put_id=put_id, indexes=indexes), protocol.Numbers(numbers=codes):
                put = books.puts.pop((client, put_id), None)
                values = self._intents.get((client, put_id), {})
                for index, code in enumerate(codes if put is not None else ()):
                    if code == 0 and index in indexes:
                        assert put is not None
                        self._becomes(books, put.keys[index], values[index])
            case protocol.Remove(keys=keys), protocol.Numbers(numbers=codes):
                for key, code in zip(keys, codes, strict=True):
                    self._may(store, client, key, code == 0)
                    if self._is_within(store, client, key):
                        self._becomes(books, key, None)
            case protocol.RemoveAll(), protocol.Numbers(numbers=[count]):
                within = [key for key in books.values if self._is_within(store, client, key)]
                if count > len(within):
                    raise Violation("I7", f"{store.name} removed {count} values for {self._users[client]}")
                books.removed.update(within)
                for key in within:
                    if books.since[key][-1][0] < asked_at:  # its later value may be removed or not
                        self._becomes(books, key, None)
            case protocol.Exist(keys=keys), protocol.Codes(codes=found):
                for key, there in zip(keys, found, strict=False):
                    self._may(store, client, key, bool(there))
                    self._finds(store, client, key, bool(there))
                    if there and books.values.get(key) is None and not books.may_return.get(key):
                        raise Violation("I1", f"{store.name} has {key}, which has no value")
            case protocol.SizesOf(keys=keys), protocol.Numbers(numbers=sizes):
                for key, size in zip(keys, sizes, strict=True):
                    self._may(store, client, key, size > 0)
                    self._finds(store, client, key, size > 0)
                    value = books.values.get(key)
                    if size > 0 and not books.may_return.get(key) and (value is None or len(value) != size):
                        raise Violation("I1", f"{store.name} answers {size} bytes of {key}, which has other ones")
            case protocol.ListKeys(), protocol.KeysListed(keys=keys, cursor=cursor):
                for key in keys:
                    self._may(store, client, key, True)
                listed, objects = set(keys), store.node.objects
                while cursor:  # the pages that this client did not ask for
                    page, cursor = objects.keys(cursor, protocol.MAX_KEYS)
                    listed.update(page)
                for key in [*objects.by_key, *(objects.log.readable if objects.log is not None else ())]:
                    self._finds(store, client, key, key in listed)

    def _is_within(self, store: CheckedStore, client: bytes, key: str) -> bool:
        """Return whether this client may know of the key. A client that may read may also write in these stores."""
        user, tenants = self._users.get(client), store.node.objects.settings.tenants
        spaces = [space for tenant in tenants if user in tenant.clients for space in tenant.namespaces]
        return user is None or any(key.startswith(space) for space in spaces)

    def _may(self, store: CheckedStore, client: bytes, key: str, was_done: bool) -> None:
        """Check I7: a key was named to a client, or changed for it."""
        if not self._is_within(store, client, key):
            self.covered["asked for another's"] += 1
            if was_done:
                raise Violation("I7", f"{store.name}: {self._users[client]} has to do with {key}")

    def _finds(self, store: CheckedStore, client: bytes, key: str, found: bool) -> None:
        """Check I1: a key that has a value in memory, or on a disk that can be read, is not denied."""
        objects = store.node.objects
        is_here = key in objects.by_key or (objects.log is not None and key in objects.log.readable)
        if is_here and not found and self._is_within(store, client, key):
            raise Violation("I1", f"{store.name} does not find {key}, which is there")

    def _refuses(self, store: CheckedStore, asked: Asked, effects: Sequence[Effect]) -> None:
        """Check I7: one whose key is another than that of the client whose name it bears gets no answer but that."""
        self.covered["impostors"] += 1
        replies = [each.reply for each in effects if isinstance(each, Reply) and each.connection == asked.connection]
        if not all(isinstance(reply, protocol.Stranger) for reply in replies):
            raise Violation("I7", f"{store.name} answers {asked.user} as if it were another, who has the name")

    def _keeps(self, store: CheckedStore, books: _Books) -> None:
        """Check I7: no key leaves memory but removed by a client that may do that, or evicted, or damaged."""
        objects = store.node.objects
        here, left = frozenset(objects.by_key), objects.counts["evicted"] + objects.counts["corrupt"]
        lost = books.here - here - books.removed
        if len(lost) > left - books.left:
            raise Violation("I7", f"{store.name} has lost {min(lost)}, which no client removed that may")
        books.here, books.left = here, left
        books.removed.clear()

    def _within_quotas(self, store: CheckedStore, books: _Books) -> None:
        """Check I7 by what is allocated and by what stands on disk, and not by the actor's sums."""
        objects = store.node.objects
        puts = [put for holder in objects.holders.clients.values() for put in holder.puts.values()]
        names = {grant.entry: key for put in puts for key, grant in zip(put.keys, put.grants, strict=True)}
        names |= {entry: key for entry, key in enumerate(objects.entries.key) if key is not None}
        cells = [(names.get(entry, ""), size) for entry, _, size in objects.slabs.cells()]
        for tenant in objects.settings.tenants:
            sizes = [size for key, size in cells if key.startswith(tenant.namespaces)]
            row_bytes = objects.settings.object_bytes // objects.settings.max_objects
            used = sum(max(size, row_bytes) for size in sizes)
            if used > tenant.dram_bytes:
                raise Violation("I7", f"{store.name}: {tenant.name} has {used} bytes of memory, not {tenant.dram_bytes}")
            if objects.log is None:
                continue
            used = _taken_on_disk(objects.log, tenant.namespaces)
            if used > max(tenant.ssd_bytes, books.on_disk.get(tenant.name, used)):
                raise Violation("I7", f"{store.name}: {tenant.name} has {used} bytes of disk, not {tenant.ssd_bytes}")
            books.on_disk[tenant.name] = used

    def _keeps_promises(self, store: CheckedStore, work: MoveValues) -> None:
        """Check I7: of the values that go with their segment, none belongs to a tenant within its quota, as all tenants are."""
        log = store.node.objects.log
        assert log is not None
        goes = {record.sequence: key for key in log.by_key if (record := log.record(key)) is not None} if work.gone else {}
        for tenant in store.node.objects.settings.tenants:
            lost = [goes[sequence] for sequence in work.gone if goes.get(sequence, "").startswith(tenant.namespaces)]
            if lost and tenant.ssd_bytes:
                raise Violation("I7", f"{store.name}: {tenant.name} loses {lost[0]}, to make room for others")

    def _leased(
        self, store: CheckedStore, books: _Books, client: bytes, request: protocol.Lease, reply: protocol.Leased
    ) -> None:
        cells: dict[int, tuple[int, int, int, bytes]] = {}
        rows = zip(request.keys, reply.entries, reply.generations, reply.offsets, reply.sizes, reply.checksums, strict=True)
        for key, entry, generation, offset, size, checksum in rows:
            if entry:
                value = self._stands(store, books, key, entry, generation, offset, size, checksum)
                cells[entry] = generation, offset, size, value
        if cells:
            expires_at = store.now + min(request.ttl_s, store.node.objects.settings.max_ttl_s)
            books.leases[client, request.id] = _Lease(expires_at, cells)

    def _stands(
        self, store: CheckedStore, books: _Books, key: str, entry: int, generation: int, offset: int, size: int, checksum: int
    ) -> bytes:
        """Check I1: a value that is served is in its cell, and its key's."""
        standing = bytes(store.memory[offset : offset + size])
        if generation % 2:
            raise Violation("I1", f"{store.name}: {key} is served before its commit")
        if (entry, generation) in books.reported:
            raise Violation("I1", f"{store.name}: {key} is served though its bytes were reported as damaged")
        if (entry, generation) in store.flipped:
            return standing
        if checksum not in (0, checksum_of(standing)):
            raise Violation("I1", f"{store.name}: {key} is served with a checksum that is not its bytes'")
        return self._is_value(store, key, standing, "served")

    def _is_value(self, store: CheckedStore, key: str, standing: bytes, how: str) -> bytes:
        books = self._of(store)
        if standing != books.values.get(key) and standing not in books.may_return.get(key, ()):
            had = [value for _, value in books.since.get(key, ())]
            what = "an older value" if standing in had else "bytes that no client put there"
            raise Violation("I1", f"{store.name}: {key} is {how} as {what}")
        return standing

    def _grant(self, store: CheckedStore, books: _Books, name: tuple[bytes, int], put: _Put) -> None:
        """Check I2: a writer is granted cells that belong to no other."""
        if name in books.puts:  # the request came twice
            return
        now = store.now
        for offset, size in put.cells.values():
            for other in books.puts.values():
                if any(offset < at + length and at < offset + size for at, length in other.cells.values()):
                    raise Violation("I2", f"{store.name}: {offset}+{size} is granted while another writer has it")
            for lease in [*books.leases.values(), *books.sending.values()]:
                if lease.expires_at > now + EPSILON_S:
                    for _, at, length, _ in lease.cells.values():
                        if offset < at + length and at < offset + size:
                            raise Violation("I2", f"{store.name}: {offset}+{size} is granted while it is leased")
        if put.cells:
            books.puts[name] = put

    def _fenced(self, store: CheckedStore, books: _Books, changes: Sequence[tuple[int, int]]) -> None:
        """Check I2: no cell changes hands while it is leased; I1: generations only grow."""
        now = store.now
        for entry, generation in changes:
            if generation <= store.generations[entry]:
                raise Violation("I1", f"{store.name} entry {entry}: generation goes back to {generation}")
            for lease in [*books.leases.values(), *books.sending.values()]:
                cell = lease.cells.get(entry)
                if cell is not None and cell[0] == store.generations[entry] and lease.expires_at > now + EPSILON_S:
                    raise Violation("I2", f"{store.name} entry {entry} is taken away while it is leased")

    def _expired(self, store: CheckedStore, books: _Books) -> None:
        """Check I2: a lease ends when its time is over. A get on a stream may have two that no client knows of."""
        now = store.now
        books.leases = {name: lease for name, lease in books.leases.items() if lease.expires_at > now - LATE_S}
        gets = sum(isinstance(request, stream_messages.Get) for _, request in books.asked.values())
        held = store.node.gauges()["leases"]
        if held > len(books.leases) + 2 * gets:
            raise Violation("I2", f"{store.name} has {held:.0f} leases, but only {len(books.leases)} were granted that last")

    def _sends(self, store: CheckedStore, books: _Books, effect: SendValues, fenced: Mapping[int, int]) -> None:
        """Check I1: bytes that are to leave are their keys'. `fenced`: this turn's generations, as of a value just promoted."""
        asked_at, get = books.asked[effect.stream]
        keys = get.keys[books.answered[effect.stream] :][: len(effect.sizes)]
        books.answered[effect.stream] += len(keys)
        for key, size in zip(keys, effect.sizes, strict=True):
            self._may(store, store.pipes[effect.stream].client.name, key, size > 0)
        sent = [key for key, checksum in zip(keys, effect.checksums, strict=True) if checksum]
        cells: dict[int, tuple[int, int, int, bytes]] = {}
        for key, found in zip(sent, effect.found, strict=True):
            standing = bytes(store.memory[found.offset : found.offset + found.size])
            generation = fenced.get(found.entry, store.generations[found.entry])
            if generation == found.generation and (found.entry, found.generation) not in store.flipped:
                self._was_value(store, books, key, standing, asked_at)
                cells[found.entry] = found.generation, found.offset, found.size, standing
        expires_at = asked_at + min(get.ttl_s, store.node.objects.settings.max_ttl_s)
        books.sending[effect.stream] = _Lease(expires_at, cells)

    def _was_value(self, store: CheckedStore, books: _Books, key: str, standing: bytes, since: float) -> None:
        """Check I1: the key had this value at some time since then."""
        history = books.since.get(key, [])
        recent = [value for at, value in history if at >= since]
        before = [value for at, value in history if at < since][-1:]
        if standing not in [*before, *recent] and standing not in books.may_return.get(key, ()):
            raise Violation("I1", f"{store.name}: {key} is sent as bytes that it did not have since it was asked for")
        self.covered["sent on a stream"] += 1

    def _receives(self, store: CheckedStore, books: _Books, effect: ReceiveValues) -> None:
        _, put = books.asked[effect.stream]
        cells = {i: (at, size) for i, (at, size) in enumerate(zip(effect.offsets, effect.sizes, strict=True)) if at >= 0}
        books.puts.pop((b"", effect.stream), None)
        self._grant(store, books, (b"", effect.stream), _Put(put.keys, cells))

    def _said(self, store: CheckedStore, books: _Books, stream: int, codes: Sequence[int]) -> None:
        _, put = books.asked.pop(stream)
        books.puts.pop((b"", stream), None)
        if isinstance(put, stream_messages.Put):
            values = self._streamed[store.name, store.incarnation, stream]
            for key, value, code in zip(put.keys, values, codes, strict=True):
                self._may(store, store.pipes[stream].client.name, key, code == 0)
                if code == 0:
                    self._becomes(books, key, value)

    def _becomes(self, books: _Books, key: str, value: Value) -> None:
        self.covered["put" if value is not None else "removed"] += 1
        if value is None:
            books.removed.add(key)
        books.values[key] = value
        books.since.setdefault(key, []).append((self._clock(), value))


def _taken_on_disk(log: ObjectLog, namespaces: tuple[str, ...]) -> int:
    """Return the bytes of each tenant by what stands on disk: header, key and bytes of each value, and its share of the rows at
    least."""
    row_bytes = log.settings.bytes // log.settings.max_objects
    records = [(key.encode(), log.record(key)) for key in log.by_key if key.startswith(namespaces)]
    return sum(max(row_bytes, taken_bytes(key, record.size)) for key, record in records if record is not None)
