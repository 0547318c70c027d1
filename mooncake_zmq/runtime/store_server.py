"""The store half of a cache-node: values of any size for store clients.

Requests come to one ROUTER, on a thread of its own. Clients of this host copy by themselves in the segment that shows the
pure `Objects`; the bytes of others pass by on streams (`store_streams`). With an SSD tier (`store_ssd`) this thread still does
no I/O: what must wait for the disk is answered when its writer has come to it.
"""

import contextlib
import hmac
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog
import zmq

from mooncake_zmq.cache_node.object_log import ObjectLog
from mooncake_zmq.cache_node.objects import Code, Found, Objects, ObjectSettings, Pin
from mooncake_zmq.runtime.store_memory import StoreMemory
from mooncake_zmq.runtime.store_ssd import StoreSsd
from mooncake_zmq.runtime.store_streams import StoreStreams
from mooncake_zmq.store import protocol
from mooncake_zmq.store.protocol import encode
from mooncake_zmq.store.segment import ObjectSegment, boot_id, is_lived, life_path
from mooncake_zmq.store.stream import Attach
from mooncake_zmq.transfer.object_disk import ObjectDisk
from mooncake_zmq.transfer.sockets import BadEndpoint, Limits, Sockets

log = structlog.get_logger()

NOTHING = Found(0, 0, 0, 0, 0)
ROUTING_ID_BYTES = 21
"""b"c", 16 bytes that name the client, 4 that number its connection."""
MAX_CLIENTS = 4096
IDLE_S = 60.0
"""A client of another host not heard of for so long is forgotten; if it lives, it will say Hello again."""
PROBE_AFTER_S = 5.0
"""A client of this host not heard of for so long is looked at, as is one that holds something."""
MAX_QUEUED_REQUESTS = 32
"""Of one connection; further ones wait at its side."""
MAX_QUEUED_REPLIES = 256
"""Of one connection; further ones are dropped, as a client that waits for each answer never has so many."""
WAKE = "inproc://wake"
"""Where the server's thread can be woken by an empty message."""
LIMITS = Limits(max_message_bytes=protocol.MAX_FRAME_BYTES, send_hwm=MAX_QUEUED_REPLIES, receive_hwm=MAX_QUEUED_REQUESTS)


@dataclass(slots=True)
class _Client:
    """`shared`: it maps the segment, and may write there for as long as it lives. `token`: by which its streams are its."""

    heard_at: float
    shared: bool = False
    streams: int = 0
    token: bytes = field(default_factory=lambda: os.urandom(16))


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
    ) -> None:
        """`stream_port`: where streams connect if `endpoint` is TCP, 0 for any free port. `disk`: closed with the server.
        `sockets`: the process's; else one's own."""
        self._settings = settings
        self._cluster, self._node, self._incarnation = cluster, node, incarnation
        self._on_crash = on_crash
        self._probe_s = probe_s
        self._boot_id = boot_id()
        self._counts = dict.fromkeys(("requests", "garbage", "dropped", "strangers", "clients_died"), 0)
        self._clients: dict[bytes, _Client] = {}
        """Changed within `with self._memory`, as streams attach from threads of their own."""
        self._stream_ids = itertools.count(1)
        self._stopping = self._closed = False
        self._late: deque[tuple[bytes, protocol.Reply]] = deque()
        """Answers to what waited for the disk."""
        objects = Objects(settings, _recovered(settings, disk) if disk else None)
        segment = ObjectSegment.create(
            directory, cluster, node, incarnation, entries=objects.table_entries, memory_bytes=settings.object_bytes
        )
        self._memory = StoreMemory(objects, segment)
        self._sockets = (sockets or Sockets(io_threads=1)).borrow()
        try:
            self._socket = self._sockets.listening(zmq.ROUTER, endpoint, "store", LIMITS)
        except BadEndpoint:
            self._sockets.give_back()
            segment.close()
            raise
        self._socket.router_mandatory = True
        self._socket.router_handover = True  # a connection's name holds 128 random bits: nobody takes it by accident
        self._socket.rcvtimeo = max(1, int(probe_s * 1000))
        self._ssd: StoreSsd | None = None
        self._waker = self._sockets.inner(zmq.DEALER)
        """Of the disk's writer, until that has ended. Its name is not one of a connection, nor to be guessed."""
        self._waker.routing_id = self._waker_name = b"w" + os.urandom(16)
        try:
            self._socket.bind(WAKE)
            self._waker.connect(WAKE)
            self._socket.bind(endpoint)
            self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
            """Where it listens, a wildcard port resolved."""
            if disk is not None and objects.log is not None:
                self._ssd = StoreSsd(self._memory, disk, objects.log, on_crash)
            self._streams = StoreStreams(self._memory, self, self.endpoint, stream_port, on_crash, self._ssd)
        except BaseException:
            self._let_go()
            raise
        self._thread = threading.Thread(target=self._run, name="store-server", daemon=True)
        self._thread.start()

    def close(self, drain_until: float = 0.0, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Stop serving and remove the segment; before, write to disk what memory alone holds. May be called twice.

        Writing ends at `drain_until` (monotonic clock) at the latest, or when `is_hurried`.
        """
        if not self._closed:
            self._closed = self._stopping = True
            with self._sockets.inner(zmq.DEALER) as waker:
                waker.connect(WAKE)
                waker.send(b"")
                self._thread.join()
            self._streams.close()
            if self._ssd is not None:
                self._ssd.close(drain_until, is_hurried)
            for name, client in self._clients.items():
                if client.shared:
                    self._clear_life(name)
            self._let_go()

    @property
    def counts(self) -> Mapping[str, int]:
        """Counters, for metrics; safe from any thread."""
        with self._memory as objects:
            ssd = self._ssd.counts if self._ssd is not None else {}
            return {**self._counts, **self._streams.counts, **objects.counts, **ssd}

    def gauges(self) -> dict[str, float]:
        """Safe from any thread. All but the pool's own are zero when no client is there."""
        with self._memory as objects:
            gauges = {**objects.gauges(), "clients": len(self._clients)}
        return {**gauges, **self._ssd.gauges()} if self._ssd is not None else gauges

    def check(self) -> None:
        """Assert the pool's invariants; slow, for tests."""
        with self._memory as objects:
            objects.check()

    def attach(self, attach: Attach) -> bool:
        """See `store_streams.Clients`."""
        with self._memory:
            client = self._clients.get(attach.client)
            if client is None or not hmac.compare_digest(client.token, attach.token):
                self._counts["strangers"] += 1
                return False
            client.streams += 1
            return True

    def new_id(self) -> int:
        """See `store_streams.Clients`."""
        return -next(self._stream_ids)

    def detach(self, client: bytes) -> None:
        """See `store_streams.Clients`."""
        with self._memory:
            self._clients[client].streams -= 1
            self._clients[client].heard_at = time.monotonic()

    def _let_go(self) -> None:
        if self._ssd is not None:  # in a constructor that failed
            self._ssd.close(0.0)
        self._waker.close()
        self._socket.close()
        self._sockets.give_back()
        self._memory.segment.close()

    # --- the thread

    def _run(self) -> None:
        tick_at = time.monotonic() + self._probe_s
        try:
            while not self._stopping:
                # Waiting in the receive itself: a poller costs a small request a tenth of its time.
                with contextlib.suppress(zmq.Again):
                    self._receive(self._socket.recv())
                while self._late:
                    self._send(*self._late.popleft())
                if time.monotonic() >= tick_at:
                    self._tick(time.monotonic())
                    tick_at = time.monotonic() + self._probe_s
        except Exception as error:
            log.critical("store_server_crashed", exc_info=error)
            self._on_crash(error)

    def _more(self) -> int:
        """Does the message go on?"""
        return int(self._socket.getsockopt(zmq.RCVMORE))

    def _receive(self, peer: bytes) -> None:
        try:
            request = protocol.decode_request(self._socket.recv()) if self._more() else None
        except protocol.NotAMessage:
            request = None
        while self._more():  # frames that no message of ours has
            self._socket.recv(copy=False)
        if request is not None and len(peer) == ROUTING_ID_BYTES:
            with self._memory as objects:
                reply = self._dispatch(objects, peer, request)
            if reply is not None:
                self._send(peer, reply)
        elif not self._stopping and peer != self._waker_name:
            self._counts["garbage"] += 1

    def _dispatch(self, objects: Objects, peer: bytes, request: protocol.Request) -> protocol.Reply | None:
        self._counts["requests"] += 1
        now = time.monotonic()
        name = peer[1:17]
        client = self._clients.get(name)
        if isinstance(request, protocol.Hello):
            return self._on_hello(now, objects, name, request)
        if client is None:
            self._counts["strangers"] += 1
            if isinstance(request, protocol.Release | protocol.ReportCorrupt):
                return None
            return protocol.Stranger(request.id)
        client.heard_at = now
        if isinstance(request, protocol.Remove):
            return self._when_erased(objects, peer, lambda _: request.keys, partial(_removed, request))
        if isinstance(request, protocol.RemoveAll):
            keys = objects.some_keys(protocol.REMOVED_AT_ONCE)
            return self._when_erased(objects, peer, lambda _: keys, partial(_all_removed, request, keys))
        if isinstance(request, protocol.Commit):

            def replaced(objects: Objects) -> Sequence[str]:
                return objects.replaces(time.monotonic(), name, request.put_id, request.indexes)

            return self._when_erased(objects, peer, replaced, partial(self._on_commit, name, client, request))
        return self._answer(now, objects, name, client, request)

    def _answer(
        self, now: float, objects: Objects, name: bytes, client: _Client, request: protocol.Request
    ) -> protocol.Reply | None:
        match request:
            case protocol.Exist(id, keys):
                return protocol.Codes(id, objects.exist(keys))
            case protocol.Lease():
                return self._on_lease(now, objects, name, client, request)
            case protocol.Release(leases, puts):
                for lease_id in leases:
                    objects.release(name, lease_id)
                for put_id in puts:
                    objects.commit(now, name, put_id, (), ())
            case protocol.Reserve():
                return self._on_reserve(now, objects, name, client, request)
            case protocol.SizesOf(id, keys):
                sizes = [objects.size_of(key) for key in keys]
                return protocol.Numbers(id, [Code.NOT_FOUND if size is None else size for size in sizes])
            case protocol.ListKeys(id, cursor, limit):
                return protocol.KeysListed(id, *objects.keys(cursor, limit))
            case protocol.ReportCorrupt(entries, generations):
                for entry, generation in zip(entries, generations, strict=False):
                    objects.report_corrupt(entry, generation)
        return None

    def _send(self, peer: bytes, reply: protocol.Reply) -> None:
        try:
            self._socket.send_multipart([peer, encode(reply)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._counts["dropped"] += 1

    # --- requests

    def _on_hello(self, now: float, objects: Objects, name: bytes, hello: protocol.Hello) -> protocol.Reply:
        if hello.protocol != protocol.PROTOCOL_VERSION or (name not in self._clients and len(self._clients) >= MAX_CLIENTS):
            self._counts["strangers"] += 1
            return protocol.Stranger(hello.id)
        client = self._clients.setdefault(name, _Client(now))
        client.heard_at = now
        same_host = hello.boot_id == self._boot_id != ""
        directory = self._memory.segment.path.parent
        if hello.shared and same_host and is_lived(life_path(directory, self._cluster, name)):
            client.shared = True
        return protocol.Welcome(
            hello.id,
            protocol.PROTOCOL_VERSION,
            self._node,
            self._incarnation,
            str(self._memory.segment.path) if same_host else "",
            self._cluster,
            self._settings.object_bytes,
            objects.table_entries,
            objects.max_object_bytes,
            self._settings.max_ttl_s,
            hello.shared and client.shared,
            self._streams.endpoint,
            client.token,
        )

    def _on_lease(self, now: float, objects: Objects, name: bytes, client: _Client, request: protocol.Lease) -> protocol.Reply:
        if not client.shared:
            return protocol.Codes(request.id, b"")
        leased = objects.lease(now, name, request.id, request.keys, request.ttl_s)
        if objects.log is None:
            found = [one or NOTHING for one in leased]
        else:
            found = [
                one or NOTHING._replace(size=objects.size_on_disk(key) or 0)
                for key, one in zip(request.keys, leased, strict=True)
            ]
        entries, offsets, sizes, generations, checksums = map(list, zip(*found, strict=True)) if found else ([],) * 5
        return protocol.Leased(request.id, sizes, entries, offsets, generations, checksums)

    def _on_reserve(
        self, now: float, objects: Objects, name: bytes, client: _Client, request: protocol.Reserve
    ) -> protocol.Reply:
        if not client.shared or len(request.keys) != len(request.sizes):
            return protocol.Codes(request.id, b"")
        pins = Pin(request.pins)
        grants = objects.reserve(now, name, request.id, request.keys, request.sizes, pins=pins, ttl_s=request.ttl_s)
        codes, entries, offsets, generations = map(list, zip(*grants, strict=True)) if grants else ([],) * 4
        return protocol.Reserved(request.id, list(map(int, codes)), entries, offsets, generations)

    def _when_erased(
        self,
        objects: Objects,
        peer: bytes,
        keys: Callable[[Objects], Sequence[str]],
        answer: Callable[[Objects, frozenset[str]], protocol.Reply],
    ) -> protocol.Reply | None:
        """The answer to what removes or replaces `keys`: now, or when no copy of them is on disk any more."""
        if not objects.copies_on_disk(keys(objects)):
            return answer(objects, frozenset())
        assert self._ssd is not None
        if not self._ssd.park(keys, answer, lambda reply: self._answer_late(peer, reply)):
            self._counts["dropped"] += 1
        return None

    def _answer_late(self, peer: bytes, reply: protocol.Reply) -> None:
        """Called by the disk's writer."""
        self._late.append((peer, reply))
        with contextlib.suppress(zmq.Again):  # with so many on their way, it is awake
            self._waker.send(b"", zmq.NOBLOCK)

    def _on_commit(
        self, name: bytes, client: _Client, request: protocol.Commit, objects: Objects, _: frozenset[str]
    ) -> protocol.Reply:
        if not client.shared or len(request.indexes) != len(request.checksums):
            return protocol.Codes(request.id, b"")
        codes = objects.commit(time.monotonic(), name, request.put_id, request.indexes, request.checksums)
        return protocol.Numbers(request.id, [] if codes is None else list(map(int, codes)))

    # --- time

    def _clear_life(self, name: bytes) -> bool:
        """Does this client of our host live? If not, nothing is left of it on the file system."""
        path = life_path(self._memory.segment.path.parent, self._cluster, name)
        if is_lived(path):
            return True
        if path.exists():  # one that closed has removed it
            path.unlink(missing_ok=True)
            self._counts["clients_died"] += 1
            log.info("store_client_died", client=name.hex())
        return False

    def _tick(self, now: float) -> None:
        """End what ran out of time; look whether those that hold something, or are silent, still live."""
        with self._memory as objects:
            active = objects.expire(now)
            for name, client in list(self._clients.items()):
                idle = now - client.heard_at > (PROBE_AFTER_S if client.shared else IDLE_S)
                if client.streams or not (idle or name in active):  # a stream notices by itself that its client is gone
                    continue
                if client.shared:
                    if self._clear_life(name):
                        continue
                elif not idle:
                    continue
                del self._clients[name]
                objects.bury(name)


def _recovered(settings: ObjectSettings, disk: ObjectDisk) -> ObjectLog:
    """The log of what is on disk."""
    objects_log = ObjectLog(settings.ssd)
    objects_log.restore(disk.lengths, disk.recovered.items())
    disk.recovered = {}
    return objects_log


def _removed(request: protocol.Remove, objects: Objects, erased: frozenset[str]) -> protocol.Reply:
    left = set(erased)
    codes = []
    for key in request.keys:
        was_here = objects.remove(key) or key in left
        left.discard(key)
        codes.append(int(Code.OK if was_here else Code.NOT_FOUND))
    return protocol.Numbers(request.id, codes)


def _all_removed(request: protocol.RemoveAll, keys: Sequence[str], objects: Objects, _: frozenset[str]) -> protocol.Reply:
    for key in keys:
        objects.remove(key)
    return protocol.Numbers(request.id, [len(keys)])
