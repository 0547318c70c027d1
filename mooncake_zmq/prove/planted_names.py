"""Names of KV blocks with bugs in them. It imports only what vLLM's environment has. PURE."""

from collections.abc import Sequence

from mooncake_zmq.kv.block_hash import Key, extend_keys, pack_tokens
from mooncake_zmq.vllm.names import BlockKeys

PLANTED_VARIABLE = "MOONCAKE_ZMQ_PROVE_PLANTED"
"""The environment variable that names the bug which `planted.py` plants."""


def keys_without_prefix(root: bytes, tokens: Sequence[int], block_tokens: int) -> BlockKeys:
    """Return keys that cover a block's own tokens and nothing of what stands before it."""

    def more(_parent: bytes, first: int, stop: int) -> list[Key]:
        blocks = (tokens[number * block_tokens : (number + 1) * block_tokens] for number in range(first, stop))
        return [key for block in blocks for key in extend_keys(root, pack_tokens(block), block_tokens)]

    return BlockKeys(more, root)
