"""The sockets of one node: a ROUTER that receives from every peer, and a DEALER that sends to each.

ZeroMQ may lose frames; they are counted here and repeated by the session, never here. The ROUTER only listens, and envelopes
name their senders, so connections keep ZeroMQ's own random identities: frames of a restarted peer arrive at once, and no
stranger can evict one.
"""

import errno
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import zmq

from mooncake_zmq.core.messages import MAX_MESSAGE_BYTES
from mooncake_zmq.transfer.connections import Connections, skip_remaining, take_part
from mooncake_zmq.transfer.sockets import BadEndpoint, Limits, Sockets, check_endpoint

SEND_HWM = 4096
"""Frames queued for one connected peer; a peer further behind than this loses frames, which the session sends again."""
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + 4096
RECEIVE_HWM = 8
"""Frames received from one connection and not taken yet, 64 MiB of them; more wait on the sender's side. On TCP
`Connections` limits their bytes instead."""
LIMITS = Limits(
    max_message_bytes=MAX_FRAME_BYTES,
    send_hwm=SEND_HWM,
    receive_hwm=RECEIVE_HWM,
    silence_ms=6_000,
    reconnect_max_ms=1_000,
)
ANOTHER_KEY_S = 1.0
"""How long a connection to a peer is tried with one of its keys before the next key."""
POLLIN = int(zmq.POLLIN)


@dataclass(slots=True)
class _Dealer:
    """The socket to one peer, which is expected to have `key`. `failing_since`: 0 if the last frame was taken."""

    socket: "zmq.Socket[bytes]"
    endpoint: str
    key: str
    failing_since: float = 0.0


class PeerSockets:
    """Own the sockets of a node; methods are for one thread."""

    def __init__(
        self, endpoint: str, peers: Mapping[str, str], sockets: Sockets, on_crash: Callable[[BaseException], None]
    ) -> None:
        """`endpoint`: where to listen. `peers`: endpoint by name. `on_crash` is called from another thread. Raises
        BadEndpoint."""
        self.counts: dict[str, int] = {}
        self._endpoint = endpoint
        self._sockets = sockets.borrow()
        self._connections: Connections | None = None
        """Connections of the ROUTER, where other users may connect."""
        self._dealers: dict[str, _Dealer] = {}
        try:
            self._router = self._listening()
        except BadEndpoint:
            self._sockets.give_back()
            raise
        self._keyed = self._sockets.keys is not None and endpoint.startswith("tcp://")
        """Whether senders are identified by their keys."""
        try:
            self._bind(on_crash)
            for name, where in sorted(peers.items()):
                self._dealers[name] = self._connect(name, where)
        except BadEndpoint:
            self.close()
            raise

    def fileno(self) -> int:
        """The ROUTER's descriptor, which is edge-triggered."""
        return int(self._router.fileno())

    def has_frames(self) -> bool:
        return bool(int(self._router.get(zmq.EVENTS)) & POLLIN)

    def take(self) -> tuple[bytes | None, str | None] | None:
        """Return the next frame with the name of the node whose key its connection used (None: it needs no key).

        The frame is None if one was dropped, and the whole result is None if there was no frame.
        """
        try:
            self._router.recv(zmq.DONTWAIT)  # the connection's identity; the envelope names the sender
        except zmq.Again:
            return None
        frame, shown = take_part(self._router, self._connections, keyed=self._keyed)
        key_of = None if shown is None else self._sockets.holder("control", shown)
        self._count("frames_received")
        if skip_remaining(self._router, self._connections):
            self._count("frames_dropped[reason=not_single_part]")
            return None, key_of
        return frame, key_of

    def drained(self) -> None:
        """Record that no frame is left."""
        if self._connections is not None:
            self._connections.drained()

    def transmit(self, to: str, frame: bytes) -> None:
        """Send a frame to a peer, or count that it was dropped."""
        dealer = self._dealers[to]
        try:
            dealer.socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:  # not connected (IMMEDIATE), or a full queue: the session sends it again
            self._count("frames_dropped[reason=not_sendable]")
            dealer.failing_since = dealer.failing_since or time.monotonic()
        else:
            self._count("frames_sent")
            dealer.failing_since = 0.0

    def try_other_keys(self, now: float) -> None:
        """Reconnect with another key to peers that do not take frames: a restarted peer may have another key, or know ours
        by now."""
        for name, dealer in self._dealers.items():
            if dealer.key and dealer.failing_since and now - dealer.failing_since > ANOTHER_KEY_S:
                dealer.failing_since = now
                with suppress(BadEndpoint):  # its keys were dropped
                    self._dealers[name] = self._connect(name, dealer.endpoint, not_by=dealer.key)
                    dealer.socket.close(linger=0)

    def close(self) -> None:
        if self._connections is not None:
            self._connections.close()
        for socket in (self._router, *(dealer.socket for dealer in self._dealers.values())):
            socket.close(linger=0)
        self._sockets.give_back()

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def _listening(self) -> "zmq.Socket[bytes]":
        check_endpoint(self._endpoint)
        router = self._sockets.listening(zmq.ROUTER, self._endpoint, "control", LIMITS)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        return router

    def _bind(self, on_crash: Callable[[BaseException], None]) -> None:
        if self._endpoint.startswith("tcp://"):
            self._connections = Connections(self._router, self.counts, on_crash)
        try:
            self._router.bind(self._endpoint)
        except zmq.ZMQError as error:
            raise BadEndpoint(f"cannot listen on {self._endpoint}: {_reason(error)}") from error

    def _connect(self, name: str, endpoint: str, not_by: str = "") -> _Dealer:
        check_endpoint(endpoint)
        dealer, key = self._sockets.connecting(zmq.DEALER, endpoint, "control", LIMITS, server=name, not_by=not_by)
        # Queueing for an absent peer would only hide its absence from the session and replay the past at it.
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            dealer.close()
            raise BadEndpoint(f"cannot connect to {name} at {endpoint}: {_reason(error)}") from error
        return _Dealer(dealer, endpoint, key)


def _reason(error: zmq.ZMQError) -> str:
    return "the address is in use" if error.errno == errno.EADDRINUSE else str(error)
