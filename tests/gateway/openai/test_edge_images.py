"""Images in chats: what a vLLM is asked to write, what becomes of it, and whatever is refused before."""

import json
from types import SimpleNamespace

import pytest
from scripted_actor import ScriptedActor, events, failing, finished, tokens

from mooncake_zmq.core.messages import (
    MAX_CONSTRAINT_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_RENDERED_BYTES,
    MAX_TOKENS,
    Image,
    Sampling,
    StartPrefill,
    StopRule,
    encode,
)
from mooncake_zmq.gateway.openai import images
from mooncake_zmq.gateway.requests.client_events import Rendered
from mooncake_zmq.gateway.requests.tenants import Limited
from mooncake_zmq.gateway.settings import EdgeSettings
from mooncake_zmq.kv.block_hash import pack_tokens, unpack_tokens
from mooncake_zmq.kv.image_keys import digest_of

CAT, DOG = "data:image/png;base64,Q0FU", "data:image/jpeg;base64,RE9HUw=="
PLACEHOLDER = 9
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def urls_of(chat):
    parts = [part for turn in chat["messages"] if isinstance(turn["content"], list) for part in turn["content"]]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def as_vllm(chat):
    """Write a chat as one token, and three for each image."""
    urls = urls_of(json.loads(chat.chat))
    places = [Image(begin=1 + 4 * at, length=3, digest=digest_of(url)) for at, url in enumerate(urls)]
    return Rendered(pack_tokens([5, *([PLACEHOLDER] * 3 + [6]) * len(urls)]), tuple(places))


def seeing(*, render=as_vllm, says="ok", **changes):
    batches = [[*tokens(says), finished()]]
    return ScriptedActor(lambda _request, _number: batches, max_model_len=4096, render=render, **changes)


def said(*parts):
    return [{"role": "user", "content": [{"type": "text", "text": "look"}, *map(shown, parts)]}]


def shown(url):
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def error_of(response):
    error = response.json()["error"]
    return response.status_code, error["code"], error["message"]


def test_a_chat_with_images_is_written_by_a_vllm_and_its_images_go_with_the_request():
    actor = seeing()
    response = actor.chat(messages=said(CAT, DOG))
    assert response.json()["choices"][0]["message"]["content"] == "ok"
    (chat,) = actor.rendered
    assert chat.images == 2
    asked = json.loads(chat.chat)
    image = {"type": "image_url", "image_url": {"url": CAT}}
    assert asked["messages"][0]["content"][:2] == [{"type": "text", "text": "look"}, image], "without what is not looked at"
    assert (asked["add_generation_prompt"], asked["continue_final_message"]) == (True, False)
    assert [image.url.decode() for image in actor.only.images] == [CAT, DOG]
    assert unpack_tokens(actor.only.tokens) == [5, 9, 9, 9, 6, 9, 9, 9, 6]


def test_two_prompts_of_equal_tokens_and_other_images_share_no_key_from_there_on():
    def keys(*urls):
        actor = seeing()
        actor.chat(messages=said(*urls))
        return actor.only.tokens, actor.only.keys

    tokens_of_cats, cats = keys(CAT, CAT)
    tokens_of_both, both = keys(CAT, DOG)
    assert tokens_of_cats == tokens_of_both
    assert len(cats) == 2
    assert cats[0] == both[0]
    assert cats[1] != both[1]
    assert not set(cats) & set(keys(DOG, DOG)[1])
    assert keys(CAT, DOG)[1] == both


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_are_made_of_one_chat(stream):
    actor = seeing()
    response = actor.chat(messages=said(CAT), n=2, stream=stream)
    assert len(actor.rendered) == 1
    assert len(actor.requests) == 2
    assert all(request.images for request in actor.requests.values())
    if stream:
        assert {each["choices"][0]["index"] for each in events(response)[:-1] if each["choices"]} == {0, 1}


def test_earlier_calls_and_tools_are_sent_as_clients_send_them():
    call = {"type": "function", "id": "x", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "x", "content": [shown(CAT)]},
    ]
    actor = seeing()
    actor.chat(messages=messages, tools=TOOLS, chat_template_kwargs={"a": 1})
    asked = json.loads(actor.rendered[0].chat)
    assert asked["messages"][1]["tool_calls"] == [{**call, "function": {"name": "look", "arguments": '{"at":1}'}}]
    assert asked["messages"][1]["reasoning"] == "hm"
    assert asked["messages"][2]["content"] == [{"type": "image_url", "image_url": {"url": CAT}}]
    assert asked["tools"] == TOOLS
    assert asked["chat_template_kwargs"] == {"a": 1}


def test_other_apis_send_images_of_their_own_shapes():
    source = {"type": "base64", "media_type": "image/png", "data": "Q0FU"}
    image = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "toolu_x", "content": [{"type": "text", "text": "so"}, image]}
    body = {"model": "toy", "max_tokens": 8, "messages": [{"role": "user", "content": [result, image]}]}
    actor = seeing()
    assert actor.call("POST", "/v1/messages", json=body).status_code == 200
    turns = json.loads(actor.rendered[0].chat)["messages"]
    assert [turn["role"] for turn in turns] == ["tool", "user"]
    assert urls_of({"messages": turns}) == [CAT, CAT]
    content = [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": CAT, "detail": "auto"}]
    actor = seeing()
    body = {"model": "toy", "input": [{"role": "user", "content": content}]}
    assert actor.call("POST", "/v1/responses", json=body).status_code == 200
    assert urls_of(json.loads(actor.rendered[0].chat)) == [CAT]


def test_functions_in_a_namespace_are_called_by_both_names_beside_images():
    call = '<tool_call>\n{"name": "here__look", "arguments": {}}\n</tool_call>'
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    content = [{"type": "input_image", "image_url": CAT}]
    body = {"model": "toy", "input": [{"role": "user", "content": content}]}
    body["tools"] = [{"type": "namespace", "name": "here", "tools": [tool]}]
    (called,) = seeing(says=call).call("POST", "/v1/responses", json=body).json()["output"]
    assert (called["namespace"], called["name"]) == ("here", "look")


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("http://169.254.169.254/latest/meta-data", "nothing is fetched from elsewhere"),
        ("https://example.org/cat.png", "nothing is fetched from elsewhere"),
        ("file:///etc/passwd", "nothing is fetched from elsewhere"),
        ("data:text/html;base64,AAAA", "nothing is fetched from elsewhere"),
        ("data:image/png;base64,", "is not base64"),
        ("data:image/png;base64,A\nA", "is not base64"),
        ("data:image/png;base64,AA,http://x", "is not base64"),
        ("", "nothing is fetched from elsewhere"),
    ],
)
def test_what_is_no_data_url_of_an_image_is_refused(url, what):
    actor = seeing()
    status, code, message = error_of(actor.chat(messages=said(url)))
    assert (status, code) == (400, "invalid_value")
    assert what in message
    assert not actor.rendered


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_other_apis_refuse_images_from_elsewhere_too(path):
    url = "https://example.org/cat.png"
    image = {"type": "image", "source": {"type": "url", "url": url}}
    of_responses = {"type": "input_image", "image_url": url}
    bodies = {
        "/v1/messages": {"max_tokens": 8, "messages": [{"role": "user", "content": [image]}]},
        "/v1/responses": {"input": [{"role": "user", "content": [of_responses]}]},
    }
    response = seeing().call("POST", path, json={"model": "toy", **bodies[path]})
    assert response.status_code == 400
    assert "nothing is fetched from elsewhere" in response.text


def test_a_model_without_vllm_takes_no_images():
    actor = ScriptedActor()
    status, code, message = error_of(actor.chat(messages=said(CAT)))
    assert (status, code) == (400, "unsupported_parameter")
    assert "takes no images" in message


def test_too_many_images_are_a_400_and_too_large_ones_a_413():
    assert error_of(seeing().chat(messages=said(*[CAT] * 17)))[:2] == (400, "invalid_value")
    small = EdgeSettings(max_image_bytes=2 * len(CAT))
    assert seeing(settings=small).chat(messages=said(CAT, CAT)).status_code == 200
    assert error_of(seeing(settings=small).chat(messages=said(CAT, DOG)))[:2] == (413, "images_too_large")


def test_a_chat_that_fits_no_message_is_a_413(monkeypatch):
    assert MAX_RENDERED_BYTES == images.MAX_RENDERED_BYTES
    monkeypatch.setattr(images, "MAX_RENDERED_BYTES", 64)
    assert error_of(seeing().chat(messages=said(CAT)))[:2] == (413, "images_too_large")


def test_images_of_all_calls_have_a_limit_and_a_tenant_half_of_it():
    actor = seeing(settings=EdgeSettings(max_image_bytes=100, max_held_image_bytes=4000))
    assert actor.edge.calls.held_image_bytes.take("", 3900)
    status, code, message = error_of(
        actor.call("POST", "/v1/chat/completions", json={"messages": said(CAT, DOG, CAT)}, idle=False)
    )
    assert (status, code) == (503, "overloaded")
    assert "images" in message
    with pytest.raises(Limited, match="bytes of images"):
        actor.edge.calls.held_image_bytes.take("tenant", 2001)
    actor.edge.calls.held_image_bytes.give_back("", 3900)
    actor.check_idle()


def test_images_leave_room_for_the_longest_prompt_and_answer_in_one_message():
    longest, shorter = (SimpleNamespace(max_model_len=tokens, block_tokens=16) for tokens in (MAX_TOKENS, 1 << 17))
    assert images.most_bytes(shorter, EdgeSettings()) == EdgeSettings().max_image_bytes
    image = Image(begin=0, length=1, digest=bytes(16), url=bytes(images.most_bytes(longest, EdgeSettings())))
    request = StartPrefill(
        request_id="r" * 128,
        attempt=1,
        tokens=bytes(4 * MAX_TOKENS),
        root=bytes(16),
        keys=(bytes(16),) * (MAX_TOKENS // 16),
        first_index=0,
        sampling=Sampling(constraint=bytes(MAX_CONSTRAINT_BYTES)),
        stop=StopRule(max_tokens=1),
        decode="d" * 64,
        reuse_blocks=0,
        sources=("s" * 64,) * 16,
        deadline_s=1.0,
        images=(image,),
    )
    assert MAX_MESSAGE_BYTES - (1 << 20) < len(encode(request)) < MAX_MESSAGE_BYTES - (1 << 18)


def test_images_go_with_each_choice_and_count_so_often():
    actor = seeing(settings=EdgeSettings(max_image_bytes=100, max_held_image_bytes=4000, max_choices=128))
    status, code, message = error_of(actor.chat(messages=said(CAT), n=128))
    assert (status, code, "128 choices" in message) == (413, "images_too_large", True)


def test_what_the_vllm_refuses_or_cannot_do_is_the_calls_error():
    for status in (400, 503):
        actor = seeing(render=lambda chat, status=status: failing(status=status))
        response = actor.chat(messages=said(CAT), stream=True)
        assert error_of(response) == (status, "no_decode", "no decode node")
        assert not actor.requests


def test_a_prompt_with_images_that_is_too_long_is_refused_when_its_tokens_are_known():
    actor = seeing(render=lambda chat: Rendered(pack_tokens([5] * 5000), as_vllm(chat).images))
    assert error_of(actor.chat(messages=said(CAT)))[:2] == (400, "context_length_exceeded")
    assert error_of(seeing().chat(messages=said(CAT), truncate_prompt_tokens=3))[:2] == (400, "invalid_value")


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_tokens_of_images_are_not_counted_without_a_vllm(path):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "Q0FU"}}
    messages = said(CAT) if path == "/tokenize" else [{"role": "user", "content": [image]}]
    response = seeing().call("POST", path, json={"model": "toy", "messages": messages})
    assert response.status_code == 400
    assert "tokens of an image" in response.text


def test_settings_beyond_what_a_message_holds_are_refused():
    for wrong in ({"max_images": 65}, {"max_image_bytes": 5 << 20}, {"max_held_image_bytes": 1 << 20}):
        with pytest.raises(ValueError, match="max_"):
            EdgeSettings(**wrong)
