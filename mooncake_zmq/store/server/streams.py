"""The bytes of a store's values, to and from clients that share no memory with it: a thread for each of their streams.

Values leave straight from their cells, under a lease, and arrive straight in cells of a put. While a thread fills a cell it
is a writer like a client of this host: a put past its time keeps its cells until the thread has let go of them. A cell read
beyond its lease may serve another value by then: the reader's checksum makes that a miss.
"""

import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import structlog

from mooncake_zmq.store.memory import checksum_of
from mooncake_zmq.store.protocol import Stranger
from mooncake_zmq.store.rules.objects import Code, Found, Grant, Objects, Pin
from mooncake_zmq.store.server.memory import StoreMemory
from mooncake_zmq.store.server.ssd import StoreSsd, StoreStopped
from mooncake_zmq.store.stream import (
    EAGER_BYTES,
    MAX_ATTACH_BYTES,
    Attach,
    Attached,
    Ended,
    Get,
    Promote,
    Put,
    Recheck,
    Stream,
    StreamError,
    StreamGarbage,
    Values,
    decode_attach,
    decode_checksums,
    decode_request,
    listen,
    promoted_bytes,
)

log = structlog.get_logger()

MAX_STREAMS = 512
"""Threads. For a further stream the one that waits longest for a request is ended, of which its client makes a new one when it
needs it; with all at work the further one is refused, and its client's call fails."""
SLICE_S = 1.0
STALL_S = 10.0
"""A client that neither takes nor sends a byte for so long, amid a request, is given up."""
ATTACH_S = 5.0
ACCEPT_AGAIN_S = 0.1
"""Pause after an accept that failed, as for want of file descriptors."""


class Clients(Protocol):
    """Who may stream. Called from the threads of streams."""

    def attach(self, attach: Attach) -> bool:
        """Is this a client of ours? Then it is one until it is detached."""

    def detach(self, client: bytes) -> None: ...

    def new_id(self) -> int:
        """For a put or a lease of a stream: one that no message of a client can name."""


class StoreStreams:
    """Serves from construction until `close`. Raises OSError where it cannot listen."""

    def __init__(
        self,
        memory: StoreMemory,
        clients: Clients,
        endpoint: str,
        port: int,
        on_crash: Callable[[BaseException], None],
        ssd: StoreSsd | None = None,
    ) -> None:
        self.counts = dict.fromkeys(("streams", "stream_garbage", "streams_refused", "corrupt_writes"), 0)
        self._memory = memory
        self._clients = clients
        self._on_crash = on_crash
        self._ssd = ssd
        self._stopping = False
        self._lock = threading.Lock()
        """Guards `counts` and `_open`."""
        self._open: dict[threading.Thread, _Served] = {}
        self._listener, self.endpoint = listen(endpoint, port)
        self._acceptor = threading.Thread(target=self._accept, name="store-streams", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """End all streams."""
        self._stopping = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        if self.endpoint.startswith("ipc://"):
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        with self._lock:
            threads = dict(self._open)
        for served in threads.values():
            served.stream.shut()
        for thread in threads:
            thread.join()

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def _accept(self) -> None:
        while not self._stopping:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._stopping:
                    log.warning("store_stream_not_accepted", reason=error.strerror)
                    time.sleep(ACCEPT_AGAIN_S)
                continue
            try:
                self._begin(connection)
            except (OSError, RuntimeError) as error:  # the latter: the system has no thread for us
                self._count("streams_refused")
                log.warning("store_stream_refused", reason=str(error))
                connection.close()

    def _begin(self, connection: socket.socket) -> None:
        with self._lock:
            others = list(self._open.values())
        if len(others) >= MAX_STREAMS:
            oldest = min(others, key=lambda served: served.waits_since)
            if oldest.waits_since == math.inf:
                raise RuntimeError(f"{MAX_STREAMS} streams are at work")
            oldest.stream.shut()
        served = _Served(self._memory, self._ssd, self._clients, connection, self._count, lambda: self._stopping)
        thread = threading.Thread(target=self._serve, args=(served,), name="store-stream", daemon=True)
        with self._lock:
            self._open[thread] = served
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                del self._open[thread]
            raise
        self._count("streams")

    def _serve(self, served: "_Served") -> None:
        try:
            served.run()
        except Exception as error:
            log.critical("store_stream_crashed", exc_info=error)
            self._on_crash(error)
        finally:
            with self._lock:
                del self._open[threading.current_thread()]
            served.stream.close()


class _Served:
    """One stream."""

    def __init__(
        self,
        memory: StoreMemory,
        ssd: StoreSsd | None,
        clients: Clients,
        connection: socket.socket,
        count: Callable[[str], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self.stream = Stream(connection, self._idle, slice_s=SLICE_S)
        self._memory = memory
        self._ssd = ssd
        self._clients = clients
        self._count = count
        self._is_stopping = is_stopping
        self._patience_s = ATTACH_S
        """How long the client may be silent."""
        self._client = b""
        self.waits_since = math.inf
        """When it began to wait for the request to come; infinite while it is at work."""

    def run(self) -> None:
        """Serve until the client ends it, falls silent amid a request, or says what is none."""
        try:
            self.stream.stop_at = time.monotonic() + ATTACH_S
            attach = self.stream.receive(decode_attach, MAX_ATTACH_BYTES)
            self.stream.stop_at = math.inf
            if not self._clients.attach(attach):
                self.stream.send(Stranger(0))
                return
        except StreamError as error:
            self._count("stream_garbage")
            log.warning("store_stream_refused", reason=str(error))
            return
        self._client = attach.client
        try:
            self.stream.send(Attached())
            while True:
                self._patience_s = math.inf
                self.waits_since = time.monotonic()
                request = self.stream.receive(decode_request)
                self.waits_since = math.inf
                self._patience_s = STALL_S
                match request:
                    case Get():
                        self._get(request)
                    case Put():
                        self._put(request)
                    case Recheck():
                        self._recheck(request)
                    case Promote():
                        self._promote(request)
        except StreamGarbage as error:
            self._count("stream_garbage")
            log.warning("store_stream_ended", client=self._client.hex(), reason=str(error))
        except StreamError as error:
            log.debug("store_stream_ended", client=self._client.hex(), reason=str(error))
        finally:
            self._clients.detach(self._client)

    def _idle(self, quiet_s: float) -> None:
        if self._is_stopping():
            raise StreamError("the store is closing")
        if quiet_s >= self._patience_s:
            raise StreamError("silent amid a request")

    def _get(self, request: Get) -> None:
        if request.caps and len(request.caps) != len(request.keys):
            raise StreamGarbage("as many caps as keys")
        caps: Sequence[float] = request.caps or [math.inf] * len(request.keys)
        start = 0
        while start < len(request.keys):
            start += self._send_some(request.keys[start:], caps[start:], request.ttl_s)

    def _send_some(self, keys: Sequence[str], caps: Sequence[float], ttl_s: float) -> int:
        """Send values of the first of `keys`, of all if nothing has to be read from disk; how many keys that were."""
        lease_ids = [self._clients.new_id()]
        with self._memory as objects:
            if self._ssd is not None:
                keys = keys[: _reach(objects, keys, caps)]
            leased = objects.lease(time.monotonic(), self._client, lease_ids[0], keys, ttl_s)
            told = [one.size if one else objects.size_on_disk(key) or 0 for key, one in zip(keys, leased, strict=True)]
        try:
            missing = [index for index, one in enumerate(leased) if not one and 0 < told[index] <= caps[index]]
            if self._ssd is not None and missing:
                promoted = [keys[index] for index in missing]
                self._ssd.promote(promoted)
                lease_ids.append(self._clients.new_id())
                with self._memory as objects:
                    came = objects.lease(time.monotonic(), self._client, lease_ids[1], promoted, ttl_s)
                for index, one in zip(missing, came, strict=True):
                    leased[index], told[index] = one, 0
            sizes, checksums, views = [], [], []
            for found, size, cap in zip(leased, told, caps, strict=False):
                fits = found is not None and found.size <= cap
                checksum = self._checksum(found) if found and fits else 0
                sizes.append(found.size if found and checksum else 0 if fits else size)
                checksums.append(checksum)
                if found and checksum:
                    views.append(self._memory.view(found.offset, found.size))
            self.stream.send(Values(sizes, checksums), views)
        finally:
            with self._memory as objects:
                for lease_id in lease_ids:
                    objects.release(self._client, lease_id)
        return len(keys)

    def _promote(self, request: Promote) -> None:
        with self._memory as objects:
            for lease_id in request.leases:
                objects.release(self._client, lease_id)
        if self._ssd is not None:
            self._ssd.promote(request.keys)
        self.stream.send(Ended([]))

    def _checksum(self, found: Found) -> int:
        """Its writer's, or one made now, as what leaves the host carries one; 0 if the value went meanwhile."""
        if found.checksum:
            return found.checksum
        checksum = checksum_of(self._memory.view(found.offset, found.size))
        with self._memory as objects:
            return checksum if objects.set_checksum(found, checksum) else 0

    def _put(self, request: Put) -> None:
        sizes = request.sizes
        if len(sizes) != len(request.keys) or len(request.checksums) not in (0, len(sizes)) or not all(sizes):
            raise StreamGarbage("a put needs a size for each key, and a checksum for each or for none")
        if request.checksums and sum(sizes) > EAGER_BYTES:
            raise StreamGarbage(f"{sum(sizes)} bytes unasked")
        now = time.monotonic()
        put_id = self._clients.new_id()
        with self._memory as objects:
            if request.again:
                objects.supersede(self._client, request.keys)
            grants = objects.reserve(
                now, self._client, put_id, request.keys, sizes, pins=Pin(request.pins), ttl_s=request.ttl_s
            )
            ttl_s = min(request.ttl_s, objects.settings.max_ttl_s)
        whole: dict[int, int] = {}
        try:
            self.stream.stop_at = now + ttl_s
            whole = self._receive(request, grants)
        finally:
            self.stream.stop_at = math.inf
            ended = self._commit(put_id, whole)
        assert ended is not None or all(grant.code is not Code.OK for grant in grants), "a put ends here alone"
        codes = [int(code) for code in ended or (grant.code for grant in grants)]
        for index, grant in enumerate(grants):
            if grant.code is Code.OK and index not in whole:
                codes[index] = Code.TRANSFER_FAILED
                self._count("corrupt_writes")
        self.stream.send(Ended(codes))

    def _commit(self, put_id: int, whole: Mapping[int, int]) -> list[Code] | None:
        def commit(objects: Objects, _: frozenset[str] = frozenset()) -> list[Code] | None:
            return objects.commit(time.monotonic(), self._client, put_id, list(whole), list(whole.values()))

        if self._ssd is None:
            with self._memory as objects:
                return commit(objects)
        try:
            return self._ssd.settle(lambda objects: objects.replaces(time.monotonic(), self._client, put_id, whole), commit)
        except StoreStopped as error:
            with self._memory as objects:
                objects.commit(time.monotonic(), self._client, put_id, [], [])
            raise StreamError(str(error)) from error

    def _receive(self, request: Put, grants: Sequence[Grant]) -> dict[int, int]:
        """Take the bytes of a put: the checksum of each value, by index, that came as it was sent."""
        granted = [index for index, grant in enumerate(grants) if grant.code is Code.OK]
        places = {index: self._memory.view(grants[index].offset, request.sizes[index]) for index in granted}
        if request.checksums:
            unwanted = memoryview(bytearray(max(request.sizes)))
            coming = list(range(len(grants)))
            came = self.stream.receive_values((places.get(i, unwanted[: request.sizes[i]]),) for i in coming)
            told = request.checksums
        else:
            self.stream.send(Ended([int(grant.code) for grant in grants]))
            coming = granted
            came = self.stream.receive_values((places[index],) for index in coming)
            told = self.stream.receive(decode_checksums).checksums
        if len(told) != len(came):
            raise StreamGarbage(f"{len(told)} checksums for {len(came)} values")
        rows = zip(coming, told, came, strict=True)
        return {index: made for index, sent, made in rows if sent == made and index in places}

    def _recheck(self, request: Recheck) -> None:
        for key in request.keys:
            with self._memory as objects:
                found = objects.find(key)
            if found and found.checksum and checksum_of(self._memory.view(found.offset, found.size)) != found.checksum:
                with self._memory as objects:
                    objects.report_corrupt(found.entry, found.generation)  # unless the cell serves another value by now


def _reach(objects: Objects, keys: Sequence[str], caps: Sequence[float]) -> int:
    """How many keys can be answered at once: all, or where some are on disk only, as many as may take up memory together."""
    if all(map(objects.by_key.__contains__, keys)):
        return len(keys)
    limit_bytes = promoted_bytes(objects.settings.object_bytes)
    total = 0
    reads = False
    for index, (key, cap) in enumerate(zip(keys, caps, strict=True)):
        size = objects.size_of(key) or 0
        total += size if size <= cap else 0
        reads = reads or (key not in objects.by_key and 0 < size <= cap)
        if index and reads and total > limit_bytes:
            return index
    return len(keys)
