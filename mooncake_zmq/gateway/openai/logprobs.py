"""Tokens' logarithmic probabilities in the two shapes that OpenAI gives them. PURE."""

from collections.abc import Callable, Sequence
from typing import Any

from mooncake_zmq.core.messages import TokenLogprob

Piece = Callable[[int], bytes]
"""The bytes that a token stands for: perhaps a part of a character."""


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
    raw = piece(token)
    return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


def text_of(raw: bytes) -> str:
    """The text of a token. Where no `bytes` stand beside it, a part of a character is written as OpenAI writes it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
