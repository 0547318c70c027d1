"""Memory for bodies and probabilities: a tenant holds at most half, is refused by name, and never stands in another's way."""

import asyncio
from contextlib import suppress
from random import Random

import httpx
import pytest
from test_edge_keys import guarded

from mooncake_zmq.gateway.http.shared_amount import TENANT_PART, SharedAmount
from mooncake_zmq.gateway.requests.tenants import Limited
from mooncake_zmq.gateway.settings import EdgeSettings

MOST = 100


@pytest.mark.parametrize("seed", range(20))
def test_no_tenant_holds_more_than_its_part_nor_all_more_than_there_is(seed):
    random, amount, held = Random(seed), SharedAmount(MOST, "bytes"), []
    for _ in range(200):
        if held and random.random() < 0.4:
            amount.give_back(*held.pop(random.randrange(len(held))))
        tenant, size = random.choice(["", "alice", "bob"]), random.randint(1, 60)
        with suppress(Limited):
            if amount.take(tenant, size):
                held.append((tenant, size))
        assert sum(size for _, size in held) == amount.taken <= MOST
        for name in ("alice", "bob"):
            assert sum(size for tenant, size in held if tenant == name) <= MOST // TENANT_PART
    for tenant, size in held:
        amount.give_back(tenant, size)
    assert amount.taken == 0
    assert not amount._by_tenant


@pytest.mark.parametrize("key", ["alice", "bob"])
def test_bodies_of_one_tenant_leave_room_for_anothers(key):
    actor = guarded()
    actor.edge.settings = actor.edge.calls.settings = EdgeSettings(max_body_bytes=1000, short_body_bytes=10)
    actor.edge.calls.reading_bytes = SharedAmount(2000, "bytes of bodies")

    async def client(port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer alice\r\n"
            writer.write(head + b"content-length: 1000\r\n\r\n" + b" " * 900)
            await actor.until(lambda: actor.edge.calls.reading_bytes.taken == 900)
            body = b'{"prompt":"a"}' + b" " * 200
            answer = await http.post("/v1/completions", content=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == (429 if key == "alice" else 200)
            assert key == "bob" or "alice may hold 1000 bytes of bodies" in answer.text
            writer.close()
        await actor.until(lambda: actor.edge.calls.reading_bytes.taken == 0)

    actor.serve(client)
