"""One answer of a vLLM's HTTP server, handled as it arrives: nothing is queued, and no task runs between the socket and what
takes it."""

import asyncio
from collections.abc import Callable

from mooncake_zmq.runtime.http_connections import Broken, Connections
from mooncake_zmq.runtime.vllm_answers import Nonsense

OK = 200
MAX_REFUSAL_BYTES = 4096
HEADERS = {b"content-type": b"application/json", b"accept-encoding": b"identity"}


class Refusal(Exception):
    """Another status than 200; `reason` is the beginning of the body."""

    def __init__(self, status: int, reason: bytes) -> None:
        super().__init__(status)
        self.status, self.reason = status, reason


class Stream:
    """One call; see `http_connections.Receiver`. It ends with the last byte, or once `take` has returned that it has all."""

    def __init__(self, take: Callable[[bytes], bool], quiet_s: float) -> None:
        """`take`: takes a piece of the body; raises Nonsense. `quiet_s`: the longest time without a byte."""
        self._take, self._quiet_s = take, quiet_s
        self._status = 0
        self._refusal = b""
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._at = self._loop.time()

    async def post(self, connections: Connections, path: str, body: bytes) -> "asyncio.Task[None]":
        """Ask, and return at the end of the answer the task that receives what is left of its transfer. Raises Nonsense,
        Refusal and Broken; the connection is then closed, as it is where this is cancelled."""
        call = self._loop.create_task(connections.call(b"POST", path, HEADERS, body, self))
        call.add_done_callback(self._ended)
        try:
            while not self._over.done():
                left = self._at + self._quiet_s - self._loop.time()
                if left <= 0:
                    raise Broken(f"nothing comes for {self._quiet_s:g} s")
                await asyncio.wait((self._over,), timeout=left)
            self._over.result()
            if self._status != OK:
                raise Refusal(self._status, self._refusal)
        except BaseException:
            call.cancel()
            self._over.cancel()
            raise
        return call

    def answered(self, at: float, status: int, headers: dict[bytes, bytes]) -> None:
        self._at, self._status = self._loop.time(), status

    def body(self, at: float, piece: bytes) -> None:
        self._at = self._loop.time()
        if self._over.done():
            return
        if self._status != OK:
            self._refusal += piece[: MAX_REFUSAL_BYTES - len(self._refusal)]
            is_complete = len(self._refusal) == MAX_REFUSAL_BYTES
        else:
            try:
                is_complete = self._take(piece)
            except Nonsense as error:
                self._over.set_exception(error)
                return
        if is_complete:
            self._over.set_result(None)

    def again(self) -> None:
        """See `http_connections.Receiver`."""

    def _ended(self, call: "asyncio.Task[None]") -> None:
        error = None if call.cancelled() else call.exception()
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)
