"""The protocol since which each message and field exists, and the form of a message in an older protocol.

A release speaks `PROTOCOL_VERSION` and all protocols from `OLDEST_PROTOCOL` on. A new protocol may add types of messages, and
fields with a default at the end of a record; the default must mean what a peer does that does not know the field. Both stand
in `SINCE`. Such messages are not sent to a peer of an older protocol, and others are sent without such fields.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

_SINCE_23 = (
    *("AnswerRead", "AnswerUnread", "BlocksArrived", "BlocksLeased.block_s", "BlocksLeased.more", "BlocksLent"),
    *("ChatRendered", "ChatUnrendered", "DecodeLoad.borrows", "DecodeLoad.lendable", "DecodeLoad.lends"),
    *("DecodeLoad.own_tokens", "DecodeTimes.borrowed_tokens", "FillLoan", "FirstToken.dropped", "FirstToken.met"),
    *("FirstToken.parts", "FirstToken.recomputed", "HandoffDone.exact_blocks", "LeaseBlocks.tail_first", "LendBlocks"),
    *("LoanEnded", "LoanFilled", "ParsersReported"),
    *("PlaceElsewhere", "Placed.lenders", "PrefillLoad.meets", "ReadAnswer", "RenderChat", "ReserveDecode.approximate"),
    *("ReserveDecode.kept_tokens", "ReserveDecode.lenders", "ReturnBlocks", "Schedule.kept_tokens", "ShortenFetch"),
    *("StartPrefill.embedding", "StartPrefill.eviction", "StartPrefill.exact"),
    *("StartPrefill.images", "StartPrefill.lenders", "TextsEmbedded", "TokensDecoded.approximate"),
)
SINCE: Final[Mapping[str, int]] = dict.fromkeys(_SINCE_23, 23)
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
