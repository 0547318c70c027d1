"""Puts and reads of a store that we share no memory with: payload frames of at most one piece, a window of them under way."""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from mooncake_zmq.cache_node.objects import Code
from mooncake_zmq.store import protocol
from mooncake_zmq.store.batch import Batch, Value, Wanted, commit
from mooncake_zmq.store.link import Unreached
from mooncake_zmq.store.memory import Checksum, address_of, checksum_of, cut, gather, new_bytes, read_view, scatter, write_view
from mooncake_zmq.store.peer import Call
from mooncake_zmq.store.protocol import MAX_OUTSTANDING, PIECE_BYTES

log = structlog.get_logger()

WINDOW_BYTES = 8 * PIECE_BYTES
"""Payload under way in one call: keeps 10 GB/s going over a round trip of 0.8 ms. Twice as much measured no faster."""


_Range = tuple[int, int, int, int]
"""(index of the key, offset, length, generation or 0) to ask for."""


def put(call: Call, put_id: int, batch: Batch) -> list[int]:
    """A code a key; EXISTS where nothing was written. The values are sent from where they are, and free when this returns;
    if it raises, when the connection is closed."""
    codes = [0] * len(batch.keys)
    small = [index for index, size in enumerate(batch.sizes) if size <= PIECE_BYTES]
    _write_small(call, batch, small, codes)
    large = [index for index, size in enumerate(batch.sizes) if size > PIECE_BYTES]
    if large:
        _write_large(call, put_id, batch, large, codes)
    call.link.settle(time.monotonic() + call.peer.settings.timeout_s)
    return codes


def _write_large(call: Call, put_id: int, batch: Batch, large: list[int], codes: list[int]) -> None:
    """Values of several pieces: reserved, sent piece by piece, and committed together. One is sent while the next is hashed."""
    reserve = protocol.Reserve(
        put_id, [batch.keys[i] for i in large], [batch.sizes[i] for i in large], batch.pins, call.session.ttl_s
    )
    stop_at = time.monotonic() + call.session.ttl_s
    granted = call.link.ask(reserve, protocol.Reserved, time.monotonic() + call.peer.settings.timeout_s).codes
    indexes: list[int] = []
    checksums: list[int] = []
    for row, index in enumerate(large):
        if granted[row] != 0 or time.monotonic() >= stop_at:
            continue
        checksum = Checksum()
        for start in range(0, batch.sizes[index], PIECE_BYTES):
            piece = _piece(batch.values[index], start, min(PIECE_BYTES, batch.sizes[index] - start))
            checksum.update(piece)
            call.link.send(protocol.WritePiece(put_id, row, start), time.monotonic() + call.peer.settings.timeout_s, piece)
        indexes.append(row)
        checksums.append(checksum.value())
    for row, code in enumerate(commit(call, put_id, granted, indexes, checksums)):
        codes[large[row]] = code


def read(call: Call, indexes: Sequence[int], wanted: Wanted) -> None:
    """Fill in the results for `indexes`; what is not there, or not good, stays NOT_FOUND."""
    reading = _Reading(call, wanted)
    reading.run(deque(zip(indexes, itertools.repeat(0), _first_pieces(call, indexes, wanted), itertools.repeat(0))))


@dataclass(slots=True)
class _Arriving:
    """A value of which the first piece has come."""

    spans: Value
    part: protocol.Part
    checksum: Checksum = field(default_factory=Checksum)
    done: int = 0


class _Reading:
    """Values piece by piece, each one's in order, a window of pieces under way. One that changes meanwhile is missed."""

    def __init__(self, call: Call, wanted: Wanted) -> None:
        self._call = call
        self._wanted = wanted
        self._id = call.peer.next_id()
        self._deadline = call.deadline
        self._arriving: dict[int, _Arriving] = {}
        self._ended: set[int] = set()
        self._tokens = itertools.count()
        self._under_way: dict[int, _Range] = {}
        self._under_way_bytes = 0

    def run(self, todo: deque[_Range]) -> None:
        """Raises Unreached or Forgotten."""
        while todo or self._under_way:
            if todo and self._under_way_bytes <= WINDOW_BYTES // 2 and len(self._under_way) <= MAX_OUTSTANDING // 2:
                self._ask(todo)
            else:
                self._receive(todo)

    def _ask(self, todo: deque[_Range]) -> None:
        rows = []
        while todo and self._under_way_bytes < WINDOW_BYTES and len(self._under_way) < MAX_OUTSTANDING:
            index, offset, length, generation = todo.popleft()
            if index not in self._ended:
                token = next(self._tokens)
                self._under_way[token] = (index, offset, length, generation)
                self._under_way_bytes += length
                rows.append((token, self._wanted.keys[index], offset, length, generation))
        if rows:
            self._call.link.send(protocol.Read(self._id, *map(list, zip(*rows, strict=True))), self._deadline)

    def _receive(self, todo: deque[_Range]) -> None:
        link = self._call.link
        part = link.receive(self._deadline)
        if not isinstance(part, protocol.Part) or part.id != self._id or part.token not in self._under_way:
            raise Unreached(f"{type(part).__name__} in answer to Read")
        self._deadline = time.monotonic() + self._call.peer.settings.timeout_s
        index, offset, length, _ = self._under_way.pop(part.token)
        self._under_way_bytes -= length
        value = self._value(todo, index, offset, length, part)
        if value is None or not self._take(value, offset, min(length, part.size - offset)):
            self._ended.add(index)
            if link.more():
                link.socket.recv(copy=False)
        elif value.done == part.size:
            self._end(index, value)

    def _value(self, todo: deque[_Range], index: int, offset: int, length: int, part: protocol.Part) -> _Arriving | None:
        """What this part belongs to; at a value's first one the others are asked for. None if it is of no use."""
        if index in self._ended or part.size == 0:
            self._call.peer.counts["stale"] += offset > 0 and index not in self._ended
            return None
        if offset:
            value = self._arriving.get(index)
            return value if value is not None and part.generation == value.part.generation else None
        spans = self._wanted.place(index, part.size)
        if spans is None:
            self._wanted.results[index] = Code.INVALID
            return None
        self._arriving[index] = value = _Arriving(spans, part)
        for start in range((part.size - 1) // PIECE_BYTES * PIECE_BYTES, length - 1, -PIECE_BYTES):
            todo.appendleft((index, start, min(PIECE_BYTES, part.size - start), part.generation))
        return value

    def _take(self, value: _Arriving, offset: int, size: int) -> bool:
        """Receive the payload to its place; False if it is not of this size."""
        link = self._call.link
        spans = cut(value.spans, offset, size)
        if not link.more():
            return False
        if len(spans) == 1:
            place = write_view(*spans[0])
            if link.socket.recv_into(place) != size:
                return False
            value.checksum.update(place)
        else:
            payload = link.socket.recv(copy=False).buffer
            if len(payload) != size:
                return False
            scatter(address_of(payload), size, spans, value.checksum)
        value.done += size
        return True

    def _end(self, index: int, value: _Arriving) -> None:
        """All is here: does it verify?"""
        self._ended.add(index)
        del self._arriving[index]
        if value.checksum.value() == value.part.checksum:
            self._wanted.results[index] = value.part.size
        else:
            self._call.peer.counts["corrupt"] += 1
            log.warning("store_value_corrupt", store=self._call.peer.endpoint, size=value.part.size)


def _first_pieces(call: Call, indexes: Sequence[int], wanted: Wanted) -> list[int]:
    """How much to ask of each value before its size is known; of many small ones more are then under way."""
    if wanted.caps is not None:
        sizes = [wanted.caps[index] for index in indexes]
    elif len(indexes) <= WINDOW_BYTES // PIECE_BYTES:
        sizes = [PIECE_BYTES] * len(indexes)
    else:
        request = protocol.SizesOf(call.peer.next_id(), [wanted.keys[index] for index in indexes])
        sizes = call.link.ask(request, protocol.Numbers, call.deadline).numbers
    return [min(PIECE_BYTES, max(1, size)) for size in sizes]


def _write_small(call: Call, batch: Batch, wanted: list[int], codes: list[int]) -> None:
    """Values of one piece: each a message of its own, a window of them under way."""
    under_way: dict[int, int] = {}
    under_way_bytes = 0
    todo = deque(wanted)
    while todo or under_way:
        deadline = time.monotonic() + call.peer.settings.timeout_s
        if todo and under_way_bytes < WINDOW_BYTES and len(under_way) < MAX_OUTSTANDING:
            index = todo.popleft()
            size = batch.sizes[index]
            piece = _piece(batch.values[index], 0, size)
            request = protocol.Write(call.peer.next_id(), batch.keys[index], size, checksum_of(piece), batch.pins)
            call.link.send(request, deadline, piece)
            under_way[request.id] = index
            under_way_bytes += size
            continue
        reply = call.link.receive(deadline)
        if not isinstance(reply, protocol.Numbers) or len(reply.numbers) != 1 or reply.id not in under_way:
            raise Unreached(f"{type(reply).__name__} in answer to Write")
        index = under_way.pop(reply.id)
        under_way_bytes -= batch.sizes[index]
        codes[index] = reply.numbers[0]


def _piece(value: Value, start: int, size: int) -> memoryview:
    """Bytes `[start, start + size)` of a value in one place: where they are, or gathered in memory of their own."""
    spans = cut(value, start, size)
    if len(spans) == 1:
        return read_view(*spans[0])
    gathered = new_bytes(size)
    gather(spans, address_of(gathered), size, None)
    return memoryview(gathered)
