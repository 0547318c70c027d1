"""A cluster whose prefill and one decode compute on a GPU gives the same tokens as the bare engine on the CPU.

The GPU is a stand-in's, shared by the processes; with REQUIRE_GPU=1 it is the machine's own.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import numpy as np
import pytest
from toy_cluster import ToyCluster, eventually, free_port, until_none

from mooncake_zmq.engine import weights
from mooncake_zmq.engine.prepare import prepare

pytestmark = pytest.mark.timeout(120)

NODES = ("conductor-0", "cache-a", "prefill-a", "decode-a", "decode-b", "gateway-0")
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
[costs]
decode_step_s = 0.023  # given, so not measured: both decodes are taken for equals, and both are chosen
[[nodes]]
name = "conductor-0"
role = "conductor"
[[nodes]]
name = "cache-a"
role = "cache-node"
[[nodes]]
name = "prefill-a"
role = "prefill"
device = "cuda"
metrics_port = {prefill_port}
[[nodes]]
name = "decode-a"
role = "decode"
device = "cuda"
metrics_port = {decode_port}
settings = {{ max_requests = 2 }}
[[nodes]]
name = "decode-b"
role = "decode"
backend = "numpy"
[[nodes]]
name = "gateway-0"
role = "gateway"
"""


class DeviceCluster(ToyCluster):
    nodes = NODES

    def complete(self) -> bool:
        detail = self.health()
        wanted = {"conductor": ["conductor-0"], "prefill": ["prefill-a"], "decode": ["decode-a", "decode-b"]}
        return detail is not None and {role: detail["peers"][role] for role in wanted} == wanted

    def counts(self, port: int) -> dict[str, float]:
        lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text.splitlines()
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
    answers: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        body = {"model": engine.spec.name, "prompt": prompts[index], "max_tokens": 20}
        answers[index] = cluster.complete_text(**body)["choices"][0]["token_ids"]

    def every_way_was_taken() -> bool:
        """Which decode a request goes to is the conductor's choice."""
        threads = [Thread(target=ask, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, prompt in enumerate(prompts):
            assert answers.pop(index) == expected(engine, prompt, 20)
        decode, prefill = (cluster.counts(cluster.ports[port]) for port in ("decode_port", "prefill_port"))
        assert decode["mooncake_cuda_opened_total"] == 1
        stepped = decode["mooncake_cuda_staged_bytes_total"] > 0
        return stepped and prefill["mooncake_data_server_reads_total"] > 0 and prefill["mooncake_cuda_pinned_bytes_total"] > 0

    eventually(every_way_was_taken, 60, "both decodes, by handle and by frames, and puts into the pool")

    def hits_the_pool() -> bool:
        body = {"model": engine.spec.name, "prompt": prompts[-1], "max_tokens": 2}
        return bool(cluster.complete_text(**body)["usage"]["prompt_tokens_details"]["cached_tokens"])

    eventually(hits_the_pool)
    until_none(cluster.busy_gauges, 20)
