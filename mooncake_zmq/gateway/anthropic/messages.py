"""Bodies of Anthropic's Messages API, translated into those of a chat, which are then checked and prepared as any other. PURE.

Unknown members are ignored, as clients of this API send new ones with each release; what asks for more than text, images and
tools is refused.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from mooncake_zmq.gateway.openai.bodies import ChatBody, OfChat, TokenCount, few_variables, given_of, parse_body, parsed
from mooncake_zmq.gateway.openai.constraints import ConstraintRefused
from mooncake_zmq.gateway.openai.errors import UNSUPPORTED, asked, check_containers, invalid, json_errors, quoted, too_long
from mooncake_zmq.gateway.openai.images import Part, content_of, image_part
from mooncake_zmq.gateway.openai.prepare import check_size, tokenized
from mooncake_zmq.gateway.openai.rejected_params import NULL
from mooncake_zmq.gateway.served_model import ServedModel, ServedModels
from mooncake_zmq.gateway.settings import EdgeSettings

CALL_PREFIX = "toolu_"
"""The beginning of a tool call's id, as this API writes it. Templates are given the rest: some take nine characters alone."""
REFUSED = ("mcp_servers", "container")
"""Fields that ask for what a gateway would have to do for the model."""
TURN_ROLES = Literal["user", "assistant", "system"]


class Source(Struct, frozen=True, gc=False, kw_only=True):
    """Where an image is: its data in base64, or elsewhere."""

    type: str
    media_type: str = ""
    data: str = ""


class Block(Struct, frozen=True, gc=False, kw_only=True):
    """A part of a message's content, of one `type`."""

    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    thinking: str = ""
    input: Raw = NULL
    tool_use_id: str = ""
    content: Raw = NULL
    source: Source | None = None


class Message(Struct, frozen=True, gc=False, kw_only=True):
    """One turn of a conversation. Its content is read once it is known that there are not too many turns."""

    role: TURN_ROLES
    content: Raw


class Tool(Struct, frozen=True, kw_only=True):
    """A tool that the client runs; `type` is `custom` or absent. Its schema is read as a part of the chat, once it is known
    to be short."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: Raw = NULL
    strict: bool | None = None


class ToolChoice(Struct, frozen=True, kw_only=True):
    """Whether the model calls a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True, kw_only=True):
    """Whether the model is to think."""

    type: str


class MessagesBody(OfChat, frozen=True, kw_only=True):
    """POST /v1/messages and /v1/messages/count_tokens. Beside Anthropic's fields it has our own of a chat."""

    max_tokens: TokenCount | None = None
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: Raw = NULL
    stop_sequences: Raw = NULL
    tools: Raw = NULL
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    mcp_servers: Raw = NULL
    container: Raw = NULL


class MessagesChat(ChatBody, frozen=True, kw_only=True):
    """The chat that a body of the Messages API is translated into. Clients of that API ask for a model's longest answer in
    every call, so that more tokens than there is room for are as many as there is room for."""

    clips_answer: ClassVar[bool] = True


_content = msgspec.json.Decoder(str | list[Block])
_text = msgspec.json.Decoder(str | list[Block] | None)
_tools = msgspec.json.Decoder(list[Tool] | None)
_variables = msgspec.json.Decoder(dict[str, Raw] | None)


def as_chat(raw: bytes | bytearray, models: ServedModels) -> bytes:
    """Return the body of the chat that a call of /v1/messages asks for. Raises RequestError."""
    body = parsed(raw, MessagesBody)
    if body.max_tokens is None:
        raise invalid("max_tokens", "max_tokens is required: the most tokens that the answer may have")
    return msgspec.json.encode(_chat_of(body, asked(body.model, models)))


def count_tokens(raw: bytes | bytearray, models: ServedModels, settings: EdgeSettings) -> bytes:
    """Return the answer to /v1/messages/count_tokens, as JSON: the tokens of the prompt as the model's template writes it.
    Raises RequestError."""
    body = parsed(raw, MessagesBody)
    model = asked(body.model, models)
    chat = parse_body(msgspec.json.encode(_chat_of(body, model)), MessagesChat)
    (prompt,) = chat.prompts(model, 1)
    check_size(prompt, model, "messages")
    try:
        tools = chat.tools_for(model, settings, None, parsed=True)  # only the prompt counts
    except ConstraintRefused as refused:
        raise invalid(refused.param, refused.message) from None
    ids = tokenized(prompt, model, "messages", form=chat.chat_form(), tools=tools.given)
    return msgspec.json.encode({"input_tokens": len(ids)})


def _chat_of(body: MessagesBody, model: ServedModel) -> dict[str, Any]:
    for name in REFUSED:
        if bytes(getattr(body, name)) not in (b"null", b"[]"):
            raise invalid(name, f"{name} is not supported", UNSUPPORTED)
    if len(body.messages) > model.max_model_len:
        raise too_long("messages", model, f"you requested {len(body.messages)} messages, which are more tokens than that")
    turns = [*_system(body.system), *_turns(body.messages, model.max_model_len)]
    named = {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    chat: dict[str, Any] = {"messages": turns, **_tools_of(body), **body.as_chat(), **given_of(named)}
    if body.thinking is not None:
        chat["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"} | _variables_of(body)
    if turns[-1]["role"] == "assistant":
        chat["continue_final_message"] = True
    return chat


def _variables_of(body: MessagesBody) -> dict[str, Raw]:
    with json_errors("chat_template_kwargs"):
        return _variables.decode(few_variables(bytes(body.chat_template_kwargs))) or {}


def _system(raw: Raw) -> list[dict[str, Any]]:
    with json_errors("system"):
        given = _text.decode(raw)
    text = given if isinstance(given, str) else "\n".join(_texts(given or (), "system"))
    return [{"role": "system", "content": text}] if text else []


def _texts(blocks: Sequence[Block], param: str) -> Iterator[str]:
    """Yield the texts of blocks that may be nothing else. Raises RequestError."""
    for block in blocks:
        if block.type != "text":
            raise invalid(param, f"content of type {quoted(block.type)} is not supported here: only 'text'", UNSUPPORTED)
        yield block.text


def _turns(messages: Sequence[Message], most_blocks: int) -> Iterator[dict[str, Any]]:
    """Yield the turns as a chat has them: results of tools are turns of their own. Raises RequestError."""
    for message in messages:
        with json_errors("messages"):
            content = _content.decode(message.content)
        if isinstance(content, str):
            yield {"role": message.role, "content": content}
            continue
        most_blocks -= len(content)
        if most_blocks < 0:
            raise invalid("messages", "the messages have more parts than the model's context has tokens")
        yield from _turns_of(message.role, content)


def _turns_of(role: str, blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
    texts: list[Part] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block.type, role:
            case "text", _:
                texts.append({"type": "text", "text": block.text})
            case "image", "user":
                texts.append(_image(block))
            case "tool_use", "assistant":
                calls.append(_call(block))
            case "tool_result", "user":
                if texts:
                    yield {"role": role, "content": content_of(texts)}
                    texts = []
                yield _result(block)
            case "thinking", "assistant":
                thoughts.append(block.thinking)
            case "redacted_thinking", "assistant":
                pass  # no server but the one that wrote it can read it
            case _:
                text = f"content of type {quoted(block.type)} is not supported in a message of the {role}"
                raise invalid("messages", text, UNSUPPORTED)
    if texts or calls or role != "user" or not blocks:
        more = {"reasoning_content": "\n".join(thoughts), "tool_calls": calls}
        yield {"role": role, "content": content_of(texts), **{name: given for name, given in more.items() if given}}


def _call(block: Block) -> dict[str, Any]:
    arguments = bytes(block.input) if block.input != NULL else b"{}"
    function = {"name": block.name, "arguments": arguments.decode(errors="replace")}
    return {"type": "function", "id": block.id.removeprefix(CALL_PREFIX), "function": function}


def _result(block: Block) -> dict[str, Any]:
    with json_errors("messages"):
        given = _text.decode(block.content)
    content: str | list[Part] = given if isinstance(given, str) else content_of(list(_parts(given or ())))
    return {"role": "tool", "tool_call_id": block.tool_use_id.removeprefix(CALL_PREFIX), "content": content}


def _parts(blocks: Sequence[Block]) -> Iterator[Part]:
    """Yield texts and images as parts of a chat's message. Raises RequestError."""
    for block in blocks:
        if block.type == "image":
            yield _image(block)
        else:
            yield from ({"type": "text", "text": text} for text in _texts((block,), "messages"))


def _image(block: Block) -> Part:
    source = block.source
    if source is None or source.type != "base64":
        kind = "none" if source is None else quoted(source.type)
        text = f"the source of an image is its data (type 'base64'), as nothing is fetched from elsewhere: not {kind}"
        raise invalid("messages", text, UNSUPPORTED)
    return image_part(f"data:{source.media_type};base64,{source.data}")


def _tools_of(body: MessagesBody) -> dict[str, Any]:
    """Return the fields of a chat that say which tools there are and whether one is called. Raises RequestError."""
    check_containers(bytes(body.tools), "tools")
    with json_errors("tools"):
        tools = _tools.decode(body.tools) or []
    for tool in tools:
        if tool.type not in (None, "custom"):
            raise invalid(
                "tools", f"tools of type {quoted(tool.type)} are not supported: only those of the client", UNSUPPORTED
            )
    chat: dict[str, Any] = {}
    if tools:
        chat["tools"] = [_function(tool) for tool in tools]
    choice = body.tool_choice
    if choice is None:
        return chat
    match choice.type:
        case "any":
            chat["tool_choice"] = "required"
        case "tool":
            chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        case "auto" | "none":
            chat["tool_choice"] = choice.type
    if choice.disable_parallel_tool_use:
        chat["parallel_tool_calls"] = False
    return chat


def _function(tool: Tool) -> dict[str, Any]:
    named = {"description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": {"name": tool.name, **given_of(named)}}
