"""The routes that generate nothing: the model's card, health, the version, metrics, and the page at the root."""

import math
import time
from functools import partial
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from mooncake_zmq import __version__
from mooncake_zmq.gateway.http import web
from mooncake_zmq.gateway.http.auth import sees_all
from mooncake_zmq.gateway.http.edge import Edge
from mooncake_zmq.gateway.openai.errors import asked
from mooncake_zmq.gateway.served_model import ServedModel, ServedModels

SCRAPE_EVERY_S = 0.1
"""Shortest time between two pages of metrics, however many scrapers read: a page takes milliseconds, in which streams wait."""


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """The answer to a call whose body is JSON."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def routes(edge: Edge) -> list[Route]:
    """Return all of these routes."""
    models, health = _Models(edge.models), partial(_health, edge)
    return [
        Route("/", partial(_front, edge.models)),
        Route("/v1/models", models.listed),
        Route("/v1/models/{model:path}", models.named),
        Route("/health", health),
        Route("/ready", health),
        Route("/ping", health),
        Route("/live", _live),
        Route("/version", _version),
        Route("/metrics", _Metrics(edge).page),
    ]


class _Models:
    """The models and their adapters, as OpenAI and vLLM list models."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._created = int(time.time())

    async def listed(self, _request: Request) -> Response:
        cards = [self._card(name, model) for model in self._models.each for name in model.names]
        return json_response({"object": "list", "data": cards})

    async def named(self, request: Request) -> Response:
        found = asked(request.path_params["model"], self._models)
        return json_response(self._card(found.id, next(model for model in self._models.each if found.id in model.names)))

    def _card(self, name: str, model: ServedModel) -> dict[str, Any]:
        """Return the card of a model, or of one with an adapter, whose parent is that without."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "mooncake_zmq",
            "root": name,
            "parent": None if name == model.id else model.id,
            "max_model_len": model.max_model_len,
        }


class _Metrics:
    """The page of metrics, which several scrapers may share."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._made_at, self._page = -math.inf, b""

    async def page(self, _request: Request) -> Response:
        edge = self._edge
        await edge.overview.look()
        if edge.clock() - self._made_at >= SCRAPE_EVERY_S:
            self._made_at, self._page = edge.clock(), edge.metrics.exposition()
        return Response(self._page, headers={"content-type": CONTENT_TYPE_LATEST})


async def _front(models: ServedModels, request: Request) -> Response:
    first = models.each[0]
    text = web.front_page(str(request.base_url), first.id, first.max_model_len)
    return HTMLResponse(text, headers=web.headers())


async def _health(edge: Edge, request: Request) -> Response:
    is_operator = sees_all(edge.tenants, request.state.tenant)
    if is_operator:  # only an operator may have every node report
        await edge.overview.look()
    ok, detail = edge.health()
    if not is_operator:
        detail = {"status": "ok" if ok else "unavailable"}
    return json_response(detail, 200 if ok else 503, {} if ok else {"retry-after": "1"})


async def _live(_request: Request) -> Response:
    return json_response({"status": "ok"})


async def _version(_request: Request) -> Response:
    return json_response({"version": __version__})
