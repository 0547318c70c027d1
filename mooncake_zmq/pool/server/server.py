"""The store half of a cache-node, carried out: a ROUTER for requests, and whatever else the actor in `node.py` needs.

Clients of this host copy by themselves in the segment that shows the actor's generations; the bytes of others pass by on
streams (`streams`). With an SSD tier, `disk_works` does its I/O.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import structlog
import zmq

from mooncake_zmq.core.actor import Drained, DrainWanted, Started
from mooncake_zmq.pool.node.store_events import (
    Asked,
    ClientDied,
    Greeted,
    Probe,
    Reply,
    ShelfChanged,
)
from mooncake_zmq.pool.node.store_node import StoreFacts, StoreNode
from mooncake_zmq.pool.rules.object_log import ObjectLog
from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.server.disk_works import DiskWorks
from mooncake_zmq.pool.server.streams import STREAM, StoreStreams
from mooncake_zmq.pool.server.turns import Timers, Turns
from mooncake_zmq.pool.ssd.object_disk import ObjectDisk
from mooncake_zmq.store import protocol
from mooncake_zmq.store.protocol import encode
from mooncake_zmq.store.segment import ObjectSegment, boot_id, is_lived, life_path, remove_life
from mooncake_zmq.transfer.connections import Connections, skip_rest, take_part
from mooncake_zmq.transfer.sockets import BadEndpoint, Limits, Sockets
from mooncake_zmq.transfer.tickets import Tickets

log = structlog.get_logger()


CONNECTION, ROUTING_ID_BYTES = b"c", 21
"""b"c", 16 bytes that name the client, 4 that number its connection."""
MAX_QUEUED_REQUESTS = 32
"""Of one connection; further ones wait at its side."""
MAX_QUEUED_REPLIES = 256
"""Of one connection; further ones are dropped, as a client that waits for each answer never has so many."""
WAKE = "inproc://wake"
"""Where the server's thread can be woken by an empty message."""
WAIT_MS = 1_000
"""How long the server's thread waits at most before it looks whether it is to stop: only where it cannot be woken."""
HURRY_S = 0.05
"""How often a drain looks whether it is hurried."""
LIMITS = Limits(max_message_bytes=protocol.MAX_FRAME_BYTES, send_hwm=MAX_QUEUED_REPLIES, receive_hwm=MAX_QUEUED_REQUESTS)


class StoreServer:
    """Serves from construction until `close`. Raises SharedMemoryError, BadEndpoint, ZMQError or OSError where it cannot."""

    def __init__(
        self,
        *,
        settings: ObjectSettings,
        directory: str | Path,
        cluster: str,
        node: str,
        incarnation: int,
        endpoint: str,
        on_crash: Callable[[BaseException], None],
        stream_port: int = 0,
        probe_s: float = 1.0,
        sockets: Sockets | None = None,
        disk: ObjectDisk | None = None,
        on_shelf: Callable[[ShelfChanged], None] = lambda changed: None,
    ) -> None:
        """`stream_port`: where streams connect if `endpoint` is TCP, 0 for any free port. `disk`: closed with the server.
        `sockets`: the process's; else one's own. `on_shelf` is called within turns, from any thread."""
        self._cluster, self._directory = cluster, Path(directory)
        self._on_crash = on_crash
        self._boot_id = boot_id()
        self._counts = dict.fromkeys(("garbage", "dropped"), 0)
        self._stopping = False
        self._drained = threading.Event()
        self._replies: deque[Reply] = deque()
        """On their way to the server's thread: at most one of each connection, and of what waited for the disk."""
        objects_log = _recovered(settings, disk) if disk else None
        facts = StoreFacts(name=node, cluster=cluster, incarnation=incarnation, probe_s=probe_s)
        self._node = StoreNode(settings, facts, objects_log)
        segment = ObjectSegment.create(
            directory,
            cluster,
            node,
            incarnation,
            entries=self._node.objects.entries.table_rows,
            memory_bytes=settings.object_bytes,
        )
        self._turns = Turns(self._node, segment)
        self._sockets = (sockets or Sockets(io_threads=1)).borrow()
        try:
            self._socket = self._sockets.listening(zmq.ROUTER, endpoint, "store", LIMITS)
        except BadEndpoint:
            self._sockets.give_back()
            segment.close()
            raise
        by_tcp = endpoint.startswith("tcp://")
        self._keyed = by_tcp and self._sockets.keys is not None
        self._keyless = "" if by_tcp and settings.tenants else None
        """Who has shown no key: over TCP nobody, where it matters who one is; by ipc, this user of the machine."""
        self._connections = Connections(self._socket, self._counts, on_crash) if by_tcp else None
        self._socket.router_mandatory = True
        self._socket.router_handover = True  # a connection's name holds 128 random bits: nobody takes it by accident
        self._socket.rcvtimeo = WAIT_MS
        self._works: DiskWorks | None = None
        self._timers = Timers(self._turns, on_crash)
        self._tickets = Tickets(sealed=self._sockets.seals(endpoint), lets_in=self._lets_in)
        self._waker = self._sockets.inner(zmq.DEALER)
        """Used within turns. Its name is not one of a connection, nor to be guessed."""
        self._waker.routing_id = self._waker_name = b"w" + os.urandom(16)
        try:
            self._socket.bind(WAKE)
            self._waker.connect(WAKE)
            self._socket.bind(endpoint)
            self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
            """Where it listens, a wildcard port resolved."""
            if disk is not None:
                self._works = DiskWorks(self._turns, disk, self._node.readers, on_crash)
            self._turns.carry_out(
                {Reply: self._reply, Probe: self._probe, Drained: lambda _: self._drained.set(), ShelfChanged: on_shelf}
            )
            self._turns.take(Started())
            self._streams = StoreStreams(self._turns, self.endpoint, stream_port, self._tickets, self._user_of, on_crash)
        except BaseException:
            self._let_go()
            raise
        self._thread = threading.Thread(target=self._run, name="store-server", daemon=True)
        self._thread.start()

    def close(self, drain_until: float = 0.0, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Stop serving and remove the segment; before, write to disk what memory alone holds. May be called twice.

        Writing ends at `drain_until` (monotonic clock) at the latest, or when `is_hurried`.
        """
        if not self._stopping:
            self._stopping = True
            with self._sockets.inner(zmq.DEALER) as waker:
                waker.connect(WAKE)
                waker.send(b"")
                self._thread.join()
            self._streams.close()
            if self._works is not None:
                self._drain(drain_until, is_hurried)
            self._look_at(self._node.shared_clients())
            self._let_go()

    def _drain(self, until: float, is_hurried: Callable[[], bool]) -> None:
        if time.monotonic() < until:
            self._turns.take(DrainWanted())
            while not self._drained.wait(HURRY_S) and time.monotonic() < until and not is_hurried():
                pass
        gauges = self.gauges()
        unsaved = gauges["ssd_unsaved_bytes"] - gauges["ssd_without_room_bytes"]
        if unsaved:
            writable = bool(gauges["ssd_writable"])
            log.warning("store_drain_incomplete", unsaved_bytes=unsaved, writable=writable)

    @property
    def counts(self) -> Mapping[str, int]:
        """Counters, for metrics; safe from any thread."""
        with self._turns as node:
            counts = node.counts
        disk = self._works.counts if self._works is not None else {}
        counts["dropped"] += self._counts["dropped"]
        return {**self._counts, **counts, "garbage": self._counts["garbage"], **self._streams.counts, **disk}

    def gauges(self) -> dict[str, float]:
        """Safe from any thread. All but the pool's own are zero when no client is there."""
        with self._turns as node:
            return node.gauges()

    def check(self) -> None:
        """Assert the pool's invariants; slow, for tests."""
        with self._turns as node:
            node.check()

    def _let_go(self) -> None:
        self._timers.close()
        if self._works is not None:
            self._works.close()
        self._waker.close()
        if self._connections is not None:
            self._connections.close()
        self._socket.close()
        self._sockets.give_back()
        self._turns.segment.close()

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                # Waiting in the receive itself: a poller costs a small request a tenth of its time.
                with contextlib.suppress(zmq.Again):
                    self._receive(self._next_sender())
                while self._replies:
                    self._send(self._replies.popleft())
        except Exception as error:
            self._on_crash(error)
            log.critical("store_server_crashed", exc_info=error)

    def _next_sender(self) -> bytes:
        """The connection that the next message is from, waited for. Raises zmq.Again."""
        if self._connections is not None and not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._connections.drained()
        return self._socket.recv()

    def _receive(self, peer: bytes) -> None:
        content, shown = b"", None
        if self._socket.getsockopt(zmq.RCVMORE):
            keyed = self._keyed and len(peer) == ROUTING_ID_BYTES  # the waker has no key
            content, shown = take_part(self._socket, self._connections, keyed=keyed)
        try:
            request = protocol.decode_request(content)
        except protocol.NotAMessage:
            request = None
        skip_rest(self._socket, self._connections)
        if request is not None and len(peer) == ROUTING_ID_BYTES and peer.startswith(CONNECTION):
            user = self._keyless if shown is None else self._sockets.holder("store", shown)
            if shown is not None and not user:
                return  # his key was dropped
            if isinstance(request, protocol.Hello):
                self._turns.take(self._greeted(peer, request, user, shown or ""))
            else:
                self._turns.take(Asked(peer, request, user))
        elif not self._stopping and peer != self._waker_name:
            self._counts["garbage"] += 1

    def _user_of(self, holder: str) -> str | None:
        """As whom the actor knows the holder of a ticket, which stands for as long as his key."""
        return holder if self._keyed else self._keyless

    def _lets_in(self, holder: str) -> bool:
        return not self._keyed or bool(self._sockets.holder("store", holder))

    def _greeted(self, peer: bytes, hello: protocol.Hello, user: str | None, shown: str) -> Greeted:
        same_host = hello.boot_id == self._boot_id != ""
        path = str(self._turns.segment.path) if same_host else ""
        lives = hello.shared and same_host and is_lived(self._life_of(peer[1:17]))
        return Greeted(peer, hello, path, lives, self._tickets.make(shown).token, self._streams.endpoint, user)

    def _send(self, reply: Reply) -> None:
        message = reply.reply
        if isinstance(message, protocol.Welcome):  # the actor sees no secret
            secret = self._tickets.secret_of(message.token)
            message = msgspec.structs.replace(message, secret=secret, sealed=self._tickets.sealed)
        try:
            self._socket.send_multipart([reply.connection, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._counts["dropped"] += 1

    # --- within turns

    def _reply(self, reply: Reply) -> None:
        if reply.connection.startswith(STREAM):
            self._streams.reply(reply)
            return
        self._replies.append(reply)
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(zmq.Again):  # with so many on their way, it is awake
                self._waker.send(b"", zmq.NOBLOCK)

    def _probe(self, probe: Probe) -> None:
        """Looks at files, on the timers' thread once its turn is over."""
        self._timers.then(partial(self._look_at, probe.clients))

    def _look_at(self, clients: Sequence[bytes]) -> None:
        for name in clients:
            self._died(name)

    def _died(self, name: bytes) -> None:
        """If this client of our host does not live, nothing is left of it on the file system, and the actor is told."""
        path = self._life_of(name)
        if is_lived(path):
            return
        closed = not remove_life(path)  # it has removed it itself
        if not closed:
            log.info("store_client_died", client=name.hex())
        self._turns.take(ClientDied(name, closed))

    def _life_of(self, name: bytes) -> Path:
        return life_path(self._directory, self._cluster, name)


def _recovered(settings: ObjectSettings, disk: ObjectDisk) -> ObjectLog:
    """The log of what is on disk."""
    objects_log = ObjectLog(settings.ssd)
    objects_log.restore(disk.lengths, disk.recovered.items())
    disk.recovered = {}
    return objects_log
