"""`trace` as an operator meets it: by whatever name, in words and for Perfetto."""

import json
from io import StringIO
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from mooncake_zmq.config.errors import ConfigError
from mooncake_zmq.gateway.requests.request_log import Attempt, RequestEntry, as_json
from mooncake_zmq.operate.console.gateways import Gateways
from mooncake_zmq.operate.console.trace import show

ATTEMPT = Attempt(number=1, began_s=0.0, conductor="k0", placed_s=0.1, prefill="p0", decode="d0", first_s=0.5, why="length")
REQUEST = as_json(RequestEntry(request_id="gw-1", arrived_at=9.0, outcome="length", duration_s=2.0, made=1, attempts=[ATTEMPT]))


def gateways(wanted: list[str]) -> Gateways:
    def handle(request: httpx.Request) -> httpx.Response:
        wanted.append(request.url.raw_path.decode())
        if request.url.path == "/trace/nobody":
            return httpx.Response(404, json={"error": {"message": "no request that is over is known"}})
        return httpx.Response(200, json={"requests": [REQUEST]})

    return Gateways({"g": "http://g"}, transport=httpx.MockTransport(handle))


def test_a_request_is_shown_with_its_attempts_and_spans():
    output = StringIO()
    asked: list[str] = []
    assert show(gateways(asked), "my id/1", Console(file=output, width=140), False, None) == 0
    assert asked == ["/trace/my%20id%2F1"]
    said = output.getvalue()
    assert "gw-1: length after 2.000 s" in said
    assert "attempt 1: p0 > d0" in said
    assert "decode" in said


def test_perfetto_gets_a_process_for_each_node(tmp_path: Path):
    file = tmp_path / "trace.json"
    show(gateways([]), "gw-1", Console(file=StringIO()), True, str(file))
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"k0", "p0", "d0"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in spans} == {"place", "queue", "prepare", "prefill", "decode"}
    assert next(event["ts"] for event in spans if event["name"] == "decode") == pytest.approx(5e5)


def test_what_no_gateway_remembers_is_an_error_in_a_line():
    with pytest.raises(ConfigError, match="no request that is over is known"):
        show(gateways([]), "nobody", Console(file=StringIO()), False, None)
