"""Reasoning is divided from the content of an answer, however it is cut, and every API returns it in its own place."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_actor import EOS, ScriptedActor, events, finished, one_by_one, tokens

from mooncake_zmq.engine.tokenizer import ByteVocabulary, Conversation, Tokenizer
from mooncake_zmq.gateway.openai.reasoning import FORMS, ReasoningReader, marks_of
from mooncake_zmq.gateway.settings import EdgeSettings

THINK = FORMS["think"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %};{% endfor %}"
    "{% if tools %}{% endif %}"
    "{% if add_generation_prompt %}>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
OPENING = TEMPLATE.replace("%}>{", "%}><think>\n{")
"""A template that begins the reasoning itself."""
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
CLOCK = {"type": "function", "function": {"name": "clock"}}


def divided(pieces: list[str], *, begun: bool = False) -> tuple[str, str]:
    reader = ReasoningReader(THINK, begun=begun)
    found = [*map(reader.push, pieces), reader.flush()]
    return "".join(reasoning for reasoning, _ in found), "".join(content for _, content in found)


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, ("hm\n", "Yes.")),
        ("\n <think>hm</think>Yes.", False, ("hm", "Yes.")),
        ("hm</think> Yes.", True, ("hm", "Yes.")),
        ("<think>hm</think>Yes.", True, ("hm", "Yes.")),
        ("<think>hm", False, ("hm", "")),
        ("hm </thi", True, ("hm </thi", "")),
        ("<think></think>Yes.", False, ("", "Yes.")),
        ("Yes. <think>no</think>", False, ("", "Yes. <think>no</think>")),
        ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        (" plain", False, ("", " plain")),
        ("<thi", False, ("", "<thi")),
        ("a </think b</think>c", True, ("a </think b", "c")),
        ("", False, ("", "")),
        ("", True, ("", "")),
    ],
)
def test_an_answer_is_divided_in_the_same_way_whole_and_by_character(text: str, begun: bool, expected: tuple[str, str]) -> None:
    assert divided([text], begun=begun) == expected
    assert divided(list(text), begun=begun) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", " ", "\n", "a", "<thi", "nk>"]), max_size=20),
    st.lists(st.integers(1, 6), max_size=40),
    st.booleans(),
)
def test_cuts_change_nothing(parts: list[str], cuts: list[int], begun: bool) -> None:
    text = "".join(parts)
    pieces, at = [], 0
    for size in [*cuts, len(text)]:
        pieces.append(text[at : at + size])
        at += size
    assert divided(pieces, begun=begun) == divided([text], begun=begun)


def test_marks_are_those_of_the_template_unless_the_operator_says_so() -> None:
    assert marks_of("{{ x }}</think>", "") == FORMS["think"]
    assert marks_of("[THINK]{{ x }}[/THINK]", "") == FORMS["mistral"]
    assert marks_of("plain", "") is None
    assert marks_of("plain", "seed_oss") == FORMS["seed_oss"]
    assert marks_of("</think>", "none") is None


def thinking(text: str, template: str = TEMPLATE, reason: str = "stop", **settings: Any) -> ScriptedActor:
    actor = ScriptedActor(
        lambda _request, _number: one_by_one([*tokens(text), finished(reason)]),
        max_model_len=4096,
        settings=EdgeSettings(**settings),
    )
    tokenizer = Tokenizer(ByteVocabulary(), Conversation(template=template, eos_ids=(EOS,)))
    actor.model = replace(actor.model, tokenizer=tokenizer)
    return actor


def chat(actor: ScriptedActor, *, stream: bool, **body: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The message, the usage and the reason of the end; of a stream, put together as clients do."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = actor.chat(**options, **body)
    assert response.status_code == 200, response.text
    if not stream:
        answer = response.json()
        (choice,) = answer["choices"]
        return choice["message"], answer["usage"], choice["finish_reason"]
    message: dict[str, Any] = {"role": "", "content": ""}
    reason = ""
    for event in (found := events(response)[:-1])[:-1]:
        (choice,) = event["choices"]
        for name, more in choice["delta"].items():
            message[name] = message[name] + more if name in message else more
        reason = choice["finish_reason"] or reason
    return message, found[-1]["usage"], reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("template", "text"), [(TEMPLATE, "<think>\nhm\n</think>\n\nYes."), (OPENING, "hm\n</think>\n\nYes.")])
def test_a_chat_returns_reasoning_beside_the_content(stream: bool, template: str, text: str) -> None:
    message, usage, reason = chat(thinking(text, template), stream=stream)
    assert message == {"role": "assistant", "reasoning_content": "hm\n", "content": "Yes."}
    assert reason == "stop"
    assert usage["completion_tokens"] == len(text)
    reasoning = text.index("</think>") + len("</think>") - text.find("<think>") - len("<think>") * ("<think>" in text)
    assert abs(usage["completion_tokens_details"]["reasoning_tokens"] - reasoning) <= 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_in_thought_has_no_content(stream: bool) -> None:
    message, usage, reason = chat(thinking("<think>so it is</th", reason="length"), stream=stream)
    assert message == {"role": "assistant", "reasoning_content": "so it is</th", "content": ""}
    assert reason == "length"
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_may_be_left_out(stream: bool) -> None:
    message, _, _ = chat(thinking("<think>hm</think>Yes."), stream=stream, include_reasoning=False)
    assert message == {"role": "assistant", "content": "Yes."}


@pytest.mark.parametrize("stream", [False, True])
def test_where_the_operator_says_so_it_is_a_part_of_the_text(stream: bool) -> None:
    text = "<think>hm</think>Yes."
    message, usage, _ = chat(thinking(text, reasoning_parser="none"), stream=stream)
    assert message == {"role": "assistant", "content": text}
    assert "completion_tokens_details" not in usage


def test_a_user_who_writes_the_mark_begins_no_reasoning() -> None:
    message, _, _ = chat(thinking("Yes."), stream=False, messages=[{"role": "user", "content": "say <think>"}])
    assert message == {"role": "assistant", "content": "Yes."}


def test_a_prompt_that_ends_the_reasoning_gets_content_alone() -> None:
    actor = thinking("Yes.")
    message, _, _ = chat(actor, stream=False, reasoning_effort="none")
    assert actor.prompt.endswith("<think></think>")
    assert message == {"role": "assistant", "content": "Yes."}


def test_a_final_message_is_continued_in_its_reasoning() -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>I see, then"}]
    message, _, _ = chat(thinking(" yes</think>Yes."), stream=False, messages=turns, continue_final_message=True)
    assert message == {"role": "assistant", "reasoning_content": "yes", "content": "Yes."}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_and_calls_count_in_the_content_alone(stream: bool) -> None:
    text = f"<think>I STOP</think>Well. {CALL}"
    message, _, reason = chat(thinking(text), stream=stream, tools=[CLOCK], stop=["STOP"])
    assert message["reasoning_content"] == "I STOP"
    assert message["content"] == "Well. "
    assert [call["function"]["name"] for call in message["tool_calls"] if "name" in call["function"]] == ["clock"]
    assert reason == "tool_calls"
    message, _, reason = chat(thinking("<think>a</think>b STOP c"), stream=stream, stop=["STOP"])
    assert (message["reasoning_content"], message["content"], reason) == ("a", "b ", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_ends_the_reasoning_and_is_text_of_it_where_there_are_no_tools(stream: bool) -> None:
    message, _, reason = chat(thinking(f"<think>so {CALL}"), stream=stream, tools=[CLOCK])
    assert (message["reasoning_content"], reason) == ("so ", "tool_calls")
    message, _, reason = chat(thinking(f"<think>so {CALL}"), stream=stream)
    assert (message["reasoning_content"], reason) == (f"so {CALL}", "stop")


def test_an_answer_that_is_bound_to_a_form_from_its_beginning_is_all_content() -> None:
    form = {"type": "json_object"}
    message, _, _ = chat(thinking('{"a": 1}', OPENING), stream=False, response_format=form)
    assert message == {"role": "assistant", "content": '{"a": 1}'}
    message, _, _ = chat(thinking(CALL, OPENING), stream=False, tools=[CLOCK], tool_choice="required")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["clock"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_earlier_reasoning_reaches_the_template(name: str) -> None:
    actor = thinking("ok")
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", name: "hm"},
        {"role": "user", "content": "c"},
    ]
    chat(actor, stream=False, messages=turns)
    assert actor.prompt == "user:a;assistant:<think>hm</think>b;user:c;>"


def test_a_stream_of_reasoning_says_its_token_ids() -> None:
    response = thinking("<think>abc</think>de").chat(stream=True, return_token_ids=True)
    ids = [token for event in events(response)[:-1] for choice in event["choices"] for token in choice.get("token_ids") or ()]
    assert bytes(ids).decode() == "<think>abc</think>de"


def test_messages_have_blocks_of_thinking() -> None:
    def ask(actor: ScriptedActor, **body: Any) -> Any:
        turns = [{"role": "user", "content": "hi"}]
        return actor.call("POST", "/v1/messages", json={"model": "toy", "max_tokens": 99, "messages": turns, **body})

    content = ask(thinking("<think>hm</think>Yes.")).json()["content"]
    assert content == [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "Yes."}]
    streamed = ask(thinking("<think>hm</think>Yes."), stream=True).text
    found = [json.loads(part.split("data: ")[1]) for part in streamed.split("\n\n")[:-1]]
    assert [each["content_block"]["type"] for each in found if each["type"] == "content_block_start"] == ["thinking", "text"]
    assert "".join(each["delta"].get("thinking", "") for each in found if each["type"] == "content_block_delta") == "hm"
    assert "".join(each["delta"].get("text", "") for each in found if each["type"] == "content_block_delta") == "Yes."
    actor = thinking("Yes.")
    assert ask(actor, thinking={"type": "disabled"}).json()["content"] == [{"type": "text", "text": "Yes."}]
    assert actor.prompt.endswith("<think></think>")
    actor = thinking("ok")
    blocks = [*content, {"type": "redacted_thinking", "data": "x"}, {"type": "tool_use", "id": "toolu_a", "name": "clock"}]
    result = [{"type": "tool_result", "tool_use_id": "toolu_a", "content": "noon"}]
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": blocks}, {"role": "user", "content": result}]
    assert ask(actor, messages=turns).status_code == 200
    assert actor.prompt.startswith("user:hi;assistant:<think>hm</think>Yes.<tool_call>")


def test_responses_have_items_of_reasoning() -> None:
    def ask(actor: ScriptedActor, **body: Any) -> Any:
        return actor.call("POST", "/v1/responses", json={"model": "toy", "input": "hi", **body})

    answer = ask(thinking("<think>hm</think>Yes.")).json()
    item, message = answer["output"]
    assert (item["type"], item["summary"]) == ("reasoning", [])
    assert item["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "Yes."
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    streamed = ask(thinking("<think>hm</think>Yes."), stream=True).text
    found = [json.loads(part.split("data: ")[1]) for part in streamed.split("\n\n")[:-1]]
    assert "".join(each["delta"] for each in found if each["type"] == "response.reasoning_text.delta") == "hm"
    (done,) = [each for each in found if each["type"] == "response.reasoning_text.done"]
    assert done["text"] == "hm"
    assert [each["type"] for each in found[-1]["response"]["output"]] == ["reasoning", "message"]
    call = {"type": "function_call", "call_id": "call_a", "name": "clock", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "call_a", "output": "noon"}
    user = {"role": "user", "content": "hi"}
    actor = thinking("ok")
    assert ask(actor, input=[user, item, message, call, result]).status_code == 200
    assert actor.prompt.startswith("user:hi;assistant:<think>hm</think>Yes.<tool_call>")
    actor = thinking("ok")
    assert ask(actor, input=[user, item, call, result]).status_code == 200
    assert actor.prompt.startswith("user:hi;assistant:<think>hm</think><tool_call>")
    actor = thinking("ok")
    assert ask(actor, input=[user, item, item, message]).status_code == 200
    assert actor.prompt == "user:hi;assistant:<think>hm\nhm</think>Yes.;>"
    actor = thinking("ok")
    assert (
        ask(actor, input=[user, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, user]).status_code
        == 200
    )
    assert actor.prompt == "user:hi;user:hi;>", "reasoning without an answer is left out"
