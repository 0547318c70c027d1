"""Field types that messages share, with their limits, and the two base classes of records on the wire."""

from typing import Annotated, Final

from msgspec import Meta, Struct

PROTOCOL_VERSION = 23
OLDEST_PROTOCOL = 22
"""The oldest protocol that this release speaks: the one before its own, unless a change to it was not additive."""
MAX_MESSAGE_BYTES = 8 << 20
MAX_BODIES = 64
"""Messages that one envelope may hold."""
MAX_BLOCKS = 65_536
"""Blocks one message may name; longer lists are split by the sender."""
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Tenant = Annotated[str, Meta(max_length=64)]
"""Name of an API key, whose shares of the pools a request's blocks are charged to; empty: none."""
MAX_TEXT = 512
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
MAX_COUNT = 1 << 48
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Counts = Annotated[tuple[Count, ...], Meta(max_length=MAX_BLOCKS)]
Checksum = Annotated[int, Meta(ge=0)]
MAX_SECONDS = 1e7
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Key = Annotated[bytes, Meta(min_length=16, max_length=16)]
Keys = Annotated[tuple[Key, ...], Meta(max_length=MAX_BLOCKS)]
Token = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
MAX_RUN = 4096
"""Tokens of one request that one message may hold."""
MAX_MODEL_NAME = 256
ModelName = Annotated[str, Meta(max_length=MAX_MODEL_NAME)]
"""Characters of the name of a model or an adapter."""
RunOfTokens = Annotated[tuple[Token, ...], Meta(max_length=MAX_RUN)]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
MAX_LOGPROBS = 20
"""Number of likeliest tokens at one position that may be requested."""
Likeliest = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
MAX_SCORED = 1024
"""Tokens of a prompt whose logprobs one message may hold: a third of a MiB at most."""
MAX_WEIGHT_VERSIONS = 64
MAX_VERSION_CHARACTERS = 128
WeightVersion = Annotated[str, Meta(max_length=MAX_VERSION_CHARACTERS)]
LEAST_LOGPROB = -1e30
MAX_CONSTRAINT_BYTES = 96 << 10
Logprob = Annotated[float, Meta(ge=LEAST_LOGPROB, le=0)]
TokenLogprob = tuple[Logprob, Annotated[tuple[tuple[Token, Logprob], ...], Meta(max_length=MAX_LOGPROBS)]]
"""A token's logarithmic probability as the model gave it, and the likeliest tokens with theirs, in order."""
Slo = Annotated[float, Meta(ge=0, le=1e7)] | None
"""A bound in seconds; None: the deployment's default; 0: no bound."""
MAX_PRIORITY: Final = 1000
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
"""Priority of a request: a larger number waits longer, as in vLLM."""
MAX_NODES = 4096
"""Nodes that one message may name."""
MAX_TOKENS = 1 << 20
Tokens = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
"""Token ids as little-endian int32 bytes."""


class ProtocolError(Exception):
    """Bytes from a peer that are not a valid message; the receiver drops and counts them."""


def clip(reason: str) -> str:
    """Return a reason cut to the limit of `Text`, as one that quotes an exception or a peer may be of any length."""
    return reason[:MAX_TEXT]


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A part of a message."""


class TaggedRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True, tag=True, gc=False):
    """Base of all messages: encodes as `[tag, field, ...]`."""


class SlotRef(Record, frozen=True):
    """One copy of a block for reading. Checksum 0: not committed yet, see `core.work.BlockLoad`."""

    node: Name
    incarnation: Count
    slot: Count
    generation: Count
    checksum: Checksum


Slots = Annotated[tuple[SlotRef, ...], Meta(max_length=MAX_BLOCKS)]
