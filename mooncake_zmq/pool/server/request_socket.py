"""The ROUTER socket on which a store receives requests, with the user who sent each."""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

import zmq

from mooncake_zmq.store import protocol
from mooncake_zmq.transfer.connections import Connections, skip_remaining, take_part
from mooncake_zmq.transfer.sockets import BadEndpoint, Limits, Sockets

CONNECTION, ROUTING_ID_BYTES = b"c", 21
"""b"c", 16 bytes that name the client, 4 that number its connection."""
MAX_QUEUED_REQUESTS = 32
"""Requests of one connection that wait here; further ones wait at the client."""
MAX_QUEUED_REPLIES = 256
"""Replies that wait for one connection; further ones are dropped, as a client that waits for each answer never has so many."""
WAKE = "inproc://wake"
"""Where the server's thread can be woken by an empty message."""
WAIT_MS = 1_000
"""How long a receive waits at most, so that the server's thread sees that it is to stop even where it cannot be woken."""
LIMITS = Limits(max_message_bytes=protocol.MAX_FRAME_BYTES, send_hwm=MAX_QUEUED_REPLIES, receive_hwm=MAX_QUEUED_REQUESTS)


class SentRequest(NamedTuple):
    """A request with its connection, the user who sent it, and the key that the connection has shown (empty: none)."""

    peer: bytes
    request: protocol.Request
    user: str | None
    shown: str


class RequestSocket:
    """Belongs to one thread, but for `wake`, which is called within turns, and `stop`. Raises BadEndpoint."""

    def __init__(self, sockets: Sockets, endpoint: str, on_crash: Callable[[BaseException], None], *, tenants: bool) -> None:
        """`tenants`: whether it matters who a user is; then a connection over TCP without a key has none."""
        self.counts = dict.fromkeys(("garbage", "dropped"), 0)
        self.endpoint = endpoint
        """Where it listens; after `bind` a wildcard port is resolved."""
        self.stopping = False
        self._sockets = sockets.borrow()
        try:
            self._socket = self._sockets.listening(zmq.ROUTER, endpoint, "store", LIMITS)
        except BadEndpoint:
            self._sockets.give_back()
            raise
        by_tcp = endpoint.startswith("tcp://")
        self._keyed = by_tcp and self._sockets.keys is not None
        self._keyless = "" if by_tcp and tenants else None
        """The user of a connection that has shown no key. By ipc it is this machine's user."""
        self._connections = Connections(self._socket, self.counts, on_crash) if by_tcp else None
        self._socket.router_mandatory = True
        self._socket.router_handover = True  # a connection's name holds 128 random bits, so no other takes it by accident
        self._socket.rcvtimeo = WAIT_MS
        self.sealed = self._sockets.seals(endpoint)
        self._waker = self._sockets.inner(zmq.DEALER)
        self._waker.routing_id = self._waker_name = b"w" + os.urandom(16)  # not a connection's name, and not to be guessed

    def bind(self) -> None:
        """Begin to listen."""
        self._socket.bind(WAKE)
        self._waker.connect(WAKE)
        self._socket.bind(self.endpoint)
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)

    def receive(self) -> SentRequest | None:
        """Wait for the next message; None if it is no request of a client that may send one. Raises zmq.Again."""
        # Waiting in the receive itself: a poller costs a small request a tenth of its time.
        if self._connections is not None and not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._connections.drained()
        peer = self._socket.recv()
        content, shown = b"", None
        if self._socket.getsockopt(zmq.RCVMORE):
            keyed = self._keyed and len(peer) == ROUTING_ID_BYTES  # the waker has no key
            content, shown = take_part(self._socket, self._connections, keyed=keyed)
        try:
            request = protocol.decode_request(content)
        except protocol.NotAMessage:
            request = None
        skip_remaining(self._socket, self._connections)
        if request is not None and len(peer) == ROUTING_ID_BYTES and peer.startswith(CONNECTION):
            user = self._keyless if shown is None else self._sockets.holder("store", shown)
            if shown is not None and not user:
                return None  # the connection's key was dropped
            return SentRequest(peer, request, user, shown or "")
        if not self.stopping and peer != self._waker_name:
            self.counts["garbage"] += 1
        return None

    def send(self, connection: bytes, message: bytes) -> None:
        """Send without waiting; a connection that is full or gone loses the message."""
        try:
            self._socket.send_multipart([connection, message], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.counts["dropped"] += 1

    def wake(self) -> None:
        """Make `receive` return on its thread."""
        with contextlib.suppress(zmq.Again):  # with so many messages on their way, it is awake
            self._waker.send(b"", zmq.NOBLOCK)

    def stop(self, thread: threading.Thread) -> None:
        """Set `stopping`, wake the socket's thread, from any other, and wait for its end."""
        self.stopping = True
        with self._sockets.inner(zmq.DEALER) as waker:  # open until then: closed at once it might drop the message
            waker.connect(WAKE)
            waker.send(b"")
            thread.join()

    def user_of(self, holder: str) -> str | None:
        """Return the user who holds a ticket, which stands for as long as the user's key."""
        return holder if self._keyed else self._keyless

    def lets_in(self, holder: str) -> bool:
        """Return whether the holder of a ticket may still connect."""
        return not self._keyed or bool(self._sockets.holder("store", holder))

    def close(self) -> None:
        """Close the socket. Its thread has ended."""
        self._waker.close()
        if self._connections is not None:
            self._connections.close()
        self._socket.close()
        self._sockets.give_back()
