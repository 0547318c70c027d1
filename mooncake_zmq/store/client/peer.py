"""One store server, seen from its client: its incarnation, our connections to it, and messages that must still be sent to
it."""

import contextlib
import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog
import zmq

from mooncake_zmq.store import protocol
from mooncake_zmq.store.client.link import SLICE_MS, Forgotten, Link, Links, ReplyT, Unreached, answer
from mooncake_zmq.store.client.outage import Outage
from mooncake_zmq.store.memory import keep_freed_memory
from mooncake_zmq.store.protocol import MAX_KEYS
from mooncake_zmq.store.segment import ClientLock, ObjectSegment, boot_id
from mooncake_zmq.store.stream_messages import Attach, decode_attached
from mooncake_zmq.transfer.segment_file import SharedMemoryError
from mooncake_zmq.transfer.shared_memory import needs_checksums
from mooncake_zmq.transfer.sockets import BadEndpoint, Sockets, connect_beside
from mooncake_zmq.transfer.stream import Stream, StreamError
from mooncake_zmq.transfer.tickets import Ticket

log = structlog.get_logger()

PING_S = 1.0
"""The longest that a ping of a store that did not answer waits."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """How a client works; the defaults are safe."""

    share_memory: bool = True
    """Map the segment of a store on this host. Off: exchange bytes on streams, as with other hosts."""
    verify_local: bool = True
    """Compare checksums on reads from shared memory too. What comes over a network is always compared. Off, like
    `checksum_local`, is refused on CPUs that reorder loads, as ARM's do."""
    checksum_local: bool = True
    """Make a checksum when writing to shared memory. Off: made by the store when the value first leaves the host."""
    timeout_s: float = 10.0
    """Longest time without any answer before a call fails."""
    setup_timeout_s: float = 3.0
    """Longest time for the first contact."""
    ttl_s: float = 20.0
    """Time asked for a put or lease: a chunk's copy, with much to spare."""
    max_connections: int = 16
    """Calls under way at one store at a time; further ones wait."""
    io_threads: int = 1
    """I/O threads of ZeroMQ, which carries requests and answers alone."""
    keys: str = ""
    """Directory with `public_keys` and our NAME.secret (`mooncake-zmq keys make --store NAME`); empty: none."""
    key_name: str = ""
    """NAME."""
    allow_plain_tcp: bool = False
    """Without keys, stores on other hosts are not connected to, unless this says that the network is private."""
    tune_malloc: bool = True
    """Let the process keep freed memory once values come on streams, see `memory.keep_freed_memory`."""

    def __post_init__(self) -> None:
        for name in ("verify_local", "checksum_local"):
            if not getattr(self, name) and (why := needs_checksums(f"{name} = false")):
                raise ValueError(why)


@dataclass(frozen=True, slots=True)
class Session:
    """The answer of one incarnation of a store to our Hello. `segment`: mapped, if it is shared with us."""

    welcome: protocol.Welcome
    segment: ObjectSegment | None
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Call:
    """The state of one attempt of a call at one store: a connection of its own until it returns or raises."""

    peer: "Peer"
    session: Session
    link: Link
    again: bool
    """Is it the second try, the first one having broken off?"""

    @property
    def deadline(self) -> float:
        """The deadline of the answer to the request sent now: the time that earlier work took, our own copying above all, is
        not the store's silence."""
        return time.monotonic() + self.peer.settings.timeout_s

    def stream(self) -> Stream:
        """The connection's stream. Raises Unreached or Forgotten where there is none yet and none can be made."""
        return self.link.stream or self.peer.open_stream(self.session, self.link, self.deadline)

    def ask(self, request: protocol.Reserve | protocol.Commit | protocol.Lease, expected: type[ReplyT]) -> ReplyT:
        """By the stream, where no thread of ZeroMQ's stands between; where that broke off by the connection itself, which takes
        no room among the store's streams. Raises Unreached, Forgotten or StreamError."""
        if self.again:
            self.peer.send_abandoned(lambda note: self.link.send(note, self.deadline))
            return self.link.ask(request, expected, self.deadline)
        stream = self.stream()
        self.peer.send_abandoned(stream.send)
        stream.send(request)
        stream.stop_at = self.deadline
        reply = stream.receive(protocol.decode_reply)
        stream.stop_at = math.inf
        return answer(request, reply, expected)

    def send_note(self, note: protocol.Note) -> None:
        """Likewise what is not answered; lost with the connection, as the server's timers do the same in the end."""
        if not self.again:
            with contextlib.suppress(StreamError):
                self.stream().send(note)
                return
        self.link.send_note(note)


class Peer:
    """One store server. Thread-safe."""

    def __init__(self, endpoint: str, settings: ClientSettings, sockets: Sockets) -> None:
        """`endpoint`: where keys are needed with the server's name, `tcp://NAME@HOST:PORT`."""
        scheme, _, place = endpoint.partition("://")
        self.name = ""
        """The store's name, once it was met."""
        self.host = ""
        """Its host, likewise."""
        self._server, _, place = place.rpartition("@") if scheme == "tcp" else ("", "", place)
        self.endpoint = f"{scheme}://{place}"
        self.closed = False
        self.settings = settings
        self._sockets = sockets
        self._client_name = os.urandom(16)
        self._numbers = itertools.count(1)
        self._links = Links(self._make_link, settings.max_connections)
        self._greetings = Links(self._make_link, 1)
        """For Hello, which calls that have all of the others may wait for."""
        self.counts = {"corrupt": 0, "stale": 0, "expired": 0}
        """Values read that did not verify, or were gone by then; puts that ran out of time."""
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._lock_file: ClientLock | None = None
        self._outage = Outage()
        self._outage_lock = threading.Lock()
        self._closing = threading.Event()
        self._abandoned: deque[int] = deque(maxlen=MAX_KEYS)
        """Puts whose end the store may not have received."""
        self._owed: deque[str] = deque(maxlen=MAX_KEYS)
        """Keys that an earlier call could not remove here; of more the first are forgotten."""
        self._owed_lock = threading.Lock()
        self._pid = os.getpid()

    def session(self, deadline: float) -> Session:
        """Raises Unreached, at once during an outage. The first call, and that after a restart of the store, say Hello."""
        self._check_reachable()
        session = self._session
        if session is not None:
            return session
        with self._lock:
            self._check_reachable()
            if self._session is None:
                try:
                    self._session = self._greet(deadline)
                except Unreached as error:
                    self._note_down(error)
                    raise
            return self._session

    def call(self, work: Callable[[Call], T]) -> T:
        """Run `work` with a connection of its own. Raises Unreached. After a loss or a restart it is run once more."""
        deadline = time.monotonic() + self.settings.timeout_s
        for again in (False, True):
            if self.closed or os.getpid() != self._pid:
                raise Unreached("the store was closed")
            session = self.session(deadline)
            link = self._links.take(deadline)
            broken = True
            try:
                self._remove_owed(link, deadline)
                result = work(Call(self, session, link, again))
                broken = False
                self._outage.answered()
                return result
            except Forgotten:
                self._drop(session)
                if again:
                    raise Unreached("the store refuses us") from None
            except (Unreached, StreamError) as error:
                # A restarted store is met anew: what we know of it, streams and all, is of its former incarnation.
                self._drop(session)
                if again or self.closed or time.monotonic() >= deadline:
                    self._note_down(error)
                    raise Unreached(str(error)) from error
            finally:
                self._links.put_back(link, broken=broken)
        raise AssertionError("the last try returns or raises")

    def owe(self, keys: Sequence[str]) -> None:
        """Remove these before the next call: a removal did not reach the store, and other stores may have newer values."""
        if len(self._owed) + len(keys) > MAX_KEYS:
            log.warning("store_removals_forgotten", endpoint=self.endpoint, reason=f"more than {MAX_KEYS} keys")
        self._owed.extend(keys)

    def _remove_owed(self, link: Link, deadline: float) -> None:
        """Calls wait here for the one that does it. Raises Unreached or Forgotten."""
        while self._owed:
            if not self._owed_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise Unreached("earlier removals take too long")
            try:
                if owed := list(self._owed):
                    link.ask(protocol.Remove(self.next_id(), list(dict.fromkeys(owed))), protocol.Numbers, deadline)
                for key in owed:
                    with contextlib.suppress(ValueError):  # more came meanwhile than are remembered
                        self._owed.remove(key)
            finally:
                self._owed_lock.release()

    def open_stream(self, session: Session, link: Link, deadline: float) -> Stream:
        """A new stream, which is the link's. Raises Unreached or Forgotten."""

        def idle(quiet_s: float) -> None:
            link.check_open()
            if quiet_s >= self.settings.timeout_s:
                raise Unreached("no answer in time")

        welcome = session.welcome
        try:
            connection = connect_beside(
                welcome.stream, self.endpoint, max(0.1, deadline - time.monotonic()), lambda: self.closed
            )
        except (OSError, ValueError, OverflowError) as error:  # the latter two: the answer has no valid address
            raise Unreached(f"no stream to {welcome.stream} of {self.endpoint}: {error}") from error
        stream = link.stream = Stream(connection, idle, slice_s=SLICE_MS / 1000)
        link.check_open()  # a close from now on finds the stream to end
        try:
            stream.attach(Ticket(welcome.token, welcome.secret, welcome.sealed))
            stream.send(Attach(self._client_name, welcome.token))
            attached = stream.receive(decode_attached)
        except StreamError as error:
            raise Unreached(f"{self.endpoint} takes no further stream: {error}") from error
        if isinstance(attached, protocol.Stranger):
            raise Forgotten
        return stream

    def abandon(self, put_id: int) -> None:
        """Nothing more will be written under this put: say so before the next request that copies."""
        self._abandoned.append(put_id)

    def send_abandoned(self, send: Callable[[protocol.Release], None]) -> None:
        """By the way that the next request takes: a put tried again would find its own first try under way, and take that for
        somebody's who writes the same. Kept for the next one if it fails. Raises what `send` raises."""
        taken: list[int] = []
        while self._abandoned:
            taken.append(self._abandoned.popleft())
        if taken:
            try:
                send(protocol.Release([], taken))
            except BaseException:
                self._abandoned.extend(taken)
                raise

    def next_id(self) -> int:
        return next(self._numbers)

    def close(self, deadline: float) -> bool:
        """End calls under way and our session at the store; False if a call had not ended by then."""
        self.closed = True
        self._closing.set()
        ended = all([links.close(deadline) for links in (self._links, self._greetings)])
        if self._lock_file is not None and ended:  # while one still writes, we are not to be taken for dead
            self._lock_file.end()
        return ended

    def _drop(self, session: Session) -> None:
        with self._lock:
            if self._session is session:
                self._session = None
        self._links.drop_idle()

    def _check_reachable(self) -> None:
        """Raises Unreached during an outage."""
        if self._outage.is_on:
            raise Unreached(self._outage.reason)

    def _note_down(self, error: Exception) -> None:
        """Leave the store alone until a ping is answered."""
        if self.closed:
            return
        with self._outage_lock:
            begins = self._outage.begin(str(error))
        if begins:
            log.warning("store_unreached", endpoint=self.endpoint, reason=str(error))
            try:
                threading.Thread(target=self._ping, name="store-ping", daemon=True).start()
            except RuntimeError:  # no thread can be had: the next call asks itself
                self._outage.met()

    def _ping(self) -> None:
        """Say Hello until it is answered or this client is closed. Whatever ends this, calls may ask again."""
        try:
            while not self._closing.wait(self._outage.pause_s):
                try:
                    session = self._greet(time.monotonic() + PING_S)
                except Unreached:
                    self._outage.missed()
                    continue
                with self._lock:
                    self._session = session
                return
        finally:
            with self._outage_lock:
                self._outage.met()

    def _make_link(self) -> Link:
        routing_id = b"c" + self._client_name + next(self._numbers).to_bytes(4, "big")
        try:
            return Link(self._sockets, self.endpoint, self._server, routing_id, lambda: self.closed)
        except (zmq.ZMQError, BadEndpoint) as error:
            raise Unreached(f"{self.endpoint}: {error}") from error

    def _greet(self, deadline: float) -> Session:
        link = self._greetings.take(deadline)
        try:
            welcome = self._hello(link, deadline, shared=False)
            segment = self._map(welcome) if self.settings.share_memory and welcome.path else None
            if segment is not None:
                welcome = self._hello(link, deadline, shared=True)
                if not welcome.shared:
                    segment = None
        except Forgotten as error:
            raise Unreached(f"refused: {error}") from None
        finally:
            self._greetings.put_back(link, broken=True)  # the next Hello is said when this connection has been lost
        if segment is None and self.settings.tune_malloc:
            keep_freed_memory()
        self.name, self.host = welcome.name, welcome.host
        how = "shared memory" if segment is not None else "network"
        log.info("store_connected", endpoint=self.endpoint, store=welcome.name, incarnation=welcome.incarnation, by=how)
        return Session(welcome, segment, min(self.settings.ttl_s, welcome.max_ttl_s))

    def _hello(self, link: Link, deadline: float, *, shared: bool) -> protocol.Welcome:
        hello = protocol.Hello(self.next_id(), protocol.PROTOCOL_VERSION, boot_id(), shared)
        return link.ask(hello, protocol.Welcome, deadline)

    def _map(self, welcome: protocol.Welcome) -> ObjectSegment | None:
        """Map the segment, with our lock file locked before any address in it can be used."""
        path = Path(welcome.path)
        try:
            segment = ObjectSegment.attach(
                path, welcome.incarnation, entries=welcome.entries, memory_bytes=welcome.memory_bytes
            )
            if self._lock_file is None:
                self._lock_file = ClientLock(path.parent, welcome.cluster, self._client_name)
        except (SharedMemoryError, OSError) as error:
            log.warning("store_not_mapped", endpoint=self.endpoint, reason=str(error))
            return None
        return segment
