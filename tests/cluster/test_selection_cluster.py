"""Decodes that attend to few of many tokens beside one that attends to all: what they answer, what they say, what is reused."""

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import web
from toy_cluster import SmallCluster, Stream, eventually, greedy, of_the_engine_alone, small_cluster, stopped

from mooncake_zmq.core.selection import RECENT, SINKS
from mooncake_zmq.engine import weights
from mooncake_zmq.engine.prepare import default_cache_dir, prepare

pytestmark = pytest.mark.timeout(200)

MODEL = "dummy:tiny"
TOKENS, ANSWER, LONG = 420, 40, 1500
NEARLY_ALL, FEW = TOKENS - SINKS - RECENT, 8
DECODES = ("decode-all", "decode-few", "decode-most")
CONFIG = """
[model]
path = "{model}"
max_model_len = 2048
[cache_node]
pool_bytes = 134_217_728
[prefill]
slab_bytes = 134_217_728
[decode]
capacity_tokens = 4096
"""


@pytest.fixture
def cluster() -> Iterator[SmallCluster]:
    few, most = (f'settings = {{ selection = "kcache", selection_tokens = {tokens} }}' for tokens in (FEW, NEARLY_ALL))
    engines = {"prefill-a": "", "decode-all": "", "decode-few": few, "decode-most": most}
    with small_cluster(CONFIG.format(model=MODEL), engines) as cluster:
        yield cluster


def test_what_selecting_decodes_answer_is_said_and_never_reused(cluster: SmallCluster) -> None:
    prompt = np.random.default_rng(7).integers(0, 500, TOKENS).tolist()
    model = web.get(f"{cluster.url}/v1/models").json()["data"][0]["id"]

    def ask(decode: str, prompt: list[int], **options: Any) -> tuple[list[int], dict[str, Any]]:
        with stopped({each: cluster.pid(each) for each in DECODES if each != decode}, cluster.serves):
            answer = cluster.complete_text(model=model, prompt=prompt, max_tokens=ANSWER, **options)
        assert answer["mooncake"]["decode"] == decode
        assert answer["usage"]["completion_tokens"] == ANSWER
        return answer["choices"][0]["token_ids"], answer["mooncake"]

    exact, served = ask("decode-all", prompt)
    assert "approximate" not in served
    engine = weights.load_engine(prepare(MODEL, default_cache_dir(), backend="auto"))
    assert exact == of_the_engine_alone(engine, prompt, ANSWER)
    most, served = ask("decode-most", prompt)
    assert served["approximate"] is True, "a few tokens are left out"
    assert most == exact
    few, served = ask("decode-few", prompt)
    assert served["approximate"] is True
    assert few != exact
    assert few[0] == exact[0], "which the prefill sampled"
    refused, served = ask("decode-few", prompt, exact=True)
    assert "approximate" not in served
    assert refused == exact

    for options, said, answered in (({"include_usage": True}, {"approximate": True}, few), ({}, {}, exact)):
        with stopped({each: cluster.pid(each) for each in DECODES if each != "decode-few"}, cluster.serves):
            body = greedy(model=model, prompt=prompt, max_tokens=ANSWER, stream=True, stream_options=options)
            with Stream(cluster.url, body) as stream:
                assert stream.read() == answered, "a plain stream cannot say that it is approximate, so it is exact"
        assert {name: value for name, value in stream.served.items() if name == "approximate"} == said
    counts = cluster.dumps()["decode-few"]["counts"]
    assert counts["generation_tokens_approximate"] == 2 * (ANSWER - 1) < counts["generation_tokens"]

    followed = [*prompt, *few, *prompt[:32]]
    warm, served = ask("decode-all", followed)
    assert "approximate" not in served
    assert sum(served[f"cached_{where}"] for where in ("own", "local", "remote")) == TOKENS // 32 * 32, (
        "the prompt's blocks alone"
    )
    assert warm == of_the_engine_alone(engine, followed, ANSWER)

    with cluster.stream(model=model, prompt=prompt, max_tokens=LONG) as stream:
        stream.read(20)
        for victim in DECODES:
            cluster.signal(victim, signal.SIGKILL)
        assert len(stream.read()) == LONG
    assert stream.errors == []
    assert stream.served["attempts"] > 1
    eventually(cluster.complete, 60, "the decodes are restarted")
