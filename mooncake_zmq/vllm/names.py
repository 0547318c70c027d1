"""What the KV blocks of a vLLM engine are called in the pool: a chain of keys says which tokens they hold, a shelf of which
weights and in which order of bytes. Two engines that differ in any of it never share a name. PURE.

    name = PREFIX vllm / DIGEST / RANK / KEY of the block
           \\-------- shelf -------/
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from mooncake_zmq.kv.block_hash import KEY_BYTES, Key, extend_keys, namespace, pack_tokens, root_of_salt

CHAIN = "vllm"
"""In the root of chains that no gateway of ours has begun."""


@dataclass(frozen=True, slots=True)
class LayerOrder:
    """One layer's part of a block: `shape`, first how many pieces a kernel cuts it into; `axes`, in the order of memory."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteOrder:
    """All that decides which bytes one rank's part of a block has, besides the tokens.

    `weights`: their identity. `config`: digest of the model's settings as the engine has it. `backends`, `instruction_sets`: of
    its attention layers; the latter order the bytes on CPUs, though no shape tells. `ranks`: how many share the model, in each
    way of sharing it.
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
        """What the names of this rank's blocks begin with. `prefix`: a tenant's namespace."""
        return f"{prefix}vllm/{self.digest}/{rank}/"


def chain_root(salt: str = "", anew: str = "") -> bytes:
    """Where the keys of a request begin. `salt`: its `cache_salt`, which holds the root where a gateway of ours has hashed the
    prompt: the keys are then the gateway's. `anew`: not empty once earlier KV is no longer good."""
    root = root_of_salt(salt) or namespace(model="", layout=CHAIN, salt=salt)
    return root if not anew else namespace(model=root.hex(), layout=CHAIN, salt=anew)


def object_names(shelves: Sequence[str], keys: Iterable[Key]) -> list[str]:
    """Of each block one name a shelf, block after block."""
    return [shelf + key.hex() for key in keys for shelf in shelves]


class BlockKeys:
    """The keys of one request's complete blocks, made as its tokens become known."""

    def __init__(self, more: Callable[[bytes, int, int], list[Key]], root: bytes) -> None:
        """`more`: (key before, first block, stop block) -> keys of these blocks, which are complete."""
        self._more = more
        self._root = root
        self._keys: list[Key] = []

    def upto(self, count: int) -> list[Key]:
        """The first `count` keys."""
        made = len(self._keys)
        if made < count:
            self._keys += self._more(self._keys[-1] if made else self._root, made, count)
        return self._keys[:count]


def token_keys(root: bytes, tokens: Sequence[int], block_tokens: int) -> BlockKeys:
    """Keys of plain text. `tokens` may grow."""

    def more(parent: bytes, first: int, stop: int) -> list[Key]:
        return extend_keys(parent, pack_tokens(tokens[first * block_tokens : stop * block_tokens]), block_tokens)

    return BlockKeys(more, root)


def derived_keys(root: bytes, hashes: Sequence[bytes]) -> BlockKeys:
    """Keys of what is more than text (images, LoRA): of vLLM's own hashes of the blocks, which cover it. `hashes` may grow."""

    def more(_parent: bytes, first: int, stop: int) -> list[Key]:
        return [hashlib.sha256(root + bytes(each)).digest()[:KEY_BYTES] for each in hashes[first:stop]]

    return BlockKeys(more, root)
