"""A client of one or several stores: values at addresses in, values at addresses out, one code a key.

The first store on this host is home: it is asked first and written first. In a store on this host the client copies in the
mapped segment; with others it exchanges bytes on streams.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from mooncake_zmq.store import protocol
from mooncake_zmq.store.client import shared_copy, streamed_copy
from mooncake_zmq.store.client.batch import Batch, Place, Value, Wanted, chunks
from mooncake_zmq.store.client.link import ReplyT, Unreached
from mooncake_zmq.store.client.peer import Call, ClientSettings, Peer
from mooncake_zmq.store.codes import Code, Pin, is_key
from mooncake_zmq.store.protocol import MAX_KEYS, REMOVED_AT_ONCE
from mooncake_zmq.transfer import key_files
from mooncake_zmq.transfer.sockets import Sockets

log = structlog.get_logger()

UNREACHED = -900
"""The store did not answer, or was closed."""
ELSEWHERE = (UNREACHED, Code.NO_ROOM, Code.EXPIRED, Code.TRANSFER_FAILED)
"""Codes of a store for a copy that another store may take."""
CLOSE_S = 5.0
SEND_BYTES = 64 << 10
CHUNK_BYTES = 64 << 20
"""Bytes put or leased at a time: bounds what one call keeps others from evicting, and how long."""


@dataclass(frozen=True, slots=True)
class Hold:
    """The first `count` of some values can be read, and those in memory are not evicted before `until` (monotonic clock)."""

    count: int
    until: float
    leases: tuple[tuple[Peer, int], ...] = ()
    holders: tuple[str, ...] = ()
    """Names of the stores that have any of them."""
    found: tuple[bool, ...] = ()
    """For each value, those after the first `count` too, whether it can be read."""


class StoreClient:
    """Thread-safe. Methods answer codes and never raise for what a store or network does; see `Code` and UNREACHED."""

    def __init__(self, endpoints: Sequence[str], settings: ClientSettings | None = None) -> None:
        """Raises KeysError."""
        self.settings = settings = settings or ClientSettings()
        keys = key_files.load(Path(settings.keys), settings.key_name) if settings.keys else None
        self._sockets = Sockets(keys, allow_plain_tcp=settings.allow_plain_tcp, io_threads=settings.io_threads).borrow()
        self._peers = [Peer(endpoint, settings, self._sockets) for endpoint in endpoints]
        self._closed = False
        self._copies = Counter(short=0, short_no_room=0)
        """See `counts`; guarded by the lock, as is whether the lack of another host was logged."""
        self._logged_alone = False
        self._lock = threading.Lock()

    def connect(self) -> str | None:
        """Meet the stores; None if at least one answered, else the reason why not."""
        with ThreadPoolExecutor(len(self._peers)) as pool:
            met = dict(zip(self._peers, pool.map(self._meet, self._peers), strict=True))
        # Those whose memory we share first; the others in the order given.
        self._peers = sorted(self._peers, key=lambda peer: met[peer] != "shared")
        reasons = [f"{peer.endpoint}: {how}" for peer, how in met.items() if how not in ("shared", "streamed")]
        return "; ".join(reasons) if len(reasons) == len(met) else None

    def _meet(self, peer: Peer) -> str:
        """How we talk to this store, or why we do not."""
        try:
            session = peer.session(time.monotonic() + self.settings.setup_timeout_s)
        except Unreached as error:
            return str(error)
        return "shared" if session.segment is not None else "streamed"

    def home_name(self) -> str | None:
        """The name of the store that is asked and written first; None if it does not answer."""
        try:
            return self._peers[0].session(time.monotonic() + self.settings.timeout_s).welcome.name
        except Unreached:
            return None

    def close(self) -> None:
        """May be called twice. Later calls, and those under way, answer UNREACHED."""
        if not self._closed:
            self._closed = True
            deadline = time.monotonic() + CLOSE_S
            if all([peer.close(deadline) for peer in self._peers]):
                self._sockets.give_back()
            else:
                log.warning("store_close_incomplete", reason="a call is still copying")

    # --- what connectors call

    def put(
        self,
        keys: Sequence[str],
        values: Sequence[Value],
        pins: Pin = Pin.NONE,
        *,
        replicas: int = 1,
        preferred: Sequence[str] = (),
        distinct_hosts: bool = False,
    ) -> list[int]:
        """Store values; 0 also where the key has one already, which stays unless `pins` say UPSERT. Of several `replicas` the
        first is in the store at home, or one that is preferred, and the others are on other hosts while there are any;
        `distinct_hosts`: never two on one host. A store that does not answer or has no room is replaced by the next one. A
        value with fewer of them is stored all the same, and counted as `short`."""
        sizes = [sum(length for _, length in value) for value in values]
        codes = [UNREACHED if size > 0 and is_key(key) else int(Code.INVALID) for key, size in zip(keys, sizes, strict=True)]
        wanted = [index for index, code in enumerate(codes) if code == UNREACHED]
        stores = self._around() if replicas > 1 else self._peers
        if preferred:
            stores = sorted(stores, key=lambda peer: not self._is_named(peer, preferred))
        if distinct_hosts and replicas > 1:
            self._check_hosts()
        replaces = bool(pins & Pin.UPSERT)
        if len(stores) > 1 and replicas == 1 and not replaces:
            # A value that another store has is neither stored again nor changed, as if they were one.
            there = self._lookup([keys[index] for index in wanted], self._exist_at, 0)
            for index, found in zip(wanted, there, strict=True):
                codes[index] = 0 if found == 1 else codes[index]
            wanted = [index for index in wanted if codes[index]]
        made: dict[int, list[Peer]] = {index: [] for index in wanted}
        settled: Counter[int] = Counter()
        full: set[int] = set()
        for peer in stores:
            some = [
                index
                for index in wanted
                if settled[index] < replicas and not (distinct_hosts and any(peer.host == other.host for other in made[index]))
            ]
            for index, code in zip(some, self._put_at(peer, keys, values, sizes, pins, some), strict=True):
                codes[index] = code if code == 0 or codes[index] == UNREACHED else codes[index]
                if code == 0:
                    made[index].append(peer)
                elif code == Code.NO_ROOM:
                    full.add(index)
                settled[index] += code not in ELSEWHERE if replicas > 1 else code != UNREACHED
        self._count_copies(made, full, replicas)
        if replaces:
            for peer in stores:
                self._remove_at(peer, [keys[index] for index in wanted if made[index] and peer not in made[index]])
        return codes

    def _count_copies(self, made: Mapping[int, Sequence[Peer]], full: set[int], replicas: int) -> None:
        short = [index for index, peers in made.items() if 0 < len(peers) < replicas]
        if short:
            with self._lock:
                self._copies.update(short=len(short), short_no_room=len(full.intersection(short)))

    def fetch(
        self, keys: Sequence[str], place: Place, caps: Sequence[int] | None = None, first: Sequence[str] = ()
    ) -> list[int]:
        """Copy values to where `place` says; answers sizes or codes. `caps`: the largest size that each place takes. `first`:
        stores that may have them, see `hold`."""
        results = [int(Code.NOT_FOUND)] * len(keys)
        wanted = Wanted(keys, place, caps, results)
        left = [index for index, key in enumerate(keys) if is_key(key)]
        unasked = set(left)
        for peer in self._in_order(first):
            for chunk in chunks(left, caps, CHUNK_BYTES):
                try:
                    self._fetch_at(peer, chunk, wanted)
                except Unreached:
                    break
                unasked.difference_update(chunk)
            left = [index for index in left if results[index] == Code.NOT_FOUND]
            if not left:
                break
        for index in unasked.intersection(left):
            results[index] = UNREACHED
        return results

    def exist(self, keys: Sequence[str]) -> list[int]:
        """1, 0, or -1 where no store could be asked."""
        return self._lookup(keys, self._exist_at, 0)

    def sizes(self, keys: Sequence[str]) -> list[int]:
        """Sizes or codes."""
        answers = self._lookup(keys, self._sizes_at, int(Code.NOT_FOUND))
        return [UNREACHED if answer == -1 else answer for answer in answers]

    def hold(self, keys: Sequence[str], first: Sequence[str] = ()) -> Hold:
        """Lease what is in memory of the values under `keys`, for later readers: any client may read them. What is on disk
        alone counts too. `first`: stores that are asked next to home, before all others."""
        found = [False] * len(keys)
        until = time.monotonic() + self.settings.ttl_s
        leases: list[tuple[Peer, int]] = []
        holders: dict[str, None] = {}
        for peer in self._in_order(first):
            left = [index for index, there in enumerate(found) if not there and is_key(keys[index])]
            for chunk in chunks(left, None, CHUNK_BYTES):
                request = protocol.Lease(peer.next_id(), [keys[index] for index in chunk], self.settings.ttl_s)
                began = time.monotonic()
                try:
                    sizes, ttl_s = peer.call(partial(_lease, request))
                except Unreached:
                    break
                leases.append((peer, request.id))
                if any(sizes):
                    holders[peer.name] = None
                until = min(until, began + ttl_s)
                for index, size in zip(chunk, sizes, strict=True):
                    found[index] = size > 0
                if not any(sizes):  # nor will what follows be here
                    break
        count = found.index(False) if False in found else len(keys)
        return Hold(count, until, tuple(leases), tuple(holders), tuple(found))

    def release(self, hold: Hold) -> None:
        """The values may be evicted again; without this they may `until` the hold is over."""
        for peer in dict.fromkeys(peer for peer, _ in hold.leases):
            ids = [number for at, number in hold.leases if at is peer]
            with suppress(Unreached):
                peer.call(partial(_release, ids))

    @property
    def counts(self) -> dict[str, int]:
        """Counts of what failed in all stores together, see `Peer.counts`; `short`: values in fewer stores than asked for;
        `short_no_room`: those of them for which a store that answered had no room."""
        counts = {name: sum(peer.counts[name] for peer in self._peers) for name in ("corrupt", "stale", "expired")}
        with self._lock:
            return counts | self._copies

    def locate(self, keys: Sequence[str]) -> list[list[tuple[str, int]]]:
        """For each key the (store name, size) of its copies."""
        found: list[list[tuple[str, int]]] = [[] for _ in keys]
        valid = [index for index, key in enumerate(keys) if is_key(key)]
        for peer in self._peers:
            try:
                name = peer.session(time.monotonic() + self.settings.timeout_s).welcome.name
                for start in range(0, len(valid), MAX_KEYS):
                    some = valid[start : start + MAX_KEYS]
                    for index, size in zip(some, self._sizes_at(peer, [keys[i] for i in some]), strict=False):
                        if size > 0:
                            found[index].append((name, size))
            except Unreached:
                continue
        return found

    def remove(self, keys: Sequence[str], named: str = "") -> list[int]:
        """0 or a code a key: every store forgets it, or the one of that name."""
        valid = [index for index, key in enumerate(keys) if is_key(key)]
        codes = [int(Code.NOT_FOUND)] * len(keys)
        for index in valid:
            codes[index] = UNREACHED
        for peer in self._peers if not named else [peer for peer in self._peers if self._is_named(peer, [named])]:
            for index, code in zip(valid, self._remove_at(peer, [keys[index] for index in valid]), strict=True):
                codes[index] = max(codes[index], code)  # 0 once any store had it, else NOT_FOUND once any was asked
        return codes

    def remove_all(self) -> int:
        """How many copies went, or UNREACHED where no store answered."""
        counts: list[int] = []
        for peer in self._peers:
            while (answer := self._ask(peer, protocol.RemoveAll(peer.next_id()), protocol.Numbers)) is not None:
                counts += answer.numbers
                if answer.numbers != [REMOVED_AT_ONCE]:
                    break
        return sum(counts) if counts else UNREACHED

    def list_keys(self) -> Iterator[str]:
        """Every readable key of every store, page by page; what changes meanwhile may or may not be seen."""
        for peer in self._peers:
            cursor = 0
            while True:
                page = self._ask(peer, protocol.ListKeys(peer.next_id(), cursor, MAX_KEYS), protocol.KeysListed)
                if page is None:
                    break
                yield from page.keys
                cursor = page.cursor
                if cursor == 0:
                    break

    # --- one store

    def _around(self) -> list[Peer]:
        """Return home, the stores of other hosts, from the one whose name comes next, so that hosts spread their second copies,
        then others of its own host, and last those that never answered."""
        for peer in self._peers:
            if not peer.name:
                with suppress(Unreached):
                    peer.session(time.monotonic() + self.settings.timeout_s)
        home, *others = self._peers
        return [
            home,
            *sorted(
                others,
                key=lambda peer: (not peer.name, peer.host == home.host, peer.name < home.name, peer.name),
            ),
        ]

    def _check_hosts(self) -> None:
        """Log once if all stores are on one host, so that each value has one copy however many are wanted."""
        if all(peer.name for peer in self._peers) and len({peer.host for peer in self._peers}) == 1:
            with self._lock:
                logged, self._logged_alone = self._logged_alone, True
            if not logged:
                log.warning("store_one_host", stores=[peer.endpoint for peer in self._peers], copies=1)

    def _in_order(self, first: Sequence[str]) -> list[Peer]:
        """Home, then the stores of these names, then the others. One that was never met has no name yet."""
        if not first:
            return self._peers
        home, *others = self._peers
        return [home, *sorted(others, key=lambda peer: first.index(peer.name) if peer.name in first else len(first))]

    def _is_named(self, peer: Peer, names: Sequence[str]) -> bool:
        try:
            return peer.session(time.monotonic() + self.settings.timeout_s).welcome.name in names
        except Unreached:
            return False

    def _ask(self, peer: Peer, request: protocol.Identified, expected: type[ReplyT]) -> ReplyT | None:
        try:
            return peer.call(lambda call: call.link.ask(request, expected, call.deadline))
        except Unreached:
            return None

    def _remove_at(self, peer: Peer, keys: Sequence[str]) -> list[int]:
        codes: list[int] = []
        for start in range(0, len(keys), MAX_KEYS):
            some = list(keys[start : start + MAX_KEYS])
            answer = self._ask(peer, protocol.Remove(peer.next_id(), some), protocol.Numbers)
            if answer is not None and len(answer.numbers) == len(some):
                codes += answer.numbers
            else:
                peer.owe(some)
                codes += [UNREACHED] * len(some)
        return codes

    def _lookup(self, keys: Sequence[str], ask: Callable[[Peer, list[str]], list[int]], nothing: int) -> list[int]:
        """Ask store after store for what none before had; -1 where none answered."""
        joined = "".join(keys)
        if joined.isascii() and len(joined) < protocol.MAX_FRAME_BYTES // 2:
            answers = [-1] * len(keys)
        else:  # with a key that cannot be stored, and so need not be sent
            answers = [-1 if is_key(key) else nothing for key in keys]
        for number, peer in enumerate(self._peers):
            left = [index for index, answer in enumerate(answers) if answer == -1 or (number and answer == nothing)]
            for start in range(0, len(left), MAX_KEYS):
                some = left[start : start + MAX_KEYS]
                try:
                    found = ask(peer, [keys[index] for index in some])
                except Unreached:
                    continue
                for index, answer in zip(some, found, strict=False):
                    answers[index] = answer
        return answers

    def _exist_at(self, peer: Peer, keys: list[str]) -> list[int]:
        request = protocol.Exist(peer.next_id(), keys)
        return peer.call(lambda call: list(call.link.ask(request, protocol.Codes, call.deadline).codes))

    def _sizes_at(self, peer: Peer, keys: list[str]) -> list[int]:
        request = protocol.SizesOf(peer.next_id(), keys)
        return peer.call(lambda call: call.link.ask(request, protocol.Numbers, call.deadline).numbers)

    def _put_at(
        self, peer: Peer, keys: Sequence[str], values: Sequence[Value], sizes: Sequence[int], pins: Pin, wanted: list[int]
    ) -> list[int]:
        """One code for each index in `wanted`."""
        codes: list[int] = []
        for chunk in chunks(wanted, sizes, CHUNK_BYTES):
            batch = Batch([keys[i] for i in chunk], [values[i] for i in chunk], [sizes[i] for i in chunk], pins)
            try:
                codes += peer.call(partial(_put, batch))
            except Unreached:
                codes += [UNREACHED] * len(chunk)
        return [0 if code == Code.EXISTS else code for code in codes]

    def _fetch_at(self, peer: Peer, indexes: Sequence[int], wanted: Wanted) -> None:
        """Fill in the results for `indexes`; NOT_FOUND stays where the store has nothing good. Raises Unreached."""

        def work(call: Call) -> None:
            if call.session.segment is not None:
                shared_copy.read(call, call.session.segment, indexes, wanted)
            else:
                streamed_copy.read(call, indexes, wanted)

        peer.call(work)


def _lease(request: protocol.Lease, call: Call) -> tuple[list[int], float]:
    """Sizes, 0 where nothing is, and how long those in memory stay there."""
    leased = call.ask(request, protocol.Leased)
    if len(leased.sizes) != len(request.keys):
        raise Unreached(f"{len(leased.sizes)} sizes for {len(request.keys)} keys")
    return leased.sizes, call.session.ttl_s


def _release(ids: list[int], call: Call) -> None:
    call.send_note(protocol.Release(ids, []))


def _put(batch: Batch, call: Call) -> list[int]:
    most = call.session.welcome.max_object_bytes
    if max(batch.sizes) > most:
        log.warning("store_value_too_large", size=max(batch.sizes), largest=most, reason="the store's slab_bytes")
    # One small value is sooner sent along with the request than written between two of them.
    if call.session.segment is not None and (len(batch.keys) > 1 or batch.sizes[0] > SEND_BYTES):
        return shared_copy.put(call, call.session.segment, batch)
    return streamed_copy.put(call, batch)
