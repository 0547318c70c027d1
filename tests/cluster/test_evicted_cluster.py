"""Answers over few of their prompt's tokens, on live nodes: what they say, where they go on, and that nothing is reused."""

import signal
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import web
from toy_cluster import ROOT, SmallCluster, eventually, expected_tokens, greedy, small_cluster, stopped

from mooncake_zmq.core.messages import Eviction
from mooncake_zmq.engine import weights
from mooncake_zmq.engine.eviction import AttentionSums, evict
from mooncake_zmq.engine.prepare import default_cache_dir, prepare
from mooncake_zmq.engine.spec import Engine
from mooncake_zmq.engine.toy import ToyEngine

pytestmark = pytest.mark.timeout(200)

CONFIG = """
[model]
path = "{model}"
max_model_len = 2048
[gateway.edge]
kv_budget = true
[cache_node]
pool_bytes = {bytes}
[prefill]
slab_bytes = {bytes}
[decode]
capacity_tokens = {capacity}
"""
ENGINES = dict.fromkeys(("prefill-a", "decode-a", "decode-b"), "")
RECENT, ELASTIC = ({"kv_budget": 0.25, "evict": kind} for kind in ("recent", "elastic"))


def over_few_tokens(
    engine: Engine, prompt: Sequence[int], eviction: Eviction, count: int, so_far: Sequence[int] = ()
) -> list[int]:
    """An answer that goes on behind these tokens of it, over the tokens of the prompt that are kept."""
    whole = np.asarray([*prompt, *so_far], np.int32)
    sequence, sums = engine.new_sequence(len(whole) + count), AttentionSums(engine.spec.layers, len(whole))

    def on_rows(layer: int, queries: Any, positions: Any) -> None:
        sums.add(layer, sequence.keys[layer], queries, positions)

    logits = engine.prefill(sequence, whole, on_rows=on_rows)
    assert logits is not None
    tokens = [*so_far, int(np.argmax(logits[-1]))]
    evict(sequence, eviction.behind(len(so_far)), sums if eviction.kind == "elastic" else None)
    while len(tokens) < count:
        tokens.append(int(np.argmax(engine.decode([sequence], np.asarray(tokens[-1:], np.int32))[0])))
    return tokens


def test_few_tokens_have_room_go_on_after_a_kill_and_leave_nothing_to_be_reused() -> None:
    prompt = np.random.default_rng(7).integers(0, 256, 1500).tolist()
    with small_cluster(CONFIG.format(model="toy", bytes=8_388_608, capacity=1280), ENGINES) as cluster:
        whole = web.post(f"{cluster.url}/v1/completions", json=greedy(prompt=prompt, max_tokens=20), timeout=60)
        assert (whole.status_code, whole.json()["error"]["code"]) == (400, "context_length_exceeded")
        for wanted in (RECENT, ELASTIC):
            for _ in range(2):
                answer = cluster.complete_text(prompt=prompt, max_tokens=20, mooncake=wanted)
                served = answer["mooncake"]
                said = {"approximate": True, "kept_tokens": 375, "dropped_tokens": 1125, "cached_own": 0, "cached_local": 0}
                assert {name: served[name] for name in said} == said
                few = Eviction(kind=wanted["evict"], kept=375)
                assert answer["choices"][0]["token_ids"] == over_few_tokens(ToyEngine(), prompt, few, 20)
        short = prompt[:1000]
        cluster.complete_text(prompt=short, max_tokens=20, mooncake=RECENT)
        exact = cluster.complete_text(prompt=short, max_tokens=20)
        assert "approximate" not in exact["mooncake"]
        assert sum(exact["mooncake"][f"cached_{where}"] for where in ("own", "local", "remote")) == 0
        assert exact["choices"][0]["token_ids"] == expected_tokens(short, 20)
        goes_on(cluster, short)


def goes_on(cluster: SmallCluster, prompt: list[int]) -> None:
    few, count = Eviction(kind="recent", kept=250), 1000
    with ExitStack() as stack:
        with stopped({"decode-b": cluster.pid("decode-b")}, cluster.serves):
            stream = stack.enter_context(cluster.stream(prompt=prompt, max_tokens=count, mooncake=RECENT))
            stream.read(20)
            cluster.signal("decode-a", signal.SIGKILL)
        answer = stream.read()
    assert stream.errors == []
    assert stream.served["attempts"] > 1
    assert (stream.served["approximate"], stream.served["dropped_tokens"]) == (True, 750)
    undisturbed = over_few_tokens(ToyEngine(), prompt, few, count)
    killed_at = next(at for at in range(count) if answer[at] != undisturbed[at])
    assert killed_at >= 20
    assert answer == over_few_tokens(ToyEngine(), prompt, few, count, undisturbed[:killed_at]), "evicted anew from there"
    eventually(cluster.complete, 60, "the decode is restarted")


def test_a_real_model_answers_over_what_is_recent_or_attended_to_most_as_its_engine_alone_does() -> None:
    with np.load(ROOT / "tests/golden/smollm2.npz", allow_pickle=False) as golden:
        prompts = np.split(golden["prompts"], np.cumsum(golden["prompt_lengths"]))
    prompt = next(np.resize(each, 420).tolist() for each in prompts if len(each) > 400)
    engine = weights.load_engine(prepare("default", default_cache_dir(), backend="auto"))
    answers = []
    with small_cluster(CONFIG.format(model="default", bytes=134_217_728, capacity=4096), ENGINES) as cluster:
        for wanted in (RECENT, ELASTIC, None):
            answer = cluster.complete_text(model="SmolLM2-135M-Instruct", prompt=prompt, max_tokens=24, mooncake=wanted)
            answers.append(answer["choices"][0]["token_ids"])
            served = answer["mooncake"]
            assert (served.get("dropped_tokens"), served.get("approximate")) == ((315, True) if wanted else (None, None))
            if wanted:
                few = Eviction(kind=wanted["evict"], kept=105)
                assert answers[-1] == over_few_tokens(engine, prompt, few, 24)
    assert answers[0] != answers[2], "a quarter is too little"
    assert len({each[0] for each in answers}) == 1, "the first token is the prefill's"
