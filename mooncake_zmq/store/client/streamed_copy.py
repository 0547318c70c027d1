"""Puts and reads of a store that we share no memory with: bytes go straight between its cells and an application's memory."""

import contextlib
from collections.abc import Sequence

import structlog

from mooncake_zmq.store.client.batch import Batch, Value, Wanted
from mooncake_zmq.store.client.link import Unreached
from mooncake_zmq.store.client.peer import Call
from mooncake_zmq.store.codes import Code
from mooncake_zmq.store.memory import checksum_of, cut, read_view, write_view
from mooncake_zmq.store.stream import receive_values, send_values
from mooncake_zmq.store.stream_messages import EAGER_BYTES, Checksums, Get, Put, Recheck, decode_ended, decode_values
from mooncake_zmq.transfer.stream import StreamError

log = structlog.get_logger()


def put(call: Call, batch: Batch) -> list[int]:
    """A code a key; EXISTS where nothing was written. Of large values only those that the store wants are sent."""
    stream = call.stream()
    values = [[read_view(*span) for span in value if span[1]] for value in batch.values]
    ttl_s = call.session.ttl_s
    if sum(batch.sizes) <= EAGER_BYTES:
        # Made in one go, as a value in several places is a rare thing among small ones.
        checksums = [checksum_of(views[0] if len(views) == 1 else b"".join(views)) for views in values]
        request = Put(batch.keys, batch.sizes, batch.pins, ttl_s, checksums, call.again)
        stream.send(request, [view for views in values for view in views])
    else:
        stream.send(Put(batch.keys, batch.sizes, batch.pins, ttl_s, [], call.again))
        granted = _codes(call, len(values))
        stream.send(Checksums(send_values(stream, (views for views, code in zip(values, granted, strict=True) if code == 0))))
    return _codes(call, len(values))


def _codes(call: Call, count: int) -> list[int]:
    codes = call.stream().receive(decode_ended).codes
    if len(codes) != count:
        raise Unreached(f"{len(codes)} codes for {count} keys")
    return codes


def read(call: Call, indexes: Sequence[int], wanted: Wanted) -> None:
    """Fill in the results for `indexes`; what is not there, or not good, stays NOT_FOUND."""
    for index in indexes:  # of a try before this one, which had other places
        wanted.results[index] = Code.NOT_FOUND
    stream = call.stream()
    most = call.session.welcome.max_object_bytes
    caps = [] if wanted.caps is None else [min(max(wanted.caps[index], 0), most) for index in indexes]
    stream.send(Get([wanted.keys[index] for index in indexes], caps, call.session.ttl_s))
    corrupt: list[str] = []
    done = 0
    while done < len(indexes):
        done += _receive(call, indexes[done:], caps[done:], wanted, corrupt)
    if corrupt:
        with contextlib.suppress(StreamError):  # what came stands; the next call finds the stream broken
            stream.send(Recheck(corrupt))


def _receive(call: Call, indexes: Sequence[int], caps: Sequence[int], wanted: Wanted, corrupt: list[str]) -> int:
    """Receive the next values of `indexes`; returns how many the store answered for."""
    stream = call.stream()
    found = stream.receive(decode_values)
    count = len(found.sizes)
    if not 0 < count == len(found.checksums) <= len(indexes):
        raise Unreached(f"{count} sizes for {len(indexes)} keys")
    if max(found.sizes) > call.session.welcome.max_object_bytes:
        raise Unreached(f"a value of {max(found.sizes)} bytes")
    coming: list[tuple[int, int, bool, int]] = []
    places: list[list[memoryview]] = []
    for row, (index, size, checksum) in enumerate(zip(indexes[:count], found.sizes, found.checksums, strict=True)):
        if size == 0:
            continue
        if caps and size > caps[row]:
            wanted.results[index] = Code.INVALID
            continue
        spans = wanted.place(index, size)
        coming.append((index, size, spans is not None, checksum))
        places.append(_views(spans, size) if spans is not None else [memoryview(bytearray(size))])  # it is on its way
    for (index, size, fits, checksum), came in zip(coming, receive_values(stream, places), strict=True):
        if came == checksum:
            wanted.results[index] = size if fits else Code.INVALID
        else:
            corrupt.append(wanted.keys[index])
            call.peer.counts["corrupt"] += 1
            log.warning("store_value_corrupt", store=call.peer.endpoint, size=size)
    return count


def _views(spans: Value, size: int) -> list[memoryview]:
    return [write_view(*span) for span in cut(spans, 0, size)]
