"""An API key that is taken away: what it had asked by then ends at once, and nobody else's."""

import asyncio
import json
from itertools import count

import httpx
import pytest
from scripted_actor import ScriptedActor, finished, tokens
from test_acceptor_tenants import STALLED
from test_edge_keys import guarded

from mooncake_zmq.gateway.http.api_keys import ApiKeys
from mooncake_zmq.gateway.requests.tenants import Tenant, Tenants


def without(actor: ScriptedActor, *names: str, **limits) -> list[Tenant]:
    return [
        Tenant(name=each.name, digest=each.digest, role=each.role, **limits)
        for each in actor.edge.tenants.known
        if each.name not in names
    ]


class Open:
    """A gateway that answers the first tokens of each request and then nothing."""

    def __init__(self, tenants: Tenants | None = None) -> None:
        self.actor = guarded()
        self.actor.script = lambda _request, _number: [tokens("some")]
        if tenants is not None:
            self.actor.edge.tenants = tenants

    def run(self, client) -> None:
        async def go(port):
            try:
                async with asyncio.timeout(20), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as self.http:
                    await client(port)
            finally:
                self.actor.acceptor.abort()  # else a test that fails waits for what goes on
            await self.actor.until(lambda: self.actor.edge.calls.slots_taken == self.actor.edge.calls.bodies == 0)
            assert self.actor.edge.tenants.slots_taken == 0
            assert not self.actor.edge.tenants._open

        self.actor.serve(go)

    def asked(self, key: str, **body):
        headers = {"authorization": f"Bearer {key}"}
        return self.http.build_request("POST", "/v1/completions", json={"prompt": "hello", **body}, headers=headers)

    async def stream(self, key: str):
        """An answer that has begun, and its events."""
        answer = await self.http.send(self.asked(key, stream=True), stream=True)
        lines = answer.aiter_lines()
        assert "some" in await anext(lines)
        return answer, lines


def test_a_streamed_answer_ends_with_an_error_and_its_requests_are_cancelled():
    gateway = Open()

    async def client(_port):
        (_, lines), (bobs, _) = await gateway.stream("alice"), await gateway.stream("bob")
        gateway.actor.edge.tenants.replace(without(gateway.actor, "alice"))
        rest = [line async for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "invalid_api_key"
        assert "[DONE]" not in "".join(rest)
        await gateway.actor.until(lambda: gateway.actor.edge.calls.slots_taken == 1)
        assert gateway.actor.cancelled == list(gateway.actor.requests)[:1]
        assert (await gateway.http.send(gateway.asked("alice"))).status_code == 401
        await bobs.aclose()

    gateway.run(client)
    assert gateway.actor.edge.counts["edge_calls_cut"] == 1


def test_a_stream_of_anthropics_ends_with_an_error_of_that_api():
    gateway = Open()

    async def client(_port):
        headers, body = {"x-api-key": "alice"}, {"max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
        asked = gateway.http.build_request("POST", "/v1/messages", json={**body, "stream": True}, headers=headers)
        lines = (await gateway.http.send(asked, stream=True)).aiter_lines()
        assert await anext(lines) == "event: message_start"
        gateway.actor.edge.tenants.replace(without(gateway.actor, "alice"))
        rest = [line async for line in lines if line]
        assert rest[-2] == "event: error"
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["type"] == "authentication_error"

    gateway.run(client)


def test_an_answer_that_has_not_begun_is_401_and_so_is_a_body_on_its_way():
    gateway = Open()

    async def client(port):
        whole = asyncio.create_task(gateway.http.send(gateway.asked("alice", n=2)))
        await gateway.actor.until(lambda: len(gateway.actor.requests) == 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(STALLED % b"alice")
        await gateway.actor.until(lambda: gateway.actor.edge.calls.bodies == 1)
        gateway.actor.edge.tenants.replace(without(gateway.actor, "alice"))
        assert (await whole).status_code == 401
        assert len(gateway.actor.cancelled) == 2
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 401")
        writer.close()

    gateway.run(client)


def test_a_client_that_takes_nothing_is_cut():
    gateway = Open()
    gateway.actor.max_model_len = 8192
    gateway.actor.script = lambda _request, _number: [tokens("x" * 60)] * 100

    async def client(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
        body = b'{"prompt":"hello","stream":true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer alice\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await reader.readline()
        (connection,) = gateway.actor.acceptor.connections
        connection.flow.pause_writing()  # as when its client takes nothing
        gateway.actor.edge.tenants.replace(without(gateway.actor, "alice"))
        await gateway.actor.until(lambda: not gateway.actor.acceptor.connections)
        writer.close()

    gateway.run(client)


def test_an_operators_stream_ends_too():
    gateway = Open()

    async def client(_port):
        request = gateway.http.build_request("GET", "/cluster/events", headers={"authorization": "Bearer root"})
        answer = await gateway.http.send(request, stream=True)
        lines = answer.aiter_lines()
        await anext(lines)
        gateway.actor.edge.tenants.replace(without(gateway.actor, "root"))
        assert "invalid_api_key" in "".join([line async for line in lines])

    gateway.run(client)


@pytest.mark.parametrize("limits", [{"share": 0.5}, {"requests": 100}])
def test_other_limits_end_nothing(limits):
    gateway = Open()
    gateway.actor.script = lambda _request, _number: [tokens("some")] + [[]] * 10 + [[*tokens("more", 4), finished()]]

    async def client(_port):
        answer, lines = await gateway.stream("alice")
        gateway.actor.edge.tenants.replace(without(gateway.actor, **limits))
        assert [line async for line in lines if line][-1] == "data: [DONE]"
        await answer.aclose()

    gateway.run(client)


@pytest.mark.parametrize("left", ["", "bob", "bob and a line that says nothing"])
def test_a_file_without_the_key_ends_its_answers(tmp_path, left):
    known = {each.name: each.line() for each in guarded().edge.tenants.known}
    path = tmp_path / "api_keys"
    path.write_text("\n".join(known.values()) + "\n")
    path.chmod(0o600)
    keys = ApiKeys(path, 8)
    keys.clock = count(step=10).__next__  # a broken file counts once it has stayed so
    gateway = Open(keys.tenants)

    async def client(_port):
        _, lines = await gateway.stream("alice")
        path.write_text("\n".join([known["bob"]] * ("bob" in left) + ["nonsense"] * ("nothing" in left)) + "\n")

        async def until_seen() -> None:
            while any(each.name == "alice" for each in keys.tenants.known):
                keys.refresh()
                await asyncio.sleep(0.01)

        await asyncio.wait_for(until_seen(), 10)
        assert "invalid_api_key" in "".join([line async for line in lines])

    gateway.run(client)
