"""Flat MessagePack records in frames whose length somebody else bounds: `encode`, and what reads them. PURE."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

KindT = TypeVar("KindT")

_NOT_OURS = (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError)


class NotAMessage(Exception):
    """Bytes that are no message of ours: the peer's fault."""


def decoder(kind: type[KindT]) -> Callable[[bytes | memoryview], KindT]:
    """What reads messages of a kind; it raises NotAMessage, and nothing else, on any other bytes."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(raw: bytes | memoryview) -> KindT:
        try:
            return decode(raw)
        except _NOT_OURS as error:
            raise NotAMessage(str(error)) from None

    return read


encode = msgspec.msgpack.encode
