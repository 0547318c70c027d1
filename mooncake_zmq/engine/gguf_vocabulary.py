"""Tokenizers built from the parts that a GGUF file carries: byte-level BPE ("gpt2") and SentencePiece BPE ("llama")."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers

from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.tokenizer import library_errors

SPACE = "\u2581"  # SentencePiece's form of a space


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Pre:
    """The way one kind of byte-level BPE cuts a text before it merges. Without a pattern: GPT-2's own."""

    pattern: str | None = None
    single_digits: bool = False
    composed: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = _Pre(f"{_CONTRACTIONS}|{_LETTERS}|\\p{{N}}{{1,3}}|{_REST}", whole_words=True, adds_bos=True)
_QWEN2 = _Pre(f"{_CONTRACTIONS}|{_LETTERS}|\\p{{N}}|{_REST}", composed=True)
_TEKKEN = _Pre(
    f"[^\\r\\n\\p{{L}}\\p{{N}}]?{_UPPER}*{_LOWER}+|[^\\r\\n\\p{{L}}\\p{{N}}]?{_UPPER}+{_LOWER}*|\\p{{N}}|"
    + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1),
    whole_words=True,
    adds_bos=True,
)
_PRES = {
    "default": _Pre(),
    "gpt-2": _Pre(),
    "smollm": _Pre(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "tekken": _TEKKEN,
}


def check(model: str, pre: str) -> None:
    """Raise ModelError unless a tokenizer of these names can be built."""
    if model not in ("gpt2", "llama"):
        raise ModelError(f"GGUF tokenizer {model!r} is not supported (gpt2, llama): use the model's Hugging Face directory")
    if model == "gpt2" and pre not in _PRES:
        known = ", ".join(_PRES)
        raise ModelError(f"GGUF pre-tokenizer {pre!r} is not supported ({known}): use the model's Hugging Face directory")


def adds_bos(model: str, pre: str) -> bool:
    """Return whether a text begins with BOS where the file does not say."""
    return model == "llama" or _PRES[pre].adds_bos


def byte_level_bpe(
    *, tokens: Sequence[str], merges: Iterable[tuple[str, str]], kinds: Sequence[int], pre: str
) -> tokenizers.Tokenizer:
    """Build a tokenizer whose merges are listed in their order. `pre` names how a text is cut first."""
    check("gpt2", pre)
    cut = _PRES[pre]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    with library_errors("the model's tokenizer is damaged"):
        model = tokenizers.models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=cut.whole_words)
        tokenizer = tokenizers.Tokenizer(model)
    if cut.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(cut)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, tokens, kinds)
    return tokenizer


def _pre_tokenizer(cut: _Pre) -> Any:
    steps: list[Any] = []
    if cut.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.pattern is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(cut.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    return pre_tokenizers.Sequence(steps)


def sentencepiece_bpe(
    *, tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], space_prefix: bool
) -> tokenizers.Tokenizer:
    """Build a tokenizer that merges the neighbours whose union scores highest, and writes unknown text as bytes."""
    if len(scores) != len(tokens):
        raise ModelError(f"the model's tokenizer is damaged: {len(tokens)} tokens with {len(scores)} scores")
    if not all(isinstance(score, int | float) and not math.isnan(score) for score in scores):
        raise ModelError("the model's tokenizer is damaged: its scores are no numbers")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenKind.UNKNOWN), None)
    merges = _merges(
        {token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == TokenKind.NORMAL}
    )
    with library_errors("the model's tokenizer is damaged"):
        model = tokenizers.models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        tokenizer = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if space_prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)
    _add_special(tokenizer, tokens, kinds)
    return tokenizer


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return every way to make a piece of two others, the best piece first; of one piece's ways, the longest left part
    first."""
    ways = [
        (-score, -cut, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    ways.sort(key=lambda way: way[:2])
    return [(left, right) for _, _, left, right in ways]


def _add_special(tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Add special tokens. Control tokens are found whole in a text, and never shown; user-defined ones are found whole, and
    shown."""
    for wanted, special in (((TokenKind.CONTROL, TokenKind.UNKNOWN), True), ((TokenKind.USER_DEFINED,), False)):
        chosen = [token for token, kind in zip(tokens, kinds, strict=True) if kind in wanted]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in chosen])
