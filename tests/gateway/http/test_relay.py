"""Tokens on their short way to the client: what comes over a connection is what ASGI's own way would have brought."""

import asyncio
import gc
import json
import weakref

import httpx
import pytest
from scripted_actor import ScriptedActor, events, finished, one_by_one, tokens

from mooncake_zmq.gateway.http import calls, connection
from mooncake_zmq.gateway.http.connection import Connection, HeadWithBody
from mooncake_zmq.gateway.openai.detokenizer import Choice
from mooncake_zmq.gateway.settings import EdgeSettings

BODY = {"model": "toy", "prompt": "hello", "stream": True, "stream_options": {"include_usage": True}, "n": 2}


def says(text="h\u00e9llo\u2028 you", **settings):
    return ScriptedActor(lambda _request, _number: one_by_one([*tokens(text), finished()]), EdgeSettings(**settings))


def said(chunks):
    """Without what differs from call to call."""
    for chunk in chunks[:-1]:
        for own in ("id", "created", "mooncake"):
            chunk.pop(own, None)
    return chunks


@pytest.mark.parametrize("ids", [False, True])
def test_over_a_connection_comes_what_comes_by_asgi_and_the_connection_is_kept(ids):
    body = {**BODY, "return_token_ids": ids}
    by_asgi = said(events(says().complete(**body)))
    found = []

    async def client(port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            found.extend([await http.post("/v1/completions", json=body) for _ in range(2)])
        assert len(actor.acceptor.connections) == 1

    actor = says()
    actor.serve(client)
    # Of two choices either may be first.
    whole = [[sorted(map(json.dumps, said(events(each))[:-1])) for each in found], sorted(map(json.dumps, by_asgi[:-1]))]
    assert whole[0] == [whole[1], whole[1]]


class Written:
    """A transport that notes what is written to it."""

    def __init__(self):
        self.said = []
        self.closing = False

    def write(self, data):
        self.said.append(data)

    def writelines(self, parts):
        self.said.append(b"".join(parts))

    def is_closing(self):
        return self.closing

    def close(self):
        self.said.append("closed")


def written(*acts):
    """What comes of these acts: a part that is written, a turn of the loop (None), the end (Ellipsis), or a cut (False)."""
    transport = Written()

    async def act():
        answer = HeadWithBody(transport, transport.close)
        for each in acts:
            if each is None:
                await asyncio.sleep(0)
            elif each is ...:
                answer.close()
            elif each is False:
                transport.closing = True
            else:
                answer.write(each)
        await asyncio.sleep(0)

    asyncio.run(act())
    return transport.said


@pytest.mark.parametrize(
    ("acts", "said"),
    [
        ((b"head ", b"one", b"two"), [b"head one", b"two"]),
        ((b"head", None, b"one"), [b"head", b"one"]),
        ((b"head",), [b"head"]),
        ((b"head", ...), [b"head", "closed"]),
        ((b"head ", b"one", ...), [b"head one", "closed"]),
        ((b"head", False), []),
        ((b"HTTP/1.1 100 Continue ", b"head ", b"one"), [b"HTTP/1.1 100 Continue ", b"head one"]),
    ],
)
def test_a_head_leaves_with_what_follows_in_its_turn_and_else_alone(acts, said):
    assert written(*acts) == said


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_is_woken_once_for_the_head_and_the_first_of_the_body(monkeypatch, stream):
    transports = []

    class Noted(HeadWithBody):
        def __init__(self, transport, close):
            transports.append(Written())
            super().__init__(transport, close)
            self._transport = Both(transport, transports[-1])

    class Both:
        def __init__(self, *transports):
            self.transports = transports

        def __getattr__(self, name):
            return lambda *parts: [getattr(each, name)(*parts) for each in self.transports][0]

    monkeypatch.setattr(connection, "HeadWithBody", Noted)

    async def client(port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            answer = await http.post("/v1/completions", json={"model": "toy", "prompt": "hello", "stream": stream})
            assert answer.status_code == 200

    says().serve(client)
    ((first, *_),) = (each.said for each in transports)
    head, _, body = first.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body


def test_all_tokens_of_a_step_are_one_write(monkeypatch):
    parts = []
    push = Connection.push

    def pushed(self, part):
        parts.append(part)
        return push(self, part)

    monkeypatch.setattr(Connection, "push", pushed)
    actor = ScriptedActor(lambda _request, _number: [tokens("a"), tokens("bcd", 1), tokens("e", 4), [finished()]])

    async def client(port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            answer = await http.post("/v1/completions", json={**BODY, "n": 1})
        assert "".join(chunk["choices"][0]["text"] for chunk in events(answer)[:-1] if chunk["choices"]) == "abcde"

    actor.serve(client)
    assert [json.loads(part.removeprefix(b"data: "))["choices"][0]["text"] for part in parts][:2] == ["bcd", "e"]


def test_who_speaks_http_1_0_gets_events_without_chunks():
    actor = says("hello")
    found = []

    async def client(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        raw = json.dumps({**BODY, "n": 1}).encode()
        head = b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw)
        writer.write(head + raw)
        found.append(await asyncio.wait_for(reader.read(), 10))
        writer.close()

    actor.serve(client)
    head, _, body = found[0].partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    lines = [line for line in body.split(b"\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    assert lines[-1] == b"data: [DONE]"


def test_what_a_connection_does_not_take_at_once_is_kept_in_order(monkeypatch):
    text = "".join(chr(97 + number % 26) for number in range(500))
    push, tries = Connection.push, []

    def full_now_and_then(self, part):
        tries.append(part)
        return len(tries) % 3 > 0 and push(self, part)

    monkeypatch.setattr(Connection, "push", full_now_and_then)
    actor = ScriptedActor(lambda _request, _number: [*([each] for each in tokens(text)), [finished()]], max_model_len=1024)

    async def client(port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            answer = await http.post("/v1/completions", json={**BODY, "n": 1, "max_tokens": 600})
        assert "".join(chunk["choices"][0]["text"] for chunk in events(answer)[:-1] if chunk["choices"]) == text

    actor.serve(client)
    assert len(tries) > 100


def test_an_error_in_one_answer_ends_that_one_and_no_other_waits_for_it(monkeypatch):
    accept = Choice.accept

    def broken(self, output):
        if self.prompt_ids[0] == ord("X") and getattr(output, "index", None) == 3:
            raise ValueError("planted")
        accept(self, output)

    monkeypatch.setattr(Choice, "accept", broken)
    told, together = [], asyncio.Event()

    class Together(ScriptedActor):
        async def _play(self, request_id, batches):
            await together.wait()
            await super()._play(request_id, batches)

    actor = Together(lambda _request, _number: one_by_one([*tokens("abcdefgh"), finished()]), EdgeSettings(keep_alive_s=0.0))

    async def client(port):
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context["exception"]))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:

            async def ask(prompt):
                return await http.post("/v1/completions", json={**BODY, "prompt": prompt, "n": 1})

            asked = [asyncio.create_task(ask(prompt)) for prompt in ("Xa", "b", "c")]
            await actor.until(lambda: len(actor.requests) == len(asked))
            together.set()
            cut, *others = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(cut, httpx.RemoteProtocolError), "not an answer that looks whole"
        for other in others:
            assert "".join(chunk["choices"][0]["text"] for chunk in events(other)[:-1] if chunk["choices"]) == "abcdefgh"

    actor.serve(client)
    assert [str(error) for error in told] == ["planted"]


def test_a_call_that_is_over_is_gone_without_the_collector(monkeypatch):
    begun = []
    begin = calls.Call.__init__

    def noted(self, of):
        begin(self, of)
        begun.append(weakref.ref(self))

    monkeypatch.setattr(calls.Call, "__init__", noted)
    actor = says("abc")

    async def client(port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            for _ in range(3):
                assert (await http.post("/v1/completions", json={**BODY, "n": 1})).status_code == 200
        await actor.until(lambda: not any(call() for call in begun))

    gc.collect()
    gc.disable()
    try:
        actor.serve(client)
    finally:
        gc.enable()
    assert len(begun) == 3
