"""The gateway's HTTP connections: who is let in, for how long one may say nothing, and what happens without descriptors.

It accepts for the HTTP server (uvicorn, by httptools), which then owns each connection; what is said on it is the
edge's matter.
"""

import asyncio
import contextlib
import ctypes
import errno
import math
import os
import resource
import socket
import ssl
import struct
import time
from asyncio.sslproto import SSLProtocol
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import httptools
import structlog
import uvicorn
import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from mooncake_zmq.gateway.settings import ConnectionSettings

ACCEPTS_PER_TURN = 32
"""Connections taken before the streams get their turn again."""
WATCH_S = 1.0
"""How often connections are looked at, at least."""
PAUSE_S = 0.2
"""Out of descriptors: whoever waits at the door by then is answered 503, and then nobody is let in for this long."""
LOG_EVERY_S = 60.0
SLOW_S = 1.0
"""A body that has been on its way for so long makes room for newcomers, and so does an answer whose end is not taken."""
WRITE_BUFFER_BYTES = 64 << 10
"""What a connection holds of an answer that its client does not take, one write apart; then the stream waits."""
PIECES, PIECE_BYTES = 32, 256
"""A body may come in so many pieces, and one more for each so many bytes: each piece takes the loop as long as a large one, and
a chunked body of single bytes would keep every stream waiting."""
FRAME_BYTES = 16
"""What may frame a piece. It is so many bytes beside the body, as long as more than the headers may be stands there."""
PARSE_S = 0.01
"""Of the loop's time that what comes in may take at once, all connections together; the rest waits for the next turn."""
READ_BYTES = 64 << 10
"""What asyncio's own loop takes from a connection at once; libuv's takes up to 256 KiB."""
MAX_HANDSHAKES = 64
"""TLS connections that are greeting at a time: each takes the loop for up to a millisecond, by itself but for this bound. Of
more the oldest goes, of the address that has the most."""
RECORD_BYTES = 16 << 10
"""What a TLS connection has memory for, as long as it stands: a record. asyncio's own wish is 256 KiB."""
KNOCKING_S = 0.2
"""For handshakes that are under way when a shared address is given up: longer than the way to a client and back."""
SO_ATTACH_FILTER = 26
"""Python has no name for it."""
_INSTRUCTION = struct.Struct("HBBI")
NO_NEWCOMERS = b"".join(
    _INSTRUCTION.pack(*each)
    for each in (
        (0x30, 0, 0, 13),  # the flags of the TCP header
        (0x54, 0, 0, 0x12),  # of them SYN and ACK
        (0x15, 0, 1, 0x02),  # SYN alone:
        (0x06, 0, 0, 0),  # dropped
        (0x06, 0, 0, 0xFFFFFFFF),  # all else: as it is
    )
)
"""What a listening socket is to hear, as a program of the kernel's classic BPF."""
NO_RESOURCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REFUSED = b'{"error":{"message":"too many connections","type":"server_error","param":null,"code":"too_many_connections"}}'
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_REFUSED), _REFUSED)
)
CONTINUE = b"HTTP/1.1 100 "
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

log = structlog.get_logger("gateway")


class Connection(HttpToolsProtocol):
    """One connection, as uvicorn serves it, with bounds on what its client may do to others."""

    def __init__(self, door: "Door", address: str, **uvicorn_own: Any) -> None:
        own_state = {"abort": self.abort, "push": self.push, "claim": partial(door.claim, self), "refuse": self.refuse}
        super().__init__(**{**uvicorn_own, "app_state": {**uvicorn_own["app_state"], **own_state}})
        self.address = address
        self.tenant = ""
        """Whose key the last call here had; empty: no key has come that is known."""
        self._door = door
        self.quiet_since: float | None = None
        """Since when no call is open here; None: one is."""
        self._called_at = 0.0
        """When the headers of the last call were whole."""
        self._refused = False
        """The answer to the call is a refusal, and is put off."""
        self.begun = False
        """Did something of a call come whose headers are not whole?"""
        self._deaf = False
        """Nothing that comes is heard any more: the call that is open is the last."""
        self._pieces = self._bytes = 0
        """Of the body that comes."""
        self._beside = self._beside_now = 0
        """Bytes of this call that are none of its body; of these, those that came just now."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.quiet_since = self._door.now()
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        with contextlib.suppress(AttributeError):  # asyncio's own name for it; libuv's measure is 256 KiB
            transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):  # gone already
            # The kernel's own: it holds while the last of an answer waits in its buffers, when nobody here does.
            transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._door.send_timeout_s * 1000)
            )

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._door.left(self)

    # --- what is said

    def data_received(self, data: bytes) -> None:
        self._door.heard(self, data)

    def take(self, data: bytes) -> None:
        """Make of it what it says."""
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        self._beside_now = len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        self._beside += self._beside_now
        if self._beside > self._door.settings.max_head_bytes + FRAME_BYTES * (self._bytes // PIECE_BYTES):
            self.send_400_response("Too much that is no body.")

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as wish:
            head = self._without_wish()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(head + data[wish.args[0] :])

    def _without_wish(self) -> bytes:
        """The headers of a call that would rather be one of another protocol: the parser took its body for that."""
        lines = [
            b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode()),
            *(b"%b: %b" % each for each in self.headers if each[0] != b"upgrade"),
        ]
        return b"\r\n".join((*lines, b"", b""))

    def on_message_begin(self) -> None:
        """Who does not wait for an answer before he goes on is told that the connection ends with it, and may ask again."""
        if self.calling:
            self._end_with_call()
            raise _Refused
        super().on_message_begin()
        self.begun = True
        self.quiet_since = self._door.now()  # it has its own time
        self._pieces = self._bytes = self._beside = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Those behind a body are nobody's: what is told there was not looked at when the call began."""
        if self.begun:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if not _is_plain(self.parser.get_method(), self.url, version, self.headers):
            raise _Refused
        self.expect_100_continue &= version != "1.0"  # to which it means nothing
        if not self.parser.should_upgrade():  # else it comes again
            self.begun, self.quiet_since, self._called_at = False, None, self._door.now()
            self._refused = False
            super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._door.has_left:  # it had asked nothing by then: its next call is for others
            cycle.keep_alive = False
        if cycle.scope["method"] != "HEAD":  # whose answer is a head alone
            cycle.transport = HeadWithBody(self.transport)  # type: ignore[assignment]
        chunks = cycle.scope["http_version"] == "1.1"
        super()._start_asgi_task(cycle, app if chunks else partial(_without_chunks, cycle, app))

    def on_body(self, body: bytes) -> None:
        self._pieces += 1
        self._bytes += len(body)
        self._beside_now -= len(body)
        if self._pieces > PIECES + self._bytes / PIECE_BYTES:
            raise _Refused  # a body in crumbs
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.begun:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self.quiet_since = self._door.now()
        super().on_response_complete()

    def _end_with_call(self) -> None:
        self._deaf = True
        self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """From uvicorn, too: nonsense came."""
        if self._deaf:
            return
        self._deaf = True
        if self.calling and self.cycle.response_started:  # there is no way to say so
            self.abort()
        elif self.cycle is not None and self.cycle.response_complete and not self.begun:  # what it is of has its answer
            self.close()
        else:
            super().send_400_response(msg)

    # --- what is answered

    def push(self, part: bytes) -> bool:
        """Write the next part of an answer that has begun and is not over, past all that stands between it and ASGI's messages.
        False: not now, the client takes no more, or not so: its answer has no chunks."""
        cycle = self.cycle
        if self.flow.write_paused or cycle is None or not cycle.chunked_encoding:
            return False
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def abort(self) -> None:
        """Cut it now; what was not taken is lost."""
        if self.transport is None:
            self._door.stop_arriving(self)
        else:
            self.transport.abort()

    def shutdown(self) -> None:
        """From uvicorn, which ends: close it, once what is open here is answered."""
        super().shutdown()
        self.say_goodbye()

    def close(self) -> None:
        """Once all that was written is taken."""
        self.transport.close()
        self.say_goodbye()

    def say_goodbye(self) -> None:
        """TLS has told the client that this is the end, and would wait for him to say so too. Who is idle does not listen."""
        below = getattr(getattr(self.transport, "_ssl_protocol", None), "_transport", None)
        if below is not None and self.transport.is_closing():
            # asyncio itself tells only of what is not encrypted yet.
            unsent = self.transport.get_write_buffer_size() + below.get_write_buffer_size()
            if not unsent:
                self.transport.abort()

    def refuse(self) -> None:
        """From the application: the answer to the call that is open is a refusal, which waits a while."""
        self._refused = True

    def make_room(self) -> None:
        """Go, for a newcomer. A client whose body is on its way is answered, if that can be done at once."""
        if self.calling and not self.cycle.response_started and not self._unsent_bytes:
            self._deaf = True
            self.transport.write(REFUSAL)
            self.close()
        else:
            self.abort()

    def is_spare(self, now: float) -> bool:
        """Does it hold nothing up to go: has it no open call, or one that is refused, or whose body is slow?"""
        if self.calling:
            return self._refused or (self.cycle.more_body and now - self._called_at >= SLOW_S)
        return not self._unsent_bytes or self.quiet_since is None or now - self.quiet_since >= SLOW_S

    @property
    def owner(self) -> tuple[str, str]:
        """The tenant or the address for which it counts when connections must go."""
        return (self.tenant, "") if self.tenant else ("", self.address)

    @property
    def idle_first(self) -> tuple[bool, float]:
        """By this the first one goes: without a call before with one, and of these what has lasted longest."""
        return (True, self._called_at) if self.calling else (False, self.quiet_since or 0.0)

    @property
    def _unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    @property
    def calling(self) -> bool:
        """Is a call open here, its headers being whole?"""
        return self.cycle is not None and not self.cycle.response_complete and not self.transport.is_closing()


class HeadWithBody:
    """What one answer is written to, as its server knows it. The head leaves with the first part of the body, if that comes in
    the same turn of the loop: apart, they would wake the client twice."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None
        self._begun = False

    def write(self, data: bytes) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.writelines((head, data))
        elif self._begun or data.startswith(CONTINUE):
            self._transport.write(data)
        else:
            self._head, self._begun = data, True
            asyncio.get_running_loop().call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        head, self._head = self._head, None
        if head is not None and not self._transport.is_closing():
            self._transport.write(head)


class _Refused(Exception):
    """To the parser: go no further."""


def _is_plain(method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> bool:
    """What the parser lets pass, and somebody between may read otherwise, is refused."""
    names = [name for name, _ in headers]
    coding = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    return (
        method not in (b"CONNECT", b"SOURCE")  # the latter: of a protocol that calls itself ICE
        and b"#" not in url
        and version in ("1.0", "1.1")
        and names.count(b"host") in ((1,) if version == "1.1" else (0, 1))
        and coding in ([], [b"chunked"] if version == "1.1" else [])
    )


async def _without_chunks(cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """A client of HTTP/1.0 knows none: an answer whose length is not told ends with the connection."""

    endless = False

    async def send_plain(message: Message) -> None:
        nonlocal endless
        if message["type"] == "http.response.start":
            endless = all(name != b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = False if endless else None
        elif endless:
            cycle.expected_content_length = len(message["body"])
        await send(message)

    await app(scope, receive, send_plain)


class Door:
    """Lets connections in, and cuts those that only take up room."""

    def __init__(
        self,
        server: uvicorn.Server,
        listener: socket.socket,
        settings: ConnectionSettings,
        *,
        send_timeout_s: float,
        reserved_files: int = 64,
        tls: Callable[[], ssl.SSLContext] | None = None,
        count: Callable[[str], None] = lambda name: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`listener` listens already. `reserved_files`: what the rest of the process may still open. `tls`: what a connection
        that comes now is to be met with; None: all is in clear."""
        self.settings = settings
        self.send_timeout_s = send_timeout_s
        self.connections: set[Connection] = set()
        self.max_connections = _within_files(settings.max_connections, reserved_files)
        self._server, self.listener, self._tls = server, listener, tls
        self._count, self._clock = count, clock
        self._by_address: Counter[str] = Counter()
        self._by_tenant: Counter[str] = Counter()
        self._arriving: dict[Connection, asyncio.Task[None]] = {}
        """Those that nothing can be said on yet, the oldest first."""
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._logged_at = -math.inf
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving = False
        self._untaken: deque[tuple[Connection, bytes]] = deque()
        """Heard, and not looked at yet: at most once for each connection, which is not read meanwhile."""
        self._in_turn = False
        self._turn_ends = 0.0
        if tls is not None:
            SSLProtocol.max_size = RECORD_BYTES

    async def open(self) -> None:
        """Let in who comes, from the running loop, once the server has started; it has no sockets of its own."""
        while not self._server.started:
            await asyncio.sleep(0.005)
        self._loop = asyncio.get_running_loop()
        self._resume()
        self._watch()

    def close(self) -> None:
        """Let nobody in any more; those inside stay."""
        self._pause()
        for timer in self._timers.values():
            timer.cancel()
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1
        self._loop = None

    def leave(self) -> None:
        """Give up an address that others share, within KNOCKING_S: who waits is let in, who comes next is theirs, and who has
        nothing to ask just now, or was answered, is sent there.

        To close a listener resets whoever waits at it and whose handshake is not over. So first nobody new gets through to it:
        who tries again, as TCP does after a second, finds the others.
        """
        if self._leaving:
            return
        self._leaving = True
        filtered = ctypes.create_string_buffer(NO_NEWCOMERS, len(NO_NEWCOMERS))
        program = struct.pack("HL", len(NO_NEWCOMERS) // _INSTRUCTION.size, ctypes.addressof(filtered))
        try:
            self.listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        except OSError as error:  # forbidden here: who comes in the last instant may be reset
            log.warning("newcomers_not_turned_away", reason=error.strerror)
        self._later(KNOCKING_S, self._lock)

    def enter(self, listener: socket.socket) -> None:
        """Come back to an address that was left: `listener` listens there."""
        self._timers.pop(self._lock).cancel()
        self._lock()
        self.listener = listener
        self._leaving = False
        self._resume()

    def _lock(self) -> None:
        self._pause()
        with contextlib.suppress(OSError):  # nobody waits any more, or no descriptor is left for who does
            while True:
                incoming, address = self.listener.accept()
                self._meet(incoming, network_of(address[0]))
        self.listener.close()
        for connection in list(self.connections):
            if connection.cycle is not None and not connection.begun:
                connection.shutdown()

    @property
    def listens(self) -> bool:
        """Whoever comes is let in, and it is not about to leave."""
        return self._loop is not None and not self._leaving

    @property
    def has_left(self) -> bool:
        """Whoever comes next is others'."""
        return self._leaving and self.listener.fileno() < 0

    def abort(self) -> None:
        """Cut every connection."""
        for connection in list(self.connections):
            connection.abort()

    def stop_arriving(self, connection: Connection) -> None:
        """It is not to come in any more."""
        if connection in self._arriving:
            self._arriving.pop(connection).cancel()

    def left(self, connection: Connection) -> None:
        """From a connection: it is gone."""
        if connection in self.connections:
            self.connections.remove(connection)
            _take_one(self._by_address, connection.address)
            self._count_for(connection, "")

    def now(self) -> float:
        """The time by which connections are judged."""
        return self._clock()

    def claim(self, connection: Connection, tenant: str) -> bool:
        """Count a connection for the tenant whose key its call has. False: the tenant has as many as it may, and none
        is spare."""
        if connection.tenant == tenant or connection not in self.connections:
            return True
        most = max(1, int(self.max_connections * self.settings.max_tenant_share))
        if self._by_tenant[tenant] >= most:
            spare = self._most_spare(each for each in self.connections if each.tenant == tenant)
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

    # --- who comes

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
            self._meet(incoming, network_of(address[0]))

    def _meet(self, incoming: socket.socket, address: str) -> None:
        incoming.setblocking(False)
        if not self._make_room(address):
            self._count("http_connections_refused")
            self._refuse(incoming)
            return
        if self._tls is not None and len(self._arriving) >= MAX_HANDSHAKES:
            self._displace(self._of_largest_crowd())
        server, loop = self._server, asyncio.get_running_loop()
        connection = Connection(
            self, address, config=server.config, server_state=server.server_state, app_state=server.lifespan.state, _loop=loop
        )
        self.connections.add(connection)
        self._by_address[address] += 1
        connection.quiet_since = self._clock()  # whoever only began to greet makes room as who only began a call does
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
        except OSError:  # gone before it was here, too slow, or it spoke no TLS
            if self._tls is not None:
                self._count("http_handshakes_failed")
            incoming.close()
            self.left(connection)

    def _arrived(self, connection: Connection, incoming: socket.socket, arriving: asyncio.Task[None]) -> None:
        self._arriving.pop(connection, None)
        if arriving.cancelled():  # maybe before it began
            incoming.close()
            self.left(connection)

    def _of_largest_crowd(self) -> Connection:
        """Of those that arrive, the one that was longest about it among those of the address that most come from."""
        crowds = Counter(each.address for each in self._arriving)
        address = max(crowds, key=crowds.__getitem__)
        return next(each for each in self._arriving if each.address == address)

    def _displace(self, connection: Connection) -> None:
        self._count("http_connections_displaced")
        connection.make_room()
        self.left(connection)

    def _make_room(self, address: str) -> bool:
        """Whether one more may come in: within the limits, or in place of a spare one."""
        crowded = self._by_address[address] >= self.settings.max_per_address
        if not crowded and len(self.connections) < self.max_connections:
            return True
        spare = self._most_spare(each for each in self.connections if not crowded or each.address == address)
        if spare is None:
            return False
        self._displace(spare)
        return True

    def _most_spare(self, among: Iterable[Connection]) -> Connection | None:
        """Of the owner who has most connections to spare, the one to go first: who takes up much makes room for the others."""
        now = self._clock()
        crowds: dict[tuple[str, str], list[Connection]] = {}
        for each in among:
            if each.is_spare(now):
                crowds.setdefault(each.owner, []).append(each)
        if not crowds:
            return None
        largest = max(crowds.values(), key=lambda crowd: len(crowd))
        return min(largest, key=lambda each: each.idle_first)

    def _refuse(self, incoming: socket.socket) -> None:
        if self._tls is None:  # else there is no way to say so
            with contextlib.suppress(OSError):
                incoming.send(REFUSAL)
        incoming.close()

    # --- what is said

    def heard(self, connection: Connection, data: bytes) -> None:
        """From a connection. All of one turn of the loop share its time for this, so that no crowd makes a stream wait."""
        if not self._in_turn:
            self._begin_turn()
        if self._untaken or self._clock() >= self._turn_ends:
            connection.transport.pause_reading()
            self._untaken.append((connection, data))
        else:
            connection.take(data)

    def _begin_turn(self) -> None:
        self._in_turn = True
        self._turn_ends = self._clock() + PARSE_S
        asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """What was left over comes first."""
        self._in_turn = False
        if self._untaken:
            self._begin_turn()
        while self._untaken and self._clock() < self._turn_ends:
            connection, data = self._untaken.popleft()
            if not connection.transport.is_closing():
                connection.take(data)
                if not connection.flow.read_paused:
                    connection.transport.resume_reading()

    # --- no descriptors left

    def _out_of_files(self, error: OSError) -> None:
        """Answer those who wait, by a descriptor kept for this, then let nobody in for a while: the listener stays readable."""
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
        """One of those who wait; whether there may be more."""
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1
        try:
            self._refuse(self.listener.accept()[0])
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):  # somebody else was quicker: the next time, then
                self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return True

    # --- who stays

    def _watch(self) -> None:
        """Cut those that have said nothing for too long, or that are closing and not being read."""
        now = self._clock()
        for connection in list(self.connections):
            if connection.transport is None:  # it arrives, for which it has a time of its own
                continue
            if connection.calling:
                connection.quiet_since = None
            elif connection.quiet_since is None:
                connection.quiet_since = now
            elif now - connection.quiet_since >= self._patience_s(connection):
                self._cut(connection)
        self._later(min(WATCH_S, self.settings.head_timeout_s / 4), self._watch)

    def _patience_s(self, connection: Connection) -> float:
        if connection.transport.is_closing():
            return self.send_timeout_s
        return self.settings.head_timeout_s if connection.begun or connection.cycle is None else self.settings.idle_timeout_s

    def _cut(self, connection: Connection) -> None:
        self._count("http_connections_timed_out")
        if connection.transport.is_closing():
            connection.abort()
            return
        if connection.begun:
            connection.transport.write(TOO_SLOW)
        connection.quiet_since = None
        connection.close()

    def _later(self, delay_s: float, what: Callable[[], None]) -> None:
        if self._loop is not None:
            self._timers[what] = self._loop.call_later(delay_s, what)


def new_loop(*, tls: bool) -> asyncio.AbstractEventLoop:
    """The loop for a gateway's connections. libuv's takes less time for a token; but what it holds for a TLS connection, half a
    MiB, cannot be bounded, so there it is asyncio's own."""
    return asyncio.new_event_loop() if tls else uvloop.new_event_loop()


def server_config(app: ASGIApp, settings: ConnectionSettings) -> uvicorn.Config:
    """How uvicorn serves `app` behind a door, without sockets or signals of its own."""
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="error",  # it would tell of each nonsense that a stranger sends
        access_log=False,
        lifespan="on",
        http=Connection,
        ws="none",
        timeout_keep_alive=math.ceil(settings.idle_timeout_s),
    )


def network_of(address: str) -> str:
    """Whom connections count for: an IPv4 address, or the /64 of an IPv6 one, which one customer has whole."""
    if ":" not in address:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    mapped = packed[:12] == bytes(10) + b"\xff\xff"
    return socket.inet_ntop(socket.AF_INET, packed[12:]) if mapped else packed[:8].hex()


def _take_one(counter: Counter[str], key: str) -> None:
    """One less, and nothing kept of what is zero."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def _within_files(wanted: int, reserved: int) -> int:
    """As many connections as the process may have beside what it has open now and `reserved` files more."""
    reserved += len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + reserved:
        soft = min(wanted + reserved, hard) if hard != resource.RLIM_INFINITY else wanted + reserved
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = max(1, min(wanted, soft - reserved))
    if allowed < wanted:
        log.warning("fewer_http_connections", allowed=allowed, wanted=wanted, rlimit_nofile=soft)
    return allowed
