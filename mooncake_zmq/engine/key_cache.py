"""Keeps the block keys of long prompts: of the next turn of a conversation only the new tokens are hashed block by block."""

import hashlib

from mooncake_zmq.engine.recent_values import RecentValues
from mooncake_zmq.kv.block_hash import KEY_BYTES, Key, extend_keys

PART_BLOCKS = 128
"""Blocks whose keys are kept together; a shorter rest of a prompt is hashed each time."""
MAX_BYTES = 32 << 20
"""Limit on the keys kept: the least recently used parts go first."""


class KeyCache:
    """The keys of prompts' parts. A part is named by a digest of the chain's root and of all tokens up to its end: equal tokens
    under another root, as another tenant has, find nothing. Safe to share between threads."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._parts: RecentValues[bytes] = RecentValues(max_bytes)

    @property
    def kept_bytes(self) -> int:
        """The bytes that are kept."""
        return self._parts.bytes

    def extend(self, parent: bytes, tokens: bytes, block_tokens: int) -> list[Key]:
        """Return what `extend_keys` returns: the keys of the complete blocks in `tokens` (int32 bytes) that follow `parent`."""
        keys: list[Key] = []
        size = 4 * block_tokens * PART_BLOCKS
        name = block_tokens.to_bytes(4, "little") + parent
        begin = 0
        for begin in range(size, len(tokens) + 1, size):
            part = tokens[begin - size : begin]
            name = hashlib.sha256(name + part).digest()
            found = self._parts.find(name)
            if found is None:
                found = b"".join(extend_keys(parent, part, block_tokens))
                self._parts.keep(name, found)
            keys += [found[at : at + KEY_BYTES] for at in range(0, len(found), KEY_BYTES)]
            parent = keys[-1]
        return keys + extend_keys(parent, tokens[begin:], block_tokens)
