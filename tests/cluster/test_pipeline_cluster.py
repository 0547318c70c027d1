"""Long prompts computed by two prefills together, as processes on two hosts: the tokens of one engine."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from toy_cluster import ToyCluster, eventually, expected_tokens, until_none

from mooncake_zmq.engine import weights
from mooncake_zmq.engine.prepare import default_cache_dir, prepare

pytestmark = pytest.mark.timeout(200)

PIPELINES = (
    "conductor.pipeline_stages=2",
    "conductor.pipeline_min_tokens=256",
    "conductor.pipeline_chunk_tokens=128",
    "prefill.chunk_tokens=128",
    "costs.decode_step_s=0.023",  # given, so not measured: the toy is so quick that no pipeline would pay
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ToyCluster]:
    yield from running("configs/toy.toml", ())


def running(config: str, settings: tuple[str, ...]) -> Iterator[ToyCluster]:
    with tempfile.TemporaryDirectory(prefix="mz-") as path:
        cluster = ToyCluster(Path(path), config=config, settings=PIPELINES + settings)
        cluster.start_s = 150.0
        with cluster.unbroken():
            until_none(cluster.missing, 60)
            yield cluster


def counted(cluster: ToyCluster, name: str) -> int:
    """Over both prefills."""
    dumps = cluster.dumps()
    return sum(dumps[node]["counts"].get(name, 0) for node in ("prefill-a", "prefill-b"))


def prompt_of(length: int, first: int) -> list[int]:
    return [first, *((first * 31 + position * 7) % 250 for position in range(length - 1))]


def ask(cluster: ToyCluster, prompt: list[int], tokens: int, model: str = "toy") -> list[int]:
    answer = cluster.complete_text(prompt=prompt, max_tokens=tokens, model=model)
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def test_a_long_prompt_is_computed_by_both_prefills_and_has_the_tokens_of_one(cluster: ToyCluster) -> None:
    """The first one: before speeds are measured the prediction is the cost model's, and no accident of the machine's load."""
    prompt = prompt_of(1000, 3)
    assert ask(cluster, prompt, 40) == expected_tokens(prompt, 40)
    assert counted(cluster, "pipelines") == 1
    assert counted(cluster, "stage_tokens_computed") == 1000
    until_none(cluster.busy_gauges, 20)


@pytest.mark.parametrize("length", [256, 257, 1023, 1024])
def test_prompts_of_any_length_have_the_tokens_of_one_engine(cluster: ToyCluster, length: int) -> None:
    prompt = prompt_of(length, length % 250)
    assert ask(cluster, prompt, 20) == expected_tokens(prompt, 20)
    until_none(cluster.busy_gauges, 20)


def test_a_short_prompt_is_left_to_one(cluster: ToyCluster) -> None:
    before = counted(cluster, "pipelines")
    prompt = prompt_of(200, 11)
    assert ask(cluster, prompt, 20) == expected_tokens(prompt, 20)
    assert counted(cluster, "pipelines") == before


def test_the_next_turn_reuses_what_a_pipeline_computed(cluster: ToyCluster) -> None:
    """The decode has given it to the pool."""
    prompt = prompt_of(900, 13)
    answer = ask(cluster, prompt, 8)
    turn = prompt + answer + prompt_of(30, 17)
    cached = 0

    def hits() -> bool:
        nonlocal cached
        again = cluster.complete_text(prompt=turn, max_tokens=4)
        assert again["choices"][0]["token_ids"] == expected_tokens(turn, 4)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached >= 896

    eventually(hits, 10)


def test_the_default_model_in_a_pipeline_follows_its_engine() -> None:
    """Its own arithmetic, over float32 hidden states; the first tokens of a greedy run."""
    path = prepare("default", default_cache_dir(), backend="auto")
    engine = weights.load_engine(path, backend="auto")
    prompt = [int(token) for token in np.random.default_rng(3).integers(100, 20_000, 600)]
    sequence = engine.new_sequence(len(prompt) + 8)
    for start in range(0, len(prompt), 128):
        logits = engine.prefill(sequence, np.array(prompt[start : start + 128], np.int32))
    expected = []
    for _ in range(8):
        assert logits is not None
        expected.append(int(logits[-1].argmax()))
        logits = engine.decode([sequence], np.array(expected[-1:], np.int32))
    sequence.close()
    settings = ("cache_node.pool_bytes=268435456", "prefill.slab_bytes=201326592", "model.max_model_len=1024")
    for cluster in running("configs/local.toml", settings):
        assert ask(cluster, prompt, 8, engine.spec.name) == expected
        assert counted(cluster, "pipelines") == 1
        assert counted(cluster, "stage_tokens_computed") == 600
