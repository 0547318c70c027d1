"""The key of a body whose answer may be given again: its tenant, model, prompt and all else that decides the answer."""

import hashlib
import unicodedata
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import structs

from mooncake_zmq.gateway.answers.table import CLASSES, Asked
from mooncake_zmq.gateway.openai.bodies import ChatBody, CompletionBody, Prompt
from mooncake_zmq.gateway.openai.rejected_params import NULL, Harmless
from mooncake_zmq.gateway.requests.client_events import ClientRequest
from mooncake_zmq.gateway.settings import AnswersSettings

KEY_BYTES = 16
_NAMES = ("model", "stream", "stream_options", "seed", "n", "cache_salt", "priority", "ttft_slo", "tbt_slo", "answer_cache")
_OPEN: dict[str, Any] = dict.fromkeys(_NAMES) | dict.fromkeys(Harmless.__struct_fields__, NULL)
"""Fields that decide nothing at temperature 0, or that the key has in another form. Every other field is a part of the key."""
_AT_THE_END = ".? \u2026\u3002\uff1f"
_SYSTEM = ("system", "developer")


def asked_of(
    body: CompletionBody | ChatBody, prompts: Sequence[Prompt], request: ClientRequest, settings: AnswersSettings
) -> Asked | None:
    """Return what the only request of a body asks; None if its answer must not be given again. `request` has the model, the
    tenant, and in its root the salt."""
    if body.temperature != 0 or body.choices_per_prompt > 1 or len(prompts) > 1 or body.answer_cache is False:
        return None
    if body.likeliest is not None or request.reading is not None or request.images or body.requested_tokens == 0:
        return None
    prompt, system = prompts[0], ""
    if isinstance(body, CompletionBody):
        if body.echo:
            return None
        fields: CompletionBody | ChatBody = structs.replace(body, prompt=NULL, **_OPEN)
        said: Any = prompt
    else:
        turns = [turn for turn in prompt if isinstance(turn, dict)]
        if bytes(body.tools) not in (b"null", b"[]") or any("tool_calls" in turn or turn["role"] == "tool" for turn in turns):
            return None
        fields = structs.replace(body, messages=[], **_OPEN)
        if settings.approximate and not body.continue_final_message:
            turns = [{**turn, "content": normalised(turn["content"])} for turn in turns]
        said = turns
        system = turns[0]["content"] if turns[0]["role"] in _SYSTEM else ""
    model = f"{request.model}/{request.adapter}"
    whole = msgspec.msgpack.encode((request.tenant, model, request.root, msgspec.json.encode(fields), said))
    group = zlib.crc32(f"{model}/{fields.__class__.__name__}/{system}".encode()) % CLASSES
    return Asked(request.tenant, request.model, hashlib.sha256(whole).digest()[:KEY_BYTES], group, request.stop.max_tokens)


def normalised(text: str) -> str:
    """Return a text without what seldom changes an answer: in lower case, in one form of each character (NFC), with single
    spaces in place of white space, and no period or question mark at the end. A text of these alone stays as it is."""
    even = text if text.isascii() else unicodedata.normalize("NFC", text)
    return " ".join(even.lower().split()).rstrip(_AT_THE_END) or text
