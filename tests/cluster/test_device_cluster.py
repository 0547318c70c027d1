"""A cluster whose prefill and one decode compute on a GPU gives the same tokens as the bare engine on the CPU.

The GPU is a stand-in's, shared by the processes; with REQUIRE_GPU=1 it is the machine's own.
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import web
from toy_cluster import SmallCluster, eventually, free_port, of_the_engine_alone, small_cluster, until_none

from mooncake_zmq.engine import weights
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.operate.console.gateways import Gateways

pytestmark = pytest.mark.timeout(120)

MODEL = "dummy:tiny"
CONFIG = """
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


class DeviceCluster(SmallCluster):
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
    cuda = [f'device = "cuda"\nmetrics_port = {port}' for port in ports.values()]
    engines = {"prefill-a": cuda[0], "decode-a": cuda[1], "decode-b": 'backend = "numpy"'}
    with small_cluster(CONFIG.format(model=MODEL, cache=cache), engines, DeviceCluster) as cluster:
        cluster.ports = ports
        yield cluster
        cluster.stop()
        for node in cluster.nodes:
            log = (cluster.runtime_dir / "logs" / f"{node}.log").read_text()
            events = [json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")]
            warmed = "engine_warm" in events[: events.index("ready")]
            assert warmed == (node in ("prefill-a", "decode-a")), f"{node} is ready with its kernels compiled"


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
            assert answer["choices"][0]["token_ids"] == of_the_engine_alone(engine, prompt, 20)
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
