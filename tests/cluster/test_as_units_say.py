"""A cluster as bin/install's units say, with a service manager of the test's own: ready, alive, drained, stuck."""

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from toy_cluster import Stream, eventually, expected_tokens, free_port, greedy
from unit_files import ROOT, Service, config_text, running

from mooncake_zmq.operate.local_nodes import collect_dumps

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def root(directory: Path) -> Path:
    install = [ROOT / "bin/install", "--root", directory, "--python", sys.executable]
    subprocess.run(install, check=True, capture_output=True)
    (directory / "shm").mkdir()
    (directory / "etc/mooncake-zmq/cluster.toml").write_text(config_text(directory / "shm", directory, free_port()))
    return directory


def ask(root: Path, tokens: int) -> Stream:
    config = (root / "etc/mooncake-zmq/cluster.toml").read_text()
    port = config.partition("http_port = ")[2].split()[0]
    return Stream(f"http://127.0.0.1:{port}", greedy(prompt=[1, 2, 3], max_tokens=tokens, stream=True))


def hears(root: Path, node: str, peer: str) -> bool:
    dump = collect_dumps(root / "run/mooncake-zmq", [node]).get(node)
    return dump is not None and dump["session"]["peers"][peer]["up"]


def units(root: Path) -> dict[str, str]:
    command = [root / "opt/mooncake-zmq/bin/mooncake-zmq", "config", "units", root / "etc/mooncake-zmq/cluster.toml"]
    named = subprocess.run(command, check=True, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}).stdout.split()
    return {unit.partition("@")[2].removesuffix(".service"): unit for unit in named}


def test_a_cluster_serves_drains_and_shows_an_engine_that_hangs(root: Path) -> None:
    known = units(root)
    with running(root, [unit for node, unit in known.items() if node != "decode-b"]) as services:
        for service in services.values():
            service.await_said("WATCHDOG=1", times=2)
            service.await_said("STATUS=serving; connected to ")
        assert any(word == "STATUS=allocating shared memory" for word in services["cache-a"].said)
        assert any(word.startswith("EXTEND_TIMEOUT_USEC=") for word in services["prefill-a"].said)

        with ask(root, 200) as stream:
            stream.read(5)
            services["decode-a"].stop()
            stuck = services["decode-b"] = Service(root, known["decode-b"])
            assert stream.read() == expected_tokens([1, 2, 3], 200)
        assert services["decode-a"].ended() == 0
        assert {"STOPPING=1", "STATUS=draining", "EXTEND_TIMEOUT_USEC=100000000"} <= set(services["decode-a"].listen())

        stuck.await_ready()
        stuck.await_said("WATCHDOG=1")
        for node in ("gateway-0", "conductor-0", "prefill-a"):
            eventually(partial(hears, root, node, "decode-b"), what=f"{node} is connected to the decode")
        with ask(root, 5) as stream:
            stream.read(1)  # the prefill's
            stuck.await_said("STATUS=the engine is ", times=4)
            assert "WATCHDOG=1" not in stuck.said[stuck.said.index(next(w for w in stuck.said if "the engine is" in w)) :]
            services["prefill-a"].await_said("WATCHDOG=1", from_now=True)
        stuck.process.send_signal(signal.SIGABRT)  # what the watchdog does
        assert stuck.process.wait(10) == -signal.SIGABRT
        assert "modelled.py" in stuck.told(), "where the engine hung"

        services["gateway-0"].stop()
        assert services["gateway-0"].ended() == 0
        workers = [services[node] for node in ("prefill-a", "cache-a", "conductor-0")]
        for worker in workers:
            worker.stop()
        assert [worker.ended() for worker in workers] == [0, 0, 0]
    assert list((root / "shm").iterdir()) == []
