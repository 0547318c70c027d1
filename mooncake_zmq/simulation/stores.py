"""The stores beside the cache-nodes of a simulated cluster: their live actor, memory, disk and streams, under the world's time.

A store's faults are those of its process: it crashes, stops and drains, its disk fills up, fails, is slow, flips bits and loses
what was not synced. Stores draw from a random generator of their own, so that the blocks' world does not depend on them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from mooncake_zmq.core.actor import Drained, DrainWanted, Fence, SetTimer, Start, Started, TimerFired, WorkDone
from mooncake_zmq.core.work import ReadValues, RemoveSegments, StoreWork, WriteValues
from mooncake_zmq.pool.node.store_events import (
    Asked,
    ChecksumsMade,
    ClientDied,
    Dismiss,
    Effect,
    Event,
    Greeted,
    MakeChecksums,
    Probe,
    ReceiveValues,
    Reply,
    SendValues,
    Serve,
    StreamAsked,
    StreamBegan,
    StreamEnded,
    ToStream,
    ValuesCame,
    ValuesSent,
)
from mooncake_zmq.pool.node.store_node import StoreFacts, StoreNode
from mooncake_zmq.pool.rules.entries import Found
from mooncake_zmq.pool.rules.object_log import ObjectLog, ObjectSsdSettings
from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.rules.tenants import StoreTenant
from mooncake_zmq.simulation.simulator import Simulator
from mooncake_zmq.simulation.store_checker import StoreChecker
from mooncake_zmq.simulation.store_disk import StoreDisk
from mooncake_zmq.simulation.violation import Violation
from mooncake_zmq.simulation.world import Process
from mooncake_zmq.store import protocol
from mooncake_zmq.store.memory import checksum_of
from mooncake_zmq.store.protocol import Hello, Request, Stranger, encode
from mooncake_zmq.store.stream_messages import Attach, Ended, Put, Values
from mooncake_zmq.store.stream_messages import Request as StreamRequest

SLAB_BYTES = 1 << 16
RED = StoreTenant(name="red", namespaces=("red/",), clients=("ruby",), dram_bytes=3 * SLAB_BYTES // 2, ssd_bytes=3 * SLAB_BYTES)
SETTINGS = ObjectSettings(
    object_bytes=4 * SLAB_BYTES,
    slab_bytes=SLAB_BYTES,
    max_objects=40,
    max_ttl_s=1.6,
    max_client_share=0.6,
    ssd=ObjectSsdSettings(directory="simulated", bytes=1 << 20, ahead=0.8, threads=2, max_objects=80),
    tenants=(RED,),
)
PROBE_S = 0.4
HOP_S = 5e-4
COPY_S = 1e-3
BYTES_PER_S = 2e7
CHECK_EVERY = 8
"""The number of turns between checks of an actor's own invariants."""
IMPOSTOR_EVERY = 8
"""The number of requests that come for one that comes once more, under the same client's name, from another's key."""


class StoreCaller(Protocol):
    """A client as its stores see it. `beside`: a process of its host; `user`: the name of its key, None for this machine's
    user."""

    number: int
    user: str | None
    beside: str
    shared: bool
    incarnation: int
    over: bool
    doing: str
    putting: list[bytes]
    name: bytes
    connection: bytes

    def healed(self) -> None: ...
    def stops(self, until: float) -> None: ...
    def received(self, incarnation: int, store: "StoreIncarnation", reply: protocol.Reply) -> None: ...
    def streamed(self, pipe: "Pipe", message: Any, payload: list[bytes]) -> None: ...


@dataclass(slots=True)
class Pipe:
    """A stream: requests that its client has sent and the store has not taken yet, and the state of its server."""

    number: int
    client: StoreCaller
    client_incarnation: int
    store: "StoreIncarnation"
    sent: deque[tuple[StreamRequest, list[bytes]]] = field(default_factory=deque)
    reads_next: bool = False
    eager: list[bytes] = field(default_factory=list)
    receiving: ReceiveValues | None = None
    """The values whose bytes are to come."""
    known: bool = False
    """Whether the actor has been notified of the stream."""
    cut: bool = False
    """Whether the client is gone; the stream's server finds out at its next look."""
    over: bool = False
    half_sent: tuple[Values, list[bytes]] | None = None
    """The answer of which one half is on its way: all that arrives of it if the store dies now."""
    dawdles_s: float = 0.0
    """The time for which its client delays its reads of answers."""
    answers: deque[tuple[Any, list[bytes]]] = field(default_factory=deque)
    """The answers that the client has not taken yet."""


class StoreIncarnation:
    """One incarnation of a store: everything but its disk is lost when it ends."""

    def __init__(self, stores: "Stores", process: Process[Any], disk: StoreDisk) -> None:
        self.name = process.name
        self.incarnation = process.starts
        self.disk = disk
        self.memory = bytearray(SETTINGS.object_bytes)
        self.flipped: set[tuple[int, int]] = set()
        """The (entry, generation) of cells in which a bit has flipped."""
        log = ObjectLog(SETTINGS.ssd)
        log.restore(*disk.recovered())
        facts = StoreFacts(name=self.name, cluster="sim", incarnation=self.incarnation, probe_s=PROBE_S)
        self.node = StoreNode(SETTINGS, facts, log)
        self.generations = [0] * self.node.objects.entries.table_rows
        self.pipes: dict[int, Pipe] = {}
        self.works: dict[int, Start[StoreWork]] = {}
        self.turns = 0
        self._stores = stores
        self._process = process
        self._timers: dict[Any, int] = {}
        self._numbers = 0
        self._acts: dict[type[Any], Callable[[Any], None]] = {
            Fence: self._fence,
            Reply: lambda effect: self._stores.reply(self, effect),
            Probe: lambda effect: self.later(HOP_S, self._probe, effect.clients),
            Start: self._start,
            SetTimer: self._set_timer,
            Drained: lambda effect: None,
            **dict.fromkeys((Serve, SendValues, MakeChecksums, ReceiveValues, Dismiss), self._to_stream),
        }

    @property
    def is_running(self) -> bool:
        return self._stores.living.get(self.name) is self

    @property
    def now(self) -> float:
        """Return the monotonic clock of its host."""
        return self._stores.simulator.clock(self._process)

    def later(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call in this incarnation, and not while its process is stopped."""
        world = self._stores.simulator
        world.in_incarnation(self._process, world.now + delay_s, action, *arguments)

    def copy_s(self, size: int) -> float:
        """Return the time in which a stream's server copies so many bytes."""
        slowness = self._stores.simulator.slowness(self._process.spec.host)
        return (COPY_S + size / BYTES_PER_S) * slowness * self._stores.random.uniform(0.5, 1.5)

    def take(self, event: Event) -> None:
        """Take a turn of the actor."""
        effects = self.node.handle(self.now, event)
        self.turns += 1
        self._stores.saw(self, event, effects)
        if self.turns % CHECK_EVERY == 0:
            self.node.check()
        for effect in effects:
            self._acts[type(effect)](effect)

    # --- streams

    def attach(self, client: StoreCaller, attach: Attach) -> Pipe:
        """Open a new stream of a client."""
        self._numbers += 1
        pipe = Pipe(self._numbers, client, client.incarnation, self)
        self.pipes[pipe.number] = pipe
        self.later(HOP_S, self._attached, pipe, attach)
        return pipe

    def look(self, pipe: Pipe) -> None:
        """Have the stream's server look for a request, or find its client gone."""
        if pipe.over:
            return
        if pipe.cut and (pipe.reads_next or pipe.receiving is not None):
            self._end(pipe)
        elif pipe.reads_next and pipe.sent:
            request, pipe.eager = pipe.sent.popleft()
            pipe.reads_next = False
            self.take(StreamAsked(pipe.number, request))

    def receive(self, pipe: Pipe, values: Sequence[bytes], sent: Sequence[int]) -> None:
        """Receive the bytes that a stream's server waits for."""
        asked, pipe.receiving = pipe.receiving, None
        if asked is None or pipe.over:
            return
        damaged = [self._stores.damaged(value) for value in values]
        delay_s = self.copy_s(sum(map(len, values)))
        self.later(delay_s / 2, self._write, pipe, asked, damaged, True)
        self.later(delay_s, self._came, pipe, asked, damaged, list(sent))

    def _attached(self, pipe: Pipe, attach: Attach) -> None:
        if not pipe.cut:
            pipe.known = True
            self.take(StreamBegan(pipe.number, attach))

    def _to_stream(self, effect: ToStream) -> None:
        self.later(0.0, self._serve, self.pipes[effect.stream], effect)

    def _serve(self, pipe: Pipe, effect: ToStream) -> None:
        if pipe.cut:
            return self._end(pipe)
        match effect:
            case Serve(_, answer):
                pipe.reads_next = True
                if answer is not None:
                    self._stores.answer(pipe, answer, [])
                self.look(pipe)
            case SendValues():
                delay_s = self.copy_s(sum(one.size for one in effect.found)) + pipe.dawdles_s
                self.later(delay_s / 2, self._send_half, pipe, effect, delay_s)
            case MakeChecksums(_, found):
                delay_s = self.copy_s(sum(one.size for one in found))
                self.later(delay_s, self._made, pipe, found)
            case ReceiveValues(_, _, _, codes, sent, within_s):
                pipe.receiving = effect
                if sent is not None:
                    self.receive(pipe, pipe.eager, sent)
                else:
                    self._stores.answer(pipe, Ended(codes or []), [])
                    self.later(within_s, self._too_slow, pipe, effect)
            case Dismiss(_, _, stranger):
                if stranger:
                    self._stores.answer(pipe, Stranger(0), [])
                self._end(pipe)
        return None

    def _send_half(self, pipe: Pipe, asked: SendValues, whole_s: float) -> None:
        halves = [self._read(one)[: one.size // 2] for one in asked.found]
        self._stores.checker.sent(self, asked, halves)
        if any(halves):
            pipe.half_sent = Values(asked.sizes, asked.checksums), halves
            self._stores.simulator.half_sent(self.name)
        if whole_s > asked.within_s:
            self.later(max(0.0, asked.within_s - whole_s / 2), self._end, pipe)
        else:
            self.later(whole_s / 2, self._sent, pipe, asked, halves)

    def _sent(self, pipe: Pipe, asked: SendValues, halves: Sequence[bytes]) -> None:
        pipe.half_sent = None
        payload = [half + self._read(one)[len(half) :] for one, half in zip(asked.found, halves, strict=True)]
        self._stores.checker.sent(self, asked, payload)
        self._stores.answer(pipe, Values(asked.sizes, asked.checksums), [self._stores.damaged(value) for value in payload])
        self.take(ValuesSent(pipe.number))

    def _made(self, pipe: Pipe, found: Sequence[Found]) -> None:
        self.take(ChecksumsMade(pipe.number, [checksum_of(self._read(one)) for one in found]))

    def _write(self, pipe: Pipe, asked: ReceiveValues, values: Sequence[bytes], half: bool) -> None:
        for value, offset in zip(values, asked.offsets, strict=True):
            if offset >= 0:
                stop = len(value) // 2 if half else len(value)
                self.memory[offset : offset + stop] = value[:stop]

    def _came(self, pipe: Pipe, asked: ReceiveValues, values: Sequence[bytes], sent: list[int]) -> None:
        if pipe.cut:
            return self._end(pipe)
        self._write(pipe, asked, values, False)
        self.take(ValuesCame(pipe.number, sent, [checksum_of(value) for value in values]))
        return None

    def _too_slow(self, pipe: Pipe, asked: ReceiveValues) -> None:
        if pipe.receiving is asked:
            self._end(pipe)

    def _end(self, pipe: Pipe) -> None:
        if not pipe.over:
            pipe.over, pipe.receiving = True, None
            del self.pipes[pipe.number]
            self._stores.answer(pipe, None, [])
            if pipe.known:
                self.take(StreamEnded(pipe.number))

    def _read(self, one: Found) -> bytes:
        return bytes(self.memory[one.offset : one.offset + one.size])

    # --- client messages and the end

    def _fence(self, effect: Fence) -> None:
        for entry, generation in effect.generations:
            self.generations[entry] = generation

    def _probe(self, clients: Sequence[bytes]) -> None:
        for name in clients:
            if not self._stores.is_running(name):
                self.take(ClientDied(name, closed=False))

    def _set_timer(self, effect: SetTimer) -> None:
        self._numbers += 1
        self._timers[effect.key] = self._numbers
        self.later(effect.delay_s, self._fire, effect.key, self._numbers)

    def _fire(self, key: Any, number: int) -> None:
        if self._timers.get(key) == number:
            del self._timers[key]
            self.take(TimerFired(key))

    def _start(self, start: Start[StoreWork]) -> None:
        writers = [each for each in self.works.values() if not isinstance(each.work, ReadValues)]
        if writers and not isinstance(start.work, ReadValues):
            raise Violation("I2", f"{self.name} has {start.work} done while {writers[0].work} is under way")
        if isinstance(start.work, RemoveSegments) and not start.work.instead:
            works = [each.work for each in self.works.values() if isinstance(each.work, ReadValues)]
            if any(value.record.segment in start.work.segments for work in works for value in work.values):
                raise Violation("I2", f"{self.name} removes segments {start.work.segments} under a read")
        self.works[start.work_id] = start
        delay_s = self.disk.seconds(start.work)
        checksums: tuple[int, ...] = ()
        if isinstance(start.work, WriteValues):
            views = [self.memory[value.offset : value.offset + value.record.size] for value in start.work.values]
            checksums = tuple(map(checksum_of, views))
        self.later(delay_s / 2, lambda: self.disk.half(start.work, self.memory))
        self.later(delay_s, self._finish, start, checksums)

    def _finish(self, start: Start[StoreWork], checksums: tuple[int, ...]) -> None:
        del self.works[start.work_id]
        result = self.disk.finish(start.work, self.memory, checksums)
        self._stores.checker.disk_did(self.name, self.disk, start.work, result)
        self.take(WorkDone(start.work_id, result))


class Stores:
    """All stores, and their clients."""

    def __init__(self, simulator: Simulator, seed: int) -> None:
        self.simulator = simulator
        self.random = Random(f"stores of seed {seed}")  # noqa: S311 (not for secrets)
        self.checker = StoreChecker(lambda: simulator.now)
        self.living: dict[str, StoreIncarnation] = {}
        self.clients: Sequence[StoreCaller] = []
        self._arrived = 0
        self._disks = {
            name: StoreDisk(disk, Random(f"store disk {name} of seed {seed}")) for name, disk in simulator.disks.items()
        }
        for name in self._disks:
            self.began(simulator.processes[name])

    # --- incarnations

    def began(self, process: Process[Any]) -> None:
        """Start the store beside a new incarnation of a process, if it has one."""
        disk = self._disks.get(process.name)
        if disk is not None:
            store = StoreIncarnation(self, process, disk)
            self.living[process.name] = store
            store.later(0.0, store.take, Started())

    def died(self, name: str) -> None:
        """End the store of an incarnation that has ended."""
        store = self.living.pop(name, None)
        if store is not None:
            self.checker.store_died(store)
            self.checker.covered.update(store.node.counts)
            self._disks[name].lose_power()
            for pipe in store.pipes.values():
                pipe.over = True
                if pipe.half_sent is not None:
                    self.answer(pipe, *pipe.half_sent)
                self.answer(pipe, None, [])

    def drains(self, name: str) -> None:
        """Drain the store of a process that the operator drains."""
        store = self.living.get(name)
        if store is not None:
            store.later(0.0, store.take, DrainWanted())

    def suspended(self, names: Sequence[str], until: float) -> None:
        """Suspend the clients on the host of these processes, which is suspended."""
        for client in self.clients:
            if client.beside in names:
                client.stops(until)

    def flip(self, name: str, count: int) -> None:
        """Flip bits on disk and in memory; not in values without a checksum, where no store could notice."""
        store = self.living.get(name)
        if store is not None:
            self._disks[name].flip(count)
            objects = store.node.objects
            checked = [found for entry in objects.by_key.values() if (found := objects.entries.found(entry)).checksum]
            for found in self.random.sample(checked, min(count, len(checked))):
                store.memory[found.offset + self.random.randrange(found.size)] ^= 1 << self.random.randrange(8)
                store.flipped.add((found.entry, found.generation))

    def is_running(self, name: bytes) -> bool:
        """Return whether this client still holds its incarnation's lock, as a stopped one does."""
        return any(client.name == name for client in self.clients)

    def saw(self, store: StoreIncarnation, event: Event, effects: list[Effect]) -> None:
        """Check a turn that a store has taken."""
        simulator = self.simulator
        simulator.note(type(event).__name__.encode(), store.name)
        simulator.write_down(f"store {store.name}", event, effects)
        self.checker.observed(store, event, effects)

    # --- messages between clients and stores

    def send(self, client: StoreCaller, store: str, request: Request) -> None:
        """Send a request, which may be lost or, while nothing else is asked, come twice."""
        wires = self.simulator.wires
        if not self._is_cut(client, store) and self.random.random() >= wires.drop:
            delay_s = HOP_S * self.random.uniform(0.5, 1.5) + wires.delay_s * self.random.random() ** 4
            times = 2 if self.random.random() < wires.duplicate else 1
            self.simulator.at(self.simulator.now + delay_s, self._arrive, client, client.connection, store, request, times)

    def _arrive(self, client: StoreCaller, connection: bytes, name: str, request: Request, times: int) -> None:
        self.simulator.note(encode(request), name)
        store = self.living.get(name)
        if store is None:
            return
        for _ in range(times):
            if isinstance(request, Hello):
                runs = request.shared and client.connection == connection
                path = store.name if client.shared else ""
                greeted = Greeted(connection, request, path, runs, self.random.randbytes(16), "sim", client.user)
                store.later(0.0, store.take, greeted)
            else:
                store.later(0.0, store.take, Asked(connection, request, client.user))
        self._arrived += 1
        if self._arrived % IMPOSTOR_EVERY == 0 and not isinstance(request, Hello):
            store.later(0.0, store.take, Asked(connection[:17] + b"else", request, "mallory"))

    def reply(self, store: StoreIncarnation, reply: Reply) -> None:
        """Send an answer to its client."""
        self.simulator.note(encode(reply.reply), store.name)
        client = next((each for each in self.clients if each.connection == reply.connection), None)
        wires = self.simulator.wires
        if client is not None and not self._is_cut(client, store.name) and self.random.random() >= wires.drop:
            self.simulator.at(
                self.simulator.now + HOP_S * self.random.uniform(0.5, 1.5),
                client.received,
                client.incarnation,
                store,
                reply.reply,
            )

    def answer(self, pipe: Pipe, message: Any, payload: list[bytes]) -> None:
        """Send a message to a stream's client; None: the stream is over."""
        self.simulator.at(self.simulator.now + HOP_S, pipe.client.streamed, pipe, message, payload)

    def stream(self, pipe: Pipe, request: StreamRequest, payload: list[bytes]) -> None:
        """Send a client's request on a stream, with the bytes that it sends unasked."""
        if self._is_cut(pipe.client, pipe.store.name):
            return self.hang_up(pipe)
        if isinstance(request, Put):
            self.checker.intends_stream(pipe)
        self.simulator.at(self.simulator.now + HOP_S, self._streamed, pipe, request, payload)
        return None

    def _streamed(self, pipe: Pipe, request: StreamRequest, payload: list[bytes]) -> None:
        self.simulator.note(encode(request), pipe.store.name)
        pipe.sent.append((request, payload))
        if pipe.store.is_running:
            pipe.store.later(0.0, pipe.store.look, pipe)

    def upload(self, pipe: Pipe, values: list[bytes], checksums: list[int]) -> None:
        """Send the bytes that a store has asked for."""
        if pipe.store.is_running:
            pipe.store.later(HOP_S, pipe.store.receive, pipe, values, checksums)

    def hang_up(self, pipe: Pipe) -> None:
        """Break a stream: its server finds out when it next looks, its client at once."""
        pipe.cut = True
        if pipe.store.is_running:
            pipe.store.later(HOP_S, pipe.store.look, pipe)
        self.answer(pipe, None, [])

    def damaged(self, value: bytes) -> bytes:
        """Return the bytes as they arrive, now and then damaged."""
        if not value or self.random.random() >= self.simulator.copy_tear:
            return value
        at = self.random.randrange(len(value))
        return value[:at] + bytes([value[at] ^ 0x10]) + value[at + 1 :]

    def _is_cut(self, client: StoreCaller, store: str) -> bool:
        cut = self.simulator.wires.cut
        return bool(not client.shared and (cut[client.beside, store] or cut[store, client.beside]))

    # --- the end

    def heal(self) -> None:
        """End the clients' faults; each client shows once that its store works, and ends."""
        for client in self.clients:
            client.healed()

    def busy(self) -> Violation | None:
        """Return what is not over yet; None when all is quiet."""
        for client in self.clients:
            if not client.over:
                return Violation("I4", f"store client {client.number} has not ended: {client.doing}")
        for name, store in self.living.items():
            levels = store.node.gauges()
            work = ("leases", "puts", "writing_objects", "quarantined_objects", "reserved_bytes")
            above = {gauge: levels[gauge] for gauge in (*work, "ssd_promoting", "ssd_erasing", "ssd_demoting") if levels[gauge]}
            if above:
                return Violation("I4", f"the store of {name} has {above}")
        return None

    def at_end(self) -> None:
        """Check the stores once nothing is in progress."""
        for store in self.living.values():
            store.node.check()
            self.checker.at_end(store)
            self.checker.covered.update(store.node.counts)
