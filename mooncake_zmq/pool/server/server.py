"""The store half of a cache-node, carried out: a ROUTER for requests, and whatever else the actor in `node.py` needs.

Clients of this host copy by themselves in the segment that shows the actor's generations; the bytes of others pass by on
streams (`streams`). With an SSD tier, `disk_works` does its I/O.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import structlog
import zmq

from mooncake_zmq.core.actor import Drained, DrainWanted, EngineBlocksReported, Started
from mooncake_zmq.pool.node.store_events import Asked, ClientDied, Greeted, Probe, Reply
from mooncake_zmq.pool.node.store_node import StoreFacts, StoreNode
from mooncake_zmq.pool.rules.object_log import ObjectLog
from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.server.disk_works import DiskWorks
from mooncake_zmq.pool.server.request_socket import RequestSocket, SentRequest
from mooncake_zmq.pool.server.streams import STREAM, StoreStreams
from mooncake_zmq.pool.server.turns import TimerThread, Turns
from mooncake_zmq.pool.ssd.object_disk import ObjectDisk
from mooncake_zmq.store import protocol
from mooncake_zmq.store.protocol import encode
from mooncake_zmq.store.segment import ObjectSegment, boot_id, client_runs, host_mark, lock_path, remove_lock
from mooncake_zmq.transfer.sockets import BadEndpoint, Sockets
from mooncake_zmq.transfer.tickets import Tickets

log = structlog.get_logger()

HURRY_S = 0.05
"""How often a drain looks whether it is hurried."""


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
        host: str = "",
        stream_port: int = 0,
        probe_s: float = 1.0,
        sockets: Sockets | None = None,
        disk: ObjectDisk | None = None,
        on_engine_blocks: Callable[[EngineBlocksReported], None] = lambda changed: None,
    ) -> None:
        """`host`: its name in the configuration.

        `stream_port`: where streams connect if `endpoint` is TCP, 0 for any free port. `disk`: closed with the server.
        `sockets`: the process's; else one's own. `on_engine_blocks` is called within turns, from any thread."""
        self._cluster, self._directory = cluster, Path(directory)
        self._on_crash = on_crash
        self._boot_id = boot_id()
        self._drained = threading.Event()
        self._replies: deque[Reply] = deque()
        """On their way to the server's thread: at most one of each connection, and of what waited for the disk."""
        objects_log = _recovered(settings, disk) if disk else None
        facts = StoreFacts(name=node, cluster=cluster, incarnation=incarnation, host=host_mark(host), probe_s=probe_s)
        self._node = StoreNode(settings, facts, objects_log)
        rows = self._node.objects.entries.table_rows
        segment = ObjectSegment.create(directory, cluster, node, incarnation, entries=rows, memory_bytes=settings.object_bytes)
        self._turns = Turns(self._node, segment)
        try:
            self._requests = RequestSocket(sockets or Sockets(io_threads=1), endpoint, on_crash, tenants=bool(settings.tenants))
        except BadEndpoint:
            segment.close()
            raise
        self._works: DiskWorks | None = None
        self._timers = TimerThread(self._turns, on_crash)
        self._tickets = Tickets(sealed=self._requests.sealed, lets_in=self._requests.lets_in)
        try:
            self._requests.bind()
            self.endpoint = self._requests.endpoint
            """Where it listens, a wildcard port resolved."""
            if disk is not None:
                self._works = DiskWorks(self._turns, disk, self._node.readers, on_crash)
            self._turns.carry_out({Reply: self._reply, Probe: self._probe, EngineBlocksReported: on_engine_blocks})
            self._turns.carry_out({Drained: lambda _: self._drained.set()})
            self._turns.take(Started())
            self._streams = StoreStreams(
                self._turns, self.endpoint, stream_port, self._tickets, self._requests.user_of, on_crash
            )
        except BaseException:
            self._let_go()
            raise
        self._thread = threading.Thread(target=self._run, name="store-server", daemon=True)
        self._thread.start()

    def close(self, drain_until: float = 0.0, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Stop serving and remove the segment; before, write to disk what memory alone holds. May be called twice.

        Writing ends at `drain_until` (monotonic clock) at the latest, or when `is_hurried`.
        """
        if not self._requests.stopping:
            self._requests.stop(self._thread)
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
        received = self._requests.counts
        counts["dropped"] += received["dropped"]
        return {**received, **counts, "garbage": received["garbage"], **self._streams.counts, **disk}

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
        self._requests.close()
        self._turns.segment.close()

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._requests.stopping:
                with contextlib.suppress(zmq.Again):
                    self._take(self._requests.receive())
                while self._replies:
                    self._send(self._replies.popleft())
        except Exception as error:
            self._on_crash(error)
            log.critical("store_server_crashed", exc_info=error)

    def _take(self, sent: SentRequest | None) -> None:
        if sent is None:
            return
        if isinstance(sent.request, protocol.Hello):
            self._turns.take(self._greeted(sent.peer, sent.request, sent.user, sent.shown))
        else:
            self._turns.take(Asked(sent.peer, sent.request, sent.user))

    def _greeted(self, peer: bytes, hello: protocol.Hello, user: str | None, shown: str) -> Greeted:
        same_host = hello.boot_id == self._boot_id != ""
        path = str(self._turns.segment.path) if same_host else ""
        runs = hello.shared and same_host and client_runs(self._lock_path(peer[1:17]))
        return Greeted(peer, hello, path, runs, self._tickets.make(shown).token, self._streams.endpoint, user)

    def _send(self, reply: Reply) -> None:
        message = reply.reply
        if isinstance(message, protocol.Welcome):  # the actor sees no secret
            secret = self._tickets.secret_of(message.token)
            message = msgspec.structs.replace(message, secret=secret, sealed=self._tickets.sealed)
        self._requests.send(reply.connection, encode(message))

    # --- within turns

    def _reply(self, reply: Reply) -> None:
        if reply.connection.startswith(STREAM):
            self._streams.reply(reply)
            return
        self._replies.append(reply)
        if threading.current_thread() is not self._thread:
            self._requests.wake()

    def _probe(self, probe: Probe) -> None:
        """Looks at files, on the timers' thread once its turn is over."""
        self._timers.then(partial(self._look_at, probe.clients))

    def _look_at(self, clients: Sequence[bytes]) -> None:
        for name in clients:
            self._died(name)

    def _died(self, name: bytes) -> None:
        """If this client of our host does not run any more, remove its files, and report it to the actor."""
        path = self._lock_path(name)
        if client_runs(path):
            return
        closed = not remove_lock(path)  # it has removed it itself
        if not closed:
            log.info("store_client_died", client=name.hex())
        self._turns.take(ClientDied(name, closed))

    def _lock_path(self, name: bytes) -> Path:
        return lock_path(self._directory, self._cluster, name)


def _recovered(settings: ObjectSettings, disk: ObjectDisk) -> ObjectLog:
    """The log of what is on disk."""
    objects_log = ObjectLog(settings.ssd)
    objects_log.restore(disk.lengths, disk.recovered.items())
    disk.recovered = {}
    return objects_log
