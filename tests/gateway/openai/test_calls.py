"""Calls as models write them: whole, cut anywhere, and what only looks like one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_zmq.gateway.openai.answer_parts import AnswerParts, Ends
from mooncake_zmq.gateway.openai.detokenizer import Piece
from mooncake_zmq.gateway.openai.reasoning import FORMS, ReasoningReader
from mooncake_zmq.gateway.openai.tagged_calls import (
    DEEPSEEK_V31,
    GLM45,
    KIMI_K2,
    MINIMAX_M2,
    QWEN3_XML,
    SectionCalls,
    TaggedCalls,
    typed,
)
from mooncake_zmq.gateway.openai.tool_call_parser import Arguments, Begins, Hermes, Llama, Mistral, merged
from mooncake_zmq.gateway.openai.tools import CallPiece

SCHEMAS = {"f": {"n": {"type": "integer"}, "many": {"type": "array"}, "text": {"type": "string"}}}
MAKERS = {
    "hermes": Hermes,
    "mistral": Mistral,
    "llama": lambda: Llama(["f", "g"]),
    "qwen": lambda: TaggedCalls(QWEN3_XML, SCHEMAS),
    "glm": lambda: TaggedCalls(GLM45, SCHEMAS),
    "minimax": lambda: TaggedCalls(MINIMAX_M2, SCHEMAS),
    "kimi": lambda: SectionCalls(KIMI_K2),
    "deepseek": lambda: SectionCalls(DEEPSEEK_V31),
}
QWEN = (
    "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n"
    "<parameter=text>\n a\n</b>\n\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n"
    "<arg_key>text</arg_key>\n<arg_value>a\n</arg_value>\n</tool_call>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="f">\n<parameter name="many">[1, {"a": 2}]</parameter>\n</invoke>\n'
    '<invoke name="g">\n</invoke>\n</minimax:tool_call>'
)
KIMI = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|> {}<|tool_call_end|><|tool_calls_section_end|>"
)
DEEPSEEK = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "}"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)


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
    ("qwen", "plain <tool_call", ["plain <tool_call"]),
    ("qwen", "I do. " + QWEN, ["I do. ", Begins("f"), Arguments('{"n": 3, "text": " a\\n</b>\\n"}')]),
    (
        "qwen",
        QWEN + "\n" + QWEN + "\ndone",
        [*2 * [Begins("f"), Arguments('{"n": 3, "text": " a\\n</b>\\n"}')], "done"],
    ),
    ("qwen", "<tool_call><function=g></function></tool_call>", [Begins("g"), Arguments("{}")]),
    ("qwen", "<tool_call><function=g><parameter=x>1</parameter></tool_call> so", [Begins("g"), Arguments('{"x": "1"}'), "so"]),
    ("qwen", "<tool_call><function=g></function> so", [Begins("g"), Arguments("{}"), "so"]),
    ("qwen", "<tool_call><function=g> so", [Begins("g"), Arguments("{}"), "so"]),
    ("qwen", "<tool_call><function=f><parameter=n>3</parameter><parameter=te", [Begins("f"), Arguments('{"n": 3')]),
    ("qwen", '<tool_call>{"name": "f"}</tool_call>', ['<tool_call>{"name": "f"}</tool_call>']),
    ("qwen", "<tool_call><function=" + "n" * 300, ["<tool_call><function=" + "n" * 300]),
    ("glm", GLM, [Begins("f"), Arguments('{"n": 3, "text": "a\\n"}')]),
    ("glm", "<tool_call>g</tool_call> ok", [Begins("g"), Arguments("{}"), "ok"]),
    ("glm", "<tool_call>g<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>", [Begins("g"), Arguments('{"a": "b"}')]),
    ("glm", "<tool_call></tool_call>", ["<tool_call></tool_call>"]),
    ("glm", "<tool_call>g\n<arg_key>a</arg_key> b", [Begins("g"), Arguments("{}"), "b"]),
    ("minimax", MINIMAX, [Begins("f"), Arguments('{"many": [1, {"a": 2}]}'), Begins("g"), Arguments("{}")]),
    ("minimax", "<minimax:tool_call>none", ["<minimax:tool_call>none"]),
    ("kimi", "so " + KIMI + "\n", ["so ", Begins("f"), Arguments('{"a": 1}'), Begins("g"), Arguments("{}")]),
    ("kimi", "<|tool_calls_section_begin|>no", ["<|tool_calls_section_begin|>no"]),
    ("kimi", KIMI[: KIMI.index("1}")], [Begins("f"), Arguments('{"a": ')]),
    ("deepseek", DEEPSEEK, [Begins("f"), Arguments('{"a": "}"}'), Begins("g"), Arguments("{}")]),
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
PARTS += [
    "<function=f>",
    "</function>",
    "<parameter=n>",
    "</parameter>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
]
PARTS += ['<invoke name="', '">', "</invoke>", "<minimax:tool_call>", *KIMI_K2.marks(), *DEEPSEEK_V31.marks()]
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


@pytest.mark.parametrize(
    ("form", "begun"),
    [
        ("llama", ""),
        ("llama", '{"name": "f", "parameters": {}};'),
        ("mistral", "[TOOL_CALLS]"),
        ("qwen", QWEN3_XML.open),
        ("glm", GLM45.open),
        ("kimi", KIMI_K2.open),
    ],
)
def test_endless_white_space_is_not_held_back_as_the_beginning_of_a_call(form, begun):
    """To look at all of it again with each character would take the loop seconds."""
    reader = MAKERS[form]()
    pieces = merged([*reader.push(begun), *reader.push(" " * 5000)])
    assert sum(len(each) for each in pieces if isinstance(each, str)) > 4000


def test_endless_white_space_is_not_held_back_as_what_comes_before_reasoning():
    readers = [ReasoningReader(FORMS["think"], begun=False) for _ in range(3)]
    reader, whole, short = readers
    assert sum(len(reader.push(" " * 100)[1]) for _ in range(50)) > 4000
    assert whole.push(" " * 600 + "<think>a")[0] == ""
    assert short.push(" " * 500 + "<think>a") == ("a", "")


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


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("3", {"type": "integer"}, 3),
        ("3.5", {"type": "number"}, 3.5),
        ("3.5", {"type": "integer"}, "3.5"),
        ("true", {"type": "integer"}, "true"),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("3", {"type": ["string", "null"]}, "3"),
        ("3", {"type": "string"}, "3"),
        ("3", None, "3"),
        ("3", {"enum": [3]}, "3"),
        ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("{a: 1}", {"type": "object"}, "{a: 1}"),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e400", {"type": "number"}, "1e400"),
        ("[-1e400]", {"type": "array"}, "[-1e400]"),
        ('["\\ud83d"]', {"type": "array"}, '["\\ud83d"]'),
        ("9" * 25, {"type": "integer"}, int("9" * 25)),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("9" * 10_000, {"type": "integer"}, "9" * 10_000),
    ],
)
def test_a_value_has_a_type_of_its_schema_or_is_the_string_that_was_written(value, schema, expected):
    found = typed(value, schema)
    assert (found, type(found)) == (expected, type(expected))


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from("fg"), st.dictionaries(st.text("ab", min_size=1, max_size=3), st.text(max_size=9), max_size=3)
        ),
        min_size=1,
        max_size=3,
    )
)
def test_texts_given_one_by_one_come_back_as_they_were_written(calls):
    def tagged(before, name, key, value, after):
        return "\n".join(
            before + name % called + "".join(key % each + value % text for each, text in arguments.items()) + after
            for called, arguments in calls
        )

    texts = {
        "qwen": tagged(
            "<tool_call>\n", "<function=%s>\n", "<parameter=%s>", "\n%s\n</parameter>\n", "</function>\n</tool_call>"
        ),
        "glm": tagged("<tool_call>", "%s\n", "<arg_key>%s</arg_key>\n", "<arg_value>%s</arg_value>\n", "</tool_call>"),
    }
    for form, text in texts.items():
        found = read(form, text)
        assert [each.name for each in found[::2]] == [name for name, _ in calls]
        assert [json.loads(each.text) for each in found[1::2]] == [arguments for _, arguments in calls]


NEWS = st.tuples(st.sampled_from(["reasoning", "text", "begins", "goes on"]), st.text("ab", max_size=2))


@given(st.lists(st.lists(NEWS, max_size=4), max_size=8))
def test_a_row_of_parts_is_the_answer_however_its_pieces_are_cut(batches):
    parts, said, is_open, calls = AnswerParts("salt", keeps_text=True), {"reasoning": "", "text": ""}, False, []
    ended = []
    for batch in batches:
        new, pieces = {"reasoning": "", "text": ""}, []
        for kind, more in batch:
            if kind in new:
                new[kind], is_open = new[kind] + more, is_open and not more
            elif kind == "begins" or is_open:
                calls.append(["f", ""]) if kind == "begins" else None
                pieces.append(CallPiece(len(calls) - 1, "f" if kind == "begins" else None, more))
                calls[-1][1], is_open = calls[-1][1] + more, True
        said = {kind: text + new[kind] for kind, text in said.items()}
        ended += [
            each.part
            for each in parts.push(Piece(new["text"], [], [], [], [], pieces, new["reasoning"]))
            if isinstance(each, Ends)
        ]
    ended += [each.part for each in parts.end()]
    assert ended == parts.all
    assert [[part.name, part.text] for part in parts.all if part.kind == "call"] == calls
    assert {kind: "".join(part.text for part in parts.all if part.kind == kind) for kind in said} == said


def test_arguments_of_no_open_call_are_left_out():
    assert list(AnswerParts("salt").push(Piece("", [], [], [], [], [CallPiece(0, None, "1}")]))) == []
