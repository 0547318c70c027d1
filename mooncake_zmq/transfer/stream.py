"""A stream: one plain connection, TCP or Unix, for bulk bytes: a store's values, and blocks between hosts.

A message is four bytes of length, little-endian, and MessagePack; bytes have no framing, as both sides know their number.
An encrypted stream consists of records, see `sealing.py`.

The sockets are plain, since these are only bytes: the kernel copies them from and to their place, in the thread that needs
them, while a ZeroMQ frame passes an I/O thread on either side and is copied out of its message once more. On
loopback of a 2-core EPYC, checksums included: 3.0 to 3.7 GB/s instead of 2.1 to 3.0, and 64 KiB in 115 to 150 us instead
of 255 to 300. Messages that must be ordered, sent to several processes or authenticated stay on ZeroMQ, which hands out the
ticket by which a stream is attached, see `tickets.py`.
"""

import contextlib
import math
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from mooncake_zmq.core.records import NotAMessage, encode
from mooncake_zmq.transfer.sealing import Broken, Opener, Sealer
from mooncake_zmq.transfer.tickets import CHALLENGE_BYTES, Attaching, Refused, Ticket

MAX_VIEWS = 512
"""Views that one system call fills or sends; Linux takes 1024."""
MAX_MESSAGE_BYTES = 2 << 20
LENGTH = struct.Struct("<I")


class StreamError(Exception):
    """End of a stream: the other side is gone or too slow, or this side closes. The message says which."""


class StreamGarbage(StreamError):
    """Bytes of the other side that break the protocol."""


MessageT = TypeVar("MessageT")
BytesT = TypeVar("BytesT", memoryview, Sequence[memoryview])


class Stream:
    """A blocking end of a stream, for one thread at a time, but for `shut`."""

    def __init__(
        self,
        connection: socket.socket,
        idle: Callable[[float], None],
        *,
        slice_s: float,
        seals: bytes | None = None,
        opens: bytes | None = None,
    ) -> None:
        """Take over a connection. `idle` is called every `slice_s` without progress, with the time since the last; it raises to
        give up. `seals`, `opens`: the keys for sending and receiving; None: in clear."""
        self.stop_at = math.inf
        """Deadline of sending and receiving (monotonic clock), even while bytes keep moving. Bytes that have arrived are valid
        however late they are read."""
        self.connection = connection
        self.sealer = Sealer(seals) if seals is not None else None
        self.opener = Opener(opens) if opens is not None else None
        self._idle = idle
        self._slice_s = slice_s
        self._length = memoryview(bytearray(LENGTH.size))
        _streams.add(self)
        # Use the kernel's timeouts: Python's own cost a poll before each call.
        connection.setblocking(True)
        limit = struct.pack("ll", int(slice_s), int(slice_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def attach(self, ticket: Ticket) -> None:
        """Show the ticket, before anything else at the client's end. Raises StreamError, or an error of `idle`."""
        attaching = Attaching(ticket)
        challenge = memoryview(bytearray(CHALLENGE_BYTES))
        self.send_views([memoryview(attaching.opening)])
        self.receive_views([challenge])
        try:
            proof, keys = attaching.answer(bytes(challenge))
        except Refused as error:
            raise StreamGarbage(str(error)) from error
        self.send_views([memoryview(proof)])
        if keys.to_server is not None and keys.to_client is not None:
            self.sealer, self.opener = Sealer(keys.to_server), Opener(keys.to_client)

    def send(self, message: object, views: Sequence[memoryview] = ()) -> None:
        """Send a message and the bytes that belong to it. Raises StreamError, or an error of `idle`."""
        self.send_views([framed(message), *views])

    def receive(self, decode: Callable[[memoryview], MessageT], most_bytes: int = MAX_MESSAGE_BYTES) -> MessageT:
        """Receive the next message. Raises StreamError, also for one that does not decode; or an error of `idle`."""
        self.receive_views([self._length])
        body = memoryview(bytearray(length_of(self._length, most_bytes)))
        self.receive_views([body])
        return decoded(decode, body)

    def send_views(self, views: Sequence[memoryview]) -> None:
        """Send bytes that the other side expects."""
        if self.sealer is not None:
            try:
                for record in self.sealer.records(views):
                    self._send([record])
            except Broken as error:
                raise StreamError(str(error)) from error
            return
        for start in range(0, len(views), MAX_VIEWS):
            self._send(views[start : start + MAX_VIEWS])

    def receive_views(self, views: Sequence[memoryview]) -> None:
        """Fill these views, at most MAX_VIEWS and none of them empty, with received bytes."""
        if self.opener is not None:
            for view in views:
                self._receive_sealed(self.opener, view)
            return
        while views:
            one = len(views) == 1
            came = self._received(self.connection.recv_into, views[0]) if one else self._received(self._scatter, views)
            views = _after(views, came)

    def has_more(self, until: float) -> bool:
        """Wait until bytes can be received or the connection has ended, at most until then (monotonic clock)."""
        waiting = select.poll()
        waiting.register(self.connection, select.POLLIN)
        return bool(waiting.poll(max(0.0, 1e3 * (until - time.monotonic()))))

    def shut(self) -> None:
        """End the stream from any thread; the thread that uses it gets StreamError."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self.connection.close()

    def _send(self, views: Sequence[memoryview]) -> None:
        while views:
            if self._is_late:
                raise StreamError("too slow")
            views = _after(views, self._move(self.connection.sendmsg, views))

    def _receive_sealed(self, opener: Opener, view: memoryview) -> None:
        try:
            while view:
                taken = opener.take(view)
                view = view[taken:]
                if not taken:
                    opener.came(self._received(self.connection.recv_into, opener.wanted()))
        except Broken as error:
            raise StreamGarbage(str(error)) from error

    def _received(self, call: Callable[[BytesT], int], place: BytesT) -> int:
        if self._is_late and not self.has_more(-math.inf):
            raise StreamError("too slow")
        received = self._move(call, place)
        if received == 0:
            raise StreamError("the connection ended")
        return received

    @property
    def _is_late(self) -> bool:
        return self.stop_at is not math.inf and time.monotonic() > self.stop_at

    def _scatter(self, views: Sequence[memoryview]) -> int:
        return self.connection.recvmsg_into(views)[0]

    def _move(self, call: Callable[[BytesT], int], place: BytesT) -> int:
        """Wait until some bytes have moved; returns how many."""
        quiet_s = 0.0
        while True:
            try:
                return call(place)
            except BlockingIOError:
                quiet_s += self._slice_s
                self._idle(quiet_s)
            except OSError as error:
                raise StreamError(f"the connection ended: {error.strerror}") from error


def framed(message: object) -> memoryview:
    """Return a message as it is sent on a stream."""
    body = encode(message)
    return memoryview(LENGTH.pack(len(body)) + body)


def length_of(raw: memoryview, most_bytes: int) -> int:
    """Return the length of the message after these bytes. Raises StreamGarbage."""
    (length,) = LENGTH.unpack(raw)
    if length > most_bytes:
        raise StreamGarbage(f"a message of {length} bytes")
    return int(length)


def decoded(decode: Callable[[memoryview], MessageT], body: memoryview) -> MessageT:
    """Return a decoded message. Raises StreamGarbage."""
    try:
        return decode(body)
    except NotAMessage as error:
        raise StreamGarbage(f"not the message expected: {error}") from error


_streams: "weakref.WeakSet[Stream]" = weakref.WeakSet()


def _close_all() -> None:
    for stream in list(_streams):
        stream.close()


# A forked child's copy would keep the connection up after its parent's end.
os.register_at_fork(after_in_child=_close_all)


def _after(views: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """Return `views` without their first `done` bytes."""
    if len(views) == 1:
        return () if done == len(views[0]) else (views[0][done:],)
    for number, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[number + 1 :]]
        done -= len(view)
    return ()
