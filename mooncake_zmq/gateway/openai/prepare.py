"""What clients send of the OpenAI surface: JSON to validated requests. Pure: no socket, clock or randomness of its own."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta, Struct

from mooncake_zmq.core.messages import MAX_LOGPROBS, Priority, Sampling, Slo, StopRule
from mooncake_zmq.engine.constraint import ConstraintError, ConstraintNotReady
from mooncake_zmq.engine.grammars import Grammars
from mooncake_zmq.gateway.http.http_calls import ServedModel
from mooncake_zmq.gateway.openai.constraints import Constrained, ConstraintRefused, schema_of
from mooncake_zmq.gateway.openai.detokenizer import Choice, stop_tables
from mooncake_zmq.gateway.openai.rejected_params import NULL, UnsupportedOfMessage, asked, asked_of_message, refusal
from mooncake_zmq.gateway.openai.tools import NO_TOOLS, Tools, read_calls, read_tools, with_names
from mooncake_zmq.gateway.requests.client_events import ClientRequest, Failed
from mooncake_zmq.gateway.requests.tenants import Tenant
from mooncake_zmq.gateway.settings import EdgeSettings
from mooncake_zmq.kv.block_hash import pack_tokens

KindT = TypeVar("KindT")

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of /v1/completions; a chat may use the whole context."""
SEED_BITS = 63
SEEDS = 1 << SEED_BITS
MAX_SCORES = 1 << 16
"""Probabilities of prompts' tokens that one answer tells: about 2 MB of JSON."""
SCORES_SHARE = 4
"""So much of `max_held_scores` one call may have: a quarter."""
UNSUPPORTED = "unsupported_parameter"
QUOTED_CHARS = 200
"""Of what a client sent, in an error: it may be megabytes."""


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
    """What a client said, for an error or the log."""
    return repr(said) if len(said) <= QUOTED_CHARS else f"{said[:QUOTED_CHARS]!r}..."


def unknown_model(wanted: str, model: ServedModel) -> RequestError:
    """There is but one."""
    return RequestError(404, f"no model {quoted(wanted)} here: it is {model.id!r}", code="model_not_found", param="model")


def _invalid(param: str | None, message: str, code: str = "invalid_value") -> RequestError:
    return RequestError(400, message, param=param, code=code)


def _too_long(param: str, model: ServedModel, however: str) -> RequestError:
    """In OpenAI's words: clients look for them."""
    text = f"This model's maximum context length is {model.max_model_len} tokens. However, {however}."
    return _invalid(param, text, "context_length_exceeded")


def _too_many_tokens(param: str, model: ServedModel, prompt_tokens: int, answer_tokens: int) -> RequestError:
    both = f"{prompt_tokens + answer_tokens} tokens ({prompt_tokens} in the prompt, {answer_tokens} in the completion)"
    return _too_long(param, model, f"you requested {both}. Please reduce the length of the prompt or the completion")


def _check_fits(prompt_tokens: int, param: str, model: ServedModel) -> None:
    if prompt_tokens >= model.max_model_len:
        raise _too_many_tokens(param, model, prompt_tokens, 1)


def check_model(wanted: str | None, model: ServedModel) -> None:
    """Raises RequestError."""
    if wanted is not None and wanted != model.id:
        raise unknown_model(wanted, model)


def _check_count(count: int, most: int, what: str) -> None:
    """Of things in the prompt."""
    if count > most:
        raise _invalid("prompt", f"{count} {what} are more than {most}")


def _of_a_library(error: Exception) -> str:
    """A library's words, which may quote what the client sent at any length."""
    text = str(error)
    return text if len(text) <= QUOTED_CHARS else f"{text[:QUOTED_CHARS]}..."


# --- what clients send; unknown fields are refused, null means absent

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
BIASES = 1024
_biases = msgspec.json.Decoder(Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=BIASES)] | None)
BIASES_BYTES = 64 * BIASES
_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])
_ids = msgspec.json.Decoder(list[TokenId])
_lists_of_ids = msgspec.json.Decoder(list[list[TokenId]])
_OPENING = re.compile(rb"\s*(?:\[\s*)?(.)", re.DOTALL)
"""What a prompt begins with, behind the bracket of a list."""


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Body(Constrained, frozen=True, kw_only=True):
    """What both endpoints accept. vLLM's extensions: top_k, ignore_eos, min_tokens, return_token_ids, cache_salt, priority (a
    lower one is earlier). Ours: ttft_slo and tbt_slo, bounds in seconds in place of the deployment's, 0 for none."""

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

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    def tools_for(self, model: ServedModel, settings: EdgeSettings, answer: dict[str, Any] | None) -> Tools:
        """`answer`: the schema of one, if there is one. Raises ConstraintRefused."""
        return NO_TOOLS

    def check_stream_options(self) -> None:
        """Raises RequestError."""
        options = self.stream_options
        if options is None:
            return
        if not self.stream:
            raise _invalid("stream_options", "stream_options are of a stream: set stream")
        if options.include_obfuscation:
            raise _invalid("stream_options", "include_obfuscation is not supported", UNSUPPORTED)
        if options.continuous_usage_stats and not options.include_usage:
            raise _invalid("stream_options", "continuous_usage_stats are told with include_usage alone")

    def stops(self) -> list[str]:
        """The stop strings. Raises RequestError."""
        given = bytes(self.stop)
        if len(given) > STOPS_BYTES:
            raise _invalid("stop", f"at most {STOPS} stop strings of {STOP_CHARS} characters")
        with _json_errors("stop"):
            found = _stops.decode(given)
        return [found] if isinstance(found, str) else found or []

    @property
    def wished_tokens(self) -> int | None:
        """How many tokens an answer shall have at most: `max_completion_tokens` counts before `max_tokens`. 0: none is told."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens' probabilities are wanted beside that of each token; None: none at all."""
        raise NotImplementedError

    @property
    def echoed_likeliest(self) -> int | None:
        """The same of the prompt's tokens."""
        return None

    def check_no_answer(self) -> None:
        """No token is to be made. Raises RequestError."""
        raise _invalid("max_tokens", "max_tokens is at least 1, or 0 for a completion with echo")

    def sampling(self, seed: int, prompt_tokens: int, model: ServedModel, constraint: bytes = b"") -> Sampling:
        """OpenAI samples at temperature 1 unless told otherwise. Raises RequestError."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=seed,
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self._biases(model),
            logprobs=self.likeliest,
            prompt_tokens=prompt_tokens,
            constraint=constraint,
        )

    def _biases(self, model: ServedModel) -> tuple[tuple[int, float], ...]:
        given = bytes(self.logit_bias)
        if len(given) > BIASES_BYTES:
            raise _invalid("logit_bias", f"at most {BIASES} tokens")
        with _json_errors("logit_bias"):
            found = _biases.decode(given) or {}
        for token in found:
            if not token.isdecimal() or len(token) > 10 or int(token) >= model.vocab_size:
                raise _invalid("logit_bias", f"{quoted(token)} is no token id: the vocabulary has {model.vocab_size} ids")
        return tuple(sorted((int(token), bias) for token, bias in found.items()))

    def stop_rule(self, prompt_tokens: int, default_tokens: int, model: ServedModel, param: str) -> StopRule:
        """Fit the output into the model's context: a wish that does not fit is an error, a default is clipped."""
        room = model.max_model_len - prompt_tokens
        _check_fits(prompt_tokens, param, model)
        wish = self.wished_tokens
        if wish == 0:
            self.check_no_answer()
            return StopRule(max_tokens=1)
        if wish is not None and wish > room:
            name = "max_completion_tokens" if self.max_completion_tokens else "max_tokens"
            raise _too_many_tokens(name, model, prompt_tokens, wish)
        max_tokens = wish or min(default_tokens, room)
        min_tokens = self.min_tokens or 0
        if min_tokens > max_tokens:
            raise _invalid("min_tokens", f"min_tokens is {min_tokens}, but at most {max_tokens} tokens will be made")
        eos_ids = () if self.ignore_eos else model.tokenizer.eos_ids
        return StopRule(max_tokens=max_tokens, min_tokens=min_tokens, eos_ids=eos_ids)


class CompletionBody(Body, frozen=True, kw_only=True):
    """POST /v1/completions. The prompt is a text, token ids, or a list of prompts of one of these kinds; it is looked at before
    it is read, as millions of lists take the interpreter a second."""

    prompt: msgspec.Raw
    echo: bool | None = None
    logprobs: Likeliest | None = None

    @property
    def likeliest(self) -> int | None:
        """See `Body`."""
        return self.logprobs

    @property
    def echoed_likeliest(self) -> int | None:
        """See `Body`."""
        return self.logprobs if self.echo else None

    def check_no_answer(self) -> None:
        """See `Body`."""
        if not self.echo:
            super().check_no_answer()

    def prompts(self, model: ServedModel, max_prompts: int) -> list[Prompt]:
        """One prompt, or a list of them; a list of ids is one prompt."""
        if self.echoed_likeliest is not None and self.choices_per_prompt > 1:
            raise _invalid("n", "logprobs with echo tell of the prompt, for one choice: leave n out")
        given = bytes(self.prompt)
        opening = _OPENING.match(given)
        first = opening[1] if opening else b""
        with _json_errors("prompt"):
            if given[:1] == b'"':
                prompts: list[Prompt] = [_text.decode(given)]
            elif first == b'"':
                # Quotation marks that are no part of a text, or fewer: of two for each text.
                _check_count((given.count(b'"') - given.count(b'\\"')) // 2, max_prompts, "prompts")
                prompts = [*_texts.decode(given)]
            elif first == b"[":
                _check_count(given.count(b"[") - 1, max_prompts, "prompts")
                _check_count(given.count(b","), max_prompts * model.max_model_len, "token ids")
                prompts = [*_lists_of_ids.decode(given)]
            elif first == b"]":
                prompts = []
            else:
                prompts = [read_ids(given, model, "prompt")]
        if not prompts or not all(prompts):
            raise _invalid("prompt", "the prompt is empty")
        return prompts

    def without_prompt(self) -> "CompletionBody":
        """What is left to know once it is tokenized: the text is not kept as long as the answer takes."""
        return msgspec.structs.replace(self, prompt=msgspec.Raw())


class TextPart(Struct, frozen=True, gc=False):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None


_content = msgspec.json.Decoder(str | list[TextPart] | None)


class ChatMessage(UnsupportedOfMessage, frozen=True, gc=False, kw_only=True):
    """One turn of a conversation. Its content is read once it is known that there are not too many of them: lists by the
    hundred thousand wake the garbage collector, in one call that nobody else can run beside."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: msgspec.Raw = msgspec.Raw(b"null")
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: msgspec.Raw = NULL
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    parsed: msgspec.Raw = NULL
    """OpenAI's client sends back with an answer what it read out of it; it says nothing that the content does not."""

    def turn(self) -> ChatTurn:
        """As chat templates read it. Text parts are joined by line breaks, as vLLM does."""
        if (name := asked_of_message(self)) is not None:
            raise _invalid("messages", f"{name} of a message is not supported", UNSUPPORTED)
        with _json_errors("messages"):
            content = _content.decode(self.content)
        parts = content if isinstance(content, list) else []
        for part in parts:
            if part.type != "text" or part.text is None:
                kind = f"content parts of type {quoted(part.type)}"
                raise _invalid("messages", f"{kind} are not supported: only 'text' with a text")
        text = "\n".join(part.text or "" for part in parts) if isinstance(content, list) else content or ""
        try:
            calls = read_calls(self.tool_calls)
        except (ValueError, RecursionError) as error:
            raise _invalid("messages", f"tool_calls of a message: {_of_a_library(error)}") from None
        more = {"name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": calls}
        return {"role": self.role, "content": text, **{name: said for name, said in more.items() if said}}


class ChatBody(Body, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    parallel_tool_calls: bool | None = None  # type: ignore[assignment]
    done: ClassVar[frozenset[str]] = frozenset({"tools", "tool_choice"})

    def tools_for(self, model: ServedModel, settings: EdgeSettings, answer: dict[str, Any] | None) -> Tools:
        """See `Body`."""
        form = settings.tool_call_parser or None
        return read_tools(self.tools, self.tool_choice, self.parallel_tool_calls, model.tokenizer, form, answer)

    @property
    def likeliest(self) -> int | None:
        """See `Body`."""
        if not self.logprobs and self.top_logprobs:
            raise _invalid("top_logprobs", "top_logprobs needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self, model: ServedModel, max_prompts: int) -> list[Prompt]:
        """The conversation is one prompt."""
        return [turns_of(self.messages, model)]

    def without_prompt(self) -> "ChatBody":
        """See `CompletionBody`."""
        return msgspec.structs.replace(self, messages=[], tools=NULL)


@contextlib.contextmanager
def _json_errors(param: str | None = None) -> Iterator[None]:
    """What msgspec finds wrong, as the client's mistake; `param` where its own words do not tell."""
    try:
        yield
    except msgspec.ValidationError as error:
        # "... - at `$.stop[0]`" or "Object missing required field `prompt`"
        found = re.search(r"`\$\.(\w+)|required field `(\w+)`$", str(error))
        raise _invalid(param or (found and (found[1] or found[2])), _of_a_library(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(None, f"the body is not JSON: {_of_a_library(error)}", "invalid_json") from None


def turns_of(messages: Sequence[ChatMessage], model: ServedModel) -> list[ChatTurn]:
    """A conversation as chat templates read it. Raises RequestError."""
    if len(messages) > model.max_model_len:
        raise _too_long("messages", model, f"you requested {len(messages)} messages, which are more tokens than that")
    return with_names([message.turn() for message in messages])


def read_ids(raw: bytes, model: ServedModel, param: str) -> list[int]:
    """A list of token ids, not longer than a prompt may be. Raises RequestError."""
    _check_fits(raw.count(b",") + 1, param, model)
    with _json_errors(param):
        return _ids.decode(raw)


def parsed(raw: bytes | bytearray, kind: type[KindT]) -> KindT:
    """A body of this kind. Raises RequestError."""
    with _json_errors():
        return msgspec.json.decode(raw, type=kind)


def _parse(raw: bytes | bytearray, kind: type[CompletionBody] | type[ChatBody]) -> CompletionBody | ChatBody:
    body = parsed(raw, kind)
    if (name := asked(body)) is not None:
        raise _invalid(name, refusal(name), UNSUPPORTED)
    return body


# --- one HTTP body to requests


@dataclass(frozen=True, slots=True)
class Prepared:
    """A valid HTTP body, tokenized: `requests[i]` is answered by `choices[i]`; `n` choices for each prompt, in order."""

    body: CompletionBody | ChatBody
    requests: list[ClientRequest]
    choices: list[Choice]

    @property
    def held_scores(self) -> int:
        """Probabilities that are held until the answers are whole, at most: nothing of a stream."""
        likeliest = self.body.likeliest
        if likeliest is None or self.body.stream:
            return 0
        return (1 + likeliest) * sum(request.stop.max_tokens for request in self.requests)


def prepare(
    raw: bytes | bytearray,
    kind: type[CompletionBody] | type[ChatBody],
    model: ServedModel,
    settings: EdgeSettings,
    draw_seed: Callable[[], int],
    tenant: Tenant | None = None,
    grammars: Grammars | None = None,
) -> Prepared:
    """Parse, check, tokenize and hash, in a thread. Raises RequestError, before the work where the size alone tells.
    `grammars`: to see whether a constraint can be followed; None: it is not tried."""
    body = _parse(raw, kind)
    check_model(body.model, model)
    body.check_stream_options()
    if model.foreign and body.likeliest is not None:
        raise _invalid("logprobs", "a vLLM engine is asked for no probabilities here", UNSUPPORTED)
    prompts = body.prompts(model, settings.max_choices)
    n = body.choices_per_prompt
    if len(prompts) * n > settings.max_choices:
        raise _invalid("n" if n > 1 else "prompt", f"{len(prompts)} prompts of {n} choices exceed {settings.max_choices}")
    chat = isinstance(body, ChatBody)
    param = "messages" if chat else "prompt"
    for prompt in prompts:
        check_size(prompt, model, param)
    seed = draw_seed() if body.seed is None else body.seed
    stops = stop_tables(body.stops())
    tools, constraint = _form(body, model, settings, grammars)
    if tenant is not None:
        _check_rights(body, tenant)
    salt = body.cache_salt or ""
    salt = salt if tenant is None else tenant.salt(salt)
    echo_chars, scored_left = settings.max_echo_chars, MAX_SCORES
    prepared = Prepared(body.without_prompt(), [], [])
    for prompt in prompts:
        ids = tokenized(prompt, model, param, tools=tools.given)
        stop = body.stop_rule(len(ids), model.max_model_len if chat else DEFAULT_COMPLETION_TOKENS, model, param)
        tokens = pack_tokens(ids)
        root, keys = model.hash_prompt(tokens, salt)
        echo = _echo(body, prompt, model)
        echo_chars -= n * len(echo)
        if echo_chars < 0:
            raise _invalid("echo", f"an answer repeats at most {settings.max_echo_chars} characters of its prompts")
        likeliest = body.echoed_likeliest
        scored_left -= 0 if likeliest is None else len(ids) * (1 + likeliest)
        if scored_left < 0:
            raise _invalid("logprobs", f"an answer tells at most {MAX_SCORES} probabilities of its prompts")
        offsets = None if likeliest is None else _offsets(ids, prompt, model)
        sampling = body.sampling(seed % SEEDS, len(ids), model, constraint)
        for nth in range(n):
            index = len(prepared.choices)
            request = ClientRequest(
                tokens=tokens,
                root=root,
                keys=keys,
                sampling=msgspec.structs.replace(sampling, seed=(seed + nth) % SEEDS),
                stop=stop,
                ttft_slo_s=body.ttft_slo,
                tbt_slo_s=body.tbt_slo,
                priority=body.priority or 0,
                tenant="" if tenant is None else tenant.name,
                prompt_logprobs=likeliest if len(ids) > 1 else None,
            )
            prepared.requests.append(request)
            choice = Choice(
                index,
                ids,
                model,
                stops=stops,
                min_tokens=stop.min_tokens,
                echo=echo,
                tools=tools,
                offsets=offsets,
                silent=body.wished_tokens == 0,
            )
            prepared.choices.append(choice)
    if prepared.held_scores > (most := settings.max_held_scores // SCORES_SHARE):
        text = (
            f"an answer that is not streamed tells at most {most} probabilities: stream it, or lower max_tokens, n or logprobs"
        )
        raise _invalid("logprobs", text)
    return prepared


def _check_rights(body: Body, tenant: Tenant) -> None:
    """What others would pay for is asked for by those whose key says so alone."""
    code = "insufficient_permissions"
    if (body.priority or 0) < tenant.priority:
        text = f"the least priority that {tenant.name} may ask for is {tenant.priority}"
        raise RequestError(403, text, param="priority", code=code)
    for name, asked_s in (("ttft_slo", body.ttft_slo), ("tbt_slo", body.tbt_slo)):
        if asked_s is not None and not tenant.slo:
            raise RequestError(403, f"{tenant.name} has the deployment's SLO, and may not name another", param=name, code=code)


def _form(body: Body, model: ServedModel, settings: EdgeSettings, grammars: Grammars | None) -> tuple[Tools, bytes]:
    """The tools, and the grammar that the answers follow; empty: none. Engines are sent none that cannot be followed."""
    try:
        param, constraint = body.constraint()
        answer = schema_of(constraint) if constraint else None
        tools = body.tools_for(model, settings, answer)
        if constraint and answer is None and tools.form is not None:
            text = "an answer that may call tools is held to a schema or to nothing: set tool_choice to none"
            raise ConstraintRefused(param, text)
        if tools.constraint:
            param, constraint = "tools", tools.constraint
        if constraint and model.foreign:
            raise _invalid(param, "a vLLM engine follows no constraint here", UNSUPPORTED)
        if constraint and grammars is not None:
            grammars.check(constraint)
    except ConstraintRefused as refused:
        raise _invalid(refused.param, refused.message) from None
    except ConstraintNotReady as error:
        raise RequestError(503, str(error), code="overloaded", retry_after_s=settings.full_retry_after_s) from None
    except ConstraintError as error:
        raise _invalid(param, f"no answer can follow it: {error}") from None
    return tools, constraint


def check_size(prompt: Prompt, model: ServedModel, param: str) -> None:
    """What is too long whatever it says is not tokenized. Raises RequestError."""
    if isinstance(prompt, str):
        _check_chars(len(prompt), param, model)
    elif isinstance(prompt[0], int):
        _check_fits(len(prompt), param, model)
    else:
        _check_chars(sum(_chars(item) for item in prompt if isinstance(item, dict)), param, model)


def _chars(turn: ChatTurn) -> int:
    calls = turn.get("tool_calls")
    return len(turn["content"]) + (len(msgspec.json.encode(calls)) if calls else 0)


def _check_chars(chars: int, param: str, model: ServedModel) -> None:
    if chars > model.max_chars:
        raise _too_long(param, model, f"you requested {chars} characters, which are more tokens than that")


def tokenized(
    prompt: Prompt,
    model: ServedModel,
    param: str,
    *,
    special: bool = True,
    answer: bool = True,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Its ids, at least one. `special`: with what the model puts before a text; `answer`: a conversation ends where the answer
    begins; `tools`: which it may call. Raises RequestError."""
    if isinstance(prompt, str):
        ids = model.tokenizer.encode(prompt) if special else model.tokenizer.encode(prompt, special=False)
    elif isinstance(prompt[0], int):
        ids = [item for item in prompt if isinstance(item, int)]
    else:
        try:
            ids = model.tokenizer.chat([item for item in prompt if isinstance(item, dict)], answer, tools)
        except ValueError as error:
            raise _invalid(param, _of_a_library(error)) from None
    if not ids:
        raise _invalid(param, "the prompt has no tokens")
    if max(ids) >= model.vocab_size:  # a text's too: a tokenizer may know more ids than the model, whose engine would fail
        raise _invalid(param, f"token id {max(ids)} is out of range: the vocabulary has {model.vocab_size} ids")
    return ids


def _echo(body: CompletionBody | ChatBody, prompt: Prompt, model: ServedModel) -> str:
    if isinstance(body, ChatBody) or not body.echo:
        return ""
    return prompt if isinstance(prompt, str) else model.tokenizer.decode([item for item in prompt if isinstance(item, int)])


def _offsets(ids: Sequence[int], prompt: Prompt, model: ServedModel) -> list[int]:
    """Where in the text that is echoed each of them begins, in characters. A text has the names of the special tokens that it
    asks for, and not those of what the model puts before it."""
    text = prompt if isinstance(prompt, str) else ""
    stream = model.tokenizer.stream(special=bool(text))
    pieces = [*(stream.push(token) for token in ids), stream.flush()]
    begins = accumulate(map(len, pieces[: len(ids) - 1]), initial=0)
    if not text:
        return list(begins)
    before = max(0, "".join(pieces).find(text))
    return [min(max(0, begin - before), len(text)) for begin in begins]
