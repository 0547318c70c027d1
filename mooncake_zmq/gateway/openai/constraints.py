"""Forms of an answer that a client may ask for, as OpenAI and vLLM name them, made into the one grammar that engines follow.

It decides what is asked and holds it against limits of size; whether the grammar can be followed, `engine.constraint` says.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from mooncake_zmq.core.grammar import links
from mooncake_zmq.core.messages import MAX_CONSTRAINT_BYTES
from mooncake_zmq.gateway.openai.rejected_params import NULL, Unsupported

MAX_SCHEMA_BYTES = 64 << 10
"""The most bytes of a schema, a pattern or a grammar."""
MAX_DEPTH = 64
MAX_MULTIPLE = 2048
"""The largest common multiple of all `multipleOf`: a grammar has as many states for numbers, and half a minute's work."""
MAX_CHOICES = 2048
MAX_LINKS = 1000
"""Rules and references to schemas: a quarter of what engines take."""
WHITESPACE = r"[ \n\r\t]{1,40}"
"""Between the parts of JSON: a model that goes astray is not to fill its answer with it."""


class ConstraintRefused(Exception):
    """The form that a client asks for is not one, or is too large."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param, self.message = param, message


class Constrained(Unsupported, frozen=True, kw_only=True):
    """OpenAI's and vLLM's ways to say it. At most one may say something."""

    response_format: Raw = NULL
    guided_json: Raw = NULL
    guided_regex: Raw = NULL
    guided_choice: Raw = NULL
    guided_grammar: Raw = NULL
    structured_outputs: Raw = NULL

    def constraint(self) -> tuple[str, bytes]:
        """The parameter that asks, and the grammar; both empty if none does. Raises ConstraintRefused."""
        found: list[tuple[str, bytes]] = []
        for name, grammar in _READERS.items():
            raw = bytes(getattr(self, name))
            if raw != b"null" and (read := _read(name, raw, grammar)):
                found.append((name, read))
        if len(found) > 1:
            raise ConstraintRefused(found[1][0], f"give one of {' and '.join(name for name, _ in found)}")
        return found[0] if found else ("", b"")


class _JsonSchema(Struct, forbid_unknown_fields=True):
    schema: Raw
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class _ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _Structured(Struct, forbid_unknown_fields=True):
    """vLLM's later way. What only chooses among its own libraries is taken as long as it asks for nothing."""

    json: Raw = NULL
    regex: Raw = NULL
    choice: Raw = NULL
    grammar: Raw = NULL
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None


_response_format = msgspec.json.Decoder(_ResponseFormat)
_structured = msgspec.json.Decoder(_Structured)
_pattern = msgspec.json.Decoder(Annotated[str, Meta(min_length=1)])
_choices = msgspec.json.Decoder(Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES)])
_schema = msgspec.json.Decoder(dict[str, Any])
_schema_text = msgspec.json.Decoder(dict[str, Any] | str)


def _read(name: str, raw: bytes, grammar: Callable[[bytes], bytes]) -> bytes:
    if len(raw) > MAX_SCHEMA_BYTES:
        raise ConstraintRefused(name, f"{len(raw)} bytes of JSON are more than {MAX_SCHEMA_BYTES}")
    with _as_refused(name):
        made = grammar(raw)
    return within_limits(name, made)


def within_limits(name: str, grammar: bytes) -> bytes:
    """The grammar, if engines take one of its size. Raises ConstraintRefused."""
    if len(grammar) > MAX_CONSTRAINT_BYTES:
        raise ConstraintRefused(name, f"it makes a grammar of {len(grammar)} bytes, more than {MAX_CONSTRAINT_BYTES}")
    with _as_refused(name):
        found = links(grammar.decode())
    if found > MAX_LINKS:
        raise ConstraintRefused(name, f"its {found} rules and references are more than {MAX_LINKS}")
    return grammar


@contextlib.contextmanager
def _as_refused(name: str) -> Iterator[None]:
    """Turn errors of msgspec and llguidance into the client's mistake at `name`."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise ConstraintRefused(name, str(error)[:200]) from None


# --- the grammars, as llguidance writes them down; its library is loaded where one is asked for


OPTIONS: dict[str, Any] = {"whitespace_pattern": WHITESPACE, "whitespace_flexible": True, "lenient": False}


NOTES: dict[str, type] = {"title": str, "description": str, "examples": list}
VALUES = ("enum", "const")
"""Keywords whose content belongs to the answer, and is kept as it is."""


def schema_text(schema: dict[str, Any]) -> str:
    """A schema as JSON that is safe to compile, without what it says to readers alone. Raises ValueError."""
    _check_schema(schema)
    return msgspec.json.encode(_bare(schema) | {"x-guidance": OPTIONS}).decode()


def _bare(schema: Any) -> Any:
    """Without notes. What has a note's name but not its kind is a schema: that of a property, say."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: value for name, value in schema.items() if not isinstance(value, NOTES.get(name, ()))}
    return {name: value if name in VALUES else _bare(value) for name, value in kept.items()}


def of_schema(schema: dict[str, Any]) -> bytes:
    """JSON that it describes, its parts in the order of the schema's. Raises ValueError."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(schema_text(schema)).encode()


def of_lark(text: str) -> bytes:
    """Text that a grammar in Lark's syntax describes."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text).encode()


def _of_format(raw: bytes) -> bytes:
    asked = _response_format.decode(raw)
    if (asked.json_schema is not None) != (asked.type == "json_schema"):
        raise ValueError("json_schema is given with type json_schema, and with no other")
    if asked.json_schema is not None:
        return of_schema(_schema.decode(asked.json_schema.schema))
    return of_schema({"type": "object"}) if asked.type == "json_object" else b""


def _of_json(raw: bytes) -> bytes:
    given = _schema_text.decode(raw)
    return of_schema(_schema.decode(given) if isinstance(given, str) else given)


def _of_regex(raw: bytes) -> bytes:
    """Match the whole answer. Classes such as `\\d` hold ASCII alone, as in vLLM."""
    from llguidance import LLMatcher, regex_to_lark

    return LLMatcher.grammar_from_regex(regex_to_lark(_pattern.decode(raw), use_ascii="dws")).encode()


def _of_choice(raw: bytes) -> bytes:
    """As one word of many, which takes no more of the parser than any word."""
    return of_lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in _choices.decode(raw)))


def _of_grammar(raw: bytes) -> bytes:
    """Lark's syntax or llama.cpp's GBNF."""
    from llguidance import grammar_from

    text = _pattern.decode(raw)
    if text.lstrip().startswith("{") or any(word in text for word in ("%json", "%llguidance", "%regex")):
        raise ValueError("%json, %llguidance, %regex and JSON are not supported: give a schema as such")
    return grammar_from("grammar", text).encode()


def _of_structured(raw: bytes) -> bytes:
    asked = _structured.decode(raw)
    ways = {"json": _of_json, "regex": _of_regex, "choice": _of_choice, "grammar": _of_grammar}
    given = [(bytes(value), way) for name, way in ways.items() if bytes(value := getattr(asked, name)) != b"null"]
    if len(given) + bool(asked.json_object) > 1:
        raise ValueError("give one of json, regex, choice, grammar and json_object")
    return given[0][1](given[0][0]) if given else of_schema({"type": "object"}) if asked.json_object else b""


_READERS: dict[str, Callable[[bytes], bytes]] = {
    "response_format": _of_format,
    "guided_json": _of_json,
    "guided_regex": _of_regex,
    "guided_choice": _of_choice,
    "guided_grammar": _of_grammar,
    "structured_outputs": _of_structured,
}


def check_depth(value: Any) -> None:
    """Before it is walked by what goes one call deeper for each level. Raises ValueError."""
    for _ in _levels(value):
        pass


def _levels(value: Any) -> Iterator[list[Any]]:
    """A value of JSON, all that stands in it, all that stands in that. Raises ValueError where it is too deep."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        yield level
        inner: list[Any] = []
        for each in level:
            inner += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        if not (level := inner):
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def _check_schema(schema: dict[str, Any]) -> None:
    """Before a library walks it. Raises ValueError."""
    multiple = 1
    for level in _levels(schema):
        for each in level:
            if isinstance(each, dict):
                multiple = math.lcm(multiple, _states(each.get("multipleOf")))
        if multiple > MAX_MULTIPLE:
            raise ValueError(f"the common multiple of all multipleOf is more than {MAX_MULTIPLE}")


def _states(multiple_of: Any) -> int:
    """The states that `multipleOf` takes: its digits, without the power of ten."""
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, int | float) or multiple_of <= 0:
        return 1  # no number, which the library refuses, or a name in `properties`
    return int(repr(multiple_of).partition("e")[0].replace(".", "").strip("0") or 1)
