"""Requests that an operator may send to a running node on the same machine. PURE: `operate` and `runtime.asking` carry them."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from mooncake_zmq.core.roles import Role

MAX_ASK_BYTES = 64 << 10


class AskError(Exception):
    """An invalid request; the message is one line."""


class SetCopies(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Request to a conductor: have `copies` hosts hold the prefix whose last block has this key (hexadecimal)."""

    key: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    copies: Annotated[int, Meta(ge=1, le=1024)]


class SetRole(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Request to a conductor: change the role of `node` to `role`."""

    node: Annotated[str, Meta(min_length=1, max_length=64)]
    role: Role


Ask = SetCopies | SetRole
_decoder: msgspec.json.Decoder[Ask] = msgspec.json.Decoder(Ask)


def encode(ask: Ask) -> bytes:
    """Return a request as JSON."""
    return msgspec.json.encode(ask)


def decode(content: bytes) -> Ask:
    """Return the request in `content`. Raises AskError."""
    if len(content) > MAX_ASK_BYTES:
        raise AskError(f"more than {MAX_ASK_BYTES} bytes")
    try:
        return _decoder.decode(content)
    except msgspec.ValidationError as error:
        text = str(error).replace("`", "")
        raise AskError("a key is 32 hexadecimal digits, as dump prints them" if text.endswith("$.key") else text) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AskError(str(error).replace("`", "")) from None


Answer = dict[str, Any]
"""A JSON-able answer; with a key "error" if the node could not do it."""
