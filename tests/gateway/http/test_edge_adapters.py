"""Adapters of vLLM as models of their own: clients find them, their requests name them, and no KV is shared with them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_actor import ScriptedActor

from mooncake_zmq.kv.block_hash import namespace

ADAPTERS = ("poet", "sql/v2")


def actor() -> ScriptedActor:
    return ScriptedActor(adapters=ADAPTERS)


def test_each_adapter_is_listed_as_a_model_whose_parent_is_the_model():
    listed = actor().call("GET", "/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in listed] == [("toy", None), ("poet", "toy"), ("sql/v2", "toy")]
    assert actor().call("GET", "/v1/models/sql/v2").json() == listed[2] | {
        "created": pytest.approx(listed[2]["created"], abs=60)
    }


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", {"prompt": "hi"}, "model"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "model"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}, "model"),
        ("/v1/responses", {"input": "hi"}, "model"),
    ],
)
def test_every_api_answers_in_the_name_of_the_adapter(path, body, name):
    asked = actor()
    answer = asked.call("POST", path, json=body | {"model": "poet"})
    assert answer.status_code == 200, answer.text
    assert answer.json()[name] == "poet"
    assert asked.only.adapter == "poet"


def test_a_stream_names_the_adapter_too():
    asked = actor()
    answer = asked.complete(model="poet", stream=True)
    assert '"model":"poet"' in answer.text
    assert asked.only.adapter == "poet"


def test_requests_that_differ_in_the_adapter_alone_share_no_key():
    roots = {}
    for model in (None, "toy", *ADAPTERS):
        asked = actor()
        asked.complete(prompt=list(range(20)), **({} if model is None else {"model": model}))
        roots[model] = (asked.only.root, *asked.only.keys)
        assert asked.only.adapter == (model if model in ADAPTERS else "")
    assert roots[None] == roots["toy"]
    keys = [key for model in ("toy", *ADAPTERS) for key in roots[model]]
    assert len(set(keys)) == len(keys) == 3 * 6


@given(st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), min_size=2, max_size=6, unique=True))
def test_no_two_pairs_of_salt_and_adapter_have_one_root(pairs):
    roots = {namespace(model="m", layout="l", salt=salt, adapter=adapter) for salt, adapter in pairs}
    assert len(roots) == len(pairs)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_model_that_is_not_there_is_a_404_with_the_list(path):
    answer = actor().call("POST", path, json={"prompt": "hi", "model": "prose"})
    assert answer.status_code == 404
    assert "there are 'toy', 'poet', 'sql/v2'" in answer.json()["error"]["message"]


def test_a_text_is_tokenized_in_the_name_of_an_adapter():
    assert actor().call("POST", "/tokenize", json={"prompt": "hi", "model": "poet"}).status_code == 200
