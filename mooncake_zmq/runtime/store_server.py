"""The store half of a cache-node: one thread with one ROUTER that serves values of any size to store clients.

It owns the pure `Objects`, the segment that shows their generations, and what it knows of each client. Clients of this host
copy by themselves in the segment; for the others it receives payload frames into cells and sends them out of cells without
a copy of its own. A cell may be reused while its frame is on the way: the reader's checksum then makes that a miss.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog
import zmq

from mooncake_zmq.cache_node.objects import Code, Found, Objects, ObjectSettings, Pin
from mooncake_zmq.store import protocol
from mooncake_zmq.store.memory import Checksum, checksum_of, keep_freed_memory
from mooncake_zmq.store.protocol import encode
from mooncake_zmq.store.segment import ObjectSegment, boot_id, is_lived, life_path

log = structlog.get_logger()

Configure = Callable[["zmq.Socket[bytes]"], None]

ROUTING_ID_BYTES = 21
"""b"c", 16 bytes that name the client, 4 that number its connection."""
MAX_CLIENTS = 4096
IDLE_S = 60.0
"""A client of another host not heard of for so long is forgotten; if it lives, it will say Hello again."""
PROBE_AFTER_S = 5.0
"""A client of this host not heard of for so long is looked at, as is one that holds something."""
MAX_QUEUED_REQUESTS = 32
"""Of one connection; with payloads of at most 2 MiB this bounds what a fast writer piles up. Further ones wait at its side."""
ZERO_COPY_BYTES = 256 << 10
"""From this size on a payload leaves straight from its cell; pyzmq's bookkeeping for that costs more than a shorter copy."""
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000


def plain(socket: "zmq.Socket[bytes]") -> None:
    """No security: for trusted networks."""


@dataclass(slots=True)
class _Incoming:
    """A value that arrives in pieces, in order."""

    received: int = 0
    checksum: Checksum = field(default_factory=Checksum)


@dataclass(slots=True)
class _Client:
    """`shared`: it maps the segment, and may write there for as long as it lives."""

    heard_at: float
    shared: bool = False
    incoming: dict[tuple[int, int], _Incoming] = field(default_factory=dict)
    """(put id, index) -> what came of it."""


class StoreServer:
    """Serves from construction until `close`. Raises SharedMemoryError or zmq.ZMQError where it cannot."""

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
        probe_s: float = 1.0,
        configure: Configure = plain,
    ) -> None:
        self._objects = Objects(settings)
        self._settings = settings
        self._cluster, self._node, self._incarnation = cluster, node, incarnation
        self._on_crash = on_crash
        self._probe_s = probe_s
        self._boot_id = boot_id()
        self._counts = dict.fromkeys(("requests", "garbage", "dropped", "strangers", "corrupt_writes", "clients_died"), 0)
        self._clients: dict[bytes, _Client] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._segment = ObjectSegment.create(
            directory,
            cluster,
            node,
            incarnation,
            entries=self._objects.table_entries,
            memory_bytes=settings.object_bytes,
        )
        keep_freed_memory()
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.maxmsgsize = protocol.MAX_FRAME_BYTES
        self._socket.heartbeat_ivl = HEARTBEAT_MS
        self._socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
        self._socket.tcp_keepalive = 1
        self._socket.router_mandatory = True
        self._socket.router_handover = True  # a connection's name holds 128 random bits: nobody takes it by accident
        self._socket.rcvtimeo = max(1, int(probe_s * 1000))
        self._socket.sndhwm = 2 * protocol.MAX_OUTSTANDING
        self._socket.rcvhwm = MAX_QUEUED_REQUESTS
        # By which other threads of this process call: it wakes the server's thread.
        self._waker = self._context.socket(zmq.DEALER)
        self._waker.linger = 0
        self._waker.routing_id = self._waker_name = b"w" + os.urandom(16)
        self._waking = threading.Lock()
        try:
            self._socket.bind("inproc://wake")
            self._waker.connect("inproc://wake")
            configure(self._socket)
            self._socket.bind(endpoint)
        except BaseException:
            self._let_go()
            raise
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        """Where it listens, a wildcard port resolved."""
        self._thread = threading.Thread(target=self._run, name="store-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and remove the segment. May be called twice."""
        if not self._closed:
            self._stopping = True
            self._on_thread(lambda: None)
            self._thread.join()
            for name, client in self._clients.items():
                if client.shared:
                    self._clear_life(name)
            self._let_go()

    @property
    def counts(self) -> Mapping[str, int]:
        """Counters, for metrics; safe from any thread."""
        return {**self._counts, **self._objects.counts}

    def gauges(self) -> dict[str, float]:
        """Asked of the server's thread, from another one. All but the pool's own are zero when no client is there."""
        answer: Future[dict[str, float]] = Future()
        self._on_thread(lambda: answer.set_result({**self._objects.gauges(), "clients": len(self._clients)}))
        return answer.result(timeout=5)

    def check(self) -> None:
        """Assert the pool's invariants, on the server's thread; slow, for tests."""
        answer: Future[None] = Future()

        def check() -> None:
            try:
                self._objects.check()
            except AssertionError as error:
                answer.set_exception(error)
            else:
                answer.set_result(None)

        self._on_thread(check)
        answer.result(timeout=5)

    def _on_thread(self, call: Callable[[], None]) -> None:
        """Without a thread any more, whoever calls carries it out."""
        self._calls.append(call)
        with self._waking:
            if not self._closed:
                with contextlib.suppress(zmq.Again):  # so many wait already that it is awake, or dead
                    self._waker.send(b"", zmq.NOBLOCK)
        if not self._thread.is_alive():
            self._run_calls()

    def _let_go(self) -> None:
        with self._waking:
            self._closed = True
            self._waker.close()
        self._socket.close()
        self._context.term()
        self._segment.close()

    # --- the thread

    def _run(self) -> None:
        tick_at = time.monotonic() + self._probe_s
        try:
            while not self._stopping:
                # Waiting in the receive itself: a poller costs a small request a tenth of its time.
                with contextlib.suppress(zmq.Again):
                    self._receive(self._socket.recv())
                if time.monotonic() >= tick_at:
                    self._tick(time.monotonic())
                    tick_at = time.monotonic() + self._probe_s
        except Exception as error:
            log.critical("store_server_crashed", exc_info=error)
            self._on_crash(error)
        finally:
            self._stopping = True
            self._run_calls()

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _more(self) -> int:
        """Does the message go on?"""
        return int(self._socket.getsockopt(zmq.RCVMORE))

    def _receive(self, peer: bytes) -> None:
        try:
            request = protocol.decode_request(self._socket.recv()) if self._more() and peer != self._waker_name else None
        except msgspec.DecodeError:
            request = None
        if peer == self._waker_name:
            self._run_calls()
        elif request is None or len(peer) != ROUTING_ID_BYTES:
            self._counts["garbage"] += 1
        else:
            self._dispatch(peer, request)
        while self._more():  # a payload that nobody wanted
            self._socket.recv(copy=False)

    def _dispatch(self, peer: bytes, request: protocol.Request) -> None:
        self._counts["requests"] += 1
        now = time.monotonic()
        name = peer[1:17]
        client = self._clients.get(name)
        if isinstance(request, protocol.Hello):
            self._send(peer, self._on_hello(now, name, request))
        elif client is None:
            self._counts["strangers"] += 1
            if not isinstance(request, protocol.Release | protocol.ReportCorrupt | protocol.WritePiece):
                self._send(peer, protocol.Stranger(request.id))
        else:
            client.heard_at = now
            self._on_request(now, peer, name, client, request)

    def _on_request(self, now: float, peer: bytes, name: bytes, client: _Client, request: protocol.Request) -> None:
        objects = self._objects
        match request:
            case protocol.Exist(id, keys):
                self._send(peer, protocol.Codes(id, bytes(map(objects.by_key.__contains__, keys))))
            case protocol.Lease():
                self._send(peer, self._on_lease(now, name, client, request))
            case protocol.Release(leases, puts):
                for lease_id in leases:
                    objects.release(name, lease_id)
                for put_id in puts:
                    objects.commit(now, name, put_id, (), ())
                self._fence()
            case protocol.Reserve():
                self._send(peer, self._on_reserve(now, name, client, request))
            case protocol.Commit():
                self._send(peer, self._on_commit(now, name, client, request))
            case protocol.Read():
                self._on_read(peer, request)
            case protocol.Write():
                self._send(peer, protocol.Numbers(request.id, [self._on_write(now, name, request)]))
            case protocol.WritePiece():
                self._on_piece(name, client, request)
            case protocol.SizesOf(id, keys):
                sizes = [objects.size_of(key) for key in keys]
                self._send(peer, protocol.Numbers(id, [Code.NOT_FOUND if size is None else size for size in sizes]))
            case protocol.Remove(id, keys):
                codes = [Code.OK if objects.remove(key) else Code.NOT_FOUND for key in keys]
                self._send(peer, protocol.Numbers(id, list(map(int, codes))))
            case protocol.RemoveAll(id):
                self._send(peer, protocol.Numbers(id, [objects.remove_all(protocol.REMOVED_AT_ONCE)]))
            case protocol.ListKeys(id, cursor, limit):
                self._send(peer, protocol.KeysListed(id, *objects.keys(cursor, limit)))
            case protocol.ReportCorrupt(entries, generations):
                for entry, generation in zip(entries, generations, strict=False):
                    objects.report_corrupt(entry, generation)
                self._fence()

    def _send(self, peer: bytes, reply: protocol.Reply, payload: memoryview | None = None) -> None:
        """What changed becomes visible in the segment before anybody is told."""
        self._fence()
        frames: list[bytes | memoryview] = [peer, encode(reply)]
        if payload is not None:
            frames.append(payload)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=payload is None or len(payload) < ZERO_COPY_BYTES)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._counts["dropped"] += 1

    def _fence(self) -> None:
        fences = self._objects.fences
        if fences:
            generations = self._segment.generations
            for entry, generation in fences:
                generations[entry] = generation
            fences.clear()

    # --- requests

    def _on_hello(self, now: float, name: bytes, hello: protocol.Hello) -> protocol.Reply:
        if hello.protocol != protocol.PROTOCOL_VERSION or (name not in self._clients and len(self._clients) >= MAX_CLIENTS):
            self._counts["strangers"] += 1
            return protocol.Stranger(hello.id)
        client = self._clients.setdefault(name, _Client(now))
        client.heard_at = now
        same_host = hello.boot_id == self._boot_id != ""
        directory = self._segment.path.parent
        if hello.shared and same_host and is_lived(life_path(directory, self._cluster, name)):
            client.shared = True
        return protocol.Welcome(
            hello.id,
            protocol.PROTOCOL_VERSION,
            self._node,
            self._incarnation,
            str(self._segment.path) if same_host else "",
            self._cluster,
            self._settings.object_bytes,
            self._objects.table_entries,
            self._objects.max_object_bytes,
            self._settings.max_ttl_s,
            hello.shared and client.shared,
        )

    def _on_lease(self, now: float, name: bytes, client: _Client, request: protocol.Lease) -> protocol.Reply:
        if not client.shared:
            return protocol.Codes(request.id, b"")
        nothing = Found(0, 0, 0, 0, 0)
        found = [one or nothing for one in self._objects.lease(now, name, request.id, request.keys, request.ttl_s)]
        entries, offsets, sizes, generations, checksums = map(list, zip(*found, strict=True)) if found else ([],) * 5
        return protocol.Leased(request.id, sizes, entries, offsets, generations, checksums)

    def _on_reserve(self, now: float, name: bytes, client: _Client, request: protocol.Reserve) -> protocol.Reply:
        if len(request.keys) != len(request.sizes):
            return protocol.Codes(request.id, b"")
        grants = self._objects.reserve(
            now,
            name,
            request.id,
            request.keys,
            request.sizes,
            pins=Pin(request.pins),
            ttl_s=request.ttl_s,
            shared=client.shared,
        )
        codes, entries, offsets, generations = map(list, zip(*grants, strict=True)) if grants else ([],) * 4
        return protocol.Reserved(request.id, list(map(int, codes)), entries, offsets, generations)

    def _on_commit(self, now: float, name: bytes, client: _Client, request: protocol.Commit) -> protocol.Reply:
        if len(request.indexes) != len(request.checksums):
            return protocol.Codes(request.id, b"")
        indexes, checksums = request.indexes, request.checksums
        torn: set[int] = set()
        if not client.shared:
            torn = {
                i
                for i, checksum in zip(indexes, checksums, strict=True)
                if not self._arrived(name, client, request, i, checksum)
            }
            self._counts["corrupt_writes"] += len(torn)
            whole = [(i, checksum) for i, checksum in zip(indexes, checksums, strict=True) if i not in torn]
            indexes, checksums = [i for i, _ in whole], [checksum for _, checksum in whole]
        codes = self._objects.commit(now, name, request.put_id, indexes, checksums)
        if codes is None:
            return protocol.Numbers(request.id, [])
        return protocol.Numbers(request.id, [int(Code.TRANSFER_FAILED if i in torn else code) for i, code in enumerate(codes)])

    def _arrived(self, name: bytes, client: _Client, request: protocol.Commit, index: int, checksum: int) -> bool:
        """Did all pieces of this value come, and are they what was sent?"""
        incoming = client.incoming.pop((request.put_id, index), None)
        cell = self._objects.writable(name, request.put_id, index)
        if incoming is None or cell is None:
            return False
        return incoming.received == cell[1] and incoming.checksum.value() == checksum

    def _on_piece(self, name: bytes, client: _Client, request: protocol.WritePiece) -> None:
        cell = self._objects.writable(name, request.put_id, request.index)
        if cell is None or client.shared or not self._more():
            return
        offset, size = cell
        incoming = client.incoming.setdefault((request.put_id, request.index), _Incoming())
        room = min(size - incoming.received, protocol.MAX_FRAME_BYTES)
        if request.offset != incoming.received or room <= 0:
            incoming.received = -1  # never whole again
            return
        view = self._segment.memory[offset + incoming.received : offset + incoming.received + room]
        length = self._socket.recv_into(view)
        if length > room:
            incoming.received = -1
            return
        incoming.checksum.update(view[:length])
        incoming.received += length

    def _on_write(self, now: float, name: bytes, request: protocol.Write) -> int:
        """A value of one piece: reserved, received and committed at once, or not at all."""
        if not self._more() or request.size > protocol.PIECE_BYTES:
            return Code.INVALID
        objects = self._objects
        (grant,) = objects.reserve(
            now, name, request.id, [request.key], [request.size], pins=Pin(request.pins), ttl_s=1.0, shared=False
        )
        if grant.code is not Code.OK:
            return grant.code
        self._fence()
        cell = self._segment.memory[grant.offset : grant.offset + request.size]
        length = self._socket.recv_into(cell)
        if length != request.size or checksum_of(cell) != request.checksum:
            self._counts["corrupt_writes"] += 1
            objects.commit(now, name, request.id, (), ())
            return Code.TRANSFER_FAILED
        codes = objects.commit(now, name, request.id, (0,), (request.checksum,))
        assert codes is not None
        return codes[0]

    def _on_read(self, peer: bytes, request: protocol.Read) -> None:
        columns: tuple[Sequence[object], ...] = (request.keys, request.offsets, request.lengths, request.generations)
        if any(len(column) != len(request.tokens) for column in columns):
            self._counts["garbage"] += 1
            return
        rows = zip(request.tokens, request.keys, request.offsets, request.lengths, request.generations, strict=True)
        for token, key, offset, length, generation in rows:
            found = self._objects.find(key)
            if found is None or generation not in (0, found.generation):
                self._send(peer, protocol.Part(request.id, token, 0, 0, 0))
                continue
            if found.checksum == 0:  # its writer made none, but what leaves the host carries one
                value = self._segment.memory[found.offset : found.offset + found.size]
                found = found._replace(checksum=checksum_of(value))
                self._objects.set_checksum(found, found.checksum)
            stop = min(offset + length, found.size, offset + protocol.PIECE_BYTES)
            payload = self._segment.memory[found.offset + offset : found.offset + max(stop, offset)]
            self._send(peer, protocol.Part(request.id, token, found.size, found.generation, found.checksum), payload)

    # --- time

    def _clear_life(self, name: bytes) -> bool:
        """Does this client of our host live? If not, nothing is left of it on the file system."""
        path = life_path(self._segment.path.parent, self._cluster, name)
        if is_lived(path):
            return True
        if path.exists():  # one that closed has removed it
            path.unlink(missing_ok=True)
            self._counts["clients_died"] += 1
            log.info("store_client_died", client=name.hex())
        return False

    def _tick(self, now: float) -> None:
        """End what ran out of time; look whether those that hold something, or are silent, still live."""
        active = self._objects.expire(now)
        for name, client in list(self._clients.items()):
            idle = now - client.heard_at > (PROBE_AFTER_S if client.shared else IDLE_S)
            if not (idle or name in active):
                continue
            if client.shared:
                if self._clear_life(name):
                    continue
            elif not idle:
                continue
            del self._clients[name]
            self._objects.bury(name)
        for name, client in self._clients.items():
            gone = [key for key in client.incoming if self._objects.writable(name, *key) is None]
            for key in gone:
                del client.incoming[key]
        self._fence()
