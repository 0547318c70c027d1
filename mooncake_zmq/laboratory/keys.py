"""Block keys and prompt bytes of a trace's requests, made when they are needed: a trace of any length takes no memory. PURE."""

from collections.abc import Sequence
from functools import lru_cache

import xxhash

from mooncake_zmq.kv.block_hash import KEY_BYTES, Key
from mooncake_zmq.laboratory.study import TRACE_BLOCK_TOKENS

ROOT = bytes(KEY_BYTES)
"""Namespace of all traces: the parent of first blocks."""


def check_block_tokens(block_tokens: int) -> int:
    """Raise ValueError unless a hash id stands for whole blocks."""
    if block_tokens < 1 or TRACE_BLOCK_TOKENS % block_tokens:
        raise ValueError(f"block_tokens must divide {TRACE_BLOCK_TOKENS}, the tokens of a trace's block, not {block_tokens}")
    return block_tokens


def block_keys(hash_ids: Sequence[int], input_tokens: int, block_tokens: int) -> tuple[Key, ...]:
    """Return the keys of a prompt's complete blocks: a chain, so that equal ids after different ones are different blocks.

    An id stands for `TRACE_BLOCK_TOKENS` tokens; with smaller blocks each of its parts has a key. The last id may be of a block
    that is not complete, of which some parts may be.
    """
    complete, digest = input_tokens // block_tokens, xxhash.xxh3_128_digest
    parts = TRACE_BLOCK_TOKENS // block_tokens
    if complete > len(hash_ids) * parts:
        raise ValueError(f"{len(hash_ids)} hash ids cannot stand for {input_tokens} tokens")
    keys: list[Key] = []
    key = ROOT
    for index in range(complete):
        block, part = divmod(index, parts)
        key = digest(key + b"%d.%d" % (hash_ids[block], part))
        keys.append(key)
    return tuple(keys)


class Prompt:
    """Token ids (as of int32 bytes) of a prompt and the output so far, made when they are read: thousands of requests may be
    queued.

    All are 0 but those after the last complete block of the prompt, which belong to request `number` alone: so no other request
    has the blocks that its output completes.
    """

    __slots__ = ("_own", "_prompt_tokens", "_shared", "_tokens")

    def __init__(self, prompt_tokens: int, block_tokens: int, number: int, output_tokens: int = 0) -> None:
        self._prompt_tokens = prompt_tokens
        self._tokens = prompt_tokens + output_tokens
        self._shared = prompt_tokens // block_tokens * block_tokens
        self._own = (number & 0x7FFFFFFF).to_bytes(4, "little")

    def __len__(self) -> int:
        return 4 * self._tokens

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(4 * self._tokens)
        first, last = start // 4, max(start, stop) // 4
        own = range(max(first, self._shared), min(last, self._prompt_tokens))
        if not own:
            return _zeros(4 * (last - first))
        return bytes(4 * (own.start - first)) + self._own * len(own) + bytes(4 * (last - own.stop))


@lru_cache(64)
def _zeros(size: int) -> bytes:
    """Return zeros for a chunk or a put, cached: to write them anew takes longer than all their other uses."""
    return bytes(size)
