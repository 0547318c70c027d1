"""An answer as a row of parts (texts, reasoning, tool calls), for APIs whose streams begin and end each of them. PURE."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from mooncake_zmq.gateway.openai.detokenizer import Piece
from mooncake_zmq.gateway.openai.tools import call_deltas


@dataclass(slots=True)
class Part:
    """One part: `index` of the answer; a call has an id and a name, the others have neither."""

    index: int
    kind: Literal["text", "reasoning", "call"]
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    """The text, or the JSON of the call's arguments, so far."""

    @property
    def text(self) -> str:
        """The text, or the JSON of the call's arguments, so far."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Begins:
    """A part begins."""

    part: Part


@dataclass(frozen=True, slots=True)
class Grows:
    """A part has more text, or a call more arguments."""

    part: Part
    more: str


@dataclass(frozen=True, slots=True)
class Ends:
    """A part is complete."""

    part: Part


PartEvent = Begins | Grows | Ends


class AnswerParts:
    """The parts of one answer as it grows. One part is open at a time."""

    def __init__(self, salt: str, *, keeps_text: bool = False) -> None:
        """`salt`: of the answer, which makes the ids of its calls unique. `keeps_text`: whether parts know all their text."""
        self.all: list[Part] = []
        self._salt = salt
        self._keeps_text = keeps_text
        self._open: Part | None = None

    def push(self, piece: Piece) -> Iterator[PartEvent]:
        """Yield what is new: more of the open call first, then the reasoning of a piece, its text, and the calls that begin in
        it. Arguments of no open call are left out."""
        calls = call_deltas(piece.calls, self._salt)
        if calls and "name" not in calls[0]["function"] and self._open is not None and self._open.kind == "call":
            yield from self._grow(calls[0]["function"]["arguments"])
        if piece.reasoning:
            yield from self._grow_in("reasoning", piece.reasoning)
        if piece.text:
            yield from self._grow_in("text", piece.text)
        for call in calls:
            if "name" in call["function"]:
                yield from self._begin("call", call["id"], call["function"]["name"])
                yield from self._grow(call["function"]["arguments"])

    def end(self) -> Iterator[PartEvent]:
        """Yield the end of the part that is open, if one is."""
        if self._open is not None:
            yield Ends(self._open)
        self._open = None

    def _grow_in(self, kind: Literal["text", "reasoning"], more: str) -> Iterable[PartEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        yield from self._grow(more)

    def _begin(self, kind: Literal["text", "reasoning", "call"], call_id: str = "", name: str = "") -> Iterable[PartEvent]:
        yield from self.end()
        self._open = Part(len(self.all), kind, call_id, name)
        self.all.append(self._open)
        yield Begins(self._open)

    def _grow(self, more: str) -> Iterable[PartEvent]:
        assert self._open is not None
        if not more:
            return
        if self._keeps_text:
            self._open.pieces.append(more)
        yield Grows(self._open, more)
