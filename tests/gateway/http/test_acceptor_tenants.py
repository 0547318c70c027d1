"""Connections by tenant: one key takes no more than its share, from however many addresses, and slow bodies make room."""

import asyncio
import json

import httpx
import pytest
from scripted_actor import ScriptedActor
from test_edge_keys import guarded

from mooncake_zmq.gateway.http.auth import REFUSALS_PER_S
from mooncake_zmq.gateway.settings import ConnectionSettings

STALLED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ncontent-length: 99\r\n\r\n{"
ADDRESSES = ("127.0.0.1", "127.0.0.2")


def with_connections(**settings) -> ScriptedActor:
    actor = guarded()
    actor.connections = ConnectionSettings(**settings)
    return actor


async def stall(port: int, key: str, address: str = ADDRESSES[0]):
    """A connection with a call whose body never ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    writer.write(STALLED % key.encode())
    return reader, writer


async def answered(port: int, key: str, address: str = ADDRESSES[0]) -> int:
    """The status of a small request on a connection of its own."""
    transport = httpx.AsyncHTTPTransport(local_address=address)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", transport=transport) as http:
        headers = {"authorization": f"Bearer {key}"}
        return (await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4}, headers=headers)).status_code


def close_all(pairs) -> None:
    for _, writer in pairs:
        writer.close()


@pytest.mark.timeout(60)
def test_bob_is_answered_while_alice_stalls_a_thousand_bodies_from_two_addresses():
    actor = with_connections()
    assert actor.connections.max_connections == 1024
    assert actor.connections.max_per_address == 512

    async def client(port):
        stalled = []
        for number in range(1024):
            stalled.append(await stall(port, "alice", ADDRESSES[number % 2]))
        counts = actor.edge.counts
        ended = [f"edge_http_responses[status={status}]" for status in (429, 499)]  # over her share, or made room for her own
        await actor.until(lambda: actor.edge.calls.bodies + sum(counts.get(name, 0) for name in ended) == 1024)
        assert actor.edge.calls.bodies <= 512
        for address in ADDRESSES:
            assert await answered(port, "bob", address) == 200
        close_all(stalled)
        await actor.until(lambda: actor.edge.calls.bodies == 0)

    actor.serve(client)
    assert not actor.acceptor._by_tenant


def age_bodies(actor, seconds: float) -> None:
    """Let all that stands at the acceptor have stood for so much longer."""
    clock = actor.acceptor._clock
    actor.acceptor._clock = lambda: clock() + seconds


def test_over_a_tenants_share_its_own_slow_bodies_make_room_and_say_so():
    actor = with_connections(max_connections=8)

    async def client(port):
        stalled = [await stall(port, "alice") for _ in range(4)]
        await actor.until(lambda: actor.edge.calls.bodies == 4)
        bobs = await stall(port, "bob")
        await actor.until(lambda: actor.edge.calls.bodies == 5)
        assert await answered(port, "alice") == 429
        age_bodies(actor, 5.0)
        assert await answered(port, "alice") == 200
        head, _, said = (await asyncio.wait_for(stalled[0][0].read(), 5)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert json.loads(said)["error"]["code"] == "too_many_connections"
        assert [reader.at_eof() for reader, _ in (*stalled[1:], bobs)] == [False] * 4
        close_all([*stalled, bobs])
        await actor.until(lambda: actor.edge.calls.bodies == 0)

    actor.serve(client)


def test_slow_bodies_make_room_for_newcomers_those_of_who_has_most_first():
    actor = with_connections(max_connections=6, max_tenant_share=1.0)

    async def client(port):
        bobs = [await stall(port, "bob") for _ in range(2)]
        await actor.until(lambda: actor.edge.calls.bodies == 2)
        stalled = [await stall(port, "alice", ADDRESSES[number % 2]) for number in range(4)]
        await actor.until(lambda: actor.edge.calls.bodies == 6)
        assert await answered(port, "bob") == 503, "all are young"
        age_bodies(actor, 5.0)
        assert await answered(port, "bob") == 200
        assert [reader.at_eof() for reader, _ in bobs] == [False] * 2
        await asyncio.wait_for(stalled[0][0].read(), 5)
        close_all([*bobs, *stalled])
        await actor.until(lambda: actor.edge.calls.bodies == 0)

    actor.serve(client)


def test_a_tenants_idle_connections_make_room_for_its_own_calls_and_not_for_anothers():
    actor = with_connections(max_connections=8, max_tenant_share=0.5)

    async def client(port):
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as alice,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as bob,
        ):

            async def ask(http, key):
                body = {"prompt": "hello", "max_tokens": 4}
                return await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

            assert (await ask(bob, "bob")).status_code == 200  # its connection stays, idle, and is the oldest
            (bobs,) = [each for each in actor.acceptor.connections if each.tenant == "bob"]
            for _ in range(3):
                assert [each.status_code for each in await asyncio.gather(*[ask(alice, "alice") for _ in range(4)])] == [
                    200
                ] * 4
                assert await answered(port, "alice") == 200
            assert actor.acceptor._by_tenant["alice"] <= 4
            assert bobs in actor.acceptor.connections

    actor.serve(client)


def test_connections_that_have_just_come_make_room_too():
    actor = with_connections(max_connections=4)

    async def client(port):
        silent = [await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)) for _ in range(4)]
        await actor.until(lambda: len(actor.acceptor.connections) == 4)
        assert await answered(port, "bob") == 200
        close_all(silent)

    actor.serve(client)


def test_who_is_refused_again_and_again_waits_for_it_and_nobody_else_does():
    actor = guarded(share=1 / 8)  # of 8 slots
    actor.script = lambda _request, _number: []
    actor.edge.clock = lambda: 1000.0  # all refusals are of one second, however slow this machine is
    counts = actor.edge.counts

    async def client(port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=httpx.Limits(max_connections=None)) as http:

            async def ask(key):
                headers = {"authorization": f"Bearer {key}"}
                return (await http.post("/v1/completions", json={"prompt": "hello"}, headers=headers)).status_code

            held = asyncio.create_task(ask("alice"))
            await actor.until(lambda: len(actor.requests) == 1)
            flood = [asyncio.create_task(ask("alice")) for _ in range(2 * REFUSALS_PER_S)]
            await actor.until(lambda: counts.get("edge_refusals_put_off", 0) == REFUSALS_PER_S)
            late = [each for each in flood if not each.done()]
            assert len(late) >= REFUSALS_PER_S / 2
            assert [await ask("nobody") for _ in range(3)] == [401] * 3
            assert not all(each.done() for each in late), "strangers do not wait for what alice waits for"
            assert {await each for each in flood} == {429}
            held.cancel()
        await actor.until(lambda: actor.edge.calls.slots_taken == 0)

    actor.serve(client)


def test_refusals_that_are_put_off_make_room_for_newcomers():
    actor = with_connections(max_connections=4)
    actor.edge.clock = lambda: 1000.0  # all refusals are of one second, however slow this machine is
    many = {"authorization": "Bearer mallory"}

    async def client(port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            for _ in range(REFUSALS_PER_S):
                assert (await http.get("/v1/models", headers=many)).status_code == 401
        put_off = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for _, writer in put_off:
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer mallory\r\n\r\n")
        await actor.until(lambda: sum(each._refused for each in actor.acceptor.connections) == 4)
        assert await answered(port, "bob", "127.0.0.2") == 200
        close_all(put_off)

    actor.serve(client)


def test_a_tenant_whose_clients_leave_too_many_calls_makes_no_more_for_a_while_and_another_one_does():
    actor = guarded(hangups=3)
    actor.edge.clock = lambda: 100.0
    answers = actor.script
    actor.script = lambda _request, _number: []

    async def client(port):
        body = json.dumps({"prompt": "hello", "max_tokens": 4}).encode()
        for number in range(4):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(STALLED.replace(b"99", b"%d" % len(body))[:-1] % b"alice" + body)
            await actor.until(lambda count=number + 1: len(actor.requests) == count)
            writer.close()
            await actor.until(lambda: actor.edge.calls.slots_taken == 0)
        assert await answered(port, "alice") == 429
        actor.script = answers
        assert await answered(port, "bob") == 200

    actor.serve(client)
