"""Makes all sockets between processes of the cluster: limits, liveness, and keys where bytes leave the machine.

Messages go over ZeroMQ sockets, in one context a process. Bulk bytes go over plain streams, which listen beside a ZeroMQ socket
that hands out the tickets for them (`stream.py`, `tickets.py`).

Without keys TCP is allowed on loopback alone, or where the operator trusts his network. With keys every TCP socket uses CURVE,
also on loopback: a client must have a key that `core.keys` admits there, and the server the key that the client expects.
`ipc://` sockets lie in a directory that only this user can enter, and need no keys.

A server checks its clients by ZAP (RFC 27). One thread answers for all servers, and puts the key and its name into the
connection's User-Id, which ZeroMQ adds to each message. A connection keeps its name until it ends or the key is dropped: ZeroMQ
does not cut the connection then, but its messages no longer count (`Sockets.holder`).
"""

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address

import structlog
import zmq
from zmq.utils import z85

from mooncake_zmq.core.keys import PLANES, Plane
from mooncake_zmq.transfer.key_files import Keys

log = structlog.get_logger()

USER_ID = "User-Id"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
REFRESH_S = 1.0
"""Interval in which the file of public keys is checked."""
LOG_EVERY_S = 10.0
"""Least interval of logged refusals; all are counted."""
HANDSHAKE_MS = 5_000
CURVE_BYTES, CURVE_HANDSHAKE_BYTES = 64, 1024
"""Upper limits of the bytes that CURVE adds to a frame, and of its own commands."""
RECONNECT_MS = 50
MAX_SOCKETS = 4096
IO_THREADS = PLANES
"""I/O threads of a serving process: messages of one plane do not wait behind those of another."""
IPC_SUFFIX = "-stream"
"""Suffix of the path where streams connect, beside the socket that hands out their tickets."""
BACKLOG = 1024
"""Connections that were not accepted yet; Linux may take fewer (net.core.somaxconn)."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 10, 5, 3
"""TCP keepalive of a stream."""
PROBE_S = 2
"""TCP keepalive of a ZeroMQ connection: the silence before the first probe, and the interval of probes."""
CONNECT_SLICE_S = 0.05
"""Interval in which the connecting thread checks whether the stream is still wanted."""


class BadEndpoint(ValueError):
    """An endpoint that cannot be bound or connected by the operator's mistake; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one socket. HWM: messages in each connection's queue."""

    max_message_bytes: int
    send_hwm: int
    receive_hwm: int
    silence_ms: int = 10_000
    """Time without a sign of the other host after which a TCP connection is closed; over ipc the kernel reports an end at
    once."""
    reconnect_max_ms: int = 2_000


class Sockets:
    """A ZeroMQ context and its keys, shared by the parts of a process. Each part borrows it; the last to give it back ends
    it."""

    def __init__(
        self,
        keys: Keys | None = None,
        *,
        allow_plain_tcp: bool = False,
        encrypt_bulk: bool = True,
        io_threads: int = 0,
        on_crash: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Make a context. `encrypt_bulk`: encrypt streams over TCP too, where there are keys. `io_threads`: number shared by
        all sockets; 0: one for each of IO_THREADS. `on_crash` is called from the thread that checks keys, which runs once a
        socket listens with keys."""
        self.counts = {"admitted": 0, "refused": 0}
        self.keys = keys
        self._allow_plain_tcp = allow_plain_tcp
        self._encrypt_bulk = encrypt_bulk
        self._pinned = io_threads == 0
        self._on_crash = on_crash
        self._in_use: dict[str, str] = {}
        """Key of each name's latest connection to us: the one by which it can be reached."""
        self._logged_at = 0.0
        self._users = 0
        self._guard = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=io_threads or len(IO_THREADS))
        self._context.max_sockets = MAX_SOCKETS
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    def borrow(self) -> "Sockets":
        """Return this object to one more part of the process, which calls `give_back` once."""
        with self._guard:
            self._users += 1
        return self

    def give_back(self) -> None:
        """End a part's use, after it has closed all sockets that it made."""
        with self._guard:
            self._users -= 1
            last = self._users == 0
        if last:
            self._end()

    def listening(self, kind: int, endpoint: str, plane: Plane, limits: Limits) -> "zmq.Socket[bytes]":
        """Return a socket that may bind to `endpoint`. Raises BadEndpoint if that requires keys and there are none."""
        keys = self._keys_for(endpoint)
        socket = self._make(kind, endpoint, plane, limits, keys)
        if keys is not None:
            self._answer_for_keys()
            socket.curve_server = True
            socket.zap_domain = plane.encode()
            socket.zap_enforce_domain = True
        return socket

    def connecting(
        self, kind: int, endpoint: str, plane: Plane, limits: Limits, *, server: str, not_by: str = ""
    ) -> "tuple[zmq.Socket[bytes], str]":
        """Return a socket that may connect to the node `server` at `endpoint`, and the key that it expects there; empty: none.

        `not_by`: a key with which the node was not reached. Raises BadEndpoint if its key is unknown, or keys are required.
        """
        keys = self._keys_for(endpoint)
        if keys is None:
            return self._make(kind, endpoint, plane, limits, None), ""
        if self._thread is None:
            keys.refresh()
        if not server:
            raise BadEndpoint(f"{endpoint}: write tcp://NAME@HOST:PORT: servers are known by the keys of their names")
        expected = self.key_of(server, not_by=not_by)
        if not expected:
            raise BadEndpoint(f"{endpoint}: {keys.path} has no key of {server}")
        socket = self._make(kind, endpoint, plane, limits, keys)
        socket.curve_publickey = keys.public.encode()
        socket.curve_serverkey = expected.encode()
        return socket, expected

    def key_of(self, name: str, *, not_by: str = "") -> str:
        """Return the best key to expect of `name`: that of its connection to us, else its newest, else the other one."""
        known = self.keys.book.of(name) if self.keys is not None else ()
        if (used := self._in_use.get(name)) in known:
            return used or ""
        return next((key for key in known if key != not_by), known[0] if known else "")

    def seals(self, endpoint: str) -> bool:
        """Return whether the streams beside this endpoint are encrypted."""
        return self._encrypt_bulk and self.keys is not None and endpoint.startswith("tcp://")

    def inner(self, kind: int) -> "zmq.Socket[bytes]":
        """Return a socket for `inproc://` alone."""
        socket = self._context.socket(kind)
        socket.linger = 0
        return socket

    def _make(self, kind: int, endpoint: str, plane: Plane, limits: Limits, keys: Keys | None) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.ipv6 = False
        socket.maxmsgsize = limits.max_message_bytes
        socket.sndhwm, socket.rcvhwm = limits.send_hwm, limits.receive_hwm
        socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS, limits.reconnect_max_ms
        socket.handshake_ivl = HANDSHAKE_MS
        if self._pinned:
            socket.affinity = 1 << IO_THREADS.index(plane)
        if endpoint.startswith("tcp://"):
            # The kernel probes the other host. With ZeroMQ's own heartbeats libzmq 4.3.5 would abort the process
            # (`!_io_error`): their timer writes to a connection that ended while its input was stopped.
            socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, KEEPALIVE_PROBES
            socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = PROBE_S
            socket.tcp_maxrt = limits.silence_ms
        if keys is not None:
            socket.maxmsgsize = max(limits.max_message_bytes + CURVE_BYTES, CURVE_HANDSHAKE_BYTES)
            socket.curve_secretkey = keys.secret
        return socket

    def holder(self, plane: Plane, shown: str) -> str:
        """Return the name of the key that a connection has shown, from a message's User-Id; empty once the key is not valid."""
        name, _, key = shown.partition(" ")
        if self.keys is not None and self.keys.book.admitted(plane, key) == name:
            return name
        self._count("refused")
        return ""

    def _count(self, what: str) -> None:
        """Count one more, from any thread."""
        with self._guard:
            self.counts[what] += 1

    def _keys_for(self, endpoint: str) -> Keys | None:
        """Return the keys for an endpoint, None if it is in clear. Raises BadEndpoint."""
        if not endpoint.startswith("tcp://"):
            return None
        if self.keys is not None:
            return self.keys
        if not self._allow_plain_tcp and not is_loopback(endpoint):
            raise BadEndpoint(
                f"{endpoint}: TCP beyond this machine needs keys: `mooncake-zmq keys make` makes them, and security.keys names "
                "their directory; on a network that no others are on, set security.allow_plain_tcp = true"
            )
        return None

    def _answer_for_keys(self) -> None:
        with self._guard:
            if self._thread is None:
                self._zap = self.inner(zmq.REP)
                self._zap.bind(ZAP_ENDPOINT)
                self._thread = threading.Thread(target=self._run, name="keys", daemon=True)
                self._thread.start()

    def _end(self) -> None:
        os.eventfd_write(self._stop, 1)
        if self._thread is not None:
            self._thread.join()
            self._zap.close()
        self._context.term()
        os.close(self._stop)

    # --- the thread that checks keys

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        assert self.keys is not None
        try:
            while self._stop not in (ready := dict(poller.poll(int(REFRESH_S * 1000)))):
                self.keys.refresh()
                if self._zap in ready:
                    self._zap.send_multipart(self._answer(self.keys, self._zap.recv_multipart()))
        except Exception as error:
            if self._on_crash is not None:
                self._on_crash(error)
            log.critical("keys_crashed", exc_info=error)

    def _answer(self, keys: Keys, request: list[bytes]) -> list[bytes]:
        version, request_id, domain, address, _, mechanism, *credentials = request
        plane, name, key = domain.decode(), None, ""
        if mechanism == b"CURVE" and len(credentials) == 1:
            key = z85.encode(credentials[0]).decode()
            name = keys.book.admitted(plane, key)
        if name is None:
            self._count("refused")
            self._log_refused(plane, address.decode())
            return [version, request_id, b"400", b"no key that is known here", b"", b""]
        self._count("admitted")
        if plane == "control":
            self._in_use[name] = key
        return [version, request_id, b"200", b"", f"{name} {key}".encode(), b""]

    def _log_refused(self, plane: str, address: str) -> None:
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            log.warning("connection_refused", plane=plane, address=address, refused=self.counts["refused"])


def listen_beside(endpoint: str, port: int) -> tuple[socket.socket, str]:
    """Return a socket that accepts streams beside a ZeroMQ endpoint, and its address for clients.

    `port`: at the endpoint's address, 0 for any free one; over ipc the path beside it. Raises OSError.
    """
    scheme, _, place = endpoint.partition("://")
    if scheme == "ipc":
        path = f"{place}{IPC_SUFFIX}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of a former incarnation: the process that bound the endpoint itself is the running one
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(BACKLOG)
        return listener, f"ipc://{path}"
    host = _host(endpoint)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    return listener, f"tcp://*:{listener.getsockname()[1]}"


def connect_beside(where: str, endpoint: str, timeout_s: float, is_over: Callable[[], bool] = lambda: False) -> socket.socket:
    """Connect to the address `where` that `listen_beside` of the server at `endpoint` returned. `is_over`: it is not wanted
    any more.

    Raises OSError, and ValueError or OverflowError if `where` is no address.
    """
    scheme, _, place = where.partition("://")
    own_scheme, _, own_place = endpoint.partition("://")
    if scheme != own_scheme or (scheme == "ipc" and place != f"{own_place}{IPC_SUFFIX}"):
        raise ValueError(f"{where} is not beside {endpoint}")
    address: str | tuple[str, int] = place
    if scheme == "ipc":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        host = _host(endpoint)
        address = (host, int(place.rpartition(":")[2]))
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        _connect(connection, address, timeout_s, is_over)
        tune(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(connection: socket.socket, address: str | tuple[str, int], timeout_s: float, is_over: Callable[[], bool]) -> None:
    connection.setblocking(False)
    until = time.monotonic() + timeout_s
    error = connection.connect_ex(address)
    waiting = select.poll()
    waiting.register(connection, select.POLLOUT)
    while error in (errno.EINPROGRESS, errno.EAGAIN):  # the latter: a Unix socket whose server accepts slowly
        if is_over() or time.monotonic() >= until:
            raise TimeoutError(errno.ETIMEDOUT, "not connected in time")
        if error == errno.EAGAIN:
            time.sleep(CONNECT_SLICE_S)
            error = connection.connect_ex(address)
        elif waiting.poll(CONNECT_SLICE_S * 1000):
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))


def tune(connection: socket.socket) -> None:
    """Set the options of either end of a stream: send without delay, and notice an end that is gone."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def check_endpoint(endpoint: str) -> None:
    """Raise BadEndpoint unless `endpoint` can be both bound and connected to, from another machine if it is TCP."""
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if not path.startswith("/"):
            raise BadEndpoint(f"{endpoint}: an ipc endpoint needs an absolute path")
        most = zmq.IPC_PATH_MAX_LEN - len(IPC_SUFFIX)
        if len(os.fsencode(path)) > most:
            raise BadEndpoint(f"{endpoint}: the path is longer than {most} bytes; use a shorter runtime_dir")
    elif endpoint.startswith("tcp://"):
        address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65536
        if not _is_one_address(address) or not is_port:
            raise BadEndpoint(
                f"{endpoint}: write tcp://ADDRESS:PORT with an IPv4 address of the node's machine, no name and no wildcard: "
                "the node listens there and the others connect to it"
            )
    else:
        raise BadEndpoint(f"{endpoint}: an endpoint begins with ipc:// or tcp://")


def is_loopback(endpoint: str) -> bool:
    """Return whether TCP at this endpoint stays on the machine."""
    host = _host(endpoint)
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name, an interface, a wildcard
        return host == "localhost"


def _host(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _is_one_address(text: str) -> bool:
    try:
        return not IPv4Address(text).is_unspecified
    except ValueError:
        return False
