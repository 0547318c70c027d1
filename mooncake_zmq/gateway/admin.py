"""What operators do to the cluster at a gateway, under `/admin`: have a node rest (drain, and stay) and serve again.

With API keys it takes one with role=admin. Without, whoever sits at the gateway's own machine may, and no other site's page.
"""

from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from mooncake_zmq.gateway.openai import RequestError
from mooncake_zmq.gateway.overview import NoNode, Overview

LOCAL = "localhost"
PASSED_ON = ("forwarded", "via", "x-forwarded-for", "x-real-ip")
"""Headers of proxies. One that sends none of them is nginx as it comes, which speaks HTTP/1.0."""
_log = structlog.get_logger("gateway")


def routes(overview: Overview, *, keyed: Callable[[], bool]) -> list[Route]:
    """`keyed`: are there API keys, so that `gateway.guard` has seen an admin's?"""

    async def drain(request: Request) -> Response:
        if not keyed():
            check_is_here(request.scope, request.headers)
        node, resting = request.path_params["node"], request.method == "POST"
        tenant = request.state.tenant
        _log.info("drain" if resting else "drain_undone", asked_for=node[:64], by=tenant.name if tenant is not None else "")
        try:
            told = await overview.rest(node, resting)
        except NoNode as error:
            raise RequestError(error.status, str(error), code=error.code) from None
        return Response(msgspec.json.encode(told), media_type="application/json")

    return [Route("/admin/drain/{node}", drain, methods=["POST", "DELETE"])]


def check_is_here(scope: Scope, headers: Mapping[str, str]) -> None:
    """Whoever calls is on this machine, no proxy there and no page of another site in its browser. Raises RequestError."""
    client: Any = scope.get("client") or ("",)
    host, origin = headers.get("host", ""), headers.get("origin", "")
    passed_on = scope.get("http_version") == "1.0" or any(name in headers for name in PASSED_ON)
    try:
        foreign = bool(origin) and urlsplit(origin).netloc != host
        local = _is_local(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        foreign = local = False
    if not _is_local(client[0]) or not local or foreign or passed_on:
        text = "without API keys this is for callers on the gateway's own machine, at a loopback address: see gateway.api_keys"
        raise RequestError(403, text, code="insufficient_permissions")


def _is_local(host: str) -> bool:
    try:
        return host == LOCAL or ip_address(host).is_loopback
    except ValueError:
        return False
