"""Routes by which operators see the cluster at a gateway: `/cluster`, the same each second as events, the last requests of all
gateways, and any node's whole state."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from mooncake_zmq.core.watch import EVERY_S
from mooncake_zmq.gateway.http.cluster_reports import NoNode, Overview
from mooncake_zmq.gateway.http.peer_gateways import wanted_of
from mooncake_zmq.gateway.openai.errors import RequestError, quoted
from mooncake_zmq.gateway.openai.responses import EVENT_STREAM, server_sent
from mooncake_zmq.gateway.requests.traces import MAX_TRACES, Traces

MAX_ONLOOKERS = 16
"""Limit on the clients of `/cluster/events`; a further one is answered 503."""
LONGEST_S = 300.0
HEADERS = [(name.encode(), value.encode()) for name, value in EVENT_STREAM.items()]
HangUp = Callable[[Scope, Receive], Awaitable[None]]


class Events:
    """GET /cluster/events: a snapshot each second, until the client disconnects, the gateway drains, or `LONGEST_S` have
    passed. The client then connects again, so that a key that was revoked ends its access."""

    def __init__(self, overview: Overview, draining: Callable[[], bool], send_timeout_s: float, hang_up: HangUp) -> None:
        self._overview, self._draining = overview, draining
        self._send_timeout_s, self._hang_up = send_timeout_s, hang_up
        self._onlookers = 0
        self._sent: dict[str, Any] = {}
        self._event = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        overview = self._overview
        if scope["method"] == "HEAD":
            await Response(headers=EVENT_STREAM)(scope, receive, send)
            return
        if self._onlookers >= MAX_ONLOOKERS:
            raise RequestError(503, f"{MAX_ONLOOKERS} clients look on already", code="overloaded")
        self._onlookers += 1
        gone = asyncio.create_task(until_gone(receive))
        try:
            await self._write(send, {"type": "http.response.start", "status": 200, "headers": HEADERS})
            ends_at = time.monotonic() + LONGEST_S
            while not gone.done() and not self._draining() and time.monotonic() < ends_at:
                await overview.look()
                await self._write(send, {"type": "http.response.body", "body": self._said(), "more_body": True})
                await asyncio.wait([gone], timeout=EVERY_S)
            await self._write(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            await self._hang_up(scope, receive)
        finally:
            gone.cancel()
            self._onlookers -= 1

    def _said(self) -> bytes:
        """Return the current snapshot as an event; all clients are sent the same bytes."""
        snapshot = self._overview.snapshot()
        if snapshot is not self._sent:
            self._sent, self._event = snapshot, server_sent(snapshot)
        return self._event

    async def _write(self, send: Send, message: Message) -> None:
        """Send a message. A client that accepts nothing within the timeout counts as gone."""
        async with asyncio.timeout(self._send_timeout_s):
            await send(message)


async def until_gone(receive: Receive) -> None:
    """Return once the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


def routes(overview: Overview, traces: Traces, events: Events) -> list[Route]:
    """Return the routes that `gateway.http.auth` restricts to operators."""

    async def cluster(_request: Request) -> Response:
        await overview.look()
        return _json(msgspec.json.encode(overview.snapshot()))

    async def requests(request: Request) -> Response:
        return _json(msgspec.json.encode(await overview.requests(wanted_of(request.url.query))))

    async def state(request: Request) -> Response:
        try:
            return _json(await overview.state(request.path_params["node"]))
        except NoNode as error:
            raise RequestError(error.status, str(error), code=error.code) from None

    async def trace(request: Request) -> Response:
        wanted = request.path_params["id"]
        found = traces.find(wanted)
        if not found:
            text = f"no request that is over is known here as {quoted(wanted)}: the last {MAX_TRACES} are"
            raise RequestError(404, text, code="unknown_request")
        return _json(msgspec.json.encode({"requests": found}))

    return [
        Route("/trace/{id:path}", trace),
        Route("/cluster", cluster),
        Route("/cluster/events", events, methods=["GET"]),
        Route("/cluster/requests", requests),
        Route("/cluster/state/{node}", state),
    ]


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
