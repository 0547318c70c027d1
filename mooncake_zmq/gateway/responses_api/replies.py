"""Replies of OpenAI's Responses API, whole or as server-sent events."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from mooncake_zmq.gateway.openai.answer_parts import Begins, Ends, Grows, Part, PartEvent
from mooncake_zmq.gateway.openai.errors import RequestError
from mooncake_zmq.gateway.openai.over_chat import OverChat
from mooncake_zmq.gateway.openai.prepare import Prepared
from mooncake_zmq.gateway.openai.responses import server_sent
from mooncake_zmq.gateway.responses_api.items import CALL_PREFIX, Spaces
from mooncake_zmq.gateway.served_model import ServedModel

TEXTS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
"""The name of a part's text in events, by the kind of the part."""
PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
"""The beginning of an item's id, by the kind of its part."""


class ResponsesReply(OverChat):
    """The JSON of one call of /v1/responses, whole or in events."""

    repeats_text = True

    def __init__(
        self, prepared: Prepared, model: ServedModel, *, request_id: str, created: int, shows_reuse: bool = True
    ) -> None:
        super().__init__(prepared, model, request_id=request_id, created=created, shows_reuse=shows_reuse)
        self._id, self._spaces = request_id, prepared.spaces
        self._head = {"id": f"resp_{request_id}", "object": "response", "created_at": created, "model": model.id}
        self._sent = 0
        """The number of events so far."""

    def encoded(self) -> bytes:
        """Return the body of a call that does not stream, as JSON."""
        self._take_whole()
        return msgspec.json.encode(self._response(self._final_status()))

    def news(self) -> bytes:
        """Return everything new, as server-sent events."""
        (choice,) = self.choices
        if not choice.has_news:
            return b""
        begun = choice.pieces_taken > 0
        first = [] if begun else [self._lifecycle(name, "in_progress") for name in ("created", "in_progress")]
        return self._written([*first, *self._events(self._parts.push(choice.take()))])

    def ending(self) -> bytes:
        """Return the last events of a stream."""
        last = list(self._events(self._parts.end()))
        status = self._final_status()
        return self._written([*last, self._lifecycle(status, status)])

    def failure(self, error: RequestError) -> bytes:
        """Return the event of an answer that failed after it had begun."""
        event = self._lifecycle("failed", "failed")
        event["response"]["error"] = {"code": error.code, "message": error.message}
        return self._written([event])

    def _written(self, events: Iterable[dict[str, Any]]) -> bytes:
        written = []
        for event in events:
            kind = event["type"]
            written.append(f"event: {kind}\n".encode() + server_sent({**event, "sequence_number": self._sent}))
            self._sent += 1
        return b"".join(written)

    def _lifecycle(self, name: str, status: str) -> dict[str, Any]:
        return {"type": f"response.{name}", "response": self._response(status)}

    def _final_status(self) -> str:
        (choice,) = self.choices
        return "incomplete" if choice.finish_reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response: what the call asked for in sizes and sampling is repeated, its input and tools are not."""
        body, ended = self.body, status in ("completed", "incomplete")
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": None,
            "max_output_tokens": body.max_completion_tokens,
            "metadata": {},
            "output": [self._item(part, self._item_status(part, status)) for part in self._parts.all] if ended else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "tool_choice": _choice_of(body.tool_choice),
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
        }

    def _item_status(self, part: Part, status: str) -> str:
        return "incomplete" if status == "incomplete" and part is self._parts.all[-1] else "completed"

    def _usage(self) -> dict[str, Any]:
        usage = self._chat.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self._cached_tokens()},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._chat.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    def _events(self, parts: Iterable[PartEvent]) -> Iterator[dict[str, Any]]:
        for event in parts:
            part = event.part
            at = {"item_id": _item_id(part, self._id), "output_index": part.index}
            within = at if part.kind == "call" else {**at, "content_index": 0}
            match event:
                case Begins():
                    begun = self._item(part, "in_progress")
                    yield {"type": "response.output_item.added", "output_index": part.index, "item": begun}
                    if part.kind != "call":
                        yield {"type": "response.content_part.added", **within, "part": _content(part, "")}
                case Grows(_, more):
                    yield {"type": f"response.{TEXTS[part.kind]}.delta", **within, "delta": more, **_scores(part)}
                case Ends():
                    yield from self._ends(part, within)

    def _ends(self, part: Part, within: dict[str, Any]) -> Iterator[dict[str, Any]]:
        text, done = part.text, f"response.{TEXTS[part.kind]}.done"
        if part.kind == "call":
            yield {"type": done, **within, **_named(part, self._spaces), "arguments": text}
        else:
            yield {"type": done, **within, "text": text, **_scores(part)}
            yield {"type": "response.content_part.done", **within, "part": _content(part, text)}
        item = self._item(part, self._item_status(part, self._final_status()))
        yield {"type": "response.output_item.done", "output_index": part.index, "item": item}

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        """Return a part as an item of the output."""
        common = {"id": _item_id(part, self._id), "status": status}
        if part.kind == "call":
            named = {"call_id": CALL_PREFIX + part.call_id, **_named(part, self._spaces)}
            return {**common, "type": "function_call", **named, "arguments": part.text}
        content = [] if status == "in_progress" else [_content(part, part.text)]
        if part.kind == "reasoning":
            return {**common, "type": "reasoning", "summary": [], "content": content}
        return {**common, "type": "message", "role": "assistant", "content": content}


def _item_id(part: Part, request_id: str) -> str:
    return f"{PREFIXES[part.kind]}_{request_id}_{part.index}"


def _named(part: Part, spaces: Spaces) -> dict[str, Any]:
    """Return the members that name a call's function as the client knows it."""
    if part.name not in spaces:
        return {"name": part.name}
    namespace, name = spaces[part.name]
    return {"name": name, "namespace": namespace}


def _content(part: Part, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": []} if part.kind == "text" else {}
    return {"type": TEXTS[part.kind], "text": text, **more, **_scores(part)}


def _scores(part: Part) -> dict[str, Any]:
    """Return the member of a text that would have its probabilities."""
    return {"logprobs": []} if part.kind == "text" else {}


def _choice_of(chosen: msgspec.Raw) -> Any:
    """Return a chat's choice of tools in the words of this API."""
    found = msgspec.json.decode(chosen)
    return {"type": "function", **found["function"]} if isinstance(found, dict) else found or "auto"
