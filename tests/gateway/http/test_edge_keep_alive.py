"""What streams say while a prompt is computed, and which pages of browsers may call."""

import asyncio
import json

import pytest
from scripted_actor import ScriptedActor, events, failing, finished, tokens

from mooncake_zmq.core.actor import ToClient
from mooncake_zmq.gateway.requests.client_events import PromptLogprobs, TokenOut
from mooncake_zmq.gateway.settings import EdgeSettings

SOON = EdgeSettings(keep_alive_s=0.02)
SCORED = {"echo": True, "logprobs": 0}


def ask(**changes):
    body = json.dumps({"prompt": "abc", "stream": True} | changes).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def silent(_request, _number):
    return []


def after_two_comments(actor, outputs, **changes):
    """What a stream then brings."""
    read = []

    async def client(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ask(**changes))
        async with asyncio.timeout(5):
            for _ in range(2):
                await reader.readuntil(b": keep-alive\n\n")
            for output in outputs:
                actor.edge.calls.deliver(ToClient(next(iter(actor.requests)), output))
            read.append(await reader.readuntil(b"0\r\n\r\n"))
        writer.close()

    actor.serve(client)
    return read[0]


def test_a_stream_says_that_it_lives_while_the_prompt_is_computed():
    rest = after_two_comments(ScriptedActor(silent, settings=SOON), [*tokens("ok"), finished()])
    assert b'"text":"ok"' in rest
    assert rest.count(b"data: ") == 2
    assert b"data: [DONE]" in rest


def test_a_stream_says_that_it_lives_while_its_answer_is_resumed():
    actor = ScriptedActor(lambda *_: [tokens("o")], settings=SOON)
    rest = after_two_comments(actor, [*tokens("k", 1), finished()])
    assert b'"text":"k"' in rest
    assert rest.count(b"data: ") == 2


def test_what_comes_and_says_nothing_ends_no_comments():
    actor = ScriptedActor(lambda *_: [[PromptLogprobs(1, ((-0.5, ()),))]], settings=SOON)
    rest = after_two_comments(actor, [PromptLogprobs(2, ((-0.25, ()),)), TokenOut(0, 100, (-1.0, ())), finished()], **SCORED)
    assert b'"token_logprobs":[null,-0.5,-0.25' in rest


def test_what_fails_before_anything_was_said_keeps_its_status():
    actor = ScriptedActor(lambda *_: [[PromptLogprobs(1, ((-0.5, ()),))], [failing()]])
    assert actor.complete(stream=True, **SCORED).status_code == 503


def test_an_error_behind_a_comment_comes_in_the_stream():
    rest = after_two_comments(ScriptedActor(silent, settings=SOON), [failing()])
    assert b'data: {"error":{"message":"no decode node"' in rest
    assert b"[DONE]" not in rest


def test_a_client_that_hangs_up_between_comments_is_noticed():
    actor = ScriptedActor(silent, settings=SOON)

    async def client(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ask())
        async with asyncio.timeout(5):
            await reader.readuntil(b": keep-alive\n\n")
        writer.close()
        await actor.until(lambda: actor.cancelled)

    actor.serve(client)


@pytest.mark.parametrize("settings", [EdgeSettings(), EdgeSettings(keep_alive_s=0)])
def test_who_need_not_wait_hears_no_comment_and_an_early_error_keeps_its_status(settings):
    assert ScriptedActor(lambda *_: [[failing()]], settings=settings).complete(stream=True).status_code == 503
    response = ScriptedActor(settings=settings).complete(stream=True)
    assert events(response)[-1] == "[DONE]"
    assert "keep-alive" not in response.text


PAGE = "https://chat.example.org"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


def test_pages_of_named_origins_may_call_and_read_the_answer():
    actor = ScriptedActor(cors_origins=(PAGE,))
    asked = actor.call("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "x-stainless-lang" in asked.headers["access-control-allow-headers"]
    for response in (
        actor.call("POST", "/v1/completions", json={"prompt": "a", "stream": True}, headers={"origin": PAGE}),
        actor.call("POST", "/v1/completions", json={"prompt": ""}, headers={"origin": PAGE}),
    ):
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in response.headers["access-control-expose-headers"]
    strange = actor.call("OPTIONS", "/v1/chat/completions", headers={**PREFLIGHT, "origin": "https://evil.example"})
    assert strange.status_code == 400
    assert "access-control-allow-origin" not in strange.headers


def test_all_origins_or_none():
    assert ScriptedActor(cors_origins=("*",)).call("GET", "/v1/models", headers={"origin": PAGE}).headers[
        "access-control-allow-origin"
    ] == ("*")
    actor = ScriptedActor()
    assert actor.call("OPTIONS", "/v1/completions", headers=PREFLIGHT).status_code == 405
    assert "access-control-allow-origin" not in actor.call("GET", "/v1/models", headers={"origin": PAGE}).headers
