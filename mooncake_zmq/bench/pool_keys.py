"""What keys cost: control frames and blocks over TCP loopback between two processes, with CURVE and without, in turns."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import zmq

from mooncake_zmq.bench.keys_driver import BLOCKS, FAR, LAYOUT, NEAR, WANTED, fail, open_sockets
from mooncake_zmq.bench.peers import driver_process
from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.kv.reading import ReadFailure
from mooncake_zmq.runtime.zmq_runtime import LIMITS
from mooncake_zmq.transfer import key_files
from mooncake_zmq.transfer.network import RemoteReader
from mooncake_zmq.transfer.reading_lane import RemoteRead

DRIVER = Path(__file__).with_name("keys_driver.py")
FRAME_BYTES = 256
ROUND_TRIPS, FRAMES = 2_000, 50_000
TIMEOUT_S = 60.0
FIGURES = ("round trip", "frames", "blocks")


@dataclass(slots=True)
class Sink:
    """Takes a block into memory of its own. Keeps whether it came whole."""

    memory: memoryview
    failure: ReadFailure | None = None

    def buffer(self) -> memoryview | None:
        """See `reading_lane.ReadSink`."""
        return self.memory

    def part(self, layer: int, payload: memoryview, checksum: int) -> None:
        """See `reading_lane.ReadSink`."""

    def end(self, failure: ReadFailure | None) -> None:
        """See `reading_lane.ReadSink`."""
        self.failure = failure


class Near:
    """Our side of one far process."""

    def __init__(self, keys: str, told: dict[str, Any]) -> None:
        self._sockets = open_sockets(keys, NEAR)
        self._socket, _ = self._sockets.connecting(zmq.DEALER, told["control"], "control", LIMITS, server=FAR)
        self._socket.rcvtimeo = self._socket.sndtimeo = int(TIMEOUT_S * 1000)
        self._socket.connect(told["control"])
        self._reader = RemoteReader(LAYOUT, on_crash=fail, sockets=self._sockets)
        self._reader.learn((FAR, 1), told["data"])
        self._refs = [SlotRef(FAR, 1, slot, 2, checksum) for slot, checksum in enumerate(told["checksums"])]
        self._memory = memoryview(bytearray(BLOCKS * LAYOUT.block_bytes))

    def close(self) -> None:
        self._reader.close()
        self._socket.close()
        self._sockets.give_back()

    def measure(self) -> dict[str, float]:
        """By name of FIGURES: us, frames/s, GB/s."""
        return {"round trip": self._round_trip_us(), "frames": self._frames_per_s(), "blocks": self._gb_per_s()}

    def _round_trip_us(self) -> float:
        took = []
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            self._ask()
            took.append(time.perf_counter() - began)
        return median(took) * 1e6

    def _frames_per_s(self) -> float:
        frame = bytes(FRAME_BYTES)
        began = time.perf_counter()
        for _ in range(FRAMES):
            self._socket.send(frame)
        self._ask()
        return FRAMES / (time.perf_counter() - began)

    def _ask(self) -> None:
        self._socket.send(WANTED + bytes(FRAME_BYTES - 1))
        self._socket.recv()

    def _gb_per_s(self) -> float:
        size = LAYOUT.block_bytes
        sinks = [Sink(self._memory[size * slot : size * (slot + 1)]) for slot in range(BLOCKS)]
        reads = [RemoteRead(ref, range(LAYOUT.layers), sink) for ref, sink in zip(self._refs, sinks, strict=True)]
        ended = threading.Event()
        began = time.perf_counter()
        self._reader.submit(reads, time.monotonic() + TIMEOUT_S, ended.set)
        ended.wait()
        took = time.perf_counter() - began
        assert not any(sink.failure for sink in sinks), "a block did not come"
        return BLOCKS * size / took / 1e9


def cost_of_keys(rounds: int, progress: Callable[[str], None]) -> dict[tuple[str, str], list[float]]:
    """("on" or "off", one of FIGURES) -> the figure of each round. Raises click.ClickException when the far side dies."""
    took: dict[tuple[str, str], list[float]] = {}
    with TemporaryDirectory() as made, _near("") as plain, _near(_keys_in(made)) as keyed:
        for number in range(rounds + 1):
            progress(f"keys off and on, round {number} of {rounds}")
            for how, near in (("off", plain), ("on", keyed)):
                for figure, value in near.measure().items():
                    if number:  # the first time memory is written and connections are made
                        took.setdefault((how, figure), []).append(value)
    return took


def _keys_in(made: str) -> str:
    directory = Path(made) / "keys"
    key_files.make(directory, [(FAR, ("node",)), (NEAR, ("node",))])
    return str(directory)


@contextmanager
def _near(keys: str) -> Iterator[Near]:
    what = f"the far side with keys {'on' if keys else 'off'}"
    with driver_process(DRIVER, {"keys": keys}, python=sys.executable, what=what, timeout_s=TIMEOUT_S) as far:
        near = Near(keys, far.ready)
        try:
            yield near
        finally:
            near.close()
