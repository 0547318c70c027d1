"""The bytes of a store's values, to and from clients that share no memory with it: a thread for each of their streams."""

import itertools
import math
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from mooncake_zmq.store.events import (
    ChecksumsMade,
    Dismiss,
    Hear,
    MakeChecksums,
    ReceiveValues,
    Say,
    SendValues,
    StreamAsked,
    StreamBegan,
    StreamEnded,
    ToStream,
    ValuesCame,
    ValuesSent,
)
from mooncake_zmq.store.memory import checksum_of
from mooncake_zmq.store.protocol import Stranger
from mooncake_zmq.store.server.turns import Turns
from mooncake_zmq.store.stream import MAX_ATTACH_BYTES, Stream, StreamError, StreamGarbage, listen
from mooncake_zmq.store.stream_messages import Ended, Values, decode_attach, decode_checksums, decode_request

log = structlog.get_logger()

MAX_STREAMS = 512
"""Threads. For a further stream the one that waits longest for a request is ended, of which its client makes a new one when it
needs it; with all at work the further one is refused, and its client's call fails."""
SLICE_S = 1.0
STALL_S = 10.0
"""A client that neither takes nor sends a byte for so long, amid a request, is given up."""
ATTACH_S = 5.0
ENDING_S = 0.02
"""With all at work, how long a further stream waits for one that has just sent its answer, and so has a client that goes on."""
ACCEPT_AGAIN_S = 0.1
"""Pause after an accept that failed, as for want of file descriptors."""


class StoreStreams:
    """Serves from construction until `close`. Raises OSError where it cannot listen."""

    def __init__(
        self,
        turns: Turns,
        endpoint: str,
        port: int,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self.counts = dict.fromkeys(("streams", "stream_garbage", "streams_refused"), 0)
        self._turns = turns
        self._on_crash = on_crash
        self._numbers = itertools.count(1)
        self._told: dict[int, queue.SimpleQueue[ToStream | None]] = {}
        """What the actor asks of each stream that it has heard of, and not heard the end of; within turns."""
        self._stopping = False
        self._lock = threading.Lock()
        """Guards `counts` and `_open`."""
        self._open: dict[threading.Thread, _Served] = {}
        turns.carry_out(dict.fromkeys((SendValues, Hear, Say, ReceiveValues, MakeChecksums, Dismiss), self.tell))
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
            served.told.put(None)
        for thread in threads:
            thread.join()

    def tell(self, effect: ToStream) -> None:
        """Within a turn: for a stream's thread to do. It asks for one thing at a time."""
        told = self._told.get(effect.stream)
        if told is not None:
            told.put(effect)

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
        if len(self._open) >= MAX_STREAMS:
            waiting = self._waits_longest()
            if waiting is None:
                time.sleep(ENDING_S)
                waiting = self._waits_longest()
            if waiting is None:
                raise RuntimeError(f"{MAX_STREAMS} streams are at work")
            waiting.stream.shut()
        served = _Served(next(self._numbers), self._turns, connection, self._count, lambda: self._stopping)
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

    def _waits_longest(self) -> "_Served | None":
        """For a request."""
        with self._lock:
            oldest = min(self._open.values(), key=lambda served: served.waits_since, default=None)
        return None if oldest is None or oldest.waits_since == math.inf else oldest

    def _serve(self, served: "_Served") -> None:
        try:
            self._told[served.number] = served.told
            served.run()
        except Exception as error:
            log.critical("store_stream_crashed", exc_info=error)
            self._on_crash(error)
        finally:
            del self._told[served.number]
            with self._lock:
                del self._open[threading.current_thread()]
            served.stream.close()


class _Served:
    """One stream: takes its requests to the actor, and moves the bytes that it says."""

    def __init__(
        self,
        number: int,
        turns: Turns,
        connection: socket.socket,
        count: Callable[[str], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self.number = number
        self.stream = Stream(connection, self._idle, slice_s=SLICE_S)
        self.told: queue.SimpleQueue[ToStream | None] = queue.SimpleQueue()
        """What to do next; None: nothing any more."""
        self._turns = turns
        self._count = count
        self._is_stopping = is_stopping
        self._patience_s = ATTACH_S
        """How long the client may be silent."""
        self.waits_since = math.inf
        """When it began to wait for the request to come; infinite while it is at work."""

    def run(self) -> None:
        """Serve until the client ends it, falls silent amid a request, or says what is none."""
        try:
            self.stream.stop_at = time.monotonic() + ATTACH_S
            attach = self.stream.receive(decode_attach, MAX_ATTACH_BYTES)
            self.stream.stop_at = math.inf
        except StreamError as error:
            self._count("stream_garbage")
            log.warning("store_stream_refused", reason=str(error))
            return
        try:
            self._turns.take(StreamBegan(self.number, attach))
            while self._do(self.told.get()):
                pass
        except StreamGarbage as error:
            self._count("stream_garbage")
            log.warning("store_stream_ended", client=attach.client.hex(), reason=str(error))
        except StreamError as error:
            log.debug("store_stream_ended", client=attach.client.hex(), reason=str(error))
        finally:
            self._turns.take(StreamEnded(self.number))

    def _do(self, effect: ToStream | None) -> bool:
        """Is there more to do? Raises StreamError."""
        match effect:
            case SendValues():
                views = [self._turns.view(one.offset, one.size) for one in effect.found]
                self.stream.send(Values(effect.sizes, effect.checksums), views)
                self._turns.take(ValuesSent(self.number))
            case Hear():
                self._hear()
            case Say(_, message):
                self.stream.send(message)
                self._hear()
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

    def _hear(self) -> None:
        self._patience_s = math.inf
        self.waits_since = time.monotonic()
        request = self.stream.receive(decode_request)
        self.waits_since = math.inf
        self._patience_s = STALL_S
        self._turns.take(StreamAsked(self.number, request))

    def _receive(self, asked: ReceiveValues) -> None:
        """Take the bytes of a put."""
        unwanted = memoryview(
            bytearray(max((s for s, at in zip(asked.sizes, asked.offsets, strict=True) if at < 0), default=0))
        )
        places = zip(asked.sizes, asked.offsets, strict=True)
        self.stream.stop_at = time.monotonic() + asked.within_s
        if asked.codes is not None:
            self.stream.send(Ended(asked.codes))
        made = self.stream.receive_values((unwanted[:size] if at < 0 else self._turns.view(at, size),) for size, at in places)
        told = self.stream.receive(decode_checksums).checksums if asked.told is None else asked.told
        self.stream.stop_at = math.inf
        self._turns.take(ValuesCame(self.number, told, made))

    def _idle(self, quiet_s: float) -> None:
        if self._is_stopping():
            raise StreamError("the store is closing")
        if quiet_s >= self._patience_s:
            raise StreamError("silent amid a request")
