"""Several models behind one address: real processes, messages and HTTP; each request is answered by its model alone."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import web
from strange_model import write_model
from stub_vllm import StubVllm
from vllm_cluster import VllmCluster, answering, expected

PROMPT = [3 + i % 40 for i in range(50)]


class ModelsCluster(VllmCluster):
    """The models "large" on the first server and "small" on the second."""

    CONFIG = "vllm-models.toml"
    nodes = ("conductor-large", "conductor-small", "cache-a", "vllm-a", "vllm-b", "gateway-0")

    def __init__(self, directory: Path, urls: tuple[str, str]) -> None:
        paths = {name: write_model(directory / "models" / name) for name in ("large", "small")}
        settings = tuple(f"models.{name}.path={path}" for name, path in paths.items())
        super().__init__(directory, directory, urls, settings)

    def answer(self, model: str, tokens: int = 6) -> list[int]:
        whole = self.complete_text(model=model, prompt=PROMPT, max_tokens=tokens)
        assert whole["model"] == model
        found: list[int] = whole["choices"][0]["token_ids"]
        return found


@pytest.fixture
def stubs() -> Iterator[tuple[StubVllm, StubVllm]]:
    both = StubVllm(answering()), StubVllm(answering())
    yield both
    for stub in both:
        stub.close()


@pytest.fixture
def cluster(directory: Path, stubs: tuple[StubVllm, StubVllm]) -> Iterator[ModelsCluster]:
    made = ModelsCluster(directory, (stubs[0].url, stubs[1].url))
    with made.running():
        yield made


def test_each_model_is_served_by_its_own_nodes_behind_one_address(
    cluster: ModelsCluster, stubs: tuple[StubVllm, StubVllm]
) -> None:
    listed = web.get(f"{cluster.url}/v1/models").json()["data"]
    assert [(each["id"], each["max_model_len"]) for each in listed] == [("large", 4096), ("small", 2048)]
    assert cluster.health()["model"] == "large, small"

    for name, mine, other in (("large", stubs[0], stubs[1]), ("small", stubs[1], stubs[0])):
        before = len(mine.asked), len(other.asked)
        assert cluster.answer(name) == cluster.answer(name) == expected(PROMPT, 6)
        assert (len(mine.asked), len(other.asked)) == (before[0] + 2, before[1])

    for body, status, text in (
        ({}, 400, "model is required: there are 'large', 'small'"),
        ({"model": "middle"}, 404, "no model 'middle' here: there are 'large', 'small'"),
        ({"model": "small", "max_tokens": 2040}, 400, "2048"),
    ):
        refused = web.post(f"{cluster.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 5, **body})
        assert (refused.status_code, text in refused.text) == (status, True), refused.text

    page = web.get(f"{cluster.url}/metrics").text
    assert 'vllm:generation_tokens_total{engine="0",model_name="large"} 12.0' in page
    assert 'vllm:generation_tokens_total{engine="0",model_name="small"} 12.0' in page

    # What one model lacks is no matter of the other.
    cluster.signal("conductor-small", signal.SIGKILL)
    assert cluster.answer("large") == expected(PROMPT, 6)
    assert cluster.answer("small") == expected(PROMPT, 6), "once its conductor is there again"
    cluster.signal("vllm-b", signal.SIGSTOP)
    try:
        assert cluster.answer("large") == expected(PROMPT, 6)
        health = web.get(f"{cluster.url}/health")
        assert (health.status_code, health.json()["missing"]) == (200, [])
    finally:
        cluster.signal("vllm-b", signal.SIGCONT)
    assert cluster.answer("small") == expected(PROMPT, 6)
