"""Replies and errors of Anthropic's Messages API, whole or as server-sent events."""

from collections.abc import Iterator
from typing import Any

import msgspec

from mooncake_zmq.gateway.anthropic.messages import CALL_PREFIX
from mooncake_zmq.gateway.openai.answer_parts import Begins, Ends, Grows, Part, PartEvent
from mooncake_zmq.gateway.openai.detokenizer import Choice
from mooncake_zmq.gateway.openai.errors import RequestError
from mooncake_zmq.gateway.openai.over_chat import OverChat
from mooncake_zmq.gateway.openai.prepare import Prepared
from mooncake_zmq.gateway.openai.responses import server_sent
from mooncake_zmq.gateway.served_model import ServedModel

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
"""This API's names of ends beside that of the model itself."""
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""The types of errors by their status; those of other statuses depend on whose fault it is."""
DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""The type of a change of a content block by the kind of its part, and the name of what is new."""


def error_body(error: RequestError) -> dict[str, Any]:
    """Return an error in this API's shape; its message begins with the parameter, which the shape has no place for."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    text = f"{error.param}: {error.message}" if error.param else error.message
    return {"type": "error", "error": {"type": ERROR_TYPES.get(error.status, other), "message": text}}


def error_event(error: RequestError) -> bytes:
    """Return an error as the event of a stream."""
    return _event(error_body(error))


class MessagesReply(OverChat):
    """The JSON of one call of /v1/messages, whole or in events. It has one choice."""

    def __init__(
        self, prepared: Prepared, model: ServedModel, *, request_id: str, created: int, shows_reuse: bool = True
    ) -> None:
        super().__init__(prepared, model, request_id=request_id, created=created, shows_reuse=shows_reuse)
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model.id}

    def encoded(self) -> bytes:
        """Return the body of a call that does not stream, as JSON."""
        (choice,) = self.choices
        self._take_whole()
        content = [_whole_block(part) for part in self._parts.all]
        ending = {"stop_reason": _stop_reason(choice), "stop_sequence": choice.stop_string}
        return msgspec.json.encode({**self._head, "content": content, **ending, "usage": self._usage()})

    def news(self) -> bytes:
        """Return everything new, as server-sent events."""
        (choice,) = self.choices
        return b"".join(map(_event, self._events(choice))) if choice.has_news else b""

    def ending(self) -> bytes:
        """Return the last events of a stream."""
        return b"".join(map(_event, self._last_events()))

    def failure(self, error: RequestError) -> bytes:
        """Return the event of an answer that failed after it had begun."""
        return error_event(error)

    def _events(self, choice: Choice) -> Iterator[dict[str, Any]]:
        if choice.pieces_taken == 0:
            unended: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
            yield {"type": "message_start", "message": {**self._head, **unended, "usage": usage}}
        yield from map(_part_event, self._parts.push(choice.take()))

    def _last_events(self) -> Iterator[dict[str, Any]]:
        (choice,) = self.choices
        yield from map(_part_event, self._parts.end())
        delta = {"stop_reason": _stop_reason(choice), "stop_sequence": choice.stop_string}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage()}
        yield {"type": "message_stop"}

    def _usage(self) -> dict[str, Any]:
        """Count the tokens. Those read from the cache are not among those of the input here, unlike in a chat."""
        usage = self._chat.usage()
        cached = self._cached_tokens()
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _stop_reason(choice: Choice) -> str:
    if choice.stop_string is not None and choice.finish_reason == "stop":
        return "stop_sequence"
    return STOP_REASONS.get(choice.finish_reason or "", "end_turn")


def _part_event(event: PartEvent) -> dict[str, Any]:
    index = event.part.index
    match event:
        case Begins(part):
            return {"type": "content_block_start", "index": index, "content_block": _block(part)}
        case Grows(part, more):
            kind, name = DELTAS[part.kind]
            return {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: more}}
        case Ends():
            return {"type": "content_block_stop", "index": index}


def _block(part: Part) -> dict[str, Any]:
    """Return a content block as it begins."""
    match part.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": CALL_PREFIX + part.call_id, "name": part.name, "input": {}}


def _whole_block(part: Part) -> dict[str, Any]:
    if part.kind != "call":
        return {**_block(part), DELTAS[part.kind][1]: part.text}
    given = msgspec.Raw(part.text.encode())
    return {**_block(part), "input": given if _is_object(given) else {}}


def _is_object(raw: msgspec.Raw) -> bool:
    """Return whether these are the whole arguments of a call: an answer may end within them."""
    try:
        return isinstance(msgspec.json.decode(raw), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def _event(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\n".encode() + server_sent(event)
