"""The codes, pins and keys that clients and servers of the store agree on. PURE."""

from enum import IntEnum, IntFlag

MAX_KEY_BYTES = 1024


class Code(IntEnum):
    """The answer about one key. The numbers are those that clients of Mooncake's store expect."""

    OK = 0
    NO_ROOM = -200
    """Everything that could make room is leased, pinned hard or being written, or the client is at its limit."""
    INVALID = -600
    NOT_FOUND = -704
    EXISTS = -705
    """Stored or being written already: nothing is to be written."""
    EXPIRED = -707
    """The put or lease was over when this came."""
    TRANSFER_FAILED = -800
    """The bytes that arrived are not those that were sent."""


class Pin(IntFlag):
    """How an object may be evicted, and whether its put replaces an older value."""

    NONE = 0
    SOFT = 1
    HARD = 2
    UPSERT = 4
    PROMOTION = 8
    """Not a client's: the value comes from the log."""


def is_key(key: str) -> bool:
    """Keys have 1..MAX_KEY_BYTES bytes of UTF-8."""
    if key.isascii():
        return 0 < len(key) <= MAX_KEY_BYTES
    try:
        return len(key.encode()) <= MAX_KEY_BYTES
    except UnicodeEncodeError:
        return False
