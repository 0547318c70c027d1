"""What operators do to the cluster at a gateway, under `/admin`: have a node rest (drain, and stay) and serve again.

With API keys it takes one with role=admin. Without, it takes a call from the gateway's own machine and no other site's page.
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
    """`keyed`: are there API keys, so that `gateway.http.auth` has seen an admin's?"""

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
