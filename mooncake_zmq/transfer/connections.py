"""The TCP connections of one listening ZeroMQ socket: what they sent and nobody has taken yet, and an end of the worst of them.

A high-water mark counts whole messages, and ZMQ_MAXMSGSIZE bounds one part of a message; of the parts of a message that never
ends ZeroMQ holds all, and tells of none. So bytes are counted on both sides of it: by the kernel those that came in on a
connection, by whoever receives those that came out. Connections by `ipc://` are not watched: they are this user's own.

Of a message that is not there yet more than `PARTIAL_BYTES` may be here for `PARTIAL_S` alone: long enough for a whole one that
whoever receives is late to look at. Empty parts take 32 times as much memory as bytes on the wire, and ZeroMQ takes up to
30 MB/s of them: so the process may not grow by more than `PARTIAL_GROWTH_BYTES` meanwhile, for whatever reason. Who is cut
wrongly connects anew, and says it again.

So no high-water mark is set on what comes. At one ZeroMQ stops a connection's input; and libzmq 4.3.5 aborts the process
(`!_io_error`) where the other side goes while it is stopped, and something is to be written there after that: the answer to a
PING of its, which was read before and is looked at when the input goes on.
"""

import contextlib
import os
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

import psutil
import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from mooncake_zmq.transfer.sockets import USER_ID

log = structlog.get_logger()

MAX_UNTAKEN_BYTES = 16 << 20
"""Of all connections of a socket together; beyond it the one with the most is cut, and its peer connects anew."""
PARTIAL_BYTES = 512 << 10
PARTIAL_S = 1.0
PARTIAL_GROWTH_BYTES = 12 << 20
"""Three of the longest messages: of an honest one what came is as long as what is held."""
LOOK_S = 0.01
"""Between two looks, in which a network brings no more than some 20 MiB."""
SHORT_BYTES, LONG_BYTES, LONG_FROM_BYTES = 2, 9, 256
"""What ZeroMQ puts before a frame on the wire, by what is in it."""
CURVE_FRAME_BYTES = 33
"""What CURVE adds to it. Nothing is guessed: a byte too many for each frame taken would hide others that wait."""
XPUB_FRAME_BYTES = 46
"""In place of that: an XPUB tells nothing of a topic that somebody leaves and did not have."""
HEARTBEAT_BYTES_PER_S = 64
"""What comes without any frame, at most."""
RECEIVE_BUFFER_BYTES = 256 << 10
"""The kernel's, for each connection."""
_BYTES_RECEIVED = struct.Struct("<128xQ")
"""Of Linux's `struct tcp_info`."""


class Connections:
    """`took` is for the thread that receives; a thread of its own counts and cuts, until closed."""

    def __init__(
        self, listening: "zmq.Socket[bytes]", counts: dict[str, int], on_crash: Callable[[BaseException], None]
    ) -> None:
        """Before `listening` binds. What is cut is added to the owner's `counts`; `on_crash` is called from the thread."""
        counts.setdefault("connections_cut", 0)
        listening.rcvbuf, listening.rcvhwm = RECEIVE_BUFFER_BYTES, 0
        self._counts = counts
        self._listening = listening
        self._added_bytes = CURVE_FRAME_BYTES if listening.get(zmq.CURVE_SERVER) else 0
        if listening.type == zmq.XPUB:
            self._added_bytes = XPUB_FRAME_BYTES
        self._on_crash = on_crash
        self._received: dict[int, int] = {}
        """Bytes that have come in, at the last look, by descriptor."""
        self._untaken: dict[int, float] = {}
        self._taken: deque[tuple[int, int]] = deque()
        """(descriptor, bytes) since the last look."""
        self._partial: dict[int, tuple[float, int]] = {}
        """Since when too much of a message is here without its end, and how large the process was then, by descriptor."""
        self._empty = True
        """Everything that was whole is taken."""
        self._process = psutil.Process()
        self._monitor: zmq.Socket[bytes] = listening.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)
        self._thread.start()

    def took(self, descriptor: int, size_bytes: int) -> None:
        """A frame of this size was received from the connection `descriptor` (ZMQ_SRCFD)."""
        self._empty = False
        size_bytes += self._added_bytes
        self._taken.append((descriptor, size_bytes + (SHORT_BYTES if size_bytes < LONG_FROM_BYTES else LONG_BYTES)))

    def looking(self) -> None:
        """Something may be left to receive; an XPUB's look lasts for as long as more comes."""
        self._empty = False

    def drained(self) -> None:
        """Nothing was left to receive."""
        self._empty = True

    def close(self) -> None:
        """Before `listening` is closed. May be called twice."""
        if self._stop >= 0:
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            self._listening.disable_monitor()
            self._monitor.close(linger=0)
            os.close(self._stop)
            self._stop = -1

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            self._on_crash(error)
            log.critical("connections_crashed", exc_info=error)

    def _watch(self) -> None:
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        looked_at = time.monotonic()
        while self._stop not in dict(poller.poll(int(LOOK_S * 1000) if self._untaken else None)):
            self._note()
            now = time.monotonic()
            if now - looked_at >= LOOK_S:
                self._look(now, now - looked_at)
                looked_at = now

    def _note(self) -> None:
        """Who came and went."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                descriptor = event["value"]
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._received[descriptor], self._untaken[descriptor] = 0, 0.0
                else:
                    self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._received.pop(descriptor, None)
        self._untaken.pop(descriptor, None)
        self._partial.pop(descriptor, None)

    def _look(self, now: float, elapsed_s: float) -> None:
        taken: Counter[int] = Counter()
        for _ in range(len(self._taken)):
            descriptor, size_bytes = self._taken.popleft()
            taken[descriptor] += size_bytes
        for descriptor in list(self._untaken):
            received = _received_bytes(descriptor)
            if received is None:
                self._forget(descriptor)
                continue
            came = received - self._received[descriptor] - taken[descriptor] - HEARTBEAT_BYTES_PER_S * elapsed_s
            self._received[descriptor] = received
            self._untaken[descriptor] = max(0.0, self._untaken[descriptor] + came)
            if not self._empty or self._untaken[descriptor] <= PARTIAL_BYTES:
                self._partial.pop(descriptor, None)
                continue
            resident_bytes = self._process.memory_info().rss
            since, before_bytes = self._partial.setdefault(descriptor, (now, resident_bytes))
            if now - since > PARTIAL_S or resident_bytes - before_bytes > PARTIAL_GROWTH_BYTES:
                self._cut(descriptor)
        while sum(self._untaken.values()) > MAX_UNTAKEN_BYTES:
            self._cut(max(self._untaken, key=self._untaken.__getitem__))

    def _cut(self, descriptor: int) -> None:
        self._counts["connections_cut"] += 1
        log.warning("connection_cut", untaken_bytes=int(self._untaken[descriptor]), endpoint=_endpoint(self._listening))
        self._forget(descriptor)
        cut(self._listening, descriptor)


def receive(listening: "zmq.Socket[bytes]", connections: Connections | None) -> list[zmq.Frame] | None:
    """The next message of a listening socket, or None: nothing is left. Who watches it, if anybody, is told of either."""
    if connections is not None:
        connections.looking()
    try:
        frames = listening.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        if connections is not None:
            connections.drained()
        return None
    if connections is not None:
        for frame in frames[listening.type == zmq.ROUTER :]:  # the first of a ROUTER's names the peer, and did not come
            connections.took(came_by(frame), len(frame))
    return frames


def take_part(
    listening: "zmq.Socket[bytes]", connections: Connections | None, *, keyed: bool = False
) -> tuple[bytes, str | None]:
    """The next part of a message that goes on, and if `keyed` what its connection has shown (see `Sockets.holder`); else None.
    Who watches the socket is told."""
    if connections is None:
        return listening.recv(), None
    frame = listening.recv(copy=False)
    connections.took(came_by(frame), len(frame))
    return frame.bytes, str(frame.get(USER_ID)) if keyed else None


def skip_rest(listening: "zmq.Socket[bytes]", connections: Connections | None) -> bool:
    """Take the parts of a message that none of ours has; were there any?"""
    longer = False
    while listening.get(zmq.RCVMORE):
        take_part(listening, connections)
        longer = True
    return longer


def came_by(frame: zmq.Frame) -> int:
    """The descriptor of the connection that a frame came by; -1: that has ended."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:  # libzmq answers -1 for it, which PyZMQ takes for an error
        return -1


def cut(listening: "zmq.Socket[bytes]", descriptor: int) -> None:
    """End a connection of a listening socket; whoever is at its other end may connect anew."""
    if (duplicate := _duplicate(listening, descriptor)) is not None:
        with duplicate, contextlib.suppress(OSError):
            duplicate.shutdown(socket.SHUT_RDWR)


def stands(listening: "zmq.Socket[bytes]", descriptor: int) -> bool:
    """Is this the descriptor of a connection of a listening socket, still or again?"""
    if (duplicate := _duplicate(listening, descriptor)) is None:
        return False
    duplicate.close()
    return True


def _duplicate(listening: "zmq.Socket[bytes]", descriptor: int) -> socket.socket | None:
    """None: the connection has ended. Its number may be another file's by now, which is this process's too and is to stay."""
    try:
        duplicate = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if _place(duplicate) == _endpoint(listening).removeprefix("ipc://").rpartition(":")[2]:
            return duplicate
    duplicate.close()
    return None


def _place(connection: socket.socket) -> str:
    """Our side's path or port: a socket may listen on all addresses."""
    name = connection.getsockname()
    return str(name if connection.family == socket.AF_UNIX else name[1])


def _endpoint(listening: "zmq.Socket[bytes]") -> str:
    return listening.get_string(zmq.LAST_ENDPOINT)


def _received_bytes(descriptor: int) -> int | None:
    """Since the connection began; None if there is none."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    except OSError:  # closed since
        return None
    try:
        (received,) = _BYTES_RECEIVED.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size))
    except (OSError, struct.error):
        return None
    else:
        return int(received)
    finally:
        connection.detach()
