"""Several models behind one gateway: clients name one, find all, and each has its limits, its keys and its metrics."""

from dataclasses import replace

import pytest
from scripted_actor import ScriptedActor

from mooncake_zmq.core.messages import Hello
from mooncake_zmq.engine.tokenizer import byte_tokenizer
from mooncake_zmq.gateway.served_model import ServedModel, ServedModels

OTHER = ServedModel(
    id="big/model",
    max_model_len=32,
    vocab_size=400,
    block_tokens=8,
    model_fingerprint="other",
    layout_fingerprint="layout",
    tokenizer=byte_tokenizer(),
    identity="other",
    adapters=("poet",),
)
BODIES = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/responses": {"input": "hi"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
}


def hello(role: str, model: str) -> Hello:
    return Hello(protocol=1, role=role, host="h", model=model, tokenizer="t", layout="l")


def actor() -> ScriptedActor:
    return ScriptedActor(others=(OTHER,))


def test_all_models_are_listed_and_an_adapter_below_its_own():
    listed = actor().call("GET", "/v1/models").json()["data"]
    assert [(card["id"], card["parent"], card["max_model_len"]) for card in listed] == [
        ("toy", None, 64),
        ("big/model", None, 32),
        ("poet", "big/model", 32),
    ]
    assert actor().call("GET", "/v1/models/poet").json()["parent"] == "big/model"
    assert actor().call("GET", "/health").json()["model"] == "toy, big/model"


@pytest.mark.parametrize("path", BODIES)
def test_every_api_wants_a_model_that_is_there(path):
    for model, status in (({}, 400), ({"model": "small"}, 404), ({"model": "big/model"}, 200), ({"model": "poet"}, 200)):
        answer = actor().call("POST", path, json=BODIES[path] | model)
        assert answer.status_code == status, answer.text
        if status != 200:
            assert "there are 'toy', 'big/model', 'poet'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_request_carries_its_model_and_the_answer_its_name(path):
    for name, identity, adapter in (("toy", "weights", ""), ("big/model", "other", ""), ("poet", "other", "poet")):
        asked = actor()
        answer = asked.call("POST", path, json=BODIES[path] | {"model": name})
        assert answer.json()["model"] == name
        assert (asked.only.model, asked.only.adapter, asked.only.model_name) == (identity, adapter, name)


def test_one_prompt_has_keys_of_each_models_own_and_blocks_of_its_size():
    found = {}
    for name in ("toy", "big/model", "poet"):
        asked = actor()
        asked.complete(prompt=list(range(20)), model=name)
        found[name] = asked.only.keys
    assert [len(keys) for keys in found.values()] == [5, 2, 2]
    keys = [key for each in found.values() for key in each]
    assert len(set(keys)) == len(keys)


def test_each_model_has_its_own_limits():
    assert actor().complete(prompt=[1] * 40, model="toy", max_tokens=4).status_code == 200
    assert "32" in actor().complete(prompt=[1] * 40, model="big/model", max_tokens=4).json()["error"]["message"]
    assert actor().complete(prompt=[450], model="toy").status_code == 200
    assert "450" in actor().complete(prompt=[450], model="big/model").json()["error"]["message"]


def test_metrics_tell_the_models_apart():
    asked = actor()

    for model in ("toy", "big/model", "poet"):
        assert asked.complete(model=model).status_code == 200
    page = asked.call("GET", "/metrics").text
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="toy"} 1.0' in page
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="big/model"} 2.0' in page
    assert 'vllm:num_requests_running{engine="0",model_name="toy"} 0.0' in page
    assert page.count("# TYPE vllm:time_to_first_token_seconds histogram") == 1


def test_the_gateway_serves_as_long_as_any_model_is_there():
    asked = actor()
    asked.up = {"k": hello("conductor", "other"), "v": hello("vllm", "weights")}
    assert asked.call("GET", "/health").status_code == 503
    asked.up["w"] = hello("vllm", "other")
    health = asked.call("GET", "/health")
    assert (health.status_code, health.json()["missing"]) == (200, [])


def test_two_models_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two models are called 'poet'"):
        ServedModels(OTHER, replace(OTHER, id="poet", adapters=()))
