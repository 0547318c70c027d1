"""A client that hangs up, at every stage, over real connections: everything is cancelled and every slot comes back."""

import asyncio
import json
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import httpx
import pytest
import structlog
from scripted_actor import ScriptedActor, events, failing, finished, one_by_one, tokens

from mooncake_zmq.gateway.http import app, calls
from mooncake_zmq.gateway.http.calls import Call
from mooncake_zmq.gateway.http.sse import accept
from mooncake_zmq.gateway.openai.errors import RequestError
from mooncake_zmq.gateway.requests.client_events import ClientRequest, TokenOut
from mooncake_zmq.gateway.settings import EdgeSettings


async def send_request(port, body, path="/v1/completions"):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-request-id: this-one\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
    writer.write(head + raw)
    return reader, writer


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("outputs", [0, 3])
def test_hanging_up_cancels(path, stream, outputs):
    actor = ScriptedActor(lambda _request, _number: one_by_one(tokens("abc"[:outputs])))
    asked = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    body = {**asked, "stream": stream, "n": 2}

    async def client(port):
        reader, writer = await send_request(port, body, path)
        await actor.until(lambda: len(actor.requests) == 2)
        if stream and outputs:
            await asyncio.wait_for(reader.readuntil(b"data: "), 5)
        assert actor.cancelled == []
        writer.close()
        await actor.until(lambda: len(actor.cancelled) == 2)
        await actor.until(lambda: actor.edge.calls.slots_taken == 0)

    with structlog.testing.capture_logs() as lines:
        actor.serve(client)
    assert sorted(actor.cancelled) == sorted(actor.requests)
    ended = [line for line in lines if line["event"] == "http" and line["x_request_id"] == "this-one"]
    assert [line["status"] for line in ended] == [499]


def test_hanging_up_before_the_body_is_whole():
    actor = ScriptedActor()

    async def client(port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{")
        await actor.until(lambda: actor.edge.calls.bodies == 1)
        assert actor.edge.calls.slots_taken == 0
        writer.close()
        await actor.until(lambda: actor.edge.calls.bodies == 0)

    actor.serve(client)
    assert not actor.requests


def test_hanging_up_while_tokenizing(monkeypatch):
    monkeypatch.setattr(app, "AT_ONCE_BYTES", 0)
    actor = ScriptedActor()
    started, noticed, go_on = asyncio.Event(), asyncio.Event(), threading.Event()
    hang_up = Call.hang_up
    monkeypatch.setattr(Call, "hang_up", lambda call: (hang_up(call), noticed.set()))
    encode = actor.model.tokenizer.encode

    async def client(port):
        loop = asyncio.get_running_loop()

        def slow(text, **_options):
            loop.call_soon_threadsafe(started.set)
            assert go_on.wait(5)
            return encode(text)

        actor.model.tokenizer.encode = slow
        _, writer = await send_request(port, {"prompt": "a"})
        await started.wait()
        writer.close()
        await asyncio.wait_for(noticed.wait(), 5)
        go_on.set()
        await actor.until(lambda: actor.edge.calls.slots_taken == 0)

    actor.serve(client)
    assert not actor.requests


def test_a_connection_serves_call_after_call():
    actor = ScriptedActor(lambda _request, _number: one_by_one([*tokens("ab"), finished()]))

    async def client(port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            for stream in (False, True, True, False):
                response = await http.post("/v1/completions", json={"prompt": "a", "stream": stream})
                assert response.status_code == 200

    actor.serve(client)
    assert actor.cancelled == []


def test_a_stream_is_sent_as_it_grows():
    actor = ScriptedActor(lambda _request, _number: one_by_one(tokens("a")))

    async def client(port):
        reader, writer = await send_request(port, {"prompt": "a", "stream": True})
        answer = await asyncio.wait_for(reader.readuntil(b'"text":"a"'), 5)
        assert b"text/event-stream" in answer
        writer.close()

    actor.serve(client)


RUNS = [tokens("a"), tokens("b" * 29, 1), tokens("b" * 29, 30)]
"""A token, then runs of tokens that come at once."""


def test_a_run_of_many_tokens_is_no_fault_of_a_reader_that_waits():
    settings = EdgeSettings(max_buffered_outputs=10)
    actor = ScriptedActor(lambda _request, _number: [*RUNS, [finished("length")]], settings=settings)
    response = actor.complete(stream=True, max_tokens=59)
    assert "".join(each["choices"][0]["text"] for each in events(response)[:-1]) == "a" + "b" * 58


def test_a_reader_that_lags_too_far_is_cut_off_with_an_error(monkeypatch):
    monkeypatch.setattr(calls, "OUTPUTS_AT_ONCE", 1)
    actor = ScriptedActor(lambda _request, _number: RUNS, settings=EdgeSettings(max_buffered_outputs=10))
    response = actor.complete(stream=True, max_tokens=59)
    assert '"code":"client_too_slow"' in response.text
    assert "[DONE]" not in response.text
    assert list(actor.requests) == actor.cancelled
    assert actor.edge.counts["edge_clients_too_slow"] == 1


def test_a_client_that_takes_nothing_counts_as_gone():
    settings = EdgeSettings(send_timeout_s=0.1, max_buffered_outputs=1 << 20)
    actor = ScriptedActor(settings=settings)
    stop = asyncio.Event()

    def inject(event):
        if not isinstance(event.input, ClientRequest):
            actor.cancelled.append(event.request_id)
            stop.set()
            return

        async def flood():
            index = 0
            while not stop.is_set():
                actor.edge.calls.deliver(to_client(event.request_id, index))
                index += 1
                await asyncio.sleep(0)

        actor.flood = asyncio.create_task(flood())

    def to_client(request_id, index):
        from mooncake_zmq.core.actor import ToClient

        return ToClient(request_id, TokenOut(index, 511))

    actor.inject = inject

    async def client(port):
        _, writer = await send_request(port, {"prompt": "a" * 10, "stream": True})
        writer.transport.pause_reading()
        await asyncio.wait_for(stop.wait(), 30)
        await actor.until(lambda: actor.edge.calls.slots_taken == 0)
        writer.transport.abort()

    actor.serve(client)
    assert len(actor.cancelled) == 1


@pytest.mark.parametrize("other_settled", [False, True])
def test_a_failure_of_a_choice_that_a_stop_string_ended_ends_the_call_unless_the_others_are_settled(other_settled):
    settled = []
    stopped = SimpleNamespace(has_ended=True, settled=False, settle=settled.append)
    reply = SimpleNamespace(choices=[stopped, SimpleNamespace(has_ended=other_settled, settled=other_settled)])
    with nullcontext() if other_settled else pytest.raises(RequestError):
        accept(None, reply, [(0, failing())])
    assert bool(settled) == other_settled
