"""What clients receive: whole bodies, streams, usage, token ids, several choices."""

import json

import numpy as np
import pytest
from scripted_actor import EOS, ScriptedActor, events, finished, one_by_one, tokens

from mooncake_zmq.gateway.requests.client_events import TokenOut
from mooncake_zmq.kv.block_hash import extend_keys, namespace, pack_tokens, unpack_tokens

USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 3,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 4},
}
SERVED = {
    "cached_own": 1,
    "cached_local": 2,
    "cached_remote": 1,
    "prefill": "prefill-0",
    "decode": "decode-0",
    "attempts": 1,
    "relocations": 0,
    "request": "gw-abc-1",
}


def hey(_request, _number):
    return one_by_one([*tokens("hé"), finished("length", completion_tokens=3)])


def test_a_whole_completion():
    response = ScriptedActor(hey).complete(max_tokens=3)
    body = response.json()
    assert body.pop("created") > 1_600_000_000
    assert body.pop("id") == "cmpl-" + response.headers["x-request-id"]
    assert body == {
        "object": "text_completion",
        "model": "toy",
        "choices": [{"index": 0, "text": "hé", "logprobs": None, "finish_reason": "length"}],
        "usage": USAGE,
        "mooncake": SERVED,
    }


@pytest.mark.parametrize(
    ("codec", "reused", "attempts", "approximate"),
    [("int8", 4, 1, False), ("k8v4", 0, 2, True), ("int4", 0, 1, False), ("int4", 4, 1, True), ("int4", 0, 2, True)],
)
def test_an_answer_says_how_blocks_held_its_kv_and_whether_it_may_differ_for_that(codec, reused, attempts, approximate):
    """One that moved was computed in other chunks, where a code may be another one; at int4 KV that was loaded differs too."""
    end = {"completion_tokens": 3, "cached_own": 0, "cached_local": reused, "cached_remote": 0, "attempts": attempts}
    actor = ScriptedActor(lambda *_: one_by_one([*tokens("hé"), finished("length", **end)]), kv_codec=codec)
    served = actor.complete(max_tokens=3).json()["mooncake"]
    assert served["kv_codec"] == codec
    assert served["kv_bytes_per_token"] == 90
    assert served["approximate"] is approximate
    ends = iter((1, attempts))
    actor = ScriptedActor(
        lambda *_: one_by_one([*tokens("hé"), finished("length", **end | {"attempts": next(ends)})]), kv_codec=codec
    )
    served = actor.complete(max_tokens=3, n=2).json()["mooncake"]
    assert served["approximate"] is approximate, "whichever of the choices moved"


def test_an_answer_over_kv_of_other_prompts_says_so_whichever_choice_it_was():
    ends = iter(({}, {"parts": 3, "recomputed": 1}))
    actor = ScriptedActor(lambda *_: one_by_one([*tokens("hé"), finished("length", completion_tokens=3, **next(ends))]))
    served = actor.complete(max_tokens=3, n=2).json()["mooncake"]
    assert {name: served[name] for name in ("approximate", "cached_parts", "recomputed")} == {
        "approximate": True,
        "cached_parts": 0,
        "recomputed": 0,
    }
    actor = ScriptedActor(
        lambda *_: one_by_one([*tokens("hé"), finished("length", completion_tokens=3, parts=3, recomputed=1)])
    )
    body = actor.complete(max_tokens=3).json()
    assert body["mooncake"] == SERVED | {"approximate": True, "cached_parts": 3, "recomputed": 1}
    assert body["usage"] == USAGE, "those that are cached exactly"
    streamed = events(actor.complete(max_tokens=3, stream=True, stream_options={"include_usage": True}))
    assert [event["mooncake"]["approximate"] for event in streamed[:-1] if "mooncake" in event] == [True]


def test_an_answer_says_of_how_many_tokens_other_decodes_held_the_kv():
    actor = ScriptedActor(lambda *_: one_by_one([*tokens("hé"), finished("length", completion_tokens=3, borrowed_tokens=64)]))
    assert actor.complete(max_tokens=3).json()["mooncake"] == SERVED | {"borrowed_tokens": 64}


@pytest.mark.parametrize(
    ("path", "body", "exact"),
    [
        ("/v1/completions", {"prompt": "hello"}, False),
        ("/v1/completions", {"prompt": "hello", "exact": True}, True),
        ("/v1/completions", {"prompt": "hello", "stream": True}, True),
        ("/v1/completions", {"prompt": "hello", "stream": True, "stream_options": {"include_usage": True}}, False),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}, True),
        ("/v1/responses", {"input": "hi"}, True),
    ],
)
def test_whoever_refuses_an_approximate_answer_or_could_not_be_told_gets_none(path, body, exact):
    actor = ScriptedActor(hey, max_model_len=4096)
    assert actor.call("POST", path, json={"model": "toy", **body}).status_code == 200
    assert actor.only.exact is exact


def test_a_whole_chat():
    actor = ScriptedActor(hey)
    body = actor.chat(max_completion_tokens=3).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-gw-abc-")
    message = {"role": "assistant", "content": "hé"}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert unpack_tokens(actor.only.tokens) == [258, *b"hi", 256, 259]
    assert actor.only.stop.max_tokens == 3


def test_a_streamed_completion_byte_by_byte():
    response = ScriptedActor(hey).complete(stream=True, max_tokens=3)
    created = json.loads(response.text.split("\n\n")[0][6:])["created"]
    head = f'"id":"cmpl-{response.headers["x-request-id"]}","object":"text_completion","created":{created},"model":"toy"'

    def chunk(text: str, reason: str) -> str:
        said = f'{{"index":0,"text":"{text}","logprobs":null,"finish_reason":{reason}}}'
        return f'data: {{{head},"choices":[{said}]}}\n\n'

    # The first byte of "é" is held back: it is no character yet.
    assert response.text == chunk("h", "null") + chunk("é", "null") + chunk("", '"length"') + "data: [DONE]\n\n"
    assert response.headers["cache-control"] == "no-cache"


def test_a_streamed_chat():
    chunks = events(ScriptedActor(hey).chat(stream=True, max_tokens=3))
    assert chunks.pop() == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"][0] for chunk in chunks] == [
        {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        for delta, reason in (
            ({"role": "assistant", "content": ""}, None),
            ({"content": "h"}, None),
            ({"content": "é"}, None),
            ({}, "length"),
        )
    ]
    assert not any("usage" in chunk for chunk in chunks)


def test_tokens_that_come_together_make_one_chunk():
    actor = ScriptedActor(lambda _request, _number: [[*tokens("hey"), finished()]])
    chunks = events(actor.complete(stream=True))
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks[:-1]] == [("hey", "stop")]


def test_usage_comes_last_and_only_if_asked_for():
    chunks = events(ScriptedActor(hey).complete(stream=True, max_tokens=3, stream_options={"include_usage": True}))
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert (chunks[-2]["usage"], chunks[-2]["mooncake"]) == (USAGE, SERVED)
    assert not any("usage" in chunk for chunk in chunks[:-2])


def test_continuous_usage():
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(ScriptedActor(hey).complete(stream=True, max_tokens=3, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]] == [1, 2, 3, 3, 3]
    assert chunks[0]["usage"] == {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_sequence_is_counted_but_not_shown(stream):
    actor = ScriptedActor(lambda _request, _number: [[*tokens("a"), TokenOut(1, EOS), finished()]])
    response = actor.complete(stream=stream, return_token_ids=True)
    body = events(response)[0] if stream else response.json()
    assert body["choices"][0]["text"] == "a"
    assert body["choices"][0]["token_ids"] == [97, 256]


def test_token_ids_in_and_out():
    prompt = [1, 2, 3, 4, 5]
    actor = ScriptedActor(hey)
    choice = actor.complete(prompt=prompt, max_tokens=3, return_token_ids=True).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, list("hé".encode()))
    assert actor.only.tokens == np.asarray(prompt, dtype="<i4").tobytes()

    chunks = events(ScriptedActor(hey).complete(prompt=prompt, max_tokens=3, stream=True, return_token_ids=True))[:-1]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[104], [0xC3], [0xA9], []]
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks] == [prompt, None, None, None]


MADE = ((None, 0, 1), ("step-7", 1, 2))
SPANS = [{"version": None, "start": 0, "end": 1}, {"version": "step-7", "start": 1, "end": 2}]


@pytest.mark.parametrize("ask", [ScriptedActor.complete, ScriptedActor.chat])
def test_a_choice_says_which_weights_made_its_tokens_and_a_stream_with_its_last_chunk(ask):
    def answer(_request, _number):
        return one_by_one([*tokens("ab"), finished(versions=MADE)])

    assert ask(ScriptedActor(answer)).json()["choices"][0]["weight_versions"] == SPANS
    choices = [chunk["choices"][0] for chunk in events(ask(ScriptedActor(answer), stream=True))[:-1]]
    assert [choice.get("weight_versions") for choice in choices] == [None] * (len(choices) - 1) + [SPANS]
    assert choices[-1]["finish_reason"] == "stop"


def test_versions_reach_no_further_than_the_answer_that_a_client_gets():
    def answer(_request, _number):
        return one_by_one([*tokens("ab"), finished(versions=(("one", 0, 2),))])

    choice = ScriptedActor(answer).complete(prompt="x", max_tokens=0, echo=True).json()["choices"][0]
    assert "weight_versions" not in choice


def test_token_ids_of_a_chat():
    prompt = [258, *b"hi", 256, 259]
    body = ScriptedActor(hey).chat(return_token_ids=True).json()
    assert (body["prompt_token_ids"], body["choices"][0]["token_ids"]) == (prompt, list("hé".encode()))
    chunks = events(ScriptedActor(hey).chat(stream=True, return_token_ids=True))[:-1]
    assert chunks[0]["prompt_token_ids"] == prompt
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == list("hé".encode())


def test_several_prompts_and_choices():
    def numbered(_request, number):
        return one_by_one([*tokens(str(number)), finished(completion_tokens=1)])

    actor = ScriptedActor(numbered)
    body = actor.complete(prompt=["ab", "c"], n=2, seed=7).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "0"), (1, "1"), (2, "2"), (3, "3")]
    sent = [(unpack_tokens(request.tokens), request.sampling.seed) for request in actor.requests.values()]
    assert sent == [([97, 98], 7), ([97, 98], 8), ([99], 7), ([99], 8)]
    (call,) = {request.call for request in actor.requests.values()}
    assert call == next(iter(actor.requests)), "none is refused for what the others take"
    assert body["usage"]["prompt_tokens"] == 3  # each prompt once
    assert body["usage"]["completion_tokens"] == 4
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert body["mooncake"]["cached_local"] == 4


def test_streamed_choices_each_begin_and_end_once():
    def one_late(_request, number):
        wait = [[]] * (3 * number)
        return [*wait, *one_by_one([*tokens("xyz"[: number + 1]), finished()])]

    chunks = events(ScriptedActor(one_late).chat(stream=True, n=3))[:-1]
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["delta"].get("role") for choice in own].count("assistant") == 1
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in own) == "xyz"[: index + 1]
        assert [choice["finish_reason"] for choice in own].count("stop") == 1
        assert own[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("prompt", ["hello", list(b"hello")])
@pytest.mark.parametrize("stream", [False, True])
def test_echo(prompt, stream):
    response = ScriptedActor().complete(prompt=prompt, echo=True, stream=stream)
    body = events(response)[0] if stream else response.json()
    assert body["choices"][0]["text"] == "hellook"


def test_the_request_as_the_actor_sees_it():
    actor = ScriptedActor()
    actor.complete(
        prompt="0123456789",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        seed=-1,
        ignore_eos=True,
        min_tokens=2,
        cache_salt="tenant",
        user="x",
        presence_penalty=0.1,
        repetition_penalty=1.5,
        min_p=0.2,
        logit_bias={"7": 3},
        priority=3,
    )
    request = actor.only
    assert (request.stop.max_tokens, request.stop.min_tokens, request.stop.eos_ids) == (7, 2, ())
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.9, 0)
    assert request.sampling.seed == (1 << 63) - 1
    assert (request.sampling.presence_penalty, request.sampling.repetition_penalty, request.sampling.min_p) == (0.1, 1.5, 0.2)
    assert (request.sampling.logit_bias, request.sampling.prompt_tokens) == (((7, 3.0),), 10)
    root = namespace(model="weights", layout="layout", salt="tenant")
    assert request.root == root != namespace(model="weights", layout="layout")
    assert request.keys == tuple(extend_keys(root, pack_tokens(list(b"0123456789")), 4))
    assert len(request.keys) == 2


def test_defaults_are_openais():
    actor = ScriptedActor()
    actor.complete()
    assert actor.only.sampling.temperature == 1.0
    assert (actor.only.stop.max_tokens, actor.only.stop.eos_ids) == (16, (EOS,))
    clipped = ScriptedActor(max_model_len=12)
    clipped.complete(max_tokens=None, stop=None, n=None, seed=None, temperature=None, stream=None, stream_options=None)
    assert clipped.only.stop.max_tokens == 7
    chat = ScriptedActor()
    chat.chat()
    assert chat.only.stop.max_tokens == 64 - 5
    assert (chat.only.ttft_slo_s, chat.only.tbt_slo_s, chat.only.priority) == (None, None, 0)


def test_a_drawn_seed_differs_each_time():
    actor = ScriptedActor()
    for _ in range(3):
        actor.complete()
    assert len({request.sampling.seed for request in actor.requests.values()}) == 3
    assert len(actor.requests) == 3


def test_text_parts_of_a_message():
    actor = ScriptedActor()
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": content}, {"role": "assistant", "content": None}]
    assert actor.chat(messages=messages).status_code == 200
    assert unpack_tokens(actor.only.tokens) == [257, *b"a\nb", 256, 259, 256, 259]


def test_a_long_body_is_tokenized_in_a_thread():
    actor = ScriptedActor(max_model_len=100_000)
    assert actor.complete(prompt="x" * 50_000).status_code == 200
    assert len(actor.only.tokens) == 200_000


def test_request_ids_are_our_own_and_the_clients_is_echoed():
    actor = ScriptedActor()
    response = actor.call(
        "POST", "/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine", "traceparent": "00-ab-cd-01"}
    )
    assert response.headers["x-request-id"] == "mine"
    assert "mine" not in response.json()["id"]
    assert list(actor.requests) == ["gw-abc-1"]
    assert actor.call("GET", "/live").headers["x-request-id"].startswith("gw-abc-")
    assert actor.call("GET", "/live", headers={"x-request-id": "x" * 300}).headers["x-request-id"].startswith("gw-abc-")


def test_slos_in_seconds_and_a_priority_go_with_the_request():
    actor = ScriptedActor()
    actor.complete(ttft_slo=2, tbt_slo=0.05, priority=-3)
    assert (actor.only.ttft_slo_s, actor.only.tbt_slo_s, actor.only.priority) == (2.0, 0.05, -3)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("ids", [False, True])
def test_tokens_said_at_once_look_as_all_others_do(chat, ids):
    """A chunk put together of what was written once is the chunk that would be written anew."""
    actor = ScriptedActor(lambda _request, _number: [*one_by_one(tokens("hé\u2028llo")), [finished()]])
    ask = actor.chat if chat else actor.complete
    chunks = events(ask(stream=True, return_token_ids=ids))[:-1]
    said = [
        chunk for chunk in chunks if chunk["choices"][0].get("delta", chunk["choices"][0]).get("content" if chat else "text")
    ]
    first = said[0]
    assert len(said) == 6
    for chunk in said:
        assert chunk.keys() - {"prompt_token_ids"} == first.keys() - {"prompt_token_ids"}
        assert chunk["choices"][0].keys() - {"prompt_token_ids"} == first["choices"][0].keys() - {"prompt_token_ids"}
        assert (chunk["id"], chunk["model"], chunk["object"]) == (first["id"], first["model"], first["object"])
    texts = [chunk["choices"][0]["delta"]["content"] if chat else chunk["choices"][0]["text"] for chunk in said]
    assert texts == ["h", "é", "\u2028", "l", "l", "o"]
    if ids:
        told = [each for chunk in chunks for each in chunk["choices"][0].get("token_ids", [])]
        assert told == [*"hé\u2028llo".encode()]
