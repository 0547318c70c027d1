"""Streams of a store's clients, a thread for each: the bytes of values of those that share no memory with it, requests of those
that do."""

import itertools
import math
import queue
import time
from collections.abc import Callable

import structlog

from mooncake_zmq.pool.node.store_events import (
    Asked,
    ChecksumsMade,
    Dismiss,
    MakeChecksums,
    ReceiveValues,
    Reply,
    SendValues,
    Serve,
    StreamAsked,
    StreamBegan,
    StreamEnded,
    ToStream,
    ValuesCame,
    ValuesSent,
)
from mooncake_zmq.pool.server.turns import Turns
from mooncake_zmq.store.memory import checksum_of
from mooncake_zmq.store.protocol import Note, OfMemory, Stranger
from mooncake_zmq.store.stream import receive_values
from mooncake_zmq.store.stream_messages import (
    MAX_ATTACH_BYTES,
    Attach,
    Ended,
    Values,
    decode_attach,
    decode_checksums,
    decode_request,
)
from mooncake_zmq.transfer.stream import StreamError, StreamGarbage
from mooncake_zmq.transfer.stream_host import ATTACH_S, Guest, StreamHost, StreamServed
from mooncake_zmq.transfer.tickets import Tickets

log = structlog.get_logger()

STREAM = b"s"
"""Begins the name of a connection that is a stream; its number ends it."""
NUMBER_BYTES = 4
SLICE_S = 1.0
STALL_S = 10.0
"""A client that neither takes nor sends a byte for so long, amid a request, is given up."""


class StoreStreams:
    """Serves from construction until `close`. Raises OSError where it cannot listen."""

    def __init__(
        self,
        turns: Turns,
        endpoint: str,
        port: int,
        tickets: Tickets,
        user_of: Callable[[str], str | None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        """`user_of`: as whom the actor knows the holder of a ticket."""
        self._turns = turns
        self._user_of = user_of
        self._numbers = itertools.count(1)
        self._effects_of: dict[int, queue.SimpleQueue[ToStream | Reply | None]] = {}
        """The effects for each stream whose beginning the actor has seen, and not its end; within turns."""
        self._stopping = False
        turns.carry_out(dict.fromkeys((SendValues, Serve, ReceiveValues, MakeChecksums, Dismiss), self.hand))
        self.counts = {"stream_garbage": 0}
        self._host = StreamHost(endpoint, port, tickets, self._make, on_crash, counts=self.counts, name="store-stream")
        self.endpoint = self._host.endpoint
        """The address that clients are sent."""

    def close(self) -> None:
        """End all streams."""
        self._stopping = True
        self._host.close()

    def hand(self, effect: ToStream) -> None:
        """Within a turn: for a stream's thread to do. It asks for one thing at a time."""
        self._hand(effect.stream, effect)

    def reply(self, effect: Reply) -> None:
        """Likewise, to a request that came by a stream."""
        self._hand(int.from_bytes(effect.connection[-NUMBER_BYTES:]), effect)

    def _hand(self, stream: int, effect: ToStream | Reply) -> None:
        effects = self._effects_of.get(stream)
        if effects is not None:
            effects.put(effect)

    def _make(self, guest: Guest) -> "_Served":
        user = self._user_of(guest.holder)
        return _Served(
            next(self._numbers), self._turns, guest, user, self._effects_of, self._host.count, lambda: self._stopping
        )


class _Served(StreamServed):
    """One stream: takes its requests to the actor, and moves the bytes that it says."""

    def __init__(
        self,
        number: int,
        turns: Turns,
        guest: Guest,
        user: str | None,
        queues: dict[int, "queue.SimpleQueue[ToStream | Reply | None]"],
        count: Callable[[str], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        super().__init__(guest, SLICE_S)
        self.number = number
        self._token = guest.token
        self._user = user
        self._connection = b""
        """The name of this one where requests come by it."""
        self._queues = queues
        self.effects: queue.SimpleQueue[ToStream | Reply | None] = queue.SimpleQueue()
        """Effects to carry out next; None: there will be no more."""
        self._turns = turns
        self._count = count
        self._is_stopping = is_stopping
        self._timeout_s = ATTACH_S
        """How long the client may be silent."""
        self.waits_since = math.inf

    def run(self) -> None:
        """Serve until the client ends it, falls silent amid a request, or says what is none."""
        self._queues[self.number] = self.effects
        try:
            self._run(self._attach())
        except StreamGarbage as error:
            self._count("stream_garbage")
            log.warning("store_stream_ended", reason=str(error))
        except StreamError as error:
            log.debug("store_stream_ended", reason=str(error))
        finally:
            del self._queues[self.number]

    def shut(self) -> None:
        super().shut()
        self.effects.put(None)

    def _attach(self) -> Attach:
        """The first message: a stream belongs to the client whose ticket it came by."""
        self.stream.stop_at = time.monotonic() + ATTACH_S
        attach = self.stream.receive(decode_attach, MAX_ATTACH_BYTES)
        self.stream.stop_at = math.inf
        if attach.token != self._token:
            raise StreamGarbage("another's ticket")
        return attach

    def _run(self, attach: Attach) -> None:
        self._connection = STREAM + attach.client + self.number.to_bytes(NUMBER_BYTES)
        try:
            self._turns.take(StreamBegan(self.number, attach))
            while self._do(self.effects.get()):
                pass
        finally:
            self._turns.take(StreamEnded(self.number))

    def _do(self, effect: ToStream | Reply | None) -> bool:
        """Is there more to do? Raises StreamError."""
        match effect:
            case SendValues():
                self._send_values(effect)
            case Serve(_, answer) | Reply(_, answer):
                if answer is not None:
                    self.stream.send(answer)
                self._read_request()
            case ReceiveValues():
                self._receive(effect)
            case MakeChecksums(_, found):
                made = [checksum_of(self._turns.view(one.offset, one.size)) for one in found]
                self._turns.take(ChecksumsMade(self.number, made))
            case Dismiss(_, reason, stranger, garbage):
                if stranger:
                    self.stream.send(Stranger(0))
                    return False
                raise StreamGarbage(reason) if garbage else StreamError(reason)
            case None:
                raise StreamError("the store is closing")
        return True

    def _read_request(self) -> None:
        self._timeout_s = math.inf
        self.waits_since = time.monotonic()
        request = self.stream.receive(decode_request)
        self.waits_since = math.inf
        self._timeout_s = STALL_S
        if isinstance(request, OfMemory):
            self._turns.take(Asked(self._connection, request, self._user))
            if isinstance(request, Note):
                self.effects.put(Serve(self.number))
        else:
            self._turns.take(StreamAsked(self.number, request))

    def _send_values(self, asked: SendValues) -> None:
        views = [self._turns.view(one.offset, one.size) for one in asked.found]
        self.stream.stop_at = time.monotonic() + asked.within_s
        self.stream.send(Values(asked.sizes, asked.checksums), views)
        self.stream.stop_at = math.inf
        self._turns.take(ValuesSent(self.number))

    def _receive(self, asked: ReceiveValues) -> None:
        """Take the bytes of a put."""
        unwanted = memoryview(
            bytearray(max((s for s, at in zip(asked.sizes, asked.offsets, strict=True) if at < 0), default=0))
        )
        places = zip(asked.sizes, asked.offsets, strict=True)
        self.stream.stop_at = time.monotonic() + asked.within_s
        if asked.codes is not None:
            self.stream.send(Ended(asked.codes))
        made = receive_values(
            self.stream, ((unwanted[:size] if at < 0 else self._turns.view(at, size),) for size, at in places)
        )
        sent = self.stream.receive(decode_checksums).checksums if asked.sent is None else asked.sent
        self.stream.stop_at = math.inf
        self._turns.take(ValuesCame(self.number, sent, made))

    def _idle(self, quiet_s: float) -> None:
        if self._is_stopping():
            raise StreamError("the store is closing")
        if quiet_s >= self._timeout_s:
            raise StreamError("silent amid a request")
