"""OpenAI's Responses API: bodies become chats, answers have its shapes and events, and nothing kept is asked for."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_actor import PLACES, TWO_CALLS, ScriptedActor, cut, finished, saying, tokens

from mooncake_zmq.gateway.requests.client_events import Failed, TokenOut

TOOLS = [
    {"type": "function", "name": "weather", "description": "of a place", "parameters": PLACES},
    {"type": "function", "name": "clock", "parameters": {"type": "object"}, "strict": False},
]
FUNCTIONS = [{"type": "function", "function": {name: said for name, said in tool.items() if name != "type"}} for tool in TOOLS]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def ask(actor: ScriptedActor, **body: Any) -> httpx.Response:
    return actor.call("POST", "/v1/responses", json={"model": "toy", "input": "hi", **body})


def events_of(raw: str) -> list[dict[str, Any]]:
    found = []
    for number, part in enumerate(raw.split("\n\n")[:-1]):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
    return found


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Put a response together from its deltas, as a client does, and check that its ends repeat it."""
    assert [each["type"] for each in events[:2]] == ["response.created", "response.in_progress"]
    output: list[dict[str, Any]] = []
    for each in events[2:-1]:
        kind = each["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert each["output_index"] == len(output)
            output.append(each["item"])
            continue
        item = output[each["output_index"]]
        if kind == "content_part.added":
            item["content"].append(each["part"])
        elif kind == "output_text.delta":
            item["content"][each["content_index"]]["text"] += each["delta"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += each["delta"]
        elif kind == "output_text.done":
            assert item["content"][0]["text"] == each["text"]
        elif kind == "content_part.done":
            assert item["content"][0] == each["part"]
        elif kind == "function_call_arguments.done":
            assert (item["arguments"], item["name"]) == (each["arguments"], each["name"])
        else:
            assert kind == "output_item.done"
            item["status"] = each["item"]["status"]
            assert item == each["item"]
    last: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert last["output"] == output
    return last


def test_a_response_is_answered_in_its_shape_with_its_usage() -> None:
    actor = saying("hello there")
    answer = ask(actor, instructions="be brief", temperature=0.5).json()
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "toy")
    assert (answer["store"], answer["temperature"], answer["tool_choice"]) == (False, 0.5, "auto")
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "hello there", "annotations": [], "logprobs": []}]
    assert answer["usage"]["input_tokens"] == len(actor.only.tokens) // 4
    assert answer["usage"]["input_tokens_details"] == {"cached_tokens": 4}
    assert answer["usage"]["output_tokens"] == 11


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut_is_incomplete(stream: bool) -> None:
    response = ask(saying("ok", "length"), stream=stream, max_output_tokens=2)
    answer = accumulated(events_of(response.text)) if stream else response.json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["max_output_tokens"] == 2


@given(st.lists(st.integers(1, 9), max_size=40), st.booleans())
@settings(max_examples=40)
def test_a_stream_says_what_the_whole_answer_says_however_it_is_cut(cuts: list[int], with_tools: bool) -> None:
    batches = cut([*tokens(TWO_CALLS), finished()], cuts)
    body = {"tools": TOOLS} if with_tools else {}
    whole = ask(saying(TWO_CALLS), **body).json()
    actor = ScriptedActor(lambda _request, _number: batches, max_model_len=4096)
    streamed = accumulated(events_of(ask(actor, stream=True, **body).text))
    for response in (whole, streamed):
        for name in ("id", "created_at"):
            response.pop(name)
        for item in response["output"]:
            item.pop("id")
            item.pop("call_id", None)
    assert streamed == whole
    assert len(whole["output"]) == (3 if with_tools else 1)


def test_calls_are_items_and_come_back_to_the_model_with_their_outputs_as_in_a_chat() -> None:
    first = ask(saying(TWO_CALLS), tools=TOOLS).json()["output"]
    text, *calls = first
    assert [(call["type"], call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("function_call", "weather", {"place": "Bern"}),
        ("function_call", "clock", {}),
    ]
    outputs = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": f"{call['name']} says so"} for call in calls
    ]
    later = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        *first,
        *outputs,
        {"role": "user", "content": "and now?"},
    ]
    ours, theirs = saying("fine"), saying("fine")
    assert ask(ours, input=later, tools=TOOLS, instructions="You are the toy.").status_code == 200
    made = [
        {"id": call["call_id"].removeprefix("call_"), "type": "function"}
        | {"function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in calls
    ]
    chat = [
        {"role": "system", "content": "You are the toy.\n\nbe brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": text["content"][0]["text"], "tool_calls": made},
        *({"role": "tool", "tool_call_id": each["id"], "content": f"{each['function']['name']} says so"} for each in made),
        {"role": "user", "content": "and now?"},
    ]
    assert theirs.chat(messages=chat, tools=FUNCTIONS).status_code == 200
    assert ours.prompt == theirs.prompt, "the same conversation is the same prompt by either API"
    assert ours.only.keys == theirs.only.keys


def test_functions_in_a_namespace_are_seen_with_it_and_called_by_both_names() -> None:
    spaces = [
        {"type": "namespace", "name": "mcp__here", "description": "What is near.", "tools": TOOLS},
        {"type": "namespace", "name": "mcp__there", "tools": [TOOLS[1]]},
        {"type": "web_search", "external_web_access": True},
    ]
    said = '<tool_call>\n{"name": "mcp__here__weather", "arguments": {"place": "Bern"}}\n</tool_call>'
    actor = saying(said)
    (call,) = ask(actor, tools=spaces).json()["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("mcp__here", "weather", '{"place": "Bern"}')
    prompt = actor.prompt
    assert all(f'"{name}"' in prompt for name in ("mcp__here__weather", "mcp__here__clock", "mcp__there__clock"))
    assert ("What is near." in prompt, "web_search" in prompt) == (True, False)

    whole = accumulated(events_of(ask(saying(said), tools=spaces, stream=True).text))
    assert [(each["namespace"], each["name"]) for each in whole["output"]] == [("mcp__here", "weather")]

    back = saying("fine")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    ask(back, tools=spaces, input=[{"role": "user", "content": "hi"}, call, output])
    assert back.prompt.count("mcp__here__weather") == 2, "among the tools, and in the turn that called it"


def test_two_functions_that_the_model_would_see_under_one_name_are_refused() -> None:
    plain = {"type": "function", "name": "a__b", "parameters": {"type": "object"}}
    spaces = [
        {"type": "namespace", "name": name, "tools": [{**plain, "name": inner}]} for name, inner in (("a", "b"), ("a__b", "c"))
    ]
    other = {"type": "namespace", "name": "a", "tools": [{**plain, "name": "b__c"}]}
    for tools in ([plain, spaces[0]], [spaces[1], other]):
        assert "two functions" in ask(ScriptedActor(), tools=tools).json()["error"]["message"]
    unnamed = {"type": "namespace", "name": "", "tools": [plain]}
    actor = saying('<tool_call>\n{"name": "a__b", "arguments": {}}\n</tool_call>')
    (call,) = ask(actor, tools=[unnamed]).json()["output"]
    assert (call["name"], "namespace" in call) == ("a__b", False)


def test_a_system_prompt_alone_is_a_conversation_as_in_a_chat() -> None:
    ours, theirs = saying("fine"), saying("fine")
    assert ask(ours, input=[{"role": "developer", "content": "say fine"}]).status_code == 200
    assert theirs.chat(messages=[{"role": "system", "content": "say fine"}]).status_code == 200
    assert ours.prompt == theirs.prompt


@pytest.mark.parametrize(
    ("asked", "held"),
    [
        ({}, False),
        ({"text": {"format": {"type": "text"}}}, False),
        ({"text": {"format": {"type": "json_object"}}}, True),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}}, True),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "clock"}}, True),
        ({"tools": TOOLS, "tool_choice": "auto"}, False),
    ],
)
def test_an_answer_with_a_form_is_held_to_a_grammar(asked: dict[str, Any], held: bool) -> None:
    actor = saying("{}")
    response = ask(actor, **asked)
    assert response.status_code == 200, response.text
    assert bool(actor.only.sampling.constraint) == held
    assert response.json()["tool_choice"] == asked.get("tool_choice", "auto")


def test_settings_reach_the_sampler_and_what_is_unknown_is_ignored() -> None:
    actor = saying("ok")
    more = {"include": ["reasoning.encrypted_content"], "store": True, "metadata": {"a": "b"}, "new_in_2027": 1}
    more |= {"reasoning": {"effort": "low", "summary": "auto"}, "prompt_cache_key": "k", "background": False}
    assert ask(actor, max_output_tokens=7, temperature=0.5, top_p=0.9, seed=7, **more).status_code == 200
    sampling = actor.only.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 7)
    assert actor.only.stop.max_tokens == 7


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": []}, "input", "invalid_value"),
        ({"input": 3}, "input", "invalid_value"),
        ({"input": [{"content": "x"}]}, "input", "invalid_value"),
        ({"input": [{"role": "user", "content": "x"}] * 5000}, "input", "context_length_exceeded"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "unsupported_parameter"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "unsupported_parameter"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"tools": [{"type": "file_search"}]}, "tools", "unsupported_parameter"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools", "unsupported_parameter"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice", "unsupported_parameter"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_output_tokens": 5000}, "max_completion_tokens", "context_length_exceeded"),
    ],
)
def test_what_cannot_be_done_is_refused(body: dict[str, Any], param: str, code: str) -> None:
    response = ask(saying("ok"), **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)


def test_an_answer_that_fails_half_way_ends_with_a_failed_response() -> None:
    failing = [[TokenOut(0, ord("a"))], [Failed(status=502, code="lost", message="gone")]]
    events = events_of(ask(ScriptedActor(lambda _request, _number: failing), max_output_tokens=8, stream=True).text)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"] == {"code": "lost", "message": "gone"}
