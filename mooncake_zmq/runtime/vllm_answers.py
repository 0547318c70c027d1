"""Parts that all calls of a vLLM's HTTP server share: the type of a body, the error of an invalid answer, and limits on what is
read and shown of one."""

from collections.abc import Mapping
from typing import Any, Final

import httpx
import msgspec
from msgspec import Struct

JSON: Final = {"content-type": "application/json"}
SHOWN_CHARACTERS: Final = 300
MOST_BYTES: Final = 8 << 20
"""Bytes of an answer that is read whole where nothing else bounds it."""


class Nonsense(Exception):
    """An invalid answer of vLLM; the text is one line."""


def for_model(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a body with the name of the model or adapter that is to serve it; "": as it is."""
    return {**body, "model": name} if name else dict(body)


async def whole(response: httpx.Response, most_bytes: int, too_long: str) -> bytearray:
    """Return the body of an answer. Raises Nonsense with the text `too_long` for one of more bytes, and httpx.HTTPError."""
    raw = bytearray()
    async for piece in response.aiter_raw():
        raw += piece
        if len(raw) > most_bytes:
            raise Nonsense(too_long)
    return raw


async def asked(client: httpx.AsyncClient, method: str, path: str, body: Any = None) -> tuple[int, bytearray]:
    """Return the status and the short body of an answer, as it came: a compressed one is not read. Raises Nonsense and
    httpx.HTTPError."""
    async with client.stream(method, path, json=body) as response:
        return response.status_code, await whole(response, MOST_BYTES, f"vLLM's {path} answers more than {MOST_BYTES} bytes")


class Model(Struct, frozen=True):
    """A model or an adapter that a server lists."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


def models_in(status: int, raw: bytes | bytearray) -> list[Model] | None:
    """Return what a server lists, but for names that are no text; None where its answer is no list of models. A field
    of another type than ours says nothing."""
    try:
        listed = msgspec.json.decode(raw)["data"] if status == httpx.codes.OK else None
        return None if listed is None else [_model(each) for each in listed if isinstance(each["id"], str)]
    except (msgspec.DecodeError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _model(listed: Mapping[str, Any]) -> Model:
    kinds = (("root", str), ("parent", str), ("max_model_len", int))
    return Model(listed["id"], **{name: listed[name] for name, kind in kinds if isinstance(listed.get(name), kind)})


class _Said(Struct, frozen=True):
    message: str = ""


class _Error(Struct, frozen=True):
    error: _Said = _Said()


def reason_of(raw: bytes | bytearray) -> str:
    """Return the reason in the body of an error, as one line."""
    try:
        said = msgspec.json.decode(raw, type=_Error).error.message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = ""
    return shown(said or bytes(raw[:SHOWN_CHARACTERS]).decode("utf-8", "replace"))


def shown(text: str) -> str:
    """Return the beginning of text from elsewhere, as one line."""
    return " ".join(text.split())[:SHOWN_CHARACTERS]
