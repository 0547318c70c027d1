"""A server with the API of vLLM, as far as routers need it, whose engine sleeps: it reads a request, waits, and streams tokens.

It takes text (/v1/chat/completions, /v1/completions) and token ids (/inference/v1/generate) and looks at no token, so that
its own time is small and equal for each router in front of it. Run as `python -m mooncake_zmq.bench.sleeping_vllm PORT...`; one
process serves all ports.
"""

import asyncio
import json
import re
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import uvloop

PREFILL_S = 0.05
"""Seconds from a request to its first token."""
TOKEN_S = 0.02
"""Seconds between two tokens."""
TOKEN = 300
"""The token of every answer; a word in most vocabularies."""
MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 64 << 20
TAIL_BYTES = 4096
"""The end of a body, in which the number of tokens is looked for first."""
MAX_ASKED = re.compile(rb'"max(?:_completion)?_tokens":\s*(\d+)')
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
MODELS = {"object": "list", "data": [{"id": "sleeping", "object": "model", "max_model_len": 1 << 24}]}


def _piece(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


def _event(generate: bool, chat: bool, last: bool) -> bytes:
    """Return one event with one token; `generate`: of /inference/v1/generate."""
    finish = "length" if last else None
    if generate:
        choice = {"index": 0, "token_ids": [TOKEN], "finish_reason": finish, "logprobs": None}
        return b"data: %b\n\n" % json.dumps({"request_id": "r", "choices": [choice]}).encode()
    said = {"delta": {"content": " on"}} if chat else {"text": " on"}
    choice = {"index": 0, "finish_reason": finish, **said}
    return b"data: %b\n\n" % json.dumps({"id": "r", "object": "chunk", "model": "sleeping", "choices": [choice]}).encode()


PIECES = {
    path: {last: _piece(_event("generate" in path, "chat" in path, last)) for last in (False, True)}
    for path in ("/inference/v1/generate", "/v1/chat/completions", "/v1/completions")
}
END = _piece(DONE) + b"0\r\n\r\n"


def asked_tokens(body: bytes) -> int:
    """Return the number of tokens that a request asks for, at least one."""
    found = MAX_ASKED.search(body, max(0, len(body) - TAIL_BYTES)) or MAX_ASKED.search(body)
    return max(1, int(found[1])) if found else 16


@dataclass(slots=True)
class _Connection(asyncio.Protocol):
    """One connection: calls one after the other, each answered before the next is read."""

    transport: asyncio.Transport | None = None
    head: bytes = b""
    body: list[bytes] = field(default_factory=list)
    missing: int = 0
    path: str = ""
    waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio: a client that hangs up ends its request."""
        if self.waiting is not None:
            self.waiting.cancel()

    def data_received(self, data: bytes) -> None:
        if self.missing:
            return self._more(data)
        self.head += data
        head, ended, rest = self.head.partition(b"\r\n\r\n")
        if not ended:
            if len(self.head) > MAX_HEAD_BYTES:
                self._hang_up()
            return None
        self.head = b""
        first, *lines = head.split(b"\r\n")
        method, path, *_ = [*first.decode("latin-1").split(" "), "", ""]
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        length = headers.get(b"content-length", b"0")
        self.missing = int(length) if length.isdigit() else MAX_BODY_BYTES + 1
        self.path, self.body = path if method == "POST" else "", []
        if self.missing > MAX_BODY_BYTES:
            return self._hang_up()
        if headers.get(b"expect", b"").lower() == b"100-continue":
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.missing:
            return self._more(rest)
        return self._answer(path)

    def _more(self, data: bytes) -> None:
        self.body.append(data)
        self.missing -= len(data)
        if self.missing == 0:
            self._answer(self.path)
        elif self.missing < 0:
            self._hang_up()

    def _answer(self, path: str) -> None:
        if (pieces := PIECES.get(self.path)) is not None:
            tokens = asked_tokens(b"".join(self.body))
            return self._later(PREFILL_S, partial(self._next, pieces, tokens, EVENTS))
        content = json.dumps(MODELS).encode() if path == "/v1/models" else b"{}"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
        return self._write(head + content)

    def _next(self, pieces: dict[bool, bytes], left: int, before: bytes) -> None:
        last = left == 1
        self._write(before + pieces[last] + (END if last else b""))
        if not last:
            self._later(TOKEN_S, partial(self._next, pieces, left - 1, b""))

    def _later(self, delay_s: float, call: "partial[None]") -> None:
        self.waiting = asyncio.get_running_loop().call_later(delay_s, call)

    def _write(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)

    def _hang_up(self) -> None:
        assert self.transport is not None
        self.transport.abort()


async def _serve(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(_Connection, "127.0.0.1", port) for port in ports]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(_serve([int(port) for port in sys.argv[1:]]))
