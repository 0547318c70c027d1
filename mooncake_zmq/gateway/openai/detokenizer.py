"""Detokenizes an answer as its tokens arrive: the text is cut at stop strings and returned in pieces."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mooncake_zmq.core.messages import TokenLogprob
from mooncake_zmq.gateway.openai.reasoning import ReasoningReader
from mooncake_zmq.gateway.openai.token_stream import TokenStream
from mooncake_zmq.gateway.openai.tools import NO_TOOLS, CallPiece, Tools
from mooncake_zmq.gateway.requests.answer import TOKEN
from mooncake_zmq.gateway.requests.client_events import (
    Failed,
    Finished,
    PromptLogprobs,
    TextRead,
    TextUnread,
    TokenOut,
    Vectors,
)
from mooncake_zmq.gateway.served_model import ServedModel

StopTable = tuple[str, list[int]]


def stop_tables(stops: Sequence[str]) -> list[StopTable]:
    """Each stop string with its borders: made once for all choices of a call."""
    return [(stop, _borders(stop)) for stop in stops]


class StopScanner:
    """Finds the first stop string to be completed, holding back text that may be the start of one (Knuth-Morris-Pratt)."""

    def __init__(self, stops: Sequence[StopTable], *, with_stop: bool = False) -> None:
        """`with_stop`: the stop string that is found is a part of the text."""
        self._stops = stops
        self._with_stop = with_stop
        self._matched = [0] * len(stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that was found."""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that may be sent, and whether a stop string was found; the text after it is cut."""
        if not self._stops:
            return text, False
        start, text = len(self._held), self._held + text
        for end in range(start, len(text)):
            found = self._step(text[end])
            if found:
                self.found = text[end + 1 - found : end + 1]
                return text[: end + 1 - (0 if self._with_stop else found)], True
        free = len(text) - max(self._matched)
        self._held = text[free:]
        return text[:free], False

    def flush(self) -> str:
        """Return the text that was held back and is no stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _step(self, char: str) -> int:
        """Advance all stops by a character; the length of the longest one completed, or 0."""
        found = 0
        for which, (stop, borders) in enumerate(self._stops):
            matched = self._matched[which]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            matched += stop[matched] == char
            self._matched[which] = matched
            if matched == len(stop):
                found = max(found, matched)
        return found


def _borders(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for end in range(1, len(text)):
        while length and text[end] != text[length]:
            length = borders[length - 1]
        length += text[end] == text[length]
        borders[end] = length
    return borders


@dataclass(frozen=True, slots=True)
class Piece:
    """The new part of a choice since the last piece."""

    text: str
    token_ids: list[int]
    echoed_ids: list[int]
    """The scores of the prompt's tokens, if they are asked for."""
    logprobs: list[TokenLogprob | None]
    """The offsets of the tokens, if they are asked for, those of the prompt first."""
    offsets: list[int]
    """Where in the text each of these begins, in characters."""
    calls: list[CallPiece]
    """Parts of tool calls."""
    reasoning: str = ""
    """The reasoning, which precedes the text."""


class Choice:
    """One answer: detokenizes, cuts at stop strings, ends once."""

    kept: "array[int] | None" = None
    """All its tokens so far, if they are wanted once it is complete."""

    def __init__(
        self,
        index: int,
        prompt_ids: "array[int]",
        model: ServedModel,
        *,
        stops: Sequence[StopTable],
        min_tokens: int,
        textless: frozenset[int],
        with_stop: bool = False,
        special: bool = False,
        echo: str,
        tools: Tools = NO_TOOLS,
        reasoning: ReasoningReader | None = None,
        with_reasoning: bool = True,
        read_elsewhere: bool = False,
        offsets: list[int] | None = None,
        silent: bool = False,
    ) -> None:
        """`textless`: the tokens whose text is left out. `with_stop`: the text has the stop string that ends it; `special`: the
        names of special tokens. `reasoning`: reads the reasoning of a model that thinks; `with_reasoning`: whether the answer
        has it. `read_elsewhere`: whether the text comes beside the tokens, as a vLLM's parsers read it. `offsets`: those of
        the prompt's tokens, if their scores are asked for. `silent`: the answer itself is left out."""
        self.index = index
        self._silent = silent
        self.prompt_ids = prompt_ids
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        """Those of the completion's tokens that are reasoning."""
        self.finish_reason: str | None = None
        self.finished: Finished | None = None
        """The actor's `Finished`; None if the request failed just as a stop string ended the choice."""
        self.settled = False
        """Whether the actor has ended the request: after a stop string `Finished` arrives last."""
        self.pieces_taken = 0
        self.has_news = False
        """Whether any output arrived since the last `take`."""
        self._textless = textless
        self._calls = tools.reader()
        self._reasoning = reasoning
        self._with_reasoning = with_reasoning
        self._thoughts: list[str] = []
        self._unread: list[int] | None = [] if read_elsewhere else None
        """Tokens whose text is to come; None: it is made here."""
        self._max_calls = tools.max_calls
        self._called = False
        """Whether a vLLM's parsers have read a call."""
        self.unread_reason = ""
        """Why vLLM's parsers read no more of it; empty: they do, or are not asked."""
        self._detokenizer = TokenStream(model.tokenizer, special=tools.marked or special)
        self._scanner = StopScanner(stops, with_stop=with_stop)
        self._min_tokens = min_tokens
        self._text = [echo]
        self._token_ids: list[int] = []
        self._echoed_ids: list[int] = [] if offsets is None else prompt_ids.tolist()
        self._logprobs: list[TokenLogprob | None] = [] if offsets is None else [None]
        self._offsets: list[int] = offsets or []
        self._pieces: list[CallPiece] = []
        self._chars = len(echo)
        """Characters of the text so far, held back or not."""

    def accept(self, output: TokenOut | PromptLogprobs | Vectors | TextRead | TextUnread | Finished) -> None:
        """Take the actor's next output; the text of a token that ends the answer is usually no part of it."""
        assert not self.has_ended
        if type(output) is TOKEN:
            if not self._silent:
                self._accept_token(output.index, output.token, output.logprob)
            return
        assert not isinstance(output, TokenOut | Vectors), "vectors are no answer of tokens"
        if isinstance(output, PromptLogprobs):
            assert output.first == len(self._logprobs)
            self._logprobs += output.logprobs
            return
        self.has_news = True
        if isinstance(output, TextRead):
            self._take_read(output)
            return
        if isinstance(output, TextUnread):
            self._read_here(output.reason)
            return
        self.settle(output)
        self._add(self._detokenizer.flush())
        if self._reasoning is not None and not self.has_ended:
            self._divide(*self._reasoning.flush())
        if self._calls is not None and not self.has_ended:
            self._scan(self._beside(*self._calls.flush()))
        if not self.has_ended:
            self._say(self._scanner.flush(), "length" if self._silent else output.reason)

    def _accept_token(self, index: int, token: int, logprob: TokenLogprob | None) -> None:
        assert index == self.completion_tokens, f"token {index} after {self.completion_tokens} tokens"
        self.has_news = True
        self.completion_tokens += 1
        self.reasoning_tokens += self._reasoning is not None and self._reasoning.is_inside
        self._token_ids.append(token)
        if self.kept is not None:
            self.kept.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
            self._offsets.append(self._chars)
        if token in self._textless:
            return
        if self._unread is None:
            self._add(self._detokenizer.push(token))
        else:
            self._unread.append(token)

    def _take_read(self, read: TextRead) -> None:
        """Take the text of the tokens so far. A part for which vLLM has no parser may be in it."""
        self._unread = []
        if read.reasoning and self._with_reasoning:
            self._thoughts.append(read.reasoning)
        self._add(read.text)
        pieces = [CallPiece(call.index, call.name or None, call.arguments) for call in read.calls]
        if pieces and not self.has_ended:
            self._called = True
            self._scan(self._beside("", [piece for piece in pieces if piece.index < self._max_calls]))

    def _read_here(self, reason: str) -> None:
        """Make the text here from now on."""
        unread, self._unread, self.unread_reason = self._unread or [], None, reason
        for token in unread:
            if not self.has_ended:
                self._add(self._detokenizer.push(token))

    @property
    def has_prompt(self) -> bool:
        """True if the next piece has the scores of the prompt."""
        return bool(self._echoed_ids)

    @property
    def may_reason(self) -> bool:
        """Whether the answer is divided into reasoning and text."""
        return self._reasoning is not None

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it; None: another end, or none yet."""
        return self._scanner.found

    @property
    def was_cut(self) -> bool:
        """True if a stop string ended it, so that the actor has to stop it too."""
        return self.has_ended and self.finished is None

    def settle(self, output: Finished | Failed) -> None:
        """Take the actor's last output."""
        self.settled = True
        self.finished = output if isinstance(output, Finished) else None

    def take(self) -> Piece:
        scores = self._logprobs, self._offsets
        reasoning = "".join(self._thoughts)
        piece = Piece("".join(self._text), self._token_ids, self._echoed_ids, *scores, self._pieces, reasoning)
        self._thoughts = []
        self._text, self._token_ids, self._echoed_ids, self.has_news = [], [], [], False
        self._logprobs, self._offsets, self._pieces = [], [], []
        self.pieces_taken += 1
        return piece

    @property
    def next_alone(self) -> Literal["", "text", "reasoning"]:
        """Return what the next piece is if it is one of these two, neither the first nor the last of the answer, with nothing
        else but token ids; else nothing."""
        if self.pieces_taken == 0 or self.finish_reason is not None or self._pieces:
            return ""
        says_text, reasons = any(text for text in self._text), bool(self._thoughts)
        return "" if says_text == reasons else "text" if says_text else "reasoning"

    def take_alone(self) -> tuple[str, list[int]]:
        """Take a piece that is text or reasoning alone."""
        text, ids = "".join(self._text) or "".join(self._thoughts), self._token_ids
        self._text, self._thoughts, self._token_ids, self.has_news = [], [], [], False
        self.pieces_taken += 1
        return text, ids

    def _add(self, text: str) -> None:
        self._chars += len(text)
        if self._reasoning is None:
            self._answer(text)
        else:
            self._divide(*self._reasoning.push(text))

    def _divide(self, reasoning: str, text: str) -> None:
        if reasoning and self._with_reasoning:
            self._thoughts.append(reasoning)
        self._answer(text)

    def _answer(self, text: str) -> None:
        """Take text that is no reasoning."""
        self._scan(text if self._calls is None else self._beside(*self._calls.push(text)))

    def _beside(self, text: str, pieces: list[CallPiece]) -> str:
        """The text beside calls, in which alone stop strings are looked for: they would end a call half-way. None stands across
        one."""
        if any(piece.name is not None for piece in pieces):
            self._text.append(self._scanner.flush())
        self._pieces += pieces
        return text

    def _scan(self, text: str) -> None:
        stopped = False
        if self.completion_tokens > self._min_tokens:
            text, stopped = self._scanner.push(text)
        self._say(text, "stop" if stopped else None)

    def _say(self, text: str, reason: str | None) -> None:
        """Add text that may be sent. A reason ends the answer."""
        self._text.append(text)
        self.finish_reason = reason
        if reason == "stop" and (self._called or (self._calls is not None and self._calls.calls)):
            self.finish_reason = "tool_calls"
