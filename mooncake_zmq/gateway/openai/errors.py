"""Errors as OpenAI's API has them: the one exception that becomes an HTTP answer, and the usual ones by their names."""

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from mooncake_zmq.gateway.requests.client_events import Failed
from mooncake_zmq.gateway.served_model import ServedModel, ServedModels

UNSUPPORTED = "unsupported_parameter"
MAX_CONTAINERS = 1 << 15
"""Lists and objects that one call reads, in about 25 ms; brackets in texts count too."""
QUOTED_CHARS = 200
"""Limits a quotation of what a client sent, which may be megabytes."""


class RequestError(Exception):
    """An HTTP error in OpenAI's shape."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after_s = 1.0 if retry_after_s is None and status in (429, 503) else retry_after_s

    @classmethod
    def of(cls, failed: Failed) -> "RequestError":
        """The actor's one explicit error."""
        status = failed.status if 400 <= failed.status <= 599 else 500
        return cls(status, failed.message, code=failed.code, retry_after_s=failed.retry_after_s)

    @property
    def kind(self) -> str:
        """OpenAI's error type."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Retry-After in whole seconds, never early, and to the millisecond for clients that know it."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.retry_after_s is None:
            return {}
        return {
            "retry-after": str(max(1, math.ceil(self.retry_after_s))),
            "retry-after-ms": str(max(1, math.ceil(self.retry_after_s * 1000))),
        }


def quoted(said: str) -> str:
    """Quote a client for an error or the log."""
    return repr(said) if len(said) <= QUOTED_CHARS else f"{said[:QUOTED_CHARS]!r}..."


def invalid(param: str | None, message: str, code: str = "invalid_value") -> RequestError:
    return RequestError(400, message, param=param, code=code)


def too_long(param: str, model: ServedModel, however: str) -> RequestError:
    """In OpenAI's words: clients look for them."""
    text = f"This model's maximum context length is {model.max_model_len} tokens. However, {however}."
    return invalid(param, text, "context_length_exceeded")


def too_many_tokens(param: str, model: ServedModel, prompt_tokens: int, answer_tokens: int) -> RequestError:
    both = f"{prompt_tokens + answer_tokens} tokens ({prompt_tokens} in the prompt, {answer_tokens} in the completion)"
    return too_long(param, model, f"you requested {both}. Please reduce the length of the prompt or the completion")


def check_fits(prompt_tokens: int, param: str, model: ServedModel) -> None:
    if prompt_tokens >= model.max_model_len:
        raise too_many_tokens(param, model, prompt_tokens, 1)


def asked(wanted: str | None, models: ServedModels) -> ServedModel:
    """Return the model that a client names; None is the only one of a cluster, without an adapter. Raises RequestError."""
    if wanted is None:
        if models.only is None:
            raise invalid("model", f"model is required: {_there(models)}")
        return models.only
    if (found := models.named(wanted)) is None:
        raise RequestError(404, f"no model {quoted(wanted)} here: {_there(models)}", code="model_not_found", param="model")
    return found


def _there(models: ServedModels) -> str:
    """Return the names of all models, in words."""
    names = ", ".join(map(repr, models.names))
    return f"it is {names}" if len(models.names) == 1 else f"there are {names}"


def check_count(count: int, most: int, what: str) -> None:
    """Refuse more things in the prompt than `most`."""
    if count > most:
        raise invalid("prompt", f"{count} {what} are more than {most}")


def check_containers(raw: bytes, param: str) -> None:
    """Refuse JSON of more lists and objects than are read in a moment: while one call reads them, no other thread runs."""
    if raw.count(b"[") + raw.count(b"{") > MAX_CONTAINERS:
        raise invalid(param, f"more than {MAX_CONTAINERS} lists and objects")


def of_a_library(error: Exception) -> str:
    """A library's text, cut short: it may quote what the client sent at any length."""
    text = str(error)
    return text if len(text) <= QUOTED_CHARS else f"{text[:QUOTED_CHARS]}..."


@contextlib.contextmanager
def json_errors(param: str | None = None) -> Iterator[None]:
    """Turn msgspec's errors into the client's mistake at `param`, or where msgspec's text names the place."""
    try:
        yield
    except msgspec.ValidationError as error:
        # "... - at `$.stop[0]`", "Object missing required field `prompt`" or "Object contains unknown field `foo`"
        found = re.search(r"`\$\.(\w+)|(?:required|unknown) field `([^`]{1,200})`$", str(error))
        raise invalid(param or (found and (found[1] or found[2])), of_a_library(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(None, f"the body is not JSON: {of_a_library(error)}", "invalid_json") from None
