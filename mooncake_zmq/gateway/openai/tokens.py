"""POST /tokenize and /detokenize, in vLLM's shapes: what a text is to the model, and back. PURE."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from mooncake_zmq.gateway.openai.bodies import ChatMessage, Prompt, chat_form, parsed, read_ids, turns_of
from mooncake_zmq.gateway.openai.errors import RequestError, asked
from mooncake_zmq.gateway.openai.logprobs import text_of
from mooncake_zmq.gateway.openai.prepare import check_size, tokenized
from mooncake_zmq.gateway.openai.rejected_params import NULL
from mooncake_zmq.gateway.served_model import ServedModel, ServedModels


class TokenizeBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A text, or a conversation; one of both."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """Adds the tokens that the model puts before a text, unless this is false; a conversation's template writes them itself."""
    add_generation_prompt: bool | None = None
    """Ends a conversation where the answer begins, unless this is false."""
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw = NULL
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Token ids."""

    tokens: msgspec.Raw
    model: str | None = None


def tokenize(raw: bytes | bytearray, models: ServedModels) -> bytes:
    """The answer to /tokenize, as JSON. Raises RequestError."""
    body = parsed(raw, TokenizeBody)
    model = asked(body.model, models)
    prompt = _prompt(body, model)
    param = "prompt" if isinstance(prompt, str) else "messages"
    check_size(prompt, model, param)
    form = chat_form(bytes(body.chat_template_kwargs), body.add_generation_prompt, body.continue_final_message)
    ids = tokenized(prompt, model, param, special=body.add_special_tokens is not False, form=form)
    strings = [text_of(model.tokenizer.piece(token)) for token in ids] if body.return_token_strs else None
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": model.max_model_len,
        "tokens": ids.tolist(),
        "token_strs": strings,
    }
    return msgspec.json.encode(answer)


def detokenize(raw: bytes | bytearray, models: ServedModels) -> bytes:
    """The answer to /detokenize, as JSON, special tokens and all. Raises RequestError."""
    body = parsed(raw, DetokenizeBody)
    model = asked(body.model, models)
    ids = read_ids(bytes(body.tokens), model, "tokens")
    if max(ids, default=0) >= model.vocab_size:
        text = f"token id {max(ids)} is out of range: the vocabulary has {model.vocab_size} ids"
        raise RequestError(400, text, code="invalid_value", param="tokens")
    return msgspec.json.encode({"prompt": model.tokenizer.decode(ids, special=True)})


def _prompt(body: TokenizeBody, model: ServedModel) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError(400, "give a prompt or messages, one of both", code="invalid_value", param="prompt")
    if body.prompt is not None:
        asked = {
            "continue_final_message": body.continue_final_message,
            "chat_template_kwargs": body.chat_template_kwargs != NULL,
        }
        if name := next((name for name, given in asked.items() if given), None):
            raise RequestError(400, f"{name} is for messages", code="invalid_value", param=name)
        return body.prompt
    if body.add_special_tokens:
        text = "add_special_tokens is for a prompt: of messages the chat template writes them"
        raise RequestError(400, text, code="invalid_value", param="add_special_tokens")
    return turns_of(body.messages or [], model)
