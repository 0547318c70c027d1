"""API keys at the HTTP edge: who has none, who has too little left, and what tenants learn of each other: nothing."""

import asyncio
import threading

import httpx
import pytest
from scripted_actor import ScriptedActor
from test_edge_errors import error_of

from mooncake_zmq.gateway.http import app
from mooncake_zmq.gateway.requests.client_events import Failed
from mooncake_zmq.gateway.requests.tenants import Tenant, Tenants, digest_of
from mooncake_zmq.operate.usage import read
from mooncake_zmq.telemetry.usage import Meter

BODY = {"prompt": [1, 2, 3, 4, 5, 6, 7, 8], "max_tokens": 4}


def guarded(**limits) -> ScriptedActor:
    """A gateway with the users "alice" and "bob", whose keys are their names, the admin "root", and "meter" for metrics."""
    actor = ScriptedActor()
    known = [Tenant(name=name, digest=digest_of(name), **limits) for name in ("alice", "bob")]
    operators = [
        Tenant(name=name, digest=digest_of(name), role=role) for name, role in (("root", "admin"), ("meter", "metrics"))
    ]
    actor.edge.tenants = Tenants([*known, *operators], slots=8)
    return actor


def ask(actor: ScriptedActor, key: str | None, path: str = "/v1/completions", **body) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    if not path.startswith("/v1/c"):
        return actor.call("GET", path, headers=headers)
    return actor.call("POST", path, json=BODY | body, headers=headers)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/nowhere"])
def test_who_has_no_key_or_a_wrong_one_gets_nothing(path):
    actor = guarded()
    for key in (None, "", "mallory", "alice2", "x" * 300, "\xff"):
        headers = {} if key is None else {"authorization": f"Bearer {key}".encode("latin-1")}
        answer = actor.call("POST" if "completions" in path else "GET", path, headers=headers, content=b"{}" * 1000)
        assert error_of(answer) == (401, "invalid_request_error", None, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    basic = actor.call("GET", path, headers={"authorization": "Basic YWxpY2U6"})
    assert basic.status_code == 401
    assert actor.requests == {}
    assert actor.edge.counts["edge_http_responses[status=401]"] == 7


def test_who_has_a_key_is_served():
    actor = guarded()
    assert ask(actor, "alice").status_code == 200
    assert ask(actor, "alice", "/v1/models").status_code == 200
    assert actor.edge.tenants.slots_taken == 0


def test_what_a_key_uses_is_counted_once_a_call(tmp_path):
    actor = guarded()
    actor.edge.meter = Meter(tmp_path, "gw", now=lambda: 0.0)
    ask(actor, "alice")
    ask(actor, "alice", n=3)
    hello = {"messages": [{"role": "user", "content": "hello"}]}
    actor.call("POST", "/v1/chat/completions", json=hello, headers={"authorization": "Bearer bob"})
    ask(actor, "bob", max_tokens=1000)  # a 400
    actor.script = lambda _request, _number: [[Failed(status=503, code="overloaded", message="full")]]
    ask(actor, "bob")
    actor.edge.meter.write()
    alice, bob = read(tmp_path)
    cached = [(each.cached_own, each.cached_local, each.cached_remote) for each in (alice, bob)]
    assert (alice.key, alice.calls, alice.prompt_tokens, alice.completion_tokens) == ("alice", 2, 16, 8)
    assert (bob.key, bob.calls, bob.completion_tokens) == ("bob", 1, 2)
    assert cached == [(2, 4, 2), (1, 2, 1)]


def test_a_prompt_without_an_answer_is_counted_too(tmp_path):
    actor = guarded()
    actor.edge.meter = Meter(tmp_path, "gw", now=lambda: 0.0)
    ask(actor, "alice", echo=True, max_tokens=0)
    actor.edge.meter.write()
    (alice,) = read(tmp_path)
    assert (alice.calls, alice.prompt_tokens, alice.completion_tokens) == (1, 8, 0)


def test_kept_tokens_of_a_text_are_of_one_tenant_and_salt():
    actor = guarded()
    tokenizer, salts = actor.model.tokenizer, []
    encode = tokenizer.encode

    def noting(text, *, special=True, salt=None):
        salts.append(salt)
        return encode(text, special=special)

    tokenizer.encode = noting
    for key, more in (("alice", {}), ("alice", {}), ("bob", {}), ("alice", {"cache_salt": "s"}), ("bob", {"cache_salt": "s"})):
        assert ask(actor, key, prompt="a text", **more).status_code == 200
    assert None not in salts
    assert salts[0] == salts[1]
    assert len({*salts}) == 4
    body = {"prompt": "a text"}
    assert actor.call("POST", "/tokenize", json=body, headers={"authorization": "Bearer alice"}).status_code == 200
    assert salts[-1] is None


def test_what_load_balancers_ask_needs_no_key_and_metrics_an_admins():
    actor = guarded()
    for path in ("/", "/health", "/ready", "/ping", "/live"):
        assert ask(actor, None, path).status_code == 200
    assert error_of(ask(actor, "alice", "/metrics"))[0::3] == (403, "insufficient_permissions")
    for operator in ("root", "meter"):
        assert ask(actor, operator, "/metrics").status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_how_the_cluster_is_an_operator_alone_is_told(path):
    actor = guarded()
    for key in (None, "mallory", "alice"):
        assert ask(actor, key, path).json() == {"status": "ok"}
    for operator in ("root", "meter"):
        assert ask(actor, operator, path).json()["peers"]["cache-node"] == ["cache-0", "cache-1"]
    actor.up.clear()
    for key in (None, "alice"):
        answer = ask(actor, key, path)
        assert (answer.status_code, answer.json()) == (503, {"status": "unavailable"})
    assert ask(actor, "root", path).json()["missing"] == ["conductor", "prefill", "decode"]
    assert ask(ScriptedActor(), None, path).json()["model"] == "toy"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/version", "/nowhere"])
def test_who_collects_metrics_may_nothing_else(path):
    actor = guarded()
    assert error_of(ask(actor, "meter", path))[0::3] == (403, "insufficient_permissions")
    assert actor.requests == {}


def test_without_keys_everybody_is_served():
    actor = ScriptedActor()
    assert ask(actor, None).status_code == 200
    assert ask(actor, None, "/metrics").status_code == 200


@pytest.mark.parametrize("limits", [{"requests": 1}, {"tokens": 15}])
def test_more_than_a_minutes_amount_is_429_with_retry_after(limits):
    actor = guarded(**limits)
    assert ask(actor, "alice").status_code == 200
    answer = ask(actor, "alice")
    assert error_of(answer) == (429, "rate_limit_error", None, "rate_limit_exceeded")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert ask(actor, "bob").status_code == 200
    assert actor.edge.tenants.slots_taken == 0


def test_a_prompt_takes_of_a_minutes_amount_once_however_many_choices_it_has():
    """Eight tokens of the prompt and four of each answer, of which two are written."""
    actor = guarded(tokens=28, share=1.0)
    actor.edge.clock = lambda: 0.0
    assert ask(actor, "alice", n=5).status_code == 200
    counts = actor.edge.tenants.counts()
    assert counts["tenant_tokens[tenant=alice]"] == 8 + 5 * 2
    assert ask(actor, "alice", n=5).headers["retry-after"] == str(18 * 60 // 28 + 1)


def test_a_share_of_the_slots_bounds_a_calls_choices():
    actor = guarded(share=0.25)
    assert ask(actor, "alice", n=2).status_code == 200
    assert error_of(ask(actor, "alice", n=3))[0::3] == (429, "rate_limit_exceeded")
    assert actor.edge.calls.slots_taken == 0
    assert actor.edge.tenants.slots_taken == 0


class Held:
    """A gateway that prepares nobody's call until it is let go on, and its clients."""

    def __init__(self, monkeypatch, **limits) -> None:
        monkeypatch.setattr(app, "AT_ONCE_BYTES", 0)
        self.actor = guarded(**limits)
        self.go_on, self.prepared = threading.Event(), []
        encode = self.actor.model.tokenizer.encode

        def slow(text, **_options):
            self.prepared.append(text)
            assert self.go_on.wait(10)
            return encode(text)

        self.actor.model.tokenizer.encode = slow

    def gauge(self, name, tenant):
        return self.actor.edge.own_gauges().get(f"tenant_{name}[tenant={tenant}]", 0)

    def run(self, client):
        async def go(port):
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as self.http:
                await client()
                await self.actor.until(lambda: self.actor.edge.calls.slots_taken == 0)
            assert self.actor.edge.tenants.slots_taken == 0
            assert self.gauge("preparing", "alice") == self.gauge("preparing", "bob") == 0

        self.actor.serve(go)

    def ask(self, key, text):
        headers = {"authorization": f"Bearer {key}"}
        return asyncio.create_task(self.http.post("/v1/completions", json={"prompt": text, "max_tokens": 4}, headers=headers))


def test_a_share_is_asked_for_before_a_slot(monkeypatch):
    held = Held(monkeypatch, share=0.25)

    async def client():
        flood = [held.ask("alice", "alice") for _ in range(20)]
        await held.actor.until(lambda: sum(each.done() for each in flood) == 18)
        assert held.actor.edge.calls.slots_taken == 2
        assert held.gauge("preparing", "alice") == held.gauge("slots", "alice") == 2
        asked = held.ask("bob", "bob")
        await held.actor.until(lambda: held.gauge("preparing", "bob") == 1)
        held.go_on.set()
        assert (await asked).status_code == 200
        assert sorted([(await each).status_code for each in flood]) == [200] * 2 + [429] * 18

    held.run(client)


def test_tenants_take_turns_at_what_prepares_their_calls(monkeypatch):
    held = Held(monkeypatch)

    async def client():
        asked = []
        for number, (key, text) in enumerate([("alice", "a"), ("alice", "a"), ("alice", "a"), ("bob", "b"), ("bob", "b")]):
            asked.append(held.ask(key, text))
            await held.actor.until(lambda count=number + 1: held.actor.edge.calls.slots_taken == count)
        held.go_on.set()
        assert [(await each).status_code for each in asked] == [200] * 5
        assert "".join(held.prepared) == "abbaa", "alice's first one took long"

    held.run(client)


def test_who_hangs_up_gives_his_place_back_at_once_whatever_is_in_hand(monkeypatch):
    held = Held(monkeypatch, share=0.25)

    async def client():
        asked = [held.ask("alice", text) for text in ("first", "second")]
        await held.actor.until(lambda: held.actor.edge.calls.slots_taken == 2)
        await held.actor.until(lambda: bool(held.prepared))
        for each in asked:
            each.cancel()
        await held.actor.until(lambda: held.actor.edge.calls.slots_taken == held.actor.edge.tenants.slots_taken == 0)
        assert not held.go_on.is_set()
        held.go_on.set()
        assert (await held.ask("alice", "third")).status_code == 200
        assert len(held.prepared) == 2, "what nobody waits for is not begun"

    held.run(client)


def test_tenants_share_no_block_keys_whatever_salt_they_wish():
    actor = guarded()
    for key, salt in (("alice", None), ("alice", None), ("bob", None), ("bob", "tenant/alice/"), ("alice", "x")):
        assert ask(actor, key, **({"cache_salt": salt} if salt else {})).status_code == 200
    keys = [request.keys for request in actor.requests.values()]
    assert [request.tenant for request in actor.requests.values()] == ["alice", "alice", "bob", "bob", "alice"]
    assert keys[0] == keys[1]
    assert len(set(keys[1:])) == 4
    open_to_all = ScriptedActor()
    ask(open_to_all, None)
    assert open_to_all.only.keys not in keys
    assert open_to_all.only.tenant == ""


def test_what_each_tenant_has_of_the_gateway_is_counted_by_name():
    actor = guarded(requests=2)
    for _ in range(3):
        ask(actor, "alice")
    ask(actor, "mallory")
    page = ask(actor, "meter", "/metrics").text
    for line in (
        'mooncake_tenant_calls_total{tenant="alice"} 2.0',
        'mooncake_tenant_limited_total{tenant="alice"} 1.0',
        'mooncake_tenant_tokens_total{tenant="alice"} 20.0',
        'mooncake_tenant_slots{tenant="alice"} 0.0',
    ):
        assert line in page
    assert "mallory" not in page
    assert "bob" not in page
    actor.edge.tenants.replace([])
    assert not [name for name in actor.edge.own_counts() if "tenant" in name]


@pytest.mark.parametrize("asked", [{"priority": -1}, {"priority": -1000}, {"ttft_slo": 0}, {"tbt_slo": 0}, {"tbt_slo": 0.001}])
def test_what_others_would_pay_for_takes_a_key_that_says_so(asked):
    actor = guarded()
    refused = ask(actor, "alice", **asked)
    assert error_of(refused) == (403, "invalid_request_error", next(iter(asked)), "insufficient_permissions")
    assert actor.requests == {}
    assert ask(guarded(priority=-1000, slo="own"), "alice", **asked).status_code == 200
    assert ask(ScriptedActor(), None, **asked).status_code == 200


def test_any_key_may_ask_to_wait_and_none_for_more_than_its_own():
    assert ask(guarded(), "alice", priority=1000).status_code == 200
    assert ask(guarded(priority=-5), "alice", priority=-5).status_code == 200
    assert ask(guarded(priority=-5), "alice", priority=-6).status_code == 403
