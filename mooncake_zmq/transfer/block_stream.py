"""The reader's end of a stream from another host's data server: opened by a thread that may block, read by one that may not.

The bytes of a read go from the kernel into its sink's buffer, and are hashed while they are in the CPU's cache; encrypted ones
are decrypted into that buffer. Bytes of an attacker fail their checksum, or end the stream.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from mooncake_zmq.core.records import NotAMessage, encode
from mooncake_zmq.kv import reading
from mooncake_zmq.kv.checksum import part_checksum
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.transfer.block_messages import (
    MAX_OFFER_BYTES,
    MAX_REPLY_BYTES,
    PROTOCOL_VERSION,
    ReadReply,
    ReadRequest,
    ReadStatus,
    StreamDenied,
    StreamOffered,
    StreamWanted,
    decode_offer,
    decode_reply,
)
from mooncake_zmq.transfer.channel import Channel, ChannelLost, RemoteRead
from mooncake_zmq.transfer.directory import Incarnation
from mooncake_zmq.transfer.sealing import RECORD_BYTES, Broken, Opener
from mooncake_zmq.transfer.sockets import BadEndpoint, Limits, Sockets, connect_beside
from mooncake_zmq.transfer.stream import LENGTH, Stream, StreamError, decoded, framed, length_of
from mooncake_zmq.transfer.tickets import Ticket

OPEN_S = 5.0
"""Timeout of opening a stream. Reads that wait for it then fail, if they did not miss their deadlines before."""
SLICE_S = 0.05
"""Interval in which the opening thread checks whether the stream is still wanted."""
LIMITS = Limits(max_message_bytes=MAX_OFFER_BYTES, send_hwm=1, receive_hwm=8)
_LOSS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_LOSS |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class BlockStreams:
    """Opens streams to data servers; see `channel.OpenChannel`."""

    def __init__(self, layout: BlockLayout, sockets: Sockets) -> None:
        self._layout = layout
        self._sockets = sockets

    def open(self, incarnation: Incarnation, endpoint: str, is_over: Callable[[], bool]) -> Channel:
        until = time.monotonic() + OPEN_S
        try:
            offer = self._ask(incarnation, endpoint, until, is_over)
            if isinstance(offer, StreamDenied):
                raise ChannelLost(f"its incarnation is {offer.incarnation}, its protocol {offer.protocol}")
            connection = connect_beside(offer.where, endpoint, until - time.monotonic(), is_over)
        except (zmq.ZMQError, BadEndpoint, NotAMessage, OSError, ValueError, OverflowError) as error:
            raise ChannelLost(str(error)) from error

        def idle(_: float) -> None:
            _check(until, is_over)

        stream = Stream(connection, idle, slice_s=SLICE_S)
        try:
            stream.stop_at = until
            stream.attach(Ticket(offer.token, offer.secret, offer.sealed))
            return StreamChannel(stream, self._layout)
        except BaseException as error:
            stream.close()
            if isinstance(error, StreamError):
                raise ChannelLost(str(error)) from error
            raise

    def _ask(
        self, incarnation: Incarnation, endpoint: str, until: float, is_over: Callable[[], bool]
    ) -> StreamOffered | StreamDenied:
        socket, _ = self._sockets.connecting(zmq.DEALER, endpoint, "data", LIMITS, server=incarnation[0])
        socket.immediate = True
        socket.sndtimeo = socket.rcvtimeo = int(SLICE_S * 1000)
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_LOSS)
        sent = False
        try:
            socket.connect(endpoint)
            while True:
                with contextlib.suppress(zmq.Again):
                    if not sent:
                        socket.send(encode(StreamWanted(PROTOCOL_VERSION, incarnation[1])))
                        sent = True
                    return decode_offer(socket.recv())
                _check(until, is_over)
                if monitor.poll(0):
                    raise ChannelLost(f"not connected ({zmq.Event(recv_monitor_message(monitor)['event']).name})")
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close()


def _check(until: float, is_over: Callable[[], bool]) -> None:
    if is_over():
        raise ChannelLost("not wanted any more")
    if time.monotonic() >= until:
        raise ChannelLost("no answer in time")


class StreamChannel:
    """See `channel.Channel`."""

    def __init__(self, stream: Stream, layout: BlockLayout) -> None:
        """Take over `stream`, which is attached and has no other user."""
        self._stream = stream
        self._layout = layout
        self._connection = stream.connection
        self._connection.setblocking(False)
        self._asked: deque[tuple[int, RemoteRead]] = deque()
        self._unsent = b""
        self._landing: RemoteRead | None = None
        self._scratch = memoryview(b"")
        self._length = memoryview(bytearray(LENGTH.size))
        self._next_id = 0
        self._answers = self._receive()

    def fileno(self) -> int:
        return self._connection.fileno()

    def ask(self, reads: Sequence[RemoteRead]) -> None:
        requests = []
        for read in reads:
            source, layers = read.source, read.layers
            requests.append(
                ReadRequest(self._next_id, source.slot, source.generation, source.checksum != 0, layers.start, layers.stop)
            )
            self._asked.append((self._next_id, read))
            self._next_id += 1
        try:
            self._send(b"".join(map(framed, requests)))
        except Broken as error:
            raise ChannelLost(str(error)) from error

    def ended(self) -> Iterator[tuple[RemoteRead, ReadFailure | None]]:
        try:
            if self._unsent:
                self._flush()
            for outcome in self._answers:
                if outcome is None:
                    return
                yield outcome
        except (StreamError, Broken) as error:
            raise ChannelLost(str(error)) from error
        except OSError as error:
            raise ChannelLost(f"the connection ended: {error.strerror}") from error

    def landing(self) -> Sequence[RemoteRead]:
        return () if self._landing is None else (self._landing,)

    def close(self) -> None:
        self._stream.close()

    # --- out

    def _send(self, raw: bytes) -> None:
        sealer = self._stream.sealer
        self._unsent += raw if sealer is None else b"".join(map(bytes, sealer.records([memoryview(raw)])))
        self._flush()

    def _flush(self) -> None:
        """Send as much as the kernel takes; the rest follows when the server answers the requests that it has."""
        try:
            with contextlib.suppress(BlockingIOError):
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except OSError as error:
            raise ChannelLost(f"the connection ended: {error.strerror}") from error

    # --- in

    def _receive(self) -> Iterator[tuple[RemoteRead, ReadFailure | None] | None]:
        """Yield one result after another; None whenever more bytes have to arrive first."""
        while True:
            yield from self._fill(self._length)
            body = memoryview(bytearray(length_of(self._length, MAX_REPLY_BYTES)))
            yield from self._fill(body)
            reply = decoded(decode_reply, body)
            if not self._asked or reply.read_id != self._asked[0][0]:
                raise StreamError("an answer to what was not asked")
            read = self._asked[0][1]
            failure = yield from self._accept(read, reply)
            self._asked.popleft()
            yield read, failure

    def _accept(self, read: RemoteRead, reply: ReadReply) -> Generator[None, None, ReadFailure | None]:
        """Receive the bytes and hand the parts on, each after its checksum was compared.

        A part that is torn because its slot was reused meanwhile looks corrupt here; its owner knows better by the generation.
        """
        layout, row = self._layout, reply.checksums
        if reply.status is not ReadStatus.OK:
            return ReadFailure.UNREACHED
        if len(row) != layout.layers:
            raise StreamError(f"{len(row)} checksums of {layout.layers} layers")
        failure = None if reading.row_stands(row, read.source.checksum) else ReadFailure.CORRUPT
        place = self._place(read, wanted=failure is None)
        part_bytes, layers = layout.part_bytes, iter(read.layers)
        start = 0
        for at in range(0, len(place), RECORD_BYTES):
            piece = place[at : at + RECORD_BYTES]
            yield from self._fill(piece)
            while failure is None and read.is_wanted and start + part_bytes <= at + len(piece):
                part, layer = place[start : start + part_bytes], next(layers)
                start += part_bytes
                if reading.part_stands(part_checksum(part), row[layer]):
                    read.sink.part(layer, part, row[layer])
                else:
                    failure = ReadFailure.CORRUPT
        self._landing = None
        return failure

    def _place(self, read: RemoteRead, *, wanted: bool) -> memoryview:
        """Return the memory for the bytes of a read: all of them arrive, wanted or not."""
        buffer = read.sink.buffer() if wanted and read.is_wanted else None
        if buffer is not None:
            self._landing = read
            return buffer
        size_bytes = len(read.layers) * self._layout.part_bytes
        if size_bytes > len(self._scratch):
            self._scratch = memoryview(bytearray(size_bytes))
        return self._scratch[:size_bytes]

    def _fill(self, view: memoryview) -> Iterator[None]:
        opener = self._stream.opener
        if opener is not None:
            yield from self._fill_sealed(opener, view)
            return
        while view:
            try:
                count = self._connection.recv_into(view)
            except BlockingIOError:
                yield None
                continue
            view = view[_came(count) :]

    def _fill_sealed(self, opener: Opener, view: memoryview) -> Iterator[None]:
        while view:
            taken = opener.take(view)
            view = view[taken:]
            while not taken:
                try:
                    count = self._connection.recv_into(opener.wanted())
                except BlockingIOError:
                    yield None
                    continue
                opener.came(_came(count))
                break


def _came(count: int) -> int:
    if count == 0:
        raise StreamError("the connection ended")
    return count
