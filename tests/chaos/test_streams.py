"""Server-sent events as they arrive: in pieces, with any character in their text, and cut off."""

import asyncio
import json
from collections.abc import AsyncIterator

from mooncake_zmq.chaos.streams import _lines


def lines(pieces: list[bytes]) -> list[bytes]:
    async def arriving() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def read() -> list[bytes]:
        return [line async for line in _lines(arriving())]

    return asyncio.run(read())


def test_a_line_ends_at_a_newline_only_and_what_was_cut_off_is_none() -> None:
    event = b"data: " + json.dumps({"text": "a\u0085b\u2028c"}, ensure_ascii=False).encode()
    whole = event + b"\n\n" + event + b"\n"
    assert lines([whole]) == [event, b"", event]
    assert lines([bytes([byte]) for byte in whole]) == [event, b"", event]
    assert lines([whole, event[:20]]) == [event, b"", event]
