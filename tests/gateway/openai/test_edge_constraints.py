"""What is asked of an answer's form reaches the engines as one grammar, or is a 400 that says why not."""

import json

import pytest
from scripted_actor import ScriptedActor

from mooncake_zmq.engine.constraint import Compiler, ConstraintError
from mooncake_zmq.engine.tokenizer import byte_tokenizer

PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
NOTHING = [{}, {"response_format": {"type": "text"}}, {"response_format": None}, {"guided_json": None}]
NOTHING += [{"structured_outputs": {}}, {"structured_outputs": {"json": None, "json_object": False}}]
FORMS = [
    ({"response_format": SCHEMA}, '{"age": 3}', '{"name": 3}'),
    ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
    ({"guided_json": PERSON}, '{ "age":\n3}', "3"),
    ({"guided_json": json.dumps(PERSON)}, '{"age": 3}', "3"),
    ({"guided_regex": r"^[a-c]+\d$"}, "abc7", "abc"),
    ({"guided_regex": r"[\d/]+\s"}, "1/2\n", "\u0661 "),
    ({"guided_choice": ["yes", 'n"o', "\u00e9"]}, 'n"o', "no"),
    ({"guided_grammar": 'start: "a" | "b" start'}, "bba", "bb"),
    ({"guided_grammar": 'root ::= [0-9]+ ("+" root)?'}, "1+2", "+"),
    ({"structured_outputs": {"json": PERSON}}, '{"age": 3}', "3"),
    ({"structured_outputs": {"regex": "a+"}}, "aa", "b"),
    ({"structured_outputs": {"choice": ["x"]}}, "x", "y"),
    ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
]


def follows(constraint, text):
    try:
        matcher = Compiler(byte_tokenizer, 512).matcher(constraint, list(text.encode()))
        return bool(matcher.allowed()[256 // 8] & 1)
    except ConstraintError:
        return False


@pytest.mark.parametrize("asked", NOTHING, ids=json.dumps)
def test_what_asks_for_no_form_gives_none(asked):
    actor = ScriptedActor()
    assert actor.complete(**asked).status_code == 200
    assert actor.only.sampling.constraint == b""


@pytest.mark.parametrize(("asked", "good", "bad"), FORMS, ids=lambda case: json.dumps(case)[:40])
def test_each_way_to_ask_becomes_its_grammar_in_both_endpoints(asked, good, bad):
    for call in (ScriptedActor.complete, ScriptedActor.chat):
        actor = ScriptedActor()
        response = call(actor, **asked)
        assert response.status_code == 200, response.text
        constraint = actor.only.sampling.constraint
        assert follows(constraint, good)
        assert not follows(constraint, bad)
        assert actor.only.sampling.reads_past


def deep(times):
    schema = {"type": "string"}
    for _ in range(times):
        schema = {"type": "array", "items": schema}
    return schema


def multiples(*numbers):
    return {"allOf": [{"type": "number", "multipleOf": number} for number in numbers]}


def chained(times):
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(times)}
    return {"$ref": "#/$defs/d0", "$defs": chain | {f"d{times}": {"type": "null"}}}


def ruled(times):
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(times)) + f'r{times}: "a"'


REFUSED = [
    ("guided_grammar", ruled(3000), "rules and references"),
    ("guided_json", chained(1480), "rules and references"),
    ("response_format", {"type": "xml"}, "xml"),
    ("response_format", "json", "object"),
    ("response_format", {"type": "json_schema"}, "json_schema is given"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "n"}}, "schema"),
    ("response_format", {"type": "json_object", "json_schema": SCHEMA["json_schema"]}, "json_schema is given"),
    ("guided_json", {"type": "strin"}, "strin"),
    ("guided_json", "{", "truncated"),
    ("guided_json", {"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
    ("guided_json", {"not": {}, "x-guidance": {"lenient": True}}, 'Unimplemented keys: ["not"]'),
    ("guided_json", {"$ref": "#/$defs/none"}, "does not exist"),
    ("guided_json", [1], "object"),
    ("guided_json", deep(80), "nested more than 64 deep"),
    ("guided_json", {"enum": ["x" * (64 << 10)]}, "bytes of JSON are more than"),
    ("guided_json", multiples(999983), "multipleOf"),
    ("guided_json", multiples(997, 991), "multipleOf"),
    ("guided_json", multiples(0.999983), "multipleOf"),
    ("guided_regex", "(a", "unclosed"),
    ("guided_regex", "", "length >= 1"),
    ("guided_regex", "(?=a)b", "look"),
    ("guided_regex", 7, "str"),
    ("guided_choice", [], "length >= 1"),
    ("guided_choice", ["a"] * 2049, "length <= 2048"),
    ("guided_choice", "yes", "array"),
    ("guided_grammar", "garbage <<<", "grammar"),
    ("guided_grammar", 'start: "a" b', "b"),
    ("guided_grammar", 'start: %json {"type": "integer", "multipleOf": 999983}', "%json"),
    ("guided_grammar", ' {"grammars": [{"lark_grammar": "start: /a/"}]} start: "a"', "give a schema as such"),
    ("guided_grammar", "start: start", "no answer can follow it"),
    ("structured_outputs", {"jsn": {}}, "jsn"),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}, "give one of"),
    ("structured_outputs", {"structural_tag": "x"}, "structural_tag"),
]


@pytest.mark.parametrize(("name", "value", "why"), REFUSED, ids=lambda case: json.dumps(case)[:40])
def test_what_is_no_form_or_too_much_is_refused_and_told_why(name, value, why):
    response = ScriptedActor().complete(**{name: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (name, "invalid_value")
    assert why in error["message"]
    assert len(error["message"]) < 400


def test_two_forms_at_once_are_refused():
    response = ScriptedActor().complete(guided_regex="a", response_format={"type": "json_object"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "give one of response_format and guided_regex"


def test_multiples_that_are_few_states_are_taken():
    for numbers in ((7,), (0.01,), (100000,), (0.25, 4)):
        assert ScriptedActor().complete(guided_json=multiples(*numbers)).status_code == 200


@pytest.mark.parametrize("multiple", [0.1, 0.3, 0.05, 0.7, 1e-7, 1.1])
def test_a_multiple_is_what_is_written_whatever_its_binary_fraction(multiple):
    assert ScriptedActor().complete(guided_json=multiples(multiple)).status_code == 200


def test_chains_of_a_size_that_is_asked_for_are_taken():
    assert ScriptedActor().complete(guided_json=chained(400)).status_code == 200
    assert ScriptedActor().complete(guided_grammar=ruled(400)).status_code == 200


def test_what_a_schema_says_to_readers_is_not_sent_to_engines():
    note = {"title": "NOTE", "description": "NOTE", "examples": ["NOTE"]}
    named = {name: note | {"const": {"title": "kept"}} for name in note}
    actor = ScriptedActor()
    assert actor.complete(guided_json=note | {"type": "object", "properties": named, "required": list(note)}).status_code == 200
    constraint = actor.only.sampling.constraint
    assert b"NOTE" not in constraint
    assert follows(constraint, json.dumps(dict.fromkeys(note, {"title": "kept"})))
    assert not follows(constraint, json.dumps(dict.fromkeys(note, {})))
    assert not follows(constraint, "{}")


def test_a_property_may_be_named_as_a_keyword():
    named = {"type": "object", "properties": {"multipleOf": {"type": "integer"}}}
    assert ScriptedActor().complete(guided_json=named).status_code == 200


def test_all_choices_of_a_call_follow_it():
    actor = ScriptedActor()
    assert actor.complete(guided_regex="a+", n=3).status_code == 200
    assert len({request.sampling.constraint for request in actor.requests.values()}) == 1
