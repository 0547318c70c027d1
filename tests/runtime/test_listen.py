"""The gateway's listening socket."""

import asyncio
import errno
import socket

import pytest

from mooncake_zmq.runtime.listening import PortInUse, begin, claim, is_deserted, listen


def test_connections_send_small_writes_at_once():
    """Nagle's algorithm would hold the first token back until the client acknowledges the headers: 40 ms."""

    async def no_delay() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def on_client(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listen("127.0.0.1", 0) as listener:
            server = await asyncio.start_server(on_client, sock=listener)
            _, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
            found = await accepted
            writer.close()
            server.close()
            return found

    assert asyncio.run(no_delay()) != 0


def test_a_taken_port_is_told():
    with listen("127.0.0.1", 0) as first, pytest.raises(PortInUse):
        listen("127.0.0.1", first.getsockname()[1])


def test_an_address_is_shared_only_by_those_who_all_say_so():
    with listen("127.0.0.1", 0, share=True) as first:
        port = first.getsockname()[1]
        listen("127.0.0.1", port, share=True).close()
        with pytest.raises(PortInUse):
            listen("127.0.0.1", port)
    with listen("127.0.0.1", 0) as alone, pytest.raises(PortInUse):
        listen("127.0.0.1", alone.getsockname()[1], share=True)


def test_a_claimed_address_that_another_took_meanwhile_is_told():
    claimed = claim("127.0.0.1", 0, share=True)
    with listen("127.0.0.1", claimed.getsockname()[1]), pytest.raises(PortInUse, match="cannot listen on 127.0.0.1:"):
        begin(claimed)


def test_without_a_descriptor_left_it_is_told_too(monkeypatch):
    def no_files(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", no_files)
    with pytest.raises(PortInUse, match="Too many open files"):
        listen("127.0.0.1", 0, share=True)
    assert not is_deserted("127.0.0.1", 1), "as far as is known"


def test_an_address_is_deserted_where_nobody_listens():
    with claim("127.0.0.1", 0, share=True) as claimed:
        port = claimed.getsockname()[1]
        assert is_deserted("127.0.0.1", port)
        with listen("127.0.0.1", port, share=True):
            assert not is_deserted("127.0.0.1", port)
            client = socket.create_connection(("127.0.0.1", port))
        assert is_deserted("127.0.0.1", port)
        client.close()
