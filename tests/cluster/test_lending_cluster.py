"""Decodes that lend each other KV: a prompt longer than any decode's memory has the answer of one with all of it, also when a
lender is killed in the middle."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import web
from toy_cluster import SmallCluster, eventually, greedy, of_the_engine_alone, small_cluster

from mooncake_zmq.engine import weights
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.operate.local_nodes import collect_dumps

pytestmark = pytest.mark.timeout(120)

MODEL = "dummy:tiny"
DECODES = ("decode-a", "decode-b", "decode-c", "decode-d")
CAPACITY = 256
LONGEST = len(DECODES) * CAPACITY
CONFIG = """
[model]
path = "{model}"
cache_dir = "{cache}"
max_model_len = 2048
[cache_node]
pool_bytes = 16_777_216
[prefill]
slab_bytes = 8_388_608
[decode]
capacity_tokens = {capacity}
lend_tokens = {capacity}
borrow = true
"""


class LendingCluster(SmallCluster):
    @property
    def model(self) -> str:
        return str(json.loads(web.get(f"{self.url}/v1/models").text)["data"][0]["id"])

    def lenders(self) -> list[str]:
        return [node for node, dump in collect_dumps(self.runtime_dir, DECODES).items() if dump["gauges"].get("lent_tokens")]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LendingCluster]:
    settings = CONFIG.format(model=MODEL, cache=tmp_path / "models", capacity=CAPACITY)
    engines = dict.fromkeys(("prefill-a", *DECODES), 'backend = "numpy"')
    with small_cluster(settings, engines, LendingCluster) as cluster:
        yield cluster


def random_prompt(tokens: int) -> list[int]:
    return np.random.default_rng(tokens).integers(0, 500, tokens).tolist()


def test_a_prompt_of_nearly_all_memory_together_has_the_answer_of_one_engine(cluster: LendingCluster, tmp_path: Path) -> None:
    prompt, count = random_prompt(LONGEST * 96 // 100), 24
    answer = cluster.complete_text(model=cluster.model, prompt=prompt, max_tokens=count)
    engine = weights.load_engine(prepare(MODEL, tmp_path / "models"))
    assert answer["choices"][0]["token_ids"] == of_the_engine_alone(engine, prompt, count)
    assert answer["mooncake"]["borrowed_tokens"] >= len(prompt) - CAPACITY
    longer = greedy(model=cluster.model, prompt=random_prompt(LONGEST), max_tokens=1)
    refused = web.post(f"{cluster.url}/v1/completions", json=longer, timeout=60)
    assert refused.status_code == 400
    assert str(LONGEST) in refused.text
    eventually(lambda: not cluster.busy_gauges(), 30, "all is returned")


def test_an_answer_goes_on_equal_when_a_lender_is_killed(cluster: LendingCluster, tmp_path: Path) -> None:
    prompt, count = random_prompt(300), 360
    with cluster.stream(model=cluster.model, prompt=prompt, max_tokens=count) as answer:
        answer.read(20)
        victim, *_ = cluster.lenders()
        cluster.signal(victim, signal.SIGKILL)
        tokens = answer.read()
    assert answer.errors == []
    assert answer.served["attempts"] > 1
    engine = weights.load_engine(prepare(MODEL, tmp_path / "models"))
    assert tokens == of_the_engine_alone(engine, prompt, count)
    eventually(cluster.complete, 30, "the lender is restarted")
