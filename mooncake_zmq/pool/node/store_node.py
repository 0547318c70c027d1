"""The store half of a cache-node: who its clients are, what they ask, and how long it lasts. PURE; `server/` carries out.

It owns the tables: `Objects` (what is in memory), `ObjectLog` (what is on SSD), `Changes` (what waits for the disk to forget),
clients and timers. `Streaming` and `Tiers` have their say in its turns.

Clients of this host copy by themselves in the memory that shows the tables' generations; so a `Fence` comes before anything
else of a turn. The bytes of others pass by on streams.
"""

import hmac
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import structs

from mooncake_zmq.core.actor import Drained, DrainWanted, EngineBlocksReported, Fence, SetTimer, Started, TimerFired, WorkDone
from mooncake_zmq.core.work import StoreResult
from mooncake_zmq.pool.node.store_events import (
    Asked,
    ChecksumsMade,
    ClientDied,
    Dismiss,
    Effect,
    Event,
    Greeted,
    Probe,
    Reply,
    StreamAsked,
    StreamBegan,
    StreamEnded,
    Turn,
    ValuesCame,
    ValuesSent,
)
from mooncake_zmq.pool.node.streaming import Streaming
from mooncake_zmq.pool.node.tiers import LOOK, RETRY, Tiers
from mooncake_zmq.pool.rules.changes import Change, Changes, replaced
from mooncake_zmq.pool.rules.entries import Found
from mooncake_zmq.pool.rules.holders import EXPIRE
from mooncake_zmq.pool.rules.object_log import ObjectLog
from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.rules.objects import Objects
from mooncake_zmq.pool.rules.tenants import HIDDEN, Reach
from mooncake_zmq.store import protocol
from mooncake_zmq.store.codes import Code, Pin

NOTHING = Found(0, 0, 0, 0, 0)
MAX_CLIENTS = 4096
MAX_CLIENTS_OF_A_KEY = MAX_CLIENTS // 4
"""So that the holder of one key does not take all places."""
IDLE_S = 60.0
"""A client of another host that has been silent for so long is forgotten; if it still runs, it sends Hello again."""
PROBE_AFTER_S = 5.0
"""A client of this host that has been silent for so long is probed, as is one that holds something."""
PROBE = ("probe",)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """Facts of this incarnation that clients are sent. `host`: see `store.segment.host_mark`; `probe_s`: how often they are
    probed."""

    name: str
    cluster: str
    incarnation: int
    host: str = ""
    probe_s: float = 1.0


@dataclass(slots=True)
class _Client:
    """A client of the store. `shared`: it maps the memory, and may write there for as long as it runs. `token`: proves that a
    stream is its own. `user`: the name of its key; `reach`: the keys that it may use, None for all."""

    token: bytes
    received_at: float
    user: str | None
    reach: Reach | None
    shared: bool = False
    streams: int = 0


class StoreNode:
    """See the module. `log`: what is on its SSD, if it has one."""

    def __init__(self, settings: ObjectSettings, facts: StoreFacts, log: ObjectLog | None = None) -> None:
        self.objects = Objects(settings, log)
        for key in log.by_key if log is not None else ():
            self.objects.engine_blocks.touch(key)
        self._facts = facts
        self._turn = Turn()
        self._clients: dict[bytes, _Client] = {}
        self._clients_of: Counter[str | None] = Counter()
        """By the name of their key."""
        self._counts = dict.fromkeys(("requests", "dropped", "strangers", "clients_died", "clients_refused"), 0)
        self._changes = Changes(self.objects)
        self._tiers = Tiers(self._turn, self.objects, log, self._changes) if log is not None else None
        self._streaming = Streaming(self._turn, self.objects, self._changes, self._tiers)
        self._probes = self._draining = False
        self._on: dict[type[Any], Callable[[Any], None]] = {
            Asked: self._on_asked,
            StreamAsked: lambda event: self._streaming.asked(event.stream, event.request),
            ValuesSent: lambda event: self._streaming.sent(event.stream),
            ValuesCame: lambda event: self._streaming.came(event.stream, event.sent, event.made),
            ChecksumsMade: lambda event: self._streaming.checksums_made(event.stream, event.checksums),
            Greeted: self._on_greeted,
            StreamBegan: self._on_stream_began,
            StreamEnded: self._on_stream_ended,
            ClientDied: self._on_client_died,
            WorkDone: self._on_work_done,
            TimerFired: self._on_timer,
            Started: self._on_started,
            DrainWanted: self._on_drain_wanted,
        }
        """A pattern over them takes longer than a small request."""

    def handle(self, now: float, event: Event) -> list[Effect]:
        """React to one event at time `now` (seconds of a monotonic clock)."""
        turn, objects = self._turn, self.objects
        turn.now = now
        self._on[type(event)](event)
        if self._tiers is not None:
            self._with_disk(self._tiers, event)
        turn.effects += objects.holders.timer(now)
        if objects.engine_blocks.is_touched:
            stored, removed = objects.engine_blocks.changes(objects.exist)
            if stored or removed:
                turn.effects.append(EngineBlocksReported(tuple(stored), tuple(removed)))
        effects, turn.effects = turn.effects, []
        if objects.fences:
            effects.insert(0, Fence(tuple(objects.fences)))
            objects.fences.clear()
        return effects

    @property
    def counts(self) -> dict[str, int]:
        """Counters, for metrics."""
        on_disk = {f"ssd_{name}": value for name, value in self._tiers.counts.items()} if self._tiers is not None else {}
        return {**self._counts, **self._streaming.counts, **self.objects.counts, **on_disk}

    def gauges(self) -> dict[str, float]:
        """All but the pool's own are zero when no client is there."""
        on_disk = self._tiers.gauges() if self._tiers is not None else {}
        return {**self.objects.gauges(), "clients": len(self._clients), **on_disk}

    def check(self) -> None:
        """Assert the invariants; slow, for tests."""
        self.objects.check()
        self._streaming.check()
        if self._tiers is not None:
            self._tiers.check()
        assert self._clients_of == Counter(client.user for client in self._clients.values())

    @property
    def readers(self) -> int:
        """Values are read from disk by so many works at a time."""
        return self._tiers.readers if self._tiers is not None else 0

    def shared_clients(self) -> list[bytes]:
        """Those that map the memory."""
        return [name for name, client in self._clients.items() if client.shared]

    # --- clients

    def _on_greeted(self, event: Greeted) -> None:
        name, hello = _name(event.connection), event.hello
        refused = self._refusal(event, name)
        if refused:
            self._reply(event.connection, protocol.Stranger(hello.id, refused))
            return
        reach = self.objects.tenants.reach_of(event.user)
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(event.token, self._turn.now, event.user, reach)
            self._clients_of[event.user] += 1
            self.objects.holders.join(name, event.user)
        client.received_at = self._turn.now
        # A process that maps the memory can read all of it: a client that may not gets its values on streams, on this host too.
        client.shared = client.shared or (hello.shared and event.runs and reach is None)
        self._probe_later()
        facts, objects = self._facts, self.objects
        welcome = protocol.Welcome(
            hello.id,
            protocol.PROTOCOL_VERSION,
            facts.name,
            facts.incarnation,
            event.path if reach is None else "",
            facts.cluster,
            objects.settings.object_bytes,
            objects.entries.table_rows,
            objects.max_object_bytes,
            objects.settings.max_ttl_s,
            hello.shared and client.shared,
            event.stream,
            client.token,
            host=facts.host,
        )
        self._reply(event.connection, welcome)

    def _refusal(self, event: Greeted, name: bytes) -> str:
        """Why this client is not taken; empty: it is. What is refused is counted."""
        known = self._clients.get(name)
        if known is not None and known.user != event.user:
            what, why = "strangers", "this name is another's"
        elif event.hello.protocol != protocol.PROTOCOL_VERSION:
            what, why = "strangers", f"the store speaks protocol {protocol.PROTOCOL_VERSION}"
        elif known is None and len(self._clients) >= MAX_CLIENTS:
            what, why = "clients_refused", f"{MAX_CLIENTS} clients are there"
        elif known is None and event.user and self._clients_of[event.user] >= MAX_CLIENTS_OF_A_KEY:
            what, why = "clients_refused", f"{MAX_CLIENTS_OF_A_KEY} clients with the key of {event.user} are there"
        else:
            return ""
        self._counts[what] += 1
        return why

    def _forget(self, name: bytes) -> None:
        """A client is gone; what it held goes too."""
        user = self._clients.pop(name).user
        self._clients_of[user] -= 1
        if not self._clients_of[user]:
            del self._clients_of[user]
        self.objects.bury(name)

    def _on_client_died(self, event: ClientDied) -> None:
        client = self._clients.get(event.client)
        if client is not None and not client.streams:
            self._forget(event.client)
            self._counts["clients_died"] += not event.closed

    def _on_stream_began(self, event: StreamBegan) -> None:
        client = self._clients.get(event.attach.client)
        if client is None or not hmac.compare_digest(client.token, event.attach.token):
            self._counts["strangers"] += 1
            self._turn.effects.append(Dismiss(event.stream, "a stranger", stranger=True))
            return
        client.streams += 1
        self._streaming.begin(event.stream, event.attach.client, client.reach)

    def _on_stream_ended(self, event: StreamEnded) -> None:
        name = self._streaming.end(event.stream)
        if name is not None:
            self._clients[name].streams -= 1
            self._clients[name].received_at = self._turn.now

    # --- requests

    def _on_asked(self, event: Asked) -> None:
        self._counts["requests"] += 1
        connection, request = event.connection, event.request
        name = _name(connection)
        client = self._clients.get(name)
        if client is None or client.user != event.user:
            self._counts["strangers"] += 1
            if not isinstance(request, protocol.Release | protocol.ReportCorrupt | protocol.Hello):
                self._reply(connection, protocol.Stranger(request.id))
            return
        client.received_at = self._turn.now
        if client.reach is not None:
            request = _narrowed(request, client.reach)
        match request:
            case protocol.Remove(keys=keys):
                self._change(connection, request.id, keys, partial(self._removed, request))
            case protocol.RemoveAll(id):
                within = client.reach.writes if client.reach is not None else None
                keys = self.objects.some_keys(protocol.REMOVED_AT_ONCE, within)
                self._change(connection, id, keys, partial(self._all_removed, id, keys))
            case protocol.Commit():
                self._commit(connection, name, client, request)
            case _:
                reply = self._answer(name, client, request)
                if reply is not None:
                    self._reply(connection, reply)

    def _answer(self, name: bytes, client: _Client, request: protocol.Request) -> protocol.Reply | None:
        objects = self.objects
        match request:
            case protocol.Exist(id, keys):
                return protocol.Codes(id, objects.exist(keys))
            case protocol.Lease():
                leased = self._lease(name, request)
                return leased if client.shared else _sizes_alone(leased)
            case protocol.Release(leases, puts):
                for lease_id in leases:
                    objects.holders.release(name, lease_id)
                for put_id in puts:
                    objects.puts.commit(self._turn.now, name, put_id, (), ())
            case protocol.Reserve():
                well_formed = client.shared and len(request.keys) == len(request.sizes)
                return self._reserve(name, request) if well_formed else protocol.Codes(request.id, b"")
            case protocol.SizesOf(id, keys):
                sizes = [objects.size_of(key) for key in keys]
                return protocol.Numbers(id, [Code.NOT_FOUND if size is None else size for size in sizes])
            case protocol.ListKeys(id) if client.reach is not None and not client.reach.reads:
                return protocol.KeysListed(id, [], 0)
            case protocol.ListKeys(id, cursor, limit):
                found, cursor = objects.keys(cursor, limit)
                if client.reach is not None:
                    found = [key for key in found if key.startswith(client.reach.reads)]
                return protocol.KeysListed(id, found, cursor)
            case protocol.ReportCorrupt(entries, generations) if client.shared:
                for entry, generation in zip(entries, generations, strict=False):
                    objects.entries.report_corrupt(entry, generation)
        return None

    def _lease(self, name: bytes, request: protocol.Lease) -> protocol.Leased:
        leased = self.objects.lease(self._turn.now, name, request.id, request.keys, request.ttl_s)
        if self.objects.log is None:
            found = [one or NOTHING for one in leased]
        else:
            found = [
                one or NOTHING._replace(size=self.objects.size_on_disk(key) or 0)
                for key, one in zip(request.keys, leased, strict=True)
            ]
        entries, offsets, sizes, generations, checksums = map(list, zip(*found, strict=True)) if found else ([],) * 5
        return protocol.Leased(request.id, sizes, entries, offsets, generations, checksums)

    def _reserve(self, name: bytes, request: protocol.Reserve) -> protocol.Reply:
        pins, now = Pin(request.pins), self._turn.now
        grants = self.objects.puts.reserve(now, name, request.id, request.keys, request.sizes, pins=pins, ttl_s=request.ttl_s)
        codes, entries, offsets, generations = map(list, zip(*grants, strict=True)) if grants else ([],) * 4
        return protocol.Reserved(request.id, list(map(int, codes)), entries, offsets, generations)

    def _commit(self, connection: bytes, name: bytes, client: _Client, request: protocol.Commit) -> None:
        if not client.shared or len(request.indexes) != len(request.checksums):
            self._reply(connection, protocol.Codes(request.id, b""))
            return

        def keys() -> Sequence[str]:
            return replaced(self.objects, self._turn.now, name, request.put_id, request.indexes)

        def commit(_: set[str]) -> protocol.Reply:
            codes = self.objects.puts.commit(self._turn.now, name, request.put_id, request.indexes, request.checksums)
            return protocol.Numbers(request.id, [] if codes is None else list(map(int, codes)))

        self._change(connection, request.id, keys, commit)

    def _removed(self, request: protocol.Remove, erased: set[str]) -> protocol.Reply:
        codes = []
        for key in request.keys:
            was_here = self.objects.remove(key) or key in erased
            erased.discard(key)
            codes.append(int(Code.OK if was_here else Code.NOT_FOUND if key != HIDDEN else Code.INVALID))
        return protocol.Numbers(request.id, codes)

    def _all_removed(self, request_id: int, keys: Sequence[str], _: set[str]) -> protocol.Reply:
        for key in keys:
            self.objects.remove(key)
        return protocol.Numbers(request_id, [len(keys)])

    def _change(
        self,
        connection: bytes,
        request_id: int,
        keys: Sequence[str] | Callable[[], Sequence[str]],
        answer: Callable[[set[str]], protocol.Reply],
    ) -> None:
        """Answer what gives `keys` another value, or none: now, or when no copy of them is on disk any more; that it cannot be
        followed, where too much waits for that."""
        asked = keys if callable(keys) else lambda: keys
        if not self._changes.begin(Change(asked, lambda erased: self._reply(connection, answer(erased)))):
            self._counts["dropped"] += 1
            self._reply(connection, protocol.Codes(request_id, b""))

    def _reply(self, connection: bytes, reply: protocol.Reply) -> None:
        self._turn.effects.append(Reply(connection, reply))

    # --- time and disk

    def _on_started(self, _: Started) -> None:
        if self._tiers is not None:
            self._tiers.start()

    def _on_work_done(self, event: WorkDone[StoreResult]) -> None:
        assert self._tiers is not None
        self._tiers.done(event.work_id, event.result)

    def _on_drain_wanted(self, _: DrainWanted) -> None:
        self._draining = True
        if self._tiers is not None:
            self._tiers.drain()
        else:
            self._turn.effects.append(Drained())

    def _on_timer(self, event: TimerFired) -> None:
        if event.key == EXPIRE:
            self.objects.expire(self._turn.now)
        elif event.key == PROBE:
            self._probes = False
            self._probe()
        elif self._tiers is not None and event.key == LOOK:
            self._tiers.look_is_due()
        elif self._tiers is not None and event.key == RETRY:
            self._tiers.retry()

    def _with_disk(self, tiers: Tiers, event: Event) -> None:
        """After each event: what changed may be due to be written, what waits may be done."""
        if len(self._changes):
            tiers.look()
        while tiers.ready:
            self._streaming.promoted(tiers.ready.pop(0))
        if not (isinstance(event, TimerFired) and event.key == LOOK):  # a look sets its own next timer
            tiers.changed()
        if tiers.drained and self._draining:
            self._draining = False
            self._turn.effects.append(Drained())

    def _probe(self) -> None:
        """Forget clients of other hosts that are silent; look at those of this host that hold something, or are silent."""
        shared: list[bytes] = []
        holders = self.objects.holders.busy()
        for name, client in list(self._clients.items()):
            idle = self._turn.now - client.received_at > (PROBE_AFTER_S if client.shared else IDLE_S)
            if client.streams:  # a stream notices by itself that its client is gone
                continue
            if client.shared and (idle or name in holders):
                shared.append(name)
            elif not client.shared and idle:
                self._forget(name)
        if shared:
            self._turn.effects.append(Probe(shared))
        self._probe_later()

    def _probe_later(self) -> None:
        if self._clients and not self._probes:
            self._probes = True
            self._turn.effects.append(SetTimer(PROBE, self._facts.probe_s))


def _narrowed(request: protocol.Request, reach: Reach) -> protocol.Request:
    """As if what is outside of the client's reach were not there. Cells of memory are for others alone."""
    match request:
        case protocol.Lease(keys=keys):
            return structs.replace(request, keys=reach.readable(keys))
        case protocol.Exist(keys=keys) | protocol.SizesOf(keys=keys):
            return structs.replace(request, keys=reach.readable(keys))
        case protocol.Remove(keys=keys):
            return structs.replace(request, keys=reach.writable(keys))
    return request


def _sizes_alone(leased: protocol.Leased) -> protocol.Leased:
    """For a client that does not map the memory: its values stay readable, where they lie is nothing to it."""
    nothing = [0] * len(leased.sizes)
    return structs.replace(leased, entries=nothing, offsets=nothing, generations=nothing, checksums=nothing)


def _name(connection: bytes) -> bytes:
    """The name of the client whose connection this is."""
    return connection[1:17]
