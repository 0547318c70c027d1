"""Tools of a chat: the template is given them, calls come back as OpenAI tells them, and what cannot be done is a 400."""

import json
from dataclasses import replace

import pytest
from scripted_actor import TWO_CALLS, ScriptedActor, events, finished, one_by_one, saying, tokens

from mooncake_zmq.engine.constraint import Compiler, ConstraintError
from mooncake_zmq.engine.tokenizer import BYTE_TEMPLATE, ByteVocabulary, Conversation, Tokenizer, byte_tokenizer
from mooncake_zmq.gateway.openai.tools import CallPiece, form_of, whole_calls
from mooncake_zmq.gateway.requests.client_events import TokenOut
from mooncake_zmq.gateway.settings import EdgeSettings

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "parameters": {"$defs": {"place": {"enum": ["Bern", "Rom"]}}, "type": "object", "additionalProperties": False}
        | {"properties": {"place": {"$ref": "#/$defs/place"}}, "required": ["place"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "weather"}}


def gathered(response):
    """Message and finish reason of a stream, put together as the SDKs do."""
    content, calls, reason = "", {}, None
    for event in events(response)[:-1]:
        choice = event["choices"][0]
        content += choice["delta"].get("content") or ""
        for piece in choice["delta"].get("tool_calls", ()):
            call = calls.setdefault(piece["index"], {"function": {"name": "", "arguments": ""}})
            call |= {name: piece[name] for name in ("id", "type") if name in piece}
            call["function"]["name"] += piece["function"].get("name", "")
            call["function"]["arguments"] += piece["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return content, [calls[index] for index in sorted(calls)], reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("reason", "told"), [("stop", "tool_calls"), ("length", "length")])
def test_calls_are_told_beside_the_text(stream, reason, told):
    actor = saying(TWO_CALLS, reason)
    response = actor.chat(tools=TOOLS, stream=stream)
    if stream:
        content, calls, why = gathered(response)
    else:
        choice = response.json()["choices"][0]
        content, calls, why = choice["message"]["content"], choice["message"]["tool_calls"], choice["finish_reason"]
    assert (content, why) == ("Let me see. ", told)
    assert [(call["type"], call["function"]["name"]) for call in calls] == [("function", "weather"), ("function", "clock")]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"place": "Bern"}, {}]
    assert len({call["id"] for call in calls}) == 2
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in calls), "there are templates that take no other"


def test_arguments_are_streamed_as_they_come():
    pieces = [
        piece
        for event in events(saying(TWO_CALLS).chat(tools=TOOLS, stream=True))[:-1]
        for piece in event["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert [piece["index"] for piece in pieces if "id" in piece] == [0, 1]
    assert sum(piece["index"] == 0 for piece in pieces) > len('{"place": "Bern"}') / 2
    assert not any("name" in piece["function"] for piece in pieces if "id" not in piece)


def test_the_end_comes_in_a_chunk_of_its_own_even_if_all_came_at_once():
    actor = ScriptedActor(lambda _request, _number: [[*tokens(TWO_CALLS), finished()]], max_model_len=4096)
    chunks = [event["choices"][0] for event in events(actor.chat(tools=TOOLS, stream=True))[:-1]]
    assert [chunk["finish_reason"] for chunk in chunks] == [None, None, "tool_calls"]
    assert chunks[-1]["delta"] == {}


def test_an_answer_of_calls_alone_has_no_content():
    message = saying(TWO_CALLS.partition(" see. ")[2]).chat(tools=TOOLS).json()["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_a_call_is_text(stream):
    response = saying("No <tool_call>, thank you").chat(tools=TOOLS, stream=stream)
    if stream:
        assert gathered(response) == ("No <tool_call>, thank you", [], "stop")
    else:
        message = response.json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "No <tool_call>, thank you"}


def test_who_wants_no_two_calls_at_once_is_told_the_first():
    message = saying(TWO_CALLS).chat(tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


def test_who_chooses_none_gets_text_and_the_same_prompt():
    actors = [saying(TWO_CALLS), saying(TWO_CALLS)]
    plain = actors[0].chat(tools=TOOLS, tool_choice="none").json()["choices"][0]
    assert (plain["message"], plain["finish_reason"]) == ({"role": "assistant", "content": TWO_CALLS}, "stop")
    actors[1].chat(tools=TOOLS)
    assert actors[0].prompt == actors[1].prompt


def test_tools_and_earlier_calls_reach_the_template():
    actor = saying("ok")
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rom"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": "sunny"}]},
    ]
    assert actor.chat(messages=messages, tools=TOOLS).status_code == 200
    prompt = actor.prompt
    assert prompt.startswith(f"<|system|>{json.dumps(TOOLS)}")
    assert '<tool_call>{"name": "weather", "arguments": {"place": "Rom"}}</tool_call><|end|><|tool|>sunny' in prompt
    named = with_template("{{ messages[2].name }} {{ tools | length }}", saying("ok"))
    named.chat(messages=messages, tools=TOOLS, tool_choice="none")
    assert named.prompt == "weather 2"


def test_templates_see_ids_and_only_what_was_given():
    template = "{{ messages }}{% if tools is not none %}{{ tools | length }}{% endif %}"
    actor = with_template(template, saying("ok"))
    turns = [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool", "tool_call_id": "x1", "content": "a"}]
    assert actor.chat(messages=turns).status_code == 200
    assert actor.prompt == str([{"role": "assistant", "content": ""}, {"role": "tool", "content": "a", "tool_call_id": "x1"}])


def with_template(template, actor):
    conversation = Conversation(template=template, eos_ids=(256,))
    actor.model = replace(actor.model, tokenizer=Tokenizer(ByteVocabulary(), conversation))
    return actor


FORMS = {
    "hermes": ("<tool_call> {{ tools }}", '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'),
    "mistral": ("[TOOL_CALLS] {{ tools }}", '[TOOL_CALLS][{"name": "weather", "arguments": %s}]'),
    "llama3_json": ("<|python_tag|> {{ tools }}", '{"name": "weather", "parameters": %s}'),
}


def follows(constraint, text):
    try:
        return bool(Compiler(byte_tokenizer, 512).matcher(constraint, text.encode()).allowed()[256 // 8] & 1)
    except ConstraintError:
        return False


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_an_answer_that_must_call_follows_the_schema_in_the_models_own_form(form, choice):
    template, written = FORMS[form]
    actor = with_template(template, saying(written % '{"place": "Rom"}'))
    response = actor.chat(tools=TOOLS, tool_choice=choice)
    assert response.status_code == 200, response.text
    constraint = actor.only.sampling.constraint
    assert follows(constraint, written % '{"place": "Rom"}')
    assert not follows(constraint, written % '{"place": "Ulm"}')
    assert not follows(constraint, "no")
    other = (written % "{}").replace("weather", "clock")
    assert follows(constraint, other) == (choice == "required")
    answer = response.json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert [call["function"] for call in answer["message"]["tool_calls"]] == [
        {"name": "weather", "arguments": '{"place": "Rom"}'}
    ]


@pytest.mark.parametrize("form", sorted(FORMS))
def test_calls_of_a_strict_function_follow_its_schema_among_any_text(form):
    template, written = FORMS[form]
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    actor = with_template(template, saying("x"))
    assert actor.chat(tools=[strict, CLOCK]).status_code == 200
    constraint = actor.only.sampling.constraint
    before = "" if form == "llama3_json" else "Hm <tool {"
    assert follows(constraint, before + written % '{"place": "Rom"}')
    assert not follows(constraint, before + written % '{"place": "Ulm"}')
    assert follows(constraint, before + (written % '{"any": 1}').replace("weather", "clock"))
    for text in ("", "plain text, \n{of any kind}", " x"):
        assert follows(constraint, text)
    lax = with_template(template, saying("x"))
    assert lax.chat(tools=TOOLS).status_code == 200
    assert lax.only.sampling.constraint == b""


@pytest.mark.parametrize("form", sorted(FORMS))
def test_an_answer_is_calls_or_json_of_its_schema(form):
    template, written = FORMS[form]
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "required": ["name"]}}}
    actor = with_template(template, saying("x"))
    response = actor.chat(tools=TOOLS, response_format=shape)
    if form == "llama3_json":  # where the one begins as the other
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "response_format"
        return
    constraint = actor.only.sampling.constraint
    assert follows(constraint, '{"name": "weather"}')
    assert follows(constraint, '{ "name":\n1, "b": [2]}')
    assert follows(constraint, written % '{"any": 1}')
    for wrong in ("", "text", "{}", 'Hm {"name": 1}', (written % "{}").replace("weather", "other")):
        assert not follows(constraint, wrong)
    must = with_template(template, saying("x"))
    assert must.chat(tools=TOOLS, response_format=shape, tool_choice="required").status_code == 200
    assert not follows(must.only.sampling.constraint, '{"name": 1}')
    assert follows(must.only.sampling.constraint, written % '{"place": "Rom"}')


def test_several_calls_may_be_required_or_one_alone():
    call = FORMS["hermes"][1] % '{"place": "Rom"}'
    for parallel in (None, True, False):
        actor = saying("x")
        assert actor.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel).status_code == 200
        assert follows(actor.only.sampling.constraint, call)
        assert follows(actor.only.sampling.constraint, f"{call}\n{call}") == (parallel is not False)


def test_a_mark_that_is_a_special_token_is_seen_and_asked_for():
    conversation = Conversation(template="[TOOL_CALLS] {{ tools }}", eos_ids=(256,))

    class Marking(ByteVocabulary):
        SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "[TOOL_CALLS]")

    body = '[{"name": "clock", "arguments": {}}]'
    said = [TokenOut(at, token) for at, token in enumerate([261, *body.encode()])]
    actor = ScriptedActor(lambda _request, _number: [[*said, finished()]], max_model_len=4096)
    tokenizer = Tokenizer(Marking(), conversation)
    actor.model = replace(actor.model, tokenizer=tokenizer)
    answer = actor.chat(tools=TOOLS, tool_choice="required").json()["choices"][0]
    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["clock"]
    matcher = Compiler(lambda: tokenizer, 512).matcher(actor.only.sampling.constraint)
    assert [token for token in range(512) if matcher.allowed()[token // 8] >> token % 8 & 1] == [261]


def test_the_operator_says_how_calls_are_written():
    settings = EdgeSettings(tool_call_parser="llama3_json")
    text = '{"name": "clock", "parameters": {}}'
    actor = ScriptedActor(lambda _request, _number: [[*tokens(text), finished()]], settings=settings, max_model_len=4096)
    message = actor.chat(tools=TOOLS).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["clock"]


def calling(arguments):
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]}


def requiring(parameters):
    function = {"name": "f", "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def deep(times):
    schema = {"type": "string"}
    for _ in range(times):
        schema = {"items": schema}
    return schema


CHAIN = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(1480)} | {"d1480": {"type": "null"}}
REFUSED = [
    (requiring({"$ref": "#/$defs/d0", "$defs": CHAIN}), "tools", "rules and references"),
    (requiring({"enum": ["x" * (100 << 10)]}), "tools", "makes a grammar of"),
    (requiring(deep(80)), "tools", "nested more than 64 deep"),
    ({"tools": requiring(deep(80))["tools"]}, "tools", "nested more than 64 deep"),
    (calling(deep(80)), "messages", "nested more than 64 deep"),
    (calling(json.dumps(deep(80))), "messages", "nested more than 64 deep"),
    ({"tools": "x"}, "tools", "array"),
    ({"tools": [{"type": "function"}]}, "tools", "function"),
    ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
    ({"tools": [CLOCK] * 129}, "tools", "length <= 128"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * (256 << 10)}}]}, "tools", "bytes"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "maybe"),
    ({"tools": TOOLS, "tool_choice": "x" * 4096}, "tool_choice", "4096"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "none of the tools"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": TOOLS, "guided_regex": "a+"}, "guided_regex", "tool_choice"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "zork"}}}], "tool_choice": "required"},
        "tools",
        "zork",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages", "function"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
        "messages",
        "tool_calls",
    ),
]


@pytest.mark.parametrize(("asked", "param", "why"), REFUSED, ids=lambda case: str(case)[:40])
def test_what_cannot_be_done_is_refused_and_told_why(asked, param, why):
    response = saying("x").chat(**asked)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert why in error["message"]
    assert len(error["message"]) < 400


def test_each_delta_tells_of_a_call_once_however_many_tokens_came_together():
    """Clients put lists of deltas together by their indexes, one of each."""
    said = tokens('<tool_call>{"name": "clock", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "clock"}</tool_call>')
    actor = ScriptedActor(lambda _request, _number: [said[:70], said[70:], [finished()]], max_model_len=4096)
    deltas = [chunk["choices"][0]["delta"] for chunk in events(actor.chat(tools=TOOLS, stream=True))[:-1]]
    told = [[call["index"] for call in delta["tool_calls"]] for delta in deltas if "tool_calls" in delta]
    assert all(len(each) == len(set(each)) for each in told)
    assert {index for each in told for index in each} == {0, 1}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("kind", ["integer", "string", "array", ["object", "null"]])
def test_parameters_that_are_those_of_no_object_are_refused(choice, kind):
    """Arguments are told as those of an object."""
    assert saying("x").chat(**requiring({"type": ["object"]}) | {"tool_choice": choice}).status_code == 200
    response = saying("x").chat(**requiring({"type": kind}) | {"tool_choice": choice})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("stop", ["clock", "Bern", "arg", "_call>", '"'])
def test_a_stop_string_ends_no_call_half_way(stop):
    text = 'so <tool_call>{"name": "clock", "arguments": {"place": "Bern"}}</tool_call> there end'
    choice = saying(text).chat(tools=TOOLS, stop=[stop, "end"]).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("clock", {"place": "Bern"})
    assert (choice["message"]["content"], choice["finish_reason"]) == ("so there ", "tool_calls")


def test_no_stop_string_stands_across_a_call():
    text = 'a E<tool_call>{"name": "clock", "arguments": {}}</tool_call>ND rest END more'
    choice = saying(text).chat(tools=TOOLS, stop="END").json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("a END rest ", "tool_calls")


def test_a_stop_string_before_any_call_ends_the_answer():
    choice = saying('first <tool_call>{"name": "clock"}</tool_call>').chat(tools=TOOLS, stop="st").json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("fir", "stop")
    assert choice["message"].get("tool_calls") is None


@pytest.mark.parametrize("rest", ["", "<", "</tool_", "</tool_call"])
def test_a_calls_end_that_was_cut_short_is_no_text(rest):
    said = tokens('<tool_call>{"name": "clock", "arguments": {}}' + rest)
    actor = ScriptedActor(lambda _request, _number: one_by_one([*said, finished("length")]), max_model_len=4096)
    choice = actor.chat(tools=TOOLS).json()["choices"][0]
    assert choice["message"]["content"] is None
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ["{}"]


def test_schemas_of_tools_count_without_what_they_say_to_readers():
    function = {"name": "f", "parameters": {"type": "object", "description": "x" * (100 << 10)}}
    asked = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    assert ScriptedActor(max_model_len=1 << 20).chat(**asked).status_code == 200


def test_of_very_many_calls_the_first_are_told():
    said = tokens('<tool_call>{"name": "clock"}</tool_call>' * 130)
    actor = ScriptedActor(lambda _request, _number: one_by_one([*said, finished()]), max_model_len=1 << 14)
    choice = actor.chat(tools=TOOLS).json()["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["clock"] * 128
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


def test_the_pieces_of_calls_are_looked_at_once_each():
    looked = []

    class Looked(CallPiece):
        __slots__ = ()

        def __getattribute__(self, name):
            looked.append(name)
            return super().__getattribute__(name)

    pieces = [Looked(index, name, text) for index in range(100) for name, text in (("f", "{"), (None, "}"))]
    assert [call["function"]["arguments"] for call in whole_calls(pieces, "salt")] == ["{}"] * 100
    assert len(looked) <= 10 * len(pieces)


def test_a_template_that_goes_too_deep_refuses_the_messages():
    template = "{% macro down(x) %}{{ down(x) }}{% endmacro %}{{ down(messages) }}"
    response = with_template(template, saying("x")).chat()
    assert response.status_code == 400
    assert "template refused" in response.json()["error"]["message"]


def test_a_model_whose_template_takes_no_tools_or_in_an_unknown_form_is_not_given_any():
    bare = with_template("{{ messages }}", saying("x")).chat(tools=TOOLS)
    assert (bare.status_code, bare.json()["error"]["param"]) == (400, "tools")
    assert "template takes no tools" in bare.json()["error"]["message"]
    unknown = with_template("{{ messages }}{{ tools }}", saying("x"))
    assert "tool_call_parser" in unknown.chat(tools=TOOLS).json()["error"]["message"]
    assert unknown.chat(tools=TOOLS, tool_choice="none").status_code == 200
    assert unknown.chat(tools=[], tool_choice="auto").status_code == 200


def test_completions_have_no_tools():
    assert ScriptedActor().complete(tools=TOOLS).json()["error"]["message"] == "tools is not supported"
    assert ScriptedActor().complete(tools=[], tool_choice="none").status_code == 200


def test_the_toys_template_is_as_it_was_for_those_who_have_no_tools():
    assert "tools" in BYTE_TEMPLATE
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert byte_tokenizer().chat_text(turns) == "<|user|>a<|end|><|assistant|>b<|end|><|assistant|>"


INNER = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}


@pytest.mark.parametrize(
    ("parameters", "fits", "does_not"),
    [
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1}', '{"a": 1, "type": 2}'),
        (
            {"properties": {"a": {"$ref": "#/$defs/inner"}}, "$defs": {"inner": INNER}},
            '{"a": {"b": 1}}',
            '{"a": {"b": 1, "c": 2}}',
        ),
        ({"properties": {"a": {"type": "array", "items": INNER}}}, '{"a": [{"b": 1}]}', '{"a": [{"b": 1, "c": 2}]}'),
        ({"properties": {"properties": {"type": "integer"}}}, '{"properties": 1}', '{"a": 1}'),
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": True}, '{"a": 1, "type": 2}', '{"a": "b"}'),
        ({"properties": {"a": {"type": "object"}}}, '{"a": {"free": 1}}', '{"b": 1}'),
        ({"allOf": [{"properties": {"a": {"type": "integer"}}}, INNER]}, '{"a": 1, "b": 1}', '{"b": "c"}'),
    ],
)
def test_objects_of_arguments_have_no_properties_that_their_schema_does_not_name(parameters, fits, does_not):
    function = {"name": "f", "parameters": {"type": "object", **parameters}}
    actor = saying('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    response = actor.chat(tools=[{"type": "function", "function": function}], tool_choice="required")
    assert response.status_code == 200, response.text
    constraint = actor.only.sampling.constraint
    for arguments, possible in ((fits, True), (does_not, False)):
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert follows(constraint, text) is possible, arguments


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "'function', not 'custom'"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "tool_choice",
            '"required" or {"type"',
        ),
    ],
)
def test_a_kind_of_tool_or_choice_that_is_not_supported_names_those_that_are(asked, param, said):
    error = saying("x").chat(**asked).json()["error"]
    assert error["param"] == param
    assert said in error["message"]


TEMPLATES = {
    "qwen3_xml": "<tool_call>\n<function=example>\n<parameter=a>\n1",
    "glm45": "<tool_call>{name}\n<arg_key>{key}</arg_key>",
    "minimax_m2": '<minimax:tool_call><invoke name="f">',
    "kimi_k2": "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "deepseek_v31": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>'",
    "hermes": '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    None: "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name']",
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_the_form_of_calls_is_that_of_the_template(form):
    assert form_of(TEMPLATES[form]) == form


@pytest.mark.parametrize("stream", [False, True])
def test_calls_with_arguments_one_by_one_are_returned_as_json_of_their_types(stream):
    text = "Let me see.<tool_call>\n<function=roll>\n<parameter=times>\n3\n</parameter>\n</function>\n</tool_call>"
    roll = {"name": "roll", "parameters": {"type": "object", "properties": {"times": {"type": "integer"}}}}
    actor = saying(text)
    actor.edge.settings = EdgeSettings(tool_call_parser="qwen3_xml")
    response = actor.chat(tools=[{"type": "function", "function": roll}], stream=stream)
    if stream:
        content, (call,), reason = gathered(response)
    else:
        (choice,) = response.json()["choices"]
        content, (call,), reason = choice["message"]["content"], choice["message"]["tool_calls"], choice["finish_reason"]
    assert (content, call["function"], reason) == ("Let me see.", {"name": "roll", "arguments": '{"times": 3}'}, "tool_calls")


def test_where_calls_are_written_so_no_answer_is_held_to_a_schema():
    actor = saying("")
    actor.edge.settings = EdgeSettings(tool_call_parser="kimi_k2")
    for more in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        refused = actor.chat(tools=TOOLS, **more)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, [*more][0])
