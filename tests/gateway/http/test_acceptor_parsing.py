"""What is said on a connection: nothing that two programs may read differently, no more than there are bounds for, and of what
comes behind a call nothing is taken for another."""

import asyncio
import json

import pytest
from scripted_actor import ScriptedActor, finished, one_by_one, tokens

from mooncake_zmq.gateway.settings import ConnectionSettings

GET = b"GET /live HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
BODY = b'{"prompt":"a"}'
CHUNKED = b"transfer-encoding: chunked\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
SHORT = ConnectionSettings(max_head_bytes=2048)


async def said(port, *parts):
    """All that is answered to these, which do not come together, until the connection is closed; nothing if it is cut."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            if writer.is_closing() or reader.at_eof():
                break
            writer.write(part)
            await asyncio.sleep(0)
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def alive(port):
    return (await said(port, GET + b"connection: close\r\n\r\n")).endswith(b'{"status":"ok"}')


def served(client, script=None, **arguments):
    actor = ScriptedActor(*([script] if script else []), **arguments)

    async def and_alive(port):
        await client(port)
        assert await alive(port)

    actor.serve(and_alive)
    return actor


AMBIGUOUS = {
    "two lengths": POST + LENGTH + b"content-length: 3\r\n\r\n" + BODY,
    "a length twice": POST + LENGTH + LENGTH + b"\r\n" + BODY,
    "lengths in a list": POST + b"content-length: 14, 14\r\n\r\n" + BODY,
    "a signed length": POST + b"content-length: +14\r\n\r\n" + BODY,
    "a negative length": POST + b"content-length: -1\r\n\r\n" + BODY,
    "a length in hex": POST + b"content-length: 0xe\r\n\r\n" + BODY,
    "a length of two words": POST + b"content-length: 1 4\r\n\r\n" + BODY,
    "no length in one": POST + b"content-length:\r\n\r\n" + BODY,
    "a length past all words": POST + b"content-length: 99999999999999999999999\r\n\r\n" + BODY,
    "chunks and a length": POST + CHUNKED + LENGTH + b"\r\n" + b"e\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a length and chunks": POST + LENGTH + CHUNKED + b"\r\n" + b"e\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunks twice": POST + CHUNKED + CHUNKED + b"\r\n0\r\n\r\n",
    "chunks twice in a list": POST + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "chunks of another coding": POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "another coding": POST + b"transfer-encoding: gzip\r\n\r\n0\r\n\r\n",
    "a coding that is nearly chunks": POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a coding before a tab": POST + b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "chunks for HTTP/1.0": b"POST /v1/completions HTTP/1.0\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "no host": b"GET /live HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"host: y\r\n\r\n",
    "two hosts for HTTP/1.0": b"GET /live HTTP/1.0\r\nhost: localhost\r\nhost: y\r\n\r\n",
    "a space before the colon": POST + b"content-length : 14\r\n\r\n" + BODY,
    "a header that goes on in the next line": GET + b"x: a\r\n b\r\n\r\n",
    "a first header that goes on": b"GET /live HTTP/1.1\r\n host: localhost\r\n\r\n",
    "a line that ends in LF": b"GET /live HTTP/1.1\r\nhost: localhost\nx: y\r\n\r\n",
    "a line that ends in CR": GET + b"x: a\ry: b\r\n\r\n",
    "headers that end in LF": GET + b"\n",
    "NUL": GET + b"x: a\0b\r\n\r\n",
    "a name with a space": GET + b"x y: a\r\n\r\n",
    "a name with NUL": GET + b"x\0y: a\r\n\r\n",
    "no name": GET + b": a\r\n\r\n",
    "no colon": GET + b"abc\r\n\r\n",
    "HTTP/2.0": b"GET /live HTTP/2.0\r\nhost: localhost\r\n\r\n",
    "HTTP/0.9": b"GET /live HTTP/0.9\r\nhost: localhost\r\n\r\n",
    "HTTP/1.2": b"GET /live HTTP/1.2\r\nhost: localhost\r\n\r\n",
    "no version": b"GET /live\r\nhost: localhost\r\n\r\n",
    "HTTP/2's greeting": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a tab": b"GET\t/live HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a space at the end": b"GET /live HTTP/1.1 \r\nhost: localhost\r\n\r\n",
    "a target with a space": b"GET /li ve HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a target that is not ASCII": b"GET /l\xc3\xafve HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a target with a control character": b"GET /li\x7fve HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a target with a fragment": b"GET /live#x HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a method of another protocol": b"SOURCE /live ICE/1.0\r\nhost: localhost\r\n\r\n",
    "a tunnel": b"CONNECT x:80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a greeting of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "nothing known": b"\xff" * 64,
    "a chunk of hex with a prefix": POST + CHUNKED + b"\r\n0xe\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk with a sign": POST + CHUNKED + b"\r\n+e\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a negative chunk": POST + CHUNKED + b"\r\n-e\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk after a space": POST + CHUNKED + b"\r\n e\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk without a size": POST + CHUNKED + b"\r\n\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk's line that ends in LF": POST + CHUNKED + b"\r\ne\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk that ends in LF": POST + CHUNKED + b"\r\ne\r\n" + BODY + b"\n0\r\n\r\n",
    "a chunk longer than it says": POST + CHUNKED + b"\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk past all words": POST + CHUNKED + b"\r\n1000000000000000e\r\n" + BODY + b"\r\n0\r\n\r\n",
    "an extension with a control character": POST + CHUNKED + b"\r\ne;\x01=\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a trailer without a colon": POST + CHUNKED + b"\r\ne\r\n" + BODY + b"\r\n0\r\nabc\r\n\r\n",
}


@pytest.mark.parametrize("raw", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
def test_what_may_be_read_in_two_ways_is_refused(raw):
    async def client(port):
        answer = await said(port, raw)
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1") == 1
        in_crumbs = await said(port, *(raw[at : at + 1] for at in range(len(raw))))
        assert in_crumbs[:12] in (b"HTTP/1.1 400", b"")  # nothing: we went on, and the answer was lost

    actor = served(client)
    assert not actor.requests


FLOODS = {
    "a header": (GET + b"x: ", b"x"),
    "headers": (GET, b"a: b\r\n"),
    "a target": (b"GET /", b"x"),
    "a method": (b"G", b"E"),
    "lines before a call": (b"", b"\r\n"),
    "a chunk's extension": (POST + CHUNKED + b"\r\ne;", b"x"),
    "zeros before a chunk's size": (POST + CHUNKED + b"\r\n", b"0"),
    "a trailer": (POST + CHUNKED + b"\r\n0\r\nx: ", b"x"),
    "trailers": (POST + CHUNKED + b"\r\n0\r\n", b"a: b\r\n"),
}


@pytest.mark.parametrize("begins", FLOODS.values(), ids=FLOODS.keys())
@pytest.mark.parametrize("at_once", [1, 40])
def test_what_never_ends_is_refused(begins, at_once):
    begin, more = begins

    async def client(port):
        parts = [at_once * more] * (2 * SHORT.max_head_bytes // at_once)
        assert (await said(port, begin, *parts))[:12] in (b"HTTP/1.1 400", b"")

    served(client, connections=SHORT)


def test_headers_that_come_at_once_have_the_same_bound():
    async def client(port):
        assert (await said(port, GET + b"x: " + b"y" * 4000 + b"\r\n\r\n")).startswith(b"HTTP/1.1 400")

    served(client, connections=SHORT)


def test_a_long_body_in_chunks_is_framed_by_as_much_as_it_takes():
    async def client(port):
        body = json.dumps({"prompt": "a", "metadata": {"x": "y" * 300}}).encode() + b" " * 50_000
        pieces = [body[at : at + 300] for at in range(0, len(body), 300)]
        chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        answer = await said(port, POST + CHUNKED + b"connection: close\r\n\r\n", chunks + b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")

    served(client, connections=ConnectionSettings(max_head_bytes=1024))


def streaming(*headers):
    body = b'{"prompt":"a","stream":true}'
    return POST + b"content-length: %d\r\n" % len(body) + b"".join(headers) + b"\r\n" + body


SLOWLY = lambda _request, _number: one_by_one([*tokens("abc"), finished()])  # noqa: E731


@pytest.mark.parametrize("behind", [GET + b"\r\n", streaming(), b"\0nonsense"])
def test_what_comes_behind_a_call_is_not_heard_and_the_connection_ends_with_that(behind):
    async def client(port):
        for parts in ([streaming() + behind], [streaming(), behind], [streaming(), *([behind] * 9)]):
            answer = await said(port, *parts)
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert answer.count(b"HTTP/1.1") == 1

    actor = served(client, SLOWLY)
    assert len(actor.requests) == 3
    assert not actor.cancelled


def test_many_calls_at_once_are_one():
    async def client(port):
        answer = await said(port, (GET + b"\r\n") * 200)
        assert answer.count(b"HTTP/1.1 200") == 1
        assert b"connection: close" in answer

    served(client)


def test_who_waits_for_each_answer_has_many_calls_on_a_connection():
    async def client(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(5):
            writer.write(streaming())
            await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 5)
            writer.write(POST + CHUNKED + b"\r\ne\r\n" + BODY + b"\r\n0\r\n\r\n\r\n")  # with a line too many
            await asyncio.wait_for(reader.readuntil(b'"usage"'), 5)
            await asyncio.wait_for(reader.readuntil(b"}}"), 5)
        writer.close()

    actor = served(client, SLOWLY)
    assert len(actor.requests) == 10


def test_headers_behind_a_body_are_nobodys():
    async def client(port):
        chunks = b"e\r\n" + BODY + b"\r\n0\r\nx-request-id: mine\r\nhost: y\r\n\r\n"
        answer = await said(port, POST + CHUNKED + b"connection: close\r\n\r\n" + chunks)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"mine" not in answer

    served(client)


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c", b"x"])
def test_who_wants_another_protocol_too_is_answered_in_this_one(protocol):
    wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + protocol + b"\r\n"
    chunked = POST + wish + CHUNKED + b"\r\ne\r\n" + BODY + b"\r\n0\r\n\r\n"

    async def client(port):
        for raw in (GET + wish + b"\r\n", streaming(wish), chunked):
            for parts in ([raw], [raw[:-1], raw[-1:]], [raw[at : at + 1] for at in range(len(raw))]):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                for part in parts:
                    writer.write(part)
                    await asyncio.sleep(0)
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
                await asyncio.wait_for(reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n" if raw == streaming(wish) else b"}"), 5)
                writer.close()

    actor = served(client)
    assert len(actor.requests) == 6


def test_to_a_client_of_http_1_0_the_end_of_the_connection_is_that_of_the_answer():
    async def client(port):
        head, _, body = (await said(port, streaming().replace(b"HTTP/1.1", b"HTTP/1.0"))).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
        whole = await said(port, POST.replace(b"HTTP/1.1", b"HTTP/1.0") + LENGTH + b"\r\n" + BODY)
        head, _, body = whole.partition(b"\r\n\r\n")
        assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"

    served(client, SLOWLY)


def test_a_client_of_http_1_0_is_met_in_it_whatever_else_it_wishes():
    async def client(port):
        wish = b"Connection: upgrade\r\nUpgrade: x\r\n"
        for raw in (GET + wish + b"\r\n", streaming(wish), streaming(b"Expect: 100-continue\r\n")):
            answer = await said(port, raw.replace(b"HTTP/1.1", b"HTTP/1.0"))
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"transfer-encoding" not in answer

    served(client, SLOWLY)


def test_nonsense_behind_an_answer_that_came_early_has_no_second_one():
    async def client(port):
        begin = b"POST /live HTTP/1.1\r\nhost: localhost\r\n" + CHUNKED + b"\r\n1\r\nx\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begin)
        assert (await asyncio.wait_for(reader.readuntil(b"}}"), 5)).startswith(b"HTTP/1.1 405")
        writer.write(b"nonsense\r\n")
        assert await asyncio.wait_for(until_cut(reader), 10) == b""
        writer.close()

    served(client)


def test_nonsense_in_a_body_that_nobody_asked_for_cuts_an_answer_that_has_begun():
    async def client(port):
        head = b"GET /cluster/events HTTP/1.1\r\nhost: localhost\r\n" + CHUNKED + b"\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"1\r\nx\r\n")
        begun = await asyncio.wait_for(reader.readuntil(b"data: "), 5)
        assert begun.startswith(b"HTTP/1.1 200")
        writer.write(b"nonsense\r\n")
        assert b"HTTP/1.1" not in await asyncio.wait_for(until_cut(reader), 10)
        writer.close()

    served(client)


async def until_cut(reader):
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


def test_an_answer_before_its_call_was_whole_leaves_the_connection_to_the_next():
    async def client(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /live HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n" + b"x" * 50_000)
        assert (await asyncio.wait_for(reader.readuntil(b"}}"), 5)).startswith(b"HTTP/1.1 405")
        writer.write(b"x" * 50_000 + GET + b"\r\n")
        assert (await asyncio.wait_for(reader.readuntil(b"}"), 5)).startswith(b"HTTP/1.1 200")
        writer.close()

    served(client)


def test_a_body_of_told_length_in_crumbs_is_refused():
    async def client(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + b"content-length: 1000\r\n\r\n")
        await actor.until(lambda: actor.edge.calls.bodies == 1)
        (connection,) = actor.acceptor.connections
        for _ in range(100):
            connection.take(b" ")
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 400")
        writer.close()

    actor = ScriptedActor()
    actor.serve(client)
