"""One streamed completion from a gateway, by the `openai` client where that is installed, by httpx else. Checks nothing."""

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
"""The time in which an undisturbed gateway accepts a connection, even on a machine with ten times the work that it can do."""
SILENCE_S = 90.0
"""The silence after which a stream is given up: longer than a gateway lets an attempt stall."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One event of a stream."""

    tokens: tuple[int, ...] = ()
    finished: bool = False
    usage: dict[str, Any] | None = None
    served: dict[str, Any] | None = None


class Refused(Exception):
    """The gateway is full or not ready; the client tries again."""


class Broken(Exception):
    """The connection was not made, or ended before the answer did."""


class Failed(Exception):
    """The gateway reported an error."""


class Api(Protocol):
    """A client of gateways. No connection is used twice, since one that an ended gateway left behind would count as a
    failure."""

    name: str

    def stream(self, url: str, prompt: list[int], max_tokens: int) -> AsyncIterator[Piece]:
        """Stream a greedy completion of exactly `max_tokens`. Raises Refused, Broken or Failed."""

    async def close(self) -> None: ...


def open_api() -> Api:
    """Return the best client that is installed."""
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


_OWN = {"ignore_eos": True, "return_token_ids": True, "cache_salt": "chaos"}
"""The fields that OpenAI's API does not have. All clients use one salt: without it an open gateway reports no cached tokens."""


class HttpApi:
    """A client that reads server-sent events as they come."""

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
                    raise _error_of(response.status_code, text)
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
    """A client by the `openai` package, which most users have."""

    name = "openai"

    def __init__(self) -> None:
        openai: Any = importlib.import_module("openai")
        self._openai = openai
        # The transport is httpx or a successor, depending on the version.
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
            raise _error_of(error.status_code, str(error)) from None
        except openai.APIConnectionError as error:
            raise Broken(f"{type(error).__name__}: {error}") from None
        except openai.APIError as error:
            raise Failed(str(error)) from None
        except self._transport.HTTPError as error:
            raise Broken(f"{type(error).__name__}: {error}") from None

    async def close(self) -> None:
        await self._client.close()


def _error_of(status: int, text: str) -> Refused | Failed:
    return Refused(text) if status in REFUSALS else Failed(f"HTTP {status}: {text[:300]}")


def _piece(chunk: dict[str, Any]) -> Piece:
    choices = chunk.get("choices") or ()
    tokens = tuple(token for choice in choices for token in choice.get("token_ids") or ())
    finished = any(choice.get("finish_reason") for choice in choices)
    return Piece(tokens, finished, chunk.get("usage"), chunk.get("mooncake"))
