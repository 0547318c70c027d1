"""Tools of a chat: what a client gives and chooses, how the model's template takes it, what its answer must look like.

How calls are read out of an answer stands in `gateway.openai.tool_call_parser`.
"""

import hashlib
import json
import string
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta, Raw, Struct

from mooncake_zmq.gateway.openai.constraints import ConstraintRefused, check_depth, of_lark, schema_text, within_limits
from mooncake_zmq.gateway.openai.errors import check_containers
from mooncake_zmq.gateway.openai.tagged_calls import (
    DEEPSEEK_V31,
    GLM45,
    KIMI_K2,
    MINIMAX_M2,
    QWEN3_XML,
    Section,
    SectionCalls,
    TaggedCalls,
    Tags,
)
from mooncake_zmq.gateway.openai.tool_call_parser import Arguments, Begins, Hermes, Llama, Mistral, Piece, Reader

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 << 10
MAX_CHOICE_BYTES = 4 << 10
MAX_CALLS = 16
"""The most calls in an answer with a grammar."""
MAX_READ_CALLS = 128
"""The most calls in any answer: further ones are left out."""
CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": NAME}}'
CallForm = Literal["hermes", "llama3_json", "mistral", "qwen3_xml", "glm45", "minimax_m2", "kimi_k2", "deepseek_v31"]
FORMS: dict[CallForm, tuple[str, ...]] = {
    "qwen3_xml": ("<parameter=",),
    "glm45": ("<arg_key>",),
    "minimax_m2": ("<minimax:tool_call>",),
    "kimi_k2": ("<|tool_call_argument_begin|>",),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>",),
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "llama3_json": ("<|python_tag|>", '"parameters": dictionary'),
}
"""By what a chat template says when its model writes calls so; the first form whose mark it contains counts."""
DEEPSEEK_V3 = "tool['type'] + '<｜tool▁sep｜>'"
"""By this a template's model writes the calls of DeepSeek-V3 and R1, whose marks are those of V3.1: they are not read."""
TAGS: dict[CallForm, Tags | Section] = {
    "qwen3_xml": QWEN3_XML,
    "glm45": GLM45,
    "minimax_m2": MINIMAX_M2,
    "kimi_k2": KIMI_K2,
    "deepseek_v31": DEEPSEEK_V31,
}
"""The texts around the parts of a call, in the forms that have such."""
MARKS: dict[CallForm, tuple[str, ...]] = {
    "hermes": (Hermes.MARK, Hermes.END),
    "mistral": (Mistral.MARK,),
    "llama3_json": (Llama.MARK,),
    **{form: tags.marks() for form, tags in TAGS.items()},
}
"""The texts that may be special tokens. The first begins a call, which a call of `llama3_json` may do without."""


class Words(Protocol):
    """The part of a tokenizer that tools need."""

    special_ids: frozenset[int]
    chat_template: str
    takes_tools: bool

    def encode(self, text: str, *, special: bool = True) -> Sequence[int]: ...


class _Function(Struct):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Its arguments are to follow the schema although the model chooses whether it calls."""


class _Tool(Struct):
    type: Literal["function"]
    function: _Function


class _Named(Struct, forbid_unknown_fields=True):
    name: str


class _Choice(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Named


class _CalledFunction(Struct):
    name: str
    arguments: str | dict[str, Any]


class _Called(Struct):
    function: _CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


_tools = msgspec.json.Decoder(Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None)
_choice = msgspec.json.Decoder(Literal["none", "auto", "required"] | _Choice | None)
_calls = msgspec.json.Decoder(Annotated[list[_Called], Meta(max_length=MAX_TOOLS)] | None)


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a chat. `given`: as the template takes them. `form`: how calls are written; None: they are not read, or by
    vLLM."""

    given: list[dict[str, Any]]
    form: CallForm | None
    names: tuple[str, ...]
    max_calls: int
    marked: bool
    """Whether the mark of a call is a special token."""
    constraint: bytes = b""
    """The grammar of an answer that must have calls, or whose strict functions bind their arguments."""
    binds_all: bool = False
    """Whether the grammar leaves no room for other text before calls."""

    @property
    def for_vllm(self) -> bool:
        """Whether the answer may have calls whose form is not known here, but to the parser of a vLLM."""
        return self.form is None and self.max_calls > 0

    def reader(self) -> "CallReader | None":
        """Return a reader for one answer."""
        return None if self.form is None else CallReader(self._form_reader(self.form), self.max_calls)

    @property
    def call_mark(self) -> str:
        """The text that begins calls; empty if there is none."""
        return "" if self.form is None or self.form == "llama3_json" else MARKS[self.form][0]

    def _form_reader(self, form: CallForm) -> Reader:
        match tags := TAGS.get(form):
            case Tags():
                functions = [tool["function"] for tool in self.given]
                schemas = {each["name"]: (each.get("parameters") or {}).get("properties") or {} for each in functions}
                return TaggedCalls(tags, schemas)
            case Section():
                return SectionCalls(tags)
            case _:
                return _READERS[form](self.names)


NO_TOOLS = Tools([], None, (), 0, False)


def read_tools(
    tools: Raw,
    choice: Raw,
    parallel: bool | None,
    words: Words,
    form: CallForm | Literal["vllm"] | None = None,
    answer: dict[str, Any] | None = None,
    *,
    parsed: bool = False,
) -> Tools:
    """Read the tools and the choice of a chat. `form`: the operator's; None: the template's. `answer`: the schema of an answer
    without calls, if it has one. `parsed`: whether vLLMs of the model have a parser of calls. Raises ConstraintRefused and
    RequestError."""
    (given, functions), chosen = _given(bytes(tools)), _chosen(bytes(choice))
    must = chosen == "required" or isinstance(chosen, _Choice)
    if not given:
        if must:
            raise ConstraintRefused("tool_choice", "there are no tools to choose from")
        return NO_TOOLS
    if not words.takes_tools:
        raise ConstraintRefused("tools", "this model's chat template takes no tools")
    names = tuple(function.name for function in functions)
    if chosen == "none":
        return Tools(given, None, names, 0, False)
    form = form_of(words.chat_template) if form is None else form if form != "vllm" else None
    if form is None and not parsed:
        text = (
            f"how this model writes calls is not known: the operator can set tool_call_parser to {', '.join(FORMS)}, or start "
            "vLLM with --enable-auto-tool-choice and --tool-call-parser"
        )
        raise ConstraintRefused("tools", text)
    if isinstance(chosen, _Choice):
        functions = [function for function in functions if function.name == chosen.function.name]
        if not functions:
            raise ConstraintRefused("tool_choice", "it names none of the tools")
    most = 1 if parallel is False or isinstance(chosen, _Choice) else MAX_CALLS
    if form is None and must:
        form = "llama3_json"  # the grammar makes the model write so
    if form is None:
        if answer is not None or any(function.strict for function in functions):
            param = "tools" if answer is None else "response_format"
            raise ConstraintRefused(param, "answers are held to no schema where vLLM's parser reads the model's calls")
        return Tools(given, None, names, 1 if parallel is False else MAX_READ_CALLS, False)
    marks = _special_marks(form, words)
    strict = any(function.strict for function in functions)
    if answer is not None and not must and form == "llama3_json":
        text = "this model's calls are JSON too, so that its answer may be held to a schema alone where tool_choice is none"
        raise ConstraintRefused("response_format", text)
    held = must or strict or answer is not None
    if held and form in TAGS:
        param = "tool_choice" if must else "tools" if strict else "response_format"
        raise ConstraintRefused(param, f"answers are held to no schema where the model writes calls as {form} here")
    constraint = _grammar(form, functions, most, marks, must=must, answer=answer) if held else b""
    most = 1 if parallel is False else MAX_READ_CALLS
    return Tools(given, form, names, most, bool(marks), constraint, must or answer is not None)


def form_of(template: str) -> CallForm | None:
    """Return the form in which a model writes calls, by its template."""
    found = next((form for form, marks in FORMS.items() if any(mark in template for mark in marks)), None)
    return None if found == "deepseek_v31" and DEEPSEEK_V3 in template else found


def read_calls(raw: Raw) -> list[dict[str, Any]]:
    """An assistant's earlier calls, their arguments as templates write them: as JSON, not as text of it. Raises ValueError and
    RequestError."""
    given = bytes(raw)
    check_containers(given, "messages")
    return [
        {
            "type": "function",
            **({"id": call.id} if call.id else {}),
            "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
        }
        for call in _calls.decode(given) or []
    ]


def with_names(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each tool's answer with the tool's name: some templates want that, and clients send the call's id alone."""
    names: dict[str, str] = {}
    for turn in turns:
        names |= {call["id"]: call["function"]["name"] for call in turn.get("tool_calls", ()) if "id" in call}
        if turn["role"] == "tool" and turn.get("tool_call_id") in names:
            turn.setdefault("name", names[turn["tool_call_id"]])
    return turns


def _arguments(given: str | dict[str, Any]) -> dict[str, Any]:
    found: Any = given
    if isinstance(given, str):
        text = given.encode() or b"{}"
        check_containers(text, "messages")
        found = msgspec.json.decode(text)
    if not isinstance(found, dict):
        raise ValueError("the arguments of a call are no JSON object")
    check_depth(found)
    return found


def _given(raw: bytes) -> tuple[list[dict[str, Any]], list[_Function]]:
    """Return the tools as the template takes them, and parsed."""
    if len(raw) > MAX_TOOLS_BYTES:
        raise ConstraintRefused("tools", f"{len(raw)} bytes of JSON are more than {MAX_TOOLS_BYTES}")
    check_containers(raw, "tools")
    try:
        given = _tools.decode(raw) or []
        check_depth(given)
        if other := next((kind for tool in given if (kind := tool.get("type", "function")) != "function"), None):
            raise ValueError(f"tools are of type 'function', not {str(other)[:64]!r}: no other is supported")
        functions = [tool.function for tool in msgspec.convert(given, list[_Tool])]
        for function in functions:
            kind = (function.parameters or {}).get("type", "object")
            if kind not in ("object", ["object"]):
                raise ValueError(f"{function.name[:64]}: parameters are those of an object, not of type {kind!r}")
        return given, functions
    except (ValueError, RecursionError) as error:
        raise ConstraintRefused("tools", str(error)[:200]) from None


def _chosen(raw: bytes) -> "Literal['none', 'auto', 'required'] | _Choice | None":
    if len(raw) > MAX_CHOICE_BYTES:
        raise ConstraintRefused("tool_choice", f"{len(raw)} bytes of JSON are more than {MAX_CHOICE_BYTES}")
    try:
        chosen: Literal["none", "auto", "required"] | _Choice | None = _choice.decode(raw)
    except (ValueError, RecursionError):
        raise ConstraintRefused("tool_choice", f"{CHOICES}, not {raw[:64].decode(errors='replace')}") from None
    return chosen


# --- the grammar of an answer with calls


def _special_marks(form: CallForm, words: Words) -> dict[str, int]:
    """Return those of the marks that are special tokens."""
    found = {}
    for mark in MARKS[form]:
        ids = words.encode(mark, special=False)
        if len(ids) == 1 and ids[0] in words.special_ids:
            found[mark] = ids[0]
    return found


def _grammar(
    form: CallForm,
    functions: list[_Function],
    most: int,
    marks: dict[str, int],
    *,
    must: bool,
    answer: dict[str, Any] | None,
) -> bytes:
    """At most so many calls as the model writes them, with arguments of their schemas; unless they must be, in their place an
    answer of its schema, or text around them. Raises ConstraintRefused."""
    alone = must or answer is not None
    names = [f"body_{number}" for number in range(len(functions))]
    lines = [f"body: {' | '.join(names)}"]
    for name, function in zip(names, functions, strict=True):
        lines += _body(name, function, "parameters" if form == "llama3_json" else "arguments", must=must)
    if not alone:
        lines.append("TEXT: /(.|\\n)*/")
    match form:
        case "hermes":
            start = _several("call", "\\n", most) if alone else f"call{{0,{most}}} TEXT"
            opening = _mark("open", Hermes.MARK, marks, lines, alone=alone)
            lines.append(f'call: {opening} "\\n" body "\\n" {_literal(Hermes.END, marks)}')
        case "mistral":
            opening = _mark("open", Mistral.MARK, marks, lines, alone=alone)
            start = f'{opening} "[" {_several("body", ", ", most)} "]"' + ("" if alone else " | TEXT")
        case "llama3_json":
            start = _several("body", "; ", most) + ("" if alone else " | PLAIN")
            lines += [] if alone else ["PLAIN: /(\\s*[^{\\s](.|\\n)*)?/"]
    if answer is not None and not must:
        start = f"answer | {start}"
        lines.append(f"answer: %json {schema_text(answer)}")
    return within_limits("tools", of_lark("\n".join([f"start: {start}", *lines])))


def _body(name: str, function: _Function, key: str, *, must: bool) -> list[str]:
    """One call's object. Where it need not come, the arguments alone of strict functions are held to their schema."""
    schema = function.parameters if must or function.strict else None
    try:
        text = schema_text(_closed({"type": "object", **(schema or {})}))
    except ValueError as error:
        raise ConstraintRefused("tools", f"{function.name[:64]}: {error}") from None
    opening = json.dumps(f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{key}": ')
    return [f'{name}: {opening} {name}_arguments "}}"', f"{name}_arguments: %json {text}"]


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have the properties it names and no others, unless it says something about others: a small
    model that may invent properties does not stop. A schema that combines objects is returned as it is."""
    if _combines(schema):
        return schema
    closed: dict[str, Any] = _with_closed(schema)
    return closed


def _with_closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        name: {key: _with_closed(each) for key, each in value.items()}
        if name in NAMED_SCHEMAS and isinstance(value, dict)
        else value
        if name in DATA
        else _with_closed(value)
        for name, value in schema.items()
    }
    return found | {"additionalProperties": False} if _is_open(schema) else found


def _is_open(schema: dict[str, Any]) -> bool:
    return bool(schema.get("properties")) and not schema.keys() & ABOUT_OTHERS


def _combines(schema: Any) -> bool:
    """Return whether an object's properties may stand in several schemas that hold together."""
    if isinstance(schema, list):
        return any(map(_combines, schema))
    if not isinstance(schema, dict):
        return False
    several = isinstance(parts := schema.get("allOf"), list) and len(parts) > 1
    beside = "properties" in schema and bool(schema.keys() & BESIDE)
    return several or beside or any(map(_combines, schema.values()))


NAMED_SCHEMAS = ("properties", "$defs", "definitions")
"""Keywords whose members are schemas by name."""
DATA = ("const", "enum", "default", "examples")
"""Keywords whose value is no schema."""
ABOUT_OTHERS = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
BESIDE = {"allOf", "anyOf", "oneOf", "$ref"}


def _several(one: str, between: str, most: int) -> str:
    return f'{one} ("{between}" {one}){{0,{most - 1}}}' if most > 1 else one


def _literal(mark: str, marks: dict[str, int]) -> str:
    return f"<[{marks[mark]}]>" if mark in marks else json.dumps(mark)


def _mark(rule: str, mark: str, marks: dict[str, int], lines: list[str], *, alone: bool) -> str:
    """The rule that opens calls; before it may stand text, which ends with the first mark in it."""
    if alone:
        return _literal(mark, marks)
    if mark in marks:
        return f"TEXT {_literal(mark, marks)}"
    lines.append(f"{rule}[lazy]: TEXT {_literal(mark, marks)}")
    return rule


# --- an answer as it grows

_READERS: dict[CallForm, Callable[[tuple[str, ...]], Reader]] = {
    "hermes": lambda names: Hermes(),
    "mistral": lambda names: Mistral(),
    "llama3_json": Llama,
}


@dataclass(slots=True)
class CallPiece:
    """The new part of call `index`: its name if it begins, and more of its arguments."""

    index: int
    name: str | None
    arguments: str


class CallReader:
    """The text and calls of one answer."""

    def __init__(self, reader: Reader, max_calls: int) -> None:
        """Read one answer. `max_calls`: further calls are left out."""
        self.calls = 0
        self._reader = reader
        self._max_calls = max_calls

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """Return the text outside calls, and the new parts of the calls."""
        return self._pieces(self._reader.push(text))

    def flush(self) -> tuple[str, list[CallPiece]]:
        """Return the text that was held back and begins no call."""
        return self._pieces(self._reader.flush())

    def _pieces(self, events: list[Piece]) -> tuple[str, list[CallPiece]]:
        text, pieces = "", list[CallPiece]()
        for each in events:
            match each:
                case Begins(name):
                    self.calls += 1
                    pieces.append(CallPiece(self.calls - 1, name, ""))
                case Arguments(more) if pieces and pieces[-1].index == self.calls - 1:
                    pieces[-1].arguments += more
                case Arguments(more):
                    pieces.append(CallPiece(self.calls - 1, None, more))
                case str():
                    text += each
        return text, [piece for piece in pieces if piece.index < self._max_calls]


def call_deltas(pieces: list[CallPiece], salt: str) -> list[dict[str, Any]]:
    """The new parts of calls as a stream has them, each call once: its first part has its name. `salt`: of the answer."""
    return [_delta(index, [*new], salt) for index, new in groupby(pieces, key=lambda piece: piece.index)]


def _delta(index: int, new: list[CallPiece], salt: str) -> dict[str, Any]:
    arguments = "".join(piece.arguments for piece in new)
    if new[0].name is None:
        return {"index": index, "function": {"arguments": arguments}}
    return {"index": index, **_call(index, new[0].name, arguments, salt)}


def whole_calls(pieces: list[CallPiece], salt: str) -> list[dict[str, Any]]:
    """Return all calls of an answer."""
    names: dict[int, str] = {}
    texts: defaultdict[int, list[str]] = defaultdict(list)
    for piece in pieces:
        texts[piece.index].append(piece.arguments)
        if piece.name is not None:
            names[piece.index] = piece.name
    return [_call(index, name, "".join(texts[index]), salt) for index, name in names.items()]


def _call(index: int, name: str, arguments: str, salt: str) -> dict[str, Any]:
    """Its id is of nine letters and digits: there are templates that take no other."""
    number = int.from_bytes(hashlib.blake2b(f"{salt}/{index}".encode(), digest_size=16).digest())
    digits = [_DIGITS[number // 36**place % 36] for place in range(9)]
    return {"id": "".join(digits), "type": "function", "function": {"name": name, "arguments": arguments}}


_DIGITS = string.digits + string.ascii_lowercase
