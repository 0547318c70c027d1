"""The default model through the whole cluster against the golden file, by DESIGN's I3, however its KV came about."""

import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import web
from near_tie import near_tie
from toy_cluster import ROOT, Stream, ToyCluster, eventually, until_none

from mooncake_zmq.core.messages import Sampling
from mooncake_zmq.engine import weights
from mooncake_zmq.engine.prepare import default_cache_dir, prepare

pytestmark = pytest.mark.timeout(280)

GOLDEN = ROOT / "tests/golden/smollm2.npz"
SETTINGS = ("cache_node.pool_bytes=536870912", "prefill.slab_bytes=402653184", "model.max_model_len=4096")


@dataclass(frozen=True)
class Reference:
    """One golden prompt and its greedy continuation."""

    prompt: list[int]
    tokens: list[int]

    def is_near_tie(self, index: int) -> bool:
        """Whether I3 lets the choice of token `index` differ. Only asked after a difference: the engine takes seconds."""
        engine = weights.load_engine(prepare("default", default_cache_dir(), backend="auto"))
        so_far = self.prompt + self.tokens[:index]
        sequence = engine.new_sequence(len(so_far))
        logits = engine.prefill(sequence, np.array(so_far, np.int32))
        sequence.close()
        return near_tie(logits[0], Sampling(), len(so_far))


def references() -> list[Reference]:
    with np.load(GOLDEN, allow_pickle=False) as golden:
        prompts = np.split(golden["prompts"], np.cumsum(golden["prompt_lengths"])[:-1])
        return [Reference(p.tolist(), t.tolist()) for p, t in zip(prompts, golden["greedy"], strict=True)]


@pytest.fixture(scope="module")
def golden() -> Reference:
    """A prompt of some hundred tokens: long enough to fill blocks, short enough to be computed often."""
    return next(reference for reference in references() if len(reference.prompt) >= 400)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ToyCluster]:
    with tempfile.TemporaryDirectory(prefix="mz-") as path:
        cluster = ToyCluster(Path(path), config="configs/local.toml", settings=SETTINGS)
        cluster.start_s = 200.0
        with cluster.unbroken():
            yield cluster


def stream(cluster: ToyCluster, prompt: list[int], tokens: int) -> Stream:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return Stream(cluster.url, {**body, "stream": True, "stream_options": {"include_usage": True}})


def assert_follows(
    cluster: ToyCluster, golden: Reference, disturb: Callable[[ToyCluster, Stream], None] = lambda _cluster, _stream: None
) -> dict[str, Any]:
    """Ask for the whole continuation; after a near-tie that fell the other way, ask again from the reference's choice on."""
    done = 0
    served: dict[str, Any] = {}
    while done < len(golden.tokens):
        with stream(cluster, golden.prompt + golden.tokens[:done], len(golden.tokens) - done) as answer:
            if not done:
                disturb(cluster, answer)
            tokens = answer.read()
            assert answer.errors == []
        served = served or answer.served
        wrong = next((i for i, pair in enumerate(zip(tokens, golden.tokens[done:], strict=True)) if pair[0] != pair[1]), None)
        if wrong is None:
            return served
        assert golden.is_near_tie(done + wrong), f"token {done + wrong} is {tokens[wrong]}, not {golden.tokens[done + wrong]}"
        done += wrong + 1
    return served


def settled(cluster: ToyCluster) -> None:
    until_none(cluster.missing, 60)
    until_none(cluster.busy_gauges, 30)


def sources(served: dict[str, Any]) -> dict[str, int]:
    return {source: served[f"cached_{source}"] for source in ("own", "local", "remote")}


def test_every_way_to_the_kv_gives_the_reference_tokens(cluster: ToyCluster, golden: Reference) -> None:
    reusable = (len(golden.prompt) - 1) // 32 * 32

    with cluster.only("a"):
        cold = assert_follows(cluster, golden)
        own = assert_follows(cluster, golden)
    assert sources(cold) == {"own": 0, "local": 0, "remote": 0}
    assert sources(own) == {"own": reusable, "local": 0, "remote": 0}
    settled(cluster)

    with cluster.only("b"):
        remote = assert_follows(cluster, golden)
    assert remote["prefill"] == "prefill-b"
    assert sources(remote) == {"own": 0, "local": 0, "remote": reusable}
    settled(cluster)

    killed = cluster.pid("prefill-a")
    cluster.signal("prefill-a", signal.SIGKILL)  # its own KV is gone, its host's pool is not
    eventually(lambda: cluster.pid("prefill-a") != killed, 30, "the prefill is restarted")
    settled(cluster)
    with cluster.only("a"):
        local = assert_follows(cluster, golden)
    assert sources(local) == {"own": 0, "local": reusable, "remote": 0}
    settled(cluster)


def test_a_decode_killed_half_way_changes_no_token(cluster: ToyCluster, golden: Reference) -> None:
    settled(cluster)

    def kill_decode(cluster: ToyCluster, answer: Stream) -> None:
        answer.read(20)
        for name in ("decode-a", "decode-b"):  # asked which of them it is, they might answer after the last token
            cluster.signal(name, signal.SIGKILL)

    served = assert_follows(cluster, golden, kill_decode)
    assert served["attempts"] > 1
    settled(cluster)


def test_every_golden_prompt_cold_and_warm(cluster: ToyCluster) -> None:
    """From one token to three thousand; the longest goes through every chunk boundary and, warm, through the pool."""
    for reference in references():
        assert_follows(cluster, reference)
    settled(cluster)
    longest = max(references(), key=lambda reference: len(reference.prompt))
    warm = assert_follows(cluster, longest)
    assert warm["cached_own"] + warm["cached_local"] + warm["cached_remote"] == (len(longest.prompt) - 1) // 32 * 32


def test_sampled_tokens_depend_on_the_seed_alone(cluster: ToyCluster, golden: Reference) -> None:
    body = {"prompt": golden.prompt[:40], "max_tokens": 16, "temperature": 1.5, "return_token_ids": True}
    answers = [
        web.post(f"{cluster.url}/v1/completions", json={**body, "seed": seed}, timeout=60).json()["choices"][0]["token_ids"]
        for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]
