"""Connections to one store server. Each is used by one call of one thread at a time, so nothing has to be handed over.

A call that gets no answer costs its connection: a late answer must not be taken for that of another call.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from mooncake_zmq.store import protocol
from mooncake_zmq.transfer.sockets import Limits, Sockets
from mooncake_zmq.transfer.stream import Stream

log = structlog.get_logger()

SLICE_MS = 200
"""How often a waiting call looks whether the store was closed or its connection lost."""
MAX_QUEUED = 32
"""Messages of a connection in either direction not yet taken; further ones wait."""
LIMITS = Limits(max_message_bytes=protocol.MAX_FRAME_BYTES, send_hwm=MAX_QUEUED, receive_hwm=MAX_QUEUED)
_LOSS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_LOSS |= zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_CONNECT_RETRIED
ReplyT = TypeVar("ReplyT", bound=protocol.Reply)


class Unreached(Exception):
    """No answer: the server is gone, silent, or speaks something else. The message says which."""


class Forgotten(Exception):
    """The server does not know this client (any more): it has to say Hello."""


def answer(request: protocol.Identified, reply: protocol.Reply, expected: type[ReplyT]) -> ReplyT:
    """The reply, if it is one to this request. Raises Unreached or Forgotten."""
    if isinstance(reply, protocol.Stranger):
        raise Forgotten(reply.reason)
    if not isinstance(reply, expected) or reply.id != request.id:
        raise Unreached(f"{type(reply).__name__} in answer to {type(request).__name__}")
    return reply


class Link:
    """One connection for requests and, once a call needs it, a stream for bytes beside it."""

    def __init__(self, sockets: Sockets, endpoint: str, server: str, routing_id: bytes, is_closed: Callable[[], bool]) -> None:
        """`server`: its name, if it is to have the key of that. Raises BadEndpoint, zmq.ZMQError."""
        self._is_closed = is_closed
        self.stream: Stream | None = None
        """The stream, which its maker stores here; it ends with the connection, which is of no use if the stream failed to
        attach."""
        self.socket, _ = sockets.connecting(zmq.DEALER, endpoint, "store", LIMITS, server=server)
        self.socket.routing_id = routing_id
        self.socket.immediate = True
        self.socket.sndtimeo = self.socket.rcvtimeo = SLICE_MS
        self._monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(_LOSS)
        try:
            self.socket.connect(endpoint)
        except BaseException:
            self.close()
            raise

    def shut(self) -> None:
        """End its stream, which its user may be reading or writing. From any thread."""
        stream = self.stream
        if stream is not None:
            stream.shut()

    def close(self) -> None:
        """Drop what is not sent yet."""
        if self.stream is not None:
            self.stream.close()
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close()

    def send(self, message: object, deadline: float) -> None:
        """Raises Unreached."""
        while True:
            try:
                self.socket.send(protocol.encode(message))
            except zmq.Again:
                self._check(deadline)
            else:
                return

    def send_note(self, message: object) -> None:
        """Send what is not answered; lost if the queue is full, as the server's timers do the same in the end."""
        try:
            self.socket.send(protocol.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("store_note_lost", message=type(message).__name__)

    def receive(self, deadline: float) -> protocol.Reply:
        """The next reply. Raises Unreached."""
        while True:
            try:
                reply: protocol.Reply = protocol.decode_reply(self.socket.recv())
            except zmq.Again:
                self._check(deadline)
            except protocol.NotAMessage as error:
                raise Unreached(f"an answer that is none: {error}") from error
            else:
                return reply

    def ask(self, request: protocol.Identified, expected: type[ReplyT], deadline: float) -> ReplyT:
        """Send and wait for the answer. Raises Unreached or Forgotten."""
        self.send(request, deadline)
        return answer(request, self.receive(deadline), expected)

    def check_open(self) -> None:
        """Raises Unreached once this connection is not needed any more."""
        if self._is_closed():
            raise Unreached("the store was closed")

    def _check(self, deadline: float) -> None:
        """Called when nothing happened for a while: is there a reason to give up?"""
        self.check_open()
        if self._monitor.poll(0):
            event = zmq.Event(recv_monitor_message(self._monitor)["event"])
            raise Unreached(f"not connected ({event.name})")
        if time.monotonic() >= deadline:
            raise Unreached("no answer in time")


class Links:
    """The connections to one server, made when needed, at most `limit`: calls wait for one in the order in which they came."""

    def __init__(self, make: Callable[[], Link], limit: int) -> None:
        self._make = make
        self._idle: deque[Link] = deque()
        self._used: set[Link] = set()
        self._limit = self._free = limit
        self._waiting: deque[threading.Event] = deque()
        """Set, and taken out, as their turns come."""
        self._lock = threading.Lock()
        self._closed = False

    def take(self, deadline: float) -> Link:
        """Raises Unreached if none is free in time."""
        if not self._await_turn(deadline):
            raise Unreached("all connections are in use")
        with self._lock:
            if self._closed:
                self._end_turn()
                raise Unreached("the store was closed")
            if self._idle:
                link = self._idle.pop()
                self._used.add(link)
                return link
        try:
            link = self._make()
        except BaseException:
            with self._lock:
                self._end_turn()
            raise
        with self._lock:
            self._used.add(link)
        return link

    def put_back(self, link: Link, *, broken: bool) -> None:
        with self._lock:
            self._used.discard(link)
            keep = not (broken or self._closed)
            if keep:
                self._idle.append(link)
        if not keep:
            link.close()
        with self._lock:
            self._end_turn()

    def drop_idle(self) -> None:
        """Close what is not in use."""
        with self._lock:
            idle, self._idle = self._idle, deque()
        for link in idle:
            link.close()

    def close(self, deadline: float) -> bool:
        """No more calls; waits for those under way, which end within moments. False if one had not by then."""
        with self._lock:
            self._closed = True
            used = list(self._used)
        for link in used:
            link.shut()
        self.drop_idle()
        taken = 0
        while taken < self._limit and self._await_turn(deadline):
            taken += 1
        with self._lock:
            for _ in range(taken):  # for calls that wait for a connection: they see that there will be none
                self._end_turn()
        return taken == self._limit

    def _await_turn(self, deadline: float) -> bool:
        """Return whether one of the turns, of which there are `limit`, is the caller's in time."""
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            turn = threading.Event()
            self._waiting.append(turn)
        came = False
        try:
            came = turn.wait(max(0.0, deadline - time.monotonic()))
        finally:
            if not came:
                with self._lock:
                    if turn.is_set():
                        self._end_turn()
                    else:
                        self._waiting.remove(turn)
        return came

    def _end_turn(self) -> None:
        """The next one's turn comes. The caller holds the lock."""
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._free += 1
