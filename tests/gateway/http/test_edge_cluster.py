"""The cluster at a gateway's HTTP face: who may see it, how many look on, and that looking is what asks the nodes."""

import asyncio
import contextlib
import json

import httpx
import pytest
import structlog
from scripted_actor import ScriptedActor, hello
from test_edge_errors import error_of
from test_edge_keys import ask, guarded

from mooncake_zmq.core.messages import Report, StateReported
from mooncake_zmq.core.watch import PeerReport
from mooncake_zmq.gateway.http import cluster_routes, ended_requests
from mooncake_zmq.gateway.http.ended_requests import LINES_AT_ONCE
from mooncake_zmq.gateway.requests.cluster_snapshot import Listed
from mooncake_zmq.gateway.requests.request_log import RequestEntry

LISTED = [Listed(role, role, "h") for role in ("conductor", "prefill", "decode")]
WITH_CACHE = [*LISTED, Listed("cache-0", "cache-node", "h")]


def watched(**fields) -> ScriptedActor:
    actor = ScriptedActor(listed=WITH_CACHE, **fields)
    actor.edge.clock = lambda: 100.0
    actor.up["cache-0"] = hello("cache-node")
    return actor


def full_disk() -> dict[str, PeerReport]:
    return {"cache-0": PeerReport(100.0, 1, Report(uptime_s=1.0, gauges=(("disk_degraded[what=writes]", 1.0),)))}


@pytest.mark.parametrize("path", ["/cluster", "/health", "/metrics"])
def test_to_look_is_to_have_the_nodes_report(path):
    actor = watched()
    actor.call("GET", path)
    assert actor.looks
    actor.looks.clear()
    actor.call("GET", "/live")
    assert not actor.looks


def test_who_is_no_operator_has_nobody_report():
    actor = guarded()
    for key, looks in ((None, False), ("alice", False), ("root", True)):
        actor.looks.clear()
        assert ask(actor, key, "/health").status_code == 200
        assert bool(actor.looks) == looks


def test_what_is_degraded_is_in_health_in_metrics_and_in_the_cluster_and_requests_are_served():
    actor = watched(reports=full_disk())
    health = actor.call("GET", "/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert [(each["reason"], each["node"]) for each in health.json()["degraded"]] == [("disk_not_written", "cache-0")]
    exposed = actor.call("GET", "/metrics").text
    assert 'mooncake_degraded{reason="disk_not_written"} 1.0' in exposed
    assert 'mooncake_degraded{reason="cache_node_down"} 0.0' in exposed
    whole = actor.call("GET", "/cluster").json()
    assert (whole["status"], whole["gateway"], whole["model"]) == ("degraded", "gw", "toy")
    assert whole["verdict"].startswith("It serves, but the SSD of cache-0")
    assert actor.complete().status_code == 200


def test_what_is_down_is_down_since_it_was_first_missed_even_while_no_client_looked():
    actor, now = watched(), [100.0]
    actor.edge.clock = lambda: now[0]

    def since() -> list[float]:
        return [each["since_s"] for each in actor.call("GET", "/cluster").json()["degraded"]]

    gone = actor.up.pop("cache-0")
    actor.edge.sample()
    now[0] += 12.0
    assert since() == [12.0]
    actor.up["cache-0"] = gone
    now[0] += 1.0
    assert since() == []
    del actor.up["cache-0"]
    now[0] += 1.0
    assert since() == [0.0]


def test_a_cache_node_that_is_gone_is_degraded_and_no_reason_to_be_unready():
    actor = watched()
    del actor.up["cache-0"]
    health = actor.call("GET", "/health")
    assert (health.status_code, health.json()["degraded"][0]["reason"]) == (200, "cache_node_down")


@pytest.mark.parametrize("path", ["/cluster", "/cluster/events", "/cluster/requests", "/cluster/state/prefill", "/trace/x"])
def test_only_operators_see_the_cluster(path):
    actor = guarded()
    assert ask(actor, None, path).status_code == 401
    assert error_of(ask(actor, "alice", path))[0::3] == (403, "insufficient_permissions")
    if path == "/cluster":
        assert ask(actor, "meter", path).status_code == 200


@pytest.mark.parametrize("body", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_a_request_has_one_id_everywhere_and_is_found_by_its_clients_too(body):
    actor = ScriptedActor()
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"x-request-id": "theirs/1", "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    request = {"model": "toy", "prompt": "hello", **body}
    answer = actor.call("POST", "/v1/completions", json=request, headers=headers)
    (request_id,) = actor.requests
    assert answer.headers["x-request-id"] == "theirs/1"
    assert answer.headers["x-mooncake-request-id"] == request_id
    chunks = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    whole = json.loads(chunks[-1]) if body else answer.json()
    assert (whole["id"], whole["mooncake"]["request"]) == (f"cmpl-{request_id}", request_id)
    assert error_of(actor.call("GET", f"/trace/{request_id}"))[0::3] == (404, "unknown_request")
    actor.edge.ended.add(RequestEntry(request_id=request_id, arrived_at=0.0, outcome="length"))
    for name in (request_id, "theirs/1", trace_id):
        (found,) = actor.call("GET", f"/trace/{name}").json()["requests"]
        assert (found["request_id"], found["x_request_id"], found["trace_id"]) == (request_id, "theirs/1", trace_id)
        assert found["outcome"] == "length"


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False)])
def test_who_keeps_spans_is_given_each_request_with_its_clients_span(flags, sampled):
    actor = ScriptedActor()
    told = []
    actor.edge.ended._export = lambda entry, names: told.append((entry.outcome, names))
    trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    request = {"model": "toy", "prompt": "hello"}
    actor.call("POST", "/v1/completions", json=request, headers={"traceparent": f"00-{trace_id}-{span_id}-{flags}"})
    (request_id,) = actor.requests
    actor.edge.ended.add(RequestEntry(request_id=request_id, arrived_at=0.0, outcome="length"))
    ((outcome, names),) = told
    assert (outcome, names[2:]) == ("length", (trace_id, span_id, sampled))


def test_further_choices_have_numbers_behind_the_calls_id():
    actor = ScriptedActor()
    answer = actor.complete(n=3)
    first = answer.headers["x-mooncake-request-id"]
    assert list(actor.requests) == [first, f"{first}.1", f"{first}.2"]


def test_each_request_that_is_over_is_one_line_of_the_log(capture_logs):
    actor = ScriptedActor()
    entry = RequestEntry(request_id="gw-1", arrived_at=0.0, outcome="length", prompt_tokens=7, duration_s=0.5)
    actor.edge.ended.add(entry)
    (line,) = [entry for entry in capture_logs if entry["event"] == "request"]
    assert (line["id"], line["outcome"], line["prompt_tokens"], line["duration_s"]) == ("gw-1", "length", 7, 0.5)


def test_the_end_of_an_answer_does_not_wait_for_its_line_in_the_log(capture_logs):
    actor = ScriptedActor(writes_later=True)
    edge, waiting = actor.edge, actor.writes
    for number in range(3):
        edge.ended.add(RequestEntry(request_id=f"gw-{number}", arrived_at=0.0, outcome="length"))
    assert (len(waiting), capture_logs) == (1, [])
    assert edge.ended.traces.find("gw-2"), "who asks for it by its trace need not wait"
    waiting.pop()()
    assert [entry["id"] for entry in capture_logs] == ["gw-0", "gw-1", "gw-2"]
    edge.ended.add(RequestEntry(request_id="gw-3", arrived_at=0.0, outcome="length"))
    assert len(waiting) == 1
    edge.ended.close()
    assert capture_logs[-1]["id"] == "gw-3", "nor is any lost as the process ends"


def test_of_many_lines_each_turn_writes_some_and_one_that_fails_takes_no_other_along(capture_logs, monkeypatch):
    actor = ScriptedActor(writes_later=True)
    edge, waiting = actor.edge, actor.writes
    written, full = ended_requests.line, [OSError("no space")]
    monkeypatch.setattr(ended_requests, "line", lambda entry: fails(full.pop()) if full else written(entry))
    for number in range(2 * LINES_AT_ONCE):
        edge.ended.add(RequestEntry(request_id=f"gw-{number}", arrived_at=0.0, outcome="length"))
    turns = []
    while waiting:
        before = len(capture_logs)
        with contextlib.suppress(OSError):
            waiting.pop()()
        turns.append(len(capture_logs) - before)
    assert turns == [0, LINES_AT_ONCE, LINES_AT_ONCE - 1]


def fails(error):
    raise error


@pytest.fixture
def capture_logs():
    with structlog.testing.capture_logs() as logs:
        yield logs


def events(actor: ScriptedActor, take: int) -> list[dict]:
    """The first pictures of a stream that is then left."""
    found: list[dict] = []

    async def client(port: int) -> None:
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
            http.stream("GET", "/cluster/events") as stream,
        ):
            assert stream.headers["content-type"].startswith("text/event-stream")
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    found.append(json.loads(line.removeprefix("data: ")))
                    if len(found) == take:
                        return

    actor.serve(client)
    return found


def test_the_picture_comes_again_and_again(monkeypatch):
    monkeypatch.setattr(cluster_routes, "EVERY_S", 0.01)
    pictures = events(watched(reports=full_disk()), 3)
    assert [each["status"] for each in pictures] == ["degraded"] * 3


def test_who_looks_on_for_long_comes_again(monkeypatch):
    monkeypatch.setattr(cluster_routes, "EVERY_S", 0.01)
    monkeypatch.setattr(cluster_routes, "LONGEST_S", 0.0)
    assert events(watched(), 1) == []
    assert watched().call("HEAD", "/cluster/events").status_code == 200


def test_so_many_look_on_and_one_more_is_sent_away_until_one_goes(monkeypatch):
    monkeypatch.setattr(cluster_routes, "EVERY_S", 0.01)
    monkeypatch.setattr(cluster_routes, "MAX_ONLOOKERS", 1)
    actor = watched()

    async def client(port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            async with http.stream("GET", "/cluster/events") as stream:
                await anext(stream.aiter_lines())
                refused = await http.get("/cluster/events")
                assert error_of(refused)[0::3] == (503, "overloaded")
            while True:
                async with http.stream("GET", "/cluster/events") as again:
                    if again.status_code == 200:
                        return
                await asyncio.sleep(0.01)

    actor.serve(client)


def test_a_stream_ends_when_its_gateway_drains(monkeypatch):
    monkeypatch.setattr(cluster_routes, "EVERY_S", 0.01)
    actor = watched()

    async def client(port: int) -> None:
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
            http.stream("GET", "/cluster/events") as stream,
        ):
            async for _ in stream.aiter_lines():
                actor.edge.drain()

    actor.serve(client)


def test_a_nodes_whole_state_is_asked_for_and_waited_for():
    actor = watched(
        states={"prefill": StateReported(ask_id=1, state=b'{"jobs":[]}'), "decode": StateReported(ask_id=1, error="too long")}
    )
    assert actor.call("GET", "/cluster/state/prefill").json() == {"jobs": []}
    assert error_of(actor.call("GET", "/cluster/state/decode"))[0::3] == (503, "state_too_long")
    assert error_of(actor.call("GET", "/cluster/state/nobody"))[0::3] == (404, "unknown_node")
    del actor.up["cache-0"]
    assert error_of(actor.call("GET", "/cluster/state/cache-0"))[0::3] == (503, "node_down")


def test_a_node_that_does_not_tell_its_state_is_given_up(monkeypatch):
    monkeypatch.setattr("mooncake_zmq.gateway.http.cluster_reports.STATE_S", 0.02)
    actor = watched()
    assert error_of(actor.call("GET", "/cluster/state/prefill"))[0::3] == (504, "node_silent")
