"""A pool on this host for engines, and vLLM engines over it where REQUIRE_VLLM names a Python that has vLLM."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mooncake_zmq.store.rules.object_log import ObjectSsdSettings
from mooncake_zmq.store.rules.objects import ObjectSettings
from mooncake_zmq.store.server.object_disk import ObjectDisk
from mooncake_zmq.store.server.server import StoreServer

SLAB_BYTES = 1 << 20


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[Callable[..., StoreServer]]:
    """A store server; its segment is sought and swept in this test's own directory."""
    servers: list[StoreServer] = []
    crashes: list[BaseException] = []

    def make(
        name: str = "pool", *, endpoint: str = "", incarnation: int = 1, slabs: int = 32, ssd_bytes: int = 0
    ) -> StoreServer:
        ssd = (
            ObjectSsdSettings(directory=str(tmp_path / "ssd"), bytes=ssd_bytes, ahead=1.0) if ssd_bytes else ObjectSsdSettings()
        )
        settings = ObjectSettings(object_bytes=slabs * SLAB_BYTES, slab_bytes=SLAB_BYTES, max_objects=4096, ssd=ssd)
        server = StoreServer(
            settings=settings,
            directory=tmp_path,
            cluster="test",
            node=name,
            incarnation=incarnation,
            endpoint=endpoint or f"ipc://{tmp_path}/{name}.sock",
            on_crash=crashes.append,
            probe_s=0.05,
            disk=ObjectDisk.open(ssd.directory, settings.slab_bytes) if ssd_bytes else None,
        )
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.check()
        server.close()
    assert not crashes
