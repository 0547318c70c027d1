"""The words that the code used in a sense of its own, and the field's words for them: no new name or docstring has one.

A name is split into its words, so `_on_told` and `EngineTold` both hold "told". Prose is every docstring and comment, without
what stands in backticks, since that is a name.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sources import Definition, Source


@dataclass(frozen=True)
class Word:
    """One word of the dialect: what to write instead, and regular expressions for names and for prose (None: may stand)."""

    instead: str
    name: str | None
    prose: str | None


WORDS = (
    Word("report, send, return, say which", "told|tells?|telling|untold", "told|tells?|telling|untold"),
    Word("received, receive", "heard|hears?|hearing|unheard", "heard|hears?|hearing|unheard"),
    Word("no node, no caller, none: name what is missing", "nobody|nobodys", "nobody(?:'s)?"),
    Word("the caller, any process that: name it", "whoever|whomever", "whoever|whomever"),
    Word(
        "incarnation; of a program: runs, exists",
        "(?<!half_)(?:life|lives)(?!_cycle)",
        r"(?<!half-)(?:life|lives)(?![ -]cycle)",
    ),
    Word("request, hint", "wish|wishes|wished", "wish(?:es|ed)?"),
    Word("LRU list, write-back window", "shel(?:f|ves?|ved|ving)|cold_end", "shel(?:f|ves?|ved|ving)|cold end"),
    Word("cordon, cordoned; of what is left: remaining", "rests|rested|resting|(?<=_)rest|rest(?=_)", "rests|rested|resting"),
    Word("candidates", "crowds?", "crowds?"),
    Word("disaggregated, separate", "apart", None),
    Word("channel", "lanes?", "lanes?"),
    Word("subtask", "part(?:y|ies)", "(?<!third.)part(?:y|ies)"),
    Word("snapshot", "pictures?", "pictures?"),
    Word("acceptor", "doors?", "doors?"),
    Word("request record", "accounts?", None),
    Word("handlers", "reactions?", None),
    Word("commands, requests", "asks", None),
    Word("drain", "leaving", None),
    Word("routes, peers", "talks?", None),
    Word("transfer_stats", "moves", None),
    Word("actor_parts", "shells?", None),
    Word("speed", "pace", None),
    Word("stub_node", "opposite", None),
    Word("timeout, attempts", "patience|patient", "patience|patient"),
    Word("connect, connection attempt", "knock(?:s|ed|ing)?", "knock(?:s|ed|ing)?"),
)

OPENING = re.compile(r"\s*(?:Of|What|Who|Whom|Whose)\b")
"""Begins a docstring that continues its name instead of saying something by itself."""
OPENING_INSTEAD = "begin with a noun or a verb"

_IN_NAMES = re.compile("|".join(f"(?<![a-z])(?P<w{i}>{word.name})(?![a-z])" for i, word in enumerate(WORDS) if word.name))
_IN_PROSE = re.compile("|".join(rf"\b(?P<w{i}>{word.prose})\b" for i, word in enumerate(WORDS) if word.prose), re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_LABEL = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)+(?:\[.*)?")
_COMMENT = re.compile(r"(?:^|  )[ \t]*#(?P<words>.*)$", re.MULTILINE)
_BACKTICKED = re.compile(r"(`+)[^`]+\1")


@dataclass(frozen=True)
class Hit:
    """A word of the dialect in a module."""

    line: int
    words: str
    instead: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.words!r} ({self.instead})"


def defined_names(source: Source) -> dict[str, int]:
    """Every name that a module gives, with a line that gives it; the module's own name among them."""
    names = {source.module.rpartition("/")[2]: 1}
    for name, line in _given(source):
        names.setdefault(name, line)
    return names


def _given(source: Source) -> Iterator[tuple[str, int]]:
    definitions: Iterator[Definition] = source.nodes(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for definition in definitions:
        yield definition.name, definition.lineno
    for parameter in source.nodes(ast.arg):
        yield parameter.arg, parameter.lineno
    for variable in source.nodes(ast.Name):
        if isinstance(variable.ctx, ast.Store):
            yield variable.id, variable.lineno
    for field in source.nodes(ast.Attribute):
        if isinstance(field.ctx, ast.Store) and isinstance(field.value, ast.Name) and field.value.id == "self":
            yield field.attr, field.lineno
    for alias in source.nodes(ast.alias):
        if alias.asname:
            yield alias.asname, alias.lineno
    for handler in source.nodes(ast.ExceptHandler):
        if handler.name:
            yield handler.name, handler.lineno
    for text in source.nodes(ast.Constant):  # counters, labels, fields of JSON
        if isinstance(text.value, str) and _LABEL.fullmatch(text.value):
            yield text.value, text.lineno


def in_names(source: Source) -> list[Hit]:
    """One hit for each name that the module gives and that holds a word of the dialect."""
    hits = []
    for name, line in defined_names(source).items():
        snake = _CAMEL.sub("_", name.strip("_")).lower()
        found = _IN_NAMES.search(snake)
        if found:
            hits.append(Hit(line, name, _instead(found)))
    return hits


def in_prose(source: Source) -> list[Hit]:
    """Each word of the dialect in a docstring or comment, and each docstring that begins as the dialect does."""
    hits = []
    for line, text, is_docstring in _prose(source):
        opening = OPENING.match(text) if is_docstring else None
        if opening:
            hits.append(Hit(line, opening[0].strip(), OPENING_INSTEAD))
        plain = _BACKTICKED.sub(lambda span: "".join("\n" if each == "\n" else "_" for each in span[0]), text)
        for found in _IN_PROSE.finditer(plain):
            where = line + plain.count("\n", 0, found.start())
            hits.append(Hit(where, found[0], _instead(found)))
    return hits


def _prose(source: Source) -> Iterator[tuple[int, str, bool]]:
    """(line, text, is it a docstring), of constants' docstrings too."""
    for statement in source.nodes(ast.Expr):
        if isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
            yield statement.lineno, statement.value.value, True
    for found in _COMMENT.finditer(source.text):
        yield source.text.count("\n", 0, found.start("words")) + 1, found["words"], False


def _instead(found: re.Match[str]) -> str:
    """The advice beside the word whose group matched."""
    assert found.lastgroup is not None
    return WORDS[int(found.lastgroup.removeprefix("w"))].instead
