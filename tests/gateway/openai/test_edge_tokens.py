"""POST /tokenize and /detokenize: vLLM's shapes, bounded and prepared as prompts are, without a request."""

import threading
from array import array

import pytest
from scripted_actor import ScriptedActor

from mooncake_zmq.gateway.http import app as app_module

TURNS = [{"role": "user", "content": "hi"}]


def tokenize(actor=None, **body):
    return (actor or ScriptedActor()).call("POST", "/tokenize", json=body)


def detokenize(actor=None, **body):
    return (actor or ScriptedActor()).call("POST", "/detokenize", json=body)


def test_a_text_is_told_as_tokens():
    actor = ScriptedActor()
    answer = tokenize(actor, model="toy", prompt="hé", add_special_tokens=False, return_token_strs=True).json()
    strings = ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert answer == {"count": 3, "max_model_len": 64, "tokens": [104, 0xC3, 0xA9], "token_strs": strings}
    assert tokenize(prompt="h").json() == {"count": 1, "max_model_len": 64, "tokens": [104], "token_strs": None}
    assert not actor.requests


def test_a_conversation_is_told_as_the_engine_would_get_it():
    actor = ScriptedActor()
    actor.chat()
    tokens = [258, *b"hi", 256, 259]
    assert list(actor.only.tokens[::4]) == [token % 256 for token in tokens]
    assert tokenize(messages=TURNS).json()["tokens"] == tokens
    assert tokenize(messages=TURNS, add_generation_prompt=False).json()["tokens"] == tokens[:-1]


def test_what_a_model_puts_before_a_text_can_be_left_out():
    actor = ScriptedActor()
    actor.model.tokenizer.encode = lambda text, *, special=True, salt=None: array("i", [256] * special + list(text.encode()))
    assert tokenize(actor, prompt="a").json()["tokens"] == [256, 97]
    assert tokenize(actor, prompt="a", add_special_tokens=True).json()["tokens"] == [256, 97]
    assert tokenize(actor, prompt="a", add_special_tokens=False).json()["tokens"] == [97]


def test_tokens_are_told_as_text_special_ones_too():
    assert detokenize(model="toy", tokens=[258, *"hé".encode(), 256]).json() == {"prompt": "<|user|>hé<|end|>"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": TURNS}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": TURNS, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [{"role": "a", "content": [{"type": "image"}]}]}, "messages"),
    ],
)
def test_what_cannot_be_tokenized_is_refused(body, param):
    response = tokenize(**body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("tokens", [None, "a", [-1], [512], [1 << 40], [[1]], [1.5]])
def test_what_are_no_tokens_is_refused(tokens):
    response = detokenize(tokens=tokens)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")


def test_another_model_and_an_unknown_field_are_refused():
    assert tokenize(model="other", prompt="a").status_code == detokenize(model="other", tokens=[1]).status_code == 404
    assert tokenize(prompt="a", tools=[]).status_code == detokenize(tokens=[1], skip=True).status_code == 400


def test_what_is_longer_than_any_prompt_is_refused_unread():
    actor = ScriptedActor(max_model_len=10)
    actor.model.tokenizer.encode = actor.model.tokenizer.decode = None
    for response in (tokenize(actor, prompt="x" * 1000), detokenize(actor, tokens=[1] * 10)):
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_it_is_done_by_another_thread_and_holds_a_slot_meanwhile(monkeypatch):
    monkeypatch.setattr(app_module, "AT_ONCE_BYTES", 0)
    actor, seen = ScriptedActor(), []

    def spy(raw, model, real=app_module.tokenize):
        seen.append((threading.current_thread().name, actor.edge.calls.slots_taken))
        return real(raw, model)

    monkeypatch.setattr(app_module, "tokenize", spy)
    actor.app = app_module.create_app(actor.edge)
    assert tokenize(actor, prompt="a").status_code == 200
    assert seen[0][0].startswith("prepare_")
    assert seen[0][1] == 1


def test_a_conversation_may_end_inside_its_final_message():
    assert tokenize(messages=TURNS, continue_final_message=True).json()["tokens"] == [258, *b"hi"]
    error = tokenize(messages=TURNS, chat_template_kwargs={"tools": 1}).json()["error"]
    assert error["param"] == "chat_template_kwargs"
    for name, value in (("continue_final_message", True), ("chat_template_kwargs", {"a": 1})):
        assert tokenize(prompt="hi", **{name: value}).json()["error"]["param"] == name
