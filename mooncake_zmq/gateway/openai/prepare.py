"""Makes one JSON body into validated requests: checked, tokenized and hashed. PURE: no socket, clock or randomness."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from mooncake_zmq.core.chat import PLAIN_CHAT, ChatForm
from mooncake_zmq.core.grammar import schema_of
from mooncake_zmq.core.messages import Image, Parsers
from mooncake_zmq.engine.constraint import ConstraintError, ConstraintNotReady
from mooncake_zmq.engine.grammars import Grammars
from mooncake_zmq.gateway.answers.table import Asked
from mooncake_zmq.gateway.openai.answer_keys import asked_of
from mooncake_zmq.gateway.openai.bodies import SEEDS, Body, ChatBody, ChatTurn, CompletionBody, Prompt, parse_body
from mooncake_zmq.gateway.openai.constraints import ConstraintRefused
from mooncake_zmq.gateway.openai.detokenizer import Choice, StopTable, stop_tables
from mooncake_zmq.gateway.openai.errors import (
    UNSUPPORTED,
    RequestError,
    asked,
    check_fits,
    invalid,
    of_a_library,
    too_long,
)
from mooncake_zmq.gateway.openai.images import check_images, held_bytes, text_of, urls_in
from mooncake_zmq.gateway.openai.reasoning import TAIL_TOKENS, Marks, ReasoningReader
from mooncake_zmq.gateway.openai.token_stream import TokenStream
from mooncake_zmq.gateway.openai.tools import Tools
from mooncake_zmq.gateway.requests.client_events import ChatToRender, ClientRequest, Reading, Rendered
from mooncake_zmq.gateway.requests.tenants import Tenant
from mooncake_zmq.gateway.served_model import ServedModel, ServedModels
from mooncake_zmq.gateway.settings import AnswersSettings, EdgeSettings
from mooncake_zmq.kv.block_hash import pack_tokens, unpack_tokens

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of /v1/completions; a chat may use the whole context."""
MAX_SCORES = 1 << 16
"""Probabilities of prompts' tokens in one answer: about 2 MB of JSON."""
MAX_REPEATED_IDS = 1 << 20
"""Token ids of prompts that one answer repeats, over all its choices, or those of the longest prompt: about 7 MB of JSON."""
SCORES_SHARE = 4
"""Divisor of `max_held_scores` for one call: it may have a quarter."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A valid HTTP body, tokenized: `requests[i]` is answered by `choices[i]`; `n` choices for each prompt, in order."""

    body: CompletionBody | ChatBody
    model: ServedModel
    """The model that the body names."""
    requests: list[ClientRequest]
    choices: list[Choice]
    spaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and name of each function in a namespace of a call of /v1/responses, by the name that the model sees."""
    unrendered: "Unrendered | None" = None
    """The chat that a vLLM has to write as tokens before there are requests."""
    asked: Asked | None = None
    """The key of an answer that may be given again; None: it may not."""
    of_kept: Callable[[], dict[str, Any]] = dict
    """Returns what the complete reply says of kept answers."""

    @property
    def held_scores(self) -> int:
        """Most probabilities that are held: those of prompts, and unless they are streamed, those of answers."""
        likeliest = self.body.likeliest
        if likeliest is None:
            return 0
        made = 0 if self.body.stream else sum(request.stop.max_tokens for request in self.requests)
        if self.body.echoed_likeliest is not None:
            made += sum(len(request.tokens) // 4 for request in self.requests)
        return (1 + likeliest) * made


def prepare(
    raw: bytes | bytearray,
    kind: type[CompletionBody] | type[ChatBody],
    models: ServedModels,
    settings: EdgeSettings,
    draw_seed: Callable[[], int],
    tenant: Tenant | None = None,
    grammars: Mapping[str, Grammars] | None = None,
    parsers: Callable[[str], Parsers] | None = None,
    answers: AnswersSettings | None = None,
) -> Prepared:
    """Parse, check, tokenize and hash, in a thread. Raises RequestError, before the work where the size alone is too large.
    `grammars`: by the model's identity, to see whether a constraint can be followed; None: it is not tried. `parsers`: those
    that vLLMs of a model have, by the same; None: there are none. `answers`: how answers are given again; None: never."""
    body = parse_body(raw, kind)
    model = asked(body.model, models)
    if model.embeds:
        raise invalid("model", f"the model {model.id!r} gives vectors alone: call /v1/embeddings", "model_not_supported")
    body.check_stream_options()
    body.check_kv_budget(settings)
    prompts = _prompts(body, model if body.mooncake is None else model.without(model.max_positions), settings)
    seed = draw_seed() if body.seed is None else body.seed
    stops = stop_tables(body.stops())
    offered = Parsers() if parsers is None else parsers(model.identity)
    tools, constraint = _form(body, model, settings, offered, grammars[model.identity] if grammars is not None else None)
    if tenant is not None:
        _check_rights(body, tenant)
    bound = bool(constraint) and (tools.binds_all or not tools.constraint)
    marks = None if bound else body.reasoning_marks(model, settings)
    if marks is None and not bound and body.reasons_as_vllm(settings) and offered.reasoning or tools.for_vllm:
        reading = _reading(body, tools, offered, whole=not body.stream and not stops)
        tools = replace(tools, form=None) if offered.calls else tools
        marks = None if offered.reasoning else marks
    else:
        reading = None
    common = _Common(body, model, settings.max_echo_chars, tenant, seed, stops, tools, constraint, marks, reading)
    prepared = Prepared(common.body, model, [], [])
    if isinstance(body, ChatBody) and (urls := urls_in(turns := _turns(prompts))):
        return replace(prepared, unrendered=common.unrendered(turns, urls, prepared, settings))
    for prompt in prompts:
        common.add(prompt, prepared)
    _check_scores(prepared, settings)
    return prepared if answers is None else replace(prepared, asked=asked_of(body, prompts, prepared.requests[0], answers))


def _turns(prompts: Sequence[Prompt]) -> list[ChatTurn]:
    """Return the turns of a chat, which is its only prompt."""
    return [turn for turn in prompts[0] if isinstance(turn, dict)]


def _check_scores(prepared: Prepared, settings: EdgeSettings) -> None:
    if prepared.held_scores > (most := settings.max_held_scores // SCORES_SHARE):
        text = f"an answer that is not streamed has at most {most} probabilities: stream it, or lower max_tokens, n or logprobs"
        raise invalid("logprobs", text)


@dataclass(frozen=True, slots=True)
class Unrendered:
    """A chat with images. Its prompt is tokens once a vLLM has written it."""

    chat: ChatToRender
    held_bytes: int
    """Bytes that are held for it and its images, and for those of all choices."""
    prepared: Callable[[Rendered], Prepared]
    """Prepares its requests, in a thread. Raises RequestError."""


def salted(tenant: Tenant | None, given: str | None) -> str:
    """Return the salt of a prompt's keys: the one that is `given`, which a tenant shares with no other one."""
    return (given or "") if tenant is None else tenant.salt(given or "")


class _Common:
    """The part that all requests of one body share, and how much of their prompts the answer may still repeat."""

    def __init__(
        self,
        body: CompletionBody | ChatBody,
        model: ServedModel,
        max_echo_chars: int,
        tenant: Tenant | None,
        seed: int,
        stops: Sequence[StopTable],
        tools: Tools,
        constraint: bytes,
        marks: Marks | None,
        reading: Reading | None,
    ) -> None:
        self._reading = reading
        self.body = body.without_prompt()
        self._model, self._seed, self._stops = model, seed, stops
        self._tools, self._marks = tools, marks
        self._sampling = body.sampling(model, constraint)
        self._stop_tokens = body.stop_tokens(model)
        shows_marks = marks is not None and marks.are_special(model.tokenizer)
        self._special = body.skip_special_tokens is False or shows_marks
        self._form = body.chat_form()
        self._tenant = "" if tenant is None else tenant.name
        self._salt = salted(tenant, body.cache_salt)
        self._default_tokens = model.max_model_len if isinstance(body, ChatBody) else DEFAULT_COMPLETION_TOKENS
        self._max_echo_chars = self._echo_chars_left = max_echo_chars
        self._scores_left = MAX_SCORES
        self._max_ids = self._ids_left = max(MAX_REPEATED_IDS, model.max_model_len)

    def unrendered(
        self, turns: Sequence[ChatTurn], urls: Sequence[str], prepared: Prepared, settings: EdgeSettings
    ) -> Unrendered:
        """Return a chat with images, as a vLLM writes it. Raises RequestError."""
        if not self._model.takes_images:
            raise invalid("messages", f"the model {self._model.id!r} takes no images: it is served without a vLLM", UNSUPPORTED)
        if self.body.truncate_prompt_tokens is not None:
            raise invalid("truncate_prompt_tokens", "a prompt with images is used as a whole: leave it out")
        check_images(urls, self._model, settings)
        chat: dict[str, Any] = {"messages": list(map(_as_sent, turns)), "add_generation_prompt": self._form.answer}
        chat |= {"continue_final_message": self._form.continued, "chat_template_kwargs": dict(self._form.variables)}
        chat |= {"tools": self._tools.given} if self._tools.given else {}
        raw = msgspec.json.encode(chat)
        held = held_bytes(raw, urls, self.body.choices_per_prompt, settings)
        encoded = [url.encode() for url in urls]

        def finish(rendered: Rendered) -> Prepared:
            images = [msgspec.structs.replace(each, url=url) for each, url in zip(rendered.images, encoded, strict=True)]
            self._add(array("i", unpack_tokens(rendered.tokens)), [*turns], prepared, tuple(images))
            _check_scores(prepared, settings)
            return prepared

        to_render = ChatToRender(chat=raw, images=len(urls), model=self._model.identity, tenant=self._tenant)
        return Unrendered(to_render, held, finish)

    def add(self, prompt: Prompt, prepared: Prepared) -> None:
        """Add the requests and choices for one prompt. Raises RequestError."""
        param = _param_of(self.body)
        ids = tokenized(prompt, self._model, param, form=self._form, tools=self._tools.given, salt=self._salt)
        self._add(self.body.truncated(ids, self._model), prompt, prepared)

    def _add(self, ids: "array[int]", prompt: Prompt, prepared: Prepared, images: tuple[Image, ...] = ()) -> None:
        body, model, param = self.body, self._model, _param_of(self.body)
        eviction = body.mooncake.eviction(len(ids)) if body.mooncake is not None else None
        held = model if eviction is None else model.without(len(ids) - eviction.kept)
        stop = body.stop_rule(len(ids), self._default_tokens, held, param, self._stop_tokens)
        tokens = pack_tokens(ids)
        root, keys = model.hash_prompt(tokens, self._salt, [(image.begin, image.digest) for image in images])
        echo, offsets = self._echoed(ids, prompt)
        if body.return_token_ids:
            self._ids_left -= body.choices_per_prompt * len(ids)
            if self._ids_left < 0:
                raise invalid("return_token_ids", f"an answer repeats at most {self._max_ids} token ids of its prompts")
        textless = body.textless(stop, model)
        reading = self._reading and msgspec.structs.replace(self._reading, textless=textless)
        for nth in range(body.choices_per_prompt):
            request = ClientRequest(
                tokens=tokens,
                root=root,
                model=model.identity,
                model_name=model.id,
                adapter=model.adapter,
                keys=keys,
                sampling=msgspec.structs.replace(self._sampling, seed=(self._seed + nth) % SEEDS, prompt_tokens=len(ids)),
                stop=stop,
                ttft_slo_s=body.ttft_slo,
                tbt_slo_s=body.tbt_slo,
                priority=body.priority or 0,
                exact=body.must_be_exact,
                tenant=self._tenant,
                prompt_logprobs=body.echoed_likeliest if len(ids) > 1 else None,
                reading=reading,
                images=images,
                eviction=eviction,
            )
            prepared.requests.append(request)
            choice = Choice(
                len(prepared.choices),
                ids,
                model,
                stops=self._stops,
                min_tokens=stop.min_tokens,
                textless=textless,
                with_stop=bool(body.include_stop_str_in_output),
                special=self._special,
                echo=echo,
                tools=self._tools,
                reasoning=self._reasoning_reader(ids, prompt),
                read_elsewhere=reading is not None,
                with_reasoning=body.wants_reasoning,
                offsets=offsets,
                silent=body.requested_tokens == 0,
            )
            prepared.choices.append(choice)

    def _reasoning_reader(self, ids: Sequence[int], prompt: Prompt) -> ReasoningReader | None:
        """Return a reader of one answer's reasoning, which a prompt may have begun: as its last text, or in a final message
        that the answer continues."""
        marks = self._marks
        if marks is None:
            return None
        tail = self._model.tokenizer.decode(ids[-TAIL_TOKENS:], special=True)
        begun = tail.rstrip().endswith(marks.begin)
        if self._form.continued and isinstance(prompt[-1], dict):
            begun = begun or marks.open_at_end(text_of(prompt[-1]["content"]))
        return ReasoningReader(marks, begun=begun, call_mark=self._tools.call_mark)

    def _echoed(self, ids: Sequence[int], prompt: Prompt) -> tuple[str, list[int] | None]:
        """The text that each answer begins with, and where its tokens do if their probabilities are returned."""
        body, model = self.body, self._model
        echo = _echo(body, prompt, model)
        self._echo_chars_left -= body.choices_per_prompt * len(echo)
        if self._echo_chars_left < 0:
            raise invalid("echo", f"an answer repeats at most {self._max_echo_chars} characters of its prompts")
        likeliest = body.echoed_likeliest
        if likeliest is None:
            return echo, None
        self._scores_left -= len(ids) * (1 + likeliest)
        if self._scores_left < 0:
            raise invalid("logprobs", f"an answer has at most {MAX_SCORES} probabilities of its prompts")
        return echo, _offsets(ids, prompt, model)


def _prompts(body: CompletionBody | ChatBody, model: ServedModel, settings: EdgeSettings) -> list[Prompt]:
    """The prompts, none of which is too long by its size alone. Raises RequestError."""
    prompts = body.prompts(model, settings.max_choices)
    n = body.choices_per_prompt
    if len(prompts) * n > settings.max_choices:
        raise invalid("n" if n > 1 else "prompt", f"{len(prompts)} prompts of {n} choices exceed {settings.max_choices}")
    for prompt in prompts:
        check_size(prompt, model, _param_of(body), cut=body.truncate_prompt_tokens is not None)
    return prompts


def _param_of(body: CompletionBody | ChatBody) -> str:
    """The name of the field that has the prompt."""
    return "messages" if isinstance(body, ChatBody) else "prompt"


def _check_rights(body: Body, tenant: Tenant) -> None:
    """Refuse priorities and SLOs that the tenant's key does not permit. Raises RequestError."""
    code = "insufficient_permissions"
    if (body.priority or 0) < tenant.priority:
        text = f"the least priority that {tenant.name} may ask for is {tenant.priority}"
        raise RequestError(403, text, param="priority", code=code)
    for name, asked_s in (("ttft_slo", body.ttft_slo), ("tbt_slo", body.tbt_slo)):
        if asked_s is not None and not tenant.slo:
            raise RequestError(403, f"{tenant.name} has the deployment's SLO, and may not name another", param=name, code=code)


def _reading(body: Body, tools: Tools, parsers: Parsers, *, whole: bool) -> Reading:
    """Return how vLLMs with these parsers read the answers. They look at no message."""
    choice = {"tools": tools.given, "tool_choice": "auto" if tools.max_calls else "none"} if tools.given else {}
    chat: dict[str, Any] = {"messages": [], **choice, "chat_template_kwargs": dict(body.chat_form().variables)}
    return Reading(parsers=parsers, chat=msgspec.json.encode(chat), whole=whole)


def _form(
    body: Body, model: ServedModel, settings: EdgeSettings, parsers: Parsers, grammars: Grammars | None
) -> tuple[Tools, bytes]:
    """The tools, and the grammar that the answers follow; empty: none. Engines are sent none that cannot be followed."""
    try:
        param, constraint = body.constraint()
        answer = schema_of(constraint) if constraint else None
        tools = body.tools_for(model, settings, answer, parsed=parsers.calls)
        if constraint and answer is None and (tools.form is not None or tools.for_vllm):
            text = "an answer that may call tools is held to a schema or to nothing: set tool_choice to none"
            raise ConstraintRefused(param, text)
        if tools.constraint:
            param, constraint = "tools", tools.constraint
        if constraint and grammars is not None:
            grammars.check(constraint)
    except ConstraintRefused as refused:
        raise invalid(refused.param, refused.message) from None
    except ConstraintNotReady as error:
        raise RequestError(503, str(error), code="overloaded", retry_after_s=settings.full_retry_after_s) from None
    except ConstraintError as error:
        raise invalid(param, f"no answer can follow it: {error}") from None
    return tools, constraint


def _as_sent(turn: ChatTurn) -> ChatTurn:
    """Return a turn as clients send it to a vLLM: the arguments of calls as text of JSON."""
    sent = {("reasoning" if name == "reasoning_content" else name): said for name, said in turn.items()}
    for call in (calls := [dict(call) for call in turn.get("tool_calls", ())]):
        function = call["function"]
        call["function"] = {**function, "arguments": msgspec.json.encode(function["arguments"]).decode()}
        call.setdefault("id", "")
    return {**sent, **({"tool_calls": calls} if calls else {})}


def check_size(prompt: Prompt, model: ServedModel, param: str, *, cut: bool = False) -> None:
    """Refuse a prompt that is too long by its size alone, before it is tokenized; `cut`: only its last tokens are used. Raises
    RequestError."""
    if isinstance(prompt, str):
        _check_chars(len(prompt), param, model)
    elif isinstance(prompt[0], int):
        if not cut:
            check_fits(len(prompt), param, model)
    else:
        _check_chars(sum(_chars(item) for item in prompt if isinstance(item, dict)), param, model)


def _chars(turn: ChatTurn) -> int:
    calls = turn.get("tool_calls")
    return (
        len(text_of(turn["content"]))
        + len(turn.get("reasoning_content", ""))
        + (len(msgspec.json.encode(calls)) if calls else 0)
    )


def _check_chars(chars: int, param: str, model: ServedModel) -> None:
    if chars > model.max_chars:
        raise too_long(param, model, f"you requested {chars} characters, which are more tokens than that")


def tokenized(
    prompt: Prompt,
    model: ServedModel,
    param: str,
    *,
    special: bool = True,
    form: ChatForm = PLAIN_CHAT,
    tools: list[dict[str, Any]] | None = None,
    salt: str | None = None,
) -> "array[int]":
    """Its ids, at least one. `special`: with what the model puts before a text; `form`: how a conversation is written;
    `tools`: which it may call; `salt`: of the prompts whose KV this one may use, as the ids of their texts may be used as well.
    Raises RequestError."""
    if isinstance(prompt, str):
        ids = model.tokenizer.encode(prompt, special=special, salt=salt)
    elif isinstance(prompt[0], int):
        ids = array("i", (item for item in prompt if isinstance(item, int)))
    else:
        if urls_in(turns := [item for item in prompt if isinstance(item, dict)]):
            raise invalid(param, "only the model's vLLM knows the tokens of an image: here they are not counted", UNSUPPORTED)
        try:
            ids = model.tokenizer.chat(turns, form, tools, salt=salt)
        except ValueError as error:
            raise invalid(param, of_a_library(error)) from None
    if not ids:
        raise invalid(param, "the prompt has no tokens")
    largest = int(np.frombuffer(ids, np.intc).max())
    if largest >= model.vocab_size:  # a text's too: a tokenizer may know more ids than the model, whose engine would fail
        raise invalid(param, f"token id {largest} is out of range: the vocabulary has {model.vocab_size} ids")
    return ids


def _echo(body: CompletionBody | ChatBody, prompt: Prompt, model: ServedModel) -> str:
    if isinstance(body, ChatBody) or not body.echo:
        return ""
    return prompt if isinstance(prompt, str) else model.tokenizer.decode([item for item in prompt if isinstance(item, int)])


def _offsets(ids: Sequence[int], prompt: Prompt, model: ServedModel) -> list[int]:
    """Where in the text that is echoed each of them begins, in characters. A text has the names of the special tokens that it
    asks for, and not those of what the model puts before it."""
    text = prompt if isinstance(prompt, str) else ""
    stream = TokenStream(model.tokenizer, special=bool(text))
    pieces = [*(stream.push(token) for token in ids), stream.flush()]
    begins = accumulate(map(len, pieces[: len(ids) - 1]), initial=0)
    if not text:
        return list(begins)
    before = max(0, "".join(pieces).find(text))
    return [min(max(0, begin - before), len(text)) for begin in begins]
