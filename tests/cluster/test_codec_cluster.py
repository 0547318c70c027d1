"""A cluster whose blocks are coded gives one answer, however its KV came about: computed, loaded, handed off, after a crash."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import web
from toy_cluster import SmallCluster, eventually, free_port, of_the_engine_alone, small_cluster

from mooncake_zmq.engine import weights
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.kv.codec import CODECS

pytestmark = pytest.mark.timeout(120)

MODEL, CODEC = "dummy:tiny", "int8"
PROMPTS, ANSWER = 20, 24
LONG = 1500
"""Tokens of an answer that is not over before its decode is killed."""
CONFIG = """
[model]
path = "{model}"
cache_dir = "{cache}"
max_model_len = 2048
kv_codec = "{codec}"
[cache_node]
pool_bytes = 16_777_216
[prefill]
slab_bytes = 8_388_608
own_reuse = false
[decode]
capacity_tokens = 16_384
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SmallCluster]:
    numpy, port = 'backend = "numpy"', free_port()
    engines = {"prefill-a": f"{numpy}\nmetrics_port = {port}", "decode-a": numpy, "decode-b": numpy}
    settings = CONFIG.format(model=MODEL, cache=tmp_path / "models", codec=CODEC)
    with small_cluster(settings, engines) as cluster:
        cluster.metrics_port = port
        yield cluster


def test_greedy_tokens_are_the_same_cold_warm_handed_off_and_after_a_kill(cluster: SmallCluster, tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    prompts = [random.integers(0, 500, int(length)).tolist() for length in random.integers(70, 300, PROMPTS)]
    engine = weights.load_engine(prepare(MODEL, tmp_path / "models"), codec=CODECS[CODEC])
    expected = [of_the_engine_alone(engine, prompt, ANSWER) for prompt in prompts]
    name = json.loads(web.get(f"{cluster.url}/v1/models").text)["data"][0]["id"]

    def ask(prompt: list[int]) -> dict[str, Any]:
        return cluster.complete_text(model=name, prompt=prompt, max_tokens=ANSWER)

    with ThreadPoolExecutor(4) as threads:
        cold, warm = (list(threads.map(ask, prompts)) for _ in range(2))
    for answers in (cold, warm):
        assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
    assert {answer["mooncake"]["decode"] for answer in cold + warm} <= {"decode-a", "decode-b"}, "all is handed off"
    assert not any(answer["mooncake"]["cached_local"] for answer in cold)
    assert all(answer["mooncake"]["cached_local"] >= 64 for answer in warm)

    bytes_per_token = 2 * CODECS[CODEC].token_bytes(2, 16)
    assert warm[0]["mooncake"]["kv_codec"] == CODEC
    assert cluster.health()["kv"] == {"codec": CODEC, "bytes_per_token": warm[0]["mooncake"]["kv_bytes_per_token"]}
    exposed = web.get(f"http://127.0.0.1:{cluster.metrics_port}/metrics").text
    assert f'mooncake_kv_bytes_per_token{{codec="{CODEC}"}} {bytes_per_token}' in exposed

    with cluster.stream(model=name, prompt=prompts[0], max_tokens=LONG) as answer:
        answer.read(20)
        for victim in ("decode-a", "decode-b"):
            cluster.signal(victim, signal.SIGKILL)
        tokens = answer.read()
    assert answer.errors == []
    assert answer.served["attempts"] > 1
    assert tokens[:ANSWER] == expected[0]
    again = cluster.complete_text(model=name, prompt=prompts[0], max_tokens=LONG)
    assert tokens == again["choices"][0]["token_ids"]
    eventually(cluster.complete, 30, "the decodes are restarted")
