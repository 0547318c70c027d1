"""Codecs of KV: in how many bits blocks hold the keys and values of a token, and how many bytes that makes. PURE.

Every codec treats each key and each value of one head by itself, with a scale of its own, so what a token's KV becomes does not
depend on the tokens beside it, on blocks or on chunks. `engine.codecs` has the arithmetic.

A key or value of `head_dim` numbers is `head_dim * bits / 8` bytes of codes and a scale in bfloat16. With 8 bits a code is
`round(x / scale) + 128`, the scale being the largest magnitude / 127. With 4 bits a code stands for one of 16 levels, of which
the outermost are the largest magnitude, 7.5 times the scale.

Levels stand closer near zero, where most numbers of a rotated head are: they are about normal. Of normal numbers, 64 with a
scale, the mean square error is .80 of that of levels at equal distances; the best levels and nearest ones (Lloyd-Max) make it
.78. These lie on a cubic, and their codes are found by a parabola, which is some products in place of a table.
"""

from dataclasses import dataclass
from typing import Final

CODES_VERSION: Final = 2
"""Raised when the bytes of a codec change."""
ZEROS = {8: 128.0, 4: 7.5}
"""The code that stands for zero, by bits."""
REACHES = {8: 127.0, 4: 7.5}
"""The largest magnitude / scale, by bits."""
CUBIC: Final = 3 / 512
LINEAR: Final = 1 - CUBIC * 7.5**2
"""A level / scale of 4 bits is `k * (LINEAR + CUBIC * k * k)`, `k` being the code - 7.5: an exact number, also in float32."""
STEEP, BENT = 1.52, 0.072
"""The code of 4 bits of y = x / scale is `floor(y * (STEEP - BENT * abs(y)) + 8)`: the nearest level's, except where two are
about as near."""
SCALE_BYTES: Final = 2
ROTATED_TOGETHER: Final = 64
"""The most numbers that one rotation mixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """One way to write KV in fewer bits."""

    name: str
    key_bits: int
    value_bits: int
    rotates_keys: bool = False
    """Whether keys are rotated (by a Hadamard matrix) before they are rounded, which spreads outliers over all channels."""
    rotates_values: bool = False
    rounds_when_stored: bool
    """Whether an engine rounds KV as soon as it has computed it. All attention is then over KV that blocks hold exactly, and an
    answer from the pool is the one without it. Else KV is rounded when it leaves the sequence that computed it."""

    @property
    def is_alike(self) -> bool:
        """Whether keys and values are coded in the same way."""
        return (self.key_bits, self.rotates_keys) == (self.value_bits, self.rotates_values)

    def head_bytes(self, head_dim: int) -> int:
        """Return the bytes of a key and a value of one head."""
        return head_dim * (self.key_bits + self.value_bits) // 8 + 2 * SCALE_BYTES

    def token_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Return the bytes of one token in one layer."""
        return kv_heads * self.head_bytes(head_dim)

    def bits_a_value(self, head_dim: int) -> float:
        """Return the bits of a key's or value's number, with its part of the scale."""
        return 8 * self.head_bytes(head_dim) / (2 * head_dim)

    def refusal(self, head_dim: int) -> str:
        """Return why the codec cannot be used with heads of this size; empty: it can."""
        return "" if head_dim % 2 == 0 else f"kv_codec {self.name!r} needs an even head_dim, and the model's is {head_dim}"


EXACT: Final = "exact"
"""The name that stands for no codec."""
CODECS: Final = {
    codec.name: codec
    for codec in (
        Codec(name="int8", key_bits=8, value_bits=8, rounds_when_stored=True),
        Codec(name="k8v4", key_bits=8, value_bits=4, rotates_values=True, rounds_when_stored=True),
        Codec(name="int4", key_bits=4, value_bits=4, rotates_keys=True, rotates_values=True, rounds_when_stored=False),
    )
}


def rotated_together(head_dim: int) -> int:
    """Return how many numbers of a head one rotation mixes: the largest power of two that divides it, at most
    `ROTATED_TOGETHER`."""
    return min(head_dim & -head_dim, ROTATED_TOGETHER)


def bytes_in_blocks(codec: str, float32_bytes: int, head_dim: int = 64) -> int:
    """Return the bytes in blocks of KV that takes so many in float32; `codec`: a name."""
    return float32_bytes if codec == EXACT else round(float32_bytes * CODECS[codec].bits_a_value(head_dim) / 32)
