"""Servers of stores in a test's own process and directory, and that all is well with them in the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mooncake_zmq.pool.rules.object_log import ObjectSsdSettings
from mooncake_zmq.pool.rules.object_settings import ObjectSettings
from mooncake_zmq.pool.server.server import StoreServer
from mooncake_zmq.pool.ssd.object_disk import ObjectDisk

SSD_BYTES = 96 << 20
HERE = ("directory", "cluster", "node", "incarnation", "endpoint", "host", "on_crash", "probe_s", "sockets", "on_engine_blocks")
"""What a server is told beside its settings."""


def store_server(
    directory: Path, *, slabs: int, slab_bytes: int, ssd: dict[str, Any] | None = None, **more: Any
) -> StoreServer:
    """`ssd`: settings of an SSD tier, if there is one. `more`: those of the pool, and what `StoreServer` takes."""
    told = {"cluster": "test", "node": "a", "incarnation": 1, "endpoint": "tcp://127.0.0.1:*", "on_crash": pytest.fail}
    told |= {name: more.pop(name) for name in HERE if name in more}
    if ssd is not None:
        more["ssd"] = ObjectSsdSettings(**({"directory": str(directory / "ssd"), "bytes": SSD_BYTES} | ssd))
    sizes = {"object_bytes": slabs * slab_bytes, "slab_bytes": slab_bytes, "max_objects": 4096}
    settings = ObjectSettings(**(sizes | more))
    disk = None if ssd is None else ObjectDisk.open(settings.ssd.directory, settings.slab_bytes)
    return StoreServer(settings=settings, directory=directory, disk=disk, **told)


@contextmanager
def store_servers(home: Path, **usual: Any) -> Iterator[Callable[..., StoreServer]]:
    """Makes them, over ipc unless told otherwise; nothing of them is left. `usual`: unless one is told otherwise."""
    servers: list[StoreServer] = []
    crashes: list[BaseException] = []

    def make(node: str = "node-1", *, endpoint: str = "", **more: Any) -> StoreServer:
        told = {"on_crash": crashes.append, "probe_s": 0.05} | usual | more
        servers.append(store_server(home, node=node, endpoint=endpoint or f"ipc://{home}/{node}.sock", **told))
        return servers[-1]

    yield make
    for server in servers:
        server.check()
        server.close()
    assert not crashes
    assert not list(home.glob("mooncake=*")), "segments and life files are gone"
