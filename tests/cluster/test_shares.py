"""A tenant that asks for more than its share takes nothing of the others', while its clients wait and once they are gone."""

import asyncio

import httpx
import pytest
import web
from toy_cluster import ToyCluster, eventually

from mooncake_zmq.gateway.requests.tenants import Tenant, digest_of

PATTERNS = " & ".join(f"/.*a.{{{number},{number + 30}}}b.*/" for number in range(18))
CALLS = 300
SHARE = 12
PATIENCE_S = 60
"""The gateway's time for the headers of a call, and the client's for its answer: all clients are one process, which on a busy
machine may take long from a connection to the call that it is for."""


@pytest.fixture
def cluster(directory):
    tenants = [Tenant(name="alice", digest=digest_of("alice"), share=0.05), Tenant(name="bob", digest=digest_of("bob"))]
    tenants.append(Tenant(name="root", digest=digest_of("root"), role="admin"))
    directory.chmod(0o700)
    file = directory / "api_keys"
    file.touch(0o600)
    file.write_text("\n".join(tenant.line() for tenant in tenants))
    settings = (f"gateway.api_keys={file}", f"gateway.connections.head_timeout_s={PATIENCE_S}")
    made = ToyCluster(directory / "run", settings=settings)
    made.operators_key = "root"
    with made.unbroken():
        yield made


def key(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {tenant}"}


def slots(cluster: ToyCluster) -> float:
    page = web.get(f"{cluster.url}/metrics", headers=key("root")).text
    return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith("mooncake_edge_slots_taken"))


async def served(http: httpx.AsyncClient, **asked) -> None:
    body = {"prompt": "hi", "max_tokens": 4} | asked
    answer = await http.post("/v1/completions", json=body, headers=key("bob"))
    assert answer.status_code == 200, answer.text


async def flood(cluster: ToyCluster) -> None:
    limits = httpx.Limits(max_connections=CALLS + 8)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S, limits=limits) as http:

        async def ask(number: int) -> httpx.Response:
            body = {"prompt": "hi", "guided_grammar": f"start: A\nA: {PATTERNS}" + "\n" * number}
            return await http.post("/v1/completions", json=body, headers=key("alice"))

        asked = [asyncio.create_task(ask(number)) for number in range(CALLS)]
        while sum(each.done() for each in asked) < CALLS - SHARE:
            await asyncio.sleep(0.02)
        await served(http)
        await served(http, guided_choice=["yes", "no"])
        assert {(await each).status_code for each in asked if each.done()} <= {400, 429}
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await served(http)
        await served(http, guided_choice=["yes", "no"])


def test_others_are_served_while_a_tenant_floods_and_when_its_clients_are_gone(cluster):
    asyncio.run(flood(cluster))
    eventually(lambda: slots(cluster) == 0, what="every slot comes back")
