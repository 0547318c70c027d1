"""A pool on this host for engines, and vLLM engines over it where REQUIRE_VLLM names a Python that has vLLM."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_servers import store_servers

from mooncake_zmq.pool.server.server import StoreServer


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[Callable[..., StoreServer]]:
    """A store server; its segment is sought and swept in this test's own directory."""
    with store_servers(tmp_path, slabs=32, slab_bytes=1 << 20) as make:
        yield make
