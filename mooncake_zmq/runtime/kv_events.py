"""Publishes a pool's KV events over ZeroMQ, in vLLM's format, so that routers outside the cluster can index the pool.

    subscriber SUB    --- subscription ------------------------------> XPUB
                      <-- [topic, number, payload] -------------------
    subscriber DEALER --- ["", first number wanted] -----------------> ROUTER
                      <-- ["", number, payload] ... ["", -1, ""] -----

Batches are numbered from 0 in each incarnation of the process, and batch 0 reports that all blocks are cleared. PUB may lose
batches; a subscriber detects that by the gap and requests them again. A batch that the publisher itself had to drop is such a
gap too, which no replay fills: the subscriber then has to forget this pool.

Up to `subscriber_bytes` are queued for a subscriber that reads too slowly; what is published while its queue is full is not
sent to it, which is a gap as well, for replay. `MAX_SUBSCRIBERS` may subscribe, and `MAX_SUBSCRIBERS_PER_KEY` with the key of
one name; a further one is cut. So all queues together are bounded in bytes, and one key does not take every place.

A PUB keeps every subscription. This one inspects each subscription, and cuts a subscriber of more than `MAX_FOREIGN` topics
that are never published here. A subscriber shows its key only once, when it subscribes: every second it is checked whether that
key is still accepted.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import zmq

from mooncake_zmq.kv.events import AllBlocksCleared, EventEncoder, EventFormat, KvEvent, batch_bytes
from mooncake_zmq.transfer.connections import Connections, came_by, cut, receive, stands
from mooncake_zmq.transfer.sockets import REFRESH_S, USER_ID, BadEndpoint, Limits, Sockets

log = structlog.get_logger()

NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
BATCHES_PER_TURN = 256
"""Batches published, and replayed to each subscriber, before the others get their turn."""
REQUESTS_PER_TURN = 256
MAX_REQUEST_BYTES = 256
MAX_REPLAYS = 16
"""Most replays at a time; a further request is dropped and counted."""
REPLAY_HWM = 64
"""Batches queued for one replay; the remaining ones wait here, where all replays share them."""
REPLAY_RETRY_MS = 20
REPLAY_STALL_S = 10.0
"""A subscriber that takes nothing for this long is dropped."""
MAX_FOREIGN = 64
"""Most other topics of a subscriber; one of several publishers sends each of them all its topics."""
MAX_SUBSCRIBERS = 32
MAX_SUBSCRIBERS_PER_KEY = 8
COUNTS = (
    "batches",
    "bytes",
    "dropped",
    "replays",
    "replayed",
    "replays_refused",
    "replays_dropped",
    "replay_garbage",
    "subscribers_cut",
)


@dataclass(slots=True)
class _Replay:
    """Batches `[number, stop)` still to be sent, and the end marker after them. `shown`: the key of the requester."""

    number: int
    stop: int
    moved_at: float
    shown: str


class _Kept:
    """Hold the newest payloads for replay, by number: `[first, stop)` except those dropped unsent."""

    def __init__(self, max_steps: int, max_bytes: int) -> None:
        self._max_steps, self._max_bytes = max_steps, max_bytes
        self.payloads: dict[int, bytes] = {}
        self.bytes = 0
        self.first = self.stop = 0

    def add(self, number: int, payload: bytes) -> None:
        """Keep the next payload, and drop the oldest where there are too many."""
        self.payloads[number] = payload
        self.bytes += len(payload)
        self.stop = number + 1
        while self.stop - self.first > self._max_steps or self.bytes > self._max_bytes:
            self.bytes -= len(self.payloads.pop(self.first, b""))
            self.first += 1


class KvEventPublisher:
    """Publish events; `publish` is for the runtime's thread, and a separate thread encodes, sends and replays, until closed."""

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str = "",
        topic: str = "",
        format: str = "map",
        block_tokens: int,
        buffer_steps: int = 10_000,
        buffer_bytes: int = 256 << 20,
        subscriber_bytes: int = 64 << 20,
        queue_bytes: int = 256 << 20,
        on_crash: Callable[[BaseException], None],
        sockets: Sockets | None = None,
    ) -> None:
        """`format`: see `EventFormat`. `buffer_steps`, `buffer_bytes`: the newest batches, kept for replay. `subscriber_bytes`:
        queued for a subscriber before it loses batches. `queue_bytes`: of batches published and not sent yet. `on_crash` is
        called from the thread. `sockets`: the process's; else own ones. Raises BadEndpoint."""
        self.counts = dict.fromkeys(COUNTS, 0)
        self._encoder = EventEncoder(EventFormat(format), block_tokens)
        self._topic = topic.encode()
        self._kept = _Kept(buffer_steps, buffer_bytes)
        self._max_queue_bytes = queue_bytes
        self._on_crash = on_crash
        self._queue: deque[tuple[int, float, tuple[KvEvent, ...]]] = deque()
        self._next_number = 0
        self._guard = threading.Lock()
        """The lock of `_queue`, `_queued_bytes`, `_next_number` and the count of dropped batches."""
        self._queued_bytes = 0
        self._replays: dict[bytes, _Replay] = {}
        self._foreign: dict[int, tuple[int, int]] = {}
        """Inode of a connection and number of its subscriptions to other topics, by the descriptor, which later ones reuse."""
        self._subscribers: dict[int, str] = {}
        """Key that each subscriber has shown (see `Sockets.holder`), by the connection's descriptor; empty without keys.
        Closed connections are removed at the next new subscription."""
        self._looked_at = 0.0
        self._connections: dict[zmq.Socket[bytes], Connections] = {}
        """Connections of those sockets that listen on TCP."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._sockets = (sockets or Sockets(io_threads=1)).borrow()
        self._open: list[zmq.Socket[bytes]] = []
        try:
            self._pub = self._listen(zmq.XPUB, endpoint, max(1, subscriber_bytes // self._encoder.max_batch_bytes))
            self._router = self._listen(zmq.ROUTER, replay_endpoint, REPLAY_HWM) if replay_endpoint else None
        except BaseException:
            self._close_sockets()
            os.close(self._wake)
            raise
        self.endpoint = self._pub.get_string(zmq.LAST_ENDPOINT)
        """Endpoint of the publisher, with a wildcard port resolved."""
        self.replay_endpoint = self._router.get_string(zmq.LAST_ENDPOINT) if self._router else ""
        self.publish((AllBlocksCleared(),))
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: tuple[KvEvent, ...]) -> None:
        """Queue these events for sending, in as many batches as needed. Never blocks: where the queue is full the oldest are
        dropped."""
        batches = self._encoder.batches(events)
        now = time.time()
        with self._guard:
            for batch in batches:
                self._queue.append((self._next_number, now, batch))
                self._next_number += 1
                self._queued_bytes += batch_bytes(batch)
                while self._queued_bytes > self._max_queue_bytes and len(self._queue) > 1:
                    self._queued_bytes -= batch_bytes(self._queue.popleft()[2])
                    self.counts["dropped"] += 1
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stop; unsent batches are lost, as is the pool for its subscribers. May be called twice."""
        if self._wake >= 0:
            self._stopping = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self._close_sockets()
            os.close(self._wake)
            self._wake = -1

    def _close_sockets(self) -> None:
        for connections in self._connections.values():
            connections.close()
        for socket in self._open:
            socket.close()
        self._sockets.give_back()

    # --- the thread

    def _listen(self, kind: int, endpoint: str, hwm: int) -> "zmq.Socket[bytes]":
        limits = Limits(max_message_bytes=MAX_REQUEST_BYTES, send_hwm=hwm, receive_hwm=REQUESTS_PER_TURN)
        socket = self._sockets.listening(kind, endpoint, "events", limits)
        self._open.append(socket)
        if kind == zmq.ROUTER:
            socket.router_mandatory = True
        else:
            socket.xpub_verboser = True  # of each subscriber, not only the first and the last
            # ZeroMQ takes subscriptions for as long as any are there, and we would never see them: on TCP
            # `Connections` cuts a peer that sends so many.
            # With 1, libzmq 4.3.5 stops reading from a connection that was accepted by its key.
            socket.rcvhwm = 2
        if endpoint.startswith("tcp://"):
            self._connections[socket] = Connections(socket, self.counts, self._on_crash)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise BadEndpoint(f"cannot publish KV events on {endpoint}: {error.strerror}") from error
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._pub, zmq.POLLIN)
        if self._router:
            poller.register(self._router, zmq.POLLIN)
        try:
            busy = False
            while not self._stopping:
                ready = dict(poller.poll(0 if busy else self._timeout_ms()))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                busy = self._publish_some()
                busy |= self._read_subscriptions()
                self._cut_dropped(time.monotonic())
                if self._router:
                    busy |= self._receive_requests(self._router)
                    busy |= self._replay_some(self._router, time.monotonic())
        except Exception as error:
            self._on_crash(error)
            log.critical("kv_events_crashed", exc_info=error)

    def _timeout_ms(self) -> int | None:
        # A ROUTER polls as writable while any one peer is, so waiting for POLLOUT would spin beside a blocked one.
        if self._replays:
            return REPLAY_RETRY_MS
        return int(REFRESH_S * 1000) if any(self._subscribers.values()) else None  # in time for a dropped key

    def _read_subscriptions(self) -> bool:
        """Read subscriptions; return True if more may be waiting."""
        for _ in range(REQUESTS_PER_TURN):
            message = receive(self._pub, self._connections.get(self._pub))
            if message is None:
                return False
            subscription, descriptor = message[0].bytes, came_by(message[0])
            if subscription[:1] == b"\0" or descriptor < 0:  # the connection is closed
                continue
            if subscription[:1] == b"\1" and not self._takes(descriptor, self._shown_by(self._pub, message[0])):
                self._cut(descriptor)
                continue
            if subscription[:1] == b"\1" and self._topic.startswith(subscription[1:]):
                continue
            if self._of_other_topics(descriptor) > MAX_FOREIGN:
                del self._foreign[descriptor]
                self._cut(descriptor)
        return True

    def _of_other_topics(self, descriptor: int) -> int:
        """Count a subscription to another topic; return how many the connection has, 0 if it has ended."""
        try:
            inode = os.fstat(descriptor).st_ino
        except OSError:
            return 0
        known, count = self._foreign.get(descriptor, (inode, 0))
        self._foreign[descriptor] = inode, count + 1 if inode == known else 1
        return self._foreign[descriptor][1]

    def _takes(self, descriptor: int, shown: str) -> bool:
        """Record a subscriber, new or known; return False at the limit."""
        if descriptor not in self._subscribers:
            self._subscribers = {each: of for each, of in self._subscribers.items() if stands(self._pub, each)}
            of_name = sum(_name(of) == _name(shown) for of in self._subscribers.values()) if shown else 0
            if len(self._subscribers) >= MAX_SUBSCRIBERS or of_name >= MAX_SUBSCRIBERS_PER_KEY:
                return False
        self._subscribers[descriptor] = shown
        return True

    def _cut(self, descriptor: int) -> None:
        self._subscribers.pop(descriptor, None)
        self.counts["subscribers_cut"] += 1
        cut(self._pub, descriptor)

    def _cut_dropped(self, now: float) -> None:
        """Cut subscribers whose keys were dropped. A descriptor may belong to another connection by now, which reconnects."""
        if now - self._looked_at < REFRESH_S:
            return
        self._looked_at = now
        for descriptor, shown in list(self._subscribers.items()):
            if not self._lets_in(shown):
                self._cut(descriptor)
        for peer, replay in list(self._replays.items()):
            if not self._lets_in(replay.shown):
                del self._replays[peer]
                self.counts["replays_dropped"] += 1

    def _shown_by(self, socket: "zmq.Socket[bytes]", frame: zmq.Frame) -> str:
        """Return the key that a connection has shown; empty without keys."""
        keyed = socket in self._connections and self._sockets.keys is not None
        return str(frame.get(USER_ID)) if keyed else ""

    def _lets_in(self, shown: str) -> bool:
        return not shown or bool(self._sockets.holder("events", shown))

    def _publish_some(self) -> bool:
        """Publish queued batches; return True if more are queued."""
        for _ in range(BATCHES_PER_TURN):
            with self._guard:
                if not self._queue:
                    return False
                number, at, events = self._queue.popleft()
                self._queued_bytes -= batch_bytes(events)
            payload = self._encoder.encode(at, events)
            self._pub.send_multipart((self._topic, _frame(number), payload), zmq.NOBLOCK)
            self.counts["batches"] += 1
            self.counts["bytes"] += len(payload)
            self._kept.add(number, payload)
        return True

    def _receive_requests(self, router: "zmq.Socket[bytes]") -> bool:
        """Receive requests for replays; return True if more may be waiting."""
        for _ in range(REQUESTS_PER_TURN):
            message = receive(router, self._connections.get(router))
            if message is None:
                return False
            peer, *frames = (frame.bytes for frame in message)
            if len(frames) != 2 or frames[0] or len(frames[1]) != NUMBER_BYTES:
                self.counts["replay_garbage"] += 1
                continue
            shown = self._shown_by(router, message[-1])
            if not self._lets_in(shown) or (peer not in self._replays and len(self._replays) >= MAX_REPLAYS):
                self.counts["replays_refused"] += 1
            else:
                self.counts["replays"] += 1
                start = int.from_bytes(frames[1], "big")
                # Later batches reach the subscriber anyway: a replay need not include them.
                self._replays[peer] = _Replay(start, self._kept.stop, time.monotonic(), shown)
        return True

    def _replay_some(self, router: "zmq.Socket[bytes]", now: float) -> bool:
        """Continue the replays; return True if one could continue at once."""
        busy = False
        for peer, replay in list(self._replays.items()):
            try:
                ended = self._send_some(router, peer, replay, now)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                    raise
                if error.errno == zmq.EHOSTUNREACH or now - replay.moved_at > REPLAY_STALL_S:
                    del self._replays[peer]
                    self.counts["replays_dropped"] += 1
                continue
            if ended:
                del self._replays[peer]
            busy |= not ended
        return busy

    def _send_some(self, router: "zmq.Socket[bytes]", peer: bytes, replay: _Replay, now: float) -> bool:
        """Continue one replay; return True once the end marker is sent. Raises ZMQError where `peer` takes no more."""
        replay.number = max(replay.number, self._kept.first)
        for _ in range(BATCHES_PER_TURN):
            if replay.number >= replay.stop:
                router.send_multipart((peer, b"", END, b""), zmq.NOBLOCK)
                return True
            payload = self._kept.payloads.get(replay.number)
            if payload is not None:
                router.send_multipart((peer, b"", _frame(replay.number), payload), zmq.NOBLOCK)
                self.counts["replayed"] += 1
            replay.number += 1
            replay.moved_at = now
        return False


def _name(shown: str) -> str:
    return shown.partition(" ")[0]


def _frame(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")
