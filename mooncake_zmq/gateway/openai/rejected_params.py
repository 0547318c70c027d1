"""Parameters of OpenAI's or vLLM's API that this one lacks: each may be given as long as it asks for nothing. PURE.

An unknown parameter is refused too: what is answered is what was asked.
"""

from typing import Any, ClassVar

import msgspec
from msgspec import Raw, Struct

NULL = Raw(b"null")
LONGEST_NEUTRAL = 64
"""Bytes of a value that may ask for nothing."""


class Harmless(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters without effect on an answer: names and hints."""

    user: Raw = NULL
    metadata: Raw = NULL
    safety_identifier: Raw = NULL
    prompt_cache_key: Raw = NULL
    prompt_cache_retention: Raw = NULL
    parallel_tool_calls: Raw = NULL


class Unsupported(Harmless, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters with an effect. `done`: those that one endpoint has all the same."""

    done: ClassVar[frozenset[str]] = frozenset()

    add_generation_prompt: Raw = NULL
    add_special_tokens: Raw = NULL
    allowed_token_ids: Raw = NULL
    audio: Raw = NULL
    bad_words: Raw = NULL
    best_of: Raw = NULL
    chat_template: Raw = NULL
    chat_template_kwargs: Raw = NULL
    continue_final_message: Raw = NULL
    documents: Raw = NULL
    early_stopping: Raw = NULL
    function_call: Raw = NULL
    functions: Raw = NULL
    guided_decoding_backend: Raw = NULL
    kv_transfer_params: Raw = NULL
    length_penalty: Raw = NULL
    logits_processors: Raw = NULL
    modalities: Raw = NULL
    prediction: Raw = NULL
    prompt_logprobs: Raw = NULL
    reasoning_effort: Raw = NULL
    service_tier: Raw = NULL
    spaces_between_special_tokens: Raw = NULL
    store: Raw = NULL
    suffix: Raw = NULL
    tool_choice: Raw = NULL
    tools: Raw = NULL
    use_beam_search: Raw = NULL
    verbosity: Raw = NULL
    web_search_options: Raw = NULL


class UnsupportedOfMessage(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The same of a turn: clients send back what they were answered, nulls and all."""

    annotations: Raw = NULL
    audio: Raw = NULL
    function_call: Raw = NULL
    refusal: Raw = NULL


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "annotations": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True, False),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
"""Values other than null that ask for nothing."""
INSTEAD = {
    "best_of": "ask for n answers with logprobs, and choose among them",
    "suffix": "write the model's own marks for what stands before and behind into the prompt",
}
"""Advice for parameters that another way replaces."""
NAMES = tuple(sorted(set(Unsupported.__struct_fields__) - set(Harmless.__struct_fields__)))
MESSAGE_NAMES = UnsupportedOfMessage.__struct_fields__


def asked(given: Unsupported) -> str | None:
    """The first parameter that asks for what is not done here."""
    return _first(given, tuple(name for name in NAMES if name not in given.done))


def refusal(name: str) -> str:
    """The reason for refusing it, for the client."""
    return f"{name} is not supported" + (f": {INSTEAD[name]}" if name in INSTEAD else "")


def asked_of_message(given: UnsupportedOfMessage) -> str | None:
    """The first such part of a turn."""
    return _first(given, MESSAGE_NAMES)


def _first(given: Struct, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if (raw := getattr(given, name)) is not NULL and not _is_neutral(name, raw)), None)


def _is_neutral(name: str, raw: Raw) -> bool:
    said = bytes(raw)
    if said == b"null":
        return True
    if len(said) > LONGEST_NEUTRAL:
        return False
    try:
        value = msgspec.json.decode(said)
    except msgspec.DecodeError:
        return False
    return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL.get(name, ()))
