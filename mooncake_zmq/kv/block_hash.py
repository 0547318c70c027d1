"""Block keys: a chain of SHA-256 digests over token ids. Never Python's `hash()`, which differs per process."""

import hashlib
import sys
from array import array
from collections.abc import Sequence

import numpy as np

KEY_BYTES = 16
Key = bytes


def namespace(*, model: str, layout: str, salt: str = "", adapter: str = "") -> bytes:
    """The chain's root: two namespaces that differ in weights, layout, tenant salt or adapter never share a key."""
    digest = hashlib.sha256()
    for part in (model, layout, salt, adapter) if adapter else (model, layout, salt):
        raw = part.encode()
        digest.update(len(raw).to_bytes(4, "little") + raw)
    return digest.digest()[:KEY_BYTES]


SALT = "mooncake-zmq:"


def salt_of(root: bytes) -> str:
    """The cache salt that separates blocks of this root from others in another engine; the root can be recovered from it."""
    return SALT + root.hex()


def root_of_salt(salt: str) -> bytes | None:
    """The inverse of `salt_of`; None for any other text."""
    name, _, text = salt.partition(SALT)
    if name or len(text) != 2 * KEY_BYTES or not set(text) <= set("0123456789abcdef"):
        return None
    return bytes.fromhex(text)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int32 bytes, the form in which they travel. Raises OverflowError, TypeError."""
    packed = tokens if isinstance(tokens, array) and tokens.typecode == "i" else array("i", tokens)
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(raw: bytes) -> list[int]:
    """The inverse of `pack_tokens`."""
    ids: list[int] = np.frombuffer(raw, dtype="<i4").tolist()
    return ids


def extend_keys(parent: bytes, tokens: bytes, block_tokens: int) -> list[Key]:
    """Keys of the complete blocks in `tokens` (int32 bytes) that follow `parent` (a key, or the namespace).

    key[i] = SHA-256(key[i-1] || tokens of block i), cut to 16 bytes: collision-resistant, as tenants share the pool.
    """
    keys: list[Key] = []
    size = block_tokens * 4
    for start in range(0, len(tokens) - size + 1, size):
        parent = hashlib.sha256(parent + tokens[start : start + size]).digest()[:KEY_BYTES]
        keys.append(parent)
    return keys
