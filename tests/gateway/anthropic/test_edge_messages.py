"""Anthropic's Messages API: bodies become chats, answers have its shapes and events, and so do refusals."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_actor import PLACES, TWO_CALLS, ScriptedActor, cut, finished, saying, tokens

from mooncake_zmq.gateway.http.call_key import authorization_of
from mooncake_zmq.gateway.requests.client_events import Failed, TokenOut
from mooncake_zmq.gateway.requests.tenants import Tenant, Tenants, digest_of
from mooncake_zmq.gateway.settings import EdgeSettings

HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"name": "weather", "description": "of a place", "input_schema": PLACES},
    {"name": "clock", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
]
FUNCTIONS = [
    {"type": "function", "function": {"name": "weather", "description": "of a place", "parameters": PLACES}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}},
]
CALLS = [("weather", {"place": "Bern"}), ("clock", {})]


def ask(actor: ScriptedActor, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    return actor.call("POST", path, json={"model": "toy", "max_tokens": 64, "messages": HI, **body})


def error_of(response: httpx.Response) -> tuple[int, str]:
    body = response.json()
    assert list(body) == ["type", "error"]
    assert body["type"] == "error"
    assert body["error"]["message"]
    return response.status_code, body["error"]["type"]


def events_of(raw: str) -> list[dict[str, Any]]:
    """Parse a stream, each of whose events is named as its type."""
    found = []
    for part in raw.split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Put a message together as a client does, and check the order of its events."""
    assert (events[0]["type"], [each["type"] for each in events[-2:]]) == ("message_start", ["message_delta", "message_stop"])
    message, begun = events[0]["message"], None
    for each in events[1:-2]:
        match each["type"]:
            case "content_block_start":
                assert begun is None
                begun = each["index"]
                assert begun == len(message["content"])
                message["content"].append(dict(each["content_block"]))
                arguments = ""
            case "content_block_delta":
                assert each["index"] == begun
                if each["delta"]["type"] == "text_delta":
                    message["content"][begun]["text"] += each["delta"]["text"]
                else:
                    arguments += each["delta"]["partial_json"]
            case "content_block_stop":
                assert each["index"] == begun
                if message["content"][begun]["type"] == "tool_use":
                    message["content"][begun]["input"] = json.loads(arguments or "{}")
                begun = None
    assert begun is None
    message |= events[-2]["delta"]
    message["usage"] |= events[-2]["usage"]
    return message


def test_a_message_is_answered_in_its_shape_and_its_usage_tells_what_the_cache_had() -> None:
    actor = saying("hello there")
    answer = ask(actor, system="be brief").json()
    assert answer["id"].startswith("msg_")
    assert {name: answer[name] for name in ("type", "role", "model", "stop_reason", "stop_sequence")} == {
        "type": "message",
        "role": "assistant",
        "model": "toy",
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert answer["content"] == [{"type": "text", "text": "hello there"}]
    usage = answer["usage"]
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"], usage["output_tokens"]) == (4, 0, 11)
    assert usage["input_tokens"] + 4 == len(actor.only.tokens) // 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "reason", "asked", "wanted"),
    [
        ("ok", "stop", {}, ("end_turn", None)),
        ("ok", "length", {}, ("max_tokens", None)),
        ("so.END more", "stop", {"stop_sequences": ["x", "END"]}, ("stop_sequence", "END")),
        (TWO_CALLS, "stop", {"tools": TOOLS}, ("tool_use", None)),
        ("", "stop", {}, ("end_turn", None)),
    ],
)
def test_the_reason_of_the_end_is_named_as_the_api_names_it(
    text: str, reason: str, asked: dict[str, Any], wanted: tuple[str, str | None], stream: bool
) -> None:
    response = ask(saying(text, reason), stream=stream, **asked)
    answer = accumulated(events_of(response.text)) if stream else response.json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == wanted


@given(st.lists(st.integers(1, 9), max_size=40), st.booleans())
@settings(max_examples=40)
def test_a_stream_says_what_the_whole_answer_says_however_it_is_cut(cuts: list[int], with_tools: bool) -> None:
    batches = cut([*tokens(TWO_CALLS), finished()], cuts)
    body = {"tools": TOOLS} if with_tools else {}
    whole = ask(saying(TWO_CALLS), **body).json()
    actor = ScriptedActor(lambda _request, _number: batches, max_model_len=4096)
    streamed = accumulated(events_of(ask(actor, stream=True, **body).text))
    for message in (whole, streamed):
        for block in message["content"]:
            block.pop("id", None)
        message.pop("id")
    assert streamed == whole
    assert len(whole["content"]) == (3 if with_tools else 1)


def test_calls_of_tools_are_blocks_and_their_ids_and_results_come_back_to_the_model() -> None:
    first = ask(saying(TWO_CALLS), tools=TOOLS, tool_choice={"type": "auto"}).json()
    assert first["content"][0] == {"type": "text", "text": "Let me see. "}
    calls = first["content"][1:]
    assert [(call["name"], call["input"]) for call in calls] == CALLS
    assert all(call["id"].startswith("toolu_") for call in calls)
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": f"{call['name']} says so"} for call in calls]
    thoughts = [{"type": "thinking", "thinking": "hm", "signature": "s"}]
    later = [
        *HI,
        {"role": "assistant", "content": thoughts + first["content"]},
        {"role": "user", "content": [*results, {"type": "text", "text": "and now?"}]},
    ]
    ours, theirs = saying("fine"), saying("fine")
    assert ask(ours, tools=TOOLS, messages=later).json()["content"] == [{"type": "text", "text": "fine"}]
    functions = [
        {"id": call["id"].removeprefix("toolu_"), "type": "function"}
        | {"function": {"name": call["name"], "arguments": json.dumps(call["input"])}}
        for call in calls
    ]
    chat = [
        *HI,
        {"role": "assistant", "content": "Let me see. ", "tool_calls": functions},
        *({"role": "tool", "tool_call_id": each["id"], "content": f"{each['function']['name']} says so"} for each in functions),
        {"role": "user", "content": "and now?"},
    ]
    assert theirs.chat(messages=chat, tools=FUNCTIONS).status_code == 200
    assert ours.prompt == theirs.prompt, "the same conversation is the same prompt by either API"
    assert ours.only.keys == theirs.only.keys


def test_a_system_prompt_in_parts_is_one_and_a_final_answer_is_continued() -> None:
    actor, chat = saying("!"), saying("!")
    parts = [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "brief"}]
    begun = [*HI, {"role": "assistant", "content": "I am"}]
    assert ask(actor, system=parts, messages=begun).status_code == 200
    turns = [{"role": "system", "content": "be\nbrief"}, *begun]
    assert chat.chat(messages=turns, continue_final_message=True).status_code == 200
    assert actor.prompt == chat.prompt
    assert actor.prompt.endswith("I am")


def test_settings_reach_the_sampler_and_more_tokens_than_there_is_room_for_are_as_many_as_there_is() -> None:
    actor = saying("ok")
    assert ask(actor, max_tokens=32_000, temperature=0.5, top_p=0.9, top_k=3, seed=7).status_code == 200
    sampling = actor.only.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 3, 7)
    assert actor.only.stop.max_tokens == 4096 - len(actor.only.tokens) // 4
    assert saying("ok").chat(max_tokens=32_000).status_code == 400, "a chat says so instead"


@pytest.mark.parametrize(
    ("choice", "must"),
    [({"type": "any"}, True), ({"type": "tool", "name": "clock"}, True), ({"type": "auto"}, False), ({"type": "none"}, False)],
)
def test_a_call_that_must_be_is_held_to_a_grammar(choice: dict[str, str], must: bool) -> None:
    actor = saying(TWO_CALLS)
    assert ask(actor, tools=TOOLS, tool_choice=choice).status_code == 200
    assert bool(actor.only.sampling.constraint) == must


def test_tokens_are_counted_as_the_prompt_has_them() -> None:
    actor = saying("ok")
    asked = {"system": "be brief", "tools": TOOLS}
    counted = ask(saying(""), "/v1/messages/count_tokens", **asked).json()
    assert ask(actor, **asked).status_code == 200
    assert counted == {"input_tokens": len(actor.only.tokens) // 4}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]}, "image"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": [1]}]}]}, "arguments"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 5000}]}, "parts"),
        ({"messages": HI * 5000}, "context length"),
        ({"system": 7}, "system"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [1]}, "stop"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ],
)
def test_what_cannot_be_done_is_refused_in_the_api_s_shape(body: dict[str, Any], names: str) -> None:
    response = ask(saying("ok"), **body)
    assert error_of(response) == (400, "invalid_request_error")
    assert names in response.json()["error"]["message"]


def test_other_errors_have_the_api_s_types() -> None:
    assert error_of(ask(saying("ok"), model="other")) == (404, "not_found_error")
    assert error_of(saying("ok").call("GET", "/v1/messages")) == (405, "invalid_request_error")
    assert error_of(saying("ok").call("POST", "/v1/messages", content=b"{")) == (400, "invalid_request_error")
    failing = ScriptedActor(lambda _request, _number: [[Failed(status=503, code="no_room", message="full")]])
    response = ask(failing, max_tokens=2)
    assert error_of(response) == (503, "overloaded_error")
    assert "retry-after" in response.headers
    large = saying("ok", settings=EdgeSettings(max_body_bytes=1024))
    assert error_of(ask(large, system="x" * 2000)) == (413, "request_too_large")


def test_an_answer_that_fails_half_way_ends_with_an_error_event() -> None:
    failing = [[TokenOut(0, ord("a"))], [Failed(status=502, code="lost", message="gone")]]
    events = events_of(ask(ScriptedActor(lambda _request, _number: failing), max_tokens=8, stream=True).text)
    assert [each["type"] for each in events] == ["message_start", "content_block_start", "content_block_delta", "error"]
    assert events[-1]["error"] == {"type": "api_error", "message": "gone"}


def test_unknown_members_are_ignored_as_clients_send_new_ones() -> None:
    more = {"metadata": {"user_id": "u"}, "thinking": {"type": "adaptive"}, "context_management": {}, "new_in_2027": 1}
    assert ask(saying("ok"), **more).status_code == 200


def test_a_key_may_come_in_x_api_key() -> None:
    assert authorization_of([(b"x-api-key", b"k"), (b"host", b"h")]) == b"Bearer k"
    assert authorization_of([(b"x-api-key", b"k"), (b"authorization", b"Bearer a")]) == b"Bearer a"
    assert authorization_of([(b"host", b"h")]) == b""
    actor = ScriptedActor()
    actor.edge.tenants = Tenants([Tenant(name="alice", digest=digest_of("alice"))], slots=8)
    body = {"max_tokens": 2, "messages": HI}
    assert actor.call("POST", "/v1/messages", json=body, headers={"x-api-key": "alice"}).status_code == 200
    refused = actor.call("POST", "/v1/messages", json=body, headers={"x-api-key": "mallory"})
    assert error_of(refused) == (401, "authentication_error")
