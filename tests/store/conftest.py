"""A store server on a thread, over ipc or tcp, and clients of it that share its memory or do not."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_harness import SLAB_BYTES
from store_servers import store_servers

from mooncake_zmq.pool.server.server import StoreServer
from mooncake_zmq.store import MooncakeDistributedStore


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., StoreServer]]:
    with store_servers(tmp_path, slabs=4, slab_bytes=SLAB_BYTES) as make:
        yield make


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
