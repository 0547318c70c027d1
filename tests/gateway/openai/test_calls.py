"""Calls as models write them: whole, cut anywhere, and what only looks like one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.gateway.openai.tool_call_parser import Arguments, Begins, Hermes, Llama, Mistral, merged

MAKERS = {"hermes": Hermes, "mistral": Mistral, "llama": lambda: Llama(["f", "g"])}


def read(form, *pieces):
    reader = MAKERS[form]()
    told = [each for piece in pieces for each in reader.push(piece)]
    return merged([*told, *reader.flush()])


CALLS = [
    ("hermes", "plain text", ["plain text"]),
    (
        "hermes",
        'I look.<tool_call>\n{"name": "f", "arguments": {"a": [1, "}</tool_call>"]}}\n</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "g"}</tool_call>\n done',
        ["I look.", Begins("f"), Arguments('{"a": [1, "}</tool_call>"]}'), Begins("g"), Arguments("{}"), "done"],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [Begins("f"), Arguments("{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', [Begins("f"), Arguments('{"a": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [Begins("f"), Arguments('{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} and', [Begins("f"), Arguments("{}"), "and"]),
    ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', [Begins("?"), Arguments("{}")]),
    ("hermes", '<tool_call> {"nam": 1}</tool_call>', ['<tool_call> {"nam": 1}</tool_call>']),
    ("hermes", '<tool_call> {"nam": 1', ['<tool_call> {"nam": 1']),
    ("hermes", "a <tool <tool_call> x", ["a <tool <tool_call> x"]),
    ("hermes", "<<tool_ca", ["<<tool_ca"]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [Begins("f"), Arguments('{"a": 1}'), Begins("g"), Arguments("{}")],
    ),
    (
        "mistral",
        'so[TOOL_CALLS]f[ARGS]{"a": {"b": "}"}}[TOOL_CALLS]g{}',
        ["so", Begins("f"), Arguments('{"a": {"b": "}"}}'), Begins("g"), Arguments("{}")],
    ),
    ("mistral", "[TOOL_CALLS] never", ["[TOOL_CALLS] never"]),
    ("mistral", "[TOOL_CALLS]" + "n" * 300, ["[TOOL_CALLS]" + "n" * 300]),
    ("llama", '\n{"name": "f", "parameters": {"x": "y"}}', [Begins("f"), Arguments('{"x": "y"}')]),
    (
        "llama",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"q": 1}}',
        [Begins("f"), Arguments("{}"), Begins("g"), Arguments('{"q": 1}')],
    ),
    ("llama", '{"a": 1}', ['{"a": 1}']),
    ("llama", '{"name": "other", "parameters": {}} ok', ['{"name": "other", "parameters": {}} ok']),
    ("llama", '{"name": "f", "parameters": {}}; no', [Begins("f"), Arguments("{}"), "; no"]),
    ("llama", "<|python_tag|> print(1)", ["<|python_tag|> print(1)"]),
    ("llama", ' text {"name": "f"}', [' text {"name": "f"}']),
]


@pytest.mark.parametrize(("form", "text", "told"), CALLS, ids=lambda case: str(case)[:30])
def test_what_an_answer_says(form, text, told):
    assert read(form, text) == told
    assert read(form, *text) == told


PARTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    '{"name": "f", ',
    '"arguments": {"a": ["\\"}"',
    "]}",
    "}",
]
PARTS += ['"parameters": {}', "f{", "[", "]", ", ", "; ", " ", "\n", '"', "\\", "<tool", "x", "[TOOL", '"name": "g"', "{"]


@pytest.mark.parametrize("form", sorted(MAKERS))
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12), cuts=st.lists(st.integers(0, 120), max_size=6))
def test_however_it_is_cut_an_answer_makes_the_same_calls(form, parts, cuts):
    text = "".join(parts)
    ends = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert read(form, *pieces) == read(form, text)


@pytest.mark.parametrize("form", sorted(MAKERS))
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12))
def test_what_calls_nothing_is_text_to_the_last_character(form, parts):
    told = read(form, "".join(parts))
    if not any(isinstance(each, Begins) for each in told):
        assert "".join(told) == "".join(parts)


JSON = st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=5)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=3)


@given(calls=st.lists(st.tuples(st.sampled_from("fg"), OBJECTS), min_size=1, max_size=3), ascii=st.booleans())
def test_calls_come_back_as_they_were_written(calls, ascii):
    def written(key, between):
        bodies = ({"name": name, key: arguments} for name, arguments in calls)
        return between.join(json.dumps(body, ensure_ascii=ascii) for body in bodies)

    texts = {
        "hermes": "<tool_call>\n" + written("arguments", "\n</tool_call>\n<tool_call>\n") + "\n</tool_call>",
        "mistral": f"[TOOL_CALLS][{written('arguments', ', ')}]",
        "llama": written("parameters", "; "),
    }
    for form, text in texts.items():
        told = read(form, text)
        assert [each.name for each in told[::2]] == [name for name, _ in calls]
        assert [json.loads(each.text) for each in told[1::2]] == [arguments for _, arguments in calls]


@pytest.mark.parametrize("named", ["before", "behind"])
def test_a_call_of_any_length_is_kept_no_longer_than_until_it_is_told(named):
    arguments, name = '"arguments": {"a": "' + "x" * 300_000 + '"}', '"name": "f"'
    first, last = (name, arguments) if named == "before" else (arguments, name)
    reader = Hermes()
    told = [each for char in f"<tool_call>{{{first}, {last}" for each in reader.push(char)]
    assert [type(each) for each in merged(told)] == [Begins, Arguments]
    assert reader._call.raw == ""
    assert reader._call._pending == []
    assert len(merged([*told, *reader.push("}</tool_call>")])[1].text) == 300_009
