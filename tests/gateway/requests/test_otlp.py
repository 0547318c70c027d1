"""Spans of requests at a collector: what it is told, and that nobody waits when it is not there."""

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
from waiting import eventually

from mooncake_zmq.gateway.requests import otlp
from mooncake_zmq.gateway.requests.request_log import Attempt, RequestEntry, spans
from mooncake_zmq.gateway.requests.traces import Names, names_of

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not here")
trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

CLIENT = names_of("gw-1", "theirs", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
ATTEMPT = Attempt(
    number=2,
    began_s=0.5,
    conductor="k",
    placed_s=0.6,
    prefill="p1",
    decode="d1",
    first_s=1.5,
    queue_s=0.2,
    prepare_s=0.1,
    load_s=0.1,
    prefill_s=0.4,
    handoff_s=0.2,
    wait_s=0.1,
    decode_s=0.4,
    steps=7,
    predicted_ttft_s=0.9,
    tokens=8,
    ended_s=2.0,
    why="stop",
)
LOST = Attempt(number=1, began_s=0.0, conductor="k", placed_s=0.1, prefill="p0", decode="d0", ended_s=0.5, why="d0 is down")
ENTRY = RequestEntry(
    request_id="gw-1",
    arrived_at=0.0,
    prompt_tokens=9,
    completion_tokens=8,
    outcome="stop",
    duration_s=2.0,
    first_s=1.5,
    cached=(1, 2, 3),
    made=2,
    attempts=[LOST, ATTEMPT],
)
DONE_S = 10.0


class Collector:
    """Takes what it is sent, or answers as it is told."""

    def __init__(self) -> None:
        self.status = 200
        self.spans: list = []
        self.resources: list[dict] = []
        self.came = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(self.path, body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        request = trace_service.ExportTraceServiceRequest.FromString(body)
        with self.came:
            if self.status == 200:
                for each in request.resource_spans:
                    self.resources.append(values(each.resource.attributes))
                    self.spans += [span for scope in each.scope_spans for span in scope.spans]
            self.came.notify_all()

    def wait(self, count: int) -> list:
        with self.came:
            assert self.came.wait_for(lambda: len(self.spans) >= count, DONE_S)
            return list(self.spans)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def values(attributes) -> dict:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    one = Collector()
    yield one
    one.close()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "EVERY_S", 0.01)
    monkeypatch.setattr(otlp, "TIMEOUT_S", 0.5)


def crashed(error: BaseException) -> None:
    raise AssertionError from error


def exporter(url: str) -> otlp.Otlp:
    return otlp.Otlp(url, gateway="gw", on_crash=crashed)


def test_a_request_is_a_tree_in_the_clients_trace(collector: Collector) -> None:
    one = exporter(collector.url)
    one.export(ENTRY, CLIENT)
    told = collector.wait(3 + len(spans(ENTRY)))
    one.close()
    assert +Counter(one.counts) == {"requests_exported": 1}
    assert {span.trace_id.hex() for span in told} == {CLIENT.trace_id}
    by_name = {span.name: span for span in told}
    root = by_name["request"]
    assert root.parent_span_id.hex() == CLIENT.parent_id
    assert root.end_time_unix_nano - root.start_time_unix_nano == 2_000_000_000
    about = values(root.attributes)
    assert about["gen_ai.usage.input_tokens"] == 9
    assert about["mooncake.request_id"] == "gw-1"
    assert about["mooncake.cached_tokens.remote"] == 3
    attempts = [span for span in told if span.name == "attempt"]
    assert [span.parent_span_id for span in attempts] == [root.span_id] * 2
    assert [values(span.attributes)["mooncake.attempt"] for span in attempts] == [1, 2]
    assert [(span.status.code, span.status.message) for span in attempts] == [(2, "d0 is down"), (0, "")]
    for name, node in (("place", "k"), ("queue", "p1"), ("load", "p1"), ("prefill", "p1"), ("handoff", "d1"), ("decode", "d1")):
        assert values(by_name[name].attributes)["mooncake.node"] == node
        assert by_name[name].parent_span_id == attempts[1].span_id
    decode = by_name["decode"]
    assert decode.start_time_unix_nano - root.start_time_unix_nano == 1_600_000_000
    assert decode.end_time_unix_nano == attempts[1].end_time_unix_nano == root.end_time_unix_nano
    (resource,) = collector.resources
    assert (resource["service.name"], resource["service.instance.id"]) == ("mooncake_zmq", "gw")


def test_without_a_clients_trace_each_request_has_one_of_its_own_and_a_failed_one_says_so(collector: Collector) -> None:
    one = exporter(f"{collector.url}/v1/traces")
    for number in range(2):
        one.export(replace(ENTRY, request_id=f"r{number}", outcome="no_decode", attempts=[]), Names(f"r{number}"))
    told = collector.wait(2)
    one.close()
    assert len({span.trace_id for span in told}) == 2
    assert [span.parent_span_id for span in told] == [b"", b""]
    assert [(span.status.code, span.status.message) for span in told] == [(2, "no_decode")] * 2


def test_what_the_client_does_not_sample_is_not_told(collector: Collector) -> None:
    one = exporter(collector.url)
    one.export(ENTRY, CLIENT._replace(sampled=False))
    one.export(replace(ENTRY, request_id="kept"), CLIENT)
    told = collector.wait(3 + len(spans(ENTRY)))
    one.close()
    assert {values(span.attributes)["mooncake.request_id"] for span in told if span.name == "request"} == {"kept"}
    assert +Counter(one.counts) == {"requests_not_sampled": 1, "requests_exported": 1}


def test_with_the_collector_away_all_is_dropped_and_counted_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "MAX_QUEUED", 3)
    monkeypatch.setattr(otlp, "EVERY_S", 3600.0)
    one = exporter("http://127.0.0.1:9")
    for _ in range(10):
        one.export(ENTRY, CLIENT)
    assert one.counts["requests_dropped[reason=queue_full]"] == 7
    one.close()
    assert one.counts["requests_dropped[reason=collector]"] == 3


def test_an_exporter_that_lets_errors_through_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As releases before 1.40 do."""
    one = exporter("http://127.0.0.1:9")

    def export(_spans: object) -> None:
        raise requests.ConnectionError("refused")

    monkeypatch.setattr(one._exporter, "export", export)
    one.export(ENTRY, CLIENT)
    one.close()
    assert one.counts["requests_dropped[reason=collector]"] == 1


def test_a_collector_that_comes_back_is_told_what_ends_then(collector: Collector) -> None:
    collector.status = 400
    one = exporter(collector.url)
    one.export(ENTRY, CLIENT)
    eventually(lambda: one.counts.get("requests_dropped[reason=collector]") == 1)
    collector.status = 200
    one.export(replace(ENTRY, request_id="later"), CLIENT)
    told = collector.wait(1)
    one.close()
    assert {values(span.attributes)["mooncake.request_id"] for span in told if span.name == "request"} == {"later"}


def test_what_waits_at_the_end_is_still_sent(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "EVERY_S", 3600.0)
    monkeypatch.setattr(otlp, "BATCH", 2)
    one = exporter(collector.url)
    for number in range(5):
        one.export(replace(ENTRY, request_id=f"r{number}"), CLIENT)
    one.close()
    assert +Counter(one.counts) == {"requests_exported": 5}
    assert len([span for span in collector.spans if span.name == "request"]) == 5


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otel/v1/traces", "https://c/otel/v1/traces"),
    ],
)
def test_a_collectors_address_alone_is_that_of_all_signals(endpoint: str, url: str) -> None:
    assert otlp.full_url(endpoint) == url
