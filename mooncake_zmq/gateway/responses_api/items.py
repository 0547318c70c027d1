"""Bodies of OpenAI's Responses API, translated into those of a chat, which are then checked and prepared as any other. PURE.

Unknown members are ignored, as clients of this API send new ones with each release; what asks for more than text, images and
functions, or for a conversation kept by the server, is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct, structs

from mooncake_zmq.gateway.openai.bodies import OfChat, given_of, parsed
from mooncake_zmq.gateway.openai.errors import UNSUPPORTED, asked, check_containers, invalid, json_errors, quoted, too_long
from mooncake_zmq.gateway.openai.images import Part, content_of, image_part
from mooncake_zmq.gateway.openai.rejected_params import NULL
from mooncake_zmq.gateway.served_model import ServedModel, ServedModels

CALL_PREFIX = "call_"
"""The beginning of a call's id, as this API writes it. Templates are given the rest: some take nine characters alone."""
REFUSED = ("previous_response_id", "conversation", "background", "prompt")
"""Fields that ask for what a server would have to keep."""
NOTHING = (b"null", b"false", b"{}")
SYSTEM_ROLES = ("system", "developer")
SPACE_SEPARATOR = "__"
"""The text between the names of a namespace and of its function, as the model sees them: it knows no namespaces."""
LEFT_OUT = frozenset({"web_search", "image_generation", "tool_search"})
"""Types of tools that agents name in each call, and that are done by no one here: the model is not offered them."""

Spaces = Mapping[str, tuple[str, str]]
"""Namespace and name of each function that is in a namespace, by the name that the model sees."""


class Content(Struct, frozen=True, gc=False, kw_only=True):
    """A part of a message's content, of one `type`."""

    type: str
    text: str = ""
    refusal: str = ""
    image_url: str | None = None


class Item(Struct, frozen=True, gc=False, kw_only=True):
    """One item of the input; without a `type` it is a message."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Raw = NULL
    summary: Raw = NULL
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    output: Raw = NULL


class Tool(Struct, frozen=True, kw_only=True):
    """A tool; of type `function` the client runs it, of type `namespace` it has `tools` that are functions. Its schema is read
    as a part of the chat, once it is known to be short."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: Raw = NULL
    strict: bool | None = None
    tools: "list[Tool] | None" = None


class Format(Struct, frozen=True, kw_only=True):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: Raw = NULL
    strict: bool | None = None


class Text(Struct, frozen=True, kw_only=True):
    """Options of the answer's text."""

    format: Format | None = None


class Reasoning(Struct, frozen=True, kw_only=True):
    """Options of models that think."""

    effort: str | None = None


class ResponsesBody(OfChat, frozen=True, kw_only=True):
    """POST /v1/responses. Beside OpenAI's fields it has our own of a chat."""

    input: Raw
    instructions: str | None = None
    max_output_tokens: Raw = NULL
    tools: Raw = NULL
    tool_choice: Raw = NULL
    text: Text | None = None
    reasoning: Reasoning | None = None
    previous_response_id: Raw = NULL
    conversation: Raw = NULL
    background: Raw = NULL
    prompt: Raw = NULL
    parallel_tool_calls: Raw = NULL


class Choice(Struct, frozen=True, kw_only=True):
    """A function that must be called."""

    type: str
    name: str = ""
    namespace: str | None = None


_input = msgspec.json.Decoder(str | list[Raw])
_item = msgspec.json.Decoder(Item)
_content = msgspec.json.Decoder(str | list[Content] | None)
_tools = msgspec.json.Decoder(list[Tool] | None)
_choice = msgspec.json.Decoder(str | Choice | None)


def as_chat(raw: bytes | bytearray, models: ServedModels) -> tuple[bytes, Spaces]:
    """Return the body of the chat that a call of /v1/responses asks for, and the namespaces of its functions. Raises
    RequestError."""
    body = parsed(raw, ResponsesBody)
    for name in REFUSED:
        if bytes(getattr(body, name)) not in NOTHING:
            raise invalid(name, f"{name} is not supported: no response is kept here, so send the whole input", UNSUPPORTED)
    tools = list(_functions(body))
    spaces = _spaces(tools)
    chat: dict[str, Any] = {"messages": _turns(body, asked(body.model, models)), **_choice_of(body), **body.as_chat()}
    if tools:
        chat["tools"] = [_function(_seen(space, tool.name), tool) for space, tool in tools]
    chat |= given_of({"parallel_tool_calls": body.parallel_tool_calls, "max_completion_tokens": body.max_output_tokens})
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if (form := body.text and body.text.format) and form.type != "text":
        chat["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            named = {"name": form.name or "answer", "schema": form.schema, "strict": form.strict}
            chat["response_format"]["json_schema"] = given_of(named)
    return msgspec.json.encode(chat), spaces


def _turns(body: ResponsesBody, model: ServedModel) -> list[dict[str, Any]]:
    """Return the conversation as a chat has it: what is said to the model before anything else is one turn, as templates know
    no more. Raises RequestError."""
    with json_errors("input"):
        given = _input.decode(body.input)
        if not isinstance(given, str) and len(given) > model.max_model_len:
            raise too_long("input", model, f"you requested {len(given)} items, which are more tokens than that")
        items = [Item(role="user", content=body.input)] if isinstance(given, str) else list(map(_item.decode, given))
    turns = list(_joined(map(_turn, items)))
    leading = [body.instructions] if body.instructions else []
    while turns and turns[0]["role"] == "system":
        if not isinstance(content := turns.pop(0)["content"], str):
            raise invalid("input", "an image is in a message of the user, not of the system", UNSUPPORTED)
        leading.append(content)
    if not turns and not leading:
        raise invalid("input", "the input is empty")
    return [*([{"role": "system", "content": "\n\n".join(leading)}] if leading else []), *turns]


def _turn(item: Item) -> dict[str, Any]:
    """Return an item as a turn of its own, or as the beginning of one: reasoning has no content. Raises RequestError."""
    match item.type:
        case "message" if item.role is not None:
            role = "system" if item.role in SYSTEM_ROLES else item.role
            return {"role": role, "content": _content_of(item.content)}
        case "function_call":
            function = {"name": _seen(item.namespace, item.name), "arguments": item.arguments}
            call = {"type": "function", "id": item.call_id.removeprefix(CALL_PREFIX), "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            return {"role": "tool", "tool_call_id": item.call_id.removeprefix(CALL_PREFIX), "content": _content_of(item.output)}
        case "reasoning":
            return {"role": "assistant", "reasoning_content": _text_of(item.content) or _text_of(item.summary)}
        case "message":
            raise invalid("input", "a message has no role")
        case _:
            raise invalid("input", f"items of type {quoted(item.type)} are not supported", UNSUPPORTED)


def _joined(turns: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the turns, with the reasoning and the calls of one answer in the turn of its text. Reasoning that no answer follows
    is left out."""
    last: dict[str, Any] | None = None
    for turn in turns:
        if last is not None and last["role"] == "assistant" and "tool_calls" in turn:
            last.setdefault("content", "")
            last.setdefault("tool_calls", []).extend(turn["tool_calls"])
            continue
        if last is not None and turn["role"] == "assistant" and "content" not in last:
            thoughts = [each["reasoning_content"] for each in (last, turn) if "reasoning_content" in each]
            last |= {**turn, "reasoning_content": "\n".join(thoughts)}
            continue
        if last is not None and "content" in last:
            yield last
        last = turn
    if last is not None and "content" in last:
        yield last


def _content_of(raw: Raw) -> str | list[Part]:
    """Return the content of a turn: one text, unless it has images. Raises RequestError."""
    with json_errors("input"):
        given = _content.decode(raw)
    return given if isinstance(given, str) else content_of(list(map(_part, given or ())))


def _part(content: Content) -> Part:
    if content.type != "input_image":
        (text,) = _texts((content,))
        return {"type": "text", "text": text}
    if content.image_url is None:
        raise invalid("input", "an image is a data URL in image_url: no files are kept here", UNSUPPORTED)
    return image_part(content.image_url)


def _text_of(raw: Raw) -> str:
    with json_errors("input"):
        given = _content.decode(raw)
    return given if isinstance(given, str) else "\n".join(_texts(given or ()))


def _texts(contents: Sequence[Content]) -> Iterator[str]:
    for content in contents:
        match content.type:
            case "input_text" | "output_text" | "text" | "reasoning_text" | "summary_text":
                yield content.text
            case "refusal":
                yield content.refusal
            case _:
                raise invalid(
                    "input", f"content of type {quoted(content.type)} is not supported: only text and images", UNSUPPORTED
                )


def _functions(body: ResponsesBody) -> Iterator[tuple[str | None, Tool]]:
    """Yield the functions, each with its namespace if it has one, which is described by its first. Raises RequestError."""
    check_containers(bytes(body.tools), "tools")
    with json_errors("tools"):
        tools = _tools.decode(body.tools) or []
    for tool in tools:
        if tool.type == "namespace":
            for place, each in enumerate(map(_checked, tool.tools or ())):
                said = [text for text in (tool.description if place == 0 else None, each.description) if text]
                yield tool.name, structs.replace(each, description="\n\n".join(said) or None)
        elif tool.type not in LEFT_OUT:
            yield None, _checked(tool)


def _spaces(tools: Sequence[tuple[str | None, Tool]]) -> Spaces:
    """Return the namespaces of functions. Raises RequestError if the model would see two functions under one name."""
    seen: dict[str, str | None] = {}
    for space, tool in tools:
        if seen.setdefault(name := _seen(space, tool.name), space) != space:
            raise invalid("tools", f"two functions of different namespaces are both {quoted(name)} for the model: rename one")
    return {_seen(space, tool.name): (space, tool.name) for space, tool in tools if space}


def _checked(tool: Tool) -> Tool:
    if tool.type != "function":
        text = f"tools of type {quoted(tool.type)} are not supported: only functions, which the client runs"
        raise invalid("tools", text, UNSUPPORTED)
    return tool


def _seen(namespace: str | None, name: str) -> str:
    """Return the name of a function as the model sees it."""
    return f"{namespace}{SPACE_SEPARATOR}{name}" if namespace else name


def _choice_of(body: ResponsesBody) -> dict[str, Any]:
    """Return the field of a chat that says whether a function is called. Raises RequestError."""
    with json_errors("tool_choice"):
        choice = _choice.decode(body.tool_choice)
    if not isinstance(choice, Choice):
        return {} if choice is None else {"tool_choice": choice}
    if choice.type != "function":
        raise invalid("tool_choice", f"a choice of type {quoted(choice.type)} is not supported", UNSUPPORTED)
    return {"tool_choice": {"type": "function", "function": {"name": _seen(choice.namespace, choice.name)}}}


def _function(name: str, tool: Tool) -> dict[str, Any]:
    named = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": {"name": name, **given_of(named)}}
