"""Messages on a stream of a store, beside the values' bytes. PURE; the order is in `store/stream.py`."""

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from mooncake_zmq.store.protocol import MAX_KEYS, Id, Ints, Keys, OfMemory, Seconds, Sizes, Stranger, U64s, decoder

EAGER_BYTES = 256 << 10
"""A put of up to so many bytes is sent without waiting to learn which of its values are wanted."""
MAX_PROMOTED_BYTES = 64 << 20
MAX_ATTACH_BYTES = 256


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Encodes as [tag, field, ...]."""


class Attach(_Message, frozen=True, tag=1):
    """The first message: whose stream it is. Answered by `Attached`, or by `Stranger` where the token is not of this client's
    last Welcome. The token is that of the ticket by which the stream was let in, see `transfer/tickets.py`."""

    client: Annotated[bytes, Meta(min_length=16, max_length=16)]
    token: Annotated[bytes, Meta(max_length=64)]


class Attached(_Message, frozen=True, tag=2):
    """Requests may follow."""


class Get(_Message, frozen=True, tag=3):
    """Send these values, as far as they are here and not larger than `caps`, if any are given."""

    keys: Keys
    caps: Sizes
    ttl_s: Seconds


class Values(_Message, frozen=True, tag=4):
    """The answer for the next keys, at least one: a size, 0 where nothing is here, and a checksum. The bytes of each value that
    its cap allows follow, in order. All keys at once, but where so much has to be read from disk that it comes in parts."""

    sizes: Sizes
    checksums: U64s


class Put(_Message, frozen=True, tag=5):
    """Store these values. `pins`: see `objects.Pin`. `again`: after a stream that broke, whose puts of these keys are over.

    Without `checksums`, what is granted is answered first. With them, the bytes of all values follow, EAGER_BYTES at most.
    """

    keys: Keys
    sizes: Sizes
    pins: Annotated[int, Meta(ge=0, le=7)]
    ttl_s: Seconds
    checksums: U64s
    again: bool


class Checksums(_Message, frozen=True, tag=6):
    """Checksums of the values just sent."""

    checksums: U64s


class Ended(_Message, frozen=True, tag=7):
    """One code a key; none for a `Promote`, which is done."""

    codes: Ints


class Recheck(_Message, frozen=True, tag=8):
    """Not answered. These values did not verify where they arrived: does the store hold them right?"""

    keys: Annotated[list[str], Meta(max_length=MAX_KEYS)]


class Promote(_Message, frozen=True, tag=19):
    """Bring these values from disk into memory, as far as there is room. Answered by `Ended`. Before, these leases end: they
    take up room."""

    keys: Keys
    leases: Annotated[list[Id], Meta(max_length=1)]


Request = Get | Put | Recheck | Promote
decode_attach = decoder(Attach)
decode_attached: Callable[[memoryview], Attached | Stranger] = decoder(Attached | Stranger)  # type: ignore[arg-type]
decode_request: Callable[[memoryview], Request | OfMemory] = decoder(Request | OfMemory)  # type: ignore[arg-type]
decode_values = decoder(Values)
decode_checksums = decoder(Checksums)
decode_ended = decoder(Ended)


def promoted_bytes(memory_bytes: int) -> int:
    """Bytes that are read from disk at a time, beyond one value: all of them must be in memory, which others lose to them."""
    return min(MAX_PROMOTED_BYTES, memory_bytes // 4)
