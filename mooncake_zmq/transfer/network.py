"""Blocks between hosts: the owner of a segment serves reads of it, the destination asks for them and verifies all it gets.

    reader DEALER  -- [ReadRequest] -------------------------> ROUTER of the owner's data server
                   <-- [ReadReply, the layers' bytes] --------

The payload leaves straight from the slot, which may be rewritten while the frame is under way (a lease should prevent it,
a late writer may still do it). The reader's checksum catches such a torn block: a failed block, hence a miss. For the same
reason no lifetime has to be tracked: the mapping outlives its frames, and what is in it matters only if it verifies.

Slots in GPU memory have no bytes that a frame could leave from: they are first copied into pinned staging memory, whose
buffers come back when their frames are gone. A reader may hold half of them. A request beyond that, or with all of them in
use, waits for the oldest to come back, for STAGING_WAIT_S, and is dropped then, as is all that would wait for the same.

Sketch: network -> kernel -> message -> slot is one copy more than a local read, and the I/O thread does the first two, so
the reader's thread should keep up with one stream. Credits: a reader asks for at most `window_bytes` at a time per peer.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Protocol

import msgspec
import numpy as np
import structlog
import zmq
from msgspec import Meta, Struct
from numpy.typing import NDArray
from zmq.utils.monitor import recv_monitor_message

from mooncake_zmq.core.messages import Checksum, Count, SlotRef
from mooncake_zmq.kv import reading
from mooncake_zmq.kv.checksum import part_checksum
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.transfer.cuda import DeviceSegment
from mooncake_zmq.transfer.directory import Life
from mooncake_zmq.transfer.shared_memory import Segment
from mooncake_zmq.transfer.sockets import BadEndpoint, Limits, Sockets

log = structlog.get_logger()

MAX_REQUEST_BYTES = 256
MAX_HEADER_BYTES = 1 << 20
MAX_QUEUED_REPLIES = 256
"""Replies under way to one reader; further requests of it are dropped."""
MAX_OUTSTANDING_READS = 128
"""Below MAX_QUEUED_REPLIES, so that a reader that keeps to it never has a request dropped."""
STAGING_BYTES = 64 << 20
"""Pinned memory for blocks that leave a GPU; half of it is what one reader asks for at a time."""
STAGING_WAIT_S = 1.0
"""How long a buffer is waited for; the requests behind wait too, so it is done but once for each use of a buffer."""


class ReadRequest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Send layers `[first_layer, stop_layer)` of this copy. Not `committed`: the next generation will do as well."""

    read_id: Count
    incarnation: Count
    slot: Count
    generation: Count
    committed: bool
    first_layer: Count
    stop_layer: Count


class ReadStatus(Enum):
    """Whether a payload follows, and why not."""

    OK = 0
    OTHER_LIFE = 1
    OUT_OF_RANGE = 2
    OTHER_GENERATION = 3


class ReadReply(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`checksums`: of the parts of all layers, so that the reader can fold them to the block checksum it was told."""

    read_id: Count
    status: ReadStatus
    checksums: Annotated[tuple[Checksum, ...], Meta(max_length=65536)] = ()


# Flat records in frames that MAXMSGSIZE bounds: msgspec's own decoder needs no further limits, and is several times faster.
_encode = msgspec.msgpack.encode
_request_decoder = msgspec.msgpack.Decoder(ReadRequest)
_reply_decoder = msgspec.msgpack.Decoder(ReadReply)


class DataServer:
    """Serves reads of this process's own segment, on a thread of its own, until closed."""

    def __init__(
        self,
        segment: Segment,
        endpoint: str,
        *,
        on_crash: Callable[[BaseException], None],
        sockets: Sockets | None = None,
    ) -> None:
        """`sockets`: the process's; else one's own. Raises BadEndpoint, zmq.ZMQError."""
        self.counts = {"reads": 0, "bytes": 0, "refused": 0, "garbage": 0, "dropped": 0}
        self._segment = segment
        self._staging = _Staging(segment) if isinstance(segment, DeviceSegment) else None
        self._on_crash = on_crash
        limits = _limits(MAX_REQUEST_BYTES)
        self._sockets = (sockets or Sockets(io_threads=1)).borrow()
        try:
            self._socket = self._sockets.listening(zmq.ROUTER, endpoint, "data", limits)
        except BadEndpoint:
            self._sockets.give_back()
            raise
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._socket.router_mandatory = True
        try:
            self._socket.bind(endpoint)
        except BaseException:
            self._release()
            raise
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        """Where it listens, a wildcard port resolved."""
        self._thread = threading.Thread(target=self._run, name="data-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; what is under way may be lost. May be called twice."""
        if self._stop >= 0:
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            self._release()

    def _release(self) -> None:
        self._socket.close()
        self._sockets.give_back()
        os.close(self._stop)
        self._stop = -1

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        try:
            while self._stop not in dict(poller.poll()):
                self._drain()
        except Exception as error:
            log.critical("data_server_crashed", exc_info=error)
            self._on_crash(error)

    def _drain(self) -> None:
        for _ in range(MAX_QUEUED_REPLIES):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                (peer, raw) = frames
                request = _request_decoder.decode(raw)
            except (ValueError, msgspec.DecodeError):
                self.counts["garbage"] += 1
            else:
                self._serve(peer, request)

    def _serve(self, peer: bytes, request: ReadRequest) -> None:
        reply = self._answer(request)
        frames: list[bytes | memoryview] = [peer, _encode(reply)]
        staged = None
        if reply.status is ReadStatus.OK and self._staging:
            staged = self._staging.fill(peer, request.slot, request.first_layer, request.stop_layer)
            if staged is None:
                self.counts["dropped"] += 1
                return
            frames.append(staged.view)
        elif reply.status is ReadStatus.OK:
            frames.append(self._segment.layers_view(request.slot, request.first_layer, request.stop_layer))
        try:
            tracker = self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False, track=staged is not None)
            if staged:
                staged.tracker = tracker
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.counts["dropped"] += 1
            return
        if reply.status is not ReadStatus.OK:
            self.counts["refused"] += 1
            return
        self.counts["reads"] += 1
        self.counts["bytes"] += len(frames[-1])

    def _answer(self, request: ReadRequest) -> ReadReply:
        segment = self._segment
        if request.incarnation != segment.incarnation:
            return ReadReply(request.read_id, ReadStatus.OTHER_LIFE)
        if request.slot >= segment.slots or not request.first_layer < request.stop_layer <= segment.layout.layers:
            return ReadReply(request.read_id, ReadStatus.OUT_OF_RANGE)
        # The row may be used only if it belongs to this generation, hence the second look.
        if self._fits(request):
            checksums = tuple(segment.parts(request.slot).tolist())
            if self._fits(request):
                return ReadReply(request.read_id, ReadStatus.OK, checksums)
        return ReadReply(request.read_id, ReadStatus.OTHER_GENERATION)

    def _fits(self, request: ReadRequest) -> bool:
        generation = self._segment.generation(request.slot)
        return reading.generation_stands(generation, request.generation, committed=request.committed)


@dataclass(slots=True, eq=False)
class _Staged:
    """A buffer of a block's size, and the message to `peer` that leaves from it, if one was sent."""

    buffer: NDArray[np.uint8]
    view: memoryview
    peer: bytes = b""
    tracker: zmq.MessageTracker | None = None
    waited: bool = False

    def is_free(self) -> bool:
        return self.tracker is None or self.tracker.done

    def comes_back(self) -> bool:
        """Whether it is free, or soon was."""
        if self.tracker and not self.tracker.done and not self.waited:
            self.waited = True
            with contextlib.suppress(zmq.NotDone):
                self.tracker.wait(STAGING_WAIT_S)
        return self.is_free()


class _Staging:
    """The staging memory of a server of device slots; for its thread."""

    def __init__(self, segment: DeviceSegment) -> None:
        self._segment = segment
        block_bytes = segment.layout.block_bytes
        count = max(2, STAGING_BYTES // block_bytes)
        memory = segment.staging(count * block_bytes)
        self._buffers = deque(_Staged(buffer, buffer.data) for buffer in memory.reshape(count, block_bytes))

    def fill(self, peer: bytes, slot: int, first_layer: int, stop_layer: int) -> _Staged | None:
        """A range of layers' parts as they were during the copy, or None if there is no buffer for this peer."""
        used = [staged for staged in self._buffers if not staged.is_free()]
        theirs = [staged for staged in used if staged.peer == peer]
        if 2 * len(theirs) >= len(self._buffers):
            staged = theirs[0]
        else:
            staged = next((each for each in self._buffers if each.is_free()), self._buffers[0])
        if not staged.comes_back():
            return None
        size_bytes = (stop_layer - first_layer) * self._segment.layout.part_bytes
        self._segment.copy_layers(slot, first_layer, stop_layer, staged.buffer[:size_bytes])
        staged.view = staged.buffer[:size_bytes].data
        staged.peer, staged.tracker, staged.waited = peer, None, False
        self._buffers.remove(staged)  # the first is always the one that was filled longest ago
        self._buffers.append(staged)
        return staged


class ReadSink(Protocol):
    """Where a read's bytes go. Called on the reader's thread: `buffer` once at most, `part` per layer, then `end` once."""

    def buffer(self) -> memoryview | None:
        """Memory to receive the payload straight into, or None to be handed views of the received frame."""

    def part(self, layer: int, payload: memoryview, checksum: int) -> None:
        """A part that verified; `payload` lies in `buffer` if there was one."""

    def end(self, failure: ReadFailure | None) -> None:
        """Nothing more comes; None: all layers arrived and verified."""


@dataclass(slots=True, eq=False)
class RemoteRead:
    """One block, or some layers of it, to fetch."""

    source: SlotRef
    layers: range
    sink: ReadSink
    batch: "ReadBatch | None" = field(default=None, init=False)
    """None once it has ended."""
    size_bytes: int = field(default=0, init=False)


@dataclass(slots=True, eq=False)
class ReadBatch:
    """Reads that share a deadline. `finished` is called once, when all have ended."""

    reads: Sequence[RemoteRead]
    deadline: float
    finished: Callable[[], None]
    left: int


class _Link:
    """The connection to one life's data server, and what is asked of it."""

    def __init__(self, sockets: Sockets, node: str, endpoint: str, max_reply_bytes: int) -> None:
        self.waiting: deque[RemoteRead] = deque()
        self.outstanding: dict[int, RemoteRead] = {}
        self.outstanding_bytes = 0
        limits = _limits(max_reply_bytes)
        self.socket, _ = sockets.connecting(zmq.DEALER, endpoint, "data", limits, server=node, thread="reads")
        self.socket.immediate = True
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        try:
            self.socket.connect(endpoint)
        except BaseException:
            self.close()
            raise

    def take_back(self) -> list[RemoteRead]:
        """Everything asked and not ended, in its order."""
        reads = [*self.outstanding.values(), *self.waiting]
        self.outstanding.clear()
        self.waiting.clear()
        self.outstanding_bytes = 0
        return [read for read in reads if read.batch]

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)  # pyzmq leaves this to garbage collection, and until then the context cannot end
        self.socket.close()


class RemoteReader:
    """Fetches blocks from other hosts on one thread of its own. Every submitted read ends, at its deadline if not before.

    A link that breaks fails what was asked over it at once; the next read opens a new one.
    """

    def __init__(
        self,
        layout: BlockLayout,
        *,
        on_crash: Callable[[BaseException], None],
        window_bytes: int = 32 << 20,
        sockets: Sockets | None = None,
    ) -> None:
        """`sockets`: the process's; else one's own."""
        self.counts = {"reads": 0, "bytes": 0, "failed": 0, "lost_links": 0}
        self._layout = layout
        self._window_bytes = window_bytes
        self._on_crash = on_crash
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._over = False
        """The thread is gone, or about to be: whoever commands carries it out, and all reads fail."""
        self._guard = threading.Lock()
        """Of `_over`, and of what is put into `_commands`."""
        self._endpoints: dict[Life, str] = {}
        self._links: dict[Life, _Link] = {}
        self._batches: dict[int, ReadBatch] = {}
        self._next_read_id = 0
        self._sockets = (sockets or Sockets(io_threads=1)).borrow()
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="remote-reader", daemon=True)
        self._thread.start()

    def learn(self, life: Life, endpoint: str) -> None:
        """This life can be read at `endpoint`."""
        self._command(lambda: self._endpoints.update({life: endpoint}))

    def forget(self, life: Life) -> None:
        """This life is over or out of reach: fail what is asked of it."""
        self._command(lambda: self._forget(life))

    def submit(self, reads: Sequence[RemoteRead], deadline: float, finished: Callable[[], None]) -> ReadBatch:
        """Begin `reads`, at least one; `deadline` is a reading of `time.monotonic`."""
        assert reads
        batch = ReadBatch(reads, deadline, finished, len(reads))
        self._command(lambda: self._begin(batch))
        return batch

    def cancel(self, batch: ReadBatch) -> None:
        """End the reads of a batch early; no sink of it is called after its `finished`."""
        self._command(lambda: self._end_batch(batch))

    def close(self) -> None:
        """Fail everything under way and stop. May be called twice."""
        if self._wake >= 0:
            self._command(self._request_stop)
            self._thread.join()
            os.close(self._wake)
            self._wake = -1

    def _command(self, command: Callable[[], None]) -> None:
        with self._guard:
            if not self._over:
                self._commands.append(command)
                os.eventfd_write(self._wake, 1)
                return
        if threading.current_thread() is not self._thread:
            self._thread.join()
        command()

    def _request_stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:
            self._crash(error)
        finally:
            self._shut_down()

    def _crash(self, error: Exception) -> None:
        log.critical("remote_reader_crashed", exc_info=error)
        self._on_crash(error)

    def _shut_down(self) -> None:
        with self._guard:
            self._over = True
        while self._commands:
            self._commands.popleft()()
        for batch in list(self._batches.values()):
            self._end_batch(batch)
        for life in list(self._links):
            self._drop_link(life)
        self._sockets.give_back()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._timeout_ms()))
        if self._wake in ready:
            os.eventfd_read(self._wake)
            while self._commands:
                self._commands.popleft()()
        for life, link in list(self._links.items()):
            if link.socket in ready and ready[link.socket] & zmq.POLLIN:
                self._receive(life, link)
            if link.monitor in ready:
                self._lose_link(life, link)
        now = time.monotonic()
        for batch in [batch for batch in self._batches.values() if batch.deadline <= now]:
            self._expire(batch)
        for life, link in list(self._links.items()):
            self._ask(life, link)

    def _timeout_ms(self) -> int | None:
        if not self._batches:
            return None
        left_s = min(batch.deadline for batch in self._batches.values()) - time.monotonic()
        return min(max(0, int(left_s * 1000) + 1), 60_000)

    # --- what was commanded

    def _begin(self, batch: ReadBatch) -> None:
        self._batches[id(batch)] = batch
        for read in batch.reads:
            read.batch = batch
            read.size_bytes = len(read.layers) * self._layout.part_bytes
        for read in batch.reads:
            link = self._link((read.source.node, read.source.incarnation))
            if link:
                link.waiting.append(read)
            else:
                self._end(read, ReadFailure.UNREACHED)

    def _link(self, life: Life) -> _Link | None:
        link = self._links.get(life)
        if link is None and life in self._endpoints and not self._over:
            try:
                link = _Link(self._sockets, life[0], self._endpoints[life], self._layout.block_bytes + MAX_HEADER_BYTES)
            except (zmq.ZMQError, BadEndpoint) as error:
                log.warning("data_endpoint_unusable", node=life[0], endpoint=self._endpoints[life], error=str(error))
                return None
            self._links[life] = link
            self._poller.register(link.monitor, zmq.POLLIN)
        return link

    def _forget(self, life: Life) -> None:
        self._endpoints.pop(life, None)
        for read in self._drop_link(life):
            self._end(read, ReadFailure.UNREACHED)

    def _end_batch(self, batch: ReadBatch) -> None:
        for read in batch.reads:
            if read.batch:
                self._end(read, ReadFailure.UNREACHED)

    def _end(self, read: RemoteRead, failure: ReadFailure | None) -> None:
        batch, read.batch = read.batch, None
        assert batch
        self.counts["failed" if failure else "reads"] += 1
        try:
            read.sink.end(failure)
        except Exception as error:  # the others of its batch must still end
            self._crash(error)
        batch.left -= 1
        if not batch.left:
            del self._batches[id(batch)]
            batch.finished()

    # --- time and links

    def _expire(self, batch: ReadBatch) -> None:
        """Fail what is late. A link that kept it waiting begins anew, as its credits may be lost; the rest is asked again."""
        late = {id(read) for read in batch.reads if read.batch}
        self._end_batch(batch)
        for life, link in list(self._links.items()):
            if any(id(read) in late for read in link.outstanding.values()):
                reads = self._drop_link(life)
                new = self._link(life) if reads else None
                for read in reads:
                    if new:
                        new.waiting.append(read)
                    else:
                        self._end(read, ReadFailure.UNREACHED)

    def _lose_link(self, life: Life, link: _Link) -> None:
        event = recv_monitor_message(link.monitor)
        log.warning("data_link_lost", node=life[0], incarnation=life[1], zmq_event=zmq.Event(event["event"]).name)
        self.counts["lost_links"] += 1
        for read in self._drop_link(life):
            self._end(read, ReadFailure.UNREACHED)

    def _drop_link(self, life: Life) -> list[RemoteRead]:
        """Close a link; returns what it was asked for."""
        link = self._links.pop(life, None)
        if link is None:
            return []
        self._poller.unregister(link.monitor)
        if link.socket in self._poller:
            self._poller.unregister(link.socket)
        link.close()
        return link.take_back()

    def _ask(self, life: Life, link: _Link) -> None:
        """Send requests as far as the credits go. A link that is not connected yet is polled for that."""
        events = zmq.POLLIN
        while link.waiting:
            read = link.waiting[0]
            if read.batch is None:  # cancelled while it waited
                link.waiting.popleft()
                continue
            if link.outstanding and link.outstanding_bytes + read.size_bytes > self._window_bytes:
                break
            if len(link.outstanding) >= MAX_OUTSTANDING_READS:
                break
            try:
                link.socket.send(_encode(self._request(read)), zmq.NOBLOCK)
            except zmq.Again:
                events |= zmq.POLLOUT
                break
            link.outstanding[self._next_read_id] = link.waiting.popleft()
            link.outstanding_bytes += read.size_bytes
            self._next_read_id += 1
        self._poller.register(link.socket, events)

    def _request(self, read: RemoteRead) -> ReadRequest:
        source = read.source
        return ReadRequest(
            self._next_read_id,
            source.incarnation,
            source.slot,
            source.generation,
            source.checksum != 0,
            read.layers.start,
            read.layers.stop,
        )

    # --- replies

    def _receive(self, life: Life, link: _Link) -> None:
        for _ in range(MAX_OUTSTANDING_READS):
            try:
                raw = link.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(link, raw)
            while link.socket.rcvmore:  # the payload of a read that has ended, or frames of a faulty server
                link.socket.recv_into(bytearray())
            if link.waiting:
                self._ask(life, link)

    def _take(self, link: _Link, raw: bytes) -> None:
        try:
            reply = _reply_decoder.decode(raw)
        except msgspec.DecodeError as error:
            log.warning("data_reply_garbage", error=str(error))
            return
        read = link.outstanding.pop(reply.read_id, None)
        if read is None:
            return
        link.outstanding_bytes -= read.size_bytes
        if read.batch:
            self._end(read, self._accept(link.socket, read, reply))

    def _accept(self, socket: "zmq.Socket[bytes]", read: RemoteRead, reply: ReadReply) -> ReadFailure | None:
        """Receive the payload and hand its parts on, each after its checksum was compared.

        What is torn because its slot was taken away meanwhile looks corrupt here; its owner knows better by the generation.
        """
        layout, checksums = self._layout, reply.checksums
        if reply.status is not ReadStatus.OK or not socket.rcvmore or len(checksums) != layout.layers:
            return ReadFailure.UNREACHED
        if not reading.row_stands(checksums, read.source.checksum):
            return ReadFailure.CORRUPT
        buffer = read.sink.buffer()
        if buffer is None:
            payload = socket.recv(copy=False).buffer
            size_bytes = len(payload)
        else:
            payload = buffer
            size_bytes = socket.recv_into(buffer)
        if size_bytes != read.size_bytes:
            return ReadFailure.UNREACHED
        self.counts["bytes"] += size_bytes
        for index, layer in enumerate(read.layers):
            part = payload[index * layout.part_bytes : (index + 1) * layout.part_bytes]
            if not reading.part_stands(part_checksum(part), checksums[layer]):
                return ReadFailure.CORRUPT
            read.sink.part(layer, part, checksums[layer])
        return None


def _limits(max_message_bytes: int) -> Limits:
    return Limits(max_message_bytes=max_message_bytes, send_hwm=MAX_QUEUED_REPLIES, receive_hwm=MAX_QUEUED_REPLIES)
