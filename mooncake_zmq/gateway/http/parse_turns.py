"""Bounds the loop's time for what clients send, so that many of them do not make a stream wait."""

import asyncio
from collections import deque
from collections.abc import Callable

from mooncake_zmq.gateway.http.connection import Connection

PARSE_S = 0.01
"""The loop's time for parsing in one turn, all connections together; the rest waits for the next turn."""


class ParseTurns:
    """Has connections parse what they received, in order, within PARSE_S of each turn of the loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: deque[tuple[Connection, bytes]] = deque()
        """Received and not parsed yet: at most once for each connection, which is not read meanwhile."""
        self._is_begun = False
        self._ends = 0.0

    def add(self, connection: Connection, data: bytes) -> None:
        """Have `connection` parse `data` now, if this turn has time left and none waits, else in a later turn."""
        if not self._is_begun:
            self._begin()
        if self._waiting or self._clock() >= self._ends:
            connection.transport.pause_reading()
            self._waiting.append((connection, data))
        else:
            connection.take(data)

    def _begin(self) -> None:
        self._is_begun = True
        self._ends = self._clock() + PARSE_S
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Parse what was left over, before anything new."""
        self._is_begun = False
        if self._waiting:
            self._begin()
        while self._waiting and self._clock() < self._ends:
            connection, data = self._waiting.popleft()
            if not connection.transport.is_closing():
                connection.take(data)
                if not connection.flow.read_paused:
                    connection.transport.resume_reading()
