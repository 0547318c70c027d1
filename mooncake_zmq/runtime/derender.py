"""Reads answers by vLLM's own parsers, over its `/v1/chat/completions/derender`, and finds out which parsers it has. It decides
nothing; whatever is received is checked against a limit.

vLLM keeps nothing between two calls: it returns a state, which goes back to it, or to another vLLM, with the next tokens. It
parses everything again that the state has, so that a call takes the longer the more calls there were before.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from mooncake_zmq.core.messages import MAX_READ_BYTES, CallRead, Parsers
from mooncake_zmq.core.work import ReadTokens, TokensRead
from mooncake_zmq.kv.block_hash import unpack_tokens
from mooncake_zmq.runtime.vllm_answers import JSON, Nonsense, asked, for_model, shown, whole

CHAT = "/v1/chat/completions"
DERENDER = f"{CHAT}/derender"
RENDER = f"{CHAT}/render"
MORE_BYTES = 64 << 10
"""Bytes of vLLM's answer around what it read and the state."""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SHORT_CHAT = {"messages": [{"role": "user", "content": "a"}]}


class _Function(Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct, frozen=True):
    function: _Function
    index: int = -1
    """The number of the call; -1: it has the one after the call before it."""


class _Said(Struct, frozen=True):
    """A message or a part of one."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(Struct, frozen=True):
    delta: _Said | None = None
    message: _Said | None = None


class _Chunk(Struct, frozen=True):
    choices: list[_Choice]


class _Read(Struct, frozen=True):
    """vLLM's answer: a chunk with the state for the next call, or a whole answer."""

    chunk: _Chunk | None = None
    stream_state: msgspec.Raw = msgspec.Raw(b"")
    choices: list[_Choice] = []


_decoder: msgspec.json.Decoder[_Read] = msgspec.json.Decoder(_Read)


def reading_body(work: ReadTokens, model: str = "") -> bytes:
    """Return the body that asks vLLM to read tokens."""
    choice: dict[str, Any] = {"index": 0, "token_ids": unpack_tokens(work.tokens), "finish_reason": work.end or None}
    answer = {"request_id": "r", "choices": [choice]}
    body = for_model({"chat_request": msgspec.Raw(work.chat), "prompt_token_ids": unpack_tokens(work.prompt)}, model)
    if work.whole:
        return msgspec.json.encode(body | {"generate_response": answer})
    state = msgspec.Raw(work.state or b"null")
    return msgspec.json.encode(body | {"stream": True, "generate_chunk": answer, "stream_state": state})


def what_was_read(raw: bytes) -> TokensRead:
    """Return what vLLM read, from its answer. Raises Nonsense."""
    try:
        read = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Nonsense(f"vLLM's parsers answer what is not theirs: {shown(str(error))}") from None
    choices = read.choices if read.chunk is None else read.chunk.choices
    said = (choices[0].delta or choices[0].message) if len(choices) == 1 else None
    if said is None:
        raise Nonsense(f"vLLM's parsers answer {len(choices)} choices")
    try:
        calls = msgspec.convert([*_calls(said.tool_calls or [])], tuple[CallRead, ...])
    except msgspec.ValidationError as error:
        raise Nonsense(f"vLLM's parsers read an invalid call: {shown(str(error))}") from None
    return TokensRead(said.reasoning or "", said.content or "", calls, bytes(read.stream_state))


def _calls(given: list[_Call]) -> Iterator[tuple[int, str, str]]:
    """Yield the fields of parts of calls; a whole answer does not number them, and each is one."""
    for place, call in enumerate(given):
        index = call.index if call.index >= 0 else place
        yield index, call.function.name or "", call.function.arguments or ""


async def read_tokens(client: httpx.AsyncClient, work: ReadTokens, model: str = "") -> TokensRead:
    """Have vLLM read tokens. Raises Nonsense and httpx.HTTPError."""
    too_long = f"vLLM's parsers answer more than {MAX_READ_BYTES} bytes"
    async with client.stream("POST", DERENDER, content=reading_body(work, model), headers=JSON, timeout=None) as response:
        raw = await whole(response, MAX_READ_BYTES + MORE_BYTES, too_long)
    if response.status_code != httpx.codes.OK:
        raise Nonsense(f"vLLM's parsers answer {response.status_code}: {shown(raw.decode('utf-8', 'replace'))}")
    return what_was_read(bytes(raw))


async def parsers_of(client: httpx.AsyncClient) -> Parsers | None:
    """Return the parsers that a vLLM was started with, or None where its answer is not clear. It renders a chat with tools only
    if it has a parser of calls, and names what its parser of reasoning needs."""
    status, raw = await asked(client, "POST", RENDER, SHORT_CHAT | {"tools": [TOOL], "tool_choice": "auto"})
    if status in (httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND):
        return Parsers()
    calls = status == httpx.codes.OK
    if not calls:
        status, raw = await asked(client, "POST", RENDER, SHORT_CHAT)
    if status != httpx.codes.OK:
        return Parsers(calls=calls)
    try:
        return Parsers(calls=calls, reasoning=msgspec.json.decode(raw).get("reasoning_parser_kwargs") is not None)
    except (msgspec.DecodeError, ValueError, AttributeError, RecursionError):
        return None
