"""A store server on a thread, over ipc or tcp, and clients of it that share its memory or do not."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest

from mooncake_zmq.store import MooncakeDistributedStore
from mooncake_zmq.store.rules.object_log import ObjectSsdSettings
from mooncake_zmq.store.rules.objects import ObjectSettings
from mooncake_zmq.store.server.object_disk import ObjectDisk
from mooncake_zmq.store.server.server import StoreServer

SLAB_BYTES = 4 << 20
SSD_BYTES = 96 << 20
WORK_GAUGES = ("leases", "puts", "writing_objects", "quarantined_objects", "reserved_bytes")
SSD_WORK_GAUGES = ("ssd_demoting", "ssd_promoting", "ssd_erasing")


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = monotonic() + timeout_s
    while not condition():
        assert monotonic() < deadline, f"waited in vain for: {what}"
        sleep(0.01)


def idle(server: StoreServer) -> bool:
    gauges = server.gauges()
    return not any(gauges[name] for name in WORK_GAUGES) and not any(gauges.get(name) for name in SSD_WORK_GAUGES)


class Memory:
    """Application memory at an address."""

    def __init__(self, content: bytes | int) -> None:
        self.buffer = ctypes.create_string_buffer(
            content if isinstance(content, int) else bytes(content), None if isinstance(content, int) else len(content)
        )
        self.address = ctypes.addressof(self.buffer)
        self.size = len(self.buffer)

    def bytes(self, start: int = 0, size: int | None = None) -> bytes:
        return self.buffer.raw[start : self.size if size is None else start + size]


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., StoreServer]]:
    servers: list[StoreServer] = []
    crashes: list[BaseException] = []

    def make(
        node: str = "node-1", *, endpoint: str = "", incarnation: int = 1, slabs: int = 4, ssd: dict | None = None, **changes
    ) -> StoreServer:
        """`ssd`: settings of an SSD tier, if there is one."""
        on_crash = changes.pop("on_crash", crashes.append)
        if ssd is not None:
            changes["ssd"] = ObjectSsdSettings(**{"directory": str(tmp_path / "ssd"), "bytes": SSD_BYTES, **ssd})
        sizes = {"object_bytes": slabs * SLAB_BYTES, "slab_bytes": SLAB_BYTES, "max_objects": 4096}
        settings = ObjectSettings(**(sizes | changes))
        server = StoreServer(
            settings=settings,
            directory=tmp_path,
            cluster="test",
            node=node,
            incarnation=incarnation,
            endpoint=endpoint or f"ipc://{tmp_path}/{node}.sock",
            on_crash=on_crash,
            probe_s=0.05,
            disk=None if ssd is None else ObjectDisk.open(settings.ssd.directory, settings.slab_bytes),
        )
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.check()
        server.close()
    assert not crashes
    assert not list(tmp_path.glob("mooncake=*")), "segments and life files are gone"


@pytest.fixture(params=["ipc", "tcp"])
def server(request, make_server) -> StoreServer:
    return make_server(endpoint="" if request.param == "ipc" else "tcp://127.0.0.1:*")


@pytest.fixture
def connect() -> Iterator[Callable[..., MooncakeDistributedStore]]:
    stores: list[MooncakeDistributedStore] = []

    def open_store(*servers: StoreServer, **config) -> MooncakeDistributedStore:
        store = MooncakeDistributedStore()
        address = ",".join(server.endpoint for server in servers)
        assert store.setup({"local_hostname": "me", "master_server_addr": address, **config}) == 0
        stores.append(store)
        return store

    yield open_store
    for store in stores:
        store.close()


@pytest.fixture(params=["shared", "streamed"])
def store(request, server, connect) -> MooncakeDistributedStore:
    return connect(server, share_memory=request.param == "shared")
