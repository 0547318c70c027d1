"""The routes under `/admin`, by which operators cordon a node (it drains and stays up) and uncordon it.

With API keys, a call needs one with role=admin. Without, it must come from the gateway's own machine and from no other site's
page.
"""

from collections.abc import Callable

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mooncake_zmq.gateway.http.cluster_reports import NoNode, Overview
from mooncake_zmq.gateway.http.keyless import check_is_here
from mooncake_zmq.gateway.openai.errors import RequestError

_log = structlog.get_logger("gateway")


def routes(overview: Overview, *, keyed: Callable[[], bool]) -> list[Route]:
    """Return the routes. `keyed`: whether there are API keys, so that `gateway.http.auth` has checked for an admin's."""

    async def drain(request: Request) -> Response:
        if not keyed():
            check_is_here(request.scope, request.headers)
        node, cordons = request.path_params["node"], request.method == "POST"
        tenant = request.state.tenant
        _log.info("drain" if cordons else "drain_undone", asked_for=node[:64], by=tenant.name if tenant is not None else "")
        try:
            node_state = await overview.set_cordon(node, cordons)
        except NoNode as error:
            raise RequestError(error.status, str(error), code=error.code) from None
        return Response(msgspec.json.encode(node_state), media_type="application/json")

    return [Route("/admin/drain/{node}", drain, methods=["POST", "DELETE"])]
