"""The owner's side of block reads between hosts: it hands out streams, and serves reads of its segment on each.

Bytes are sent straight from the slot, which may be rewritten meanwhile (a lease should prevent it, a late writer may still do
it). The reader's checksum catches such a torn block: a failed block, hence a miss.

A socket cannot send from slots in GPU memory: they are first copied into pinned staging memory, whose buffers are free again
once the socket has taken their bytes. A stream holds one at a time. If all of them are in use a read waits for one, for
STAGING_WAIT_S, and is then refused, as are all others that would wait.
"""

import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Empty, SimpleQueue

import structlog
import zmq
from numpy import uint8
from numpy.typing import NDArray

from mooncake_zmq.core.records import NotAMessage, encode
from mooncake_zmq.kv import reading
from mooncake_zmq.transfer.block_messages import (
    MAX_REQUEST_BYTES,
    PROTOCOL_VERSION,
    ReadReply,
    ReadRequest,
    ReadStatus,
    StreamDenied,
    StreamOffered,
    decode_request,
    decode_wanted,
)
from mooncake_zmq.transfer.connections import Connections, receive
from mooncake_zmq.transfer.cuda import DeviceSegment
from mooncake_zmq.transfer.shared_memory import Segment
from mooncake_zmq.transfer.sockets import USER_ID, BadEndpoint, Limits, Sockets
from mooncake_zmq.transfer.stream import StreamError, StreamGarbage
from mooncake_zmq.transfer.stream_host import Guest, StreamHost, StreamServed
from mooncake_zmq.transfer.tickets import Tickets

log = structlog.get_logger()

STAGING_BYTES = 64 << 20
"""Pinned memory for sending blocks from a GPU."""
STAGING_WAIT_S = 1.0
TICKET_S = 30.0
"""Validity of a ticket: clients attach at once, unless the network is slow."""
SLICE_S = 1.0
STALL_S = 10.0
"""Time after which a reader that takes no byte of its answer is given up."""
MAX_QUEUED = 64
"""Messages of one connection in the queue of either direction; further ones wait, or are dropped."""
LIMITS = Limits(max_message_bytes=MAX_REQUEST_BYTES, send_hwm=MAX_QUEUED, receive_hwm=MAX_QUEUED)


class DataServer:
    """Serves reads of this process's own segment, on threads of its own, until closed."""

    def __init__(
        self,
        segment: Segment,
        endpoint: str,
        *,
        on_crash: Callable[[BaseException], None],
        stream_port: int = 0,
        sockets: Sockets | None = None,
    ) -> None:
        """Start to serve. `stream_port`: the port of streams if `endpoint` is TCP, 0 for any free one. `sockets`: the
        process's; None: the server makes its own. Raises BadEndpoint, zmq.ZMQError, OSError."""
        self.counts = dict.fromkeys(("reads", "bytes", "refused", "garbage", "dropped"), 0)
        self._segment = segment
        self._staging = _Staging(segment) if isinstance(segment, DeviceSegment) else None
        self._on_crash = on_crash
        self._stopping = False
        self._sockets = (sockets or Sockets(io_threads=1)).borrow()
        try:
            self._socket = self._sockets.listening(zmq.ROUTER, endpoint, "data", LIMITS)
        except BadEndpoint:
            self._sockets.give_back()
            raise
        self._keyed = self._sockets.keys is not None and endpoint.startswith("tcp://")
        self._tickets = Tickets(sealed=self._sockets.seals(endpoint), ttl_s=TICKET_S, lets_in=self._lets_in)
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._socket.router_mandatory = True
        self._connections: Connections | None = None
        try:
            if endpoint.startswith("tcp://"):
                self._connections = Connections(self._socket, self.counts, on_crash)
            self._socket.bind(endpoint)
            self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
            """Endpoint where it listens, with a wildcard port resolved."""
            self._host = StreamHost(
                self.endpoint, stream_port, self._tickets, self._make, on_crash, counts=self.counts, name="data-stream"
            )
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name="data-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; answers under way may be lost. May be called twice."""
        if self._stop >= 0:
            self._stopping = True
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            self._host.close()
            if self._staging is not None:
                self._staging.close()
            self._release()

    def _release(self) -> None:
        if self._connections is not None:
            self._connections.close()
        self._socket.close()
        self._sockets.give_back()
        os.close(self._stop)
        self._stop = -1

    # --- handing out streams

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        try:
            while self._stop not in dict(poller.poll()):
                self._drain()
        except Exception as error:
            self._on_crash(error)
            log.critical("data_server_crashed", exc_info=error)

    def _drain(self) -> None:
        for _ in range(MAX_QUEUED):
            frames = receive(self._socket, self._connections)
            if frames is None:
                return
            try:
                peer, raw = (frame.bytes for frame in frames)
                wanted = decode_wanted(raw)
            except (ValueError, NotAMessage):
                self._host.count("garbage")
            else:
                holder = str(frames[1].get(USER_ID)) if self._keyed else ""
                if self._lets_in(holder):
                    self._offer(peer, holder, wanted.protocol, wanted.incarnation)

    def _lets_in(self, holder: str) -> bool:
        return not self._keyed or bool(self._sockets.holder("data", holder))

    def _offer(self, peer: bytes, holder: str, protocol: int, incarnation: int) -> None:
        answer: StreamOffered | StreamDenied
        if (protocol, incarnation) == (PROTOCOL_VERSION, self._segment.incarnation):
            ticket = self._tickets.make(holder)
            answer = StreamOffered(self._host.endpoint, ticket.token, ticket.secret, ticket.sealed)
        else:
            answer = StreamDenied(PROTOCOL_VERSION, self._segment.incarnation)
            self._host.count("refused")
        try:
            self._socket.send_multipart([peer, encode(answer)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._host.count("dropped")

    def _make(self, guest: Guest) -> "_Served":
        return _Served(guest, self._segment, self._staging, lambda *what: self._host.count(*what), lambda: self._stopping)


class _Served(StreamServed):
    """One reader's stream."""

    def __init__(
        self,
        guest: Guest,
        segment: Segment,
        staging: "_Staging | None",
        count: Callable[..., None],
        is_stopping: Callable[[], bool],
    ) -> None:
        super().__init__(guest, SLICE_S)
        self._segment = segment
        self._staging = staging
        self._count = count
        self._is_stopping = is_stopping

    def run(self) -> None:
        try:
            for request in self.requests(decode_request, MAX_REQUEST_BYTES):
                self._serve(request)
        except StreamGarbage as error:
            self._count("garbage")
            log.warning("data_stream_ended", reason=str(error))
        except StreamError as error:
            log.debug("data_stream_ended", reason=str(error))

    def _serve(self, request: ReadRequest) -> None:
        reply = self._answer(request)
        if reply.status is not ReadStatus.OK:
            self.stream.send(reply)
            self._count("refused")
            return
        if self._staging is None:
            view = self._segment.layers_view(request.slot, request.first_layer, request.stop_layer)
            self.stream.send(reply, [view])
        else:
            with self._staging.filled(request.slot, request.first_layer, request.stop_layer) as staged:
                if staged is None:
                    self.stream.send(ReadReply(request.read_id, ReadStatus.NO_STAGING))
                    self._count("dropped")
                    return
                view = staged
                self.stream.send(reply, [view])
        self._count("reads")
        self._count("bytes", len(view))

    def _answer(self, request: ReadRequest) -> ReadReply:
        segment = self._segment
        if request.slot >= segment.slots or not request.first_layer < request.stop_layer <= segment.layout.layers:
            return ReadReply(request.read_id, ReadStatus.OUT_OF_RANGE)
        # The row is valid only if the generation is still the same, hence the second read.
        if self._fits(request):
            checksums = tuple(segment.parts(request.slot).tolist())
            if self._fits(request):
                return ReadReply(request.read_id, ReadStatus.OK, checksums)
        return ReadReply(request.read_id, ReadStatus.OTHER_GENERATION)

    def _fits(self, request: ReadRequest) -> bool:
        generation = self._segment.generation(request.slot)
        return reading.generation_stands(generation, request.generation, committed=request.committed)

    def _idle(self, quiet_s: float) -> None:
        if self._is_stopping():
            raise StreamError("the server is closing")
        if quiet_s >= STALL_S and self.waits_since == math.inf:
            raise StreamError("the reader takes nothing")


class _Staging:
    """Staging memory of a server of device slots, for its streams' threads."""

    def __init__(self, segment: DeviceSegment) -> None:
        self._segment = segment
        block_bytes = segment.layout.block_bytes
        count = max(2, STAGING_BYTES // block_bytes)
        memory = segment.staging(count * block_bytes)
        self._free: SimpleQueue[NDArray[uint8]] = SimpleQueue()
        for buffer in memory.reshape(count, block_bytes):
            self._free.put(buffer)
        self._is_stuck = False
        """Whether a wait for a buffer failed, and none has been freed since."""
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="data-staging")
        """The only thread that copies: each such thread keeps pinned memory of its own."""

    @contextmanager
    def filled(self, slot: int, first_layer: int, stop_layer: int) -> Iterator[memoryview | None]:
        """Yield a range of layers' parts as they were during the copy, or None if no buffer becomes free."""
        buffer = self._take()
        if buffer is None:
            yield None
            return
        try:
            staged = buffer[: (stop_layer - first_layer) * self._segment.layout.part_bytes]
            self._copier.submit(self._segment.copy_layers, slot, first_layer, stop_layer, staged).result()
            yield staged.data
        finally:
            self._is_stuck = False
            self._free.put(buffer)

    def close(self) -> None:
        """Free the memory, once no stream is served any more."""
        self._copier.shutdown()

    def _take(self) -> NDArray[uint8] | None:
        try:
            return self._free.get(timeout=0 if self._is_stuck else STAGING_WAIT_S)
        except Empty:
            self._is_stuck = True
            return None
