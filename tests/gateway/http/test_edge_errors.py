"""Every way to be refused, in OpenAI's error shape."""

import asyncio
import json

import httpx
import pytest
from scripted_actor import ScriptedActor, events, failing, finished, one_by_one, tokens

from mooncake_zmq.gateway.requests.client_events import Failed
from mooncake_zmq.gateway.settings import EdgeSettings


def error_of(response):
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return response.status_code, body["error"]["type"], body["error"]["param"], body["error"]["code"]


def refused(response, param, code="invalid_value", status=400):
    assert error_of(response) == (status, "invalid_request_error", param, code)
    return response.json()["error"]["message"]


BAD_FIELDS = [
    ("temperature", -0.1),
    ("temperature", 101),
    ("temperature", "warm"),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1 << 30),
    ("seed", 1 << 63),
    ("seed", 1.5),
    ("seed", 10**40),
    ("n", 0),
    ("n", 129),
    ("n", 1 << 40),
    ("n", True),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["x"] * 17),
    ("stop", [1]),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "3"),
    ("max_completion_tokens", 0),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("cache_salt", ""),
    ("cache_salt", 1),
    ("priority", 1.5),
    ("priority", 1001),
    ("priority", "first"),
    ("ttft_slo", -1),
    ("ttft_slo", "soon"),
    ("ttft_slo", 1e9),
    ("tbt_slo", -0.001),
    ("tbt_slo", [0.1]),
    ("stream", "yes"),
    ("stream_options", []),
    ("stream_options", {"include_usage": 1}),
    ("ignore_eos", 1),
    ("return_token_ids", "x"),
    ("model", 1),
]


@pytest.mark.parametrize(("param", "value"), BAD_FIELDS, ids=str)
def test_invalid_parameters_are_named(param, value):
    actor = ScriptedActor()
    refused(actor.complete(**{param: value}), param)
    if param != "min_tokens" or value < 0:
        refused(actor.chat(**{param: value}), param)
    assert not actor.requests


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], [[]], ["a", ""], [[1], []], ["a", 1], [[1], "a"], [-1], [512], [[1, 512]], [1 << 31], [1.5], 7, {}, [True]],
)
def test_bad_prompts(prompt):
    refused(ScriptedActor().complete(prompt=prompt), "prompt")


def test_a_text_that_the_tokenizer_knows_but_the_model_does_not_reaches_no_engine():
    actor = ScriptedActor(vocab_size=100)
    assert "token id 122 is out of range" in refused(actor.complete(prompt="az"), "prompt")
    refused(actor.chat(messages=[{"role": "user", "content": "z"}]), "messages")
    assert not actor.requests


def test_a_token_id_out_of_range_is_told_with_the_vocabulary():
    assert "513" in (text := refused(ScriptedActor().complete(prompt=[5, 513]), "prompt"))
    assert "512 ids" in text


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [{"content": "no role"}],
        [{"role": "", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": 5}],
        [5],
    ],
)
def test_bad_messages(messages):
    refused(ScriptedActor().chat(messages=messages), "messages")


def test_what_the_template_refuses():
    actor = ScriptedActor()

    def refuse(_messages, _answer, _tools, **_options):
        raise ValueError("the chat template refused the messages: roles must alternate")

    actor.model.tokenizer.chat = refuse
    assert "alternate" in refused(actor.chat(), "messages")


def test_missing_fields():
    actor = ScriptedActor()
    refused(actor.call("POST", "/v1/completions", json={"model": "toy"}), "prompt")
    refused(actor.call("POST", "/v1/chat/completions", json={"model": "toy"}), "messages")


def test_too_long_for_the_context():
    actor = ScriptedActor(max_model_len=10)
    text = refused(actor.complete(prompt="x" * 10), "prompt", "context_length_exceeded")
    assert "10 tokens" in text
    text = refused(actor.complete(prompt="x" * 6, max_tokens=5), "max_tokens", "context_length_exceeded")
    assert [number for number in ("6", "5", "10") if number not in text] == []
    refused(actor.complete(prompt="x", max_completion_tokens=10), "max_completion_tokens", "context_length_exceeded")
    refused(actor.chat(messages=[{"role": "user", "content": "x" * 20}]), "messages", "context_length_exceeded")
    assert actor.complete(prompt="x" * 9).status_code == 200


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"nonsense", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"metadata":' * 5000, b'{"prompt": NaN}']
)
def test_bad_json(raw):
    refused(ScriptedActor().call("POST", "/v1/completions", content=raw), None, "invalid_json")


@pytest.mark.parametrize("raw", [b"[]", b"null", b"3", b'"x"'])
def test_json_that_is_no_object(raw):
    refused(ScriptedActor().call("POST", "/v1/completions", content=raw), None)


def test_unknown_model():
    actor = ScriptedActor()
    for response in (
        actor.complete(model="gpt-4"),
        actor.chat(model="gpt-4"),
        actor.call("GET", "/v1/models/gpt-4"),
    ):
        assert "'toy'" in refused(response, "model", "model_not_found", 404)


def test_unknown_paths_and_methods():
    actor = ScriptedActor()
    refused(actor.call("GET", "/v2/nothing"), None, "not_found", 404)
    refused(actor.call("POST", "/v1/completions/", json={}), None, "not_found", 404)
    response = actor.call("GET", "/v1/completions")
    refused(response, None, "method_not_allowed", 405)
    assert response.headers["allow"] == "POST"
    refused(actor.call("DELETE", "/v1/models"), None, "method_not_allowed", 405)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/health", "/health"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/completions/", "/v1/completions"),
    ],
)
def test_a_path_that_is_nearly_one_is_answered_with_the_one_that_was_meant(path, meant):
    assert refused(ScriptedActor().call("POST", path, json={}), None, "not_found", 404).endswith(f"; did you mean {meant}?")


def test_a_path_that_is_near_none_gets_no_hint():
    assert "did you mean" not in refused(ScriptedActor().call("GET", "/wp-admin/setup.php"), None, "not_found", 404)


def test_a_large_body_is_refused_unread():
    actor = ScriptedActor(settings=EdgeSettings(max_body_bytes=1000))
    read = 0

    async def body():
        nonlocal read
        for _ in range(100):
            read += 1
            yield b" " * 100

    headers = {"content-length": "10000"}
    refused(actor.call("POST", "/v1/completions", content=body(), headers=headers), None, "body_too_large", 413)
    assert read == 0
    refused(actor.call("POST", "/v1/completions", content=body()), None, "body_too_large", 413)
    assert read <= 11
    refused(
        actor.call("POST", "/v1/completions", content=b"{}", headers={"content-length": "9" * 5000}),
        None,
        "body_too_large",
        413,
    )


def test_a_large_body_over_a_real_connection():
    actor = ScriptedActor(settings=EdgeSettings(max_body_bytes=100_000))

    async def client(port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            response = await http.post("/v1/completions", content=b" " * 150_000)
            refused(response, None, "body_too_large", 413)
            assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200

    actor.serve(client)


def test_a_body_that_stalls():
    actor = ScriptedActor(settings=EdgeSettings(body_timeout_s=0.05))

    async def client(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 408")
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "body_timeout"
        writer.close()

    actor.serve(client)


def test_too_many_open_requests():
    actor = ScriptedActor(lambda _request, _number: [], max_open=3)

    async def go():
        transport = httpx.ASGITransport(app=actor.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            open_calls = [
                asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "n": n, "stream": n == 1}))
                for n in (1, 2)
            ]
            await actor.until(lambda: len(actor.requests) == 3)
            rejected = await http.post("/v1/completions", content=b"not even read")
            for call in open_calls:
                call.cancel()
            await asyncio.gather(*open_calls, return_exceptions=True)
            return rejected

    response = asyncio.run(go())
    assert error_of(response) == (503, "server_error", None, "overloaded")
    assert response.headers["retry-after"] == "1"
    assert len(actor.cancelled) == 3
    actor.check_idle()


def test_more_choices_than_slots_or_than_allowed():
    small = ScriptedActor(max_open=2, settings=EdgeSettings(max_choices=2))
    refused(small.complete(prompt=["a", "b", "c"]), "prompt")
    refused(small.complete(prompt=["a", "b"], n=2), "n")
    assert small.complete(n=2).status_code == 200


def test_no_new_calls_while_draining():
    actor = ScriptedActor()
    actor.edge.drain()
    response = actor.complete()
    assert error_of(response)[0] == 503
    assert "retry-after" in response.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "kind"),
    [(503, "server_error"), (429, "rate_limit_error"), (500, "server_error"), (400, "invalid_request_error")],
)
def test_failure_before_the_first_token_is_a_status(stream, status, kind):
    actor = ScriptedActor(lambda _request, _number: [[failing(status)]])
    response = actor.complete(stream=stream)
    assert error_of(response) == (status, kind, None, "no_decode")
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2500")


def test_retry_after_is_whole_and_always_there_for_429_and_503():
    for given, told in ((None, "1"), (0.0, "1"), (1.0, "1"), (1.001, "2")):
        response = ScriptedActor(lambda _request, _number, given=given: [[failing(429, given)]]).complete()
        assert response.headers["retry-after"] == told
    assert "retry-after" not in ScriptedActor(lambda _request, _number: [[failing(500, None)]]).complete().headers


def test_a_status_that_is_no_error_becomes_500():
    failed = Failed(status=200, code="odd", message="odd")
    assert ScriptedActor(lambda _request, _number: [[failed]]).complete().status_code == 500


@pytest.mark.parametrize("chat", [False, True])
def test_failure_after_the_first_token_is_an_event_and_the_end(chat):
    actor = ScriptedActor(lambda _request, _number: one_by_one([*tokens("ab"), failing()]))
    chunks = events(actor.chat(stream=True) if chat else actor.complete(stream=True))
    assert chunks[-1] == {
        "error": {"message": "no decode node", "type": "server_error", "param": None, "code": "no_decode"},
    }
    assert "[DONE]" not in chunks
    assert all(choice["finish_reason"] is None for chunk in chunks[:-1] for choice in chunk["choices"])


def test_tokens_just_before_a_failure_are_still_told():
    actor = ScriptedActor(lambda _request, _number: [tokens("a"), [*tokens("b", 1), failing()]])
    chunks = events(actor.complete(stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["a", "b"]
    assert "error" in chunks[-1]


def test_failure_after_a_token_of_a_whole_answer_is_a_status():
    actor = ScriptedActor(lambda _request, _number: one_by_one([*tokens("ab"), failing()]))
    assert actor.complete().status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_one_failed_choice_cancels_the_others(stream):
    actor = ScriptedActor(lambda _request, number: [[failing()]] if number == 1 else [])
    assert actor.complete(n=3, stream=stream).status_code == 503
    assert actor.cancelled == ["gw-abc-1", "gw-abc-1.2"]


def test_a_bug_of_ours_is_a_500_in_the_same_shape():
    actor = ScriptedActor(lambda _request, _number: [tokens("b", start=1)])

    async def client(port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            response = await http.post("/v1/completions", json={"prompt": "a"})
            assert error_of(response) == (500, "server_error", None, "internal_error")

    actor.serve(client)
    assert len(actor.cancelled) == 1


def test_a_finished_stream_is_not_cancelled():
    actor = ScriptedActor(lambda _request, _number: one_by_one([*tokens("ab"), finished()]))
    actor.complete(stream=True)
    actor.complete()
    assert actor.cancelled == []
