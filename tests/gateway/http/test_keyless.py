"""A gateway without API keys: who may call it, and that no client learns by it what strangers have asked."""

import asyncio

import httpx
import pytest
from scripted_actor import ScriptedActor, events
from test_edge_errors import error_of
from test_edge_keys import guarded

REBOUND = {"host": "evil.example"}
FOREIGN = {"origin": "http://evil.example", "content-type": "text/plain"}
BODY = {"prompt": "hello", "max_tokens": 2}
PATHS = ("/", "/health", "/metrics", "/cluster", "/cluster/state/decode", "/v1/models", "/trace/x")


def refused(answer: httpx.Response) -> bool:
    return answer.status_code == 403 and error_of(answer)[3] == "insufficient_permissions"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "host", ["evil.example", "10.0.0.1:8000", "127.0.0.1.evil.example", "[", "localhost.evil.example:8000"]
)
def test_on_loopback_it_is_called_by_no_other_name(path, host):
    assert refused(ScriptedActor().call("GET", path, headers={"host": host}))


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "127.5.5.5"])
def test_on_loopback_this_machine_calls_it(host):
    assert ScriptedActor().call("GET", "/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("headers", [REBOUND, FOREIGN, {"origin": "null"}, {"origin": "http://127.0.0.1:3000"}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_another_sites_page_has_nothing_made(path, headers):
    actor = ScriptedActor()
    assert refused(actor.call("POST", path, json=BODY, headers=headers))
    assert actor.requests == {}


def test_the_own_page_and_those_that_the_operator_names_may():
    for origins, origin in (
        ((), "http://127.0.0.1:8000"),
        (("https://chat.example",), "https://chat.example"),
        (("*",), "null"),
    ):
        actor = ScriptedActor(cors_origins=origins)
        assert actor.call("POST", "/v1/completions", json=BODY, headers={"origin": origin}).status_code == 200
    assert refused(ScriptedActor(cors_origins=("*",)).call("GET", "/metrics", headers=REBOUND))


@pytest.mark.parametrize("actor", [ScriptedActor(allow_open=True), guarded()], ids=["allow_open", "keys"])
def test_by_keys_or_where_everybody_may_call_it_has_any_name(actor):
    headers = {"host": "llm.example.org", "origin": "https://chat.example", "authorization": "Bearer alice"}
    assert actor.call("POST", "/v1/completions", json=BODY, headers=headers).status_code == 200


def reuse(answer: dict) -> list:
    return [
        answer["usage"]["prompt_tokens_details"],
        *(answer["mooncake"][f"cached_{where}"] for where in ("own", "local", "remote")),
    ]


def test_where_strangers_call_reuse_is_told_for_a_salt_alone():
    actor, told = ScriptedActor(allow_open=True), [{"cached_tokens": 4}, 1, 2, 1]
    assert reuse(actor.complete().json()) == [None] * 4
    assert actor.complete().json()["mooncake"]["prefill"] == "prefill-0"
    assert reuse(events(actor.complete(stream=True, stream_options={"include_usage": True}))[-2]) == [None] * 4
    assert reuse(actor.complete(cache_salt="mine").json()) == told
    assert reuse(ScriptedActor().complete().json()) == told, "on loopback everybody is this machine's"
    with_key = guarded().call("POST", "/v1/completions", json=BODY, headers={"authorization": "Bearer alice"})
    assert reuse(with_key.json()) == told, "a key's prefixes are its own"


def test_where_strangers_call_an_answer_is_approximate_for_a_salt_alone():
    asked = []
    for actor, options in (
        (ScriptedActor(allow_open=True), {}),
        (ScriptedActor(allow_open=True), {"cache_salt": "mine"}),
        (ScriptedActor(), {}),
    ):
        assert actor.complete(**options).status_code == 200
        asked.append(actor.only.exact)
    assert asked == [True, False, False]


def get(actor: ScriptedActor, path: str, client: str, **headers: str) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=actor.app, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.1:8000") as http:
            return await http.get(path, headers=headers)

    return asyncio.run(go())


@pytest.mark.parametrize("path", ["/cluster", "/trace/unknown", "/cluster/state/nobody"])
def test_where_strangers_call_what_others_asked_is_for_this_machine(path):
    actor = ScriptedActor(allow_open=True)
    assert refused(get(actor, path, "10.0.0.9"))
    assert refused(get(actor, path, "127.0.0.1", **{"x-forwarded-for": "10.0.0.9"}))
    for client in ("127.0.0.1", "10.0.0.1"):
        assert not refused(get(actor, path, client))
    for open_path in ("/health", "/metrics", "/v1/models", "/"):
        assert get(actor, open_path, "10.0.0.9").status_code == 200
