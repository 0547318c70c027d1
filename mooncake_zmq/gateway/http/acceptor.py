"""Accepts the gateway's HTTP connections: how many come in, how long each may be silent, and what happens without descriptors.

Each connection then belongs to the HTTP server (uvicorn, by httptools); `connection` bounds what its client sends on it.
uvicorn alone has no timeout for headers and no limit for an address or a tenant.
"""

import asyncio
import contextlib
import math
import socket
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from heapq import nsmallest
from typing import Any

import structlog
import uvicorn
import uvloop
from starlette.types import ASGIApp

from mooncake_zmq.gateway.http.connection import REFUSAL, Connection
from mooncake_zmq.gateway.http.descriptors import NO_RESOURCE, Reserve, within_files
from mooncake_zmq.gateway.http.loop_turns import LoopTurns
from mooncake_zmq.gateway.http.syn_filter import drop_new_connections
from mooncake_zmq.gateway.settings import ConnectionSettings

ACCEPTS_PER_TURN = 128
"""Connections taken from the kernel in one turn of the loop: about 2 ms. The kernel has them in the order in which they came,
so that only what was taken can go by turns between addresses."""
MAX_UNMET = 256
"""Limit on the connections that were taken and wait for their turn; more wait in the kernel."""
MEET_S, CALL_S = 0.0002, 0.0005
"""The time that the loop needs for a new connection, and for the beginning of a call or its refusal, once its turn has come."""
SPARE_AT_ONCE = 32
"""Spare connections that one search finds, for as many new ones."""
NONE_SPARE_S = 0.02
"""Time for which a search that finds none serves."""
WATCH_S = 1.0
"""The longest time between two checks of the connections' timeouts."""
PAUSE_S = 0.2
"""Without descriptors, clients that wait are answered 503, and then none is accepted for this long."""
LOG_EVERY_S = 60.0
MAX_HANDSHAKES = 64
"""TLS handshakes at a time: each takes the loop for up to a millisecond. For one more, the oldest goes of the address that has
the most."""
RECORD_BYTES = 16 << 10
"""The buffer that a TLS connection holds as long as it is open: one record. asyncio's default is 256 KiB."""
HANDSHAKE_S = 0.2
"""Time for the handshakes that are under way when a shared address is given up: longer than a round trip."""
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

log = structlog.get_logger("gateway")


class Acceptor:
    """Accepts connections within the limits, and cuts those that only take up room."""

    def __init__(
        self,
        server: uvicorn.Server,
        listener: socket.socket,
        settings: ConnectionSettings,
        *,
        send_timeout_s: float,
        reserved_files: int = 64,
        tls: Callable[[], ssl.SSLContext] | None = None,
        whose: Callable[[bytes], str] = lambda authorization: "",
        count: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`listener` listens already. `reserved_files`: descriptors that the rest of the process may still open. `tls` returns
        the context for a new connection; None: without TLS. `whose` returns the tenant of a call, or nothing."""
        self.settings = settings
        self.send_timeout_s = send_timeout_s
        self.connections: set[Connection] = set()
        self.max_connections = within_files(settings.max_connections, reserved_files + MAX_UNMET)
        self._server, self.listener, self._tls = server, listener, tls
        self._whose, self._count, self._clock = whose, count, time.monotonic
        self._by_address: Counter[str] = Counter()
        self._by_tenant: Counter[str] = Counter()
        self._arriving: dict[Connection, asyncio.Task[None]] = {}
        """Connections whose handshake is not over, the oldest first."""
        self._reserve = Reserve()
        self._logged_at = -math.inf
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._watch_at = math.inf
        """The time of the next check of the connections' timeouts."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._yielding = False
        self._turns = LoopTurns(self.now)
        self._unmet: dict[socket.socket, str] = {}
        """Connections that were taken from the kernel and wait for their turn, with their addresses."""
        self._spare: dict[str, deque[Connection]] = {}
        """Connections that were spare at the last search, by what they make room for."""
        self._none_spare: dict[str, float] = {}
        """Time of the last search that found none."""
        if tls is not None:
            SSLProtocol.max_size = RECORD_BYTES

    async def open(self) -> None:
        """Accept in the running loop, once the server has started; it has no sockets of its own."""
        while not self._server.started:
            await asyncio.sleep(0.005)
        self._loop = asyncio.get_running_loop()
        self._resume()
        self._watch()

    def close(self) -> None:
        """Accept no more; open connections stay."""
        self._pause()
        for incoming in self._unmet:
            incoming.close()
        self._unmet.clear()
        for timer in self._timers.values():
            timer.cancel()
        self._reserve.close()
        self._loop = None

    def leave(self) -> None:
        """Give up an address that other gateways share, within HANDSHAKE_S. Connections that wait are accepted, the kernel
        routes new ones to the others, and idle ones are closed, now or after their answer, so that their clients go there.

        Closing a listener resets the connections whose handshake is not over. So the kernel first drops new ones: TCP tries
        again after a second, and finds the others.
        """
        if self._yielding:
            return
        self._yielding = True
        try:
            drop_new_connections(self.listener)
        except OSError as error:  # not permitted here: a connection of the last instant may be reset
            log.warning("newcomers_not_turned_away", reason=error.strerror)
        self._later(HANDSHAKE_S, self._shut)

    def enter(self, listener: socket.socket) -> None:
        """Come back to an address that was left; `listener` listens there."""
        self._timers.pop(self._shut).cancel()
        self._shut()
        self.listener = listener
        self._yielding = False
        self._resume()

    def _shut(self) -> None:
        self._pause()
        unmet, self._unmet = self._unmet, {}
        for incoming, address in unmet.items():
            self._meet(incoming, address)
        with contextlib.suppress(OSError):  # none waits any more, or no descriptor is left
            while True:
                incoming, address = self.listener.accept()
                self._meet(incoming, network_of(address[0]))
        self.listener.close()
        for connection in list(self.connections):
            if connection.cycle is not None and not connection.begun:
                connection.shutdown()

    @property
    def listens(self) -> bool:
        """True while connections are accepted and the address is not being given up."""
        return self._loop is not None and not self._yielding

    @property
    def has_left(self) -> bool:
        """True once the listener is closed: the kernel routes new connections to the other gateways."""
        return self._yielding and self.listener.fileno() < 0

    def abort(self) -> None:
        """Cut every connection."""
        for connection in list(self.connections):
            connection.abort()

    def stop_arriving(self, connection: Connection) -> None:
        """Cancel a connection whose handshake is not over."""
        if connection in self._arriving:
            self._arriving.pop(connection).cancel()

    def forget(self, connection: Connection) -> None:
        """Count a connection no more, as it is gone or going."""
        if connection in self.connections:
            self.connections.remove(connection)
            _take_one(self._by_address, connection.address)
            self._count_for(connection, "")

    def received(self, connection: Connection, data: bytes) -> None:
        """Have a connection parse what it received, within the share of this turn of the loop or a later one. It is not read
        meanwhile."""
        if self._turns.has_time:
            connection.take(data)
        else:
            connection.transport.pause_reading()
            self._turns.add(connection.owner, partial(connection.take_later, data))

    def begin_call(self, connection: Connection, authorization: bytes, begin: Callable[[], None]) -> None:
        """Begin a call likewise."""
        if self._turns.has_time:
            self._turns.spend(CALL_S)
            begin()
        else:
            tenant = self._whose(authorization)
            self._turns.add((tenant, "") if tenant else connection.owner, begin, CALL_S)

    def now(self) -> float:
        """The time by which connections are judged."""
        return self._clock()

    def claim(self, connection: Connection, tenant: str) -> bool:
        """Count a connection for the tenant whose key its call has. False: the tenant has as many as it may, and none
        can go."""
        if connection.tenant == tenant or connection not in self.connections:
            return True
        most = max(1, int(self.max_connections * self.settings.max_tenant_share))
        if self._by_tenant[tenant] >= most:
            spare = self._most_spare(tenant, lambda each: each.tenant == tenant)
            if spare is None:
                self._count("http_connections_refused")
                return False
            self._displace(spare)
        self._count_for(connection, tenant)
        return True

    def _count_for(self, connection: Connection, tenant: str) -> None:
        if connection.tenant:
            _take_one(self._by_tenant, connection.tenant)
        connection.tenant = tenant
        if tenant:
            self._by_tenant[tenant] += 1

    # --- new connections

    def _resume(self) -> None:
        if self._loop is not None and self.listener.fileno() >= 0:
            self._loop.add_reader(self.listener.fileno(), self._accept)

    def _pause(self) -> None:
        if self._loop is not None and self.listener.fileno() >= 0:
            self._loop.remove_reader(self.listener.fileno())

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                incoming, address = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in NO_RESOURCE:
                    raise
                self._out_of_files(error)
                return
            network = network_of(address[0])
            if self._turns.has_time:
                self._turns.spend(MEET_S)
                self._meet(incoming, network)
                continue
            self._unmet[incoming] = network
            self._turns.add(("", network), partial(self._meet_next, incoming), MEET_S)
            if len(self._unmet) >= MAX_UNMET:
                self._pause()
                return

    def _meet_next(self, incoming: socket.socket) -> None:
        """Meet a connection that waited for its turn."""
        if incoming not in self._unmet:  # the acceptor was closed, or left its address
            return
        if len(self._unmet) == MAX_UNMET:
            self._resume()
        self._meet(incoming, self._unmet.pop(incoming))

    def _meet(self, incoming: socket.socket, address: str) -> None:
        incoming.setblocking(False)
        if not self._make_room(address):
            self._count("http_connections_refused")
            self._refuse(incoming)
            return
        if self._tls is not None and len(self._arriving) >= MAX_HANDSHAKES:
            self._displace(self._displaced_handshake())
        server, loop = self._server, asyncio.get_running_loop()
        connection = Connection(
            self, address, config=server.config, server_state=server.server_state, app_state=server.lifespan.state, _loop=loop
        )
        self.connections.add(connection)
        self._by_address[address] += 1
        connection.quiet_since = self._clock()  # an unfinished handshake makes room as an unfinished call does
        arriving = self._arriving[connection] = loop.create_task(self._let_in(connection, incoming))
        arriving.add_done_callback(partial(self._arrived, connection, incoming))

    async def _let_in(self, connection: Connection, incoming: socket.socket) -> None:
        timeouts: dict[str, Any] = {}
        if self._tls is not None:
            timeouts = {
                "ssl": self._tls(),
                "ssl_handshake_timeout": self.settings.head_timeout_s,
                "ssl_shutdown_timeout": self.send_timeout_s,
            }
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, incoming, **timeouts)
        except OSError:  # gone already, too slow, or not TLS
            if self._tls is not None:
                self._count("http_handshakes_failed")
            incoming.close()
            self.forget(connection)

    def _arrived(self, connection: Connection, incoming: socket.socket, arriving: asyncio.Task[None]) -> None:
        self._arriving.pop(connection, None)
        if arriving.cancelled():  # perhaps before it began
            incoming.close()
            self.forget(connection)

    def _displaced_handshake(self) -> Connection:
        """The oldest handshake of the address that has the most."""
        groups = Counter(each.address for each in self._arriving)
        address = max(groups, key=groups.__getitem__)
        return next(each for each in self._arriving if each.address == address)

    def _displace(self, connection: Connection) -> None:
        self._count("http_connections_displaced")
        connection.make_room()
        self.forget(connection)

    def _make_room(self, address: str) -> bool:
        """True if one more may come in: within the limits, or in place of a spare one."""
        address_is_full = self._by_address[address] >= self.settings.max_per_address
        if not address_is_full and len(self.connections) < self.max_connections:
            return True
        spare = self._most_spare(f"at {address}" * address_is_full, lambda each: not address_is_full or each.address == address)
        if spare is None:
            return False
        self._displace(spare)
        return True

    def _most_spare(self, name: str, fits: Callable[[Connection], bool]) -> Connection | None:
        """Return the connection to go first among those that fit, of the owner that has the most spare ones; None if none is
        spare. A search goes through all connections, so its result serves for a while, under this `name`."""
        now, found = self._clock(), self._spare.get(name, deque())
        if now - self._none_spare.get(name, -math.inf) < NONE_SPARE_S:
            return None
        while found:
            each = found.popleft()
            if each in self.connections and fits(each) and each.is_spare(now):
                return each
        groups: dict[tuple[str, str], list[Connection]] = {}
        for each in self.connections:
            if fits(each) and each.is_spare(now):
                groups.setdefault(each.owner, []).append(each)
        largest = max(groups.values(), key=len, default=[])
        if not largest:
            self._none_spare[name] = now
            return None
        found = self._spare[name] = deque(nsmallest(SPARE_AT_ONCE, largest, key=lambda each: each.idle_first))
        return found.popleft()

    def _refuse(self, incoming: socket.socket) -> None:
        if self._tls is None:  # a client of TLS cannot read it
            with contextlib.suppress(OSError):
                incoming.send(REFUSAL)
        incoming.close()

    # --- no descriptors left

    def _out_of_files(self, error: OSError) -> None:
        """Refuse those that wait, by the reserve, then pause: the listener stays readable, and would keep the loop busy."""
        self._count("http_out_of_descriptors")
        now = self._clock()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            log.warning("http_out_of_descriptors", reason=error.strerror, connections=len(self.connections))
        for _ in range(ACCEPTS_PER_TURN):
            if not self._turn_away():
                break
        self._pause()
        self._later(PAUSE_S, self._resume)

    def _turn_away(self) -> bool:
        """Refuse one that waits; False: none does."""
        incoming = self._reserve.accept(self.listener)
        if incoming is not None:
            self._refuse(incoming)
        self._reserve.refill()
        return incoming is not None

    # --- timeouts

    def _watch(self) -> None:
        """Cut connections that were silent for too long, or whose client does not read the last of an answer. The time by which
        this check is late counts for none of them: what came while this process had no CPU is read only after it."""
        now = self._clock()
        late_s = max(0.0, now - self._watch_at)
        self._spare.clear()
        self._none_spare.clear()
        for connection in list(self.connections):
            if connection.transport is None or connection.lingers:  # which have a timeout of their own
                continue
            if connection.calling:
                connection.quiet_since = None
            elif connection.quiet_since is None:
                connection.quiet_since = now
            else:
                connection.quiet_since = min(now, connection.quiet_since + late_s)
                if now - connection.quiet_since >= self._timeout_s(connection):
                    self._cut(connection)
        delay_s = min(WATCH_S, self.settings.head_timeout_s / 4)
        self._watch_at = now + delay_s
        self._later(delay_s, self._watch)

    def _timeout_s(self, connection: Connection) -> float:
        if connection.transport.is_closing():
            return self.send_timeout_s
        return self.settings.head_timeout_s if connection.begun or connection.cycle is None else self.settings.idle_timeout_s

    def _cut(self, connection: Connection) -> None:
        self._count("http_connections_timed_out")
        if connection.transport.is_closing():
            connection.abort()
            return
        connection.quiet_since = None
        if connection.begun:
            connection.transport.write(TOO_SLOW)
            connection.linger()
        else:
            connection.close()

    def _later(self, delay_s: float, what: Callable[[], None]) -> None:
        if self._loop is not None:
            self._timers[what] = self._loop.call_later(delay_s, what)


def new_loop(*, tls: bool) -> asyncio.AbstractEventLoop:
    """The loop for a gateway's connections: libuv's takes less time for a token. With TLS it is asyncio's own, as libuv's holds
    half a MiB for each connection."""
    return asyncio.new_event_loop() if tls else uvloop.new_event_loop()


def server_config(app: ASGIApp, settings: ConnectionSettings) -> uvicorn.Config:
    """Configure uvicorn to serve `app` behind an acceptor, without sockets or signals of its own."""
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="error",  # or it logs every malformed request
        access_log=False,
        lifespan="on",
        http=Connection,
        ws="none",
        timeout_keep_alive=math.ceil(settings.idle_timeout_s),
    )


def network_of(address: str) -> str:
    """The network that connections are counted by: an IPv4 address, or the /64 of an IPv6 one, which one customer has whole."""
    if ":" not in address:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    mapped = packed[:12] == bytes(10) + b"\xff\xff"
    return socket.inet_ntop(socket.AF_INET, packed[12:]) if mapped else packed[:8].hex()


def _take_one(counter: Counter[str], key: str) -> None:
    """Count one less, and drop the key at zero."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
