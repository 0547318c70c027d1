"""What an operator may ask of a running node, from the node's own machine. PURE: `operate` and `runtime.asking` carry them."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from mooncake_zmq.core.roles import Role

MAX_ASK_BYTES = 64 << 10


class AskError(Exception):
    """What was asked makes no sense; in one line."""


class SetCopies(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Conductor: have `copies` hosts hold the prefix whose last block has this key (hexadecimal)."""

    key: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    copies: Annotated[int, Meta(ge=1, le=1024)]


class SetRole(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Conductor: have `node` become a `role`."""

    node: Annotated[str, Meta(min_length=1, max_length=64)]
    role: Role


Ask = SetCopies | SetRole
_decoder: msgspec.json.Decoder[Ask] = msgspec.json.Decoder(Ask)


def encode(ask: Ask) -> bytes:
    """As JSON."""
    return msgspec.json.encode(ask)


def decode(content: bytes) -> Ask:
    """Raises AskError."""
    if len(content) > MAX_ASK_BYTES:
        raise AskError(f"more than {MAX_ASK_BYTES} bytes")
    try:
        return _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AskError(str(error).replace("`", "")) from None


Answer = dict[str, Any]
"""JSON-able; with a key "error" where the node could not do it."""
