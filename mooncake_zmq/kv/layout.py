"""The shape of a KV block: where each layer's part lies in a slot, whose KV it may be, and the fingerprint two nodes must
share."""

import hashlib
import math
from dataclasses import dataclass, replace

import numpy as np

from mooncake_zmq.kv.codec import CODECS, CODES_VERSION, EXACT, Codec

PAGE_BYTES = 4096
FINGERPRINT_CHARS = 16


def div_ceil(a: int, b: int) -> int:
    """Smallest integer not below a / b."""
    return -(-a // b)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """`block_tokens` tokens' KV of all layers as `[layer, k/v, token, kv_head, head_dim]`, or with a codec as `[layer, token,
    token_bytes]`, contiguous.

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
    codec: str = EXACT
    """The name of the codec of all blocks, whose `dtype` is then uint8."""
    has_offsets: bool = False
    """Whether the model has biases, so that coded KV is without its offsets (`engine.offsets`)."""
    vocab_size: int = 0
    """Token ids are below this; 0: token ids are not used (a replay's prompts have lengths alone)."""

    def coded(self, codec: str) -> "BlockLayout":
        """Return the layout of the same KV in another codec, or as it is."""
        return self if codec == EXACT else replace(self, codec=codec, dtype="uint8", itemsize=1)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of one layer's part: `[k/v, token, kv_head, head_dim]`, or `[token, token_bytes]`."""
        codec = self.block_codec
        if codec is None:
            return (2, self.block_tokens, self.kv_heads, self.head_dim)
        return (self.block_tokens, codec.token_bytes(self.kv_heads, self.head_dim))

    @property
    def token_axis(self) -> int:
        """The axis of a part along which its tokens lie."""
        return 1 if self.codec == EXACT else 0

    @property
    def block_codec(self) -> Codec | None:
        """The codec of blocks; None: they hold KV as it is."""
        return None if self.codec == EXACT else CODECS[self.codec]

    @property
    def part_bytes(self) -> int:
        """Bytes of one layer's part."""
        return math.prod(self.part_shape) * self.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's KV in a block."""
        return self.block_bytes // self.block_tokens

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
        """Digest of everything that must agree before two nodes exchange block bytes: hexadecimal, after the codec's name if
        there is one."""
        text = f"v1 {self.layers} 2 {self.block_tokens} {self.kv_heads} {self.head_dim} {self.dtype}"
        if self.codec == EXACT:
            return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_CHARS]
        text = f"{text} {self.codec} {CODES_VERSION}"
        if self.has_offsets:
            text += " without offsets, divided" if CODECS[self.codec].rotates_keys else " without offsets"
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f"{self.codec}-{digest}"[:FINGERPRINT_CHARS]
