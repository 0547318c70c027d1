"""What happens to the blocks of one pool, for routers outside the cluster. PURE; the wire format is vLLM's KV events."""

from dataclasses import dataclass
from enum import Enum

from mooncake_zmq.kv.block_hash import Key


class Medium(Enum):
    """The tier of a copy, by vLLM's names."""

    CPU = "CPU"
    DISK = "DISK"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """These blocks can now be read from `medium`. `keys` are a chain after `parent`; `tokens` (int32 bytes) are what they
    hold, both empty where this node was not told, as for copies of another node's blocks."""

    keys: tuple[Key, ...]
    medium: Medium
    parent: bytes = b""
    tokens: bytes = b""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks can no longer be read from `medium`."""

    keys: tuple[Key, ...]
    medium: Medium


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing said before counts any more."""


KvEvent = BlocksStored | BlocksRemoved | AllBlocksCleared
