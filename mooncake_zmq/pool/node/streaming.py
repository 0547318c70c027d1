"""Gets, puts and promotions over the streams of a store's clients, each stream one at a time. PURE.

Values leave straight from their cells, under a lease, and arrive straight in cells of a put. The thread that serves a stream is
a writer like a client of this host: a put past its time keeps its cells until the stream has let go of them. So do values that
leave: a client that reads slowly would get what others put there next. One that is slower than it may be loses its stream.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from mooncake_zmq.pool.node.store_events import Dismiss, MakeChecksums, ReceiveValues, SendValues, Serve, Turn
from mooncake_zmq.pool.node.tiers import Tiers
from mooncake_zmq.pool.rules.changes import Change, Changes, replaced
from mooncake_zmq.pool.rules.entries import Found
from mooncake_zmq.pool.rules.holders import Grant
from mooncake_zmq.pool.rules.objects import Objects
from mooncake_zmq.pool.rules.tenants import Reach
from mooncake_zmq.store.codes import Code, Pin
from mooncake_zmq.store.stream_messages import EAGER_BYTES, Attached, Ended, Get, Promote, Put, Recheck, Request, promoted_bytes

LEAST_BYTES_PER_S = 16 << 20
"""The slowest rate at which a client may take bytes, once the time that it asked for is over."""


@dataclass(slots=True)
class _Get:
    """`caps`: none if all sizes are welcome. `next`: the first key not answered yet. Of those being answered: what is
    `leased`, and the sizes that are `sizes`."""

    keys: Sequence[str]
    caps: Sequence[int]
    ttl_s: float
    leases: list[int]
    leased: list[Found | None]
    sizes: list[int]
    next: int = 0
    missing: Sequence[int] = ()
    """Which of them are on disk only, and wanted."""


@dataclass(slots=True)
class _Put:
    """`coming`: the indexes of the values that are sent. `is_over`: its bytes are there, and it is or will be committed."""

    put_id: int
    grants: Sequence[Grant]
    coming: Sequence[int]
    whole: dict[int, int] = field(default_factory=dict)
    """The checksum of each value, by index, that came as it was sent."""
    is_over: bool = False


@dataclass(slots=True)
class _Recheck:
    found: Sequence[Found]


@dataclass(slots=True)
class _Stream:
    """`doing`: None while it waits for a request. `reach`: of its client, None for everything."""

    client: bytes
    reach: Reach | None = None
    doing: _Get | _Put | _Recheck | Promote | None = None


class Streaming:
    """The streams' half of a store's actor: the node calls it within its turns."""

    def __init__(self, turn: Turn, objects: Objects, changes: Changes, tiers: Tiers | None) -> None:
        self.counts = {"corrupt_writes": 0}
        self._open: dict[int, _Stream] = {}
        self._turn = turn
        self._objects = objects
        self._changes = changes
        self._tiers = tiers
        self._ids = itertools.count(1)

    def begin(self, stream: int, client: bytes, reach: Reach | None = None) -> None:
        """A client's stream. `reach`: the keys that it may use, None for all."""
        self._open[stream] = _Stream(client, reach)
        self._turn.effects.append(Serve(stream, Attached()))

    def end(self, stream: int) -> bytes | None:
        """The stream is over; whose it was, if anybody's."""
        over = self._open.pop(stream, None)
        if over is None:
            return None
        match over.doing:
            case _Get(leases=leases):
                self._release(over.client, leases)
            case _Put(put_id=put_id, is_over=False):
                self._objects.puts.commit(self._turn.now, over.client, put_id, (), ())
        return over.client

    def asked(self, number: int, request: Request) -> None:
        """The next request of a stream."""
        stream = self._open[number]
        assert stream.doing is None, "one request after the other"
        if stream.reach is not None:
            request = _narrowed(request, stream.reach)
        match request:
            case Get(keys, caps, ttl_s):
                if caps and len(caps) != len(keys):
                    self._refuse(number, "as many caps as keys")
                    return
                stream.doing = _Get(keys, caps, ttl_s, [], [], [])
                self._get(number, stream)
            case Put():
                self._put(number, stream, request)
            case Recheck(keys):
                found = [one for key in keys if (one := self._objects.entries.find(key)) is not None and one.checksum]
                stream.doing = _Recheck(found)
                self._turn.effects.append(MakeChecksums(number, found))
            case Promote(keys, leases):
                self._release(stream.client, leases)
                stream.doing = request
                if self._tiers is None:
                    self.promoted(number)
                else:
                    self._tiers.promote(keys, number)

    def sent(self, number: int) -> None:
        """The requested values have been sent."""
        stream = self._open[number]
        assert isinstance(stream.doing, _Get)
        self._release(stream.client, stream.doing.leases)
        stream.doing.leases = []
        self._get(number, stream)

    def promoted(self, number: int) -> None:
        """The values that this stream needed from disk are in memory, as far as they fit."""
        stream = self._open.get(number)
        if stream is None:
            return
        get = stream.doing
        if not isinstance(get, _Get):
            assert isinstance(get, Promote)
            self._say(number, stream, Ended([]))
            return
        start = get.next - len(get.leased)
        came = self._lease(stream.client, get, [get.keys[start + index] for index in get.missing])
        for index, found in zip(get.missing, came, strict=True):
            get.leased[index], get.sizes[index] = found, found.size if found is not None else 0
        self._send(number, get)

    def checksums_made(self, number: int, checksums: Sequence[int]) -> None:
        """Checksums of values that had none, or that were to be verified again."""
        stream = self._open[number]
        match stream.doing:
            case _Recheck(found):
                for looked_at, checksum in zip(found, checksums, strict=True):
                    if checksum != looked_at.checksum:  # unless its cell serves another value by now
                        self._objects.entries.report_corrupt(looked_at.entry, looked_at.generation)
                stream.doing = None
                self._turn.effects.append(Serve(number))
            case _Get() as get:
                made = iter(checksums)
                for index, one in enumerate(_fitting(get)):
                    if one is not None and not one.checksum:
                        checksum = next(made)
                        if self._objects.entries.set_checksum(one, checksum):
                            get.leased[index] = one._replace(checksum=checksum)
                        else:
                            get.leased[index], get.sizes[index] = None, 0
                self._send(number, get)

    def came(self, number: int, sent: Sequence[int], made: Sequence[int]) -> None:
        """The bytes of a put are in their cells."""
        stream = self._open[number]
        put = stream.doing
        assert isinstance(put, _Put)
        if len(sent) != len(made):
            self._refuse(number, f"{len(sent)} checksums for {len(made)} values")
            return
        for index, expected, arrived in zip(put.coming, sent, made, strict=True):
            if put.grants[index].code is Code.OK:
                if expected == arrived:
                    put.whole[index] = arrived
                else:
                    self.counts["corrupt_writes"] += 1
        put.is_over = True
        change = Change(
            lambda: replaced(self._objects, self._turn.now, stream.client, put.put_id, put.whole),
            lambda _: self._commit(number, stream, put),
        )
        if not self._changes.begin(change):
            self._objects.puts.commit(self._turn.now, stream.client, put.put_id, (), ())
            self._turn.effects.append(Dismiss(number, "too much waits for the disk"))

    def check(self) -> None:
        """Assert the invariants. Slow: for tests."""
        for number, stream in self._open.items():
            assert not (isinstance(stream.doing, _Get) and not stream.doing.leases), f"stream {number} gets nothing"

    # --- inside

    def _get(self, number: int, stream: _Stream) -> None:
        """Answer the next keys: all, if nothing has to be read from disk."""
        get = stream.doing
        assert isinstance(get, _Get)
        if get.next == len(get.keys):
            stream.doing = None
            self._turn.effects.append(Serve(number))
            return
        objects, tiers = self._objects, self._tiers
        keys = get.keys[get.next :] if get.next else get.keys
        if tiers is not None:
            keys = keys[: _reach(objects, keys, get.caps[get.next :])]
        get.leased = self._lease(stream.client, get, keys)
        get.sizes = [one.size if one else objects.size_on_disk(key) or 0 for key, one in zip(keys, get.leased, strict=True)]
        get.next += len(keys)
        get.missing = _missing(get) if tiers is not None else ()
        if tiers is not None and get.missing:
            tiers.promote([keys[index] for index in get.missing], number)
        else:
            self._send(number, get)

    def _lease(self, client: bytes, get: _Get, keys: Sequence[str]) -> list[Found | None]:
        lease_id = -next(self._ids)  # no message of a client can name it
        get.leases.append(lease_id)
        return self._objects.lease(self._turn.now, client, lease_id, keys, None)

    def _send(self, number: int, get: _Get) -> None:
        """Send the values; all that leave the host carry a checksum: their writer's, or one computed now."""
        fitting = _fitting(get)
        checksums = [0 if one is None else one.checksum for one in fitting]
        sent = [one for one in fitting if one is not None]
        if 0 in checksums and (unchecked := [one for one in sent if not one.checksum]):
            self._turn.effects.append(MakeChecksums(number, unchecked))
        else:
            asked_s = min(get.ttl_s, self._objects.settings.max_ttl_s)
            within_s = asked_s + sum(one.size for one in sent) / LEAST_BYTES_PER_S
            self._turn.effects.append(SendValues(number, get.sizes, checksums, sent, within_s))

    def _put(self, number: int, stream: _Stream, put: Put) -> None:
        sizes, checksums = put.sizes, put.checksums
        if len(sizes) != len(put.keys) or len(checksums) not in (0, len(sizes)) or not all(sizes):
            self._refuse(number, "a put needs a size for each key, and a checksum for each or for none")
            return
        if checksums and sum(sizes) > EAGER_BYTES:
            self._refuse(number, f"{sum(sizes)} bytes unasked")
            return
        if put.again:
            self._objects.puts.supersede(stream.client, put.keys)
        put_id, pins = -next(self._ids), Pin(put.pins)
        grants = self._objects.puts.reserve(self._turn.now, stream.client, put_id, put.keys, sizes, pins=pins, ttl_s=put.ttl_s)
        granted = [index for index, grant in enumerate(grants) if grant.code is Code.OK]
        coming = list(range(len(grants))) if checksums else granted
        stream.doing = _Put(put_id, grants, coming)
        self._turn.effects.append(
            ReceiveValues(
                number,
                [sizes[index] for index in coming],
                [grants[index].offset if grants[index].code is Code.OK else -1 for index in coming],
                None if checksums else [int(grant.code) for grant in grants],
                checksums or None,
                min(put.ttl_s, self._objects.settings.max_ttl_s),
            )
        )

    def _commit(self, number: int, stream: _Stream, put: _Put) -> None:
        ended = self._objects.puts.commit(self._turn.now, stream.client, put.put_id, list(put.whole), list(put.whole.values()))
        codes = [int(code) for code in ended or (grant.code for grant in put.grants)]
        for index, grant in enumerate(put.grants):
            if grant.code is Code.OK and index not in put.whole:
                codes[index] = Code.TRANSFER_FAILED
        if self._open.get(number) is stream:
            self._say(number, stream, Ended(codes))

    def _say(self, number: int, stream: _Stream, message: Ended) -> None:
        stream.doing = None
        self._turn.effects.append(Serve(number, message))

    def _refuse(self, number: int, reason: str) -> None:
        self._turn.effects.append(Dismiss(number, reason, garbage=True))

    def _release(self, client: bytes, leases: Sequence[int]) -> None:
        for lease_id in leases:
            self._objects.holders.release(client, lease_id)


def _narrowed(request: Request, reach: Reach) -> Request:
    """As if what is outside of the client's reach were not there."""
    keys = reach.writable(request.keys) if isinstance(request, Put) else reach.readable(request.keys)
    return structs.replace(request, keys=keys)


def _fitting(get: _Get) -> list[Found | None]:
    """The leased values for which the client has room."""
    if not get.caps:
        return get.leased
    caps = get.caps[get.next - len(get.leased) :]
    return [one if one is not None and one.size <= cap else None for one, cap in zip(get.leased, caps, strict=False)]


def _missing(get: _Get) -> list[int]:
    """Which of the keys being answered are on disk only, and fit."""
    caps = get.caps[get.next - len(get.leased) : get.next] or itertools.repeat(math.inf)
    rows = enumerate(zip(get.leased, get.sizes, caps, strict=False))
    return [index for index, (one, size, cap) in rows if one is None and 0 < size <= cap]


def _reach(objects: Objects, keys: Sequence[str], caps: Sequence[int]) -> int:
    """How many keys can be answered at once: all, or where some are on disk only, as many as may take up memory together."""
    if all(map(objects.by_key.__contains__, keys)):
        return len(keys)
    limit_bytes = promoted_bytes(objects.settings.object_bytes)
    total = 0
    reads = False
    for index, (key, cap) in enumerate(zip(keys, caps or itertools.repeat(math.inf), strict=False)):
        size = objects.size_of(key) or 0
        total += size if size <= cap else 0
        reads = reads or (key not in objects.by_key and 0 < size <= cap)
        if index and reads and total > limit_bytes:
            return index
    return len(keys)
