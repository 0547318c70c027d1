"""One streamed completion from a gateway, by the `openai` client where that is installed, by httpx else. It checks nothing."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
from httpx_sse import EventSource

MODEL = "toy"
REFUSALS = (429, 503)
CONNECT_TIMEOUT_S = 10.0
"""A gateway that was left alone is reached by then, on a machine with ten times the work it can do too."""
SILENCE_S = 90.0
"""A stream that says nothing for this long is given up: longer than a gateway lets an attempt stall."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One event of a stream."""

    tokens: tuple[int, ...] = ()
    finished: bool = False
    usage: dict[str, Any] | None = None
    served: dict[str, Any] | None = None


class Refused(Exception):
    """The gateway is full, or not ready: come again."""


class Broken(Exception):
    """The connection did not come about, or ended before the answer did."""


class Failed(Exception):
    """The gateway told of an error."""


class Api(Protocol):
    """A way to ask. No connection is used twice: one left over from a gateway's former life would be a failure of ours."""

    name: str

    def stream(self, url: str, prompt: list[int], max_tokens: int) -> AsyncIterator[Piece]:
        """Greedy, exactly `max_tokens`. Raises Refused, Broken or Failed."""

    async def close(self) -> None: ...


def open_api() -> Api:
    """The best client there is."""
    return OpenAiApi() if importlib.util.find_spec("openai") else HttpApi()


def _body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


_OWN = {"ignore_eos": True, "return_token_ids": True}
"""What OpenAI's API does not have."""


class HttpApi:
    """Server-sent events, as they come."""

    name = "httpx"

    def __init__(self) -> None:
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_TIMEOUT_S)
        self._client = httpx.AsyncClient(
            timeout=timeout, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )

    async def stream(self, url: str, prompt: list[int], max_tokens: int) -> AsyncIterator[Piece]:
        try:
            async with self._client.stream("POST", f"{url}/v1/completions", json=_body(prompt, max_tokens) | _OWN) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise _told(response.status_code, text)
                async for event in EventSource(response).aiter_sse():
                    if event.data != "[DONE]":
                        chunk = event.json()
                        if "error" in chunk:
                            raise Failed(str(chunk["error"]))
                        yield _piece(chunk)
        except httpx.HTTPError as error:
            raise Broken(f"{type(error).__name__}: {error}") from None

    async def close(self) -> None:
        await self._client.aclose()


class OpenAiApi:
    """The client that most people use."""

    name = "openai"

    def __init__(self) -> None:
        openai: Any = importlib.import_module("openai")
        self._openai = openai
        # The transport is httpx or a successor, as the version wants it.
        self._transport: Any = sys.modules[openai.DefaultAsyncHttpxClient.__base__.__module__.partition(".")[0]]
        timeout = self._transport.Timeout(SILENCE_S, connect=CONNECT_TIMEOUT_S)
        limits = self._transport.Limits(max_connections=None, max_keepalive_connections=0)
        http = openai.DefaultAsyncHttpxClient(timeout=timeout, limits=limits)
        self._client = openai.AsyncOpenAI(
            api_key="none", base_url="http://none", max_retries=0, timeout=timeout, http_client=http
        )

    async def stream(self, url: str, prompt: list[int], max_tokens: int) -> AsyncIterator[Piece]:
        openai = self._openai
        try:
            client = self._client.with_options(base_url=f"{url}/v1")
            async with contextlib.AsyncExitStack() as stack:
                chunks = await client.completions.create(**_body(prompt, max_tokens), extra_body=_OWN)
                stack.push_async_callback(chunks.close)
                async for chunk in chunks:
                    yield _piece(chunk.to_dict())
        except openai.APIStatusError as error:
            raise _told(error.status_code, str(error)) from None
        except openai.APIConnectionError as error:
            raise Broken(f"{type(error).__name__}: {error}") from None
        except openai.APIError as error:
            raise Failed(str(error)) from None
        except self._transport.HTTPError as error:
            raise Broken(f"{type(error).__name__}: {error}") from None

    async def close(self) -> None:
        await self._client.close()


def _told(status: int, text: str) -> Refused | Failed:
    return Refused(text) if status in REFUSALS else Failed(f"HTTP {status}: {text[:300]}")


def _piece(chunk: dict[str, Any]) -> Piece:
    choices = chunk.get("choices") or ()
    tokens = tuple(token for choice in choices for token in choice.get("token_ids") or ())
    finished = any(choice.get("finish_reason") for choice in choices)
    return Piece(tokens, finished, chunk.get("usage"), chunk.get("mooncake"))
