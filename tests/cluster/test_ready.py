"""How a gateway begins and ends, as clients see it: ready means that nothing is computed twice; no stream ends unsaid."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import web
from toy_cluster import NODES, ToyCluster, eventually, expected_tokens, until_none

pytestmark = pytest.mark.timeout(120)

PROMPT = [(7 * position) % 250 for position in range(400)]
REUSABLE = (len(PROMPT) - 1) // 32 * 32
CACHES = ("cache-a", "cache-b")
DECODES = ("decode-a", "decode-b")
SLOW = "costs.prefill_token_s=0.001"
"""Computing takes longer than loading, whatever the toy was measured at: else what lies on disk may be left there."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mz-") as path:
        yield Path(path)


def ask(cluster: ToyCluster) -> dict[str, Any]:
    with cluster.stream(prompt=PROMPT, max_tokens=8) as answer:
        assert answer.read() == expected_tokens(PROMPT, 8)
        return answer.served


def kill_everything(cluster: ToyCluster) -> None:
    assert cluster.process is not None
    cluster.process.send_signal(signal.SIGSTOP)  # or it would start again what dies
    for node in NODES:
        cluster.signal(node, signal.SIGKILL)
    cluster.process.kill()
    cluster.process.wait()


def state(cluster: ToyCluster) -> dict[str, Any]:
    try:
        return web.get(f"{cluster.url}/health", timeout=2).json()
    except httpx.HTTPError:
        return {}


def test_after_a_crash_of_everything_what_lies_on_disk_is_reused_as_soon_as_a_gateway_is_ready(directory: Path) -> None:
    settings = ("prefill.own_reuse=false", "cache_node.ssd.ahead=1.0", "gateway.requests.ready_wait_s=60.0", SLOW)
    cluster = ToyCluster(directory, settings=(*settings, f"cache_node.ssd.directory={directory}/ssd"))
    children = []

    def start(*nodes: str) -> None:
        for node in nodes:
            role = "cache-node" if node in CACHES else node.split("-")[0]
            command = [sys.executable, "-m", "mooncake_zmq", role, "--node", node, *cluster.arguments]
            children.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    try:
        cluster.start()
        until_none(cluster.missing, 30)
        node = ask(cluster)["prefill"].replace("prefill", "cache")
        eventually(lambda: cluster.dumps()[node]["gauges"]["cached_disk_blocks"] >= REUSABLE // 32, 20, "all is on disk")
        kill_everything(cluster)
        start(*(node for node in NODES if node not in CACHES))
        eventually(lambda: state(cluster).get("not_connected") == list(CACHES), 30, "the others hear each other")
        eventually(lambda: not state(cluster)["missing"], 30, "requests could be served")
        assert state(cluster)["status"] == "starting"
        start(*CACHES)
        eventually(cluster.health, 30, "the gateway is ready")
        served = ask(cluster)
        assert served["cached_local"] + served["cached_remote"] == REUSABLE
    finally:
        cluster.kill()
        for child in children:
            child.terminate()
        assert [child.wait(30) for child in children] == [0] * len(children)


@pytest.mark.parametrize("signals", [1, 2])
def test_a_gateway_that_may_wait_no_longer_says_so_in_every_stream(directory: Path, signals: int) -> None:
    timeout_s = 0.2 if signals == 1 else 600.0
    cluster = ToyCluster(directory, settings=(f"cluster.drain_timeout_s={timeout_s}",))
    log = directory / "logs" / "gateway-0.log"
    try:
        cluster.start()
        with cluster.stream(prompt=[1, 2, 3], max_tokens=3000) as stream, web.Client(timeout=30) as other:
            stream.read(5)
            for decode in DECODES:  # or a slow gateway would find the answer whole
                cluster.signal(decode, signal.SIGSTOP)
            gateway = cluster.pid("gateway-0")
            for _ in range(signals):
                os.kill(gateway, signal.SIGTERM)
                eventually(lambda: '"draining"' in log.read_text(), what="it drains")
            if signals == 1:
                stream.read()
                assert (stream.done, [error["code"] for error in stream.errors]) == (False, ["gateway_stopped"])
            other.close()
            eventually(lambda: cluster.pid("gateway-0") != gateway, 20, "it ended")
            for decode in DECODES:
                cluster.signal(decode, signal.SIGCONT)
        assert "Traceback" not in log.read_text()
        assert "exception" not in log.read_text()
        until_none(cluster.busy_gauges, 20)
        cluster.stop()
        assert cluster.leftovers() == []
    finally:
        cluster.kill()
