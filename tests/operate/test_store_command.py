"""`mooncake-zmq store`: a store without a configuration, a model or another node, and what its options refuse."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from ports import free_port
from waiting import eventually

from mooncake_zmq.cli import main
from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.config.load import load, load_text
from mooncake_zmq.config.summary import summary
from mooncake_zmq.config.warnings import warnings
from mooncake_zmq.store import MooncakeDistributedStore

VALUE = os.urandom(3 << 20)


def printed(*options: str) -> str:
    run = CliRunner().invoke(main, ["store", "--dry-run", *options])
    assert run.exit_code == 0, run.output
    return run.output


def test_a_dry_run_prints_a_file_of_one_store_that_warns_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "store.toml").write_text(
        printed(
            *("--listen", "10.0.0.1:7300", "--keys", str(tmp_path), "--stream-port", "7400", "--name", "pool-a"),
            *("--bytes", "256MiB", "--ssd", str(tmp_path / 'a "place"'), "--ssd-bytes", "10GiB", "--metrics", "127.0.0.1:9100"),
        )
    )
    loaded = load(tmp_path / "store.toml", environment={})
    (node,), objects = loaded.config.nodes, loaded.config.cache_node.objects
    assert (node.name, node.store_endpoint, node.store_stream_port) == ("pool-a", "tcp://10.0.0.1:7300", 7400)
    assert (node.metrics_host, node.metrics_port) == ("127.0.0.1", 9100)
    assert (objects.object_bytes, objects.ssd.bytes) == (256 << 20, 10 << 30)
    assert objects.ssd.directory == str(tmp_path / 'a "place"')
    assert loaded.config.security.keys == str(tmp_path)
    assert list(warnings(loaded)) == []
    assert "without a model" in next(summary(loaded))


def test_without_options_it_takes_a_quarter_of_what_is_free_on_loopback() -> None:
    loaded = load_text(printed(), "store", environment={})
    assert loaded.config.nodes[0].store_endpoint == "tcp://127.0.0.1:7301"
    assert loaded.config.cache_node.objects.object_bytes >= 64 << 20


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--listen", "10.0.0.1:7300"), "--allow-plain-tcp"),
        (("--listen", "0.0.0.0:7300", "--allow-plain-tcp"), "no wildcard"),
        (("--listen", "7300"), "--listen 7300: write ADDRESS:PORT"),
        (("--bytes", "4GG"), "--bytes 4GG: write a size such as 4GiB"),
        (("--bytes", "1MiB"), "object_bytes"),
        (("--ssd", "/tmp/x"), "--ssd and --ssd-bytes go together"),
        (("--metrics", "9100"), "--metrics 9100: write ADDRESS:PORT"),
        (("--name", "A store"), "name must be"),
        (("--set", "cache_node.objects.slab"), "write KEY=VALUE"),
        (("--set", "cache_node.objects.slab_byte=1"), "did you mean slab_bytes?"),
    ],
)
def test_an_option_that_is_wrong_is_one_line(options: tuple[str, ...], said: str) -> None:
    run = CliRunner().invoke(main, ["store", "--dry-run", *options])
    assert run.exit_code == 2
    assert said in run.output
    assert len(run.output.splitlines()) == 1


@pytest.mark.parametrize(
    "nodes", ['[[nodes]]\nname = "a"\nrole = "conductor"', '[[nodes]]\nname = "a"\nrole = "cache-node"'], ids=["role", "store"]
)
def test_a_deployment_without_an_engine_has_stores_alone(nodes: str) -> None:
    with pytest.raises(ConfigError, match='with model.engine "none" all are cache-nodes with a store_endpoint'):
        load_text(f'[model]\nengine = "none"\n{nodes}', "f", environment={})


def test_it_serves_on_a_machine_without_a_model_and_outlives_kill_9_by_its_ssd(tmp_path: Path) -> None:
    port, metrics = free_port(), f"127.0.0.1:{free_port()}"
    options = ["--listen", f"127.0.0.1:{port}", "--bytes", "128MiB", "--ssd", str(tmp_path / "ssd"), "--ssd-bytes", "1GiB"]
    settings = (f"cluster.runtime_dir={tmp_path}", f"cluster.shm_dir={tmp_path}", "cache_node.objects.ssd.ahead=1")
    options += ["--name", "pool", "--metrics", metrics, *(part for each in settings for part in ("--set", each))]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "no models"), "HF_HUB_OFFLINE": "1"}

    def started() -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "mooncake_zmq", "store", *options]
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    process = started()
    try:
        client = connected(f"localhost:{port}")
        assert client.put("key", VALUE) == 0
        assert client.get("key") == VALUE
        until_written(metrics)
        process.kill()
        process.wait()
        process = started()
        eventually(lambda: client.get("key") == VALUE, 60, "the value is back", poll_s=0.05)
        client.close()
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not list(tmp_path.glob("mooncake=*"))


def connected(address: str) -> MooncakeDistributedStore:
    """Return a client of a store that is starting."""

    def connect() -> MooncakeDistributedStore | None:
        client = MooncakeDistributedStore()
        if client.setup({"local_hostname": "engine", "master_server_addr": address}) == 0:
            return client
        client.close()
        return None

    return eventually(connect, 60, "the store serves", poll_s=0.1)


def until_written(metrics: str) -> None:
    """Wait until the index of the SSD has the value."""
    written = "\nmooncake_store_ssd_objects 1.0\n"

    def is_written() -> bool:
        with suppress(httpx.ConnectError):  # the metrics are served a moment after the store
            return written in httpx.get(f"http://{metrics}/metrics").text
        return False

    eventually(is_written, 60, "it is written", poll_s=0.05)
