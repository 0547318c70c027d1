"""The shape of a KV block: where each layer's part lies in a slot, whose KV it may be, and the fingerprint two nodes must
share."""

import hashlib
from dataclasses import dataclass

import numpy as np

PAGE_BYTES = 4096


def div_ceil(a: int, b: int) -> int:
    """Smallest integer not below a / b."""
    return -(-a // b)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """`block_tokens` tokens' KV of all layers as `[layer, k/v, token, kv_head, head_dim]`, contiguous.

    A layer's part is a contiguous range, so layer-wise streaming and block storage are the same bytes.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str = "float32"
    itemsize: int = 4
    hidden_bytes: int = 0
    """Bytes of one token's hidden state, which stages of a pipeline pass on in slots; 0: this engine is not cut into stages."""
    vocab_size: int = 0
    """Token ids are below this; 0: token ids are not used (a replay's prompts have lengths alone)."""

    @property
    def part_shape(self) -> tuple[int, int, int, int]:
        """Shape of one layer's part: `[k/v, token, kv_head, head_dim]`."""
        return (2, self.block_tokens, self.kv_heads, self.head_dim)

    @property
    def part_bytes(self) -> int:
        """Bytes of one layer's part."""
        return 2 * self.block_tokens * self.kv_heads * self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: every layer's part."""
        return self.layers * self.part_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: a block rounded up to whole 4 KiB pages, as O_DIRECT and DMA want it."""
        return div_ceil(self.block_bytes, PAGE_BYTES) * PAGE_BYTES

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens, the last one perhaps partial."""
        return div_ceil(tokens, self.block_tokens)

    def has_tokens(self, tokens: bytes) -> bool:
        """Are these (int32 bytes) ids of the model's tokens?"""
        if len(tokens) % 4 or not self.vocab_size:
            return len(tokens) % 4 == 0
        # Unsigned, a negative one is larger than any of them.
        return int(np.frombuffer(tokens, "<u4").max(initial=0)) < self.vocab_size

    def has_token(self, token: int) -> bool:
        """Is this an id of the model's tokens?"""
        return not self.vocab_size or 0 <= token < self.vocab_size

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything that must agree before two nodes exchange block bytes."""
        text = f"v1 {self.layers} 2 {self.block_tokens} {self.kv_heads} {self.head_dim} {self.dtype}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]
