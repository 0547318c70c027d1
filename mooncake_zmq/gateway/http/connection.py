"""One HTTP connection as uvicorn serves it (by httptools), with bounds on what its client may cost the others."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from mooncake_zmq.gateway.http.call_key import authorization_of
from mooncake_zmq.gateway.settings import ConnectionSettings

SLOW_S = 1.0
"""A body that takes longer makes room for new connections, and so does an answer whose end is not read."""
LINGER_S = 1.0
"""The time for which input after a refusal is discarded: data that meets a closed connection resets it,
and the client may lose the answer."""
WRITE_BUFFER_BYTES = 64 << 10
"""The part of an answer that is held for a client that does not read it, one write apart; then the stream waits."""
PIECES, PIECE_BYTES = 32, 256
"""A body may come in PIECES pieces, and one more for each PIECE_BYTES: each takes the loop as long as a large one, and a body
of single bytes would make every stream wait."""
FRAME_BYTES = 16
"""The bytes that may frame a piece of the body; more than these and the headers is refused."""
READ_BYTES = 64 << 10
"""The most that asyncio's own loop reads from a connection at once; libuv's reads up to 256 KiB."""
CONTINUE = b"HTTP/1.1 100 "
_REFUSED = b'{"error":{"message":"too many connections","type":"server_error","param":null,"code":"too_many_connections"}}'
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_REFUSED), _REFUSED)
)


class Owner(Protocol):
    """The part of an acceptor that its connections use."""

    settings: ConnectionSettings
    send_timeout_s: float

    @property
    def has_left(self) -> bool:
        """True once the kernel routes new connections to other gateways."""

    def now(self) -> float:
        """The time by which connections are judged."""

    def received(self, connection: "Connection", data: bytes) -> None:
        """Have `Connection.take` called, now or in a later turn of the loop."""

    def begin_call(self, connection: "Connection", authorization: bytes, begin: Callable[[], None]) -> None:
        """Have `begin` called, now or in a later turn of the loop."""

    def claim(self, connection: "Connection", tenant: str) -> bool:
        """Count a connection for a tenant; False: it may have no more."""

    def stop_arriving(self, connection: "Connection") -> None:
        """Cancel a connection that is still being made."""

    def forget(self, connection: "Connection") -> None:
        """Forget a connection that is gone."""


class Connection(HttpToolsProtocol):
    """One connection, as uvicorn serves it, with bounds on what its client may cost others."""

    def __init__(self, owner: "Owner", address: str, **uvicorn_own: Any) -> None:
        own_state = {"abort": self.abort, "push": self.push, "claim": partial(owner.claim, self), "refuse": self.refuse}
        super().__init__(**{**uvicorn_own, "app_state": {**uvicorn_own["app_state"], **own_state}})
        self.address = address
        self.tenant = ""
        """The tenant whose key the last call had; empty: no known key has come."""
        self._owner = owner
        self.quiet_since: float | None = None
        """The time since which no call is open here; None: one is."""
        self._called_at = 0.0
        """The time when the headers of the last call were whole."""
        self._refused = False
        """True while the answer to the call is a refusal that is put off."""
        self.begun = False
        """True while a part of a call's headers has come."""
        self._ignores_input = False
        """True once the open call is the last: nothing more is read."""
        self.lingers = False
        """True once all is answered and what still comes is discarded."""
        self._pieces = self._bytes = 0
        """Count the body that comes."""
        self._beside = self._beside_now = 0
        """Count the bytes of this call that are not its body, and those of them in the data that is parsed now."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.quiet_since = self._owner.now()
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        with contextlib.suppress(AttributeError):  # asyncio's own loop has it; libuv's reads 256 KiB
            transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):  # gone already
            # The kernel's timeout also holds while only its buffers have the last of an answer.
            transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._owner.send_timeout_s * 1000)
            )

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._owner.forget(self)

    # --- requests

    def data_received(self, data: bytes) -> None:
        self._owner.received(self, data)

    def take(self, data: bytes) -> None:
        """Parse what was received."""
        if self._ignores_input:
            return
        self._unset_keepalive_if_required()
        self._beside_now = len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        self._beside += self._beside_now
        if self._beside > self._owner.settings.max_head_bytes + FRAME_BYTES * (self._bytes // PIECE_BYTES):
            self.send_400_response("Too much beside the body.")

    def take_later(self, data: bytes) -> None:
        """Parse what was received in an earlier turn of the loop, and read on."""
        if not self.transport.is_closing():
            self.take(data)
            if not self.flow.read_paused:
                self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            head = self._without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(head + data[upgrade.args[0] :])

    def _without_upgrade(self) -> bytes:
        """The headers of a call without its request for another protocol, for which the parser took its body."""
        lines = [
            b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode()),
            *(b"%b: %b" % each for each in self.headers if each[0] != b"upgrade"),
        ]
        return b"\r\n".join((*lines, b"", b""))

    def on_message_begin(self) -> None:
        """Refuse pipelining: the open call's answer says that the connection ends with it, and the client may ask again."""
        if self.calling:
            self._end_with_call()
            raise _Refused
        super().on_message_begin()
        self.begun = True
        self.quiet_since = self._owner.now()  # a new call has a timeout of its own
        self._pieces = self._bytes = self._beside = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Ignore trailers: authentication and limits ran on the headers."""
        if self.begun:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if not _is_plain(self.parser.get_method(), self.url, version, self.headers):
            raise _Refused
        self.expect_100_continue &= version != "1.0"  # which has no such header
        if not self.parser.should_upgrade():  # else this is called again
            self.begun, self.quiet_since, self._called_at = False, None, self._owner.now()
            self._refused = False
            super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._owner.has_left:  # it came after the address was left: the next call is for the others
            cycle.keep_alive = False
        if cycle.scope["method"] != "HEAD":  # its answer is a head alone
            cycle.transport = HeadWithBody(self.transport, self._end_answer)  # type: ignore[assignment]
        if cycle.scope["http_version"] != "1.1":
            app = partial(_without_chunks, cycle, app)
        self._owner.begin_call(self, authorization_of(cycle.scope["headers"]), partial(self._begin_call, cycle, app))

    def _begin_call(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not (cycle.disconnected or self.transport.is_closing()):  # meanwhile
            super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._pieces += 1
        self._bytes += len(body)
        self._beside_now -= len(body)
        if self._pieces > PIECES + self._bytes / PIECE_BYTES:
            raise _Refused  # a body in tiny pieces
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.begun:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self.quiet_since = self._owner.now()
        super().on_response_complete()

    def _end_with_call(self) -> None:
        self._ignores_input = True
        self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request; uvicorn calls this too."""
        if self._ignores_input:
            return
        self._ignores_input = True
        if self.calling and self.cycle.response_started:  # its answer has begun already
            self.abort()
        elif self.cycle is not None and self.cycle.response_complete and not self.begun:  # the call has its answer already
            self.close()
        else:
            super().send_400_response(msg)
            self.end_tls()

    # --- answers

    def push(self, part: bytes) -> bool:
        """Write the next part of a chunked answer that has begun, without an ASGI message. False: the client does not read,
        or the answer is not chunked."""
        cycle = self.cycle
        if self.flow.write_paused or cycle is None or not cycle.chunked_encoding:
            return False
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def abort(self) -> None:
        """Cut the connection now; what was not sent is lost."""
        if self.transport is None:
            self._owner.stop_arriving(self)
        else:
            self.transport.abort()

    def shutdown(self) -> None:
        """Close once the open call is answered; uvicorn calls this when it ends."""
        super().shutdown()
        self.end_tls()

    def close(self) -> None:
        """Close once all that was written is sent."""
        self.transport.close()
        self.end_tls()

    def timeout_keep_alive_handler(self) -> None:
        """Do nothing when uvicorn finds the connection idle: its acceptor closes it, and knows whether a call lies unread."""

    def linger(self) -> None:
        """Close once the client has, or after LINGER_S; until then discard what it still sends."""
        self._ignores_input = self.lingers = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.close)

    def _end_answer(self) -> None:
        """Close after the last answer."""
        if self.cycle.more_body:
            self.linger()
        else:
            self.close()

    def end_tls(self) -> None:
        """Abort a closing TLS connection once all is sent: TLS waits for a close_notify, which an idle client never sends."""
        below = getattr(getattr(self.transport, "_ssl_protocol", None), "_transport", None)
        if below is not None and self.transport.is_closing():
            # asyncio itself counts only what is not encrypted yet.
            unsent = self.transport.get_write_buffer_size() + below.get_write_buffer_size()
            if not unsent:
                self.transport.abort()

    def refuse(self) -> None:
        """Note that the open call is refused, after a delay; the application calls this."""
        self._refused = True

    def make_room(self) -> None:
        """Close for a new connection. A client that still sends its body is answered, if that can be done at once."""
        if self.calling and not self.cycle.response_started and not self._unsent_bytes:
            self._ignores_input = True
            self.transport.write(REFUSAL)
            self.close()
        else:
            self.abort()

    def is_spare(self, now: float) -> bool:
        """True if it may go: it has no open call, or one that is refused or whose body is slow."""
        if self.calling:
            return self._refused or (self.cycle.more_body and now - self._called_at >= SLOW_S)
        return not self._unsent_bytes or self.quiet_since is None or now - self.quiet_since >= SLOW_S

    @property
    def owner(self) -> tuple[str, str]:
        """The tenant or the address that it counts for when connections must go."""
        return (self.tenant, "") if self.tenant else ("", self.address)

    @property
    def idle_first(self) -> tuple[bool, float]:
        """The key by which connections go: those without a call first, and of these the longest idle."""
        return (True, self._called_at) if self.calling else (False, self.quiet_since or 0.0)

    @property
    def _unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    @property
    def calling(self) -> bool:
        """True while a call is open whose headers are whole."""
        return self.cycle is not None and not self.cycle.response_complete and not self.transport.is_closing()


class HeadWithBody:
    """The transport of one answer, which sends the head with the first part of the body if both come in one turn of the loop:
    apart, they would wake the client twice."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport, self._close = transport, close
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
        self._close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        head, self._head = self._head, None
        if head is not None and not self._transport.is_closing():
            self._transport.write(head)


class _Refused(Exception):
    """Raised to stop the parser."""


def _is_plain(method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> bool:
    """False for a request that the parser accepts but a proxy may read otherwise."""
    names = [name for name, _ in headers]
    coding = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    return (
        method not in (b"CONNECT", b"SOURCE")  # the latter belongs to a protocol named ICE
        and b"#" not in url
        and version in ("1.0", "1.1")
        and names.count(b"host") in ((1,) if version == "1.1" else (0, 1))
        and coding in ([], [b"chunked"] if version == "1.1" else [])
    )


async def _without_chunks(cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a client of HTTP/1.0, which knows no chunks: an answer of unknown length ends with the connection."""

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
