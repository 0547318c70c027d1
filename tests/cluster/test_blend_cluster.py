"""Documents in another order on live nodes: answered over the KV of the first ones and marked so, and never as exact KV."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import web
from toy_cluster import SmallCluster, small_cluster

pytestmark = pytest.mark.timeout(120)

CONFIG = """
[model]
path = "dummy:tiny"
cache_dir = "{cache}"
max_model_len = 1024
[cache_node]
pool_bytes = 16_777_216
[prefill]
slab_bytes = 8_388_608
blend = true
blend_least_tokens = 32
[decode]
capacity_tokens = 16_384
"""
RANDOM = np.random.default_rng(5)
SYSTEM, ONE, TWO, THREE, QUESTION = (RANDOM.integers(0, 500, count).tolist() for count in (64, 130, 150, 110, 11))
FIRST = [*SYSTEM, *ONE, *TWO, *THREE, *QUESTION]
SHUFFLED = [*SYSTEM, *THREE, *ONE, *TWO, *QUESTION]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SmallCluster]:
    engines = dict.fromkeys(("prefill-a", "decode-a"), 'backend = "numpy"')
    with small_cluster(CONFIG.format(cache=tmp_path / "models"), engines) as cluster:
        yield cluster


def test_documents_in_another_order_are_blended_told_and_never_cached_as_exact(cluster: SmallCluster) -> None:
    name = json.loads(web.get(f"{cluster.url}/v1/models").text)["data"][0]["id"]

    def ask(prompt: list[int], **options: Any) -> tuple[list[int], dict[str, Any]]:
        answer = cluster.complete_text(model=name, prompt=prompt, max_tokens=24, **{"cache_salt": "mine", **options})
        return answer["choices"][0]["token_ids"], answer["mooncake"]

    def is_approximate(served: dict[str, Any]) -> bool:
        assert ("cached_parts" in served) == ("recomputed" in served) == ("approximate" in served)
        return bool(served.get("approximate"))

    cold, served = ask(SHUFFLED, cache_salt="another tenant")
    assert not is_approximate(served)
    _, served = ask(FIRST)
    assert not is_approximate(served), "that another tenant's prompt has the same documents"
    for _ in range(2):
        _, served = ask(SHUFFLED)
        assert is_approximate(served)
        assert served["cached_own"] == len(SYSTEM)
        assert 300 < served["cached_parts"] <= len(SHUFFLED) - len(SYSTEM)
        assert 0 < served["recomputed"] < served["cached_parts"] // 4
    with cluster.stream(model=name, prompt=SHUFFLED, max_tokens=4, cache_salt="mine") as stream:
        stream.read()
        assert is_approximate(stream.served)
    exact, served = ask(SHUFFLED, exact=True)
    assert not is_approximate(served)
    assert served["cached_own"] + served["cached_local"] == len(SYSTEM)
    again, served = ask(SHUFFLED)
    assert not is_approximate(served)
    assert served["cached_own"] > len(SYSTEM)
    assert exact == again == cold
