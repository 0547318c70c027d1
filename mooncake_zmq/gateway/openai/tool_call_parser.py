"""Calls of tools, read out of an answer as it grows, in the forms in which models write them. PURE.

A reader goes character by character: however a text is cut into pieces, the same calls come out of it. What only looks like
the beginning of a call is text in the end; once a call's name is out, it stays one.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

ARGUMENTS = ("arguments", "parameters")
MAX_HELD = 512
"""Most characters that are held back because a call may begin with them, before its object: white space is no end of them."""


@dataclass(frozen=True, slots=True)
class Begins:
    """A call of this tool. Its arguments follow, as the text of a JSON value, in pieces."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of those of the call that began last."""

    text: str


Piece = str | Begins | Arguments
"""A string is text beside calls."""


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge adjacent pieces of one kind."""
    found: list[Piece] = []
    for kind, each in groupby(pieces, type):
        if kind is Begins:
            found += each
        elif kind is Arguments:
            found.append(Arguments("".join(piece.text for piece in each if isinstance(piece, Arguments))))
        else:
            found.append("".join(piece for piece in each if isinstance(piece, str)))
    return found


class Reader:
    """The base of the readers of all forms: text in, pieces out."""

    def __init__(self) -> None:
        self._state: Callable[[str], None] = self._text
        """Takes the next character."""
        self._pieces: list[Piece] = []
        self._held = ""
        """Holds back text that may be the beginning of a call."""
        self._call: JsonCall | None = None

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain with this text."""
        for char in text:
            self._state(char)
        return self._take()

    def flush(self) -> list[Piece]:
        """Return the text that was held back and begins no call."""
        self._give_up()
        return self._take()

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return merged(pieces)

    def _text(self, char: str) -> None:
        """Take a character outside calls."""
        raise NotImplementedError

    def _behind(self, char: str) -> None:
        """Take a character behind a call."""
        raise NotImplementedError

    def _go(self, state: Callable[[str], None], chars: str = "") -> None:
        """Pass characters that were taken before to another state."""
        self._state = state
        for char in chars:
            self._state(char)

    def _open(self, call: "JsonCall", chars: str = "") -> None:
        """Begin to read a call's object."""
        self._call = call
        self._go(self._object, chars)

    def _object(self, char: str) -> None:
        call = self._call
        assert call is not None
        if not call.takes(char):
            self._give_up()
            self._go(self._text, char)
            return
        self._pieces += call.push(char)
        if call.ended and call.is_begun:
            self._call, self._held = None, ""
            self._go(self._behind)
        elif call.ended:
            self._give_up()

    def _give_up(self) -> None:
        """Treat as text what was held back, and what follows."""
        call, self._call = self._call, None
        held, self._held = self._held, ""
        if call is None or not call.is_begun:
            held += "" if call is None else call.raw
            self._pieces += [held] if held else []
        self._go(self._text)


class Marked(Reader):
    """Calls that begin with a mark, wherever it stands."""

    MARK = ""

    def _text(self, char: str) -> None:
        """Hold back what may become the mark."""
        held = self._held + char
        while not self.MARK.startswith(held):
            self._pieces.append(held[0])
            held = held[1:]
        self._held = held
        if held == self.MARK:
            self._marked()

    def _marked(self) -> None:
        raise NotImplementedError


class Hermes(Marked):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after the other: Hermes, Qwen and many others."""

    MARK, END = "<tool_call>", "</tool_call>"

    def _marked(self) -> None:
        self._open(JsonCall())

    def _behind(self, char: str) -> None:
        """Take the end mark, which some models leave out."""
        held = (self._held + char).lstrip()
        self._held = ""
        if held == self.END:
            self._go(self._between)
        elif self.END.startswith(held):
            self._held = held
        else:
            self._go(self._text, held)

    def flush(self) -> list[Piece]:
        """The text that was held back and begins no call; the end of a call that was cut short is dropped."""
        if self._state == self._behind:
            self._held = ""
        return super().flush()

    def _between(self, char: str) -> None:
        """Skip space behind a call: it is not part of the text."""
        if not char.isspace():
            self._go(self._text, char)


class Mistral(Marked):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or of later models `[TOOL_CALLS]name{...}`."""

    MARK = "[TOOL_CALLS]"
    LONGEST_NAME = 256

    def _marked(self) -> None:
        self._go(self._name)

    def _name(self, char: str) -> None:
        """Take what follows the mark: a list or a name."""
        name = self._held.removeprefix(self.MARK).strip()
        if char == "[" and not name:
            self._held += char
            self._open(JsonCall())
        elif char == "{":
            self._open(JsonCall(name=name.partition("[")[0] or None), char)
        else:
            self._held += char
            if len(name) >= self.LONGEST_NAME or len(self._held) > MAX_HELD:
                self._give_up()

    def _behind(self, char: str) -> None:
        if char == ",":
            self._held = char
            self._open(JsonCall())
        elif not char.isspace():
            self._go(self._text, char if char != "]" else "")


class Llama(Reader):
    """The whole answer is `{"name": ..., "parameters": {...}}`, or some of these with `;` between them. JSON that calls none
    of the tools is text."""

    MARK = "<|python_tag|>"

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._state = self._begin

    def _begin(self, char: str) -> None:
        """Take space, the mark and space, all of which may be missing."""
        held = (self._held + char).strip()
        if char == "{" and self._held.strip() in ("", self.MARK):
            self._open(JsonCall(names=self._names), char)
        elif self.MARK.startswith(held) and len(self._held) < MAX_HELD:
            self._held += char
        else:
            self._give_up()
            self._go(self._text, char)

    def _text(self, char: str) -> None:
        self._pieces.append(char)

    def _behind(self, char: str) -> None:
        if char == ";":
            self._held = char
            self._go(self._next)
        elif not char.isspace():
            self._go(self._text, char)

    def _next(self, char: str) -> None:
        """Take a character between two calls."""
        if char == "{":
            self._open(JsonCall(names=self._names), char)
        elif char.isspace() and len(self._held) < MAX_HELD:
            self._held += char
        else:
            self._give_up()
            self._go(self._text, char)


class JsonCall:
    """One call's JSON object, character by character. Only its structure is looked at: what it says is the caller's to read."""

    def __init__(self, *, names: frozenset[str] | None = None, name: str | None = None) -> None:
        """`names`: of the tools; None: any may be called. `name`: stood before the object, which is the arguments alone."""
        self._raw: list[str] = []
        self.is_begun = False
        self.ended = False
        self._names = names
        self._name = name
        self._around = 1 if name is None else 0
        """Depth of the braces around the arguments."""
        self._key: str | None = None
        self._depth = 0
        self._string: list[str] | None = None
        self._escaped = False
        self._given = False
        self._inside = False
        """Whether the value being read is that of the arguments."""
        self._pending: list[str] = []

    @property
    def raw(self) -> str:
        """The whole text of the call, while no piece of it was returned."""
        return "".join(self._raw)

    def takes(self, char: str) -> bool:
        """Return whether the text may continue like this."""
        return self._depth > 0 or char == "{" or char.isspace()

    def push(self, char: str) -> list[Piece]:
        """The pieces that are certain with this text."""
        if not self.is_begun:
            self._raw.append(char)
        if self._string is None:
            self._outside(char)
        else:
            self._in_string(char)
        return self._known()

    def _outside(self, char: str) -> None:
        if char in "{[":
            if self._depth == self._around and not self._given and (self._around == 0 or self._key in ARGUMENTS):
                self._inside = self._given = True
            self._depth += 1
        if self._inside:
            self._pending.append(char)
        if char == '"':
            self._string = [char]
        elif char in "}]":
            self._depth -= 1
            self._inside = self._inside and self._depth > self._around
            self.ended = self._depth == 0
        elif char == "," and self._depth == 1:
            self._key = None

    def _in_string(self, char: str) -> None:
        assert self._string is not None
        if self._inside:
            self._pending.append(char)
        else:
            self._string.append(char)
        if self._escaped or char == "\\":
            self._escaped = not self._escaped
        elif char == '"':
            text, self._string = "".join(self._string), None
            if self._depth == 1 and not self._inside:
                self._word(_read(text))

    def _word(self, word: str) -> None:
        """Take a string of the object itself: a key or a value."""
        if self._key is None:
            self._key = word
        elif self._key == "name":
            self._name = word
        elif self._key in ARGUMENTS and not self._given:  # as JSON in a string
            self._given, self._pending = True, [word]

    def _known(self) -> list[Piece]:
        if self._name is None or (self._names is not None and self._name not in self._names):
            return []
        found: list[Piece] = [] if self.is_begun else [Begins(self._name)]
        self.is_begun = True
        self._raw.clear()
        if self.ended and not self._given:
            self._pending = ["{}"]
        if self._pending:
            found.append(Arguments("".join(self._pending)))
            self._pending = []
        return found


def _read(quoted: str) -> str:
    """A JSON string; of one that is none, what stands there."""
    try:
        text = str(json.loads(quoted, strict=False))
    except ValueError:
        text = quoted[1:-1]
    return text.encode(errors="replace").decode()
