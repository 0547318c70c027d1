"""Answers whose calls and reasoning the parsers of a vLLM read: who asks for that, and what the client gets."""

import json

import pytest
from scripted_actor import EOS, ScriptedActor, events, finished, one_by_one, tokens
from test_edge_tools import CLOCK, TOOLS, gathered, with_template

from mooncake_zmq.core.messages import CallRead, Parsers
from mooncake_zmq.engine.tokenizer import BYTE_TEMPLATE
from mooncake_zmq.gateway.requests.client_events import TextRead, TextUnread, TokenOut
from mooncake_zmq.gateway.settings import EdgeSettings

STRANGE = "{{ messages }}{{ tools }}"
BOTH = Parsers(calls=True, reasoning=True)
CALLS = (CallRead(index=0, name="weather"), CallRead(index=0, arguments='{"place":'), CallRead(index=1, name="clock"))
READ = [
    *tokens("hm", 0),
    TextRead("so", "", ()),
    *tokens("abc", 2),
    TextRead(" be it", "Let me", ()),
    *tokens("de", 5),
    TextRead("", " see.", CALLS[:1]),
    *tokens("f", 7),
    TextRead("", "", (CALLS[1], CallRead(index=0, arguments=' "Bern"}'))),
    TokenOut(8, EOS),
    TextRead("", "", (CALLS[2], CallRead(index=1, arguments="{}"))),
]


def reading(*outputs, parsers=BOTH, template=STRANGE, settings=EdgeSettings(), end="stop"):
    script = one_by_one([*(outputs or READ), finished(end)])
    actor = with_template(template, ScriptedActor(lambda _request, _number: script, max_model_len=4096, settings=settings))
    actor.offered = parsers
    return actor


def message_of(response):
    (choice,) = response.json()["choices"]
    return choice["message"], choice["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_reasoning_come_as_vllm_reads_them(stream):
    actor = reading()
    response = actor.chat(tools=TOOLS, stream=stream)
    asked = actor.only.reading
    assert (asked.parsers, asked.whole) == (BOTH, not stream)
    assert json.loads(asked.chat) == {
        "messages": [],
        "tools": TOOLS,
        "tool_choice": "auto",
        "chat_template_kwargs": {},
    }
    assert EOS in asked.textless
    if stream:
        text, calls, why = gathered(response)
        thoughts = "".join(each["choices"][0]["delta"].get("reasoning_content") or "" for each in events(response)[:-1])
    else:
        message, why = message_of(response)
        text, calls, thoughts = message["content"], message["tool_calls"], message["reasoning_content"]
        assert response.json()["usage"]["completion_tokens"] == 9
    assert (thoughts, text, why) == ("so be it", "Let me see.", "tool_calls")
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == [
        ("weather", {"place": "Bern"}),
        ("clock", {}),
    ]


def test_who_wants_one_call_gets_the_first():
    message, _ = message_of(reading().chat(tools=TOOLS, parallel_tool_calls=False))
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


def test_reasoning_that_is_not_wanted_is_left_out():
    message, _ = message_of(reading().chat(tools=TOOLS, include_reasoning=False))
    assert "reasoning_content" not in message
    assert message["content"] == "Let me see."


def test_a_stop_string_is_looked_for_in_what_was_read_as_it_comes():
    actor = reading()
    message, why = message_of(actor.chat(stop="me s"))
    assert (message["content"], why) == ("Let ", "stop")
    assert not actor.only.reading.whole
    assert actor.cancelled


def test_chats_without_tools_are_read_for_their_reasoning_alone():
    actor = reading()
    actor.chat()
    assert json.loads(actor.only.reading.chat) == {"messages": [], "chat_template_kwargs": {}}
    plain = reading(*tokens("hm"), parsers=Parsers(calls=True))
    assert message_of(plain.chat())[0]["content"] == "hm"
    assert plain.only.reading is None


def test_what_vllm_has_no_parser_for_is_read_here():
    thinks = reading(*tokens("x"), TextRead("", "<think>so", CALLS[:1]), parsers=Parsers(calls=True))
    with_marks = with_template(STRANGE + "{# </think> #}", thinks)
    message, _ = message_of(with_marks.chat(tools=TOOLS))
    assert (message["reasoning_content"], len(message["tool_calls"])) == ("so", 1)
    called = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    calls = reading(*tokens("x"), TextRead("so", called, ()), parsers=Parsers(reasoning=True), template=BYTE_TEMPLATE)
    message, why = message_of(calls.chat(tools=TOOLS))
    assert (message["reasoning_content"], message["tool_calls"][0]["function"]["name"], why) == ("so", "clock", "tool_calls")


def test_what_is_known_here_is_not_read_by_vllm_unless_the_operator_says_so():
    known = reading(*tokens("x"), parsers=Parsers(calls=True), template=BYTE_TEMPLATE)
    known.chat(tools=TOOLS)
    assert known.only.reading is None
    said = reading(parsers=Parsers(calls=True), template=BYTE_TEMPLATE, settings=EdgeSettings(tool_call_parser="vllm"))
    said.chat(tools=TOOLS)
    assert said.only.reading is not None
    none = reading(*tokens("x"), settings=EdgeSettings(reasoning_parser="none"))
    none.chat()
    assert none.only.reading is None


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_read_is_text_and_says_why(stream):
    actor = reading(*tokens("hm"), TextRead("", "read,", ()), *tokens("not", 2), TextUnread("it is gone"), *tokens(" so", 5))
    response = actor.chat(stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
    if stream:
        *chunks, last = events(response)[:-1]
        assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks) == "read,not so"
    else:
        last = response.json()
        assert message_of(response)[0]["content"] == "read,not so"
    assert last["mooncake"]["unread"] == "it is gone"


def test_a_required_call_is_held_to_json_which_is_read_here():
    actor = reading(*tokens('{"name": "clock", "parameters": {}}'))
    message, _ = message_of(actor.chat(tools=[CLOCK], tool_choice="required"))
    assert message["tool_calls"][0]["function"]["name"] == "clock"
    assert actor.only.reading is None
    assert actor.only.sampling.constraint


def test_a_schema_beside_calls_in_an_unknown_form_is_refused():
    strict = {"type": "function", "function": {"name": "clock", "strict": True}}
    for more in ({"tools": [strict]}, {"tools": [CLOCK], "response_format": {"type": "json_object"}}):
        response = reading().chat(**more)
        assert response.status_code == 400
        assert "held to" in response.json()["error"]["message"]


def test_without_a_parser_tools_of_an_unknown_form_are_refused_with_both_ways_out():
    text = reading(parsers=Parsers()).chat(tools=TOOLS).json()["error"]["message"]
    assert "tool_call_parser" in text
    assert "--tool-call-parser" in text


def test_several_answers_are_read_each_by_itself():
    actor = reading()
    choices = actor.chat(tools=TOOLS, n=2).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["Let me see."] * 2
    assert all(request.reading is not None for request in actor.requests.values())
