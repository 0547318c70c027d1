"""Block keys and prompt bytes of a trace's requests, made when they are needed: a trace of any length takes no memory. PURE."""

from collections.abc import Sequence

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
    """Keys of a prompt's complete blocks: a chain, so that equal ids after different ones are different blocks.

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


def prompt_bytes(input_tokens: int, block_tokens: int, number: int) -> bytes:
    """Token ids (int32 bytes) of the length asked for. All are 0 but those after the last complete block, which belong to
    request `number` alone: so blocks that its output completes are nobody else's."""
    tail = input_tokens % block_tokens
    return bytes(4 * (input_tokens - tail)) + (number & 0x7FFFFFFF).to_bytes(4, "little") * tail
