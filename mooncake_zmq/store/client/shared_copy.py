"""Puts and reads of a store on this host: its server names the cells, we copy in the segment that both map.

A lease or put is good for `ttl_s` from when it was *sent*, and a cell read is good if its generation still stands afterwards.
What the server names is held against the segment before any of it is touched: one that names something else is not a store.
"""

import time
from collections.abc import Sequence

import structlog

from mooncake_zmq.store import protocol
from mooncake_zmq.store.client.batch import Batch, Wanted, chunks, commit
from mooncake_zmq.store.client.link import Unreached
from mooncake_zmq.store.client.peer import Call
from mooncake_zmq.store.codes import Code
from mooncake_zmq.store.memory import gather, scatter
from mooncake_zmq.store.segment import ObjectSegment
from mooncake_zmq.store.stream_messages import Promote, decode_ended, promoted_bytes

log = structlog.get_logger()

PROMOTIONS = 2


def put(call: Call, segment: ObjectSegment, batch: Batch) -> list[int]:
    """A code a key; EXISTS where nothing was written."""
    put_id = call.peer.next_id()
    try:
        return _put(call, segment, put_id, batch)
    except BaseException:
        call.peer.abandon(put_id)
        raise


def _put(call: Call, segment: ObjectSegment, put_id: int, batch: Batch) -> list[int]:
    stop_at = time.monotonic() + call.session.ttl_s
    reserve = protocol.Reserve(put_id, batch.keys, batch.sizes, batch.pins, call.session.ttl_s)
    reserved = call.ask(reserve, protocol.Reserved)
    _check_rows(len(batch.keys), reserved.codes, reserved.offsets)
    for code, offset, size in zip(reserved.codes, reserved.offsets, batch.sizes, strict=True):
        if code == 0:
            _check_cell(segment, offset, size)
    indexes: list[int] = []
    checksums: list[int] = []
    for index, (code, offset) in enumerate(zip(reserved.codes, reserved.offsets, strict=True)):
        if code == 0 and time.monotonic() < stop_at:
            hashed = call.peer.settings.checksum_local
            checksum = gather(batch.values[index], segment.address + offset, batch.sizes[index], hashed=hashed)
            if time.monotonic() < stop_at:
                indexes.append(index)
                checksums.append(checksum)
    return commit(call, put_id, reserved.codes, indexes, checksums)


def read(call: Call, segment: ObjectSegment, indexes: Sequence[int], wanted: Wanted) -> None:
    """Fill in the results for `indexes`; what is not here, or not good, stays NOT_FOUND."""
    for index in indexes:  # of a try before this one, over whose bytes this one may copy what does not verify
        wanted.results[index] = Code.NOT_FOUND
    lease_id, on_disk = _read(call, segment, indexes, wanted)
    for chunk in chunks(on_disk, on_disk, promoted_bytes(call.session.welcome.memory_bytes)):
        # One pass more for what came into memory and went again before it was leased.
        for _ in range(PROMOTIONS):
            if chunk:
                stream = call.stream()
                stream.send(Promote([wanted.keys[index] for index in chunk], [lease_id]))
                stream.receive(decode_ended)
                lease_id, left = _read(call, segment, chunk, wanted)
                chunk = list(left)


def _read(call: Call, segment: ObjectSegment, indexes: Sequence[int], wanted: Wanted) -> tuple[int, dict[int, int]]:
    """Copy what is in memory. The lease for it, which is over, and by index the sizes of what is on disk and fits its place."""
    on_disk: dict[int, int] = {}
    stop_at = time.monotonic() + call.session.ttl_s
    request = protocol.Lease(call.peer.next_id(), [wanted.keys[index] for index in indexes], call.session.ttl_s)
    leased = call.ask(request, protocol.Leased)
    columns = (leased.sizes, leased.entries, leased.offsets, leased.generations, leased.checksums)
    _check_rows(len(indexes), *columns)
    for size, entry, offset in zip(leased.sizes, leased.entries, leased.offsets, strict=True):
        if size and entry:
            _check_cell(segment, offset, size, entry)
    generations = segment.generations
    corrupt: list[tuple[int, int]] = []
    rows = zip(indexes, *columns, strict=True)
    try:
        for index, size, entry, offset, generation, expected in rows:
            if size == 0:
                continue
            if entry == 0:
                if wanted.caps is None or size <= wanted.caps[index]:
                    on_disk[index] = size
                else:
                    wanted.results[index] = Code.INVALID
                continue
            spans = wanted.place(index, size)
            if spans is None:
                wanted.results[index] = Code.INVALID
                continue
            if generations[entry] != generation or time.monotonic() >= stop_at:
                call.peer.counts["stale"] += 1
                continue
            hashed = expected != 0 and call.peer.settings.verify_local
            found = scatter(segment.address + offset, size, spans, hashed=hashed)
            if generations[entry] != generation or time.monotonic() >= stop_at:
                call.peer.counts["stale"] += 1
            elif hashed and found != expected:
                call.peer.counts["corrupt"] += 1
                corrupt.append((entry, generation))
                log.warning("store_value_corrupt", store=call.peer.endpoint, size=size)
            else:
                wanted.results[index] = size
    finally:
        if any(leased.entries):
            call.send_note(protocol.Release([request.id], []))
        if corrupt:
            call.send_note(protocol.ReportCorrupt([entry for entry, _ in corrupt], [generation for _, generation in corrupt]))
    return request.id, on_disk


def _check_rows(count: int, *columns: Sequence[int]) -> None:
    if any(len(column) != count for column in columns):
        raise Unreached(f"{[len(column) for column in columns]} rows for {count} keys")


def _check_cell(segment: ObjectSegment, offset: int, size: int, entry: int = 0) -> None:
    """Raise Unreached unless the segment has this entry, and these bytes."""
    if entry >= len(segment.generations) or offset + size > segment.memory_bytes:
        raise Unreached(f"{size} bytes at {offset} under entry {entry} are outside of the store's memory")
