"""Fetch blocks of another process over a stream, as a pool or decode on another host does, and as many bytes over a bare
stream."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.kv.layout import BlockLayout
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.transfer.channel import RemoteRead
from mooncake_zmq.transfer.directory import Incarnation
from mooncake_zmq.transfer.network import RemoteReader
from mooncake_zmq.transfer.sockets import Sockets

TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Sink:
    """Take a block into memory of its own, and keep whether it arrived whole; see `channel.ReadSink`."""

    memory: memoryview
    failure: ReadFailure | None = None

    def buffer(self) -> memoryview | None:
        return self.memory

    def part(self, layer: int, payload: memoryview, checksum: int) -> None:
        """See `channel.ReadSink`."""

    def end(self, failure: ReadFailure | None) -> None:
        self.failure = failure


class BlockFetch:
    """Fetch `blocks` blocks, of one incarnation whose data server is at `endpoint`, into memory of its own."""

    def __init__(
        self,
        layout: BlockLayout,
        blocks: int,
        incarnation: Incarnation,
        endpoint: str,
        *,
        on_crash: Callable[[BaseException], None],
        sockets: Sockets | None = None,
    ) -> None:
        self.memory = memoryview(bytearray(blocks * layout.block_bytes))
        """Blocks lie one after the other."""
        self._layout = layout
        self._reader = RemoteReader(layout, on_crash=on_crash, sockets=sockets)
        self._reader.learn(incarnation, endpoint)

    def fetch_s(self, blocks: Sequence[SlotRef]) -> float:
        """Return the seconds until all blocks have arrived and were verified. Raises ValueError where one was not."""
        size = self._layout.block_bytes
        sinks = [_Sink(self.memory[start : start + size]) for start in range(0, len(self.memory), size)]
        layers = range(self._layout.layers)
        reads = [RemoteRead(block, layers, sink) for block, sink in zip(blocks, sinks, strict=True)]
        ended = threading.Event()
        began = time.perf_counter()
        self._reader.submit(reads, time.monotonic() + TIMEOUT_S, ended.set)
        ended.wait()
        took_s = time.perf_counter() - began
        if failures := [sink.failure for sink in sinks if sink.failure]:
            raise ValueError(f"{len(failures)} blocks did not come: {failures[0].name}")
        return took_s

    def close(self) -> None:
        """Stop the reader."""
        self._reader.close()


class BareStream:
    """The receiving end of `send_bare`."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))

    def fetch_s(self, memory: memoryview) -> float:
        """Return the seconds until `memory` is full. Raises ConnectionError if the sender closes before."""
        began = time.perf_counter()
        self._socket.send(b"!")
        left = memory
        while left:
            if not (count := self._socket.recv_into(left)):
                raise ConnectionError(f"the bare stream ended {len(left)} bytes early")
            left = left[count:]
        return time.perf_counter() - began

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def send_bare(listener: socket.socket, blocks: Sequence[memoryview]) -> None:
    """Send all blocks' bytes for each byte that one connection sends, until it closes."""
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1):
            for block in blocks:
                connection.sendall(block)
