"""HTTP connections: who takes up room without calling is cut, whoever crowds is refused, and the rest go on."""

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import textwrap
from itertools import count
from pathlib import Path

import httpx
import pytest
from scripted_actor import ScriptedActor, finished, one_by_one, tokens

from mooncake_zmq.gateway.http import acceptor as acceptor_module
from mooncake_zmq.gateway.http import loop_turns
from mooncake_zmq.gateway.http.acceptor import network_of
from mooncake_zmq.gateway.http.connection import PIECES, Connection
from mooncake_zmq.gateway.requests.client_events import TokenOut
from mooncake_zmq.gateway.settings import ConnectionSettings, EdgeSettings
from mooncake_zmq.runtime.listening import listen

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
QUICK = ConnectionSettings(head_timeout_s=0.08, idle_timeout_s=60.0)


def connect(port):
    return asyncio.open_connection("127.0.0.1", port)


async def until_closed(reader):
    """What came until the other side closed."""
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionResetError:
        return b""


async def alive(port):
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        return (await http.get("/live")).status_code == 200


@pytest.mark.parametrize("said", [b"", b"GET", HEAD, HEAD + b"content-length: 1"])
def test_headers_that_never_end(said):
    actor = ScriptedActor(connections=QUICK)

    async def client(port):
        pairs = [await connect(port) for _ in range(20)]
        for _, writer in pairs:
            writer.write(said)
        answers = [await until_closed(reader) for reader, _ in pairs]
        assert all(answer.startswith(b"HTTP/1.1 408") == bool(said) for answer in answers)
        assert await alive(port)

    actor.serve(client)
    assert actor.edge.counts["http_connections_timed_out"] == 20


def test_headers_that_come_byte_by_byte_have_the_same_time():
    actor = ScriptedActor(connections=QUICK)

    async def client(port):
        reader, writer = await connect(port)

        async def dribble():
            writer.write(b"GET / HTTP/1.1\r\nx: ")
            while True:
                await asyncio.sleep(0.01)
                writer.write(b"x")

        dribbling = asyncio.create_task(dribble())
        assert b"408" in await until_closed(reader)
        dribbling.cancel()

    actor.serve(client)
    assert actor.edge.counts["http_connections_timed_out"] == 1


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nx: ", HEAD + b"content-length: 4000000\r\n\r\n{"], ids=["head", "body"])
def test_an_answer_reaches_a_client_that_still_sends(said):
    actor = ScriptedActor(settings=EdgeSettings(body_timeout_s=0.05), connections=QUICK)

    def sends_first(port):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(said)
            assert select.select([client], [], [], 10)[0]
            for _ in range(30):  # a closed connection answers the first of these by a reset, and the others fail
                client.sendall(b"x" * 100_000)
            return b"".join(iter(lambda: client.recv(4096), b""))

    async def client(port):
        assert (await asyncio.to_thread(sends_first, port)).startswith(b"HTTP/1.1 408")
        await actor.until(lambda: not actor.acceptor.connections)

    actor.serve(client)


def test_a_second_call_on_a_connection_has_its_own_time():
    actor = ScriptedActor(connections=ConnectionSettings(head_timeout_s=10.0, idle_timeout_s=60.0))
    now = 100.0

    async def client(port):
        nonlocal now
        actor.acceptor._clock = lambda: now
        reader, writer = await connect(port)
        writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b'{"status":"ok"}'), 5)
        (connection,) = actor.acceptor.connections
        for idle_s in (0.0, 50.0):
            now += idle_s
            actor.acceptor._watch()
        writer.write(b"GET /live HTT")
        await actor.until(lambda: connection.begun)
        for slow_s in (0.0, *[1.0] * 9):
            now += slow_s
            actor.acceptor._watch()
        assert not connection.transport.is_closing()
        now += 1.0
        actor.acceptor._watch()
        assert b"408" in await until_closed(reader)

    actor.serve(client)


def test_a_call_that_came_while_the_gateway_did_not_run_is_answered():
    """Neither the first call of a connection nor a later one waits too long because it was not read."""
    actor = ScriptedActor(connections=ConnectionSettings(head_timeout_s=10.0, idle_timeout_s=30.0))
    now = 100.0

    async def client(port):
        nonlocal now
        actor.acceptor._clock = lambda: now
        actor.acceptor._watch()
        reader, writer = await connect(port)
        await actor.until(lambda: any(each.transport for each in actor.acceptor.connections))
        (connection,) = actor.acceptor.connections
        for stopped_s in (15.0, 45.0):
            now += stopped_s
            writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            connection.timeout_keep_alive_handler()
            actor.acceptor._watch()  # a timer that is due comes before what can be read
            await asyncio.wait_for(reader.readuntil(b'{"status":"ok"}'), 5)
        writer.close()

    actor.serve(client)
    assert "http_connections_timed_out" not in actor.edge.counts


def test_a_connection_without_a_second_call_is_closed_after_its_idle_time():
    actor = ScriptedActor(connections=ConnectionSettings(idle_timeout_s=0.05, head_timeout_s=0.2))

    async def client(port):
        reader, writer = await connect(port)
        writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await until_closed(reader)).endswith(b'{"status":"ok"}')

    actor.serve(client)


def test_a_body_that_stalls_keeps_nobody_else_waiting():
    actor = ScriptedActor(max_open=4)

    async def client(port):
        stalled = [await connect(port) for _ in range(40)]
        for _, writer in stalled:
            writer.write(HEAD + b"content-length: 10\r\n\r\n{")
        await actor.until(lambda: actor.edge.calls.bodies == 40)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        for _, writer in stalled:
            writer.close()
        await actor.until(lambda: actor.edge.calls.bodies == 0)

    actor.serve(client)


def test_long_bodies_share_their_memory():
    settings = EdgeSettings(max_body_bytes=100_000, max_reading_bytes=250_000, short_body_bytes=1000)
    actor = ScriptedActor(settings=settings)

    async def client(port):
        stalled = [await connect(port) for _ in range(2)]
        for _, writer in stalled:
            writer.write(HEAD + b"content-length: 100000\r\n\r\n" + b" " * 99_999)
        await actor.until(lambda: actor.edge.calls.reading_bytes.taken == 2 * 99_999)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            refused = await http.post("/v1/completions", content=b" " * 90_000)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        for _, writer in stalled:
            writer.close()
        await actor.until(lambda: actor.edge.calls.reading_bytes.taken == 0)

    actor.serve(client)
    assert actor.edge.counts["edge_rejected[reason=bodies]"] == 1


def test_one_address_has_so_many_connections_and_those_without_a_call_make_room():
    actor = ScriptedActor(lambda _request, _number: [], connections=ConnectionSettings(max_per_address=3))

    async def client(port):
        calls = [await connect(port) for _ in range(2)]
        body = b'{"prompt":"a"}'
        for _, writer in calls:
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await actor.until(lambda: len(actor.requests) == 2)
        idle, _ = await connect(port)
        reader, writer = await connect(port)
        assert await until_closed(idle) == b""
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await actor.until(lambda: len(actor.requests) == 3)
        refused, _ = await connect(port)
        answer = await until_closed(refused)
        assert answer.startswith(b"HTTP/1.1 503")
        head, _, said = answer.partition(b"\r\n\r\n")
        assert b"content-length: %d\r\n" % len(said) in head + b"\r\n"
        assert json.loads(said)["error"]["code"] == "too_many_connections"
        for each in (*calls, (reader, writer)):
            each[1].close()
        await actor.until(lambda: len(actor.cancelled) == 3)

    actor.serve(client)
    assert actor.edge.counts["http_connections_displaced"] == actor.edge.counts["http_connections_refused"] == 1


def test_addresses_are_counted_as_networks():
    assert network_of("10.1.2.3") == "10.1.2.3"
    assert network_of("::ffff:10.1.2.3") == "10.1.2.3"
    assert network_of("2001:db8::1") == network_of("2001:db8:0:0:ffff::2") != network_of("2001:db8:0:1::1")
    assert network_of("fe80::1%lo") == network_of("fe80::2")


def test_a_body_in_crumbs_is_refused():
    actor = ScriptedActor()

    async def client(port):
        reader, writer = await connect(port)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 5000)
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 400")
        await actor.until(lambda: actor.edge.calls.bodies == 0)
        reader, writer = await connect(port)
        body = b'{"prompt":"%b"}' % (b"a" * 30)
        pieces = [body[at : at + 2] for at in range(0, len(body), 2)]
        assert len(pieces) < PIECES
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        writer.write(HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 200")

    actor.serve(client)


def test_what_comes_in_takes_only_its_share_of_a_turn(monkeypatch):
    """By a clock of which each look takes half of that share, so that two things at most are looked at in a turn; none is
    lost."""
    actor = ScriptedActor()
    waiting, taken = [], [0]

    async def client(port):
        acceptor, turns, take = actor.acceptor, actor.acceptor._turns, Connection.take
        looks = count()
        acceptor._clock = lambda: next(looks) * loop_turns.TURN_S / 2
        next_turn = turns._next

        def turn():
            waiting.append(len(turns))
            taken.append(0)
            next_turn()

        def look(connection, data):
            taken[-1] += 1
            take(connection, data)

        turns._next = turn
        monkeypatch.setattr(Connection, "take", look)
        pairs = [await connect(port) for _ in range(30)]
        for _, writer in pairs:
            writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        for reader, writer in pairs:
            await asyncio.wait_for(reader.readuntil(b'{"status":"ok"}'), 10)
            writer.close()

    actor.serve(client)
    assert max(waiting) > 1
    assert max(taken) <= 2


LONG_ANSWERS = {
    "script": lambda _request, _number: [[*(TokenOut(index, 511) for index in range(3000)), finished("length")]],
    "settings": EdgeSettings(send_timeout_s=0.3, max_echo_chars=1 << 24),
    "connections": ConnectionSettings(head_timeout_s=0.2),
    "max_model_len": 1 << 22,
}


async def ask_for_much_and_read_nothing(actor, writer):
    """Returns once the acceptor has given the connection up."""
    body = json.dumps({"prompt": "a" * 1_500_000, "echo": True, "n": 8, "max_tokens": 3000}).encode()
    writer.transport.pause_reading()
    writer.write(HEAD + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
    await actor.until(lambda: len(actor.requests) == 8)
    async with asyncio.timeout(15):
        while actor.acceptor.connections:
            await asyncio.sleep(0.02)
    writer.transport.abort()


def test_a_whole_answer_that_nobody_reads_is_given_up():
    """What an answer leaves in a closing connection does not stay for good."""
    actor = ScriptedActor(**LONG_ANSWERS)

    async def client(port):
        _, writer = await connect(port)
        await ask_for_much_and_read_nothing(actor, writer)

    actor.serve(client)


def test_a_stream_that_nobody_reads_ends_and_its_connection_too(caplog):
    actor = ScriptedActor(settings=EdgeSettings(send_timeout_s=0.2, max_buffered_outputs=1 << 20))
    actor.script = lambda _request, _number: [[TokenOut(at + i, 511) for i in range(2000)] for at in range(0, 400_000, 2000)]
    actor.model.tokenizer.texts = lambda special: lambda token: "x" * 200

    async def client(port):
        body = b'{"prompt":"a","stream":true}'
        actor.acceptor.send_timeout_s = 60.0  # or the kernel were quicker; it cannot tell of a client that takes a little
        _, writer = await connect(port)
        writer.transport.pause_reading()
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(20):
            while not actor.cancelled:
                await asyncio.sleep(0.01)
        await actor.until(lambda: not actor.acceptor.connections)
        writer.transport.abort()

    actor.serve(client)
    assert [record for record in caplog.records if record.levelname != "INFO"] == []


OUT_OF_FILES = """
    import asyncio, os, resource, sys, httpx, structlog
    sys.path.insert(0, {tests!r})
    from scripted_actor import ScriptedActor, one_by_one, tokens
    actor = ScriptedActor(lambda request, number: one_by_one(tokens("a")))

    async def client(port):
        stream, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{{"prompt":"a","stream":true}}'
        writer.write(b"POST /v1/completions HTTP/1.1\\r\\nhost: [::1]\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body)
        await stream.readuntil(b'"text":"a"')
        parent, child = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:  # the crowd, with files of its own
            import socket
            crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
            os.write(parent[1], b"x")
            for each in crowd:
                each.settimeout(20)
                each.recv(1)
            os._exit(0)
        highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        await actor.until(lambda: actor.edge.counts.get("http_out_of_descriptors", 0) >= 1)
        assert len(actor.cancelled) == 0, "who is inside stays"
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://127.0.0.1:{{port}}/live")).status_code == 200
        writer.close()

    with structlog.testing.capture_logs() as lines:
        actor.serve(client)
    print([line["event"] for line in lines if line["log_level"] != "info"].count("http_out_of_descriptors"))
"""


def test_out_of_descriptors_newcomers_are_turned_away_and_the_log_has_one_line():
    script = textwrap.dedent(OUT_OF_FILES).format(tests=str(Path(__file__).parents[2] / "helpers"))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env={**os.environ})
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["1"]
    assert result.stderr == ""


def test_connections_leave_the_process_the_files_that_it_needs():
    script = textwrap.dedent("""
        import resource
        from mooncake_zmq.gateway.http.descriptors import within_files
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 500))
        print(within_files(150, 100), resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 200, within_files(10_000, 100))
    """)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    allowed, raised, clipped = result.stdout.split()[-3:]
    assert (int(allowed), raised) == (150, "True"), result
    assert 300 < int(clipped) < 400


@pytest.mark.parametrize(
    "wrong",
    [{"max_connections": 0}, {"max_per_address": 0}, {"head_timeout_s": 0}, {"idle_timeout_s": -1}, {"max_head_bytes": 9}],
)
def test_settings_of_connections_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ConnectionSettings(**wrong)


def test_who_waits_at_a_shared_address_that_is_left_is_served_and_all_others_find_who_stays():
    actor = ScriptedActor(share=True)

    async def client(port):
        reader, writer = await connect(port)
        writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"200" in await reader.readline()
        waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]  # nobody accepts meanwhile
        with listen("127.0.0.1", port, share=True) as stays:
            actor.acceptor.leave()
            later = await asyncio.gather(*(connect(port) for _ in range(20)))
            for _ in later:
                stays.accept()
        for each in waiting:
            each.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        for each in waiting:
            arrived, _ = await asyncio.open_connection(sock=each)
            assert (await until_closed(arrived)).startswith(b"HTTP/1.1 200")
        await until_closed(reader)
        with pytest.raises(ConnectionRefusedError):
            await connect(port)

    actor.serve(client)


@pytest.mark.parametrize("at_once", [True, False])
def test_an_address_that_was_left_is_come_back_to(at_once):
    actor = ScriptedActor(share=True)

    async def client(port):
        reader, writer = await connect(port)
        writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"200" in await reader.readline()
        waiting, left = socket.create_connection(("127.0.0.1", port)), actor.acceptor.listener
        assert actor.acceptor.listens
        actor.acceptor.leave()
        assert not actor.acceptor.listens
        if not at_once:
            await until_closed(reader)
        actor.acceptor.leave()  # it does, or has
        listener = listen("127.0.0.1", port, share=True)
        actor.acceptor.enter(listener)
        assert (left.fileno(), actor.acceptor.listens) == (-1, True)
        await asyncio.sleep(1.5 * acceptor_module.HANDSHAKE_S)  # later than what was to shut the old one
        for each in (await asyncio.open_connection(sock=waiting), await connect(port)):
            assert (await said_live(each)).startswith(b"HTTP/1.1 200")
        reader, writer = await connect(port)
        for _ in range(2):
            writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b'"ok"' in await asyncio.wait_for(reader.readuntil(b"}"), 10)
        writer.close()
        actor.acceptor.close()
        listener.close()

    actor.serve(client)


async def said_live(connected):
    reader, writer = connected
    writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    return await until_closed(reader)


@pytest.mark.parametrize("said", [b"", b"GET /live HTT"])
def test_who_had_asked_nothing_when_an_address_was_left_is_answered_once_and_finds_others(said):
    actor = ScriptedActor(share=True)

    async def client(port):
        reader, writer = await connect(port)
        writer.write(said)
        idle, its = await connect(port)
        its.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"200" in await idle.readline()
        actor.acceptor.leave()
        await until_closed(idle)
        writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"[len(said) :])
        answer = await until_closed(reader)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer

    actor.serve(client)


def test_the_last_answer_on_a_connection_to_an_address_that_is_left_says_so():
    actor = ScriptedActor(script=lambda _request, _number: one_by_one([*tokens("abcdef"), finished()]))

    async def client(port):
        reader, writer = await connect(port)
        body = json.dumps({"model": "toy", "prompt": "x", "stream": True}).encode()
        writer.write(HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        assert b"200" in await reader.readline()
        actor.acceptor.leave()
        assert b"data: [DONE]" in await until_closed(reader)

    actor.serve(client)
