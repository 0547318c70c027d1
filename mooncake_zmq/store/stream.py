"""A stream: one plain connection, TCP or Unix, on which the bytes of values travel between a store and its client.

    client  -- Attach(client, token) --------------> server     once; the token is that of the Welcome
            <- Attached ---------------------------
            -- Get(keys, caps) -------------------->
            <- Values(sizes, checksums), bytes ----             again until all keys are answered
            -- Put(keys, sizes), no checksums ----->            or with checksums: the bytes follow at once
            <- Ended(codes) -----------------------             what is granted
            -- bytes of what is, Checksums -------->
            <- Ended(codes) -----------------------
            -- Promote(keys, leases) --------------->           of a client that shares memory
            <- Ended() -----------------------------

A message is four bytes of length, little-endian, and MessagePack; bytes have no framing, as both sides know how many come.

Plain sockets, since these are bytes and nothing but: the kernel copies them from and to where they belong, in the thread
that wants them, while a ZeroMQ frame passes an I/O thread on either side and is copied out of its message once more. On
loopback of a 2-core EPYC, checksums included: 3.0 to 3.7 GB/s instead of 2.1 to 3.0, and 64 KiB in 115 to 150 us instead
of 255 to 300. What must be ordered, told to several or authenticated stays on ZeroMQ, which hands out the token.
"""

import contextlib
import math
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from mooncake_zmq.store.memory import Checksum, checksum_of
from mooncake_zmq.store.protocol import MAX_FRAME_BYTES, PIECE_BYTES, NotAMessage, encode

MAX_VIEWS = 512
"""Places that one system call fills or sends; Linux takes 1024."""
IPC_SUFFIX = "-stream"
MAX_ATTACH_BYTES = 256
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 10, 5, 3
_LENGTH = struct.Struct("<I")


class StreamError(Exception):
    """The other side is gone, or too slow, or the store is closing. The message says which."""


class StreamGarbage(StreamError):
    """The other side speaks something else."""


MessageT = TypeVar("MessageT")
BytesT = TypeVar("BytesT", memoryview, Sequence[memoryview])


class Stream:
    """One end. Of one thread at a time, but for `shut`."""

    def __init__(self, connection: socket.socket, idle: Callable[[float], None], *, slice_s: float) -> None:
        """`idle` is called every `slice_s` that nothing moves, with how long that is; it raises where that is a reason to
        give up."""
        self.stop_at = math.inf
        """When what is awaited has to have come, however steadily it does (monotonic clock)."""
        self._socket = connection
        self._idle = idle
        self._slice_s = slice_s
        self._length = memoryview(bytearray(_LENGTH.size))
        _streams.add(self)
        # Timeouts of the kernel's: Python's own cost a poll before each call.
        connection.setblocking(True)
        limit = struct.pack("ll", int(slice_s), int(slice_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)

    def send(self, message: object, views: Sequence[memoryview] = ()) -> None:
        """A message and the bytes that belong to it. Raises StreamError, or what `idle` raises."""
        body = encode(message)
        head = memoryview(_LENGTH.pack(len(body)) + body)
        self._send([head, *views[: MAX_VIEWS - 1]])
        for start in range(MAX_VIEWS - 1, len(views), MAX_VIEWS):
            self._send(views[start : start + MAX_VIEWS])

    def receive(self, decode: Callable[[memoryview], MessageT], most_bytes: int = MAX_FRAME_BYTES) -> MessageT:
        """The next message. Raises StreamError, also for one that does not decode; or what `idle` raises."""
        self._receive([self._length])
        (length,) = _LENGTH.unpack(self._length)
        if length > most_bytes:
            raise StreamGarbage(f"a message of {length} bytes")
        body = memoryview(bytearray(length))
        self._receive([body])
        try:
            return decode(body)
        except NotAMessage as error:
            raise StreamGarbage(f"not the message expected: {error}") from error

    def send_values(self, values: Iterable[Sequence[memoryview]]) -> list[int]:
        """Send the bytes of values, each of which lies in one or several places; returns their checksums."""
        checksums = _Checksums()
        for run in _runs(values):
            checksums.update(run)  # while they come into the CPU's cache anyway
            self._send([view for view, _, _ in run])
        return checksums.made

    def receive_values(self, values: Iterable[Sequence[memoryview]]) -> list[int]:
        """Fill the places of values with what comes; returns the checksums of what came."""
        checksums = _Checksums()
        for run in _runs(values):
            self._receive([view for view, _, _ in run])
            checksums.update(run)
        return checksums.made

    def shut(self) -> None:
        """End it under whoever is at it, who then gets StreamError. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """May be called twice."""
        self._socket.close()

    def _send(self, views: Sequence[memoryview]) -> None:
        while views:
            views = _after(views, self._move(self._socket.sendmsg, views))

    def _receive(self, views: Sequence[memoryview]) -> None:
        while views:
            one = len(views) == 1
            received = self._move(self._socket.recv_into, views[0]) if one else self._move(self._scatter, views)
            if received == 0:
                raise StreamError("the connection ended")
            if self.stop_at is not math.inf and time.monotonic() > self.stop_at:
                raise StreamError("too slow")
            views = _after(views, received)

    def _scatter(self, views: Sequence[memoryview]) -> int:
        return self._socket.recvmsg_into(views)[0]

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


_streams: "weakref.WeakSet[Stream]" = weakref.WeakSet()


def _close_all() -> None:
    for stream in list(_streams):
        stream.close()


# A forked child's copy would keep the connection up when its parent is gone.
os.register_at_fork(after_in_child=_close_all)


def listen(endpoint: str, port: int) -> tuple[socket.socket, str]:
    """A socket that takes streams beside a ZeroMQ endpoint, and where that is, to be told to clients.

    `port`: at the endpoint's address, 0 for any free one; over ipc the path beside it. Raises OSError.
    """
    scheme, _, place = endpoint.partition("://")
    if scheme == "ipc":
        path = f"{place}{IPC_SUFFIX}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of a former life: whoever bound the endpoint itself is the one that lives
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen()
        return listener, f"ipc://{path}"
    host = place.rpartition(":")[0].strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=128)
    return listener, f"tcp://*:{listener.getsockname()[1]}"


def connect(where: str, endpoint: str, timeout_s: float) -> socket.socket:
    """A connection to what `listen` told, of the server at `endpoint`. Raises OSError."""
    scheme, _, place = where.partition("://")
    if scheme == "ipc":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(place)
        except BaseException:
            connection.close()
            raise
        return connection
    host = endpoint.partition("://")[2].rpartition(":")[0].strip("[]")
    return socket.create_connection((host, int(place.rpartition(":")[2])), timeout_s)


class _Checksums:
    """Makes the checksums of values that pass by in runs."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self._begun: Checksum | None = None

    def update(self, run: "_Run") -> None:
        for view, first, last in run:
            if first and last:
                self.made.append(checksum_of(view))
                continue
            if first or self._begun is None:
                self._begun = Checksum()
            self._begun.update(view)
            if last:
                self.made.append(self._begun.value())


_Run = list[tuple[memoryview, bool, bool]]
"""(bytes, do they begin a value, do they end one)."""


def _runs(values: Iterable[Sequence[memoryview]]) -> Iterator[_Run]:
    """The places of all values in runs of at most PIECE_BYTES: as much as stays in the CPU's cache to be hashed."""
    run: _Run = []
    room = PIECE_BYTES
    for views in values:
        last = len(views) - 1
        for number, view in enumerate(views):
            start = 0
            while len(view) - start > room:
                run.append((view[start : start + room], number == 0 and start == 0, False))
                start += room
                yield run
                run, room = [], PIECE_BYTES
            run.append((view[start:] if start else view, number == 0 and start == 0, number == last))
            room -= len(view) - start
            if room == 0 or len(run) == MAX_VIEWS:
                yield run
                run, room = [], PIECE_BYTES
    if run:
        yield run


def _after(views: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """What is left of `views` after their first `done` bytes."""
    if len(views) == 1:
        return () if done == len(views[0]) else (views[0][done:],)
    for number, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[number + 1 :]]
        done -= len(view)
    return ()
