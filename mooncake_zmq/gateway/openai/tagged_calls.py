"""Readers of tool calls that models write between tags of their own, with arguments one by one or as one JSON object. PURE.

The forms are those that the models' chat templates show: Qwen3-Coder and Qwen3.5, GLM-4.5 and later, MiniMax-M2, Kimi-K2 and
DeepSeek-V3.1.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from mooncake_zmq.gateway.openai.tool_call_parser import MAX_HELD, Arguments, Begins, JsonCall, Marked, Piece

LONGEST_NAME = 256
"""Most characters of the name of a tool or of an argument."""
JSON_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}


PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Words that models write for those of JSON."""


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts around the parts of a call whose arguments are written one by one. White space between the parts is skipped."""

    open: str
    """Before one or more calls."""
    name: str
    """Before the tool's name; empty: the name follows at once."""
    name_ends: tuple[str, ...]
    """After the name: the first one ends it and is nothing else, any other one begins the next part."""
    key: str
    key_end: str
    value: str
    """Before an argument's value; empty: it follows the key at once."""
    value_end: str
    end: str
    """After a call."""
    close: str = ""
    """After the calls; empty: `end` is."""
    trims: bool = True
    """Whether one line break at either end of a value is no part of it."""

    def marks(self) -> tuple[str, ...]:
        """Return the texts that may be special tokens."""
        return tuple(filter(None, (self.open, self.close or self.end)))


@dataclass(frozen=True, slots=True)
class Section:
    """The texts around the parts of a call whose arguments are one JSON object."""

    open: str
    """Before one or more calls."""
    call: str
    """Before a tool's name."""
    arguments: str
    """Between the name and the arguments."""
    end: str
    """After a call."""
    close: str
    """After the calls."""

    def marks(self) -> tuple[str, ...]:
        """Return the texts that may be special tokens."""
        return self.open, self.call, self.arguments, self.end, self.close


QWEN3_XML = Tags(
    open="<tool_call>",
    name="<function=",
    name_ends=(">",),
    key="<parameter=",
    key_end=">",
    value="",
    value_end="</parameter>",
    end="</function>",
    close="</tool_call>",
)
MINIMAX_M2 = Tags(
    open="<minimax:tool_call>",
    name='<invoke name="',
    name_ends=('">',),
    key='<parameter name="',
    key_end='">',
    value="",
    value_end="</parameter>",
    end="</invoke>",
    close="</minimax:tool_call>",
)
GLM45 = Tags(
    open="<tool_call>",
    name="",
    name_ends=("\n", "<arg_key>", "</tool_call>"),
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    end="</tool_call>",
    trims=False,
)
KIMI_K2 = Section(
    open="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>",
    arguments="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    close="<|tool_calls_section_end|>",
)
DEEPSEEK_V31 = Section(
    open="<｜tool▁calls▁begin｜>",
    call="<｜tool▁call▁begin｜>",
    arguments="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    close="<｜tool▁calls▁end｜>",
)


class _Parts(Marked):
    """A reader that goes from part to part of a call."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.MARK = mark
        self._part = ""
        """The text since the last tag."""

    def _after(self, char: str, tags: Mapping[str, Callable[[], None]]) -> bool:
        """Take a character where one of these tags is expected, behind white space; call what the tag means. Return False where
        the text is none of them."""
        self._part = (self._part + char).lstrip()
        if (found := tags.get(self._part)) is not None:
            self._part = ""
            found()
            return True
        return any(tag.startswith(self._part) for tag in tags)

    def _as_text(self) -> None:
        """Treat as text what was held back, or what followed a call that had begun."""
        part, self._part = self._part, ""
        if self._held:
            self._give_up()
        else:
            self._go(self._text, part)

    def _skip_space(self, char: str) -> None:
        """Skip white space behind the calls: it is no part of the text."""
        if not char.isspace():
            self._go(self._text, char)


class TaggedCalls(_Parts):
    """Calls whose arguments are written one by one: each is returned once it is complete, as JSON of its type."""

    def __init__(self, tags: Tags, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: those of the arguments by name, by the tool's name."""
        super().__init__(tags.open)
        self._tags, self._schemas = tags, schemas
        self._types: Mapping[str, Any] = {}
        self._key_name = ""
        self._given = 0
        self._value_chars: list[str] = []

    def _marked(self) -> None:
        self._part = ""
        self._go(self._before_name if self._tags.name else self._name)

    def _before_name(self, char: str) -> None:
        self._held += char
        if not self._after(char, {self._tags.name: lambda: self._go(self._name)}) or len(self._held) > MAX_HELD:
            self._as_text()

    def _name(self, char: str) -> None:
        self._held += char
        self._part = (self._part + char).lstrip()
        end = next((end for end in self._tags.name_ends if self._part.endswith(end)), None)
        if end is None:
            if len(self._part) > LONGEST_NAME or len(self._held) > MAX_HELD:
                self._as_text()
            return
        name, self._part = self._part.removesuffix(end).strip(), ""
        if not name or "<" in name:
            self._as_text()
            return
        self._pieces.append(Begins(name))
        self._held, self._given, self._types = "", 0, self._schemas.get(name, {})
        self._go(self._between, end if end != self._tags.name_ends[0] else "")

    def _between(self, char: str) -> None:
        """Take a character where an argument may begin and the call may end."""
        tags = {self._tags.key: lambda: self._go(self._key), self._tags.end: self._end}
        if self._tags.close:
            tags[self._tags.close] = self._end_all
        if not self._after(char, tags):
            self._break_off()

    def _key(self, char: str) -> None:
        self._part += char
        if self._part.endswith(self._tags.key_end):
            self._key_name, self._part = self._part.removesuffix(self._tags.key_end).strip(), ""
            self._go(self._before_value if self._tags.value else self._value)
        elif len(self._part) > LONGEST_NAME:
            self._break_off()

    def _before_value(self, char: str) -> None:
        if not self._after(char, {self._tags.value: lambda: self._go(self._value)}):
            self._break_off()

    def _value(self, char: str) -> None:
        chars, end = self._value_chars, self._tags.value_end
        chars.append(char)
        if char == end[-1] and "".join(chars[-len(end) :]) == end:
            value = "".join(chars[: -len(end)])
            if self._tags.trims:
                value = value.removeprefix("\n").removesuffix("\n")
            self._value_chars = []
            before = ", " if self._given else "{"
            written = json.dumps(typed(value, self._types.get(self._key_name)), ensure_ascii=False)
            self._pieces.append(Arguments(f"{before}{json.dumps(self._key_name, ensure_ascii=False)}: {written}"))
            self._given += 1
            self._go(self._between)

    def _break_off(self) -> None:
        """End a call behind which stands what belongs to none."""
        self._finish()
        self._as_text()

    def _finish(self) -> None:
        """End the arguments of a call."""
        self._pieces.append(Arguments("}" if self._given else "{}"))

    def _end(self) -> None:
        self._finish()
        self._go(self._behind if self._tags.close else self._skip_space)

    def _end_all(self) -> None:
        """End a call that has no end of its own."""
        self._finish()
        self._go(self._skip_space)

    def _behind(self, char: str) -> None:
        """Take a character behind a call, where another one or the end of all may follow."""
        tags = {self._tags.close: lambda: self._go(self._skip_space), self._tags.name: lambda: self._go(self._name)}
        if not self._after(char, tags):
            self._as_text()

    def flush(self) -> list[Piece]:
        """Return the text that was held back and begins no call; a call that was cut short stays as it is."""
        self._part, self._value_chars = "", []
        return super().flush()


class SectionCalls(_Parts):
    """Calls in a section, each a name and a JSON object."""

    def __init__(self, section: Section) -> None:
        super().__init__(section.open)
        self._section = section

    def _marked(self) -> None:
        self._part = ""
        self._go(self._before_call)

    def _before_call(self, char: str) -> None:
        self._held += char
        if not self._after(char, {self._section.call: lambda: self._go(self._name)}) or len(self._held) > MAX_HELD:
            self._as_text()

    def _name(self, char: str) -> None:
        self._held += char
        self._part += char
        if self._part.endswith(self._section.arguments):
            name, self._part = called(self._part.removesuffix(self._section.arguments)), ""
            self._open(JsonCall(name=name or None))
        elif len(self._part) > LONGEST_NAME:
            self._as_text()

    def _behind(self, char: str) -> None:
        """Take a character behind a call's object."""
        section = self._section
        ends = {section.end: lambda: None, section.call: self._again, section.close: lambda: self._go(self._skip_space)}
        if not self._after(char, ends):
            self._as_text()

    def _again(self) -> None:
        self._held = self._section.call
        self._go(self._name)

    def flush(self) -> list[Piece]:
        """Return the text that was held back and begins no call."""
        self._part = ""
        return super().flush()


def called(head: str) -> str:
    """Return a tool's name out of what stands before its arguments: `name`, or Kimi's `functions.name:0`."""
    head = head.strip()
    name, _, number = head.rpartition(":")
    return (name if number.isdecimal() else head).removeprefix("functions.")


def typed(value: str, schema: Any) -> Any:
    """Return an argument's value by its schema: JSON of one of the schema's types, or else the string that was written."""
    kinds = _kinds(schema)
    if not kinds - {"string"}:
        return value
    text = value.strip()
    try:
        found = msgspec.json.decode(PYTHON_WORDS.get(text, text))
    except (ValueError, RecursionError):
        return value
    allowed = tuple(type_ for kind in kinds for type_ in JSON_TYPES.get(kind, ()))
    return found if type(found) in allowed else value


def _kinds(schema: Any) -> set[str]:
    """Return the types that a schema permits, as far as it names them."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type", [])
    kinds = {kind for kind in ([named] if isinstance(named, str) else named) if isinstance(kind, str)}
    for several in ("anyOf", "oneOf"):
        parts = schema.get(several)
        kinds |= set().union(*map(_kinds, parts)) if isinstance(parts, list) else set()
    return kinds
