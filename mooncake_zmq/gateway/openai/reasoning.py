"""The reasoning of models that think before they answer, read out of an answer's text as it grows. PURE.

Such a model writes its reasoning between two marks at the beginning of its answer. Many chat templates write the first mark
themselves, as the end of the prompt. However an answer is cut into pieces, its reasoning and its content are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from mooncake_zmq.gateway.openai.tool_call_parser import MAX_HELD

ReasoningForm = Literal["think", "mistral", "seed_oss"]
TAIL_TOKENS = 16
"""Tokens at a prompt's end in which a template's mark is looked for."""


class Words(Protocol):
    """The part of a tokenizer that is needed here."""

    special_ids: frozenset[int]
    chat_template: str

    def encode(self, text: str, *, special: bool = True) -> Sequence[int]: ...
    def decode(self, ids: Sequence[int], *, special: bool = False) -> str: ...


@dataclass(frozen=True, slots=True)
class Marks:
    """The texts before and after the reasoning."""

    begin: str
    end: str

    def are_special(self, words: Words) -> bool:
        """Return whether a mark is a special token, whose name is usually left out of the text."""
        return any(
            len(ids) == 1 and ids[0] in words.special_ids
            for ids in (words.encode(mark, special=False) for mark in (self.begin, self.end))
        )

    def open_at_end(self, text: str) -> bool:
        """Return whether reasoning has begun in a text and not ended."""
        return text.rfind(self.begin) > text.rfind(self.end)


FORMS: dict[ReasoningForm, Marks] = {
    "think": Marks("<think>", "</think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
}


def marks_of(template: str, form: ReasoningForm | Literal["", "none", "vllm"]) -> Marks | None:
    """Return the marks of a model's reasoning. `form`: the operator's; empty: the form whose second mark the model's chat
    template contains."""
    if form == "none" or form == "vllm":
        return None
    if form:
        return FORMS[form]
    return next((marks for marks in FORMS.values() if marks.end in template), None)


class ReasoningReader:
    """Divides one answer into reasoning and content."""

    def __init__(self, marks: Marks, *, begun: bool, call_mark: str = "") -> None:
        """`begun`: whether the prompt ends inside the reasoning. `call_mark`: begins the tool calls, for which some models end
        their reasoning without its mark."""
        self._marks = marks
        self._ends = tuple(filter(None, (marks.end, call_mark)))
        self._held = ""
        self._state: Literal["before", "inside", "after", "content"] = "before"
        self._begun = begun
        self._said = False
        """Whether any reasoning was returned."""

    @property
    def is_inside(self) -> bool:
        """Whether the next text is expected to be reasoning."""
        return self._state == "inside" or (self._state == "before" and self._begun)

    def push(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that are certain with this text; white space around the marks is neither."""
        if self._state == "content":
            return "", text
        text, self._held = self._held + text, ""
        if self._state == "before":
            text = self._before(text)
        reasoning = ""
        if self._state == "inside":
            reasoning, text = self._inside(text)
        if self._state == "after" and (text := text.lstrip()):
            self._state = "content"
        return reasoning, text

    def flush(self) -> tuple[str, str]:
        """Return the text that was held back and is no mark, as the answer ends."""
        held, self._held = self._held, ""
        return (held, "") if self.is_inside else ("", held)

    def _before(self, text: str) -> str:
        """Return the text behind the first mark, or all of it if there is none; hold it back while that is not certain."""
        mark, begins = self._marks.begin, text.lstrip()
        if len(text) - len(begins) <= MAX_HELD:
            if begins.startswith(mark):
                self._state = "inside"
                return begins[len(mark) :]
            if mark.startswith(begins):
                self._held = text
                return ""
        self._state = "inside" if self._begun else "content"
        return text

    def _inside(self, text: str) -> tuple[str, str]:
        """Return the reasoning and what follows it."""
        found = [(at, mark) for mark in self._ends if (at := text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._state = "after"
            return self._trimmed(text[:at]), text[at + len(mark) :] if mark == self._marks.end else text[at:]
        held = max(_common(text, mark) for mark in self._ends)
        reasoning, self._held = text[: len(text) - held], text[len(text) - held :]
        return self._trimmed(reasoning), ""

    def _trimmed(self, reasoning: str) -> str:
        """Return the reasoning without white space at its beginning."""
        if not self._said:
            reasoning = reasoning.lstrip()
            self._said = bool(reasoning)
        return reasoning


def _common(text: str, mark: str) -> int:
    """Return the length of the longest end of a text with which the mark may begin."""
    most = min(len(mark) - 1, len(text))
    return next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)
