"""What operators may do at the HTTP edge, and that nobody else may, by whatever way he comes."""

import asyncio

import httpx
import pytest
from scripted_actor import ScriptedActor, hello
from test_edge_cluster import WITH_CACHE
from test_edge_errors import error_of
from test_edge_keys import guarded

from mooncake_zmq.core.messages import Report
from mooncake_zmq.core.watch import Heard
from mooncake_zmq.gateway.cluster import Listed

LOCAL = {"host": "127.0.0.1:8000"}


def cluster(**fields) -> ScriptedActor:
    actor = ScriptedActor(listed=[*WITH_CACHE, Listed("gw", "gateway", "h")], **fields)
    actor.up["cache-0"] = hello("cache-node")
    return actor


def drain(actor: ScriptedActor, node: str = "decode", *, undo: bool = False, **headers: str) -> httpx.Response:
    return actor.call("DELETE" if undo else "POST", f"/admin/drain/{node}", headers=LOCAL | headers)


def test_a_node_is_drained_stays_and_serves_again():
    actor = cluster()
    told = drain(actor).json()
    assert (told["name"], told["state"], told["left"], told["resting"]) == ("decode", "drained", 0, True)
    assert drain(actor, undo=True).json()["state"] == "ready"
    assert actor.rests == [("decode", True), ("decode", False)]


@pytest.mark.parametrize(
    ("role", "gauge"), [("decode", "requests_running"), ("prefill", "stages"), ("cache-0", "demoting_blocks")]
)
def test_it_is_drained_once_nothing_is_left(role, gauge):
    actor = cluster()
    actor.edge.clock = lambda: 100.0
    report = Report(uptime_s=1.0, draining=True, resting=True, gauges=((gauge, 3.0),))
    actor.reports = {role: Heard(100.0, 1, report)}
    (node,) = [each for each in actor.call("GET", "/cluster").json()["nodes"] if each["name"] == role]
    assert (node["state"], node["left"]) == ("draining", 3)


@pytest.mark.parametrize(("node", "status"), [("conductor", 400), ("gw", 400), ("nobody", 404)])
def test_who_cannot_rest_is_asked_nothing(node, status):
    actor = cluster()
    assert drain(actor, node).status_code == status
    assert actor.rests == []


def test_a_node_that_is_not_there_or_does_not_do_it_is_told(monkeypatch):
    monkeypatch.setattr("mooncake_zmq.gateway.overview.REST_S", 0.05)
    actor = cluster(deaf=True)
    assert error_of(drain(actor))[0::3] == (504, "node_silent")
    del actor.up["decode"]
    assert error_of(drain(actor))[0::3] == (503, "node_down")


@pytest.mark.parametrize(("key", "status"), [("root", 200), ("meter", 403), ("alice", 403), (None, 401)])
def test_with_keys_it_takes_an_admins_from_wherever(key, status):
    actor = guarded()
    actor.edge.overview._listed = [Listed("decode", "decode", "h")]
    headers = {"host": "llm.example.org", **({"authorization": f"Bearer {key}"} if key else {})}
    assert actor.call("POST", "/admin/drain/decode", headers=headers).status_code == status
    assert bool(actor.rests) == (status == 200)


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
    assert actor.rests == []


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
