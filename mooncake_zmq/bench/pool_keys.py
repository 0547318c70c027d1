"""The cost of keys: control frames, blocks and values over TCP loopback between two processes, in turns: without keys, with
them, and with them but bulk data in clear. Beside each, the same blocks over a bare socket, and as frames of ZeroMQ."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import zmq

from mooncake_zmq.bench.block_fetch import BareStream, BlockFetch
from mooncake_zmq.bench.keys_driver import BLOCKS, BULK, FAR, LAYOUT, NEAR, WANTED, fail, open_sockets
from mooncake_zmq.bench.others.peers import driver_process
from mooncake_zmq.core.messages import SlotRef
from mooncake_zmq.runtime.peer_sockets import LIMITS
from mooncake_zmq.store import MooncakeDistributedStore
from mooncake_zmq.store.memory import address_of
from mooncake_zmq.transfer import key_files

DRIVER = Path(__file__).with_name("keys_driver.py")
FRAME_BYTES = 256
ROUND_TRIPS, FRAMES = 2_000, 50_000
TIMEOUT_S = 60.0
FIGURES = ("round trip", "frames", "blocks", "values", "bare", "framed")
SIDES = {"clear": (False, True), "attached": (True, False), "encrypted": (True, True)}
"""Name -> (with keys, encrypting bulk data)."""
VALUES_PER_CALL = 16


class Near:
    """Our side of one remote process."""

    def __init__(self, keys: str, encrypt_bulk: bool, remote: dict[str, Any]) -> None:
        self._sockets = open_sockets(keys, NEAR, encrypt_bulk=encrypt_bulk)
        self._socket, _ = self._sockets.connecting(zmq.DEALER, remote["control"], "control", LIMITS, server=FAR)
        self._socket.rcvtimeo = self._socket.sndtimeo = int(TIMEOUT_S * 1000)
        self._socket.connect(remote["control"])
        self._blocks = [SlotRef(FAR, 1, slot, 2, checksum) for slot, checksum in enumerate(remote["checksums"])]
        self._fetch = BlockFetch(LAYOUT, BLOCKS, (FAR, 1), remote["data"], on_crash=fail, sockets=self._sockets)
        self._memory = self._fetch.memory
        self._bare = BareStream(remote["bare"])
        self._framed, _ = self._sockets.connecting(zmq.DEALER, remote["framed"], "data", BULK, server=FAR)
        self._framed.rcvtimeo = self._socket.rcvtimeo
        self._framed.connect(remote["framed"])
        self._store = MooncakeDistributedStore()
        place = remote["store"].removeprefix("tcp://")
        config: dict[str, Any] = {"local_hostname": "near", "share_memory": False}
        config |= (
            {"master_server_addr": f"{FAR}@{place}", "keys": keys, "key_name": NEAR} if keys else {"master_server_addr": place}
        )
        assert self._store.setup(config) == 0
        size = LAYOUT.block_bytes
        for slot in range(BLOCKS):
            assert self._store.put(str(slot), bytes([slot]) * size) == 0

    def close(self) -> None:
        self._store.close()
        self._bare.close()
        self._framed.close()
        self._fetch.close()
        self._socket.close()
        self._sockets.give_back()

    def measure(self) -> dict[str, float]:
        """Return by name of FIGURES: us, frames/s, GB/s."""
        measures = (self._round_trip_us, self._frames_per_s, self._blocks_gb_per_s, self._values_gb_per_s, self._bare_gb_per_s)
        return {figure: measured() for figure, measured in zip(FIGURES, (*measures, self._framed_gb_per_s), strict=True)}

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

    def _blocks_gb_per_s(self) -> float:
        return len(self._memory) / self._fetch.fetch_s(self._blocks) / 1e9

    def _values_gb_per_s(self) -> float:
        size = LAYOUT.block_bytes
        address = address_of(self._memory)
        began = time.perf_counter()
        for first in range(0, BLOCKS, VALUES_PER_CALL):
            slots = range(first, first + VALUES_PER_CALL)
            places = [address + size * slot for slot in slots]
            got = self._store.batch_get_into([str(slot) for slot in slots], places, [size] * VALUES_PER_CALL)
            assert got == [size] * VALUES_PER_CALL, "a value did not come"
        return BLOCKS * size / (time.perf_counter() - began) / 1e9

    def _bare_gb_per_s(self) -> float:
        return len(self._memory) / self._bare.fetch_s(self._memory) / 1e9

    def _framed_gb_per_s(self) -> float:
        size = LAYOUT.block_bytes
        began = time.perf_counter()
        self._framed.send(b"!")
        for slot in range(BLOCKS):
            self._framed.recv_into(self._memory[size * slot : size * (slot + 1)])
        return len(self._memory) / (time.perf_counter() - began) / 1e9


def cost_of_keys(rounds: int, progress: Callable[[str], None]) -> dict[tuple[str, str], list[float]]:
    """Return (one of SIDES, one of FIGURES) -> the figure of each round. Raises click.ClickException when the remote side
    dies."""
    took: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        keys = _keys_in(stack.enter_context(TemporaryDirectory()))
        nears = {
            how: stack.enter_context(_near(keys if with_keys else "", encrypt_bulk))
            for how, (with_keys, encrypt_bulk) in SIDES.items()
        }
        for number in range(rounds + 1):
            progress(f"keys off and on, round {number} of {rounds}")
            for how, near in nears.items():
                for figure, value in near.measure().items():
                    if number:  # The first round writes memory for the first time and connects.
                        took.setdefault((how, figure), []).append(value)
    return took


def _keys_in(made: str) -> str:
    directory = Path(made) / "keys"
    key_files.make(directory, [(FAR, ("node",)), (NEAR, ("node", "store"))])
    return str(directory)


@contextmanager
def _near(keys: str, encrypt_bulk: bool) -> Iterator[Near]:
    what = f"the far side with keys {'on' if keys else 'off'}"
    order = {"keys": keys, "encrypt_bulk": encrypt_bulk}
    with driver_process(DRIVER, order, python=sys.executable, what=what, timeout_s=TIMEOUT_S) as far:
        near = Near(keys, encrypt_bulk, far.ready)
        try:
            yield near
        finally:
            near.close()
