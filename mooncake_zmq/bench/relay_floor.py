"""The floor of a relayed token: a process that receives a frame over ZeroMQ, writes a piece of a stream to a TCP connection and
does nothing else. Its CPU time is that of the system calls, of ZeroMQ's thread, and of caches that are cold between tokens."""

import socket
import subprocess
import sys
import time
from tempfile import TemporaryDirectory

import zmq

from mooncake_zmq.bench.memory import threads_cpu_s

FRAME = b"\x00" * 64
"""As long as a message of a decode to a gateway with one token."""
PIECE = b"\x00" * 320
"""As long as a chunk of a stream with one token."""
WARM_UP = 16
START_S = 30.0


def relay(frames: str, port: int) -> None:
    """Write a piece to the port of this machine for each frame that comes from `frames`, until an empty one."""
    with zmq.Context() as context, context.socket(zmq.PULL) as source, socket.create_connection(("127.0.0.1", port)) as target:
        source.connect(frames)
        target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poller = zmq.Poller()
        poller.register(source, zmq.POLLIN)
        while poller.poll() and source.recv():
            target.sendall(PIECE)


def floor_s(tokens: int, gap_s: float) -> float:
    """Return the CPU time of one token in such a process, over `tokens` that come `gap_s` apart."""
    with TemporaryDirectory(prefix="mczmq-") as directory, zmq.Context() as context, context.socket(zmq.PUSH) as source:
        source.linger = 0
        source.bind(frames := f"ipc://{directory}/frames")
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(START_S)
            command = [sys.executable, "-m", __name__, frames, str(server.getsockname()[1])]
            with subprocess.Popen(command) as process:
                try:
                    return _measured(process.pid, source, server.accept()[0], tokens, gap_s)
                finally:
                    process.kill()


def _measured(pid: int, source: "zmq.Socket[bytes]", stream: socket.socket, tokens: int, gap_s: float) -> float:
    stream.settimeout(START_S)
    used_s = 0.0
    with stream:
        for number in range(WARM_UP + tokens):
            if number == WARM_UP:
                used_s = threads_cpu_s(pid)
            due = time.perf_counter() + gap_s
            source.send(FRAME)
            stream.recv(len(PIECE), socket.MSG_WAITALL)
            time.sleep(max(0.0, due - time.perf_counter()))
        return (threads_cpu_s(pid) - used_s) / tokens


if __name__ == "__main__":
    relay(sys.argv[1], int(sys.argv[2]))
