"""Requests that ask for an answer over few of their prompt's tokens: what is allowed, what is asked for, and what is said."""

from dataclasses import replace

import pytest
from scripted_actor import ScriptedActor, finished, one_by_one, tokens

from mooncake_zmq.core.messages import Eviction
from mooncake_zmq.gateway.settings import EdgeSettings

HALF = {"kv_budget": 0.5}
PROMPT = list(range(20))


def scripted(**end):
    made = lambda *_: one_by_one([*tokens("hé"), finished("length", completion_tokens=3, **end)])  # noqa: E731
    return ScriptedActor(made, EdgeSettings(kv_budget=True), max_model_len=4096)


@pytest.mark.parametrize(
    ("wanted", "eviction"),
    [
        (HALF, Eviction(kind="recent", kept=10)),
        (HALF | {"evict": "elastic"}, Eviction(kind="elastic", kept=10)),
        ({"kv_budget": 0.51}, Eviction(kind="recent", kept=11)),
        ({"kv_budget": 0.01}, Eviction(kind="recent", kept=5)),
        ({"kv_budget": 1}, None),
        (None, None),
    ],
)
def test_a_share_of_the_prompt_is_asked_for(wanted, eviction):
    actor = scripted()
    assert actor.complete(prompt=PROMPT, max_tokens=3, mooncake=wanted).status_code == 200
    assert actor.only.eviction == eviction
    assert not actor.only.exact


def test_a_prompt_of_which_nothing_would_go_is_an_ordinary_one():
    actor = scripted()
    assert actor.complete(prompt=[1, 2, 3, 4, 5], max_tokens=3, mooncake=HALF).status_code == 200
    assert actor.only.eviction is None


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"mooncake": {"kv_budget": 0}}, "kv_budget"),
        ({"mooncake": {"kv_budget": 1.01}}, "kv_budget"),
        ({"mooncake": {"kv_budget": "half"}}, "kv_budget"),
        ({"mooncake": {"evict": "recent"}}, "kv_budget"),
        ({"mooncake": HALF | {"keep": 3}}, "keep"),
        ({"mooncake": HALF | {"evict": "random"}}, "evict is one of elastic, recent: 'random'"),
        ({"mooncake": HALF | {"evict": "pyramid"}}, "pyramid is only measured, by `mooncake-zmq bench codecs --eviction`"),
        ({"mooncake": HALF, "exact": True}, "leave out either exact or kv_budget"),
        ({"mooncake": HALF, "stream": True}, "set stream_options.include_usage"),
        ({"mooncake": HALF, "echo": True, "logprobs": 1}, "leave out echo, logprobs or kv_budget"),
    ],
)
def test_what_makes_no_sense_is_refused(body, says):
    response = scripted().complete(prompt=PROMPT, max_tokens=3, **body)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


def test_it_is_refused_unless_the_gateway_allows_it():
    for actor in (ScriptedActor(), ScriptedActor(settings=EdgeSettings())):
        response = actor.complete(prompt=PROMPT, mooncake=HALF)
        assert response.status_code == 400
        assert "the gateway's setting edge.kv_budget is false" in response.json()["error"]["message"]
    assert (
        ScriptedActor().call("POST", "/v1/messages", json={"model": "toy", "messages": [], "mooncake": HALF}).status_code == 400
    )


def test_the_answer_says_how_much_was_kept():
    actor = scripted(prompt_tokens=20, dropped=10)
    served = actor.complete(prompt=PROMPT, max_tokens=3, mooncake=HALF).json()["mooncake"]
    said = {"approximate": True, "kept_tokens": 10, "dropped_tokens": 10}
    assert {name: served[name] for name in said} == said
    assert "kept_bytes" in served
    streamed = actor.chat(max_tokens=3, mooncake=HALF, stream=True, stream_options={"include_usage": True}).text
    assert '"approximate":true' in streamed
    assert '"dropped_tokens":10' in streamed


def test_a_prompt_that_no_decode_holds_is_taken_if_what_is_kept_of_it_and_the_answer_have_room():
    """A decode holds 100 tokens, and the model takes 160."""
    actor = scripted()
    actor.model = replace(actor.model, max_model_len=100, max_positions=160)
    for length, more, status in ((150, {}, 400), (150, {"mooncake": HALF}, 200), (150, {"mooncake": {"kv_budget": 0.9}}, 400)):
        response = actor.complete(prompt=[1] * length, max_tokens=10, **more)
        assert response.status_code == status
        assert status == 200 or response.json()["error"]["code"] == "context_length_exceeded"
    assert actor.only.eviction.kept == 75
    for length, max_tokens in ((150, 11), (160, 1)):
        assert actor.complete(prompt=[1] * length, max_tokens=max_tokens, mooncake=HALF).status_code == 400
