"""Encoder and decoders of flat MessagePack records; the caller bounds the frame's length. PURE."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

KindT = TypeVar("KindT")

_NOT_OURS = (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError)


class NotAMessage(Exception):
    """Bytes from a peer that are not a valid message."""


def decoder(kind: type[KindT]) -> Callable[[bytes | memoryview], KindT]:
    """Return a decoder of messages of one kind; it raises NotAMessage, and nothing else, on any other bytes."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(raw: bytes | memoryview) -> KindT:
        try:
            return decode(raw)
        except _NOT_OURS as error:
            raise NotAMessage(str(error)) from None

    return read


encode = msgspec.msgpack.encode
