"""Keys of prompts with images. The tokens of an image are the same for all images, so that its content is in the key of the
block where it begins, and by the chain in all that follow. PURE.

    tokens   | a b c | d # # | # # e |      an image is at "#"
    keys     |  K1   |  K2   |  K3   |      K2 = SHA-256(K1 || tokens || place in the block, digest); K1 is that of plain text
"""

import hashlib
from collections.abc import Callable, Sequence
from itertools import groupby

from mooncake_zmq.kv.block_hash import KEY_BYTES, Key, extend_keys

Begin = tuple[int, bytes]
"""Where an image begins, as the index of its first token, and the digest of its content."""
Extend = Callable[[bytes, bytes, int], list[Key]]


def digest_of(name: str) -> bytes:
    """Return the digest of an image from vLLM's hash of its content."""
    return hashlib.sha256(name.encode()).digest()[:KEY_BYTES]


def keys_with_images(
    parent: bytes, tokens: bytes, block_tokens: int, begins: Sequence[Begin], extend: Extend = extend_keys
) -> list[Key]:
    """Return the keys of the complete blocks in `tokens` (int32 bytes) that follow `parent`, as `extend_keys` does.

    `begins`: those images that begin in these tokens, in order. `extend` makes the keys of blocks in which none begins.
    """
    size, keys, done = 4 * block_tokens, list[Key](), 0
    for block, group in groupby(begins, lambda begin: begin[0] // block_tokens):
        start = block * size
        if start + size > len(tokens):
            break
        keys += extend(keys[-1] if keys else parent, tokens[done:start], block_tokens)
        marks = b"".join((at % block_tokens).to_bytes(4, "little") + digest for at, digest in group)
        before = keys[-1] if keys else parent
        keys.append(hashlib.sha256(before + tokens[start : start + size] + marks).digest()[:KEY_BYTES])
        done = start + size
    return keys + extend(keys[-1] if keys else parent, tokens[done:], block_tokens)


def shifted(begins: Sequence[Begin], first: int) -> tuple[Begin, ...]:
    """Return the images that begin at token `first` or after it, counted from there."""
    return tuple([(at - first, digest) for at, digest in begins if at >= first])
