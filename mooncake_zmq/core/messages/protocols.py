"""The protocol since which each message and field exists, and the form of a message in an older protocol.

A release speaks `PROTOCOL_VERSION` and all protocols from `OLDEST_PROTOCOL` on. A new protocol may add types of messages, and
fields with a default at the end of a record; the default must mean what a peer does that does not know the field. Both stand
in `SINCE`. Such messages are not sent to a peer of an older protocol, and others are sent without such fields.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

SINCE: Final[Mapping[str, int]] = {
    "AnswerRead": 23,
    "AnswerUnread": 23,
    "BlocksArrived": 23,
    "BlocksLeased.block_s": 23,
    "BlocksLeased.more": 23,
    "BlocksLent": 23,
    "ChatRendered": 23,
    "ChatUnrendered": 23,
    "DecodeLoad.borrows": 23,
    "DecodeLoad.lendable": 23,
    "DecodeLoad.own_tokens": 23,
    "DecodeTimes.borrowed_tokens": 23,
    "FillLoan": 23,
    "FirstToken.met": 23,
    "FirstToken.parts": 23,
    "FirstToken.recomputed": 23,
    "HandoffDone.exact_blocks": 23,
    "LeaseBlocks.tail_first": 23,
    "LendBlocks": 23,
    "LoanEnded": 23,
    "LoanFilled": 23,
    "ParsersReported": 23,
    "PlaceElsewhere": 23,
    "Placed.lenders": 23,
    "PrefillLoad.meets": 23,
    "ReadAnswer": 23,
    "RenderChat": 23,
    "ReserveDecode.lenders": 23,
    "ReturnBlocks": 23,
    "ShortenFetch": 23,
    "StartPrefill.embedding": 23,
    "StartPrefill.exact": 23,
    "StartPrefill.images": 23,
    "StartPrefill.lenders": 23,
    "TextsEmbedded": 23,
}
"""The protocol that added a type of message or a field ("Type.field"), for those that not every spoken protocol has."""


def speaks(protocol: int, message: type) -> bool:
    """Return whether a peer of this protocol knows a type of message."""
    return SINCE.get(message.__name__, 0) <= protocol


def has_field(protocol: int, name: str) -> bool:
    """Return whether a peer of this protocol knows a field ("Type.field")."""
    return SINCE.get(name, 0) <= protocol


FIELDS_SINCE: Final = max(since for name, since in SINCE.items() if "." in name)
"""The oldest protocol that has every field of the messages that it has."""


def without_newer_fields(value: object, protocol: int) -> object:
    """Return a value as it is encoded for a peer of an older protocol: structs as lists, without the fields that it lacks."""
    if isinstance(value, tuple):
        return [without_newer_fields(each, protocol) for each in value]
    if not isinstance(value, Struct):
        return value
    kind = type(value)
    names = [name for name in kind.__struct_fields__ if SINCE.get(f"{kind.__name__}.{name}", 0) <= protocol]
    fields = [without_newer_fields(getattr(value, name), protocol) for name in names]
    tag = kind.__struct_config__.tag
    return fields if tag is None else [tag, *fields]
