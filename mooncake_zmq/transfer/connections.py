"""Memory limits of the TCP connections of one listening ZeroMQ socket: of the host that holds most for longest, one is cut.

A high-water mark counts whole messages, and ZMQ_MAXMSGSIZE bounds one part of a message; ZeroMQ holds all parts of a message
that never ends, and reports none. So bytes are counted on both sides of it: the kernel counts those received on a connection,
and the receiving thread those taken from the socket. `ipc://` connections are not watched: they are this user's own.

More than `PARTIAL_BYTES` of an incomplete message may be held for `PARTIAL_S` only: long enough for the longest one over the
slowest link, whose receiving thread is late by `LATE_S`. Empty parts take 32 times as much memory as bytes on the wire, and
ZeroMQ takes up to 30 MB/s of them: so the process may not grow by more than `PARTIAL_GROWTH_BYTES` meanwhile, for whatever
reason. A peer that is cut wrongly reconnects, and sends again.

For this no high-water mark is set on received messages. At one ZeroMQ stops a connection's input; and libzmq 4.3.5 aborts the
process (`!_io_error`) if the peer disconnects while its input is stopped, and something is to be written to it after that: the
answer to a PING that was read before and is handled when the input continues.
"""

import contextlib
import os
import socket
import struct
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from mooncake_zmq.core.messages import MAX_MESSAGE_BYTES
from mooncake_zmq.transfer.process_memory import resident_bytes
from mooncake_zmq.transfer.sockets import USER_ID

log = structlog.get_logger()

MAX_UNTAKEN_BYTES = 4 * MAX_MESSAGE_BYTES
"""Limit for all connections of a socket together. Beyond it connections are cut, first of the host whose untaken bytes, each by
the time for which it has waited, weigh most: one that sends much and is late by a moment weighs less than many that send little
and never end. A peer that is cut reconnects."""
PARTIAL_BYTES = 512 << 10
LATE_S = 1.0
SLOWEST_BYTES_PER_S = 3 << 20
"""Bytes that the slowest usable link brings (25 Mbit/s): over a slower one the longest message takes longer than the peer
timeout of 3 s, in which nothing else comes."""
PARTIAL_S = LATE_S + MAX_MESSAGE_BYTES / SLOWEST_BYTES_PER_S
"""How long more than PARTIAL_BYTES of an incomplete message may be held."""
PARTIAL_GROWTH_BYTES = 3 * MAX_MESSAGE_BYTES
"""A normal message takes as much memory as it has bytes."""
MAX_OF_A_HOST = 1024
"""Connections of one host to a socket, a tenth of what the descriptors of a process allow; a further one is cut at once. A host
whose handshakes fail holds no more either."""
LOOK_S = 0.01
"""Interval of the checks, in which a network brings no more than some 20 MiB."""
SHORT_BYTES, LONG_BYTES, LONG_FROM_BYTES = 2, 9, 256
"""Bytes of a frame's header on the wire, for short frames and for frames from LONG_FROM_BYTES on."""
CURVE_FRAME_BYTES = 33
"""Bytes that CURVE adds to a frame. The number is exact: a byte too many for each frame would hide untaken ones."""
XPUB_FRAME_BYTES = 46
"""Bytes per frame that are assumed instead for an XPUB, which does not report the end of a subscription that did not exist."""
HEARTBEAT_BYTES_PER_S = 64
"""Upper limit of the bytes that arrive outside of frames."""
RECEIVE_BUFFER_BYTES = 256 << 10
"""Size of the kernel's receive buffer of each connection."""
_BYTES_RECEIVED = struct.Struct("<128xQ")
"""Place of the received bytes in Linux's `struct tcp_info`."""


@dataclass(slots=True)
class _Open:
    """An open connection of the host `address`."""

    address: str
    since: float
    """Time when it last held nothing, or some of it was taken."""
    received_bytes: int = 0
    untaken_bytes: float = 0.0
    partial: tuple[float, int] | None = None
    """Time since when too much of an incomplete message is held, and the process's size then."""

    def weight(self, now: float) -> float:
        """Return the untaken bytes by the time for which they have been held."""
        return self.untaken_bytes * (now - self.since + LOOK_S)


class Connections:
    """Counts and cuts connections on a thread of its own, until closed. `took` is for the receiving thread."""

    def __init__(
        self, listening: "zmq.Socket[bytes]", counts: dict[str, int], on_crash: Callable[[BaseException], None]
    ) -> None:
        """Start before `listening` binds. Cut connections are added to the owner's `counts`; `on_crash` is called from the
        thread."""
        for what in ("connections_cut", "connections_over_share"):
            counts.setdefault(what, 0)
        listening.rcvbuf, listening.rcvhwm = RECEIVE_BUFFER_BYTES, 0
        self._counts = counts
        self._listening = listening
        self._added_bytes = CURVE_FRAME_BYTES if listening.get(zmq.CURVE_SERVER) else 0
        if listening.type == zmq.XPUB:
            self._added_bytes = XPUB_FRAME_BYTES
        self._on_crash = on_crash
        self._open: dict[int, _Open] = {}
        """The connections, by descriptor."""
        self._of_hosts: Counter[str] = Counter()
        self._taken: deque[tuple[int, int]] = deque()
        """Frames taken since the last check: (descriptor, bytes)."""
        self._empty = True
        """Whether all complete messages are taken."""
        self._monitor: zmq.Socket[bytes] = listening.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)
        self._thread.start()

    def took(self, descriptor: int, size_bytes: int) -> None:
        """Note that a frame of this size was taken from the connection `descriptor` (ZMQ_SRCFD)."""
        self._empty = False
        size_bytes += self._added_bytes
        self._taken.append((descriptor, size_bytes + (SHORT_BYTES if size_bytes < LONG_FROM_BYTES else LONG_BYTES)))

    def looking(self) -> None:
        """Note that the receiving thread begins to receive; for an XPUB this lasts as long as more arrives."""
        self._empty = False

    def drained(self) -> None:
        """Note that no complete message was left."""
        self._empty = True

    def close(self) -> None:
        """Stop the thread, before `listening` is closed. May be called twice."""
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
        while self._stop not in dict(poller.poll(int(LOOK_S * 1000) if self._open else None)):
            self._note()
            now = time.monotonic()
            if now - looked_at >= LOOK_S:
                self._look(now, now - looked_at)
                looked_at = now

    def _note(self) -> None:
        """Note new and closed connections."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                descriptor = event["value"]
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._accept(descriptor, _address(descriptor), time.monotonic())
                else:
                    self._forget(descriptor)

    def _accept(self, descriptor: int, address: str, now: float) -> None:
        self._forget(descriptor)
        self._open[descriptor] = _Open(address, now)
        self._of_hosts[address] += 1
        if self._of_hosts[address] > MAX_OF_A_HOST:
            self._counts["connections_over_share"] += 1
            self._forget(descriptor)
            cut(self._listening, descriptor)

    def _forget(self, descriptor: int) -> _Open | None:
        """Count a connection no more, and return what was known of it."""
        held = self._open.pop(descriptor, None)
        if held is not None:
            self._of_hosts[held.address] -= 1
            if not self._of_hosts[held.address]:
                del self._of_hosts[held.address]
        return held

    def _look(self, now: float, elapsed_s: float) -> None:
        taken: Counter[int] = Counter()
        for _ in range(len(self._taken)):
            descriptor, size_bytes = self._taken.popleft()
            taken[descriptor] += size_bytes
        for descriptor, held in list(self._open.items()):
            received = _received_bytes(descriptor)
            if received is None:
                self._forget(descriptor)
                continue
            came = received - held.received_bytes - taken[descriptor] - HEARTBEAT_BYTES_PER_S * elapsed_s
            held.received_bytes, held.untaken_bytes = received, max(0.0, held.untaken_bytes + came)
            if taken[descriptor] or not held.untaken_bytes:
                held.since = now
            if not self._empty or held.untaken_bytes <= PARTIAL_BYTES:
                held.partial = None
                continue
            taken_bytes = resident_bytes()
            held.partial = since, before_bytes = held.partial or (now, taken_bytes)
            if now - since > PARTIAL_S or taken_bytes - before_bytes > PARTIAL_GROWTH_BYTES:
                self._cut(descriptor)
        while sum(held.untaken_bytes for held in self._open.values()) > MAX_UNTAKEN_BYTES:
            self._cut(self._heaviest(now))

    def _heaviest(self, now: float) -> int:
        """Return the heaviest connection of the host whose connections together weigh most."""
        weights = {descriptor: held.weight(now) for descriptor, held in self._open.items()}
        hosts: defaultdict[str, float] = defaultdict(float)
        for descriptor, weight in weights.items():
            hosts[self._open[descriptor].address] += weight
        return max(weights, key=lambda descriptor: (hosts[self._open[descriptor].address], weights[descriptor]))

    def _cut(self, descriptor: int) -> None:
        held = self._forget(descriptor)
        assert held is not None
        self._counts["connections_cut"] += 1
        log.warning("connection_cut", untaken_bytes=int(held.untaken_bytes), endpoint=_endpoint(self._listening))
        cut(self._listening, descriptor)


def receive(listening: "zmq.Socket[bytes]", connections: Connections | None) -> list[zmq.Frame] | None:
    """Return the next message of a listening socket, or None if none is left; `connections` counts either."""
    if connections is not None:
        connections.looking()
    try:
        frames = listening.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        if connections is not None:
            connections.drained()
        return None
    if connections is not None:
        for frame in frames[listening.type == zmq.ROUTER :]:  # a ROUTER's first frame is the peer's name, not received
            connections.took(came_by(frame), len(frame))
    return frames


def take_part(
    listening: "zmq.Socket[bytes]", connections: Connections | None, *, keyed: bool = False
) -> tuple[bytes, str | None]:
    """Return the next part of an unfinished message and, if `keyed`, its connection's User-Id (see `Sockets.holder`), else
    None. `connections` counts the part."""
    if connections is None:
        return listening.recv(), None
    frame = listening.recv(copy=False)
    connections.took(came_by(frame), len(frame))
    return frame.bytes, str(frame.get(USER_ID)) if keyed else None


def skip_remaining(listening: "zmq.Socket[bytes]", connections: Connections | None) -> bool:
    """Take the excess parts of a message, which no valid message has; returns whether there were any."""
    longer = False
    while listening.get(zmq.RCVMORE):
        take_part(listening, connections)
        longer = True
    return longer


def came_by(frame: zmq.Frame) -> int:
    """Return the descriptor of a frame's connection; -1 if that has ended."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:  # libzmq returns -1 then, which PyZMQ takes for an error
        return -1


def cut(listening: "zmq.Socket[bytes]", descriptor: int) -> None:
    """End a connection of a listening socket; its peer may reconnect."""
    if (duplicate := _duplicate(listening, descriptor)) is not None:
        with duplicate, contextlib.suppress(OSError):
            duplicate.shutdown(socket.SHUT_RDWR)


def stands(listening: "zmq.Socket[bytes]", descriptor: int) -> bool:
    """Return whether this is the descriptor of a connection of a listening socket, still or again."""
    if (duplicate := _duplicate(listening, descriptor)) is None:
        return False
    duplicate.close()
    return True


def _duplicate(listening: "zmq.Socket[bytes]", descriptor: int) -> socket.socket | None:
    """Return a duplicate of a connection, or None if it has ended. Its number may by now be another file of this process, which
    must stay open."""
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
    """Return our side's path or port, without the address, as a socket may listen on all addresses."""
    name = connection.getsockname()
    return str(name if connection.family == socket.AF_UNIX else name[1])


def _endpoint(listening: "zmq.Socket[bytes]") -> str:
    return listening.get_string(zmq.LAST_ENDPOINT)


def _address(descriptor: int) -> str:
    """Return the address of a connection's other end; empty if it has ended."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            return str(duplicate.getpeername()[0])
    except (OSError, IndexError):
        return ""


def _received_bytes(descriptor: int) -> int | None:
    """Return the bytes received since the connection began; None if there is none."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    except OSError:  # closed meanwhile
        return None
    try:
        (received,) = _BYTES_RECEIVED.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size))
    except (OSError, struct.error):
        return None
    else:
        return int(received)
    finally:
        connection.detach()
