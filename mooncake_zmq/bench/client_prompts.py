"""Prompts of a trace's requests, made of its hash ids: equal ids give equal tokens, or equal text. PURE.

A prompt is assembled from blocks that are already encoded as JSON, each encoded once: to encode twelve thousand ids for every
request would delay the streams that are measured meanwhile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mooncake_zmq.kv.layout import div_ceil
from mooncake_zmq.laboratory.study import TRACE_BLOCK_TOKENS, Arrival

BLOCKS_KEPT = 8192
"""Encoded blocks that are kept, those used last: 20 MiB."""
WORDS = (
    *("the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not",),
    *("what all were we when your can said there use an each which she do how their if will up other about out many then",),
    *("them these so some her would make like him into time has look two more write go see number no way could people my",),
    *("than first water been call who oil its now find long down day did get come made may part over new sound take only",),
    *("little work know place year live me back give most very after thing our just name good sentence man think say great",),
)
VOCABULARY = tuple(word for line in WORDS for word in line.split())
"""Words that most tokenizers know as one token, with the space before them."""
_ODD, _MULTIPLIERS = np.uint64(0x9E3779B97F4A7C15), (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptForm:
    """The form of prompts: ids from `first_id` up to `last_id`, or words."""

    text: bool = False
    first_id: int = 0
    last_id: int = 255
    block_tokens: int = TRACE_BLOCK_TOKENS
    """Tokens that a hash id stands for here; prompts are shorter than the trace's in proportion."""

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= TRACE_BLOCK_TOKENS:
            raise ValueError(f"a hash id stands for 1 to {TRACE_BLOCK_TOKENS} tokens, not {self.block_tokens}")
        if not 0 <= self.first_id <= self.last_id < 1 << 31:
            raise ValueError(f"token ids from {self.first_id} to {self.last_id} are none")

    def length(self, arrival: Arrival) -> int:
        """Return the number of tokens, or words, of a request's prompt."""
        return div_ceil(arrival.input_tokens * self.block_tokens, TRACE_BLOCK_TOKENS)


def pieces(arrival: Arrival, form: PromptForm) -> Iterator[bytes]:
    """Yield the JSON of a prompt, block by block: a list of ids, or a string."""
    yield b'"' if form.text else b"["
    left, block = form.length(arrival), form.block_tokens
    for number, hash_id in enumerate(arrival.hash_ids):
        tokens = min(left, block)
        between = b"" if form.text or number == 0 else b","
        yield between + (_block(hash_id, form) if tokens == block else _written(hash_id, form, tokens))
        left -= tokens
    yield b'"' if form.text else b"]"


@lru_cache(BLOCKS_KEPT)
def _block(hash_id: int, form: PromptForm) -> bytes:
    return _written(hash_id, form, form.block_tokens)


def _written(hash_id: int, form: PromptForm, tokens: int) -> bytes:
    if form.text:
        return "".join(f" {VOCABULARY[each]}" for each in _drawn(hash_id, tokens, len(VOCABULARY)).tolist()).encode()
    ids = _drawn(hash_id, tokens, form.last_id - form.first_id + 1) + form.first_id
    return ",".join(map(str, ids.tolist())).encode()


def _drawn(hash_id: int, count: int, kinds: int) -> NDArray[np.int64]:
    """Return `count` numbers below `kinds` that depend only on this block: SplitMix64 of their places in the trace."""
    with np.errstate(over="ignore"):
        places = np.uint64(hash_id & ((1 << 64) - 1)) * np.uint64(TRACE_BLOCK_TOKENS) + np.arange(count, dtype=np.uint64)
        mixed = (places + np.uint64(1)) * _ODD
        for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * multiplier
        mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(kinds)).astype(np.int64)
