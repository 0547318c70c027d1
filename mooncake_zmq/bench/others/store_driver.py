"""One side of `bench pool`: a process that keeps values in one store and times it. Ours and the others run this very file.

Run by path, in the Python of the store's own environment, so it imports nothing but the standard library before it knows
which store. Its argument is a JSON object with `role` and `store`:

    owner    keeps the values: starts the servers, has the memory; answers one line, the `at` that its clients need
    client   answers one line when connected; then one line for each request `{"do": method, **arguments}`

All lines are JSON, on standard input and output. The end of the input ends the process and all that it started.
"""

import contextlib
import ctypes
import importlib
import json
import mmap
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

START_TIMEOUT_S = 60.0
BATCH = 16
PIECE_BYTES = 1 << 20
STREAM_QUEUE = 64
"""Frames queued at the sender of the bare stream; more would only be more memory, as the kernel's buffers fill first."""


class WrongBytes(Exception):
    """The bytes read are not those stored: such a run has no meaningful figure."""


class Buffer:
    """Private memory as an application has it: written, page-aligned, in huge pages where the kernel gives them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.wipe()

    def wipe(self) -> None:
        """Overwrite the buffer, so that a read which delivers nothing cannot pass for one that does."""
        ctypes.memset(self.address, 0xA5, self.size)

    def fill(self, seed: int) -> None:
        """Write the same bytes for the same seed in every process."""
        source = random.Random(seed)
        for start in range(0, self.size, PIECE_BYTES):
            length = min(PIECE_BYTES, self.size - start)
            self.memory[start : start + length] = source.randbytes(length)

    def view(self, offset: int, size: int) -> memoryview:
        return memoryview(self.memory)[offset : offset + size]


def expect_equal(one: Buffer, other: Buffer, size: int) -> None:
    """Raise WrongBytes unless the first `size` bytes agree."""
    if ctypes.CDLL(None).memcmp(ctypes.c_void_p(one.address), ctypes.c_void_p(other.address), ctypes.c_size_t(size)):
        raise WrongBytes(f"the first {size} bytes read differ from those stored")


class Store(Protocol):
    """The measured operations of a store. Values lie one after another in `source`, and are read to the same places of
    `target`."""

    def clear(self) -> None: ...
    def put(self, keys: Sequence[str], offsets: Sequence[int], size: int) -> None: ...
    def get(self, keys: Sequence[str], offsets: Sequence[int], size: int) -> None: ...
    def exist(self, keys: list[str]) -> int:
        """Return how many of `keys` exist."""

    def fill(self, keys: list[str]) -> None:
        """Store a small value under each key."""

    def close(self) -> None: ...


class MooncakeApi:
    """A store with Mooncake's Python API: Mooncake's own, or ours."""

    def __init__(self, module: str, setup: dict[str, str], source: Buffer, target: Buffer) -> None:
        self._source, self._target = source, target
        self._store: Any = importlib.import_module(module).MooncakeDistributedStore()
        if code := self._store.setup(setup):
            raise RuntimeError(f"setup of {module} answered {code} to {setup}")
        for buffer in (source, target):
            if code := self._store.register_buffer(buffer.address, buffer.size):
                raise RuntimeError(f"register_buffer answered {code}")

    def clear(self) -> None:
        self._store.remove_all(True)

    def put(self, keys: Sequence[str], offsets: Sequence[int], size: int) -> None:
        places = [self._source.address + offset for offset in offsets]
        codes = self._store.batch_put_from(list(keys), places, [size] * len(keys))
        if any(codes):
            raise RuntimeError(f"batch_put_from answered {codes}")

    def get(self, keys: Sequence[str], offsets: Sequence[int], size: int) -> None:
        if len(keys) == 1:
            codes = [self._store.get_into(keys[0], self._target.address + offsets[0], size)]
        else:
            places = [self._target.address + offset for offset in offsets]
            codes = self._store.batch_get_into(list(keys), places, [size] * len(keys))
        if any(code != size for code in codes):
            raise RuntimeError(f"{len(keys)} gets answered {codes}")

    def exist(self, keys: list[str]) -> int:
        return sum(self._store.batch_is_exist(keys))

    def fill(self, keys: list[str]) -> None:
        for start in range(0, len(keys), 1000):
            some = keys[start : start + 1000]
            if code := self._store.put_batch(some, [b"64 bytes" * 8] * len(some)):
                raise RuntimeError(f"put_batch answered {code}")

    def close(self) -> None:
        self._store.close()


class StoreClient:
    """Answers the requests: each is one round, timed here, next to the calls."""

    def __init__(self, store: Store, source: Buffer, target: Buffer) -> None:
        self._store = store
        self._source, self._target = source, target
        self._round = 0
        self._resident = 0

    def bytes(self, size: int) -> dict[str, float]:
        """Put the whole source in values of `size`, in batches, and get it back: GB/s of both, and of plain memory copies."""
        self._round += 1
        offsets = range(0, self._source.size, size)
        keys = [f"{self._round}/{size}/{offset}" for offset in offsets]
        self._store.clear()
        self._resident = 0
        put_s = _timed(lambda: self._in_batches(self._store.put, keys, offsets, size))
        self._target.wipe()
        get_s = _timed(lambda: self._in_batches(self._store.get, keys, offsets, size))
        expect_equal(self._source, self._target, self._source.size)
        self._target.wipe()
        copy_s = _timed(lambda: self._copy(offsets, size))
        total = self._source.size / 1e9
        return {"put": total / put_s, "get": total / get_s, "copy": total / copy_s}

    def single(self, size: int, count: int) -> dict[str, float]:
        """Get `count` values of `size` one by one: the median in microseconds."""
        self._round += 1
        offsets = range(0, count * size, size)
        keys = [f"{self._round}/{size}/{offset}" for offset in offsets]
        self._store.clear()
        self._resident = 0
        self._in_batches(self._store.put, keys, offsets, size)
        self._target.wipe()
        took = []
        for key, offset in zip(keys, offsets, strict=True):
            began = time.perf_counter()
            self._store.get([key], [offset], size)
            took.append(time.perf_counter() - began)
        took.sort()
        expect_equal(self._source, self._target, count * size)
        return {"p50": took[count // 2] * 1e6, "p99": took[count * 99 // 100] * 1e6}

    def exist(self, resident: int, keys_per_call: int, in_flight: int, calls: int) -> dict[str, float]:
        """Ask for keys of which half are there, `in_flight` calls at a time: keys per second."""
        if self._resident != resident:
            self._store.clear()
            self._store.fill([f"{key:032x}" for key in range(resident)])
            self._resident = resident
        choose = random.Random(resident)
        asked = []
        for _ in range(calls):
            half = choose.sample(range(resident), keys_per_call // 2)
            both = [key for one in half for key in (f"{one:032x}", f"{one + resident:032x}")]
            asked.append(both)
        with ThreadPoolExecutor(in_flight) as pool:
            list(pool.map(self._store.exist, asked[:in_flight]))  # every thread and connection exists
            began = time.perf_counter()
            found = list(pool.map(self._store.exist, asked))
            took = time.perf_counter() - began
        if any(count != keys_per_call // 2 for count in found):
            raise WrongBytes(f"{sorted(set(found))} of {keys_per_call} keys were found where half are there")
        return {"rate": calls * keys_per_call / took}

    def close(self) -> None:
        self._store.close()

    def _copy(self, offsets: Sequence[int], size: int) -> None:
        for offset in offsets:
            ctypes.memmove(self._target.address + offset, self._source.address + offset, size)

    @staticmethod
    def _in_batches(
        call: Callable[[Sequence[str], Sequence[int], int], None], keys: Sequence[str], offsets: Sequence[int], size: int
    ) -> None:
        for start in range(0, len(keys), BATCH):
            call(keys[start : start + BATCH], offsets[start : start + BATCH], size)


class StreamClient:
    """The bare stream's reader: DEALERs that ask a ROUTER for everything once, and receive straight into the target."""

    def __init__(self, endpoints: Sequence[str], source: Buffer, target: Buffer) -> None:
        zmq = importlib.import_module("zmq")
        self._source, self._target = source, target
        self._context = zmq.Context(io_threads=len(endpoints))
        self._sockets = [self._context.socket(zmq.DEALER) for _ in endpoints]
        for connection, endpoint in zip(self._sockets, endpoints, strict=True):
            connection.linger = 0
            connection.rcvhwm = STREAM_QUEUE
            connection.connect(endpoint)

    def bytes(self, size: int) -> dict[str, float]:
        """Receive the whole source in frames of `size`, alternating between the connections: GB/s."""
        self._target.wipe()
        took = _timed(lambda: self._receive(size))
        expect_equal(self._source, self._target, self._source.size)
        return {"get": self._source.size / 1e9 / took}

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _receive(self, size: int) -> None:
        for connection in self._sockets:
            connection.send(str(size).encode())
        for index, offset in enumerate(range(0, self._target.size, size)):
            self._sockets[index % len(self._sockets)].recv_into(self._target.view(offset, size))


def own_stream(order: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
    """Start the bare stream's sender, on a thread, one ROUTER per connection; a frame's size on each begins a round."""
    zmq = importlib.import_module("zmq")
    source = Buffer(order["working_set_bytes"])
    source.fill(order["seed"])
    context = zmq.Context(io_threads=order["connections"])
    routers = []
    for _ in range(order["connections"]):
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.sndhwm = STREAM_QUEUE
        router.router_mandatory = True  # else frames beyond the queue are dropped instead of waiting
        router.bind("tcp://127.0.0.1:*")
        routers.append(router)
    endpoints = [router.get_string(zmq.LAST_ENDPOINT) for router in routers]
    threading.Thread(target=_stream, args=(routers, source), daemon=True).start()
    return {"endpoints": endpoints}


def _stream(routers: Sequence[Any], source: Buffer) -> None:
    while True:
        asked = [router.recv_multipart() for router in routers]
        size = int(asked[0][1])
        for index, offset in enumerate(range(0, source.size, size)):
            turn = index % len(routers)
            routers[turn].send_multipart([asked[turn][0], source.view(offset, size)], copy=False)


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextlib.contextmanager
def server(command: Sequence[str], port: int) -> Iterator[None]:
    """Run a server process that is listening on `port`, and end it with the context."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start to listen on port {port}")
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """Return a port of the loopback on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def own_ours(order: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
    """Run our store's server, as a cache-node does."""
    objects = importlib.import_module("mooncake_zmq.pool.rules.objects")
    directory = stack.enter_context(TemporaryDirectory(prefix="mczmq-bench-", dir="/dev/shm"))
    server = importlib.import_module("mooncake_zmq.pool.server.server").StoreServer(
        settings=objects.ObjectSettings(object_bytes=order["segment_bytes"], slab_bytes=64 << 20),
        directory=directory,
        cluster=Path(directory).name,
        node="bench",
        incarnation=1,
        endpoint="tcp://127.0.0.1:*",
        on_crash=_fail,
    )
    stack.callback(server.close)
    return {"master_server_addr": server.endpoint}


def _fail(error: BaseException) -> None:
    """End the process on a thread's bug: its measurements would mean nothing."""
    sys.stderr.write(f"{error!r}\n")
    os._exit(1)


def our_setup(at: dict[str, str], client: dict[str, Any]) -> dict[str, Any]:
    """Return our settings, by the names that Mooncake gives them where it has such. `client`: see
    `store.peer.ClientSettings`."""
    return {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp", **at, **client}


def own_mooncake(order: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
    """Run Mooncake's master, and a client of it that contributes memory if `segment_bytes` is not 0."""
    port = free_port()
    master = Path(sys.executable).parent / "mooncake_master"
    command = [str(master), "-rpc_port", str(port), "-metrics_port", str(free_port())]
    stack.enter_context(server(command, port))
    at = {"master_server_addr": f"127.0.0.1:{port}"}
    if order["segment_bytes"]:
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        if code := store.setup(mooncake_setup(at, order["segment_bytes"])):
            raise RuntimeError(f"setup answered {code}")
        stack.callback(store.close)
    return at


def mooncake_setup(at: dict[str, str], segment_bytes: int) -> dict[str, str]:
    """Return Mooncake's settings for TCP without a metadata server."""
    return {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "rdma_devices": "",
        "global_segment_size": str(segment_bytes),
        "local_buffer_size": str(64 << 20),
        **at,
    }


OWNERS = {"mooncake_zmq": own_ours, "mooncake": own_mooncake, "stream": own_stream}


def open_client(order: dict[str, Any]) -> StoreClient | StreamClient:
    """Return the client of an owner that answered `order["at"]`. Values lie in `working_set_bytes` of memory."""
    source, target = Buffer(order["working_set_bytes"]), Buffer(order["working_set_bytes"])
    source.fill(order["seed"])
    match order["store"]:
        case "stream":
            return StreamClient(order["at"]["endpoints"], source, target)
        case "mooncake":
            setup = mooncake_setup(order["at"], order["segment_bytes"])
            return StoreClient(MooncakeApi("mooncake.store", setup, source, target), source, target)
        case "mooncake_zmq":
            setup = our_setup(order["at"], order["client"])
            return StoreClient(MooncakeApi("mooncake_zmq.store", setup, source, target), source, target)
        case unknown:
            raise ValueError(f"there is no store {unknown!r}")


def main() -> None:
    """Run the process that the module's docstring describes."""
    # Libraries print to standard output; ours must carry answers only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    sys.path.pop(0)  # this file's directory: a module of a library must not be taken from there
    order = json.loads(sys.argv[1])
    with ExitStack() as stack:
        if order["role"] == "owner":
            answer(OWNERS[order["store"]](order, stack))
            sys.stdin.read()
            return
        client = open_client(order)
        stack.callback(client.close)
        answer({})
        for line in sys.stdin:
            request = json.loads(line)
            answer(getattr(client, request.pop("do"))(**request))


if __name__ == "__main__":
    main()
