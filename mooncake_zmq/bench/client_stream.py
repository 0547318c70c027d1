"""One streamed answer of an OpenAI endpoint as a client receives it: the times of its tokens, its usage, its error."""

import asyncio
import time
from array import array
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from mooncake_zmq.laboratory.gaps import longest_tenth_s
from mooncake_zmq.runtime.http_connections import Broken, Connections

MAX_EVENT_BYTES = 8 << 20
"""Size limit of one event or of an error's body; more is an error."""
MAX_BEYOND = 64
"""Tokens that an answer may have beyond those asked for; more is an error."""
SHOWN_CHARS = 200
NONSENSE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions that decoding raises on input that is not the expected JSON."""

Count = Annotated[int, Meta(ge=0, le=1 << 40)]


@dataclass(slots=True, kw_only=True)
class Seen:
    """The record of one request. Times in seconds: `due_s` since the trace's begin, the answer's since the request was sent."""

    due_s: float = 0.0
    """The request's time in the trace."""
    input_tokens: int = 0
    output_tokens: int = 0
    """Output tokens that the trace has."""
    exact: bool = False
    """Whether the server was asked for no fewer than `output_tokens`."""
    held_s: float = 0.0
    """How long the request, or one before it that delayed it, waited because `max_open` streams were open."""
    late_s: float = 0.0
    """How long after its time and its wait it was sent: this client's own lag."""
    repeats: int = 0
    """How often it was sent again because the kept connection was closed while it was written."""
    status: int = 0
    """The answer's HTTP status; 0: no answer."""
    answered_s: float = -1.0
    retry_after: str = ""
    token_s: "array[float]" = field(default_factory=lambda: array("d"))
    """The time of each token, where the server sends ids; else of each event that brought text."""
    ended_s: float = -1.0
    finished: bool = False
    """Whether the server sent a finish reason."""
    prompt_tokens: int = -1
    """The server's own usage count, as are the next two; -1: it sent none."""
    completion_tokens: int = -1
    cached_tokens: int = -1
    error: str = ""
    """The kind of error; empty: none."""
    said: str = ""
    """The message of an error or a refusal."""

    @property
    def outcome(self) -> str:
        """The outcome by the laboratory's names: finished, rejected or failed."""
        if self.status == 429:
            return "rejected"
        return "failed" if self.error or not self.finished else "finished"

    @property
    def tokens(self) -> int:
        """Tokens of the answer: by the server's usage, or as they were received."""
        return max(self.completion_tokens, 0) or len(self.token_s)

    @property
    def short(self) -> bool:
        """Whether the answer finished with fewer tokens than it had to."""
        return self.exact and self.outcome == "finished" and self.tokens < self.output_tokens

    @property
    def ttft_s(self) -> float:
        """Time to the first token; -1: none came."""
        return self.token_s[0] if self.token_s else -1.0

    @property
    def tbt_s(self) -> float:
        """Mean of the longest tenth of the gaps, counted as the laboratory and the gateway do."""
        return longest_tenth_s(np.diff(self.token_s))

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first; 0 with fewer than two."""
        return (self.token_s[-1] - self.token_s[0]) / (self.tokens - 1) if self.tokens > 1 and len(self.token_s) > 1 else 0.0


class _Delta(Struct, frozen=True, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(Struct, frozen=True, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Details(Struct, frozen=True, gc=False):
    cached_tokens: Count | None = None


class _Usage(Struct, frozen=True, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None


class _Error(Struct, frozen=True, gc=False):
    message: str | None = None
    code: str | Annotated[int, Meta(ge=-(1 << 40), le=1 << 40)] | None = None
    type: str | None = None


class _Event(Struct, frozen=True, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


class _ErrorBody(Struct, frozen=True, gc=False):
    error: _Error | str | None = None


_event = msgspec.json.Decoder(_Event)
_error_body = msgspec.json.Decoder(_ErrorBody)


class Listener:
    """Writes one answer into a `Seen`; see `http_connections.Receiver`."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.began_at = time.perf_counter()
        self._rest = b""
        self._broken = False

    def answered(self, at: float, status: int, headers: dict[bytes, bytes]) -> None:
        seen = self.seen
        seen.status, seen.answered_s = status, at - self.began_at
        seen.retry_after = headers.get(b"retry-after", b"").decode("latin-1")

    def body(self, at: float, piece: bytes) -> None:
        if self._broken:
            return
        self._rest += piece
        if self.seen.status != 200:
            self._rest = self._rest[:MAX_EVENT_BYTES]
            return
        *lines, self._rest = self._rest.split(b"\n") if b"\n" in piece else (self._rest,)
        for line in lines:
            if line.startswith(b"data:") and not self._broken:
                self._line(at, line[5:].strip())
        if len(self._rest) > MAX_EVENT_BYTES:
            self.fail("an event too long", f"more than {MAX_EVENT_BYTES} bytes")

    def again(self) -> None:
        self.seen.repeats += 1

    def end(self, at: float) -> None:
        """Handle the end of the answer."""
        seen = self.seen
        seen.ended_s = at - self.began_at
        if seen.error:
            return
        if seen.status != 200:
            self._refused()
        elif not seen.finished:
            self.fail("ended early", f"after {seen.tokens} tokens")
        elif seen.output_tokens and not seen.token_s:
            self.fail("finished without a token", f"{seen.tokens} by its own account")

    def _line(self, at: float, line: bytes) -> None:
        if line == b"[DONE]":
            return
        try:
            event = _event.decode(line)
        except NONSENSE as error:
            self.fail("nonsense", str(error))
            return
        if event.error is not None:
            self._take_error(event.error)
        for choice in event.choices:
            self._choice(at - self.began_at, choice)
        if event.usage is not None:
            self._take_usage(event.usage)

    def _choice(self, at_s: float, choice: _Choice) -> None:
        seen, delta = self.seen, choice.delta
        text = choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)) or ""
        if choice.token_ids is not None:
            came = len(choice.token_ids)
        else:
            came = 1 if text or (delta and delta.tool_calls is not None) else 0
        if len(seen.token_s) + came > seen.output_tokens + MAX_BEYOND:
            self.fail("too many tokens", f"more than {seen.output_tokens} + {MAX_BEYOND}")
            return
        seen.token_s.extend([at_s] * came)
        seen.finished = seen.finished or choice.finish_reason is not None

    def _take_usage(self, usage: _Usage) -> None:
        seen, details = self.seen, usage.prompt_tokens_details
        seen.prompt_tokens = -1 if usage.prompt_tokens is None else usage.prompt_tokens
        seen.completion_tokens = -1 if usage.completion_tokens is None else usage.completion_tokens
        if details is not None and details.cached_tokens is not None:
            seen.cached_tokens = details.cached_tokens

    def _refused(self) -> None:
        try:
            error = _error_body.decode(self._rest).error
        except NONSENSE:
            error = self._rest[:SHOWN_CHARS].decode(errors="replace")
        code, said = _read(error)
        self.fail(f"HTTP {self.seen.status}{f' {code}' if code else ''}", said)

    def _take_error(self, error: _Error | str) -> None:
        code, said = _read(error)
        self.fail(f"in the stream: {code or 'error'}", said)

    def fail(self, kind: str, said: str) -> None:
        """Record an error; later bytes and later failures do not count."""
        self._broken = True
        if not self.seen.error:
            self.seen.error, self.seen.said = kind, said[:SHOWN_CHARS]


def _read(error: _Error | str | None) -> tuple[str, str]:
    if isinstance(error, _Error):
        return str(error.code or error.type or "")[:SHOWN_CHARS], error.message or ""
    return "", error or ""


async def ask(connections: Connections, path: str, headers: dict[bytes, bytes], body: bytes, seen: Seen, most_s: float) -> Seen:
    """Send one request and wait for its end, at most `most_s`; its record is `seen`."""
    listener = Listener(seen)
    try:
        async with asyncio.timeout(most_s):
            await connections.call(b"POST", path, headers, body, listener)
    except TimeoutError:
        listener.fail("timeout", f"after {most_s:g} s")
    except Broken as error:
        listener.fail("connection", str(error))
    listener.end(time.perf_counter())
    return seen
