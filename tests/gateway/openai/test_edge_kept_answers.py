"""Answers that a gateway gives again: to whom, for which bodies, in what shape, and what it counts."""

import asyncio
from dataclasses import replace

import httpx
import pytest
from msgspec import structs
from scripted_actor import ScriptedActor, events, finished, one_by_one, tokens

from mooncake_zmq.gateway.answers.table import AnswerTable
from mooncake_zmq.gateway.openai.answer_keys import asked_of, normalised
from mooncake_zmq.gateway.requests.client_events import Failed, TokenOut
from mooncake_zmq.gateway.requests.tenants import Tenant, Tenants, digest_of
from mooncake_zmq.gateway.settings import AnswersSettings

KEPT = AnswersSettings(enabled=True, max_error=1.0)
EXACT = {"temperature": 0, "max_tokens": 8}


def keeping(script=None, settings: AnswersSettings = KEPT, draw: float = 0.99, **more) -> ScriptedActor:
    """A gateway that keeps answers. `draw`: the number that decides whether a hit is verified: a small one lets it be."""
    actor = ScriptedActor(script or numbered, answers=settings, **more)
    return drawing(actor, draw)


def drawing(actor: ScriptedActor, draw: float) -> ScriptedActor:
    actor.edge.answers._draw = lambda: draw
    return actor


def numbered(_request, number):
    """Answers that differ: each says its number."""
    return [[*tokens(f"n{number}"), finished()]]


def scored(_request, _number):
    return [[*(TokenOut(index, token, (-0.5, ())) for index, token in enumerate(b"ok")), finished()]]


def text_of(response: httpx.Response) -> str:
    choice = response.json()["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def counts(actor: ScriptedActor) -> dict[str, float]:
    return actor.edge.answers.counts


def test_nothing_is_kept_unless_it_is_enabled():
    actor = ScriptedActor(numbered)
    assert [text_of(actor.complete(**EXACT)) for _ in range(2)] == ["n0", "n1"]
    assert actor.edge.answers is None


def test_the_same_prompt_is_answered_once_and_the_answer_says_so():
    actor = keeping()
    first, second = actor.complete(**EXACT).json(), actor.complete(**EXACT).json()
    assert len(actor.requests) == 1
    assert "answered_from" not in first["mooncake"]
    assert second["mooncake"].pop("answered_from") == "cache"
    assert second["mooncake"].pop("verified_at") > 1_600_000_000
    for answer in (first, second):
        del answer["mooncake"]["request"], answer["id"], answer["created"]
    assert first == second, "usage and all"
    assert counts(actor) == {"misses": 1, "hits": 1}


def test_chats_that_differ_in_form_alone_have_one_answer():
    actor = keeping()
    for said in ("What is  KV?", "what is kv", "  WHAT is KV…\n"):
        assert text_of(actor.chat(messages=[{"role": "user", "content": said}], **EXACT)) == "n0"
    assert text_of(actor.chat(messages=[{"role": "user", "content": "what is the KV"}], **EXACT)) == "n1"
    assert text_of(actor.chat(messages=[{"role": "system", "content": "what is kv"}], **EXACT)) == "n2"


def test_where_keys_are_exact_they_have_two():
    actor = keeping(settings=AnswersSettings(enabled=True, max_error=1.0, approximate=False))
    answers = [text_of(actor.complete(prompt=said, **EXACT)) for said in ("hello", "Hello", "hello")]
    assert answers == ["n0", "n1", "n0"]


@pytest.mark.parametrize(
    ("said", "same"),
    [
        ("  Tell\n me ", "tell me"),
        ("Straße?!", "strasse"),
        ("\uff28\uff29", "hi"),
        ("???", "???"),
        ("", ""),
    ],
)
def test_normalised(said, same):
    assert normalised(said) == same


def test_the_end_of_a_text_that_is_continued_stays():
    assert normalised("Once,  ", with_end=True) == "once, "
    assert normalised("Once.", with_end=True) == "once."


def test_a_stream_has_the_answer_at_once_and_usage_says_where_it_is_from():
    actor = keeping(lambda *_: one_by_one([*tokens("hé"), finished("length", completion_tokens=3)]))
    stream = {"stream": True, "stream_options": {"include_usage": True}, **EXACT}
    whole = actor.chat(**EXACT).json()
    chunks = events(actor.chat(**stream))
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-2]] == [{"role": "assistant", "content": ""}, {"content": "hé"}]
    assert chunks[-3]["choices"][0]["finish_reason"] == "length"
    assert chunks[-2]["usage"] == whole["usage"]
    assert chunks[-2]["mooncake"]["answered_from"] == "cache"
    assert chunks[-1] == "[DONE]"
    assert len(actor.requests) == 1


def test_a_long_answer_is_streamed_whole():
    said = "long " * 200
    actor = keeping(lambda *_: [[*tokens(said), finished("length")]], max_model_len=2048)
    actor.complete(temperature=0, max_tokens=1000)
    chunks = events(actor.complete(temperature=0, max_tokens=1000, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == said


def test_a_stop_string_cuts_the_answer_again():
    actor = keeping(lambda *_: one_by_one(tokens("one. two")))
    first = actor.complete(stop=["."], **EXACT)
    second = actor.complete(stop=["."], **EXACT)
    assert (text_of(first), text_of(second)) == ("one", "one")
    assert len(actor.requests) == 1
    assert counts(actor)["hits"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.5},
        {"temperature": None},
        {"n": 2},
        {"logprobs": 1},
        {"echo": True},
        {"prompt": ["hello", "hello"]},
        {"answer_cache": False},
    ],
)
def test_completions_that_are_always_computed(changes):
    actor = keeping(scored)
    for _ in range(2):
        assert actor.complete(**EXACT | changes).status_code == 200
    assert counts(actor) == {}
    assert len(actor.requests) >= 2


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": True},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "tool", "content": "2", "tool_call_id": "x"}]},
    ],
)
def test_chats_that_are_always_computed(changes):
    actor = keeping(scored, max_model_len=4096)
    for _ in range(2):
        assert actor.chat(**EXACT | changes).status_code == 200
    assert counts(actor) == {}


@pytest.mark.parametrize("other", [{"max_tokens": 7}, {"stop": ["x"]}, {"cache_salt": "s"}, {"presence_penalty": 1.0}])
def test_what_decides_the_answer_is_a_part_of_the_key(other):
    actor = keeping()
    assert text_of(actor.complete(**EXACT)) == "n0"
    assert text_of(actor.complete(**EXACT | other)) == "n1"
    assert text_of(actor.complete(**EXACT | other)) == "n1"


@pytest.mark.parametrize("other", [{"seed": 3}, {"user": "u"}, {"priority": 1}, {"ttft_slo": 1.0}, {"stream": False}])
def test_what_does_not_decide_it_is_none(other):
    actor = keeping()
    assert text_of(actor.complete(**EXACT)) == text_of(actor.complete(**EXACT | other))


def test_adapters_have_answers_of_their_own():
    actor = keeping(adapters=("toy-b",))
    assert text_of(actor.complete(**EXACT)) == "n0"
    assert text_of(actor.complete(model="toy-b", **EXACT)) == "n1"


def of_tenants(kind: type[AnswerTable] = AnswerTable) -> list[str]:
    """Ask as alice, bob and alice; return the answers."""
    actor = ScriptedActor(numbered)
    actor.edge.tenants = Tenants([Tenant(name=name, digest=digest_of(name)) for name in ("alice", "bob")], slots=8)
    actor.edge.answers = kind(KEPT, lambda: 0.99)
    said = []
    for tenant in ("alice", "bob", "alice"):
        headers = {"authorization": f"Bearer {tenant}"}
        said.append(text_of(actor.call("POST", "/v1/completions", json={"prompt": "hello", **EXACT}, headers=headers)))
    return said


class Forgetful(AnswerTable):
    """Planted: all tenants have one part of the table."""

    def _tenant(self, asked):
        return super()._tenant(replace(asked, tenant=""))


def test_no_tenant_is_given_the_answer_of_another_even_where_they_have_one_part_of_the_table():
    """The key alone keeps them apart."""
    assert of_tenants() == ["n0", "n1", "n0"]
    assert of_tenants(Forgetful) == ["n0", "n1", "n0"]


def test_a_key_without_the_tenant_in_such_a_table_is_seen(monkeypatch):
    def planted(body, prompts, request, settings):
        return asked_of(body, prompts, structs.replace(request, tenant="", root=b""), settings)

    monkeypatch.setattr("mooncake_zmq.gateway.openai.prepare.asked_of", planted)
    assert of_tenants() == ["n0", "n0", "n0"]


def test_strangers_share_an_answer_only_with_a_salt():
    actor = keeping(allow_open=True)
    assert [text_of(actor.complete(**EXACT)) for _ in range(2)] == ["n0", "n1"]
    assert [text_of(actor.complete(cache_salt="s", **EXACT)) for _ in range(2)] == ["n2", "n2"]


def test_a_hit_that_is_verified_is_answered_by_the_engine_and_a_changed_answer_replaces_the_kept_one():
    actor = keeping()
    assert text_of(actor.complete(**EXACT)) == "n0"
    drawing(actor, 0.0)
    verified = actor.complete(**EXACT)
    assert text_of(verified) == "n1"
    assert "answered_from" not in verified.json()["mooncake"]
    drawing(actor, 0.99)
    assert text_of(actor.complete(**EXACT)) == "n1"
    assert counts(actor) == {"misses": 1, "verifications": 1, "wrong": 1, "hits": 1}


def test_a_class_without_evidence_is_answered_by_the_engine():
    actor = keeping(settings=AnswersSettings(enabled=True))
    assert [text_of(actor.complete(**EXACT)) for _ in range(3)] == ["n0", "n1", "n2"]
    assert counts(actor) == {"misses": 1, "withheld": 2, "wrong": 2}


def test_an_answer_that_failed_is_not_kept():
    failed = Failed(status=503, code="x", message="x")
    actor = keeping(lambda _request, number: [[*tokens("n"), failed if number == 0 else finished()]])
    assert actor.complete(**EXACT).status_code == 503
    assert text_of(actor.complete(**EXACT)) == "n"
    assert counts(actor) == {"misses": 2}


def test_an_answer_whose_client_left_is_not_kept():
    actor = keeping(lambda *_: [tokens("n")])

    async def go(port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=0.2) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/completions", json={"prompt": "hello", **EXACT})
        while actor.edge.calls.open_requests:
            await asyncio.sleep(0.01)

    actor.serve(go)
    assert counts(actor) == {"misses": 1}
    assert actor.edge.answers.gauges()["entries"] == 0


def test_metrics_say_how_questions_were_answered():
    actor = keeping()
    for _ in range(3):
        actor.complete(**EXACT)
    scraped = actor.call("GET", "/metrics").text
    for line in ("mooncake_answers_hits_total 2.0", "mooncake_answers_misses_total 1.0", "mooncake_cached_answers_entries 1.0"):
        assert line in scraped
