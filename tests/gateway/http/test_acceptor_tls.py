"""TLS at the acceptor: who speaks something else, or never ends to greet, has no more room and time than in clear."""

import asyncio
import ssl
from random import Random

import certificates
import httpx
import pytest
from scripted_actor import ScriptedActor
from test_acceptor import LONG_ANSWERS, ask_for_much_and_read_nothing, until_closed

from mooncake_zmq.gateway.http import acceptor as acceptor_module
from mooncake_zmq.gateway.http.tls import Tls, trusting
from mooncake_zmq.gateway.settings import ConnectionSettings

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return certificates.make(tmp_path_factory.mktemp("tls"))


def behind(files, **options):
    tls = Tls(files)
    actor = ScriptedActor(tls=lambda: tls.context, **options)
    return actor, tls


def speaking(files, port):
    context = trusting(files.certificate)
    return asyncio.open_connection("127.0.0.1", port, ssl=context)


async def healthy(files, port):
    reader, writer = await speaking(files, port)
    writer.write(GET)
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)
    writer.close()
    return b" 200 " in answer


def hello_of(files):
    """The first flight of a client."""
    outgoing = ssl.MemoryBIO()
    client = trusting(files.certificate).wrap_bio(ssl.MemoryBIO(), outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def test_answers_and_streams_come_over_tls(files):
    actor, _ = behind(files)

    async def client(port):
        url = f"https://localhost:{port}"
        async with httpx.AsyncClient(base_url=url, verify=trusting(files.certificate)) as http:
            assert (await http.get("/health")).status_code == 200
            body = {"model": "toy", "prompt": "hello", "stream": True}
            streamed = await http.post("/v1/completions", json=body)
            assert streamed.text.endswith("data: [DONE]\n\n")
            assert f"{url}/v1" in (await http.get("/")).text

    actor.serve(client)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_both_versions_are_spoken_and_none_older(files, version):
    actor, _ = behind(files)

    async def client(port):
        context = trusting(files.certificate)
        context.maximum_version = version
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        assert writer.get_extra_info("ssl_object").version() == version.name.replace("_", ".")
        writer.close()

    actor.serve(client)
    assert actor.tls().minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("said", [GET, b"\x16\x03\x01\xff\xff" + b"x" * 70_000, bytes(64)])
def test_who_speaks_no_tls_is_cut_and_the_others_are_served(files, said):
    actor, _ = behind(files)

    async def client(port):
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            assert b"HTTP" not in await until_closed(reader)
            writer.close()
        await actor.until(lambda: actor.edge.counts.get("http_handshakes_failed") == 5)
        assert await healthy(files, port)

    actor.serve(client)


def test_any_greeting_ends_the_connection_at_most(files, caplog):
    actor, _ = behind(files)
    hello, random = hello_of(files), Random(7)

    def damaged():
        said = bytearray(hello)
        for _ in range(random.choice((1, 2, 30))):
            said[random.randrange(len(said))] = random.randrange(256)
        stop = random.choice((len(said), random.randrange(len(said))))
        return bytes(said[:stop]) + random.randbytes(random.choice((0, 5, 9000)))

    async def client(port):
        for _ in range(150):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(damaged())
            writer.write_eof()
            await until_closed(reader)
            writer.close()
        assert await healthy(files, port)

    actor.serve(client)
    assert actor.edge.counts["http_handshakes_failed"] == 150
    assert [record for record in caplog.records if record.levelname not in ("INFO", "DEBUG")] == []


@pytest.mark.parametrize("part", [0, 1, 100, None])
def test_a_greeting_that_never_ends_has_the_time_of_headers_that_never_end(files, part):
    actor, _ = behind(files, connections=ConnectionSettings(head_timeout_s=0.08))
    hello = hello_of(files)

    async def client(port):
        pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in pairs:
            writer.write(hello[:part])
        for reader, _ in pairs:
            await until_closed(reader)
        await actor.until(lambda: not actor.acceptor.connections)
        assert await healthy(files, port)

    actor.serve(client)
    assert actor.edge.counts["http_handshakes_failed"] == 20


def test_after_the_greeting_headers_have_their_time(files):
    actor, _ = behind(files, connections=ConnectionSettings(head_timeout_s=0.08))

    async def client(port):
        reader, writer = await speaking(files, port)
        writer.write(b"GET /")
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 408")
        writer.close()

    actor.serve(client)


@pytest.mark.parametrize("said", [b"", GET])
def test_an_idle_client_that_does_not_say_goodbye_is_not_waited_for(files, said):
    actor, _ = behind(files, connections=ConnectionSettings(head_timeout_s=0.1, idle_timeout_s=0.1))

    async def client(port):
        reader, writer = await speaking(files, port)
        writer.write(said)
        if said:
            await asyncio.wait_for(reader.readuntil(b'"open_requests":0}'), 5)
        writer.transport.pause_reading()
        await actor.until(lambda: not actor.acceptor.connections)  # `send_timeout_s` is a minute
        writer.transport.resume_reading()
        assert await asyncio.wait_for(reader.read(), 5) == b""  # told by TLS, and not cut
        kept = await speaking(files, port)
        kept[1].transport.pause_reading()
        await actor.until(lambda: len(actor.acceptor.connections) == 1)

    actor.serve(client)


def test_an_idle_client_that_reads_nothing_is_not_waited_for(files):
    actor, _ = behind(files, connections=ConnectionSettings(idle_timeout_s=0.05))

    async def client(port):
        reader, writer = await speaking(files, port)
        writer.write(GET)
        await asyncio.wait_for(reader.readuntil(b'"open_requests":0}'), 5)
        writer.transport.pause_reading()
        await actor.until(lambda: not actor.acceptor.connections)

    actor.serve(client)


@pytest.mark.parametrize(
    ("said", "status"), [(GET[:-2] + b"connection: close\r\n\r\n", b" 200 "), (b"no call\r\n\r\n", b" 400 ")]
)
def test_a_client_whose_last_answer_was_sent_is_not_waited_for(files, said, status):
    actor, _ = behind(files, connections=ConnectionSettings(idle_timeout_s=60.0))

    async def client(port):
        reader, writer = await speaking(files, port)
        writer.transport.pause_reading()
        writer.write(said)
        await actor.until(lambda: not actor.acceptor.connections)  # `send_timeout_s` is a minute
        writer.transport.resume_reading()
        assert status in await asyncio.wait_for(reader.read(), 5)

    actor.serve(client)


def test_half_greetings_take_no_room_from_who_speaks(files, monkeypatch):
    monkeypatch.setattr(acceptor_module, "MAX_HANDSHAKES", 8)
    actor, _ = behind(files, connections=ConnectionSettings(head_timeout_s=60.0, max_connections=12, max_per_address=12))

    async def client(port):
        stalled = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        await actor.until(lambda: actor.edge.counts.get("http_connections_displaced", 0) >= 22)
        assert len(actor.acceptor.connections) <= 12
        for _ in range(20):
            assert await healthy(files, port)
        for _, writer in stalled:
            writer.close()

    actor.serve(client)


def test_the_crowded_address_makes_room_and_not_the_one_beside_it(files, monkeypatch):
    monkeypatch.setattr(acceptor_module, "MAX_HANDSHAKES", 4)
    actor, _ = behind(files, connections=ConnectionSettings(head_timeout_s=60.0))

    async def client(port):
        first, _ = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        await actor.until(lambda: [reader.at_eof() for reader, _ in crowd] == [True] * 9 + [False] * 3)
        assert not first.at_eof()
        assert actor.edge.counts["http_connections_displaced"] == 9

    actor.serve(client)


def test_the_caps_hold_for_who_has_greeted(files):
    actor, _ = behind(files, connections=ConnectionSettings(max_per_address=3, max_connections=3, idle_timeout_s=60.0))

    async def client(port):
        pairs = []
        for _ in range(6):
            pairs.append(await speaking(files, port))
            await actor.until(lambda: not actor.acceptor._arriving)
            actor.acceptor._watch()
        assert len(actor.acceptor.connections) == 3
        assert [await until_closed(reader) for reader, _ in pairs[:3]] == [b""] * 3
        for _, writer in pairs:
            writer.close()

    actor.serve(client)


def test_a_whole_answer_that_nobody_reads_is_given_up(files):
    actor, _ = behind(files, **LONG_ANSWERS)

    async def client(port):
        _, writer = await speaking(files, port)
        await ask_for_much_and_read_nothing(actor, writer)

    actor.serve(client)


def test_a_new_certificate_is_shown_to_who_comes_then_and_nobody_is_cut(files, tmp_path):
    mine = certificates.make(tmp_path)
    actor, tls = behind(mine)

    async def client(port):
        reader, writer = await speaking(mine, port)
        other = certificates.make(tmp_path, "other")
        mine.key.write_bytes(other.key.read_bytes())
        tls.refresh()  # the key alone fits to nothing yet
        assert await healthy(mine, port)
        mine.certificate.write_bytes(other.certificate.read_bytes())
        tls.refresh()
        assert await healthy(other, port)
        writer.write(GET)
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)
        writer.close()

    actor.serve(client)
