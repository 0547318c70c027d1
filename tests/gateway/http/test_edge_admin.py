"""What operators may do at the HTTP edge, and that nobody else may, by whatever way he comes."""

import asyncio

import httpx
import pytest
from scripted_actor import ScriptedActor, finished, hello, one_by_one, tokens
from test_edge_cluster import WITH_CACHE
from test_edge_errors import error_of
from test_edge_keys import guarded

from mooncake_zmq.core.messages import Report
from mooncake_zmq.core.watch import PeerReport
from mooncake_zmq.gateway.requests.cluster_snapshot import Listed

LOCAL = {"host": "127.0.0.1:8000"}
CORDONED = Report(uptime_s=1.0, draining=True, cordoned=True)


def cluster(**fields) -> ScriptedActor:
    actor = ScriptedActor(listed=[*WITH_CACHE, Listed("gw", "gateway", "h")], **fields)
    actor.up["cache-0"] = hello("cache-node")
    return actor


def drain(actor: ScriptedActor, node: str = "decode", *, undo: bool = False, **headers: str) -> httpx.Response:
    return actor.call("DELETE" if undo else "POST", f"/admin/drain/{node}", headers=LOCAL | headers)


def test_a_node_is_drained_stays_and_serves_again():
    actor = cluster()
    told = drain(actor).json()
    assert (told["name"], told["state"], told["left"], told["cordoned"]) == ("decode", "drained", 0, True)
    assert drain(actor, undo=True).json()["state"] == "ready"
    assert actor.cordons == [("decode", True), ("decode", False)]


@pytest.mark.parametrize(
    ("role", "gauge"),
    [
        ("decode", "requests_running"),
        ("prefill", "stages"),
        ("cache-0", "demoting_blocks"),
        ("conductor", "bookings"),
        ("gw", "edge_slots_taken"),
    ],
)
def test_it_is_drained_once_nothing_is_left(role, gauge):
    actor = cluster()
    actor.edge.clock = lambda: 100.0
    report = Report(uptime_s=1.0, draining=True, cordoned=True, gauges=((gauge, 3.0),))
    actor.reports = {role: PeerReport(100.0, 1, report)}
    (node,) = [each for each in actor.call("GET", "/cluster").json()["nodes"] if each["name"] == role]
    assert (node["state"], node["left"]) == ("draining", 3)


@pytest.mark.parametrize(("node", "status"), [("conductor", 409), ("nobody", 404)])
def test_who_cannot_rest_is_asked_nothing(node, status):
    actor = cluster()
    assert drain(actor, node).status_code == status
    assert actor.cordons == []


def test_the_gateway_that_is_asked_may_be_the_one_and_serves_again():
    actor = cluster()
    told = drain(actor, "gw").json()
    assert (told["name"], told["state"], told["cordoned"]) == ("gw", "drained", True)
    refused = actor.complete()
    assert error_of(refused)[0::3] == (503, "overloaded")
    assert "retry-after" in refused.headers
    assert actor.requests == {}
    health = actor.call("GET", "/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert [actor.call("GET", path).status_code for path in ("/", "/live", "/metrics", "/cluster", "/v1/models")] == [200] * 5
    assert drain(actor, "decode").status_code == 200, "it passes on what operators want of others"
    assert drain(actor, "gw", undo=True).json()["state"] == "ready"
    assert actor.complete().status_code == 200
    assert actor.call("GET", "/health").status_code == 200


def test_a_resting_gateway_answers_what_it_began():
    """Its rest begins between two tokens."""
    actor = cluster()
    actor.script = lambda _request, _number: one_by_one([*tokens("abc"), finished()])
    deliver, backing = actor.edge.calls.deliver, actor

    def resting_meanwhile(effect) -> None:
        backing.set_cordon("gw", True)
        deliver(effect)

    actor.edge.calls.deliver = resting_meanwhile
    assert actor.complete().json()["choices"][0]["text"] == "abc"
    assert actor.complete().status_code == 503


@pytest.mark.parametrize(
    ("second", "status"),
    [(None, 409), (CORDONED, 409), (Report(uptime_s=1.0), 200)],
    ids=["down", "cordoned", "serving"],
)
def test_a_conductor_rests_where_another_is_there_that_does_not(second, status):
    actor = cluster()
    actor.edge.overview._listed = [*actor.listed, Listed("conductor-2", "conductor", "h")]
    if second is not None:
        actor.up["conductor-2"] = hello("conductor")
        actor.reports["conductor-2"] = PeerReport(actor.edge.clock(), 1, second)
    answer = drain(actor, "conductor")
    assert answer.status_code == status
    assert actor.cordons == ([("conductor", True)] if status == 200 else [])
    if status == 409:
        assert error_of(answer)[3] == "last_conductor"
    assert drain(actor, "conductor", undo=True).status_code == 200


def test_whether_another_conductor_rests_is_looked_at_first():
    actor = cluster()
    actor.edge.overview._listed = [*actor.listed, Listed("conductor-2", "conductor", "h")]
    actor.up["conductor-2"] = hello("conductor")
    actor.look = lambda _for_s: actor.reports.setdefault("conductor-2", PeerReport(actor.edge.clock(), 1, CORDONED))
    assert drain(actor, "conductor").status_code == 409


def test_a_conductor_that_rests_already_is_told_again_whoever_else_is_there():
    actor = cluster()
    actor.reports["conductor"] = PeerReport(actor.edge.clock(), 1, CORDONED)
    assert drain(actor, "conductor").json()["cordoned"]


def test_a_resting_gateway_knows_how_the_cluster_is():
    actor = cluster()
    actor.set_cordon("gw", True)
    assert (actor.edge.status(), actor.edge.cluster_status()) == ("draining", "ok")


def test_a_node_that_is_not_there_or_does_not_do_it_is_told(monkeypatch):
    monkeypatch.setattr("mooncake_zmq.gateway.http.cluster_reports.CORDON_S", 0.05)
    actor = cluster(deaf=True)
    assert error_of(drain(actor))[0::3] == (504, "node_silent")
    del actor.up["decode"]
    assert error_of(drain(actor))[0::3] == (503, "node_down")


def test_a_node_that_lost_the_command_as_it_restarted_is_sent_it_again(monkeypatch):
    monkeypatch.setattr("mooncake_zmq.gateway.http.cluster_reports.CORDON_AGAIN_S", 0.02)
    actor = cluster(deaf=True)
    set_cordon = actor.set_cordon

    def lost_once(node, cordoned):
        actor.deaf = not actor.cordons
        set_cordon(node, cordoned)

    actor.set_cordon = lost_once
    assert drain(actor, "decode").json()["cordoned"]
    assert actor.cordons == [("decode", True)] * 2


@pytest.mark.parametrize(("key", "status"), [("root", 200), ("meter", 403), ("alice", 403), (None, 401)])
def test_with_keys_it_takes_an_admins_from_wherever(key, status):
    actor = guarded()
    actor.edge.overview._listed = [Listed("decode", "decode", "h")]
    headers = {"host": "llm.example.org", **({"authorization": f"Bearer {key}"} if key else {})}
    assert actor.call("POST", "/admin/drain/decode", headers=headers).status_code == status
    assert bool(actor.cordons) == (status == 200)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "10.0.0.1:8000"},
        {"host": "evil.example"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"x-forwarded-for": "10.0.0.9"},
        {"via": "1.1 proxy"},
        {"origin": "http://127.0.0.1:3000"},
    ],
)
def test_without_keys_no_other_machine_and_no_other_sites_page_may(headers):
    actor = cluster()
    assert error_of(drain(actor, **headers))[0::3] == (403, "insufficient_permissions")
    assert actor.cordons == []


def test_without_keys_the_own_page_may():
    assert drain(cluster(), origin="http://127.0.0.1:8000").status_code == 200
    assert drain(cluster(), host="localhost:1", origin="http://localhost:1").status_code == 200
    assert drain(cluster(), host="[::1]:1").status_code == 200


def test_without_keys_who_calls_from_elsewhere_may_not():
    actor = cluster()

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=actor.app, client=("10.0.0.9", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post("/admin/drain/decode")

    assert asyncio.run(go()).status_code == 403


def test_it_is_not_read_by_get():
    assert cluster().call("GET", "/admin/drain/decode", headers=LOCAL).status_code == 405
