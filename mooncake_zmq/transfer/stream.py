"""A stream: one plain connection, TCP or Unix, on which bytes travel: a store's values, and blocks between hosts.

A message is four bytes of length, little-endian, and MessagePack; bytes have no framing, as both sides know how many come.
Encrypted, all of it goes in records, see `sealing.py`.

Plain sockets, since these are bytes and nothing but: the kernel copies them from and to where they belong, in the thread
that wants them, while a ZeroMQ frame passes an I/O thread on either side and is copied out of its message once more. On
loopback of a 2-core EPYC, checksums included: 3.0 to 3.7 GB/s instead of 2.1 to 3.0, and 64 KiB in 115 to 150 us instead
of 255 to 300. What must be ordered, told to several or authenticated stays on ZeroMQ, which hands out the ticket by which a
stream is attached, see `tickets.py`.
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
"""Places that one system call fills or sends; Linux takes 1024."""
MAX_MESSAGE_BYTES = 2 << 20
LENGTH = struct.Struct("<I")


class StreamError(Exception):
    """The other side is gone, or too slow, or we are closing. The message says which."""


class StreamGarbage(StreamError):
    """The other side speaks something else."""


MessageT = TypeVar("MessageT")
BytesT = TypeVar("BytesT", memoryview, Sequence[memoryview])


class Stream:
    """One end that waits. Of one thread at a time, but for `shut`."""

    def __init__(
        self,
        connection: socket.socket,
        idle: Callable[[float], None],
        *,
        slice_s: float,
        seals: bytes | None = None,
        opens: bytes | None = None,
    ) -> None:
        """`idle` is called every `slice_s` that nothing moves, with how long that is; it raises where that is a reason to
        give up. `seals`, `opens`: the keys of what leaves and of what comes; None: in clear."""
        self.stop_at = math.inf
        """When what is awaited has to have come, however steadily it does (monotonic clock), and after which
        nothing is sent. What is here counts, however late it is taken."""
        self.connection = connection
        self.sealer = Sealer(seals) if seals is not None else None
        self.opener = Opener(opens) if opens is not None else None
        self._idle = idle
        self._slice_s = slice_s
        self._length = memoryview(bytearray(LENGTH.size))
        _streams.add(self)
        # Timeouts of the kernel's: Python's own cost a poll before each call.
        connection.setblocking(True)
        limit = struct.pack("ll", int(slice_s), int(slice_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def attach(self, ticket: Ticket) -> None:
        """Before anything else at the client's end: show the ticket. Raises StreamError, or what `idle` raises."""
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
        """A message and the bytes that belong to it. Raises StreamError, or what `idle` raises."""
        self.send_views([framed(message), *views])

    def receive(self, decode: Callable[[memoryview], MessageT], most_bytes: int = MAX_MESSAGE_BYTES) -> MessageT:
        """The next message. Raises StreamError, also for one that does not decode; or what `idle` raises."""
        self.receive_views([self._length])
        body = memoryview(bytearray(length_of(self._length, most_bytes)))
        self.receive_views([body])
        return decoded(decode, body)

    def send_views(self, views: Sequence[memoryview]) -> None:
        """Bytes that the other side expects."""
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
        """Fill these places, at most MAX_VIEWS and none of them empty, with what comes."""
        if self.opener is not None:
            for view in views:
                self._receive_sealed(self.opener, view)
            return
        while views:
            one = len(views) == 1
            came = self._received(self.connection.recv_into, views[0]) if one else self._received(self._scatter, views)
            views = _after(views, came)

    def shut(self) -> None:
        """End it under whoever is at it, who then gets StreamError. From any thread."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """May be called twice."""
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
        if self._is_late and not self._has_more():
            raise StreamError("too slow")
        received = self._move(call, place)
        if received == 0:
            raise StreamError("the connection ended")
        return received

    @property
    def _is_late(self) -> bool:
        return self.stop_at is not math.inf and time.monotonic() > self.stop_at

    def _has_more(self) -> bool:
        waiting = select.poll()
        waiting.register(self.connection, select.POLLIN)
        return bool(waiting.poll(0))

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
    """A message as it lies on a stream."""
    body = encode(message)
    return memoryview(LENGTH.pack(len(body)) + body)


def length_of(raw: memoryview, most_bytes: int) -> int:
    """Of the message behind these bytes. Raises StreamGarbage."""
    (length,) = LENGTH.unpack(raw)
    if length > most_bytes:
        raise StreamGarbage(f"a message of {length} bytes")
    return int(length)


def decoded(decode: Callable[[memoryview], MessageT], body: memoryview) -> MessageT:
    """A message. Raises StreamGarbage."""
    try:
        return decode(body)
    except NotAMessage as error:
        raise StreamGarbage(f"not the message expected: {error}") from error


_streams: "weakref.WeakSet[Stream]" = weakref.WeakSet()


def _close_all() -> None:
    for stream in list(_streams):
        stream.close()


# A forked child's copy would keep the connection up when its parent is gone.
os.register_at_fork(after_in_child=_close_all)


def _after(views: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """What is left of `views` after their first `done` bytes."""
    if len(views) == 1:
        return () if done == len(views[0]) else (views[0][done:],)
    for number, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[number + 1 :]]
        done -= len(view)
    return ()
