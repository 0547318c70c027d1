"""Names of a vLLM engine's KV blocks in the pool: a chain of keys identifies their tokens, a prefix the weights and the order
of bytes. Two engines that differ in any of these never share a name. PURE.

    name = PREFIX vllm / DIGEST / RANK / KEY of the block
           \\------- prefix -------/
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from mooncake_zmq.kv.block_hash import KEY_BYTES, Key, extend_keys, namespace, pack_tokens, root_of_salt

CHAIN = "vllm"
"""Part of the root of chains that no gateway of ours has begun."""


@dataclass(frozen=True, slots=True)
class LayerOrder:
    """One layer's bytes of a block. `shape`: first how many pieces a kernel cuts it into; `axes`: in the order of memory."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteOrder:
    """Everything that decides which bytes one rank has for a block, besides the tokens.

    `weights`: their identity. `config`: digest of the model's settings as the engine uses them. `backends`, `instruction_sets`:
    of its attention layers; the latter change the order of bytes on CPUs, which no shape shows. `ranks`: how many share the
    model, in each way of sharing it.
    """

    engine: str
    weights: str
    config: str
    device: str
    layout: str
    backends: tuple[str, ...]
    instruction_sets: tuple[str, ...]
    block_tokens: int
    ranks: tuple[int, ...]
    layers: tuple[LayerOrder, ...]

    @property
    def digest(self) -> str:
        """128 bits of SHA-256, in hexadecimal."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[: 2 * KEY_BYTES]

    def shelf(self, rank: str, prefix: str = "") -> str:
        """Return the prefix of the names of this rank's blocks. `prefix`: a tenant's namespace."""
        return f"{prefix}vllm/{self.digest}/{rank}/"


def chain_root(salt: str = "", anew: str = "") -> bytes:
    """Return the root of the keys of a request. `salt`: its `cache_salt`, which holds the root where a gateway of ours has
    hashed the prompt: the keys are then the gateway's. `anew`: not empty once earlier KV is invalid."""
    root = root_of_salt(salt) or namespace(model="", layout=CHAIN, salt=salt)
    return root if not anew else namespace(model=root.hex(), layout=CHAIN, salt=anew)


def object_names(shelves: Sequence[str], keys: Iterable[Key]) -> list[str]:
    """Return one name per prefix for each block, block after block."""
    return [prefix + key.hex() for key in keys for prefix in shelves]


class BlockKeys:
    """The keys of one request's complete blocks, computed as its tokens become known."""

    def __init__(self, more: Callable[[bytes, int, int], list[Key]], root: bytes) -> None:
        """`more`: (key before, first block, stop block) -> keys of these blocks, which are complete."""
        self._more = more
        self._root = root
        self._keys: list[Key] = []

    def upto(self, count: int) -> list[Key]:
        """Return the first `count` keys."""
        made = len(self._keys)
        if made < count:
            self._keys += self._more(self._keys[-1] if made else self._root, made, count)
        return self._keys[:count]


def token_keys(root: bytes, tokens: Sequence[int], block_tokens: int) -> BlockKeys:
    """Return keys of plain text. `tokens` may grow."""

    def more(parent: bytes, first: int, stop: int) -> list[Key]:
        return extend_keys(parent, pack_tokens(tokens[first * block_tokens : stop * block_tokens]), block_tokens)

    return BlockKeys(more, root)


def derived_keys(root: bytes, hashes: Sequence[bytes]) -> BlockKeys:
    """Return keys of inputs that are more than text (images, LoRA), derived from vLLM's own hashes of the blocks, which
    cover all input. `hashes` may grow."""

    def more(_parent: bytes, first: int, stop: int) -> list[Key]:
        return [hashlib.sha256(root + bytes(each)).digest()[:KEY_BYTES] for each in hashes[first:stop]]

    return BlockKeys(more, root)
