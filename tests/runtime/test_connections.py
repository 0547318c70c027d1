"""Connections of a listening socket: what is counted of them, and that none of them ends the process with itself."""

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import hostile
import pytest
import zmq

from mooncake_zmq.pool.server import request_socket as store_server
from mooncake_zmq.runtime import kv_events, peer_sockets
from mooncake_zmq.transfer import connections, data_server, key_files, zmtp
from mooncake_zmq.transfer.connections import Connections, _received_bytes, came_by, cut, receive
from mooncake_zmq.transfer.sockets import PROBE_S, Limits, Sockets

PATIENCE_S = 20.0
EVENTS = Limits(max_message_bytes=kv_events.MAX_REQUEST_BYTES, send_hwm=64, receive_hwm=kv_events.REQUESTS_PER_TURN)
PLANES = {
    "control": (zmq.ROUTER, peer_sockets.LIMITS),
    "data": (zmq.ROUTER, data_server.LIMITS),
    "store": (zmq.ROUTER, store_server.LIMITS),
    "events": (zmq.XPUB, EVENTS),
    "replay": (zmq.ROUTER, EVENTS),
}
PEERS = {zmq.ROUTER: b"DEALER", zmq.XPUB: b"XSUB"}
CONNECTIONS, FRAMES = 40, 300
PING = zmtp.part(b"\4PING\0\0", zmtp.COMMAND)


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def test_a_connection_that_ended_has_no_bytes() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    assert _received_bytes(reading) is None
    os.close(reading)
    assert _received_bytes(reading) is None


def test_a_frame_of_a_connection_that_has_ended_came_by_none() -> None:
    class Gone:
        def get(self, _option: int) -> int:
            raise zmq.ZMQError(zmq.EINVAL)

    assert came_by(Gone()) == -1


def victim(plane: str) -> None:
    """A process that listens as that plane does: is busy while connections say much and go, and then reads all of it."""
    kind, limits = PLANES[plane]
    sockets = Sockets(io_threads=1).borrow()
    with sockets.listening(kind, "tcp://127.0.0.1:*", plane.replace("replay", "events"), limits) as listening:
        watched = Connections(listening, {}, lambda error: os._exit(1))
        listening.bind("tcp://127.0.0.1:*")
        print(listening.get_string(zmq.LAST_ENDPOINT), flush=True)
        while sys.stdin.readline():
            while receive(listening, watched) is not None or listening.poll(100):
                pass
            print("read", flush=True)
        watched.close()
    sockets.give_back()


@pytest.mark.parametrize("plane", PLANES)
def test_a_peer_that_says_much_and_goes_ends_no_process(plane: str) -> None:
    command = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_connections as t; t.victim({plane!r})"
    )
    with subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        endpoint = process.stdout.readline().strip()
        kind = PLANES[plane][0]
        # What the victim is told, and in between whether it is there, which it would have to answer.
        told = (zmtp.part(b"\0" + b"x" * 40) * 3 + PING) * FRAMES
        for _ in range(2):
            peers = [hostile.connect(endpoint, PEERS[kind]) for _ in range(CONNECTIONS)]
            for peer in peers:
                peer.setblocking(False)
                peer.send(told)
            time.sleep(0.1)  # for its I/O thread to take what it takes; what it does not take proves nothing and does no harm
            for peer in peers:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                peer.close()
            time.sleep(0.1)
            process.stdin.write("read\n")
            process.stdin.flush()
            assert process.stdout.readline() == "read\n", process.stderr.read()
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("keyed", [False, True])
def test_of_what_is_taken_not_a_byte_too_many_is_counted(tmp_path: Path, keyed: bool) -> None:
    if keyed:
        key_files.make(tmp_path, [("a", ("node",))])
    sockets = Sockets(key_files.load(tmp_path, "a") if keyed else None, io_threads=1).borrow()
    with sockets.listening(zmq.ROUTER, "tcp://127.0.0.1:*", "data", store_server.LIMITS) as listening:
        watched = Connections(listening, {}, pytest.fail)
        watched.close()  # each of its checks would take what was counted
        listening.bind("tcp://127.0.0.1:*")
        endpoint = listening.get_string(zmq.LAST_ENDPOINT)
        peer, _ = sockets.connecting(zmq.DEALER, endpoint, "data", store_server.LIMITS, server="a")
        with peer:
            peer.connect(endpoint)
            for size in (0, 1, 222, 223, 255, 256, 100_000):
                peer.send_multipart([b"x" * size] * 2)
            taken: list[zmq.Frame] = []
            while len(taken) < 14:
                assert listening.poll(int(PATIENCE_S * 1000))
                taken += (receive(listening, watched) or [])[1:]
            descriptor = came_by(taken[0])
            counted = sum(size for _, size in watched._taken)
            received = _received_bytes(descriptor)
            assert received is not None
            # Beside the frames, what was said before the first of them.
            assert 64 <= received - counted <= 1024
    sockets.give_back()


def test_a_host_has_no_more_connections_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_OF_A_HOST", 3)
    sockets, counts = Sockets(io_threads=1).borrow(), dict[str, int]()
    with sockets.listening(zmq.ROUTER, "tcp://127.0.0.1:*", "store", store_server.LIMITS) as listening:
        watched = Connections(listening, counts, pytest.fail)
        listening.bind("tcp://127.0.0.1:*")
        endpoint = listening.get_string(zmq.LAST_ENDPOINT)
        with ExitStack() as stack:
            peers = [stack.enter_context(closing(hostile.connect(endpoint, b"DEALER"))) for _ in range(3)]
            eventually(lambda: len(watched._open) == 3)
            with socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2]))) as further:
                further.settimeout(PATIENCE_S)
                while further.recv(4096):  # its greeting, if that came first
                    pass
            peers[0].close()
            eventually(lambda: len(watched._open) == 2)
            stack.enter_context(closing(hostile.connect(endpoint, b"DEALER")))
            eventually(lambda: len(watched._open) == 3)
        watched.close()
    sockets.give_back()
    assert (counts["connections_over_share"], counts["connections_cut"]) == (1, 0)


def test_the_kernel_notices_that_the_other_host_is_gone(tmp_path: Path) -> None:
    sockets = Sockets(io_threads=1).borrow()
    with sockets.listening(zmq.ROUTER, "tcp://127.0.0.1:*", "store", store_server.LIMITS) as listening:
        listening.bind("tcp://127.0.0.1:*")
        endpoint = listening.get_string(zmq.LAST_ENDPOINT)
        with closing(hostile.connect(endpoint, b"DEALER")) as peer:
            peer.sendall(zmtp.part(b"x"))
            assert listening.poll(int(PATIENCE_S * 1000))
            descriptor = came_by(listening.recv_multipart(copy=False)[1])
            with socket.socket(fileno=os.dup(descriptor)) as accepted:
                options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
                told = [accepted.getsockopt(socket.IPPROTO_TCP, option) for option in options]
            assert told == [PROBE_S, PROBE_S, store_server.LIMITS.silence_ms]
            cut(listening, descriptor)
            eventually(lambda: peer.recv(4096) == b"")
    sockets.give_back()
