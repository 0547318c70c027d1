"""A store in a process of its own, which can be killed, stopped and spoilt."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.server.server import StoreServer
from mooncake_zmq.store.segment import SUFFIX

OBJECT_BYTES = 64 << 20


class Pool:
    """A store under one address, life after life, with room for `times` as much as is usual."""

    def __init__(self, directory: Path, times: int = 1) -> None:
        self.directory = directory
        self.times = times
        self.endpoint = f"ipc://{directory}/pool.sock"
        self.lives = 0
        self.start()

    def start(self) -> None:
        self.lives += 1
        root = str(Path(__file__).parents[2])
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(self.directory), self.endpoint, str(self.lives), str(self.times)],
            env={"PYTHONPATH": root, "MOONCAKE_ZMQ_MYPYC": "0"},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Linux shares cores out by session: it is run beside whatever this one is busy with
        )
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()) != "serving\n":
            assert line, "the store did not start"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def spoil(self) -> None:
        """Flip a bit of every byte of its memory."""
        size = self.times * OBJECT_BYTES
        (path,) = [each for each in self.directory.glob(f"*{SUFFIX}*") if each.stat().st_size > size]
        memory = np.memmap(path, np.uint8, "r+", offset=path.stat().st_size - size)
        memory ^= 1
        del memory

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.go_on()
        self.process.terminate()
        self.process.wait(30)


def main(directory: str, endpoint: str, incarnation: str, times: str) -> None:
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    server = StoreServer(
        settings=ObjectSettings(object_bytes=int(times) * OBJECT_BYTES, slab_bytes=4 << 20, max_objects=int(times) * 8192),
        directory=directory,
        cluster="test",
        node="pool",
        incarnation=int(incarnation),
        endpoint=endpoint,
        on_crash=lambda _: None,
        probe_s=0.2,
    )
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    while not ended:
        time.sleep(0.05)
    server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
