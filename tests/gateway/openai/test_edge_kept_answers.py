"""Answers that a gateway gives again: to whom, for which bodies, in what shape, and what it counts."""

import asyncio
import json
from dataclasses import replace
from itertools import count

import httpx
import msgspec
import pytest
from msgspec import structs
from scripted_actor import ScriptedActor, events, finished, one_by_one, tokens

from mooncake_zmq.core.messages import Sampling, StopRule
from mooncake_zmq.gateway.answers.table import AnswerTable, Stored
from mooncake_zmq.gateway.http.calls import Call, Full
from mooncake_zmq.gateway.http.sse import accept
from mooncake_zmq.gateway.openai.answer_keys import asked_of, normalised
from mooncake_zmq.gateway.openai.bodies import ChatBody, CompletionBody
from mooncake_zmq.gateway.requests.client_events import ClientRequest, Failed, TokenOut
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
    answers = [actor.complete(**EXACT) for _ in range(2)]
    assert [text_of(answer) for answer in answers] == ["n0", "n1"]
    assert actor.edge.answers is None
    assert "kept" not in answers[0].json()["mooncake"]


def test_the_same_prompt_is_answered_once_and_the_answer_says_so():
    actor = keeping()
    first, second = actor.complete(**EXACT).json(), actor.complete(**EXACT).json()
    assert len(actor.requests) == 1
    assert "answered_from" not in first["mooncake"]
    assert first["mooncake"].pop("kept") is True
    assert second["mooncake"].pop("answered_from") == "cache"
    assert second["mooncake"].pop("verified_at") > 1_600_000_000
    for name in ("cached_own", "cached_local", "cached_remote"):
        assert first["mooncake"].pop(name) > 0 == second["mooncake"].pop(name), "nothing is loaded for a kept answer"
    assert first["usage"].pop("prompt_tokens_details") != second["usage"].pop("prompt_tokens_details") == {"cached_tokens": 0}
    for answer in (first, second):
        del answer["mooncake"]["request"], answer["id"], answer["created"]
    assert first == second, "usage and all"
    assert counts(actor) == {"misses": 1, "hits": 1}


APPROXIMATE = AnswersSettings(enabled=True, max_error=1.0, approximate=True)


def said(*texts: str, **settings) -> list[str]:
    """Return the answers to chats, one after the other, by a gateway with approximate keys."""
    actor = keeping(settings=APPROXIMATE)
    return [text_of(actor.chat(messages=[{"role": "user", "content": text}], **EXACT)) for text in texts]


def test_chats_that_differ_in_form_alone_have_one_answer_where_keys_are_approximate():
    assert said("What is  KV?", "what is kv", "  WHAT is KV…\n", "what is the KV") == ["n0", "n0", "n0", "n1"]
    actor = keeping(settings=APPROXIMATE)
    for role, answer in (("user", "n0"), ("system", "n1")):
        assert text_of(actor.chat(messages=[{"role": role, "content": "what is kv"}], **EXACT)) == answer


@pytest.mark.parametrize(("one", "other"), [("C#?", "C?"), ("C++", "C"), ("5!", "5"), ("2⁵", "25"), ("Maße", "Masse")])
def test_questions_with_different_answers_have_two(one, other):
    assert said(one, other) == ["n0", "n1"]


def test_keys_are_exact_by_default():
    actor = keeping()
    answers = [
        text_of(actor.chat(messages=[{"role": "user", "content": said}], **EXACT)) for said in ("hello", "Hello", "hello")
    ]
    assert answers == ["n0", "n1", "n0"]


def test_those_of_completions_always_are():
    actor = keeping(settings=APPROXIMATE)
    answers = [text_of(actor.complete(prompt=said, **EXACT)) for said in ("hello", "Hello", "hello ", "hello")]
    assert answers == ["n0", "n1", "n2", "n0"]


@pytest.mark.parametrize(
    ("said", "same"),
    [
        ("  Tell\n me ", "tell me"),
        ("STRASSE?.", "strasse"),
        ("e\u0301", "\u00e9"),
        ("???", "???"),
        ("", ""),
    ],
)
def test_normalised(said, same):
    assert normalised(said) == same


def test_a_stream_has_the_answer_at_once_and_usage_says_where_it_is_from():
    actor = keeping(lambda *_: one_by_one([*tokens("hé"), finished(completion_tokens=3)]))
    stream = {"stream": True, "stream_options": {"include_usage": True}, **EXACT}
    whole = actor.chat(**EXACT).json()
    chunks = events(actor.chat(**stream))
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-2]] == [{"role": "assistant", "content": ""}, {"content": "hé"}]
    assert chunks[-3]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-2]["usage"] == whole["usage"] | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert chunks[-2]["mooncake"]["answered_from"] == "cache"
    assert chunks[-1] == "[DONE]"
    assert len(actor.requests) == 1


def test_a_long_answer_is_streamed_whole():
    said = "long " * 200
    actor = keeping(lambda *_: [[*tokens(said), finished("length")]], max_model_len=2048)
    actor.complete(temperature=0, max_tokens=1000)
    chunks = events(actor.complete(temperature=0, max_tokens=1000, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == said
    assert len(actor.requests) == 1


def test_the_outputs_of_a_kept_answer_are_made_a_portion_at_a_time(monkeypatch):
    """A client that does not read has no more than one portion in memory, and the loop no more than one at a time."""
    actor = keeping(lambda *_: [[*tokens("x" * 900), finished()]], max_model_len=2048)
    body = {"temperature": 0, "max_tokens": 1000}
    actor.complete(**body)
    made, made_by_then, outputs = count(1), list[int](), Stored.outputs

    def accepting(*args):
        made_by_then.append(next(made) - 1 - len(made_by_then))
        accept(*args)

    monkeypatch.setattr(Stored, "outputs", lambda stored: (output for output in outputs(stored) if next(made)))
    monkeypatch.setattr("mooncake_zmq.gateway.http.app.accept", accepting)
    assert text_of(actor.complete(**body)) == "x" * 900
    assert made_by_then == [256, 512, 768, 901]


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
        answer = actor.complete(**EXACT | changes)
        assert answer.status_code == 200
        assert "kept" not in answer.json()["mooncake"]
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


NO_PART = {
    *("model", "stream", "stream_options", "seed", "cache_salt", "priority", "ttft_slo", "tbt_slo", "answer_cache"),
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
}
"""Fields that are no part of the key; the key has the model and the salt by what they become."""
OTHER = {
    "stream_options": {"include_usage": True},
    "prompt": "other",
    "messages": [{"role": "user", "content": "other"}],
    "reasoning_effort": "high",
    "model": "other",
    "cache_salt": "other",
    "top_logprobs": 0,
    "mooncake": {"kv_budget": 0.5},
}
"""Values of fields that may not be true, 2 or 0.5."""


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in (CompletionBody, ChatBody) for name in kind.__struct_fields__]
)
def test_each_field_of_a_body_is_a_part_of_the_key_or_known_not_to_be(kind, name):
    """A new field is a part of it, unless someone says otherwise here. A body without a key is always computed."""
    said = {"messages": [{"role": "user", "content": "hi"}]} if kind is ChatBody else {"prompt": "hi"}
    plain = {"temperature": 0, **said}

    def key(fields):
        body = msgspec.json.decode(json.dumps(fields), type=kind)
        said = [message.turn() for message in body.messages] if kind is ChatBody else json.loads(bytes(body.prompt))
        request = ClientRequest(tokens=b"", root=b"", keys=(), sampling=Sampling(), stop=StopRule(max_tokens=8))
        asked = asked_of(body, [said], request, KEPT)
        return asked and asked.key

    for other in (OTHER[name],) if name in OTHER else (True, 2, 0.5):
        try:
            found = key({**plain, name: other})
        except msgspec.ValidationError:
            continue
        assert (found == key(plain)) == (name in NO_PART)
        break
    else:
        pytest.fail(f"no value for {name}: add one to OTHER")


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

    def look_up(self, asked):
        return super().look_up(replace(asked, tenant=""))


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


def test_a_verification_that_was_refused_is_followed_by_another_one(monkeypatch):
    actor = keeping()
    actor.complete(**EXACT)
    drawing(actor, 0.0)

    def refusing(*_):
        raise Full("full")

    with monkeypatch.context() as patched:
        patched.setattr(Call, "submit", refusing)
        assert actor.complete(**EXACT).status_code == 503
    assert text_of(actor.complete(**EXACT)) == "n1"
    assert counts(actor)["verifications"] == 2


def test_any_answer_of_new_weights_ends_the_older_ones():
    """It need not be one that could be kept."""
    versions = ["v1", "v2", "v2"]
    actor = keeping(lambda _request, number: [[*tokens(f"n{number}"), finished(versions=((versions[number], 0, 2),))]])
    assert [text_of(actor.complete(**EXACT)) for _ in range(2)] == ["n0", "n0"]
    assert text_of(actor.complete(max_tokens=8)) == "n1"
    assert [text_of(actor.complete(**EXACT)) for _ in range(2)] == ["n2", "n2"]


def test_a_stream_says_whether_its_answer_is_kept():
    actor = keeping(settings=replace(KEPT, max_bytes=4096), max_model_len=2048)
    actor.script = lambda request, _number: [[*tokens("x" * request.stop.max_tokens), finished()]]
    stream = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    kept = [events(actor.complete(max_tokens=count, **stream))[-2]["mooncake"]["kept"] for count in (8, 800)]
    assert kept == [True, False]


def test_an_answer_over_kv_of_other_prompts_is_not_kept_as_a_plain_stream_could_not_say_that_it_is_approximate():
    actor = keeping(lambda _request, number: [[*tokens(f"n{number}"), finished(parts=3, recomputed=1)]])
    first = actor.complete(**EXACT).json()["mooncake"]
    assert (first["approximate"], first["kept"]) == (True, False)
    assert "n1" in actor.complete(stream=True, **EXACT).text


def test_an_answer_given_again_may_have_been_over_rounded_kv_and_says_so():
    actor = keeping(kv_codec="int4")
    told = [actor.complete(**EXACT).json()["mooncake"] for _ in range(2)]
    assert told[1]["answered_from"] == "cache"
    assert [each["approximate"] for each in told] == [True, True], "what was loaded for the first one is not known any more"
    actor = keeping(kv_codec="int8")
    assert [actor.complete(**EXACT).json()["mooncake"]["approximate"] for _ in range(2)] == [False, False]


def test_metrics_say_how_questions_were_answered():
    actor = keeping()
    for _ in range(3):
        actor.complete(**EXACT)
    scraped = actor.call("GET", "/metrics").text
    for line in ("mooncake_answers_hits_total 2.0", "mooncake_answers_misses_total 1.0", "mooncake_cached_answers_entries 1.0"):
        assert line in scraped
