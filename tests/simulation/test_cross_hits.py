"""What a seed of several models consists of, and the check of what its vLLMs load."""

import pytest

from mooncake_zmq.simulation.cluster import ClusterSettings, processes
from mooncake_zmq.simulation.cross_hits import CrossHits
from mooncake_zmq.simulation.engine_store import SavedBlock
from mooncake_zmq.simulation.models import ADAPTERS, MODELS, OF_SEVERAL, adapters_of
from mooncake_zmq.simulation.violation import Violation

POET, SQL, OTHER = ("m", "poet"), ("m", "sql"), ("n", "poet")
KV, TEXT = b"kv", b"text"


def test_three_models_with_20_adapters_are_on_two_hosts() -> None:
    specs = processes(ClusterSettings.of_seed(1, of_models=True))
    vllms = [spec for spec in specs if spec.role == "vllm"]
    assert {spec.host for spec in specs} == {"a", "b"}
    assert sorted((spec.model, spec.host) for spec in vllms) == sorted((model, host) for model in MODELS for host in "ab")
    assert {spec.model for spec in specs if spec.role == "conductor"} == set(MODELS)
    assert len(MODELS) == 3
    assert sum(len(ADAPTERS[model]) for model in MODELS) == 20
    assert set(OF_SEVERAL) == {(model, adapter) for model in MODELS for adapter in ("", *ADAPTERS[model])}


def test_each_adapter_is_at_some_vllm_and_names_are_those_of_other_models_too() -> None:
    for model in MODELS:
        assert set(adapters_of("vllm-a1", model)) < set(adapters_of("vllm-b1", model)) == set(ADAPTERS[model])
    assert set(ADAPTERS["other"]) == set(ADAPTERS["simulated"]) > set(ADAPTERS["third"])


def test_some_whole_seeds_have_several_models() -> None:
    assert 5 < sum(bool(ClusterSettings.of_seed(seed).models) for seed in range(200)) < 20


@pytest.mark.parametrize("made_by", [SQL, OTHER, ("m", "")])
def test_kv_of_another_model_or_adapter_is_a_cross_hit(made_by: tuple[str, str]) -> None:
    with pytest.raises(Violation, match="I9: vllm-a1 loads KV of"):
        CrossHits().loading("vllm-a1", POET, TEXT, [SavedBlock(KV, TEXT, POET), SavedBlock(KV, TEXT, made_by)])


def test_kv_of_other_tokens_is_a_cross_hit() -> None:
    with pytest.raises(Violation, match="I9: vllm-a1 loads KV of other tokens"):
        CrossHits().loading("vllm-a1", POET, TEXT, [SavedBlock(KV, b"test", POET)])


def test_looks_past_the_same_text_of_others_are_counted() -> None:
    cross_hits = CrossHits()
    cross_hits.loading("vllm-a1", POET, TEXT, [SavedBlock(KV, b"te", POET)])
    cross_hits.looked(POET, TEXT, [SavedBlock(KV, b"te", POET), SavedBlock(KV, b"test", SQL)])
    assert cross_hits.loads == {"blocks": 1, "looks": 1, "looks past another adapter's": 0, "looks past another model's": 0}
    cross_hits.looked(POET, TEXT, [SavedBlock(KV, b"te", SQL), SavedBlock(KV, b"te", OTHER)])
    assert cross_hits.loads["looks past another adapter's"] == cross_hits.loads["looks past another model's"] == 1
