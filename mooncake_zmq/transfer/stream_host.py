"""A server's end of streams: one thread at the door, where who connects shows his ticket, then a thread for each stream.

Whoever has not shown it yet holds a descriptor and a few hundred bytes, no thread, for `ATTACH_S` at most, and of these there
are `MAX_UNATTACHED`: one more ends the one that has been silent for longest. So strangers cost each other their places, and
clients, who say all that they have to at once, are let in while the strangers come.
"""

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from mooncake_zmq.transfer.sockets import listen_beside, tune
from mooncake_zmq.transfer.tickets import OPENING_BYTES, PROOF_BYTES, Challenge, Refused, StreamKeys, Tickets

log = structlog.get_logger()

MAX_STREAMS = 512
"""Threads. For a further stream the one that waits longest for a request is ended, of which its client makes a new one when it
needs it; with all at work the further one is refused, and its client's call fails."""
MAX_STREAMS_OF_A_KEY = MAX_STREAMS // 4
"""Likewise of the holder of one key, whose own make room: he has no other's place."""
MAX_UNATTACHED = 256
ATTACH_S = 5.0
ENDING_S = 0.02
"""With all at work, how long a further stream waits for one that has just sent its answer, and so has a client that goes on."""
SHUT_S = 0.2
"""How long it waits for the end of the stream that is ended for it."""
ACCEPT_AGAIN_S = 0.1
"""Pause after an accept that failed, as for want of file descriptors."""
ACCEPTED_AT_ONCE = 64
LOOK_S = 1.0
"""How often the keys of those whose streams are open are looked at."""


@dataclass(frozen=True, slots=True)
class Guest:
    """Who has shown a ticket. The connection is the one's who takes it over."""

    connection: socket.socket
    token: bytes
    keys: StreamKeys
    holder: str
    """Name of the key to which the ticket was handed; empty: none had to be shown."""


class Served(Protocol):
    """One stream of a server."""

    waits_since: float
    """When it began to wait for the next request (monotonic clock); infinite while it is at work."""

    def run(self) -> None:
        """On a thread of its own, until the stream is over."""

    def shut(self) -> None:
        """End it under `run`. From any thread."""

    def close(self) -> None:
        """Once `run` is over."""


@dataclass(slots=True, eq=False)
class _Unattached:
    """At the door. `challenge`: once its opening was good."""

    connection: socket.socket
    until: float
    said: bytearray = field(default_factory=bytearray)
    challenge: Challenge | None = None

    @property
    def missing(self) -> int:
        """Bytes of what it is to say next."""
        return (PROOF_BYTES if self.challenge else OPENING_BYTES) - len(self.said)


@dataclass(frozen=True, slots=True)
class _Open:
    served: Served
    holder: str
    token: bytes


class StreamHost:
    """Takes streams beside a ZeroMQ endpoint from construction until `close`. Raises OSError where it cannot listen."""

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
        """`make` is called at the door, and only to make. `counts`: the owner's, added to here; `name`: of the threads, and in
        logs."""
        self._counts = counts
        for what in ("streams", "streams_refused", "streams_over_share", "strangers_at_door", "silent_at_door"):
            counts.setdefault(what, 0)
        self._tickets = tickets
        self._make = make
        self._on_crash = on_crash
        self._name = name
        self._lock = threading.Lock()
        """Guards `_counts`, `_open` and `_shut`."""
        self._ended = threading.Condition(self._lock)
        """One more stream is over."""
        self._open: dict[threading.Thread, _Open] = {}
        self._shut: set[threading.Thread] = set()
        """Of these, those that were ended for others."""
        self._looked_at = 0.0
        self._unattached: dict[int, _Unattached] = {}
        """By descriptor, in the order in which they came."""
        self._listener, self.endpoint = listen_beside(endpoint, port)
        self._listener.setblocking(False)
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready = select.epoll()
        for waits in (self._listener.fileno(), self._stop):
            self._ready.register(waits, select.EPOLLIN)
        self._door = threading.Thread(target=self._run, name=f"{name}-door", daemon=True)
        self._door.start()

    def close(self) -> None:
        """End all streams. May be called twice."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        self._door.join()
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
        """From any thread."""
        with self._lock:
            self._counts[name] += by

    # --- at the door

    def _run(self) -> None:
        try:
            while True:
                ready = {descriptor for descriptor, _ in self._ready.poll(self._patience_s())}
                if self._stop in ready:
                    return
                for descriptor in ready & self._unattached.keys():
                    self._hear(self._unattached[descriptor])
                if self._listener.fileno() in ready:
                    self._accept()
                self._expire(time.monotonic())
                self._look(time.monotonic())
        except Exception as error:
            self._on_crash(error)
            log.critical("streams_crashed", streams=self._name, exc_info=error)

    def _patience_s(self) -> float:
        oldest = next(iter(self._unattached.values()), None)
        patience_s = math.inf if oldest is None else max(0.0, oldest.until - time.monotonic())
        return min(patience_s, LOOK_S) if self._open else -1 if oldest is None else patience_s

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
            self._hear(unattached)

    def _most_silent(self) -> _Unattached:
        """The oldest without a good opening; if all have one, the oldest."""
        silent = (each for each in self._unattached.values() if each.challenge is None)
        return next(silent, None) or next(iter(self._unattached.values()))

    def _hear(self, unattached: _Unattached) -> None:
        """What it says, as far as it has come."""
        try:
            said = unattached.connection.recv(unattached.missing)
            if not said:
                raise Refused("gone")
            unattached.said += said
            if unattached.missing:
                return
            if unattached.challenge is None:
                unattached.challenge = Challenge(self._tickets, bytes(unattached.said))
                unattached.connection.sendall(unattached.challenge.challenge)  # into a buffer that nothing is in yet
                unattached.said.clear()
            else:
                unattached.challenge.check(bytes(unattached.said))
                self._let_in(unattached, unattached.challenge)
        except BlockingIOError:
            pass
        except (OSError, Refused):  # counted, and not logged: strangers may be many
            self.count("strangers_at_door")
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
        except (OSError, RuntimeError) as error:  # the latter: the system has no thread for us
            self.count("streams_refused")
            log.warning("stream_refused", streams=self._name, key=holder, reason=str(error))
            connection.close()

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
            self.count("silent_at_door")
        unattached.connection.close()

    def _forget(self, unattached: _Unattached) -> None:
        descriptor = unattached.connection.fileno()
        if self._unattached.pop(descriptor, None) is not None:
            with contextlib.suppress(FileNotFoundError):
                self._ready.unregister(descriptor)

    # --- streams

    def _make_room(self, holder: str) -> None:
        """Raises RuntimeError."""
        if holder and len(self._of(holder)) >= MAX_STREAMS_OF_A_KEY:
            self.count("streams_over_share")
            self._wait_for_room(partial(self._of, holder), MAX_STREAMS_OF_A_KEY)
        if len(self._open) >= MAX_STREAMS:
            self._wait_for_room(lambda: list(self._open), MAX_STREAMS)

    def _of(self, holder: str) -> list[threading.Thread]:
        return [thread for thread, each in self._open.copy().items() if each.holder == holder]

    def _wait_for_room(self, streams: Callable[[], list[threading.Thread]], limit: int) -> None:
        """One of these is ended, if any waits for a request. Raises RuntimeError."""
        if not self._end_one_that_waits(streams):
            time.sleep(ENDING_S)
            self._end_one_that_waits(streams)
        with self._ended:
            if not self._ended.wait_for(lambda: len(streams()) < limit, SHUT_S if self._shut else 0):
                raise RuntimeError(f"{limit} streams are at work")

    def _end_one_that_waits(self, streams: Callable[[], list[threading.Thread]]) -> bool:
        """Of those that wait for a request, the one that does for longest. False: none does."""
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
