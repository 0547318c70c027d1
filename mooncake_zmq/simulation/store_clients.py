"""The clients of the stores of a simulated cluster: programs on their hosts, which copy in shared memory, and others, on
streams.

Each makes one call after another, as the live client does; now and then it stops in the middle of a copy, or dies. The checker
compares what it reads with its own books.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from mooncake_zmq.simulation.stores import BYTES_PER_S, COPY_S, Pipe, StoreIncarnation, Stores
from mooncake_zmq.simulation.violation import Violation
from mooncake_zmq.store import protocol
from mooncake_zmq.store.codes import Pin
from mooncake_zmq.store.memory import checksum_of
from mooncake_zmq.store.stream_messages import EAGER_BYTES, Attach, Attached, Ended, Get, Promote, Put, Recheck, Values

KEYS = tuple(f"key {number}" for number in range(9))
OWN_KEYS = tuple(f"red/{number}" for number in range(5))
"""The keys in a tenant's namespace. Its client now and then uses others, in vain; this machine's user may use all."""
OTHERS_SHARE = 0.15
SIZES = (1, 70, 5000, 40_000, 65_535, 1 << 16)
_CALLS = ("get",) * 8 + ("upsert",) * 4 + ("put",) * 2 + ("exist", "sizes", "remove", "list", "clear")
HOT, HOT_SHARE = KEYS[0], 0.4
"""A key that all clients use often, so that calls meet at it."""
TIMEOUT_S = 2.5
TTL_S = 1.2
PAUSE_S = 0.1
CLEARS = 0.1
SLOW_READS = 0.3
"""The share of a stream's gets in which the client delays its reads, and asks for a lease that ends before."""
STOPS, DEATHS = 0.04, 0.02
"""The chances that a client stops amid a copy, and that it dies after a call."""
PROBES = 40
"""The number of attempts to put a value and get it back, once all is healed."""
CLIENTS = ((True, None), (True, None), (False, None), (False, "ruby"))
"""The clients of each store: whether they share its memory, and the name of their key."""


@dataclass(frozen=True, slots=True)
class Sleep:
    delay_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A wait for the reply to a request, which is None if none comes in time."""

    request: Any


@dataclass(frozen=True, slots=True)
class Streamed:
    """A wait for the next (message, payload) of a stream, which is None if it broke, or nothing comes in time."""

    pipe: Pipe


Want = Sleep | Answer | Streamed
Call = Generator[Want, Any, Any]


class StoreClient:
    """One client through all its incarnations. `beside`: a process of its host, whose partitions are its; `store`: the store
    that it uses; `user`: the name of its key, None for this machine's user."""

    def __init__(
        self, stores: Stores, number: int, *, store: str, beside: str, shared: bool, user: str | None, random: Random
    ) -> None:
        self.number = number
        self.user = user
        self.store = store
        self.beside = beside
        self.shared = shared
        self.incarnation = 0
        self.over = False
        self.doing = ""
        self.putting: list[bytes] = []
        """The values of its stream's present put."""
        self.name = self.connection = b""
        self._stores = stores
        self._random = random
        self._call: Call | None = None
        self._waits: tuple[int, Want] | None = None
        """The present wait, with its number."""
        self._wait = 0
        self._stopped_until = 0.0
        self._healed = False
        self._serial = 0
        self._pipe: Pipe | None = None
        self._memory: StoreIncarnation | None = None
        """The incarnation of the store whose memory it maps, or would map."""
        self._token = b""
        self._abandoned: list[int] = []
        self._begin()

    # --- called from outside

    def healed(self) -> None:
        """End its faults: it neither stops nor dies from now on, shows that its store works, and ends."""
        self._healed = True
        self._stopped_until = 0.0

    def stops(self, until: float) -> None:
        """Stop for a while, as its host is suspended."""
        self._stopped_until = max(self._stopped_until, until)

    def received(self, incarnation: int, store: StoreIncarnation, reply: protocol.Reply) -> None:
        """Receive the reply to a request."""
        want = self._waits[1] if self._waits is not None else None
        if incarnation == self.incarnation and isinstance(want, Answer) and reply.id == want.request.id:
            if isinstance(reply, protocol.Welcome):
                self._memory, self._token = store, reply.token
            self._go_on(self._wait, reply)

    def streamed(self, pipe: Pipe, message: Any, payload: list[bytes]) -> None:
        """Receive a stream's next message; None: the stream broke."""
        if pipe.client_incarnation == self.incarnation:
            pipe.answers.append((message, payload))
            if self._waits is not None and isinstance(self._waits[1], Streamed) and self._waits[1].pipe is pipe:
                self._go_on(self._waits[0], "something came")

    # --- running calls

    @property
    def _now(self) -> float:
        return self._stores.simulator.now

    @property
    def _clock(self) -> float:
        """Return the monotonic clock of its host, by which its leases end."""
        simulator = self._stores.simulator
        return simulator.clock(simulator.processes[self.beside])

    def _begin(self) -> None:
        """Begin a new incarnation."""
        self.incarnation += 1
        self.name = self._random.randbytes(16)
        self._stores.checker.is_called(self.name, self.user)
        self.connection = b"c" + self.name + self.incarnation.to_bytes(4, "big")
        self._pipe, self._memory = None, None
        self._abandoned.clear()
        self._call = self._live()
        self._step(None)

    def _step(self, value: Any) -> None:
        assert self._call is not None
        self._wait += 1
        try:
            want = self._call.send(value)
        except StopIteration:
            self._waits, self.over = None, True
            return
        self._waits = self._wait, want
        at = self._stores.simulator.at
        match want:
            case Sleep(delay_s):
                at(self._now + delay_s, self._go_on, self._wait, None)
            case Answer():
                at(self._now + TIMEOUT_S, self._go_on, self._wait, None)
            case Streamed(pipe):
                at(self._now + (0.0 if pipe.answers else TIMEOUT_S), self._go_on, self._wait, None)

    def _go_on(self, wait: int, value: Any) -> None:
        if self._waits is None or self._waits[0] != wait:
            return
        if self._now < self._stopped_until:
            self._stores.simulator.at(self._stopped_until, self._go_on, wait, value)
            return
        want = self._waits[1]
        if isinstance(want, Streamed):
            value = want.pipe.answers.popleft() if want.pipe.answers else (None, [])
        self._step(value)

    # --- what an incarnation does

    def _live(self) -> Call:
        while not self._healed:
            yield Sleep(self._random.expovariate(1 / PAUSE_S))
            yield from self._do_something()
            yield from self._maybe_dying()
        for _ in range(PROBES):
            if (yield from self._probe()):
                break
            yield Sleep(PAUSE_S)
        else:
            raise Violation("I4", f"store client {self.number} of {self.store} could not put a value and have it back")
        self.doing = "leaving"
        self._hang_up()
        yield from self._meet()  # reports the incarnation that it gave up
        self.name = b""
        return None

    def _maybe_dying(self) -> Call:
        """Die by chance."""
        if not self._healed and self._random.random() < DEATHS:
            self._die()
            yield Sleep(math.inf)

    def _die(self) -> None:
        """Die as by SIGKILL; the next incarnation follows."""
        self._hang_up()
        self.incarnation += 1
        self.name = b""
        simulator = self._stores.simulator
        simulator.at(simulator.now + self._random.uniform(0.3, 1.5), self._begin)

    def _do_something(self) -> Call:
        count = self._random.choice((1, 1, 1, 2, 3))
        if (self._random.random() < OTHERS_SHARE) == (self.user is None):
            keys = self._random.sample(OWN_KEYS, count)
        else:
            keys = self._random.sample(KEYS, count)
            if HOT not in keys and self._random.random() < HOT_SHARE:
                keys[0] = HOT
        self.doing = self._random.choice(_CALLS)
        if not (yield from self._meet()):
            return
        match self.doing:
            case "get":
                yield from self._get(keys)
            case "upsert" | "put":
                pins = Pin.UPSERT if self.doing == "upsert" else self._random.choice((Pin.NONE, Pin.SOFT))
                yield from self._put(keys, pins)
            case "exist":
                yield from self._ask(protocol.Exist(self._id(), keys))
            case "sizes":
                yield from self._ask(protocol.SizesOf(self._id(), keys))
            case "remove":
                yield from self._ask(protocol.Remove(self._id(), keys[:1]))
            case "list":
                yield from self._ask(protocol.ListKeys(self._id(), 0, protocol.MAX_KEYS))
            case "clear" if self._random.random() < CLEARS:
                yield from self._ask(protocol.RemoveAll(self._id()))

    def _probe(self) -> Call:
        """Check that a value can be put and got, while everything works and other clients release their leases."""
        self.doing = "probe"
        key = f"{'' if self.user is None else 'red/'}probe {self.number}"
        if not (yield from self._meet()):
            return False
        codes = yield from self._put([key], Pin.UPSERT)
        if codes != [0]:
            return False
        got = yield from self._get([key])
        return got == [key]

    # --- calls

    def _id(self) -> int:
        self._serial += 1
        return self._serial

    def _ask(self, request: Any) -> Call:
        """Send a request; return the reply, or None."""
        self._stores.send(self, self.store, request)
        reply = yield Answer(request)
        if reply is None or isinstance(reply, protocol.Stranger):
            self._memory = None
            self._hang_up()
            return None
        return reply

    def _notify(self, note: Any) -> None:
        self._stores.send(self, self.store, note)

    def _meet(self) -> Call:
        """Connect to the store; return whether it answered."""
        if self._memory is None or not self._memory.is_running:
            self._memory = None
            self._hang_up()
            hello = protocol.Hello(self._id(), protocol.PROTOCOL_VERSION, "", self.shared)
            if (yield from self._ask(hello)) is None:
                return False
        if self._abandoned:
            self._notify(protocol.Release([], list(self._abandoned)))
            self._abandoned.clear()
        return True

    def _value(self, key: str) -> bytes:
        self._serial += 1
        pattern = f"{key} of {self.number}: {self._serial}; ".encode()
        size = self._random.choice(SIZES)
        return (pattern * (size // len(pattern) + 1))[:size]

    def _put(self, keys: Sequence[str], pins: Pin) -> Call:
        values = [self._value(key) for key in keys]
        put = self._put_shared if self.shared else self._put_streamed
        return (yield from put(keys, values, pins))

    def _put_shared(self, keys: Sequence[str], values: Sequence[bytes], pins: Pin) -> Call:
        """Put values as `client/shared_copy.py` does."""
        stop_at, put_id = self._clock + TTL_S, self._id()
        store = self._memory
        assert store is not None
        reserved = yield from self._ask(protocol.Reserve(put_id, list(keys), list(map(len, values)), int(pins), TTL_S))
        if not isinstance(reserved, protocol.Reserved):
            self._abandoned.append(put_id)
            return None
        written: dict[int, bytes] = {}
        checksums: list[int] = []
        for index, code in enumerate(reserved.codes):
            if code == 0 and self._clock < stop_at:
                value, offset = values[index], reserved.offsets[index]
                for half in (value[: len(value) // 2], value):
                    yield from self._copying(len(value) // 2)
                    self._stores.checker.writes(store, reserved.entries[index], reserved.generations[index])
                    store.memory[offset : offset + len(half)] = half
                if self._clock < stop_at:
                    written[index] = value
                    checksums.append(checksum_of(value) if self._random.random() < 0.8 else 0)
        self._stores.checker.intends(self.name, put_id, written)
        ended = yield from self._ask(protocol.Commit(self._id(), put_id, list(written), checksums))
        if not isinstance(ended, protocol.Numbers):
            self._abandoned.append(put_id)
            return None
        return ended.numbers

    def _get(self, keys: Sequence[str]) -> Call:
        return self._get_shared(keys) if self.shared else self._get_streamed(keys)

    def _get_shared(self, keys: Sequence[str]) -> Call:
        """Get values as `client/shared_copy.py` does; return the keys that were got."""
        got: list[str] = []
        on_disk: list[str] = []
        lease_id = yield from self._read(keys, got, on_disk)
        if on_disk and lease_id is not None:
            pipe = yield from self._open()
            if pipe is not None:
                self._stores.stream(pipe, Promote(on_disk, [lease_id]), [])
                if (yield from self._next(pipe)) is not None:
                    yield from self._read(on_disk, got, [])
        return got

    def _read(self, keys: Sequence[str], got: list[str], on_disk: list[str]) -> Call:
        stop_at, lease_id = self._clock + TTL_S, self._id()
        store, checker = self._memory, self._stores.checker
        if store is None:
            return None
        leased = yield from self._ask(protocol.Lease(lease_id, list(keys), TTL_S))
        if not isinstance(leased, protocol.Leased):
            return None
        corrupt: list[tuple[int, int]] = []
        rows = zip(keys, leased.sizes, leased.entries, leased.offsets, leased.generations, leased.checksums, strict=True)
        for key, size, entry, offset, generation, checksum in rows:
            if size and not entry:
                on_disk.append(key)
            if not entry or store.generations[entry] != generation or self._clock >= stop_at:
                continue
            yield from self._copying(size // 2)
            value = bytes(store.memory[offset : offset + size // 2])
            yield from self._copying(size // 2)
            value += bytes(store.memory[offset + size // 2 : offset + size])
            if store.generations[entry] != generation or self._clock >= stop_at:
                continue
            if checksum and checksum_of(value) != checksum:
                corrupt.append((entry, generation))
            elif checksum or (entry, generation) not in store.flipped:
                checker.read_leased(store, self.name, lease_id, entry, value)
                got.append(key)
        self._notify(protocol.Release([lease_id], []))
        if corrupt:
            self._notify(protocol.ReportCorrupt([entry for entry, _ in corrupt], [generation for _, generation in corrupt]))
        return lease_id

    def _put_streamed(self, keys: Sequence[str], values: Sequence[bytes], pins: Pin) -> Call:
        """Put values as `client/streamed_copy.py` does."""
        pipe = yield from self._open()
        if pipe is None:
            return None
        self.putting = list(values)
        checksums = [checksum_of(value) for value in values]
        again = self._random.random() < 0.2
        if sum(map(len, values)) <= EAGER_BYTES and self._random.random() < 0.5:
            self._stores.stream(pipe, Put(list(keys), list(map(len, values)), int(pins), TTL_S, checksums, again), list(values))
        else:
            self._stores.stream(pipe, Put(list(keys), list(map(len, values)), int(pins), TTL_S, [], again), [])
            granted = yield from self._next(pipe)
            if granted is None:
                return None
            wanted = [index for index, code in enumerate(granted[0].codes) if code == 0]
            yield from self._copying(sum(len(values[index]) for index in wanted))
            self._stores.upload(pipe, [values[index] for index in wanted], [checksums[index] for index in wanted])
        ended = yield from self._next(pipe)
        return None if ended is None else ended[0].codes

    def _get_streamed(self, keys: Sequence[str]) -> Call:
        """Get values as `client/streamed_copy.py` does; return the keys that were got."""
        pipe = yield from self._open()
        if pipe is None:
            return []
        asked_at = self._now
        is_slow = not self._healed and self._random.random() < SLOW_READS
        pipe.dawdles_s = self._random.uniform(0.0, TIMEOUT_S) if is_slow else 0.0
        self._stores.stream(pipe, Get(list(keys), [], TTL_S * self._random.random() if is_slow else TTL_S), [])
        got: list[str] = []
        corrupt: list[str] = []
        left = list(keys)
        while left:
            came = yield from self._next(pipe)
            if came is None:
                return got
            answered, left = left[: len(came[0].sizes)], left[len(came[0].sizes) :]
            sent = [(key, checksum) for key, checksum in zip(answered, came[0].checksums, strict=True) if checksum]
            for (key, checksum), value in zip(sent, came[1], strict=True):
                if checksum_of(value) == checksum:
                    self._stores.checker.read_streamed(pipe, key, value, asked_at)
                    got.append(key)
                else:
                    corrupt.append(key)
        if corrupt:
            self._stores.stream(pipe, Recheck(corrupt), [])
        return got

    def _open(self) -> Call:
        """Return the client's stream, opened if need be, or None."""
        if self._pipe is not None and not self._pipe.cut and not self._pipe.over:
            return self._pipe
        store = self._memory
        if store is None or not store.is_running:
            return None
        self._pipe = store.attach(self, Attach(self.name, self._token))
        attached = yield from self._next(self._pipe)
        if attached is None or not isinstance(attached[0], Attached):
            self._memory = None
            return None
        return self._pipe

    def _next(self, pipe: Pipe) -> Call:
        """Return the next (message, payload) on the stream, or None; then the stream is of no use any more."""
        message, payload = yield Streamed(pipe)
        if message is None:
            self._hang_up()
            return None
        assert isinstance(message, Attached | Ended | Values | protocol.Stranger)
        return message, payload

    def _hang_up(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None and not pipe.cut:
            self._stores.hang_up(pipe)

    def _copying(self, size: int) -> Call:
        """Wait for a copy, which now and then takes much longer."""
        if not self._healed and self._random.random() < STOPS:
            self._stopped_until = self._now + self._random.uniform(0.1, 3.0)
        yield from self._maybe_dying()
        yield Sleep((COPY_S + size / BYTES_PER_S) * self._random.uniform(0.5, 1.5))


def clients_of(stores: Stores) -> list[StoreClient]:
    """Return two clients on each store's host, and two elsewhere."""
    simulator = stores.simulator
    clients: list[StoreClient] = []
    for name in stores.living:
        host = simulator.processes[name].spec.host
        others = [each for each in simulator.processes.values() if each.spec.host != host]
        for shared, user in CLIENTS:
            beside = name if shared else stores.random.choice(others).name
            number = len(clients) + 1
            random = Random(f"{stores.random.random()} of store client {number}")  # noqa: S311 (not for secrets)
            clients.append(StoreClient(stores, number, store=name, beside=beside, shared=shared, user=user, random=random))
    return clients
