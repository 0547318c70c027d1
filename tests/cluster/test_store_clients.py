"""The store of a running cache-node: values go in and out while it serves a cluster, and outlive no process that held them."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_cluster import ROOT, ToyCluster, eventually, free_port, until_none

from mooncake_zmq.store import MooncakeDistributedStore

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ToyCluster]:
    with tempfile.TemporaryDirectory(prefix="mz-") as path, tempfile.TemporaryDirectory(prefix="mz-ssd-") as ssd:
        directory = Path(path)
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        config = directory / "store.toml"
        node = 'name = "cache-a"\nrole = "cache-node"\n'
        config.write_text((ROOT / "configs/toy.toml").read_text().replace(node, f'{node}store_endpoint = "{endpoint}"\n'))
        settings = ("cache_node.objects.object_bytes=67108864", "cache_node.objects.slab_bytes=8388608")
        # Nothing is written ahead: only a graceful end brings values to disk.
        settings += (f"cache_node.objects.ssd.directory={ssd}", "cache_node.objects.ssd.ahead=0.0")
        cluster = ToyCluster(directory / "run", config=str(config), settings=settings)
        cluster.endpoint = endpoint
        with cluster.unbroken():
            until_none(cluster.missing, 30)
            yield cluster


def connect(cluster: ToyCluster) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    assert store.setup({"local_hostname": "localhost", "master_server_addr": cluster.endpoint}) == 0
    return store


def test_what_one_client_puts_another_gets(cluster: ToyCluster) -> None:
    writer, reader = connect(cluster), connect(cluster)
    value = bytes(range(256)) * 8192
    try:
        assert writer.put("answer", value) == 0
        assert reader.get("answer") == value
        assert reader.get_size("answer") == len(value)
        assert reader.batch_is_exist(["answer", "nothing"]) == [1, 0]
    finally:
        writer.close()
        reader.close()


def test_a_killed_cache_node_is_a_miss_and_its_next_life_serves(cluster: ToyCluster) -> None:
    store = connect(cluster)
    try:
        assert store.put("gone", b"x" * 100_000) == 0
        killed = cluster.pid("cache-a")
        cluster.signal("cache-a", signal.SIGKILL)
        eventually(lambda: cluster.pid("cache-a") != killed, 30, "the cache-node is restarted")
        eventually(lambda: store.put("new", b"y") == 0, 30, "the store takes values again")
        assert store.get("gone") == b""
        assert store.get("new") == b"y"
    finally:
        store.close()
    until_none(cluster.missing, 30)


def test_what_a_stopped_cache_node_held_its_next_life_serves_from_disk(cluster: ToyCluster) -> None:
    store = connect(cluster)
    try:
        assert store.put("kept", b"x" * 100_000) == 0
        stopped = cluster.pid("cache-a")
        cluster.signal("cache-a", signal.SIGTERM)
        eventually(lambda: cluster.pid("cache-a") != stopped, 30, "the cache-node is started again")
        eventually(lambda: store.is_exist("kept") == 1, 30, "the store serves again")
        assert store.get("kept") == b"x" * 100_000
    finally:
        store.close()
    until_none(cluster.missing, 30)
