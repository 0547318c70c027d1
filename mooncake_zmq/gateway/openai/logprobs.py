"""Tokens' logarithmic probabilities in the two shapes that OpenAI gives them. PURE."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from mooncake_zmq.core.messages import TokenLogprob

Piece = Callable[[int], bytes]
"""The bytes that a token stands for: perhaps a part of a character."""
KEPT = 1 << 14
"""Tokens whose texts are kept: an answer names the same likely ones again and again, twenty with each of its tokens."""


def of_completion(
    tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], offsets: Sequence[int], piece: Piece
) -> dict[str, Any]:
    """The shape of /v1/completions: parallel lists. The likeliest tokens come with the one that stands there. None: the first
    token of a prompt, which has no probability."""
    texts = [text_of(piece(token)) for token in tokens]
    likeliest = [
        scored and {text_of(piece(each)): value for each, value in [*scored[1], (token, scored[0])]}
        for token, scored in zip(tokens, logprobs, strict=True)
    ]
    return {
        "tokens": texts,
        "token_logprobs": [scored and scored[0] for scored in logprobs],
        "top_logprobs": likeliest,
        "text_offset": list(offsets),
    }


def of_chat(tokens: Sequence[int], logprobs: Sequence[TokenLogprob], piece: Piece) -> dict[str, Any]:
    """The shape of /v1/chat/completions: an entry for each token."""
    content = [
        {**_entry(token, own, piece), "top_logprobs": [_entry(each, value, piece) for each, value in best]}
        for token, (own, best) in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _entry(token: int, logprob: float, piece: Piece) -> dict[str, Any]:
    text, raw = _text_and_bytes(piece(token))
    return {"token": text, "logprob": logprob, "bytes": raw}


@lru_cache(KEPT)
def _text_and_bytes(raw: bytes) -> tuple[str, tuple[int, ...]]:
    return raw.decode(errors="replace"), tuple(raw)


@lru_cache(KEPT)
def text_of(raw: bytes) -> str:
    """The text of a token. Where no `bytes` stand beside it, a part of a character is written as OpenAI writes it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
