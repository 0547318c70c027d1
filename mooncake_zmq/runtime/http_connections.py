"""HTTP/1.1 connections on which what is received is handled as soon as this process has it, and parsed in C.

httpx needs a task's turn for each piece of a stream, and several times the CPU time of a call.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

MAX_IDLE = 4096
"""Idle connections kept between two calls; one more is closed."""
AT_ONCE_S = 0.05
"""A kept connection that ends within this time after a call was written is taken to have been closed before the server received
the call."""


class BadUrl(ValueError):
    """The URL cannot be called."""


class Broken(Exception):
    """The connection was not established, or ended before the answer did."""


class Receiver(Protocol):
    """Receives one answer, in the loop, as it arrives."""

    def answered(self, at: float, status: int, headers: dict[bytes, bytes]) -> None:
        """Handle the status and headers; `at` by `time.perf_counter`."""

    def body(self, at: float, piece: bytes) -> None:
        """Handle the next bytes of the body."""

    def again(self) -> None:
        """Handle that the call is made once more because the kept connection had been closed."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the prefix of the paths that are called there."""

    host: str
    port: int
    tls: bool
    prefix: str
    authority: bytes

    @classmethod
    def of(cls, url: str) -> "Target":
        """Parse `http://host:8000`, perhaps with a path, of which a final `/v1` is dropped. Raises BadUrl."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise BadUrl(f"{url}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadUrl(f"{url} is no http:// or https:// address")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix, parts.netloc.rpartition("@")[2].encode())


class Connections:
    """The connections to one server; the idle one that was used last is used again first."""

    def __init__(
        self,
        target: Target,
        context: ssl.SSLContext | None = None,
        *,
        connect_s: float | None = None,
        most_idle: int = MAX_IDLE,
    ) -> None:
        """`connect_s`: how long a connection may take to be established; None: as long as the system tries."""
        self.target = target
        self._connect_s, self._most_idle = connect_s, most_idle
        self._context = (context or ssl.create_default_context()) if target.tls else None
        self._idle: list[_Connection] = []

    async def call(self, method: bytes, path: str, headers: dict[bytes, bytes], body: bytes, receiver: Receiver) -> None:
        """Make one call and wait for its end; where a kept connection was closed while the call was written, make it again,
        once. Raises Broken."""
        kept = self._kept()
        if kept is not None:
            try:
                return await self._call(kept, method, path, headers, body, receiver)
            except _NotTaken:
                receiver.again()
        try:
            await self._call(await self._open(), method, path, headers, body, receiver)
        except _NotTaken:
            raise Broken("the connection was closed") from None

    async def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().transport.abort()

    def _kept(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _open(self) -> "_Connection":
        target = self.target
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(_Connection, target.host, target.port, ssl=self._context)
        except OSError as error:
            raise Broken(f"no connection: {error.strerror or str(error) or 'none in time'}") from None
        return connection

    async def _call(
        self, connection: "_Connection", method: bytes, path: str, headers: dict[bytes, bytes], body: bytes, receiver: Receiver
    ) -> None:
        all_headers = {b"host": self.target.authority, b"content-length": b"%d" % len(body), **headers}
        lines = b"".join(b"%b: %b\r\n" % each for each in all_headers.items())
        head = b"%b %b HTTP/1.1\r\n%b\r\n" % (method, (self.target.prefix + path).encode(), lines)
        try:
            await connection.exchange(head + body, receiver)
        except BaseException:
            connection.transport.abort()
            raise
        if connection.usable and len(self._idle) < self._most_idle:
            self._idle.append(connection)
        else:
            connection.transport.close()


class _NotTaken(Exception):
    """The connection ended at once, before anything of the answer came: on a kept one the call may be made again."""


class _Connection(asyncio.Protocol):
    """One connection, with one call at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._lost: str | None = None
        self._receiver: Receiver | None = None
        self._ended: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._at = self._written_at = 0.0
        self._begun = False
        self._until_closed = False
        """The answer ends only when the connection is closed."""

    @property
    def usable(self) -> bool:
        """Return whether it can carry another call."""
        return self._lost is None and self._receiver is None

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Send the request and receive the answer."""
        assert self._receiver is None
        self._receiver, self._begun = receiver, False
        self._ended = asyncio.get_running_loop().create_future()
        if self._lost is not None:
            raise _NotTaken
        self._written_at = time.perf_counter()
        self.transport.write(request)
        await self._ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = str(exc) if exc is not None else "closed"
        if self._until_closed and exc is None:
            self.on_message_complete()
        taken = self._begun or time.perf_counter() - self._written_at >= AT_ONCE_S
        self._fail(Broken(f"the connection ended: {self._lost}") if taken else _NotTaken())

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            self._lost = "it spoke unasked"
            self.transport.abort()
            return
        self._at = time.perf_counter()
        self._begun = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(Broken(f"the answer is no HTTP: {error}"))

    def on_message_begin(self) -> None:
        """Called by the parser, as are all methods below."""
        if self._receiver is None:
            self._lost = "it spoke unasked"

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header of the answer, or of an interim answer before it."""
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Begin the answer, unless this is an interim one."""
        headers, self._headers = self._headers, {}
        if self._interim:
            return
        self._until_closed = not headers.keys() & {b"content-length", b"transfer-encoding"}
        if self._receiver is not None:
            self._receiver.answered(self._at, self._parser.get_status_code(), headers)

    def on_body(self, piece: bytes) -> None:
        """Take more of the body."""
        if self._receiver is not None:
            self._receiver.body(self._at, piece)

    def on_message_complete(self) -> None:
        """End the answer. By now it is known whether the connection is kept; a parser reads one answer after another."""
        if self._interim:
            return
        self._until_closed, self._receiver = False, None
        if not self._parser.should_keep_alive():
            self._lost = "not kept"
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    @property
    def _interim(self) -> bool:
        return self._parser.get_status_code() < 200

    def _fail(self, error: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
