"""Messages by which a vLLM's own parsers read an answer: its tokens go from gateway to vLLM node, its parts come back.

The gateway owns the state of the reading as it owns the tokens, so that any vLLM with the same parsers may go on.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta

from mooncake_zmq.core.messages.fields import Count, Record, RequestId, Seconds, TaggedRecord, Text, Tokens

MAX_CHAT_BYTES = 1 << 20
"""Bytes of JSON of a chat's tools and template variables."""
MAX_READ_BYTES: Final = 6 << 20
"""Bytes of tokens and state that one message has room for, and of what was read."""
ReadText = Annotated[str, Meta(max_length=MAX_READ_BYTES)]
End = Literal["", "stop", "length"]


class Parsers(Record, frozen=True):
    """The parsers with which a vLLM was started: `--tool-call-parser` and `--reasoning-parser`."""

    calls: bool = False
    reasoning: bool = False

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return self.calls or self.reasoning


class ParsersReported(TaggedRecord, frozen=True):
    """The parsers of the vLLM beside a node, from the node to each gateway when it connects, and when they change."""

    parsers: Parsers


class ReadAnswer(TaggedRecord, frozen=True):
    """Request to read the next `tokens` (int32 bytes) of an answer to `prompt`, after those that `state` has.

    `chat`: JSON of the fields of the client's request that parsers look at. `call`: the number of this call for the request,
    which its answer repeats. `end`: why the answer ends with these tokens; empty: more follow. `whole`: these are all of them.
    """

    request_id: RequestId
    call: Count
    deadline_s: Seconds
    """Time after which the gateway asks another vLLM."""
    chat: Annotated[bytes, Meta(max_length=MAX_CHAT_BYTES)]
    prompt: Tokens
    tokens: Tokens
    state: Annotated[bytes, Meta(max_length=MAX_READ_BYTES)] = b""
    """State that vLLM returned with the tokens before, as it came; empty: these are the first."""
    end: End = ""
    whole: bool = False


class CallRead(Record, frozen=True):
    """The new part of a tool call: its name if it begins, and more of its arguments."""

    index: Count
    name: Annotated[str, Meta(max_length=1024)] = ""
    arguments: ReadText = ""


class AnswerRead(TaggedRecord, frozen=True):
    """Parts that vLLM's parsers read in the tokens of a `ReadAnswer`: the reasoning first, then the text, then calls."""

    request_id: RequestId
    call: Count
    reasoning: ReadText = ""
    text: ReadText = ""
    calls: Annotated[tuple[CallRead, ...], Meta(max_length=4096)] = ()
    state: Annotated[bytes, Meta(max_length=MAX_READ_BYTES)] = b""


class AnswerUnread(TaggedRecord, frozen=True):
    """The tokens of a `ReadAnswer` were not read, and why."""

    request_id: RequestId
    call: Count
    reason: Text
