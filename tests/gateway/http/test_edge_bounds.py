"""What one call may cost the others: sizes are looked at before the work, and the work is not the loop's."""

import asyncio
import gc
import json
import threading
import weakref
from array import array
from types import SimpleNamespace

import httpx
import pytest
from scripted_actor import ScriptedActor, events, finished, tokens
from test_edge_errors import error_of

from mooncake_zmq.core.messages import Image
from mooncake_zmq.gateway.anthropic import messages
from mooncake_zmq.gateway.http import app, calls
from mooncake_zmq.gateway.openai import bodies, detokenizer, prepare, responses
from mooncake_zmq.gateway.openai.bodies import ChatBody, CompletionBody
from mooncake_zmq.gateway.openai.errors import QUOTED_CHARS
from mooncake_zmq.gateway.requests.client_events import Rendered, TokenOut
from mooncake_zmq.gateway.responses_api import items
from mooncake_zmq.gateway.settings import EdgeSettings
from mooncake_zmq.kv.block_hash import pack_tokens
from mooncake_zmq.kv.image_keys import digest_of


def refusal(response, param, code="invalid_value"):
    assert response.status_code == 400, response.text[:500]
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    return error["message"]


# --- stop strings


@pytest.mark.parametrize("stop", ["x" * 1025, ["a", "x" * 1025], ["x"] * 17, ["x" * 480_000] * 16, ["x"] * 200_000])
def test_stop_strings_are_few_and_short(stop):
    actor = ScriptedActor(settings=EdgeSettings(max_body_bytes=8 << 20))
    assert len(refusal(actor.complete(stop=stop), "stop")) < 200
    refusal(actor.chat(stop=stop), "stop")
    assert not actor.requests


@pytest.mark.parametrize("stop", ["\U0001f642" * 1024, ["é" * 1024] * 16])
def test_the_longest_stop_strings_are_taken_however_they_are_written(stop):
    raw = json.dumps({"prompt": "a", "stop": stop})
    assert ScriptedActor().call("POST", "/v1/completions", content=raw.encode()).status_code == 200


def test_a_list_of_many_stop_strings_is_not_even_read(monkeypatch):
    monkeypatch.setattr(bodies, "_stops", None)
    refusal(ScriptedActor().complete(stop=["x"] * 200_000), "stop")


def test_tables_of_stop_strings_are_made_once_a_call(monkeypatch):
    made = []
    monkeypatch.setattr(detokenizer, "_borders", lambda text, real=detokenizer._borders: made.append(text) or real(text))
    assert ScriptedActor().complete(prompt=["a", "b", "c"], n=4, stop=["xy", "z"]).status_code == 200
    assert made == ["xy", "z"]


# --- prompts that are too long whatever they say


COMPLETIONS, CHATS, IMAGE = "/v1/completions", "/v1/chat/completions", "data:image/png;base64,Q0FU"
SAID = [{"role": "user", "content": "hi"}]


def unused(*_, **__):
    raise AssertionError("this was to be refused unread")


def test_a_text_of_more_characters_than_fit_is_refused_before_it_is_tokenized():
    actor = ScriptedActor(max_model_len=10)
    tokenizer = actor.model.tokenizer
    most = 10 * tokenizer.longest_token
    tokenizer.encode = tokenizer.chat = unused
    for response, param in (
        (actor.complete(prompt="x" * (most + 1)), "prompt"),
        (actor.complete(prompt=["a", "x" * (most + 1)]), "prompt"),
        (actor.chat(messages=[{"role": "user", "content": "x" * most}, {"role": "user", "content": "x"}]), "messages"),
    ):
        said = refusal(response, param, "context_length_exceeded")
        assert said.startswith("This model's maximum context length is 10 tokens. However, ")
        assert str(most + 1) in said
    with pytest.raises(AssertionError):
        actor.complete(prompt="x" * most)


def test_more_messages_than_tokens_are_refused_before_the_template_sees_them():
    actor = ScriptedActor(max_model_len=10)
    actor.model.tokenizer.chat = unused
    messages = [{"role": "user", "content": ""}] * 11
    assert "11 messages" in refusal(actor.chat(messages=messages), "messages", "context_length_exceeded")


def test_a_prompt_that_leaves_no_room_is_refused_in_openais_words():
    words = "This model's maximum context length is 10 tokens. However, you requested {} tokens ({} in the prompt, {} in the"
    actor = ScriptedActor(max_model_len=10)
    said = refusal(actor.complete(prompt="x" * 10), "prompt", "context_length_exceeded")
    assert said.startswith(words.format(11, 10, 1))
    said = refusal(actor.complete(prompt="x" * 6, max_tokens=7), "max_tokens", "context_length_exceeded")
    assert said.startswith(words.format(13, 6, 7))
    said = refusal(actor.chat(max_completion_tokens=9), "max_completion_tokens", "context_length_exceeded")
    assert said.startswith(words.format(14, 5, 9))


@pytest.mark.parametrize(
    ("prompt", "decoder"),
    [
        ([[1]] * 129, "_lists_of_ids"),
        ([[1] * 100] * 128, "_lists_of_ids"),
        (["a"] * 129, "_texts"),
        (['"\\'] * 258, "_texts"),
        ([1] * 64, "_ids"),
    ],
)
def test_prompts_of_too_many_parts_are_not_read(monkeypatch, prompt, decoder):
    monkeypatch.setattr(bodies, decoder, None)
    actor = ScriptedActor()
    assert actor.complete(prompt=prompt).status_code == 400
    assert not actor.requests


@pytest.mark.parametrize("content", [[], [{"type": ""}], "a", 1])
def test_contents_of_too_many_messages_are_not_read(monkeypatch, content):
    monkeypatch.setattr(bodies, "_content", None)
    messages = [{"role": "a", "content": content}] * 11
    refusal(ScriptedActor(max_model_len=10).chat(messages=messages), "messages", "context_length_exceeded")


def test_making_out_messages_wakes_no_garbage_collector():
    raw = json.dumps({"messages": [{"role": "a", "content": [{"type": ""}]}] * 1000}).encode()
    before = gc.get_count()[0]
    body = bodies.parse_body(raw, ChatBody)
    assert gc.get_count()[0] - before < 100, "no object for each message that it would look at"
    assert len(body.messages) == 1000


@pytest.mark.parametrize(
    ("as_chat", "body"),
    [
        (items.as_chat, lambda long: {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": long}]}),
        (items.as_chat, lambda long: {"input": "a", "text": {"format": {"type": "json_schema", "schema": long}}}),
        (messages.as_chat, lambda long: {"messages": SAID, "max_tokens": 1, "tools": [{"name": "f", "input_schema": long}]}),
    ],
    ids=["tools", "schema", "tools of messages"],
)
def test_schemas_of_other_apis_are_not_read_before_their_length_is_known(as_chat, body):
    """Four MiB of them would take the interpreter for half a second, in one call beside which no other thread runs."""
    actor, raw = ScriptedActor(), json.dumps(body({"a": [[]] * 10_000})).encode()
    before = gc.get_stats()[0]["collections"]
    as_chat(raw, actor.edge.models)
    assert gc.get_stats()[0]["collections"] - before < 5, "no object for each list"


def call_with(arguments):
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}


LONG = {"a": [[]] * (1 << 15)}
TOO_MANY_TOOLS = [{"type": "function", "name": "f", "parameters": LONG}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHATS, {"messages": [call_with(LONG)]}, "messages"),
        (CHATS, {"messages": [call_with(json.dumps(LONG))]}, "messages"),
        (CHATS, {"messages": [call_with(json.dumps(LONG).replace("[", "\\u005b"))]}, "messages"),
        (CHATS, {"messages": SAID, "tools": [{"type": "function", "function": {"name": "f", "parameters": LONG}}]}, "tools"),
        ("/v1/responses", {"input": "a", "tools": TOO_MANY_TOOLS}, "tools"),
        ("/v1/messages", {"messages": SAID, "max_tokens": 1, "tools": [{"name": "f", "input_schema": LONG}]}, "tools"),
    ],
)
def test_no_more_lists_and_objects_are_read_in_one_call_than_in_a_moment(path, body, param):
    actor = ScriptedActor(max_model_len=1 << 20)
    raw = json.dumps({"model": "toy", **body}).replace("\\\\u005b", "\\u005b")
    response = actor.call("POST", path, content=raw.encode())
    assert response.status_code == 400
    assert "lists and objects" in response.text
    assert param in response.text


@pytest.mark.parametrize("content", [1, {}, [1], [{"text": "a"}], [[]]])
def test_content_of_another_kind_is_the_clients_mistake(content):
    response = ScriptedActor().chat(messages=[{"role": "user", "content": content}])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("prompt", [['say "a", \\', '["', "a,b" * 20], [[1, 2], [3]], ["\\\\"] * 64, [",,,,,,,,"] * 8])
def test_prompts_full_of_punctuation_are_read(prompt):
    raw = json.dumps({"prompt": prompt}, indent=1).encode()
    actor = ScriptedActor()
    assert actor.call("POST", "/v1/completions", content=raw).status_code == 200
    assert len(actor.requests) == len(prompt)


def test_echo_repeats_only_so_much():
    actor = ScriptedActor(settings=EdgeSettings(max_echo_chars=20))
    refusal(actor.complete(prompt=["hello", "world"], n=3, echo=True), "echo")
    assert actor.complete(prompt=["hello", "world"], n=2, echo=True).status_code == 200
    assert actor.complete(prompt=["hello", "world"], n=3).status_code == 200


def test_token_ids_of_prompts_are_repeated_only_so_often(monkeypatch):
    monkeypatch.setattr(prepare, "MAX_REPEATED_IDS", 80)
    actor = ScriptedActor()
    prompt = [[1] * 20, [2] * 20]
    refusal(actor.complete(prompt=prompt, n=3, return_token_ids=True), "return_token_ids")
    assert actor.complete(prompt=prompt, n=2, return_token_ids=True).status_code == 200
    assert actor.complete(prompt=prompt, n=3).status_code == 200
    monkeypatch.setattr(prepare, "MAX_REPEATED_IDS", 1)
    assert actor.complete(prompt=[1] * 60, return_token_ids=True).status_code == 200, "any prompt's may be repeated once"


@pytest.mark.parametrize("stream", [False, True])
def test_many_token_ids_of_prompts_are_written_by_another_thread(stream, monkeypatch):
    monkeypatch.setattr(responses, "LONG_IDS", 4)
    threads, choices, take = [], [], detokenizer.Choice.take

    def spy(choice):
        if not choice.pieces_taken:
            threads.append(threading.current_thread().name.rpartition("_")[0])
        choices.append(choice)
        return take(choice)

    def script(_request, number):
        while stream and number and not any(choice.pieces_taken > 1 for choice in choices):
            yield []
        yield from ([], tokens("a"), tokens("b", 1), [finished()])

    monkeypatch.setattr(detokenizer.Choice, "take", spy)
    ScriptedActor(script).complete(prompt="hello", n=2, stream=stream, return_token_ids=True)
    assert threads == ["prepare-long"] * 2
    del threads[:]
    ScriptedActor().complete(prompt="hey", stream=stream, return_token_ids=True)
    assert threads == [""]
    del threads[:]
    ScriptedActor(lambda _request, _number: [[*tokens("a long answer"), finished()]]).complete(stream=stream)
    assert threads[0] == ("" if stream else "prepare-long"), "an answer of many tokens, as a whole"


class WatchedBody(bytearray):
    """A body that can be referred to weakly."""


SEEN = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (COMPLETIONS, {"stop": "Z", "stop_token_ids": [1], "user": "u", "logit_bias": {"5": 1}, "metadata": {}, "tools": []}),
        (CHATS, {"stop": "Z", "tools": [], "tool_choice": "none", "chat_template_kwargs": {}, "response_format": None}),
        (CHATS, {"messages": [SEEN], "logit_bias": {"5": 1}, "stop_token_ids": [1]}),
        ("/v1/messages", {"stop_sequences": ["Z"], "max_tokens": 5, "metadata": {}}),
        ("/v1/responses", {"input": "hi", "tools": [], "tool_choice": "none"}),
    ],
)
def test_what_is_being_answered_keeps_no_body(path, asked, monkeypatch):
    """The limit on bodies counts them until their requests are ready."""
    bodies, held, read = [], [], app._read_body

    async def watched(*arguments):
        body = WatchedBody(await read(*arguments))
        bodies.append(weakref.ref(body))
        return body

    def see(*_):
        for _ in range(1000):  # the thread that prepared it may not be done with it yet
            if bodies[0]() is None:
                break
            yield []
        held.append(bodies[0]() is not None)
        yield [*tokens("ok"), finished()]

    def written(*_):
        held.append(bodies[0]() is not None)
        return Rendered(pack_tokens([5, 9]), (Image(begin=1, length=1, digest=digest_of(IMAGE)),))

    monkeypatch.setattr(app, "_read_body", watched)
    actor = ScriptedActor(see, max_model_len=4096, render=written)
    opening = {COMPLETIONS: {"prompt": "hi"}, "/v1/responses": {}}.get(path, {"messages": SAID})
    response = actor.call("POST", path, json={"model": "toy", **opening, **asked})
    assert response.status_code == 200, response.text
    assert held
    assert not any(held)


# --- errors


@pytest.mark.parametrize(
    "call",
    [
        lambda actor, long: actor.complete(model=long),
        lambda actor, long: actor.call("GET", f"/v1/models/{long}"),
        lambda actor, long: actor.call("GET", f"/{long}"),
        lambda actor, long: actor.chat(messages=[{"role": "user", "content": [{"type": long}]}]),
        lambda actor, long: actor.chat(messages=[{"role": "user", "content": "a"}], **{long: 1}, n=long),
        lambda actor, long: actor.chat(),
    ],
)
def test_errors_quote_little_of_what_was_sent(call):
    actor, long = ScriptedActor(), "y" * 5000

    def refuse(_messages, _answer, _tools, **_options):
        raise ValueError(f"no such role: {long}")

    actor.model.tokenizer.chat = refuse
    response = call(actor, long)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["message"].count("y") <= QUOTED_CHARS + 5
    assert len(response.content) < 600


# --- the loop is for streams


@pytest.fixture
def none_at_once(monkeypatch):
    monkeypatch.setattr(app, "AT_ONCE_BYTES", 0)


def test_the_shortest_bodies_are_made_into_requests_at_once_and_of_the_loops_time_no_more_than_half(monkeypatch):
    actor, seen, now = ScriptedActor(), [], [0.0]
    monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0))
    encode = actor.model.tokenizer.encode

    def slow(text, **_options):
        seen.append(threading.current_thread() is threading.main_thread())
        now[0] += 3.0
        return encode(text)

    actor.model.tokenizer.encode = slow
    for at, filler in ((0.0, ""), (5.9, ""), (6.0, ""), (20.0, "x" * app.AT_ONCE_BYTES)):
        now[0] = at
        assert actor.complete(prompt="a", user=filler).status_code == 200
    assert seen == [True, False, True, False]


@pytest.mark.parametrize(("filler", "lane"), [(0, "prepare_"), (5000, "prepare-long_")])
def test_bodies_are_made_into_requests_by_other_threads_long_ones_by_their_own(monkeypatch, none_at_once, filler, lane):
    actor = ScriptedActor(settings=EdgeSettings(short_body_bytes=1000))
    seen = []
    tokenizer = actor.model.tokenizer
    for module, name in ((prepare, "parse_body"), (tokenizer, "encode"), (tokenizer, "chat"), (prepare, "stop_tables")):
        real = getattr(module, name)

        def spy(*arguments, real=real, **named):
            seen.append(threading.current_thread().name)
            return real(*arguments, **named)

        monkeypatch.setattr(module, name, spy)
    assert actor.complete(user="x" * filler, stop="x").status_code == 200
    assert actor.chat(user="x" * filler, stop="x").status_code == 200
    assert len(seen) == 6
    assert all(name.startswith(lane) for name in seen)


@pytest.mark.parametrize("name", [b"guided_regex", b"guided\\u005fregex", b"\\u0067\\u0075ided_rege\\u0078"])
def test_who_asks_for_a_grammar_keeps_nobody_waiting_who_asks_for_none(none_at_once, name):
    actor, go_on, threads = ScriptedActor(), threading.Event(), []

    def slow(text, **_options):
        threads.append(threading.current_thread().name)
        assert text == "plain" or go_on.wait(10)
        return array("i", [1])

    actor.model.tokenizer.encode = slow

    async def client(port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            body = b'{"prompt": "formed", "%b": "a+"}' % name
            formed = asyncio.create_task(http.post("/v1/completions", content=body))
            await actor.until(lambda: len(threads) == 1)
            assert (await http.post("/v1/completions", json={"model": "toy", "prompt": "plain"})).status_code == 200
            go_on.set()
            assert (await formed).status_code == 200

    actor.serve(client)
    assert [name.rpartition("_")[0] for name in threads] == ["prepare-grammar", "prepare"]


@pytest.mark.parametrize("text", ["caf\u00e9", "<a&b>", "\u4e2d\U0001f642"])
def test_whose_text_is_written_with_escapes_waits_for_no_grammar(text, monkeypatch, none_at_once):
    actor, threads = ScriptedActor(), []
    encode = actor.model.tokenizer.encode
    monkeypatch.setattr(
        actor.model.tokenizer,
        "encode",
        lambda text, **_options: threads.append(threading.current_thread().name) or encode(text),
    )
    escaped = json.dumps({"prompt": text}).replace("<", "\\u003c").replace("&", "\\u0026")
    assert actor.call("POST", "/v1/completions", content=escaped.encode()).status_code == 200
    assert [name.rpartition("_")[0] for name in threads] == ["prepare"]


def test_a_long_body_keeps_no_short_one_waiting():
    actor = ScriptedActor(settings=EdgeSettings(short_body_bytes=1000, tokenize_threads=1))
    go_on = threading.Event()
    encode = actor.model.tokenizer.encode

    def slow(text, **_options):
        assert text == "short" or go_on.wait(10)
        return encode(text)

    actor.model.tokenizer.encode = slow

    async def go():
        transport = httpx.ASGITransport(app=actor.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            bodies = [{"prompt": "long", "user": "x" * 2000}] * 3
            long = [asyncio.create_task(http.post("/v1/completions", json=body)) for body in bodies]
            await actor.until(lambda: actor.edge.calls.slots_taken == 3)
            assert (await http.post("/v1/completions", json={"prompt": "short"})).status_code == 200
            go_on.set()
            assert [(await each).status_code for each in long] == [200] * 3

    asyncio.run(go())
    actor.check_idle()


def test_what_a_client_no_longer_waits_for_is_not_prepared():
    actor = ScriptedActor(settings=EdgeSettings(short_body_bytes=0, tokenize_threads=1))
    go_on, encoded = threading.Event(), []
    encode = actor.model.tokenizer.encode

    def slow(text, **_options):
        encoded.append(text)
        assert go_on.wait(10)
        return encode(text)

    actor.model.tokenizer.encode = slow

    async def client(port):
        writers = []
        for text in ("a", "b", "c"):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            body = json.dumps({"prompt": text}).encode()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            writers.append(writer)
            await actor.until(lambda: actor.edge.calls.slots_taken == len(writers))
        for writer in writers:
            writer.close()
        await actor.until(lambda: not actor.acceptor.connections)
        go_on.set()
        await actor.until(lambda: actor.edge.calls.slots_taken == 0)

    actor.serve(client)
    assert encoded == ["a"]


def test_a_reader_that_lagged_gets_the_rest_in_portions(monkeypatch):
    monkeypatch.setattr(calls, "OUTPUTS_AT_ONCE", 4)
    outputs = [TokenOut(index, 97) for index in range(10)]
    actor = ScriptedActor(lambda _request, _number: [[*tokens("a")], [*outputs[1:], finished("length")]])
    chunks = events(actor.complete(stream=True, max_tokens=10))
    texts = [choice["text"] for chunk in chunks[:-1] for choice in chunk["choices"]]
    assert "".join(texts) == "a" * 10
    assert max(map(len, texts)) == 4


def test_probabilities_that_would_be_held_by_the_million_are_refused_and_streamed_ones_are_not():
    told = [TokenOut(0, 97, (-1.0, ())), finished()]
    actor = ScriptedActor(lambda _request, _number: [told], settings=EdgeSettings(max_held_scores=4 * 2 * 10 * 6))
    assert actor.complete(n=2, max_tokens=10, logprobs=5).status_code == 200
    refused = actor.complete(n=2, max_tokens=10, logprobs=6)
    assert error_of(refused) == (400, "invalid_request_error", "logprobs", "invalid_value")
    assert actor.complete(n=2, max_tokens=10, logprobs=6, stream=True).status_code == 200
    assert actor.complete(n=2, max_tokens=40).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "max_tokens": 10, "logprobs": 1},
        {"prompt": "a" * 10, "max_tokens": 30, "logprobs": 1, "echo": True, "stream": True},
    ],
    ids=["of answers", "of prompts"],
)
def test_answers_that_hold_probabilities_share_what_the_gateway_has_for_them(body):
    actor = ScriptedActor(lambda _request, _number: [], settings=EdgeSettings(max_held_scores=4 * 20))

    async def client(port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            waiting = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(4)]
            await actor.until(lambda: actor.edge.calls.held_scores.taken == 80)
            refused = await http.post("/v1/completions", json=body)
            assert error_of(refused)[0::3] == (503, "overloaded")
            assert "retry-after" in refused.headers
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        await actor.until(lambda: actor.edge.calls.held_scores.taken == 0)

    actor.serve(client)


@pytest.mark.parametrize(
    ("logprobs", "choices", "most"), [(None, 1, 8192), (0, 1, 8192), (20, 1, 390), (20, 8, 390), (20, 64, 512)]
)
def test_the_more_comes_with_tokens_the_fewer_wait_for_a_reader(logprobs, choices, most):
    actor = ScriptedActor(lambda _request, _number: [])
    body = {"prompt": "a", "n": choices, "max_tokens": 40, "stream": True, "logprobs": logprobs}
    ready = prepare.prepare(json.dumps(body).encode(), CompletionBody, actor.edge.models, actor.settings, lambda: 1)

    async def go() -> int:
        number = 0
        with actor.edge.calls.call() as call:
            call.submit(ready.requests, choices)
            while "edge_clients_too_slow" not in actor.edge.counts:
                call.receive(0, TokenOut(number, 97))
                number += 1
        return number - 1

    assert asyncio.run(go()) == most
