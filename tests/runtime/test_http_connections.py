"""Limits of the connections on which vLLMs are asked; `tests/bench/test_bench_client.py` has the others."""

import asyncio
import ssl

import pytest

from mooncake_zmq.runtime.http_connections import Broken, Connections, Target


class Nothing:
    """A receiver to which nothing comes."""

    def answered(self, at: float, status: int, headers: dict[bytes, bytes]) -> None:
        raise AssertionError(status)

    def body(self, at: float, piece: bytes) -> None:
        raise AssertionError(piece)

    def again(self) -> None:
        raise AssertionError("again")


def test_a_connection_that_is_not_established_in_time_is_broken() -> None:
    async def ask() -> None:
        ends = asyncio.Event()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await ends.wait()  # and shake no hands
            writer.close()

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
            target = Target.of(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            connections = Connections(target, ssl.create_default_context(), connect_s=0.05)
            try:
                with pytest.raises(Broken, match="none in time"):
                    await connections.call(b"POST", "/", {}, b"", Nothing())
            finally:
                ends.set()

    asyncio.run(asyncio.wait_for(ask(), 20.0))
