"""Whatever is sent, the answer is a success or an error in the one shape, and nothing stays open."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_actor import ScriptedActor

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=8
)
ids = st.lists(st.integers(0, 511), min_size=1, max_size=70)
prompts = st.text(max_size=70) | ids | st.lists(ids, max_size=3) | st.lists(st.text(max_size=5), max_size=9) | anything
contents = st.text(max_size=9) | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)}))
roles = st.sampled_from(["system", "user", "assistant", "tool", "<|end|>"]) | st.text(max_size=5)
messages = st.lists(st.fixed_dictionaries({"role": roles, "content": contents | anything}), max_size=3) | anything
FIELDS = {
    "model": st.sampled_from(["toy", "other"]),
    "prompt": prompts,
    "messages": messages,
    "stream": st.booleans(),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "continuous_usage_stats"]), st.booleans()),
    "max_tokens": st.integers(0, 70),
    "max_completion_tokens": st.integers(0, 70),
    "temperature": st.floats(-1, 3),
    "top_p": st.floats(-1, 2),
    "top_k": st.integers(-2, 100),
    "seed": st.integers(-(1 << 64), 1 << 64),
    "stop": st.text(max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=18),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 20),
    "n": st.integers(0, 9),
    "return_token_ids": st.booleans(),
    "cache_salt": st.text(max_size=4),
    "echo": st.booleans(),
    "logprobs": st.integers() | st.booleans(),
}
bodies = st.fixed_dictionaries(
    {"prompt": prompts, "messages": messages},
    optional={name: values | anything for name, values in FIELDS.items() if name not in ("prompt", "messages")},
)
paths = st.sampled_from(["/v1/completions", "/v1/chat/completions"])


def check(path: str, raw: bytes) -> None:
    actor = ScriptedActor()
    response = actor.call("POST", path, content=raw)  # raises what a handler raises; checks that nothing stays open
    assert response.status_code == 200 or 400 <= response.status_code < 500
    if response.status_code != 200:
        (error,) = response.json().values()
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert not actor.requests
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert all(choice["finish_reason"] for choice in response.json()["choices"])


@settings(max_examples=300)
@given(paths, bodies)
def test_any_body_of_known_fields(path, body):
    check(path, json.dumps(body).encode("utf-8", "surrogatepass"))


@settings(max_examples=150)
@given(paths, anything)
def test_any_json(path, body):
    check(path, json.dumps(body).encode("utf-8", "surrogatepass"))


@settings(max_examples=100)
@given(paths, st.binary(max_size=200))
def test_any_bytes(path, raw):
    check(path, raw)
