"""A store server on a thread, over ipc or tcp, and clients of it that share its memory or do not."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_harness import SLAB_BYTES, SSD_BYTES

from mooncake_zmq.store import MooncakeDistributedStore
from mooncake_zmq.store.rules.object_log import ObjectSsdSettings
from mooncake_zmq.store.rules.objects import ObjectSettings
from mooncake_zmq.store.server.object_disk import ObjectDisk
from mooncake_zmq.store.server.server import StoreServer


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
