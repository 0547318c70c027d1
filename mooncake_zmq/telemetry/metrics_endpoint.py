"""The HTTP endpoint of a node's metrics: one thread, a bounded number of connections, one call on each.

It requires no key, so it serves the node's own machine only, unless `security.allow_open_metrics` allows more. It costs the
node at most one page each `PAGE_S`, however many calls come, and on a loopback address it refuses calls by another host's
name, as a web page could make a browser send them (DNS rebinding).
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST

from mooncake_zmq.transfer.sockets import is_loopback

MAX_CONNECTIONS = 16
"""The most connections at once; for one more, the oldest is closed."""
MAX_HEAD_BYTES = 8 << 10
CALL_S = 5.0
"""The time limit of a connection from its beginning until the answer is sent."""
PAGE_S = 0.25
"""The greatest age of a page that is served again."""
PATH = b"/metrics"
HEAD_END = b"\r\n\r\n"


class MetricsEndpoint:
    """Serves what `page` returns, which the endpoint's own thread calls, until it is closed."""

    def __init__(self, host: str, port: int, page: Callable[[], bytes]) -> None:
        """Start it on `port`, 0 for any. `page` may raise TimeoutError, which is answered with 503. Raises OSError when the
        port is taken."""
        listening = socket.create_server((host, port), backlog=MAX_CONNECTIONS)
        self.port: int = listening.getsockname()[1]
        self._is_local = is_loopback(f"tcp://{host}:{port}")
        self._page = page
        self._made = b""
        self._made_at: float | None = None
        self._calls: dict[_Call, None] = {}
        """The open connections, the oldest first."""
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(listening,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and the thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self, listening: socket.socket) -> None:
        with closing(self._loop):
            self._loop.run_until_complete(self._serve(listening))

    async def _serve(self, listening: socket.socket) -> None:
        server = await self._loop.create_server(lambda: _Call(self), sock=listening)
        await self._stopping.wait()
        server.close()
        for call in self._calls:
            call.abort()
        await asyncio.sleep(0)  # until the connections have ended

    # --- for the calls

    def begin(self, call: "_Call") -> None:
        """Add an opened connection."""
        self._calls[call] = None
        if len(self._calls) > MAX_CONNECTIONS:
            oldest = next(iter(self._calls))
            del self._calls[oldest]  # removed now, as its end comes later and others begin before
            oldest.abort()

    def end(self, call: "_Call") -> None:
        """Remove a connection that ended."""
        self._calls.pop(call, None)

    def answer(self, head: bytes) -> bytes:
        """Return the whole response to a request with this head."""
        request, *fields = head.split(b"\r\n")
        method, _, rest = request.partition(b" ")
        hosts = [
            value.strip().decode("latin-1") for name, _, value in (each.partition(b":") for each in fields) if _is_host(name)
        ]
        if method not in (b"GET", b"HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED)
        if self._is_local and not all(is_loopback(f"tcp://{_with_port(host)}") for host in hosts):
            return _response(HTTPStatus.FORBIDDEN)
        if rest.partition(b" ")[0].partition(b"?")[0] != PATH:
            return _response(HTTPStatus.NOT_FOUND)
        try:
            page = self._current_page()
        except TimeoutError:  # the node's loop has not taken up the call
            return _response(HTTPStatus.SERVICE_UNAVAILABLE)
        return _response(HTTPStatus.OK, page, CONTENT_TYPE_LATEST, with_body=method == b"GET")

    def _current_page(self) -> bytes:
        now = time.monotonic()
        if self._made_at is None or now - self._made_at >= PAGE_S:
            self._made, self._made_at = self._page(), now
        return self._made


class _Call(asyncio.Protocol):
    """One connection, with one call."""

    def __init__(self, endpoint: MetricsEndpoint) -> None:
        self._endpoint = endpoint
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._over = asyncio.get_running_loop().call_later(CALL_S, self.abort)
        self._endpoint.begin(self)

    def data_received(self, data: bytes) -> None:
        self._head += data
        head, end, _ = self._head.partition(HEAD_END)
        if end and len(head) <= MAX_HEAD_BYTES:
            self._transport.pause_reading()
            self._transport.write(self._endpoint.answer(head))
            self._transport.close()
        elif len(self._head) > MAX_HEAD_BYTES:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over.cancel()
        self._endpoint.end(self)

    def abort(self) -> None:
        """Close the connection at once, and drop unsent data."""
        self._transport.abort()


def _is_host(name: bytes) -> bool:
    return name.strip().lower() == b"host"


def _with_port(host: str) -> str:
    return host if ":" in host.rpartition("]")[2] else f"{host}:0"


def _response(status: HTTPStatus, body: bytes | None = None, kind: str = "text/plain", *, with_body: bool = True) -> bytes:
    if body is None:
        body = f"{status.phrase}\n".encode()
    head = (
        f"HTTP/1.1 {status} {status.phrase}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
