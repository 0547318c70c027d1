"""The JSON bodies that clients send: unknown fields are refused, null means absent. PURE: no socket, clock or randomness."""

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from mooncake_zmq.core.chat import PLAIN_CHAT, TEMPLATE_NAMES, ChatForm
from mooncake_zmq.core.messages import MAX_LOGPROBS, Priority, Sampling, Slo, StopRule
from mooncake_zmq.gateway.openai.constraints import Constrained
from mooncake_zmq.gateway.openai.errors import (
    UNSUPPORTED,
    check_count,
    check_fits,
    invalid,
    json_errors,
    of_a_library,
    quoted,
    too_long,
    too_many_tokens,
)
from mooncake_zmq.gateway.openai.images import ImageUrl, content_of, image_part
from mooncake_zmq.gateway.openai.kv_budgets import KvBudget
from mooncake_zmq.gateway.openai.reasoning import Marks, marks_of
from mooncake_zmq.gateway.openai.rejected_params import NULL, UnsupportedOfMessage, asked, asked_of_message, refusal
from mooncake_zmq.gateway.openai.tools import NO_TOOLS, Tools, read_calls, read_tools, with_names
from mooncake_zmq.gateway.served_model import ServedModel
from mooncake_zmq.gateway.settings import EdgeSettings

KindT = TypeVar("KindT")

SEED_BITS = 63
SEEDS = 1 << SEED_BITS

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
STOPS, STOP_CHARS = 16, 1024
Filled = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Likeliest = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
TokenCount = Annotated[int, Meta(ge=1, le=1 << 48)]
ChatTurn = dict[str, Any]
Prompt = str | list[int] | list[ChatTurn]

_stops = msgspec.json.Decoder(Filled | Annotated[list[Filled], Meta(max_length=STOPS)] | None)
STOPS_BYTES = 2 * STOPS * STOP_CHARS * len(r"\ud83d\ude42")
"""As JSON, in whatever way it is written; more is not even read."""
STOP_TOKENS = 32
STOP_TOKENS_BYTES = 32 * STOP_TOKENS
BIASES = 1024
_biases = msgspec.json.Decoder(Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=BIASES)] | None)
BIASES_BYTES = 64 * BIASES
VARIABLES_BYTES = 4096
VARIABLE = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
Scalar = Annotated[str, Meta(max_length=STOP_CHARS)] | int | float | bool | None
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_variables = msgspec.json.Decoder(dict[str, Scalar] | None)
_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])
_ids = msgspec.json.Decoder(list[TokenId])
_stop_tokens = msgspec.json.Decoder(Annotated[list[TokenId], Meta(max_length=STOP_TOKENS)] | None)
_lists_of_ids = msgspec.json.Decoder(list[list[TokenId]])
_OPENING = re.compile(rb"\s*(?:\[\s*)?(.)", re.DOTALL)
"""Finds the first character of a prompt, behind the bracket of a list."""


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options for what a stream has beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Body(Constrained, frozen=True, kw_only=True):
    """The fields of both endpoints. vLLM's extensions: top_k, ignore_eos, min_tokens, return_token_ids, cache_salt, priority (a
    lower one is earlier), stop_token_ids, include_stop_str_in_output, skip_special_tokens, truncate_prompt_tokens. Ours:
    ttft_slo and tbt_slo, bounds in seconds in place of the deployment's, 0 for none; exact, for an answer that is not
    approximate; answer_cache, which is false where an engine is to answer though the gateway has an answer; and mooncake, for
    an answer over fewer of the prompt's tokens."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 48)] | None = None
    max_completion_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    seed: Annotated[int, Meta(ge=-SEEDS, le=SEEDS - 1)] | None = None
    stop: msgspec.Raw = msgspec.Raw(b"null")
    stop_token_ids: msgspec.Raw = NULL
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=1 << 48)] | None = None
    """How many of the prompt's last tokens are used; -1: as many as leave room for the answer."""
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 48)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    return_token_ids: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    logit_bias: msgspec.Raw = msgspec.Raw(b"null")
    cache_salt: Filled | None = None
    priority: Priority | None = None
    ttft_slo: Slo = None
    tbt_slo: Slo = None
    answer_cache: bool | None = None
    exact: bool | None = None
    mooncake: KvBudget | None = None
    clips_answer: ClassVar[bool] = False
    """Whether more tokens than there is room for are no error."""

    def without_prompt(self) -> Self:
        """Return a copy for the time of the answer: without raw values, of which each one keeps the whole body in memory."""
        given = msgspec.structs.asdict(self)
        return msgspec.structs.replace(self, **{name: NULL for name, value in given.items() if isinstance(value, msgspec.Raw)})

    @property
    def must_be_exact(self) -> bool:
        """Whether the answer may not be approximate: its client refuses that, or it has no place to say so."""
        return bool(self.exact or (self.stream and not self.include_usage))

    def check_kv_budget(self, settings: EdgeSettings) -> None:
        """Check that the decode may hold fewer of the prompt's tokens, if that is asked for. Raises RequestError."""
        if self.mooncake is None:
            return
        if not settings.kv_budget:
            raise invalid(
                "mooncake", "kv_budget is not allowed here: the gateway's setting edge.kv_budget is false", UNSUPPORTED
            )
        self.mooncake.kind()
        if self.exact:
            raise invalid("mooncake", "an answer over fewer tokens is approximate: leave out either exact or kv_budget")
        if self.must_be_exact:
            text = "a stream says with its usage that its answer is approximate: set stream_options.include_usage"
            raise invalid("mooncake", text)
        if self.echoed_likeliest is not None:
            raise invalid("mooncake", "probabilities of a prompt come without kv_budget: leave out echo, logprobs or kv_budget")

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    def tools_for(self, model: ServedModel, settings: EdgeSettings, answer: dict[str, Any] | None, *, parsed: bool) -> Tools:
        """`answer`: the schema of one, if there is one. `parsed`: whether vLLMs parse calls. Raises ConstraintRefused."""
        return NO_TOOLS

    @property
    def wants_reasoning(self) -> bool:
        """Whether the reasoning of a model that thinks is returned."""
        return True

    def reasoning_marks(self, model: ServedModel, settings: EdgeSettings) -> Marks | None:
        """Return the marks of the reasoning in an answer; None: it is a part of the text."""
        return None

    def reasons_as_vllm(self, settings: EdgeSettings) -> bool:
        """Return whether the parser of a vLLM may read the reasoning in an answer, if its marks are not known here."""
        return False

    def check_stream_options(self) -> None:
        """Raises RequestError."""
        options = self.stream_options
        if options is None:
            return
        if not self.stream:
            raise invalid("stream_options", "stream_options are of a stream: set stream")
        if options.include_obfuscation:
            raise invalid("stream_options", "include_obfuscation is not supported", UNSUPPORTED)
        if options.continuous_usage_stats and not options.include_usage:
            raise invalid("stream_options", "continuous_usage_stats need include_usage")

    def stops(self) -> list[str]:
        """The stop strings. Raises RequestError."""
        given = bytes(self.stop)
        if len(given) > STOPS_BYTES:
            raise invalid("stop", f"at most {STOPS} stop strings of {STOP_CHARS} characters")
        with json_errors("stop"):
            found = _stops.decode(given)
        return [found] if isinstance(found, str) else found or []

    def stop_tokens(self, model: ServedModel) -> tuple[int, ...]:
        """The tokens that end an answer beside the model's own. Raises RequestError."""
        given = bytes(self.stop_token_ids)
        if len(given) > STOP_TOKENS_BYTES:
            raise invalid("stop_token_ids", f"at most {STOP_TOKENS} token ids")
        with json_errors("stop_token_ids"):
            found = _stop_tokens.decode(given) or []
        if found and max(found) >= model.vocab_size:
            raise invalid("stop_token_ids", f"{max(found)} is no token id: the vocabulary has {model.vocab_size} ids")
        return tuple(found)

    def textless(self, stop: StopRule, model: ServedModel) -> frozenset[int]:
        """The tokens whose text is no part of an answer."""
        if self.include_stop_str_in_output:
            return frozenset()
        own = () if self.skip_special_tokens is False else model.tokenizer.eos_ids
        return frozenset((*stop.eos_ids, *own))

    def truncated(self, ids: "array[int]", model: ServedModel) -> "array[int]":
        """The last tokens of a prompt, as many as are asked for. Raises RequestError."""
        kept = self.truncate_prompt_tokens
        if kept is None:
            return ids
        if kept == -1:
            kept = model.max_model_len - (self.requested_tokens or 1)
        if kept < 1:
            raise invalid("truncate_prompt_tokens", "a prompt has one token at least, and leaves room for the answer")
        return ids[-kept:]

    def chat_form(self) -> ChatForm:
        """How a conversation is written as a prompt. Raises RequestError."""
        return PLAIN_CHAT

    @property
    def requested_tokens(self) -> int | None:
        """The most tokens that the client asks for: `max_completion_tokens` counts before `max_tokens`. 0: the echo alone."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def likeliest(self) -> int | None:
        """Number of likeliest tokens to return with each token's probability; None: no probabilities."""
        raise NotImplementedError

    @property
    def echoed_likeliest(self) -> int | None:
        """Number of likeliest tokens to return with each token of the prompt; None: no probabilities."""
        return None

    def check_no_answer(self) -> None:
        """Check that a request for no token is allowed. Raises RequestError."""
        raise invalid("max_tokens", "max_tokens is at least 1, or 0 for a completion with echo")

    def sampling(self, model: ServedModel, constraint: bytes = b"") -> Sampling:
        """The temperature is 1 by default, as OpenAI has it; seed and length of a prompt are still to come. Raises
        RequestError."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self._biases(model),
            logprobs=self.likeliest,
            constraint=constraint,
        )

    def _biases(self, model: ServedModel) -> tuple[tuple[int, float], ...]:
        given = bytes(self.logit_bias)
        if len(given) > BIASES_BYTES:
            raise invalid("logit_bias", f"at most {BIASES} tokens")
        with json_errors("logit_bias"):
            found = _biases.decode(given) or {}
        for token in found:
            if not token.isdecimal() or len(token) > 10 or int(token) >= model.vocab_size:
                raise invalid("logit_bias", f"{quoted(token)} is no token id: the vocabulary has {model.vocab_size} ids")
        return tuple(sorted((int(token), bias) for token, bias in found.items()))

    def stop_rule(
        self, prompt_tokens: int, default_tokens: int, model: ServedModel, param: str, stop_tokens: Sequence[int]
    ) -> StopRule:
        """Fit the output into the model's context: a request that does not fit is an error, a default is clipped."""
        room = model.max_model_len - prompt_tokens
        check_fits(prompt_tokens, param, model)
        requested = self.requested_tokens
        if requested == 0:
            self.check_no_answer()
            return StopRule(max_tokens=1)
        if requested is not None and requested > room and self.clips_answer:
            requested = room
        if requested is not None and requested > room:
            name = "max_completion_tokens" if self.max_completion_tokens else "max_tokens"
            raise too_many_tokens(name, model, prompt_tokens, requested)
        max_tokens = requested or min(default_tokens, room)
        min_tokens = self.min_tokens or 0
        if min_tokens > max_tokens:
            raise invalid("min_tokens", f"min_tokens is {min_tokens}, but at most {max_tokens} tokens will be made")
        own = () if self.ignore_eos else model.tokenizer.eos_ids
        eos_ids = tuple(dict.fromkeys((*own, *stop_tokens)))
        return StopRule(max_tokens=max_tokens, min_tokens=min_tokens, eos_ids=eos_ids)


class CompletionBody(Body, frozen=True, kw_only=True):
    """POST /v1/completions. The prompt is a text, token ids, or a list of prompts of one of these kinds; it is looked at before
    it is read, as millions of lists take the interpreter a second."""

    prompt: msgspec.Raw
    echo: bool | None = None
    logprobs: Likeliest | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def echoed_likeliest(self) -> int | None:
        return self.logprobs if self.echo else None

    def check_no_answer(self) -> None:
        if not self.echo:
            super().check_no_answer()

    def prompts(self, model: ServedModel, max_prompts: int) -> list[Prompt]:
        """One prompt, or a list of them; a list of ids is one prompt."""
        if self.echo and self.truncate_prompt_tokens is not None:
            raise invalid("truncate_prompt_tokens", "echo repeats the whole prompt: leave one of the two out")
        if self.echoed_likeliest is not None and self.choices_per_prompt > 1:
            raise invalid("n", "logprobs with echo cover the prompt, for one choice only: leave n out")
        given = bytes(self.prompt)
        opening = _OPENING.match(given)
        first = opening[1] if opening else b""
        with json_errors("prompt"):
            if given[:1] == b'"':
                prompts: list[Prompt] = [_text.decode(given)]
            elif first == b'"':
                # Quotation marks that are no part of a text, or fewer: of two for each text.
                check_count((given.count(b'"') - given.count(b'\\"')) // 2, max_prompts, "prompts")
                prompts = [*_texts.decode(given)]
            elif first == b"[":
                check_count(given.count(b"[") - 1, max_prompts, "prompts")
                check_count(given.count(b","), max_prompts * model.max_model_len, "token ids")
                prompts = [*_lists_of_ids.decode(given)]
            elif first == b"]":
                prompts = []
            else:
                prompts = [read_ids(given, model, "prompt", cut=self.truncate_prompt_tokens is not None)]
        if not prompts or not all(prompts):
            raise invalid("prompt", "the prompt is empty")
        return prompts


class ContentPart(Struct, frozen=True, gc=False):
    """A part of a message: a text or an image."""

    type: str
    text: str | None = None
    image_url: ImageUrl | None = None


_content = msgspec.json.Decoder(str | list[ContentPart] | None)


class ChatMessage(UnsupportedOfMessage, frozen=True, gc=False, kw_only=True):
    """One turn of a conversation. Its content is read once it is known that there are not too many of them: lists by the
    hundred thousand wake the garbage collector, in one call beside which no other thread runs."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: msgspec.Raw = msgspec.Raw(b"null")
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: msgspec.Raw = NULL
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The reasoning of an earlier answer, by either name; templates decide whether they write it again."""
    parsed: msgspec.Raw = NULL
    """OpenAI's client sends back with an answer what it read out of it; it says nothing that the content does not."""

    def turn(self) -> ChatTurn:
        """As chat templates read it. Text parts are joined by line breaks, as vLLM does, unless there are images among them."""
        if (name := asked_of_message(self)) is not None:
            raise invalid("messages", f"{name} of a message is not supported", UNSUPPORTED)
        with json_errors("messages"):
            content = _content.decode(self.content)
        text = content_of(list(map(_part, content))) if isinstance(content, list) else content or ""
        try:
            calls = read_calls(self.tool_calls)
        except (ValueError, RecursionError) as error:
            raise invalid("messages", f"tool_calls of a message: {of_a_library(error)}") from None
        more = {"name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": calls}
        more["reasoning_content"] = self.reasoning_content or self.reasoning
        return {"role": self.role, "content": text, **{name: said for name, said in more.items() if said}}


def _part(given: ContentPart) -> dict[str, Any]:
    """Return a part of a message. Raises RequestError."""
    if given.type == "text" and given.text is not None:
        return {"type": "text", "text": given.text}
    if given.type == "image_url" and given.image_url is not None:
        return image_part(given.image_url.url)
    kind = f"content parts of type {quoted(given.type)}"
    raise invalid("messages", f"{kind} are not supported: only 'text' with a text, and 'image_url' with an image")


class ChatBody(Body, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    parallel_tool_calls: bool | None = None  # type: ignore[assignment]
    add_generation_prompt: bool | None = None  # type: ignore[assignment]
    continue_final_message: bool | None = None  # type: ignore[assignment]
    reasoning_effort: Effort | None = None  # type: ignore[assignment]
    include_reasoning: bool | None = None
    done: ClassVar[frozenset[str]] = frozenset(
        ("tools", "tool_choice", "add_generation_prompt", "continue_final_message", "reasoning_effort", "chat_template_kwargs")
    )

    def tools_for(self, model: ServedModel, settings: EdgeSettings, answer: dict[str, Any] | None, *, parsed: bool) -> Tools:
        form, words = settings.tool_call_parser or None, model.tokenizer
        return read_tools(self.tools, self.tool_choice, self.parallel_tool_calls, words, form, answer, parsed=parsed)

    @property
    def wants_reasoning(self) -> bool:
        return self.include_reasoning is not False

    def reasoning_marks(self, model: ServedModel, settings: EdgeSettings) -> Marks | None:
        return marks_of(model.tokenizer.chat_template, settings.reasoning_parser)

    def reasons_as_vllm(self, settings: EdgeSettings) -> bool:
        return settings.reasoning_parser in ("", "vllm")

    @property
    def likeliest(self) -> int | None:
        if not self.logprobs and self.top_logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self, model: ServedModel, max_prompts: int) -> list[Prompt]:
        """The conversation is one prompt."""
        return [turns_of(self.messages, model)]

    def without_prompt(self) -> Self:
        """See `Body`. The choice of tools is short."""
        return msgspec.structs.replace(super().without_prompt(), messages=[], tool_choice=self.tool_choice.copy())

    def chat_form(self) -> ChatForm:
        return chat_form(
            bytes(self.chat_template_kwargs), self.add_generation_prompt, self.continue_final_message, self.reasoning_effort
        )


def chat_form(
    kwargs: bytes, add_generation_prompt: bool | None, continue_final_message: bool | None, effort: Effort | None = None
) -> ChatForm:
    """How a conversation is written as a prompt, as a body's fields say. Raises RequestError."""
    if continue_final_message and add_generation_prompt:
        raise invalid("continue_final_message", "either the final message is continued or an answer begins: one of the two")
    with json_errors("chat_template_kwargs"):
        variables = _variables.decode(few_variables(kwargs)) or {}
    for name in variables:
        if name in TEMPLATE_NAMES:
            raise invalid("chat_template_kwargs", f"{name} cannot be set here")
        if not VARIABLE.fullmatch(name):
            raise invalid("chat_template_kwargs", f"{quoted(name)} is no name of a template's variable")
    if effort is not None:
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"} | variables
    continued = bool(continue_final_message)
    return ChatForm(add_generation_prompt is not False and not continued, continued, variables)


def given_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a translated object's fields that the client has given."""
    return {name: said for name, said in fields.items() if said is not None and said != NULL}


class OfChat(Struct, frozen=True, kw_only=True):
    """The fields of another API's body that have the same name and meaning in the body of a chat."""

    model: str | None = None
    stream: Raw = NULL
    temperature: Raw = NULL
    top_p: Raw = NULL
    top_k: Raw = NULL
    seed: Raw = NULL
    min_tokens: Raw = NULL
    ignore_eos: Raw = NULL
    chat_template_kwargs: Raw = NULL
    cache_salt: Raw = NULL
    priority: Raw = NULL
    ttft_slo: Raw = NULL
    tbt_slo: Raw = NULL

    def as_chat(self) -> dict[str, Any]:
        """Return those that are given, for a chat whose answer cannot say that it is not exact, as that API's cannot."""
        return given_of({name: getattr(self, name) for name in OfChat.__struct_fields__}) | {"exact": True}


def few_variables(kwargs: bytes) -> bytes:
    """Return the JSON of a template's variables, if it is short. Raises RequestError."""
    if len(kwargs) > VARIABLES_BYTES:
        raise invalid("chat_template_kwargs", f"{len(kwargs)} bytes of JSON are more than {VARIABLES_BYTES}")
    return kwargs


def turns_of(messages: Sequence[ChatMessage], model: ServedModel) -> list[ChatTurn]:
    """A conversation as chat templates read it. Raises RequestError."""
    if len(messages) > model.max_model_len:
        raise too_long("messages", model, f"you requested {len(messages)} messages, which are more tokens than that")
    return with_names([message.turn() for message in messages])


def read_ids(raw: bytes, model: ServedModel, param: str, *, cut: bool = False) -> list[int]:
    """A list of token ids, not longer than a prompt may be; `cut`: one whose last ones are used, no longer than a text may be.
    Raises RequestError."""
    count = raw.count(b",") + 1
    if not cut:
        check_fits(count, param, model)
    elif count > model.max_chars:
        raise too_long(param, model, f"you requested {count} tokens")
    with json_errors(param):
        return _ids.decode(raw)


def parsed(raw: bytes | bytearray, kind: type[KindT]) -> KindT:
    """A body of this kind. Raises RequestError."""
    with json_errors():
        return msgspec.json.decode(raw, type=kind)


def parse_body(raw: bytes | bytearray, kind: type[CompletionBody] | type[ChatBody]) -> CompletionBody | ChatBody:
    body = parsed(raw, kind)
    if (name := asked(body)) is not None:
        raise invalid(name, refusal(name), UNSUPPORTED)
    return body
