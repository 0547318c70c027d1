"""Receives the KV events that a vLLM publishes over ZeroMQ, in a thread of its own. Missed events are requested again where
vLLM replays; where that does not help, all blocks are reported as cleared.

See `kv_events` for the other side, and for the messages.
"""

import math
import threading
import time
from collections.abc import Callable

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from mooncake_zmq.kv.engine_events import MAX_PAYLOAD_BYTES, EngineBatch, EngineCleared, EngineEvent, EventError, decode_batch
from mooncake_zmq.runtime.kv_events import END, NUMBER_BYTES

log = structlog.get_logger()

HWM = 1000
"""Most batches queued here; beyond that some are lost, and requested again."""
POLL_MS = 200
REPLAY_MS = 2000
"""Silence that ends a replay."""

UNREACHED_S = 30.0
"""Time without a first connection after which that is logged. vLLM listens before it serves."""

OnEvents = Callable[[tuple[EngineEvent, ...]], None]


class KvSubscriber:
    """Receive events; `on_events` is called from the thread, in the order in which vLLM numbered its batches."""

    def __init__(
        self, endpoint: str, *, replay_endpoint: str, topic: str, on_events: OnEvents, on_crash: Callable[[BaseException], None]
    ) -> None:
        """Raise zmq.ZMQError for an invalid endpoint."""
        self.counts = {"batches": 0, "gaps": 0, "garbage": 0, "cleared": 0, "replayed": 0}
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._report = on_events
        self._on_crash = on_crash
        self._next = 0
        """The number of the next batch."""
        self._time_s = 0.0
        """Time of the latest batch, by vLLM's clock."""
        self._stopping = False
        self._warns_at = time.monotonic() + UNREACHED_S
        """When to log that nothing listens at the endpoint; infinite once something did, or that is logged."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._sub = self._context.socket(zmq.SUB)
            self._sub.setsockopt(zmq.LINGER, 0)
            self._sub.setsockopt(zmq.RCVHWM, HWM)
            self._sub.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
            self._sub.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
            self._links: zmq.Socket[bytes] = self._sub.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
            self._sub.connect(endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-subscriber", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._stopping = True
        self._thread.join()
        self._context.destroy(linger=0)

    # --- the own thread

    def _run(self) -> None:
        try:
            if self._replay_endpoint:
                self._catch_up()  # vLLM may have served for long
            poller = zmq.Poller()
            for each in (self._links, self._sub):
                poller.register(each, zmq.POLLIN)
            while not self._stopping:
                ready = dict(poller.poll(POLL_MS))
                if self._links in ready:
                    self._on_link(parse_monitor_message(self._links.recv_multipart())["event"])
                elif self._sub in ready:
                    self._on_frames(self._sub.recv_multipart())
                elif time.monotonic() > self._warns_at:
                    self._warns_at = math.inf
                    log.warning("kv_events_not_reached", endpoint=self._endpoint)
        except Exception as error:
            self._on_crash(error)
            log.critical("worker_crashed", thread="kv-subscriber", exc_info=error)

    def _on_link(self, event: int) -> None:
        self._warns_at = math.inf
        if event == zmq.EVENT_DISCONNECTED:
            self._on_disconnected()

    def _on_disconnected(self) -> None:
        """Clear everything, as this vLLM may have ended. Batches that are still queued are dropped; if some are of a new one,
        the numbers of its next ones show that."""
        for each in (self._links, self._sub):
            while each.poll(0):
                each.recv_multipart()
        self._time_s = 0.0
        self._begin_anew(0)

    def _on_frames(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            self.counts["garbage"] += 1
            return
        number = int.from_bytes(frames[1], "big", signed=True)
        batch = self._decoded(frames[2])
        if number < self._next:
            if batch is not None and batch.time_s <= self._time_s:
                return  # a replay brought it already
            self._begin_anew(0)  # numbers begin anew with each incarnation of vLLM
        if number > self._next:
            self.counts["gaps"] += 1
            self._catch_up()
        if number > self._next:  # the gap cannot be filled
            self._begin_anew(number)
        if number == self._next:
            self._take(batch)

    def _catch_up(self) -> None:
        """Request everything from the next batch on, as far as vLLM keeps it."""
        if not self._replay_endpoint:
            return
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVHWM, HWM)
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart([b"", self._next.to_bytes(NUMBER_BYTES, "big")])
            while not self._stopping and dealer.poll(REPLAY_MS):
                frames = dealer.recv_multipart()
                if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
                    self.counts["garbage"] += 1
                    return
                if frames[1] == END:
                    return
                self._replayed(int.from_bytes(frames[1], "big", signed=True), frames[2])
        finally:
            dealer.close()

    def _replayed(self, number: int, payload: bytes) -> None:
        if number < self._next:
            return
        if number > self._next:  # vLLM no longer has the batches between
            self._begin_anew(number)
        self.counts["replayed"] += 1
        self._take(self._decoded(payload))

    def _decoded(self, payload: bytes) -> EngineBatch | None:
        try:
            return decode_batch(payload)
        except EventError as error:
            self.counts["garbage"] += 1
            log.warning("kv_events_garbage", endpoint=self._endpoint, reason=str(error))
            return None

    def _take(self, batch: EngineBatch | None) -> None:
        """Take the next batch. An invalid one may have removed blocks, so all are cleared."""
        self.counts["batches"] += 1
        if batch is None:
            self._begin_anew(self._next + 1)
            return
        self._next += 1
        self._time_s = batch.time_s
        if batch.events:
            self._report(batch.events)

    def _begin_anew(self, number: int) -> None:
        """Clear everything received so far."""
        self._next = number
        self.counts["cleared"] += 1
        self._report((EngineCleared(),))
