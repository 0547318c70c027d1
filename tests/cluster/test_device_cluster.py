"""A cluster whose prefill and one decode compute on a GPU gives the same tokens as the bare engine on the CPU.

The GPU is a stand-in's, shared by the processes; with REQUIRE_GPU=1 it is the machine's own.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import web
from toy_cluster import SMALL_NODES, SmallCluster, eventually, free_port, until_none

from mooncake_zmq.engine import weights
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.operate.console.gateways import Gateways

pytestmark = pytest.mark.timeout(120)

NODES = ("conductor-0", "cache-a", "prefill-a", "decode-a", "decode-b", "gateway-0")
MODEL = "dummy:tiny"
CONFIG = (
    """
[model]
path = "{model}"
cache_dir = "{cache}"
max_model_len = 512
[cache_node]
pool_bytes = 16_777_216
[prefill]
slab_bytes = 8_388_608
own_reuse = false
[decode]
capacity_tokens = 4096
"""
    + SMALL_NODES
    + """[[nodes]]
name = "prefill-a"
role = "prefill"
device = "cuda"
metrics_port = {prefill_port}
[[nodes]]
name = "decode-a"
role = "decode"
device = "cuda"
metrics_port = {decode_port}
[[nodes]]
name = "decode-b"
role = "decode"
backend = "numpy"
"""
)


class DeviceCluster(SmallCluster):
    nodes = NODES

    def counts(self, port: int) -> dict[str, float]:
        lines = web.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text.splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def cluster(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceCluster]:
    if os.environ.get("REQUIRE_GPU") != "1":
        stand_in = str(Path(__file__).parent / "stand_in_gpu")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([stand_in, os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setenv("STAND_IN_GPU", str(tmp_path))
    ports = {"prefill_port": free_port(), "decode_port": free_port()}
    config = tmp_path / "device.toml"
    config.write_text(CONFIG.format(model=MODEL, cache=cache, **ports))
    with tempfile.TemporaryDirectory(prefix="mz-") as path:
        cluster = DeviceCluster(Path(path), config=str(config))
        cluster.ports = ports
        try:
            cluster.start()
            yield cluster
            cluster.stop()
            assert cluster.leftovers() == []
            logs = [(Path(path) / "logs" / f"{node}.log").read_text() for node in NODES]
            told = [line for log in logs for line in log.splitlines() if '"critical"' in line or '"error"' in line]
            assert told == []
            for node, log in zip(NODES, logs, strict=True):
                events = [json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")]
                warmed = "engine_warm" in events[: events.index("ready")]
                assert warmed == (node in ("prefill-a", "decode-a")), f"{node} is ready with its kernels compiled"
        finally:
            cluster.kill()


def expected(engine: Any, prompt: list[int], count: int) -> list[int]:
    sequence = engine.new_sequence(len(prompt) + count)
    logits = engine.prefill(sequence, np.asarray(prompt, np.int32))
    tokens = [int(np.argmax(logits[-1]))]
    for _ in range(count - 1):
        tokens.append(int(np.argmax(engine.decode([sequence], np.asarray(tokens[-1:], np.int32))[0])))
    return tokens


def test_tokens_of_a_cluster_on_a_gpu_are_those_of_the_bare_engine(cluster: DeviceCluster, cache: Path) -> None:
    engine = weights.open_model(prepare(MODEL, cache))
    random = np.random.default_rng(4)
    prompts = [random.integers(0, 500, length).tolist() for length in (40, 75, 100, 130, 64, 200)]
    gateways = Gateways({"gateway-0": cluster.url})

    def ask(prompt: list[int]) -> dict[str, Any]:
        return cluster.complete_text(model=engine.spec.name, prompt=prompt, max_tokens=20)

    def answers_while_only(decode: str) -> set[str]:
        """Sends every prompt at once while the other decode is cordoned; returns the decodes that answered."""
        (other,) = {"decode-a", "decode-b"} - {decode}
        assert gateways.order(f"/admin/drain/{other}", "POST")[1]["cordoned"]
        with ThreadPoolExecutor(len(prompts)) as threads:
            asked = list(threads.map(ask, prompts))
        for prompt, answer in zip(prompts, asked, strict=True):
            assert answer["choices"][0]["token_ids"] == expected(engine, prompt, 20)
        assert gateways.order(f"/admin/drain/{other}", "DELETE")[1]["state"] == "ready"
        return {answer["mooncake"]["decode"] for answer in asked}

    def counted(port: str, name: str) -> float:
        return cluster.counts(cluster.ports[port])[f"mooncake_{name}_total"]

    assert answers_while_only("decode-a") == {"decode-a"}
    assert counted("decode_port", "cuda_opened") == 1, "KV went by handle to the decode on the same GPU"
    eventually(lambda: counted("decode_port", "cuda_staged_bytes") > 0, what="the decode stepped on the GPU")
    assert answers_while_only("decode-b") == {"decode-b"}
    eventually(lambda: counted("prefill_port", "data_server_reads") > 0, what="KV went by frames to the decode on the CPU")
    eventually(lambda: counted("prefill_port", "cuda_pinned_bytes") > 0, what="KV was put into the pool")

    def hits_the_pool() -> bool:
        body = {"model": engine.spec.name, "prompt": prompts[-1], "max_tokens": 2}
        return bool(cluster.complete_text(**body)["usage"]["prompt_tokens_details"]["cached_tokens"])

    eventually(hits_the_pool)
    until_none(cluster.busy_gauges, 20)
