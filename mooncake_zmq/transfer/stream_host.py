"""A server's end of streams: one thread accepts connections and checks their tickets, then each stream has a thread.

A connection without a ticket yet costs a descriptor and a few hundred bytes, no thread, for `ATTACH_S` at most. There are at
most `MAX_UNATTACHED`: one more ends the one that has been silent for longest. So strangers displace each other, and clients,
which send everything at once, get in meanwhile.
"""

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from mooncake_zmq.transfer.sockets import LOG_EVERY_S, listen_beside, tune
from mooncake_zmq.transfer.stream import MAX_MESSAGE_BYTES, MessageT, Stream
from mooncake_zmq.transfer.tickets import OPENING_BYTES, PROOF_BYTES, Challenge, Refused, StreamKeys, Tickets

log = structlog.get_logger()

MAX_STREAMS = 512
"""Streams, each with a thread. For a further one the stream that has waited longest for a request is ended, which its client
opens again when it needs it; if all are at work the further one is refused, and its client's call fails."""
MAX_STREAMS_OF_A_KEY = MAX_STREAMS // 4
"""Streams of the holder of one key; for a further one a stream of the same holder is ended. If none of them waits for a request
it is refused at once: a client that attaches again and again holds up no other."""
MAX_UNATTACHED = 256
ATTACH_S = 5.0
ENDING_S = 0.02
"""Time for which a further stream waits if all are at work: one may just have sent its answer, and wait for a request soon."""
SHUT_S = 0.2
"""Time for which it waits for the end of the stream that makes room."""
ACCEPT_AGAIN_S = 0.1
"""Pause after a failed accept, as for lack of file descriptors."""
ACCEPTED_AT_ONCE = 64
LOOK_S = 1.0
"""Interval in which the keys of open streams are checked."""


@dataclass(frozen=True, slots=True)
class Guest:
    """A client that has shown a ticket. The stream that is made for it owns the connection."""

    connection: socket.socket
    token: bytes
    keys: StreamKeys
    holder: str
    """Name of the key to which the ticket was handed; empty if none was required."""


class Served(Protocol):
    """One stream of a server."""

    waits_since: float
    """Time when it began to wait for the next request (monotonic clock); infinite while it is at work."""

    def run(self) -> None:
        """Serve the stream, on a thread of its own, until it is over."""

    def shut(self) -> None:
        """End the stream during `run`, from any thread."""

    def close(self) -> None:
        """Free everything, once `run` is over."""


class StreamServed:
    """A base for `Served` over one stream, of which `run` is left to define."""

    def __init__(self, guest: Guest, slice_s: float) -> None:
        """Take over the guest's connection. `slice_s`: as for `Stream`, which calls `_idle`."""
        keys = guest.keys
        self.stream = Stream(guest.connection, self._idle, slice_s=slice_s, seals=keys.to_client, opens=keys.to_server)
        self.waits_since = time.monotonic()

    def requests(self, decode: Callable[[memoryview], MessageT], most_bytes: int = MAX_MESSAGE_BYTES) -> Iterator[MessageT]:
        """Yield each request; `waits_since` is infinite until the next one is wanted. Raises StreamError."""
        while True:
            self.waits_since = time.monotonic()
            request = self.stream.receive(decode, most_bytes)
            self.waits_since = math.inf
            yield request

    def shut(self) -> None:
        self.stream.shut()

    def close(self) -> None:
        self.stream.close()

    def _idle(self, quiet_s: float) -> None:
        """Raise StreamError if nothing moved for too long, or this side closes."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class _Unattached:
    """A connection without a valid ticket yet. `challenge`: set once its opening was valid."""

    connection: socket.socket
    until: float
    said: bytearray = field(default_factory=bytearray)
    challenge: Challenge | None = None

    @property
    def missing(self) -> int:
        """Number of bytes missing of its next message."""
        return (PROOF_BYTES if self.challenge else OPENING_BYTES) - len(self.said)


@dataclass(frozen=True, slots=True)
class _Open:
    served: Served
    holder: str
    token: bytes


class StreamHost:
    """Accepts streams beside a ZeroMQ endpoint from construction until `close`. Raises OSError where it cannot listen."""

    def __init__(
        self,
        endpoint: str,
        port: int,
        tickets: Tickets,
        make: Callable[[Guest], Served],
        on_crash: Callable[[BaseException], None],
        *,
        counts: dict[str, int],
        name: str,
    ) -> None:
        """Start to listen. `make` makes a stream, on the accepting thread, and must not block. `counts`: the owner's counters,
        which are increased here; `name`: the threads' name, also in logs."""
        self._counts = counts
        for what in ("streams", "streams_refused", "streams_over_share", "without_ticket", "ticket_late"):
            counts.setdefault(what, 0)
        self._tickets = tickets
        self._make = make
        self._on_crash = on_crash
        self._name = name
        self._lock = threading.Lock()
        """Guards `_counts`, `_open` and `_shut`."""
        self._ended = threading.Condition(self._lock)
        """Signalled when a stream is over."""
        self._open: dict[threading.Thread, _Open] = {}
        self._shut: set[threading.Thread] = set()
        """Threads of `_open` whose streams were ended to make room."""
        self._looked_at = 0.0
        self._logged_at = -math.inf
        self._unattached: dict[int, _Unattached] = {}
        """Connections by descriptor, in the order of their arrival."""
        self._listener, self.endpoint = listen_beside(endpoint, port)
        self._listener.setblocking(False)
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready = select.epoll()
        for waits in (self._listener.fileno(), self._stop):
            self._ready.register(waits, select.EPOLLIN)
        self._acceptor = threading.Thread(target=self._run, name=f"{name}-acceptor", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """End all streams. May be called twice."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        self._acceptor.join()
        with self._lock:
            open_now = dict(self._open)
        for each in open_now.values():
            each.served.shut()
        for thread in open_now:
            thread.join()
        for unattached in self._unattached.values():
            unattached.connection.close()
        self._unattached.clear()
        self._listener.close()
        if self.endpoint.startswith("ipc://"):
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        self._ready.close()
        os.close(self._stop)
        self._stop = -1

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter, from any thread."""
        with self._lock:
            self._counts[name] += by

    # --- accepting connections

    def _run(self) -> None:
        try:
            while True:
                ready = {descriptor for descriptor, _ in self._ready.poll(self._timeout_s())}
                if self._stop in ready:
                    return
                for descriptor in ready & self._unattached.keys():
                    self._read_first(self._unattached[descriptor])
                if self._listener.fileno() in ready:
                    self._accept()
                self._expire(time.monotonic())
                self._look(time.monotonic())
        except Exception as error:
            self._on_crash(error)
            log.critical("streams_crashed", streams=self._name, exc_info=error)

    def _timeout_s(self) -> float:
        oldest = next(iter(self._unattached.values()), None)
        timeout_s = math.inf if oldest is None else max(0.0, oldest.until - time.monotonic())
        return min(timeout_s, LOOK_S) if self._open else -1 if oldest is None else timeout_s

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("stream_not_accepted", streams=self._name, reason=error.strerror)
                time.sleep(ACCEPT_AGAIN_S)
                return
            if len(self._unattached) >= MAX_UNATTACHED:
                self._turn_away(self._most_silent())
            connection.setblocking(False)
            unattached = _Unattached(connection, time.monotonic() + ATTACH_S)
            self._unattached[connection.fileno()] = unattached
            self._ready.register(connection.fileno(), select.EPOLLIN)
            self._read_first(unattached)

    def _most_silent(self) -> _Unattached:
        """Return the oldest without a valid opening; if all have one, the oldest."""
        silent = (each for each in self._unattached.values() if each.challenge is None)
        return next(silent, None) or next(iter(self._unattached.values()))

    def _read_first(self, unattached: _Unattached) -> None:
        """Handle the bytes of an unattached connection that have arrived."""
        try:
            said = unattached.connection.recv(unattached.missing)
            if not said:
                raise Refused("gone")
            unattached.said += said
            if unattached.missing:
                return
            if unattached.challenge is None:
                unattached.challenge = Challenge(self._tickets, bytes(unattached.said))
                unattached.connection.sendall(unattached.challenge.challenge)  # the send buffer is still empty
                unattached.said.clear()
            else:
                unattached.challenge.check(bytes(unattached.said))
                self._let_in(unattached, unattached.challenge)
        except BlockingIOError:
            pass
        except (OSError, Refused):  # counted, not logged: there may be many strangers
            self.count("without_ticket")
            self._turn_away(unattached)

    def _let_in(self, unattached: _Unattached, challenge: Challenge) -> None:
        self._forget(unattached)
        self.count("streams")
        connection = unattached.connection
        holder = self._tickets.holder_of(challenge.token)
        try:
            self._make_room(holder)
            tune(connection)
            guest = Guest(connection, challenge.token, challenge.keys, holder)
            self._begin(self._make(guest), guest)
        except (OSError, RuntimeError) as error:  # the latter: the system cannot start a thread
            self.count("streams_refused")
            connection.close()
            if time.monotonic() - self._logged_at >= LOG_EVERY_S:
                self._logged_at = time.monotonic()
                log.warning("stream_refused", streams=self._name, key=holder, reason=str(error))

    def _expire(self, now: float) -> None:
        for unattached in [each for each in self._unattached.values() if each.until <= now]:
            self._turn_away(unattached)

    def _look(self, now: float) -> None:
        """End the streams of those whose key was dropped."""
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        with self._lock:
            gone = [each for each in self._open.values() if not self._tickets.stands(each.token)]
        for each in gone:
            log.warning("stream_ended", streams=self._name, key=each.holder, reason="its key was dropped")
            each.served.shut()

    def _turn_away(self, unattached: _Unattached) -> None:
        self._forget(unattached)
        if not unattached.said and unattached.challenge is None:
            self.count("ticket_late")
        unattached.connection.close()

    def _forget(self, unattached: _Unattached) -> None:
        descriptor = unattached.connection.fileno()
        if self._unattached.pop(descriptor, None) is not None:
            with contextlib.suppress(FileNotFoundError):
                self._ready.unregister(descriptor)

    # --- streams

    def _make_room(self, holder: str) -> None:
        """Wait until a further stream of this holder is allowed. Raises RuntimeError."""
        of_holder = partial(self._of, holder)
        if holder and len(of_holder()) >= MAX_STREAMS_OF_A_KEY:
            self.count("streams_over_share")
            if not self._end_one_that_waits(of_holder):
                raise RuntimeError(f"{MAX_STREAMS_OF_A_KEY} streams of this key are at work")
            self._wait_for_room(of_holder, MAX_STREAMS_OF_A_KEY)
        if len(self._open) >= MAX_STREAMS:
            of_all: Callable[[], list[threading.Thread]] = partial(list, self._open)
            if not self._end_one_that_waits(of_all):
                time.sleep(ENDING_S)
                self._end_one_that_waits(of_all)
            self._wait_for_room(of_all, MAX_STREAMS)

    def _of(self, holder: str) -> list[threading.Thread]:
        return [thread for thread, each in self._open.copy().items() if each.holder == holder]

    def _wait_for_room(self, streams: Callable[[], list[threading.Thread]], limit: int) -> None:
        """Wait until fewer than `limit` of these are left, while one ends. Raises RuntimeError."""
        with self._ended:
            if not self._ended.wait_for(lambda: len(streams()) < limit, SHUT_S if self._shut else 0):
                raise RuntimeError(f"{limit} streams are at work")

    def _end_one_that_waits(self, streams: Callable[[], list[threading.Thread]]) -> bool:
        """End the stream that has waited longest for a request. Returns False if none waits."""
        with self._lock:
            waiting = [(self._open[thread].served.waits_since, thread) for thread in streams() if thread not in self._shut]
            since, thread = min(waiting, key=lambda each: each[0], default=(math.inf, None))
            if thread is None or since == math.inf:
                return False
            self._shut.add(thread)
            oldest = self._open[thread].served
        oldest.shut()
        return True

    def _begin(self, served: Served, guest: Guest) -> None:
        thread = threading.Thread(target=self._serve, args=(served,), name=self._name, daemon=True)
        with self._lock:
            self._open[thread] = _Open(served, guest.holder, guest.token)
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                del self._open[thread]
            raise

    def _serve(self, served: Served) -> None:
        try:
            served.run()
        except Exception as error:
            self._on_crash(error)
            log.critical("stream_crashed", streams=self._name, exc_info=error)
        finally:
            with self._ended:
                del self._open[threading.current_thread()]
                self._shut.discard(threading.current_thread())
                self._ended.notify()
            served.close()
