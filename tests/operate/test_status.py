"""`status`, `top` and `dump` as an operator meets them: what a gateway tells, and an exit code that says the same."""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread

import certificates
import httpx
import pytest
from click.testing import CliRunner
from rich.console import Console

from mooncake_zmq.cli import main
from mooncake_zmq.config.load import load
from mooncake_zmq.gateway.requests.cluster_snapshot import Listed, Seen, snapshot
from mooncake_zmq.operate.console.gateways import KEY_VARIABLE, Gateways, NoGateway, place, trusted
from mooncake_zmq.operate.console.status import show, watch

CONFIG = Path(__file__).parent.parent.parent / "configs"


def told(status: str = "ok", **seen) -> dict:
    listed = (Listed("gateway-0", "gateway", "h"), Listed("cache-0", "cache-node", "h"))
    return snapshot(Seen(now=1.0, gateway="gateway-0", status=status, model="toy", listed=listed, peers={}, **seen))


def gateways(answers: dict[str, httpx.Response | Exception]) -> Gateways:
    def handle(request: httpx.Request) -> httpx.Response:
        answer = answers[request.url.host]
        if isinstance(answer, Exception):
            raise answer
        return answer

    urls = {name: f"http://{name}" for name in answers}
    return Gateways(urls, transport=httpx.MockTransport(handle))


def said(of: Gateways, *, as_json: bool = False) -> tuple[int, str]:
    output = StringIO()
    return show(of, Console(file=output, width=120), as_json=as_json), output.getvalue()


def test_a_whole_cluster_is_0_a_degraded_one_1_and_one_that_does_not_serve_2():
    whole = {**told(), "status": "ok", "degraded": [], "verdict": "All is well."}
    assert said(gateways({"g": httpx.Response(200, json=whole)})) == (
        0,
        said(gateways({"g": httpx.Response(200, json=whole)}))[1],
    )
    code, text = said(gateways({"g": httpx.Response(200, json=told())}))
    assert code == 1
    assert "cache_node_down" in text
    assert "cache-0" in text
    for status in ("starting", "unavailable", "draining"):
        assert said(gateways({"g": httpx.Response(200, json=told(status))}))[0] == 2


def test_the_first_gateway_that_answers_speaks():
    answers = {"dead": httpx.ConnectError("refused"), "denies": httpx.Response(503), "lives": httpx.Response(200, json=told())}
    code, text = said(gateways(answers))
    assert (code, "by lives" in text) == (1, True)


def test_a_gateway_that_drains_speaks_only_where_no_other_serves():
    drains, serves = httpx.Response(200, json=told("draining")), httpx.Response(200, json=told())
    code, text = said(gateways({"drains": drains, "serves": serves}))
    assert (code, "by serves" in text) == (1, True)
    code, text = said(gateways({"dead": httpx.ConnectError("refused"), "drains": drains}))
    assert (code, "by drains" in text) == (2, True)


def test_a_gateway_by_its_url_needs_no_settings(tmp_path: Path):
    result = CliRunner().invoke(main, ["status", "--url", "http://127.0.0.1:1", "--config", str(tmp_path / "none.toml")])
    assert (result.exit_code, "No gateway answers" in result.output) == (2, True)


def test_where_no_gateway_answers_it_says_why_and_2():
    code, text = said(gateways({"dead": httpx.ConnectError("refused"), "strange": httpx.Response(200, text="hello")}))
    assert code == 2
    assert "refused" in text
    assert "no gateway of ours" in text
    code, text = said(gateways({"dead": httpx.ConnectError("refused")}), as_json=True)
    assert (code, json.loads(text)["status"]) == (2, "down")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_gateway_that_wants_a_key_is_no_outage(as_json: bool):
    no_key = httpx.Response(401, json={"error": {"message": "You didn't provide an API key"}})
    code, text = said(gateways({"dead": httpx.ConnectError("refused"), "locked": no_key}), as_json=as_json)
    assert (code, "set MOONCAKE_ZMQ_API_KEY" in text, "outage" in text) == (3, True, False)
    wrong_role = httpx.Response(403, json={"error": {"message": "is for keys with role=metrics"}})
    code, text = said(gateways({"locked": wrong_role}), as_json=as_json)
    assert (code, "role=metrics" in text) == (3, True)


def test_an_address_without_its_scheme_is_answered_with_both():
    result = CliRunner().invoke(main, ["status", "--url", "localhost:8000"])
    assert (result.exit_code, "write http://localhost:8000 or https://localhost:8000" in result.output) == (2, True)


def test_json_is_what_the_gateway_tells():
    _, text = said(gateways({"g": httpx.Response(200, json=told())}), as_json=True)
    assert json.loads(text) == json.loads(json.dumps(told()))


def test_top_shows_traffic_and_goes_on_when_a_gateway_is_gone():
    output = StringIO()
    assert watch(gateways({"g": httpx.Response(200, json=told())}), Console(file=output, width=120), times=1) == 1
    assert "prompt tokens" in output.getvalue()
    assert "ttft predicted" in output.getvalue()
    assert watch(gateways({"g": httpx.ConnectError("refused")}), Console(file=output, width=120), times=1) == 2


def test_a_gateway_is_where_its_config_says():
    loaded = load(CONFIG / "toy.toml", {"gateway.http_port": "8123"})
    (node,) = loaded.config.of_role("gateway")
    assert place(loaded, node) == "http://127.0.0.1:8123"
    loaded = load(CONFIG / "two-hosts.toml", {"gateway.http_host": "0.0.0.0"})
    for node in loaded.config.of_role("gateway"):
        assert place(loaded, node) == f"https://{node.endpoint.removeprefix('tcp://').rpartition(':')[0]}:8000"


def test_the_certificates_of_all_gateways_are_trusted_where_their_files_are(tmp_path: Path):
    config = tmp_path / "two.toml"
    config.write_text(
        "".join(
            f"""
[[nodes]]
name = "{name}"
role = "gateway"
host = "{name}"
settings = {{ tls_certificate = "{tmp_path}/{name}.crt", tls_key = "{tmp_path}/{name}.key" }}
"""
            for name in ("a", "b", "elsewhere")
        )
    )
    for name in ("a", "b"):
        certificates.make(tmp_path, name)
    assert trusted(load(config, {}, {}), "").cert_store_stats()["x509"] == 2


def test_an_operators_key_goes_with_every_question(monkeypatch: pytest.MonkeyPatch):
    seen = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return httpx.Response(200, json={})

    Gateways({"g": "http://g"}, key="secret", transport=httpx.MockTransport(handle)).ask("/cluster")
    assert seen == ["Bearer secret"]
    monkeypatch.setenv(KEY_VARIABLE, "other")
    of = Gateways.at("http://127.0.0.1:1")
    assert of._client.headers["authorization"] == "Bearer other"
    with pytest.raises(NoGateway):
        of.ask("/cluster")


@pytest.mark.parametrize("command", ["status", "top"])
def test_each_says_how_it_is_used(command: str):
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0
    assert f"mooncake-zmq {command}" in result.output


def test_a_node_that_runs_elsewhere_is_dumped_by_a_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answers = gateways({"g": httpx.Response(200, json={"node": "decode-a", "jobs": []})})
    monkeypatch.setattr(Gateways, "of", lambda *_, **__: answers)
    settings = ["--config", str(CONFIG / "toy.toml"), "--set", f"cluster.runtime_dir={tmp_path}"]
    result = CliRunner().invoke(main, ["dump", "--node", "decode-a", *settings])
    assert (result.exit_code, json.loads(result.output)["decode-a"]["jobs"]) == (0, [])


def test_a_dump_by_url_is_of_one_node_whatever_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answers = gateways({"g": httpx.Response(200, json={"node": "unheard/of"})})
    asked = []
    monkeypatch.setattr(Gateways, "at", lambda url, **_: answers)
    monkeypatch.setattr(answers, "ask", lambda path: asked.append(path) or Gateways.ask(answers, path))
    here = ["dump", "--url", "http://g", "--config", str(tmp_path / "none.toml")]
    result = CliRunner().invoke(main, here)
    assert (result.exit_code, "--node" in result.output) == (2, True), result.output
    result = CliRunner().invoke(main, [*here, "--node", "unheard/of"])
    assert (result.exit_code, json.loads(result.output)) == (0, {"unheard/of": {"node": "unheard/of"}})
    assert asked == ["/cluster/state/unheard%2Fof"]


@pytest.mark.parametrize("wide", [True, False], ids=["pipe", "80 columns"])
def test_a_nodes_line_has_all_its_figures(wide: bool, monkeypatch: pytest.MonkeyPatch):
    tiers = {"dram": {"used_blocks": 12, "blocks": 100}, "ssd": {"used_blocks": 0, "blocks": 1000}}
    levels = {"uptime_s": 600.0, "gauges": {"requests_waiting": 10, "requests_running": 64}, "tiers": tiers}
    node = {"role": "cache-node", "host": "host-a", "state": "degraded", **levels}
    whole = {**told(), "nodes": [{"name": f"cache-{name}", **node} for name in "ab"]}
    if wide:
        whole["nodes"][0]["name"] = "cache-" + "a" * 100
        monkeypatch.setattr(Gateways, "at", lambda url, **_: gateways({"g": httpx.Response(200, json=whole)}))
        text = CliRunner().invoke(main, ["status", "--url", "http://g"]).output
    else:
        output = StringIO()
        show(gateways({"g": httpx.Response(200, json=whole)}), Console(file=output, width=80), as_json=False)
        text = output.getvalue()
    lines = [" ".join(line.split()[1:]) for line in text.splitlines() if line.startswith("cache-")]
    assert lines == ["cache-node host-a degraded 10 min 10 64 dram 12% ssd 0%"] * 2


def test_top_tells_each_picture_as_it_comes(monkeypatch: pytest.MonkeyPatch):
    output, told_then = StringIO(), []
    monkeypatch.setattr("time.sleep", lambda _: told_then.append(output.getvalue().count("prompt tokens")))
    watch(gateways({"g": httpx.Response(200, json=told())}), Console(file=output, width=120), times=3)
    assert told_then == [1, 2]


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["top"]], ids=" ".join)
def test_a_reader_who_goes_changes_no_exit_code(command: list[str]):
    whole = json.dumps({**told(), "status": "ok", "degraded": [], "verdict": "All is well."}).encode()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(whole)

    reads, writes = os.pipe()
    os.close(reads)
    with HTTPServer(("127.0.0.1", 0), Answer) as server, open(writes, "wb") as nobody:
        serving = Thread(target=server.serve_forever)
        serving.start()
        arguments = [*command, "--url", f"http://127.0.0.1:{server.server_port}"]
        ran = [sys.executable, "-m", "mooncake_zmq", *arguments]
        try:
            done = subprocess.run(ran, stdout=nobody, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        finally:
            server.shutdown()
            serving.join()
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=["no snapshot"]),
        httpx.Response(404, text="File not found"),
        httpx.Response(404, json={"detail": "Not Found"}),
    ],
    ids=["page", "list", "404", "404 as JSON"],
)
def test_what_answers_and_is_no_gateway_is_told_as_that(answer: httpx.Response):
    code, text = said(gateways({"g": answer}))
    assert (code, "g at http://g: what answers there is no gateway of ours" in " ".join(text.split())) == (2, True), text


def test_a_gateway_that_is_known_by_its_url_alone_is_named_once():
    with pytest.raises(NoGateway) as error:
        Gateways.at("http://127.0.0.1:1").snapshot()
    assert str(error.value).count("http://127.0.0.1:1") == 1


def test_without_a_cluster_status_is_2_and_dump_says_that_nobody_tells(tmp_path: Path):
    settings = ["--config", str(CONFIG / "toy.toml"), "--set", f"cluster.runtime_dir={tmp_path}", "--url", "http://127.0.0.1:1"]
    assert CliRunner().invoke(main, ["status", *settings]).exit_code == 2
    result = CliRunner().invoke(main, ["dump", "--node", "decode-a", *settings])
    assert result.exit_code == 1
    assert "no gateway knows its state" in result.output
